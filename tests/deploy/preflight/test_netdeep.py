"""`kit check --deep`: an all-reduce on real hosts, or who waited for whom; and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm_agents
import yaml
from agents import until
from lab_hosts import BUSY_S, on, processes
from test_plan import facts

from nodekit.deploy.agent.hang import flight
from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import BOOT, HostChannel, source
from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.deploy.lab.lab_process import ProcessRecord
from nodekit.deploy.plan import check
from nodekit.deploy.plan.check import Facts
from nodekit.deploy.plan.findings import Finding
from nodekit.deploy.preflight.network import netdeep, netdeep_job
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Inventory


class Site:
    """The lab with channels to its hosts."""

    def __init__(self, lab: Lab, inventory: Inventory, channels: dict[str, HostChannel]) -> None:
        self.lab = lab
        self.inventory = inventory
        self.channels = channels
        peers = cluster.peer_addresses(inventory.hosts)
        self.facts: dict[str, Facts] = check.gather(channels, inventory, peers=peers)
        self.before = self.processes()

    def processes(self) -> dict[str, set[ProcessRecord]]:
        return {name: processes(self.lab, name) for name in self.lab.hosts}

    def deep(self, *names: str, deadline_s: float = 60, port: int = 0) -> list[Finding]:
        """Check some of the hosts; the deadline is kept, and nothing runs or listens there afterwards."""
        channels = {name: self.channels[name] for name in names}
        start = time.monotonic()
        found = netdeep.deep_findings(channels, self.inventory, self.facts, deadline_s=deadline_s, port=port)
        assert time.monotonic() - start < deadline_s + BUSY_S
        # It waits for their end for a second, which is less than a machine may stand still.
        until(lambda: self.processes() == self.before, timeout_s=15, what="the end of all that was started")
        for name in names:
            until(lambda name=name: self.listened_at(name) == {"22"}, timeout_s=15)  # type: ignore[misc]
        for finding in found:
            assert finding.check == "deep"
            assert finding.level == "ok" or (finding.found and finding.wanted and finding.cure)
        return found

    def listened_at(self, name: str) -> set[str]:
        lines = on(self.lab, name, "ss", "-Hltn").splitlines()
        return {line.split()[3].rpartition(":")[2] for line in lines}

    def use_python(self, name: str, script: str) -> None:
        """Put a program of its own in place of a host's python."""
        path = "/root/other python"
        subprocess.run(
            self.lab.enter_argv(name, "tee", path),
            input=script.encode(),
            stdout=subprocess.DEVNULL,
            check=True,
        )
        on(self.lab, name, "chmod", "+x", path)
        self.facts[name] = dataclasses.replace(self.facts[name], executable=path)


