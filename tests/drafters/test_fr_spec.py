"""FR-Spec: drafts come from the given subset of codes, and all codes give EAGLE-1."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.io import load_component, save_component
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.drafters.eagle.fr_spec import FrequencyTable, nearest, repeated
from lantern.methods.registry import METHODS, Decoder, build_decoder
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.tiny import tiny_condition, tiny_eagle, tiny_target
from tests.tiny_parts import tiny_table

TARGET = tiny_target()
CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]
TABLE = proximity_table(torch.randn(24, 4, generator=torch.Generator().manual_seed(2)), 12)
RANKING = tiny_table(TARGET).ranking  # type: ignore[operator]


def parts_of(name: str = "fr-spec", form: str = "guided", sampling: Sampling | None = None, **settings: Any) -> Decoder:
    return build_decoder(
        METHODS[name].with_options(**settings),
        TARGET,
        sampling=sampling or Sampling(guidance=3, temperature=0.9),
        drafter_module=tiny_eagle(TARGET, form=form),
        add_ons={"fr-spec": tiny_table(TARGET)},
        neighbours=TABLE,
    )


def trees_of(parts: Decoder) -> tuple[Tensor, list[Step]]:
    steps: list[Step] = []
    made = parts.generate(CONDITION, keys=KEYS, callback=steps.append)
    return made.codes, [step for step in steps if step.tree is not None]


@pytest.mark.parametrize("form", ["guided", "rows"])
@pytest.mark.parametrize("near", [0, 5])
def test_head_over_all_codes_equals_eagle(form: str, near: int) -> None:
    drafted, eagles = (
        trees_of(parts)
        for parts in (
            parts_of("fr-spec", form, tree="narrow_10", codes=24, near=near),
            parts_of("eagle1", form, tree="narrow_10"),
        )
    )
    assert torch.equal(drafted[0], eagles[0])
    for mine, eagle in zip(drafted[1], eagles[1], strict=True):
        assert mine.tree is not None and eagle.tree is not None
        assert torch.equal(mine.tree.tokens, eagle.tree.tokens)


@pytest.mark.parametrize("form", ["guided", "rows"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0}])
def test_draft_vocabulary_does_not_change_the_picture(form: str, filters: dict[str, Any]) -> None:
    sampling = Sampling(guidance=3, **filters)
    expected = build_decoder("plain", TARGET, sampling=sampling).generate(CONDITION, keys=KEYS).codes
    for codes, near in ((6, 0), (6, 3), (1, 9)):
        tree = "narrow_10" if codes > 1 else "chain_3"
        parts = parts_of(form=form, sampling=sampling, codes=codes, near=near, tree=tree)
        assert torch.equal(parts.generate(CONDITION, keys=KEYS).codes, expected)


def test_drafts_are_frequent_codes_or_near_the_neighbours() -> None:
    frequent = set(RANKING[:4].tolist())
    codes, steps = trees_of(parts_of(codes=4, near=0, tree="narrow_10"))
    assert all(set(step.tree.tokens[:, 1:].flatten().tolist()) <= frequent for step in steps if step.tree is not None)
    codes, steps = trees_of(parts_of(codes=4, near=3, tree="narrow_10"))
    around, outside = nearest(TABLE, 3), 0
    for step in steps:
        assert step.tree is not None
        for image, start in enumerate(step.start.tolist()):
            if start >= 16:
                continue
            left, up = codes[image, start - 1], codes[image, start - 4] if start >= 4 else codes[image, start - 1]
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
    table = FrequencyTable.of_codes(torch.tensor([[3, 3, 1], [1, 5, 3]]), 6)
    assert table.ranking.tolist() == [3, 1, 5, 0, 2, 4]
    save_component(table.state_dict(), table.config, tmp_path / "fr-spec")
    again = load_component(FrequencyTable, type(table.config), tmp_path / "fr-spec")
    assert torch.equal(again.counts, table.counts) and again.config == table.config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"codes": 0}, "codes is 0, wanted a whole number of at least 1"),
        ({"codes": 2, "tree": "narrow_10"}, "the draft vocabulary has 2 codes, wanted at least 3 for this tree"),
        ({"near": 14}, "near is 14, wanted from 0 to 13"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parts_of(**settings)


def test_missing_and_foreign_tables_raise() -> None:
    method, module = METHODS["fr-spec"].with_options(near=2), tiny_eagle(TARGET)
    trained = {"fr-spec": tiny_table(TARGET)}
    with pytest.raises(ValueError, match="needs the proximity table"):
        build_decoder(method, TARGET, sampling=Sampling(), drafter_module=module, add_ons=trained)
    other = {"fr-spec": FrequencyTable.of_codes(torch.zeros(1, 4, dtype=torch.long), 30)}
    with pytest.raises(ValueError, match="is of 30 codes, the model has 24"):
        build_decoder(METHODS["fr-spec"], TARGET, sampling=Sampling(), drafter_module=module, add_ons=other)
