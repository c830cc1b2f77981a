"""FR-Spec: drafts come from the given subset of tokens, and all tokens give EAGLE-1."""

from typing import Any

import pytest
import torch

from lantern.core.io import load_component, save_component
from lantern.core.sampling import Sampling
from lantern.drafters.eagle.fr_spec import FrequencyTable, nearest, repeated
from lantern.generation.decoder import build_decoder
from lantern.methods import METHODS
from tests.drafters.sampled_trees import stepped
from tests.tiny import tiny_eagle
from tests.tiny_decoder import CONDITION, KEYS, TARGET, plain_tokens, tiny_decoder, tiny_neighbours
from tests.tiny_parts import tiny_table

WARM = Sampling(guidance=3, temperature=0.9)
RANKING = tiny_table(TARGET).ranking  # type: ignore[operator]


@pytest.mark.parametrize("form", ["guided", "rows"])
@pytest.mark.parametrize("near", [0, 5])
def test_head_over_all_tokens_equals_eagle(form: str, near: int) -> None:
    how: dict[str, Any] = {"sampling": WARM, "form": form, "tree": "narrow_10"}
    drafted, eagles = (
        stepped(decoder)
        for decoder in (tiny_decoder("fr-spec", vocabulary=24, near=near, **how), tiny_decoder("eagle1", **how))
    )
    assert torch.equal(drafted[0].tokens, eagles[0].tokens)
    for mine, eagle in zip(drafted[1], eagles[1], strict=True):
        assert torch.equal(mine.tree.tokens, eagle.tree.tokens)


@pytest.mark.parametrize("form", ["guided", "rows"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0}])
def test_draft_vocabulary_does_not_change_the_picture(form: str, filters: dict[str, Any]) -> None:
    sampling = Sampling(guidance=3, **filters)
    expected = plain_tokens(sampling=sampling)
    for size, near in ((6, 0), (6, 3), (1, 9)):
        tree = "narrow_10" if size > 1 else "chain_3"
        parts = tiny_decoder("fr-spec", sampling=sampling, form=form, vocabulary=size, near=near, tree=tree)
        assert torch.equal(parts.generate(CONDITION, keys=KEYS).tokens, expected)


def test_drafts_are_frequent_tokens_or_near_the_neighbours() -> None:
    frequent = set(RANKING[:4].tolist())
    how: dict[str, Any] = {"sampling": WARM, "vocabulary": 4, "tree": "narrow_10"}
    _, steps = stepped(tiny_decoder("fr-spec", near=0, **how))
    assert all(set(step.tree.tokens[:, 1:].flatten().tolist()) <= frequent for step in steps)
    made, steps = stepped(tiny_decoder("fr-spec", near=3, **how))
    tokens, around, outside = made.tokens, nearest(tiny_neighbours(), 3), 0
    for step in steps:
        for image, start in enumerate(step.start.tolist()):
            if start >= 16:
                continue
            left, up = tokens[image, start - 1], tokens[image, start - 4] if start >= 4 else tokens[image, start - 1]
            allowed = frequent | set(around[left].tolist()) | set(around[up].tolist())
            children = step.tree.tokens[image, step.tree.shape.depths == 1].tolist()
            assert set(children) <= allowed and len(set(children)) == len(children)
            outside += bool(set(children) - frequent)
    assert outside > 0


def test_repeated_marks_all_but_first_occurrences() -> None:
    known = torch.zeros(6, dtype=torch.bool)
    known[2] = True
    found = repeated(torch.tensor([[1, 2, 1, 3, 3], [2, 0, 4, 5, 0]]), known)
    assert found.tolist() == [[False, True, True, False, True], [True, False, False, False, True]]


def test_ranking_is_by_count_then_by_number(tmp_path: Any) -> None:
    table = FrequencyTable.of_tokens(torch.tensor([[3, 3, 1], [1, 5, 3]]), 6)
    assert table.ranking.tolist() == [3, 1, 5, 0, 2, 4]
    save_component(table.state_dict(), table.config, tmp_path / "fr-spec")
    again = load_component(FrequencyTable, type(table.config), tmp_path / "fr-spec")
    assert torch.equal(again.counts, table.counts) and again.config == table.config


def test_missing_and_foreign_tables_raise() -> None:
    method, module = METHODS["fr-spec"].with_options(near=2), tiny_eagle(TARGET)
    trained = {"fr-spec": tiny_table(TARGET)}
    with pytest.raises(ValueError, match="needs the proximity table"):
        build_decoder(method, TARGET, sampling=Sampling(), drafter_module=module, add_ons=trained)
    other = {"fr-spec": FrequencyTable.of_tokens(torch.zeros(1, 4, dtype=torch.long), 30)}
    with pytest.raises(ValueError, match="is of 30 tokens, the model has 24"):
        build_decoder(METHODS["fr-spec"], TARGET, sampling=Sampling(), drafter_module=module, add_ons=other)
