"""Medusa heads: drafts match training, and trees over their marginals stay exact."""

from dataclasses import replace

import pytest
import torch

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.drafters.heads.medusa import Medusa, MedusaConfig, MedusaDrafter
from lantern.drafters.trees.static import named
from lantern.methods import METHODS
from tests.drafters.sampled_trees import drafted
from tests.drafters.whole import whole_pictures
from tests.tiny import tiny_target
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET, made_of, tiny_decoder
from tests.tiny_parts import randomised


@torch.no_grad()
def test_children_of_one_depth_are_the_best_of_one_distribution() -> None:
    shape = named("0 1 2 0.0 0.1 1.0 0.0.0")
    module = randomised(Medusa(MedusaConfig.for_target(TARGET.config)))
    drafter = MedusaDrafter(module, TARGET, tree=shape, mode="gumbel", sampling=SAMPLING, records_log_q=True)
    _, drafts = drafted(drafter)
    known, tree, _ = drafts[2]
    log_q = tree.log_q[:, [0, 1, 4]]  # a node of each depth
    noise = Noise(KEYS, positions=16, vocab_size=24).gumbel(known[:, None] + torch.arange(3))
    best = (log_q + noise).argsort(-1, descending=True)
    for node, (depth, rank) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 0), (2, 0)], start=1):
        assert torch.equal(tree.tokens[:, node], best[:, depth, rank])


@torch.no_grad()
def test_heads_without_the_token_do_not_read_it() -> None:
    tokens = torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(0))
    given = whole_pictures(TARGET, CONDITION, tokens)
    for reads_token in (True, False):
        module = Medusa(MedusaConfig.for_target(TARGET.config, reads_token=reads_token))
        randomised(module)
        output = [module(given.guided, c, given.scales[:, None].expand(3, 16)) for c in (tokens, tokens.roll(1, 0))]
        assert torch.equal(*output) != reads_token


@torch.no_grad()
def test_untrained_heads_repeat_the_feature() -> None:
    module = Medusa(MedusaConfig.for_target(TARGET.config))
    module.init_for(TARGET, torch.Generator())
    features, tokens = torch.randn(2, 5, 32), torch.zeros(2, 5, dtype=torch.long)
    output = module(features, tokens, torch.full((2, 5), 3.0))
    assert torch.equal(output, features[:, :, None].expand(-1, -1, 4, -1))
    assert module.heads.embed_tokens is not None
    assert torch.equal(module.heads.embed_tokens.weight, TARGET.tok_embeddings.weight)


def test_shallow_heads_and_invalid_modes_raise() -> None:
    module = Medusa(MedusaConfig.for_target(TARGET.config, depths=2))
    for tree, mode, reported in (("chain_3", "gumbel", "guesses 2 tokens"), ("chain_2", "jacobi", "draft mode")):
        with pytest.raises(ValueError, match=reported):
            MedusaDrafter(module, TARGET, tree=named(tree), mode=mode, sampling=Sampling())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="train one for it"):
        MedusaDrafter(module, tiny_target(block_size=4), tree=named("chain_2"), mode="gumbel", sampling=Sampling())
    small = tiny_target(vocab_size=5)
    module = Medusa(MedusaConfig.for_target(small.config))
    with pytest.raises(ValueError, match="children at a node, wanted at most"):
        MedusaDrafter(module, small, tree=named("grown_99_1"), mode="gumbel", sampling=Sampling())


def test_relaxations_get_log_q() -> None:
    bounded, drafter = METHODS["bounded"].with_options(k=5).made, METHODS["medusa"].made.drafter
    assert drafter is not None
    records = replace(drafter, named={**drafter.named, "records_log_q": True})
    built = tiny_decoder(made_of("medusa", records, bounded.verifier))
    assert built.generate(CONDITION, keys=KEYS).total_variation.max() > 0
