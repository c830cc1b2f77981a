"""`python -m recipes.emoji.card DATA`: figures of the embedded model's card, and its contact sheet."""

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

from lantern.cli.command import DONE, OneOf, arg, command, existing, opt, run_command
from lantern.cli.options import MAX_SEED, MODEL
from lantern.core.io import atomic_write
from lantern.decoding.cache import prefill, read_tokens
from lantern.training.features import decode, encode, picture_tokens
from lantern.training.tokenizer import reconstruction

if TYPE_CHECKING:
    from lantern.core.types import Condition, Target
    from lantern.models.folder import Model

PROMPTS = Path(__file__).resolve().parents[2] / "assets" / "prompts" / "contact_sheet.txt"
BATCH = 8  # images at a time; larger batches are slower on a CPU because of memory traffic
COPY_RATIO = 1.5  # a copy is nearer than this multiple of the tokenizer's own error


def card(
    data: Path = arg("folder written by `lantern train data`", type=existing),
    model: str = MODEL,
    images: int = opt(200, "images of each figure", 1, 10**5),
    seed: int = opt(0, "seed of noise and choices", 0, MAX_SEED),
    dtype: str = opt("fp32", "of the target: fp32 or bf16", type=OneOf(("fp32", "bf16"))),
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
    prompts = [line for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line.strip()]
    sheeted = generate(loaded, prompts, seed=seed, method="plain", batch=32)
    shown = [files.to_image(one.pixels) for one in sheeted if one.pixels is not None]
    with atomic_write(sheet) as temporary:
        files.sheet(shown, columns=8, labels=prompts).save(temporary, format="PNG", optimize=True)
    print(json.dumps(found, ensure_ascii=False, indent=1))
    return DONE


def losses(model: "Model", captions: Sequence[str], tokens: Int[Tensor, "n tokens"]) -> dict[str, float]:
    """Return the mean loss in nats per token with the caption and without one."""
    text, target, found = model.text, model.target, []
    assert text is not None
    for first in range(0, len(tokens), BATCH):
        part = slice(first, first + BATCH)
        condition = text.condition(captions[part], slots=target.config.cls_token_num)
        found.append(nats(target, condition, tokens[part]))
    caption, none = torch.cat(found).double().mean((0, 2)).tolist()
    return {"caption": caption, "none": none}


@torch.no_grad()
def nats(target: "Target", condition: "Condition", tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b 2 n"]:
    """Return -log p of each token given the tokens before it, with the caption and with the unconditional one."""
    prompt, cache = prefill(target, condition, 2, stage=0)
    read, _ = read_tokens(target, cache, tokens[:, :-1])
    logits = target.head(torch.cat([prompt.features[:, :, -1:], read.features], 2))
    return F.cross_entropy(logits.movedim(-1, 1), tokens[:, None].expand(-1, 2, -1), reduction="none")


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
