"""Training of a drafter of any kind on images that the target generates (`lantern train drafter`).

Online, the target generates images when they are needed; offline, they are generated once and cached. The losses
compare the drafter's distributions with the target's, after guidance and filters, at every depth of a training-time
test (arXiv:2503.01840): see losses.py.
"""

import hashlib
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.config import build_config, build_fields, check_least, hint_for
from lantern.core.io import CONFIG_NAME, load_component, read_config, save_component, save_tensors, weights_digest
from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.decoding.cache import prefill, read_tokens
from lantern.drafters.base import Examples, Trainee, fused_layers
from lantern.engines.engine import engine
from lantern.generation.generator import Decoder, build_decoder
from lantern.methods.method import ADD_ONS, AddOn
from lantern.models.folder import pick_dtype
from lantern.models.llamagen.text import TextEncoder
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.releases.llamagen import read_checkpoint
from lantern.models.transformers.loading import load as load_transformers
from lantern.models.transformers.target import TransformersTarget
from lantern.training.data import NO_IMAGES, Prepared
from lantern.training.features import captions_name, encode_captions, training_device
from lantern.training.loop import LoopConfig, Task, run_loop, save_sheet, step_generator, step_seed
from lantern.training.losses import Draft, Objective, acceptance, maps, measure

MOST = 1 << 31  # different pictures of an online run
TWO_ROWS = ("eagle1", "poss")  # kinds that may read and draft both guidance rows
SPARE = 1 << 26  # bytes of the disk that stay free
BATCH = 64  # images generated together for the cache


def kinds(stage: str = "drafter") -> dict[str, AddOn]:
    """Return the add-ons that a stage of `lantern train` trains, "drafter" or "policy", by name."""
    return {name: entry for name, entry in ADD_ONS.items() if entry.training == stage}


def find_kind(name: str, stage: str = "drafter") -> AddOn:
    """Return the add-on of a kind; ValueError gives the nearest name."""
    known = kinds(stage)
    if name not in known:
        raise ValueError(f"{stage} kind is {name[:40]!r}; {hint_for(name, known)}")
    return known[name]


def digest_of(target: Any) -> str | None:
    """Return the digest of a target's weights; None for one of transformers, whose weights are read in any dtype."""
    return weights_digest(target.state_dict()) if target.config.family == "llamagen" else None


def new_module(kind: str, target: Any, changes: dict[str, Any], *, seed: int) -> Trainee:
    """Return a new module for a target; `changes` are fields of its config.

    ValueError for unknown ones, for sizes that are not the target's, and for a config of another kind, whose folder
    would not load as this one.
    """
    entry = find_kind(kind)
    changes = build_fields(entry.config, changes, source="config", prefix="model.")
    module: Trainee = entry.module(entry.config.for_target(target.config, target=digest_of(target), **changes))
    if module.config.kind != kind:
        got = f'{entry.config_path} has kind "{module.config.kind}"'
        raise ValueError(f'{got}, wanted "{kind}", under which it is declared: change one of them')
    check_same_sizes(module.config, target.config, source="config: model")
    module.init_for(target, torch.Generator().manual_seed(seed))
    return module


def check_same_sizes(drafter: Any, target: Any, *, source: str | Path) -> None:
    """Raise ValueError for the config of a drafter of another width, codebook or grid than the target's."""
    for name in ("dim", "vocab_size", "block_size"):
        if (got := getattr(drafter, name)) != (expected := getattr(target, name)):
            raise ValueError(f"{source}: {name} is {got}, wanted {expected} as the target has")


def load_kind(kind: str, folder: Path, target: Any) -> Trainee:
    """Load a trained module to continue from and record this target in its config; LANTERN's folders load too.

    ValueError for a module of another kind or for another target.
    """
    entry = find_kind(kind)
    build, config = entry.module, entry.config
    raw = read_config(folder)
    if "hidden_size" in raw:  # in the layout of LANTERN
        checkpoint = read_checkpoint(folder, kind="drafter")
        module = build(build_config(config, checkpoint.config, source=folder / CONFIG_NAME))
        module.load_state_dict(checkpoint.state)
    else:
        if raw.get("kind", kind) != kind:
            raise ValueError(f"{folder} holds a drafter of kind {raw['kind']}, wanted {kind}: give its own --kind")
        module = load_component(build, config, folder)
    check_same_sizes(module.config, target.config, source=folder)
    module.config = replace(module.config, target=digest_of(target))
    return module.train()


