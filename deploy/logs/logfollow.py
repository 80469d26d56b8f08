"""`kit logs -f`: shows the ranks' output as it comes, until the run has ended and all of it is shown."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodekit.deploy.logs.reader import Reader
from nodekit.deploy.records.loglines import Line, Source, Window, lines_of
from nodekit.inventory.errors import HostError

TICK_S = 0.1
RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Followed:
    """The logs that are followed through one channel: those of one node, or under Slurm of all nodes."""

    name: str
    open: Callable[[], list[Source]]
    """Returns the logs behind the channel, which it opens again if it was lost; raises HostError."""
    node_dir: str | None
    """The node's folder, if there is one node: its logs are polled less often once its agent has ended."""


class Follower:
    """Prints lines as they come, until the run has ended and all lines are printed."""

    def __init__(
        self, reader: Reader, nodes: Sequence[str], offsets: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Continue from `offsets`: node → log → the byte up to which it was printed."""
        self.lost: set[str] = set()
        """The names of those that are unreachable at present."""
        self._reader = reader
        self._at = {node: dict(each) for node, each in offsets.items()}
        self._gone: set[str] = set()
        self._window = Window(nodes)
        self._arrived: queue.Queue[list[Line]] = queue.Queue()
        self._over = threading.Event()
        self._lock = threading.Lock()

    def run(self, followed: Sequence[Followed], is_over: Callable[[bool], bool], *, poll_s: float) -> None:
        """Follow until the run has ended.

        Args:
            followed: what to follow.
            is_over: called every second; returns whether the run has ended, given whether all agents are gone or
                unreachable.
            poll_s: how often a host looks for new lines, in seconds (`Backend.poll_s`).
        """
        for each in followed:
            threading.Thread(target=self._follow, args=(each, poll_s), daemon=True).start()
        try:
            self._until(is_over, {each.name for each in followed})
        finally:
            with self._lock:
                self._over.set()  # lines that arrive from now on are dropped, and read again below
        self._take(0)
        self._reader.print(self._window.ready(float("inf")))
        rest = []
        for each in followed:
            if each.name not in self.lost:
                try:
                    rest += each.open()
                except HostError as error:
                    print(f"kit: {error}", file=sys.stderr, flush=True)
                    self.lost.add(each.name)
        self._reader.read(rest, offsets=self._at)

    def _until(self, is_over: Callable[[bool], bool], names: set[str]) -> None:
        looked = time.monotonic()
        while True:
            self._take(TICK_S)
            self._reader.print(self._window.ready(time.monotonic()))
            if time.monotonic() - looked > RETRY_S:
                looked = time.monotonic()
                if is_over(names <= self._gone | self.lost):
                    return

    def _take(self, timeout_s: float) -> None:
        """Move the lines that have arrived to the window; wait up to `timeout_s` for the first."""
        try:
            self._window.add(
                self._arrived.get(timeout=timeout_s or None, block=timeout_s > 0), time.monotonic()
            )
            while True:
                self._window.add(self._arrived.get_nowait(), time.monotonic())
        except queue.Empty:
            pass

    def _follow(self, each: Followed, poll_s: float) -> None:
        while not self._over.is_set():
            try:
                sources = each.open()
                if each.name in self.lost:
                    print(f"kit: {each.name}: reached again", file=sys.stderr, flush=True)
                    self.lost.discard(each.name)
                if sources:
                    self._stream(each, sources, poll_s)
                    self._gone.add(each.name)
            except HostError as error:
                if self._over.is_set():
                    return  # the run has ended, and the channel was closed
                if each.name not in self.lost:
                    print(f"kit: {error}; trying again", file=sys.stderr, flush=True)
                self.lost.add(each.name)
            self._over.wait(RETRY_S)

    def _stream(self, each: Followed, sources: Sequence[Source], poll_s: float) -> None:
        by_name = {source.node: source for source in sources}

        def take(part: Any) -> None:
            with self._lock:
                if not self._over.is_set():
                    self._at[part["node"]] = part["offsets"]
                    self._arrived.put(lines_of(by_name[part["node"]], part["lines"]))

        channel = sources[0].channel
        assert channel is not None
        self._gone.discard(each.name)
        channel.stream(
            "logread.follow",
            take,
            folders={source.node: source.folder for source in sources},
            offsets={source.node: self._at.get(source.node, {}) for source in sources},
            wanted={source.node: self._reader.told(source) for source in sources},
            poll_s=poll_s,
            node_dir=each.node_dir,
        )
