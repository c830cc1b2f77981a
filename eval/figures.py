"""The figures of a model card: each is a function from a study to what is written down of it."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from lantern.eval import efficientnet, memorisation, retrieval
from lantern.eval.likelihood import nats
from lantern.eval.memorisation import nearest_pixels, report, share
from lantern.eval.reconstruction import codebook_use, decode, mean_squared_error, psnr
from lantern.eval.sheet import labelled_sheet, save_sheet
from lantern.eval.study import Painting, Study, styled_caption, usual_caption
from lantern.training.data import Record

Figure = dict[str, Any]
SHEET_NAME, NEAREST_NAME = "contact_sheet.png", "nearest_training.png"
REFERENCE_GUIDANCE = 3.0


def reconstruction(study: Study) -> Figure:
    """What the tokenizer keeps of held-out cells, and how many of its codes the training pictures use."""
    held = study.images_of(study.some(study.records("heldout")))
    training = study.images_of(study.some(study.records("train", None)))
    found = psnr(decode(study.vq, study.encode(held)), held)
    use = codebook_use(study.encode(training), study.vq.config.codebook_size)
    return {
        "heldout_pictures": len(held),
        "psnr_db": round(float(found.mean()), 3),
        "psnr_db_worst": round(float(found.min()), 3),
        "training_pictures": len(training),
        "codebook_size": study.vq.config.codebook_size,
        "codebook_used": round(use.used, 4),
        "perplexity": round(use.perplexity, 1),
    }


def loss(study: Study) -> Figure:
    """Nats per code of held-out cells, and of as many training cells beside them."""
    held = study.some(study.records("heldout"))
    seen = study.some(study.records("train"), most=len(held))
    return {"heldout": caption_losses(study, held), "training": caption_losses(study, seen)}


def caption_losses(study: Study, records: Sequence[Record]) -> Figure:
    """Loss with the usual caption, with one that tells the style too, and without; gains in nats per picture."""
    codes = study.settled(study.images_of(records))
    usual, styled = ([say(r) for r in records] for say in (usual_caption, styled_caption))
    named = mean_nats(study, usual, codes)
    with_style = mean_nats(study, styled, codes)
    without = mean_nats(study, usual, codes, has_caption=False)
    return {
        "pictures": len(records),
        "nats_per_code": round(named, 4),
        "nats_per_code_with_style": round(with_style, 4),
        "nats_per_code_without_caption": round(without, 4),
        "caption_nats_per_picture": round((without - named) * codes.shape[1], 2),
        "caption_with_style_nats_per_picture": round((without - with_style) * codes.shape[1], 2),
    }


def mean_nats(study: Study, captions: Sequence[str], codes: Tensor, *, has_caption: bool = True) -> float:
    """Mean loss over pictures and codes."""
    total = 0.0
    for first in study.bar(range(0, len(codes), study.batch), "loss"):
        part = slice(first, first + study.batch)
        condition = study.condition(captions[part])
        target, given = study.model.target, codes[part].to(study.model.device)
        total += float(nats(target, condition, given, has_caption=has_caption).double().sum())
    return total / codes.numel()


def entropy(study: Study) -> Figure:
    """Entropy of p at temperature 1 along the pictures of the contact sheet, at guidance 3 and at the model's own."""
    prompts = study.sheet_prompts()
    scales = dict.fromkeys((REFERENCE_GUIDANCE, float(study.sampling.guidance)))
    laws = {f"{scale:g}": study.paint(prompts, guidance=scale).entropy.summary() for scale in scales}
    return {"pictures": len(prompts.texts), "guidance": laws, "drawn_with": drawn_with(study)}


def retrieval_accuracy(study: Study) -> Figure:
    """Whether generated pictures are nearest to their own concept, by set of prompts; and how real pictures fare."""
    gallery = study.gallery
    result: Figure = {
        "network": efficientnet.NAME,
        "concepts": len(gallery.concepts),
        "chance_top1": round(1 / len(gallery.concepts), 5),
        "chance_top5": round(min(5 / len(gallery.concepts), 1), 5),
        "drawn_with": drawn_with(study),
    }
    sets = (study.trained_prompts(), study.styled_prompts(), study.heldout_prompts(), study.synonym_prompts())
    for prompts in sets:
        labels = torch.tensor([gallery.label(concept) for concept in prompts.concepts])
        similarity = gallery.similarity(study.features(study.paint(prompts).pictures))
        found = retrieval.ranks(similarity, labels)
        missed = retrieval.misses(gallery, similarity, prompts.texts, found)
        result[prompts.name] = retrieval.accuracy(found, seed=study.seed) | {"missed_top5": missed}
    return result | real_retrieval(study)


