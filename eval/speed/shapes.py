"""LlamaGen's sizes with random weights: seconds per token at a scripted acceptance, apart from a drafter's quality.

tau = 2.5, a tree of depth 3: tokens kept of each step, its bonus token included
2 3 2 3 2 3 ...      after k steps floor(2.5 k) tokens are known, besides the one of the prefill
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import nn

from lantern.core.io import NoInitialisation
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step, TreeShape
from lantern.decoding.loop import PATIENCE
from lantern.decoding.statistics import now
from lantern.drafters.trees import named
from lantern.eval.json_lines import Line
from lantern.eval.speed import race as racing
from lantern.eval.speed.bench import ended
from lantern.eval.speed.contenders import PLAIN, Contender, RoundImages, Stable, entries_of, kinds_of, line_up
from lantern.eval.speed.race import reporter, rounded, seconds_of, spread
from lantern.eval.speed.surroundings import load_average, surroundings
from lantern.generation.generator import Decoder, Generator
from lantern.methods import METHODS, find
from lantern.methods.method import ADD_ONS, AddOn
from lantern.models.folder import DTYPES, Model, pick_device
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig
from lantern.verifiers.scripted import ScriptedVerifier

CAPTION_WORDS = 24


@dataclass(frozen=True)
class ShapeOptions:
    """Options of a size: text-conditional, with 256 tokens of a codebook of 16,384, and `changes` of its config.

    Each round decodes at least `tokens` tokens, with caches of the full length.
    """

    shape: str = "L"
    taus: Sequence[float] = (2.0, 3.0, 3.5, 4.0)
    tokens: int = 48
    tree: str = "grown_15_4"
    drafters: Sequence[str] = ("eagle1",)
    images: int = 10
    batch: int = 1
    dtypes: Sequence[str] = ("bf16",)
    kinds: Sequence[str] = ()
    baselines: Sequence[str] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    is_quiet: bool = False


def measure(options: ShapeOptions) -> dict[str, Any]:
    """Return all figures of one size for JSON: plain, and each drafter at each tau; ValueError for a shallow tree."""
    before, device, tree = load_average(), pick_device(options.device), named(options.tree)
    changes: dict[str, Any] = {"model_type": "t2i", "cls_token_num": 120} | dict(options.changes)
    config = TransformerConfig.named(options.shape, **changes)
    tokens, report = min(options.tokens, config.block_size - 1), reporter(options.is_quiet)
    if (deep := math.ceil(max(options.taus)) - 1) > tree.depth:
        needs = f"tau {max(options.taus):g} needs {deep} accepted tokens in a step"
        raise ValueError(f"{needs}, tree {options.tree} has depth {tree.depth}: choose a deeper --tree")
    sampling = Sampling(guidance=7.5, top_k=1000 if config.vocab_size > 1000 else 0)
    stable = Stable(random_model(config, options.drafters, device, DTYPES[options.dtypes[0]]))
    images = RoundImages(random_captions(config, options.batch, device), [(0, n) for n in range(options.batch)])
    of_label = {
        f"{f'{name}, ' if len(options.drafters) > 1 else ''}tau {tau:g}": (name, tau)
        for name, tau in product(options.drafters, options.taus)
    }
    taus = {PLAIN: 1.0} | {label: tau for label, (_, tau) in of_label.items()}
    every = {label: script(tau, config.block_size - 1) for label, tau in taus.items()}  # tokens of each step
    least = {label: len(script(tau, tokens)) for label, tau in taus.items()}  # steps

    def build(label: str, model: Model) -> Decoder:
        if label == PLAIN:
            return Generator(model, METHODS[PLAIN], sampling).parts
        method = find(of_label[label][0]).with_options(tree=options.tree)
        return scripted(Generator(model, method, sampling).parts, every[label], tree.shape())

    def spent(one: Contender) -> float:
        return seconds_per_token(one, images, every[one.label], least[one.label])

    def take(one: Contender, number: int, _: RoundImages) -> Line:
        return {"round": number, "contender": one.name, "seconds": spent(one)}

    def figures_of(one: Contender) -> dict[str, Any]:
        """Return milliseconds per token of a contender, and its roofline."""
        seconds, steps, rows = seconds_of(lines, one.name), every[one.label], options.batch * sampling.rows
        step = median(seconds) * sum(steps) / len(steps)
        return {
            **one.described,
            "ms_per_token": spread([1e3 * value for value in seconds]),
            "tokens_per_second": rounded(options.batch / median(seconds)),
            **racing.roofline(one, rows=rows, copy_gbps=copy_gbps, step_seconds=step),
        }

    copy_gbps, kinds, failed = racing.copy_bandwidth(device), options.kinds or kinds_of(device), list[dict[str, str]]()
    entries = entries_of([PLAIN], {*kinds, *options.baselines}, options.dtypes)
    entries += entries_of(list(of_label), kinds, options.dtypes)
    field = line_up(stable, entries, build, spent, failed, report=lambda line: report(f"{options.shape}: {line}"))
    rounds = racing.race(field, [images] * options.images, take, report=report)
    lines, stop = racing.collect(rounds, len(field))
    figures = {
        "what": "shape",
        "shape": options.shape,
        "tree": {"name": options.tree, "nodes": tree.max_nodes, "depth": tree.depth},
        "batch": options.batch,
        "drafter": ", ".join(options.drafters),
        "tokens": options.tokens,
        "surroundings": surroundings(device),
        "copy_gbps": rounded(copy_gbps),
        "contenders": [figures_of(one) for one in field],
        "results": racing.results(field, lines),
        "phases": [] if stop else list(racing.phases(racing.best_of_labels(field, lines), images, least)),
        "failed": failed,
    }
    return ended(figures, before, stop)


def seconds_per_token(contender: Contender, images: RoundImages, counts: Sequence[int], least: int) -> float:
    """Return the seconds per token of at least so many steps; as in use, an engine may take several at once."""
    times = list[tuple[float, int]]()

    def watch(step: Step) -> bool:
        if step.index == 0 or step.index >= least:
            times.append((now(contender.device), step.index))
        return step.index >= least

    contender.decode(images, callback=watch, interval=PATIENCE)
    (begun, _), (ended, steps) = times
    return (ended - begun) / min(sum(counts[:steps]), contender.parts.target.config.block_size - 1)


def random_model(config: TransformerConfig, drafters: Sequence[str], device: torch.device, dtype: torch.dtype) -> Model:
    """Return a model of random weights with one-layer drafters; ValueError for one without a tree and own layers."""
    drafts = dict[str, nn.Module]()
    for name in drafters:
        method = find(name)
        found = [ADD_ONS[part] for part in method.made.needs if ADD_ONS[part].training == "drafter"]
        if method.tree is None or len(found) != 1 or "layers" not in {entry.name for entry in fields(found[0].config)}:
            raise ValueError(f'drafter is "{name}", wanted a method with a tree and own layers, such as "eagle1"')
        drafts[found[0].name] = random_drafter(found[0], config, device, dtype)
    with device, NoInitialisation():
        target = Transformer(config)
        vq = VQVAE(VQConfig(config.vocab_size, encoder_ch_mult=(1,), decoder_ch_mult=(1,), ch=32))
    for network in (target, vq):
        randomise(network.to(dtype))
    target.tok_embeddings.weight.data.mul_(config.dim**0.5)
    target.output.weight.data.mul_(3)
    return Model(name="random", target=target, vq=vq, add_ons=drafts)


def random_drafter(entry: AddOn, config: TransformerConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a drafter of one layer with random weights, for a target of this config."""
    with device, NoInitialisation():
        made = entry.module(entry.config.for_target(config, layers=1)).to(dtype)
    randomise(made)
    return made


