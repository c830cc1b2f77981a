"""Requests: which prompt or class an image shows, its condition and its noise; and prompts from files."""

import csv
import json
import secrets
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from lantern.core.config import as_number, check_key, check_number, one_line, shipped_folder

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from lantern.core.sampling import Sampling
    from lantern.core.types import Condition
    from lantern.models.folder import Model

OUTPUT_TYPES = ("pil", "pt", "np", "latent")
CALLBACK_TENSORS = ("tokens", "known")
MAX_EXACT_SEED = 2**53  # integers up to it are exact in every JSON reader; random seeds stay below it
MAX_PROMPT = 2000
MAX_FILE_BYTES = 64 << 20
KINDS = ("prompt", "negative prompt")
COLUMNS = ("prompt", "caption", "text")


@dataclass(frozen=True)
class Request:
    """One image to make: of a prompt or of a class, with the noise of (seed, image number).

    reading: what the text encoder reads in place of the prompt, "" for the prompt itself.
    warning: why the image will not be of its prompt, as `with_warnings` finds; the image's statistics have it.
    condition: conditioning of one image in place of what the text encoder makes of the prompt, which may then be None.
    negative_prompt: the text that guidance leads away from, or `negative`, its condition.
    forced: tokens (n) that the image keeps of another, -1 where they are generated, as `with_init_image` adds them.
    """

    prompt: str | None = None
    label: int | None = None
    seed: int = 0
    number: int = 0
    reading: str = field(default="", compare=False)
    warning: str | None = field(default=None, compare=False)
    condition: "Condition | None" = field(default=None, compare=False)
    negative_prompt: str | None = None
    negative: "Condition | None" = field(default=None, compare=False)
    forced: "Int[Tensor, ' n'] | None" = field(default=None, compare=False)

    @property
    def text(self) -> str | None:
        """What the text encoder reads."""
        return self.reading or self.prompt

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The prompt and the negative prompt where there are any, each with its kind."""
        return [(kind, text) for kind, text in zip(KINDS, (self.prompt, self.negative_prompt), strict=True) if text]

    @property
    def subject(self) -> str:
        """The prompt, "class N", or "embeddings"."""
        if self.prompt is None and self.label is None:
            return "embeddings"
        return self.prompt if self.prompt is not None else f"class {self.label}"


def as_requests(items: Sequence[Request | str | int], seed: int = 0) -> list[Request]:
    """Return requests as they are, and prompts (texts) and class labels (integers) as requests with this seed.

    The first occurrence of a prompt or class is its image 0, the next one its image 1, and so on.
    TypeError for items of other types.
    """
    seed = as_number(seed)
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise TypeError(f"requests are of type {type(items).__name__}, wanted a list of prompts or class labels")
    found, counts = list[Request](), Counter[str | int]()
    for item in map(as_number, items):
        if isinstance(item, Request):
            found.append(item)
            continue
        if not isinstance(item, str | int) or isinstance(item, bool):
            raise TypeError(f"a request is of type {type(item).__name__}, wanted a prompt, a class label or a Request")
        prompt, label = (item, None) if isinstance(item, str) else (None, item)
        found.append(Request(prompt, label, seed=seed, number=counts[item]))
        counts[item] += 1
    return found


def requests_of_call(
    model: "Model",
    sampling: "Sampling",
    *,
    prompt: Any = None,
    class_labels: Any = None,
    images: int = 1,
    generator: Any = None,
    prompt_embeds: Any = None,
    prompt_attention_mask: Any = None,
    negative_prompt: Any = None,
    negative_prompt_embeds: Any = None,
    negative_prompt_attention_mask: Any = None,
) -> list[Request]:
    """Return `images` requests for each prompt, class or row of `prompt_embeds`, one after another.

    The arguments are those of `LanternPipeline.__call__`. `generator` is a torch.Generator, a seed, a list with one of
    these per image, or None for a random seed. ValueError names an argument that does not fit the model, the
    other arguments, or guidance, without which a negative prompt has no effect; TypeError one of another type.
    """
    found = given_condition(model, prompt_embeds, prompt_attention_mask, name="prompt")
    if sum(one is not None for one in (prompt, class_labels, found)) != 1:
        raise ValueError("a call takes prompt, class_labels or prompt_embeds: give one of them")
    if found is not None:
        subjects = [Request(condition=found.select([i])) for i in range(found.batch)]
    elif prompt is not None:
        subjects = [Request(prompt=text) for text in texts_of(prompt, "prompt")]
    else:
        labels = list(class_labels) if isinstance(class_labels, Iterable) else [class_labels]
        if any(isinstance(label, bool) or not isinstance(label, SupportsIndex) for label in labels):
            raise TypeError(f"class_labels is {str(class_labels)[:40]!r}, wanted a whole number or a list of them")
        subjects = [Request(label=index(label)) for label in labels]
    texts = [] if negative_prompt is None else texts_of(negative_prompt, "negative_prompt")
    negative = given_condition(model, negative_prompt_embeds, negative_prompt_attention_mask, name="negative_prompt")
    if any(texts) and negative is not None:
        raise ValueError("a call takes negative_prompt or negative_prompt_embeds: give one of them")
    if any(texts) and not all(texts):
        raise ValueError("negative_prompt is empty for some prompts: give a text for each, or none")
    changes: list[dict[str, Any]] = [{"negative_prompt": check_prompt(text)} for text in texts if text]
    if negative is not None:
        changes = [{"negative": negative.select([i])} for i in range(negative.batch)]
    if changes:
        check_captions(model, "negative_prompt", sampling)
        if len(changes) not in (1, len(subjects)):
            raise ValueError(f"got {len(changes)} negative prompts for {len(subjects)} images, wanted 1 or one each")
        subjects = [replace(subject, **changes[i % len(changes)]) for i, subject in enumerate(subjects)]
    total = len(subjects) * images
    if isinstance(generator, list | tuple):
        if len(generator) != total:
            raise ValueError(f"got {len(generator)} generators for {total} images, wanted one each, or a single one")
        keys = [(_seed(one), 0) for one in generator]
    else:
        seed = secrets.randbelow(MAX_EXACT_SEED) if generator is None else _seed(generator)
        keys = [(seed, number) for _ in subjects for number in range(images)]
    repeated = [subject for subject in subjects for _ in range(images)]
    return [replace(one, seed=seed, number=number) for one, (seed, number) in zip(repeated, keys, strict=True)]


def texts_of(given: Any, name: str) -> list[str]:
    """Return a text or a list of texts as a list; TypeError for anything else names the argument and the value."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple):
        raise TypeError(f"{name} is {type(given).__name__} {str(given)[:40]!r}, wanted a text or a list of texts")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{i}] is {type(text).__name__} {str(text)[:40]!r}, wanted a text")
    return list(texts)


