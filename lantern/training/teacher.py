"""The target as a teacher: images by plain decoding, with the target's features along them, and their cache on disk."""

import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.io import atomic_write
from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.decoding.plain import generate
from lantern.decoding.prompt import prefill, read_tokens
from lantern.drafters.examples import fused_layers
from lantern.training.loop import step_seed

SPARE = 1 << 26  # bytes of the disk that stay free
BATCH = 64  # images generated together for the cache


class Source(Protocol):
    """A source of images by number; image i is the same from every source of one teacher."""

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return tokens, rows and other fields of `Examples` of these images."""
        ...


@dataclass(eq=False)
class Teacher:
    """Generates image number i with a caption and noise that depend on the seed and i alone, not on the batch.

    `texts` are the captions to choose from, and `condition` reads some of them; `reads` names the extra fields that a
    drafter reads. A drafter that reads the prompt gets every slot of it, padding included. Features are in bf16, as in
    a feature cache. ValueError for a target of transformers if `sampling` has no guidance, and for extras other than
    `layers`: its rows of guidance have prompts of their own, which are not given slot by slot.
    """

    target: Any
    condition: Callable[[list[str]], Condition]
    texts: Sequence[str]
    _: KW_ONLY
    sampling: Sampling
    seed: int
    reads: Collection[str] = ()

    def __post_init__(self) -> None:
        self._layers = fused_layers(self.target.config.n_layer) if "layers" in self.reads else ()
        if self.target.config.family == "llamagen":
            return
        if self.sampling.rows != 2:
            given = self.sampling.guidance
            raise ValueError(f"guidance is {given}, wanted above 1: the drafter reads both guidance rows")
        if others := sorted(set(self.reads) - {"layers"}):
            raise ValueError(f"the drafter reads {others[0]}, which targets of transformers do not give: train another")

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Generate these images on the target's device; return their tokens and the features that predict each."""
        texts = [self.texts[step_seed(self.seed, number, 0) % len(self.texts)] for number in numbers]
        condition = self.condition(texts).to(self.target.tok_embeddings.weight.device)
        keys = [(self.seed, number) for number in numbers]
        tokens = generate(self.target, condition, sampling=self.sampling, keys=keys).tokens
        prompt, cache = prefill(self.target, condition, 2, stage=0, whole="prompt" in self.reads, taps=self._layers)
        read, _ = read_tokens(self.target, cache, tokens[:, :-1], taps=self._layers)
        found = {"rows": torch.cat([prompt.features[:, :, -1:], read.features], 2)}
        if read.fused is not None and prompt.fused is not None:
            fused = torch.cat([prompt.fused[:, :, -1:], read.fused], 2)
            found["layers"] = fused.unflatten(-1, (len(self._layers), -1)).transpose(2, 3)
        if "prompt" in self.reads:
            found["prompt"] = prompt.features[:, :, :-1]
        whole = {"tokens": tokens.int()}
        if condition.embeddings is not None and condition.mask is not None:
            missing = prompt.mask.shape[1] - condition.mask.shape[1] if "prompt" in self.reads else 0
            found["words"] = pad(condition.embeddings, (0, 0, missing, 0))
            whole["mask"] = pad(condition.mask, (missing, 0))
        return whole | {name: x.bfloat16().contiguous() for name, x in found.items()}


@dataclass(frozen=True)
class FeatureCache:
    """The first `pictures` images of a teacher, `shard` per file: 00000.safetensors, 00001.safetensors, ...

    Files are written to a temporary path and renamed, so that a stopped build continues with the first missing one.
    """

    folder: Path
    _: KW_ONLY
    pictures: int
    shard: int

    def fill(self, teacher: Teacher) -> None:
        """Generate the missing files, each of several processes its share, and print the disk space they take.

        ValueError if the disk has less space.
        """
        from accelerate import PartialState

        shards = range(-(-self.pictures // self.shard))
        missing = [number for number in shards if not self._path(number).exists()]
        if not missing:
            return
        state = PartialState(cpu=not torch.cuda.is_available())
        if state.is_main_process:
            self._check_space(teacher, len(missing))
        with state.split_between_processes(missing) as mine:
            self._make(teacher, cast(Sequence[int], mine), is_quiet=not state.is_main_process)
        state.wait_for_everyone()

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return the tensors of these images."""
        from safetensors import safe_open

        rows: dict[int, dict[str, Tensor]] = {}
        for shard in sorted({number // self.shard for number in numbers}):
            with safe_open(self._path(shard), framework="pt") as file:
                parts: dict[str, Any] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                for number in {n for n in numbers if n // self.shard == shard}:
                    at = number % self.shard
                    rows[number] = {name: part[at : at + 1] for name, part in parts.items()}
        return {name: torch.cat([rows[number][name] for number in numbers]) for name in rows[numbers[0]]}

    def _path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.safetensors"

    def _check_space(self, teacher: Teacher, missing: int) -> None:
        from tqdm import tqdm

        self.folder.mkdir(parents=True, exist_ok=True)
        each = sum(tensor.nbytes for tensor in teacher.read([0]).values())
        size, free = each * min(self.pictures, missing * self.shard), shutil.disk_usage(self.folder).free
        total, left = tqdm.format_sizeof(size, "B"), tqdm.format_sizeof(free, "B")
        text = f"feature cache {self.folder}: {self.pictures} images, {total} to write"
        print(f"{text}, {left} free", file=sys.stderr)
        if size + SPARE > free:
            advice = 'use fewer images, or "source": "online"'
            raise ValueError(f"{text}, do not fit on a disk with {left} left: {advice}")

    def _make(self, teacher: Teacher, shards: Sequence[int], *, is_quiet: bool) -> None:
        from safetensors.torch import save_file
        from tqdm import tqdm

        todo = {s: range(s * self.shard, min(self.pictures, (s + 1) * self.shard)) for s in shards}
        with tqdm(total=sum(map(len, todo.values())), desc="images", disable=True if is_quiet else None) as bar:
            for shard, numbers in todo.items():
                parts = []
                for first in range(0, len(numbers), BATCH):
                    some = numbers[first : first + BATCH]
                    parts.append({name: x.cpu() for name, x in teacher.read(some).items()})
                    bar.update(len(some))
                with atomic_write(self._path(shard)) as temporary:
                    save_file({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, temporary)
