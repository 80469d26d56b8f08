"""An elastic start on real hosts, of which one is lost in each of its phases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from agents import until
from kit_runs import Kit
from lab_hosts import make_whole

from nodekit.deploy.connect.channel import HostChannel
from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.deploy.launch import start
from nodekit.deploy.launch.options import Options
from nodekit.deploy.records import find_runs
from nodekit.inventory.load import load_inventory

pytestmark = pytest.mark.lab

JOB = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
with open(os.path.join(os.environ["NODEKIT_OUTPUT_DIR"], "world"), "w") as file:
    file.write(os.environ["WORLD_SIZE"])
while True:
    dist.barrier()
    time.sleep(0.1)
"""


def worlds(lab: Lab, run: str) -> dict[str, str]:
    """Host → the size of the world that its rank was started in last, of those that were started."""
    found = {}
    for host in lab.hosts:
        path = lab.folder / "hosts" / host / f"upper/root/nodekit/runs/{run}/{host}/output/world"
        with contextlib.suppress(FileNotFoundError):
            found[host] = path.read_text()
    return found


def num_agents(kit: Kit, host: str) -> int:
    """Of an agent there is one process, and what warm_agents has in its place."""
    return sum("nodekit.deploy.agent" in argv for argv in kit._processes()[host].values())


def before_call(monkeypatch: pytest.MonkeyPatch, op: str, host: str, do: Callable[[], object]) -> list[str]:
    """Do something right before the first call of `op` on a host; what was done is in the list."""
    done: list[str] = []
    real = HostChannel.stream

    def stream(channel: HostChannel, called: str, *args: Any, **kwargs: Any) -> Any:
        if called == op and channel.host == host and not done:
            done.append(op)
            do()
        return real(channel, called, *args, **kwargs)

    monkeypatch.setattr(HostChannel, "stream", stream)
    return done


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("op", "lost"),
    [
        *(
            (op, "node3")
            for op in ("broken.recall", "probes.probe", "prestart", "tree.place", "fence", "start")
        ),
        *((op, "node1") for op in ("hold_port", "prestart", "fence", "status")),  # the rendezvous host
    ],
)
def test_a_start_goes_on_without_a_host_that_is_lost_and_that_comes_in_later(
    kit: Kit,
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    op: str,
    lost: str,
) -> None:
    (kit.folder / "job.py").write_text(JOB)
    inventory = load_inventory(kit.inventory(nodes="2:3"))
    monkeypatch.chdir(kit.folder)
    done = before_call(monkeypatch, op, lost, lambda: lab.crash(lost))
    options = Options(inventory=inventory.path, command=("job.py",), detach=True)
    left = [host for host in lab.hosts if host != lost]
    try:
        with contextlib.ExitStack() as stack:
            start.start(stack, inventory, None, options)
        supervised = kit.run("up", "lab.yaml", "-d", "--", "job.py")
        assert supervised.returncode == 0, supervised.stderr
        assert done == [op]
        said = capsys.readouterr().out
        later = op == "status" and f"none trains yet; {lost}: " in said
        assert later or (f"without {lost}: " in said and "2 nodes, world size 2" in said)
        run = find_runs.find(None).run_id
        # Agents that are still starting are given SLOW_START_S to meet (deploy/supervise/generations.py).
        until(lambda: worlds(lab, run) == dict.fromkeys(left, "2"), timeout_s=240, what="training without it")
        lab.revive(lost)
        until(lambda: worlds(lab, run) == dict.fromkeys(lab.hosts, "3"), timeout_s=90, what="its return")
        assert len({num_agents(kit, host) for host in lab.hosts}) == 1
        assert kit.run("down").returncode == 0
        assert not kit.leftovers()
    finally:
        make_whole(lab)
