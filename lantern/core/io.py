"""A component on disk: a folder with `config.json`, `model.safetensors` and the checksums of its files.

Loading is strict: a missing or damaged file, and a tensor that is missing, extra, of the wrong
shape or not finite, raises ValueError in one line that names the file and the tensor. Files are
written to a temporary path in the same folder and renamed atomically.

`SHA256SUMS` has the format of `sha256sum`, one line a file, so that `sha256sum -c SHA256SUMS` verifies a folder as
well. Files that are not listed, and folders without the list, load unverified.
"""

import argparse
import ctypes
import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import tempfile
import uuid
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lantern.core.config import CONFIG_NAME, is_out_of_memory, load_config, one_line, read_json_object

SUMS_NAME = "SHA256SUMS"
MAX_SUMS_BYTES = 1 << 16
WEIGHTS_NAME = "model.safetensors"
TRAINING_NAME = "training.json"  # the schedule that a component was trained with
Config = TypeVar("Config")
Module = TypeVar("Module", bound=nn.Module)
INITIALISERS = (
    *(nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_, nn.init.kaiming_uniform_),
    *(Tensor.normal_, Tensor.uniform_),
)
MOST_COMPUTED = 1 << 24  # values of a tensor that is not a weight, such as a rotary table
DIGESTED_VALUES = 1 << 16  # most values of a tensor in a digest
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STORED = {
    **{"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8},
    "BOOL": torch.bool,
}


@contextmanager
def atomic_write(path: str | Path, *, is_new: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`, and rename it to `path` at the end of the block.

        with atomic_write(folder / "image.png") as temporary:
            image.save(temporary)

    The temporary name keeps the suffix, from which writers derive the format. Missing parent folders
    are created. If the block fails, `path` is unchanged and the temporary file is removed; an OSError of that file, as
    which safetensors' error is raised too, names `path`. A symbolic link stays, and the file that it names is replaced.
    A device or a pipe is written to at the end of the block. With `is_new`, FileExistsError if `path` exists by then.
    """
    from safetensors import SafetensorError

    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():  # also behind a link, such as /dev/stdout
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder, f"written{path.suffix[:16]}")
            temporary.touch()
            yield temporary
            try:
                with path.open("wb") as out:
                    out.write(temporary.read_bytes())
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error
        return
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}{path.suffix[:16]}")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode  # of the umask; writers of some formats replace the file by a private one
        yield temporary
        with temporary.open("r+b") as file:  # Windows flushes only what is open for writing
            os.fsync(file.fileno())
        temporary.chmod(mode)
        if is_new:
            _give_new_name(temporary, path)
        else:
            temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        for folder in made:  # innermost first; one that something else was written to stays
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, SafetensorError):  # of the system, such as a full disk
            raise OSError(errno.EIO, f"cannot be written: {one_line(error)}", str(path)) from error
        if isinstance(error, OSError) and str(temporary) in (str(error.filename or temporary), str(error.filename2)):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def _give_new_name(temporary: Path, path: Path) -> None:
    """Rename a file to what does not exist; FileExistsError if it does."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        raise
    except OSError:  # a file system without links, such as FAT
        path.touch(exist_ok=False)
        temporary.replace(path)
    else:
        temporary.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write text as UTF-8, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def trained_steps(folder: Path) -> int | None:
    """Return for how many steps a trained component was trained; None if it has not recorded them."""
    with suppress(ValueError, KeyError, TypeError):
        found = read_json_object(folder / TRAINING_NAME)
        return int(found.get("steps", found["loop"]["steps"]))  # "steps" counts those of earlier trainings too
    return None


def write_json(path: str | Path, value: object) -> None:
    """Write `value` as indented JSON, atomically; ValueError for NaN and infinity."""
    write_text(path, _json(value))


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the `config.json` of a component folder."""
    return read_json_object(Path(folder) / CONFIG_NAME)


def plain_name(name: str) -> str:
    """Return the name of a tensor without what `torch.compile` adds for modules that it compiled."""
    return name.replace("_orig_mod.", "")


def save_component(
    state: Mapping[str, Tensor],
    config: Mapping[str, object] | object,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a component: `state` to `model.safetensors`, `config` to `config.json`.

    `config` is a mapping or a config dataclass. `dtype` converts floating tensors (torch.bfloat16
    halves a folder). OSError if a file cannot be written.
    """
    from safetensors.torch import save_file

    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    stored, storages = dict[str, Tensor](), set[int]()
    for name, tensor in state.items():
        own = _own_storage(tensor, dtype)
        stored[plain_name(name)] = own.clone() if own.untyped_storage().data_ptr() in storages else own
        storages.add(own.untyped_storage().data_ptr())
    folder = Path(folder)
    with (
        atomic_write(folder / SUMS_NAME) as sums,
        atomic_write(folder / CONFIG_NAME) as config_file,
        atomic_write(folder / WEIGHTS_NAME) as weights,
    ):
        save_file(stored, weights, metadata={"format": "pt"})
        config_file.write_text(_json(config), encoding="utf-8")
        listed = {name: digest for name, digest in read_checksums(folder).items() if (folder / name).is_file()}
        sums.write_text(format_checksums(listed | {WEIGHTS_NAME: sha256_of(weights)}), encoding="ascii")


def save_tensors(tensors: dict[str, Tensor], path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, atomically."""
    from safetensors.torch import save_file

    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata)


def save_checksums(folder: str | Path) -> None:
    """Write `SHA256SUMS` of the safetensors files of a folder."""
    folder = Path(folder)
    if found := {path.name: sha256_of(path) for path in folder.glob("*.safetensors")}:
        with atomic_write(folder / SUMS_NAME) as sums:
            sums.write_text(format_checksums(read_checksums(folder) | found), encoding="ascii")


def load_state(folder: str | Path) -> dict[str, Tensor]:
    """Load the tensors of a component folder; ValueError names the file, and the tensor that is not finite."""
    return load_tensors(Path(folder) / WEIGHTS_NAME)


def check_there(path: Path) -> None:
    """Raise ValueError for a missing file, a link to one, and what is no regular file."""
    if not path.is_file():
        what = "missing" if not os.path.lexists(path) else "a link to no file" if path.is_symlink() else "no file"
        raise ValueError(f"{path} is {what}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; ValueError for what goes wrong in the block."""
    from safetensors import SafetensorError, safe_open

    check_there(path)
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {one_line(error)}") from error


def load_tensors(path: str | Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Load one safetensors file, or some of its tensors; see `load_state`. ValueError for a file that is not complete.

    Tensors are views of the mapped file.
    """
    path = Path(path)
    with _opened(path) as file:
        state = {name: file.get_tensor(name) for name in file.keys() if names is None or name in names}  # noqa: SIM118
    check_finite(state, source=path)
    return state


def read_pickled(path: str | Path) -> Any:
    """Read what torch.save wrote of tensors and plain values, on the CPU; nothing that the file contains is executed.

    ValueError names the file and what is wrong with it.
    """
    path = Path(path)
    check_there(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about sparse tensors, which are refused later
            # only zip archives can be mapped; files of torch before 1.6 are read whole
            if is_zip := zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
                        raise ValueError("it is compressed")
                    if broken := archive.testzip():  # reads the file once more: torch looks at no checksum
                        raise ValueError(f"the checksum of {broken} is wrong; if it was saved without, save it again")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a damaged or hostile pickle can raise anything
        raise ValueError(f"{path} is no whole checkpoint of plain tensors: {_pickle_fault(error)}") from error


def is_there(path: str | Path) -> bool:
    """Return whether a folder has an entry of this name, be it damaged: a dangling link counts."""
    return os.path.lexists(path)


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, source: str | Path) -> None:
    """Raise ValueError for a `state` whose names or shapes differ from those of `expected` (may be meta tensors)."""
    missing = [name for name in expected if name not in state]
    extra = [name for name in state if name not in expected]
    for names, fault in ((missing, "is missing"), (extra, "is not expected")):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(f"{source}: tensor {names[0]!r} {fault}{more}")
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            got, required = list(state[name].shape), list(tensor.shape)
            raise ValueError(f"{source}: tensor {name!r} has shape {got}, wanted {required}")
        check_dtype(name, state[name], is_floating=tensor.is_floating_point(), source=source)


def check_dtype(name: str, tensor: Tensor, *, is_floating: bool, source: str | Path) -> None:
    """Raise ValueError for a tensor of a kind that weights are not stored in.

    Floating-point tensors are fp64, fp32, fp16 or bf16; others are signed or unsigned integers or booleans. Complex,
    float8, quantised and sparse tensors are refused.
    """
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{source}: tensor {name!r} is sparse or quantised, wanted a dense one")
    if is_floating and tensor.dtype not in FLOATING:
        raise ValueError(f"{source}: tensor {name!r} is {kind}, wanted one of fp32, bf16, fp16, fp64")
    if not is_floating and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{source}: tensor {name!r} is {kind}, wanted integers")


def check_finite(state: Mapping[str, Tensor], *, source: str | Path) -> None:
    """Raise ValueError for a `state` in which a floating tensor holds NaN or infinity."""
    for name, tensor in state.items():
        if tensor.is_floating_point():
            check_dtype(name, tensor, is_floating=True, source=source)
            if tensor.is_meta:
                raise ValueError(f"{source}: tensor {name!r} has a shape and no values (meta device)")
        # in blocks, since isfinite takes more memory than its input
        if tensor.is_floating_point() and not all(bool(x.isfinite().all()) for x in tensor.flatten().split(1 << 16)):
            raise ValueError(f"{source}: tensor {name!r} holds NaN or infinity")


def load_module(module: nn.Module, folder: str | Path) -> None:
    """Load the weights of a component folder into `module`, strictly; its dtype and device stay."""
    state = load_state(folder)
    check_state(state, module.state_dict(), source=Path(folder) / WEIGHTS_NAME)
    module.load_state_dict(state)


class WeightsDigest:
    """SHA-256 over names, shapes and up to 65,536 evenly spaced values of each tensor, rounded to bf16.

    Weights rounded to bf16 have the same digest whether they are stored in bf16 or in fp32.
    """

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Add tensors, in any order."""
        for name, tensor in state.items():
            values = tensor.detach().flatten()
            some = values[:: -(-len(values) // DIGESTED_VALUES) or 1].to(torch.bfloat16).view(torch.int16)
            values = some.cpu().numpy().astype("<i2").tobytes()
            name = plain_name(name)
            self._parts[name] = f"{name}\0{list(tensor.shape)}\0".encode() + values

    def hexdigest(self) -> str:
        """Return the digest of all tensors."""
        return hashlib.sha256(b"".join(self._parts[name] for name in sorted(self._parts))).hexdigest()


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """Return the `WeightsDigest` of a state."""
    digest = WeightsDigest()
    digest.add(state)
    return digest.hexdigest()


def _own_storage(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    # safetensors rejects tensors that share memory, such as slices of one storage
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def user_cache() -> Path:
    """Return the cache folder of this user: lantern/ in $XDG_CACHE_HOME or ~/.cache.

    For a user who has neither it is one that nothing can be written to.
    """
    given, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if not os.path.isabs(given):
        given = f"{home}/.cache" if os.path.isabs(home) else os.devnull
    return Path(given, "lantern")


def _pickle_fault(error: Exception) -> str:
    """Return the fault that torch found, without its advice to load the file in other ways."""
    text = one_line(error)
    if found := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it holds {found[1]}, which is code"
    is_damaged = "weights_only" in str(error) or not isinstance(error, OSError | RuntimeError | ValueError)
    return "its pickle is damaged" if is_damaged else text.split(". ")[0]


def load_component(
    build: Callable[[Config], Module],
    kind: type[Config],
    folder: str | Path,
    *,
    verify: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    digest: WeightsDigest | None = None,
    change: Callable[[str, nn.Module], None] | None = None,
) -> Module:
    """Build a module from a component folder: `build(config)` with the folder's weights, in eval mode.

    Names, shapes and dtypes in the file's header are compared with those of the module before its memory is written,
    so that the operating system has not allocated it yet; `verify` compares the file with its SHA-256 where the folder
    lists one (`lantern.core.io`). Each linear, or other part, is read, converted, and given to `change` with its name
    before the next one, the largest first, so that memory holds little more than the module in its `dtype`. `digest`
    receives the stored tensors.
    ValueError names the file that does not fit.
    """
    folder = Path(folder)
    config, path = load_config(kind, folder / CONFIG_NAME), folder / WEIGHTS_NAME
    try:
        with NoInitialisation():
            module = build(config)
    except (RuntimeError, ValueError, OverflowError, MemoryError) as error:
        if is_out_of_memory(error):
            sizes = None
            with suppress(Exception), torch.device("meta"):
                sizes = build(config).state_dict()
            if sizes is not None:  # a config of other sizes than those of the file is what is wrong
                check_state(read_header(path), sizes, source=path)
            raise
        raise ValueError(
            f"{folder / CONFIG_NAME} describes a module that cannot be built: {one_line(error)}"
        ) from error
    expected = module.state_dict()
    check_state(read_header(path), expected, source=path)
    if verify:
        verify_files(folder, [WEIGHTS_NAME])
    parts = sorted(_parts(module), key=lambda part: -sum(p.numel() for p in part[1].parameters()))
    named = {name: {key for key in expected if key.startswith(f"{name}.")} for name, _ in parts}
    named[""] = set(expected).difference(*named.values())  # the module's own
    del expected
    for name, part in [*parts, ("", module)]:
        part._apply(partial(_placed, device=device, dtype=dtype), recurse=bool(name))
        state = load_tensors(path, named[name])
        if digest is not None:
            digest.add(state)
        part.load_state_dict({key.removeprefix(f"{name}."): x for key, x in state.items()}, strict=bool(name))
        del state
        if name and change is not None:
            change(name, part)
        trim_memory()
    return module.eval()


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the smallest submodules that load by themselves: linears and others with tensors or a hook of their own."""
    for name, child in module.named_children():
        if child._parameters or child._buffers or child._load_state_dict_pre_hooks:
            yield prefix + name, child
        else:
            yield from _parts(child, f"{prefix}{name}.")


def trim_memory() -> None:
    """Return memory that is no longer used to the operating system, where the C library can."""
    with suppress(AttributeError, TypeError):  # TypeError: on Windows None names no library
        ctypes.CDLL(None).malloc_trim(0)


def _placed(tensor: Tensor, *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Return a parameter without values, and a buffer with its own, in the dtype if they are floating."""
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    if isinstance(tensor, nn.Parameter):
        return torch.empty_like(tensor, device=device, dtype=dtype)
    return tensor.to(device=device, dtype=dtype)


class NoInitialisation(TorchFunctionMode):
    """Leaves new parameters and large buffers uninitialised: memory that is never written is not allocated.

    The meta device does the same, but torch then imports sympy, which takes seconds and 150 MiB.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in INITIALISERS:
            return args[0] if args else kwargs["tensor"]
        is_filled = func in (torch.zeros, torch.ones)
        if is_filled and math.prod(args if isinstance(args[0], int) else args[0]) > MOST_COMPUTED:
            func = torch.empty
        return func(*args, **kwargs)


def read_header(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file on the meta device.

    ValueError for a file that is not complete and for tensors of another kind.
    """
    found: dict[str, Tensor] = {}
    with _opened(Path(path)) as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            part = file.get_slice(name)
            if (kind := part.get_dtype()) not in STORED:
                raise ValueError(f"tensor {name!r} is {kind}, wanted one of {', '.join(STORED)}")
            found[name] = torch.empty(part.get_shape(), dtype=STORED[kind], device="meta")
    return found


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines of text, in hexadecimal."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_checksums(folder: str | Path) -> dict[str, str]:
    """Return {file name: SHA-256} as listed in a folder, empty without a list; ValueError for a damaged one."""
    path = Path(folder) / SUMS_NAME
    if not is_there(path):
        return {}
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: copy the folder again")
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_SUMS_BYTES).decode("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a list of checksums: {one_line(error)}") from error
    sums = {}
    for line in filter(None, lines):
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or set(digest) - set("0123456789abcdef") or not name:
            raise ValueError(f"{path}: line {line[:40]!r} is no SHA-256 with a file name: copy the folder again")
        sums[name] = digest
    return sums


def format_checksums(sums: dict[str, str]) -> str:
    """Return the text of a `SHA256SUMS` file."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def verify_files(folder: str | Path, names: Iterable[str]) -> None:
    """Compare files of a folder with its list of checksums; ValueError names the first file that differs."""
    folder, sums = Path(folder), read_checksums(folder)
    for name in names:
        if name not in sums or not (folder / name).is_file():
            continue
        if name.endswith(".safetensors"):
            read_header(folder / name)  # a file whose length differs from its header is refused before it is read
        if sha256_of(folder / name) != sums[name]:
            raise ValueError(
                f"{folder / name} is damaged: its SHA-256 is not the one in {SUMS_NAME}; copy it again, or delete "
                f"{SUMS_NAME} if the file was changed on purpose"
            )
