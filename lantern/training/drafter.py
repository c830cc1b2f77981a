"""Training of an EAGLE-1 drafter in the guided form, on pictures that the target itself makes.

The loss is acceptance itself: -log of the probability that one draft is kept, sum of min(p, q), on the laws after
guidance (LK loss, as in SpecForge), with a little cross-entropy and feature regression (EAGLE, arXiv:2401.15077), over
several unrolled steps (training-time test, arXiv:2503.01840).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lantern.decoding.plain import generate
from lantern.drafters.eagle import Eagle, EagleConfig, Unroll
from lantern.io import load_component, save_component, weights_digest
from lantern.models.llamagen.text import TextEncoder
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.sampling import Sampling
from lantern.training.data import Prepared
from lantern.training.features import Captions, cached, fingerprint
from lantern.training.loop import LoopConfig, Task, step_seed, with_overrides
from lantern.training.loop import train as run_loop
from lantern.training.target import prefix_mask
from lantern.types import Condition


@dataclass(frozen=True)
class DrafterConfig:
    """What to train and how: `pictures` are made by the target at `guidance`; a batch draws its scale from `scales`."""

    loop: LoopConfig
    batch: int = 8
    lr: float = 2e-3
    pictures: int = 512
    guidance: float = 3.0
    scales: tuple[float, float] = (1.5, 5.0)
    unroll: int = 3
    fade: float = 0.8
    cross_entropy: float = 0.1
    regression: float = 0.1
    slots: int = 12

    @classmethod
    def load(cls, path: Path) -> "DrafterConfig":
        """Reads JSON; an unknown field is a ValueError."""
        raw = json.loads(path.read_text())
        try:
            return cls(**{**raw, "loop": LoopConfig(**raw["loop"]), "scales": tuple(raw.get("scales", cls.scales))})
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from None


@torch.no_grad()
def make_pictures(
    target: Transformer, captions: Captions, prepared: Prepared, config: DrafterConfig, *, batch: int = 64
) -> dict[str, Tensor]:
    """Codes and both rows' features of pictures that the target makes for training captions.

    features: `(m, 2, n, c)` bf16, entry i predicts code i.
    """
    device = target.norm.weight.device
    records = [r for r in prepared.records if r.split == "train"]
    generator = torch.Generator().manual_seed(config.loop.seed)
    chosen = torch.randint(0, len(records), (config.pictures,), generator=generator).tolist()
    rows = torch.tensor([captions.index[records[i].captions[0][0]] for i in chosen])
    parts: dict[str, list[Tensor]] = {"codes": [], "features": []}
    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        words, mask = captions.features[some].float().to(device), captions.mask[some].to(device)
        keys = [(config.loop.seed, start + i) for i in range(len(some))]
        sampling = Sampling(guidance=config.guidance)
        codes = generate(target, Condition(embeddings=words, mask=mask), sampling=sampling, keys=keys).codes
        parts["codes"].append(codes.short().cpu())
        parts["features"].append(teacher_features(target, words, mask, codes).bfloat16().cpu())
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def teacher_features(target: Transformer, words: Tensor, mask: Tensor, codes: Tensor) -> Float[Tensor, "m 2 n c"]:
    """Features that predict each code, in the conditional and the unconditional row."""
    rows = []
    for embed in (target.cls_embedding, target.cls_embedding.unconditional):
        inputs = torch.cat([embed(words), target.tok_embeddings(codes[:, :-1])], dim=1)
        first = target.config.cls_token_num - words.shape[1]
        positions = torch.arange(first, first + inputs.shape[1], device=codes.device)[None]
        out = target.features(inputs, positions, prefix_mask(mask, codes.shape[1] - 1))
        rows.append(out[:, words.shape[1] - 1 :])
    return torch.stack(rows, dim=1)


class DrafterTask(Task):
    """Every pass i of the unroll takes the outputs of pass i - 1 as features, as drafting will."""

    def __init__(self, config: DrafterConfig, target: Transformer, made: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.drafter = Eagle(EagleConfig.for_target(target.config, target=weights_digest(target.state_dict())))
        self.drafter.init_weights(target.tok_embeddings.weight.data, torch.Generator().manual_seed(config.loop.seed))
        self.frozen = (target.requires_grad_(False),)
        held = max(1, len(made["codes"]) // 16)
        self._held = {name: tensor[:held] for name, tensor in made.items()}
        self._made = {name: tensor[held:] for name, tensor in made.items()}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """AdamW over the whole drafter."""
        return [torch.optim.AdamW(self.drafter.parameters(), lr=self.config.lr, betas=(0.9, 0.95), weight_decay=0.01)]

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Codes, both rows' features, and a guidance scale per picture."""
        generator = torch.Generator().manual_seed(step_seed(self.config.loop.seed, step, rank))
        chosen = torch.randint(0, len(self._made["codes"]), (self.config.batch,), generator=generator)
        low, high = self.config.scales
        scales = low + (high - low) * torch.rand(self.config.batch, generator=generator)
        drawn = (self._made["codes"][chosen].long(), self._made["features"][chosen].float(), scales)
        return tuple(tensor.to(device) for tensor in drawn)

    def _unroll(
        self, codes: Int[Tensor, "b n"], rows: Float[Tensor, "b 2 n c"], scales: Float[Tensor, " b"]
    ) -> list[dict[str, Tensor]]:
        """Cross-entropy, acceptance and regression of each pass, averaged over the outputs that mean something."""
        head = cast(Transformer, self.frozen[0]).output
        guided = rows[:, 1] + scales[:, None, None] * (rows[:, 0] - rows[:, 1])
        wanted = guided[:, 1:]
        p = F.softmax(head(wanted).float(), dim=-1)
        features, tokens = guided[:, :-1], codes[:, :-1]
        spread = scales[:, None].expand(tokens.shape)
        cache, figures = Unroll(), []
        for done in range(self.config.unroll):
            out = self.drafter.training_forward(features, tokens, scales=spread, unroll=cache)
            log_q = F.log_softmax(head(out).float(), dim=-1)
            accepted = torch.minimum(p, log_q.exp()).sum(-1)[:, done:]
            figures.append(
                {
                    "cross_entropy": -(p * log_q).sum(-1)[:, done:].mean(),
                    "log_accepted": accepted.clamp(min=1e-6).log().mean(),
                    "accepted": accepted.mean(),
                    "regression": F.smooth_l1_loss(out[:, done:].float(), wanted[:, done:]),
                }
            )
            features = torch.cat([features[:, :1], out[:, :-1].to(features.dtype)], dim=1)
        return figures

    def forward(self, codes: Tensor, rows: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """The faded sum of the passes' losses, and the acceptance of the first and the last."""
        config, figures = self.config, self._unroll(codes, rows, scales)
        loss = codes.new_zeros((), dtype=torch.float)
        for done, f in enumerate(figures):
            terms = config.cross_entropy * f["cross_entropy"] + config.regression * f["regression"] - f["log_accepted"]
            loss = loss + config.fade**done * terms
        return {"loss": loss, "accepted_1": figures[0]["accepted"], "accepted_last": figures[-1]["accepted"]}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Acceptance of a single draft at each depth on pictures kept aside, at the guidance they were made with."""
        codes, rows = self._held["codes"].long(), self._held["features"].float()
        device = self.drafter.fc.weight.device
        scales = torch.full((len(codes),), self.config.guidance, device=device)
        figures = self._unroll(codes.to(device), rows.to(device), scales)
        return {f"accepted_{i + 1}": float(f["accepted"]) for i, f in enumerate(figures)}

    def export(self, folder: Path) -> None:
        """Writes the drafter to `folder/drafter`."""
        save_component(self.drafter.state_dict(), self.drafter.config, folder / "drafter", dtype=torch.bfloat16)


def train(
    config: DrafterConfig,
    *,
    out: Path,
    data: Path,
    target: Path,
    text_encoder: Path,
    tokenizer: Path | None = None,
    steps: int | None = None,
    decay: int | None = None,
) -> None:
    """Trains a drafter for a target and writes `out/drafter`; resumes what `out` holds."""
    config = with_overrides(config, loop=with_overrides(config.loop, steps=steps, decay=decay))
    prepared, model = Prepared.open(data), load_component(Transformer, TransformerConfig, target)
    read = fingerprint([text_encoder / "model.safetensors", data / "records.jsonl"])
    seen = fingerprint([target / "model.safetensors", data / "records.jsonl"])
    encoder = TextEncoder.from_pretrained(text_encoder, tokenizer)
    captions = Captions.encode(encoder, prepared, out / f"captions-{read}.safetensors", slots=config.slots)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    made = cached(out / f"made-{seen}.safetensors", lambda: make_pictures(model, captions, prepared, config))
    run_loop(DrafterTask(config, model, made), config.loop, out=out)
