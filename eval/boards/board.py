"""What the frontier and the leaderboard share: their options, the loaded model, and the images of a round."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lantern.core.types import Generation
from lantern.eval.boards.results import weight_hashes
from lantern.eval.boards.rounds import SAME, Progress, SweepFolder, name_of, record
from lantern.eval.speed.contenders import AUTO, Contender, Job, Stable, Variant, condition_of, kinds_of
from lantern.eval.speed.race import interleave, step_order
from lantern.eval.speed.surroundings import load_average, surroundings
from lantern.models.folder import Model, load_model

# decodes a job by a contender and returns the images with further figures of the record; the last argument is a number
Run = Callable[[Contender, Job, int], tuple[Generation, dict[str, Any]]]


@dataclass(frozen=True)
class BoardOptions:
    """How methods are measured: in `variant`, on `prompts`, which are used in order and repeated.

    Plain decoding runs in each of the kinds `baselines` (empty: all kinds of the device) and each of `baseline_dtypes`.
    `run` is the folder of intermediate results.
    """

    run: Path
    prompts: Sequence[str]
    model: str = "lantern-emoji"
    variant: Variant = field(default_factory=lambda: Variant(AUTO, "fp32"))
    baselines: Sequence[str] = ()
    baseline_dtypes: Sequence[str] = ("fp32", "bf16")
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    device: str = "auto"
    is_quiet: bool = False


class Board:
    """A measurement with its model loaded, and its variant resolved to an engine."""

    def __init__(self, options: BoardOptions) -> None:
        self.model: Model = load_model(options.model, device=options.device, dtype="fp32", engine="eager")
        self.stable = Stable(self.model)
        self._options, self.variant = options, options.variant.resolved(self.stable)
        self.surroundings = surroundings(self.model.device)

    @property
    def header(self) -> dict[str, Any]:
        """The settings of the measurement, without the number of images, so that more can be added later."""
        options = self._options
        return {
            "model": self.model.name,
            "fingerprint": self.model.fingerprint,
            "weights": weight_hashes(self.model.folder) if self.model.folder else {},
            "variant": str(self.variant),
            "plain": list(map(str, self.plain_variants)),
            "seed": options.seed,
            "prompts": hashlib.sha256("\n".join(options.prompts).encode()).hexdigest(),
            "surroundings": {name: self.surroundings[name] for name in SAME},
        }

    @property
    def plain_variants(self) -> list[Variant]:
        """The variants of plain decoding."""
        kinds = self._options.baselines or kinds_of(self.model.device)
        return [Variant(kind, dtype) for dtype in self._options.baseline_dtypes for kind in kinds]

    def prompt(self, number: int) -> str:
        """Return the prompt of an image, or "class N" for a model of classes; both are used in order, repeated."""
        if not self.model.takes_prompts:
            return f"class {number % self.model.target.config.num_classes}"
        return self._options.prompts[number % len(self._options.prompts)]

    def job(self, number: int, *, seed: int | None = None) -> Job:
        """Return the job of a round; another `seed` gives images that are not part of the measurement."""
        seed = self._options.seed if seed is None else seed
        return Job(condition_of(self.model, self._options.prompts, [number]), [(seed, number)])

    def bar(self, total: int, name: str, unit: str) -> Progress:
        """Return the progress of some steps: a bar on a terminal, else lines."""
        return Progress(total, name, unit, is_quiet=self._options.is_quiet)

    def run_rounds(
        self,
        folder: SweepFolder,
        missing: Sequence[int],
        cast: Callable[[int], Sequence[Contender]],
        run: Run,
        *,
        name: str = "rounds",
        **facts: Any,
    ) -> None:
        """Run the missing rounds: one image by every contender of `cast(number)`, stored before the next round starts.

        `name` is the label of the bar; `facts` are stored with each round.
        """
        bar = self.bar(sum(len(cast(number)) for number in missing), name, "images")
        for number in missing:
            everyone = cast(number)
            order = [everyone[who] for who in step_order(len(everyone), number)]
            job, before = self.job(number), load_average()
            seconds, made = interleave([partial(run, one, job) for one in order], 1, device=self.model.device)
            kept = {
                name_of(one.label, one.variant): record(found[0][0], spent[0]) | found[0][1]
                for one, spent, found in zip(order, seconds, made, strict=True)
            }
            load = {"before": before, "after": load_average()}
            folder.write_round(number, {"commit": self.surroundings["commit"], "load": load, **facts, "made": kept})
            bar.update(len(order))
        bar.close()
