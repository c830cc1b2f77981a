"""Freed memory is used again without page faults."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from lantern.training.allocator import keep_freed_memory
is_kept, counts = keep_freed_memory(), []
for _ in range(16):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(is_kept), min(counts[8:]))
"""
PAGES = 1 << 14  # of one tensor


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    is_kept, fewest = map(int, done.stdout.split())
    if not is_kept:
        pytest.skip("the C library has no mallopt")
    assert fewest < PAGES // 100
