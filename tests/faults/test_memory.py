"""Out of memory: the batch is halved, which is reported once; images stay the same and none is lost."""

import gc
import json
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern import LanternPipeline
from lantern.core.config import is_out_of_memory
from lantern.core.sampling import Sampling
from lantern.generation.generator import Generator, generate
from lantern.generation.images import Picture
from lantern.generation.requests import as_requests
from lantern.methods import METHODS
from lantern.models.folder import Model

FOUR = ("-n", "4", "--batch", "4", "--method", "eagle1")
CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory")


@pytest.fixture(scope="module", autouse=True)
def _collections_take_no_time() -> Iterator[None]:
    """Let the collections of garbage after each failure pass over what was there before these tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@contextmanager
def room_for(
    images: int, target: Any, error: Exception = CUDA, *, when: Callable[[], bool] = lambda: True
) -> Iterator[list[int]]:
    """Make passes over more images fail; an image has two rows. Yield the list of images of every pass."""
    seen: list[int] = []

    def look(module: torch.nn.Module, inputs: Any) -> None:
        seen.append(len(inputs[0]) // 2)
        if seen[-1] > images and when():
            raise type(error)(*error.args)

    handle = target.norm.register_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def make(model: Model, count: int, batch: int, **options: Any) -> list[Picture]:
    requested = as_requests(["a red apple"] * count)
    return list(generate(model, requested, batch=batch, settings={"k": 4}, method="lantern++", **options))


def digests(pictures: list[Picture]) -> list[str]:
    return [picture.tokens_sha256 for picture in pictures]


def test_only_a_failed_allocation_halves_the_batch(model: Model) -> None:
    for allocate in (lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: bytearray(1 << 60)):
        with pytest.raises((RuntimeError, MemoryError)) as failed:
            allocate()
        assert is_out_of_memory(failed.value)
    assert is_out_of_memory(CUDA) and is_out_of_memory(CPU)
    assert not is_out_of_memory(RuntimeError("size of tensor a (3) must match")) and not is_out_of_memory(OSError(28))
    with room_for(0, model.target, RuntimeError("shapes differ")), pytest.raises(RuntimeError, match="shapes differ"):
        make(model, 4, 4)


def test_finished_pictures_are_not_made_again(model: Model) -> None:
    expected, made = make(model, 6, 2), []
    with room_for(1, model.target, when=lambda: len(made) >= 2) as seen:
        requested = as_requests(["a red apple"] * 6)
        how: dict[str, Any] = {"method": "lantern++", "settings": {"k": 4}, "on_halved": lambda *_: None}
        for picture in generate(model, requested, batch=2, **how):
            made.append(picture)
            if len(made) == 2:
                first = len(seen)
    assert digests(made) == digests(expected) and [picture.batch for picture in made] == [2, 2, 1, 1, 1, 1]
    assert seen[first:].count(2) == 1


def test_a_single_picture_that_does_not_fit_ends_the_run_and_keeps_the_others(model: Model) -> None:
    made: list[Picture] = []
    with room_for(0, model.target, when=lambda: len(made) == 2), pytest.raises(MemoryError, match="single image"):
        for picture in generate(model, ["a red apple"] * 4, batch=2):
            made.append(picture)
    assert [picture.request.number for picture in made] == [0, 1]


def test_a_failed_attempt_leaves_no_references(model: Model) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def look(module: torch.nn.Module, inputs: Any) -> None:
        if len(inputs[0]) > 4:
            held.append(weakref.ref(inputs[0]))
            raise type(CUDA)(*CUDA.args)  # a fresh one: errors keep the frames that they went through
        alive.append(sum(ref() is not None for ref in held))

    target: Any = model.target
    handle = target.norm.register_forward_pre_hook(look)
    make(model, 4, 4, on_halved=lambda *_: None)
    handle.remove()
    assert held and set(alive) == {0}


def test_tokens_are_kept_if_only_their_pixels_do_not_fit(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make(model, 4, 2)
    decode, tried = model.vq.decode, list[int]()

    def tight(tokens: torch.Tensor) -> torch.Tensor:
        tried.append(len(tokens))
        if len(tokens) > most:
            raise CUDA
        return decode(tokens)

    monkeypatch.setattr(model.vq, "decode", tight)
    most = 1
    made = make(model, 4, 2, on_halved=lambda *both: pytest.fail("batches of tokens fit"))
    assert digests(made) == digests(expected) and tried == [2, 1, 1, 1, 1]
    assert [picture.batch for picture in made] == [2] * 4
    for one, other in zip(made, expected, strict=True):
        assert one.pixels is not None and other.pixels is not None and torch.equal(one.pixels, other.pixels)
    most = 0
    with pytest.raises(MemoryError, match="out of memory with a single image: "):
        make(model, 4, 2)
    most = 1
    tokens, decode = torch.zeros(1200, 16, dtype=torch.long), lambda some: torch.zeros(len(some), 3, 1, 1)
    # more images than Python's calls within each other
    assert len(Generator(model, METHODS["plain"], Sampling()).pixels(tokens)) == 1200


def test_the_pipeline_warns_and_makes_the_same_pictures(folder: Path) -> None:
    pipe: Any = LanternPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    expected = pipe("a red apple", generator=5, num_images_per_prompt=4)
    known: list[list[int]] = []

    def watch(pipe: Any, step: int, timestep: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert timestep == int(tensors["known"].min())
        known.append(tensors["known"].tolist())
        return tensors

    with room_for(2, pipe.transformer), pytest.warns(RuntimeWarning, match="continuing with 2") as output:
        found = pipe("a red apple", generator=5, num_images_per_prompt=4, callback_on_step_end=watch)
    assert len(output) == 1 and torch.equal(found.tokens, expected.tokens)
    assert known[0] == [1] * 4 and known[-1] == [16, 16] and [one["batch"] for one in found.stats] == [2] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(pipe("a red apple", generator=5, num_images_per_prompt=4).tokens, expected.tokens)


def test_the_command_reports_a_halving_once(run: Any, tmp_path: Path, changed_models: Any) -> None:
    whole = json.loads(run(*FOUR, "--json", "--out", tmp_path / "a")[1])
    with ExitStack() as stack:
        changed_models(lambda model: stack.enter_context(room_for(1, model.target, CPU)))
        code, out, error = run(*FOUR, "--json", "--out", tmp_path / "b")
        assert run(*FOUR, "--json", "--out", tmp_path / "c", "--quiet")[::2] == (0, "")
    found = json.loads(out)
    assert (code, error) == (0, "lantern: out of memory with 4 images at once: continuing with 1\n")
    assert (whole["batch_halved"], found["batch_halved"], found["batch"]) == (None, 1, 4)
    assert found["tokens_sha256"] == whole["tokens_sha256"] and len(set(found["paths"])) == 4
