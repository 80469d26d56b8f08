"""The other members of a round, as one of them asks for their listings and their files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from nodekit.deploy import replica_wire
from nodekit.deploy.replica_merge import Attempt, Source, Version
from nodekit.deploy.replica_voice import Voice, reason
from nodekit.deploy.replica_wire import Wire, checked

_CONNECT_S = 5.0
_MAX_EXCHANGES = 16


class Members:
    """Connections to the other members for one gather; who fails is asked no more and is in `silent`."""

    def __init__(self, name: str, peers: Mapping[str, str], token: str, voice: Voice) -> None:
        ring = list(peers)
        start = ring.index(name) + 1
        # Each begins at its own neighbour, so that not all ask the same one.
        self._endpoints = {node: peers[node] for node in [*ring[start:], *ring[: start - 1]]}
        self._token, self._voice = token, voice
        self._wires: dict[str, Wire] = {}
        self.holders: dict[str, set[str]] = {}
        """Content → the members that said they have it."""
        self.silent: dict[str, str] = {}
        """Member → why it is not asked (any more)."""

    def close(self) -> None:
        """End the connections."""
        for wire in self._wires.values():
            wire.close()

    def listings(self, attempt: Attempt, deadline_s: float) -> dict[str, tuple[Source, list[Source]]]:
        """Member → what its folder holds, and what it keeps for others."""
        heard: dict[str, tuple[Source, list[Source]]] = {}

        def ask(node: str) -> tuple[Source, list[Source], list[str]] | None:
            try:
                return self._listing(node, attempt, deadline_s)
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._give_up(node, error)
                return None

        with ThreadPoolExecutor(min(len(self._endpoints), _MAX_EXCHANGES) or 1) as pool:
            answers = list(pool.map(ask, self._endpoints))
        for node, answer in zip(self._endpoints, answers, strict=True):
            if answer is not None:
                heard[node] = answer[0], answer[1]
                for sha256 in answer[2]:
                    self.holders.setdefault(sha256, set()).add(node)
        return heard

    def _listing(
        self, node: str, attempt: Attempt, deadline_s: float
    ) -> tuple[Source, list[Source], list[str]]:
        until = time.monotonic() + deadline_s
        wire = self._connect(node, min(deadline_s, _CONNECT_S))
        wire.send({"op": "list", "attempt": attempt})
        while True:
            answer = checked(wire.receive(until - time.monotonic()))
            if "own" in answer:
                own = Source.from_dict(answer["own"])
                if own.node != node:
                    raise ValueError(f"{own.node} answered in its place")
                return own, [Source.from_dict(each) for each in answer["kept"]], list(answer["holds"])
            if answer["is_reading"]:  # it came to this attempt and looks through its files
                until = time.monotonic() + deadline_s
            if time.monotonic() > until:
                raise TimeoutError("it did not come to this attempt in time")

    def fetch(
        self, version: Version, draft: Path, room: Callable[[Path, int], AbstractContextManager[BinaryIO]]
    ) -> bool:
        """Write this content to `draft`, verified; False if no member has it intact.

        Raises:
            OSError: it cannot be written here.
        """
        holders = self.holders.get(version.sha256, set())
        order = [node for node in self._endpoints if node in holders]
        damaged: set[str] = set()
        with room(draft, version.size_bytes) as file:
            while order:
                is_busy = False
                for node in order:
                    if node in self.silent or node in damaged:
                        continue
                    file.seek(0)
                    found = self._fetch_from(node, version, file)
                    if found == version.sha256:
                        return True
                    if found == "busy":
                        is_busy = True
                    elif found:
                        damaged.add(node)
                        self._voice.tell("replica-damaged", peer=node, sha256=version.sha256)
                if not is_busy:
                    break
                time.sleep(0.05)
                order = list(self._endpoints)  # another member may have it by now
        return False

    def _fetch_from(self, node: str, version: Version, file: BinaryIO) -> str:
        """The SHA-256 of what came, `busy`, or nothing."""
        wire = None
        try:
            wire = self._wires.get(node) or self._connect(node, _CONNECT_S)
            answer = checked(wire.ask({"op": "fetch", "sha256": version.sha256}))
            if answer.get("size_bytes") == version.size_bytes:
                return wire.receive_bytes(version.size_bytes, file)
            if "size_bytes" in answer:
                self._drop(node)  # what comes now is of no use
                return "another size"
            return "busy" if answer.get("is_busy") else ""
        except (ConnectionError, TimeoutError, ValueError) as error:
            self._give_up(node, error)
            return ""
        except OSError as error:
            if wire is None:
                self._give_up(node, error)  # it cannot be reached
                return ""
            self._drop(node)  # its bytes are still on the way
            raise

    def _connect(self, node: str, timeout_s: float) -> Wire:
        wire = self._wires[node] = replica_wire.connect(self._endpoints[node], self._token, timeout_s)
        return wire

    def _drop(self, node: str) -> None:
        if wire := self._wires.pop(node, None):
            wire.close()

    def _give_up(self, node: str, error: Exception) -> None:
        self._drop(node)
        self.silent[node] = reason(error)