@dataclass(eq=False)
class Teacher:
    """Generates image number i with a caption and noise that depend on the seed and i alone, not on the batch.

    `texts` are the captions to choose from, and `condition` reads some of them; `reads` names the extra fields that a
    drafter reads. A drafter that reads the prompt gets every slot of it, padding included. Features are in bf16, as in
    a feature cache. ValueError for a target of transformers if `sampling` has no guidance, and for extras other than
    `layers`: its rows of guidance have prompts of their own, which are not given slot by slot.
    """

    target: Any
    condition: Callable[[list[str]], Condition]
    texts: Sequence[str]
    _: KW_ONLY
    sampling: Sampling
    seed: int
    reads: Collection[str] = ()

    def __post_init__(self) -> None:
        self._layers = fused_layers(self.target.config.n_layer) if "layers" in self.reads else ()
        if self.target.config.family == "llamagen":
            return
        if self.sampling.rows != 2:
            given = self.sampling.guidance
            raise ValueError(f"guidance is {given}, wanted above 1: the drafter reads both guidance rows")
        if others := sorted(set(self.reads) - {"layers"}):
            raise ValueError(f"the drafter reads {others[0]}, which targets of transformers do not give: train another")

    @cached_property
    def decoder(self) -> Decoder:
        """Plain decoding by the fastest engine that is ready."""
        return build_decoder("plain", self.target, sampling=self.sampling, engine=engine("auto"))

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Generate these images on the target's device; return their tokens and the features that predict each."""
        texts = [self.texts[step_seed(self.seed, number, 0) % len(self.texts)] for number in numbers]
        condition = self.condition(texts).to(self.target.tok_embeddings.weight.device)
        keys = [(self.seed, number) for number in numbers]
        tokens = self.decoder.generate(condition, keys=keys).tokens
        prompt, cache = prefill(self.target, condition, 2, stage=0, whole="prompt" in self.reads, taps=self._layers)
        read, _ = read_tokens(self.target, cache, tokens[:, :-1], taps=self._layers)
        found = {"rows": torch.cat([prompt.features[:, :, -1:], read.features], 2)}
        if read.tapped is not None and prompt.tapped is not None:
            tapped = torch.cat([prompt.tapped[:, :, -1:], read.tapped], 2)
            found["layers"] = tapped.unflatten(-1, (len(self._layers), -1)).transpose(2, 3)
        if "prompt" in self.reads:
            found["prompt"] = prompt.features[:, :, :-1]
        whole = {"tokens": tokens.int()}
        if condition.embeddings is not None and condition.mask is not None:
            missing = prompt.mask.shape[1] - condition.mask.shape[1] if "prompt" in self.reads else 0
            found["words"] = pad(condition.embeddings, (0, 0, missing, 0))
            whole["mask"] = pad(condition.mask, (missing, 0))
        return whole | {name: x.bfloat16().contiguous() for name, x in found.items()}


