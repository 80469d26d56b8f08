"""The record of each run on the control machine, so that every kit command works from any terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nodekit.deploy.host.files import NOT_FOUND, append_private, make_private, read, retried, write_private
from nodekit.deploy.host.schema import FINISHED, EventKind, Finished
from nodekit.deploy.records.record_files import (
    FILE,
    OF_A_SWEEP,
    Unreadable,
    fields_of,
    folder,
    see_to,
    told,
    unreadable_record,
    waited_for,
)
from nodekit.inventory.errors import KitError, NotWritten

if TYPE_CHECKING:
    from nodekit.inventory.schema import Host

Outcome = Finished
ENDED = FINISHED
"""The final states of a run or a node."""
STOPPED_EXIT = 130
"""Kit's exit status for a run that was stopped, the same as a shell's for Ctrl-C."""
TRIED = ("drills", "selftests")
"""The folders, beside that of all runs, with the inventories of `kit drill` and `kit selftest`."""
LIVE = ("starting", "running")  # as recorded; a `kit up` that was killed could not record the end


@dataclass(kw_only=True)
class Run:
    """One run: the contents of its ``run.json`` (mode 0600)."""

    run_id: str
    name: str
    inventory_path: str
    inventory: dict[str, Any]
    """The inventory at the start, with its defaults filled in; an inventory holds no secrets."""
    command: list[str] | None
    """The command given on the command line in place of the inventory's; None if there was none."""
    skip_check: bool = False
    """Whether it was started with --skip-check; resuming it without that option may fail the checks."""
    created: float
    started: float = 0.0
    """When the run was started or resumed last."""
    generation: int = 0
    state: str = "starting"
    """starting, running, succeeded, failed, stopped."""
    ended: float | None = None
    verdict: str = ""
    cause: dict[str, str] = field(default_factory=dict)
    """The known cause of its end, a `Cause`'s fields: name, what, cure; {} if none is known, and in old records."""
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """node → its plan (deploy/plan/plan.py), from which it can be found and started again."""
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)
    """node of an earlier start that is not in `nodes` → its plan, and, as `host`, how to reach it: files of the run may
    be there."""
    argv: list[str] = field(default_factory=list)
    """The command of its ranks, with placeholders like {node} not yet replaced; [] in old records."""
    token: str = field(default="", repr=False)
    """The secret by which the agents of this run recognise each other."""
    code_digest: str = ""
    """The digest of the code that was sent."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """What was not sent because .gitignore names it (`LeftOut.to_dict`)."""
    is_placed: bool = False
    """Whether the code is in a folder that all nodes share, so that a new node finds it there."""
    slurm: dict[str, str] = field(default_factory=dict)
    """For a run submitted to Slurm: its job_id, and its run_dir in the shared folder; in a sweep also the sweep's id,
    and the run's values there."""
    clock_offsets: dict[str, float] = field(default_factory=dict)
    """node → its clock minus ours, in seconds."""
    judgement: dict[str, Any] = field(default_factory=dict)
    """The policy's `State.to_dict`: a supervisor that takes over continues from it."""
    number: int = 0
    """Which run of this user it is, counted from 1; 0 for runs from before they were counted."""

    def __post_init__(self) -> None:
        """Begin without unknown fields; `parse` sets them."""
        # Fields that only another version of kit knows; they are written back unchanged.
        self._unknown: dict[str, Any] = {}

    @property
    def folder(self) -> Path:
        """The folder of the record."""
        return folder() / self.run_id

    @property
    def sweep(self) -> str:
        """The id of the sweep that this run belongs to; "" if it belongs to none."""
        return self.slurm.get("sweep", "")

    @property
    def sweep_values(self) -> str:
        """The run's own values in its sweep, like ``lr=1e-3``."""
        return self.slurm.get("values", "")

    @property
    def was_resumed(self) -> bool:
        """Whether the run was started more than once."""
        return self.started != self.created

    def end_or_now(self) -> float:
        """Return until when its history goes: the recorded end, since the last event may be lost, or now."""
        return self.ended if self.state in ENDED and self.ended else time.time()

    @property
    def is_led_here(self) -> bool:
        """Whether it is supervised from this machine; else, under Slurm, from one of its nodes."""
        return not self.slurm

    @property
    def is_tried(self) -> bool:
        """Whether `kit drill` or `kit selftest` started it, with an inventory of their own."""
        path, state = Path(self.inventory_path), folder().parent
        return any(path.is_relative_to(place / each) for place in (state, state.resolve()) for each in TRIED)

    @property
    def num_nodes(self) -> str:
        """The number of nodes that it has, or has requested from Slurm, as text; "?" if unknown."""
        if self.is_led_here:
            return str(len(self.nodes))
        asked = self.inventory.get("slurm")
        return str(asked.get("nodes", "?")) if isinstance(asked, dict) else "?"

    @property
    def order(self) -> tuple[int, float]:
        """The sort key of runs. The clock may have been wrong, so it decides only among runs without a number."""
        return self.number, self.created

    @property
    def stopped_by(self) -> str:
        """Who asked this run to stop since its last start (like "kit down"); "" if no one. Start nothing after that."""
        path = str(self.folder / "stop")
        try:
            return read(path).decode("utf-8", "replace")
        except OSError:
            return f"somebody ({path} cannot be read)" if os.path.lexists(path) else ""

    def say_stop(self, by: str) -> None:
        """Ask the run's supervisor to stop it, in the name of `by` ("kit down"); with "" withdraw that request.

        Raises:
            KitError: the request cannot be withdrawn, so the run cannot be started again.
        """
        path = self.folder / "stop"
        if not by:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise KitError(
                    f"{path} cannot be removed: {error.strerror}; while it is there, {self.run_id} counts as stopped",
                    cure="see what it is, and remove it",
                ) from error
        elif self.folder.exists():
            with contextlib.suppress(OSError):  # the disk may be full; the caller stops the run anyway
                write_private(str(path), by.encode())

    @property
    def drained(self) -> frozenset[str]:
        """The names of the drained nodes (`kit drain`).

        Raises:
            KitError: as `drained_because` does.
        """
        return frozenset(self.drained_because)

    @property
    def drained_because(self) -> dict[str, str]:
        """Drained node → what is broken, if kit drained it by itself; "" if the user did.

        Raises:
            KitError: the file exists and cannot be read, so any node may be drained.
        """
        path = self.folder / "drained"
        try:
            found = json.loads(read(str(path)))
            return found if isinstance(found, dict) else dict.fromkeys(found, "")
        except NOT_FOUND:
            return {}
        except OSError as error:
            raise KitError(
                f"{path} cannot be read: {error.strerror}", cure=see_to(path.parent, error)
            ) from error
        except (ValueError, TypeError) as error:
            cure = "remove it, then kit drain again what is to stay out"
            raise KitError(f"{path} is damaged: it names no nodes", cure=cure) from error

    def drain(self, nodes: Mapping[str, str]) -> None:
        """Write the drained nodes, in the form of `drained_because`, for the run's supervisor; replaces the last list.

        Raises:
            NotWritten: the disk is full, or gone.
        """
        path = self.folder / "drained"
        with told(path):
            write_private(str(path), json.dumps(dict(sorted(nodes.items()))).encode(), durable=True)

    @property
    def skew_s(self) -> float:
        """The greatest difference between two nodes' clocks, in seconds."""
        offsets = self.clock_offsets.values()
        return max(offsets, default=0.0) - min(offsets, default=0.0)

    def is_still(self, started: float) -> bool:
        """Whether the start at time `started` is the run's last one, and the run has not ended."""
        return self.started == started and self.state in LIVE

    def as_recorded(self) -> Run:
        """Return the run as it is on disk now; if that cannot be read, this object."""
        try:
            return parse(read(str(self.folder / FILE)), self.run_id)
        except (OSError, ValueError):
            return self

    def finish_stopped(self) -> None:
        """Record that the run was stopped; every process that sees it end may call this, with the same result."""
        self.finish("stopped", f"stopped by {self.stopped_by}" if self.stopped_by else "stopped")

    def save(self) -> None:
        """Write the whole record; to change one that other processes may have written since, use `changing`.

        Raises:
            NotWritten: the disk is full, or gone.
        """
        with self.alone():
            self._write()

    @contextlib.contextmanager
    def changing(self, *, mends: bool = False) -> Iterator[bool]:
        """Change fields of the record under a lock: all are read again on entry, and written on exit.

        Assign new values; do not modify a list or dictionary in place. An exception in the body leaves the record as it
        was, in memory and on disk.

        Args:
            mends: rewrite a damaged record from this object, and keep the damaged one as ``run.json.damaged``. For the
                supervisor only, which knows the whole record.

        Yields:
            Whether the record was damaged.

        Raises:
            NotWritten: the disk is full or gone, or the record cannot be read.
        """
        path, is_damaged = str(self.folder / FILE), False
        with self.alone():
            try:
                self._read_anew()
            except NOT_FOUND:
                pass  # a new run
            except OSError as error:
                cure = see_to(self.folder, error)
                raise NotWritten(f"{path} cannot be read: {error.strerror}", cure=cure) from error
            except ValueError as error:
                if not mends:
                    raise NotWritten(*Unreadable(self.run_id, str(error)).problem) from error
                is_damaged = True
                with told(Path(path)):
                    write_private(f"{path}.damaged", read(path))
            before = dict(vars(self))
            try:
                yield is_damaged
                self._write()
            except BaseException:
                vars(self).update(before)
                raise

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the record's lock, so that it can be read and then written; other processes wait.

        Raises:
            NotWritten: the disk is full, or gone.
        """
        with contextlib.ExitStack() as stack:
            with told(self.folder / "run.json"):
                make_private(self.folder)
                stack.enter_context(waited_for(self.folder / "record.lock"))
            yield

    def _write(self) -> None:
        path = self.folder / FILE
        with told(path):
            if not self.number and not path.exists():
                self.number = _next_number()
            fields = {**self._unknown, **dataclasses.asdict(self)}
            write_private(str(path), json.dumps(fields, indent=1).encode(), durable=True)

    def reload(self) -> None:
        """Read the record again.

        Raises:
            KitError: the record is missing or unreadable; this object is unchanged.
        """
        try:
            self._read_anew()
        except (OSError, ValueError) as error:
            raise unreadable_record(self.run_id, error).error() from error

    def _read_anew(self) -> None:
        path = self.folder / FILE
        vars(self).update(vars(parse(retried(lambda: read(str(path))), self.run_id)))

    def finish(self, state: str, verdict: str, cause: Mapping[str, str] | None = None) -> None:
        """Record the run's end, unless the record says that it succeeded, or was started again since.

        Args:
            state: the final state, one of `ENDED`.
            verdict: how it ended, in one line.
            cause: the known cause, as the fields of a `Cause`.

        Raises:
            NotWritten: the disk is full, or gone.
        """
        end = {"state": state, "verdict": verdict, "cause": dict(cause or {}), "ended": time.time()}
        started = self.started
        try:
            with self.changing():
                if self.started != started or self.state == "succeeded":
                    return
                vars(self).update(end)
        except NotWritten:
            vars(self).update(end)  # true all the same, though it is only in this process's memory
            raise
        self.event("run-ended", state=state, verdict=verdict, **({"cause": dict(cause)} if cause else {}))

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Append one event to the run's ``events.jsonl``."""
        with contextlib.suppress(OSError):  # a full disk here must not end the run
            append_private(str(self.folder / "events.jsonl"), self.event_line(kind, **fields))

    def event_line(self, kind: EventKind, **fields: Any) -> bytes:
        """Return an event with the present time, as a line for ``events.jsonl``."""
        line = {"run": self.run_id, "time": time.time(), "node": None, "kind": kind, **fields}
        return json.dumps(line).encode() + b"\n"