def real_retrieval(study: Study) -> Figure:
    """How real pictures fare: reconstructions of trained ones, held-out ones, and all among other styles alone."""
    cells = study.styled_cells()
    held = study.some(study.records("heldout"))
    rebuilt = decode(study.vq, study.encode(study.images_of(cells)))
    found = {
        "reconstructed": real_ranks(study, cells, rebuilt),
        "heldout_real": real_ranks(study, held, study.images_of(held)),
        "real_across_styles": retrieval.ranks(*study.gallery.of_other_styles()),
    }
    return {name: retrieval.accuracy(those, seed=study.seed) for name, those in found.items()}


def real_ranks(study: Study, records: Sequence[Record], pictures: UInt8[Tensor, "b 3 h w"]) -> Int[Tensor, " b"]:
    """Ranks of pictures whose records tell what they show."""
    labels = torch.tensor([study.gallery.label(r.concepts[0]) for r in records])
    return retrieval.ranks(study.gallery.similarity(study.features(pictures)), labels)


def memorised(study: Study) -> Figure:
    """How near generated pictures lie to training pictures, and how near pictures lie that were never trained on."""
    training = study.records("train", None)
    originals = study.images_of(training)
    sets = (study.trained_prompts(), study.styled_prompts())
    made = [study.paint(prompts) for prompts in sets]
    pictures = torch.cat([m.pictures for m in made])
    ratios, figure = nearness(study, pictures, torch.cat([m.codes for m in made]), originals)
    held = study.images_of(study.some(study.records("heldout")))
    _, reference = nearness(study, held, study.encode(held), originals)
    save_nearest(study, pictures, originals, ratios)
    return {
        "drawn_with": drawn_with(study),
        "copy_ratio": memorisation.COPY_RATIO,
        "same_codes_bound": memorisation.SAME_CODES,
        "training_pictures": len(training),
        "generated": figure | feature_nearness(study, pictures),
        "heldout_real": reference | feature_nearness(study, held),
        "sheet": NEAREST_NAME,
    }


def nearness(
    study: Study, pictures: UInt8[Tensor, "b 3 h w"], codes: Tensor, originals: UInt8[Tensor, "n 3 h w"]
) -> tuple[Float[Tensor, " b"], Figure]:
    """Distance to the nearest training picture over the tokenizer's own error of that picture, and a report of it."""
    nearest = nearest_pixels(pictures, originals)
    wanted = originals[nearest.index]
    encoded = study.encode(wanted)
    own_error = mean_squared_error(decode(study.vq, encoded), wanted).sqrt()
    ratio = nearest.rmse / own_error.clamp(min=0.5)
    return ratio, report(ratio, (codes == encoded).double().mean(1))


def feature_nearness(study: Study, pictures: UInt8[Tensor, "b 3 h w"]) -> Figure:
    """Cosine to the nearest plain training picture in the network's features."""
    best = (study.features(pictures) @ study.gallery.features.T).amax(1)
    return {"feature_cosine_mean": share(best), "feature_cosine_median": round(float(best.median()), 4)}


def save_nearest(study: Study, pictures: Tensor, originals: Tensor, ratio: Float[Tensor, " b"]) -> None:
    """Sixteen generated pictures, evenly spaced from nearest to farthest, each above its nearest training picture."""
    order = ratio.argsort()
    columns = min(8, len(order))
    count = 16 if len(order) >= 16 else columns
    chosen = order[torch.linspace(0, len(order) - 1, count).round().long()]
    nearest = nearest_pixels(pictures[chosen], originals)
    rows, labels = [], []
    for part in torch.arange(count).split(columns):
        rows += [pictures[chosen[part]], originals[nearest.index[part]]]
        labels += [f"made, {ratio[chosen[i]]:.2f} x error" for i in part] + ["nearest training"] * len(part)
    save_sheet(labelled_sheet(torch.cat(rows), labels, columns=columns), study.pictures / NEAREST_NAME)


def contact_sheet(study: Study) -> Figure:
    """The contact sheet, written beside the card; what a person recognises on it is for a person to say."""
    prompts = study.sheet_prompts()
    painting: Painting = study.paint(prompts)
    sheet = labelled_sheet(painting.pictures, prompts.texts, columns=8)
    size = save_sheet(sheet, study.pictures / SHEET_NAME)
    digest = hashlib.sha256(painting.codes.short().numpy().tobytes()).hexdigest()
    figure = {"prompts": len(prompts.texts), "file": SHEET_NAME, "bytes": size, "codes_sha256": digest}
    return figure | {"drawn_with": drawn_with(study), "recognised": None}


def drawn_with(study: Study) -> Figure:
    """How pictures were drawn."""
    return dataclasses.asdict(study.sampling) | {"seed": study.seed, "method": "plain", "batch": study.batch}


FIGURES: dict[str, Callable[[Study], Figure]] = {
    "reconstruction": reconstruction,
    "loss": loss,
    "entropy": entropy,
    "retrieval": retrieval_accuracy,
    "memorisation": memorised,
    "sheet": contact_sheet,
}
