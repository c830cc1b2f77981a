"""Candidates of tuning under bounds."""

from typing import Any

import pytest

from lantern.generation.tuning.candidates import Bounds, swept, variants
from lantern.methods import METHODS

KID = Bounds(max_kid=0.001, quality={"lantern++": {"2.0": 0.0004, "5": 0.02}})


def found(bounds: Bounds, **changes: Any) -> list[str]:
    given: dict[str, Any] = {"has_drafter": True, "tokens": 256, "vocabulary": 2048, "has_table": True}
    return [variant.label for variant in variants(bounds, **(given | changes))]


def test_without_a_bound_only_exact_methods_are_candidates() -> None:
    names = {label.split()[0] for label in found(Bounds())}
    assert "eagle1" in names and all(METHODS[name].exact for name in names)


def test_a_bound_on_total_variation_admits_relaxed_methods_at_several_settings() -> None:
    labels = found(Bounds(max_tv=0.1))
    assert {"lantern++ lambda 2.0", "lantern delta 0.1", "bounded delta 0.1"} <= set(labels)
    exact = [METHODS[label.split()[0]].exact for label in labels]
    assert exact == sorted(exact, reverse=True)


def test_every_knob_is_a_setting_of_its_method() -> None:
    for method in (method for method in METHODS.values() if not method.exact):
        setting, values = swept(method)
        assert setting in method.settings
        assert list(values) in (sorted(values), sorted(values, reverse=True))
    assert not any(option.sweep for method in METHODS.values() if method.exact for option in method.options.values())


def test_kid_figures_admit_only_the_listed_settings() -> None:
    relaxed = [label for label in found(KID) if not METHODS[label.split()[0]].exact]
    assert relaxed == ["lantern++ lambda 2.0"]


def test_a_bound_on_kid_without_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="a bound on KID needs the figures of an evaluation"):
        Bounds(max_kid=0.01)


@pytest.mark.parametrize(
    "quality", [{"eagle9": {}}, {"lantern++": 3}, {"lantern++": {"x": 0.1}}, {"lantern++": {"2": None}}]
)
def test_damaged_kid_figures_are_refused(quality: Any) -> None:
    with pytest.raises(ValueError, match="quality figures"):
        Bounds(max_kid=0.01, quality=quality)


def test_without_a_drafter_there_are_windows_only() -> None:
    labels = found(Bounds(max_tv=0.5), has_drafter=False)
    assert labels and all("window" in label for label in labels)


def test_methods_with_add_ons_are_candidates_if_the_model_has_them() -> None:
    names = {label.split()[0] for label in found(Bounds())}
    assert not {"parallelspec", "fr-spec", "c2t"} & names
    names = {label.split()[0] for label in found(Bounds(), parts={"parallelspec", "c2t"})}
    assert "parallelspec" in names and not {"fr-spec", "c2t"} & names


def test_windows_are_at_most_as_long_as_the_picture() -> None:
    windows = [label for label in found(Bounds(), tokens=9) if "window" in label]
    assert windows and not [label for label in windows if int(label.rsplit(" ", 1)[1]) > 9]


def test_names_restrict_the_candidates() -> None:
    assert found(Bounds(), names=["eagle1"]) == ["eagle1"]
    with pytest.raises(ValueError, match="cannot be tuned"):
        found(Bounds(), names=["eagle9"])
    with pytest.raises(ValueError, match="--max-tv"):
        found(Bounds(), names=["lantern++"])


def test_methods_that_need_a_drafter() -> None:
    needy = {name for name, method in METHODS.items() if method.made.reads_drafter}
    assert {"eagle1", "lantern++"} <= needy and not needy & {"plain", "sjd", "gumbel-jacobi"}
