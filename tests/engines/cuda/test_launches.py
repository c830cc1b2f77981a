"""Launches of a whole round at the size of LlamaGen-XL stay within what the tables of the documentation assume."""

import pytest

from lantern.drafters.trees.static import named
from lantern.methods import METHODS as CATALOGUE

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.engines.cuda.kernels import is_interpreted
from tests.engines.cuda.launches import METHODS, launches_of

MOST = {
    "plain": 237,
    "EAGLE-1": 308,
    "EAGLE-1, rejection": 310,
    "LANTERN++": 310,
    "LANTERN++, published tree": 352,
    "window of 16": 272,
}


@pytest.mark.skipif(not is_interpreted(), reason="launches are counted in Triton's interpreter")
@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=pytest.mark.slow if label.startswith("EAGLE-1") or "," in label else ())
        for label in MOST
    ],
)
def test_a_round_has_few_launches(label: str) -> None:
    name, settings = METHODS[label]
    # a launch is for all nodes of a window, or of a depth of a tree
    if tree := CATALOGUE[name].tree:
        settings = {"tree": f"chain_{named(tree).depth}"}
    elif "window" in settings:
        settings = {"window": 3}
    assert launches_of(name, settings=settings).total() <= MOST[label]
