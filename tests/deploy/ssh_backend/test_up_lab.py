"""`kit up` on three real hosts over real SSH: each with its own disk, its own interface name, no shared folder."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from agents import until
from kit_runs import Kit, run_id, slow_training

from nodekit.deploy.host import current_status

pytestmark = pytest.mark.lab

END_S = 60
"""For the end of kit after a Ctrl-C or `kit down`: of 15 s, or 30, a stall takes half, and a busy machine the rest."""
DDP = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.ones(1)
dist.all_reduce(total)
"""
# The digits, slowly while a file is there, so that something can happen in the middle of a run.
SLOW = """
import os, time
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    def loss(self, model, batch):
        time.sleep(0.4 if os.path.exists("/root/hold") else 0)
        return super().loss(model, batch)
"""
FOREVER = (
    DDP + "print('rank', rank, 'is up', flush=True)\nwhile True: dist.all_reduce(total); time.sleep(0.1)\n"
)


def test_a_fresh_control_folder_trains_digits_to_its_accuracy(kit: Kit) -> None:
    kit.inventory()
    done = kit.run("up", "lab.yaml", "--", "-m", "nodekit.training", "--epochs", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(r"trained to the end in \d+ s, accuracy (\d+\.\d+)%", done.stdout)
    assert match, done.stdout
    assert float(match.group(1)) >= 97
    assert re.search(r"^node1:0 +\| ", done.stdout, re.MULTILINE)
    found = run_id(done.stdout)
    assert f"node1:/root/nodekit/runs/{found}/node1/snapshots" in done.stdout
    assert kit.on_host("node3", "ls", f"/root/nodekit/runs/{found}/node3/snapshots").split()
    listed = json.loads(kit.run("runs", "--json").stdout)
    assert [(run["run_id"], run["state"]) for run in listed] == [(found, "succeeded")]
    assert "accuracy" in kit.run("logs", "--rank", "0").stdout
    assert kit.run("status").stdout.count("succeeded") == 4
    assert not kit.leftovers()


HARD_ARGS = [
    "a b",
    "it's",
    '"q"',
    "$HOME",
    "$$",
    "${local_rank}",
    "; rm",
    "new\nline",
    "ünï ✓",
    "",
    "--lr=1",
    "*",
]


def test_a_users_torchrun_script_runs_unchanged_from_a_repository_with_packages_of_our_names(
    kit: Kit,
) -> None:
    for package in ("training", "deploy"):
        (kit.folder / package).mkdir()
        (kit.folder / package / "__init__.py").write_text("")
    (kit.folder / "training/trainer.py").write_text('def name():\n    return "the user\'s trainer"\n')
    (kit.folder / "deploy/target.py").write_text('NAME = "the user\'s target"\n')
    (kit.folder / "job.py").write_text(
        DDP + "import json\nfrom training.trainer import name\nfrom deploy.target import NAME\n"
        "print(json.dumps([rank, int(total), name(), NAME, os.environ['GLOO_SOCKET_IFNAME'], sys.argv[1:]]))\n"
        "dist.destroy_process_group()\n"
    )
    kit.inventory()
    done = kit.run("up", "lab.yaml", "--", "job.py", *HARD_ARGS)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(line.split("| ", 1)[1]) for line in done.stdout.splitlines() if "the user's" in line]
    assert {each[0] for each in said} == {0, 1, 2}
    for rank, world_size, trainer, target, interface, argv in said:
        assert (world_size, trainer, target) == (3, "the user's trainer", "the user's target")
        assert kit.lab is not None
        assert interface == kit.lab.hosts[f"node{rank + 1}"].interface
        assert argv == HARD_ARGS
    assert len({each[4] for each in said}) == 3, "the hosts' interfaces have different names"


def test_a_dry_run_prints_the_plan_and_runs_nothing(kit: Kit) -> None:
    kit.inventory(job={"command": ["job.py", "a b"], "secrets": ["TOKEN"]})
    (kit.folder / "job.py").write_text("")
    done = kit.run("up", "lab.yaml", "--dry-run", "--json", env={"TOKEN": "s3cr3t-value"})
    assert done.returncode == 0, done.stderr
    nodes = json.loads(done.stdout)["nodes"]
    assert kit.lab is not None
    assert [(n["name"], n["node_rank"], n["interface"], n["local_addr"]) for n in nodes] == [
        (host.name, rank, host.interface, host.address) for rank, host in enumerate(kit.lab.hosts.values())
    ]
    assert {n["master_addr"] for n in nodes} == {nodes[0]["local_addr"]}
    assert nodes[0]["argv"] == ["python", "-u", "job.py", "a b"]
    assert "s3cr3t" not in done.stdout
    assert "secrets     TOKEN" in kit.run("up", "lab.yaml", "--dry-run", env={"TOKEN": "x"}).stdout
    assert not kit.leftovers()
    assert kit.run("runs").stdout.startswith("no run on record")


