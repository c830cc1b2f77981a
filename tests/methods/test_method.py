"""What a method is: a function with a decorator, from which its options, needs and promise follow."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lantern.core.io import save_component
from lantern.core.sampling import Sampling
from lantern.drafters.windows import JacobiDrafter
from lantern.generation.generator import build_decoder
from lantern.generation.tuning import swept
from lantern.methods import METHODS, find
from lantern.methods.method import ADD_ONS, Made, Parts, add_on, lazy, method, opt, preset
from lantern.models.folder import AddOns
from lantern.training.drafter import kinds
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.relaxations.neighbours import proximity_table
from lantern.verifiers.relaxations.rule import Relaxation, Relaxed
from tests.methods import test_contracts as contracts
from tests.refusals import refused
from tests.tiny import tiny_condition, tiny_eagle, tiny_target
from tests.tiny_decoder import made_of
from tests.tiny_parts import tiny_part

TARGET = tiny_target()
DRAFTER = tiny_eagle(TARGET)
TABLE = proximity_table(torch.randn(24, 4, generator=torch.Generator().manual_seed(2)), 23)
KEYS = [(1, 0), (1, 1)]


@pytest.mark.parametrize("name", METHODS)
def test_a_declaration_is_whole(name: str) -> None:
    found = find(name)
    assert found.name == name and found.summary
    for option in found.options.values():
        assert option.help and option.parse(str(option.default)) == option.check(option.default) == option.default
    assert set(found.made.needs) <= set(ADD_ONS)
    if not found.exact:
        assert all(set(one) <= set(found.options) for one in swept(found)) and len(swept(found)) > 1


def test_what_a_method_lacks_is_named_and_parts_must_fit() -> None:
    how: Any = {"sampling": Sampling(), "add_ons": {"eagle1": DRAFTER}}
    refused(build_decoder, "eagle1", TARGET, sampling=Sampling(), match="needs a drafter")
    refused(build_decoder, "lantern", TARGET, **how, match="needs the proximity table")
    refused(build_decoder, "grouped", TARGET, **how, match="needs the vectors of the tokens")
    wanted = 'needs the trained part "medusa".* medusa --model FOLDER` .* as parts/medusa'
    refused(build_decoder, "medusa", TARGET, sampling=Sampling(), match=wanted)
    odd = made_of("eagle1", METHODS["eagle1"].made.drafter, METHODS["eagle1-rejection"].made.verifier)
    refused(build_decoder, odd, TARGET, **how, match="use one of iid, point, sampled")


def test_needs_and_changes_follow_from_the_options() -> None:
    assert METHODS["fr-spec"].made.columns(2048) == 0
    assert METHODS["lantern"].with_options(k=5, residual="released").made.columns(2048) == 6
    assert [METHODS["lantern"].with_options(k=k).made.columns(2048) for k in (0.25, 0.5)] == [513, 1024]
    assert not METHODS["sjd"].made.needs and METHODS["eagle1"].made.needs == ("eagle1",)
    assert METHODS["ddd"].made.needs_host and not METHODS["ddd"].with_options(adaptive=False).made.needs_host
    assert METHODS["lantern"].with_options(k=5, delta=0.1).changed() == {"k": 5}
    assert METHODS["lantern++"].with_options(**{"lambda": 3.0}).spec == "lantern++:lambda=3.0"
    assert METHODS["plain"].spec == "plain"


@pytest.mark.parametrize("name", METHODS)
def test_damaged_options_are_refused_in_one_line(name: str) -> None:
    for option, value in METHODS[name].settings.items():
        others: list[Any] = [] if isinstance(value, bool) else [True]
        others += [] if isinstance(value, str) else ["x y"]
        others += [2.5, -7] if type(value) is int else []
        for damaged in [float("nan"), [], {}, None, *others]:
            with pytest.raises(ValueError, match=option.rstrip("_")) as caught:
                METHODS[name].with_options(**{option: damaged})
            assert "\n" not in str(caught.value)


STATIC, DYNAMIC = "wanted a static one", "wanted eagle2_NODES_WIDTH_DEPTH"
LACKED = 'method "lantern" has no setting window: it takes tree, k, delta, residual'


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lantern", {"delta": 2}, "delta is 2, wanted a number from 0 to 1"),
        ("gumbel-jacobi", {"window": 10**400}, "wanted a whole number from 2 to"),
        ("lantern", {"residual": "papre"}, "wanted one of paper, released, cool; did you mean 'paper'"),
        ("lantern", {"window": 4}, LACKED),
        ("lantern-released", {"k": 1024}, "k asks for 1025 nearest tokens"),
        *(("eagle1", {"tree": tree}, DYNAMIC) for tree in ("eagle2_58_10", "eagle2_0_1_1", "eagle2_a_b_c")),
        *((name, {"tree": "eagle2_8_3_2"}, STATIC) for name in ("bounded", "vvs")),  # the noise shapes such a tree
    ],
)
def test_the_error_names_what_is_wanted(name: str, options: dict[str, Any], message: str) -> None:
    refused(lambda: METHODS[name].with_options(**options).describe(), match=message)


@pytest.mark.parametrize("name", ["lantern", "lantern++"])
@pytest.mark.parametrize(("tree", "mode"), [("eagle2_8_3_2", "point"), ("chain_2", "sampled")])
def test_a_dynamic_tree_is_not_sampled(name: str, tree: str, mode: str) -> None:
    method = METHODS[name].with_options(k=5, tree=tree)
    how: dict[str, Any] = {"sampling": Sampling(), "add_ons": {"eagle1": DRAFTER}, "neighbours": TABLE}
    decoder = build_decoder(method, TARGET, **how)
    drafter: Any = decoder.drafter
    assert drafter.mode == mode
    assert bool((decoder.generate(tiny_condition((4, 2)), keys=KEYS).total_variation > 0).all())


# -- a method is one file, its drafter, and a paragraph --------------------------------------------------------------
# This test module is the file; the paragraphs are the functions in the fixture.


class Size(nn.Module):
    def __init__(self, config: "SizeConfig") -> None:
        super().__init__()
        self.config, self.weight = config, nn.Parameter(torch.zeros(1))


@dataclass(frozen=True)
class SizeConfig:
    size: int = 4
    kind: str = "made-up-trained"
    target: str | None = None


def window(target: Any, size: int | Size) -> JacobiDrafter:
    """Return a window of a size, or of the size that a network has learned."""
    tokens = size if isinstance(size, int) else size.config.size
    return JacobiDrafter(target, window=tokens, keeps_distributions=False)


@pytest.fixture(autouse=True)
def _made_up() -> Iterator[None]:
    sized, match = lazy(__name__, "window"), lazy("lantern.verifiers.gumbel", "GumbelVerifier")
    with patch.dict(METHODS), patch.dict(ADD_ONS):

        @method()
        def made_up(m: Parts, *, size: int = opt(4, 2, 9, "tokens scored in one pass")) -> Any:
            """a window under another name"""
            return sized(m.target, size), match()

        @method()
        def made_up_trained(m: Parts) -> Any:
            """a window of a learned size"""
            return sized(m.target, m.part("made-up-trained")), match()

        add_on("made-up-trained", __name__, "Size", "SizeConfig", toy={"size": 5})
        preset("made-up-paper", "made-up", "another size", size=9)
        yield


def test_an_untrained_method_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find("made-up").with_options(size=3)
    assert found.is_identical and found.summary == "a window under another name"
    assert "size is 1, wanted a whole number from 2 to 9" in refused(found.option("size").parse, "1")
    decoder = build_decoder(found, TARGET, sampling=Sampling(guidance=3))
    plain = build_decoder("plain", TARGET, sampling=Sampling(guidance=3))
    tokens = [one.generate(tiny_condition((4, 2)), keys=KEYS).tokens for one in (decoder, plain)]
    assert torch.equal(tokens[0], tokens[1])
    monkeypatch.setitem(contracts.SPECS, "made-up", found)
    for case in ("sampled", "greedy", "top-k"):
        contracts.test_every_method_keeps_its_promise("made-up", case)


def test_a_trained_method_is_added_with_its_network(tmp_path: Path) -> None:
    assert "made-up-trained" in kinds() and find("made-up-trained").made.needs == ("made-up-trained",)
    assert "python FILE.py train drafter --config CONFIG.json" in ADD_ONS["made-up-trained"].command
    toy = tiny_part("made-up-trained", TARGET)
    save_component(toy.state_dict(), toy.config, tmp_path / "parts" / "made-up-trained")
    trained = AddOns(tmp_path, TARGET, model_name="toy")
    assert list(trained) == ["made-up-trained"] and isinstance(trained["made-up-trained"], Size)
    decoder = build_decoder("made-up-trained", TARGET, sampling=Sampling(), add_ons=trained)
    assert decoder.drafter is not None and decoder.drafter.max_nodes == 5
    message = 'needs the trained part "made-up-trained"'
    refused(build_decoder, "made-up-trained", TARGET, sampling=Sampling(), match=message)


class Half(Relaxation):
    def relax(self, log_p: Any, log_q: Any, *, depths: Any, levels: int) -> Relaxed:
        r = (log_p.exp() + log_q.exp()) / 2
        return Relaxed(r.log(), (r - log_p.exp()).abs().sum(-1) / 2)


class OwnMatch(GumbelVerifier): ...


def test_a_verifier_of_another_package_is_exact_only_if_it_says_so() -> None:
    relaxed, match = lazy("lantern.verifiers.relaxed", "RelaxedVerifier"), lazy(__name__, "OwnMatch")
    own, exact = lazy(__name__, "Half"), lazy("lantern.verifiers.gumbel", "GumbelVerifier")
    assert Made(verifier=relaxed(own(), exact())).promise == "relaxed"
    assert Made(verifier=match()).promise == "distribution"


def test_a_preset_changes_values_only() -> None:
    found = find("made-up-paper")
    assert found.settings == {"size": 9} and found.page == "made-up" and found.changed() == {}


def test_wrong_declarations_are_refused() -> None:
    refused(preset, "made-up-10", "made-up", "s", size=10, match="size is 10, wanted a whole number from 2 to 9")
    refused(preset, "made-up-other", "made-up", "another size", sise=9, match='"made-up" has no setting sise')
    refused(preset, "made-up-other", "nope", "s", match='method "nope" is unknown')
    declared = '"eagle1" is declared by lantern.methods.catalogue.eagle1 already'
    refused(preset, "eagle1", "made-up", "s", match=declared)
    refused(method(name="eagle1"), lambda m: Made(), match=declared)
    refused(method, lambda m: Made(), error=TypeError, match=r"without parentheses, wanted @method\(\)")
    refused(method(name="own:2"), lambda m: Made(), match='"own:2" has a name that is not of letters')
    for option in (opt(None), opt((1, 2))):
        refused(method(name="own"), lambda m, size=option: Made(), match="size of own is .*, wanted a number, a")
    wrong = {"size is 9, wanted a number from 0 to 1": opt(0.5, 0, 1, sweep=(9,)), "name it window": opt(4, fits=True)}
    for message, option in wrong.items():
        refused(method(name="own"), lambda m, size=option: Made(), match=message)
    refused(add_on, "medusa", "mine", "Heads", "Config", match='"medusa" is declared by lantern.* already')
    for made in (None, Parts().target, (METHODS["eagle1"].made.drafter, None)):
        function = method(name="own")(lambda m, made=made: made)
        method(name="own")(function)  # as a cell of a notebook that runs again
        refused(METHODS["own"].describe, match='"own" returned .*, wanted a drafter and a verifier')
    refused(Parts().part, "mine", match='the part "mine" is not declared')
    refused(getattr, Parts().target, "config", error=AttributeError, match="config of a part .* by `lazy`")


def test_a_number_of_neighbours_may_be_a_share_of_the_codebook() -> None:
    k = METHODS["lantern"].option("k")
    assert [k.parse(text) for text in ("0", "125", "0.061", "1", "1e-05")] == [0, 125, 0.061, 1, 1e-05]
    for text in ("1.5", "0.0", "-0.2", "1025", "nan", "0.x"):
        assert "wanted a whole number from 0 to 1024, or a share between 0 and 1" in refused(k.parse, text)
