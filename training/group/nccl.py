"""NCCL's communicator, so that a collective can be ended that waits for a lost rank.

Its kernels wait on the GPU, whatever has become of the other ranks, until the communicator is aborted. Then they end
without an error, with a part of the sum, and what comes after them on the GPU goes on with that. So `leave` says that
it aborts before it does, and whoever has waited asks with `check`, before anything counts that came of a collective.
"""

import logging
import os
import threading
from collections.abc import Callable

import torch.distributed as dist

log = logging.getLogger("nodekit.training")

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_DUMP_MS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_given: list[str | None] = []
"""What the variable was before this process first changed it; not when this is imported, which a fork server may do."""
_lock = threading.Lock()
_has_left = threading.Event()
_is_aborted = False
_before_abort: Callable[[], None] | None = None


class LostRank(RuntimeError):
    """Another rank is lost, and what the last collectives have returned does not count."""


def can_abort() -> bool:
    """Whether this torch can abort a communicator (2.6 or newer)."""
    return hasattr(dist.distributed_c10d, "_abort_process_group")


def prepare(*, aborts: bool) -> None:
    """Before a group is made: whether this process ends its collectives by itself, and not torch's watchdog.

    The watchdog would end the process, or abort without a word. Without one that does, a collective that takes too
    long is a hang, which kit's agents find.
    """
    global _is_aborted, _before_abort
    _has_left.clear()
    _is_aborted, _before_abort = False, None
    if not _given:
        _given.append(os.environ.get(_HANDLING))
    if aborts:
        os.environ[_HANDLING] = "0"
        # After an error the watchdog sleeps four times as long, and whoever closes its group waits for it: not 60 s.
        os.environ.setdefault(_DUMP_MS, "250")
    elif os.environ.get(_HANDLING) == "0":
        os.environ.pop(_HANDLING) if _given[0] is None else os.environ.update({_HANDLING: _given[0]})


def before_abort(call: Callable[[], None]) -> None:
    """Have this called, in any thread, when it is certain that the present group is aborted, and not done yet."""
    global _before_abort
    with _lock:
        _before_abort = call


def leave() -> None:
    """Abort the communicator, and return when that is done; any thread may call it, any number of times."""
    global _is_aborted
    with _lock:
        _has_left.set()
        if _is_aborted:
            return
        if _before_abort is not None:
            try:
                _before_abort()
            except RuntimeError:  # nothing is to keep the collectives from ending
                log.exception("before the abort")
        if dist.is_initialized():
            _is_aborted = True
            _abort()


def _abort() -> None:
    assert dist.group.WORLD is not None
    dist.group.WORLD.abort()


def has_left() -> bool:
    """Whether the present group is aborted, or about to be."""
    return _has_left.is_set()


def check() -> None:
    """Raise `LostRank` if the present group is aborted, or about to be."""
    if has_left():
        raise LostRank("another rank is lost, and this one has left NCCL's group")


def close() -> None:
    """Close all groups, the aborted one too, which torch's threads may still use: keep what refers to it."""
    global _before_abort
    with _lock:
        _before_abort = None
    if has_left():
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