def test_a_secret_is_nowhere_but_in_the_workers_environment(kit: Kit) -> None:
    secret = "s3cr3t-value"
    (kit.folder / "job.py").write_text(FOREVER + "")
    kit.inventory(job={"command": ["job.py"], "secrets": ["TOKEN"]})
    kit.start("up", "lab.yaml", env={"TOKEN": secret})
    kit.wait_for("rank 2 is up")
    assert kit.lab is not None
    for host in kit.lab.hosts:
        assert not [argv for argv in kit.lab.processes(host).values() if any(secret in part for part in argv)]
        carriers = kit.on_host(
            host,
            "sh",
            "-c",
            f"cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c '^TOKEN={secret}$'",
        )
        assert int(carriers) >= 2  # the agent and its worker
        # Without the gigabytes of python's own.
        argv = ["grep", "-rl", "--exclude-dir=lib", secret, "/root", "/tmp"]
        found = kit.lab.run(host, argv, capture_output=True, text=True)
        assert found.stdout == ""
    state = Path(os.environ["XDG_STATE_HOME"])
    for path in state.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # kit, which runs, has replaced it
            assert not path.is_file() or secret not in path.read_text(errors="replace"), path
    assert secret not in kit.log()
    assert secret not in subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
    assert kit.run("down").returncode == 0


def test_a_secret_that_is_not_set_is_refused_before_anything_starts(kit: Kit) -> None:
    kit.inventory(job={"secrets": ["NOT_SET_HERE"]})
    done = kit.run("up", "lab.yaml")
    assert done.returncode == 1
    assert "job.secrets names NOT_SET_HERE, not set in this environment" in done.stderr


def other_key(kit: Kit) -> str:
    assert kit.lab is not None
    line = kit.lab.known_hosts.read_text().splitlines()[1].split()
    other = kit.lab.known_hosts.read_text().splitlines()[0].split()
    return " ".join([line[0], other[1], other[2]]) + "\n"


def with_hosts(kit: Kit, host: str, **changes: object) -> None:
    """The lab's inventory with one host changed."""
    import yaml

    path = kit.inventory()
    values = yaml.safe_load(path.read_text())
    values["hosts"][host] = {**(values["hosts"][host] or {}), **changes}
    path.write_text(yaml.safe_dump(values))


def unknown_key(kit: Kit) -> None:
    (kit.folder / "known").write_text("")
    with_hosts(kit, "node2", known_hosts="known")


def changed_key(kit: Kit) -> None:
    (kit.folder / "known").write_text(other_key(kit))
    with_hosts(kit, "node2", known_hosts="known")


def torch_version_file() -> str:
    import torch

    return str(Path(torch.__file__).with_name("version.py"))


def another_torch(kit: Kit) -> None:
    """On node2 alone another file is seen where torch says its version; python's folders may be read-only there."""
    kit.inventory()
    text = re.sub(
        "^__version__ = .*$", "__version__ = '2.12.1'", Path(torch_version_file()).read_text(), flags=re.M
    )
    kit.on_host("node2", "sh", "-c", 'printf %s "$1" >/root/version.py', "sh", text)
    kit.on_host("node2", "mount", "--bind", "/root/version.py", torch_version_file())


def own_script(kit: Kit) -> None:
    for host in ("node1", "node3"):
        kit.on_host(host, "install", "-D", "/bin/true", "/root/.cache/own/train")
    kit.inventory(job={"command": ["/root/.cache/own/train"]})


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        pytest.param(unknown_key, r"node2: .*(not known|unknown).*ssh-keyscan", id="unknown host key"),
        pytest.param(changed_key, r"node2: .*(?i:changed).*ssh-keygen -R", id="changed host key"),
        pytest.param(
            lambda kit: with_hosts(kit, "node2", user="nobody"), r"node2: .*'?nobody'?", id="wrong user"
        ),
        pytest.param(
            lambda kit: with_hosts(kit, "node2", address="198.18.255.254"),
            r"node2: .*198\.18\.255\.254",
            id="unreachable address",
        ),
        pytest.param(
            lambda kit: with_hosts(kit, "node2", python="/opt/none/bin/python"),
            r"node2: its python does not run \(.*/opt/none/bin/python.*\); set `python:` to an interpreter there",
            id="no python",
        ),
        pytest.param(
            another_torch,
            r"node2: torch 2\.12\.1, but 2 of the hosts have 2\.13\.0.*pip install torch==2\.13\.0",
            id="another torch",
        ),
        pytest.param(
            own_script,
            r"node2: no /root/.cache/own/train there, which the command runs; lay it at the same place on each host",
            id="a script that it lacks",
        ),
    ],
)
def test_a_host_that_will_not_do_is_refused_soon_with_its_name_and_the_cure(
    kit: Kit, breaks: object, says: str
) -> None:
    assert callable(breaks)
    breaks(kit)
    start = time.monotonic()
    try:
        done = kit.run("up", "lab.yaml")
    finally:
        if breaks is another_torch:
            kit.on_host("node2", "umount", torch_version_file())
    # On a busy machine 40 s, as it once was, may go by without TCP.
    assert time.monotonic() - start < 100, "TCP would try for two minutes"
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(says, done.stderr, re.DOTALL), done.stderr
    assert not [line for line in done.stderr.splitlines() if re.match(r"(kit: )?node[13]:", line)]
    assert not kit.leftovers()