def randomise(module: nn.Module) -> None:
    """Give a module random weights for decoding, stored buffers too: norms ones, matrices scaled by their inputs."""
    weights = [item for item in module.eval().requires_grad_(False).state_dict().items() if item[1].is_floating_point()]
    generator = torch.Generator(weights[0][1].device).manual_seed(0)
    for name, weight in weights:
        if weight.ndim < 2:
            weight.fill_(1.0 if "norm" in name else 0.0)
        else:
            weight.normal_(0.0, 0.7 / weight[0].numel() ** 0.5, generator=generator)


def random_captions(config: TransformerConfig, images: int, device: torch.device, *, seed: int = 0) -> Condition:
    """Return random captions of CAPTION_WORDS words, or of as many as fit."""
    words, generator = min(CAPTION_WORDS, config.cls_token_num), torch.Generator().manual_seed(seed)
    captions = torch.randn(images, words, config.caption_dim, generator=generator)
    return Condition(embeddings=captions, mask=torch.ones(images, words, dtype=torch.bool)).to(device)


def script(tau: float, tokens: int) -> list[int]:
    """Return the tokens that each step commits: at least `tokens` in total, with mean `tau` up to less than one token.

    The token of the prefill is not counted. ValueError for a tau below 1.
    """
    if tau < 1:
        raise ValueError(f"tau is {tau}, wanted at least 1: every step commits a token")
    counts: list[int] = []
    while sum(counts) < tokens:
        # the small term corrects for values such as 2.3 that floats round down
        counts.append(math.floor(tau * (len(counts) + 1) + 1e-9) - sum(counts))
    return counts


def deepest(shape: TreeShape) -> list[int]:
    """Return the path from below the root to the first of the deepest nodes."""
    return shape.ancestors[shape.depths.argmax()].nonzero().flatten().tolist()[1:]


def scripted(decoder: Decoder, counts: Sequence[int], shape: TreeShape) -> Decoder:
    """Return a decoder that commits so many tokens in each step, along the deepest path of its tree."""
    target, verifier = decoder.target, decoder.verifier
    assert verifier is not None
    how = (tuple(counts), tuple(deepest(shape)), target.config.block_size, target.walk)
    return dataclasses.replace(decoder, verifier=ScriptedVerifier(verifier, *how))
