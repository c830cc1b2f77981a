"""The C allocator of a training: it keeps freed memory instead of returning it to the system after every layer."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
MAX_MMAP, NEVER = 1 << 30, (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Let glibc reuse freed blocks of up to 1 GiB; return False where the C library has no such setting.

    By default large blocks are returned to the system when they are freed, and each page of a new one costs a page
    fault: a large part of the CPU time of convolutions. The process keeps its largest memory use until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(name, value) for name, value in ((M_MMAP_THRESHOLD, MAX_MMAP), (M_TRIM_THRESHOLD, NEVER))
    )
