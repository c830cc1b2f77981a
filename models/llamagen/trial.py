"""Trial run of a component folder on the meta device: it loads, and one code goes through it.

Nothing of the size of the weights is allocated, so that a model of many gigabytes is tried in seconds.
"""

from pathlib import Path

import torch

from lantern.core.config import build_config, one_line
from lantern.core.io import CONFIG_NAME, WEIGHTS_NAME, check_state, read_config, read_header
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig


def try_component(folder: Path, kind: str) -> None:
    """Load a folder of kind "t2i", "c2i" or "vq" on the meta device and compute one code of it.

    ValueError names the file that does not fit. Kind "drafter" is not run: `read_checkpoint` has compared its names
    and shapes.
    """
    source = folder / CONFIG_NAME
    if kind == "drafter":
        return
    try:
        with torch.device("meta"), torch.no_grad():
            if kind == "vq":
                vq = VQVAE(build_config(VQConfig, read_config(folder), source=source)).eval()
                check_state(read_header(folder / WEIGHTS_NAME), vq.state_dict(), source=folder / WEIGHTS_NAME)
                side = vq.config.downsample
                pixels = vq.decode(torch.zeros(1, 4, dtype=torch.long))
                if list(pixels.shape) != [1, 3, 2 * side, 2 * side]:
                    raise ValueError(f"{source}: 2 x 2 codes became {list(pixels.shape)} pixels")
                return
            config = build_config(TransformerConfig, read_config(folder), source=source)
            target = Transformer(config).eval()
            check_state(read_header(folder / WEIGHTS_NAME), target.state_dict(), source=folder / WEIGHTS_NAME)
            inputs = target.tok_embeddings(torch.zeros(1, 1, dtype=torch.long))
            positions = torch.full((1, 1), config.cls_token_num)
            logits = target(inputs, positions).logits
            if list(logits.shape) != [1, 1, config.vocab_size]:
                raise ValueError(f"{source}: one code became logits of shape {list(logits.shape)}")
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(f"{source}: the component does not run: {one_line(error)}") from error