def test_one_host_that_fails_to_start_stops_the_others(kit: Kit) -> None:
    (kit.folder / "job.py").write_text(FOREVER)
    kit.inventory()
    kit.on_host("node2", "mkdir", "-p", "/root/nodekit/runs")
    kit.on_host("node2", "mount", "-t", "tmpfs", "-o", "ro", "none", "/root/nodekit/runs")
    try:
        done = kit.run("up", "lab.yaml", "--", "job.py")
    finally:
        kit.on_host("node2", "umount", "/root/nodekit/runs")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"node2: .*Read-only file system", done.stderr)
    assert not kit.leftovers()


def test_the_rank_that_raises_is_the_verdict_with_its_own_traceback(kit: Kit) -> None:
    (kit.folder / "job.py").write_text(
        DDP + "if rank == 1:\n    raise ValueError('boom in rank 1')\nwhile True: dist.all_reduce(total)\n"
    )
    kit.inventory(num_hosts=2, job={"command": ["job.py"], "max_restarts": 0})
    done = kit.run("up", "lab.yaml")
    assert done.returncode == 3, done.stdout + done.stderr
    end = done.stdout[done.stdout.index(" failed: rank") :]
    # gloo's threads may abort the interpreter as it ends, after the traceback: upstream's, and as good a failure
    assert re.search(r"rank 1 on node2 failed first \((exit status 1|killed by SIGABRT)\)", end)
    assert "ValueError: boom in rank 1" in end
    assert "the other rank ended" in end or "1 other rank ended because of it" in end
    assert "closed by peer" not in end
    assert not kit.leftovers()


def test_a_rank_that_fails_when_those_of_other_hosts_have_ended_well_fails_the_job(kit: Kit) -> None:
    (kit.folder / "job.py").write_text(
        "import os, pathlib, time\nprint('up', flush=True)\nif os.environ['RANK'] == '0':\n"
        "    go = pathlib.Path(os.environ['NODEKIT_OUTPUT_DIR']).with_name('go')\n"
        "    while not go.exists(): time.sleep(0.05)\n    raise OSError('the final save')\n"
    )
    kit.inventory(num_hosts=2, job={"command": ["job.py"], "max_restarts": 0})
    up = kit.start("up", "lab.yaml")
    kit.wait_for("| up")
    assert kit.lab is not None
    runs = {host: f"root/nodekit/runs/{run_id(kit.log())}/{host}" for host in ("node1", "node2")}
    node2 = str(kit.lab.folder / "hosts/node2/upper" / runs["node2"])

    def state() -> str | None:
        return current_status.statuses(node2).get("node2", {}).get("state")

    # After a few seconds alone, the other rank of a busy machine might not have ended yet.
    until(lambda: state() == "waiting", what="the good end of the other rank")
    kit.on_host("node1", "touch", f"/{runs['node1']}/go")
    assert up.wait(60) == 3, kit.log()
    assert "1 other rank had ended well" in kit.log()
    assert "OSError: the final save" in kit.log()


def test_ctrl_c_stops_the_job_everywhere_and_says_so(kit: Kit) -> None:
    (kit.folder / "job.py").write_text(FOREVER)
    kit.inventory(num_hosts=2)
    up = kit.start("up", "lab.yaml", "--", "job.py")
    kit.wait_for("rank 1 is up")
    os.kill(up.pid, signal.SIGINT)
    assert up.wait(END_S) == 130
    assert "is stopped on 2 nodes" in kit.log()
    assert not kit.leftovers()


