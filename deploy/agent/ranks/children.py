"""Kill and reap the workers that are children of this process, with all the processes that they have started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from nodekit.deploy.host import processes

STUCK_S = 10.0
"""How long a killed process may show no activity before it counts as one that SIGKILL does not end."""


def exit_codes(pids: Mapping[int, int]) -> dict[int, int]:
    """Return the exit codes of the children that have ended, negative for a signal; leave the children unreaped.

    A failed child is included as soon as it begins to end: other ranks need not wait until the kernel has freed its
    memory.
    """
    found = {}
    for local_rank, pid in pids.items():
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended:
            exited = ended.si_code == os.CLD_EXITED
            found[local_rank] = ended.si_status if exited else -ended.si_status
        # Not a 0: it may be the first thread's alone, while other threads go on.
        elif code := processes.code_if_ending(pid):
            found[local_rank] = code
    return found


def signal_groups(pids: Mapping[int, int], number: int) -> None:
    """Send a signal to the process groups of workers that are not reaped yet."""
    for pid in pids.values():
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)  # it has not made its own process group yet


def clear_up(
    pids: Mapping[int, int],
    *,
    but: Collection[int] = (),
    stay: Collection[int] = (),
    ending: set[int] | None = None,
) -> dict[int, tuple[str, str]]:
    """Kill and reap workers, their process groups, and all orphans of theirs that have become children of this process.

    Args:
        pids: local rank → pid of the workers.
        but: pids of processes to leave alone.
        stay: pids of workers that go on, with the processes of their sessions.
        ending: if given, do not wait for workers that only have memory left to free, but add their pids to this set;
            call this again once they are gone, to clear up what they had started.

    Returns:
        pid → state and wchan of processes that SIGKILL does not end, as when the driver of a lost GPU never answers.
    """
    signal_groups(pids, signal.SIGKILL)
    stuck = _reap(pids.values(), ending)
    spared = {os.getsid(0), *stay}
    left_alone = {*but, *(ending or ())}
    while strays := [
        pid for pid in _children() if os.getsid(pid) not in spared and pid not in stuck.keys() | left_alone
    ]:
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
        stuck.update(_reap(strays))
    return stuck


def _reap(pids: Iterable[int], ending: set[int] | None = None) -> dict[int, tuple[str, str]]:
    """Reap killed children; return pid → state and wchan of those that have shown no activity for `STUCK_S`.

    The kernel takes a while to free much memory; if a set `ending` is given, children that only wait for this are added
    to it, and not waited for.
    """
    left = _left_of(pids, lambda those: _not_over(those, ending))
    return {pid: processes.where_it_waits(pid) for pid in left}


def wait_until_reaped(pids: Iterable[int]) -> None:
    """Wait until killed processes, children of another process, are reaped, or show no activity for `STUCK_S`."""
    _left_of(pids, lambda those: {pid for pid in those if processes.find(pid)})


def _left_of(pids: Iterable[int], look: Callable[[set[int]], set[int]]) -> set[int]:
    """Wait until `look` finds none of the processes left; return those that have shown no activity for `STUCK_S`."""
    left = set(pids)
    before: dict[int, str] = {}
    since, pause_s = time.monotonic(), 0.001
    while left := look(left):
        now = {pid: processes.activity(pid) for pid in left}
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > STUCK_S:
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.005)
    return left


def _not_over(pids: set[int], ending: set[int] | None) -> set[int]:
    left = {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0}
    if ending is not None:
        ending.update(pid for pid in left if processes.code_if_ending(pid) is not None)
        left -= ending
    return left


def _children() -> list[int]:
    return [
        int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()
    ]
