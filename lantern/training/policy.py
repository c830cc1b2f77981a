"""Training of tree policies on recorded drafts: C2T's classifier of nodes and RADAR's decision to continue a draft.

A record holds, for every drafted node, its traits and whether the target accepted it
(`lantern.drafters.records`). Both networks are small: minutes on a CPU are enough. `export` writes an add-on
of a model's folder.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.config import build_fields, check_least
from lantern.core.io import save_component, sha256_of
from lantern.drafters.policies import SIDE_INPUTS, TRAITS, side_inputs
from lantern.drafters.records import Records, load_records
from lantern.methods.method import resolved
from lantern.training.drafter import find_kind
from lantern.training.loop import LoopConfig, Task, run_loop, step_generator

HELD_OUT = 5  # every fifth picture is held out
SIDES = [TRAITS.index(name) for name in ("left", "up", "up_right")]


@dataclass(frozen=True)
class PolicyConfig:
    """Settings of a policy: `model` changes fields of the network's config, `batch` counts nodes or drafts.

    For RADAR `nodes` is the number of nodes scored in a pass, root included, and `curiosity` weighs the entropy of its
    decisions in the loss. A step takes `node_cost` plain steps for each node behind the root and `level_cost` for each
    draft pass, as measured with the embedded model on two cores. ValueError for an unknown kind and for values out of
    range.
    """

    loop: LoopConfig
    kind: str = "c2t"
    model: dict[str, Any] = field(default_factory=dict)
    batch: int = 512
    lr: float = 3e-3
    weight_decay: float = 1e-4
    nodes: int = 16
    curiosity: float = 0.01
    node_cost: float = 0.15
    level_cost: float = 0.35

    def __post_init__(self) -> None:
        find_kind(self.kind, "policy")
        check_least(self, batch=1, lr=0, weight_decay=0, nodes=2, curiosity=0, node_cost=0, level_cost=0)
        if not self.lr:
            raise ValueError("lr is 0, wanted above 0")


def held_out(records: Records) -> Bool[Tensor, " s"]:
    """Return which drafts are of held-out images, or of the second half of the image if there is only one."""
    pictures = int(records.picture.max()) + 1
    if pictures < HELD_OUT:
        return records.picture == pictures - 1 if pictures > 1 else records.start > records.start.median()
    return records.picture % HELD_OUT == HELD_OUT - 1


class PolicyTask(Task):
    """What trainings of policies share: `part` is the network of the config's kind."""

    betas = (0.9, 0.999)

    def __init__(self, config: PolicyConfig, records: Records) -> None:
        super().__init__()
        self.config, kind = config, find_kind(config.kind, "policy")
        given = build_fields(kind.config, config.model, source="config", prefix="model.")
        self.part: Any = kind.module(kind.config(**{"target": records.about.get("target"), **given}))
        self.part.init_weights(torch.Generator().manual_seed(config.loop.seed))

    def export(self, folder: Path) -> None:
        """Write the add-on to a folder named like its kind."""
        save_component(self.part.state_dict(), self.part.config, folder / self.config.kind)


class C2TTask(PolicyTask):
    """C2T: which nodes were accepted, of those whose parents were. Cross-entropy over nodes.

    Held-out figures are reported beside those of the path's own probabilities, the baseline.
    """

    def __init__(self, config: PolicyConfig, records: Records) -> None:
        super().__init__(config, records)
        assert records.traits is not None
        is_held = held_out(records)[:, None]
        tested = [records.is_tested & rows for rows in (~is_held, is_held)]
        if not all(rows.any() for rows in tested):
            raise ValueError("the records hold too few drafts to hold some out: record more images")
        self._train, self._held = ((records.traits[rows], records.is_taken[rows].float()) for rows in tested)

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return traits of some nodes and whether each was accepted."""
        generator = step_generator(self.config.loop.seed, step, rank)
        traits, taken = self._train
        chosen = torch.randint(0, len(taken), (self.config.batch,), generator=generator)
        return traits[chosen].to(device), taken[chosen].to(device)

    def forward(self, traits: Tensor, taken: Tensor) -> dict[str, Tensor]:
        """Return the cross-entropy in nats per node."""
        return {"loss": F.binary_cross_entropy_with_logits(self.part(traits), taken)}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return AUC, cross-entropy and calibration error, and the first two of the path's own probabilities."""
        from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

        device = self.part.first.weight.device
        traits, taken = (tensor.to(device) for tensor in self._held)
        logits = self.part(traits)
        match = traits[:, TRAITS.index("match")].clamp(max=-1e-4)
        found = {"calibration": float(binary_calibration_error(logits.sigmoid(), taken.int(), n_bins=10))}
        own = match - torch.log1p(-match.exp())  # the logit of a log-probability
        for name, scores in (("", logits), ("_of_scores", own)):
            found[f"auc{name}"] = float(binary_auroc(scores, taken.int()))
            found[f"loss{name}"] = float(F.binary_cross_entropy_with_logits(scores, taken))
        return found


