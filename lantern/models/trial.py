"""Trial run of a component on the meta device: it loads, and one token goes through it.

Nothing of the size of the weights is allocated, so that a model of many gigabytes is tried in seconds.
"""

from pathlib import Path
from typing import Any, Literal

import torch

from lantern.core.config import load_config, one_line
from lantern.core.io import CONFIG_NAME, WEIGHTS_NAME, check_state, read_header
from lantern.methods.parts import ADD_ONS, DRAFTER
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig

Kind = Literal["transformer", "vqvae", "drafter"]  # the folder of a component in a model
KINDS: tuple[Kind, ...] = ("transformer", "vqvae", "drafter")


def try_component(folder: Path, kind: Kind) -> None:
    """Load a component on the meta device and compute one token with it.

    ValueError names the file that does not fit.
    """
    source = folder / CONFIG_NAME
    drafter: Any = ADD_ONS[DRAFTER]
    classes = {"transformer": (Transformer, TransformerConfig), "vqvae": (VQVAE, VQConfig)}
    build, config = classes.get(kind) or (drafter.module, drafter.config)
    values: Any = load_config(config, source)
    try:
        with torch.device("meta"), torch.no_grad():
            module = build(values).eval()
            check_state(read_header(folder / WEIGHTS_NAME), module.state_dict(), source=folder / WEIGHTS_NAME)
            got, wanted = _run(module, kind)
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(f"{source}: the component does not run: {one_line(error)}") from error
    if got != wanted:
        raise ValueError(f"{source}: one token became {list(got)} values, wanted {list(wanted)}")


def _run(module: Any, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of what a component makes of one token (a VQ decoder: of four), and the shape wanted."""
    config, token = module.config, torch.zeros(1, 1, dtype=torch.long)
    if kind == "transformer":
        found = module(module.tok_embeddings(token), token + config.cls_token_num).logits
        return found.shape, (1, 1, config.vocab_size)
    if kind == "vqvae":
        side = 2 * config.downsample
        return module.decode(token.expand(1, 4)).shape, (1, 3, side, side)
    features = torch.zeros(1, 1, config.dim, dtype=torch.float32)
    return module(features, token, token + config.cls_token_num).shape, (1, 1, config.dim)
