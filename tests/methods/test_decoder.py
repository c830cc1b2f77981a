"""The catalogue of methods."""

import subprocess
import sys

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.methods.registry import METHODS, build_decoder, find, neighbour_columns
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.tiny import tiny_condition, tiny_eagle, tiny_target

TARGET = tiny_target()
DRAFTER = tiny_eagle(TARGET)
TABLE = proximity_table(torch.randn(24, 4, generator=torch.Generator().manual_seed(2)), 23)
KEYS = [(1, 0), (1, 1)]
RELAXED = ("lantern", "lantern++", "cool", "grouped", "tolerance", "vadusa")
RELAXED += ("bounded", "bounded-window", "gsd", "lantern-paper", "lantern++-paper", "zipar", "pjd")
RELAXED += ("cool-paper", "medusa-paper", "vvs")


def test_an_unknown_method_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match='did you mean "lantern"'):
        find("lanter")


def test_what_a_method_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="needs a drafter"):
        build_decoder("eagle1", TARGET, sampling=Sampling())
    with pytest.raises(ValueError, match="needs the proximity table"):
        build_decoder("lantern", TARGET, sampling=Sampling(), drafter_module=DRAFTER)


def test_parts_that_do_not_fit_are_refused_with_the_legal_ones() -> None:
    odd = METHODS["eagle1"].with_spec(verifier="rejection")
    with pytest.raises(ValueError, match="use one of iid, point, sampled"):
        build_decoder(odd, TARGET, sampling=Sampling(), drafter_module=DRAFTER)


def test_auto_is_plain_unless_it_is_replaced_by_a_choice() -> None:
    assert build_decoder("auto", TARGET, sampling=Sampling(), drafter_module=DRAFTER).drafter is None


@pytest.mark.parametrize("name", METHODS)
def test_names_and_summaries_are_there(name: str) -> None:
    assert METHODS[name].name == name and METHODS[name].summary
    assert METHODS[name].exact == (name not in RELAXED)


def test_the_catalogue_costs_no_torch() -> None:
    code = "import sys, lantern.methods.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_table_is_only_read_up_to_k() -> None:
    method = METHODS["lantern"].with_options(k=5)
    both = [
        build_decoder(method, TARGET, sampling=Sampling(), drafter_module=DRAFTER, neighbours=table)
        .generate(tiny_condition((4, 2)), keys=KEYS)
        .codes
        for table in (TABLE, TABLE[:, :5])
    ]
    assert torch.equal(both[0], both[1])


def test_the_columns_of_the_proximity_table_follow_from_the_settings() -> None:
    assert neighbour_columns(METHODS["fr-spec"]) == 0
    assert neighbour_columns(METHODS["fr-spec"].with_options(near=3)) == 3
    assert neighbour_columns(METHODS["lantern"].with_options(k=5)) >= 5
