"""Records of drafts: every step's tree and what was accepted of it, in one file that any generation can write.

Tree policies are trained on such files (`lantern train policy`), and drafters are compared by them. A file is
safetensors with one row per step and image, trees padded to the largest. Drafters of dynamic trees add their traits of
each node.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.config import one_line
from lantern.core.io import save_tensors
from lantern.core.types import Step, Verdict
from lantern.drafters.policies import MIN_LOG, TRAITS

VERSION = 1


@dataclass(frozen=True)
class Records:
    """s drafts with up to n nodes and their results, the root first and parents before children.

    `parents` is -1 where there is no node. `is_tested`: the node's parent was on the accepted path, so the node could
    be accepted; `is_taken`: it was. `start` is the number of the first drafted token, `picture` numbers the images of
    the file. `traits` are the numbers that TRAITS names, and `beams` the best log probabilities of the nodes extended
    at depth 1 and below; None where the drafter has none.
    """

    parents: Int[Tensor, "s n"]
    depths: Int[Tensor, "s n"]
    ranks: Int[Tensor, "s n"]
    is_tested: Bool[Tensor, "s n"]
    is_taken: Bool[Tensor, "s n"]
    start: Int[Tensor, " s"]
    length: Int[Tensor, " s"]
    picture: Int[Tensor, " s"]
    traits: Float[Tensor, "s n t"] | None = None
    beams: Float[Tensor, "s d w"] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.start)

    @classmethod
    def load(cls, path: Path) -> "Records":
        """Read a file; ValueError for another kind of file, another version, or other traits."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get("lantern", "{}"))
                read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a file of records: {one_line(error)}") from error
        names = {entry.name for entry in fields(cls)} - {"about"}
        drafts = {len(x) if x.ndim else 0 for x in read.values()}
        is_whole = names - {"traits", "beams"} <= set(read) <= names and len(drafts) == 1 and 0 not in drafts
        if not is_whole or not isinstance(about, dict) or about.get("version") != VERSION:
            raise ValueError(f"{path} has no records of version {VERSION}: write it with lantern-generate --record")
        if "traits" in read and about.get("traits") != list(TRAITS):
            raise ValueError(f"{path} has traits {about.get('traits')}, wanted {list(TRAITS)}: record it again")
        wide = {name: x.float() if x.is_floating_point() else x.long() for name, x in read.items()}
        return cls(**wide | {name: read[name].bool() for name in ("is_tested", "is_taken")}, about=about)

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        kinds = {torch.bool: torch.uint8, torch.long: torch.int32, torch.float: torch.float16}
        stored = {name: x.to(kinds[x.dtype]).contiguous() for name, x in vars(self).items() if isinstance(x, Tensor)}
        metadata = {"lantern": json.dumps({**self.about, "version": VERSION, "traits": list(TRAITS)}, sort_keys=True)}
        save_tensors(stored, path, metadata)


class Recorder:
    """A callback that records the trees of all steps; `watch` makes a drafter add its traits of the nodes.

    recorder = Recorder()
    for image in lantern.generation.generator.generate(model, asked, method="ddd", record=recorder): ...
    recorder.records().save(path)
    """

    def __init__(self, **about: Any) -> None:
        self.about: dict[str, Any] = about
        self._steps: list[tuple[int, Step]] = []
        self._pictures = 0
        self._batch = 0

    def watch(self, drafter: Any) -> None:
        """Make a drafter add its traits of the nodes, if it has any; None is plain decoding."""
        if drafter is not None:
            drafter.records_traits = True

    def __call__(self, step: Step) -> None:
        """Record a step; nothing is computed before `records`."""
        if step.index == 0:
            self._pictures, self._batch = self._pictures + self._batch, len(step.counts)
        if step.tree is not None and step.verdict is not None:
            # log q is large and not recorded.
            tree = replace(step.tree, log_q=None)
            verdict = Verdict(step.verdict.path, step.verdict.length, step.verdict.next_token)
            self._steps.append((self._pictures, replace(step, scores=None, tree=tree, verdict=verdict)))

    def records(self) -> Records:
        """Return all recorded steps, on the CPU; ValueError if nothing was drafted."""
        if not self._steps:
            raise ValueError("nothing was drafted, so nothing was recorded: use a method that drafts trees")
        return joined([record_of(step, first) for first, step in self._steps], self.about)


def record_of(step: Step, first: int) -> Records:
    """Return the records of one step of the unfinished images; the first image is image number `first`."""
    assert step.tree is not None and step.verdict is not None
    shape, path = step.tree.shape, step.verdict.path
    images, nodes = len(step.counts), shape.num_nodes
    parents, depths, ranks = (x.expand(images, nodes) for x in (shape.parents, shape.depths, shape.ranks))
    on_path = torch.zeros(images, nodes + 1, dtype=torch.bool, device=path.device)
    is_walked = torch.arange(path.shape[1], device=path.device) < step.verdict.length[:, None]
    on_path = on_path.scatter(1, torch.where(is_walked, path, nodes), True)[:, :nodes]
    on_path[:, 0] = True
    is_tested = on_path.gather(1, parents) & (depths > 0) & (depths <= step.counts[:, None])
    found = {"parents": parents, "depths": depths, "ranks": ranks, "is_tested": is_tested, "start": step.start}
    found |= {"is_taken": is_tested & on_path, "length": torch.minimum(step.verdict.length, step.counts)}
    found["picture"] = torch.arange(first, first + images, device=path.device)
    if (traits := step.tree.traits) is not None:
        found |= {"traits": traits.nodes.float(), "beams": traits.beams.float()}
    alive: Any = {name: x[step.counts > 0].cpu() for name, x in found.items()}
    return Records(**alive)


def joined(parts: Sequence[Records], about: Mapping[str, Any]) -> Records:
    """Return several records as one, padded to the largest tree; traits only if all have them."""
    made, fillers = dict[str, Any](), {"parents": -1, "beams": MIN_LOG}
    for name in (entry.name for entry in fields(Records) if entry.name != "about"):
        rows = [getattr(part, name) for part in parts]
        if any(row is None for row in rows):
            continue
        largest = [max(sizes) for sizes in zip(*(row.shape[1:] for row in rows), strict=True)]
        for i, row in enumerate(rows):
            missing = [n for most, own in zip(largest, row.shape[1:], strict=True) for n in (most - own, 0)]
            rows[i] = pad(row, missing[::-1], value=fillers.get(name, 0))
        made[name] = torch.cat(rows)
    return Records(**made, about=dict(about))


def load_records(paths: Sequence[Path]) -> Records:
    """Read several files as one, with consecutive image numbers; ValueError for files of different targets."""
    parts = [Records.load(path) for path in paths]
    if len(targets := {part.about.get("target") for part in parts}) > 1:
        raise ValueError(f"the records are of {len(targets)} different targets, wanted one")
    starts = accumulate((int(part.picture.max()) + 1 for part in parts[:-1]), initial=0)
    shifted = [replace(part, picture=part.picture + first) for part, first in zip(parts, starts, strict=True)]
    return joined(shifted, parts[0].about)
