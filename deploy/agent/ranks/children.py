"""End the workers that are children of this process, and all that they have started, as far as that can be done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from nodekit.deploy.host import processes

STUCK_S = 10.0


def exit_codes(pids: Mapping[int, int]) -> dict[int, int]:
    """The exit codes of those children that have ended, negative for a signal; they are left unreaped.

    Of those that fail, while they end: what others wait for is not that the kernel has taken back their memory.
    """
    found = {}
    for local_rank, pid in pids.items():
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended:
            exited = ended.si_code == os.CLD_EXITED
            found[local_rank] = ended.si_status if exited else -ended.si_status
        # One that is 0 may be that of the first thread alone, while others go on.
        elif code := processes.code_if_ending(pid):
            found[local_rank] = code
    return found


def signal_groups(pids: Mapping[int, int], number: int) -> None:
    """Send a signal to the process groups of workers that are not reaped yet."""
    for pid in pids.values():
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)  # it has not come to have its own group


def clear_up(
    pids: Mapping[int, int],
    *,
    but: Collection[int] = (),
    stay: Collection[int] = (),
    ending: set[int] | None = None,
) -> dict[int, tuple[str, str]]:
    """Kill and reap workers, their groups, and whatever else they left to us: all that is in another session.

    Returns those that SIGKILL does not end, as where the driver of a lost GPU never answers: pid → state and wchan.

    Args:
        pids: of the workers, by local rank.
        but: pids of processes about which nothing is done.
        stay: pids of workers that go on, with what is in their sessions.
        ending: those of the workers of which nothing but memory is left are not waited for, and are added to this; once
            they are gone, what they had started is to be cleared up, too.
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
    """Wait until killed children have ended; those that have not, and in which nothing has moved for `STUCK_S`.

    To take back a lot of memory, the kernel needs a while; if there is a set for those that are `ending`, it is not
    waited for.
    """
    left = _left_of(pids, lambda those: _not_over(those, ending))
    return {pid: processes.where_it_waits(pid) for pid in left}


def wait_until_reaped(pids: Iterable[int]) -> None:
    """Wait until killed processes are reaped that are somebody else's children, while anything moves in them."""
    _left_of(pids, lambda those: {pid for pid in those if processes.find(pid)})


def _left_of(pids: Iterable[int], look: Callable[[set[int]], set[int]]) -> set[int]:
    """Wait while, of processes, a look finds some left; those in which nothing has moved for `STUCK_S`."""
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
