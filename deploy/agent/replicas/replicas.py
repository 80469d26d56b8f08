"""Replicate the user's own snapshots: every agent copies the files that its workers write to other agents.

A script writes files to NODEKIT_SNAPSHOT_DIR, which no other node can see. While a round runs, a thread of the agent
copies complete files to other nodes of the round. Before the next round all agents exchange listings of their files,
agree on one version of each, and send each other the missing ones (`replica_gather`): the script finds the same
verified files on every node. Standard library only; runs in threads of the agent's process.

A file is complete once it was renamed into place (its inode changed after its last byte was written), or has not
changed for a second. A file that changes while it is copied is copied again. The files of one folder are copied
together, or a restart could find half a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nodekit.deploy.agent import agent_wire
from nodekit.deploy.agent.agent_wire import Wire, WrongToken
from nodekit.deploy.agent.replicas.replica_copies import Copies
from nodekit.deploy.agent.replicas.replica_files import (
    BROKEN,
    NEVER,
    SHA256,
    Attempt,
    Listing,
    Scan,
    UserFiles,
    Version,
    open_file,
)
from nodekit.deploy.agent.replicas.replica_gather import Gather, Gathered, Here, after
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.host import ports
from nodekit.deploy.host.accept import HANDSHAKE_S, Acceptor
from nodekit.deploy.host.schema import EventKind, Say
from nodekit.training.snapshots.files import commit

POLL_S = 0.5
STABLE_S = 1.0
"""How long a file must stay unchanged to count as complete, if it was not renamed into place."""
WAIT_FOR_REST_S = 30.0
"""How long the files of a folder wait for one of them that is still being written."""
RETRY_S = 5.0
"""How long to wait before trying a node again that failed to keep a copy."""
_IDLE_S = 300.0  # how long a connection may be silent between two requests
_REASSURE_S = 1.0  # between two messages to a member that waits for this node's listing
_KEEP_S = 60.0  # how long the other side may take to write what it received to its disk, before it answers


def replica_holders(name: str, peers: Mapping[str, str], copies: int) -> list[str]:
    """Return the nodes that hold copies for node `name`: the next ones in ring order.

    Nodes on hosts that have no copy yet come first, since a host fails as a whole.

    Args:
        name: the node whose files are copied.
        peers: all members → endpoint, `name` among them, in rank order.
        copies: on how many nodes to have each file, `name` included.
    """
    ring = after(name, peers)
    hosts = {node: endpoint.rpartition(":")[0] for node, endpoint in peers.items()}
    chosen = [name]
    for is_host_free in (True, False):
        for node in ring:
            taken = {hosts[each] for each in chosen}
            if node not in chosen and not (is_host_free and hosts[node] in taken):
                chosen.append(node)
    return chosen[1:copies]


class Replicas:
    """One node's part in replicating user files among the nodes of a run."""

    @classmethod
    def of(cls, spec: AgentSpec, say: Say) -> Replicas | None:
        """Start it for the node of this spec; return None if the spec wants no copies on other nodes."""
        if spec.copies < 2 or len(spec.nodes) < 2:
            return None
        folder = Path(spec.node_dir)
        return cls(
            name=spec.name,
            folder=folder / "snapshots",
            kept=folder / "kept",
            copies=spec.copies,
            address=spec.local_addr,
            token=spec.token,
            say=say,
        )

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        kept: Path,
        copies: int,
        address: str,
        token: str,
        say: Say,
    ) -> None:
        """Start to listen; copy nothing before the first `gather` or `enter`.

        Args:
            name: of this node.
            folder: where the user's script writes, on this node alone.
            kept: where to keep copies for other nodes, and the state; best on the same file system.
            copies: on how many nodes to have each file, this one included.
            address: to listen at.
            token: secret of this run's agents.
            say: called as ``say(kind, **fields)`` from any thread, without a field ``node``, which every event has.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._copies = Copies(kept)
        self._files = UserFiles(folder, kept / "state.json")
        self._here = Here(name, token, self._files, self._copies, self._tell)
        self._num_copies, self._say = copies, say
        self._told: set[str] = set()
        self._pusher: Pusher | None = None
        self._turn = threading.Condition()
        self._entered = self._files.entered
        self._announced: tuple[Attempt, float] = NEVER, 0.0
        self._answer: dict[str, Any] | None = None  # the listings to send, once known for this attempt
        self._is_gathering = self._is_closed = False
        self._serving: dict[threading.Thread, Wire] = {}
        listener = ports.listen(address)
        self.endpoint = agent_wire.endpoint_of(listener)
        """`address:port` at which the other members reach this node."""
        self._acceptor = Acceptor(listener, self._serve, name="replicas-serve")

    def close(self) -> None:
        """Stop copying and listening, and wait for the threads to end."""
        self._stop_pushing()
        with self._turn:
            self._is_closed = True
            self._turn.notify_all()
        self._acceptor.close()
        for thread, wire in list(self._serving.items()):
            wire.abort()
            thread.join()

    @property
    def has_files(self) -> bool:
        """Whether this node has files, deletions or copies to report to the others, or may have."""
        found = self._here.scan()
        return bool(found.files or not found.is_whole or self._files.known or not self._copies.are_none)

    def announce(self, attempt: Attempt, within_s: float) -> None:
        """Promise the other members that this node enters `attempt` within `within_s` seconds, so that they wait."""
        self._announced = attempt, time.monotonic() + within_s

    def enter(self, peers: Mapping[str, str], attempt: Attempt) -> None:
        """Enter an attempt without a `gather`, if no member `has_files`; copy what workers write from now on."""
        with self._turn:
            self._entered, self._answer, self._is_gathering = attempt, None, False
        self._files.entered = self._files.attempt = attempt
        self._push_to(peers)

    def finish_copying(self, deadline_s: float) -> bool:
        """Copy the files that are not copied yet, once the workers have ended; return False if time ran out."""
        return self._pusher is None or self._pusher.finish_copying(deadline_s)

    def gather(self, peers: Mapping[str, str], attempt: Attempt, deadline_s: float = 10.0) -> Gathered:
        """Bring the folder to the state that the members agree on for this attempt; no worker may be running.

        Args:
            peers: every member → its endpoint, this node among them, in rank order.
            attempt: (generation, round), greater than any before.
            deadline_s: how long to wait for a member that sends nothing. Scanning many files, and transfers, may take
                longer as long as they proceed.

        Raises:
            OSError: files here cannot be read, so that the others cannot be told of them, and nothing was changed; or
                a file that was not agreed on cannot be removed, and no worker may find it.
        """
        started = time.monotonic()
        self._stop_pushing()
        self._told.clear()
        with self._turn:
            self._entered, self._answer, self._is_gathering = attempt, None, True
        files = self._files
        with self._here.failing():
            files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.remove_drafts()
            self._copies.clean(all_have_all=False)
        commit.retried(self._copies.read)
        found = commit.retried(self._look)
        own, kept = files.listing(self._here.name), self._copies.listings.values()
        with self._turn:
            self._answer = {"own": asdict(own), "kept": [asdict(each) for each in kept]}
            self._turn.notify_all()
        gather = Gather(self._here, attempt, peers)
        is_joined, gathered = gather.run(own, found, deadline_s), gather.gathered
        files.entered = attempt
        files.attempt = attempt if is_joined else files.attempt
        with self._here.failing():
            files.save()
            self._copies.clean(all_have_all=is_joined and not gathered.missing)
        self._is_gathering = False
        self._push_to(peers)
        gathered.seconds = round(time.monotonic() - started, 4)
        if gathered.num_files or gathered.silent or gathered.lost or gathered.set_aside:
            self._tell("replicas-gathered", attempt=f"{attempt[0]}.{attempt[1]}", **asdict(gathered))
        return gathered

    def _look(self) -> Scan:
        found = self._here.scan()
        self._files.update(found)
        if unread := found.unread or self._files.unread:
            raise unread
        return found

    def _push_to(self, peers: Mapping[str, str]) -> None:
        targets = {node: peers[node] for node in replica_holders(self._here.name, peers, self._num_copies)}
        if self._pusher is None or self._pusher.targets != targets:
            self._stop_pushing()
            self._pusher = Pusher(self._here, targets)

    def _stop_pushing(self) -> None:
        if self._pusher is not None:
            self._pusher.stop()
            self._pusher = None

    def _tell(self, kind: EventKind, **fields: Any) -> None:
        """Pass an event on to the agent's record; the same failure only once in a round."""
        if kind in ("replica-failed", "replica-refused"):
            if repr(fields) in self._told:
                return
            self._told.add(repr(fields))
        with contextlib.suppress(OSError):  # a full disk must not end the thread that reports it
            self._say(kind, **fields)

    # --- for the other agents ---

    def _serve(self, connection: socket.socket, address: str, proven: Callable[[], None]) -> None:
        answers = {"list": self._list, "fetch": self._fetch, "keep": self._keep}
        wire = Wire(connection)
        self._serving[threading.current_thread()] = wire
        try:
            with wire:
                wire.prove(self._here.token, is_client=False, timeout_s=HANDSHAKE_S)
                proven()
                while True:
                    request = wire.receive(_IDLE_S)
                    answers[request["op"]](wire, request)
        except WrongToken:
            self._tell("replica-refused", reason=f"somebody at {address} does not know the run's token")
        except BROKEN:
            pass  # the other side is gone or sent nonsense: it reports itself what it could not get
        finally:
            del self._serving[threading.current_thread()]

    def _list(self, wire: Wire, request: Mapping[str, Any]) -> None:
        """Send this node's listings as of its entry into the attempt; wait for this if the request comes earlier."""
        attempt = tuple(request["attempt"])
        while not self._is_closed:
            with self._turn:
                self._turn.wait_for(
                    lambda: (
                        self._is_closed
                        or self._entered > attempt
                        or (self._entered == attempt and self._answer)
                    ),
                    _REASSURE_S,
                )
                entered, answer = self._entered, self._answer
            if entered > attempt:
                return wire.send({"error": f"it is in {entered[0]}.{entered[1]} already"})
            if entered == attempt and answer is not None:
                return wire.send(answer)
            announced, until = self._announced
            is_coming = announced == attempt and time.monotonic() < until
            wire.send({"is_reading": entered == attempt or is_coming})
        return None

    def _fetch(self, wire: Wire, request: Mapping[str, Any]) -> None:
        _serve_file(wire, request, self._files.path_of, self._copies.path_of)

    def _keep(self, wire: Wire, request: Mapping[str, Any]) -> None:
        """Fetch the contents that this node lacks of a listing, over the same connection; then keep the listing."""
        _yield_to_workers()
        listing, attempt = Listing.of(request["listing"]), tuple(request["attempt"])
        try:
            if attempt == self._entered and not self._is_gathering:
                for version in self._copies.lacking(listing, self._files.known).values():
                    self._copies.receive(wire, version)
            # Once this node has sent its listings to others, it must accept no further copies.
            with self._turn:
                if attempt < self._entered:
                    answer: dict[str, Any] = {"error": "that attempt is over"}
                elif attempt > self._entered or self._is_gathering:
                    answer = {"is_kept": False}  # this node's own gather will fetch what it lacks
                else:
                    answer = {"is_kept": not self._copies.lacking(listing, self._files.known)}
                    if answer["is_kept"]:
                        self._copies.keep(listing)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            self._here.fail(error, what="cannot keep copies here")
            answer = {"error": f"it cannot keep copies: {error.strerror or error}"}
        wire.send(answer)


