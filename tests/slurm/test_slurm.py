"""Slurm's stories, each for real: on a cluster of three lab hosts with a shared folder, from the queue to the end.

Every story asserts that the fault happened, that training went on at the next step and came to the unbroken run's
result, and (by the `site` fixture) that no job, no process and no listening port is left anywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import listeners
import pytest
import submitit
import yaml
from agents import until
from free_ports import free_port
from kit_runs import RUN_ID
from packages import make_wheel
from slurm_runs import STARTED, STEPS, TRAIN, Site, Story

from nodekit.deploy.connect.channel import on_all
from nodekit.deploy.records import find_runs, record_files
from nodekit.slurm.allocation import allocation, handshake, requeue

# Slurm's own pauses are a minute in some of these stories, and a busy machine takes long for the rest: 300 s are few.
pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def unbroken() -> dict[int, float]:
    """The unbroken run's losses; filled by the first story."""
    return {}


@pytest.fixture
def story(site: Site, unbroken: dict[int, float]) -> Callable[..., Story]:
    """Makes a story; before the first one of the module goes the run that all are compared with."""
    if not unbroken:
        whole = Story(site, "whole", nodes=3).begin()
        assert whole.end() == 0, whole.said()
        unbroken.update(whole.curve())
    return lambda name, *args, **slurm: Story(site, name, *args, **slurm)


def test_a_job_from_the_queue_to_its_end(site: Site, unbroken: dict[int, float]) -> None:
    site.python = sys.executable  # Slurm is to see, and signal, all processes of the job
    whole = Story(site, "whole", nodes=3, time=None)
    whole.hold()
    whole.begin()
    wrong = Story(site, "wrong", ["job.py", "fails last", "1"], nodes=2, max_restarts=0).begin()
    whole.wait_for(STARTED)
    followed = site.folder / "followed"
    following = site.start(followed, "logs", "-f", whole.run_id)
    whole.wait_for(" running on node[1-3]")  # Slurm is asked every other second, and may say so after rank 0
    assert re.search(r"job \d+ running on node\[1-3\]", whole.said())
    assert whole.job()["TimeLimit"] == "04:00:00", "the partition's, where none was asked for"
    with site.without_controller():
        whole.wait_for("goes on, as far as is known: Slurm does not answer (login: scontrol show job")
        away = site.kit("status", whole.run_id)
    assert "goes on, as far as is known: Slurm does not answer" in away.stdout, away.stderr
    assert "node1  running" in away.stdout, "that is in the shared folder"
    node3 = r"node3 +running +rank 2 of 3"
    until(lambda: re.search(node3, site.kit("status", whole.run_id).stdout), what="word of node3")
    status = site.kit("status", whole.run_id)
    assert status.returncode == 0
    assert re.search(r"job \d+ running on node\[1-3\]", status.stdout), status.stdout
    assert re.search(node3, status.stdout), status.stdout
    for host, also in (
        ("node1", {listeners.STORE, listeners.KEEPALIVES, listeners.RANKS_STORE, listeners.LEADER}),
        ("node3", set()),
    ):
        found = listeners.found(
            site.lab, host, whole.run_dir / host, is_host=host == "node1", has_copies=False
        )
        wanted = {listeners.HELD, listeners.RANKS, *also}
        assert found == {who: listeners.told()[who] for who in wanted}
    assert wrong.end() == 3, wrong.said()
    assert "rank 0 on node" in wrong.said()
    assert "ValueError: so it is" in wrong.said()
    assert "1 other rank had ended well" in wrong.said()
    assert wrong.job()["Restarts"] == "0"
    assert whole.end() == 0, whole.said()
    assert f"{whole.run_id} trained to the end in" in whole.said()
    assert re.search(r"accuracy 9\d\.\d+%", whole.said())
    assert re.search(r"^node1:0 +\| epoch 6 done", whole.said(), re.MULTILINE)
    logs = site.kit("logs", whole.run_id, "--rank", "0").stdout
    assert "epoch 6 done" in logs
    assert following.wait(60) == 0, "it ends with the job"
    everything = site.kit("logs", whole.run_id).stdout
    assert sorted(followed.read_text().splitlines()) == sorted(everything.splitlines())
    fetched = site.kit("logs", whole.run_id, "--fetch")
    assert "logs of 3 nodes are in ~/.local/state/nodekit/runs/" in fetched.stdout, fetched.stderr
    assert site.kit("logs", whole.run_id).stdout == everything, "now from here"
    unbroken.update(whole.curve())
    assert sorted(unbroken) == list(range(1, STEPS + 1))
    runs = site.kit("runs").stdout
    assert re.search(rf"{whole.run_id}.*succeeded", runs), runs


