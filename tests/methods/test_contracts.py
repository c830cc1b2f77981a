"""What every method of the catalogue promises. A method that is added gets its promises checked by being listed."""

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.methods.registry import METHODS, Decoder, Method, build_decoder
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.proof.pictures import DISTRIBUTION, SMALL, p_value
from tests.tiny import select, tiny_condition, tiny_eagle, tiny_target
from tests.tiny_parts import tiny_parts

TARGET = tiny_target()
CODEBOOK = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))
TABLE = proximity_table(CODEBOOK, 23)
CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]
# every method as it is, and woven trees of more than their own drafter
SPECS: dict[str, Method] = {
    **METHODS,
    **{f"woven:drafter={name}": METHODS["woven"].with_options(drafter=name) for name in ("eagle3", "poss", "vispec")},
    "bounded-woven:drafter=eagle3": METHODS["bounded-woven"].with_options(drafter="eagle3"),
}
SAMPLINGS = [Sampling(guidance=3), Sampling(guidance=1, top_k=6, top_p=0.9), Sampling(guidance=3, temperature=0)]


def toy_sized(method: Method) -> Method:
    k = method.settings.get("k")
    return method if k is None else method.with_options(k=min(k, 10))


def parts(name: str, sampling: Sampling, form: str = "guided") -> Decoder:
    method = toy_sized(SPECS[name])
    module = tiny_eagle(TARGET, form=form)
    return build_decoder(
        method,
        TARGET,
        sampling=sampling,
        drafter_module=module,
        add_ons=tiny_parts(TARGET),
        neighbours=TABLE,
        codebook=CODEBOOK,
    )


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["sampled", "filtered", "greedy"])
@pytest.mark.parametrize("form", ["guided", "rows"])
def test_grids_are_whole_and_the_account_adds_up(name: str, sampling: Sampling, form: str) -> None:
    made = parts(name, sampling, form).generate(CONDITION, keys=KEYS)
    assert made.codes.shape == (3, 16) and made.codes.dtype == torch.int64
    assert (made.codes >= 0).all() and (made.codes < 24).all()
    assert (made.passes >= 1).all() and (made.passes <= 16).all()
    # A loop of its own commits several codes per pass without drafts.
    assert SPECS[name].spec.loop is not None or (made.passes + made.accepted.sum(1) >= 16).all()
    if SPECS[name].exact:
        assert made.relaxed.sum() == 0 and made.total_variation.sum() == 0
    else:
        assert made.total_variation_max is not None and (made.total_variation_max <= 1 + 1e-6).all()
        assert (made.total_variation <= 16 * made.total_variation_max).all() and (made.relaxed >= 0).all()
        assert (made.relaxed <= made.accepted.sum(1)).all()
        # At temperature 0 nothing can move but by the greedy form. Only relaxations know between which codes it moves.
        is_moved = SPECS[name].spec.relaxation is not None and not sampling.is_greedy
        assert not is_moved or (made.latent_distance is not None and (made.latent_distance >= 0).all())


@pytest.mark.parametrize("name", SPECS)
def test_a_picture_depends_on_its_key_alone(name: str) -> None:
    method = parts(name, SAMPLINGS[0])
    batch = method.generate(CONDITION, keys=KEYS).codes
    for order in ([2, 0, 1], [1], [0, 0]):
        made = method.generate(select(CONDITION, order), keys=[KEYS[i] for i in order])
        assert torch.equal(made.codes, batch[order])


@pytest.mark.parametrize("name", [name for name, method in SPECS.items() if method.exact])
def test_greedy_codes_of_exact_methods_are_those_of_plain_decoding(name: str) -> None:
    expected = parts("plain", SAMPLINGS[2]).generate(CONDITION, keys=KEYS).codes
    assert torch.equal(parts(name, SAMPLINGS[2]).generate(CONDITION, keys=KEYS).codes, expected)


@pytest.mark.parametrize("name", [name for name, m in SPECS.items() if m.spec.promise == "codes"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["sampled", "filtered", "greedy"])
def test_gumbel_methods_give_the_codes_of_plain_decoding(name: str, sampling: Sampling) -> None:
    expected = parts("plain", sampling).generate(CONDITION, keys=KEYS).codes
    assert torch.equal(parts(name, sampling).generate(CONDITION, keys=KEYS).codes, expected)


@pytest.mark.parametrize("name", [name for name, m in SPECS.items() if m.spec.promise == "distribution"])
def test_other_exact_methods_have_the_distribution_of_the_target(name: str) -> None:
    """Whole images of 4 codes out of 5, against the enumerated distribution."""
    method, target, pictures = SPECS[name], SMALL, 20_000
    method = method.with_options(tree="chain_2") if method.tree else method
    small = {"nodes": 8, "width": 3, "depth": 2}  # large trees cover all pictures and take minutes
    method = method.with_options(**{name: most for name, most in small.items() if method.settings.get(name, 0) > most})
    built = build_decoder(
        method, target, sampling=DISTRIBUTION, drafter_module=tiny_eagle(target), add_ons=tiny_parts(target)
    )
    codes = [
        built.generate(select(tiny_condition((3,)), [0] * 5000), keys=[(seed, i) for i in range(5000)]).codes
        for seed in range(pictures // 5000)
    ]
    assert p_value(torch.cat(codes)) > 1e-4
