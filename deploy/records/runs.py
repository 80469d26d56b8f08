"""The record of each run on the control machine, so that status, logs, down and up work from any terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from nodekit.deploy.host.files import append_private, write_private
from nodekit.deploy.host.schema import FINISHED, EventKind, Finished
from nodekit.inventory.errors import KitError, NotWritten

Outcome = Finished
ENDED = FINISHED
"""The states of a run, or of a node, that has come to its end."""
STOPPED_EXIT = 130
"""Kit's exit status for a run that was stopped, as a shell has it for Ctrl-C."""
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
    skew_s: float = 0.0
    """How far the nodes' clocks are apart."""
    judgement: dict[str, Any] = field(default_factory=dict)
    """What the supervisor has decided so far (deploy/supervise/policy.py): who takes over goes on from it."""
    number: int = 0
    """Which run of this user it is, counted from 1; 0: it was begun before they were counted."""

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
    def is_led_here(self) -> bool:
        """Whether a process on this machine supervises it while it goes on; else one of its nodes does."""
        return not self.slurm

    @property
    def num_nodes(self) -> str:
        """How many nodes it has, or has asked for."""
        return str(len(self.nodes)) if self.is_led_here else str(self.inventory["slurm"]["nodes"])

    @property
    def order(self) -> tuple[int, float]:
        """What runs are sorted by. A clock may have run ahead: it decides only among runs that have no number."""
        return self.number, self.created

    @property
    def stopped_by(self) -> str:
        """Who has told this run to end since it was started ("kit down"): nothing may be started any more."""
        with contextlib.suppress(OSError):
            return (self.folder / "stop").read_text(encoding="utf-8")
        return ""

    def say_stop(self, by: str) -> None:
        """Tell whoever supervises this run that it is to end, and who wants that; "": that it begins again."""
        path = self.folder / "stop"
        if not by:
            path.unlink(missing_ok=True)
        elif self.folder.exists():
            with contextlib.suppress(OSError):  # a full disk: it is stopped all the same
                write_private(str(path), by.encode())

    @property
    def drained(self) -> frozenset[str]:
        """The nodes that are to be out of the job (`kit drain`)."""
        return frozenset(self.drained_because)

    @property
    def drained_because(self) -> dict[str, str]:
        """The same, with what is broken of those that kit has taken out itself; "" where the user did."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            found = json.loads((self.folder / "drained").read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else dict.fromkeys(found, "")
        return {}

    def drain(self, nodes: Mapping[str, str]) -> None:
        """Tell whoever supervises this run which nodes are to be out of it, as `drained_because`, and no others.

        Raises:
            NotWritten: the disk is full, or gone.
        """
        path = self.folder / "drained"
        with _told(path):
            write_private(str(path), json.dumps(dict(sorted(nodes.items()))).encode())

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
    def changing(self) -> Iterator[None]:
        """Change some fields: the others are read anew before, all are written after, and nobody writes in between.

        Give a field another value; do not change one that is a list or a dictionary in its place. What raises leaves
        the record as it was, here and on the disk.

        Raises:
            NotWritten: the disk is full, or gone.
        """
        with self.alone():
            with _told(self.folder / "run.json"), contextlib.suppress(FileNotFoundError):  # a new run
                self.reload()
            before = dict(vars(self))
            try:
                yield
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
            with _told(self.folder / "run.json"):
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                stack.enter_context(_waited_for(self.folder / "record.lock"))
            yield

    def _write(self) -> None:
        path = self.folder / "run.json"
        with _told(path):
            if not self.number and not path.exists():
                self.number = _next_number()
            write_private(str(path), json.dumps(dataclasses.asdict(self), indent=1).encode(), durable=True)

    def reload(self) -> None:
        """Take over what another process has written."""
        fields = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        for name, value in fields.items():
            setattr(self, name, value)

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

    def event_line(self, kind: str, **fields: Any) -> bytes:
        """An event of now, as its line."""
        line = {"run": self.run_id, "time": time.time(), "node": None, "kind": kind, **fields}
        return json.dumps(line).encode() + b"\n"


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotWritten(
            f"{path} cannot be written: {error.strerror}", cure=f"see to the disk (df {path.parent})"
        ) from error


def folder() -> Path:
    """``$XDG_STATE_HOME/nodekit/runs``."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "nodekit" / "runs"


