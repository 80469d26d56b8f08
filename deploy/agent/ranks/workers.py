"""The worker processes of one node, one round of them at a time: started, watched, stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodekit.deploy.agent.ranks import children
from nodekit.deploy.agent.ranks.early_ends import EarlyEnds
from nodekit.deploy.agent.ranks.forkserver import ForkServer, ServerLost
from nodekit.deploy.host import processes

_POLL_S = 0.01
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """One worker, and everything it needs."""

    local_rank: int
    argv: tuple[str, ...]
    """The user's command; ``python`` is this interpreter."""
    env: Mapping[str, str]
    """Its whole environment."""
    cwd: str
    log: str
    """The file for stdout and stderr: appended to, 0600."""


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A process that waits in the kernel and cannot be ended."""

    pid: int
    local_rank: int | None
    """None: it is no rank, but a rank has started it."""
    state: str
    """The kernel's letter, mostly D."""
    wchan: str
    """The kernel's function that it waits in; "" where that is not told."""

    def __str__(self) -> str:
        who = "a process of the ranks" if self.local_rank is None else f"local rank {self.local_rank}"
        return f"{who} (pid {self.pid}, state {self.state}{f' in {self.wchan}' if self.wchan else ''})"


class Workers:
    """Starts workers as forks of `server`, or, without one or where it cannot, as fresh processes.

    For one thread, and one that lives as long as the workers: they die with it. Each round ends with `stop`, also
    where all workers have ended, and it ends every child of this process that is in another session.
    """

    def __init__(self, server: ForkServer | None) -> None:
        self._server = server
        # Of a worker, whatever ours is by then.
        self._max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._pids: dict[int, int] = {}
        self._served = False
        self._ended: dict[int, int] = {}
        self._ends = select.epoll()
        self._handles: dict[int, int] = {}
        self._watched: set[int] = set()  # pids of which a thread tells when they begin to end
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ends.register(self._bell, select.EPOLLIN)
        self.fresh: dict[int, str] = {}
        """Local rank → why this worker of the round is not a fork."""
        self._logged: set[str] = set()  # of these reasons, in any round
        self.stuck: list[Stuck] = []
        """Of all rounds, what SIGKILL did not end."""
        processes.adopt_orphans()

    @property
    def pids(self) -> dict[int, int]:
        """Local rank → pid, of all that were started and not stopped yet."""
        return dict(self._pids)

    def start_soon(self, starts: Sequence[WorkerStart]) -> None:
        """Have workers started, beside those that have stayed, and do not wait for it: `poll` does, and then `pids`."""
        if self._server is not None:
            self._served = True
            with self._losing_the_server():
                self._server.post("start", starts=_requests(starts))
                return
        self.start(starts)

    def start(self, starts: Sequence[WorkerStart]) -> dict[int, int]:
        """Start a round of workers, beside those that have stayed: local rank → pid, of all."""
        assert not any(start.local_rank in self._pids for start in starts), "stop comes before the next start"
        self.fresh, self._ended = {}, {}
        self._served = (
            self._server is not None
        )  # said first: `stop` must ask the server also if we are interrupted
        answer = self._ask("start", starts=_requests(starts))
        if answer is not None:
            self.fresh = {int(local_rank): why for local_rank, why in answer["fresh"].items()}
            for why in {*self.fresh.values()} - self._logged:
                _LOGGER.warning("ranks are no forks, and import everything themselves: %s", why)
                self._logged.add(why)
        else:
            for start in starts:
                self.fresh[start.local_rank] = "there is no fork server"
                self._pids[start.local_rank] = self._spawn(start)
        return self.pids

    def preload(self, names: Sequence[str], env: Mapping[str, str]) -> None:
        """Have the fork server import what the workers will, in their environment; `warm_up` waits for it."""
        if self._server is not None:
            with self._losing_the_server():
                self._server.preload(names, env)

    def warm_up(self, pause: Callable[[], None]) -> None:
        """Wait until the fork server has its imports, so that a start takes no time; what `pause` raises ends that."""
        while self._server is not None:
            with self._losing_the_server():
                if self._server.is_ready():
                    return
                pause()
                time.sleep(_POLL_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a worker ends that was still there at the last `poll`, at most that long: it costs nothing.

        Returns False if none has ended; True if one may have, which `poll` then tells, or somebody has called `wake`.
        """
        is_sure = True
        there = {pid for local_rank, pid in self._pids.items() if local_rank not in self._ended}
        self._watch_early_ends()
        for pid in self._handles.keys() - there:
            self._forget(pid)
        for pid in there - self._handles.keys():
            try:
                handle = os.pidfd_open(pid)
            except OSError:  # it is gone, or the kernel is older than 5.3
                timeout_s, is_sure = min(timeout_s, _POLL_S), False
                continue
            try:
                self._ends.register(handle, select.EPOLLIN)
            except OSError:  # this user watches as many files as the kernel allows
                os.close(handle)
                timeout_s, is_sure = min(timeout_s, _POLL_S), False
            else:
                self._handles[pid] = handle
        found = self._ends.poll(timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return bool(found) or not is_sure

    def _watch_early_ends(self) -> None:
        """Have `wait` end as soon as a worker begins to end: some time before its parent is told."""
        if self._server is None:
            return
        early_ends = self._server.early_ends
        self._watched &= set(self._pids.values())
        for local_rank, pid in self._pids.items():
            if pid not in self._watched and early_ends.is_held(local_rank):
                self._watched.add(pid)
                tell = functools.partial(self._tell_early_end, early_ends, local_rank)
                with contextlib.suppress(RuntimeError):  # no thread can be started: its end is told later
                    threading.Thread(target=tell, name=f"nodekit-end{local_rank}", daemon=True).start()

    def _tell_early_end(self, early_ends: EarlyEnds, local_rank: int) -> None:
        early_ends.wait(local_rank)
        self.wake()

    def wake_by(self, descriptor: int) -> None:
        """Have `wait` end, too, when something has come that can be read from this: once, whether it is read or not."""
        with contextlib.suppress(FileExistsError):
            self._ends.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def wake(self) -> None:
        """End the present `wait`, or the next; from any thread."""
        os.eventfd_write(self._bell, 1)

    def _forget(self, pid: int) -> None:
        handle = self._handles.pop(pid)
        self._ends.unregister(handle)
        os.close(handle)

    def poll(self) -> dict[int, int]:
        """Local rank → exit code, negative for a signal, of those that have ended so far."""
        if self._served and (answer := self._ask("poll")) is not None:
            self._ended = {int(local_rank): code for local_rank, code in answer["ended"].items()}
        else:
            self._ended = children.exit_codes(self._pids)
        return dict(self._ended)

    def stop(
        self,
        grace_s: float,
        *,
        is_wanted: Callable[[], bool] = lambda: False,
        unsignalled: Collection[int] = (),
        staying: Callable[[], Collection[int]] = tuple,
        waits: bool = True,
    ) -> bool:
        """End all workers and what they started: SIGTERM, and SIGKILL after `grace_s`; whether a worker needed that.

        Args:
            grace_s: until SIGKILL.
            is_wanted: after `grace_s`, even of 0, this goes on waiting while it is true; it is asked before, too.
            unsignalled: local ranks that get no SIGTERM: they have been told otherwise.
            staying: those that are not to be ended by now, but are to be there at the next `start`.
            waits: whether for the kernel to take back their memory, too. If not, those that are started in their place
                wait for it, as far as they are forks, and what cannot be ended is known at the next `stop`.
        """
        deadline = time.monotonic() + grace_s
        left = self._left(staying)
        if left and (grace_s > 0 or is_wanted()):
            signalled = {key: pid for key, pid in left.items() if key not in unsignalled}
            children.signal_groups(signalled, signal.SIGTERM)
            children.signal_groups(left, signal.SIGCONT)  # a stopped one hears only this
            while left := self._left(staying):
                if not is_wanted() and time.monotonic() > deadline:
                    break
                self.wait(_POLL_S)
        pids, stays = dict(self._pids), set(staying())  # asked once: who says so only now stays as well
        stay = {key: pid for key, pid in pids.items() if key in stays and key not in self._ended}
        if self._served and (answer := self._ask("clear", stay=[*stay], waits=waits)) is not None:
            stuck = {int(pid): where for pid, where in answer["stuck"].items()}
        else:
            but = [each.pid for each in self.stuck]
            ending = {key: pid for key, pid in pids.items() if key not in stay}
            stuck = children.clear_up(ending, but=but, stay=stay.values())
            self._pids = stay
        for pid, (state, wchan) in stuck.items():
            local_rank = next((key for key, each in pids.items() if each == pid), None)
            self.stuck.append(Stuck(pid=pid, local_rank=local_rank, state=state, wchan=wchan))
        for pid in list(self._handles):
            self._forget(pid)
        self._served = self._served and (bool(self._pids) or not waits)  # what ends is to be waited for yet
        return bool(left.keys() - stay.keys())

    def _left(self, staying: Callable[[], Collection[int]]) -> dict[int, int]:
        """Local rank → pid of those that have not ended, nor are to stay."""
        ended, stay = self.poll(), staying()
        return {key: pid for key, pid in self._pids.items() if key not in ended and key not in stay}

    def _ask(self, op: str, **args: Any) -> dict[str, Any] | None:
        """The server's answer; None without a server, whose children are then ours."""
        if self._server is None:
            return None
        with self._losing_the_server():
            answer = self._server.ask(op, **args)
            self._pids = {int(local_rank): pid for local_rank, pid in answer["pids"].items()}
            return answer
        return None

    @contextlib.contextmanager
    def _losing_the_server(self) -> Iterator[None]:
        """Go on without it where it is lost."""
        try:
            yield
        except ServerLost as error:
            _LOGGER.warning("the fork server is lost (%r): workers start afresh", error.__cause__)
            self._server = None
            self._served = False

    def _spawn(self, start: WorkerStart) -> int:
        program = str(Path(__file__).with_name("worker.py"))
        ours = [str(os.getpid()), start.log, str(self._max_files), start.cwd]
        argv = [sys.executable, "-I", "-S", program, *ours, *start.argv]
        return os.posix_spawn(sys.executable, argv, start.env)


def _requests(starts: Sequence[WorkerStart]) -> list[dict[str, Any]]:
    """As the fork server is asked for them."""
    return [
        {**dataclasses.asdict(start), "env": dict(start.env), "argv": list(start.argv)} for start in starts
    ]
