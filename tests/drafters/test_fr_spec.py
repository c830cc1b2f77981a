"""FR-Spec: drafts come from the given subset of tokens, and all tokens give EAGLE-1."""

from typing import Any

import pytest
import torch

from lantern.core.io import load_component, save_component
from lantern.core.sampling import Sampling
from lantern.drafters.eagle.fr_spec import FrequencyTable
from tests.drafters.sampled_trees import stepped
from tests.tiny_decoder import TARGET, tiny_decoder
from tests.tiny_parts import tiny_table

WARM = Sampling(guidance=3, temperature=0.9)
RANKING = tiny_table(TARGET).ranking  # type: ignore[operator]


@pytest.mark.parametrize("form", ["guided", "rows"])
def test_head_over_all_tokens_equals_eagle(form: str) -> None:
    how: dict[str, Any] = {"sampling": WARM, "form": form, "tree": "narrow_10"}
    drafted, eagles = (
        stepped(decoder) for decoder in (tiny_decoder("fr-spec", vocabulary=24, **how), tiny_decoder("eagle1", **how))
    )
    assert torch.equal(drafted[0].tokens, eagles[0].tokens)
    for mine, eagle in zip(drafted[1], eagles[1], strict=True):
        assert torch.equal(mine.tree.tokens, eagle.tree.tokens)


@pytest.mark.parametrize("form", ["guided", "rows"])
@pytest.mark.parametrize("sampling", [WARM, Sampling(temperature=0)])
def test_drafts_are_frequent_tokens(form: str, sampling: Sampling) -> None:
    frequent = set(RANKING[:4].tolist())
    _, steps = stepped(tiny_decoder("fr-spec", sampling=sampling, form=form, vocabulary=4, tree="narrow_10"))
    assert all(set(step.tree.tokens[:, 1:].flatten().tolist()) <= frequent for step in steps)


def test_ranking_is_by_count_then_by_number(tmp_path: Any) -> None:
    table = FrequencyTable.of_tokens(torch.tensor([[3, 3, 1], [1, 5, 3]]), 6)
    assert table.ranking.tolist() == [3, 1, 5, 0, 2, 4]
    save_component(table.state_dict(), table.config, tmp_path / "fr-spec")
    again = load_component(FrequencyTable, type(table.config), tmp_path / "fr-spec")
    assert torch.equal(again.counts, table.counts) and again.config == table.config


def test_tables_of_another_codebook_raise() -> None:
    other = {"fr-spec": FrequencyTable.of_tokens(torch.zeros(1, 4, dtype=torch.long), 30)}
    with pytest.raises(ValueError, match="is of 30 tokens, the model has 24"):
        tiny_decoder("fr-spec", add_ons=other)
