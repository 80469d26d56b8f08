"""Keeps a copy of a run's TensorBoard files here: of the node where rank 0 writes them, so that no curve is double."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any

from nodekit.deploy.backend import backend_of
from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import CALL_TIMEOUT_S, HostChannel, on_all
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.host.files import make_private, write_private
from nodekit.deploy.plan.command import weights_folders
from nodekit.deploy.records import locks, record_files, runs
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Host

CHUNK_BYTES = 1 << 20
SLACK_S = 150.0
"""A script may let two minutes pass between its writes."""
RETRY_S = 30.0
_ATTEMPT = re.compile(r"\.attempt(\d+)\.(\d+)$")  # as nodekit.training.reporting.event_files names them
LOGIN = "login"  # what a Slurm run's login node is called among the hosts
NOTE = "from.json"
OWN = "tensorboard"  # the folder where the training module has them


@dataclass(frozen=True)
class Held:
    """The event files of a run on one node."""

    files: Mapping[str, int]
    """Path below the node's output folder → size."""
    attempt: tuple[int, int]
    """The last one that a file is of, where their names say that."""
    newest: float
    """When one was written last, by our clock."""


def held(listed: Sequence[Sequence[Any]], *, clock_offset: float) -> Held | None:
    """What a host lists, without what is no name of a file below its folder; None where there is nothing."""
    there = {str(path): (int(size), float(changed)) for path, size, changed in listed if _is_below(str(path))}
    if not there:
        return None
    attempts = [(int(found[1]), int(found[2])) for path in there if (found := _ATTEMPT.search(path))]
    return Held(
        {path: size for path, (size, _) in there.items()},
        max(attempts, default=(-1, -1)),
        max(changed for _, changed in there.values()) - clock_offset,
    )


def _is_below(path: str) -> bool:
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and "\0" not in path


def choose(found: Mapping[str, Held], current: str | None) -> str | None:
    """The node whose files are the run's: rank 0 writes there, or did last; the first of those that seem to be.

    Args:
        found: node → its files, in the order of node ranks.
        current: whose files are shown; it stays that where all do as well.
    """
    if not found:
        return None
    attempt = max(each.attempt for each in found.values())
    last = {name: each for name, each in found.items() if each.attempt == attempt}
    newest = max(each.newest for each in last.values())
    there = [name for name, each in last.items() if each.newest >= newest - SLACK_S]
    return current if current in there else there[0]


