"""The table of a model card: Markdown made of the figures' JSON, between two marks of a README."""

from collections.abc import Iterator, Mapping
from typing import Any

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
COMMAND = "python -m lantern.eval.card"
Row = tuple[str, str, str]  # what, value, name of the figure


def insert(readme: str, block: str) -> str:
    """A README with what stands between its marks replaced; ValueError where it lacks them."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README has no lines {BEGIN} and {END}, between which the figures go: add them")
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


def render(card: Mapping[str, Any]) -> str:
    """The block of a card: the table, what it says of memorisation in words, and the commands."""
    figures = card.get("figures", {})
    rows = [row for kind, rows_of in ROWS.items() for row in (rows_of(figures[kind]) if kind in figures else [])]
    if not rows:
        return "No figure has been taken yet."
    lines = ["| figure | value | `--only` |", "|---|---|---|"]
    lines += [f"| {what} | {value} | {name} |" for what, value, name in rows]
    parts = ["\n".join(lines)]
    if "memorisation" in figures:
        parts.append(in_words(figures["memorisation"]))
    parts.append("\n".join(["Each figure again, on one thread or many:", "", *commands(figures)]))
    return "\n\n".join(parts)


def commands(figures: Mapping[str, Any]) -> list[str]:
    """The command of each figure, as a block of shell."""
    return ["```sh", *dict.fromkeys(figures[kind]["command"] for kind in ROWS if kind in figures), "```"]


def percent(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.1f} %"


def size_rows(sizes: Mapping[str, Any]) -> Iterator[Row]:
    """Parameters and bytes."""
    for name, size in sizes["components"].items():
        yield f"{name}: parameters", f"{size['parameters'] / 1e6:.2f} M, {size['bytes'] / 2**20:.1f} MiB", "size"
    total = sum(size["bytes"] for size in sizes["components"].values())
    yield "all weights", f"{total / 2**20:.1f} MiB", "size"


def reconstruction_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """PSNR and codebook."""
    name = "reconstruction"
    n = figure["heldout_pictures"]
    yield (
        f"reconstruction PSNR, {n} held-out cells (worst)",
        f"{figure['psnr_db']:.2f} dB ({figure['psnr_db_worst']:.2f})",
        name,
    )
    use = f"{percent(figure['codebook_used'])} of {figure['codebook_size']}, perplexity {figure['perplexity']:.0f}"
    yield f"codebook use, {figure['training_pictures']} training pictures", use, name


def loss_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """Validation and training loss."""
    for key, what in (("heldout", "held-out"), ("training", "training")):
        part = figure[key]
        losses = [part[f"nats_per_code{end}"] for end in ("", "_with_style", "_without_caption")]
        shown = " / ".join(f"{value:.3f}" for value in losses)
        yield f"loss on {part['pictures']} {what} cells: caption / with style / none", f"{shown} nats a code", "loss"
        gains = [part[f"caption{middle}_nats_per_picture"] for middle in ("", "_with_style")]
        shown = " / ".join(f"{value:.1f}" for value in gains)
        yield f"what the caption tells, {what}: name / name and style", f"{shown} nats a picture", "loss"


def entropy_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """Entropy of p."""
    for scale, law in figure["guidance"].items():
        cuts = " / ".join(f"{cut:.2f}" for cut in law["quantiles"].values())
        names = "/".join(key.rstrip("%") for key in law["quantiles"])
        yield (
            f"entropy of p at guidance {scale}, temperature 1: mean ({names} %)",
            f"{law['mean']:.2f} ({cuts}) nats",
            "entropy",
        )
        masses = f"{law['top1_mass_mean']:.2f} ({law['top1_mass_median']:.2f}), {law['top10_mass_mean']:.2f}"
        yield f"mass of the first code (median), of the first ten, at guidance {scale}", masses, "entropy"


RETRIEVAL_SETS = {
    "trained": "trained concepts",
    "styled": "trained cells, asked for with their style",
    "heldout": "held-out cells, asked for with their style",
    "synonyms": "synonyms that no caption holds",
    "reconstructed": "for comparison: reconstructions of trained pictures",
    "heldout_real": "for comparison: held-out real pictures",
    "real_across_styles": "for comparison: real pictures, among those of other styles alone",
}


def retrieval_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """Accuracy by set of prompts."""
    for key, what in RETRIEVAL_SETS.items():
        part = figure[key]
        shown = []
        for top in ("top1", "top5"):
            low, high = part[f"{top}_interval"]
            shown.append(f"{percent(part[top])} ({100 * low:.0f}-{100 * high:.0f})")
        yield f"nearest to its own concept, top-1 / top-5: {what}, n = {part['n']}", " / ".join(shown), "retrieval"
    chance = f"{percent(figure['chance_top1'])} / {percent(figure['chance_top5'])}"
    yield f"the same by chance, {figure['concepts']} concepts", chance, "retrieval"


def memorisation_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """Copies, and how far from training pictures."""
    name = "memorisation"
    for key, what in (("generated", "generated pictures"), ("heldout_real", "held-out real pictures")):
        part = figure[key]
        cuts = " / ".join(f"{cut:.2f}" for cut in part["ratio_quantiles"].values())
        yield f"copies among {part['n']} {what}", percent(part["copies"]), name
        yield f"distance to the nearest training picture over the tokenizer's error, {what} (10/50/90 %)", cuts, name
        yield (
            f"codes shared with it: mean; pictures that share 90 %, {what}",
            (f"{percent(part['same_codes_mean'])}; {percent(part['same_codes_copies'])}"),
            name,
        )
        yield f"cosine to the nearest training picture, {what}, median", f"{part['feature_cosine_median']:.3f}", name


def sheet_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """What a person recognises."""
    seen = figure["recognised"]
    value = "not yet counted" if seen is None else f"{seen} of {figure['prompts']}"
    yield f"prompts whose picture a person recognises on [the contact sheet]({figure['file']})", value, "sheet"


def in_words(figure: Mapping[str, Any]) -> str:
    """What the memorisation check found, plainly."""
    made, real = figure["generated"], figure["heldout_real"]
    return (
        f"**Does it copy?** {percent(made['copies'])} of {made['n']} pictures made from training captions are copies: "
        f"nearer to one of {figure['training_pictures']} training pictures than {figure['copy_ratio']:g} times "
        f"the error that the tokenizer alone makes on it. Of {real['n']} real pictures that were held out, "
        f"{percent(real['copies'])} lie so near. [{figure['sheet']}]({figure['sheet']}) shows sixteen generated "
        "pictures, from the nearest to the farthest, above their nearest training pictures."
    )


ROWS = {
    "size": size_rows,
    "reconstruction": reconstruction_rows,
    "loss": loss_rows,
    "entropy": entropy_rows,
    "retrieval": retrieval_rows,
    "memorisation": memorisation_rows,
    "sheet": sheet_rows,
}
