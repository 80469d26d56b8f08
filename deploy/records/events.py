"""A run's events (docs/events.md): reads the file, follows it while it grows, and gathers events from the nodes."""

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
MAX_KEPT = 20_000  # events held in memory while the disk is full
# A node's clock counts as set if its events are off by more. A rank may report an event a minute late, and a smaller
# change of the clock does not matter.
CLOCK_SET_S = 90.0
_TIMES = ("when", "progress_time", "done_at")  # fields, beside that of an event itself
_REWRITTEN = (current_status.KIND, current_status.MOVED)


@dataclass(frozen=True)
class Event:
    """One event of a run."""

    time: float
    """Seconds since 1970, by the supervisor's clock."""
    node: str | None
    """The node whose agent wrote it; None for the supervisor."""
    kind: EventKind
    fields: Mapping[str, Any]
    """All other fields."""
    end: int | None = field(default=None, compare=False)
    """The byte offset where its line ends in the run's file, if read by a `Follower`: identifies and orders events."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return one of the other fields."""
        return self.fields.get(name, default)

    @property
    def about(self) -> str | None:
        """The node that the event is about: the one that wrote it, or that the supervisor names in it."""
        return self.node or self.fields.get("about")


def of_node(
    channel: HostChannel, node_dir: str, at: Sequence[Any] = ("", 0), *, timeout_s: float
) -> Iterator[list[tuple[str, int, str]]]:
    """Yield a node's events after `at`, a (file, offset), in batches of (file, offset where the line ends, line)."""
    while found := channel.call(
        "hostfollow.events", timeout_s=timeout_s, node_dir=node_dir, file=at[0], offset=at[1]
    ):
        at = found[-1]
        yield found


def parse(line: str | bytes) -> Event | None:
    """Parse one line; return None if it is torn, or not an event."""
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
    """Parse lines, and return their events in the order of time, without duplicates that two supervisors gathered.

    If the clock was set back between two starts of the run, the events of the later start still come after the others.
    If the supervisor's clock was set during a start, the times of the events before that are shifted to the new clock.
    """
    found: dict[Any, tuple[int, float, Event]] = {}
    parsed = [event for event in map(parse, lines) if event and event.kind not in _REWRITTEN]
    set_s = 0.0
    for number in range(len(parsed) - 1, -1, -1):
        event = parsed[number]
        if set_s:
            others = {key: told + set_s for key in _TIMES if isinstance(told := event.get(key), int | float)}
            parsed[number] = dataclasses.replace(
                event, time=event.time + set_s, fields={**event.fields, **others}
            )
        set_s += clock_set_s(event)
    num_set_back = 0
    for number, (event, set_back_s) in enumerate(with_set_back(parsed)):
        num_set_back += set_back_s > 0
        at = event.get("at")
        found.setdefault((event.node, *at) if at else number, (num_set_back, event.time, event))
    return [event for *_, event in sorted(found.values(), key=lambda each: each[:2])]


def clock_set_s(event: Event) -> float:
    """By how much the supervisor's clock was set forward just before an event; negative: back; 0 for all others."""
    told = event.get("clock_set_s") if event.node is None else None
    return float(told) if isinstance(told, int | float) and math.isfinite(told) else 0.0


