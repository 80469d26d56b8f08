"""Nodes that keep copies of each other's files: real sockets, real files, several agents' worth of Replicas here."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nodekit.deploy.agent.replicas.replica_gather import Gathered
from nodekit.deploy.agent.replicas.replicas import Replicas

TOKEN = "the run's token"
PATIENT_S = 60.0
"""For what comes at once, unless the machine stands still: with 5 s, a member that is here is taken for silent then."""
Fails = Callable[..., None]
"""Makes reading a file of a name, or listing a folder of that name, fail so many times."""


class Node:
    """One node: its disk, and its agent's Replicas while it lives."""

    def __init__(self, root: Path, name: str, copies: int) -> None:
        self.name, self.disk, self.copies = name, root / name, copies
        self.folder = self.disk / "snapshots"
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.replicas: Replicas | None = None

    def start(self) -> Replicas:
        self.replicas = Replicas(
            name=self.name,
            folder=self.folder,
            kept=self.disk / "kept",
            copies=self.copies,
            address="127.0.0.1",
            token=TOKEN,
            say=self._hear,
        )
        return self.replicas

    def _hear(self, kind: str, **fields: Any) -> None:
        # The agent's record has these itself, and its events are lines of JSON.
        assert not fields.keys() & {"run", "time", "node", "kind"}
        json.dumps(fields)
        self.said.append((kind, fields))

    @property
    def alive(self) -> Replicas:
        assert self.replicas is not None
        return self.replicas

    def die(self) -> None:
        if self.replicas is not None:
            self.replicas.close()
        self.replicas = None

    def write(self, name: str, content: str | bytes, mtime: float | None = None) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".tmp")
        draft.write_bytes(content if isinstance(content, bytes) else content.encode())
        if mtime is not None:
            os.utime(draft, (mtime, mtime))
        draft.replace(path)

    def files(self) -> dict[str, str]:
        """Name → content, or → where it points."""
        return {
            str(path.relative_to(self.folder)): f"-> {path.readlink()}"
            if path.is_symlink()
            else path.read_text(errors="replace")
            for path in self.folder.rglob("*")
            if path.is_symlink() or path.is_file()
        }

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [fields for each, fields in self.said if each == kind]

    def aside(self) -> dict[str, str]:
        root = self.disk / "kept" / "set-aside"
        return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}

    def blobs(self) -> list[Path]:
        return sorted((self.disk / "kept" / "blobs").iterdir())

    def keeps(self, owner: str) -> dict[str, str]:
        """What this node could give back of `owner`'s files: name → content."""
        path = self.disk / "kept" / "listings" / f"{owner}.json"
        listed = json.loads(path.read_text())["files"] if path.exists() else {}
        kept = {}
        for name, (_, _, sha256, _, _) in listed.items():
            for copy in [self.disk / "kept" / "blobs" / sha256, self.folder / name]:
                if copy.is_file() and hashlib.sha256(copy.read_bytes()).hexdigest() == sha256:
                    kept[name] = copy.read_text(errors="replace")
        return kept


class Cluster:
    def __init__(self, root: Path, num_nodes: int, copies: int) -> None:
        self.nodes = [Node(root, f"n{i}", copies) for i in range(num_nodes)]
        self.attempt = 0
        for node in self.nodes:
            node.start()

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.replicas is not None]

    def gather(
        self,
        nodes: Iterable[Node] | None = None,
        silent: dict[str, str] | None = None,
        deadline_s: float = PATIENT_S,
    ) -> list[Gathered]:
        """All given nodes enter the next attempt together; `silent` are endpoints that say nothing."""
        self.attempt += 1
        members = list(nodes if nodes is not None else self.alive)
        peers = self.peers(members) | (silent or {})
        with ThreadPoolExecutor(len(members)) as pool:
            return list(
                pool.map(lambda node: node.alive.gather(peers, (1, self.attempt), deadline_s), members)
            )

    def enter(self) -> None:
        """All living nodes enter the next attempt without giving each other anything."""
        self.attempt += 1
        for node in self.alive:
            node.alive.enter(self.peers(self.alive), (1, self.attempt))

    @staticmethod
    def peers(nodes: Iterable[Node]) -> dict[str, str]:
        """Name → endpoint."""
        return {node.name: node.alive.endpoint for node in nodes}

    def settle(self) -> None:
        """All living nodes have copied everything to their living targets."""
        dead = {node.name for node in self.nodes if node.replicas is None}
        for node in self.alive:
            pusher = node.alive._pusher
            if pusher and dead & {target.node for target in pusher._targets}:
                node.alive.finish_copying(0.3)
            else:
                assert node.alive.finish_copying(PATIENT_S), node.said


def wait_for(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENT_S
    while not is_so():
        assert time.monotonic() < until, "it did not come to that in time"
        time.sleep(0.01)


def blob_of(node: Node, content: bytes) -> Path:
    (path,) = [each for each in node.blobs() if each.name == hashlib.sha256(content).hexdigest()]
    return path


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
