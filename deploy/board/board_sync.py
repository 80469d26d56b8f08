"""Copies a run's TensorBoard files here, from the node where rank 0 writes them only, so that no curve shows twice."""

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
"""Allowance for pauses: a script may write only every two minutes."""
RETRY_S = 30.0
_ATTEMPT = re.compile(r"\.attempt(\d+)\.(\d+)$")  # as nodekit.training.reporting.event_files names them
LOGIN = "login"  # name of a Slurm run's login node among the hosts
NOTE = "from.json"
OWN = "tensorboard"  # name of the folder that the training module writes them to


@dataclass(frozen=True)
class Held:
    """The event files of a run on one node."""

    files: Mapping[str, int]
    """Path below the node's output folder → size."""
    attempt: tuple[int, int]
    """The newest attempt in the files' names; (-1, -1) if the names have none."""
    newest: float
    """When a file was last written, by this machine's clock."""


def held(listed: Sequence[Sequence[Any]], *, clock_offset: float) -> Held | None:
    """Return what a host has listed, without paths outside its folder; None if there are no files."""
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
    """Return the node whose files are the run's: rank 0 writes there, or did last; the first one if several might.

    Args:
        found: node → its files, ordered by node rank.
        current: the node that is shown now, which is kept if it is as good as any other.
    """
    if not found:
        return None
    attempt = max(each.attempt for each in found.values())
    last = {name: each for name, each in found.items() if each.attempt == attempt}
    newest = max(each.newest for each in last.values())
    there = [name for name, each in last.items() if each.newest >= newest - SLACK_S]
    return current if current in there else there[0]


class Mirror:
    """The copy of one run's files, in the folder of the run's record."""

    def __init__(self, run: Run, ssh: SshOptions) -> None:
        """Prepare; no host is contacted before `look`."""
        self.run = run
        self.folder = run.folder / "tensorboard"
        self.node: str | None = None
        """The node that the copied files are from."""
        self.synced: float | None = None
        """When the copy was last known to be complete, in seconds since 1970."""
        self.found: dict[str, Held] = {}
        self.places: dict[str, str] = {}
        """Node → its output folder."""
        self.plans: Mapping[str, Mapping[str, Any]] = {}
        """Node → its plan."""
        self.problems: dict[str, str] = {}
        """Node → why its files could not be listed or read."""
        self.channels: dict[str, HostChannel] = {}
        self._ssh = ssh
        self._closed_at: dict[str, float] = {}
        self._is_complete = False
        self._turn = 0  # how often the source of the copy has changed to another node
        self._lock: IO[str] | None = None
        self._read_note()

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and its files are copied."""
        return self.run.state in runs.ENDED and not self.problems and self._is_complete

    def look(self) -> None:
        """Find out which node has the files; nodes that cannot be reached are in `problems`."""
        with contextlib.suppress(KitError):
            self.run.reload()
        clock = self.run.clock_offsets
        nodes = self.plans = self._nodes()
        if LOGIN in self.channels and LOGIN not in nodes:  # it has answered; a node may have this name, too
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
        # An unreachable node may have newer files than the others.
        if chosen not in (None, self.node) and (
            self.node not in self.problems or self._is_newer(str(chosen))
        ):
            self._turn += self.node is not None
            self.node = chosen

    def sync(self) -> None:
        """Call `look`, and update the copy; errors, on a host or here, are in `problems`."""
        self._is_complete = False
        try:
            self.look()
        except KitError as error:  # the login node of a Slurm run failed
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
        """Whether a node's files are newer than the copy, which is from an unreachable node."""
        own = [_ATTEMPT.search(name) for name in self._copied()]
        attempts = [(int(found[1]), int(found[2])) for found in own if found]
        there = self.found[node]
        return there.attempt > max(attempts, default=(-1, -1)) or there.newest > (self.synced or 0.0)

    def _nodes(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the plans of the run's nodes; opens channels to the reachable ones."""
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
            return  # there is no channel, or it still works: try again next time
        # Nodes of a Slurm job share one channel.
        self.channels = {other: each for other, each in self.channels.items() if each is not channel}
        with contextlib.suppress(OSError, KitError):
            channel.close()

    # --- the copy ---

    def _is_ours(self) -> bool:
        """Whether this process writes the copy: of several, the others only show it."""
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
        """Return path → size of the copied files."""
        return {
            str(path.relative_to(self.folder)): path.stat().st_size
            for path in self.folder.rglob("*tfevents*")
            if path.is_file()
        }

    def _copy(self, node: str, files: Mapping[str, int]) -> None:
        wanted = {own_name(path, self._turn): (path, size) for path, size in files.items()}
        copied = self._copied()
        for name in copied.keys() - wanted.keys():
            # Truncated, not removed: a TensorBoard that reads the file would not continue with the next one.
            os.truncate(self.folder / name, 0)
        for name, (path, size) in sorted(wanted.items()):
            own = self.folder / name
            have = copied.get(name, 0)
            if have > size:  # repeated steps were cut off on the node
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
                        break  # it was truncated meanwhile: copy the rest next time
                    file.write(data)
                    have += len(data)


def own_name(path: str, turn: int) -> str:
    """Return the path of a node's file in the copy; prefixed by `turn`, as TensorBoard reads files by name."""
    pure = PurePosixPath(path)  # empty parts are dropped, so the path stays below the copy
    if pure.parts[0] == OWN and len(pure.parts) > 1:
        pure = pure.relative_to(OWN)
    return str(pure.with_name(f"{turn:04d}.{pure.name}"))
