"""`lantern doctor`: prints versions and devices, checks that they fit, and suggests commands for repair."""

import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from packaging.requirements import Requirement

from lantern import __version__
from lantern.cli.command import DONE, FAILED, OneOf, command, opt
from lantern.cli.options import DTYPES
from lantern.core.config import install_hint, installed, one_line

# what lacks without a package that pip installs with lantern, and that decoding runs without
OPTIONAL = {
    "diffusers": "there is no diffusers pipeline",
    "ftfy": "prompts can be plain ASCII only",
    "argcomplete": "shells complete no options",
}
PIP = f"{sys.executable} -m pip install"
EXTRAS = ("eval", "train", "quantized", "serve", "demo", "ray")


@dataclass(frozen=True)
class Finding:
    """One line of the report; a finding with a `repair`, a command to run, is a fault.

    `state` is the first word of the line for a finding that is none.
    """

    text: str
    repair: str = ""
    state: str = "ok"


@command
def doctor(
    build: bool = opt(False, "first build the C++ engine (about 20 seconds, needs g++)"),
    model: str | None = opt(None, "predict memory and time of this model instead, from its configs"),
    size: tuple[int, int] | None = opt(None, "--model: pixels, of models that make several sizes"),
    batch: int = opt(1, "--model: images at a time", 1, 4096),
    device: str = opt("auto", "--model: auto, cpu, cuda or cuda:N"),
    dtype: str = opt("auto", "--model: auto, fp32, bf16 or fp16", type=OneOf(("auto", *DTYPES))),
    *,
    changed: list[str],
) -> int:
    """Print versions and devices, and commands to repair faults."""
    of_model = [name for name in changed if name not in ("--build", "--debug")]
    if of_model and model is None:
        raise ValueError(f"{of_model[0]} is an option of --model, which is missing")
    if build:
        from lantern.engines.cpu.build import library

        library()
    is_well = True
    for finding in checked() if model is None else predicted(model, size, batch, device, dtype):
        print(f"{'broken' if finding.repair else finding.state:<8}{finding.text}")
        if finding.repair:
            is_well = False
            print(f"{'':<8}run: {finding.repair}")
    if model is None:
        print("no faults found" if is_well else "faults found")
    return DONE if is_well else FAILED


def checked() -> Iterator[Finding]:
    """Yield the findings of all CHECKS; one that cannot be made is no fault."""
    for check in CHECKS:
        try:
            yield from check()
        except (ImportError, OSError, ValueError) as error:
            yield Finding(f"{check.__name__.strip('_').replace('_', ' ')}: not checked, {one_line(error)}")


def _packages() -> Iterator[Finding]:
    yield Finding(f"lantern {__version__}")
    yield Finding(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    own = _requirements("lantern")
    there = ", ".join(f"{one.name} {installed(one.name)}" for one in own if installed(one.name))
    yield Finding(there or "lantern is not installed as a package: the versions of others are not checked")
    of_torch = [one for one in _requirements("torchvision") if one.name == "torch"]  # they are released together
    for needing, one in [*(("lantern", one) for one in own), *(("torchvision", one) for one in of_torch)]:
        found = installed(one.name)
        if not found and one.name in OPTIONAL:
            text = f"{one.name} is not installed: {OPTIONAL[one.name]}; {PIP} {one.name}"
            yield Finding(text, state="absent")
        elif not found or not one.specifier.contains(found, prereleases=True):
            yield Finding(f"{one.name} {found or 'is not installed'}: {needing} needs {one}", f'{PIP} "{one}"')
    for extra in EXTRAS:
        versions = {one.name: installed(one.name) for one in _requirements("lantern", extra)}
        texts = [", ".join(f"{name} {found}" for name, found in versions.items() if found)]
        if absent := ", ".join(name for name, found in versions.items() if not found):
            texts.append(f"{absent} not installed, {install_hint(extra)}")
        yield Finding(f"extra {extra}: {'; '.join(filter(None, texts))}", state="absent" if absent else "ok")


def _requirements(package: str, extra: str = "") -> list[Requirement]:
    """Return what a package requires by itself or for one of its extras; nothing if it is not installed."""
    try:
        found = map(Requirement, requires(package) or ())
    except PackageNotFoundError:
        return []
    return [one for one in found if (f'extra == "{extra}"' in str(one.marker) if extra else one.marker is None)]


def _imports() -> Iterator[Finding]:
    for name in ("torch", "torchvision"):
        try:
            import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            again = f'{PIP} --force-reinstall --no-deps "{name}=={(installed(name) or "").split("+")[0]}"'
            repairs = [one.repair for one in _packages() if one.repair]
            yield Finding(f"{name} does not import: {one_line(error)}", [*repairs, again][0])
            return


def _devices() -> Iterator[Finding]:
    import torch

    yield Finding(f"cpu: {os.cpu_count()} cores, {torch.get_num_threads()} threads for torch")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}: {found.name}, {found.total_memory / 2**30:.0f} GiB")


