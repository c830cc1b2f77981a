import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lantern.eval.metrics.judges import extract
from lantern.eval.metrics.pictures import AHEAD, find_pictures, raw, stream
from tests.eval.tiny_metrics import save_pictures
from tests.refusals import refused


def test_batches_and_digests_keep_the_order(tmp_path: Path) -> None:
    paths, batches = save_pictures(tmp_path, 11, prompts=True), []
    for _ in range(2):
        batches = list(stream(paths, {"raw": raw}, batch=4))
        assert [(one.first, len(one.names)) for one in batches] == [(0, 4), (4, 4), (8, 3)]
        assert [name for one in batches for name in one.names] == [path.name for path in paths]
        assert [prompt for one in batches for prompt in one.prompts] == [f"prompt {i}" for i in range(11)]
        pixels = torch.cat([one.inputs["raw"] for one in batches])
        expected = torch.stack([torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) for path in paths])
        assert torch.equal(pixels, expected)
    found = [digest for one in batches for digest in one.digests]
    assert found == [hashlib.sha256(path.read_bytes()).digest() for path in paths]
    seen, _ = extract(tmp_path / "features", ((paths, {}), ((), {})), {}, batch=2, is_quiet=True)
    assert seen[0].sha256 == hashlib.sha256(b"".join(found)).hexdigest()


def test_grey_of_16_bits_is_not_clipped(tmp_path: Path) -> None:
    grey = np.array([[0, 300], [40_000, 65_535]], dtype=np.uint16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    (batch,) = stream([tmp_path / "grey.png"], {"raw": raw}, batch=1)
    assert torch.equal(batch.inputs["raw"][0], torch.tensor(grey >> 8).to(torch.uint8).expand(3, 2, 2))


def test_only_a_few_batches_are_in_memory(tmp_path: Path) -> None:
    paths = save_pictures(tmp_path, 40)
    lock, prepared = threading.Lock(), 0

    def prepare(pixels: np.ndarray) -> torch.Tensor:
        nonlocal prepared
        with lock:
            prepared += 1
        return raw(pixels)

    for number, _ in enumerate(stream(paths, {"raw": prepare}, batch=2), start=1):
        assert prepared <= 2 * (number + AHEAD)
    assert prepared == 40


TORN = b"\x89PNG\r\n\x1a\n" + b"\0" * 40


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "its format is not recognised$"), (b"no image", "its format is not recognised$"), (TORN, ""), (None, "")],
)
def test_a_file_that_is_no_whole_picture_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "bad.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:2000] if content is None else content)
    refused(list, stream([path], {"raw": raw}), match=rf"bad.png is not a complete image: {reason}")


@pytest.mark.parametrize("batch", [1, 2])
def test_pictures_of_two_sizes_are_rejected_without_a_resize(tmp_path: Path, batch: int) -> None:
    one, other = (save_pictures(tmp_path / name, 1, side=side)[0] for name, side in (("a", 32), ("b", 16)))
    message = rf"^{other} is \[3, 16, 16\], {one} is \[3, 32, 32\]: expected images of the same size$"
    refused(list, stream([one, other], {"raw": raw}, batch=batch), match=message)


def test_pictures_are_found_in_subfolders_by_name(tmp_path: Path) -> None:
    for name in ("b", "a/x", "a"):
        save_pictures(tmp_path / name, 2)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".hidden.png").write_bytes(b"x")
    found = [str(path.relative_to(tmp_path)) for path in find_pictures(tmp_path)]
    assert found == sorted(found) and len(found) == 6
