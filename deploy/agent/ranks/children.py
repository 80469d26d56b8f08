"""End the workers that are children of this process, and all that they have started, as far as that can be done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from nodekit.deploy.host import processes

STUCK_S = 10.0


def exit_codes(pids: Mapping[int, int]) -> dict[int, int]:
    """The exit codes of those children that have ended, negative for a signal; they are left unreaped."""
    found = {}
    for local_rank, pid in pids.items():
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended:
            exited = ended.si_code == os.CLD_EXITED
            found[local_rank] = ended.si_status if exited else -ended.si_status
    return found


def signal_groups(pids: Mapping[int, int], number: int) -> None:
    """Send a signal to the process groups of workers that are not reaped yet."""
    for pid in pids.values():
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)  # it has not come to have its own group


def clear_up(
    pids: Mapping[int, int], *, but: Collection[int] = (), stay: Collection[int] = ()
) -> dict[int, tuple[str, str]]:
    """Kill and reap workers, their groups, and whatever else they left to us: all that is in another session.

    Nothing is done about `but`, nor about the workers that `stay` and what is in their sessions. Returns those that
    SIGKILL does not end, as where the driver of a lost GPU never answers: pid → state and wchan.
    """
    signal_groups(pids, signal.SIGKILL)
    stuck = _reap(pids.values())
    spared = {os.getsid(0), *stay}
    while strays := [
        pid for pid in _children() if os.getsid(pid) not in spared and pid not in (*stuck, *but)
    ]:
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
        stuck.update(_reap(strays))
    return stuck


def _reap(pids: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Wait until killed children have ended; those that have not, and in which nothing has moved for `STUCK_S`.

    To take back a lot of memory, the kernel needs a while.
    """
    left = set(pids)
    before: dict[int, str] = {}
    since, pause_s = time.monotonic(), 0.001
    while left := {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}:
        now = {pid: processes.activity(pid) for pid in left}
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > STUCK_S:
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.02)
    return {pid: processes.where_it_waits(pid) for pid in left}


def _children() -> list[int]:
    return [
        int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()
    ]
