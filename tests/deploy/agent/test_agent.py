"""The agent, with torch's real elastic launch and real workers."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import strangers
from agents import ANSWER_S, KIT_DIR, Agents, no_process_left, processes_of, until
from fake_nvml import FakeNvml
from record_failures import memory_cgroup

from nodekit.deploy.agent import descriptors
from nodekit.deploy.connect.channel import HostError
from nodekit.deploy.story.status import status_line

pytestmark = pytest.mark.slow

ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("world", int(total), flush=True)
"""
# gloo's threads may abort an interpreter that ends by itself (seen with torch 2.13): what is tested is before that.
END = "sys.stdout.flush()\nos._exit(0)\n"
FOREVER = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def without_gloos(log: str) -> list[str]:
    """Its lines, without those of gloo's own in torch 2.8: to whom it is connected."""
    return [line for line in log.splitlines() if not line.startswith("[Gloo] Rank ")]


def test_a_node_that_waits_in_vain_ends_itself_and_not_the_job(agents: Agents) -> None:
    """The others may train without it: that it found nobody is no verdict on them."""
    agents.start("", num_nodes=1, min_nodes=2, max_nodes=2, wait_s=1.0)
    status = agents.wait("n0", "gone")
    assert (status["state"], status["message"]) == ("ended", "waited 1 s for 2 nodes")
    assert status["cause"] == "too-few-nodes"


