"""How far matches go, and the command that writes SAM's tables."""

import json
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from lantern.drafters.lookup.suffix_automaton import SuffixAutomaton
from lantern.drafters.lookup.tables import SamTables
from lantern.models.folder import load_model
from lantern.training.sam_tables import agreement, corpus_lengths, main, own_lengths, shares
from tests.tiny_folder import save_tiny_model


def is_in(part: list[int], whole: list[int]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


@given(st.lists(st.integers(0, 2), min_size=2, max_size=18), st.lists(st.integers(0, 2), max_size=18))
def test_lengths_are_those_of_the_longest_suffixes(symbols: list[int], corpus: list[int]) -> None:
    own, other = own_lengths(symbols), corpus_lengths(SuffixAutomaton(corpus), symbols)
    for i in range(1, len(symbols)):
        output = symbols[:i]
        suffixes = [output[-n:] for n in range(1, i + 1)]
        assert own[i - 1] == max((len(s) for s in suffixes if is_in(s, output[:-1])), default=0)
        assert other[i - 1] == max((len(s) for s in suffixes if is_in(s, corpus)), default=0)


def test_shares_count_places() -> None:
    assert shares([0, 1, 3, 3])[:4] == [0.75, 0.5, 0.5, 0.0] and len(shares([])) == 8


def test_a_picture_of_the_corpus_matches_everywhere() -> None:
    codes = torch.randint(0, 9, (2, 16), generator=torch.Generator().manual_seed(0))
    codebook = torch.randn(9, 2, generator=torch.Generator().manual_seed(1))
    found = agreement(SamTables.of_codes(codes, codebook, groups=4), codes)
    assert found["corpus_super_codes"] == shares([n for _ in range(2) for n in range(1, 16)])
    assert found["own_codes"][0] <= found["own_super_codes"][0] <= 1


def test_the_command_writes_tables_that_draft(tmp_path: Path) -> None:
    folder, prompts, out = save_tiny_model(tmp_path / "tiny"), tmp_path / "prompts.txt", tmp_path / "sam.json"
    prompts.write_text("a red apple\na cat\n")
    arguments = ["--model", str(folder), "--prompts", str(prompts), "--groups", "5", "--out", str(out)]
    main([*arguments, "--parts", str(folder / "parts")])
    written = json.loads(out.read_text())
    assert written["pictures"] == 2 and len(written["own_codes"]) == 8
    tables = load_model(folder).add_ons["sam"]
    assert isinstance(tables, SamTables)
    assert tables.corpus.shape == (2, 16) and int(tables.group_of.max()) < 5
