"""`python -m lantern.eval.gpu_headline --minutes 9 --out DIR`: what a GPU can show of this project, within ten minutes.

One process measures all sections in the order of their worth, and writes DIR/headline.json after every figure. A
supervisor starts it again behind a section that ended it: by an invalid access of memory, after which a process cannot
use the GPU any more, or because it hung. A stopped run continues. Weights of released sizes are random, and made on the
device. Steps are timed by events on the device, behind the steps that run before the graph. `--device cpu --toy`
rehearses all of it (with TRITON_INTERPRET=1 the kernels too).
"""

import argparse
import faulthandler
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lantern.cli.command import DONE, FAILED, OneOf, command, opt, run_command
from lantern.core.config import KvCache, read_json_object
from lantern.core.io import write_json
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step
from lantern.core.weights import original
from lantern.decoding.statistics import run_times
from lantern.engines.cuda.engine import PRODUCTS, GraphEngine
from lantern.engines.cuda.graphs import capture, forget_all
from lantern.engines.engine import EAGER, AutoEngine, Engine
from lantern.engines.pass_times import passes_of
from lantern.eval.speed.contenders import condition_of
from lantern.eval.speed.race import copy_bandwidth, pass_bytes, rounded
from lantern.eval.speed.shapes import random_captions, random_drafter, random_model, randomise, script, scripted
from lantern.eval.speed.surroundings import surroundings
from lantern.generation.choice import choose_method
from lantern.generation.generator import Decoder, Generator, build_decoder
from lantern.generation.requests import Request
from lantern.generation.serving.worker import Job, Worker
from lantern.methods import METHODS, find
from lantern.methods.method import ADD_ONS, DRAFTER
from lantern.models.folder import load_model, pick_device
from lantern.models.llamagen.transformer import Transformer, TransformerConfig, rotate

Figures = dict[str, Any]
Tensors = tuple[Tensor, ...]
Decoded = tuple[list[Tensor], float, int]  # tokens, seconds of a batch, passes
SKIPPED_STEPS = 8  # at the begin of an image: those before the graph, and a few behind
CRASHED = 3
SPARE = 30.0  # seconds beside twice those of a section, after which the process ends: a kernel may never return
SIZES = read_json_object(Path(__file__).with_suffix(".json"))
# sections in the order of their worth, and the seconds after which one leaves out its further figures
SECTIONS: dict[str, int] = SIZES["sections"]
PROMPTS: list[str] = SIZES["prompts"]


def random_janus(width: int, inner: int, layers: int, heads: int, device: torch.device) -> Any:
    """Return a Janus-Pro's target of random weights, with a short vocabulary: only its tokens are decoded."""
    import transformers

    from lantern.models.transformers.janus import assemble

    sizes: Figures = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 1024}
    config = transformers.JanusConfig(
        text_config=transformers.LlamaConfig(vocab_size=1024, **sizes),  # type: ignore[arg-type]
        vision_config=transformers.JanusVisionConfig(
            projection_dim=width, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
        ),
        vq_config=transformers.JanusVQVAEConfig(projection_dim=width, image_token_embed_dim=width),
    )
    with torch.device("meta"):
        model: Any = transformers.JanusForConditionalGeneration(config)
    randomise(model.to(torch.bfloat16).to_empty(device=device))
    body = model.model.language_model
    with device:  # its buffers are not weights
        body.rotary_emb = type(body.rotary_emb)(body.config)
    return assemble(model, None).target