def _serve_file(wire: Wire, request: Mapping[str, Any], *where: Callable[[str], Path | None]) -> int:
    """Send the content that a request names, if it is still here; return the number of bytes sent."""
    if not SHA256.fullmatch(request["sha256"]):  # else it might be a path
        raise ValueError("not a SHA-256")
    path = next(filter(None, (path_of(request["sha256"]) for path_of in where)), None)
    if path is None:
        wire.send({})
        return 0
    with open_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        wire.send({"size_bytes": size_bytes})
        wire.send_bytes(file, size_bytes)
        return size_bytes


@dataclass(slots=True)
class _Target:
    """The state of a node that keeps copies for this one."""

    node: str
    endpoint: str
    files: Mapping[str, Version] = field(default_factory=dict)
    """The files that it has confirmed to keep for this node."""
    retry: float = 0.0


class Pusher:
    """A thread that copies this node's files to `targets`, one file at a time, while a round runs."""

    def __init__(self, here: Here, targets: Mapping[str, str]) -> None:
        self._here, self._files = here, here.files
        self.targets = targets
        """Node → endpoint."""
        self._targets = [_Target(node, endpoint) for node, endpoint in targets.items()]
        self._since: dict[str, tuple[object, float]] = {}  # changed name → the change, first seen when
        self._is_stopping = False
        self._wake, self._settled = threading.Event(), threading.Event()
        self._settle_until = 0.0
        self._wire: Wire | None = None
        self._thread = threading.Thread(target=self._run, name="replicas-push", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, even in the middle of a file or of a call to an unreachable host."""
        self._is_stopping = True
        while self._thread.is_alive():
            self._wake.set()
            if wire := self._wire:
                wire.abort()
            self._thread.join(0.02)

    def finish_copying(self, deadline_s: float) -> bool:
        """Treat all files as complete, and wait until they are copied; return False if time ran out."""
        self._settled.clear()
        self._settle_until = time.monotonic() + deadline_s
        for target in self._targets:
            target.retry = 0.0
        self._wake.set()
        return self._settled.wait(deadline_s)

    def _run(self) -> None:
        _yield_to_workers()
        pause_s = 0.0
        while not self._is_stopping:
            self._wake.wait(pause_s)
            self._wake.clear()
            started = time.monotonic()
            is_settling = started < self._settle_until
            found = self._here.scan()
            looked_s = time.monotonic() - started
            with self._here.failing():
                names = None if is_settling else self._complete(found)
                if self._files.update(found, names, lambda: self._is_stopping):
                    self._files.save()
            are_done = [self._push(target) for target in self._targets]
            if is_settling and all(are_done):
                self._settle_until = 0.0
                self._settled.set()
            # Scan a folder of very many files less often, or the scans would take a whole core.
            pause_s = 0.1 if is_settling else max(POLL_S, 20 * looked_s)

    def _complete(self, found: Scan) -> Iterable[str]:
        """Yield the new, changed and deleted files that are complete: nothing is writing to them any more."""
        now, known = time.monotonic(), self._files.known
        marks = {name: each.mark for name, each in known.items() if each.mark is not None}
        new = {name: seen for name, seen in found.files.items() if marks.get(name) != seen.mark}
        changes: dict[str, object] = {name: seen.mark for name, seen in new.items()}
        changes |= dict.fromkeys(marks.keys() - found.files.keys(), "deleted")
        changes |= dict.fromkeys(found.unfinished, "unfinished")
        before, self._since = self._since, {}
        for name, change in changes.items():
            old, first = before.get(name, (None, now))
            self._since[name] = change, first if old == change else now
        age_s = {name: now - first for name, (_, first) in self._since.items()}
        # A known file that is appended to, such as a log, holds up no others, nor does a forgotten temporary file.
        written = {
            name
            for name, seen in new.items()
            if not seen.is_renamed and name not in known and age_s[name] < STABLE_S
        } | {name for name in found.unfinished if age_s[name] < WAIT_FOR_REST_S}
        folders = {_group(name) for name in written if "/" in name}
        for name, (change, _) in self._since.items():
            if change == "unfinished":
                continue
            if change == "deleted":  # report a deletion only after the new file that may replace it
                wait_s = WAIT_FOR_REST_S if written else STABLE_S
            # A symlink may point to a file that is still being written.
            elif _group(name) in folders or (new[name].link and written):
                wait_s = WAIT_FOR_REST_S
            else:
                wait_s = 0.0 if new[name].is_renamed else STABLE_S
            if age_s[name] >= wait_s:
                yield name

    def _push(self, target: _Target) -> bool:
        """Bring a target up to date; return whether it is."""
        files = {
            name: known.version
            for name, known in self._files.known.items()
            if known.mark is not None or known.version.is_gone
        }
        if files == target.files:
            return True
        if self._is_stopping or time.monotonic() < target.retry:
            return False
        try:
            with agent_wire.connect(target.endpoint, self._here.token, announce=self._hold) as wire:
                return self._bring(wire, target, files)
        except BROKEN as error:
            if not self._is_stopping:
                self._here.fail(error, peer=target.node)
            target.retry = time.monotonic() + RETRY_S
            return False
        finally:
            self._wire = None

    def _hold(self, wire: Wire) -> None:
        self._wire = wire
        if self._is_stopping:
            raise InterruptedError("stopping")

    def _bring(self, wire: Wire, target: _Target, files: Mapping[str, Version]) -> bool:
        """Copy to a target, newest folder first; deletions come last, once all new files have arrived."""
        groups: dict[str, dict[str, Version]] = {}
        for name, version in files.items():
            if version.written < self._files.entered:
                groups.setdefault("", {})[name] = version  # all members got it at the start of the round
            elif not version.is_gone:
                groups.setdefault(_group(name), {})[name] = version
        for group in sorted(groups.values(), key=lambda group: max(group.values()), reverse=True):
            if not group.items() <= target.files.items():
                self._offer(wire, target, {**target.files, **group}, sorted(group))
        return target.files == files or self._offer(wire, target, files, [])

    def _offer(self, wire: Wire, target: _Target, files: Mapping[str, Version], new: list[str]) -> bool:
        """Offer a listing to the target, and send the contents it lacks; return whether it keeps all of them now."""
        started, size_bytes = time.monotonic(), 0
        listing = self._files.listing(self._here.name, files)
        answer = wire.ask({"op": "keep", "attempt": self._files.entered, "listing": asdict(listing)})
        while "sha256" in answer:
            size_bytes += _serve_file(wire, answer, self._files.path_of)
            answer = wire.receive(_KEEP_S)
        if answer["is_kept"]:
            target.files = files
            if size_bytes:
                seconds = round(time.monotonic() - started, 3)
                told = {"files": new[:5], "num_files": len(new), "size_bytes": size_bytes, "seconds": seconds}
                self._here.tell("replica-kept", peer=target.node, **told)
        return bool(answer["is_kept"])


def _group(name: str) -> str:
    """Return the name of what is copied together: a top-level folder with all below it, or a single file."""
    return name.split("/", 1)[0]


def _yield_to_workers() -> None:
    """Lower the priority of this thread alone, below the workers' (on Linux a thread has its own nice value)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
