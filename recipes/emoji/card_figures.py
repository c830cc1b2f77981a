"""The figures of a model card, each a function of a study; contact sheets; sizes and hashes of weights."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from lantern.core.io import WEIGHTS_NAME
from lantern.eval.metrics import efficientnet, retrieval
from lantern.eval.metrics.reconstruction import codebook_use, decode, mean_squared_error, psnr
from lantern.generation.images import save_sheet, sheet, to_image
from lantern.training.data import Record
from recipes.emoji import memorisation
from recipes.emoji.likelihood import nats
from recipes.emoji.memorisation import nearest_pixels, report, share
from recipes.emoji.study import Painting, Study, styled_caption, usual_caption

if TYPE_CHECKING:
    from PIL.Image import Image

Figure = dict[str, Any]
SHEET_NAME, NEAREST_NAME = "contact_sheet.png", "nearest_training.png"
REFERENCE_GUIDANCE = 3.0


def reconstruction(study: Study) -> Figure:
    """Return PSNR of reconstructed held-out cells, and codebook use by the training images."""
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
    """Return nats per code of held-out cells and of as many training cells."""
    held = study.some(study.records("heldout"))
    seen = study.some(study.records("train"), most=len(held))
    return {"heldout": caption_losses(study, held), "training": caption_losses(study, seen)}


def caption_losses(study: Study, records: Sequence[Record]) -> Figure:
    """Return the loss with the usual caption, with a caption with style, and without; gains in nats per image."""
    codes = study.training_codes(study.images_of(records))
    usual, styled = [usual_caption(r) for r in records], [styled_caption(r) for r in records]
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
    """Return the mean loss over images and codes."""
    total = 0.0
    for first in study.bar(range(0, len(codes), study.batch), "loss"):
        part = slice(first, first + study.batch)
        condition = study.condition(captions[part])
        given = codes[part].to(study.model.device)
        total += float(nats(study.target, condition, given, has_caption=has_caption).double().sum())
    return total / codes.numel()


def entropy(study: Study) -> Figure:
    """Return the entropy of p at temperature 1 over the contact sheet, at guidance 3 and the model's own."""
    prompts = study.sheet_prompts()
    scales = dict.fromkeys((REFERENCE_GUIDANCE, float(study.sampling.guidance)))
    found = {f"{scale:g}": study.paint(prompts, guidance=scale).entropy.summary() for scale in scales}
    return {"pictures": len(prompts.texts), "guidance": found, "drawn_with": sampled_with(study)}


def retrieval_accuracy(study: Study) -> Figure:
    """Return retrieval accuracy of generated images by set of prompts, and of real images for comparison.

    Where the model's folder lists the names whose images are recognised, chosen on images of other seeds, their part of
    the trained concepts and of the synonyms has figures of its own.
    """
    gallery = study.gallery
    result: Figure = {
        "network": efficientnet.NAME,
        "concepts": len(gallery.concepts),
        "chance_top1": round(1 / len(gallery.concepts), 5),
        "chance_top5": round(min(5 / len(gallery.concepts), 1), 5),
        "drawn_with": sampled_with(study),
    }
    sets = [study.trained_prompts(), study.styled_prompts(), study.heldout_prompts()]
    sets += [study.synonym_prompts(), study.synonym_prompts(by_name=True)]
    for prompts in sets:
        labels = torch.tensor([gallery.label(concept) for concept in prompts.concepts])
        similarity = gallery.similarity(study.features(study.paint(prompts).pictures))
        found = retrieval.ranks(similarity, labels)
        missed = retrieval.misses(gallery, similarity, prompts.texts, found)
        result[prompts.name] = retrieval.accuracy(found, seed=study.seed) | {"missed_top5": missed}
        is_listed = torch.tensor([concept in study.recognised for concept in prompts.concepts])
        if prompts.name in ("trained", "synonyms_by_name") and is_listed.any():
            result[f"{prompts.name}_recognised"] = retrieval.accuracy(found[is_listed], seed=study.seed)
    return result | real_retrieval(study)


def real_retrieval(study: Study) -> Figure:
    """Return accuracy of real images: reconstructions, held-out ones, and all among other styles only."""
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
    """Return the ranks of images by the concepts of their records."""
    labels = torch.tensor([study.gallery.label(r.concepts[0]) for r in records])
    return retrieval.ranks(study.gallery.similarity(study.features(pictures)), labels)


