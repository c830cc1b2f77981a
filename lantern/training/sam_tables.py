"""The tables that SAM drafts from, and the lengths of matching suffixes.

`python -m lantern.training.sam_tables` samples images of some prompts as a corpus (the add-on "sam": the images and
the super-codes). At each code of other images it finds the longest suffix that occurred before: among the image's
own codes, among its super-codes, and among the corpus's super-codes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from lantern.core.io import save_component, weights_digest, write_json
from lantern.drafters.lookup.suffix_automaton import SuffixAutomaton
from lantern.drafters.lookup.tables import SamTables
from lantern.eval.speed.surroundings import about
from lantern.generation.requests import read_prompts
from lantern.models.folder import load_model
from lantern.training.sampled_codes import sampled_codes

ROOT = Path(__file__).resolve().parents[2]
CORPUS, MEASURED = 1000, 3000  # seeds of the corpus and of the measured pictures
LONGEST = 8


def own_lengths(symbols: Sequence[int]) -> list[int]:
    """Return, before each symbol but the first, the length of the longest suffix that occurred earlier."""
    automaton, found = SuffixAutomaton(), []
    for symbol in symbols[:-1]:
        automaton.extend(symbol)
        found.append(automaton.repeat()[0])
    return found


def corpus_lengths(automaton: SuffixAutomaton, symbols: Sequence[int]) -> list[int]:
    """Return, before each symbol but the first, the length of the longest suffix that occurs in the corpus."""
    state, length, found = 0, 0, []
    for symbol in symbols[:-1]:
        state, length = automaton.step(state, length, symbol)
        found.append(length)
    return found


def shares(lengths: Sequence[int]) -> list[float]:
    """Return the share of places with a match of at least 1, 2, .. LONGEST symbols."""
    return [round(sum(length >= n for length in lengths) / max(len(lengths), 1), 5) for n in range(1, LONGEST + 1)]


def agreement(tables: SamTables, codes: Int[Tensor, "p n"]) -> dict[str, Any]:
    """Return shares of matches by length for images that are not in the corpus."""
    groups = tables.group_of.long()
    separated = [[*row, tables.config.groups] for row in groups[tables.corpus.long()].tolist()]
    corpus = SuffixAutomaton(symbol for row in separated for symbol in row)
    pictures = codes.tolist()
    super_codes = groups[codes].tolist()
    return {
        "at_least": list(range(1, LONGEST + 1)),
        "own_codes": shares([length for row in pictures for length in own_lengths(row)]),
        "own_super_codes": shares([length for row in super_codes for length in own_lengths(row)]),
        "corpus_super_codes": shares([length for row in super_codes for length in corpus_lengths(corpus, row)]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Write the match lengths, and the tables if a folder of parts is given.

    ValueError for a model without a VQ decoder.
    """
    parser = argparse.ArgumentParser(prog="python -m lantern.training.sam_tables", description=__doc__)
    parser.add_argument("--model", default="lantern-emoji")
    parser.add_argument("--prompts", default=str(ROOT / "assets" / "prompts" / "contact_sheet.txt"))
    parser.add_argument("--limit", type=int, default=32, help="the first so many prompts (32)")
    parser.add_argument("--groups", type=int, default=64, help="super-codes (64)")
    parser.add_argument("--parts", type=Path, metavar="DIR", help="folder to write the add-on sam to")
    parser.add_argument("--out", type=Path, default=ROOT / "eval" / "results" / "sam.json", metavar="FILE")
    args = parser.parse_args(argv)
    model = load_model(args.model, parts=("vq", "text"))
    if model.codebook is None:
        raise ValueError(f"model {model.name} has no vqvae/ folder, without which there are no super-codes")
    prompts = read_prompts(args.prompts)[: args.limit]
    digest = weights_digest(model.target.state_dict())
    corpus = sampled_codes(model, prompts, seed=CORPUS)
    tables = SamTables.of_codes(corpus, model.codebook.cpu().float(), groups=args.groups, target=digest)
    if args.parts is not None:
        save_component(tables.state_dict(), tables.config, args.parts / "sam")
    found = agreement(tables, sampled_codes(model, prompts, seed=MEASURED))
    write_json(args.out, about(model) | {"prompts": prompts, "groups": args.groups, "pictures": len(corpus)} | found)
    for name in ("own_codes", "own_super_codes", "corpus_super_codes"):
        print(f"{name:<20}" + "  ".join(f"{share:.3f}" for share in found[name]))


if __name__ == "__main__":
    main()
