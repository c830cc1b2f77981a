"""Conditions of a pipeline's call that are not just prompts: caption embeddings, and negative captions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.generation.requests import Request, check_prompt, check_requests, texts_of

if TYPE_CHECKING:
    from lantern.models.folder import Model


def with_conditions(
    model: "Model",
    subjects: Sequence[Request],
    sampling: Sampling,
    *,
    prompt_embeds: Any = None,
    prompt_attention_mask: Any = None,
    negative_prompt: Any = None,
    negative_prompt_embeds: Any = None,
    negative_prompt_attention_mask: Any = None,
) -> list[Request]:
    """Return the subjects of a call with their conditions, unless prompts or classes are all there is.

    The arguments are those of `LanternPipeline.__call__`; with `prompt_embeds` each of its rows is a subject.
    ValueError names an argument that does not fit the model, the other arguments, or guidance, without which a negative
    prompt has no effect; TypeError one of another type.
    """
    texts = [] if negative_prompt is None else texts_of(negative_prompt, "negative_prompt")
    found = given_condition(model, prompt_embeds, prompt_attention_mask, name="prompt")
    negative = given_condition(model, negative_prompt_embeds, negative_prompt_attention_mask, name="negative_prompt")
    if found is not None and subjects:
        raise ValueError("a call takes prompt or prompt_embeds: give one of them")
    if any(texts):
        check_captions(model, "negative_prompt")
        if negative is not None:
            raise ValueError("a call takes negative_prompt or negative_prompt_embeds: give one of them")
        if not all(texts):
            raise ValueError("negative_prompt is empty for some prompts: give a text for each, or none")
        negative = captions(model, [check_prompt(text) for text in texts])
    if found is None and negative is None:
        return list(subjects)
    if found is None:
        check_requests(model, subjects)
        found = captions(model, [model.read(subject.prompt or "") for subject in subjects])
    images = found.batch
    if negative is not None:
        check_captions(model, "negative_prompt", sampling)
        if negative.batch not in (1, images):
            wanted = "1" if images == 1 else f"1 or {images}"
            raise ValueError(f"got {negative.batch} negative prompts for {images} images, wanted {wanted}")
        repeats = images // negative.batch
        found = replace(found, negative=negative.select([*range(negative.batch)] * repeats))
        texts = texts * repeats
    return [
        replace(subject, condition=found.select([i]), negative_prompt=text or None)
        for i, (subject, text) in enumerate(zip(subjects or [Request()] * images, texts or [""] * images, strict=True))
    ]


def check_captions(model: "Model", name: str, sampling: Sampling | None = None) -> None:
    """Raise ValueError if the model takes no caption embeddings, which the argument of this name needs.

    Given the sampling, also if that takes no negative caption.
    """
    if not model.takes_prompts or model.target.config.family != "llamagen":
        takes = "prompts as tokens" if model.takes_prompts else "class labels"
        raise ValueError(f"{name} is not supported: model {model.name} takes {takes}, not caption embeddings")
    if sampling is not None and sampling.rows != 2:
        raise ValueError("negative_prompt has no effect without guidance: give guidance above 1")


def given_condition(model: "Model", embeddings: Any, mask: Any, *, name: str) -> Condition | None:
    """Return caption embeddings (b slots channels) with their mask (b slots) as a condition of all the model's slots.

    None without embeddings. Fewer slots are padded on the left; without a mask no slot is padding. ValueError for
    another shape, for values that are not finite, for a model without captions, and for a mask without embeddings, with
    padding behind words or without a word; TypeError for what is no tensor of floating-point numbers.
    """
    if embeddings is None and mask is not None:
        raise ValueError(f"{name}_attention_mask is given without {name}_embeds: give both")
    if embeddings is None:
        return None
    config, name = model.target.config, f"{name}_embeds"
    check_captions(model, name)
    if not isinstance(embeddings, Tensor) or not embeddings.is_floating_point():
        got = str(embeddings.dtype) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        raise TypeError(f"{name} is {got}, wanted a tensor of floating-point numbers, as encode_prompt returns")
    slots, width = config.cls_token_num, config.caption_dim
    if embeddings.ndim != 3 or embeddings.shape[2] != width or not 1 <= embeddings.shape[1] <= slots:
        raise ValueError(f"{name} has shape {list(embeddings.shape)}, wanted [b, 1 to {slots}, {width}]")
    if not bool(torch.isfinite(embeddings).all()):
        raise ValueError(f"{name} holds NaN or infinity")
    mask = torch.ones(embeddings.shape[:2]) if mask is None else mask
    if not isinstance(mask, Tensor) or mask.shape != embeddings.shape[:2]:
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"the attention mask of {name} is {got}, wanted {list(embeddings.shape[:2])}")
    seen = mask.to(model.device, torch.bool)
    if bool((seen[:, 1:] < seen[:, :-1]).any()) or not bool(seen[:, -1].all()):
        raise ValueError(f"the attention mask of {name} has padding behind words, or no word: wanted it on the left")
    missing = slots - embeddings.shape[1]
    shown = embeddings.to(model.device, model.dtype).masked_fill(~seen[..., None], 0)
    return Condition(embeddings=pad(shown, (0, 0, missing, 0)), mask=pad(seen, (missing, 0)))


def captions(model: "Model", texts: Sequence[str]) -> Condition:
    """Return the condition of some texts, of which equal ones are encoded once; ValueError without a text encoder."""
    if model.text is None:
        raise ValueError(f"model {model.name} has no text encoder, which prompts need: give embeddings")
    unique = list(dict.fromkeys(texts))
    found = model.text.condition(unique, slots=model.target.config.cls_token_num)
    return found.select([unique.index(text) for text in texts])
