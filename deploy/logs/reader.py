"""Reads the logs of several nodes page by page, and prints their lines in the order of time."""

from __future__ import annotations

import heapq
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nodekit.deploy.records.loglines import Line, Source, Style, Wanted, lines_of, pick_attempts
from nodekit.inventory.errors import KitError

BATCH_S = 0.1


class _Pages:
    """An iterator over the lines of one source, in the order of time; a thread fetches the next pages ahead."""

    def __init__(
        self, source: Source, wanted: Mapping[str, Any], *, offsets: Mapping[str, int], final: bool
    ) -> None:
        self.source = source
        self.offsets = dict(offsets)
        self.error: Exception | None = None
        self._wanted = dict(wanted)
        self._final = final
        self._pages: queue.Queue[list[Line] | None] = queue.Queue(maxsize=2)
        threading.Thread(target=self._fetch, daemon=True).start()

    def _fetch(self) -> None:
        sizes = None
        try:
            while True:
                found = self.source.call(
                    "page",
                    offsets=self.offsets,
                    sizes=sizes,
                    final=self._final,
                    limited=self.source.channel is not None,
                    **self._wanted,
                )
                self.offsets, sizes = found["offsets"], found["sizes"]
                self._pages.put(lines_of(self.source, found["lines"]))
                if not found["more"]:
                    break
        except Exception as error:  # reported by `Reader.read`
            self.error = error
        self._pages.put(None)

    def __iter__(self) -> Iterator[Line]:
        while True:
            try:
                page = self._pages.get(timeout=0.2)  # a get without a timeout would block Ctrl-C
            except queue.Empty:
                continue
            if page is None:
                return
            yield from page


class Reader:
    """Prints the selected lines of several nodes' logs."""

    def __init__(self, nodes: Sequence[str], wanted: Wanted, style: Style) -> None:
        """Read nothing yet; `nodes` are all nodes that may have logs, in the order of their lines at equal times."""
        self.failed: set[str] = set()
        """Nodes whose lines could not all be read."""
        self.num_lines = 0
        self._nodes = tuple(nodes)
        self._wanted = wanted
        self._style = style
        self._attempts: list[str] | None = None
        self._last: list[str] | None = None

    def choose(self, sources: Sequence[Source]) -> None:
        """Resolve the selected attempt (``last``, a generation) to those in the logs; call before `read`."""
        if not self._wanted.attempt:
            return
        there = [log["attempt"] for log in self._listing(sources)]
        if there or not self.failed:
            self._attempts = pick_attempts(self._wanted.attempt, there)

    def other_ranks(self, sources: Sequence[Source]) -> list[int]:
        """Return the ranks that have logs, if ranks are selected and none of them has; else []."""
        there = {log["rank"] for log in self._listing(sources)} if self._wanted.ranks else set()
        return [] if there & {*self._wanted.ranks} else sorted(there)

    def _listing(self, sources: Sequence[Source]) -> list[dict[str, Any]]:
        """Return the logs that exist."""
        from nodekit.deploy.connect.channel import on_all

        found = on_all({each.node: each for each in sources}, lambda each: each.call("listing"))
        for node, result in found.items():
            if isinstance(result, Exception):
                self._lost(node, result)
        return [log for result in found.values() if not isinstance(result, Exception) for log in result]

    def told(self, source: Source) -> dict[str, Any]:
        """Return the selection as arguments for a node's log reader."""
        return self._wanted.on_host(self._attempts, source.clock_offset)

    def read(
        self,
        sources: Sequence[Source],
        *,
        offsets: Mapping[str, Mapping[str, int]] | None = None,
        final: bool = True,
    ) -> dict[str, dict[str, int]]:
        """Print all lines; return node → log → the byte up to which it was read.

        Args:
            sources: the logs to read.
            offsets: node → log → the byte to start at; None for the beginning.
            final: whether to print a last line that has no line end yet.
        """
        order = {node: place for place, node in enumerate(self._nodes)}
        sources = sorted(sources, key=lambda each: order.get(each.node, len(order)))
        pages = [
            _Pages(source, self.told(source), offsets=(offsets or {}).get(source.node, {}), final=final)
            for source in sources
        ]
        batch: list[Line] = []
        printed = time.monotonic()
        for line in heapq.merge(*pages, key=lambda line: line.time):
            batch.append(line)
            if len(batch) == 256 or time.monotonic() - printed > BATCH_S:
                self.print(batch)
                batch, printed = [], time.monotonic()
        self.print(batch)
        for each in pages:
            if each.error is not None:
                self._lost(each.source.node, each.error)
        return {each.source.node: each.offsets for each in pages}

    def print(self, lines: Sequence[Line]) -> None:
        """Print lines that are in order already."""
        if lines:
            self.num_lines += len(lines)
            print("\n".join(text for line in lines for text in self._style.shown(line)), flush=True)

    def _lost(self, node: str, error: Exception) -> None:
        from nodekit.deploy.connect.channel import ChannelLost
        from nodekit.deploy.host.logs.logread import MATCH_S

        if not isinstance(error, KitError):
            raise error
        self.failed.add(node)
        hint = ""
        if self._wanted.grep and isinstance(error, ChannelLost):
            hint = f" (a --grep that takes longer than {MATCH_S} s is ended there)"
        print(f"kit: {error}{hint}", file=sys.stderr, flush=True)
