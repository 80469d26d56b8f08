"""The user's own snapshots outlive their node: every agent copies what its workers write to other agents.

A script writes files to NODEKIT_SNAPSHOT_DIR, which no other node can see. While a round runs, its agent copies what
is complete to the next nodes of the round (`replica_push`). Before the next round, all agents tell each other what
they have, agree on what there is (`replica_merge`), and give each other what is missing (`replica_fill`): the script
finds the same verified files on whatever node it runs. Standard library only; threads of the agent's process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nodekit.deploy import replica_wire
from nodekit.deploy.replica_files import UserFiles, look, open_file
from nodekit.deploy.replica_fill import Filling
from nodekit.deploy.replica_kept import Kept
from nodekit.deploy.replica_members import Members
from nodekit.deploy.replica_merge import Attempt, Source, Version, agree
from nodekit.deploy.replica_push import Pusher, yield_to_workers
from nodekit.deploy.replica_voice import Voice, reason
from nodekit.deploy.replica_wire import Wire

_IDLE_S = 300.0  # a connection may be silent so long between two requests
_REASSURE_S = 1.0
_LARGE_BYTES = 64 << 20
_MAX_LARGE_SENDS = (
    3  # more would only share the same wire; who has to wait finds a member that has it by then
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """How a gather went."""

    num_files: int
    """The user's files that this node now has, as all do."""
    num_fetched: int
    """Those that had to be put into its folder."""
    fetched_bytes: int
    num_set_aside: int
    """Files of this node that were no part of what was agreed on."""
    lost: list[str]
    """Files whose newest version no member has intact; an older one is in place if there was one."""
    missing: list[str]
    """Files that could not be written to this node's folder."""
    silent: dict[str, str]
    """Member → why it was not heard."""
    seconds: float


