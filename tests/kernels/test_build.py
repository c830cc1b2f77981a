"""Building the library once, on this processor and on others, and the memory in which packed weights stand."""

import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lantern.kernels import build as building
from lantern.kernels.linear import linear
from lantern.kernels.packed import Arena
from tests.kernels.bytewise import rows, weights
from tests.kernels.test_fused import PATH, TREE, Passes, by_single_passes, target_in, twin_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which fused passes are built")

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not PAGES.is_file() or "[never]" in PAGES.read_text(), reason="huge pages are not to be had on this machine"
)
def test_weights_stand_in_huge_pages() -> None:
    memory = Arena(16 << 20).memory.fill_(1)
    regions = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    spans = [tuple(int(end, 16) for end in region.split(" ", 1)[0].split("-")) for region in regions]
    (found,) = (region for region, (low, high) in zip(regions, spans, strict=True) if low <= memory.data_ptr() < high)
    assert int(re.findall(r"^AnonHugePages: +(\d+) kB$", found, re.MULTILINE)[0]) > 0


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing was built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    building.library.cache_clear()
    yield tmp_path / "lantern"
    building.library.cache_clear()


def test_a_library_is_built_once(fresh: Path) -> None:
    building.library()
    (made,) = fresh.iterdir()
    when = made.stat().st_mtime_ns
    building.library.cache_clear()
    building.library()
    assert [made] == list(fresh.iterdir()) and made.stat().st_mtime_ns == when


def test_processors_without_wide_vectors_score_the_same(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "x86_64" not in os.uname().machine:
        pytest.skip("builds for other x86-64 processors")
    targets, codes = [target_in(torch.float32), target_in(torch.bfloat16)], [3, 1, 4, 15, 9, 2, 6]
    here = [Passes(twin_of(target)).score(codes, TREE).logits for target in targets]
    x, integers = rows(23, 192), [weights(96, 192)[1]] if find_spec("torchao") else []
    products = [linear(x, packed, None, 96) for packed in integers]
    other = {"-march=native": "-march=x86-64-v2", "-O3": "-O1"}  # the compiler takes minutes for all it can do there
    flags = tuple(other.get(flag, flag) for flag in building.FLAGS)
    monkeypatch.setattr(building, "FLAGS", flags)
    building.library.cache_clear()
    for target, expected, tolerance in zip(targets, here, (1e-4, 0.1), strict=True):
        fused = twin_of(target)
        found = Passes(fused).score(codes, TREE).logits
        assert torch.allclose(found, expected, atol=tolerance)
        alone = by_single_passes(fused, [codes[node] for node in PATH])
        assert all(torch.equal(found[:, node], alone[step]) for step, node in enumerate(PATH))
    for packed, product in zip(integers, products, strict=True):
        assert torch.equal(linear(x, packed, None, 96), product)  # integers add up to the same everywhere
    assert len(list(fresh.iterdir())) == 2  # one for this processor, one for the others


def test_a_damaged_library_is_told_and_built_anew(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(compiler: str, path: Path) -> None:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")

    with monkeypatch.context() as patch:
        patch.setattr(building, "_build", damaged)
        with pytest.raises(ValueError, match="fused passes cannot be loaded .*too short.*: try again"):
            building.library()
    building.library()
    assert all(made.stat().st_size > 0 for made in fresh.iterdir())


def test_without_a_compiler_one_line_says_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match="which was not found: install it"):
        building.library()


def test_a_compiler_that_fails_is_told(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ValueError, match="could not build fused passes .*leave fused out"):
        building.library()
    assert not fresh.exists() or not list(fresh.iterdir())
