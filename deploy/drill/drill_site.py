"""The target of a drill's faults: the current run, its nodes, and the lab that their hosts may be in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nodekit.deploy.drill.drill_job import Job
from nodekit.deploy.drill.drill_lab import SAVE_TIMEOUT_S, Lab, NotTried
from nodekit.deploy.drill.drill_watch import Watch
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Inventory


class Site:
    """The operations that faults need; `enter` a run before injecting one."""

    def __init__(self, inventory: Inventory, load_lab: Callable[[Path], Lab]) -> None:
        self.inventory = inventory
        self.lab, self._lab_names = lab_of(inventory, load_lab)
        self._hosts = [host.name for host in inventory.hosts]
        self._folders: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._job: Job | None = None
        self._watch: Watch | None = None

    def enter(self, job: Job, watch: Watch) -> None:
        """Set the current run."""
        self._job, self._watch = job, watch

    def leave(self) -> None:
        """Unset the current run."""
        self._job = self._watch = None

    def measure(self, run: Run) -> None:
        """Remember each node's folder of runs and, on a lab, the size of a run."""
        for name, node in run.nodes.items():
            folder = Path(node["node_dir"]).parent
            self._folders[name] = str(folder.parent)
            if self.lab is not None:
                done = self.lab.run(
                    self.lab_name(name), ["du", "-sb", str(folder)], capture_output=True, text=True
                )
                self._sizes[name] = int(done.stdout.split()[0]) if done.stdout else 0

    @property
    def small_disk_node(self) -> str:
        """The node that gets a small disk before a run: the last one in use, as the first hosts the rendezvous."""
        return self._hosts[min(self.inventory.nodes.max, len(self._hosts)) - 1]

    @property
    def small_disk(self) -> str:
        """Mount point of the small disk; "" before `measure`."""
        return self._folders.get(self.small_disk_node, "")

    @property
    def nodes(self) -> list[str]:
        """The nodes that train now; without a run, all nodes of the inventory."""
        statuses = self._watch.statuses if self._watch is not None else {}
        return [name for name in self._hosts if statuses.get(name, {}).get("workers")] or self._hosts

    @property
    def host(self) -> str:
        """The node that hosts the rendezvous."""
        assert self._watch is not None
        run = self._watch.run
        run.reload()
        return str(run.judgement["host"])

    @property
    def rank0(self) -> str:
        """The node with rank 0."""
        assert self._watch is not None
        for name, status in list(self._watch.statuses.items()):
            if any(worker["rank"] == 0 for worker in status.get("workers", ())):
                return name
        return self.host

    def inject(self, node: str, target: str, number: int, **how: Any) -> float:
        """Signal processes of a node (`inject` in deploy/host/node/agents.py); return when, by this machine's clock.

        Raises:
            NotTried: no process got the signal.
        """
        assert self._watch is not None
        done = self._watch.channel(node).call(
            "inject",
            timeout_s=SAVE_TIMEOUT_S + 30.0,
            node_dir=self._watch.run.nodes[node]["node_dir"],
            target=target,
            number=number,
            **how,
        )
        if not done["pids"]:
            nothing = "saved nothing to its snapshot folder" if how.get("saving_s") else "has no such process"
            raise NotTried(f"{node} {nothing}")
        return self._watch.local_time(node, done["time"])

    def lab_name(self, node: str) -> str:
        """Return the lab's name of a node."""
        return self._lab_names[node]

    def runs_of(self, node: str) -> tuple[str, int]:
        """Return a node's folder of runs, and the size of a run in bytes."""
        return self._folders[node], self._sizes.get(node, 0)

    def kill_kit(self) -> None:
        """Kill the `kit up` of this run."""
        assert self._job is not None
        self._job.kill(on_purpose=True)

    def start_kit(self) -> None:
        """Start another `kit up` for this run."""
        assert self._job is not None
        self._job.start(new=False)


def lab_of(inventory: Inventory, load_lab: Callable[[Path], Lab]) -> tuple[Lab | None, Mapping[str, str]]:
    """Return the lab that all hosts belong to, and host → its name there; None if there is none."""
    folders = [inventory.path.resolve().parent]
    for host in inventory.hosts:
        folders += [Path(path).parent for path in (host.identity_file, host.known_hosts) if path]
    for folder in dict.fromkeys(folders):
        with contextlib.suppress(KitError, OSError):
            if os.geteuid() == 0 and (folder / "lab.json").exists():
                lab = load_lab(folder)
                names = {host.address: name for name, host in lab.hosts.items()}
                if all(host.address in names for host in inventory.hosts):
                    return lab, {host.name: names[host.address] for host in inventory.hosts}
    return None, {}
