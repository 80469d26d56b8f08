"""A run's events (docs/events.md): read, followed while they are written, gathered from its nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from nodekit.deploy.connect.channel import HostChannel
from nodekit.deploy.host import current_status
from nodekit.deploy.host.files import NOT_FOUND, append_private, check_regular, retried
from nodekit.deploy.host.files import read as read_file
from nodekit.deploy.host.schema import EventKind, NodeStatus
from nodekit.deploy.records.record_files import see_to
from nodekit.inventory.errors import KitError

FILE = "events.jsonl"
MAX_KEPT = 20_000  # events while there is no room for them on the disk
# A rank may tell of something a minute after it was. A clock that is set by less than this shows little.
CLOCK_SET_S = 90.0
_REWRITTEN = (current_status.KIND, current_status.MOVED)


@dataclass(frozen=True)
class Event:
    """One event."""

    time: float
    """Seconds since 1970, by the supervisor's clock."""
    node: str | None
    """Whose agent wrote it; None for the supervisor."""
    kind: EventKind
    fields: Mapping[str, Any]
    """All others."""
    end: int | None = field(default=None, compare=False)
    """Where its line ends in the run's file, if it was read from there: events are told apart and ordered by that."""

    def get(self, name: str, default: Any = None) -> Any:
        """One of the other fields."""
        return self.fields.get(name, default)

    @property
    def about(self) -> str | None:
        """The node it is about: the writer's, or the one that the supervisor names."""
        return self.node or self.fields.get("about")


def of_node(
    channel: HostChannel, node_dir: str, at: Sequence[Any] = ("", 0), *, timeout_s: float
) -> Iterator[list[tuple[str, int, str]]]:
    """Yield a node's events since `at` (its file, and how far that was read), part by part: (file, end, line)."""
    while found := channel.call(
        "hostfollow.events", timeout_s=timeout_s, node_dir=node_dir, file=at[0], offset=at[1]
    ):
        at = found[-1]
        yield found


