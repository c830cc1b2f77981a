"""What the configs of a folder tell, on the meta device: memory and time of passes, and whether a component runs.

Nothing of the size of the weights is allocated, so that a model of many gigabytes is tried in seconds.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lantern.core.config import load_config, one_line
from lantern.core.io import CONFIG_NAME, WEIGHTS_NAME, check_state, read_header
from lantern.decoding.statistics import run_times
from lantern.engines.cpu.build import missing
from lantern.methods.method import ADD_ONS, DRAFTER
from lantern.models.folder import is_transformers_folder
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig
from lantern.models.transformers.loading import shape_of

PROMPT = 64  # tokens assumed of a prompt that has keys and values of its own
Kind = Literal["transformer", "vqvae", "drafter"]  # the folder of a component in a model
KINDS: tuple[Kind, ...] = ("transformer", "vqvae", "drafter")


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model in a dtype, in bytes, and the work of its passes.

    `weights` are those of the target, of which a pass reads `read`; `pixels` those of the VQ tokenizer in fp32. `cache`
    and `noise` are of one image at guidance. `products` are multiplications and additions of one token. `target` has
    no values.
    """

    parameters: int
    weights: int
    pixels: int
    read: int
    cache: int
    noise: int
    products: int
    target: Any

    def memory(self, images: int = 1) -> int:
        """Return the bytes that stay allocated while images are decoded together."""
        return self.weights + self.pixels + images * (self.cache + self.noise)

    def seconds(self, images: int, nodes: int, *, bandwidth: float, rate: float) -> float:
        """Return the shortest time of a pass over `nodes` tokens of each image.

        It is bound by reading weights and cache at `bandwidth` bytes per second, or by arithmetic at `rate` per second.
        """
        return max((self.read + images * self.cache) / bandwidth, images * nodes * self.products / rate)


def predict(folder: Path, dtype: torch.dtype, *, size: tuple[int, int] | None = None) -> ModelSize:
    """Return the prediction for a model's folder, of which only configs are read; nothing is allocated.

    ValueError names a config that is missing or invalid.
    """
    target, vq = _modules(folder, size)
    config: Any = target.config
    raster, width = config.raster, dtype.itemsize
    pixels = [] if vq is None else list(vq.parameters())
    others = {id(weight) for weight in pixels}  # some bodies hold the VQ tokenizer too
    own = [weight for weight in target.parameters() if id(weight) not in others]
    # of an embedding a pass reads single rows
    tables = {id(module.weight) for module in target.modules() if isinstance(module, nn.Embedding)}
    read = sum(weight.numel() for weight in own if id(weight) not in tables)
    slots = raster.tokens + raster.newlines + (1 if config.family == "llamagen" else PROMPT)
    parameters = sum(weight.numel() for weight in own)
    return ModelSize(
        parameters=parameters,
        weights=parameters * width,
        pixels=sum(weight.numel() for weight in pixels) * torch.float32.itemsize,
        read=read * width,
        cache=2 * 2 * config.n_layer * config.n_head * slots * config.head_dim * width,
        noise=raster.tokens * config.vocab_size * torch.float32.itemsize,
        products=2 * 2 * read,
        target=target,
    )


def placed(target: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a target without values as engines see one on a device: its embeddings are empty tensors there."""
    for module in target.modules():
        if isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(torch.empty(0, module.embedding_dim, device=device, dtype=dtype))
    return target


def measure_device(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return bytes per second of reading and operations per second of a matrix product, measured in about 0.1 s.

    On a CPU products in bf16 are those of the C++ engine, if its library is there: torch's are many times as slow.
    """
    block = torch.ones(1 << 25, dtype=torch.uint8, device=device)
    copy, matrix = torch.empty_like(block), torch.ones(768, 768, dtype=dtype, device=device)
    multiply = partial(torch.matmul, matrix, matrix)
    if device.type == "cpu" and dtype == torch.bfloat16 and missing() is None:
        from lantern.engines.cpu.target import Arena, linear

        multiply = partial(linear, matrix.float(), Arena(4 * matrix.numel()).panels(matrix), None, 768)
    runs = (lambda: copy.copy_(block), multiply)
    copying, multiplying = (min(run_times(run, device, 4)[1:]) for run in runs)
    return 2 * block.numel() / copying, 2 * 768**3 / multiplying


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory that a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _modules(folder: Path, size: tuple[int, int] | None) -> tuple[Any, nn.Module | None]:
    """Return target and VQ tokenizer of a folder on the meta device."""
    if is_transformers_folder(folder):
        made = shape_of(folder, size)
        return made.target, made.vq
    if size is not None:
        raise ValueError(f"model {folder.name} makes images of one size: omit the size")
    if not (folder / "transformer" / CONFIG_NAME).is_file():
        raise ValueError(f"{folder} is not a model: it has neither {CONFIG_NAME} nor transformer/{CONFIG_NAME}")
    config = load_config(TransformerConfig, folder / "transformer" / CONFIG_NAME)
    path = folder / "vqvae" / CONFIG_NAME
    with torch.device("meta"):
        return Transformer(config), VQVAE(load_config(VQConfig, path)) if path.is_file() else None


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