class Replicas:
    """The exchange of one node's user files with the other nodes of the run."""

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        kept: Path,
        copies: int,
        address: str,
        token: str,
        say: Callable[..., object],
    ) -> None:
        """Listens from now on; nothing is copied before the first `gather`.

        Args:
            name: this node's.
            folder: where the user's script writes, on this node alone.
            kept: where copies for others and the state go; best on the same file system.
            copies: how many nodes are to have each file, this one included.
            address: to listen on.
            token: known to the agents of this run alone.
            say: called as ``say(kind, **fields)`` from any thread; no field is called ``node``, which an event of
                the agent has of its own.
        """
        self._name, self._copies, self._token, self._voice = name, copies, token, Voice(say)
        self._kept = Kept(kept)
        self._files = UserFiles(folder, kept / "state.json")
        self._pusher: Pusher | None = None
        self._number = 0
        self._holders: Mapping[str, set[str]] = {}
        self._turn = threading.Condition()
        self._entered = self._files.attempt
        self._answer: dict[str, Any] | None = None
        self._is_gathering = False
        self._large_sends = threading.BoundedSemaphore(_MAX_LARGE_SENDS)
        self._served: set[Wire] = set()
        self._listener = replica_wire.listen(address)
        self.endpoint = replica_wire.endpoint_of(self._listener)
        """`address:port` for the other members."""
        threading.Thread(target=self._accept, name="replicas", daemon=True).start()

    def close(self) -> None:
        """Stop copying and listening."""
        self._stop_pushing()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        for wire in list(self._served):
            wire.abort()

    def settle(self, deadline_s: float) -> bool:
        """Once the workers have ended: copy what is not copied yet; False if that was not done in time."""
        return self._pusher is None or self._pusher.settle(deadline_s)

    def status(self) -> dict[str, list[str]]:
        """User file → the nodes known to have it as it is here, this one first."""
        nodes = {}
        targets = self._pusher.targets if self._pusher else {}
        for name, version in self._files.versions.items():
            if name in self._files.marks:
                others = {node for node, target in targets.items() if target.files.get(name) == version}
                others |= self._holders.get(version.sha256, set())
                nodes[name] = [self._name, *sorted(others - {self._name})]
        return nodes

    # --- before a round --------------------------------------------------------------------------------------

    def gather(self, peers: Mapping[str, str], attempt: Attempt, deadline_s: float = 30.0) -> Gathered:
        """Make the folder what it has to be for this attempt; no worker may run.

        Args:
            peers: every member → its endpoint, this node among them, in rank order.
            attempt: (generation, round), greater than any before.
            deadline_s: how long to wait for a member that says nothing. Looking through many files and
                transfers may take longer, as long as they go on.
        """
        started = time.monotonic()
        self._stop_pushing()
        with self._turn:
            self._entered, self._answer, self._is_gathering = attempt, None, True
        with self._voice.complaining("folder"):
            self._files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._kept.collect()
            self._files.remove_drafts()
        found = look(self._files.folder)
        for name, why in found.refused.items():
            self._voice.tell_once(("refused", name), "replica-refused", file=name, reason=why)
        self._files.update(found)
        own, kept = self._files.source(self._name, self._number), list(self._kept.sources.values())
        with self._turn:
            self._answer = {
                "own": own.to_dict(),
                "kept": [source.to_dict() for source in kept],
                "holds": sorted(self._files.held() | self._kept.held()),
            }
            self._turn.notify_all()
        members = Members(self._name, peers, self._token, self._voice)
        try:
            heard = members.listings(attempt, deadline_s)
            unheard = dict(members.silent)
            owns = [own, *(source for source, _ in heard.values())]
            agreed = agree(owns, [*kept, *(each for _, sources in heard.values() for each in sources)])
            # Alone or with a few, a node cannot know whether what it has is the newest.
            is_joined = 2 * len(owns) > len(peers)
            filled = Filling(
                self._name, attempt, self._files, found, self._kept, members, agreed, self._voice, is_joined
            ).run()
        finally:
            members.close()
        self._files.attempt = attempt
        if is_joined:
            self._files.base = attempt
            self._files.forget_deletions()
        with self._voice.complaining("state"):
            self._files.save()
        with self._voice.complaining("kept"):
            if is_joined and not filled.missing:
                self._kept.drop_before(attempt)
            self._kept.drop_shared()
        self._is_gathering = False
        self._holders = members.holders
        ring = list(peers)
        start = ring.index(self._name) + 1
        after = [*ring[start:], *ring[: start - 1]][: self._copies - 1]
        self._pusher = Pusher(
            self._name,
            self._files,
            {node: peers[node] for node in after},
            self._token,
            self._number,
            self._voice,
        )
        gathered = Gathered(
            **asdict(filled),
            num_files=len(self._files.marks),
            silent=unheard,
            seconds=round(time.monotonic() - started, 4),
        )
        if gathered.num_files or gathered.silent or gathered.lost or gathered.num_set_aside:
            self._voice.tell("replicas-gathered", attempt=list(attempt), **asdict(gathered))
        return gathered

    def _stop_pushing(self) -> None:
        if self._pusher is not None:
            self._pusher.stop()
            self._number = self._pusher.number
            self._pusher = None

    # --- for the other agents --------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.05)  # about to be closed, or there are no descriptors left
                continue
            threading.Thread(target=self._serve, args=(sock,), name="replicas-serve", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            wire = replica_wire.accept(sock, self._token)
        except OSError as error:
            sock.close()
            if isinstance(error, replica_wire.WrongToken):
                self._voice.tell_once(
                    ("token",), "replica-refused", reason="somebody without the run's token"
                )
            return
        self._served.add(wire)
        answers = {"list": self._list, "fetch": self._fetch, "put": self._put, "keep": self._keep}
        try:
            while True:
                request = wire.receive(_IDLE_S)
                answers[request["op"]](wire, request)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # it is gone or breaks the rules: it is the other side that has to say what it missed
        finally:
            self._served.discard(wire)
            wire.close()

    def _list(self, wire: Wire, request: Mapping[str, Any]) -> None:
        """Tell what was here when this node entered the attempt: asked for earlier, the answer waits for that."""
        attempt = tuple(request["attempt"])
        while True:
            with self._turn:
                self._turn.wait_for(
                    lambda: self._entered > attempt or (self._entered == attempt and self._answer),
                    _REASSURE_S,
                )
                entered, answer = self._entered, self._answer
            if entered > attempt:
                wire.send({"error": f"it is in {entered[0]}.{entered[1]} already"})
                return
            if entered == attempt and answer is not None:
                wire.send(answer)
                return
            wire.send({"is_reading": entered == attempt})

    def _fetch(self, wire: Wire, request: Mapping[str, Any]) -> None:
        sha256, _ = _content_in(request)
        path = self._files.path_of(sha256) or self._kept.path_of(sha256)
        if path is None:
            wire.send({})
            return
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_file(path))
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes >= _LARGE_BYTES:
                if not self._large_sends.acquire(blocking=False):
                    wire.send({"is_busy": True})
                    return
                stack.callback(self._large_sends.release)
            wire.send({"size_bytes": size_bytes})
            wire.send_bytes(file, size_bytes)

    def _put(self, wire: Wire, request: Mapping[str, Any]) -> None:
        yield_to_workers()
        if tuple(request["attempt"]) < self._entered:
            wire.send({"error": "that attempt is over"})
            return
        sha256, size_bytes = _content_in(request, request["size_bytes"])
        try:
            found = self._kept.receive(wire, sha256, size_bytes, lambda: wire.send({}))
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            self._voice.tell_once(
                ("keep",), "replica-failed", reason=f"cannot keep copies here: {reason(error)}"
            )
            wire.send({"error": f"it cannot keep copies: {reason(error)}"})
            raise  # bytes may be under way already: this connection is of no more use
        self._voice.works("keep")
        wire.send({"sha256": found})

    def _keep(self, wire: Wire, request: Mapping[str, Any]) -> None:
        source = Source.from_dict(request["source"])
        here = self._files.unchanged()
        with self._turn:  # once this node has told what it keeps, it may promise no more
            if source.attempt < self._entered:
                answer: dict[str, Any] = {"error": "that attempt is over"}
            elif self._is_gathering or source.attempt > self._files.attempt:
                answer = {"is_gathering": True}
            else:
                try:
                    answer = {"lacking": self._kept.keep(source, here)}
                except OSError as error:
                    answer = {"error": f"it cannot keep copies: {reason(error)}"}
        wire.send(answer)


def _content_in(request: Mapping[str, Any], size_bytes: Any = 0) -> tuple[str, int]:
    """The content a request is about, as SHA-256, and its size.

    Raises:
        ValueError: it is none; it could be a path instead.
    """
    version = Version.from_list("a file", [request["sha256"], size_bytes, 0, 0, 0, ""])
    if version.is_gone:
        raise ValueError("no content")
    return version.sha256, version.size_bytes
