"""POST /v1/images/edits: forms as OpenAI's clients send them, answered by a real server of a toy model."""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
import httpx
import numpy as np
from PIL import Image

from lantern.generation.generator import generate
from lantern.generation.requests import Request
from lantern.generation.serving.app import Limits
from lantern.models.folder import Model
from tests.generation.served import PROMPT, Served, image

SIDE = 8  # pixels of an image; a token has two
BELOW = (slice(4, 8), slice(0, 8))  # the lower half
ONE = (slice(3, 4), slice(4, 5))  # one pixel, of token 6


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with Served(model, Limits(upload=90_000, batch=3)) as server:
        yield server


def png(*holes: tuple[slice, slice], side: int = SIDE, alpha: bool = True, form: str = "PNG") -> bytes:
    """Return an image file of the same colours whatever its side is, transparent in the holes."""
    colours = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 4), dtype=np.uint8)
    colours[..., 3] = 255
    for hole in holes:
        colours[(*hole, 3)] = 0
    pixels = colours.repeat(side // SIDE, 0).repeat(side // SIDE, 1)
    target = BytesIO()
    Image.fromarray(pixels if alpha else pixels[..., :3]).save(target, form)
    return target.getvalue()


def scans(count: int) -> bytes:
    """Return a progressive JPEG file whose last scan is there so many times more."""
    Image.new("RGB", (SIDE, SIDE)).save(target := BytesIO(), "JPEG", progressive=True)
    whole = target.getvalue()
    return whole[:-2] + whole[whole.rindex(b"\xff\xda") : -2] * count + whole[-2:]


def with_exif(size: int, times: int = 1, form: str = "PNG") -> bytes:
    """Return an image file with so many EXIF blocks of `size` bytes, which say nothing."""
    Image.new("RGB", (SIDE, SIDE)).save(target := BytesIO(), form, exif=b"Exif\0\0II*\0\x08\0\0\0" + bytes(size - 8))
    whole = target.getvalue()
    if times == 1:
        return whole
    begin = whole.index(b"\xff\xe1")
    return whole[:begin] + times * whole[begin : begin + size + 10] + whole[begin + size + 10 :]


def expected(model: Model, tmp_path: Path, hole: tuple[slice, slice], number: int = 0) -> np.ndarray:
    """Return the pixels of the image that `generate` makes, by a mask that is white in the hole."""
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[hole] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    (tmp_path / "image.png").write_bytes(png(alpha=False))
    how: dict[str, Any] = {"init_image": tmp_path / "image.png", "mask_image": tmp_path / "mask.png"}
    (picture,) = generate(model, [Request(prompt=PROMPT, seed=5, number=number)], **how)
    return picture.pixels.numpy()


@pytest.mark.parametrize("side", [SIDE, 3 * SIDE])
@pytest.mark.parametrize("has_mask", [False, True])
def test_an_edit_keeps_what_is_opaque(served: Served, model: Model, tmp_path: Path, side: int, has_mask: bool) -> None:
    files: dict[str, Any] = {"image": png(BELOW, side=side)}
    if has_mask:  # then the transparent pixels of the image have no meaning
        files["mask"] = png(ONE, side=side)
    hole = ONE if has_mask else BELOW
    answer = served.client.images.edit(prompt=PROMPT, n=2, size="8x8", **files, extra_body={"seed": 5})  # type: ignore[call-overload]
    assert len(answer.data) == 2
    for number, found in enumerate(answer.data):
        assert np.array_equal(image(found), expected(model, tmp_path, hole, number=number))
    kept = 15 if has_mask else 8
    assert answer.usage.input_tokens_details.image_tokens == kept
    assert answer.to_dict()["metrics"][0]["forced_tokens"] == kept


def test_a_list_of_one_image_and_other_formats_are_read(served: Served, model: Model, tmp_path: Path) -> None:
    files: dict[str, Any] = {"image": [png(alpha=False)], "mask": png(BELOW, form="WEBP")}
    fields: dict[str, Any] = {"size": "8x8", "input_fidelity": "high", "extra_body": {"seed": 5, "method": "eagle1"}}
    answer = served.client.images.edit(prompt=PROMPT, **files, **fields)
    assert np.array_equal(image(answer.data[0]), expected(model, tmp_path, BELOW))
    tiff = {"image": png(BELOW, form="TIFF")}
    refused = httpx.post(f"{served.url}/v1/images/edits", data={"prompt": PROMPT}, files=tiff)
    assert "wanted a PNG, WEBP, JPEG file" in refused.json()["error"]["message"]


def test_an_edit_is_streamed_with_its_partial_images(served: Served, model: Model, tmp_path: Path) -> None:
    """Of three partial images the first two are one: half of the image is kept."""
    fields: dict[str, Any] = {"size": "8x8", "partial_images": 3, "extra_body": {"seed": 5, "method": "plain"}}
    events: list[Any] = list(served.client.images.edit(prompt=PROMPT, image=png(BELOW), stream=True, **fields))
    assert [event.type for event in events] == ["image_edit.partial_image"] * 2 + ["image_edit.completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert np.array_equal(image(events[2]), expected(model, tmp_path, BELOW))


@pytest.mark.parametrize(
    ("fields", "files", "param", "message"),
    [
        ({}, {}, "image", "got 0 images and 0 masks, wanted one image"),
        ({}, {"image": png(alpha=False)}, "mask", "the image has no transparent pixel, wanted some where it is to be"),
        ({}, {"image": png(BELOW), "mask": png()}, "mask", "the mask has no transparent pixel"),
        ({}, {"image": b"nonsense"}, "image", "cannot read the image: wanted a PNG"),
        ({}, {"image": png(BELOW)[:90]}, "image", "cannot read the image"),
        ({}, {"image": png(BELOW), "mask": b"nonsense"}, "mask", "cannot read the mask"),
        ({}, {"image": png(BELOW, side=SIDE * 300)}, "image", "it has 2400x2400 pixels, wanted at most 2048 a side"),
        ({}, {"image": scans(300)}, "image", "it has more than 256 scans or 2 EXIF segments: save it again"),
        ({}, {"image": with_exif(99, times=3, form="JPEG")}, "image", "it has more than 256 scans or 2 EXIF segments"),
        ({}, {"image": with_exif(70_000)}, "image", "its EXIF has more than 65536 bytes: save it again"),
        ({}, {"image": with_exif(65_000)}, "mask", "the image has no transparent pixel"),
        ({"n": "many"}, {"image": png(BELOW)}, "n", "valid integer"),
        ({"temprature": "1"}, {"image": png(BELOW)}, "temprature", "not permitted"),
        ({"prompt": ""}, {"image": png(BELOW)}, "prompt", "prompt: it is missing or empty"),
        ({"image": "a.png"}, {}, "image", "image: wanted a file"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value)[:40],
)
def test_forms_that_are_no_edit_name_their_field(
    served: Served, fields: dict[str, str], files: dict[str, bytes], param: str, message: str
) -> None:
    form = {name: (None, value) for name, value in ({"prompt": PROMPT} | fields).items()}
    answer = httpx.post(f"{served.url}/v1/images/edits", files=form | {name: (name, files[name]) for name in files})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param and message in error["message"]


def test_bodies_of_other_kinds_and_sizes_are_refused(served: Served) -> None:
    url = f"{served.url}/v1/images/edits"
    answer = httpx.post(url, json={"prompt": PROMPT})
    assert answer.status_code == 415 and "wanted multipart/form-data" in answer.json()["error"]["message"]
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert "Too many fields" in httpx.post(url, content=b"a=&" * 2000, headers=form).json()["error"]["message"]
    for images, masks in ((2, 0), (1, 2)):
        files = [*[("image", png(BELOW))] * images, *[("mask", png(ONE))] * masks]
        answer = httpx.post(url, data={"prompt": PROMPT}, files=files)
        assert f"got {images} images and {masks} masks" in answer.json()["error"]["message"]
    assert httpx.post(url, content=b"x", headers={"Content-Type": "multipart/form-data"}).status_code == 400
    assert httpx.post(url, data={"prompt": PROMPT}, files={"image": b"x" * 100_000}).status_code == 413
    half = Image.new("RGBA", (8, 6))
    half.save(target := BytesIO(), "PNG")
    answer = httpx.post(url, data={"prompt": PROMPT}, files={"image": target.getvalue()})
    assert "the image has 8x6 pixels, wanted 8x8 or a whole multiple" in answer.json()["error"]["message"]
