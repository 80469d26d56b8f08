"""Learn that a rank ends before the kernel has taken back its memory, which takes 0.1 s for each GB.

Its sockets close, and its parent is told, only after that. But first of all the kernel marks the robust mutexes that
an ending thread holds, and wakes who waits for them (`get_robust_list(2)`, "owner died"). So each rank holds one, in
memory that the agent shares with all that is forked from it.
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
    """A mutex for each local rank; of the 65th and later ones nothing is learnt early."""

    def __init__(self) -> None:
        """Shared with the processes that are forked from this one."""
        self._memory = mmap.mmap(-1, _NUM_MUTEXES * _MUTEX_BYTES)
        self._libc = ctypes.CDLL(None, use_errno=True)

    def hold(self, local_rank: int) -> None:
        """Hold this rank's mutex until the calling thread ends, which is a rank's main thread."""
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
            word.value |= _WAITERS  # or the kernel would wake nobody

    def is_held(self, local_rank: int) -> bool:
        """Whether a process holds this rank's mutex, so that its end can be waited for."""
        if _SYS_FUTEX is None or local_rank >= _NUM_MUTEXES:
            return False
        return _is_held(self._word(local_rank).value)

    def wait(self, local_rank: int) -> None:
        """Wait until the process that holds this rank's mutex begins to end, or executes another program."""
        # Not by pthread_mutex_lock: it may abort this process if the rank has written over the mutex. The value is read
        # once: for what it is when its owner has ended nobody is woken any more.
        while _is_held(value := self._word(local_rank).value):
            expected = ctypes.c_uint32(value)
            self._libc.syscall(_SYS_FUTEX, self._address(local_rank), _FUTEX_WAIT, expected, None, None, 0)

    def _address(self, local_rank: int) -> ctypes.c_void_p:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        return ctypes.c_void_p(start + local_rank * _MUTEX_BYTES)

    def _word(self, local_rank: int) -> ctypes.c_uint32:
        """The mutex's first word: its owner's thread, and the two flags."""
        return ctypes.c_uint32.from_buffer(self._memory, local_rank * _MUTEX_BYTES)


def _is_held(value: int) -> bool:
    return bool(value & _WAITERS and value & _OWNER and not value & _OWNER_DIED)
