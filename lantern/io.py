"""A component on disk: a folder with `config.json` and `model.safetensors`.

Loading is strict. A file that is missing, torn or altered, and a tensor that is missing, extra,
misshaped or not finite, is refused in one line that names the file and the tensor. Writing goes to
a temporary name in the same folder first, so that no reader ever sees half a file.
"""

import dataclasses
import difflib
import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

from lantern.config import build_config, one_line, read_json_object

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
EMBEDDED_MODEL = "lantern-emoji"
Config = TypeVar("Config")
Module = TypeVar("Module", bound=nn.Module)
DIGESTED_VALUES = 1 << 16  # of each tensor
HUB_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.md")


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Lend a temporary path beside `path` and put what was written there in its place at the end.

        with atomic_write(folder / "image.png") as temporary:
            image.save(temporary)

    The temporary name keeps the suffix, by which writers tell formats. Missing parent folders are
    made. If the body fails, `path` is as it was and the temporary file is gone.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}{path.suffix[:16]}")
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value: object) -> None:
    """Write `value` as indented JSON, aside first; NaN and infinity are refused with ValueError."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the `config.json` of a component folder."""
    return read_json_object(Path(folder) / CONFIG_NAME)


def save_component(
    state: Mapping[str, Tensor],
    config: Mapping[str, object] | object,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    int8: Collection[str] = (),
) -> None:
    """Write a component: `state` to `model.safetensors`, `config` to `config.json`.

    `config` is a mapping or a config dataclass. `dtype` converts floating tensors (torch.bfloat16
    halves a folder). Tensors named in `int8` are stored as int8 with one scale per row, under their
    own name and `<name>.scale`.
    """
    from safetensors.torch import save_file

    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name in int8:
            stored[name], stored[f"{name}.scale"] = quantize_rows(tensor.detach().cpu().float())
        else:
            stored[name] = _own_storage(tensor, dtype)
    folder = Path(folder)
    with (
        atomic_write(folder / WEIGHTS_NAME) as weights,
        atomic_write(folder / CONFIG_NAME) as config_file,
    ):
        save_file(stored, weights, metadata={"format": "pt"})
        text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False)
        config_file.write_text(text + "\n", encoding="utf-8")


def load_state(folder: str | Path) -> dict[str, Tensor]:
    """Load the tensors of a component folder, int8 rows dequantised to fp32, others as stored.

    ValueError names the file, and the tensor that is not finite or lacks its scale.
    """
    return load_tensors(Path(folder) / WEIGHTS_NAME)