@pytest.fixture
def site(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    # On this network no packet is lost: what is not answered at once never is.
    monkeypatch.setattr(netdeep, "GROUP_S", {"gloo": 4.0})
    monkeypatch.setattr(netdeep, "PATIENCE_S", 1.0)
    # All hosts are on this machine: where it stands still for 2 s, none of them is lost.
    monkeypatch.setattr(netdeep, "CALL_S", 60.0)
    python = warm_agents.program(lab, with_torch=True)
    (tmp_path / "lab.yaml").write_text(
        yaml.safe_dump({**yaml.safe_load(lab.inventory.read_text()), "python": python})
    )
    inventory = load_inventory(tmp_path / "lab.yaml")
    with cluster.channels(inventory.hosts, cluster.SshOptions()) as channels:
        yield Site(lab, inventory, channels)
    for name in lab.hosts:
        on(lab, name, "nft", "flush", "ruleset")


def filter_on(site: Site, host: str, rule: str) -> None:
    chain = f"chain c {{ type filter hook input priority 0; policy accept; {rule}\n }}"
    on(site.lab, host, "nft", f"table inet site {{ {chain}\n }}")


@pytest.mark.lab
def test_hosts_that_are_well_reduce_together(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netdeep, "GROUP_S", {"gloo": 60.0})  # also where this machine stands still
    found = site.deep("node1", "node2", "node3")
    assert [(finding.host, finding.level) for finding in found] == [(name, "ok") for name in site.lab.hosts]
    assert all(re.fullmatch(r"gloo, \d+ ms", finding.found) for finding in found)


@pytest.mark.lab
def test_a_host_that_is_refused_at_the_rendezvous_is_named_and_who_waited_for_it(site: Site) -> None:
    filter_on(
        site, "node1", f"ip saddr {site.lab.hosts['node3'].address} tcp dport 29500 reject with tcp reset"
    )
    summary, refused = site.deep("node1", "node3", port=29500)
    assert (summary.host, summary.level) == ("node3", "failure")
    assert summary.found == "node1 waited for node3 (calls the rendezvous (refused))"
    assert (refused.host, refused.hosts, refused.level) == ("node3 → node1", ("node3", "node1"), "failure")
    assert refused.found.startswith("port 29500 refused; node1's nftables, chain inet site c: ip saddr")
    assert refused.cure.startswith("on node1: sudo nft delete rule inet site c handle ")


@pytest.mark.lab
def test_ports_that_only_the_all_reduce_needs_are_named(site: Site) -> None:
    filter_on(
        site,
        "node1",
        f"ip saddr {site.lab.hosts['node2'].address} tcp dport 32768-60999 reject with tcp reset",
    )
    summary, *found = site.deep("node1", "node2", port=29500)
    assert summary.found.startswith("all arrived, but there was no all-reduce (gloo): ")
    pairs = {finding.host: finding for finding in found}
    assert set(pairs) == {"node2 → node1", "node1 → node2"}
    refused = re.match(r"port (\d+) refused", pairs["node2 → node1"].found)
    assert refused
    assert 32768 <= int(refused[1]) <= 60999
    for finding in pairs.values():  # answers to node1's own calls are refused, too
        assert finding.cure.startswith("on node1: sudo nft delete rule inet site c handle "), finding


@pytest.mark.lab
def test_a_host_whose_torch_does_not_run_is_named_with_its_error(site: Site) -> None:
    site.use_python("node2", f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    summary, broken = site.deep("node1", "node2")
    assert (summary.host, summary.hosts) == ("node2", ("node2",))
    assert "node2 (imports torch, then ended (status 1: ModuleNotFoundError" in summary.found
    assert broken.host == "node2"
    assert "ModuleNotFoundError: No module named 'torch'" in broken.found


@pytest.mark.lab
def test_a_host_that_does_nothing_is_named_within_the_deadline(site: Site) -> None:
    site.use_python("node2", "#!/bin/sh\nexec sleep 1000\n")
    (summary,) = site.deep("node1", "node2", deadline_s=12)
    # Where this machine is busy, node1 has not got as far by then.
    late = "did not start|imports torch|calls the rendezvous"
    assert re.fullmatch(
        rf"(node1 waited for|did not arrive: node1 \(({late})\),) node2 \(did not start\)", summary.found
    )


@pytest.mark.lab
def test_a_rendezvous_port_that_is_taken_is_named(site: Site) -> None:
    (found,) = site.deep("node1", "node2", port=22)
    assert (found.host, found.level) == ("node1", "failure")
    assert "port 22 cannot be listened at" in found.found


DRIVER = """
import sys
from nodekit.deploy.agent.hang import flight
from nodekit.deploy.connect import cluster
from nodekit.deploy.plan import check
from nodekit.deploy.preflight.network import netdeep
from nodekit.inventory.load import load_inventory
inventory = load_inventory(sys.argv[1])
with cluster.channels(inventory.hosts, cluster.SshOptions()) as channels:
    facts = check.gather(channels, inventory, peers=cluster.peer_addresses(inventory.hosts))
    netdeep.deep_findings(channels, inventory, facts, deadline_s=60)
"""


@pytest.mark.lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_on_any_host_when_kit_is_ended(lab: Lab, number: signal.Signals) -> None:
    def jobs() -> int:
        found = 0
        for name in lab.hosts:
            for pid in lab.processes(name):
                with contextlib.suppress(OSError):
                    found += b"GLOO_SOCKET_IFNAME" in Path(f"/proc/{pid}/environ").read_bytes()
        return found

    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(lab.inventory)], stderr=subprocess.PIPE)
    try:
        until(lambda: jobs() == 3, what="the jobs' start")
        os.kill(driver.pid, number)
        driver.communicate(timeout=60)  # 10 and 5 s, as it once was here, are hardly more than a stall
        until(lambda: jobs() == 0, timeout_s=30, what="the jobs' end")
    finally:
        driver.kill()
        driver.communicate()


