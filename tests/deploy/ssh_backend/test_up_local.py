"""`kit` on two local nodes: the same path as over SSH, without hosts; what the command line says and returns."""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import warm_agents
from agents import no_process_left, processes_of, until
from disks import full, small_disk
from free_ports import free_port
from kit_runs import Kit, run_id

from nodekit.deploy.commands import cli
from nodekit.deploy.host.node import status
from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.launch import start, started, watch
from nodekit.deploy.launch.options import Options, StopOptions
from nodekit.deploy.records import events, find_runs, locks, runs
from nodekit.deploy.ssh_backend.backend import SshBackend
from nodekit.deploy.supervise.node_client import NodeClient
from nodekit.deploy.sync import sync
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.load import load_inventory

pytestmark = pytest.mark.slow

FOREVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.1)\n"
# An agent that has saved all there is, and does not end for 3 s since the machine stands still, is killed by rights.
STOPPED = r"{} is stopped on 2 nodes(; had to be killed on [ab](, b)?)?\n"


def nodes() -> dict[str, NodeStatus]:
    """What `kit status` asks the nodes of the latest run for: to wait by that takes half a second of a core a look."""
    return {name: status.status(node["node_dir"]) for name, node in find_runs.find(None).nodes.items()}


@pytest.fixture
def local(tmp_path: Path, own_home: Path) -> Iterator[Kit]:
    """Kit in a project with two local nodes in its inventory."""
    kit = Kit(tmp_path / "my 'project' $HOME", None)
    (kit.folder / "two nodes.yaml").write_text(
        f"name: two\nconnection: local\npython: {warm_agents.program()}\n"
        f"workdir: {str(tmp_path / 'work dir')!r}\nhosts: {{a: , b: }}\n"
    )
    yield kit
    kit.close()
    if any(each.state not in runs.ENDED for each in runs.all_runs()):
        kit.run("down", "--force")
    no_process_left(f"HOME={own_home}")


