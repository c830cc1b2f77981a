"""Trial run of components on the meta device: they load, and one token goes through them.

Nothing of the size of the weights is allocated, so that a model of many gigabytes is tried in seconds.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lantern.core.config import load_config, one_line
from lantern.core.io import CONFIG_NAME, WEIGHTS_NAME, check_state, read_header
from lantern.methods.parts import ADD_ONS, DRAFTER
from lantern.models.folder import check_sizes
from lantern.models.llamagen.text import check_text_files
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig

Kind = Literal["target", "vq", "drafter"]
KINDS: Mapping[str, Kind] = {"transformer": "target", "vqvae": "vq", "drafter": "drafter"}  # by component's name


def try_component(folder: Path, kind: Kind) -> nn.Module:
    """Load a component on the meta device, compute one token with it, and return it.

    ValueError names the file that does not fit.
    """
    build, config, run = _trial(kind)
    source = folder / CONFIG_NAME
    values = load_config(config, source)
    try:
        with torch.device("meta"), torch.no_grad():
            module = build(values).eval()
            check_state(read_header(folder / WEIGHTS_NAME), module.state_dict(), source=folder / WEIGHTS_NAME)
            got, expected = run(module)
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(f"{source}: the component does not run: {one_line(error)}") from error
    if got != expected:
        raise ValueError(f"{source}: one token became {list(got)} values, wanted {list(expected)}")
    return module


def try_components(folders: Mapping[str, Path], *, name: str) -> None:
    """Try the components of a model, by the names of their folders, and compare their sizes.

    Components that are not given are not tried. ValueError names the file or folder that does not fit.
    """
    tried: dict[str, Any] = {
        part: try_component(folders[part], kind) for part, kind in KINDS.items() if part in folders
    }
    if "text_encoder" in folders:
        check_text_files(folders["text_encoder"], folders.get("tokenizer"))
    target = tried.get("transformer")
    if target is None:
        return
    if "drafter" in tried:
        drafter = f"drafter {folders['drafter']}"
        check_sizes(tried["drafter"].config, target.config, drafter_name=drafter, model_name=name)
    if "vqvae" in tried and tried["vqvae"].config.codebook_size != target.config.vocab_size:
        tokens = tried["vqvae"].config.codebook_size
        raise ValueError(f"{folders['vqvae']} has {tokens} tokens, {folders['transformer']} {target.config.vocab_size}")


def _run_target(target: Transformer) -> tuple[torch.Size, torch.Size]:
    inputs = target.tok_embeddings(torch.zeros(1, 1, dtype=torch.long))
    logits = target(inputs, torch.full((1, 1), target.config.cls_token_num)).logits
    return logits.shape, torch.Size((1, 1, target.config.vocab_size))


def _run_vq(vq: VQVAE) -> tuple[torch.Size, torch.Size]:
    side = 2 * vq.config.downsample
    return vq.decode(torch.zeros(1, 4, dtype=torch.long)).shape, torch.Size((1, 3, side, side))


def _run_drafter(drafter: Any) -> tuple[torch.Size, torch.Size]:
    config = drafter.config
    features = torch.zeros(1, 1, config.dim)
    found = drafter(features, torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), config.cls_token_num))
    return found.shape, torch.Size((1, 1, config.dim))


def _trial(kind: Kind) -> tuple[Any, Any, Callable[[Any], tuple[torch.Size, torch.Size]]]:
    """Return the class of a component, that of its config, and the run over one token."""
    if kind == "target":
        return Transformer, TransformerConfig, _run_target
    if kind == "vq":
        return VQVAE, VQConfig, _run_vq
    return ADD_ONS[DRAFTER].module, ADD_ONS[DRAFTER].config, _run_drafter
