"""The noise: published vectors, distributions, and dependence on the key only."""

import pytest
import torch

from lantern.core.sampling import (
    MASK,
    Key,
    Noise,
    Purpose,
    philox,
    purpose_key,
    random_gumbel,
    random_words,
    to_gumbel,
    to_uniform,
)

ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def stream(seed: int, image: int, purpose: Purpose, where: torch.Tensor, count: int) -> torch.Tensor:
    return random_words(purpose_key(torch.tensor([seed]), purpose), torch.tensor([image]), where, count)[0]


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_philox_is_the_published_one(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    words = philox([torch.tensor(word) for word in counter], Key(torch.tensor(key[0]), torch.tensor(key[1])))
    assert tuple(int(word) for word in words) == answer


def test_uniforms_and_gumbels_are_finite_at_both_ends() -> None:
    words = torch.tensor([0, 1, MASK - 1, MASK])
    uniform = to_uniform(words)
    assert (uniform > 0).all() and (uniform < 1).all()
    gumbel = to_gumbel(to_uniform(words))
    assert gumbel.isfinite().all()
    assert gumbel[0] == pytest.approx(-3.1300, abs=1e-3) and gumbel[-1] == pytest.approx(33 * 0.693147, abs=1e-4)


@pytest.mark.parametrize("vocab", [8, 16384])
def test_gumbel_argmax_matches_distribution(vocab: int) -> None:
    samples, blocks = 1_000_000 if vocab == 8 else 512, 8
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * (1.5 if vocab == 8 else 3.0)
    distribution = logits.softmax(-1)
    counts = torch.zeros(vocab)
    for block in range(blocks):
        where = torch.arange(samples // blocks) + block * (samples // blocks)
        sampled = (to_gumbel(to_uniform(stream(3, 0, Purpose.TARGET, where, vocab))) + logits).argmax(-1)
        counts += torch.bincount(sampled, minlength=vocab)
    bins = torch.argsort(distribution).chunk(8)  # rare tokens are pooled, so that every bin has many expected samples
    observed = torch.stack([counts[chosen].sum() for chosen in bins])
    expected = torch.stack([distribution[chosen].sum() for chosen in bins]) * samples
    kept = expected > 5
    chi_square = ((observed - expected).square() / expected)[kept].sum()
    assert chi_square < 30  # 7 degrees of freedom: 1e-4


def test_rows_that_an_engine_makes_when_they_are_read_are_those_of_the_table() -> None:
    made, keys = list[int](), [(7, 0), (2**40, 3)]

    def gumbel(key: Key, images: torch.Tensor, where: torch.Tensor, table: torch.Tensor) -> None:
        made.extend(where.tolist())
        random_gumbel(key, images, where, table)

    table = Noise(keys, positions=9, vocab_size=12).gumbel_table(Purpose.RESIDUAL)
    noise = Noise(keys, positions=9, vocab_size=12, make_gumbel=gumbel)
    assert table is not None
    for places in ([[3], [5]], [[4, 8], [5, 20]], [[3, 4], [0, 0]]):
        where = torch.tensor(places)
        found = noise.gumbel(where, Purpose.RESIDUAL)
        assert torch.equal(found, table[torch.arange(2)[:, None], where.clamp(max=8)])
    assert made == [3, 5, 4, 8, 0]
    again = noise.gumbel_table(Purpose.RESIDUAL)
    assert again is not None and torch.equal(again, table) and sorted(made) == list(range(9))


def test_streams_are_uncorrelated() -> None:
    where = torch.arange(64)
    streams = {
        "a": stream(1, 0, Purpose.TARGET, where, 256),
        "image": stream(1, 1, Purpose.TARGET, where, 256),
        "seed": stream(2, 0, Purpose.TARGET, where, 256),
        "purpose": stream(1, 0, Purpose.DRAFT, where, 256),
        "position": stream(1, 0, Purpose.TARGET, where + 1, 256),
    }
    flat = torch.stack([to_uniform(words).flatten() for words in streams.values()])
    correlation = torch.corrcoef(flat) - torch.eye(len(flat))
    assert correlation.abs().max() < 5 / (64 * 256) ** 0.5
    by_token = torch.corrcoef(to_uniform(streams["a"]).T)[0, 1:8]
    assert by_token.abs().max() < 0.6


def test_keys_of_purposes_differ() -> None:
    seeds = torch.tensor([0, 1, 2**32, 2**63 - 1])
    keys = [torch.stack([key.low, key.high], 1) for key in (purpose_key(seeds, purpose) for purpose in Purpose)]
    assert len(torch.cat(keys).unique(dim=0)) == 4 * len(Purpose)
    alone = purpose_key(seeds[3:], Purpose.TEST)
    assert torch.equal(torch.stack([alone.low, alone.high], 1), keys[Purpose.TEST - 1][3:])


def test_tables_are_those_of_seed_and_image_also_if_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, where = torch.tensor([(i, 9 - i) for i in range(6)]), torch.arange(9).expand(6, -1)
    words = [stream(seed, image, Purpose.TARGET, where[0], 37) for seed, image in keys.tolist()]
    steps = torch.tensor([1, 4, 2, 8, 3, 3])
    ahead = (steps[:, None] + torch.arange(4)).clamp(max=8)
    of_steps = random_words(purpose_key(keys[:, 0], Purpose.TEST, steps), keys[:, 1], ahead, 2)
    for block in (10**6, 50):
        monkeypatch.setattr("lantern.core.sampling.BLOCK", block)
        noise = Noise(keys.tolist(), positions=9, vocab_size=37)
        assert torch.equal(noise.gumbel(where), to_gumbel(to_uniform(torch.stack(words))))
        assert torch.equal(noise.uniform(ahead, 2, iterations=steps), to_uniform(of_steps))


def test_lanes_do_not_depend_on_their_number_and_steps_have_others() -> None:
    noise, where = Noise([(1, 0)], positions=4, vocab_size=5), torch.arange(4)[None]
    assert torch.equal(noise.uniform(where, 3), noise.uniform(where, 9)[..., :3])
    noise, where = Noise([(1, 0)], positions=9, vocab_size=5), torch.arange(2, 6)[None]
    seen = [
        noise.uniform(where - 2 + iteration, 2, iterations=torch.tensor([iteration])).flatten() for iteration in (1, 2)
    ]
    seen.append(noise.uniform(where, 2).flatten())
    seen.append(noise.uniform(where, 2, purpose=Purpose.DRAFT).flatten())
    assert len(torch.cat(seen).unique()) == 32


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed is"):
        Noise([(seed, 0)], positions=1, vocab_size=4)


@pytest.mark.gpu
def test_cuda_gives_the_same_bits() -> None:
    where = torch.arange(64)
    seed, image = torch.tensor([7]), torch.tensor([3])
    words = random_words(purpose_key(seed.cuda(), Purpose.TARGET), image.cuda(), where.cuda(), 4096)[0]
    assert torch.equal(words.cpu(), stream(7, 3, Purpose.TARGET, where, 4096))
