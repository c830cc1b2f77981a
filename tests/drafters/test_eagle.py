"""EAGLE-1: drafts match its teacher-forced pass."""

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.eagle.eagle1 import Eagle, EagleConfig
from lantern.drafters.trees.static import named
from tests.tiny import tiny_condition, tiny_eagle, tiny_target
from tests.tiny_decoder import TARGET
from tests.uncached import uncached

CONDITION = tiny_condition((4, 2))


def true_features(tokens: Tensor, sampling: Sampling) -> Tensor:
    """Features (b r n c) that predict tokens 0 .. 15, without a cache, after the prompt's six slots."""
    return uncached(TARGET, CONDITION, tokens, "features", rows=sampling.rows)


def test_guided_features_give_guided_logits() -> None:
    sampling, tokens = Sampling(guidance=3), torch.zeros(2, 16, dtype=torch.long)
    features, where = true_features(tokens, sampling)[:, :, 5:21], torch.arange(16).expand(2, -1)
    logits = TARGET.head(features.flatten(0, 1)).unflatten(0, (2, 2))
    guided = sampling.filtered(TARGET.head(sampling.guide(features, where)))
    assert (sampling.log_probs(logits, where) - guided).abs().max() < 1e-4


def test_untrained_module_repeats_the_feature() -> None:
    module = Eagle(EagleConfig.for_target(TARGET.config))
    module.init_weights(TARGET.tok_embeddings.weight, torch.Generator().manual_seed(0))
    features, tokens = torch.randn(1, 5, 32), torch.randint(24, (1, 5))
    out = module.training_forward(features, tokens, scales=torch.full((1, 5), 3.0))
    assert torch.allclose(out, features + 0.05 * TARGET.tok_embeddings(tokens), atol=1e-5)


def test_state_dict_has_the_published_names() -> None:
    names = set(Eagle(EagleConfig.for_target(TARGET.config, form="rows")).state_dict())
    assert names == {
        "embed_tokens.weight",
        "fc.weight",
        "fc.bias",
        "layers.0.attention.wqkv.weight",
        "layers.0.attention.wo.weight",
        "layers.0.feed_forward.w1.weight",
        "layers.0.feed_forward.w2.weight",
        "layers.0.feed_forward.w3.weight",
        "layers.0.ffn_norm.weight",
    }
    assert set(Eagle(EagleConfig.for_target(TARGET.config)).state_dict()) == names | {"guidance"}


def test_drafters_of_another_target_raise() -> None:
    other = tiny_eagle(tiny_target(dim=48))
    with pytest.raises(ValueError, match="use a drafter trained for it"):
        EagleDrafter(other, TARGET, tree=named("chain_1"), mode="gumbel", sampling=Sampling())