class RadarTask(PolicyTask):
    """RADAR: when another draft pass is worth its time, by REINFORCE on the measured time of steps.

    An episode is one recorded draft: after each pass the network continues or stops. Stopping after pass k commits
    min(accepted, k) + 1 tokens in the time T of a step with k passes. Speed is not the mean of tokens / T over steps
    but the ratio of their means, so the reward is tokens - c T with c the tokens per second of the best constant depth:
    a mean above 0 is faster than that. ValueError for records with fewer beams than the network reads.
    """

    def __init__(self, config: PolicyConfig, records: Records) -> None:
        super().__init__(config, records)
        assert records.beams is not None
        self._beams, self._sides = records.beams[..., : self.part.config.beam], sides(records)
        if self._beams.shape[2] < self.part.config.beam:
            raise ValueError(f"the records' beams are {self._beams.shape[2]} wide, wanted {self.part.config.beam}")
        depths = torch.arange(1, self._beams.shape[1] + 2)
        self._times = 1 + config.node_cost * (config.nodes - 1) + config.level_cost * depths
        self._tokens = torch.minimum(records.length[:, None], depths) + 1.0
        self._is_held = held_out(records)
        self.rate = float((self._tokens[~self._is_held].mean(0) / self._times).max())

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return some drafts and the uniforms that decide where they stop."""
        generator = step_generator(self.config.loop.seed, step, rank)
        seen = (~self._is_held).nonzero()[:, 0]
        chosen = seen[torch.randint(0, len(seen), (self.config.batch,), generator=generator)]
        uniforms = torch.rand(len(chosen), self._beams.shape[1], generator=generator)
        return tuple(x.to(device) for x in (self._beams[chosen], self._sides[chosen], self._tokens[chosen], uniforms))

    def forward(self, beams: Tensor, near: Tensor, tokens: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
        """Return minus the log-probability of the decisions times their advantage over the mean reward."""
        logits = self.decisions(beams, near)
        stops = uniforms < torch.sigmoid(-logits)
        depth = first_stop(stops)
        times = self._times.to(tokens.device)
        rewards = (tokens - self.rate * times).gather(1, depth[:, None])[:, 0]
        advantage = rewards - rewards.mean()
        made = torch.arange(stops.shape[1], device=tokens.device) <= depth[:, None]
        log_probs = F.logsigmoid(torch.where(stops, -logits, logits))
        # the entropy of a decision; gradients through entr(p) are not finite once a decision is certain
        entropy = F.softplus(logits) - logits * torch.sigmoid(logits)
        loss = -(log_probs * made).sum(1) * advantage - self.config.curiosity * (entropy * made).sum(1)
        return {"loss": loss.mean(), "reward": rewards.mean(), "steps": depth.float().mean() + 1}

    def decisions(self, beams: Float[Tensor, "b d w"], near: Float[Tensor, "b d 3"]) -> Float[Tensor, "b d"]:
        """Return the logit of continuing after each pass but the last."""
        hidden = torch.zeros(len(beams), self.part.config.hidden, dtype=beams.dtype, device=beams.device)
        memory, logits = (hidden, hidden.clone()), []
        for i in range(beams.shape[1]):
            predicted, memory = self.part(beams[:, i], side_inputs(i + 1, near[:, i]), memory)
            logits.append(predicted)
        return torch.stack(logits, 1)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return tokens per unit of time of its likelier decisions, of the best constant depth and of the deepest."""
        device = self.part.second.weight.device
        beams, near, tokens = (x[self._is_held].to(device) for x in (self._beams, self._sides, self._tokens))
        depth = first_stop(self.decisions(beams, near) < 0)
        times = self._times.to(device)
        constant = tokens.mean(0) / times
        speed = tokens.gather(1, depth[:, None]).mean() / times[depth].mean()
        return {
            "speed": float(speed),
            "speed_of_best_depth": float(constant.max()),
            "speed_of_all_depths": float(constant[-1]),
            "steps": float(depth.float().mean() + 1),
            "steps_of_best_depth": float(constant.argmax() + 1),
        }


def first_stop(stops: Bool[Tensor, "b d"]) -> Int[Tensor, " b"]:
    """Return the pass, from 0, after which each draft stops; the last if it never does."""
    never = torch.ones_like(stops[:, :1])
    return torch.cat([stops, never], 1).long().argmax(1)


def sides(records: Records) -> Float[Tensor, "s d 3"]:
    """Return the mean side traits of the nodes one deeper than each pass, 0.5 where there are none."""
    assert records.traits is not None and records.beams is not None
    assert len(SIDES) == SIDE_INPUTS - 1
    found = []
    for depth in range(2, records.beams.shape[1] + 2):
        is_there = ((records.depths == depth) & (records.parents >= 0))[..., None]
        count = is_there.sum(1)
        total = torch.where(is_there, records.traits[..., SIDES], 0.0).sum(1)
        found.append(torch.where(count > 0, total / count.clamp(min=1), 0.5))
    return torch.stack(found, 1)


def train(config: PolicyConfig, *, out: Path, records: Path) -> None:
    """Train a policy on a file of records, or on all in a folder; resume what `out` holds.

    ValueError for records without traits, which only dynamic trees have.
    """
    paths = sorted(records.glob("*.safetensors")) if records.is_dir() else [records]
    if not paths:
        raise ValueError(f"{records} holds no *.safetensors: write some with lantern-generate --record FILE")
    found = load_records(paths)
    if found.traits is None or found.beams is None:
        advice = "use one with dynamic trees, such as eagle2"
        raise ValueError(f"{records}: the method {found.about.get('method')} records no traits of nodes: {advice}")
    torch.manual_seed(config.loop.seed)
    task: type[PolicyTask] = resolved(find_kind(config.kind, "policy").task)
    run_loop(task(config, found), config.loop, out=out, source=" ".join(map(sha256_of, paths)))
