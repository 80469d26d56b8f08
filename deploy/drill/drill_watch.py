"""Observes a run through separate connections: statuses, events and metrics."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import ChannelLost, HostChannel, on_all
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.drill.drill_report import Step, Trace
from nodekit.deploy.host.logs import hostfollow
from nodekit.deploy.records import events
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Host

POLL_S = 0.2
ANSWER_TIMEOUT_S = 3.0
FILE_BYTES = 64 << 20


class Watch:
    """Polls the nodes of one run; times are by this machine's clock."""

    def __init__(self, run: Run, hosts: Mapping[str, Host], options: SshOptions, output: Path) -> None:
        """Prepare; polling starts with the ``with`` block.

        Args:
            run: the run's record, with its nodes.
            hosts: name → the host in the inventory.
            options: how to reach the hosts.
            output: the file that `kit up` writes to.
        """
        self.run = run
        self.statuses: dict[str, dict[str, Any]] = {}
        """Node → its last status."""
        self.moved_at = time.monotonic()
        """When a new step was last seen, by the monotonic clock."""
        self._hosts = {name: host for name, host in hosts.items() if name in run.nodes}
        self._options = options
        self._output = output
        self._lock = threading.Lock()
        self._channels: dict[str, HostChannel] = {}
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._steps: dict[tuple[str, int, float], Step] = {}
        self._progress: dict[tuple[str, str, int], Step] = {}
        self._said: list[tuple[float, str]] = []
        self._events_at: dict[str, tuple[str, int]] = {}
        self._read: dict[tuple[str, str], str] = {}
        self._closing = threading.Event()
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._follow, args=(name,), name=f"drill-{name}", daemon=True)
            for name in self._hosts
        ]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        with self._lock:
            channels, self._channels, self._is_over = self._channels, {}, True
        on_all(channels, HostChannel.close)  # which ends pending calls

    @property
    def trace(self) -> Trace:
        """Everything observed so far."""
        self._read_own()
        with self._lock:
            events = [event for found in self._events.values() for event in found]
            steps = self._steps or self._progress
            return Trace(
                events=sorted(events, key=lambda event: event["time"]),
                steps=sorted(steps.values(), key=lambda each: each.time),
                said=list(self._said),
                nproc={name: node["nproc_per_node"] for name, node in self.run.nodes.items()},
            )

    @property
    def step(self) -> int:
        """The highest step reported; 0 for none."""
        with self._lock:
            return max((each.step for each in (self._steps or self._progress).values()), default=0)

    def channel(self, name: str) -> HostChannel:
        """Return a channel to a node, reopened if it was lost."""
        with self._lock:
            channel = self._channels.get(name)
        if channel is None:
            channel = cluster.open_channel(self._hosts[name], self._options)
            with self._lock:
                if not self._is_over:
                    self._channels[name] = channel
                    return channel
            channel.close()
            raise ChannelLost(name, "it is not watched any more")
        return channel

    def local_time(self, name: str, when: float) -> float:
        """Convert a time by a node's clock to this machine's."""
        return when - self.run.clock_offsets.get(name, 0.0)

    def close(self) -> None:
        """Poll once more, for what the nodes report at the end, and stop."""
        self._closing.set()
        for thread in self._threads:
            thread.join(ANSWER_TIMEOUT_S * 4)
        for name in self._hosts:
            with contextlib.suppress(KitError):
                self._look(name)

    def _follow(self, name: str) -> None:
        while not self._closing.is_set():
            started = time.monotonic()
            with contextlib.suppress(KitError):  # drills make nodes unreachable
                self._look(name)
            # Large files are polled less often.
            self._closing.wait(max(POLL_S, time.monotonic() - started))

    def _look(self, name: str) -> None:
        node_dir = self.run.nodes[name]["node_dir"]
        channel = self.channel(name)
        try:
            status = channel.call("status", timeout_s=ANSWER_TIMEOUT_S, node_dir=node_dir)
            happened = self._new_events(
                name,
                lambda file, offset: channel.call(
                    "hostfollow.events",
                    timeout_s=ANSWER_TIMEOUT_S * 2,
                    node_dir=node_dir,
                    file=file,
                    offset=offset,
                ),
            )
            metrics = self._file(channel, f"{node_dir}/output/metrics.jsonl")
        except KitError:
            with self._lock:
                lost = self._channels.pop(name, None)
            if lost is not None:
                threading.Thread(target=lost.close, daemon=True).start()
            raise
        with self._lock:
            known = len(self._steps) + len(self._progress)
            self.statuses[name] = status
            self._take_progress(name, status)
            for event in happened:
                event["time"] = self.local_time(name, event["time"])
                self._events.setdefault(name, []).append(event)
            for line in metrics:
                # It may be an unrelated file of the same name.
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    step = Step(self.local_time(name, line["time"]), int(line["step"]), float(line["loss"]))
                    self._steps.setdefault((name, step.step, step.time), step)
            if len(self._steps) + len(self._progress) > known:
                self.moved_at = time.monotonic()

    def _take_progress(self, name: str, status: Mapping[str, Any]) -> None:
        attempt, progress = status.get("attempt"), status.get("progress")
        number = re.match(r"\s*(\d+)", str(progress or ""))
        if attempt and number:
            when = self.local_time(name, float(status["progress_time"]))
            step = Step(when, int(number.group(1)), attempt=attempt)
            self._progress.setdefault((name, attempt, step.step), step)

    def _file(self, channel: HostChannel, path: str) -> list[dict[str, Any]]:
        """Return the lines added to a JSON Lines file since the last read; all if it was rewritten."""
        text = (
            channel.call("read_file", timeout_s=ANSWER_TIMEOUT_S * 2, path=path, limit_bytes=FILE_BYTES) or ""
        )
        return self._new_lines((channel.host, path), text)

    def _read_own(self) -> None:
        new = self._new_events("", functools.partial(hostfollow.events, str(self.run.folder)))
        with self._lock:
            self._events.setdefault("", []).extend(new)
        with contextlib.suppress(OSError):
            text = self._output.read_text(encoding="utf-8", errors="replace")
            before = self._read.get(("", "said"), "")
            self._read["", "said"] = text
            lines = text[len(before) :].splitlines()
            with self._lock:
                self._said += [(time.time(), line) for line in lines]

    def _new_events(self, name: str, read: Callable[[str, int], list[list[Any]]]) -> list[dict[str, Any]]:
        """Return the events added to a file since the last read."""
        told: list[dict[str, Any]] = []
        while found := read(*self._events_at.get(name, ("", 0))):
            self._events_at[name] = found[-1][0], found[-1][1]
            told += events.objects(line for _, _, line in found)
        return told

    def _new_lines(self, key: tuple[str, str], text: str) -> list[dict[str, Any]]:
        before = self._read.get(key, "")
        whole = text[: text.rfind("\n") + 1]
        self._read[key] = whole
        found = []
        for line in (whole[len(before) :] if whole.startswith(before) else whole).splitlines():
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    found.append(value)
        return found
