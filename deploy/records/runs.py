"""The record of each run on the control machine, so that status, logs, down and up work from any terminal."""

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
"""The states of a run, or of a node, that has come to its end."""
STOPPED_EXIT = 130
"""Kit's exit status for a run that was stopped, as a shell has it for Ctrl-C."""
TRIED = ("drills", "selftests")
"""Where `kit drill` and `kit selftest` have the inventories of their runs, beside the folder of all runs."""
LIVE = ("starting", "running")  # on record; a `kit up` that was killed cannot write down the rest


@dataclass(kw_only=True)
class Run:
    """One run, as ``run.json`` (0600) has it."""

    run_id: str
    name: str
    inventory_path: str
    inventory: dict[str, Any]
    """The inventory as it was, defaults filled in; no secret is in an inventory."""
    command: list[str] | None
    """The command line's command, in place of the inventory's."""
    skip_check: bool = False
    """Whether it was started with --skip-check: to go on without that may be refused."""
    created: float
    started: float = 0.0
    """When this generation was started."""
    generation: int = 0
    state: str = "starting"
    """starting, running, succeeded, failed, stopped."""
    ended: float | None = None
    verdict: str = ""
    cause: dict[str, str] = field(default_factory=dict)
    """The known cause of its end: name, what, cure; {} where there is none (and in old records)."""
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """node → its plan (deploy/plan/plan.py): where to find it again, and how to start it again."""
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)
    """node that an earlier start had and this one has not → its plan, and, as `host`, how it was reached: a part of the
    run may lie there."""
    argv: list[str] = field(default_factory=list)
    """What its ranks run, with {node} and the like as they were written; [] in old records."""
    token: str = field(default="", repr=False)
    """What the agents of this run know each other by."""
    code_digest: str = ""
    """Of the code that was synced."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """What of the code's folder .gitignore left out (`LeftOut.to_dict`)."""
    is_placed: bool = False
    """Whether the code lies in a folder that all nodes share: a new node finds it there."""
    slurm: dict[str, str] = field(default_factory=dict)
    """Of a run that was submitted: its job_id, and its run_dir in the shared folder; in a sweep also that, and its
    values there."""
    clock_offsets: dict[str, float] = field(default_factory=dict)
    """node → its clock minus ours, in seconds."""
    judgement: dict[str, Any] = field(default_factory=dict)
    """What the supervisor has decided so far (deploy/supervise/policy.py): who takes over goes on from it."""
    number: int = 0
    """Which run of this user it is, counted from 1; 0: it was begun before they were counted."""

    def __post_init__(self) -> None:
        """Nothing is known of it that this kit does not know."""
        self._unknown: dict[str, Any] = {}  # fields of another version's: they are written again as they are

    @property
    def folder(self) -> Path:
        """Where the record lies."""
        return folder() / self.run_id

    @property
    def sweep(self) -> str:
        """The id of the sweep that it is one run of; "" where it is not."""
        return self.slurm.get("sweep", "")

    @property
    def sweep_values(self) -> str:
        """What it has for itself in its sweep, as ``lr=1e-3``."""
        return self.slurm.get("values", "")

    @property
    def was_resumed(self) -> bool:
        """Whether it has been started again: its first start is when it was created."""
        return self.started != self.created

    def end_or_now(self) -> float:
        """Until when its history goes: its end on record, since its last event may be lost, or now."""
        return self.ended if self.state in ENDED and self.ended else time.time()

    @property
    def is_led_here(self) -> bool:
        """Whether a process on this machine supervises it while it goes on; else one of its nodes does."""
        return not self.slurm

    @property
    def is_tried(self) -> bool:
        """Whether `kit drill` or `kit selftest` has started it, with an inventory of their own."""
        path, state = Path(self.inventory_path), folder().parent
        return any(path.is_relative_to(place / each) for place in (state, state.resolve()) for each in TRIED)

    @property
    def num_nodes(self) -> str:
        """How many nodes it has, or has asked for."""
        if self.is_led_here:
            return str(len(self.nodes))
        asked = self.inventory.get("slurm")
        return str(asked.get("nodes", "?")) if isinstance(asked, dict) else "?"

    @property
    def order(self) -> tuple[int, float]:
        """What runs are sorted by. A clock may have run ahead: it decides only among runs that have no number."""
        return self.number, self.created

    @property
    def stopped_by(self) -> str:
        """Who has told this run to end since it was started ("kit down"): nothing may be started any more."""
        path = str(self.folder / "stop")
        try:
            return read(path).decode("utf-8", "replace")
        except OSError:
            return f"somebody ({path} cannot be read)" if os.path.lexists(path) else ""

    def say_stop(self, by: str) -> None:
        """Tell whoever supervises this run that it is to end, and who wants that; "": that it begins again.

        Raises:
            KitError: it cannot begin again, since what was said cannot be taken back.
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
            with contextlib.suppress(OSError):  # a full disk: it is stopped all the same
                write_private(str(path), by.encode())

    @property
    def drained(self) -> frozenset[str]:
        """The nodes that are to be out of the job (`kit drain`).

        Raises:
            KitError: nobody knows, as of `drained_because`.
        """
        return frozenset(self.drained_because)

    @property
    def drained_because(self) -> dict[str, str]:
        """The same, with what is broken of those that kit has taken out itself; "" where the user did.

        Raises:
            KitError: the file is there and cannot be read: any node may be drained.
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
        """Tell whoever supervises this run which nodes are to be out of it, as `drained_because`, and no others.

        Raises:
            NotWritten: the disk is full, or gone.
        """
        path = self.folder / "drained"
        with told(path):
            write_private(str(path), json.dumps(dict(sorted(nodes.items()))).encode(), durable=True)

    @property
    def skew_s(self) -> float:
        """How far the nodes' clocks are apart."""
        offsets = self.clock_offsets.values()
        return max(offsets, default=0.0) - min(offsets, default=0.0)

    def is_still(self, started: float) -> bool:
        """Whether what was started then goes on: it has not ended, and the run was not started anew."""
        return self.started == started and self.state in LIVE

    def as_recorded(self) -> Run:
        """The run as it is on record now; this one where nobody can read that."""
        try:
            return parse(read(str(self.folder / FILE)), self.run_id)
        except (OSError, ValueError):
            return self

    def finish_stopped(self) -> None:
        """Record that it was stopped; all who see it end write down the same."""
        self.finish("stopped", f"stopped by {self.stopped_by}" if self.stopped_by else "stopped")

    def save(self) -> None:
        """Write all of the record as it is here; one that others may have written since is changed in `changing`.

        Raises:
            NotWritten: the disk is full, or gone.
        """
        with self.alone():
            self._write()

    @contextlib.contextmanager
    def changing(self, *, mends: bool = False) -> Iterator[bool]:
        """Change some fields: the others are read anew before, all are written after, and nobody writes in between.

        Give a field another value; do not change one that is a list or a dictionary in its place. What raises leaves
        the record as it was, here and on the disk.

        Args:
            mends: who supervises the run knows all of its record: one that is damaged is written anew from that, and
                kept as ``run.json.damaged``.

        Yields:
            Whether it was damaged.

        Raises:
            NotWritten: the disk is full, or gone; or the record cannot be read.
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
        """Held while what is on record is read and then written: whoever else is about to waits.

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
        """Take over what another process has written.

        Raises:
            KitError: there is nothing, or nobody can read it; all is as it was here.
        """
        try:
            self._read_anew()
        except (OSError, ValueError) as error:
            raise unreadable_record(self.run_id, error).error() from error

    def _read_anew(self) -> None:
        path = self.folder / FILE
        vars(self).update(vars(parse(retried(lambda: read(str(path))), self.run_id)))

    def finish(self, state: str, verdict: str, cause: Mapping[str, str] | None = None) -> None:
        """Record the end; nothing where it is on record that the run succeeded, or was started anew since.

        Args:
            state: its last.
            verdict: how it ended, in a line.
            cause: the known one, as the fields of a `Cause`.

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
            vars(self).update(end)  # it is so, though only this process knows
            raise
        self.event("run-ended", state=state, verdict=verdict, **({"cause": dict(cause)} if cause else {}))

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Append one event to the run's ``events.jsonl``."""
        with contextlib.suppress(OSError):  # a full disk here must not end the run
            append_private(str(self.folder / "events.jsonl"), self.event_line(kind, **fields))

    def event_line(self, kind: EventKind, **fields: Any) -> bytes:
        """An event of now, as its line."""
        line = {"run": self.run_id, "time": time.time(), "node": None, "kind": kind, **fields}
        return json.dumps(line).encode() + b"\n"


def new_id(name: str) -> str:
    """``NAME-MMDD-HHMMSS-xx``: sorts by time within a name, and is unique."""
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def parse(data: bytes | str, run_id: str) -> Run:
    """The run with this id, from what its ``run.json`` holds; fields that only another version knows are kept.

    Raises:
        ValueError: that is no record of this run, and why.
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
    """Every run on record, oldest first; and each record that cannot be read, or is not this kit's.

    Raises:
        KitError: nobody knows which there are.
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
    """Every run on record, oldest first, without those whose record cannot be read: nothing may follow from these."""
    return on_record()[0]


def _next_number() -> int:
    """The number of a new run."""
    with waited_for(folder().parent / "runs.count") as file:
        text = file.read().strip()
        number = 1 + (int(text) if text.isdigit() else max((run.number for run in all_runs()), default=0))
        file.seek(0)
        file.truncate()
        file.write(str(number))
    return number


class RunFolder(NamedTuple):
    """Where a run lies on one host."""

    host: str
    path: str
    snapshots: str = ""
    """Where else it keeps snapshots there."""
    reached: Host | None = None
    """How, where that host is none of the run's any more."""


def public(run: Run) -> Mapping[str, Any]:
    """What `kit runs --json` tells of a run."""
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