class Mirror:
    """The copy of one run's files, below the run's record."""

    def __init__(self, run: Run, ssh: SshOptions) -> None:
        """Nothing is asked of any host before `look`."""
        self.run = run
        self.folder = run.folder / "tensorboard"
        self.node: str | None = None
        """Whose files they are."""
        self.synced: float | None = None
        """When it was last known to be all there is, in seconds since 1970."""
        self.found: dict[str, Held] = {}
        self.places: dict[str, str] = {}
        """Node → its output folder."""
        self.plans: Mapping[str, Mapping[str, Any]] = {}
        """Node → its plan."""
        self.problems: dict[str, str] = {}
        """Node → why it could not be looked at."""
        self.channels: dict[str, HostChannel] = {}
        self._ssh = ssh
        self._closed_at: dict[str, float] = {}
        self._is_complete = False
        self._turn = 0  # how often another node has come to be the one
        self._lock: IO[str] | None = None
        self._read_note()

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come."""
        return self.run.state in runs.ENDED and not self.problems and self._is_complete

    def look(self) -> None:
        """Find out which node has the files; those that cannot be reached are in `problems`."""
        with contextlib.suppress(KitError):
            self.run.reload()
        clock = self.run.clock_offsets
        nodes = self.plans = self._nodes()
        if LOGIN in self.channels and LOGIN not in nodes:  # it has answered; a node may have that name
            self.problems.pop(LOGIN, None)
        self.places = {name: weights_folders(node, "")[0].rstrip("/") for name, node in nodes.items()}
        reached = [name for name in nodes if name in self.channels]
        listed = on_all(
            {name: name for name in reached},
            lambda name: self.channels[name].call(
                "board_host.event_files", timeout_s=CALL_TIMEOUT_S, folder=self.places[name]
            ),
        )
        self.found = {}
        for name, result in listed.items():
            if isinstance(result, Exception):
                self._lose(name, result)
                continue
            self.problems.pop(name, None)
            if (there := held(result, clock_offset=clock.get(name, 0.0))) is not None:
                self.found[name] = there
        chosen = choose(self.found, self.node)
        # A node that cannot be seen may have more than those that can.
        if chosen not in (None, self.node) and (
            self.node not in self.problems or self._is_newer(str(chosen))
        ):
            self._turn += self.node is not None
            self.node = chosen

    def sync(self) -> None:
        """`look`, and bring the copy up to date; what goes wrong, on a host or here, is in `problems`."""
        self._is_complete = False
        try:
            self.look()
        except KitError as error:  # a Slurm run's login node
            self.problems = {LOGIN: str(error)}
            return
        self._is_complete = True
        if self.node is None or self.node not in self.found:
            return
        try:
            with record_files.told(self.folder):
                if not self._is_ours():
                    self._read_note()
                    return
                self._copy(self.node, self.found[self.node].files)
                self.synced = time.time()
                note = {"node": self.node, "time": self.synced, "turn": self._turn}
                write_private(str(self.folder / NOTE), json.dumps(note).encode())
        except KitError as error:
            self._lose(self.node, error)
            self._is_complete = False

    def close(self) -> None:
        """Close the channels."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        channels, self.channels = self.channels, {}
        on_all({str(id(channel)): channel for channel in channels.values()}, HostChannel.close)

    def _is_newer(self, node: str) -> bool:
        """Whether a node's files are newer than the copy of those of one that cannot be seen."""
        own = [_ATTEMPT.search(name) for name in self._copied()]
        attempts = [(int(found[1]), int(found[2])) for found in own if found]
        there = self.found[node]
        return there.attempt > max(attempts, default=(-1, -1)) or there.newest > (self.synced or 0.0)

    def _nodes(self) -> Mapping[str, Mapping[str, Any]]:
        """The plans of the run's nodes, with channels to those that can be reached."""
        backend = backend_of(self.run)
        hosts = backend.hosts(self.run)
        self._open(hosts)
        record = backend.record(self.run, self.channels)
        if record is None:
            return {}
        for host in hosts.keys() & self.channels.keys():
            self.channels.update(dict.fromkeys(backend.nodes_at(record, host), self.channels[host]))
        return record.nodes

    def _open(self, hosts: Mapping[str, Host]) -> None:
        now = time.monotonic()
        wanted = {
            name: host
            for name, host in hosts.items()
            if (name not in self.channels or self.channels[name].is_lost)
            and now - self._closed_at.get(name, -RETRY_S) >= RETRY_S
        }
        for name, result in on_all(wanted, lambda host: cluster.open_channel(host, self._ssh)).items():
            if isinstance(result, HostChannel):
                self.channels[name] = result
                self.problems.pop(name, None)
            else:
                self._lose(name, result)

    def _lose(self, name: str, error: Exception) -> None:
        self.problems[name] = str(error)
        self._closed_at[name] = time.monotonic()
        channel = self.channels.get(name)
        if channel is None or not channel.is_lost:
            return  # there was none, or what went wrong was something else: it is asked again
        # Nodes of a Slurm job have one channel together.
        self.channels = {other: each for other, each in self.channels.items() if each is not channel}
        with contextlib.suppress(OSError, KitError):
            channel.close()

    # --- the copy ---

    def _is_ours(self) -> bool:
        """Whether this is the process that copies: of two, the other only shows."""
        if self._lock is None:
            make_private(self.folder)
            self._lock = locks.locked(self.folder / "lock")
            if self._lock is None:
                return False
            for name, size in self._copied().items():
                if not size:
                    (self.folder / name).unlink()
        return True

    def _read_note(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            noted = json.loads((self.folder / NOTE).read_text(encoding="utf-8"))
            self.node, self.synced, self._turn = noted["node"], noted["time"], noted["turn"]

    def _copied(self) -> dict[str, int]:
        """The files of the copy, by their path below it, with their sizes."""
        return {
            str(path.relative_to(self.folder)): path.stat().st_size
            for path in self.folder.rglob("*tfevents*")
            if path.is_file()
        }

    def _copy(self, node: str, files: Mapping[str, int]) -> None:
        wanted = {own_name(path, self._turn): (path, size) for path, size in files.items()}
        copied = self._copied()
        for name in copied.keys() - wanted.keys():
            # Not removed: a TensorBoard that reads it would not go on to the next one.
            os.truncate(self.folder / name, 0)
        for name, (path, size) in sorted(wanted.items()):
            own = self.folder / name
            have = copied.get(name, 0)
            if have > size:  # steps that were done again are cut off there
                os.truncate(own, size)
            make_private(own.parent)
            with open(own, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                while have < size:
                    data = base64.b64decode(
                        self.channels[node].call(
                            "board_host.part_of",
                            timeout_s=CALL_TIMEOUT_S,
                            folder=self.places[node],
                            path=path,
                            offset=have,
                            size=min(CHUNK_BYTES, size - have),
                        )
                    )
                    if not data:
                        break  # cut off meanwhile: the next time
                    file.write(data)
                    have += len(data)


def own_name(path: str, turn: int) -> str:
    """Where the copy has a file of a node's: TensorBoard reads by name, and the next node's come later."""
    pure = PurePosixPath(path)  # of which no part is empty: no absolute path is left below
    if pure.parts[0] == OWN and len(pure.parts) > 1:
        pure = pure.relative_to(OWN)
    return str(pure.with_name(f"{turn:04d}.{pure.name}"))