def parse(line: str | bytes) -> Event | None:
    """An event from its line; None for one that is torn, or no event."""
    try:
        fields = json.loads(line)
        when, node, kind, at = (
            float(fields.pop("time")),
            fields.pop("node"),
            fields.pop("kind"),
            fields.get("at"),
        )
        is_whole = math.isfinite(when) and isinstance(kind, str) and isinstance(node, str | None)
        if not is_whole or (at and list(map(type, at)) != [str, int]):
            return None
        return Event(when, node, cast(EventKind, kind), fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def parse_all(lines: Iterable[str | bytes]) -> list[Event]:
    """What has happened, by some lines, in the order of time; what two supervisors have gathered is there once.

    Between two starts of a run the clock may have been set back: the later start comes after the earlier one all the
    same.
    """
    found: dict[Any, tuple[int, float, Event]] = {}
    parsed = [event for event in map(parse, lines) if event and event.kind not in _REWRITTEN]
    num_set_back = 0
    for number, (event, set_back_s) in enumerate(with_set_back(parsed)):
        num_set_back += set_back_s > 0
        at = event.get("at")
        found.setdefault((event.node, *at) if at else number, (num_set_back, event.time, event))
    return [event for *_, event in sorted(found.values(), key=lambda each: each[:2])]


def with_set_back(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Each event, in the order in which they came in, and how far the clock was set back before it; most often 0.

    Only a start of the run tells: before it, nothing happens that could have a later time.
    """
    latest = -math.inf
    for event in events:
        set_back_s = max(0.0, latest - event.time) if event.kind == "run-started" else 0.0
        latest = event.time if set_back_s else max(latest, event.time)
        yield event, set_back_s


def objects(lines: Iterable[str | bytes]) -> list[dict[str, Any]]:
    """What has happened, by some lines, as they have it; without those that are torn."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            fields = json.loads(line)
            if fields["kind"] not in _REWRITTEN:
                found.append(fields)
    return found


def read(folder: Path) -> list[Event]:
    """What has happened in the run whose record lies in `folder`, in the order of time; nothing without a file.

    Raises:
        KitError: the file cannot be read: anything may have happened.
    """
    path = folder / FILE
    try:
        return parse_all(retried(lambda: read_file(str(path))).splitlines())
    except NOT_FOUND:
        return []
    except OSError as error:
        raise unreadable(path, error) from error


def now(folder: Path) -> dict[str, NodeStatus]:
    """What each node of that run does, as it was last heard of.

    Raises:
        KitError: the file cannot be read.
    """
    try:
        return current_status.statuses(str(folder))
    except OSError as error:
        raise unreadable(folder / FILE, error) from error


def unreadable(path: Path, error: OSError) -> KitError:
    """What to say of a run's file of events that cannot be read."""
    return KitError(
        f"{path} cannot be read: {error.strerror}, so what has happened in this run is not known",
        cure=see_to(path.parent, error),
    )


class Follower:
    """Reads a file of events while it grows, in the order in which they came in: no clock that jumps changes that."""

    def __init__(self, folder: Path, *, offset: int = 0) -> None:
        """From byte `offset` on."""
        self._path = folder / FILE
        self._offset = offset
        self._read: dict[str, tuple[str, int]] = {}

    def more(self) -> list[Event]:
        """What is new since the last call; what two supervisors have gathered is there once."""
        try:
            check_regular(str(self._path))
            if self._path.stat().st_size == self._offset:  # a supervisor asks several times a second
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        found = []
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            self._offset += len(line)
            event = parse(line)
            if event is None or event.kind in _REWRITTEN:
                continue
            if event.node and (at := event.get("at")):
                if _is_read(self._read, event.node, *at):
                    continue
                self._read[event.node] = (at[0], at[1])
            found.append(dataclasses.replace(event, end=self._offset))
        return found


def _is_read(read: Mapping[str, tuple[str, int]], node: str, file: str, end: int) -> bool:
    known, offset = read.get(node, ("", 0))
    return file == known and end <= offset


class Gatherer:
    """Adds events to the run's file, those of nodes each once, whoever did it before; by several threads, if need be.

    What the disk has no room for is kept until it has, as many as `MAX_KEPT`.
    """

    def __init__(self, folder: Path) -> None:
        """Find out what is there already, and mend a last line that a crash has torn."""
        self._path = folder / FILE
        self._status_file = current_status.StatusFile(str(self._path))
        self._statuses: dict[str, NodeStatus] = {}
        self._read: dict[str, tuple[str, int]] = {}
        self._latest: dict[str, float] = {}  # node → the latest time of its events
        # Node → its clock minus ours: as it was measured, and as it is since it was set.
        self._clocks: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()
        self._kept: list[bytes] = []
        self.num_lost = 0
        """How many could not even be kept."""
        with contextlib.suppress(OSError):
            data = read_file(str(self._path))
            for event in filter(
                None, map(parse, data.splitlines())
            ):  # by their order: a node's clock may jump
                if event.node and (at := event.get("at")):
                    self._read[event.node] = (at[0], at[1])
                    self._latest[event.node] = max(event.time, self._latest.get(event.node, event.time))
            if data and not data.endswith(b"\n"):
                append_private(str(self._path), b"\n")

    def at(self, node: str) -> tuple[str, int]:
        """Which file of a node was read last, and how far."""
        return self._read.get(node, ("", 0))

    def clock_offset(self, node: str, measured: float) -> float:
        """A node's clock minus ours: as it was measured, or as its events tell that it was set since."""
        known = self._clocks.get(node)
        return known[1] if known and known[0] == measured else measured

    def _offset_at(self, node: str, when: float, measured: float) -> float:
        """The same, at an event that was `when` by its clock: none is to come, or was long before those before it."""
        offset = self.clock_offset(node, measured)
        if not math.isfinite(when):
            return offset
        now = time.time()
        latest = min(self._latest.get(node, -math.inf), now)  # an earlier kit may have gathered some of later
        if (ahead_s := when - offset - now) > CLOCK_SET_S:
            offset += ahead_s
        elif (behind_s := latest - (when - offset)) > CLOCK_SET_S:
            offset -= behind_s
        self._clocks[node] = (measured, offset)
        self._latest[node] = max(latest, when - offset)
        return offset

    def add_of_node(self, node: str, found: Sequence[tuple[str, int, str]], *, clock_offset: float) -> bool:
        """Add what was found on a node: (file, where its line ends, line); False: there is no room.

        `clock_offset` is its clock minus ours, as it was measured.
        """
        lines = []
        for file, end, text in found:
            if _is_read(self._read, node, file, end):
                continue
            self._read[node] = (file, end)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                fields = json.loads(text)
                if fields["kind"] in _REWRITTEN:
                    continue  # `heard` is told of these
                offset = self._offset_at(node, float(fields["time"]), clock_offset)
                lines.append(
                    json.dumps({**_by_our_clock(fields, offset), "at": [file, end]}).encode() + b"\n"
                )
        return self.add(*lines)

    def add(self, *lines: bytes) -> bool:
        """Add lines to the run's file, with those that were kept; False: there is no room."""
        with self._lock:
            self._kept += lines
            self.num_lost += max(0, len(self._kept) - MAX_KEPT)
            del self._kept[:-MAX_KEPT]
            try:
                if self._kept:
                    append_private(str(self._path), b"".join(self._kept))
            except OSError:
                return False
            self._kept.clear()
            return True

    def heard(self, node: str, status: NodeStatus, *, clock_offset: float) -> None:
        """Have what a node does now, and what its host says of it, stand in place of what was heard before."""
        if status == self._statuses.get(node) or "time" not in status:
            return
        clock_offset = self.clock_offset(node, clock_offset)
        failures = [_by_our_clock(each, clock_offset) for each in status.get("failures", ())]
        with contextlib.suppress(OSError):
            self._status_file.write(
                {**_by_our_clock(status, clock_offset), "failures": failures, "node": node}
            )
            self._statuses[node] = status


def _by_our_clock(fields: Mapping[str, Any], clock_offset: float) -> dict[str, Any]:
    """What a node has told, with its times by the clock here; `clock_offset` is its clock minus ours."""
    times = {
        name: fields[name] - clock_offset
        for name in ("time", "when", "progress_time", "done_at")
        if fields.get(name)
    }
    return {**fields, **times}