def new_id(name: str) -> str:
    """``NAME-MMDD-HHMMSS-xx``: sorts by time within a name, and is unique."""
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def all_runs() -> list[Run]:
    """Every run on record, oldest first; one whose record cannot be read is left out."""
    found = []
    for path in folder().glob("*/run.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Run(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda run: run.order)


def find(run_id: str | None) -> Run:
    """The run with this id, or an unambiguous beginning of it; without an id the latest, as of `latest_of`.

    Raises:
        KitError: there is none, or more than one.
    """
    runs = all_runs()
    if not runs:
        raise KitError(f"no run on record in {folder()}", cure="start one: kit up INVENTORY")
    if run_id is None:
        last = runs[-1]
        return last if last.sweep else _latest(runs, last.inventory_path) or last
    found = [run for run in runs if run.run_id == run_id] or [
        run for run in runs if run.run_id.startswith(run_id)
    ]
    if len(found) == 1:
        return found[0]
    ids = ", ".join(run.run_id for run in (found or runs)[-8:])
    if found:
        raise KitError(f"'{run_id}' begins the ids of {len(found)} runs: {ids}")
    raise KitError(f"no run '{run_id}' on record; the latest are {ids}")


def latest_of(inventory_path: Path) -> Run | None:
    """The latest run of an inventory file, the one that is not over before all others; without those of a sweep."""
    return _latest(all_runs(), str(inventory_path.resolve()))


def _latest(runs: Sequence[Run], inventory_path: str) -> Run | None:
    own = [run for run in runs if run.inventory_path == inventory_path and not run.sweep]
    return max(own, key=lambda run: (run.state in LIVE, run.order), default=None)


def _next_number() -> int:
    """The number of a new run."""
    with _waited_for(folder().parent / "runs.count") as file:
        text = file.read().strip()
        number = 1 + (int(text) if text.isdigit() else max((run.number for run in all_runs()), default=0))
        file.seek(0)
        file.truncate()
        file.write(str(number))
    return number


def sweep(run_id: str | None) -> list[Run]:
    """The runs of the sweep with this id, or an unambiguous beginning of it; without an id of the latest run's.

    Empty where that is not a sweep.
    """
    runs = all_runs()
    if run_id is None:
        ids = {run.sweep for run in runs[-1:]}
    else:
        ids = {run.sweep or run.run_id for run in runs if run.run_id.startswith(run_id)}
        ids = ids & {run_id} or ids
    if len(ids) != 1 or (run_id and not all(each.startswith(run_id) for each in ids)):
        return []
    found = [run for run in runs if run.sweep and run.sweep in ids]
    return sorted(found, key=lambda run: int(run.run_id.rpartition(".")[2]))


@contextlib.contextmanager
def _waited_for(path: Path) -> Iterator[IO[str]]:
    """A file of ours (0600, made if it is not there), locked while in use; whoever else wants it waits."""
    path.touch(mode=0o600)
    with path.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def locked(path: Path) -> IO[str] | None:
    """A file of ours (0600, made if it is not there), locked until it is closed; None while another has it."""
    path.touch(mode=0o600)
    file = path.open("r+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _sign(file: IO[str]) -> None:
    with contextlib.suppress(OSError):  # a full disk: it is locked all the same
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)


class SupervisorLock:
    """Only one supervisor acts for a run; others watch, and one of them takes over when it ends."""

    def __init__(self, run: Run) -> None:
        self._path = run.folder / "supervisor.lock"
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """Acquire the lock without blocking; False if another process holds it."""
        if self._file is not None:
            return True
        with _told(self._path):
            self._file = locked(self._path)
        if self._file is None:
            return False
        _sign(self._file)
        return True

    def owner(self) -> str:
        """The pid of the process that holds it, or held it last."""
        with contextlib.suppress(OSError):
            return self._path.read_text() or "?"
        return "?"

    def release(self) -> None:
        """Let another supervisor act."""
        if self._file is not None:
            self._file.close()
            self._file = None


def is_supervised(run: Run) -> bool:
    """Whether somebody acts for a run."""
    lock = SupervisorLock(run)
    taken = lock.acquire()
    lock.release()
    return not taken


def current(inventory_path: Path, command: Sequence[str] | None, *, is_new: bool) -> Run | None:
    """The run that a `kit up` is about: the inventory's latest, when it runs the same command.

    Raises:
        KitError: it is not over, and `is_new`, or runs another command.
    """
    run = latest_of(inventory_path)
    if run is None:
        return None
    same = (run.command or run.inventory["job"].get("command")) == (list(command) if command else None)
    if run.state in LIVE and is_new:
        raise KitError(f"{run.run_id} of this inventory is not over", cure=f"kit down {run.run_id} stops it")
    if run.state in LIVE and not same:
        raise KitError(
            f"{run.run_id} of this inventory is running another command",
            cure=f"kit down {run.run_id} stops it; to run both, copy the inventory file",
        )
    return run if same and not is_new else None


@contextlib.contextmanager
def starting(inventory_path: Path) -> Iterator[None]:
    """Held while a run of this inventory is being started: two `kit up` at once must not start two.

    Raises:
        KitError: another `kit up` holds it.
    """
    path = _starting_path(str(inventory_path.resolve()))
    with _told(path):
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        file = locked(path)
    if file is None:
        raise KitError(
            f"another kit up (pid {path.read_text().strip() or '?'}) is just starting {inventory_path}",
            cure="wait for it, then kit up attaches to its run",
        )
    with file:
        _sign(file)
        yield


def starting_lock(run: Run) -> Path:
    """What a `kit up` holds that is just starting a run of the same inventory."""
    return _starting_path(str(Path(run.inventory_path).resolve()))


def _starting_path(inventory_path: str) -> Path:
    import hashlib

    name = hashlib.sha256(inventory_path.encode()).hexdigest()[:16]
    return folder().parent / f"starting-{name}.lock"


class RunFolder(NamedTuple):
    """Where a run lies on one host."""

    host: str
    path: str
    snapshots: str = ""
    """Where else it keeps snapshots there."""


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
