"""`python -m recipes.emoji.card --data FOLDER`: figures of the embedded model's card, and its contact sheet."""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from lantern.cli.command import DONE, Command, run_command
from lantern.cli.options import existing, integer
from lantern.models.llamagen.vqvae import to_pixels, to_uint8
from lantern.training.target import prefix_mask

if TYPE_CHECKING:
    from lantern.core.types import Condition
    from lantern.models.folder import Model
    from lantern.models.llamagen.transformer import Transformer
    from lantern.models.llamagen.vqvae import VQVAE

PROMPTS = Path(__file__).resolve().parents[2] / "assets" / "prompts" / "contact_sheet.txt"
BATCH = 8  # images at a time; larger batches are slower on a CPU because of memory traffic
COPY_RATIO = 1.5  # a copy is nearer than this multiple of the tokenizer's own error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--model", default="lantern-emoji", help="name, folder or hub id of the model")
    add("--data", type=existing, required=True, help="folder written by `lantern train data`")
    add("--images", type=integer(1, 10**5), default=200, help="images of each figure (default 200)")
    add("--seed", type=integer(0, 2**63 - 1), default=0, help="seed of noise and choices (default 0)")
    add("--sheet", type=Path, default=Path("contact_sheet.png"), help="file of the contact sheet")


def run(args: argparse.Namespace) -> int:
    """Print the figures as one JSON object and write the contact sheet."""
    from lantern.eval.speed.surroundings import about
    from lantern.generation.generator import generate
    from lantern.generation.images import save_sheet, sheet, to_image
    from lantern.models.folder import load_model
    from lantern.training.data import Prepared

    model, data = load_model(args.model, dtype="fp32", parts=("vq", "text")), Prepared.open(args.data)
    vq: Any = model.vq
    images, order = data.images(), torch.Generator().manual_seed(args.seed)
    chosen = {}
    for split in ("train", "heldout"):
        some = [record for record in data.records if (record.split, record.kind) == (split, "plain")]
        chosen[split] = [some[i] for i in torch.randperm(len(some), generator=order)[: args.images].tolist()]
    pictures = {name: images[[r.image for r in some]] for name, some in chosen.items()}
    captions = {name: [max(r.captions, key=lambda one: one[1])[0] for r in some] for name, some in chosen.items()}
    made = [one.pixels for one in generate(model, captions["train"], seed=args.seed, method="plain", batch=32)]
    generated = torch.stack([torch.as_tensor(one) for one in made]).permute(0, 3, 1, 2)
    found = {
        **about(model),
        "images": {name: len(some) for name, some in chosen.items()},
        "parameters": {"target": count(model.target), "vq": count(vq)},
        "reconstruction": reconstruction(vq, pictures),
        "nats_per_token": {name: losses(model, captions[name], encode(vq, pictures[name])) for name in pictures},
        "copies": {
            "generated": copies(vq, generated, pictures["train"]),
            "heldout": copies(vq, pictures["heldout"], pictures["train"]),
        },
    }
    prompts = [line for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line.strip()]
    sheeted = generate(model, prompts, seed=args.seed, method="plain", batch=32)
    shown = [to_image(one.pixels) for one in sheeted if one.pixels is not None]
    save_sheet(sheet(shown, columns=8, labels=prompts, lines=2), args.sheet)
    print(json.dumps(found, ensure_ascii=False, indent=1))
    return DONE


def count(module: Any) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


@torch.inference_mode()
def encode(vq: "VQVAE", pictures: UInt8[Tensor, "n 3 h w"]) -> Int[Tensor, "n tokens"]:
    """Encode images to tokens."""
    return torch.cat([vq.encode(to_pixels(block)) for block in pictures.split(BATCH)])


@torch.inference_mode()
def decode(vq: "VQVAE", tokens: Int[Tensor, "n tokens"]) -> UInt8[Tensor, "n 3 h w"]:
    """Decode tokens to images."""
    return torch.cat([to_uint8(vq.decode(part)).permute(0, 3, 1, 2) for part in tokens.split(BATCH)])


def reconstruction(vq: "VQVAE", pictures: dict[str, UInt8[Tensor, "n 3 h w"]]) -> dict[str, float]:
    """Return the PSNR of held-out images in dB, and the share and perplexity of the codebook on training images."""
    from lantern.eval.metrics.judges import psnr

    held = pictures["heldout"]
    counts = torch.bincount(encode(vq, pictures["train"]).flatten(), minlength=vq.config.codebook_size).double()
    entropy = torch.special.entr(counts / counts.sum()).sum()
    return {
        "psnr_db": float(psnr(decode(vq, encode(vq, held)), held).mean()),
        "codebook_used": float((counts > 0).double().mean()),
        "perplexity": float(entropy.exp()),
    }


def losses(model: "Model", captions: Sequence[str], tokens: Int[Tensor, "n tokens"]) -> dict[str, float]:
    """Return the mean loss in nats per token with the caption and without one."""
    text: Any = model.text
    target: Any = model.target
    total = {"caption": 0.0, "none": 0.0}
    for first in range(0, len(tokens), BATCH):
        part = slice(first, first + BATCH)
        condition = text.condition(captions[part], slots=target.config.cls_token_num)
        for name in total:
            found = nats(target, condition, tokens[part], has_caption=name == "caption")
            total[name] += float(found.double().sum())
    return {name: one / tokens.numel() for name, one in total.items()}


def copies(vq: "VQVAE", pictures: UInt8[Tensor, "b 3 h w"], training: UInt8[Tensor, "n 3 h w"]) -> float:
    """Return the share of images nearer to a training image than COPY_RATIO times the tokenizer's error on it."""
    # exact in float64, since squared norms of the bytes of an image are below 2 ** 53
    distance, nearest = torch.cdist(pictures.flatten(1).double(), training.flatten(1).double()).min(1)
    expected = training[nearest]
    error = (decode(vq, encode(vq, expected)).double() - expected).square().flatten(1).sum(1).sqrt()
    return float((distance < COPY_RATIO * error).double().mean())


@torch.inference_mode()
def nats(
    target: "Transformer", condition: "Condition", tokens: Int[Tensor, "b n"], *, has_caption: bool
) -> Float[Tensor, "b n"]:
    """Return -log p of each token given the tokens before it and the caption, or the unconditional caption."""
    assert condition.embeddings is not None and condition.mask is not None
    embed = target.cls_embedding if has_caption else target.cls_embedding.unconditional
    prefix = embed(condition.embeddings)
    slots = prefix.shape[1]
    inputs = torch.cat([prefix, target.tok_embeddings(tokens[:, :-1])], dim=1)
    first = target.config.cls_token_num - slots
    positions = torch.arange(first, first + inputs.shape[1], device=tokens.device).expand(len(tokens), -1)
    features = target.features(inputs, positions, prefix_mask(condition.mask, tokens.shape[1] - 1))
    return F.cross_entropy(target.head(features[:, slots - 1 :]).transpose(1, 2), tokens, reduction="none")


COMMAND = Command("card", "Compute the figures of the embedded model's card.", add_arguments, run)
main = partial(run_command, COMMAND, prog="python -m recipes.emoji.card")

if __name__ == "__main__":
    sys.exit(main())
