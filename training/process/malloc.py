"""Make glibc keep freed memory in the process, since the next step allocates as much again.

By default glibc returns large blocks to the kernel at once, and the kernel zeroes each page when it is next touched:
that took 9 ms of a step of 51 ms on a CPU (two convolutions, 512 samples).
"""

import ctypes
import os

# mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_MOST_BYTES = 32 << 20
"""The largest threshold that glibc accepts; larger blocks are still returned to the kernel when they are freed."""
_BY_USER = (
    "GLIBC_TUNABLES",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, unless the user has set one of its variables; do nothing for other C libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _BY_USER):
        mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