def check_captions(model: "Model", name: str, sampling: "Sampling | None" = None) -> None:
    """Raise ValueError if the model takes no caption embeddings, which the argument of this name needs.

    Given the sampling, also if that takes no negative caption.
    """
    if not model.takes_prompts or model.target.config.family != "llamagen":
        takes = "prompts as tokens" if model.takes_prompts else "class labels"
        raise ValueError(f"{name} is not supported: model {model.name} takes {takes}, not caption embeddings")
    if sampling is not None and sampling.rows != 2:
        raise ValueError("negative_prompt has no effect without guidance: give guidance above 1")


def given_condition(model: "Model", embeddings: Any, mask: Any, *, name: str) -> "Condition | None":
    """Return caption embeddings (b slots channels) with their mask (b slots) as a condition of all the model's slots.

    None without embeddings. Fewer slots are padded on the left; without a mask no slot is padding. ValueError for
    another shape, for values that are not finite, for a model without captions, and for a mask without embeddings, with
    padding behind words or without a word; TypeError for what is no tensor of floating-point numbers.
    """
    import torch
    from torch.nn.functional import pad

    from lantern.core.types import Condition

    if embeddings is None and mask is not None:
        raise ValueError(f"{name}_attention_mask is given without {name}_embeds: give both")
    if embeddings is None:
        return None
    config, name = model.target.config, f"{name}_embeds"
    check_captions(model, name)
    if not isinstance(embeddings, torch.Tensor) or not embeddings.is_floating_point():
        got = str(embeddings.dtype) if isinstance(embeddings, torch.Tensor) else type(embeddings).__name__
        raise TypeError(f"{name} is {got}, wanted a tensor of floating-point numbers, as encode_prompt returns")
    slots, width = config.cls_token_num, config.caption_dim
    if embeddings.ndim != 3 or embeddings.shape[2] != width or not 1 <= embeddings.shape[1] <= slots:
        raise ValueError(f"{name} has shape {list(embeddings.shape)}, wanted [b, 1 to {slots}, {width}]")
    if not bool(torch.isfinite(embeddings).all()):
        raise ValueError(f"{name} holds NaN or infinity")
    mask = torch.ones(embeddings.shape[:2]) if mask is None else mask
    if not isinstance(mask, torch.Tensor) or mask.shape != embeddings.shape[:2]:
        got = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"the attention mask of {name} is {got}, wanted {list(embeddings.shape[:2])}")
    seen = mask.to(model.device, torch.bool)
    if bool((seen[:, 1:] < seen[:, :-1]).any()) or not bool(seen[:, -1].all()):
        raise ValueError(f"the attention mask of {name} has padding behind words, or no word: wanted it on the left")
    missing = slots - embeddings.shape[1]
    shown = embeddings.to(model.device, model.dtype).masked_fill(~seen[..., None], 0)
    return Condition(embeddings=pad(shown, (0, 0, missing, 0)), mask=pad(seen, (missing, 0)))


