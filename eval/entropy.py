"""How undecided the target is: entropy of p, the law after guidance, along generated pictures."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.sampling import Sampling
from lantern.types import Step

QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90)


@dataclass
class EntropyMeter:
    """A callback of plain decoding that notes entropy (nats) and mass of the first codes of p at temperature 1.

    Filters are left out: it is the law of `sampling.soft()`, whatever the codes are drawn from.
    """

    sampling: Sampling
    entropies: list[Float[Tensor, " b"]] = field(default_factory=list)
    top1: list[Float[Tensor, " b"]] = field(default_factory=list)
    top10: list[Float[Tensor, " b"]] = field(default_factory=list)

    def __call__(self, step: Step) -> None:
        """Takes notice of the law that the next code is drawn from."""
        assert step.scores is not None
        law, logits = self.sampling.soft(), step.scores.logits
        log_p = law.log_probs(logits.unflatten(0, (-1, law.rows)), step.start[:, None])[:, 0]
        p = log_p.exp()
        best = p.topk(min(10, p.shape[-1])).values
        self.entropies.append(torch.special.entr(p).sum(-1).cpu())
        self.top1.append(best[:, 0].cpu())
        self.top10.append(best.sum(-1).cpu())

    def summary(self) -> dict[str, object]:
        """Mean and quantiles over all codes of all pictures."""
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