def test_a_job_is_told_of_brought_here_shown_and_removed(site: Site, tmp_path: Path) -> None:
    told = site.lab.slurm.shared / "told"
    tell = ["sh", "-c", 'cat >> "$1"; echo >> "$1"', "tell", str(told)]  # on the leader's node, in the job
    run = Story(site, "seen", nodes=2)
    site.inventory("seen", TRAIN, {"nodes": 2}, logs={"fetch": True}, notify={"command": tell})
    port = free_port()
    refused = site.kit("up", run.file, "-d", "--metrics-port", str(port))
    assert (refused.returncode, "under Slurm nothing of kit stays on this machine" in refused.stderr) == (
        1,
        True,
    )
    run.hold()
    run.begin("--metrics-port", str(port))
    run.wait_for(STARTED)
    run_id = run.run_id
    wanted = [f'nodekit_node_up{{node="node{number}",run="{run_id}"}} 1.0' for number in (1, 2)]
    wanted += [f'nodekit_target_step{{run="{run_id}"}} {float(STEPS)}', "nodekit_goodput_ratio{"]

    def scraped() -> bool:
        with contextlib.suppress(OSError):
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
            return all(each in text for each in wanted)
        return False

    until(scraped, timeout_s=60, what=f"all of {wanted} at port {port}")
    assert run.end() == 0, run.said()
    messages = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(each["kind"], each["run"]) for each in messages] == [("start", run_id), ("end", run_id)]

    assert f"logs of 2 nodes are in ~/.local/state/nodekit/runs/{run_id}/" in run.said()
    fetched = sorted(path.parent.name for path in record_files.folder().glob(f"{run_id}/logs/*/rank*.log"))
    assert fetched == ["node1", "node2"]

    report = site.kit("report", run_id, "--output", str(tmp_path / "report.html"))
    assert report.returncode == 0, report.stderr
    page = (tmp_path / "report.html").read_text()
    assert f"of {STEPS}" in page
    assert all(name in page for name in ("node1", "node2"))

    log = tmp_path / "board"
    board = site.start(log, "board", run_id)
    url = until(
        lambda: re.search(r"http://127\.0\.0\.1:\d+/", log.read_text()), timeout_s=90, what="a board"
    )[0]
    asked = f"{url}data/plugin/scalars/scalars?run={run_id}&tag=train/loss"
    (drawn,) = run.run_dir.glob("*/output/tensorboard")
    lines = [json.loads(line) for line in (drawn.parent / "metrics.jsonl").read_text().splitlines()]

    def whole() -> Any:
        """The curve, once TensorBoard has read all of it: it shows what it has read so far."""
        found = _answer(asked)
        return found if found and found[-1][1] == STEPS else None

    curve = until(whole, timeout_s=60, what=f"a whole curve at {url}")
    steps = [step for _, step, _ in curve]  # of quick ones not all are drawn
    assert steps[0] == 1
    assert steps == sorted({*steps} & {line["step"] for line in lines if "loss" in line})
    board.send_signal(signal.SIGINT)
    assert board.wait(60) == 0, log.read_text()

    folder = site.shared / "runs" / run_id
    assert folder.is_dir()
    removed = site.kit("rm", run_id, "--yes")
    assert removed.returncode == 0, removed.stdout + removed.stderr
    assert not folder.exists()
    assert not (site.shared / "snapshots" / run_id).exists()
    assert run_id not in site.kit("runs").stdout