def captions(model: "Model", texts: Sequence[str]) -> "Condition":
    """Return the condition of some texts, of which equal ones are encoded once; ValueError without a text encoder."""
    if model.text is None:
        raise ValueError(f"model {model.name} has no text encoder, which prompts need: give embeddings")
    unique = list(dict.fromkeys(texts))
    found = model.text.condition(unique, slots=model.target.config.cls_token_num)
    return found.select([unique.index(text) for text in texts])


def check_call(output_type: str, callback: Any, names: Sequence[str], images: int, batch_size: int | None) -> None:
    """Raise ValueError for arguments of a pipeline call that are invalid; the message lists the valid ones.

    TypeError for a callback that is no function.
    """
    if callback is not None and not callable(callback):
        raise TypeError(f"callback_on_step_end is {callback!r:.40}, wanted a function")
    if output_type not in OUTPUT_TYPES:
        raise ValueError(f"output_type is {output_type!r}, wanted one of {', '.join(OUTPUT_TYPES)}")
    if unknown := [name for name in names if name not in CALLBACK_TENSORS]:
        known = ", ".join(CALLBACK_TENSORS)
        raise ValueError(f"callback_on_step_end_tensor_inputs has {unknown[0]!r}, wanted some of {known}")
    for name, count in (("num_images_per_prompt", images), ("batch_size", 1 if batch_size is None else batch_size)):
        check_number(name, as_number(count), 1, kind=int)


def check_requests(model: "Model", requested: Sequence[Request], *, with_pixels: bool = False) -> None:
    """Raise ValueError for a request that this model cannot serve.

    That is a prompt for a model of classes or the reverse, a class that does not exist, an empty prompt, a seed out of
    range, or `with_pixels` any request to a model without a VQ decoder.
    """
    if not requested:
        raise ValueError("got no prompt and no class label, wanted at least one")
    if with_pixels and model.vq is None:
        place = model.missing("vqvae")
        raise ValueError(f"model {model.name} has no VQ decoder: it can make tokens but no images{place}")
    classes = model.target.config.num_classes
    for request in requested:
        check_key(request.seed, request.number)
        if request.condition is not None and request.label is None:
            continue  # `requests_of_call` has checked it
        if (request.prompt is None) == (request.label is None):
            raise ValueError("a request has a prompt or a class label: give one of them")
        if model.takes_prompts and request.prompt is None:
            raise ValueError(f"model {model.name} takes prompts, not class labels: give a prompt")
        if not model.takes_prompts and request.label is None:
            raise ValueError(f"model {model.name} takes class labels, not prompts: give a class label")
        if request.prompt is not None:
            check_prompt(request.prompt)
        if request.label is not None and not 0 <= request.label < classes:
            raise ValueError(f"class label is {request.label}, wanted a number from 0 to {classes - 1}")
    if len({request.negative_prompt is None and request.negative is None for request in requested}) > 1:
        raise ValueError("some requests have a negative prompt: give one to each, or to none")
    if not model.takes_prompts or all(one.condition is not None and one.negative_prompt is None for one in requested):
        return
    if model.text is None:
        raise ValueError(f"model {model.name} has no text encoder, which prompts need{model.missing('text_encoder')}")
    for kind, text in dict.fromkeys(text for request in requested for text in request.texts):
        if model.text.is_blank(text):
            raise ValueError(f"the {kind} {text[:40]!r} is empty after cleaning; give a few words in English")