def memorised(study: Study) -> Figure:
    """Return distances of generated images, and of held-out ones, to the nearest training images."""
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
        "drawn_with": sampled_with(study),
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
    """Return the distance to the nearest training image over the tokenizer's error on it, and a summary."""
    nearest = nearest_pixels(pictures, originals)
    expected = originals[nearest.index]
    encoded = study.encode(expected)
    own_error = mean_squared_error(decode(study.vq, encoded), expected).sqrt()
    ratio = nearest.rmse / own_error.clamp(min=0.5)
    return ratio, report(ratio, (codes == encoded).double().mean(1))


def feature_nearness(study: Study, pictures: UInt8[Tensor, "b 3 h w"]) -> Figure:
    """Return the cosine to the nearest plain training image in the network's features."""
    best = (study.features(pictures) @ study.gallery.features.T).amax(1)
    return {"feature_cosine_mean": share(best), "feature_cosine_median": round(float(best.median()), 4)}


def save_nearest(study: Study, pictures: Tensor, originals: Tensor, ratio: Float[Tensor, " b"]) -> None:
    """Write sixteen generated images, from nearest to farthest, each above its nearest training image."""
    order = ratio.argsort()
    columns = min(8, len(order))
    count = 16 if len(order) >= 16 else columns
    chosen = order[torch.linspace(0, len(order) - 1, count).round().long()]
    nearest = nearest_pixels(pictures[chosen], originals)
    rows, labels = [], []
    for part in torch.arange(count).split(columns):
        rows += [pictures[chosen[part]], originals[nearest.index[part]]]
        labels += [f"generated, {ratio[chosen[i]]:.2f} x error" for i in part] + ["nearest training"] * len(part)
    save_sheet(labelled_sheet(torch.cat(rows), labels, columns=columns), study.pictures / NEAREST_NAME)


def contact_sheet(study: Study) -> Figure:
    """Write the contact sheet beside the card; `recognised` is filled in by a person."""
    prompts = study.sheet_prompts()
    painting: Painting = study.paint(prompts)
    path = study.pictures / SHEET_NAME
    save_sheet(labelled_sheet(painting.pictures, prompts.texts, columns=8), path)
    digest = hashlib.sha256(painting.codes.short().numpy().tobytes()).hexdigest()
    figure = {"prompts": len(prompts.texts), "file": SHEET_NAME, "bytes": path.stat().st_size, "codes_sha256": digest}
    return figure | {"drawn_with": sampled_with(study), "recognised": None}


def sampled_with(study: Study) -> Figure:
    """Return the sampling settings of the images."""
    return dataclasses.asdict(study.sampling) | {"seed": study.seed, "method": "plain", "batch": study.batch}


FIGURES: dict[str, Callable[[Study], Figure]] = {
    "reconstruction": reconstruction,
    "loss": loss,
    "entropy": entropy,
    "retrieval": retrieval_accuracy,
    "memorisation": memorised,
    "sheet": contact_sheet,
}


def labelled_sheet(
    pictures: UInt8[Tensor, "n 3 h w"], labels: Sequence[str], *, columns: int, scale: int = 2, lines: int = 2
) -> "Image":
    """Return images scaled by `scale`, each above its label of at most `lines` lines."""
    enlarged = pictures.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    images = [to_image(picture) for picture in enlarged.permute(0, 2, 3, 1).contiguous()]
    return sheet(images, columns=columns, labels=labels, lines=lines)


def component_sizes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return parameters and bytes of every component folder with weights."""
    found = {path.parent.name: path for path in sorted(folder.glob(f"*/{WEIGHTS_NAME}"))}
    return {
        name: {"parameters": count_parameters(path), "bytes": bytes_of_weights(path.parent)}
        for name, path in found.items()
    }


def bytes_of_weights(folder: Path) -> int:
    """Return the bytes of all safetensors files of a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def count_parameters(path: Path) -> int:
    """Return the number of parameters in a safetensors file, without the scales of int8 rows."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if not name.endswith(".scale")]  # noqa: SIM118 - no mapping
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
