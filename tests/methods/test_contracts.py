"""What every method of the catalogue promises. A method that is added gets its promises checked by being listed."""

from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.generation.decoder import Decoder
from lantern.methods import METHODS, Method
from tests.proof.pictures import DISTRIBUTION, SMALL, distance, p_value, pictures
from tests.tiny import select
from tests.tiny_decoder import CONDITION, KEYS, plain_tokens, shrunk, tiny_decoder

SPECS: dict[str, Method] = dict(METHODS)
SAMPLINGS = [Sampling(guidance=3), Sampling(guidance=1, top_k=6, top_p=0.9), Sampling(guidance=3, temperature=0)]


def parts(name: str, sampling: Sampling, form: str = "guided") -> Decoder:
    return tiny_decoder(SPECS[name], sampling=sampling, form=form)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["sampled", "filtered", "greedy"])
@pytest.mark.parametrize("form", ["guided", "rows"])
def test_grids_are_whole_and_the_account_adds_up(name: str, sampling: Sampling, form: str) -> None:
    made = parts(name, sampling, form).generate(CONDITION, keys=KEYS)
    assert made.tokens.shape == (3, 16) and made.tokens.dtype == torch.int64
    assert (made.tokens >= 0).all() and (made.tokens < 24).all()
    assert (made.steps >= 1).all() and (made.steps <= 16).all()
    assert made.is_finite is not None and made.is_finite.tolist() == [True, True, True]
    # A loop of its own commits several tokens per step without drafts.
    assert SPECS[name].made.driver is not None or (made.steps + made.accepted.sum(1) >= 16).all()
    if SPECS[name].exact:
        assert made.relaxed.sum() == 0 and made.total_variation.sum() == 0
    else:
        assert made.total_variation_max is not None and (made.total_variation_max <= 1 + 1e-6).all()
        assert (made.total_variation <= 16 * made.total_variation_max).all() and (made.relaxed >= 0).all()
        assert (made.relaxed <= made.accepted.sum(1)).all()
        # At temperature 0 nothing can move but by the greedy form. Only relaxations know between which tokens it moves.
        is_moved = SPECS[name].made.driver is None and not sampling.is_greedy
        assert not is_moved or (made.latent_distance is not None and (made.latent_distance >= 0).all())


@pytest.mark.parametrize("name", SPECS)
def test_a_picture_depends_on_its_key_alone(name: str) -> None:
    method = parts(name, SAMPLINGS[0])
    batch = method.generate(CONDITION, keys=KEYS).tokens
    for order in ([2, 0, 1], [1], [0, 0]):
        made = method.generate(select(CONDITION, order), keys=[KEYS[i] for i in order])
        assert torch.equal(made.tokens, batch[order])


@pytest.mark.parametrize("name", [name for name, method in SPECS.items() if method.exact])
def test_greedy_tokens_of_exact_methods_are_those_of_plain_decoding(name: str) -> None:
    expected = plain_tokens(sampling=SAMPLINGS[2])
    assert torch.equal(parts(name, SAMPLINGS[2]).generate(CONDITION, keys=KEYS).tokens, expected)


@pytest.mark.parametrize("name", [name for name, m in SPECS.items() if m.promise == "tokens"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["sampled", "filtered", "greedy"])
def test_gumbel_methods_give_the_tokens_of_plain_decoding(name: str, sampling: Sampling) -> None:
    assert torch.equal(parts(name, sampling).generate(CONDITION, keys=KEYS).tokens, plain_tokens(sampling=sampling))


@pytest.mark.parametrize("name", [name for name, m in SPECS.items() if m.promise == "distribution"])
def test_other_exact_methods_have_the_distribution_of_the_target(name: str) -> None:
    """Whole images of 4 tokens out of 5, against the enumerated distribution."""
    built = tiny_decoder(shrunk(SPECS[name]), SMALL, DISTRIBUTION)  # large trees cover all pictures and take minutes
    assert p_value(torch.cat([pictures(built, 5000, seed).tokens for seed in range(4)])) > 1e-4


@pytest.mark.parametrize(
    ("name", "settings"),
    [("zipar", {"lead": 1}), ("vvs", {"tree": "spine_1_2_1"})],
)
def test_the_reported_cost_is_that_of_the_distribution_of_pictures(name: str, settings: dict[str, Any]) -> None:
    """Pictures of 2 x 2 tokens out of 5 are farther from the target's distribution than chance, within the cost."""
    made = pictures(tiny_decoder(name, SMALL, DISTRIBUTION, **settings), 10_000, seed=3)
    found, chance = distance(made.tokens)
    assert chance * 1.5 < found < float(made.total_variation.mean()) + chance