def test_two_nodes_run_a_torchrun_script_to_its_end(agents: Agents) -> None:
    agents.start(
        ALL_REDUCE + "print({name: os.environ[name] for name in "
        "('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME')})\n" + END
    )
    assert agents.wait("n0", "succeeded")["state"] == "succeeded"
    assert agents.wait("n1", "succeeded")["state"] == "succeeded"
    assert without_gloos(agents.log(1)) == [
        "world 2",
        "{'RANK': '1', 'LOCAL_RANK': '0', 'WORLD_SIZE': '2', 'NODE_RANK': '1', 'MASTER_ADDR': '127.0.0.1', "
        "'GLOO_SOCKET_IFNAME': 'lo'}",
    ]

    events = [json.loads(line) for line in (agents.node_dir("n0") / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["kind"] != "sample"] == [
        "agent-started",
        "status",
        "rendezvous",
        "workers-started",
        "attempt-ended",
        "agent-ended",
    ]
    assert events[1]["state"] == "succeeded", "what it does now stands where it stood at first"
    assert {(event["run"], event["node"]) for event in events} == {("r", "n0")}


HARD_ARGS = ["a b", "'", '"', "$HOME", "$$", "${local_rank}", ";", "new\nline", "ünï ✓", "", "-x", "*", "\\n"]


def test_ranks_are_counted_through_node_by_node(agents: Agents) -> None:
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    agents.start(f"import os\nprint(*map(os.environ.get, {names}))", nproc_per_node=2)
    for name in ("n0", "n1"):
        assert agents.wait(name, "succeeded")["state"] == "succeeded"
    said = [agents.log(rank).split() for rank in range(4)]
    assert said == [
        ["0", "0", "0", "4", "2"],
        ["1", "1", "0", "4", "2"],
        ["2", "0", "1", "4", "2"],
        ["3", "1", "1", "4", "2"],
    ]


def test_arguments_arrive_byte_for_byte(agents: Agents) -> None:
    agents.start("import json, sys; print(json.dumps(sys.argv[1:]))", *HARD_ARGS, num_nodes=1)
    agents.wait("n0", "succeeded")
    assert json.loads(agents.log(0)) == HARD_ARGS


def test_a_pythonpath_of_the_jobs_comes_behind_kits_own_folder(agents: Agents) -> None:
    script = "import os, sys; print(os.environ['PYTHONPATH'], *sys.path[1:3], sep='\\n')"
    job = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": "/job's/lib"}
    # kit gives the job's variables to the prestart, too.
    agents.start(script, num_nodes=1, env=job, secrets=job)
    agents.wait("n0", "succeeded")
    assert agents.log(0).splitlines() == [f"{KIT_DIR}:/job's/lib", KIT_DIR, "/job's/lib"]


def test_a_secret_reaches_the_worker_and_no_file_or_command_line(agents: Agents) -> None:
    secret = "s3cr3t-value"
    agents.start(
        "import hashlib, os, time\nprint(hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest(), flush=True)\n"
        "time.sleep(600)",
        num_nodes=1,
        secrets={"TOKEN": secret},
    )
    agents.wait("n0", "running")
    until(lambda: list(agents.folder.glob("n0/logs/*")) and agents.log(0))
    import hashlib

    assert agents.log(0).strip() == hashlib.sha256(secret.encode()).hexdigest()
    assert not [command for command in processes_of(agents.marker).values() if secret in command]
    for path in agents.folder.rglob("*"):
        assert not path.is_file() or secret not in path.read_text(errors="replace"), path
    spec = agents.node_dir("n0") / "spec.json"
    assert spec.stat().st_mode & 0o777 == 0o600


def test_a_crashed_worker_is_restarted_and_both_logs_are_kept(agents: Agents) -> None:
    agents.start(
        ALL_REDUCE + "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "if first and os.environ['RANK'] == '1': raise ValueError('boom')\n"
        "dist.all_reduce(total)\n" + END,
        max_restarts=1,
    )
    for name in ("n0", "n1"):
        assert agents.wait(name, "succeeded")["state"] == "succeeded"
    assert "ValueError: boom" in agents.log(1, "0.0")
    assert without_gloos(agents.log(1, "0.1")) == ["world 2"]
    (failure,) = agents.status("n1")["failures"]
    assert (failure["rank"], failure["attempt"]) == (1, "0.0")
    assert failure["exitcode"] in (1, -signal.SIGABRT)  # see END: it may abort on its way out
    assert failure["error"].endswith("ValueError: boom")


ECC = "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')\n"


@pytest.mark.parametrize(
    ("script", "state", "cause"),
    [
        (ECC, "ended", "broken"),
        ("raise RuntimeError('CUDA error: device-side assert triggered')\n", "failed", ""),
    ],
)
def test_a_crash_of_a_broken_gpu_is_not_the_users(
    agents: Agents, fake_nvml: FakeNvml, script: str, state: str, cause: str
) -> None:
    agents.start(script, num_nodes=1, gpus=(0,))

    def ended() -> dict[str, Any] | None:
        found = agents.status("n0")
        return found if not found["alive"] and found.get("state") in ("ended", "failed") else None

    status = until(ended)
    assert (status["state"], status.get("cause", "")) == (state, cause)
    assert len(status["failures"]) == 1
    if cause:
        assert status["message"] == "GPU ?: rank 0 failed with: uncorrectable ECC error"
        assert "kit clean --forgive" in status["cure"]


DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER


def test_a_node_that_loses_a_gpu_ends_its_ranks_and_leaves(agents: Agents, fake_nvml: FakeNvml) -> None:
    agents.start(DEAF, num_nodes=1, nproc_per_node=2, gpus=(0, 1))
    agents.wait("n0", "running")
    until(lambda: (agents.status("n0").get("usage") or {}).get("gpus"))
    fake_nvml.kernel_says(
        "NVRM: Xid (PCI:0000:3b:00): 119, pid=7, name=python, Timeout waiting for RPC from GSP!"
    )
    status = until(lambda: (found := agents.status("n0")) and not found["alive"] and found)
    assert (status["state"], status["cause"]) == ("ended", "broken")
    assert status["message"].startswith(
        "GPU 1: Xid 119 (its system processor does not answer): pid=7, name=python"
    )
    events = [json.loads(line) for line in (agents.node_dir("n0") / "events.jsonl").read_text().splitlines()]
    (error,) = [event for event in events if event["kind"] == "gpu-error"]
    assert (error["gpu"], error["what"], error["number"], error["fatal"]) == (1, "xid", 119, True)


SPINS_UNLESS_1 = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while not os.path.exists(os.path.expandvars("$NODEKIT_TEST/go")):
        time.sleep(0.01)
    if os.environ["RANK"] == "3":
        raise ValueError("boom")
    while True:
        time.sleep(0.01)
"""


def test_ranks_that_wait_in_nccl_are_ended_as_soon_as_another_has_failed(agents: Agents) -> None:
    agents.start(SPINS_UNLESS_1, num_nodes=3, nproc_per_node=2, max_restarts=1)
    for rank in range(6):
        until(
            lambda rank=rank: list(agents.folder.glob(f"n*/logs/rank{rank}-*")) and agents.log(rank) == "up\n"
        )
    (agents.folder / "go").touch()
    for name in ("n0", "n1", "n2"):
        assert agents.wait(name, "succeeded")["state"] == "succeeded"
        events = [
            json.loads(line) for line in (agents.node_dir(name) / "events.jsonl").read_text().splitlines()
        ]
        ends = [event["why"] for event in events if event["kind"] == "attempt-ended"]
        # Nobody has waited for the store to tell that the node has left the round.
        assert ends == ["a rank failed" if name == "n1" else "a rank of another node failed", "done"]
        assert len([event for event in events if event["kind"] == "rendezvous"]) == 2, (
            "all have met in one more round"
        )


DIES_AFTER_ITS_PEER = """
import os, pathlib, time
folder = pathlib.Path(os.environ["NODEKIT_TEST"])
if os.environ["RANK"] == "0":
    (folder / "pid.new").write_text(str(os.getpid()))
    (folder / "pid.new").rename(folder / "pid")
    while not (folder / "raised").exists():
        time.sleep(0.01)
    raise RuntimeError("Connection reset by peer")
while not (folder / "pid").exists():
    time.sleep(0.01)
try:
    raise ValueError("boom")
except ValueError:
    import traceback
    traceback.print_exc()
(folder / "raised").touch()
peer = pathlib.Path("/proc", (folder / "pid").read_text(), "stat")
while peer.exists() and ") Z " not in peer.read_text():
    time.sleep(0.005)
time.sleep(0.2)
os._exit(1)
"""


def test_a_rank_that_ends_after_the_peer_that_it_has_brought_down_still_says_why(agents: Agents) -> None:
    agents.start(DIES_AFTER_ITS_PEER)
    agents.wait("n1", "failed")
    (failure,) = agents.status("n1")["failures"]
    assert (failure["rank"], failure["exitcode"]) == (1, 1)
    assert failure["error"].endswith("ValueError: boom")


SAVES_AND_FAILS = """
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["NODEKIT_PROGRESS_FILE"]).parents[1] / "snapshots"
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        (folder / "mine.tmp").write_text("mine")
        (folder / "mine.tmp").rename(folder / "mine.pt")
        sys.exit("as asked")
    time.sleep(600)