def _engines() -> Iterator[Finding]:
    from lantern.engines.cpu.build import find_compiler, missing
    from lantern.generation.choice import choose_method
    from lantern.models.folder import load_model

    model = load_model(parts=())
    yield from _engines_of(model.target)
    lines = list[str]()
    method = choose_method(model, "auto", report=lines.append)
    chosen = f"method auto is {method.spec}: {method.reason}"
    yield Finding(next((line for line in lines if line.startswith(chosen)), chosen))  # with advice, if it is measured
    try:
        yield Finding(f"C++ library: {missing() or 'built'}; compiler {find_compiler()}")
    except ValueError as error:
        yield Finding(one_line(error))  # no fault: all other engines run without


def _engines_of(target: Any) -> Iterator[Finding]:
    """Yield what `auto` chooses for a target, and why each other engine can run it or not, in the engine's words."""
    from lantern.engines.cuda.engine import GraphEngine
    from lantern.engines.engine import ENGINES, Engine, engine

    def remark_of(engine: Engine) -> str | None:  # what a graph does not do for a target that it can run
        return engine.remark(target) if isinstance(engine, GraphEngine) else None

    chosen = engine("auto").resolve(target)
    remark = remark_of(chosen)
    yield Finding(f"engine auto: {chosen.name} ({chosen.reason}){f'; {remark}' if remark else ''}")
    for name in ENGINES:
        if name not in ("auto", chosen.name):
            other = engine(name)
            reason, remark = other.why_not(target, can_wait=False), remark_of(other)
            ready = f"available{f', but {remark}' if remark else ''}"
            yield Finding(f"engine {name}: {reason or ready}", state="absent" if reason else "ok")


def _embedded_model() -> Iterator[Finding]:
    from lantern.core.config import embedded_model

    try:
        yield Finding(f"embedded model: {embedded_model()}")
    except ValueError as error:
        yield Finding(one_line(error), "git checkout -- assets && pip install . (in a clone of lantern)")


def predicted(name: str, size: tuple[int, int] | None, batch: int, device: str, dtype: str) -> Iterator[Finding]:
    """Yield what a model needs on a device, from its configs and short measurements of the device."""
    from lantern.core.config import resolve_model
    from lantern.models.folder import pick_device, pick_dtype
    from lantern.models.prediction import measure_device, memory_of, placed, predict

    where, folder = pick_device(device), resolve_model(name)
    kind = pick_dtype(dtype, where, folder)
    found = predict(folder, kind, size=size)
    words, config = str(kind).removeprefix("torch."), found.target.config
    grid = f"{config.raster.rows} rows of {config.raster.columns} tokens"
    yield Finding(f"{config.family}: {found.parameters / 1e9:.3g} billion parameters, {grid}")
    each = f"{_gib(found.cache)} of cache and {_gib(found.noise)} of noise an image"
    parts = f"{_gib(found.weights)} for the target, {_gib(found.pixels)} for the VQ tokenizer, {each}"
    yield Finding(f"memory in {words}: {parts}")
    total, there = found.memory(batch), memory_of(where)
    room = f"{where} has {_gib(there)}: {'fits' if total <= there else 'does not fit'}"
    yield Finding(f"batch {batch}: {_gib(total)} and what steps allocate for a moment; {room}")
    if config.family != "llamagen":
        yield from _engines_of(placed(found.target, where, kind))
    bandwidth, rate = measure_device(where, kind)
    yield Finding(f"{where} copies {bandwidth / 1e9:.3g} GB/s and computes {rate / 1e9:.3g} GFLOP/s in {words}")
    for count in (1, 16):
        seconds = found.seconds(batch, count, bandwidth=bandwidth, rate=rate)
        rest = f", plain decoding {_time(config.raster.tokens * seconds)}" if count == 1 else ""
        yield Finding(f"a step over {count} of each image's tokens: at least {_time(seconds)}{rest}")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_packages, _imports, _devices, _embedded_model, _engines)
