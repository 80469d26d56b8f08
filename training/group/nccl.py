"""NCCL's communicator, so that a collective can be ended that waits for a lost rank.

Its kernels wait on the GPU, whatever has become of the other ranks, until the communicator is aborted. Then they end
without an error, with a part of the sum, and what comes after them on the GPU goes on with that. So `leave` says that
it aborts before it does, and whoever has waited asks with `check`, before anything counts that came of a collective.

The kernels end within milliseconds. To free what NCCL had takes half a second more (2.28, H200), in which the ranks can
meet again already: so a thread does it.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

log = logging.getLogger("nodekit.training")

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_DUMPS, _DUMP_MS = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_ROOM_BYTES = 4 << 30
"""With less free memory on the GPU, wait until an earlier group has freed its own: the next may need as much."""
_END_TIMEOUT_S = 30.0
"""The longest wait for earlier groups to end: NCCL itself may be waiting for a lost rank."""
_given: list[str | None] = []
"""The variable's value before this process first changed it; not read at import, which a fork server may do."""
_lock = threading.Lock()
_has_left = threading.Event()
_is_aborted = False
_num_groups = 0
_before_abort: Callable[[], None] | None = None
_ending: list[threading.Thread] = []
"""The threads that end groups which this process has left."""


class LostRank(RuntimeError):
    """Another rank is lost, and what the last collectives have returned does not count."""


def can_abort() -> bool:
    """Whether this torch can abort a communicator (2.6 or newer)."""
    return hasattr(dist.distributed_c10d, "_abort_process_group")


def prepare(*, aborts: bool) -> None:
    """Set torch's environment variables before a group is made.

    Args:
        aborts: whether this process aborts its collectives by itself when a rank is lost, in place of torch's watchdog,
            which would end the process, or abort without telling it. A collective that takes too long is then a hang,
            which kit's agents find.
    """
    global _is_aborted, _before_abort
    _has_left.clear()
    _is_aborted, _before_abort = False, None
    if not _given:
        _given.append(os.environ.get(_HANDLING))
    if aborts:
        os.environ[_HANDLING] = "0"
        # After an error the watchdog would have all ranks write what the flight recorder has, for which kit's agents
        # ask by themselves. Where it still does, it sleeps four times as long as this, and whoever closes its group
        # waits for it: not 60 s.
        os.environ.setdefault(_DUMPS, "0")
        os.environ.setdefault(_DUMP_MS, "250")
    elif os.environ.get(_HANDLING) == "0":
        os.environ.pop(_HANDLING) if _given[0] is None else os.environ.update({_HANDLING: _given[0]})


def before_abort(call: Callable[[], None]) -> None:
    """Set a function that `leave` calls right before it aborts the present group, in whichever thread."""
    global _before_abort
    with _lock:
        _before_abort = call


def count_group() -> int:
    """Count a group that is about to be made, and return how many this process has made before."""
    global _num_groups
    _num_groups += 1
    return _num_groups - 1


def leave() -> None:
    """Have all communicators aborted, so that their kernels end soon; any thread may call it, any number of times."""
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
        # All of them: this rank may wait in one of a loop's own (`new_group`). Each in a thread of its own, since NCCL
        # ends one only when its kernels are done, which may wait for those of another.
        for group in [*dist.distributed_c10d._world.pg_names]:
            _end_in_thread(group.abort)
            _is_aborted = True


def _end_in_thread(end: Callable[[], object]) -> None:
    def run() -> None:
        try:
            end()
        except Exception as error:  # its traceback would be in the next attempt's log
            log.warning("NCCL's old group: %s", str(error).partition("\n")[0])

    thread = threading.Thread(target=run, name="nodekit-nccl", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there may be no more threads: to wait here is better than to wait for a lost rank
        run()
        return
    _ending[:] = [*(each for each in _ending if each.is_alive()), thread]


def wait_until_ended() -> None:
    """Wait for the threads that end groups: a process that ends itself meanwhile may crash."""
    threads, deadline = [*_ending], time.monotonic() + _END_TIMEOUT_S
    _ending.clear()  # what does not end is waited for once
    for each in threads:
        each.join(max(0.0, deadline - time.monotonic()))


def has_left() -> bool:
    """Whether the present group is aborted, or about to be."""
    return _has_left.is_set()


def check() -> None:
    """Raise `LostRank` if the present group is aborted, or about to be."""
    if has_left():
        raise LostRank("another rank is lost, and this one has left NCCL's group")


def close() -> None:
    """Close all groups, the aborted one too; torch's threads may still use that one, so keep references to it."""
    global _before_abort
    with _lock:
        _before_abort = None
    wait_until_ended()
    if has_left():
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def close_in_thread() -> None:
    """As `close`; if there is one NCCL group only, end it in a thread, so that the next can be made meanwhile."""
    global _before_abort
    groups = dist.distributed_c10d._world.pg_names
    if len(groups) > 1 or dist.get_backend() != "nccl":
        close()
        return
    with _lock:
        _before_abort = None
    (group,) = groups
    groups.clear()  # torch would end it here, and wait
    dist.destroy_process_group()
    _end_in_thread(group.abort if has_left() else group.shutdown)


def warm_up(device: torch.device) -> None:
    """Start NCCL by a group of this process alone: the first one in a process takes 0.4 s more than others (H200)."""
    count_group()
    try:
        dist.init_process_group(
            "nccl",
            store=dist.HashStore(),  # type: ignore[attr-defined]  # no stub
            rank=0,
            world_size=1,
            device_id=device,
        )
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # By this number the ranks name their groups, and one that was not formed has counted too.
        dist.distributed_c10d._world.group_count = 0


def make_room(device: torch.device) -> None:
    """Wait until what earlier groups had on the GPU is free, if little else is."""
    if any(each.is_alive() for each in _ending) and torch.cuda.mem_get_info(device)[0] < _ROOM_BYTES:
        wait_until_ended()