def test_two_local_nodes_train_the_shared_module(local: Kit) -> None:
    done = local.run("up", "two nodes.yaml", "--", "-m", "nodekit.training", "--epochs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"trained to the end in \d+ s, accuracy \d+\.\d+%", done.stdout)
    for kind in ("logs", "snapshots", "output", "output/best"):
        assert re.search(rf"a:.*/a/{kind}\b", done.stdout), f"it says where the {kind} are"
    assert "the same command" not in done.stdout  # nor where a run without kit goes on
    assert re.search(r"^a:0 \| epoch 1 done .* \(best accuracy so far\)$", done.stdout, re.MULTILINE), (
        done.stdout
    )


# As the tutorials write them, but for gloo and for a port of the test's own.
SPAWNS = """
import argparse
import torch, torch.distributed as dist, torch.multiprocessing as mp

def main_worker(local_rank, args):
    where = {"init_method": f"tcp://localhost:{args.port}", "world_size": args.local_world_size, "rank": local_rank}
    dist.init_process_group(backend="gloo", **where)
    met = torch.ones(1)
    dist.all_reduce(met)
    print(f"rank {local_rank}: {met.item():.0f} have met", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_world_size", type=int)
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    mp.spawn(main_worker, nprocs=args.local_world_size, args=(args,))
"""
WRAPS = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--gpu_ids")
gpu_ids = [int(each) for each in parser.parse_args().gpu_ids.split(",")]
model = torch.nn.DataParallel(torch.nn.Linear(4, 2), device_ids=gpu_ids, output_device=gpu_ids[0])
loss = model(torch.ones(8, 4)).sum()
loss.backward()
print("trained by one process", flush=True)
"""


@pytest.mark.parametrize(
    ("script", "command", "said"),
    [
        (
            SPAWNS,
            ["env", "-u", "TORCHELASTIC_USE_AGENT_STORE", "python", "job.py", "--local_world_size=2"],
            ["rank 0: 2 have met", "rank 1: 2 have met"],
        ),
        (WRAPS, ["job.py", "--gpu_ids", "0,1"], ["trained by one process"]),
    ],
    ids=["mp.spawn", "DataParallel"],
)
def test_a_script_that_starts_its_own_processes_runs_as_one(
    script: str, command: list[str], said: list[str], local: Kit
) -> None:
    (local.folder / "job.py").write_text(script)
    text = (local.folder / "two nodes.yaml").read_text().replace("{a: , b: }", "{a: }")
    (local.folder / "one.yaml").write_text(f"{text}job: {{nproc_per_node: 1}}\n")
    if script == SPAWNS:
        command = [*command, f"--port={free_port()}"]
    done = local.run("up", "one.yaml", "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in said:
        assert done.stdout.count(line) == 1, done.stdout


def test_detached_it_is_watched_and_stopped_from_elsewhere(local: Kit) -> None:
    # A script that reads its stdin finds it at its end, whatever the user types or pipes into kit.
    writes = "import pathlib, sys\npathlib.Path('out').mkdir(exist_ok=True)\npathlib.Path('out/log').write_text('12')\n"
    (local.folder / "job.py").write_text(f"{writes}assert sys.stdin.read() == ''\n{FOREVER}")
    done = local.run("up", "two nodes.yaml", "-d", "--", "job.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = run_id(done.stdout)
    assert locks.is_supervised(find_runs.find(found)), (
        "not a moment later alone: kit runs would say it is left"
    )
    assert f"{found} is running: kit up 'two nodes.yaml' -- job.py attaches to it" in done.stdout
    shown = local.run("status", found[:-2]).stdout  # the beginning of an id will do
    assert re.search(r"^  a  running  rank 0 of 2$", shown, re.MULTILINE), shown
    assert json.loads(local.run("status", "--json").stdout)["status"]["b"]["rank"] == 1
    place = local.folder.parent / "work dir" / "runs" / found
    until(lambda: [log.read_text() for log in place.glob("*/logs/rank*.log")] == ["up\n"] * 2)
    assert sorted(local.run("logs").stdout.splitlines()) == ["a:0 | up", "b:1 | up"]
    assert local.run("logs", "--rank", "1").stdout == "b:1 | up\n"
    assert local.run("logs", "--node", "a").stdout == "a:0 | up\n"
    refused = local.run("up", "two nodes.yaml", "--", "job.py", "other")
    assert (refused.returncode, "is running another command" in refused.stderr) == (1, True)
    assert local.run("up", "two nodes.yaml", "--new", "--", "job.py").returncode == 1
    with (local.folder / "two nodes.yaml").open("a") as file:
        file.write("timings: {hang: 99}\n")
    attached = local.start("up", "two nodes.yaml", "--", "job.py")
    local.wait_for("supervised by process")
    assert (
        f"two nodes.yaml has changed since {found} was started (timings.hang): that counts from"
        in local.log()
    )
    down = local.run("down")
    assert down.returncode == 0
    assert re.fullmatch(STOPPED.format(found), down.stdout), down.stdout
    assert attached.wait(60) == 130, local.log()
    shown = local.log().partition(f"{found} was stopped; ")[2]
    assert shown.splitlines() == [
        "kit up 'two nodes.yaml' -- job.py begins it anew: it has no snapshot",
        f"  logs       a:{place}/a/logs   (kit logs {found})",
        f"  written    a:{place}/code: out/ (2 bytes)",
    ]
    again = local.run("down")
    assert (again.returncode, again.stdout) == (0, f"{found} is not running (stopped)\n")
    assert re.search(rf"^{found} .* stopped +stopped by kit down$", local.run("runs").stdout, re.MULTILINE)


def test_detached_again_it_is_left_to_the_supervisor_that_it_has(local: Kit, own_home: Path) -> None:
    (local.folder / "job.py").write_text(FOREVER)
    up = ("up", "two nodes.yaml", "-d", "--metrics-port", str(free_port()), "--", "job.py")
    assert local.run(*up).returncode == 0
    run = find_runs.find(None)
    log = run.folder / "supervisor.log"
    until(lambda: "running" in log.read_text(), what="the supervisor that was left behind")

    def supervisors() -> list[int]:
        found = processes_of(f"HOME={own_home}").items()
        return [pid for pid, line in found if f"supervise {run.run_id}" in line]

    (first,) = supervisors()
    again = local.run(*up)
    assert again.returncode == 0, again.stderr
    assert f"process {first} supervises it already, and serves metrics as" in again.stdout
    assert "Ctrl-C" not in again.stdout  # which stops nothing here
    assert supervisors() == [first]
    os.kill(first, signal.SIGKILL)
    until(lambda: not locks.is_supervised(run), what="its end")
    assert local.run(*up).returncode == 0
    until(lambda: locks.is_supervised(run), what="another one")
    assert len(supervisors()) == 1


@pytest.mark.parametrize("before", ["fence", "start"], ids=["before the gos", "after a go"])
def test_a_run_that_is_stopped_while_it_starts_does_not_start(
    local: Kit, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    (local.folder / "job.py").write_text(FOREVER)
    inventory = load_inventory(local.folder / "two nodes.yaml")
    monkeypatch.chdir(local.folder)
    downs: list[int] = []
    real = getattr(NodeClient, before)

    def stopped_first(client: NodeClient, name: str, *args: Any) -> None:
        if name == "b":
            until(lambda: before == "fence" or status.agent_alive(client.node("a").node_dir), what="a's go")
            downs.append(SshBackend().down(find_runs.find(None), StopOptions()))
        real(client, name, *args)

    monkeypatch.setattr(NodeClient, before, stopped_first)
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(KitError, match="was stopped while it was being started"),
    ):
        start.start(stack, inventory, None, Options(inventory=inventory.path, command=("job.py",)))

    assert downs == [0]
    run = find_runs.find(None)
    assert (run.state, run.verdict) == ("stopped", "stopped by kit down")
    assert not any(each["alive"] for each in nodes().values())


def test_a_run_that_is_being_started_is_told_as_that(local: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    (local.folder / "job.py").write_text("print('up', flush=True)\n")
    real, told = sync.send_package, []

    def look_first(*args: Any, **more: Any) -> None:
        told.append({name: local.run(*name.split()).stdout for name in ("status", "status --json", "watch")})
        real(*args, **more)

    monkeypatch.chdir(local.folder)
    monkeypatch.setattr(sync, "send_package", look_first)
    for _ in ("a first start", "one whose nodes tell of the first"):
        assert cli.main(["up", "two nodes.yaml", "--", "job.py"]) == 0
        found = find_runs.find(None)
        found.state = "failed"
        found.save()
    assert len(told) == 2
    for each in told:
        assert each["status"] == f"{found.run_id}  starting\n  a  starting\n  b  starting\n"
        assert json.loads(each["status --json"])["state"] == "starting"
        assert each["watch"] == f"{found.run_id} is starting; kit watch shows it when it runs\n"


def interrupt() -> None:
    """As Ctrl-C does; whatever it interrupts is interrupted by then."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)


def test_ctrl_c_stops_a_run_as_soon_as_it_has_started_also_twice_in_a_hurry(
    local: Kit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (local.folder / "job.py").write_text(FOREVER)
    observers_of, say_stop = watch.observers_of, runs.Run.say_stop

    def interrupted(*args: Any) -> list[Any]:
        interrupt()  # nobody watches yet
        return observers_of(*args)

    def interrupted_again(run: runs.Run, by: str) -> None:
        if by:
            interrupt()
        say_stop(run, by)

    monkeypatch.chdir(local.folder)
    monkeypatch.setattr(watch, "observers_of", interrupted)
    monkeypatch.setattr(runs.Run, "say_stop", interrupted_again)
    assert cli.main(["up", "two nodes.yaml", "--", "job.py"]) == 130

    said = capsys.readouterr()
    assert f"{find_runs.find(None).run_id} is stopped on 2 nodes" in said.out
    resume = "kit up 'two nodes.yaml' -- job.py begins it anew: it has no snapshot"
    assert f"{find_runs.find(None).run_id} was stopped; {resume}\n  logs " in said.out
    assert "killing it" not in said.out, "what a second one does had not been said"
    assert said.err == ""
    assert (find_runs.find(None).state, find_runs.find(None).verdict) == ("stopped", "stopped by Ctrl-C")
    assert not any(each["alive"] for each in nodes().values())


def test_a_terminal_that_is_closed_while_a_run_starts_stops_it(local: Kit) -> None:
    (local.folder / "job.py").write_text(FOREVER)
    starting = subprocess.Popen(
        local.argv("up", "two nodes.yaml", "--", "job.py"), cwd=local.folder, stdout=subprocess.DEVNULL
    )
    until(lambda: any(each.state == "starting" for each in runs.all_runs()), what="a run on record")
    starting.send_signal(signal.SIGHUP)
    assert starting.wait(timeout=60) == 130
    found = find_runs.find(None)
    assert (found.state, found.verdict) == ("stopped", "stopped by SIGHUP (its terminal was closed)")


def test_ctrl_c_stops_a_run_whose_output_nobody_reads_any_more(
    local: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `kit up | tee log`, where Ctrl-C ends tee at once."""
    (local.folder / "job.py").write_text(FOREVER)
    watched = watch.observers_of
    reader, writer = os.pipe()

    def interrupted(*args: Any) -> list[Any]:
        os.close(reader)
        interrupt()
        return watched(*args)

    monkeypatch.chdir(local.folder)
    monkeypatch.setattr(watch, "observers_of", interrupted)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert cli.main(["up", "two nodes.yaml", "--", "job.py"]) == 130
    assert (find_runs.find(None).state, find_runs.find(None).verdict) == ("stopped", "stopped by Ctrl-C")
    assert not any(each["alive"] for each in nodes().values())


def test_ctrl_c_while_a_run_starts_stops_what_has_started_and_again_kills_it(
    local: Kit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (local.folder / "job.py").write_text(FOREVER)
    wait_started, stop_all = started.wait_started, NodeClient.stop_all
    asked: list[bool] = []

    def interrupted(*args: Any, **more: Any) -> None:
        wait_started(*args, **more)
        interrupt()

    def interrupted_again(client: NodeClient, *, force: bool = False, **more: Any) -> Any:
        asked.append(force)
        if not force:
            interrupt()
        return stop_all(client, force=force, **more)

    monkeypatch.chdir(local.folder)
    monkeypatch.setattr(start, "wait_started", interrupted)
    monkeypatch.setattr(NodeClient, "stop_all", interrupted_again)
    assert cli.main(["up", "two nodes.yaml", "--", "job.py"]) == 130

    assert asked == [False, True]
    assert not any(each["alive"] for each in nodes().values())
    assert capsys.readouterr().err == "kit: stopped; nothing is left running\n"
    assert (find_runs.find(None).state, find_runs.find(None).verdict) == ("stopped", "stopped by Ctrl-C")


def test_an_agent_that_ends_at_once_is_told_of_at_once_though_the_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes: dict[str, Any] = {
        "a": {"alive": False, "agent_log": "no such module"},
        "b": {"alive": True, "state": "rendezvous"},
    }
    run = SimpleNamespace(run_id="r", stopped_by="")
    client = cast(NodeClient, SimpleNamespace(status=nodes.get, run=run))
    began = time.monotonic()
    with pytest.raises(KitError) as error:
        started.wait_started(client, list(nodes), least=2, say=print)
    assert (str(error.value), len(error.value.errors)) == ("a: its agent ended at once: no such module", 1)
    assert time.monotonic() - began < started.STARTED_TIMEOUT_S / 2
    nodes["a"] = nodes["b"]
    with monkeypatch.context() as patched:
        patched.setattr(started, "STARTED_TIMEOUT_S", 0.0)
        with pytest.raises(KitError, match="still rendezvous") as error:
            started.wait_started(client, list(nodes), least=2, say=print)
    assert "kit check tries every pair of hosts" in error.value.errors[0].problem.cure
    nodes["a"] = {"alive": False, "agent_log": ""}
    run.stopped_by = "kit down"
    with pytest.raises(KitError, match="r was stopped while it was being started, by kit down"):
        started.wait_started(client, list(nodes), least=2, say=print)


def test_an_elastic_job_starts_without_a_node_that_is_lost_while_they_meet() -> None:
    nodes: dict[str, Any] = {
        "a": {"alive": True, "state": "running"},
        "b": {"alive": True, "state": "running"},
        "c": {"alive": False, "agent_log": "no such module"},
    }
    run = SimpleNamespace(run_id="r", stopped_by="")
    client = cast(NodeClient, SimpleNamespace(status=nodes.get, run=run))
    lost = started.wait_started(client, list(nodes), least=2, say=print)
    assert [str(each) for each in lost.values()] == ["c: its agent ended at once: no such module"]
    with pytest.raises(KitError, match=r"^c: its agent ended at once"):
        started.wait_started(client, list(nodes), least=3, say=print)


@pytest.mark.parametrize("when", ["before it heard its go", "later"])
def test_a_start_that_loses_the_rendezvous_host_leaves_the_others_to_the_supervisor(when: str) -> None:
    """It begins another generation on them; they wait for up to a minute for the host of this one."""
    nodes: dict[str, Any] = {
        "a": {"alive": False, "agent_log": "killed"},
        "b": {"alive": True, "state": "rendezvous"},
        "c": {"alive": True, "state": None},
    }
    told = {"a": HostError("a", "no answer within 30 s")} if when != "later" else {}
    run = SimpleNamespace(run_id="r", stopped_by="")
    client = cast(NodeClient, SimpleNamespace(status=nodes.get, run=run))
    without = started.wait_started(client, list(nodes), least=2, say=print, lost=told)
    assert str(without["a"]) == ("a: its agent ended at once: killed" if when == "later" else str(told["a"]))
    assert str(without["b"]) == "b: waits for another generation to begin"
    nodes["b"] = nodes["a"]  # those that are left could not be told from a group that trains on
    with pytest.raises(KitError, match=r"b: its agent ended at once"):
        started.wait_started(client, list(nodes), least=1, say=print, lost=told)


@pytest.mark.parametrize("state", ["running", "succeeded"])
def test_nodes_that_train_are_not_stopped_for_one_that_cannot_reach_them(state: str) -> None:
    members = ["a", "b"] if state == "running" else []
    nodes: dict[str, Any] = {
        "a": {"alive": True, "state": state, "members": members},
        "b": {"alive": True, "state": state, "members": members},
        "c": {"alive": True, "state": "orphaned"},
    }
    client = cast(
        NodeClient, SimpleNamespace(status=nodes.get, run=SimpleNamespace(run_id="r", stopped_by=""))
    )
    began = time.monotonic()
    without = started.wait_started(client, list(nodes), least=2, say=print)
    assert [str(each) for each in without.values()] == [f"c: not yet with the others: {started.NOT_REACHED}"]
    assert time.monotonic() - began < started.STARTED_TIMEOUT_S / 2


# It ends when the other one has begun, too: who begins late would be ended before it has said so.
BEGINS = """
import os, pathlib, sys, time
print("begun", flush=True)
begun = pathlib.Path(os.environ["BEGUN"])
(begun / os.environ["RANK"]).touch()
while len(list(begun.iterdir())) < 2:
    time.sleep(0.05)
sys.exit(pathlib.Path("bad").exists())
"""


def test_a_run_that_is_over_is_followed_by_a_new_one_and_a_failed_one_goes_on(
    local: Kit, tmp_path: Path
) -> None:
    (tmp_path / "begun").mkdir()
    (local.folder / "job.py").write_text(BEGINS)
    (local.folder / "bad").write_text("")
    values = (local.folder / "two nodes.yaml").read_text()
    (local.folder / "two nodes.yaml").write_text(
        f"{values}job: {{env: {{BEGUN: {str(tmp_path / 'begun')!r}}}, max_restarts: 0}}\n"
    )
    failed = local.run("up", "two nodes.yaml", "--", "job.py")
    assert failed.returncode == 3
    assert "failed first (exit status 1)" in failed.stdout
    why = local.run("why")
    assert why.stdout in failed.stdout, "the same screen, from the events alone"
    assert "resume    kit up 'two nodes.yaml' -- job.py\n" in why.stdout
    told = json.loads(local.run("why", "--json").stdout)
    assert (told["why"]["first"]["exitcode"], told["state"]) == (1, "failed")
    assert local.run("status").stdout.endswith(f"\nwhy: kit why {run_id(failed.stdout)}\n")
    (local.folder / "bad").unlink()
    mended = local.run("up", "two nodes.yaml", "--", "job.py")
    assert (mended.returncode, run_id(mended.stdout)) == (0, run_id(failed.stdout)), mended.stdout
    assert re.search(r"trained to the end in \d+ s since it was resumed$", mended.stdout, re.MULTILINE), (
        mended.stdout
    )
    assert (failed.stdout.count("| begun"), mended.stdout.count("| begun")) == (2, 2), (
        "each line is shown once"
    )
    after = local.run("up", "two nodes.yaml", "--", "job.py")
    assert run_id(after.stdout) != run_id(failed.stdout)


def test_agents_that_a_stop_has_missed_are_ended_when_the_run_goes_on(local: Kit, own_home: Path) -> None:
    (local.folder / "job.py").write_text(FOREVER)
    up = ("up", "two nodes.yaml", "-d", "--", "job.py")
    assert local.run(*up).returncode == 0
    (run,) = runs.all_runs()
    (supervisor,) = (
        pid for pid, line in processes_of(f"HOME={own_home}").items() if f"supervise {run.run_id}" in line
    )
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: supervisor not in processes_of(f"HOME={own_home}"))
    run = find_runs.find(run.run_id)
    run.finish("stopped", "by hand, while its nodes were out of reach")

    def workers() -> dict[str, int]:
        return {name: each["workers"][0]["pid"] for name, each in nodes().items() if each.get("workers")}

    before = workers()
    again = local.run(*up)
    assert (again.returncode, run_id(again.stdout)) == (0, run.run_id), again.stdout + again.stderr
    after = workers()
    assert set(before) == set(after) == {"a", "b"}
    assert set(before.values()).isdisjoint(after.values())
    assert not any(Path(f"/proc/{pid}").exists() for pid in before.values())


def test_sigterm_ends_the_job_only_where_a_user_has_this_process_supervise_it(local: Kit) -> None:
    """What a machine that shuts down sends to all processes is about these, and not about the job."""
    (local.folder / "job.py").write_text(FOREVER)
    assert local.run("up", "two nodes.yaml", "-d", "--", "job.py").returncode == 0
    run = find_runs.find(None)
    log = run.folder / "supervisor.log"
    until(lambda: "running" in log.read_text(), what="the supervisor that was left behind")
    agents = {name: each["agent"] for name, each in nodes().items()}

    os.kill(int(locks.SupervisorLock(run).owner()), signal.SIGTERM)
    until(lambda: not locks.is_supervised(run), what="its end")
    assert f"{run.run_id} goes on: SIGTERM has ended this process alone; kit up " in log.read_text()
    leads = local.start("up", "two nodes.yaml", "--", "job.py")
    until(lambda: locks.is_supervised(run), what="another one")
    pid = int(locks.SupervisorLock(run).owner())
    stands_by = subprocess.Popen(
        local.argv("up", "two nodes.yaml", "--", "job.py"),
        cwd=local.folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stands_by.stdout is not None
    until(lambda: "this one watches" in stands_by.stdout.readline(), what="one that stands by")
    stands_by.terminate()
    assert stands_by.wait(30) == 0
    assert f"{run.run_id} goes on: SIGTERM has ended this process alone\n" in stands_by.stdout.read()
    stands_by.stdout.close()
    assert {name: each["agent"] for name, each in nodes().items() if each["alive"]} == agents
    assert (find_runs.find(None).state, run.stopped_by) == ("running", "")

    os.kill(pid, signal.SIGTERM)
    assert leads.wait(60) == 130
    assert (find_runs.find(None).state, find_runs.find(None).verdict) == ("stopped", "stopped by SIGTERM")


def test_a_full_disk_here_ends_no_supervision(
    local: Kit, tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rendezvous host is lost while nothing can be written: its next generation waits for room."""
    (local.folder / "job.py").write_text(FOREVER)
    small = tmp_path / "small"
    monkeypatch.setenv("XDG_STATE_HOME", str(small))

    with small_disk(small):
        try:
            assert local.run("up", "two nodes.yaml", "-d", "--", "job.py").returncode == 0
            run = find_runs.find(None)
            log = run.folder / "supervisor.log"  # it lies on the same disk
            until(lambda: "running" in log.read_text(), what="the supervisor that was left behind")
            with full(small):
                os.kill(int(nodes()["a"]["agent"].partition(".")[0]), signal.SIGKILL)
                until(lambda: not nodes()["a"]["alive"])
                told = json.loads(local.run("status", "--json").stdout)["status"]
                assert {name: each["alive"] for name, each in told.items()} == {"a": False, "b": True}
                for _ in range(10):
                    time.sleep(0.5)
                    assert (find_runs.find(None).generation, nodes()["a"]["alive"]) == (0, False)
                assert locks.is_supervised(run)
            until(lambda: nodes()["a"].get("generation") == 1 and nodes()["a"]["alive"], timeout_s=60)
            assert find_runs.find(None).generation == 1
            until(lambda: all(each.get("state") == "running" for each in nodes().values()), timeout_s=60)
            said = log.read_text()
            assert said.count("can be written again") == 1, said
            assert "fence" in {event.kind for event in events.read(run.folder)}
            with full(small):
                down = local.run("down")
                until(lambda: not locks.is_supervised(run), what="the end of its supervisor")
            assert (down.returncode, down.stderr) == (0, ""), down.stdout
            assert "how it ended is not on record" in down.stdout
            assert re.search(STOPPED.format(run.run_id), down.stdout), down.stdout
            assert local.run("down").stdout == f"{run.run_id} is not running (stopped)\n"
        finally:
            local.run("down", "--force")
            no_process_left(f"HOME={own_home}")


FAILS_LAST = """
import os, time
rank, attempt, go = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["GO"]
print("begins in", os.environ["NODEKIT_GENERATION"], attempt, flush=True)
if rank == "0" and not os.path.exists(go):
    while not os.path.exists(go + " and fail"):
        time.sleep(0.05)
    raise OSError("the final save")
"""


def last_rank(local: Kit, go: Path) -> subprocess.Popen[str]:
    """A job of two nodes; rank 1 has ended well, and rank 0, on the rendezvous host, waits until it is to fail."""
    (local.folder / "job.py").write_text(FAILS_LAST)
    values = (local.folder / "two nodes.yaml").read_text()
    (local.folder / "two nodes.yaml").write_text(
        f"{values}job: {{env: {{GO: {str(go)!r}}}, max_restarts: 0}}\n"
    )
    up = local.start("up", "two nodes.yaml", "--", "job.py")
    local.wait_for("| begins in 0 ")  # before, there may be no run to ask for
    until(lambda: nodes()["b"].get("waits_for") == ["a"])
    return up


def test_a_rank_that_fails_when_the_others_have_ended_well_fails_the_job(local: Kit, tmp_path: Path) -> None:
    up = last_rank(local, tmp_path / "go")
    (tmp_path / "go and fail").touch()
    assert up.wait(90) == 3
    said = local.log()
    assert "OSError: the final save" in said
    assert "trained to the end" not in said
    assert "others    1 other rank had ended well" in said
    assert re.search(r"^\S+ .* failed +.*rank 0.*the final save", local.run("runs").stdout, re.MULTILINE)


def test_a_node_that_is_lost_when_the_others_have_ended_well_is_made_good(local: Kit, tmp_path: Path) -> None:
    up = last_rank(local, tmp_path / "go")
    assert re.search(
        r"^  b  waiting .*ended well \d+ s ago, waiting for a", local.run("status").stdout, re.MULTILINE
    )
    (tmp_path / "go").touch()
    os.kill(int(nodes()["a"]["agent"].partition(".")[0]), signal.SIGKILL)
    assert up.wait(120) == 0, local.log()
    # Mostly 1 0; on a busy machine a round may fall apart while its members meet, and that is mended, too.
    assert re.search(r"a:0 \| begins in 1 \d", local.log())
    assert re.search(r"b:1 \| begins in 1 \d", local.log()), "all of the round start again"


def test_a_run_keeps_the_code_it_started_with(local: Kit) -> None:
    (local.folder / "part.py").write_text("WORD = 'old'\n")
    (local.folder / "job.py").write_text(
        "import os, pathlib, time\nprint('up', flush=True)\n"
        "while not os.path.exists(os.environ['GO']): time.sleep(0.05)\nimport part\nprint('it is', part.WORD)\n"
    )
    go = local.folder.parent / "go"
    values = (local.folder / "two nodes.yaml").read_text()
    (local.folder / "two nodes.yaml").write_text(values + f"job: {{env: {{GO: {str(go)!r}}}}}\n")
    up = local.start("up", "two nodes.yaml", "--", "job.py")
    local.wait_for("b:1 | up")
    (local.folder / "part.py").write_text("WORD = 'new'\n")
    go.touch()
    assert up.wait(60) == 0
    assert "it is old" in local.log()
    assert "it is new" not in local.log()


def test_the_code_on_record_is_what_was_sent_though_a_file_changed_meanwhile(
    local: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that a node that comes back with an empty disk is given the code again, or refused."""
    (local.folder / "job.py").write_text("print('up', flush=True)\n")
    real, changed = sync.bring, []

    def bring(delivery: Any) -> None:
        if not changed:
            changed.append("part.py")
            (local.folder / "part.py").write_text("WORD = 'new'\n")
        real(delivery)

    (local.folder / "part.py").write_text("WORD = 'old'\n")
    monkeypatch.chdir(local.folder)
    monkeypatch.setattr(sync, "bring", bring)
    assert cli.main(["up", "two nodes.yaml", "--", "job.py"]) == 0
    assert changed
    assert find_runs.find(None).code_digest == sync.list_code(local.folder).digest


# The shape of many public programs: data lies beside the script, git is not for it, and some of it is optional.
READS_DATA = """
import mmap, os, pickle
folder = os.path.join("data", "chars")
vocabulary = 50304
if os.path.exists(os.path.join(folder, "meta.pkl")):
    with open(os.path.join(folder, "meta.pkl"), "rb") as file:
        vocabulary = pickle.load(file)["vocabulary"]
with open(os.path.join(folder, "train.bin"), "rb") as file:
    size = len(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
print("a model of", vocabulary, "words on", size, "bytes", flush=True)
"""


def test_a_dry_run_says_what_would_be_sent(local: Kit) -> None:
    (local.folder / "job.py").write_text("print('up')\n")
    done = local.run("up", "two nodes.yaml", "--dry-run", "--", "job.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\n\ncode sent to each host\n  2 files, \d+ bytes, from \S.*\n$", done.stdout), (
        done.stdout
    )
    assert "nodes" in json.loads(
        local.run("up", "two nodes.yaml", "--dry-run", "--json", "--", "job.py").stdout
    )


def test_data_that_git_ignores_is_told_and_named_where_it_is_missed_and_sent_where_kitignore_says_so(
    local: Kit,
) -> None:
    (local.folder / "train").write_text(f"#!/bin/false\n{READS_DATA}")
    (local.folder / "data/chars").mkdir(parents=True)
    (local.folder / "data/chars/train.bin").write_bytes(bytes(1 << 16))
    (local.folder / "data/chars/meta.pkl").write_bytes(pickle.dumps({"vocabulary": 65}))
    (local.folder / ".gitignore").write_text("*.bin\n*.pkl\n")
    done = local.run("up", "two nodes.yaml", "--", "train")
    assert done.returncode == 4, done.stdout + done.stderr
    told = "left out: 2 files, 65.6 kB, ignored by .gitignore: `!*.bin`, `!*.pkl` in .kitignore send them"
    assert re.search(rf"^sync .*; {re.escape(told)}", done.stdout, re.MULTILINE), done.stdout
    named = "data/chars/train.bin was not sent to the nodes: .gitignore ignores it"
    assert named in " ".join(done.stdout.split())
    assert "!*.bin in .kitignore sends it" in " ".join(done.stdout.split())
    assert json.loads(local.run("why", "--json").stdout)["why"]["cause"]["what"] == named
    (local.folder / ".kitignore").write_text("!*.bin\n!*.pkl\n")
    done = local.run("up", "two nodes.yaml", "--", "train")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("a model of 65 words on 65536 bytes") == 2
    assert "left out" not in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("up", "none.yaml"), 1, "none.yaml: no such file"),
        (("up", "two nodes.yaml", "--", "none.py"), 1, "no none.py in "),
        (
            ("up", "two nodes.yaml", "--", "-m", "nodekit.training", "--engine", "dpp"),
            1,
            "invalid choice: 'dpp'",
        ),
        (("up", "two nodes.yaml", "--", "-m", "nodekit.training", "--engine", "dp"), 1, "there are 2 ranks"),
        (("status",), 1, "no run on record in "),
        (("up", "two nodes.yaml", "--wrong"), 2, "unrecognized arguments: --wrong"),
        (("fly",), 2, "there is no command 'fly'"),
        ((), 2, "the following arguments are required: COMMAND"),
        (("up", "slurm"), 1, "job.secrets names WANDB_API_KEY, not set in this environment"),
        (("up", "slurm", "--sweep", "lr"), 1, "--sweep: found 'lr', wanted an option and its values"),
        (("up", "two nodes.yaml", "--sweep", "lr=1,2"), 1, "this inventory has no slurm section"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line_with_its_exit_code(
    local: Kit, args: tuple[str, ...], code: int, says: str
) -> None:
    done = local.run(*args)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_help_teaches_the_exit_codes(local: Kit) -> None:
    for command in ((), ("up",)):
        assert "130  stopped by Ctrl-C" in local.run(*command, "--help").stdout


def test_the_reader_of_a_pipe_may_leave(local: Kit) -> None:
    first = subprocess.Popen(
        local.argv("schema"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    assert first.stdout is not None
    first.stdout.read(10)
    first.stdout.close()
    assert first.stderr is not None
    assert first.stderr.read() == b""
    first.stderr.close()
    assert first.wait(20) == 0