@pytest.mark.parametrize("torch", ["2.13.0", "2.15.0+cu132"])
@pytest.mark.parametrize("chosen", [{}, {"TORCH_DIST_USE_NCCL2": "1"}], ids=["kit's", "the user's"])
def test_nccl_is_tried_as_the_ranks_will_use_it(torch: str, chosen: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(yaml.safe_dump({"hosts": {"a": None}, "job": {"command": ["a.py"], "env": chosen}}))
    inventory = load_inventory(file)
    found = {"a": facts("a", torch=torch)}
    env = netdeep._environment(inventory.hosts[0], inventory, found, {"a": ("eth0", "10.0.0.1")}, {"a": []})
    assert flight.read_once(chosen, torch).items() <= env.items()


def test_lines_that_a_library_prints_are_no_stages() -> None:
    progress = netdeep.Progress()
    progress.read_line("a warning")
    assert progress.stage == ""
    progress.read_line('{"stage": "calls", "s": 2.5, "problem": "refused"}')
    assert (progress.stage, progress.problem) == ("calls", "refused")
    progress.read_line('{"stage": "arrived", "s": 2.6}')
    assert (progress.stage, progress.problem) == ("arrived", "")
    assert progress.reached("calls")
    assert not progress.reached("complete")


def test_a_host_has_come_as_far_as_the_last_of_its_ranks() -> None:
    progress = netdeep.Progress(num_ranks=2, status=0)
    progress.read_line('{"stage": "group", "s": 1.0, "local_rank": 1}')
    assert progress.stage == ""
    progress.read_line('{"stage": "arrived", "s": 1.0, "local_rank": 0}')
    assert progress.stage == "arrived"
    reduced = '{"stage": "reduced", "s": 2.0, "seconds": 0.1, "start_s": 3.0, '
    progress.read_line(reduced + '"is_right": false, "local_rank": 1}')
    progress.read_line(reduced + '"is_right": true, "local_rank": 0}')
    assert progress.stage == "reduced"
    assert not progress.is_done, "the sum was wrong on one of them"
    progress.read_line("gpu1:71:80 [1] init.cc:42 NCCL WARN Duplicate GPU detected")
    assert progress.nccl == ["gpu1:71:80 [1] init.cc:42 NCCL WARN Duplicate GPU detected"]


def test_a_rank_writes_its_line_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank of its host writes to the same pipe: of an unbuffered stdout, each write goes there by itself."""
    pieces: list[str] = []

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Pipe())
    netdeep_job.say("arrived")
    (line,) = filter(None, pieces)
    assert line.endswith("}\n")


# NCCL as far as it is used: a rank has a GPU of its own, and only tensors there, in one piece, are reduced.
AS_NCCL = """
import torch
import torch.distributed as dist
real, own = (torch.full, dist.init_process_group, dist.all_reduce), []
def set_device(number):
    assert number in (0, 1) and not own, "a GPU for each rank"
    own.append(number)
def full(*arguments, device):
    assert device == "cuda" and own
    tensor = real[0](*arguments)
    tensor.is_there = True
    return tensor
def init_process_group(backend, **more):
    assert backend == "nccl" and own
    real[1]("gloo", **more)
def all_reduce(tensor):
    assert tensor.is_there and tensor.is_contiguous(), "No backend type associated with device type cpu"
    real[2](tensor)
torch.cuda.set_device, torch.full, torch.cuda.synchronize = set_device, full, lambda: None
dist.init_process_group, dist.all_reduce = init_process_group, all_reduce
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_with_nccl_there_is_a_rank_for_each_gpu_of_each_host(fails: bool) -> None:
    """Two hosts of two GPUs; if the last rank fails, its host's process ends with it."""
    held = socket.create_server(("127.0.0.1", 0))
    settings = {
        **netdeep._settings(4, "nccl", "127.0.0.1", held.getsockname()[1], 60.0),
        "num_local_ranks": 2,
    }
    prefix = AS_NCCL
    if fails:
        prefix = prefix.replace(
            "    assert tensor.is_there",
            '    assert dist.get_rank() < 3, "NCCL says no"\n    assert tensor.is_there',
        )
    program = prefix + source("nodekit.deploy.preflight.network.netdeep_job")
    jobs = []
    for rank, more in ((0, {"listen_fd": held.fileno()}), (2, {})):
        data = f"SETTINGS = { {**settings, 'rank': rank, **more}!r}\n{program}".encode()
        jobs.append(
            subprocess.Popen(
                [sys.executable, "-c", BOOT],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[held.fileno()],
                start_new_session=True,
            )
        )
        stdin = jobs[-1].stdin
        assert stdin is not None
        stdin.write(b"%d\n" % len(data) + data)
        stdin.flush()
    held.close()
    try:
        if fails:
            assert jobs[1].wait(timeout=90) == 1
            return
        for job in jobs:
            assert job.stdout is not None
            progress = netdeep.Progress(num_ranks=2)
            for line in job.stdout:
                progress.read_line(line.decode())
            progress.status = job.wait(timeout=90)
            assert progress.is_done, job.communicate()
            assert sorted(progress.stages) == [0, 1]
            assert progress.reduced["start_s"] > 0
            (fine,) = netdeep._fine({"gpu1": progress}, "nccl", 4)
            assert re.fullmatch(r"nccl, 4 GPUs, [\d.]+ ms \(after [\d.]+ s to start NCCL\)", fine.found)
    finally:
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.communicate()


@pytest.mark.parametrize(("printed", "wanted"), [(64937, 43517), (1923, 33543), (45419, 45419)])
def test_a_port_that_gloo_prints_the_wrong_way_around_is_put_right(printed: int, wanted: int) -> None:
    assert netdeep.meant(printed, 32768, 60999) == wanted
