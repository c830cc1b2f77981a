"""What tests of kernels share."""

import pytest
import torch


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four positions, so that trees cross their borders; a GPU multiplies tiles of 16 at least."""
    if not torch.cuda.is_available():
        from lantern.engines.cuda.fused_eagle import FusedEagle
        from lantern.engines.cuda.target import KernelTarget

        prepared = KernelTarget.__init__
        monkeypatch.setattr(KernelTarget, "__init__", lambda self, target, rows: prepared(self, target, rows, 4))
        monkeypatch.setattr(FusedEagle, "block", 4)