def new_id(name: str) -> str:
    """Return a unique run id, ``NAME-MMDD-HHMMSS-xx``, which sorts by time within a name."""
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def parse(data: bytes | str, run_id: str) -> Run:
    """Parse the ``run.json`` of the run with this id; fields that only another version of kit knows are kept.

    Raises:
        ValueError: the data is not a record of this run; the message says why.
    """
    known, unknown = fields_of(data, Run)
    run = Run(**known)
    run._unknown = unknown
    if run.run_id != run_id:
        raise ValueError(f"it is the record of '{run.run_id}'")
    if run.state not in (*LIVE, *ENDED):
        raise ValueError(f"its state '{run.state}' is none that this kit knows")
    if run.sweep and not OF_A_SWEEP.fullmatch(run.run_id):
        raise ValueError("it is one of a sweep's runs, and its id has no number")
    return run


def on_record() -> tuple[list[Run], list[Unreadable]]:
    """Return all runs on record, oldest first, and all records that cannot be read or parsed.

    Raises:
        KitError: the folder of the records cannot be read.
    """
    found, unreadable = [], []
    try:
        names = sorted(path.name for path in folder().iterdir())
    except NOT_FOUND:
        names = []
    except OSError as error:
        raise KitError(
            f"{folder()} cannot be read: {error.strerror}", cure=see_to(folder(), error)
        ) from error
    for name in names:
        path, data = str(folder() / name / FILE), b""
        try:
            data = retried(lambda path=path: read(path))  # type: ignore[misc]
            found.append(parse(data, name))
        except NOT_FOUND:
            continue
        except (OSError, ValueError) as error:
            unreadable.append(unreadable_record(name, error, data))
    return sorted(found, key=lambda run: run.order), unreadable


def all_runs() -> list[Run]:
    """Return all runs with a readable record, oldest first; where a missing one would matter, use `on_record`."""
    return on_record()[0]


def _next_number() -> int:
    """Count one run more, and return its number."""
    with waited_for(folder().parent / "runs.count") as file:
        text = file.read().strip()
        number = 1 + (int(text) if text.isdigit() else max((run.number for run in all_runs()), default=0))
        file.seek(0)
        file.truncate()
        file.write(str(number))
    return number


class RunFolder(NamedTuple):
    """The folder of a run on one host."""

    host: str
    path: str
    snapshots: str = ""
    """Another folder there with snapshots of the run; "" for none."""
    reached: Host | None = None
    """How to reach the host, if it belongs to the run no longer."""


def public(run: Run) -> Mapping[str, Any]:
    """Return the fields of a run that `kit runs --json` prints."""
    return {
        "run_id": run.run_id,
        "state": run.state,
        "inventory": run.inventory_path,
        "command": run.command,
        "created": run.created,
        "ended": run.ended,
        "generation": run.generation,
        "nodes": list(run.nodes),
        "verdict": run.verdict,
        "cause": run.cause or None,
    }
