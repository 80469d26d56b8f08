"""Notice that a rank ends before the kernel has freed its memory, which takes 0.1 s for each GB.

Only after that do its sockets close and its parent get SIGCHLD. But the kernel first marks the robust mutexes that an
ending thread holds, and wakes the threads that wait for them (`get_robust_list(2)`, "owner died"). So each rank holds
one, in memory that the agent shares with all its forks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

_NUM_MUTEXES, _MUTEX_BYTES = 64, 64  # glibc's has 40 or 48
_ATTRIBUTES_BYTES = 64
_PTHREAD_MUTEX_ROBUST = _PTHREAD_PROCESS_SHARED = 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine)
_FUTEX_WAIT = 0
_WAITERS, _OWNER_DIED, _OWNER = 0x80000000, 0x40000000, 0x3FFFFFFF  # linux/futex.h


class EarlyEnds:
    """A mutex for each of the first 64 local ranks; the end of other ranks is not noticed early."""

    def __init__(self) -> None:
        """Map memory that is shared with the processes forked from this one."""
        self._memory = mmap.mmap(-1, _NUM_MUTEXES * _MUTEX_BYTES)
        self._libc = ctypes.CDLL(None, use_errno=True)

    def hold(self, local_rank: int) -> None:
        """Lock this rank's mutex until the calling thread, the rank's main thread, ends."""
        if local_rank >= _NUM_MUTEXES:
            return
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        mutex = self._address(local_rank)
        ctypes.memset(mutex, 0, _MUTEX_BYTES)  # the last owner's
        results = [
            self._libc.pthread_mutexattr_init(attributes),
            self._libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST),
            self._libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED),
            self._libc.pthread_mutex_init(mutex, attributes),
            self._libc.pthread_mutex_lock(mutex),
        ]
        word = self._word(local_rank)
        if not any(results) and word.value == threading.get_native_id():
            word.value |= _WAITERS  # without this flag the kernel wakes no waiter

    def is_held(self, local_rank: int) -> bool:
        """Whether a process holds this rank's mutex, so that `wait` can wait for its end."""
        if _SYS_FUTEX is None or local_rank >= _NUM_MUTEXES:
            return False
        return _is_held(self._word(local_rank).value)

    def wait(self, local_rank: int) -> None:
        """Wait until the process that holds this rank's mutex begins to end, or executes another program."""
        # Not by pthread_mutex_lock, which may abort this process if the rank has overwritten the mutex. Test and wait
        # for the same value: with a second read, the owner could end in between, and nothing would wake this thread.
        while _is_held(value := self._word(local_rank).value):
            expected = ctypes.c_uint32(value)
            self._libc.syscall(_SYS_FUTEX, self._address(local_rank), _FUTEX_WAIT, expected, None, None, 0)

    def _address(self, local_rank: int) -> ctypes.c_void_p:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        return ctypes.c_void_p(start + local_rank * _MUTEX_BYTES)

    def _word(self, local_rank: int) -> ctypes.c_uint32:
        """Return the mutex's first word: the id of its owner's thread, and two flags."""
        return ctypes.c_uint32.from_buffer(self._memory, local_rank * _MUTEX_BYTES)


def _is_held(value: int) -> bool:
    return bool(value & _WAITERS and value & _OWNER and not value & _OWNER_DIED)