class Clock:
    """Callback that marks every step by an event on the device, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda, self.marks = device.type == "cuda", list[Any]()

    def __call__(self, step: Step | None = None) -> None:
        """Mark the end of a step."""
        mark = torch.cuda.Event(enable_timing=True) if self.is_cuda else time.perf_counter()
        if isinstance(mark, torch.cuda.Event):
            mark.record()
        self.marks.append(mark)

    def milliseconds(self) -> float:
        """Return the mean time of a step behind the first SKIPPED_STEPS."""
        skipped = min(SKIPPED_STEPS, len(self.marks) - 2)
        first, last, steps = self.marks[skipped], self.marks[-1], len(self.marks) - 1 - skipped
        if not self.is_cuda:
            return 1e3 * (last - first) / steps
        torch.cuda.synchronize()
        return first.elapsed_time(last) / steps


class Bench:
    """All sections, each a method of the same name. Figures go to `found`, which `save` writes.

    How much is measured, and how much of it a rehearsal takes, is in gpu_headline.json: `taus` are scripted tokens a
    step, `janus` has width, inner width, layers and heads, `exact` images of a batch and seeds, `embedded` images of a
    batch, `training` whether it is compiled and images of a batch.
    """

    def __init__(self, device: torch.device, is_toy: bool, found: Figures, save: Callable[[], None]) -> None:
        self.device, self.is_toy, self.found, self.save = device, is_toy, found, save
        self.sizes, self.is_cuda = SimpleNamespace(**SIZES["toy" if is_toy else "full"]), device.type == "cuda"
        self.sampling = Sampling(guidance=7.5, top_k=20 if self.is_toy else 1000)
        self.until = float("inf")
        self._models: dict[tuple[str, int], tuple[Transformer, Any]] = {}

    def put(self, section: str, name: str, figure: Any) -> None:
        """Enter a figure and write the file."""
        self.found["sections"].setdefault(section, {})[name] = figure
        self.save()

    def measure(self, section: str, name: str, run: Callable[..., Any], *given: Any) -> Any:
        """Enter what `run(*given)` gives, or its error; an error that the GPU does not survive ends the process."""
        if time.monotonic() > self.until:
            return self.put(section, name, {"left_out": "the time of the section was over"})
        try:
            figure = run(*given)
        except Exception as error:
            text = "".join(traceback.format_exception_only(error)).strip()[-600:]
            figure = {"error": text, "at": traceback.format_tb(error.__traceback__)[-1].strip()[-300:]}
        if section != "errors" or figure is not None:
            self.put(section, name, figure)
        if self.is_cuda:
            try:
                torch.cuda.synchronize()
            except Exception:  # the context is lost: every later figure would fail
                sys.exit(CRASHED)

    def model(self, shape: str = "XL", tokens: int | None = None) -> tuple[Transformer, Any]:
        """Return target and drafter of a size, by default the headline's; the one before is dropped."""
        key = shape, tokens or self.sizes.tokens
        if key not in self._models:
            self._models.clear()
            torch.cuda.empty_cache()
            changes = {"model_type": "t2i", "cls_token_num": 120, "block_size": key[1], **self.sizes.changes}
            made: Any = random_model(TransformerConfig.named(shape, **changes), ["eagle1"], self.device, torch.bfloat16)
            self._models[key] = made.target, made.drafter
        return self._models[key]

    def condition(self, config: Any, images: int) -> Condition:
        """Return random captions of 24 words, or token prompts of 32 tokens."""
        if config.family == "llamagen":
            return random_captions(config, images, self.device, seed=1)
        tokens = torch.randint(5, 1000, (images, 2, 32), generator=torch.Generator().manual_seed(1))
        return Condition(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool)).to(self.device)

    def decoder(self, name: str, engine: Engine, model: Any = None, **settings: Any) -> Decoder:
        """Return the decoder of a method with the random drafter, and a table of neighbours."""
        target, drafter = model or self.model()
        tokens = target.config.vocab_size
        ahead = torch.arange(1, min(128, tokens), device=self.device)
        near = (torch.arange(tokens, device=self.device)[:, None] + ahead) % tokens
        method = find(name).with_options(**settings)
        if "k" in method.settings:
            method = method.with_options(k=min(int(method.settings["k"]), near.shape[1]))
        parts = set(method.made.needs) - {DRAFTER}
        made = {part: random_drafter(ADD_ONS[part], target.config, self.device, torch.bfloat16) for part in parts}
        how: Figures = {"add_ons": made | {DRAFTER: drafter}, "neighbours": near.int()}
        return build_decoder(method, target, sampling=self.sampling, engine=engine, **how)

    def steps(self, decoder: Decoder, images: int = 1, *, most: int | None = None, repeats: int = 0) -> Figures:
        """Return milliseconds and tokens of a step, and the class of its passes, of whole images or of `most` steps."""
        condition = self.condition(decoder.target.config, images)
        begun = time.perf_counter()
        self.begin(decoder, condition, min(SKIPPED_STEPS + 2, self.sizes.steps))  # compiles and captures
        first, found = time.perf_counter() - begun, []
        for _ in range(repeats or self.sizes.repeats):
            clock, tokens = self.begin(decoder, condition, most)
            found.append((clock.milliseconds(), tokens / len(clock.marks) / images))
        ms, tau = median(one[0] for one in found), median(one[1] for one in found)
        figures = {"ms_per_step": ms, "tokens_per_step": tau, "ms_per_token": ms / tau, "first_seconds": first}
        return {name: rounded(figure) for name, figure in figures.items()} | {"passes": type(decoder.target).__name__}

    def begin(self, decoder: Decoder, condition: Condition, most: int | None) -> tuple[Clock, int]:
        """Decode at most so many steps; return their times and the tokens of all images."""
        clock = Clock(self.device)

        def watch(step: Step) -> bool:
            clock(step)
            return most is not None and len(clock.marks) > most

        keys = [(0, number) for number in range(condition.batch)]
        made = decoder.generate(condition, keys=keys, callback=watch)
        return clock, made.tokens.numel() if made.known is None else int(made.known.sum())

    def with_share(self, figures: Figures, target: Any, images: int = 1, kv_cache: KvCache = "full") -> Figures:
        """Add the least time of a pass at the bandwidth of a copy, and its share of the step."""
        rows, cached = images * self.sampling.rows, target.config.block_size // 2
        read = pass_bytes(target, rows=rows, cached=cached, kv_cache=kv_cache)
        floor = 1e3 * read / self.found["sections"]["machine"]["copy_gbps"] / 1e9
        return figures | {"floor_ms": rounded(floor), "share": rounded(floor / figures["ms_per_step"])}

    def products(self) -> str:
        """Return the kind of products with the fastest plain decoding."""
        known = self.found["sections"].get("plain", {})
        spent = {kind: known[kind]["ms_per_step"] for kind in PRODUCTS if "ms_per_step" in known.get(kind, {})}
        return min(spent, key=spent.__getitem__, default=PRODUCTS[0])

    def machine(self) -> None:
        """What it is, the bandwidth of copy and read, the gap between two kernels, what `auto` chooses and why."""
        for name, value in surroundings(self.device).items():
            self.put("machine", name, value)
        self.put("machine", "copy_gbps", rounded(copy_bandwidth(self.device)))
        if self.is_cuda:
            about = torch.cuda.get_device_properties(self.device)
            self.put("machine", "processors", about.multi_processor_count)
            x, big = torch.zeros(1, device=self.device), torch.ones(1 << 30, dtype=torch.bfloat16, device=self.device)
            many = partial(lambda: [x.add_(1) for _ in range(200)])
            self.measure("machine", "gap_us", lambda: rounded(1e3 * graph_ms(many) / 200))
            self.measure("machine", "read_gbps", lambda: rounded(big.nbytes / graph_ms(big.sum) / 1e6))
        self.measure("machine", "auto", self._chosen)  # builds a model and its kernels

    def _chosen(self) -> Figures:
        target, _ = self.model()
        chosen = AutoEngine().resolve(target)
        remark = chosen.remark(target) if isinstance(chosen, GraphEngine) else None
        return {"engine": chosen.name, "reason": chosen.reason, "remark": remark}

    def plain(self) -> None:
        """Plain decoding in six forms: milliseconds a token, share of the bandwidth; the kernels of a step by time."""
        target, _ = self.model()

        def shown(decoder: Decoder, **how: Any) -> Figures:
            return self.with_share(self.steps(decoder, **how), target)

        for kind in PRODUCTS if self.is_cuda else PRODUCTS[:2]:
            decoder = self.decoder("plain", GraphEngine(products=kind))
            self.measure("plain", kind, shown, decoder)
            self.measure("plain", f"{kind} kernels", self.kernels_of, decoder)
        self.measure("plain", "torch in a graph", shown, self.decoder("plain", TorchInGraph()))
        self.measure("plain", "eager", partial(shown, self.decoder("plain", EAGER), most=self.sizes.steps // 2))
        self.measure("plain", "compiled layers in a graph", lambda: self.with_share(self._compiled(target), target))

    @torch.no_grad()
    def _compiled(self, target: Transformer) -> Figures:
        """Time a step in the manner of gpt-fast: static cache, layers by torch.compile, all in one CUDA graph."""
        begun = time.perf_counter()
        step = CompiledPlain(target, self.sampling, compiles=not self.is_toy)
        step()  # compiles
        spent, ms, tokens = time.perf_counter() - begun, [], target.config.block_size
        for place in (tokens // 4, tokens // 2, 3 * tokens // 4):
            step.place.fill_(place)
            ms.append(graph_ms(step))
        figures = {"ms_per_step": rounded(median(ms)), "ms_per_token": rounded(median(ms)), "tokens_per_step": 1.0}
        return figures | {"compile_seconds": rounded(spent)}

    def pass_times(self) -> None:
        """T(n): milliseconds of a pass over n nodes after half of the image, as a graph, without what surrounds it."""

        @torch.no_grad()
        def of(prepared: Any, nodes: int) -> float:
            return rounded(graph_ms(passes_of(prepared, self.sampling.rows, [nodes])[nodes]))

        for kind in PRODUCTS if self.is_cuda else PRODUCTS[:1]:
            prepared = GraphEngine(products=kind).prepare(self.model()[0])
            for nodes in self.sizes.nodes:
                self.measure("pass_times", f"{kind} {nodes}", of, prepared, nodes)

    def drafted(self) -> None:
        """Milliseconds a token of drafted methods with their own draft and walk, at scripted tokens a step.

        Trees commit as many tokens as the script says. Windows keep what they sampled, so theirs is the time of their
        steps over the tokens that the script would commit.
        """
        engine = GraphEngine(products=self.products())
        self.measure("drafted", "plain", lambda: self.steps(self.decoder("plain", engine), most=self.sizes.steps))
        for name in self.sizes.scripted:
            for tree in self.sizes.trees:
                self.measure("drafted", f"{name} {tree}", self._scripted, name, engine, tree)
        for window in self.sizes.windows:
            self.measure("drafted", f"gumbel-jacobi {window}", self._of_window, engine, window)
        for name in ("eagle1", "lantern++"):
            decoder = partial(self.decoder, name, engine, tree=self.sizes.trees[-1])
            self.measure("drafted", f"{name} kernels", lambda decoder=decoder: self.kernels_of(decoder()))

    def _scripted(self, name: str, engine: Engine, tree: str) -> Figures:
        made, found = self.decoder(name, engine, tree=tree), Figures()
        drafter: Any = made.drafter
        for tau in self.sizes.taus:
            if tau <= drafter.depth + 1:
                counts = script(tau, made.target.config.block_size - 1)
                one = scripted(made, counts, drafter.tree.shape())
                found[f"{tau:g}"] = self._at(tau, self.steps(one, most=self.sizes.steps))
        return found

    def _of_window(self, engine: Engine, window: int) -> Figures:
        figures = self.steps(self.decoder("gumbel-jacobi", engine, window=window), most=self.sizes.steps)
        return {f"{tau:g}": self._at(tau, figures) for tau in self.sizes.taus if tau <= window}

    def _at(self, tau: float, figures: Figures) -> Figures:
        """Return milliseconds a token at `tau` tokens a step, and the speedup over the fastest plain decoding."""
        sections = self.found["sections"]
        known = [one["ms_per_step"] for one in sections.get("plain", {}).values() if "share" in (one or ())]
        known += [one["ms_per_step"] for one in [sections.get("drafted", {}).get("plain", {})] if "passes" in one]
        ms = figures["ms_per_step"] / tau
        speedup = {"speedup": rounded(min(known) / ms)} if known else {}
        return {"ms_per_step": figures["ms_per_step"], "ms_per_token": rounded(ms), **speedup}

    def exact(self) -> None:
        """Bits: tokens of exact methods in bf16 that differ from plain decoding's, of random weights of the size."""
        names = exact_methods({"eagle1"})
        images, seeds = self.sizes.exact
        settings: Figures = {"tree": self.sizes.trees[0]} if self.is_toy else {}
        condition = self.condition(self.model()[0].config, images)
        for kind in dict.fromkeys((self.products(), PRODUCTS[0])):
            make = partial(self.decoder, engine=GraphEngine(products=kind))
            plain = self._tokens(make("plain"), condition, seeds)
            for name in names[:1] if self.is_toy else names:
                made = partial(make, name, **settings)
                self.measure("exact", f"{name} {kind}", self._same, made, condition, plain)

    def int8(self) -> None:
        """Weights in 8 bits: plain decoding, drafted methods over the fastest full one, and bits of an exact method."""
        target, _ = self.model()
        condition, seeds = self.condition(target.config, 1), self.sizes.exact[1]
        engine, tree = GraphEngine(weights="int8"), self.sizes.trees[-1]
        plain, drafted = self.decoder("plain", engine), self.decoder("eagle1", engine, tree=tree)
        self.measure("int8", "plain", lambda: self.with_share(self.steps(plain), original(plain.target)))
        for name in ("eagle1", "lantern++")[: 1 if self.is_toy else 2]:
            self.measure("int8", f"{name} {tree}", self._scripted, name, engine, tree)
        expected = self._tokens(plain, condition, seeds)
        self.measure("int8", "eagle1 exact", self._same, lambda: drafted, condition, expected)

    def _tokens(self, decoder: Decoder, condition: Condition, seeds: int) -> Decoded:
        """Return the tokens of all seeds, the median seconds of a batch, and the number of passes."""
        made, spent, steps = list[Tensor](), list[float](), 0
        for seed in range(seeds):
            begun = time.perf_counter()
            one = decoder.generate(condition, keys=[(seed, image) for image in range(condition.batch)])
            made.append(one.tokens.cpu())
            spent.append(time.perf_counter() - begun)
            steps += int(one.steps.sum())
        return made, median(spent), steps

    def _same(self, make: Callable[[], Decoder], condition: Condition, plain: Decoded) -> Figures:
        """Return tokens a step, milliseconds an image, and the tokens that differ from plain decoding's."""
        try:
            decoder = make()
        except ValueError as error:
            return {"refused": str(error)}
        tokens, seconds, steps = self._tokens(decoder, condition, len(plain[0]))
        differing = sum(int((one != other).sum()) for one, other in zip(tokens, plain[0], strict=True))
        count, images = sum(one.numel() for one in tokens), len(tokens[0])
        figures: Figures = {"tokens": count, "differing": differing, "promise": decoder.promise(images)}
        return figures | {"tokens_per_step": rounded(count / steps), "ms_per_image": rounded(1e3 * seconds / images)}

    def embedded(self) -> None:
        """The embedded model: tokens a step, milliseconds an image, and tokens that differ, in batches of 1 and 8."""
        model = self._embedded()
        relaxed = ("lantern", "lantern++", "bounded", "bounded-window", "sjd")
        main = ("gumbel-jacobi", "eagle1", "eagle1-rejection", *relaxed)
        for images in self.sizes.embedded:
            condition = condition_of(model, PROMPTS, range(images))
            for guidance in self.sizes.guidance:
                sampling = model.sampling(guidance=guidance, temperature=1.0, top_k=0, top_p=1.0)

                def make(name: str, sampling: Sampling = sampling) -> Decoder:
                    return Generator(model, choose_method(model, name, sampling=sampling), sampling).parts

                plain = self._tokens(make("plain"), condition, self.sizes.seeds)
                names = list(dict.fromkeys(("plain", *main, *(exact_methods(model.add_ons) if images == 1 else ()))))
                for name in names[1:2] if self.is_toy else names:
                    label = f"{name} guidance {guidance:g} batch {images}"
                    self.measure("embedded", label, self._same, partial(make, name), condition, plain)

    def _embedded(self) -> Any:
        engine = GraphEngine() if self.is_cuda else EAGER
        return load_model("lantern-emoji", device=str(self.device), dtype="bf16", engine=engine)

    def batches(self) -> None:
        """Plain decoding of images, also with an fp8 cache, and steps of a window: tokens a second, peak memory."""
        target, _ = self.model()

        def of(name: str, settings: Figures, images: int, kv_cache: KvCache = "full") -> Figures:
            if self.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            engine = GraphEngine(products=self.products(), kv_cache=kv_cache)
            decoder, most = self.decoder(name, engine, **settings), None if name == "plain" else self.sizes.steps
            found = self.steps(decoder, images, most=most, repeats=1)
            found = self.with_share(found, target, images, kv_cache) if most is None else found
            forget_all()
            peak = torch.cuda.max_memory_allocated() / 2**30 if self.is_cuda else 0.0
            rate = 1e3 * images / found["ms_per_token"]
            return found | {"tokens_per_second": rounded(rate), "peak_gib": rounded(peak)}

        for images in self.sizes.batches:
            self.measure("batches", f"plain {images}", of, "plain", {}, images)
            self.measure("batches", f"plain {images} fp8", of, "plain", {}, images, "fp8")
            self.measure("batches", f"gumbel-jacobi {images}", of, "gumbel-jacobi", {"window": 4}, images)

    def shapes(self) -> None:
        """Plain decoding and a drafted method of other sizes, and of Janus."""
        engine = GraphEngine(products=self.products())

        def of(shape: str, tokens: int, name: str, settings: Figures) -> Figures:
            model = self.model(shape, tokens)
            made = self.steps(self.decoder(name, engine, model, **settings), most=self.sizes.steps)
            return self.with_share(made, model[0])

        methods: list[tuple[str, Figures]] = [("plain", {}), ("eagle1", {"tree": self.sizes.trees[-1]})]
        for shape, tokens in self.sizes.others:
            for name, settings in methods[: 1 if self.is_toy else 2]:
                self.measure("shapes", f"{shape} {tokens} {name}", of, shape, tokens, name, settings)
        for name in self.sizes.undrafted:
            self.measure("shapes", f"Janus {name}", self._of_janus, name)

    def _of_janus(self, name: str) -> Figures:
        self._models.clear()
        target = random_janus(*self.sizes.janus, self.device)  # type: ignore[misc]
        decoder = build_decoder(METHODS[name], target, sampling=Sampling(guidance=5.0), engine=GraphEngine())
        return self.steps(decoder, most=self.sizes.steps)

    def server(self) -> None:
        """Images a second of the server's worker, with all requests queued at once."""
        model = self._embedded()
        for name in self.sizes.undrafted:
            self.measure("server", name, self._served, model, name)

    def _served(self, model: Any, name: str) -> Figures:
        ended, failed = threading.Semaphore(0), list[str]()

        def send(kind: str, value: Any, index: int | None) -> None:
            if kind == "failed":
                failed.append(str(value)[:200])
            if kind != "partial":
                ended.release()

        worker, sampling = Worker(model, batch=8, waiting=256), model.sampling()
        worker.start()
        spent = []
        for _ in range(1 if self.is_toy else 2):  # the first captures
            prompts = [PROMPTS[number % len(PROMPTS)] for number in range(self.sizes.served)]
            jobs = [Job(Request(text, seed=number), name, sampling, send) for number, text in enumerate(prompts)]
            begun = time.perf_counter()
            worker.submit(jobs)
            for _ in jobs:
                if not ended.acquire(timeout=120):
                    raise TimeoutError("the worker finished no image in 120 seconds")
            spent.append(time.perf_counter() - begun)
        worker.stop(10)
        if failed:
            raise RuntimeError(failed[0])
        return {"images_per_second": rounded(self.sizes.served / spent[-1]), "first_seconds": rounded(spent[0])}

    def training(self) -> None:
        """Images a second of training the embedded target anew, on random tokens and captions."""
        model = self._embedded()
        for is_compiled, batch in self.sizes.training:
            self.measure("training", "compiled" if is_compiled else "torch", self._trained, model, is_compiled, batch)

    def _trained(self, model: Any, is_compiled: bool, batch: int) -> Figures:
        from lantern.training.data import Record
        from lantern.training.features import Conditions
        from lantern.training.loop import LoopConfig
        from lantern.training.target import TargetConfig, TargetTask

        own, steps = model.target.config, self.sizes.training_steps
        own = replace(own, n_layer=1) if self.is_toy else own
        loop = LoopConfig(steps=steps, warmup=1, decay=1)
        config = TargetConfig(own, loop, batch=batch, slots=own.cls_token_num, compile=is_compiled)
        generator, texts = torch.Generator().manual_seed(0), [f"caption {number}" for number in range(64)]
        record = partial(Record, kind="plain", concepts=(), style="", split="train")
        records = [record(image=number, captions=((text, 1.0),)) for number, text in enumerate(texts)]
        tokens = torch.randint(own.vocab_size, (64, own.block_size), generator=generator)
        features = torch.randn(64, config.slots, own.caption_dim, generator=generator)
        mask = torch.ones(features.shape[:2], dtype=torch.bool)
        captions = Conditions({text: number for number, text in enumerate(texts)}, features, mask)
        prepared: Any = SimpleNamespace(records=records)
        task = TargetTask(config, prepared, tokens, captions, model.vq.to("cpu")).to(self.device).train()
        optimizers, clock = task.optimizers(), Clock(self.device)
        batches = [task.batch(step, 0, self.device) for step in range(2)]  # training makes them in a thread
        for step in range(steps):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=loop.precision == "bf16"):
                loss = task(*batches[step % 2])["loss"]
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            clock()
        ms = clock.milliseconds()
        return {"ms_per_step": rounded(ms), "images_per_second": rounded(1e3 * batch / ms), "batch": batch}

    def tests(self) -> None:
        """The tests marked gpu, in a process of their own; none in a wheel."""
        folder = Path(__file__).resolve().parents[1] / "tests"
        files = [path for path in sorted(folder.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *map(str, files)]

        def run() -> Figures:
            left = max(self.until - time.monotonic(), 1)
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=left, cwd=folder.parent)
            except subprocess.TimeoutExpired as error:
                return {"error": "stopped", "output": str(error.stdout or "")[-2000:]}
            return {"exit_code": done.returncode, "output": (done.stdout + done.stderr)[-2000:]}

        if files and not self.is_toy:
            self.measure("tests", "gpu", run)

    def kernels_of(self, decoder: Decoder, steps: int = 8) -> list[Figures] | None:
        """Return the kernels of the first replayed steps, by time: launches and microseconds a step."""
        if not self.is_cuda:
            return None
        from torch.profiler import ProfilerActivity, profile

        recorder = profile(activities=[ProfilerActivity.CUDA])

        def watch(step: Step) -> bool:
            if step.index == SKIPPED_STEPS:
                torch.cuda.synchronize()
                recorder.start()
            is_last = step.index == SKIPPED_STEPS + steps
            if is_last:
                torch.cuda.synchronize()
                recorder.stop()
            return is_last

        decoder.generate(self.condition(decoder.target.config, 1), keys=[(0, 0)], callback=watch)
        spent = sorted(recorder.key_averages(), key=lambda one: -one.self_device_time_total)
        return [
            {"kernel": one.key[:90], "launches": one.count / steps, "us": rounded(one.self_device_time_total / steps)}
            for one in spent[:24]
        ]


def layer(
    x: Tensor, slot: Tensor, factors: Tensor, mask: Tensor, cache: Tensors, weights: Tensors, eps: float
) -> Float[Tensor, "r c"]:
    """One layer for one token per row (r c); factors (half 2), mask (1 s), keys and values of the cache (r h s d)."""
    (keys, values), (first, wqkv, wo, second, w13, w2) = cache, weights
    q, k, v = F.linear(F.rms_norm(x, first.shape, first, eps), wqkv).unflatten(-1, (3, keys.shape[1], -1)).unbind(1)
    q, k = (rotate(one, factors).to(x.dtype) for one in (q, k))
    keys.index_copy_(2, slot, k[:, :, None])
    values.index_copy_(2, slot, v[:, :, None])
    y = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask)
    x = x + F.linear(y[:, :, 0].flatten(1), wo)
    gate, up = F.linear(F.rms_norm(x, second.shape, second, eps), w13).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w2)


