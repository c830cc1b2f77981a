import pytest
import torch

from lantern.drafters.policies.c2t import C2T, C2TConfig, C2TPolicy
from lantern.drafters.policies.policy import TRAITS, traits_of
from tests.drafters.policies.layers import layer, pool


def classifier(**changes: object) -> C2T:
    module = C2T(C2TConfig(**changes))  # type: ignore[arg-type]
    module.init_weights(torch.Generator().manual_seed(0))
    return module


def test_confidence_is_the_logistic_of_the_output() -> None:
    module, given = classifier(), layer()
    chances, _ = C2TPolicy(module).chances(given, ())
    assert torch.allclose(chances.exp(), torch.sigmoid(module(traits_of(given))))


def test_network_of_three_traits_reads_only_those() -> None:
    module = classifier(traits=("joint", "entropy", "depth"))
    traits = torch.randn(5, len(TRAITS), generator=torch.Generator().manual_seed(1))
    other = traits.clone()
    others = [i for i, name in enumerate(TRAITS) if name not in module.config.traits]
    other[:, others] += 3.0
    assert torch.equal(module(traits), module(other))
    other[:, TRAITS.index("entropy")] += 3.0
    assert not torch.equal(module(traits), module(other))


def test_nodes_below_the_threshold_do_not_count() -> None:
    given = pool([[0.5, 0.2, 0.02]], [1, 1, 2], deepest=2, most=9)
    size = C2TPolicy(classifier(), threshold=0.1).preferred_size(given, ())
    assert size.nodes.tolist() == [2] and size.depth.tolist() == [1]


def test_unknown_traits_raise() -> None:
    with pytest.raises(ValueError, match="trait 'colour' is unknown"):
        C2TConfig(traits=("colour",))