def check_init_image(init_image: Any, keep_rows: Any, mask_image: Any) -> None:
    """Raise ValueError unless an image comes with either the rows to keep or a mask."""
    if init_image is None and (keep_rows is not None or mask_image is not None):
        raise ValueError("rows to keep and a mask belong to an init image: give one")
    if init_image is not None and (keep_rows is None) == (mask_image is None):
        raise ValueError("an init image takes the number of rows to keep or a mask: give one of them")


def check_prompt(prompt: str) -> str:
    """Return the prompt; ValueError if it is blank or longer than MAX_PROMPT characters."""
    if not prompt.strip():
        raise ValueError("the prompt is empty, wanted a few words such as 'a red apple'")
    if len(prompt) > MAX_PROMPT:
        raise ValueError(f"the prompt {prompt[:20]!r}... has {len(prompt)} characters, wanted at most {MAX_PROMPT}")
    return prompt


class UnknownPromptWarning(UserWarning):
    """The model was not trained on the words of a prompt, or does not read all of it."""


def with_warnings(
    model: "Model", requested: Sequence[Request], *, warn: Callable[[str], None] | None = None
) -> list[Request]:
    """Return the requests, with readings of prompts in words that the training captions never had (`Names`).

    Prompts with a reading have a warning, and so have prompts and negative prompts with a word that is in no training
    caption, with none in the vocabulary of the text encoder, or with more than the model reads.
    `warn` receives one line for each such text of requests that had no warning before; None gives an
    UnknownPromptWarning at the first caller that is not of this package.
    """
    if model.text is None:
        return list(requested)
    readings, lines = dict[str | None, str](), dict[tuple[str, str], str]()
    for kind, text in dict.fromkeys(text for one in requested if one.warning is None for text in one.texts):
        shown, read = f"{kind} {text[:40]!r}", model.read(text) if kind == KINDS[0] else text
        if read != text:
            readings[text] = read
        if read != text and not model.untrained_words(read):
            line = f"model {model.name} reads the {shown} as {read[:40]!r}, words that it was trained on"
        elif not model.text.knows(text):
            line = f"no word of the {shown} is in the vocabulary of model {model.name}: its effect is arbitrary"
        elif kind == KINDS[0] and not model.has_trained_word(text):
            line = (
                f"model {model.name} was trained on no word of the {shown}: the image may show anything;"
                " --list-words prints the words"
            )
        elif unread := model.text.unread(text, slots := model.target.config.cls_token_num):
            shown = repr(text[:40])
            line = f"model {model.name} reads {slots} tokens of a {kind}: {unread} at the end of {shown} are left out"
        elif unknown := model.untrained_words(text):
            words = " or ".join(map(repr, unknown))
            line = f"no training caption of model {model.name} has {words:.80} of the {shown}; --list-words prints all"
        else:
            continue
        lines[kind, text] = line
        if warn is None:
            warnings.warn(line, UnknownPromptWarning, stacklevel=_level_of_caller())
        else:
            warn(line)
    return [
        replace(one, warning="; ".join(found), reading=readings.get(one.prompt, one.reading))
        if one.warning is None and (found := [lines[text] for text in one.texts if text in lines])
        else one
        for one in requested
    ]


