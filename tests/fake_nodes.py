"""Nodes that are not there: channels that answer as a host would, as late as a seed says, and what runs on them."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.plan import check, plan
from nodekit.deploy.plan.check import Facts, Interface
from nodekit.deploy.plan.gpus import HostGpus
from nodekit.deploy.records.runs import Run
from nodekit.deploy.supervise.node_client import NodeClient
from nodekit.inventory.errors import HostError
from nodekit.inventory.load import dump, load_inventory

NAMES = ("a", "b", "c", "d")
STATUS = {
    "alive": True,
    "known": True,
    "agent": "12.34",
    "state": "running",
    "generation": 0,
    "workers": [],
    "members": ["a", "b"],
    "fence": 0,
    "port": 4711,
    "electorate": {"generation": 0, "version": 0, "nodes": ["a", "b"]},
    "granted": None,
    "snapshot": [-1, 0],
}
Answer = Callable[[str, str, dict[str, Any]], Any]


def facts(host: str, *, address: str = "10.0.0.1") -> Facts:
    """What a host says of itself."""
    return Facts(
        host=host,
        hostname=host,
        user="train",
        python="3.11.2",
        executable="/venv/bin/python",
        torch="2.13.0",
        modules=(),
        clock_offset_s=0.0,
        cpus=8,
        interfaces=(Interface("eth0", True, (address,)),),
        routes={},
        gpus=HostGpus(),
        workdir="/home/train/nodekit",
        workdir_id=host,
        workdir_problem=None,
        free_bytes=10**12,
        rsync=True,
        boot_id=host,
    )


class Nodes:
    """The nodes `NAMES` of a run; a and b are in it, c and d are spares."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        """Node, operation and arguments, in the order in which they came."""
        self.answers: dict[str, Callable[[str, dict[str, Any]], Any]] = {}
        """Operation → what it does on a node, in place of nothing."""
        self.parts: dict[str, list[Any]] = {}
        """Node → what it says before it repeats its status, each once; an error is raised."""
        self.pause_s: dict[str, float] = {}
        """Node → how long it takes from one of these to the next."""
        self.silent: set[str] = set()
        """Nodes that say no more."""
        self.loses_channels = False
        self.are_gone = False
        file = folder / "lab.yaml"
        # By addresses: a name server would be asked for names.
        hosts = ", ".join(f"{name}: {{address: 198.18.0.{number}}}" for number, name in enumerate(NAMES, 1))
        file.write_text(f"network: 10.0.0.0/24\nnodes: 1:4\nhosts: {{{hosts}}}\njob: {{code: .}}\n")
        self.inventory = load_inventory(file)

        def gather(channels: dict[str, FakeChannel], *_: object, **__: object) -> dict[str, Facts]:
            # Each time it is at another address: its plan changes.
            return {
                name: facts(name, address=f"10.0.0.{1 + NAMES.index(name) + 10 * self.number(10)}")
                for name in channels
            }

        built = plan.build(
            self.inventory,
            {name: facts(name, address=f"10.0.0.{1 + NAMES.index(name)}") for name in ("a", "b")},
            run_id="lab-1",
            peers=dict.fromkeys(NAMES, ()),
            master_port=4711,
            kit_digest="abc",
        )
        self.run = Run(
            run_id="lab-1",
            name="lab",
            inventory_path=str(file),
            inventory=dump(self.inventory),
            command=None,
            created=1.0,
            state="running",
            is_placed=True,  # there is no code to send
            nodes={node.name: dataclasses.asdict(node) for node in built.nodes},
        )
        self.run.save()
        monkeypatch.setattr(check, "gather", gather)
        self.client = NodeClient(self.run, self.inventory, {name: FakeChannel(name, self) for name in NAMES})

    def number(self, below: int) -> int:
        """The next one of this seed."""
        with self._lock:
            return self._chance.randrange(below)

    def pause(self) -> None:
        """As long as the seed says; mostly not at all."""
        time.sleep(max(0, self.number(12) - 6) / 1000)

    def reopen(self, name: str) -> FakeChannel:
        """Another channel."""
        self.pause()
        return FakeChannel(name, self)

    def of(self, op: str) -> list[tuple[str, dict[str, Any]]]:
        """Node and arguments of the calls of an operation."""
        return [(name, args) for name, called, args in list(self.calls) if called == op]


class FakeChannel:
    """A channel to one of them."""

    is_lost = False
    connection = "ssh"

    def __init__(self, host: str, nodes: Nodes) -> None:
        self.host = host
        self._nodes = nodes

    def call(self, op: str, *, timeout_s: float, **args: Any) -> Any:
        """One call of an operation there."""
        self._nodes.pause()
        self._nodes.calls.append((self.host, op, args))
        if op in self._nodes.answers:
            return self._nodes.answers[op](self.host, args)
        return {
            "status": dict(STATUS),
            "hold_port": 4711,
            "tree.keep_package": True,
            "stop": {"was": "running", "killed": False},
            "read_file": "{",
            "hostfollow.events": [],
        }.get(op)

    def stream(self, op: str, take: Callable[[Any], None], **args: Any) -> Any:
        """What follows a node: its status, over and over."""
        self._nodes.calls.append((self.host, op, args))
        for each in iter(lambda: self._nodes.parts.get(self.host), []):
            if each is None:
                break
            if isinstance(said := each.pop(0), HostError):
                raise said
            take({**self._part(), **said})
            time.sleep(self._nodes.pause_s.get(self.host, 0.0))
        while True:
            self._nodes.pause()
            while self.host in self._nodes.silent:
                time.sleep(0.002)
            if self._nodes.are_gone or (self._nodes.loses_channels and not self._nodes.number(10)):
                raise HostError(self.host, "the connection is gone")
            take(self._part())
            time.sleep(0.002)

    @staticmethod
    def _part() -> dict[str, Any]:
        own_time = time.clock_gettime(time.CLOCK_REALTIME)  # whatever a test has our clock say
        return {"status": dict(STATUS), "logs": [], "offsets": {}, "events": [], "time": own_time}

    def close(self) -> None:
        """Nothing is open."""