class CompiledPlain:
    """Plain decoding of one image with guidance as gpt-fast does it, step by step; the prompt is one slot of zeros.

    A static cache, layers by torch.compile, one CUDA graph a step (https://github.com/pytorch-labs/gpt-fast). One
    program serves all layers, since weights and caches are its arguments.
    """

    def __init__(self, target: Transformer, sampling: Sampling, *, compiles: bool = True) -> None:
        config, weight = target.config, target.output.weight
        self.target, self.sampling, self.rows = target, sampling, sampling.rows
        size = (self.rows, config.n_head, config.block_size + 1, config.head_dim)
        made = [torch.zeros(2, *size, dtype=weight.dtype, device=weight.device) for _ in target.layers]
        self.caches = [both.unbind() for both in made]
        self.place = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.token = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.slots = torch.arange(size[2], device=weight.device)
        names = ("attention_norm", "attention.wqkv", "attention.wo", "ffn_norm", "feed_forward.w13", "feed_forward.w2")
        self.weights: list[Any] = [tuple(block.get_submodule(name).weight for name in names) for block in target.layers]
        compiled: Any = partial(torch.compile, dynamic=False, fullgraph=True, disable=not compiles)
        self.layer, self.ends = compiled(layer), compiled(self._sample)

    def __call__(self) -> None:
        """Decode the token at `place`, and count."""
        config, eps = self.target.config, self.target.config.norm_eps
        x = self.target.tok_embeddings(self.token).expand(self.rows, -1)
        factors = self.target.rotary.table.index_select(0, self.place + config.cls_token_num)[0]
        mask = torch.where(self.slots <= self.place + 1, 0.0, -torch.inf)[None].to(x.dtype)
        for cache, weights in zip(self.caches, self.weights, strict=True):
            x = self.layer(x, self.place + 1, factors, mask, cache, weights, eps)
        self.token.copy_(self.ends(x))
        self.place.add_(1).clamp_(max=config.block_size - 1)

    def _sample(self, x: Float[Tensor, "r c"]) -> Tensor:
        logits = self.target.output(self.target.norm(x)).float()
        guided = logits[1] + (logits[0] - logits[1]) * self.sampling.guidance
        least = guided.topk(self.sampling.top_k).values[-1]
        noise = -torch.empty_like(guided).exponential_().log()
        return torch.where(guided < least, -torch.inf, guided + noise).argmax(-1, keepdim=True)


