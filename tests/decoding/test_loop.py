"""The loop against plain decoding."""

from dataclasses import replace

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, DraftMode, DraftTree, Generation, Step, TreeShape
from lantern.decoding import loop, plain
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.trees.static import named
from lantern.models.llamagen.transformer import Transformer
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from tests.tiny import select, tiny_condition, tiny_eagle, tiny_target

TARGET = tiny_target()
CONDITION = tiny_condition((4, 1, 6, 3))


def drafter_for(
    target: Transformer, sampling: Sampling, tree: str = "narrow_10", mode: DraftMode = "gumbel", form: str = "guided"
) -> EagleDrafter:
    return EagleDrafter(tiny_eagle(target, form=form), target, tree=named(tree), mode=mode, sampling=sampling)


def decode(condition: Condition, sampling: Sampling, keys: list[tuple[int, int]], **drafting: str) -> torch.Tensor:
    drafter = drafter_for(TARGET, sampling, **drafting)  # type: ignore[arg-type]
    verifier = GumbelVerifier()
    return loop.generate(TARGET, condition, sampling=sampling, keys=keys, drafter=drafter, verifier=verifier).codes


@pytest.mark.parametrize("guidance", [1.0, 3.0, 7.5])
def test_codes_of_64_seeds_equal_plain_decoding(guidance: float) -> None:
    sampling = Sampling(guidance=guidance)
    for first in range(0, 64, 16):
        keys = [(seed, 0) for seed in range(first, first + 16)]
        condition = select(CONDITION, [seed % 3 for seed in range(first, first + 16)])
        expected = plain.generate(TARGET, condition, sampling=sampling, keys=keys).codes
        assert torch.equal(decode(condition, sampling, keys), expected)


@pytest.mark.parametrize("form", ["guided", "rows"])
@pytest.mark.parametrize("mode", ["gumbel", "sampled", "point"])
@pytest.mark.parametrize("tree", ["chain_1", "chain_4", "mc_sim_7b_63", "naive_extend_57"])
def test_codes_do_not_depend_on_drafter_or_tree(form: str, mode: str, tree: str) -> None:
    sampling, keys = Sampling(guidance=3), [(7, i) for i in range(4)]
    expected = plain.generate(TARGET, CONDITION, sampling=sampling, keys=keys).codes
    assert torch.equal(decode(CONDITION, sampling, keys, form=form, mode=mode, tree=tree), expected)


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
def test_codes_equal_plain_decoding_with_all_sampling_options(sampling: Sampling) -> None:
    keys = [(1, i) for i in range(4)]
    expected = plain.generate(TARGET, CONDITION, sampling=sampling, keys=keys).codes
    for form in ("guided", "rows"):
        assert torch.equal(decode(CONDITION, sampling, keys, form=form), expected)


def test_codes_do_not_depend_on_batch_or_order() -> None:
    sampling, keys = Sampling(guidance=3), [(5, i) for i in range(4)]
    batch = decode(CONDITION, sampling, keys)
    order = [3, 1, 0, 2]
    assert torch.equal(decode(select(CONDITION, order), sampling, [keys[i] for i in order]), batch[order])
    for i in range(4):
        assert torch.equal(decode(select(CONDITION, [i]), sampling, [keys[i]]), batch[i : i + 1])


def test_class_labels_are_a_condition() -> None:
    target = tiny_target(model_type="c2i", cls_token_num=1, num_classes=3)
    condition, keys = Condition(labels=torch.tensor([0, 2])), [(1, 0), (1, 1)]
    sampling = Sampling(guidance=2)
    expected = plain.generate(target, condition, sampling=sampling, keys=keys).codes
    for form in ("guided", "rows"):
        drafter = drafter_for(target, sampling, form=form)
        made = loop.generate(
            target, condition, sampling=sampling, keys=keys, drafter=drafter, verifier=GumbelVerifier()
        )
        assert torch.equal(made.codes, expected)


@pytest.mark.parametrize("block_size", [1, 4])
def test_trees_deeper_than_the_grid_are_cut(block_size: int) -> None:
    target, sampling, keys = tiny_target(block_size=block_size), Sampling(), [(0, i) for i in range(4)]
    expected = plain.generate(target, CONDITION, sampling=sampling, keys=keys)
    made = loop.generate(
        target,
        CONDITION,
        sampling=sampling,
        keys=keys,
        drafter=drafter_for(target, sampling, tree="naive_extend_57"),
        verifier=GumbelVerifier(),
    )
    assert torch.equal(made.codes, expected.codes)
    assert (made.passes <= expected.passes).all() and (made.passes >= 1).all()