@dataclass(frozen=True)
class FeatureCache:
    """The first `pictures` images of a teacher, `shard` per file: 00000.safetensors, 00001.safetensors, ...

    Files are written to a temporary path and renamed, so that a stopped build continues with the first missing one.
    """

    folder: Path
    _: KW_ONLY
    pictures: int
    shard: int

    def fill(self, teacher: Teacher) -> None:
        """Generate the missing files, each of several processes its share, and print the disk space they take.

        ValueError if the disk has less space.
        """
        from accelerate import PartialState

        shards = range(-(-self.pictures // self.shard))
        missing = [number for number in shards if not self._path(number).exists()]
        if not missing:
            return
        state = PartialState(cpu=not torch.cuda.is_available())
        if state.is_main_process:
            self._check_space(teacher, len(missing))
        with state.split_between_processes(missing) as mine:
            self._make(teacher, cast(Sequence[int], mine), is_quiet=not state.is_main_process)
        state.wait_for_everyone()

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return the tensors of these images."""
        from safetensors import safe_open

        found = []
        for shard, at in (divmod(number, self.shard) for number in numbers):
            with safe_open(self._path(shard), framework="pt") as file:
                found.append({name: file.get_slice(name)[at] for name in file.keys()})  # noqa: SIM118
        return {name: torch.stack([one[name] for one in found]) for name in found[0]}

    def _path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.safetensors"

    def _check_space(self, teacher: Teacher, missing: int) -> None:
        from tqdm import tqdm

        self.folder.mkdir(parents=True, exist_ok=True)
        each = sum(tensor.nbytes for tensor in teacher.read([0]).values())
        size, free = each * min(self.pictures, missing * self.shard), shutil.disk_usage(self.folder).free
        total, left = tqdm.format_sizeof(size, "B"), tqdm.format_sizeof(free, "B")
        text = f"feature cache {self.folder}: {self.pictures} images, {total} to write"
        print(f"{text}, {left} free", file=sys.stderr)
        if size + SPARE > free:
            advice = 'use fewer images, or "source": "online"'
            raise ValueError(f"{text}, do not fit on a disk with {left} left: {advice}")

    def _make(self, teacher: Teacher, shards: Sequence[int], *, is_quiet: bool) -> None:
        from tqdm import tqdm

        todo = {s: range(s * self.shard, min(self.pictures, (s + 1) * self.shard)) for s in shards}
        with tqdm(total=sum(map(len, todo.values())), desc="images", disable=True if is_quiet else None) as bar:
            for shard, numbers in todo.items():
                parts = []
                for some in (numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH)):
                    parts.append({name: x.cpu() for name, x in teacher.read(some).items()})
                    bar.update(len(some))
                joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                save_tensors(joined, self._path(shard))


@dataclass(frozen=True)
class DrafterConfig:
    """Settings of a drafter. `kind` is the name of a trained drafter, `model` changes fields of its config.

    `source`: "offline" generates `pictures` images first and caches their features, `shard` per file; "online"
    generates them when they are needed, new ones in every batch if `pictures` is 0. They are sampled at `guidance` with
    `temperature`, `top_k` and `top_p`; the losses compare distributions under the same filters, at a guidance scale
    sampled from `scales` per image of a batch. The first `held_out` images are held out. `unroll` is the number of
    depths that the drafter learns. Uniform noise of at most `noise` is added to the features that it reads, the same
    to both guidance rows, so that guided ones have it too (EAGLE-1, section 3.2: 0.1). ValueError for an unknown kind
    and for values out of range.
    """

    loop: LoopConfig
    kind: str = "eagle1"
    model: dict[str, Any] = field(default_factory=dict)
    objective: Objective = field(default_factory=Objective)
    source: Literal["offline", "online"] = "offline"
    batch: int = 8
    lr: float = 2e-3
    weight_decay: float = 0.01
    pictures: int = 512
    held_out: int = 24
    shard: int = 64
    guidance: float = 3.0
    scales: tuple[float, float] = (1.5, 5.0)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    unroll: int = 3
    noise: float = 0.0

    def __post_init__(self) -> None:
        find_kind(self.kind)
        check_least(self, batch=1, shard=1, unroll=1, held_out=1, noise=0, lr=0, weight_decay=0)
        if not self.held_out < self.pictures < MOST and not (self.source == "online" and not self.pictures):
            raise ValueError(f"pictures is {self.pictures}, wanted more than the {self.held_out} held out, or 0 online")
        if len(self.scales) != 2 or not 0 < self.scales[0] <= self.scales[1]:
            raise ValueError(f"scales is {list(self.scales)}, wanted the lowest and the highest guidance, above 0")
        if self.sampling.is_greedy:
            raise ValueError("temperature is 0: a drafter learns distributions, wanted above 0")

    @property
    def sampling(self) -> Sampling:
        """How images are sampled."""
        return Sampling(self.guidance, self.temperature, self.top_k, self.top_p)


class DrafterTask(Task):
    """The part of training that all drafters share: source of images, losses of drafts, held-out figures.

    ValueError if `unroll` is too small for the drafter's layers or heads, and for noise on features that it does not
    read.
    """

    best = "tokens"

    def __init__(self, config: DrafterConfig, target: Any, source: Teacher | FeatureCache, module: Trainee) -> None:
        super().__init__()
        self.config, self.sampling, self.drafter = config, config.sampling, module
        # later layers and heads would not be trained otherwise
        if config.unroll < (least := self.drafter.least_depths):
            raise ValueError(f"unroll is {config.unroll}, wanted at least {least}: it trains all of the drafter")
        if config.noise and "layers" in module.reads:
            raise ValueError(f"noise is {config.noise:g}, wanted 0: {config.kind} reads layers, not features")
        if config.unroll >= (tokens := target.config.block_size):
            raise ValueError(f"unroll is {config.unroll}, wanted fewer than the {tokens} tokens of an image")
        self.frozen = (target.requires_grad_(False).eval(),)
        self._source, self.judged_by = source, repr((config.unroll, config.held_out, config.sampling))
        self.batch_tokens = config.batch * target.config.block_size

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Examples, Tensor]:
        """Return examples, each at its own guidance scale, and the features that the drafter reads."""
        config, generator = self.config, step_generator(self.config.loop.seed, step, rank)
        numbers = torch.randint(config.held_out, config.pictures or MOST, (config.batch,), generator=generator)
        low, high = config.scales
        scales = low + (high - low) * torch.rand(config.batch, generator=generator)
        examples = self._examples(numbers.tolist(), scales, device)
        if not config.noise:
            return examples, examples.rows
        noise = torch.rand(examples.rows[:, :1].shape, generator=generator).mul_(2).sub_(1).mul_(config.noise)
        return examples, examples.rows + noise.to(device)

    def _examples(self, numbers: list[int], scales: Tensor, device: torch.device) -> Examples:
        read = {name: x.to(device) for name, x in self._source.read(numbers).items()}
        read |= {name: x.float() for name, x in read.items() if x.is_floating_point()}
        return Examples(scales=scales.to(device), **read | {"tokens": read["tokens"].long()})

    def _draft(self, examples: Examples, rows: Tensor | None = None) -> list[Draft]:
        """Return the target's and the drafter's distributions at every depth; it reads `rows`, or the target's own."""
        # guided logits rounded to bf16 would be another distribution
        with torch.no_grad(), torch.autocast(examples.tokens.device.type, enabled=False):
            p = self.sampling.filtered(self._logits(examples.rows, examples)).exp()
        made, name = list[Draft](), type(self.drafter).__name__
        read = examples if rows is None else replace(examples, rows=rows)
        for predicted in self.drafter.training_predictions(read, self.config.unroll):
            if predicted.rows is not None:
                logits = self._logits(predicted.rows, examples)
            elif (logits := predicted.logits) is None:
                if predicted.features is None:
                    raise ValueError(f"{name} predicted no rows, logits or features at depth {predicted.depth}")
                logits = self._head(predicted.features)
            wanted = [len(p), len(predicted.places), p.shape[2]]
            if list(logits.shape) != wanted:
                raise ValueError(
                    f"{name} predicted logits of shape {list(logits.shape)} at depth {predicted.depth}, wanted {wanted}"
                )
            made.append(Draft(predicted, p[:, predicted.places], self.sampling.filtered(logits)))
        depths = [one.predicted.depth for one in made]
        if not made or depths != [*range(1, len(made) + 1)]:
            raise ValueError(f"{name} predicted depths {depths}, wanted 1 to {self.config.unroll}, each once")
        return made

    @property
    def target(self) -> Any:
        """The target."""
        return self.frozen[0]

    def _logits(self, rows: Tensor, examples: Examples) -> Tensor:
        """Return the guided logits of features (b 2 m c); LlamaGen's head is linear, so one product is enough."""
        if self.target.config.family == "llamagen":
            return self.target.head(examples.guide(rows))
        return examples.guide(self._head(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]))

    def _head(self, features: Tensor) -> Tensor:
        """Return the logits of features, whose dtype may be wider than the weights'."""
        return self.target.head(features.to(self.target.tok_embeddings.weight.dtype))

    def forward(self, examples: Examples, rows: Tensor) -> dict[str, Tensor]:
        """Return the sum of the depths' losses, faded by depth, and the acceptance at the first and the last depth."""
        drafts = self._draft(examples, rows)
        objective = self.config.objective
        losses = [objective.fade ** (one.predicted.depth - 1) * objective.of(one, examples).mean() for one in drafts]
        first, last = (acceptance(draft.p, draft.log_q).mean() for draft in (drafts[0], drafts[-1]))
        return {"loss": torch.stack(losses).sum(), "accepted_first": first, "accepted_last": last}

    @cached_property
    def _held(self) -> list[Examples]:
        """The held-out images, at the guidance that they were sampled with."""
        config, device = self.config, next(self.drafter.parameters()).device
        blocks = torch.arange(config.held_out).split(config.batch)
        return [self._examples(b.tolist(), torch.full((len(b),), config.guidance), device) for b in blocks]

    def evaluate(self) -> dict[str, float]:
        """Return tokens of a step, and acceptance and hit rates of every depth, on held-out images."""
        return measure(map(self._draft, self._held), self.target.config.block_size)

    def sample(self, path: Path) -> None:
        """Write a map of acceptance per depth."""
        config = self.target.config
        found = maps(map(self._draft, self._held), config.block_size, config.raster.columns)
        save_sheet(found, path, columns=len(found))

    def export(self, folder: Path) -> None:
        """Write the drafter to `folder/drafter`."""
        save_component(self.drafter.state_dict(), self.drafter.config, folder / "drafter", dtype=torch.bfloat16)


def for_tokens(config: DrafterConfig, target: TransformersTarget) -> DrafterConfig:
    """Return the config for a target of transformers; ValueError for a form that its head does not allow.

    Kinds with a form for two guidance rows take it unless the config names another. Features of two rows, combined by
    guidance, have the combined logits only if the head is linear. If it is not, kinds of one row learn features of
    their own, which are not regressed.
    """
    model, objective, is_linear = config.model, config.objective, target.has_linear_head
    if config.kind in TWO_ROWS:
        model = {"form": "rows"} | model
        if model["form"] != "rows" and not is_linear:
            raise ValueError(f'form is "{model["form"]}", wanted "rows": the head of this target is not linear')
    elif not is_linear:
        objective = replace(objective, regression=0.0)
    return replace(config, model=model, objective=objective)


def train(
    config: DrafterConfig,
    *,
    out: Path,
    data: Path,
    target: Path,
    text_encoder: Path | None = None,
    tokenizer: Path | None = None,
    init: Path | None = None,
    cache: Path | None = None,
    size: tuple[int, int] | None = None,
) -> None:
    """Train a drafter for a target and write `out/drafter`; resume what `out` holds.

    `target` is a transformer component, whose captions `text_encoder` encodes, or a model folder of transformers, for
    images of `size` (height, width) in pixels; for the latter see `for_tokens`.

    `init` is a trained drafter of the same kind to start from, LANTERN's released ones included; it keeps its sizes.
    Features of captions and images are cached in `cache`, by default `out`; runs may share them. ValueError for
    a component without `text_encoder`.
    """
    prepared, cache, device = Prepared.open(data), cache or out, training_device()
    records, seed, sampling = prepared.records, config.loop.seed, config.sampling
    if (kind := read_config(target).get("model_type")) in ("t2i", "c2i"):
        if kind == "c2i":
            raise ValueError(f"{target} takes classes, wanted a target that takes captions: drafters learn with these")
        if text_encoder is None:
            raise ValueError(f"{target} is a target of LlamaGen, got no text encoder: give --text-encoder")
        if size is not None:
            raise ValueError(f"{target} makes images of one size: omit --size")
        model, text = load_component(Transformer, TransformerConfig, target), None
    else:
        found = load_transformers(target, device, pick_dtype("auto", device), parts=("text",), size=size)
        config, model, text = for_tokens(config, found.target), found.target, found.text
    module = load_kind(config.kind, init, model) if init else new_module(config.kind, model, config.model, seed=seed)
    if text is None:
        assert text_encoder is not None
        model.to(device)
        encoder = TextEncoder.from_pretrained(text_encoder, tokenizer)
        slots = model.config.cls_token_num  # as many as generation reads
        read = captions_name(text_encoder, tokenizer, prepared, slots=slots)
        if encoder.width != model.config.caption_dim:
            wanted = f"wanted that of width {model.config.caption_dim} with which {target} was trained"
            raise ValueError(f"{text_encoder} has embeddings of width {encoder.width}, {wanted}")
        captions = encode_captions(encoder, prepared, cache / read, slots=slots)
        condition, records = captions.of, captions.readable(records)
    if not (texts := [record.captions[0][0] for record in records if record.split == "train"]):
        raise ValueError(f"{prepared.folder} {NO_IMAGES}")
    if text is not None:
        condition, read = text.condition, hashlib.sha256(repr(texts).encode()).hexdigest()
    teacher = Teacher(model, condition, texts, sampling=sampling, seed=seed, reads=module.reads)
    source: Teacher | FeatureCache = teacher
    if config.source == "offline":
        numbers, weights = (seed, config.pictures, config.shard), weights_digest(model.state_dict())
        made = repr((weights, read, numbers, sampling, sorted(module.reads)))
        name = f"features-{hashlib.sha256(made.encode()).hexdigest()[:16]}"
        source = FeatureCache(cache / name, pictures=config.pictures, shard=config.shard)
    task = DrafterTask(config, model, source, module)
    if isinstance(source, FeatureCache):
        source.fill(teacher)
    run_loop(task, config.loop, out=out, init=init, source=f"{module.config.target} {read}")