print([path.read_text() for path in folder.glob("*.pt")])
"""


def test_what_a_rank_has_saved_is_on_all_nodes_at_the_next_attempt(agents: Agents) -> None:
    agents.start(SAVES_AND_FAILS, max_restarts=1)
    for name in ("n0", "n1"):
        assert agents.wait(name, "succeeded")["state"] == "succeeded"
    assert [agents.log(rank, "0.1") for rank in range(2)] == ["['mine']\n"] * 2


def test_a_node_that_cannot_read_what_was_saved_starts_no_rank_and_says_why(agents: Agents) -> None:
    (agents.node_dir("n0") / "saved.json").mkdir(parents=True)
    agents.start("print('it began')", num_nodes=1)
    status = agents.wait("n0", "ended")
    assert "saved.json" in status["message"]
    assert status["notice"] == f"n0: {status['message']}"
    assert status["message"] in until(lambda: agents.status("n0").get("agent_log"))
    assert not list((agents.node_dir("n0") / "logs").iterdir())


def test_ranks_are_told_what_was_committed_before(agents: Agents) -> None:
    agents.node_dir("n0").mkdir(parents=True)
    (agents.node_dir("n0") / "saved.json").write_text('{"words": "step 6 was committed"}')
    agents.start("import os; print(os.environ['NODEKIT_SNAPSHOT_EXPECTED'])", num_nodes=1)
    agents.wait("n0", "succeeded")
    assert agents.log(0) == "step 6 was committed\n"


def test_each_start_of_a_rank_has_its_own_time(agents: Agents) -> None:
    agents.start(
        "import os, sys, time\nprint(os.environ['NODEKIT_STARTED'], time.clock_gettime(time.CLOCK_BOOTTIME))\n"
        "sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))",
        num_nodes=1,
        max_restarts=1,
    )
    agents.wait("n0", "succeeded")
    times = [float(word) for attempt in ("0.0", "0.1") for word in agents.log(0, attempt).split()]
    assert times == sorted(times), "the second is started after the first has ended"
    assert len(times) == 4


def test_a_rank_that_raises_fails_its_node_with_its_own_traceback(agents: Agents) -> None:
    agents.start(ALL_REDUCE + "if dist.get_rank() == 1: raise KeyError('x y')\ndist.all_reduce(total)")
    status = agents.wait("n1", "failed")
    assert status["state"] == "failed"
    assert status["failures"][0]["error"].splitlines()[-1] == "KeyError: 'x y'"


def test_what_the_kernel_says_of_a_rank_that_it_killed_is_taken_down(agents: Agents, tmp_path: Path) -> None:
    greedy = (
        "import os, sys, time\nprint('reading', flush=True)\nopen(sys.argv[1] + '/cgroup.procs', 'w').write('0')\n"
        "time.sleep(0.2)\nopen(sys.argv[2], 'w').write(str(time.time()))\n"
        "kept = [bytearray(16 << 20) for _ in range(99)]\n"
    )
    with memory_cgroup() as cgroup:
        agents.start(greedy, str(cgroup), str(tmp_path / "alive"), num_nodes=1)
        (failure,) = agents.wait("n0", "failed")["failures"]
    assert (failure["exitcode"], failure["error"]) == (-9, "reading")
    assert re.search(r"Killed process \d+ \(.*UID:", failure["kernel"][-1])
    assert failure["when"] >= float((tmp_path / "alive").read_text()), "when it died, not when it last wrote"


def test_stop_ends_workers_and_what_they_started(agents: Agents) -> None:
    agents.start(
        "import subprocess, time\nsubprocess.Popen(['sleep', '601'], start_new_session=True)\n"
        "print('up', flush=True)\ntime.sleep(600)",
        num_nodes=1,
    )
    until(lambda: list(agents.folder.glob("n0/logs/*")) and agents.log(0) == "up\n")
    until(lambda: any("sleep 601" in command for command in processes_of(agents.marker).values()))
    found = agents.channels["n0"].call(
        "stop", timeout_s=120, node_dir=str(agents.node_dir("n0")), grace_s=60.0
    )
    # An agent without ranks is killed after 3 s, for which the machine may stand still; its last event tells the rest.
    assert found["was"] == "running"
    assert agents.status("n0")["state"] == "stopped"
    ended = json.loads((agents.node_dir("n0") / "events.jsonl").read_text().splitlines()[-1])
    assert (ended["kind"], ended["state"]) == ("agent-ended", "stopped"), (
        "one that only ended is started again"
    )
    assert not {
        pid: line for pid, line in processes_of(agents.marker).items() if "agent" in line or "sleep" in line
    }


def test_a_worker_deaf_to_sigterm_is_killed_after_the_grace(agents: Agents) -> None:
    agents.start(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\n"
        "time.sleep(600)",
        num_nodes=1,
        grace_s=1.0,
    )
    until(lambda: list(agents.folder.glob("n0/logs/*")) and agents.log(0) == "up\n")
    found = agents.channels["n0"].call(
        "stop", timeout_s=ANSWER_S, node_dir=str(agents.node_dir("n0")), grace_s=30.0
    )
    assert found["was"] == "running"
    assert not {pid: line for pid, line in processes_of(agents.marker).items() if "job.py" in line}


SAVES_WHEN_STOPPED = """
import os, pathlib, signal, sys, time
def save(*_):
    time.sleep(4)  # longer than an agent without workers is given
    folder = pathlib.Path(os.environ["NODEKIT_PROGRESS_FILE"]).parents[1] / "snapshots"
    (folder / "last.tmp").write_text("the last of rank " + os.environ["RANK"])
    (folder / "last.tmp").rename(folder / ("last%s.pt" % os.environ["RANK"]))
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(600)
"""


def test_a_stop_leaves_the_time_to_save_and_to_copy_it_to_another_node(agents: Agents) -> None:
    agents.start(SAVES_WHEN_STOPPED, grace_s=20.0)
    until(lambda: [log.read_text() for log in agents.folder.glob("n*/logs/rank*.log")] == ["up\n"] * 2)

    def stop(name: str) -> Any:
        folder = str(agents.node_dir(name))
        return agents.channels[name].call("stop", timeout_s=60, node_dir=folder, grace_s=30.0)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(stop, ("n0", "n1"))) == [{"was": "running", "killed": False}] * 2
    kept = [path.read_text() for path in sorted(agents.folder.glob("n*/kept/blobs/**/*")) if path.is_file()]
    assert kept == ["the last of rank 1", "the last of rank 0"], "each node has the other's"


def test_workers_die_with_an_agent_that_is_killed(agents: Agents) -> None:
    agents.start(FOREVER, num_nodes=1)
    until(lambda: list(agents.folder.glob("n0/logs/*")) and agents.log(0) == "up\n")
    agent = json.loads((agents.node_dir("n0") / "agent.json").read_text())["pid"]
    (worker,) = until(lambda: agents.status("n0").get("workers"))  # told a moment after the rank has begun
    os.kill(agent, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{worker['pid']}").exists())
    # Its last word; that it is not alive tells the rest.
    assert agents.wait("n0", "gone")["state"] == "running"


@pytest.mark.parametrize("how", ["was removed", "is another agent's"])
def test_an_agent_that_nobody_finds_by_its_folder_any_more_ends_with_its_ranks(
    agents: Agents, how: str
) -> None:
    agents.start(FOREVER, num_nodes=1)
    agents.wait("n0", "running")
    folder = agents.node_dir("n0")
    with (folder / "agent.log").open() as log:
        if how == "was removed":
            shutil.rmtree(folder)
        else:
            (folder / "agent.json").write_text('{"pid": 1, "start_time": 1, "boot_id": "of another agent"}')
        no_process_left(agents.marker, timeout_s=60)
        assert f"{folder} {how}: nobody could stop this " in log.read()
    if how == "was removed":
        assert not folder.exists()
    else:
        told = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
        assert "agent-ended" not in told, "it would be taken for the other agent's end"


def test_a_node_that_is_no_majority_waits_until_it_is_granted_one(agents: Agents) -> None:
    agents.start(FOREVER, min_nodes=1)
    for name in ("n0", "n1"):
        agents.wait(name, "running")
    os.kill(json.loads((agents.node_dir("n1") / "agent.json").read_text())["pid"], signal.SIGKILL)
    until(lambda: agents.status("n0").get("no_quorum"), what="that half is no majority")
    assert agents.status("n0")["workers"] == []
    granted = {"generation": 0, "version": 1, "nodes": ["n0"]}
    node_dir = str(agents.node_dir("n0"))
    agents.channels["n0"].call("set_voters", timeout_s=ANSWER_S, node_dir=node_dir, voters=granted)
    assert agents.wait("n0", "running")["world_size"] == 1


def test_a_fence_ends_a_generation_and_the_call_into_the_next_one_begins_it(agents: Agents) -> None:
    agents.start(FOREVER, num_nodes=1)
    (before,) = agents.wait("n0", "running")["workers"]
    node_dir = str(agents.node_dir("n0"))
    agents.channels["n0"].call("fence", timeout_s=ANSWER_S, node_dir=node_dir, generation=1)
    assert agents.wait("n0", "fenced")["workers"] == []
    assert not Path(f"/proc/{before['pid']}").exists()
    spec = agents.spec("n0", generation=1, master_port=agents.status("n0")["held_port"])
    agents.channels["n0"].call("join", timeout_s=ANSWER_S, node_dir=spec.node_dir, spec=spec.to_dict())
    assert agents.wait("n0", "running")["attempt"].startswith("1.")


RUNS_AGAIN = """
import os, pathlib, resource, sys, time
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
sys.exit("as asked" if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""


def test_an_agent_outlives_that_strangers_have_all_its_descriptors(agents: Agents, tmp_path: Path) -> None:
    agents.start(RUNS_AGAIN, str(tmp_path / "go"), python=sys.executable, max_restarts=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for name in ("n0", "n1"):
        agents.wait(name, "running")
    # Unbuffered, python writes a line and its end one after the other.
    until(lambda: list(agents.folder.glob("n*/logs/rank0-*")) and agents.log(0).endswith("\n"))
    assert agents.log(0) == f"{soft}\n", "a rank has the limit that it always had"
    pid = json.loads((agents.node_dir("n0") / "agent.json").read_text())["pid"]
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == min(hard, descriptors.MOST)
    folder = Path(f"/proc/{pid}/fd")
    limit = max(int(each.name) for each in folder.iterdir()) + 20
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    with strangers.silent(agents.status("n0")["port"], 200):
        until(lambda: len(list(folder.iterdir())) >= limit - 1)
        (tmp_path / "go").touch()  # another round needs another store for its ranks
        until(lambda: "file descriptors" in (agents.node_dir("n0") / "agent.log").read_text())
    for name in ("n0", "n1"):
        assert agents.wait(name, "succeeded")["state"] == "succeeded"
    assert f"all {limit} file descriptors of the agent were in use" in agents.status("n0")["notice"]


def test_agents_outlive_the_link_that_started_them(agents: Agents) -> None:
    agents.start(FOREVER, num_nodes=1)
    agents.wait("n0", "running")
    agents.channels["n0"].close()
    from nodekit.deploy.connect.channel import open_local

    agents.channels["n0"] = open_local("n0", sys.executable)
    assert agents.status("n0")["alive"]


def test_an_agent_that_never_got_its_go_ends_with_its_link(agents: Agents) -> None:
    agents.start(FOREVER, num_nodes=1, go=False)
    until(lambda: any("nodekit.deploy.agent" in line for line in processes_of(agents.marker).values()))
    agents.channels.pop("n0").close()
    until(lambda: not processes_of(agents.marker))


def test_of_two_starts_under_way_at_once_only_one_has_an_agent(agents: Agents) -> None:
    """The one that was begun first hears so, and the agent that it had started ends."""
    agents.start(FOREVER, num_nodes=1, go=False)
    # What kit has started, and, once that has asked for it, the fork that it stands for.
    first = until(
        lambda: {pid for pid, line in processes_of(agents.marker).items() if "nodekit.deploy.agent" in line}
    )
    port = agents.channels["n0"].call("hold_port", timeout_s=ANSWER_S, address="127.0.0.1")
    with pytest.raises(HostError, match="another request has started an agent here meanwhile"):
        agents._start(agents.spec("n0", master_port=port))  # its agent has no such socket
    assert not (agents.node_dir("n0") / "spec.json").exists()

    port = agents.channels["n0"].call("hold_port", timeout_s=ANSWER_S, address="127.0.0.1")
    agents.start_again("n0", master_port=port)
    # It reads that its stdin has ended after its imports.
    until(lambda: first.isdisjoint(processes_of(agents.marker)))
    agents.wait("n0", "running")


def test_where_the_agent_has_been_killed_nobody_listens(agents: Agents) -> None:
    """Others hear that the rendezvous is gone, though kit is still connected to the host."""
    agents.start(FOREVER, num_nodes=1, python=sys.executable)
    port = agents.wait("n0", "running")["port"]
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    os.kill(json.loads((agents.node_dir("n0") / "agent.json").read_text())["pid"], signal.SIGKILL)
    agents.wait("n0", "gone")

    def is_refused() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            return True
        return False

    until(is_refused, timeout_s=15, what="the fork server's end")


def test_a_command_that_does_not_exist_is_named(agents: Agents) -> None:
    agents.start("", num_nodes=1, argv=("./no such", "x"))
    status = agents.wait("n0", "failed")
    assert status["failures"][0]["exitcode"] == 127
    assert "kit: cannot run './no such'" in status["failures"][0]["error"]


def test_a_rank_that_would_train_on_the_cpu_in_place_of_its_gpu_ends_the_job_at_once(agents: Agents) -> None:
    agents.start(FOREVER, num_nodes=1, env={"NODEKIT_NUM_GPUS": "2"}, max_restarts=5)
    status = agents.wait("n0", "failed")
    (failure,) = status["failures"]
    assert "kit: 2 GPU(s) are planned for this node, and torch" in failure["error"]


def test_a_node_without_the_address_it_is_to_listen_on_says_so(agents: Agents) -> None:
    agents.start(FOREVER, num_nodes=1, local_addr="203.0.113.1")
    ended = until(lambda: (status := agents.status("n0")).get("state") == "ended" and status)
    assert re.search(r"no interface of \S+ has the address 203\.0\.113\.1 to listen on$", ended["message"])
    assert ended["cure"] == "see `ip addr` there"


def test_who_is_missing_is_said_once_a_node_has_looked_who_is_there(agents: Agents) -> None:
    spec = agents.spec("n1", num_nodes=3, min_nodes=2)
    assert spec.who_is_missing([]) == "", "it is there itself"
    assert spec.who_is_missing([1]) == "1 of at least 2 nodes are here, without n0, n2"
    assert spec.who_is_missing([1, 2]) == ""


def test_progress_is_told_by_the_least_advanced_rank(agents: Agents) -> None:
    agents.start(
        "import os, time\nopen(os.environ['NODEKIT_PROGRESS_FILE'], 'w').write('7/9 loss 0.5')\ntime.sleep(600)",
        num_nodes=1,
    )
    until(lambda: agents.status("n0").get("progress") == "7/9 loss 0.5")


@pytest.mark.parametrize("delay_s", [1.5, 1.6, 1.7, 1.8])
def test_a_stop_is_heard_also_while_workers_end(agents: Agents, delay_s: float) -> None:
    agents.start("import time; time.sleep(1.5)", num_nodes=1)
    agents.wait("n0", "running", "waiting", "succeeded")  # it may be over before it is looked at
    time.sleep(delay_s)  # upstream swallows a signal at some of these moments
    start = time.monotonic()
    agents.channels["n0"].call("stop", timeout_s=120, node_dir=str(agents.node_dir("n0")), grace_s=60.0)
    # Of 15 s, as they once were, a machine that stands still takes half.
    assert time.monotonic() - start < 45, "one that is not heard is killed after 60 s"


def test_an_agent_deep_in_torch_without_workers_is_not_waited_for(agents: Agents) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # accepts, and never answers
        agents.start(FOREVER, num_nodes=1, go=False)
        spec = agents.spec("n0", "job.py", master_port=nobody.getsockname()[1])
        agents.channels["n0"].call("start", timeout_s=10, node_dir=spec.node_dir, spec=spec.to_dict())
        agents.wait("n0", "starting")
        start = time.monotonic()
        found = agents.channels["n0"].call("stop", timeout_s=60, node_dir=spec.node_dir, grace_s=40.0)
        assert found["was"] == "running"
        assert time.monotonic() - start < 30, "it is waited for 40 s"


# What each rank comes to, and after how many seconds: the exit code, negative for a signal.
WELL, FAILS, KILLED, ABORTED, STOPS = 0, 7, -signal.SIGKILL, -signal.SIGABRT, 143
ENDS: dict[int, list[list[tuple[int, float]]]] = {
    2: [
        [(WELL, 0.0), (FAILS, 0.0)],
        [(FAILS, 0.3), (WELL, 0.0)],
        [(WELL, 0.0), (KILLED, 0.6)],
        [(WELL, 0.4), (ABORTED, 0.0)],
        [(STOPS, 0.5), (WELL, 0.0)],
    ],
    3: [
        [(FAILS, 1.0), (WELL, 0.0), (WELL, 0.0)],  # the rendezvous host, long after the others
        [(WELL, 0.0), (WELL, 0.0), (FAILS, 1.0)],
        [(WELL, 0.0), (WELL, 0.0), (KILLED, 0.0)],
        [(WELL, 0.3), (KILLED, 0.6), (WELL, 0.0)],
        [(ABORTED, 0.2), (WELL, 0.3), (FAILS, 0.4)],
        [(WELL, 0.0), (STOPS, 0.7), (WELL, 0.5)],
        [(WELL, 0.0), (FAILS, 0.0), (KILLED, 0.7)],
        *([(WELL, 0.05 * n), (WELL, 0.0), (FAILS, 0.05 * n)] for n in range(8)),
    ],
}
ENDS_SO = """
import json, os, signal, sys, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
open(os.environ["NODEKIT_PROGRESS_FILE"], "w").write(str(attempt + 1))
ends = json.loads(sys.argv[1])
code, after_s = ends[attempt][rank] if attempt < len(ends) else (0, 0.3 * rank)
time.sleep(after_s)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("num_nodes", "nproc"), [(1, 2), (2, 1), (3, 1)], ids=["two-ranks", "two-nodes", "three-nodes"]
)
def test_a_job_has_succeeded_when_every_rank_of_one_round_has(
    agents: Agents, num_nodes: int, nproc: int
) -> None:
    ends = ENDS[num_nodes * nproc]
    agents.start(ENDS_SO, json.dumps(ends), num_nodes=num_nodes, nproc_per_node=nproc, max_restarts=99)
    names = [f"n{number}" for number in range(num_nodes)]
    # Up to sixteen rounds, one after the other: on a slow machine they may well take more than 120 s.
    found = {name: agents.wait(name, "succeeded", timeout_s=240) for name in names}
    assert {each["state"] for each in found.values()} == {"succeeded"}
    for attempt in range(len(ends) + 1):
        for rank in range(num_nodes * nproc):
            agents.log(rank, f"0.{attempt}")  # there was a worker of it
    assert not list(agents.folder.glob(f"n*/logs/rank*-attempt0.{len(ends) + 1}.log"))
    failures = [each for status in found.values() for each in status["failures"]]
    told = {(each["attempt"], each["rank"], each["exitcode"]) for each in failures}
    for attempt, codes in enumerate(ends):
        ranks = {rank: code for rank, (code, _) in enumerate(codes) if code not in (WELL, STOPS)}
        said = {(rank, code) for number, rank, code in told if number == f"0.{attempt}"}
        assert said <= ranks.items() | {(rank, -signal.SIGKILL) for rank in range(3)}, attempt
        # Which of several comes first is the machine's to say, for they do not begin at one moment.
        assert not ranks or said & ranks.items(), attempt


def test_a_rank_that_fails_last_fails_the_job_on_every_node(agents: Agents) -> None:
    script = ENDS_SO.replace("sys.exit(code)", "raise OSError('the final save')")
    ends = [[(WELL, 0.0), (WELL, 0.0), (WELL, 0.0)]]
    script = script.replace("raise", "if rank == 0: time.sleep(1); raise")
    agents.start(script, json.dumps(ends), num_nodes=3)
    found = {name: agents.wait(name, "failed") for name in ("n0", "n1", "n2")}
    assert {each["state"] for each in found.values()} == {"failed"}
    (failure,) = found["n0"]["failures"]
    assert (failure["rank"], failure["error"].splitlines()[-1]) == (0, "OSError: the final save")
    assert found["n1"]["message"] == found["n2"]["message"] == "another node ended the job"
    assert found["n1"]["cause"] == found["n2"]["cause"] == "ended-elsewhere"


LOST_AT_THE_END = """
import os, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt == 0 and rank == 1:
    time.sleep(600)
"""


def kill(agents: Agents, name: str) -> None:
    os.kill(json.loads((agents.node_dir(name) / "agent.json").read_text())["pid"], signal.SIGKILL)


def test_a_node_lost_before_its_ranks_have_ended_has_the_others_start_again(agents: Agents) -> None:
    agents.start(LOST_AT_THE_END, num_nodes=3, min_nodes=2)
    for name in ("n0", "n2"):
        done = until(lambda name=name: agents.status(name).get("waits_for") == ["n1"] and agents.status(name))
        assert done["state"] == "waiting"
        line = status_line(done, now=done["done_at"] + 12)
        assert "ended well 12 s ago, waiting for n1" in line
        line = status_line(done, now=done["done_at"] - 0.4)  # its clock is known by no more than that
        assert "ended well 0 s ago" in line
    kill(agents, "n1")
    for name in ("n0", "n2"):
        assert agents.wait(name, "succeeded")["state"] == "succeeded"
        events = (agents.node_dir(name) / "events.jsonl").read_text()
        assert re.search(r'"kind": "membership", "lost": \d, "waiting": \d, "names": \["(n0", ")?n1"', events)
        assert '"attempt": "0.1"' in events


def test_a_node_lost_after_its_ranks_have_ended_well_is_not_missed(agents: Agents, tmp_path: Path) -> None:
    script = f"import os, time\nwhile os.environ['RANK'] == '1' and not os.path.exists({str(tmp_path / 'go')!r}):\n"
    agents.start(script + "    time.sleep(0.05)\n", num_nodes=3, min_nodes=2)
    # What n2 says itself it may say before it has told the others that it is done.
    until(lambda: agents.status("n0").get("waits_for") == ["n1"])
    kill(agents, "n2")
    until(lambda: not agents.status("n2")["alive"])
    time.sleep(2)  # for those who are left to see it
    assert [agents.status(name)["attempt"] for name in ("n0", "n1")] == ["0.0", "0.0"]
    (tmp_path / "go").touch()
    for name in ("n0", "n1"):
        assert agents.wait(name, "succeeded")["attempt"] == "0.0"


def test_who_loses_the_rendezvous_before_all_have_ended_does_not_call_it_success(agents: Agents) -> None:
    agents.start(LOST_AT_THE_END.replace("rank == 1", "rank == 0"), num_nodes=2)
    until(lambda: agents.status("n1").get("waits_for") == ["n0"])
    kill(agents, "n0")
    assert agents.wait("n1", "orphaned")["alive"]


def test_a_worker_that_does_not_end_when_the_others_have_is_a_hang(agents: Agents) -> None:
    script = "open(os.environ['NODEKIT_PROGRESS_FILE'], 'w').write('9/9')\n"
    script += "if dist.get_rank() == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
    script += "    import time; time.sleep(600)\n"
    # Of a time in which the machine stands still, 5 s count at most: with less, that alone is a hang.
    agents.start(ALL_REDUCE + script + END, hang=8.0)
    for name in ("n0", "n1"):
        assert agents.wait(name, "succeeded")["attempt"] == "0.1"
    events = (agents.node_dir("n1") / "events.jsonl").read_text()
    assert '"lingering"' in events
    assert "time.sleep" in events or "job.py" in events, "with the stack, to see why"


def test_hangs_without_a_step_are_not_restarted_for_ever(agents: Agents) -> None:
    script = "import time\nif dist.get_rank() == 1:\n    time.sleep(600)\n"
    agents.start(ALL_REDUCE + script + "dist.all_reduce(total)\n" + END, hang=2.0, max_restarts=1)
    for name in ("n0", "n1"):
        # Each time all stacks are read, for which the agents alone take up to 25 s.
        status = agents.wait(name, "failed", timeout_s=120)
        assert (status["attempt"], status["message"]) == ("0.1", "2 hangs without progress")
        assert status["no_progress"]


def test_what_rank_0_prints_of_its_training_counts_for_a_rank_of_another_node(agents: Agents) -> None:
    # It is read every second or so, and once two epochs were seen, that counts for the later attempts as well.
    script = "import time\nfor epoch in range(6 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 1):\n"
    script += "    if dist.get_rank() == 0:\n        print('epoch', epoch, flush=True)\n"
    script += "    time.sleep(1.6)\n    dist.all_reduce(total)\n"
    script += "if dist.get_rank() == 1:\n    raise ValueError('boom')\ndist.all_reduce(total)\n"
    agents.start(ALL_REDUCE + script + END, max_restarts=2)
    assert agents.wait("n1", "failed")["message"] == "3 crashes without progress"
    assert agents.wait("n0", "failed")["attempt"] == "0.2"


def test_the_last_words_of_an_agent_are_its_own(agents: Agents) -> None:
    """Those of an agent before it, in the same file, are about another end."""
    agents.start("import time; time.sleep(600)", num_nodes=1)
    with (agents.node_dir("n0") / "agent.log").open("a") as log:
        log.write("of the first\n")
    os.kill(int(agents.wait("n0", "running")["agent"].partition(".")[0]), signal.SIGKILL)
    assert "of the first" in agents.wait("n0", "gone")["agent_log"]
    agents.start_again("n0", generation=1, is_host=False)
    os.kill(int(agents.status("n0")["agent"].partition(".")[0]), signal.SIGKILL)
    assert "of the first" not in agents.wait("n0", "gone")["agent_log"]
