"""Fair tests of pairs of methods: the same images by both, compared by codes per pass and total variation.

Both methods of a pair decode the same prompts with the same seeds, in batches. Codes per pass do not depend on the load
of the machine, so nothing is timed. Ratio and difference have bootstrap intervals over images, resampled for both
methods together. There is a verdict only where the interval excludes equality and both networks have as many decoder
layers and were trained for the same number of steps. Each batch is stored when it ends, so an interrupted run resumes.

A method followed by "@NAME" reads the network in parts/NAME instead of its own, as in "poss-paper@poss-1": an ablation
is the same method with another network.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lantern.core.config import one_line, read_json_object
from lantern.core.io import CONFIG_NAME, load_component, write_json
from lantern.eval.boards.axes import interval
from lantern.eval.boards.contest import NodeCount, Setting, how_to_get, made_with, parts_of, training_steps
from lantern.eval.boards.equal_budget import at_tree
from lantern.eval.boards.leaderboard_report import GENERATED, rewrite
from lantern.eval.boards.results import figures_mark
from lantern.eval.boards.rounds import as_dict, codes_ratio, open_folder, record, step_compression
from lantern.eval.metrics.distances import Estimate, mean_estimate
from lantern.eval.speed.contenders import assemble, condition_of, method_of
from lantern.eval.speed.race import rounded
from lantern.methods.registry import Method, add_ons_of, find_add_on
from lantern.methods.spec import DRAFTER, AddOn
from lantern.models.folder import FOLDER, Model, check_weights

VERSUS = "=="  # between the methods of a pair on the command line
PART = "@"  # between a method and the folder in parts/ whose network it reads
MARKED = re.compile(r"^<!-- pairs: (?!end)(\S+) -->$.*?^<!-- pairs: end -->$", re.MULTILINE | re.DOTALL)
BATCH = 8
LEAST = 3  # pictures, below which there is no verdict
# what the papers compare with, at the same tree or window; ablations; and our form of a method with the published one
PAIRS = (
    ("eagle2-paper", "eagle1-paper"),
    ("eagle3-paper", "eagle2-paper:depth=7"),
    ("eagle3-paper", "eagle3-paper@eagle3-unroll-1"),  # without training-time test
    ("eagle3-paper", "eagle3-paper@eagle3-unfused"),  # one layer of the target instead of three
    ("poss-paper", "eagle2-paper"),
    ("poss-paper", "poss-paper@poss-1"),
    ("poss-paper", "poss-paper@poss-3"),
    ("vispec-paper", "eagle2-paper:nodes=29,width=8,depth=3"),
    ("vispec-paper", "vispec-paper@vispec-no-globe"),
    ("fr-spec-paper", "eagle2-paper"),
    ("ddd-paper", "eagle2-paper:depth=11"),
    ("c2t-paper", "eagle2-paper"),
    ("c2t-paper", "eagle2-paper:nodes=44"),  # a quarter fewer nodes, as the paper's claim has it
    ("radar-paper", "eagle2-paper:depth=7"),
    ("radar-paper", "eagle2-paper:depth=3"),
    ("adt-tree-paper", "eagle2-paper"),
    ("parallelspec-paper", "eagle1-paper"),
    ("parallelspec:tree=chain_2", "eagle1:tree=chain_2"),
    ("parallelspec:tree=chain_4", "eagle1:tree=chain_4"),
    ("parallelspec:tree=chain_8", "eagle1:tree=chain_8"),
    ("medusa-paper", "medusa:tree=grown_63_4"),
    ("vertical", "medusa"),
    ("vertical", "vertical@vertical-ssd"),  # trained to predict features alone, as in SSD
    ("vadusa", "medusa"),
    ("self-cascade", "eagle1:tree=chain_4"),
    ("svip-paper", "eagle1:tree=chain_12"),
    ("sam-eagle1", "eagle1:tree=grown_12_2"),
    ("sam-paper", "sam"),
    ("scd:window=16", "sjd:window=16"),
    ("scd:window=32", "sjd:window=32"),
    ("scd:window=64", "sjd:window=64"),
    ("sjd++:window=16", "sjd:window=16"),
    ("gumbel-jacobi:window=16", "scd:window=16"),
    ("sjd-pac", "gumbel-jacobi:window=26"),  # as many nodes
    ("gsd", "sjd-paper"),
    ("specmquant-paper", "specmquant"),
    ("lantern-paper", "eagle2-paper:nodes=58,depth=5"),
    ("lantern-paper:shared=true", "lantern-paper"),
    ("lantern++-paper", at_tree("eagle1-rejection", "naive_extend_57")),
    ("cool-paper", at_tree("eagle1-rejection", "chain_5")),
    ("eagle1", "eagle1-rejection"),
    ("eagle2", "eagle2-paper"),
)


def parse_pair(text: str) -> tuple[str, str]:
    """Return the two methods of "A==B"; ValueError for another form."""
    first, sign, second = text.partition(VERSUS)
    if not sign or not first or not second or VERSUS in second:
        raise ValueError(f"--pairs {text[:60]!r}, wanted METHOD{VERSUS}METHOD, such as eagle2{VERSUS}eagle1")
    return first, second


@dataclass(frozen=True)
class Pairs:
    """Pairs of methods on the model of a `Setting`: `images` images of each method, `batch` at a time."""

    setting: Setting
    pairs: Sequence[tuple[str, str]]
    images: int = 64
    batch: int = BATCH

    @cached_property
    def specs(self) -> list[str]:
        """All methods, each once. ValueError for an unknown method or setting."""
        found = list(dict.fromkeys(spec for pair in self.pairs for spec in pair))
        for spec in found:
            name, part = split_part(spec)
            method = method_of(self.setting.model, name)
            if part:
                network_of(method)
        return found

    @cached_property
    def header(self) -> dict[str, Any]:
        """What must be the same when a run resumes; pairs and numbers of images may change."""
        shared = ("model", "fingerprint", "weights", "variant", "seed", "prompts", "surroundings")
        setting, options = self.setting, self.setting.options
        sampling = setting.model.sampling(**options.sampling)
        return (
            {name: setting.header[name] for name in shared}
            | {"parts": parts_of(setting.model), "sampling": dataclasses.asdict(sampling), "batch": self.batch}
            | {"commit": setting.surroundings["commit"]}
        )

    def measure(self) -> dict[str, Any]:
        """Decode what is missing and return all figures for JSON."""
        folder = open_folder(self.setting.options.run, self.header).path
        bar = self.setting.bar(len(self.specs), "methods", "methods")
        rows, records = {}, {}
        for spec in self.specs:
            try:
                records[spec] = self._records(spec, folder)
            except ValueError as error:
                command = how_to_get(self.setting.model, split_part(spec)[0])
                rows[spec] = {"reason": one_line(error)[:300]} | {"command": command}
            else:
                rows[spec] = self._row(spec, records[spec])
            bar.update(what=spec)
        bar.close()
        return {
            "what": "pairs",
            **self.header,
            "surroundings": self.setting.surroundings,
            "images": self.images,
            "methods": [{"method": spec} | row for spec, row in rows.items()],
            "pairs": [self._pair(pair, rows, records) for pair in self.pairs if all(spec in records for spec in pair)],
        }

    def _records(self, spec: str, folder: Path) -> list[dict[str, Any]]:
        """Return one record per image, from the folder or by decoding."""
        setting, found, decoder = self.setting, [], None
        for first in range(0, self.images, self.batch):
            numbers = range(first, min(first + self.batch, self.images))
            name = hashlib.sha256(f"{spec} {first} {len(numbers)}".encode()).hexdigest()[:16]
            path = folder / "batches" / f"{name}.json"
            if not path.is_file():
                if decoder is None:
                    model = setting.stable.model(setting.options.variant)
                    sampling = setting.model.sampling(**setting.options.sampling)
                    name, part = split_part(spec)
                    method = method_of(setting.model, name)
                    decoder = assemble(with_part(model, method, part), method, sampling)
                keys = [(setting.options.seed, number) for number in numbers]
                condition, count = condition_of(setting.model, setting.options.prompts, list(numbers)), NodeCount()
                made = decoder.generate(condition, keys=keys, prompts=None, callback=count)
                # total variation beyond a rule's bound, summed over the codes of an image
                beyond = [None] * len(numbers) if made.excess is None else made.excess.tolist()
                images = [record(made, 0.0, i) | {"excess": beyond[i]} for i in range(len(numbers))]
                write_json(path, {"nodes": count.per_pass, "images": images, "method": spec})
            entry = read_json_object(path)
            found += [image | {"nodes": entry["nodes"]} for image in entry["images"]]
        return found

    def _row(self, spec: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        codes = self.setting.model.target.config.block_size
        spent = torch.tensor([one["total_variation"] / codes for one in records], dtype=torch.float64)
        beyond = [one["excess"] for one in records if one["excess"] is not None]
        return {
            "step_compression": as_dict(step_compression(records, codes)),
            "total_variation": as_dict(mean_estimate(spent, seed=0)),
            "excess": sum(beyond) / (codes * len(beyond)) if beyond else None,
            "nodes_per_pass": rounded(sum(one["nodes"] for one in records) / len(records)),
            "made_with": self._made_with(spec),
        }

    def _made_with(self, spec: str) -> dict[str, Any]:
        """Return `made_with` of a method with the network that it read, and the decoder layers of its networks."""
        model, variant = self.setting.stable.model(self.setting.options.variant), self.setting.options.variant
        name, part = split_part(spec)
        made = made_with(model, name, variant)
        if part:
            own, read = network_of(method_of(model, name)).folder, f"{FOLDER}/{part}"
            others = {folder: steps for folder, steps in made["training_steps"].items() if folder != own}
            made["training_steps"] = others | {read: training_steps(model, read)}
        return made | {"layers": {folder: layers_of(model, folder) for folder in made["training_steps"]}}

    def _pair(
        self,
        pair: tuple[str, str],
        rows: Mapping[str, Mapping[str, Any]],
        records: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> dict[str, Any]:
        codes = self.setting.model.target.config.block_size
        mine, other = (rows[spec]["made_with"] for spec in pair)
        refusal = refusal_of(mine["training_steps"], other["training_steps"], images=self.images)
        refusal = refusal or refusal_of_layers(mine["layers"], other["layers"])
        ratio = codes_ratio(*(records[spec] for spec in pair))
        apart = variation_difference(*(records[spec] for spec in pair), codes=codes)
        return {
            "pair": list(pair),
            "codes_ratio": as_dict(ratio),
            "variation_difference": as_dict(apart),
            "no_verdict": refusal,
            "codes": None if refusal else verdict(ratio, 1.0, "more codes per pass", "fewer codes per pass"),
            "variation": None if refusal else verdict(apart, 0.0, "more total variation", "less total variation"),
        }


def split_part(spec: str) -> tuple[str, str]:
    """Return method and settings of "METHOD:SETTINGS@NAME", and the name, "" if there is none."""
    method, _, part = spec.partition(PART)
    return method, part


def network_of(method: Method) -> AddOn:
    """Return the network of a method that "@NAME" replaces; ValueError for a method that reads none."""
    name = method.spec.add_on or (DRAFTER if method.spec.needs_drafter else "")
    found = find_add_on(name)
    if found is None:
        raise ValueError(f'method "{method.name}" reads no trained network: give it without "{PART}NAME"')
    return found


def with_part(model: Model, method: Method, part: str) -> Model:
    """Return the model with the network of parts/PART in place of the one that a method reads.

    ValueError where the folder is missing, or holds a network of another kind or for another target.
    """
    if not part:
        return model
    entry, folder = network_of(method), (model.folder or Path()) / FOLDER / part
    if not folder.is_dir():
        raise ValueError(f"this model has no {FOLDER}/{part}")
    module = load_component(entry.module, entry.config, folder)
    if entry.names_target:
        names = {"drafter_name": f"add-on {part}", "model_name": model.name}
        check_weights(module.config.target, model.target, **names)
    module.requires_grad_(False).to(device=model.device, dtype=model.dtype)
    if entry.name == DRAFTER:
        return dataclasses.replace(model, drafter=module)
    others = {name: model.add_ons[name] for name in add_ons_of(method) if name != entry.name and name in model.add_ons}
    return dataclasses.replace(model, add_ons=others | {entry.name: module})


def layers_of(model: Model, name: str) -> int | None:
    """Return the decoder layers of a network of a model's folder, None where its config has no `layers`."""
    if model.folder is None:
        return None
    return read_json_object(model.folder / name / CONFIG_NAME).get("layers")


