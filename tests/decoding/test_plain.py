from typing import Any

import pytest
import torch

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import Condition, Step
from lantern.decoding import plain
from tests.refusals import refused
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, plain_tokens, tiny_decoder


def test_tokens_are_the_argmax_of_log_probs_plus_noise() -> None:
    target, condition, sampling = tiny_target(), tiny_condition((4,)), Sampling(guidance=3)
    made = plain.generate(target, condition, sampling=sampling, keys=KEYS[:1])
    noise = Noise(KEYS[:1], positions=16, vocab_size=24)
    words = condition.embeddings[:, -4:]
    rows = torch.cat([target.cls_embedding(words), target.cls_embedding.unconditional(words)])
    inputs = torch.cat([rows, target.tok_embeddings(made.tokens[:, :-1]).expand(2, -1, -1)], 1)
    with torch.no_grad():
        logits = target(inputs, torch.arange(2, 21).expand(2, -1)).logits[None, :, 3:]
    where = torch.arange(16)[None]
    assert torch.equal((sampling.log_probs(logits, where) + noise.gumbel(where)).argmax(-1), made.tokens)


def test_tokens_do_not_depend_on_padding() -> None:
    target, wide = tiny_target(), tiny_condition((3,))
    cut = Condition(embeddings=wide.embeddings[:, -3:], mask=wide.mask[:, -3:])
    one = plain.generate(target, wide, sampling=Sampling(), keys=KEYS[:1])
    assert torch.equal(one.tokens, plain.generate(target, cut, sampling=Sampling(), keys=KEYS[:1]).tokens)


def test_bad_arguments_are_refused() -> None:
    target, condition = tiny_target(), tiny_condition()
    refused(plain.generate, target, condition, sampling=Sampling(), keys=KEYS[:2], match="2 noise keys for 1 images")
    how: dict[str, Any] = {"sampling": Sampling(), "keys": KEYS[:1]}
    refused(plain.generate, target, tiny_condition((9,), slots=9), **how, match="at most 6")
    refused(plain.generate, target.train(), condition, **how, match="training mode")
    right = Condition(embeddings=torch.zeros(1, 3, 8), mask=torch.tensor([[True, True, False]]))
    refused(plain.generate, target.eval(), right, **how, match="on the left")


@pytest.mark.parametrize("form", ["guided", "rows"])
def test_class_labels_are_a_condition(form: str) -> None:
    target = tiny_target(model_type="c2i", cls_token_num=1, num_classes=3)
    how: dict[str, Any] = {"condition": Condition(labels=torch.tensor([0, 2])), "keys": [(5, 0), (5, 1)]}
    made = tiny_decoder("eagle1", target, form=form, tree="narrow_10").generate(**how)
    expected = plain.generate(target, sampling=SAMPLING, **how).tokens
    assert torch.equal(made.tokens, expected) and not torch.equal(expected[0], expected[1])


@pytest.mark.gpu
def test_cuda_gives_the_same_tokens() -> None:
    made = tiny_decoder("eagle1", tiny_target().cuda(), tree="narrow_10").generate(CONDITION, keys=KEYS)
    assert torch.equal(made.tokens.cpu(), plain_tokens())


READERS = "eagle1 eagle2 eagle3 fr-spec medusa parallelspec poss sam sam-eagle1 self-cascade specmquant vertical vispec"
IN_ROWS = ("eagle1", "eagle2", "fr-spec", "sam-eagle1", "specmquant")  # their drafter has two forms


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "guided") for name in READERS.split()), *((name, "rows") for name in IN_ROWS)]
)
def test_a_drafter_reads_kept_tokens_as_it_reads_committed_ones(name: str, form: str) -> None:
    """The tree below kept tokens is the one of a generation in which these tokens were sampled."""
    steps, built = list[Step](), tiny_decoder(name, form=form)
    how: dict[str, Any] = {"keys": KEYS[:1], "callback": steps.append}
    condition = CONDITION.select([0])
    tokens = built.generate(condition, **how).tokens
    trees = {int(step.start): step.tree for step in steps[1:] if 2 <= step.start < 15}
    assert len(trees) > 2
    for known, tree in [*trees.items()][::3]:
        steps.clear()
        forced = torch.where(torch.arange(16) < known, tokens, -1)
        assert torch.equal(built.generate(condition, forced=forced, **how).tokens, tokens)
        found = steps[1].tree
        assert int(steps[1].start) == known and tree is not None and found is not None
        assert torch.equal(found.tokens, tree.tokens)


def test_forced_tokens_are_checked() -> None:
    for wrong, message in (
        (torch.zeros(3, 15, dtype=torch.long), r"shape \[3, 15\], wanted \[3, 16\]"),
        (torch.full((3, 16), 24), r"from 24 to 24, wanted -1 \(free\) to 23"),
        (torch.full((3, 16), -2), "from -2 to -2"),
    ):
        refused(tiny_decoder("plain").generate, CONDITION, keys=KEYS, forced=wrong, match=message)
