"""Memory that is freed in one step stays in the process for the next one, which allocates as much again.

By default glibc gives large blocks back to the kernel at once, and the kernel zeroes each page when it is next touched:
of a step of 51 ms on a CPU (two convolutions, 512 samples), 9 ms.
"""

import ctypes
import os

# mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_MOST_BYTES = 32 << 20
"""The largest threshold that glibc takes: larger blocks are mapped one by one, and given back, all the same."""
_BY_USER = (
    "GLIBC_TUNABLES",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
)


def keep_freed_memory() -> None:
    """Have glibc keep it, unless a variable says what it is to do; other C libraries are left as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _BY_USER):
        mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