def variation_difference(
    mine: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], *, codes: int
) -> Estimate:
    """Return the difference of total variation per code, on the same images."""
    pairs = zip(mine, other, strict=True)
    apart = [(a["total_variation"] - b["total_variation"]) / codes for a, b in pairs]
    return mean_estimate(torch.tensor(apart, dtype=torch.float64), seed=0)


def verdict(found: Estimate, equal: float, above: str, below: str) -> str | None:
    """Return which side of equality the whole interval is on, None if it contains it."""
    assert found.low is not None and found.high is not None
    if found.low <= equal <= found.high:
        return None
    return above if found.value > equal else below


def refusal_of(mine: Mapping[str, int | None], other: Mapping[str, int | None], *, images: int) -> str | None:
    """Return why two methods allow no verdict: networks of other or unknown training, or too few images.

    Networks that both read do not matter, nor does training that only one needs.
    """
    if images < LEAST:
        return f"{images} images, wanted at least {LEAST}"
    own, its = only_own(mine, other), only_own(other, mine)
    if not own or not its or set(own.values()) == set(its.values()) != {None}:
        return None
    return f"trained for other numbers of steps: {listed(own)}; {listed(its)}"


def refusal_of_layers(mine: Mapping[str, int | None], other: Mapping[str, int | None]) -> str | None:
    """Return why the decoder layers of the networks that only one of two methods reads allow no verdict, or None.

    Networks without decoder layers, such as heads, are not compared.
    """
    both = only_own(mine, other), only_own(other, mine)
    own, its = ({name: layers for name, layers in one.items() if layers is not None} for one in both)
    if not own or not its or set(own.values()) == set(its.values()):
        return None
    return f"networks of other numbers of layers: {listed(own)}; {listed(its)}"