class TorchInGraph(GraphEngine):
    """Passes by torch, captured in a graph."""

    def without_kernels(self, target: Any) -> str:
        """Return a reason: this is a baseline."""
        return "torch's passes are measured"

    def why_not(self, target: Any, drafter: Any = None, *, can_wait: bool = True) -> str | None:
        """Return None: the sections choose where it runs."""
        return None


def exact_methods(parts: Container[str]) -> list[str]:
    """Return the methods that promise plain decoding's tokens, and whose trained parts are there."""
    exact = [m for m in METHODS.values() if m.is_identical and m.name != "auto"]
    return [m.name for m in exact if all(part in parts for part in m.made.needs)]


def graph_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds of one run, on a GPU as a replayed CUDA graph: the median of five times 20 replays."""
    run()
    if not torch.cuda.is_available():
        return 1e3 * run_times(run, torch.device("cpu"), 1)[0]
    for _ in range(2):
        run()
    graph, _ = capture(run)
    spent = []
    for _ in range(5):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        graph.replay()
        events[0].record()
        for _ in range(20):
            graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        spent.append(events[0].elapsed_time(events[1]) / 20)
    return median(spent)


def headline(
    minutes: float = opt(None, "time for everything, in minutes", 0.1, 10**4, required=True, metavar="M"),
    out: Path = opt(None, "folder of headline.json; a stopped run continues", required=True, metavar="DIR"),
    device: str = opt("cuda", "cuda (default), cuda:N or cpu"),
    toy: bool = opt(False, "rehearse with toy sizes"),
    sections: list[str] = opt([], "(default: all)", type=OneOf(list(SECTIONS))),
    worker: bool = opt(False, argparse.SUPPRESS),
) -> int:
    """Measure the headline table of a GPU within ten minutes.

    What the file has stays. Returns 1 if a section is missing at the end.
    """
    path, begun, sections = out.resolve() / "headline.json", time.monotonic(), sections or list(SECTIONS)
    if worker:
        work(path, sections, ending=begun + 60 * minutes, device=torch.device(device), is_toy=toy)
        return DONE
    pick_device(device)  # refuses a GPU that is not there
    out.mkdir(parents=True, exist_ok=True)

    def left() -> list[str]:
        return [name for name in sections if name not in read(path)["finished"]]

    while left() and (seconds := begun + 60 * minutes - time.monotonic()) > 10:
        how = ["--minutes", str(seconds / 60), "--out", str(out), "--device", device]
        words = [*how, *(["--toy"] if toy else []), "--sections", *sections, "--worker"]
        try:
            done = subprocess.run([sys.executable, "-m", "lantern.eval.gpu_headline", *words], timeout=seconds)
        except subprocess.TimeoutExpired:
            break
        if done.returncode and not skip(path, left()):
            break
    return DONE if not left() else FAILED


def skip(path: Path, left: Sequence[str]) -> bool:
    """Leave out the section that ended the process; return whether there was one."""
    found = read(path)
    if (name := found.get("under_way")) not in left:
        return False
    found["ended_the_process"] = [*found.get("ended_the_process", ()), name]
    found["finished"].append(name)
    write_json(path, found)
    return True


def read(path: Path) -> Figures:
    """Return what has been measured so far."""
    found = read_json_object(path) if path.is_file() else {}
    return {"finished": [], "seconds": {}, "sections": {}} | found


def work(path: Path, sections: Sequence[str], *, ending: float, device: torch.device, is_toy: bool) -> None:
    """Measure the sections that are missing, in this process, until the clock reads `ending`."""
    found = read(path)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    bench = Bench(device, is_toy, found, lambda: write_json(path, found))
    for name in [one for one in sections if one not in found["finished"]]:
        found["under_way"], begun = name, time.monotonic()
        bench.until = ending if is_toy else min(begun + SECTIONS[name], ending)
        bench.save()
        faulthandler.dump_traceback_later(2 * SECTIONS[name] + SPARE, exit=True)
        bench.measure("errors", name, getattr(bench, name))
        faulthandler.cancel_dump_traceback_later()
        found["finished"].append(name)
        found["seconds"][name] = round(time.monotonic() - begun, 1)
        bench.save()
        print(f"{name}: {found['seconds'][name]:g} s", file=sys.stderr, flush=True)
        print(json.dumps({name: found["sections"].get(name)})[:1500], flush=True)


main = partial(run_command, command(headline), prog="python -m lantern.eval.gpu_headline")


if __name__ == "__main__":
    sys.exit(main())
