"""The loop against plain decoding."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, DraftTree, Generation, Step, TreeShape, Verifier
from lantern.decoding import plain
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.trees.static import named
from lantern.models.llamagen.transformer import Transformer
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from tests.tiny import select, tiny_condition, tiny_eagle, tiny_target
from tests.tiny_decoder import SAMPLING, TARGET, generate

CONDITION = tiny_condition((4, 1, 6, 3))
KEYS = [(5, i) for i in range(4)]


def decode(
    target: Transformer = TARGET,
    condition: Condition = CONDITION,
    *,
    sampling: Sampling = SAMPLING,
    keys: list[tuple[int, int]] = KEYS,
    kind: type[EagleDrafter] = EagleDrafter,
    module: Any = None,
    form: str = "guided",
    tree: str = "narrow_10",
    mode: Any = "gumbel",
    verifier: Verifier = GumbelVerifier(),  # noqa: B008
    **watching: Any,
) -> Generation:
    """Decode with an EAGLE drafter, by default with Gumbel match and the drafter of the target."""
    drafter = kind(module or tiny_eagle(target, form=form), target, tree=named(tree), mode=mode, sampling=sampling)
    return generate(drafter, verifier, target=target, condition=condition, sampling=sampling, keys=keys, **watching)


def plainly(target: Transformer = TARGET, sampling: Sampling = SAMPLING) -> torch.Tensor:
    return plain.generate(target, CONDITION, sampling=sampling, keys=KEYS).tokens


@pytest.mark.parametrize("guidance", [1.0, 3.0, 7.5])
def test_tokens_of_64_seeds_equal_plain_decoding(guidance: float) -> None:
    sampling = Sampling(guidance=guidance)
    for first in range(0, 64, 16):
        keys = [(seed, 0) for seed in range(first, first + 16)]
        condition = select(CONDITION, [seed % 3 for seed in range(first, first + 16)])
        expected = plain.generate(TARGET, condition, sampling=sampling, keys=keys).tokens
        assert torch.equal(decode(TARGET, condition, sampling=sampling, keys=keys).tokens, expected)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(guidance=3, temperature=0),
        Sampling(guidance=1, temperature=0),
        Sampling(guidance=3, temperature=0.7, top_k=5),
        Sampling(guidance=2, top_p=0.6),
        Sampling(guidance=4, guidance_interval=5),
    ],
)
def test_tokens_equal_plain_decoding_with_all_sampling_options(sampling: Sampling) -> None:
    for form in ("guided", "rows"):
        assert torch.equal(decode(sampling=sampling, form=form).tokens, plainly(sampling=sampling))


def test_class_labels_are_a_condition() -> None:
    target = tiny_target(model_type="c2i", cls_token_num=1, num_classes=3)
    condition, how = Condition(labels=torch.tensor([0, 2])), {"sampling": Sampling(guidance=2), "keys": KEYS[:2]}
    expected = plain.generate(target, condition, **how).tokens  # type: ignore[arg-type]
    for form in ("guided", "rows"):
        assert torch.equal(decode(target, condition, form=form, **how).tokens, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [1, 4])
def test_trees_deeper_than_the_grid_are_cut(block_size: int) -> None:
    target = tiny_target(block_size=block_size)
    made = decode(target, sampling=Sampling(), tree="naive_extend_57")
    assert torch.equal(made.tokens, plainly(target, Sampling()))
    assert (made.steps <= block_size).all() and (made.steps >= 1).all()


def test_statistics_are_consistent() -> None:
    seen = list[Step]()
    made = decode(tree="mc_sim_7b_63", callback=seen.append, keep_history=True, is_timed=True)
    counts = torch.stack([step.counts for step in seen])
    assert (counts.sum(0) == 16).all()
    assert torch.equal((counts > 0).sum(0), made.steps)
    # every pass gives one token and the accepted ones, except for a path that ends one past the end
    assert ((made.steps + made.accepted.sum(1)) - 16 <= 1).all() and (made.steps + made.accepted.sum(1) >= 16).all()
    assert (made.accepted <= made.reached).all()
    assert torch.equal(made.tokens_per_step, 16 / made.steps.float())
    assert set(made.seconds) == {"prefill", "propose", "score", "walk"}
    assert len(made.history) == len(seen) and made.history[0].scores is None
    written = torch.zeros(4, 24, dtype=torch.long)
    for step in seen:
        for image in range(4):
            start, count = int(step.start[image]), int(step.counts[image])
            written[image, start : start + count] = step.tokens[image, :count]
    assert torch.equal(written[:, :16], made.tokens)


def test_perfect_drafts_are_all_accepted() -> None:
    class Oracle(EagleDrafter):
        """Proposes the final tokens."""

        def propose(self):  # type: ignore[no-untyped-def]
            tree = super().propose()
            where = self.known[:, None] - 1 + tree.shape.depths
            tree.tokens.copy_(ANSWER.gather(1, where.clamp(max=15)))
            return tree

    ANSWER = plainly()
    made = decode(kind=Oracle, tree="chain_4")
    assert torch.equal(made.tokens, ANSWER)
    assert made.steps.tolist() == [4] * 4  # the prompt, then three steps of five tokens
    assert torch.equal(made.accepted, made.reached)


class Batched(EagleDrafter):
    """Returns shapes with an image axis, as drafters whose trees differ between images do."""

    def propose(self) -> DraftTree:
        tree = super().propose()
        shape = tree.shape
        images = len(tree.tokens)
        batched = TreeShape(
            parents=shape.parents.expand(images, -1),
            ranks=shape.ranks.expand(images, -1),
            depths=shape.depths.expand(images, -1),
            ancestors=shape.ancestors.expand(images, -1, -1),
            widths=shape.widths,
        )
        return replace(tree, shape=batched)


@pytest.mark.parametrize("verifier", [GumbelVerifier(), RejectionVerifier()])
def test_shapes_may_have_an_image_axis(verifier: GumbelVerifier | RejectionVerifier) -> None:
    how: dict[str, Any] = {"tree": "mc_sim_7b_63", "mode": "sampled", "verifier": verifier}
    made = [decode(kind=kind, **how) for kind in (EagleDrafter, Batched)]
    assert torch.equal(made[0].tokens, made[1].tokens)
    assert torch.equal(made[0].accepted, made[1].accepted) and torch.equal(made[0].reached, made[1].reached)


def test_half_precision_decodes() -> None:
    target = tiny_target().bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        made = decode(target, module=tiny_eagle(target).to(dtype))
        assert made.tokens.shape == (4, 16) and (made.tokens_per_step > 1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_the_same_tokens() -> None:
    target = tiny_target().cuda()
    made = decode(target, module=tiny_eagle(target).cuda())
    assert torch.equal(made.tokens.cpu(), plainly())


def test_verifier_of_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match='mode "sampled": use one of gumbel, iid'):
        decode(mode="sampled", verifier=GumbelVerifier(modes=frozenset({"gumbel", "iid"})))