def test_a_second_ctrl_c_kills_a_job_that_is_deaf_to_the_first(kit: Kit) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    (kit.folder / "job.py").write_text(deaf + FOREVER)
    kit.inventory(num_hosts=2)
    up = kit.start("up", "lab.yaml", "--", "job.py")
    kit.wait_for("rank 1 is up")
    os.kill(up.pid, signal.SIGINT)
    kit.wait_for("Ctrl-C again kills it at once")
    os.kill(up.pid, signal.SIGINT)
    assert up.wait(END_S) == 130
    assert not kit.leftovers()


def test_a_killed_control_process_leaves_the_job_running_and_kit_up_attaches_again(kit: Kit) -> None:
    (kit.folder / "job.py").write_text(FOREVER)
    kit.inventory(num_hosts=2)
    up = kit.start("up", "lab.yaml", "--", "job.py")
    kit.wait_for("rank 1 is up")
    up.kill()
    up.wait()
    before = kit._processes()
    assert len([host for host in before if before[host]]) == 2
    status = kit.run("status")
    assert status.stdout.count("running") >= 2, status.stdout
    again = kit.start("up", "lab.yaml", "--", "job.py")
    kit.wait_for("attached to ")
    workers = {
        host: {pid for pid, line in found.items() if "job.py" in line} for host, found in before.items()
    }
    now = {
        host: {p for p, line in found.items() if "job.py" in line} for host, found in kit._processes().items()
    }
    assert now == workers, "attaching starts nothing"
    assert kit.run("down").returncode == 0
    assert again.wait(END_S) == 130
    assert not kit.leftovers()


def test_two_runs_at_once_on_the_same_hosts_do_not_touch_each_other(kit: Kit) -> None:
    (kit.folder / "job.py").write_text(
        DDP + "open('mine', 'x').write(sys.argv[1])\nprint('world', int(total), sys.argv[1], flush=True)\n"
        # Longer than it is waited for below: one rank that leaves by the clock leaves the other one alone.
        "until = time.time() + 240\nwhile True:\n    time.sleep(0.1)\n"
        "    go = torch.tensor(float(os.path.exists('/tmp/release')))\n"
        "    dist.all_reduce(go, op=dist.ReduceOp.MAX)\n"
        "    if go or time.time() > until: break\n"
        "assert open('mine').read() == sys.argv[1]\ndist.destroy_process_group()\n"
    )
    kit.inventory("a.yaml", num_hosts=2, name="a")
    kit.inventory("b.yaml", num_hosts=2, name="b")
    first = kit.start("up", "a.yaml", "--", "job.py", "one")
    second = kit.start("up", "b.yaml", "--", "job.py", "two")
    kit.wait_for("world 2 one")
    kit.wait_for("world 2 two")
    kit.on_host("node1", "touch", "/tmp/release")
    assert (first.wait(60), second.wait(60)) == (0, 0), kit.log()
    kit.on_host("node1", "rm", "/tmp/release")


def test_kit_down_and_up_again_goes_on_at_the_step_after_the_snapshot(kit: Kit) -> None:
    # No snapshot by the interval: what the run goes on from can only be the stop's own.
    command = [*slow_training(3)[:-1], "100000"]
    (kit.folder / "slow.py").write_text(SLOW)
    kit.inventory("whole.yaml", num_hosts=2, name="whole")
    done = kit.run("up", "whole.yaml", "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    unbroken = kit.metrics("node1", run_id(done.stdout))
    kit.inventory("again.yaml", num_hosts=2, name="again")
    kit.on_host("node1", "touch", "/root/hold")
    up = kit.start("up", "again.yaml", "--", *command)
    kit.wait_for("world size 2")
    until(lambda: _step_of(kit) > 5, timeout_s=60, what="step 5")
    assert kit.run("down").returncode == 0
    assert up.wait(END_S) == 130
    assert not kit.leftovers()
    kit.on_host("node1", "rm", "/root/hold")
    again = kit.run("up", "again.yaml", "--", *command)
    assert again.returncode == 0, again.stdout + again.stderr
    resumed = re.search(r"resumed at step (\d+)", again.stdout)
    assert resumed, again.stdout
    assert 5 <= int(resumed.group(1)) < 3 * 23, "in the middle of the run"
    curve = kit.metrics("node1", run_id(again.stdout))
    losses = [(line["step"], line["loss"]) for line in curve if "loss" in line]
    assert losses == [(line["step"], line["loss"]) for line in unbroken if "loss" in line]


def _step_of(kit: Kit) -> int:
    found = re.findall(r"step (\d+)/", kit.run("status").stdout)
    return max(map(int, found), default=0)
