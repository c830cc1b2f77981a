from pathlib import Path

import pytest
import torch

from lantern.eval.metrics.judges import Pair, load_lpips, psnr
from lantern.eval.metrics.weights import find_weights


@pytest.fixture(scope="module")
def alexnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from torchvision.models import alexnet

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("alexnet") / "alexnet.pth"
    torch.save(alexnet(weights=None).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def lpips(alexnet: Path) -> Pair:
    return load_lpips(find_weights("lpips", {"lpips": alexnet}))


def pictures(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (2, 3, 64, 64), generator=generator, dtype=torch.uint8)


def test_psnr_matches_its_formula() -> None:
    a = torch.full((1, 3, 4, 4), 100, dtype=torch.uint8)
    assert float(psnr(a, a + 10)[0]) == pytest.approx(28.1308, abs=1e-4)
    assert psnr(a, a).isinf().all()


def test_lpips_of_equal_pictures_is_zero(lpips: Pair) -> None:
    assert float(lpips(pictures(), pictures()).abs().max()) == 0


def test_lpips_matches_torchmetrics_with_the_given_network(lpips: Pair, alexnet: Path) -> None:
    from torchmetrics.functional.image.lpips import _LPIPS
    from torchvision.models import alexnet as architecture

    whole = architecture(weights=None)
    whole.load_state_dict(torch.load(alexnet, weights_only=True))
    theirs = _LPIPS(pretrained=True, net="alex", pnet_rand=True)
    for number, layer in enumerate(whole.features):
        for part in theirs.net.children():
            if isinstance(part, torch.nn.Sequential) and str(number) in dict(part.named_children()):
                part._modules[str(number)] = layer
    a, b = pictures(), pictures(1)
    with torch.inference_mode():
        expected = theirs.eval()(a / 255.0, b / 255.0, normalize=True).flatten()
    found = lpips(a, b)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert float(found.min()) > 0