def with_set_back(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each event with the seconds that the clock was set back before it, which is mostly 0.

    `events` are in the order in which they were written. Only a start of the run can show that: all events before it
    happened earlier, whatever their times say.
    """
    latest = -math.inf
    for event in events:
        set_back_s = max(0.0, latest - event.time) if event.kind == "run-started" else 0.0
        latest = event.time if set_back_s else max(latest, event.time)
        yield event, set_back_s


def objects(lines: Iterable[str | bytes]) -> list[dict[str, Any]]:
    """Parse lines, and return their events as plain dictionaries, without torn lines."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            fields = json.loads(line)
            if fields["kind"] not in _REWRITTEN:
                found.append(fields)
    return found


def read(folder: Path) -> list[Event]:
    """Return the events of the run whose record is in `folder`, in the order of time; [] if there is no file.

    Raises:
        KitError: the file exists and cannot be read.
    """
    path = folder / FILE
    try:
        return parse_all(retried(lambda: read_file(str(path))).splitlines())
    except NOT_FOUND:
        return []
    except OSError as error:
        raise unreadable(path, error) from error


def now(folder: Path) -> dict[str, NodeStatus]:
    """Return node → its last known status, for the run whose record is in `folder`.

    Raises:
        KitError: the file cannot be read.
    """
    try:
        return current_status.statuses(str(folder))
    except OSError as error:
        raise unreadable(folder / FILE, error) from error


def unreadable(path: Path, error: OSError) -> KitError:
    """Return the error for a run's file of events that cannot be read."""
    return KitError(
        f"{path} cannot be read: {error.strerror}, so what has happened in this run is not known",
        cure=see_to(path.parent, error),
    )


class Follower:
    """Reads a file of events while it grows, in the order in which they were written, whatever their times."""

    def __init__(self, folder: Path, *, offset: int = 0) -> None:
        """Start at byte `offset`."""
        self._path = folder / FILE
        self._offset = offset
        self._read: dict[str, tuple[str, int]] = {}

    def more(self) -> list[Event]:
        """Return the events since the last call, without duplicates that two supervisors gathered."""
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
    """Adds events to the run's file; each event of a node once, even if another process gathered it before.

    Several threads may use it at once. While the disk is full, up to `MAX_KEPT` events are held in memory.
    """

    def __init__(self, folder: Path) -> None:
        """Find out which events are in the file already, and end a last line that a crash has torn."""
        self._path = folder / FILE
        self._status_file = current_status.StatusFile(str(self._path))
        self._statuses: dict[str, NodeStatus] = {}
        self._read: dict[str, tuple[str, int]] = {}
        self._latest: dict[str, float] = {}  # node → the latest time of its events
        # Node → its clock minus ours in seconds: as measured at its start, and as it is now if it was set since.
        self._clocks: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()
        self._kept: list[bytes] = []
        self.num_lost = 0
        """How many events were dropped because more than `MAX_KEPT` were held."""
        with contextlib.suppress(OSError):
            data = read_file(str(self._path))
            # In the order of the lines: a node's clock may have jumped.
            for event in filter(None, map(parse, data.splitlines())):
                if event.node and (at := event.get("at")):
                    self._read[event.node] = (at[0], at[1])
                    self._latest[event.node] = max(event.time, self._latest.get(event.node, event.time))
            if data and not data.endswith(b"\n"):
                append_private(str(self._path), b"\n")

    def at(self, node: str) -> tuple[str, int]:
        """Return how far a node's events were read, as (file, offset)."""
        return self._read.get(node, ("", 0))

    def clock_offset(self, node: str, measured: float) -> float:
        """Return a node's clock minus ours in seconds: `measured`, or corrected if its events show that it was set."""
        known = self._clocks.get(node)
        return known[1] if known and known[0] == measured else measured

    def our_clock_was_set(self, seconds: float) -> None:
        """Shift the times of the events that were gathered so far, since our clock was set forward by `seconds`."""
        self._latest = {node: when + seconds for node, when in self._latest.items()}

    def _offset_at(self, node: str, when: float, measured: float) -> float:
        """Return the offset of a node's clock at an event, whose time by that clock is `when`.

        An event cannot lie in the future, nor long before the earlier ones: if it does, the clock was set.
        """
        offset = self.clock_offset(node, measured)
        if not math.isfinite(when):
            return offset
        now = time.time()
        # Not in the future: older versions of kit may have recorded such times.
        latest = min(self._latest.get(node, -math.inf), now)
        if (ahead_s := when - offset - now) > CLOCK_SET_S:
            offset += ahead_s
        elif (behind_s := latest - (when - offset)) > CLOCK_SET_S:
            offset -= behind_s
        self._clocks[node] = (measured, offset)
        self._latest[node] = max(latest, when - offset)
        return offset

    def add_of_node(self, node: str, found: Sequence[tuple[str, int, str]], *, clock_offset: float) -> bool:
        """Add events found on a node: (file, offset where the line ends, line); False if the disk is full.

        `clock_offset` is the node's clock minus ours in seconds, as measured at its start.
        """
        lines = []
        for file, end, text in found:
            if _is_read(self._read, node, file, end):
                continue
            self._read[node] = (file, end)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                fields = json.loads(text)
                if fields["kind"] in _REWRITTEN:
                    continue  # a status, which `heard` receives
                offset = self._offset_at(node, float(fields["time"]), clock_offset)
                lines.append(
                    json.dumps({**_by_our_clock(fields, offset), "at": [file, end]}).encode() + b"\n"
                )
        return self.add(*lines)

    def add(self, *lines: bytes) -> bool:
        """Append lines to the run's file, after those held in memory; False if the disk is full."""
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
        """Record a node's present status in place of the last one; `clock_offset` is as in `add_of_node`."""
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
    """Return fields of a node with their times by our clock; `clock_offset` is the node's clock minus ours."""
    times = {name: fields[name] - clock_offset for name in ("time", *_TIMES) if fields.get(name)}
    return {**fields, **times}