def _level_of_caller() -> int:
    """Return the stack level, seen from the calling function, of its first caller outside of lantern and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("lantern", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def read_prompts(path: str, *, ending: str = "") -> list[str]:
    """Read a prompt file, or standard input for "-"; blank lines and comments (#) are skipped, prompts are checked.

    .json holds a list, .jsonl one value per line: texts, or objects with "prompt", "caption" or "text", whose other
    keys are ignored. .tsv and .csv have a header with such a column, and tabs between columns, or in .csv commas. Any
    other file holds one prompt per line. `ending` is that of the form, by default the file's own. ValueError names the
    file and the line.
    """
    name, ending = "standard input" if path == "-" else path, ending or Path(path).suffix.lower()
    text = _read(path, name)
    lines = enumerate(StringIO(text, newline=None), start=1)  # JSON texts hold what else `splitlines` splits at
    kept = ((i, line) for i, line in lines if line.strip() and line.lstrip(" ")[0] != "#")
    found: list[tuple[str, Any]] = [(f"line {i}", line) for i, line in kept]
    if ending == ".json":
        values = _parsed(text, name)
        if not isinstance(values, list):
            raise ValueError(f"{name} holds a JSON {type(values).__name__}, wanted a list of prompts")
        found = [(f"entry {i}", value) for i, value in enumerate(values, start=1)]
    elif ending == ".jsonl":
        found = [(place, _parsed(line, f"{name}, {place}")) for place, line in found]
    elif ending in (".tsv", ".csv"):
        (_, header), *rows = _rows(name, text, ending) or [("", [])]
        column = next((i for known in COLUMNS for i, cell in enumerate(header) if cell.lower() == known), None)
        if column is None:
            raise ValueError(f"{name} has no column {', '.join(COLUMNS)} in its first line")
        found = [(place, (cells[column:] or [""])[0]) for place, cells in rows]
    else:
        found = [(place, line.strip()) for place, line in found]
    prompts = []
    for place, value in found:
        if isinstance(value, dict):
            value = next((value[known] for known in COLUMNS if known in value), None)
        if not isinstance(value, str):
            raise ValueError(f'{name}, {place} is no prompt: wanted a text, or an object with "prompt"')
        try:
            prompts.append(check_prompt(value))
        except ValueError as error:
            raise ValueError(f"{name}, {place}: {error}") from error
    if not prompts:
        raise ValueError(f"{name} holds no prompts, wanted one per line")
    return prompts


def _rows(name: str, text: str, ending: str) -> list[tuple[str, list[str]]]:
    """Return the rows of a table, each with its last line, without blank ones and comments; ValueError for others.

    Columns are separated as those of the header: by tabs, where quotes have no meaning, or in .csv by commas.
    """
    header = next((line for line in text.split("\n") if line.strip() and line.lstrip(" ")[0] != "#"), "")
    is_tabbed = ending == ".tsv" or "\t" in header  # LlamaGen's .csv has tabs
    form: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    if not is_tabbed:
        form = {"delimiter": "," if "," in header else "\t", "skipinitialspace": True, "strict": True}
    reader, rows = csv.reader(StringIO(text, newline=""), **form), list[tuple[str, list[str]]]()
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if any(stripped) and not stripped[0].startswith("#"):
                rows.append((f"line {reader.line_num}", stripped))
    except csv.Error as error:
        raise ValueError(f"{name}, line {reader.line_num} is no row of a table: {error}") from error
    long = [place for place, cells in rows if not is_tabbed and len(cells) > len(rows[0][1])]
    if long:
        raise ValueError(f"{name}, {long[0]} has more cells than the first line: put cells with commas in quotes")
    return rows


def shuffled_prompts(file: str | Path | None, seed: int) -> list[str]:
    """Return the prompts of a file, by default the concepts that come with lantern, in an order given by the seed: a
    longer run extends a shorter one.
    """
    import torch

    prompts = read_prompts(str(file or shipped_folder("assets", "prompts") / "concepts.txt"))
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed % 2**32))
    return [prompts[i] for i in order.tolist()]


def _read(path: str, name: str) -> str:
    try:
        if path == "-":
            if sys.stdin is None:
                raise ValueError("standard input is closed: give a file of prompts, or leave --prompts-file out")
            raw = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with open(path, "rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror or error}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"{name} is larger than {MAX_FILE_BYTES >> 20} MiB, too large for prompts")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {one_line(error)}") from error


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {one_line(error)}") from error


def _seed(generator: Any) -> int:
    import torch

    if isinstance(generator, torch.Generator):
        return generator.initial_seed() % 2**63  # torch takes negative seeds too
    if isinstance(generator, SupportsIndex) and not isinstance(generator, bool):
        with suppress(TypeError):  # of an array
            return index(generator)
    raise TypeError(f"generator is a {type(generator).__name__}, wanted a torch.Generator, a seed, or a list of them")