def test_statistics_are_consistent() -> None:
    sampling, keys, seen = Sampling(guidance=3), [(5, i) for i in range(4)], list[Step]()
    made = loop.generate(
        TARGET,
        CONDITION,
        sampling=sampling,
        keys=keys,
        drafter=drafter_for(TARGET, sampling, tree="mc_sim_7b_63"),
        verifier=GumbelVerifier(),
        callback=seen.append,
        keep_steps=True,
        is_timed=True,
    )
    counts = torch.stack([step.counts for step in seen])
    assert (counts.sum(0) == 16).all()
    assert torch.equal((counts > 0).sum(0), made.passes)
    # every pass gives one code and the accepted ones, except for a path that ends one past the end
    assert ((made.passes + made.accepted.sum(1)) - 16 <= 1).all() and (made.passes + made.accepted.sum(1) >= 16).all()
    assert (made.accepted <= made.reached).all()
    assert torch.equal(made.step_compression, 16 / made.passes.float())
    assert set(made.seconds) == {"prefill", "propose", "score", "walk", "commit"}
    assert len(made.steps) == len(seen) and made.steps[0].scores is None
    written = torch.zeros(4, 24, dtype=torch.long)
    for step in seen:
        for image in range(4):
            start, count = int(step.start[image]), int(step.counts[image])
            written[image, start : start + count] = step.codes[image, :count]
    assert torch.equal(written[:, :16], made.codes)


def test_perfect_drafts_are_all_accepted() -> None:
    class Oracle(EagleDrafter):
        """Proposes the final codes."""

        def propose(self):  # type: ignore[no-untyped-def]
            tree = super().propose()
            where = self.known[:, None] - 1 + tree.shape.depths
            tree.tokens.copy_(ANSWER.gather(1, where.clamp(max=15)))
            return tree

    sampling, keys = Sampling(guidance=3), [(5, i) for i in range(4)]
    ANSWER = plain.generate(TARGET, CONDITION, sampling=sampling, keys=keys).codes
    oracle = Oracle(tiny_eagle(TARGET), TARGET, tree=named("chain_4"), mode="gumbel", sampling=sampling)
    made = loop.generate(TARGET, CONDITION, sampling=sampling, keys=keys, drafter=oracle, verifier=GumbelVerifier())
    assert torch.equal(made.codes, ANSWER)
    assert made.passes.tolist() == [4] * 4  # the prompt, then three steps of five codes
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
    sampling, keys, made = Sampling(guidance=3), [(5, i) for i in range(4)], list[Generation]()
    for kind in (EagleDrafter, Batched):
        drafter = kind(tiny_eagle(TARGET), TARGET, tree=named("mc_sim_7b_63"), mode="sampled", sampling=sampling)
        made.append(loop.generate(TARGET, CONDITION, sampling=sampling, keys=keys, drafter=drafter, verifier=verifier))
    assert torch.equal(made[0].codes, made[1].codes)
    assert torch.equal(made[0].accepted, made[1].accepted) and torch.equal(made[0].reached, made[1].reached)


def test_half_precision_decodes() -> None:
    target = tiny_target().bfloat16()
    sampling, keys = Sampling(guidance=3), [(5, i) for i in range(4)]
    for dtype in (torch.bfloat16, torch.float32):
        module = tiny_eagle(target).to(dtype)
        drafter = EagleDrafter(module, target, tree=named("narrow_10"), mode="gumbel", sampling=sampling)
        made = loop.generate(
            target, CONDITION, sampling=sampling, keys=keys, drafter=drafter, verifier=GumbelVerifier()
        )
        assert made.codes.shape == (4, 16) and (made.step_compression > 1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_the_same_codes() -> None:
    sampling, keys = Sampling(guidance=3), [(5, i) for i in range(4)]
    expected = plain.generate(TARGET, CONDITION, sampling=sampling, keys=keys).codes
    target = tiny_target().cuda()
    drafter = EagleDrafter(tiny_eagle(target).cuda(), target, tree=named("narrow_10"), mode="gumbel", sampling=sampling)
    made = loop.generate(target, CONDITION, sampling=sampling, keys=keys, drafter=drafter, verifier=GumbelVerifier())
    assert torch.equal(made.codes.cpu(), expected)


def test_verifier_of_another_mode_is_refused() -> None:
    sampling = Sampling()
    verifier = GumbelVerifier(modes=frozenset({"gumbel", "iid"}))
    with pytest.raises(ValueError, match='mode "sampled": use one of gumbel, iid'):
        loop.generate(
            TARGET,
            CONDITION,
            sampling=sampling,
            keys=[(0, i) for i in range(4)],
            drafter=drafter_for(TARGET, sampling, mode="sampled"),
            verifier=verifier,
        )