def only_own(mine: Mapping[str, int | None], other: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the networks that the other method does not read."""
    return {name: value for name, value in mine.items() if name not in other}


def listed(numbers: Mapping[str, int | None]) -> str:
    """Return networks with their numbers as text."""
    return ", ".join(f"{name} {number or 'not recorded'}" for name, number in numbers.items())


HOW = f"""{GENERATED}
`lantern leaderboard --pairs --from eval/results/pairs.json` rewrites it, and the pairs on the pages of methods.

Both methods of a pair decoded the same prompts with the same seeds. *Codes per pass* is the ratio of the first method
to the second, *total variation* the difference per code; brackets hold paired 95 % bootstrap intervals over images.
*Nodes* is the ratio of drafted nodes per pass; in a batch the trees of all images are as large as the largest.
*Beyond the bound* is the total variation per code that exceeds the bound of a rule that has one (`delta`).
There is a verdict only where an interval excludes equality and both networks have as many decoder layers and were
trained for the same number of steps. Nothing was timed.
A method followed by `@NAME` reads the network in `parts/NAME` instead of its own."""


def setting_of(figures: Mapping[str, Any]) -> str:
    """Return in a sentence what was measured with."""
    where, sampling = figures["surroundings"], figures["sampling"]
    return (
        f"Model {figures['model']} ({figures['fingerprint'][:12]}), {figures['variant']}, {figures['images']} images "
        f"per method in batches of {figures['batch']}, guidance {sampling['guidance']:g}, temperature "
        f"{sampling['temperature']:g}; torch {where['torch']}, lantern {where['lantern']}, commit "
        f"{figures['commit'][:12]}."
    )


def table_of(pairs: Sequence[Mapping[str, Any]], methods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return pairs as lines of a Markdown table; `methods` are the figures of the methods."""
    nodes = {one["method"]: one["nodes_per_pass"] for one in methods if "reason" not in one}
    text = ["| method | against | codes per pass | total variation | nodes | verdict |", "|---|---|---:|---:|---:|---|"]
    for one in pairs:
        drafted, other = (nodes[name] for name in one["pair"])
        share = f"{drafted / other:.2f}" if other else "-"
        said = one["no_verdict"] or ", ".join(word for word in (one["codes"], one["variation"]) if word) or "none"
        ratio, apart = interval(one["codes_ratio"], "{:.2f}"), interval(one["variation_difference"], "{:+.3f}")
        text.append("| " + " | ".join([*(f"`{name}`" for name in one["pair"]), ratio, apart, share, said]) + " |")
    return text


def with_pairs(text: str, figures: Mapping[str, Any]) -> str:
    """Return a page with the pairs of a method between each pair of marks: those that it is compared in first.

    Marks are the lines "<!-- pairs: METHOD -->" and "<!-- pairs: end -->". A method without figures gets a line that
    says so.
    """

    def made(mark: re.Match[str]) -> str:
        pairs = [one for one in figures["pairs"] if re.split("[:@]", one["pair"][0])[0] == mark[1]]
        lines = ["Not measured."]
        if pairs:
            lines = [*table_of(pairs, figures["methods"]), "", f"{setting_of(figures)} [How](../pairs.md)."]
        return "\n".join([f"<!-- pairs: {mark[1]} -->", "", *lines, "", "<!-- pairs: end -->"])

    return MARKED.sub(made, text)


def write_pages(figures: Mapping[str, Any], docs: Path) -> list[Path]:
    """Write the marked pairs of methods/*.md; return the files that changed."""
    return rewrite(docs, lambda text: with_pairs(text, figures))


def page(figures: Mapping[str, Any]) -> str:
    """Return the figures as a page in Markdown: the pairs, then the methods."""
    text = ["# Pairs of methods", "", f"<!-- {figures_mark(figures)} -->", "", HOW, "", setting_of(figures), ""]
    text += table_of(figures["pairs"], figures["methods"])
    text += ["", "| method | codes per pass | total variation per code | beyond the bound | nodes per pass |"]
    text += ["|---|---:|---:|---:|---:|"]
    for one in figures["methods"]:
        if "reason" in one:
            cells = ["not measured: " + one["reason"], "", "", ""]
        else:
            compression = interval(one["step_compression"], "{:.2f}")
            beyond = "-" if one.get("excess") is None else f"{one['excess']:.3f}"
            cells = [compression, interval(one["total_variation"], "{:.3f}"), beyond, f"{one['nodes_per_pass']:.0f}"]
        text.append("| " + " | ".join([f"`{one['method']}`", *cells]) + " |")
    return "\n".join(text) + "\n"


def lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the figures as lines of text, one per pair."""
    found = []
    for one in figures["pairs"]:
        ratio, apart = one["codes_ratio"], one["variation_difference"]
        text = f"codes per pass x {ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        if apart["value"] or apart["low"] != apart["high"]:
            text += f", total variation {apart['value']:+.4f} ({apart['low']:+.4f} to {apart['high']:+.4f})"
        said = [word for word in (one["codes"], one["variation"]) if word]
        if one["no_verdict"]:
            said = [f"no verdict: {one['no_verdict']}"]
        found.append("; ".join([f"{' against '.join(one['pair'])}: {text}", *said]))
    found += [f"{one['method']}: not measured, {one['reason']}" for one in figures["methods"] if "reason" in one]
    return found
