"""Row pool: scouts see the right codes, sample with the noise of their places, and are never accepted."""

from typing import Any

import pytest
import torch

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Prefill
from lantern.drafters.windows.row_pool import RowPoolDrafter, two_candidate_chain, with_scouts
from tests.drafters.sampled_trees import stepped
from tests.tiny import select
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET, plain_codes, tiny_decoder
from tests.uncached import uncached


def decode(sampling: Sampling = SAMPLING, images: list[int] | None = None, **settings: Any) -> tuple[Any, list[Any]]:
    return stepped(tiny_decoder("row-pool", sampling=sampling, **settings), images)


@pytest.mark.parametrize("scouts", [1, 3, 16])
@pytest.mark.parametrize("lag", [0, 2, 9])
@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(guidance=2, top_k=4), Sampling(temperature=0)])
def test_pictures_equal_plain_decoding(scouts: int, lag: int, sampling: Sampling) -> None:
    codes = plain_codes(sampling=sampling)
    for window, doubled in ((2, 0), (5, 2), (16, 9)):
        made, _ = decode(sampling, window=window, scouts=scouts, lag=lag, doubled=doubled)
        assert torch.equal(made.codes, codes)


def test_scouts_see_the_root_and_their_own_row() -> None:
    shape = with_scouts(two_candidate_chain(3, 1).shape(), 2, 7)
    assert shape.depths.tolist() == [0, 1, 1, 2, 7, 8] and shape.widths == (2, 1)
    assert shape.ancestors[4:].int().tolist() == [[1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 1, 1]]
    assert not shape.ancestors[:4, 4:].any()


def test_scouts_sample_with_committed_codes_and_their_own_noise() -> None:
    made, steps = decode(images=[0], window=3, scouts=2, lag=1)
    step = steps[2]
    start, nodes = int(step.start[0]), step.tree.shape.num_nodes
    scouts = step.tree.tokens[0, nodes:]
    output = torch.cat([made.codes[0, :start], scouts])
    # The same without cache and tree: the committed codes, then the scouts at their own places.
    places = torch.cat([torch.arange(start), start - 1 + 3 + torch.arange(2)])
    expected = uncached(TARGET, select(CONDITION, [0]), output[None], places=places)[0, :, -2:]
    torch.testing.assert_close(step.scores.logits[:, nodes:], expected, atol=1e-4, rtol=1e-4)


def test_windows_start_with_scouted_codes() -> None:
    drafter = RowPoolDrafter(TARGET, sampling=SAMPLING, window=3, scouts=2, lag=0, doubled=2)
    noise, first = Noise(KEYS[:1], positions=16, vocab_size=24), torch.tensor([5])
    drafter.begin(Prefill(torch.zeros(1, 2, 1, 32), torch.ones(1, 1, dtype=torch.bool), first), noise)
    drafter._write(torch.tensor([[1, 2, 3, 99]]), torch.tensor([[11, 12, 13, 14]]))
    drafter._build(first[:, None], torch.tensor([[7, 8]]))
    # root, 7 with the pool's 11 as sibling, 8 with 12; scouts at places 4 and 5 start with the codes above.
    assert drafter.propose().tokens.tolist() == [[5, 7, 11, 8, 12, 5, 11]]
    assert drafter._pool[0, 4:16].eq(5).all()


def test_scouts_are_never_accepted() -> None:
    made, steps = decode(window=4, scouts=6, lag=2)
    for step in steps:
        assert (step.verdict.path < step.tree.shape.num_nodes).all()
        assert step.tree.walkable.tokens.shape[1] == step.tree.shape.num_nodes < step.tree.tokens.shape[1]
    assert made.accepted.shape[1] == 3
