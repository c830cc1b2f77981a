"""EAGLE-1: drafts match its teacher-forced pass."""

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.eagle.eagle1 import Eagle, EagleConfig, Unroll
from lantern.drafters.trees.static import named
from tests.drafters.sampled_trees import eagle_drafts, ways
from tests.tiny import tiny_condition, tiny_eagle, tiny_target
from tests.tiny_decoder import TARGET
from tests.uncached import uncached

CONDITION = tiny_condition((4, 2))


def true_features(tokens: Tensor, sampling: Sampling) -> Tensor:
    """Features (b r n c) that predict tokens 0 .. 15, without a cache, after the prompt's six slots."""
    return uncached(TARGET, CONDITION, tokens, "features", rows=sampling.rows)


@torch.no_grad()
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("form", ["guided", "rows"])
def test_drafts_follow_the_teacher_forced_pass(form: str, guidance: float) -> None:
    """For every step and path log q equals one causal pass over true pairs, then drafted ones."""
    sampling = Sampling(guidance=guidance, guidance_interval=7 if form == "guided" else -1)
    module = tiny_eagle(TARGET, form=form)
    if form == "guided":
        module.guidance.data.normal_(generator=torch.Generator().manual_seed(5))
    _, tokens, drafts = eagle_drafts(module, TARGET, CONDITION, sampling=sampling)
    features = true_features(tokens, sampling)[:, :, :21]
    if form == "guided":
        features = sampling.guide(features[:, :, 5:], torch.arange(16).expand(2, -1))[:, None]
    prefix, rows = module.config.cls_token_num, features.shape[1]
    for known, tree, _ in drafts[:4]:
        for image, length in enumerate(known.tolist()):
            if length > 11:
                continue
            for node, path in ways(tree).items():
                inputs = features[image, :, : prefix + length]
                read = torch.cat([torch.zeros(prefix, dtype=torch.long), tokens[image, :length]])
                for step in range(len(path) + 1):
                    positions = torch.arange(len(read)).expand(rows, -1)
                    scales = sampling.scales(positions)
                    out = module(inputs, read.expand(rows, -1), positions, scales=scales)
                    if step < len(path):
                        inputs = torch.cat([inputs, out[:, -1:]], 1)
                        read = torch.cat([read, tree.tokens[image, path[step] : path[step] + 1]])
                logits = TARGET.head(out[:, -1:])
                place = torch.tensor([[length + len(path)]])
                expected = sampling.filtered(logits) if rows == 1 else sampling.log_probs(logits[None], place)
                assert (expected.flatten() - tree.log_q[image, node]).abs().max() < 1e-4


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


def test_unrolled_passes_see_what_drafting_sees() -> None:
    module = tiny_eagle(TARGET)
    features, tokens = torch.randn(2, 8, 32), torch.randint(24, (2, 8))
    unroll = Unroll()
    first = module.training_forward(features, tokens, unroll=unroll)
    assert torch.allclose(first, module.training_forward(features, tokens), atol=1e-5)
    shifted = [first]
    for _ in range(2):
        previous = torch.cat([features[:, :1], shifted[-1][:, :-1]], 1)
        shifted.append(module.training_forward(previous, tokens, unroll=unroll))
    # pair 5 drafted twice: true features up to pair 3, then the drafter's own at 4 and 5
    inputs = features[:, :4]
    for length in (4, 5):
        out = module.training_forward(inputs, tokens[:, :length])
        inputs = torch.cat([inputs, out[:, -1:]], 1)
    expected = module.training_forward(inputs, tokens[:, :6])[:, -1]
    assert torch.allclose(shifted[2][:, 5], expected, atol=1e-5)


def test_drafters_of_another_target_raise() -> None:
    other = tiny_eagle(tiny_target(dim=48))
    with pytest.raises(ValueError, match="use a drafter trained for it"):
        EagleDrafter(other, TARGET, tree=named("chain_1"), mode="gumbel", sampling=Sampling())
