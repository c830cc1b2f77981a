"""Statistics of the target's distributions: nats per code of given images, and entropy of p while generating."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step
from lantern.models.llamagen.transformer import Transformer


def teacher_mask(valid: Bool[Tensor, "b t"], codes: int) -> Bool[Tensor, "b n n"]:
    """Return the causal mask over t conditioning slots and `codes` codes; only padding attends to padding.

    For one padding slot, one word and two codes:

        .   1 . . .
        a   . 1 . .
        0   . 1 1 .
        1   . 1 1 1
    """
    count = valid.shape[1] + codes
    seen = F.pad(valid, (0, codes), value=True)
    causal = torch.ones(count, count, dtype=torch.bool, device=valid.device).tril() & seen[:, None]
    return causal | torch.eye(count, dtype=torch.bool, device=valid.device)


def nats(
    target: Transformer, condition: Condition, codes: Int[Tensor, "b n"], *, has_caption: bool = True
) -> Float[Tensor, "b n"]:
    """Return -log p of each code given the codes before it and the caption, or the unconditional caption."""
    logits = teacher_forced_logits(target, condition, codes, has_caption=has_caption)
    return F.cross_entropy(logits.transpose(1, 2), codes, reduction="none")


@torch.inference_mode()
def teacher_forced_logits(
    target: Transformer, condition: Condition, codes: Int[Tensor, "b n"], *, has_caption: bool
) -> Float[Tensor, "b n v"]:
    """Return the logits of each code given the codes before it, in one pass without a cache."""
    assert condition.embeddings is not None and condition.mask is not None
    embed = target.cls_embedding if has_caption else target.cls_embedding.unconditional
    prefix = embed(condition.embeddings)
    slots = prefix.shape[1]
    inputs = torch.cat([prefix, target.tok_embeddings(codes[:, :-1])], dim=1)
    first = target.config.cls_token_num - slots
    positions = torch.arange(first, first + inputs.shape[1], device=codes.device).expand(len(codes), -1)
    features = target.features(inputs, positions, teacher_mask(condition.mask, codes.shape[1] - 1))
    return target.head(features[:, slots - 1 :])


QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90)


@dataclass
class EntropyMeter:
    """Callback of plain decoding that records the entropy of p in nats and the mass of its most probable codes.

    p is the distribution after guidance at temperature 1, without truncation (`sampling.untruncated()`).
    """

    sampling: Sampling
    entropies: list[Float[Tensor, " b"]] = field(default_factory=list)
    top1: list[Float[Tensor, " b"]] = field(default_factory=list)
    top10: list[Float[Tensor, " b"]] = field(default_factory=list)

    def __call__(self, step: Step) -> None:
        """Record the distribution of the next code."""
        assert step.scores is not None
        sampling, logits = self.sampling.untruncated(), step.scores.logits
        log_p = sampling.log_probs(logits.unflatten(0, (-1, sampling.rows)), step.start[:, None])[:, 0]
        p = log_p.exp()
        best = p.topk(min(10, p.shape[-1])).values
        self.entropies.append(torch.special.entr(p).sum(-1).cpu())
        self.top1.append(best[:, 0].cpu())
        self.top10.append(best.sum(-1).cpu())

    def summary(self) -> dict[str, object]:
        """Return mean and quantiles over all codes of all images."""
        entropies, top1 = torch.cat(self.entropies).double(), torch.cat(self.top1).double()
        cuts = torch.quantile(entropies, torch.tensor(QUANTILES, dtype=torch.float64))
        return {
            "codes": len(entropies),
            "mean": round(float(entropies.mean()), 4),
            "quantiles": {f"{int(100 * q)}%": round(float(cut), 4) for q, cut in zip(QUANTILES, cuts, strict=True)},
            "top1_mass_mean": round(float(top1.mean()), 4),
            "top1_mass_median": round(float(top1.median()), 4),
            "top10_mass_mean": round(float(torch.cat(self.top10).double().mean()), 4),
        }