def _answer(url: str) -> Any:
    """What TensorBoard says there; None while it does not know that curve."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError:
        return None


def test_a_secret_is_nowhere_but_in_the_ranks_environment(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.python = sys.executable  # Slurm is to see, and signal, all processes of the job
    secret = "s3cr3t-of-the-ranks"
    monkeypatch.setenv("KIT_SECRET", secret)
    script = "import os, time\nprint(len(os.environ['KIT_SECRET']), 'letters', flush=True)\n"
    # Until all is looked through: of a few seconds, a stall of the machine may take all.
    script += "while os.path.exists(os.environ['HOLD']): time.sleep(0.1)\n"
    (site.folder / "tell.py").write_text(script)
    site.hold("secret").touch()
    path = site.inventory("secret", ["tell.py"], {"nodes": 1})
    values = yaml.safe_load(path.read_text())
    values["job"]["secrets"] = ["KIT_SECRET"]
    path.write_text(yaml.safe_dump(values))
    up = site.start(site.folder.parent / "secret.log", "up", path.name)
    (kept,) = until(lambda: list(site.shared.glob("runs/secret-*/slurm/secrets-*.json")), timeout_s=60)
    assert kept.stat().st_mode & 0o777 == 0o600
    until(lambda: f"{len(secret)} letters" in (site.folder.parent / "secret.log").read_text(), timeout_s=60)
    folders = (site.shared, *(site.lab.folder / "hosts").glob("*/upper"))  # Slurm's controller has one, too
    files = [Path(root, name) for each in folders for root, _, names in os.walk(each) for name in names]
    holding = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # the job, which goes on, has replaced it
            holding += [file] if file.is_file() and secret.encode() in file.read_bytes() else []
    assert holding == [kept], holding
    argvs = [" ".join(argv) for host in site.lab.hosts for argv in site.lab.processes(host).values()]
    assert not [argv for argv in argvs if secret in argv]
    site.hold("secret").unlink()
    assert up.wait(90) == 0
    assert not kept.exists()

    # Killed with all its processes, a job cannot remove it itself.
    site.hold("secret").touch()
    said = site.kit("up", path.name, "-d").stdout
    (run_id,) = RUN_ID.findall(said)
    here = site.shared / "runs" / run_id
    until(lambda: "letters" in "".join(log.read_text() for log in here.glob("*/logs/*.log")), timeout_s=60)
    # Stopped first: they look after each other, and Slurm ends them by SIGTERM when the batch script is gone.
    words = ("slurm_script", "submitit.core", "nodekit.deploy.agent", "sys.stdin.buffer", "tell.py")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        running = [each for host in site.lab.hosts for each in site.lab.processes(host).items()]
        for pid in [pid for word in words for pid, argv in running if word in " ".join(argv)]:
            with contextlib.suppress(ProcessLookupError):  # it has gone with one before it
                os.kill(pid, number)
    until(lambda: not site.queue(), timeout_s=60, what="the end of the job")
    assert len(list(here.glob("slurm/secrets-*.json"))) == 1
    assert site.kit("status", run_id).stdout.startswith(f"{run_id}  failed")
    assert not list(here.glob("slurm/secrets-*.json"))


def test_stopped_and_taken_up_again_through_a_login_node(
    site: Site, story: Callable[..., Story], unbroken: dict[int, float]
) -> None:
    address = site.lab.hosts["node2"].address
    run = story("login", nodes=3, login=f"root@{address}")
    run.hold()
    left = site.kit("up", run.file, "-d")
    run.log.write_text(left.stdout)
    assert left.returncode == 0, left.stderr
    assert "is queued: kit up login.yaml attaches to it" in left.stdout
    record = find_runs.find(run.run_id)  # as where kit up was killed before it knew the job's id
    job_id, record.slurm["job_id"], record.state = record.slurm["job_id"], "", "starting"
    record.save()
    run.begin()
    run.wait_for(f"attached to {run.run_id}, job {job_id};")
    run.wait_for(STARTED)
    assert run.interrupt(signal.SIGKILL) == -signal.SIGKILL
    first = run.wait_more()
    assert run.job()["JobState"] == "RUNNING"
    run.begin()
    run.wait_for("attached to", 2)
    run.wait_for(" running on node[1-3]", 2)  # it watches
    for pid, argv in site.lab.processes("node2").items():  # a laptop that slept, say
        if argv[0].startswith("sshd: root"):
            os.kill(pid, signal.SIGKILL)
    run.wait_for("login: reached again")
    assert "; the job goes on, and kit logs in again when it can" in run.said()
    run.wait_more(1)
    assert run.interrupt() == 130, run.said()
    assert run.job()["JobState"] == "CANCELLED"
    assert f"{run.run_id} is stopped" in run.said()

    run.begin()  # and with that another job, of the same run
    run.wait_for(STARTED, 2)
    assert run.wait_more() > first
    down = site.kit("down", run.run_id)
    assert (down.returncode, down.stdout) == (0, f"{run.run_id} is stopped\n"), down.stderr
    assert run.end() == 130, run.said()
    assert f"{run.run_id} was stopped; kit up login.yaml goes on from its snapshot" in run.said()
    assert "stopped by kit down" in site.kit("status", run.run_id).stdout

    run.begin()
    assert run.end() == 0, run.said()
    assert run.said().count("resumed at step") == 2
    run.trained_as(unbroken)


def test_whatever_slurm_ends_goes_back_to_the_queue_and_on_at_the_next_step(
    site: Site, story: Callable[..., Story], unbroken: dict[int, float]
) -> None:
    site.python = sys.executable  # Slurm is to see, and signal, all processes of the job
    run = story("queue", nodes=2, max_requeues=5)
    run.hold(0.5)  # until Slurm looks at time limits, up to 60 steps go by
    run.begin()
    run.wait_for(STARTED)
    job = submitit.SlurmJob(run.run_dir / "slurm", run.job_id)

    def time_limit() -> None:
        # The least that is left is a minute, and the signal comes 90 s before the end: at Slurm's next look at it.
        elapsed = site.ask("squeue", "--noheader", "--job", run.job_id, "--format=%M").strip()
        site.slurm(
            "scontrol", "update", f"JobId={run.job_id}", f"TimeLimit={int(elapsed.split(':')[-2]) + 2}"
        )

    def longer() -> None:
        site.slurm("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=20")

    def preempt() -> None:
        site.slurm("srun", "--partition=urgent", "-N3", "--exclusive", "hostname")

    def preempt_by_sigterm() -> None:
        with without_user_signal(site):
            preempt()

    for number, fault in enumerate(
        (
            time_limit,
            job._interrupt,
            preempt,
            preempt_by_sigterm,
            lambda: site.slurm("scontrol", "requeue", run.job_id),
        ),
        start=1,
    ):
        run.wait_more()
        fault()
        until(lambda n=number: run.job()["Restarts"] == str(n), timeout_s=90, what=f"requeue {number}")
        if number == 1:
            longer()
            run.hold(1.0)  # the other faults take less long, and that not in steps: less of the job goes by
        run.wait_for(STARTED, number + 1)
    run.wait_more()
    assert run.end() == 0, run.said()
    # One is told of by both signals within a moment, and either may be seen first.
    warned = run.said().count("stopped by Slurm, which ends the job soon; Slurm queues it again")
    assert warned in (2, 3)
    assert run.said().count("stopped by Slurm; Slurm queues it again") == 4 - warned
    assert run.said().count("resumed at step") == 5
    run.trained_as(unbroken, same_world=False)


@contextlib.contextmanager
def without_user_signal(site: Site) -> Iterator[None]:
    """A cluster that tells a job of its preemption by SIGTERM alone."""
    conf = site.lab.slurm.conf
    text = conf.read_text()
    line = "SlurmctldParameters=preempt_send_user_signal\n"
    assert line in text
    try:
        conf.write_text(text.replace(line, ""))
        site.slurm("scontrol", "reconfigure")
        assert "preempt_send" not in site.slurm("scontrol", "show", "config")
        yield
    finally:
        conf.write_text(text)
        site.slurm("scontrol", "reconfigure")


def test_what_would_end_the_same_way_again_is_not_queued_again(site: Site) -> None:
    site.python = sys.executable  # Slurm is to see, and signal, all processes of the job
    stuck = Story(site, "stuck", ["job.py", "stuck", "600"], nodes=1)
    spent = Story(site, "spent", ["job.py", "fine", "600"], nodes=1, max_requeues=0)
    cancelled = Story(site, "cancelled", ["job.py", "fine", "600"], nodes=1)
    for each in (stuck, spent, cancelled):
        each.begin()
    for each in (stuck, spent, cancelled):
        each.wait_for("it is ")
    until(lambda: requeue.has_made_progress(spent.run_dir), what="progress on record")
    for each in (stuck, spent):
        submitit.SlurmJob(each.run_dir / "slurm", each.job_id)._interrupt(timeout=True)
    site.slurm("scancel", cancelled.job_id)
    for each, status in ((stuck, 3), (spent, 3), (cancelled, 130)):
        assert each.end() == status, each.said()
        assert each.job()["Restarts"] == "0"
    assert "failed: it had to end before its first step" in stuck.said()
    assert "slurm.max_requeues is 0" in spent.said()
    assert re.search("failed: .*max_requeues", site.kit("status", spent.run_id).stdout)
    assert cancelled.job()["JobState"] == "CANCELLED"
    assert "stopped by scancel" in site.kit("status", cancelled.run_id).stdout


def test_lost_hosts_and_what_each_job_does_without_them(
    site: Site, story: Callable[..., Story], unbroken: dict[int, float]
) -> None:
    often = [*TRAIN[:-1], "2"]
    elastic, fixed = story("elastic", often, nodes="2:3"), story("fixed", nodes=3)
    for run in (elastic, fixed):
        run.hold()
        run.begin()
    for run in (elastic, fixed):
        run.wait_for(STARTED)
    elastic.wait_more()
    wait_for_a_save(elastic.snapshots)
    site.lab.crash("node3")
    # Two are enough for the one: it goes on at once, inside its allocation.
    elastic.wait_for(STARTED, 2)
    before = elastic.wait_more()
    # The other one needs three: it goes back to the queue when Slurm knows that the host is lost.
    fixed.wait_for("Slurm queues it again")
    why = "node3 lost, and 3 nodes are needed (nodes: 2:3 would go on without)"
    assert f"stopped by kit: {why}; Slurm queues it again" in fixed.said()
    assert elastic.job()["Restarts"] == "0"
    # Its own leader may tell of that a moment later than the other job's.
    until(
        lambda: re.search(r"node3 +lost", site.kit("status", elastic.run_id).stdout),
        what="node3 lost in kit status",
    )

    # With the batch host its leader is lost; --no-kill has Slurm leave the others alone, so these say it.
    site.lab.crash("node1")
    site.slurm("scontrol", "update", "NodeName=node1", "State=down", "Reason=crashed")  # sooner than it would
    elastic.wait_for("node1, whose task leads the job, is lost; Slurm queues it again")
    for host in ("node1", "node3"):
        site.lab.revive(host)
    for run, times in ((elastic, 3), (fixed, 2)):
        run.wait_for(STARTED, times)
    assert elastic.wait_more() >= before
    for run in (elastic, fixed):
        assert run.end() == 0, run.said()
        assert run.job()["Restarts"] == "1"
    elastic.trained_as(unbroken, same_world=False, once=False)
    fixed.trained_as(unbroken, once=False)


@contextlib.contextmanager
def stalls_s() -> Iterator[list[float]]:
    """For how long at a time this machine stands still, or has no time for us, while the block runs: all of them."""
    found, is_over = [0.0], threading.Event()

    def look() -> None:
        before = time.monotonic()
        while not is_over.wait(0.1):
            found.append(time.monotonic() - before)
            before = time.monotonic()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def test_a_lost_leader_is_replaced_and_one_that_only_some_cannot_reach_is_not(
    site: Site, story: Callable[..., Story], unbroken: dict[int, float]
) -> None:
    leader = site.lab.hosts["node1"]
    for number in itertools.count():
        run = story(f"leader{number}", nodes="2:3")
        run.hold()
        run.begin()
        run.wait_for(STARTED)
        with stalls_s() as stalls:
            site.lab.run("node3", ["ip", "route", "add", "blackhole", leader.address], check=True)
            run.wait_for(STARTED, 2)
            # Longer than for a leader that is lost.
            time.sleep(handshake.UNHEARD_S + 2 * allocation.LEADER_LOST_S)
            job = run.job()
        site.lab.run("node3", ["ip", "route", "del", "blackhole", leader.address], check=True)
        run.interrupt()
        if max(stalls) < allocation.LEADER_LOST_S / 2:
            break
        # The leader's host, too, has stood still: by rights that is a lost leader.
    assert (job["JobState"], job["Restarts"]) == ("RUNNING", "0")

    run = story("exclude", nodes=2)
    run.hold()
    run.begin()
    run.wait_for(STARTED)
    run.wait_more()
    site.lab.crash("node1")
    run.wait_for("node1, whose task leads the job, is lost; Slurm queues it again")
    run.wait_for(STARTED, 2)  # and node1 is still down
    assert run.job()["ExcNodeList"] == "node1"
    assert run.end() == 0, run.said()
    assert run.job()["Restarts"] == "1"
    run.trained_as(unbroken, same_world=False, once=False)


def test_a_host_that_is_back_before_slurm_has_missed_it_takes_srun_along_and_not_the_job(
    site: Site, story: Callable[..., Story], unbroken: dict[int, float]
) -> None:
    run = story("back", nodes=3)
    run.hold()
    run.begin()
    run.wait_for(STARTED)
    run.wait_more()
    site.lab.crash("node3")
    site.lab.revive("node3")
    run.wait_for("srun ended before the leader did; Slurm queues it again")
    run.wait_for(STARTED, 2)
    assert run.job()["Restarts"] == "1"
    assert run.end() == 0, run.said()
    run.trained_as(unbroken, once=False)
    # Before its first step it would do so again, and after max_requeues it has done so often enough. They begin now:
    # after two minutes without a word, a job counts as past its first step.
    early = story("early", ["job.py", "stuck", "600"], nodes=1)
    spent = story("spent", ["job.py", "fine", "600"], nodes=1, max_requeues=0)
    for each in (early, spent):
        each.begin()
    early.wait_for("it is stuck")
    spent.wait_for("it is fine")
    until(lambda: requeue.has_made_progress(spent.run_dir), what="progress on record")
    for each in (early, spent):
        site.slurm("scancel", "--signal=KILL", f"{each.job_id}.0")
        assert each.end() == 3
        assert each.job()["Restarts"] == "0"
    why = r"failed: srun ended before the leader did, and it was queued again 0 times \(slurm.max_requeues\)"
    assert re.search(why, site.kit("status", spent.run_id).stdout)


def wait_for_a_save(folder: Path) -> None:
    """Until something is being written to a snapshot folder."""
    before = {path.name for path in folder.iterdir()}
    deadline = time.monotonic() + 30
    while {path.name for path in folder.iterdir()} <= before:
        assert time.monotonic() < deadline, "no save within 30 s"
        time.sleep(0.0005)


def test_what_cannot_run_is_refused_before_it_is_queued(site: Site, tmp_path: Path) -> None:
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "partition": ({"partition": "nope"}, {}, "slurm.partition (or SBATCH_PARTITION): found 'nope'"),
        "time": ({"time": 300}, {}, "slurm.time"),
        "nodes": ({"nodes": 9}, {}, "slurm.nodes"),
        "memory": ({"mem_gb": 64}, {}, "slurm.mem_gb"),
        "folder": ({"shared_dir": str(tmp_path / "mine")}, {}, "is not the folder that the login node has"),
        "script": ({}, {"job": {"command": ["absent.py"]}}, "no absent.py in"),
        "outside": ({}, {"job": {"command": ["bash", "../run.sh"]}}, "../run.sh lies outside of"),
        "absolute": (
            {},
            {"job": {"command": ["/opt/none/train"]}},
            "no /opt/none/train, which the command runs",
        ),
        "torch": ({}, {"python": "/usr/bin/python3"}, "/usr/bin/python3 lacks torch"),
    }

    untried: list[str] = []

    def up(name: str) -> str:
        slurm, changes, _ = cases[name]
        bad = f"bad{len(untried)}-{name}"
        file = site.inventory(bad, TRAIN, {"nodes": 1, **slurm}, **changes)
        done = site.kit("up", file.name, "-d")
        said = done.stdout + done.stderr
        if name == "folder" and "no idle node to try" in said and len(untried) < 5:
            untried.append(bad)
            site.slurm("scancel", "--user=root")
            site.lab.slurm.wait_idle()
            return up(name)
        assert done.returncode == 1, said
        return said

    # It wants an idle node within five seconds, which the others' may have. Where a busy Slurm finds none in time, kit
    # says so, and queues the job.
    alone = {"folder": up("folder")}
    for name, said in {**on_all({name: name for name in cases if name not in alone}, up), **alone}.items():
        assert not isinstance(said, Exception), said
        assert cases[name][2] in said, said
        assert "Traceback" not in said, said
    names = site.ask("squeue", "--noheader", "--states=all", "--format=%j").split()
    assert not [name for name in names if re.match(r"bad\d-", name) and not name.startswith(tuple(untried))]


def test_an_environment_is_made_once_in_the_shared_folder(site: Site) -> None:
    make_wheel(site.folder / "wheels", "tinypkg", "1.2")
    (site.folder / "requirements.txt").write_text("tinypkg\n")
    (site.folder / "job.py").write_text(
        "import sys, tinypkg\nprint('tinypkg', tinypkg.__version__, sys.executable)\n"
    )
    asked = {"requirements": "requirements.txt", "find_links": ["wheels"], "system_site_packages": True}
    inventory = site.inventory("made", ["job.py"], {"nodes": 1}, environment=asked)
    done = site.kit("up", str(inventory))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "environment requirements.txt: built on login, from wheels fetched here" in done.stdout
    assert f"tinypkg 1.2 {site.shared}/envs/" in done.stdout
    inventory.write_text(
        inventory.read_text().replace("system_site_packages: true", "system_site_packages: false")
    )
    refused = site.kit("up", str(inventory), "--new")
    assert refused.returncode == 1
    assert (
        "lacks torch, ClusterShell, pathspec, pydantic, rich, submitit, yaml, which kit needs on"
        in refused.stderr
    )


def test_a_full_queue_is_told_with_its_reason_and_left_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Story(site, f"many{number}", ["job.py", "fine", "0"], nodes=1) for number in range(8)]
    blocker = site.slurm(
        "sbatch", "--parsable", "-N3", "--exclusive", "--output=/dev/null", "--wrap=sleep 600"
    )
    until(lambda: "RUNNING" in " ".join(site.queue()))
    monkeypatch.setenv("KIT_SECRET", "s3cr3t")
    alone = Story(site, "alone", ["job.py", "fine", "0"], nodes=3)
    values = yaml.safe_load((site.folder / alone.file).read_text())
    values["job"]["secrets"] = ["KIT_SECRET"]
    (site.folder / alone.file).write_text(yaml.safe_dump(values))
    alone.begin()
    alone.wait_for("waits in the queue (Resources")
    secrets = [*alone.run_dir.glob("slurm/secrets-*.json")]
    assert [path.exists() for path in secrets] == [True]
    assert "no idle node to try whether slurm.shared_dir is shared" in alone.said()
    said = on_all({each.file: each for each in jobs}, lambda each: site.kit("up", each.file, "-d").stdout)
    for each in jobs:
        each.log.write_text(str(said[each.file]))
    assert len(site.queue()) == 2 + len(jobs), said
    assert alone.interrupt() == 130, alone.said()
    assert alone.job()["JobState"] == "CANCELLED"
    assert not secrets[0].exists()
    site.slurm("scancel", blocker.strip())
    # Each imports kit by the real python, six at a time: 120 s are few on a busy machine.
    until(lambda: not site.queue(), timeout_s=300, what="the end of all jobs")
    for each in jobs:
        status = site.kit("status", each.run_id).stdout
        assert status.startswith(f"{each.run_id}  succeeded: trained to the end"), status