def load_tensors(path: str | Path) -> dict[str, Tensor]:
    """Load one safetensors file; see `load_state`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        stored = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {one_line(error)}") from error
    check_finite(stored, source=path)
    state = {}
    for name, tensor in stored.items():
        if name.endswith(".scale") and _is_int8(stored.get(name.removesuffix(".scale"))):
            continue
        state[name] = _dequantized(name, stored, path) if _is_int8(tensor) else tensor
    return state


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, source: str | Path) -> None:
    """Refuse a `state` whose names or shapes are not those of `expected` (meta tensors do)."""
    missing = [name for name in expected if name not in state]
    extra = [name for name in state if name not in expected]
    if missing:
        raise ValueError(f"{source}: tensor {missing[0]!r} is missing{_and_more(missing)}")
    if extra:
        raise ValueError(f"{source}: tensor {extra[0]!r} is not expected{_and_more(extra)}")
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            got, wanted = list(state[name].shape), list(tensor.shape)
            raise ValueError(f"{source}: tensor {name!r} has shape {got}, wanted {wanted}")


def check_finite(state: Mapping[str, Tensor], *, source: str | Path) -> None:
    """Refuse a `state` in which a floating tensor holds NaN or infinity."""
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{source}: tensor {name!r} holds NaN or infinity")


def load_module(module: nn.Module, folder: str | Path) -> None:
    """Fill `module` with the weights of a component folder, strictly; its dtype and device stay."""
    state = load_state(folder)
    check_state(state, module.state_dict(), source=Path(folder) / WEIGHTS_NAME)
    module.load_state_dict(state)


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and up to 65,536 evenly spaced values of each tensor, rounded to bf16.

    So it is the same whether weights are stored in bf16 or, unrounded no more, in fp32; and it is quick.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        values = state[name].detach().flatten()
        some = values[:: -(-len(values) // DIGESTED_VALUES) or 1].to(torch.bfloat16).view(torch.int16)
        digest.update(f"{name}\0{list(state[name].shape)}\0".encode())
        digest.update(some.cpu().numpy().astype("<i2").tobytes())
    return digest.hexdigest()


def quantize_rows(
    tensor: Float[Tensor, " rows *rest"],
) -> tuple[Int8[Tensor, " rows *rest"], Float[Tensor, " rows"]]:
    """Round each row to 255 even steps: `tensor` is about `int8 * scale[row]`."""
    scale = tensor.flatten(1).abs().amax(1).clamp(min=1e-12) / 127
    broadcast = scale.view(-1, *[1] * (tensor.ndim - 1))
    return torch.round(tensor / broadcast).to(torch.int8), scale


def resolve_model(name: str | Path) -> Path:
    """Find the folder of a model given by name, folder or hub id.

    "lantern-emoji" is the embedded model; an existing folder is itself; "owner/name" is fetched
    from the hub into its cache. ValueError for a name that is none of these, ConnectionError where
    the hub does not give it.
    """
    if str(name) == EMBEDDED_MODEL:
        return embedded_model()
    try:
        if str(name) and Path(name).is_dir():
            return Path(name)
    except OSError as error:
        raise ValueError(f"model {str(name)[:80]!r}: {error.strerror}") from error
    if re.fullmatch(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", str(name)):
        return _download(str(name))
    near = difflib.get_close_matches(str(name), [EMBEDDED_MODEL], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the embedded model is {EMBEDDED_MODEL!r}"
    raise ValueError(f"model {str(name)[:80]!r} is neither a folder nor a hub id owner/name; {hint}")


def embedded_model() -> Path:
    """Return the folder of the embedded model: inside the package, or in the checkout around it."""
    package = Path(__file__).resolve().parent
    for root in (package, package.parent):
        folder = root / "assets" / EMBEDDED_MODEL
        if any(folder.glob(f"*/{CONFIG_NAME}")):
            return folder
    raise ValueError(f"this installation lacks the embedded model {EMBEDDED_MODEL!r}; install lantern anew")


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(repository, allow_patterns=list(HUB_PATTERNS)))
    except HFValidationError as error:
        raise ValueError(f"model {repository!r}: {one_line(error)}") from error
    except (HfHubHTTPError, OSError) as error:
        reason = one_line(error)
        raise ConnectionError(f"the hub did not give model {repository!r}: {reason}") from error


def _own_storage(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    # safetensors refuses tensors that share memory, as slices of one storage do
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def user_cache() -> Path:
    """lantern/ in $XDG_CACHE_HOME or ~/.cache: what can be made again for this user."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "lantern"


def _is_int8(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.int8


def _dequantized(name: str, stored: Mapping[str, Tensor], path: Path) -> Tensor:
    rows, scale = stored[name], stored.get(f"{name}.scale")
    if scale is None:
        raise ValueError(f"{path}: int8 tensor {name!r} has no {name + '.scale'!r}")
    if scale.shape != rows.shape[:1]:
        got, wanted = list(scale.shape), list(rows.shape[:1])
        raise ValueError(f"{path}: tensor {name + '.scale'!r} has shape {got}, wanted {wanted}")
    return rows.float() * scale.float().view(-1, *[1] * (rows.ndim - 1))


def _and_more(names: Collection[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def load_component(build: Callable[[Config], Module], kind: type[Config], folder: str | Path) -> Module:
    """Build a module from a component folder: `build(config)` with the folder's weights, in fp32, in eval mode."""
    module = build(build_config(kind, read_config(folder), source=Path(folder) / CONFIG_NAME))
    load_module(module, folder)
    return module.eval()
