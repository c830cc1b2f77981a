"""Training of the target: a LlamaGen transformer on tokens of images with captions or classes (arXiv:2406.06525)."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from lantern.core.config import check_least, check_number
from lantern.core.io import WEIGHTS_NAME, check_state, load_component, load_state, save_component, sha256_of, write_json
from lantern.core.sampling import Sampling
from lantern.decoding.plain import generate
from lantern.models.llamagen.text import CLASSES_NAME, TextEncoder
from lantern.models.llamagen.transformer import Transformer, TransformerConfig, prefix_mask
from lantern.models.llamagen.vqvae import VQVAE, VQConfig
from lantern.training.data import Prepared, held_or_trained
from lantern.training.features import Conditions, captions_name, decode, encode_captions, number_classes, picture_tokens
from lantern.training.loop import LoopConfig, Task, run_loop, save_sheet, step_generator
from lantern.verifiers.relaxations.neighbours import proximity_table

SHORT = 512  # positions up to which training on a CPU computes attention as plain products


@dataclass(frozen=True)
class TargetConfig:
    """Model and settings of the target. `kinds` weighs the kinds of records, `slots` is the number of caption slots.

    A model of type t2i is conditioned on captions. One of type c2i is conditioned on classes: each image's concept;
    its `num_classes` is set to their number.

    `unify_background` gives white background one token. `corruption` is input noise: up to this share of an image's
    input tokens, never the tokens to be predicted, is replaced: each by one of its `corruption_neighbours` nearest
    tokens, or, with probability `corruption_others`, by the token at the same place of another image of the batch. The
    target so learns to continue from sampled tokens, which differ from those of training images, and to rely on the
    caption. ValueError for values out of range.
    """

    model: TransformerConfig
    loop: LoopConfig
    batch: int = 16
    matrix_lr: float = 0.02
    other_lr: float = 2e-3
    weight_decay: float = 0.01
    slots: int = 12
    kinds: dict[str, float] = field(default_factory=lambda: {"plain": 1.0})
    unify_background: bool = False
    corruption: float = 0.0
    corruption_neighbours: int = 32
    corruption_others: float = 0.0
    compile: bool = False

    def __post_init__(self) -> None:
        check_least(self, batch=1, matrix_lr=0, other_lr=0, weight_decay=0, slots=1, corruption_neighbours=1)
        for name in ("corruption", "corruption_others"):
            check_number(name, vars(self)[name], 0, 1)
        if min(self.kinds.values(), default=0) < 0 or not any(self.kinds.values()):
            raise ValueError(f"kinds is {self.kinds!r:.80}, wanted weights of kinds: none below 0 and one above")
        if self.model.model_type == "c2i" and not self.model.class_dropout_prob:
            raise ValueError("class_dropout_prob is 0, wanted above 0: guidance needs an unconditional class")
        if self.corruption_others and self.batch < 2:
            raise ValueError(f"corruption_others needs other images: batch is {self.batch}, wanted 2 or more")


def grow(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return weights of a deeper model with the same output (block expansion, arXiv:2401.02415).

    Layers keep their order; between them stand copies whose output projections are zero. ValueError for fewer layers
    than the model has.
    """
    depth = 1 + max((int(name.split(".")[1]) for name in state if name.startswith("layers.")), default=0)
    if layers < depth:
        raise ValueError(f"the model given as init has {depth} layers, wanted at most {layers}")
    grown = {name: tensor for name, tensor in state.items() if not name.startswith("layers.")}
    before = -1
    for layer, source in enumerate(layer * depth // layers for layer in range(layers)):
        for name in (name for name in state if name.startswith(f"layers.{source}.")):
            part = name.removeprefix(f"layers.{source}.")
            is_silent = source == before and part in ("attention.wo.weight", "feed_forward.w2.weight")
            grown[f"layers.{layer}.{part}"] = torch.zeros_like(state[name]) if is_silent else state[name].clone()
        before = source
    return grown


def check_fit(config: TransformerConfig, tokens: Int[Tensor, "n tokens"], captions: Conditions, vq: VQVAE) -> None:
    """Raise ValueError for a config of other sizes than the tokenizer, the images and the text encoder have."""
    sizes = {"vocab_size": vq.config.codebook_size, "block_size": tokens.shape[1]}
    if not captions.names:
        sizes["caption_dim"] = captions.features.shape[-1]
    for name, size in sizes.items():
        if (got := getattr(config, name)) != size:
            wanted = f"{size} for this tokenizer, these images and captions"
            raise ValueError(f"{name} of the model is {got}, wanted {wanted}")
    if (slots := captions.mask.shape[1]) > config.cls_token_num:
        raise ValueError(f"slots is {slots}, wanted at most the model's cls_token_num, {config.cls_token_num}")


class TargetTask(Task):
    """Next-token cross-entropy; `class_dropout_prob` of the conditions are replaced by the unconditional one.

    ValueError for sizes that do not fit together, and for a kind without prepared images.
    """

    def __init__(
        self, config: TargetConfig, prepared: Prepared, tokens: Tensor, captions: Conditions, vq: VQVAE
    ) -> None:
        super().__init__()
        self.config = config
        check_fit(config.model, tokens, captions, vq)
        torch.manual_seed(config.loop.seed)  # the unconditional caption is random and is not trained
        self.target = Transformer(config.model)
        self.target.init_weights(torch.Generator().manual_seed(config.loop.seed))
        for block in self.target.layers:
            block.attention.wo.weight.data.zero_()
            block.feed_forward.w2.weight.data.zero_()
        self._tokens, self._captions, self.frozen = tokens, captions, (vq.eval(),)
        self.batch_tokens = config.batch * tokens.shape[1]
        columns = min(config.corruption_neighbours, config.model.vocab_size - 1)
        self._near = proximity_table(vq.quantize.tokens().detach(), columns).long()
        records = captions.readable(prepared.records)
        pools = [[i for i, r in enumerate(records) if r.kind == kind and r.split == "train"] for kind in config.kinds]
        if empty := [kind for kind, pool in zip(config.kinds, pools, strict=True) if not pool]:
            raise ValueError(f'no prepared images of kind "{empty[0]}": prepare them or leave it out of "kinds"')
        held = [i for i, r in enumerate(records) if r.kind == "plain" and r.split == "heldout"][:64]
        self._pool = torch.tensor([record for pool in pools for record in pool])
        self._pool_sizes = torch.tensor([len(pool) for pool in pools])
        self._held = held_or_trained(held, pools[0])
        self._images = torch.tensor([r.image for r in records])
        # of record r: its captions, and the running sums of their weights but the last, with padding that none reaches
        rows = [torch.tensor([captions.index[text] for text, _ in r.captions]) for r in records]
        weights = [torch.tensor([weight for _, weight in r.captions], dtype=torch.float64) for r in records]
        self._caption_rows = pad_sequence(rows, True)
        self._caption_edges = pad_sequence([(w.cumsum(0) / w.sum())[:-1] for w in weights], True, 1.0)
        self._loss = torch.compile(self._token_loss) if config.compile else self._token_loss

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return Muon on the matrices of the layers and AdamW on the rest."""
        config = self.config
        named = dict(self.target.named_parameters())
        is_matrix = {name: name.startswith("layers.") and p.ndim == 2 for name, p in named.items()}
        matrices, rest = ([p for name, p in named.items() if is_matrix[name] == kind] for kind in (True, False))
        return [
            torch.optim.Muon(matrices, lr=config.matrix_lr, weight_decay=config.weight_decay, momentum=0.95),
            torch.optim.AdamW(rest, lr=config.other_lr, betas=(0.9, 0.95), weight_decay=config.weight_decay),
        ]

    def _examples(
        self, records: Int[Tensor, " b"], uniforms: Float[Tensor, " b"] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return features, mask and tokens of records: of their first captions, or of those that uniforms select.

        Features of captions are in fp32; those of classes are their numbers.
        """
        chosen = 0 if uniforms is None else (self._caption_edges[records] <= uniforms[:, None]).sum(1)
        rows = self._caption_rows[records, chosen]
        tokens = self._tokens[self._images[records]].long()
        features = self._captions.features[rows]
        return features.float() if features.is_floating_point() else features, self._captions.mask[rows], tokens

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return caption features, their mask, tokens, input tokens, and which captions are dropped."""
        generator = step_generator(self.config.loop.seed, step, rank)
        size, weights = self.config.batch, torch.tensor([float(weight) for weight in self.config.kinds.values()])
        kinds = torch.multinomial(weights, size, replacement=True, generator=generator)
        uniforms = torch.rand(4, size, generator=generator, dtype=torch.float64)
        before = self._pool_sizes.cumsum(0) - self._pool_sizes
        records = self._pool[before[kinds] + (uniforms[0] * self._pool_sizes[kinds]).long()]
        is_dropped = uniforms[1] < self.config.model.class_dropout_prob
        features, mask, tokens = self._examples(records, uniforms[3])
        given = self._corrupt(tokens, uniforms[2] * self.config.corruption, generator)
        return tuple(t.to(device) for t in (features, mask, tokens, given, is_dropped))

    def _corrupt(self, tokens: Int[Tensor, "b n"], shares: Float[Tensor, " b"], generator: torch.Generator) -> Tensor:
        """Return the tokens with a share of each image's replaced by near ones or by those of the next image."""
        place = torch.rand(tokens.shape, generator=generator)
        column = torch.randint(0, self._near.shape[1], tokens.shape, generator=generator)
        others = self.config.corruption_others
        replaced = torch.where(place < shares[:, None] * others, tokens.roll(1, 0), self._near[tokens, column])
        return torch.where(place < shares[:, None], replaced, tokens)

    def _token_loss(
        self,
        features: Float[Tensor, "b t c"] | Int[Tensor, " b"],
        mask: Bool[Tensor, "b t"],
        tokens: Int[Tensor, "b n"],
        given: Int[Tensor, "b n"],
        is_dropped: Bool[Tensor, " b"],
    ) -> Float[Tensor, "b n"]:
        target, slots = self.target, mask.shape[1]
        embed = target.cls_embedding
        prefix = torch.where(is_dropped[:, None, None], embed.unconditional(features), embed(features))
        inputs = torch.cat([prefix, target.tok_embeddings(given[:, :-1])], dim=1)
        first = self.config.model.cls_token_num - slots
        positions = torch.arange(first, first + inputs.shape[1], device=tokens.device)[None]
        # plain products take half the time of the fused kernel there
        is_plain = inputs.shape[1] <= SHORT and inputs.device.type == "cpu"
        with sdpa_kernel(SDPBackend.MATH) if is_plain else nullcontext():
            out = target.features(inputs, positions, prefix_mask(mask, tokens.shape[1] - 1))
        logits = target.output(out[:, slots - 1 :])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="none").view(tokens.shape)

    def forward(self, *batch: Tensor) -> dict[str, Tensor]:
        """Return the mean cross-entropy in nats per token."""
        switches = torch.backends.cuda  # of a CPU too, where plain products of attention in bf16 are else in fp32
        before = switches.fp16_bf16_reduction_math_sdp_allowed()
        switches.allow_fp16_bf16_reduction_math_sdp(True)
        try:
            return {"loss": self._loss(*batch).mean()}
        finally:
            switches.allow_fp16_bf16_reduction_math_sdp(before)

    def evaluate(self) -> dict[str, float]:
        """Return the cross-entropy on held-out images (nats per token) and the gain by captions (nats per image)."""
        losses = {}
        device = self.target.norm.weight.device
        features, mask, tokens = (t.to(device) for t in self._examples(self._held))
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.loop.precision == "bf16"):
            for name, flag in (("loss", False), ("loss_without_caption", True)):
                dropped = torch.full((len(tokens),), flag, device=device)
                losses[name] = float(self._token_loss(features, mask, tokens, tokens, dropped).mean())
        gain = (losses["loss_without_caption"] - losses["loss"]) * tokens.shape[1]
        return {**losses, "caption_nats_per_picture": gain}

    def sample(self, path: Path) -> None:
        """Write images sampled for sixteen training captions, above the images of these captions."""
        pool = self._pool[: int(self._pool_sizes[0])]
        records = pool[:: max(1, len(pool) // 16)][:16]
        features, mask, tokens = self._examples(records)
        device, vq = self.target.norm.weight.device, cast(VQVAE, self.frozen[0])
        condition = self._captions.condition(features.to(device), mask.to(device))
        keys = [(0, i) for i in range(len(records))]
        made = generate(self.target, condition, sampling=Sampling(guidance=2.0), keys=keys)
        save_sheet(decode(vq, torch.cat([made.tokens.cpu(), tokens])), path, columns=16)

    def export(self, folder: Path) -> None:
        """Write the target to `folder/transformer`; of a class-conditional one the names of the classes as well."""
        save_component(self.target.state_dict(), self.config.model, folder / "transformer", dtype=torch.bfloat16)
        if self._captions.names:
            write_json(folder / "transformer" / CLASSES_NAME, {"classes": self._captions.names})


def train(
    config: TargetConfig,
    *,
    out: Path,
    data: Path,
    vq: Path,
    text_encoder: Path | None = None,
    tokenizer: Path | None = None,
    init: Path | None = None,
) -> None:
    """Train a target on prepared images and write `out/transformer`; resume what `out` holds.

    A target of type t2i needs a text encoder; ValueError without one. `init` is a trained target to start from, of the
    same width and the same or a smaller depth.
    """
    prepared, pictures = Prepared.open(data), load_component(VQVAE, VQConfig, vq)
    if config.model.model_type == "c2i":
        captions, read = number_classes(prepared), ""
        config = replace(config, model=replace(config.model, num_classes=len(captions.names)))
    elif text_encoder is None:
        raise ValueError("the target takes captions, got no text encoder: give --text-encoder")
    else:
        encoder = TextEncoder.from_pretrained(text_encoder, tokenizer)
        read = captions_name(text_encoder, tokenizer, prepared, slots=config.slots)
        captions = encode_captions(encoder, prepared, out / read, slots=config.slots)
    tokens = picture_tokens(pictures, prepared, vq_folder=vq, cache=out, unify=config.unify_background)
    task = TargetTask(config, prepared, tokens, captions, pictures)
    if init is not None:
        grown = grow(load_state(init), config.model.n_layer)
        check_state(grown, task.target.state_dict(), source=init)
        task.target.load_state_dict(grown)
    about = f"{prepared.source} {sha256_of(vq / WEIGHTS_NAME)} {read}"
    run_loop(task, config.loop, out=out, init=init, source=about)
