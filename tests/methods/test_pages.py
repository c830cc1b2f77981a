"""The pages of methods: each has all sections, a row of the leaderboard, and a list of what is not as published."""

import re
from pathlib import Path

import pytest

from lantern.methods import MethodSpec, specs

PAGES = Path(__file__).resolve().parents[2] / "docs/methods"
SECTIONS = ("Idea", "Equation", "Settings", "Measured", "Fair test", "Failures", "Reference")
DESCRIBED = [spec for spec in specs() if spec.name not in ("plain", "auto")]
PROMISES = {"codes": "in codes", "distribution": "in distribution", "relaxed": "relaxed"}
OTHER = {"not-included", "specforge"}  # pages of no method


def text_of(spec: MethodSpec) -> str:
    return (PAGES / f"{spec.page or spec.name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted({spec.page or spec.name for spec in DESCRIBED}))
def test_a_page_is_complete(page: str) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"^## (.+)$", text, re.M)
    assert [name for name in SECTIONS if name not in found] == [] and len(set(found)) == len(found)
    published = [name for name in found if name.startswith("As published")]
    differences = [name for name in found if name.startswith("Differences")]
    assert len(published) == len(differences) <= 1
    fair = text.partition("## Fair test\n")[2].partition("\n## ")[0]
    assert "<!-- pairs: " in fair or "](" in fair


@pytest.mark.parametrize("spec", DESCRIBED, ids=lambda spec: spec.name)
def test_a_method_has_its_promise_and_a_row_on_its_page(spec: MethodSpec) -> None:
    text = text_of(spec)
    assert f"<!-- row: {spec.name} -->" in text and f"`{spec.name}`" in text.partition("\n")[0]
    assert PROMISES[spec.promise] in " ".join(text.partition("\n## ")[0].lower().split())


def test_all_pages_are_of_methods() -> None:
    found = {path.stem for path in PAGES.glob("*.md")}
    assert found == {spec.page or spec.name for spec in DESCRIBED} | OTHER
