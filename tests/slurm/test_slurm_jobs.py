"""What goes to Slurm and what comes back, read: pure parts, on what a Slurm 22.05 printed (tests/recorded)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import submitit
from agents import until
from places import RECORDED
from slurm_runs import Site
from submitit.core.job_environment import SignalHandler
from submitit.core.utils import DelayedSubmission

from nodekit.deploy.connect.channel import RemoteError
from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.deploy.launch.options import Options
from nodekit.deploy.output.phases import Phases
from nodekit.deploy.records import runs
from nodekit.inventory.errors import JobFailed, KitError
from nodekit.inventory.load import dump, load_inventory
from nodekit.inventory.schema import Inventory, SlurmSettings
from nodekit.slurm.allocation import allocation, requeue, srun_loss
from nodekit.slurm.allocation.allocation import Allocated, Ending, QueueAgain, own_job_id
from nodekit.slurm.cluster.accounts import Usage, account_problem, parse_usage, usage
from nodekit.slurm.cluster.jobs import (
    Job,
    Slurm,
    Watched,
    beyond_limits,
    choose_partition,
    indexes,
    minutes,
    parse_jobs,
    slurm_of,
    time_limit,
)
from nodekit.slurm.cluster.login import of_a_job
from nodekit.slurm.sbatch_parameters import inventory_keys, overriding, parameters, planned_gpus, written
from nodekit.slurm.submission import submit
from nodekit.slurm.submission.prepare import Ready, _as_sbatch_has_it, _cluster, _not_shared, dry_run, prepare


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def inventory(tmp_path: Path, **slurm: Any) -> Inventory:
    path = tmp_path / "lab.yaml"
    path.write_text(json.dumps({"slurm": slurm}))
    return load_inventory(path)


def settings(**given: Any) -> SlurmSettings:
    return SlurmSettings.model_validate({"nodes": 2, **given})


class Recorded:
    """A channel that answers each command with what was recorded."""

    host = "login"

    def __init__(self, answers: dict[str, tuple[int, str, str]]) -> None:
        self.answers = answers

    def call(self, op: str, *, argv: tuple[str, ...], **_: Any) -> dict[str, Any]:
        status, out, err = self.answers[argv[0]]
        return {"status": status, "out": out, "err": err}


def slurm(**answers: tuple[int, str, str]) -> Slurm:
    return Slurm(Recorded(answers))  # type: ignore[arg-type]  # all that is called


def test_a_job_is_asked_for_again_while_the_controller_is_away() -> None:
    """As while it is restarted: `kit up` had ended, and its job had gone on."""
    away = (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
    answers = {"scontrol": away}
    watched = Watched(Slurm(Recorded(answers)), "7")  # type: ignore[arg-type]  # all that is called
    assert not watched.look()
    assert "goes on, as far as is known: Slurm does not answer (login: scontrol show job 7:" in watched.line
    with pytest.raises(KitError, match=r"; try again when Slurm answers \(scontrol ping\); its jobs run on"):
        Slurm(Recorded(answers)).job("7")  # type: ignore[arg-type]  # as above
    answers["scontrol"] = (0, recorded("scontrol-running"), "")
    assert not watched.look()
    assert watched.line == "running on node[1-3]"
    answers["scontrol"] = away
    assert not watched.look()
    assert watched.job.state == "RUNNING", "as it was last known"
    answers["scontrol"] = (0, recorded("scontrol-completed"), "")
    assert watched.look()
    answers["scontrol"] = (1, "", "slurm_load_jobs error: Invalid job id specified\n")
    assert watched.look(), "Slurm knows it no more"


# --- jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_over", "line"),
    [
        ("running", False, r"running on node\[1-3\]"),
        ("pending", False, r"waits in the queue \(Resources\), expected to start 20\d\d-\d\d-\d\dT[\d:]{8}"),
        ("pending-for-ever", False, r"waits in the queue \(PartitionTimeLimit\)"),
        ("requeued", False, r"waits in the queue \(.*\), expected to start .*, 1 time\(s\) queued again"),
        ("completed", True, r"completed on node3"),
        ("failed", True, r"failed on node\[1-3\] \(NonZeroExitCode\)"),
        ("timeout", True, r"timeout on node\[1-3\] \(TimeLimit\)"),
        ("node-fail", True, r"node_fail on node2 \(NodeDown\)"),
        ("cancelled-pending", True, r"cancelled \(PartitionTimeLimit\)"),
    ],
)
def test_a_job_is_told_in_one_line(name: str, is_over: bool, line: str) -> None:
    (job,) = parse_jobs(recorded(f"scontrol-{name}")).values()
    assert job.is_over is is_over
    assert re.fullmatch(line, job.line())


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("JobHeldUser", "it is held; scontrol release 26 lets it start"),
        ("JobHeldAdmin", "an administrator has held it, and can release it"),
        (
            "launch_failed_requeued_held",
            "a node could not start it, see sinfo -R, and it is held; scontrol release 26",
        ),
    ],
)
def test_a_job_that_is_held_says_what_lets_it_start(reason: str, says: str) -> None:
    """It waits for ever by itself: launch_failed_requeued_held comes after a prolog that has failed."""
    (job,) = parse_jobs(f"JobId=26 JobState=PENDING Reason={reason} Restarts=1").values()
    assert job.line().startswith(f"waits in the queue ({reason}: {says}")
    (job,) = parse_jobs(f"JobId=26 JobState=CANCELLED Reason={reason}").values()
    assert job.line() == f"cancelled ({reason})"


def test_a_job_named_like_a_field_is_read_all_the_same() -> None:
    text = recorded("scontrol-running")
    assert "JobName=lr=1e-3 JobState=mine " in text
    (job,) = parse_jobs(text).values()
    assert job.state == "RUNNING"


def test_what_a_job_has_in_its_environment_is_not_for_another_job() -> None:
    own = {"SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURMD_NODENAME": "n1", "PMIX_RANK": "0"}
    users = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "a", "SBATCH_ACCOUNT": "lab", "PATH": "/bin"}
    assert of_a_job({**users, **own}) == list(own)
    assert of_a_job({**users, "SLURM_ACCOUNT": "lab"}) == [], "outside of a job it is the user's own"


@pytest.mark.parametrize(
    ("out", "err", "expected"),
    [
        ("WORD", "", ""),
        ("Job 5 begins on n1\nWORD\n", "", ""),
        (
            "",
            "srun: error: Unable to allocate resources",
            "no idle node to try whether slurm.shared_dir is shared",
        ),
        ("Job 5 begins on n1\n", "", "no idle node to try whether slurm.shared_dir is shared"),
        (
            "",
            "bash: cat: No such file or directory",
            "no idle node to try whether slurm.shared_dir is shared",
        ),
        (
            "",
            "cat: NAME: Permission denied\nsrun: error: n1: task 0: Exited with exit code 1",
            "a node cannot read slurm.shared_dir, without which the job fails (cat: NAME: Permission denied)",
        ),
        ("", "Job 5\ncat: NAME: No such file or directory", None),
    ],
)
def test_a_folder_is_shared_unless_a_node_says_that_its_file_is_not_there(
    out: str, err: str, expected: str | None
) -> None:
    """A site's task prolog may print lines of its own."""
    file: dict[str, str] = {}

    class Node(Recorded):
        def call(self, op: str, **given: Any) -> Any:
            if op == "write_file":
                file.update(NAME=given["path"], WORD=given["text"])
                return None
            if given["argv"][0] == "rm":
                return {"status": 0, "out": "", "err": ""}
            said = {"out": out, "err": err}
            for word, value in file.items():
                said = {stream: text.replace(word, value) for stream, text in said.items()}
            return {"status": 1 if err else 0, **said}

    def find() -> str:
        return _not_shared(Node({}), "/s/a dir", settings(nodes=1))  # type: ignore[arg-type]  # it has what is called

    if expected is not None:
        assert find() == expected.replace("NAME", file["NAME"] if file else "")
        return
    with pytest.raises(
        KitError, match=r"is not the folder that the login node has .*No such file or directory"
    ):
        find()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "of the shell"),
        ({"partition": "named"}, "named"),
        ({"extra": {"partition": "further"}}, "further"),
    ],
)
def test_a_job_is_checked_against_the_partition_that_sbatch_will_use(
    given: dict[str, Any], expected: str
) -> None:
    """The limits of another one, as of the default, would refuse what this one takes."""

    class Shell(Recorded):
        def call(self, op: str, *, argv: tuple[str, ...], **_: Any) -> dict[str, Any]:
            is_set = argv == ("printenv", "SBATCH_PARTITION")
            return {"status": int(not is_set), "out": "of the shell\n" if is_set else "", "err": ""}

    seen = _as_sbatch_has_it(Shell({}), settings(**given))  # type: ignore[arg-type]  # it has what is called
    assert (seen.partition, seen.account, seen.qos) == (expected, None, None)


class Clusters(Recorded):
    """A shell whose commands ask one cluster; only sbatch follows SBATCH_CLUSTERS."""

    def __init__(self, asked: str, **env: str) -> None:
        super().__init__(
            {"scontrol": (int(not asked), f"ClusterName             = {asked}\n" if asked else "", "")}
        )
        self.env = env

    def call(self, op: str, *, argv: tuple[str, ...], **given: Any) -> dict[str, Any]:
        if argv[0] == "printenv":
            return {
                "status": int(argv[1] not in self.env),
                "out": f"{self.env.get(argv[1], '')}\n",
                "err": "",
            }
        return super().call(op, argv=argv, **given)


@pytest.mark.parametrize(("submitted_to", "asked"), [("a", "a"), ("a", ""), ("", "b")])
def test_a_job_is_asked_for_where_its_cluster_is_asked_or_unknown(submitted_to: str, asked: str) -> None:
    run = SimpleNamespace(run_id="r", slurm={"cluster": submitted_to} if submitted_to else {})
    slurm_of(run, Clusters(asked))  # type: ignore[arg-type]  # all that is read


def test_a_job_is_not_asked_for_on_another_cluster_where_its_number_is_unknown_or_another_jobs() -> None:
    run = SimpleNamespace(run_id="r", slurm={"cluster": "a"})
    with pytest.raises(
        KitError, match=r"commands ask the cluster b, and the job of r is on a; set SLURM_CLUSTERS"
    ):
        slurm_of(run, Clusters("b"))  # type: ignore[arg-type]  # all that is read


def test_a_job_is_for_the_cluster_that_all_commands_ask() -> None:
    assert _cluster(Clusters("a", SBATCH_CLUSTERS="a", SLURM_CLUSTERS="a")) == "a"  # type: ignore[arg-type]  # as above
    with pytest.raises(KitError, match=r"SBATCH_CLUSTERS is b, .*; set SLURM_CLUSTERS=b in its place"):
        _cluster(Clusters("a", SBATCH_CLUSTERS="b"))  # type: ignore[arg-type]  # as above


def test_a_node_that_takes_long_to_start_ends_no_kit_up() -> None:
    """As one that Slurm powers up for the first job: srun then waits for minutes, with an allocation."""

    class Node(Recorded):
        def call(self, op: str, **given: Any) -> Any:
            if op == "execute" and given["argv"][0] == "srun":
                raise RemoteError("login", {"type": "TimeoutExpired", "message": "60 s", "traceback": ""})
            return {"status": 0, "out": "", "err": ""}

    told = _not_shared(Node({}), "/s/a dir", settings(nodes=1))  # type: ignore[arg-type]  # it has what is called
    assert told == "no node has tried within 60 s whether slurm.shared_dir is shared"


def test_a_job_is_known_by_its_place_in_an_array() -> None:
    assert own_job_id({"SLURM_JOB_ID": "12"}) == "12"
    array = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}
    assert own_job_id(array) == "12_1"


def test_an_array_is_its_tasks() -> None:
    waiting = parse_jobs(recorded("scontrol-array-pending"))
    assert len(waiting) == 10
    (array,) = {key.partition("_")[0] for key in waiting}
    assert set(waiting) == {f"{array}_{index}" for index in range(10)}
    assert {job.state for job in waiting.values()} == {"PENDING"}
    assert {job.job_id for job in waiting.values()} == {array}
    running = parse_jobs(recorded("scontrol-array"))
    assert set(running) == {f"{next(iter(running)).partition('_')[0]}_{index}" for index in range(10)}
    started = [job for job in running.values() if job.state != "PENDING"]
    assert len(started) >= 2
    # A task has a number of its own, which is its SLURM_JOB_ID.
    assert len({job.job_id for job in started}) == len(started)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0", [0]),
        ("0-3%2", [0, 1, 2, 3]),
        ("1,5-7,10,15,20%3", [1, 5, 6, 7, 10, 15, 20]),
        ("0-8:2,30", [0, 2, 4, 6, 8, 30]),
        ("0-2,4,6-8,150,153,1...%3", [0, 1, 2, 4, 6, 7, 8, 150, 153]),  # the last may be half a number
        ("", []),
    ],
)
def test_indexes_are_those_slurm_names(written: str, expected: list[int]) -> None:
    assert indexes(written) == expected


@pytest.mark.parametrize("name", ["scontrol-gone", "scontrol-no-such-index"])
def test_a_job_slurm_knows_no_more_is_over(name: str) -> None:
    text = recorded(name)
    out, err = ("", text) if "slurm_load_jobs" in text else (text, "")
    job = slurm(scontrol=(1, out, err)).job("99999")
    assert job == Job(state="")
    assert job.is_over
    assert job.line() == "gone"


def test_a_slurm_that_does_not_answer_is_an_error() -> None:
    told = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    with pytest.raises(KitError, match=r"login: scontrol show job 7: .*Unable to contact"):
        slurm(scontrol=(1, "", told)).job("7")


def test_a_job_is_cancelled_whatever_variables_the_users_shell_has() -> None:
    """With SCANCEL_PARTITION scancel left the job alone, with status 0; with SCANCEL_INTERACTIVE it asked for ever."""
    called: dict[str, Any] = {}
    answers = {"scancel": (0, "", "")}
    channel = Recorded(answers)
    channel.call = lambda op, **args: called.update(args) or Recorded.call(channel, op, **args)  # type: ignore[method-assign, func-returns-value]
    assert Slurm(channel).cancel("7")  # type: ignore[arg-type]  # all that is called
    assert called["argv"] == ("scancel", "7")
    named = {name for name, value in called["env"].items() if value is None}
    assert {"SCANCEL_PARTITION", "SCANCEL_STATE", "SCANCEL_USER", "SCANCEL_INTERACTIVE"} <= named


# --- time, partitions, limits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("04:00:00", 240),
        ("00:00:01", 1),
        ("00:30:00", 30),
        ("1-12:00:00", 2160),
        ("30:00", 30),
        ("UNLIMITED", 365 * 1440),
        ("INFINITE", 365 * 1440),
        ("NONE", None),
        ("", None),
    ],
)
def test_minutes_of_a_time_as_slurm_writes_it(written: str, expected: int | None) -> None:
    assert minutes(written) == expected


@pytest.mark.parametrize(
    ("asked", "partition", "expected"),
    [
        (10, {"DefaultTime": "00:30:00", "MaxTime": "04:00:00"}, 10),
        (None, {"DefaultTime": "00:30:00", "MaxTime": "04:00:00"}, 30),
        (None, {"DefaultTime": "NONE", "MaxTime": "04:00:00"}, 240),
        (None, {"DefaultTime": "NONE", "MaxTime": "UNLIMITED"}, 365 * 1440),
        (None, {}, 365 * 1440),
    ],
)
def test_the_time_limit_is_what_was_asked_or_the_partitions(
    asked: int | None, partition: dict[str, str], expected: int
) -> None:
    assert time_limit(asked, partition) == expected


def test_the_default_partition_is_first_and_others_go_by_name() -> None:
    there = slurm(scontrol=(0, recorded("scontrol-partitions"), "")).partitions()
    assert list(there) == ["main", "urgent"]
    assert choose_partition(None, there)["PartitionName"] == "main"
    assert choose_partition("urgent,main", there)["PartitionName"] == "urgent"
    with pytest.raises(KitError, match=r"SBATCH_PARTITION\): found 'gpu', wanted one of main, urgent"):
        choose_partition("main,gpu", there)


def test_a_hidden_partition_is_there_all_the_same() -> None:
    asked: list[tuple[str, ...]] = []

    class Site(Recorded):
        def call(self, op: str, *, argv: tuple[str, ...], **_: Any) -> dict[str, Any]:
            asked.append(argv)
            return super().call(op, argv=argv)

    Slurm(Site({"scontrol": (0, "", "")})).partitions()  # type: ignore[arg-type]  # all that is called
    assert asked == [("scontrol", "--all", "show", "partition", "--oneliner")]


@pytest.mark.parametrize(
    ("given", "time_min", "expected"),
    [
        ({}, 240, ""),
        ({}, 241, "slurm.time: found 241 minutes, and partition main allows at most 240 (04:00:00)"),
        ({"nodes": 4}, 10, "slurm.nodes: found 4, and partition main has 3"),
        ({"nodes": "2:4"}, 10, "slurm.nodes: found 4, and partition main has 3"),
        ({"nodes": 3}, 10, ""),
        ({"qos": "long"}, 241, ""),  # it may allow more
        ({"partition": "main,urgent"}, 241, ""),
    ],
)
def test_what_slurm_would_let_wait_for_ever_is_refused(
    given: dict[str, Any], time_min: int, expected: str
) -> None:
    partition = slurm(scontrol=(0, recorded("scontrol-partitions"), "")).partitions()["main"]
    problem = beyond_limits(settings(**given), time_min, partition)
    assert str(problem or "").startswith(expected)
    assert (problem is not None) is bool(expected)


# --- what is asked ------------------------------------------------------------------------------------------

ALWAYS = {
    "job_name": "r",
    "nodes": 2,
    "ntasks_per_node": 1,
    "time": None,
    "signal_delay_s": 90,
    "stderr_to_stdout": True,
    "setup": [
        "export PYTHONPATH='/s/k it'${PYTHONPATH:+:$PYTHONPATH}",
        "trap '/v/python -m nodekit.slurm.allocation.srun_loss /s' EXIT",
    ],
    "srun_args": ["--no-kill", "--kill-on-bad-exit=0", "--export=ALL"],
    "additional_parameters": {"requeue": True, "no_kill": True, "chdir": "/s/r"},
}


@pytest.mark.parametrize(
    ("given", "planned"),
    [
        ({}, 0),
        ({"gpus_per_node": 4}, 4),
        ({"gpus_per_node": 0, "extra": {"gres": "gpu:a100:4"}}, 0),
        ({"extra": {"gres": "gpu:a100:4"}}, None),
        ({"extra": {"gres": "shard:1,nvme:2"}}, 0),
        ({"extra": {"gpus_per_task": 2}}, None),
        ({"extra": {"tres_per_node": "gres/gpu:2"}}, None),
        ({"extra": {"licenses": "matlab"}}, 0),
    ],
)
def test_gpus_asked_for_in_any_words_are_the_jobs(given: dict[str, Any], planned: int | None) -> None:
    assert planned_gpus(settings(**given)) == planned


@pytest.mark.parametrize(
    ("given", "time_min", "changed"),
    [
        ({"nodes": 2}, 30, {}),
        ({"nodes": "1:2"}, 30, {}),
        ({"nodes": 2, "time": 1}, 1, {"time": 1, "signal_delay_s": 20}),
        ({"nodes": 2, "extra": {"time": "2-0"}}, 30, {"time": "2-0"}),
        ({"nodes": 2, "mem_gb": 1.5}, 30, {"mem": "1536M"}),
        ({"nodes": 2, "gpus_per_node": 0}, 30, {}),
        (
            {"nodes": 2, "gpus_per_node": 4, "cpus_per_task": 8},
            30,
            {
                "gpus_per_node": 4,
                "cpus_per_task": 8,
                "srun_args": [*ALWAYS["srun_args"], "--cpus-per-task=8"],
            },
        ),  # type: ignore[misc]  # it is a list
        (
            {
                "nodes": 2,
                "partition": "p",
                "account": "a",
                "qos": "q",
                "constraint": "x&y",
                "exclude": "n[1-2]",
            },
            30,
            {"partition": "p", "account": "a", "qos": "q", "constraint": "x&y", "exclude": "n[1-2]"},
        ),
        (
            {"nodes": 2, "setup": ["module load cuda"]},
            30,
            {"setup": ["module load cuda", *ALWAYS["setup"]]},  # type: ignore[misc]  # it is a list
        ),
        (
            {"nodes": 2, "srun_args": ["--mpi=none"]},
            30,
            {"srun_args": [*ALWAYS["srun_args"], "--mpi=none"]},  # type: ignore[misc]  # likewise
        ),
        ({"nodes": 2, "extra": {"wckey": "w"}}, 30, {"wckey": "w"}),
        (
            {"nodes": 2, "extra": {"licenses": "matlab", "requeue": False}},
            30,
            {
                "additional_parameters": {
                    "requeue": False,
                    "no_kill": True,
                    "chdir": "/s/r",
                    "licenses": "matlab",
                }
            },
        ),
    ],
)
def test_parameters_are_what_submitit_takes(
    tmp_path: Path, given: dict[str, Any], time_min: int, changed: dict[str, Any]
) -> None:
    asked = parameters(
        inventory(tmp_path, **given),
        name="r",
        run_dir="/s/r",
        python="/v/python",
        kit_dir="/s/k it",
        minutes=time_min,
    )
    assert asked == {**ALWAYS, **changed}


def test_what_is_false_is_written_as_sbatch_takes_it(tmp_path: Path) -> None:
    """sbatch refuses `--exclusive=False`."""
    given = {
        "nodes": 2,
        "extra": {"exclusive": False, "requeue": False, "no_kill": False, "spread_job": False},
    }
    asked = parameters(
        inventory(tmp_path, **given), name="r", run_dir="/s", python="p", kit_dir="/k", minutes=9
    )
    executor = submitit.SlurmExecutor(folder=tmp_path)
    executor.update_parameters(**written(asked))
    script = executor._make_submission_file_text("true", "test")
    found = [line for line in script.splitlines() if re.search("exclusive|requeue|kill|spread|False", line)]
    assert found[:2] == ["#SBATCH --no-kill=off", "#SBATCH --no-requeue"]
    assert all(line.startswith("srun") for line in found[2:])
    assert overriding(asked, ["SBATCH_EXCLUSIVE", "SBATCH_REQUEUE"]) == ["SBATCH_EXCLUSIVE", "SBATCH_REQUEUE"]


def test_an_array_that_is_longer_than_slurm_allows_is_refused() -> None:
    ours = slurm(scontrol=(0, "MaxArraySize            = 1001\nMaxJobCount             = 10000\n", ""))
    ours.refuse_array_of(1001)
    with pytest.raises(KitError, match=r"found 1002 runs, and Slurm allows at most 1001 .*MaxArraySize"):
        ours.refuse_array_of(1002)
    slurm(scontrol=(1, "", "no answer")).refuse_array_of(1002)  # sbatch says what it has against it


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ({}, ["SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_ACCOUNT", "PATH"], []),
        ({"partition": "p", "time": 5}, ["SBATCH_PARTITION", "SBATCH_ACCOUNT"], ["SBATCH_PARTITION"]),
        ({"time": 5, "mem_gb": 1}, ["SBATCH_TIMELIMIT", "SBATCH_MEM_PER_NODE"], "all"),
        ({"extra": {"reservation": "r"}}, ["SBATCH_RESERVATION"], "all"),
        ({}, ["SBATCH_NO_REQUEUE", "SBATCH_REQUEUE", "SBATCH_NO_KILL", "SBATCH_JOB_NAME"], "all"),
        ({}, ["SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_SIGNAL", "SBATCH_OPEN_MODE"], "all"),
    ],
)
def test_sbatchs_variables_do_not_override_what_is_asked_for(
    tmp_path: Path, given: dict[str, Any], environ: list[str], expected: list[str] | str
) -> None:
    """For sbatch they count more than the options in a batch script."""
    asked = parameters(
        inventory(tmp_path, nodes=2, **given), name="r", run_dir="/s", python="p", kit_dir="/k", minutes=9
    )
    assert overriding(asked, environ) == (environ if expected == "all" else expected)


def test_what_would_be_submitted_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = inventory(
        tmp_path, nodes="2:3", shared_dir="/shared", setup=["module load cuda"], extra={"exclusive": True}
    )
    assert dry_run(asked, Options(inventory=asked.path, command=("date",))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  nodes                  3 (goes on while 2 are left)" in lines
    at = lines.index("  setup                  module load cuda")
    assert lines[at + 1].startswith("                         export PYTHONPATH=")
    assert {
        "  requeue                yes",
        "  exclusive              yes",
        "  command                date",
    } <= set(lines)
    assert not re.search(r"[\[{]'|True", "\n".join(lines))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mem"], "slurm.mem_gb (64.0)"),
        (["nodes", "exclude"], "slurm.nodes (2) or slurm.exclude (n1)"),
        (["licenses"], "slurm.extra.licenses (matlab)"),
        (["chdir", "requeue"], ""),  # kit's own
        ([], ""),
    ],
)
def test_parameters_are_told_by_their_keys_in_the_inventory(names: list[str], expected: str) -> None:
    given = settings(mem_gb=64, exclude="n1", extra={"licenses": "matlab"})
    assert inventory_keys(names, given) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("allocation failure: Invalid feature specification\n", "Invalid feature specification"),
        (
            "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
            "invalid partition specified: nope; Invalid partition name specified",
        ),
        ("sbatch: unrecognized option '--b=1'\nTry \"sbatch --help\"\n", "unrecognized option '--b=1'"),
        (
            "Command '['sbatch']' returned …\nsbatch: error: Batch job submission failed: Invalid account\n",
            "Batch job submission failed: Invalid account",
        ),
        ("one\ntwo\n", "two"),
        ("", ""),
    ],
)  # fmt: skip
def test_of_all_that_is_said_slurms_own_words_are_kept(said: str, expected: str) -> None:
    assert submit._words(said) == expected


# --- the script's imports -----------------------------------------------------------------------------------


def problems(folder: Path, *command: str, path: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "nodekit.slurm.submission.imports", str(folder)],
        input=json.dumps(command),
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", **({"PYTHONPATH": path} if path else {})},
    )
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os, json.decoder\nfrom os import path\nimport torch.nn as nn\n", []),
        ("import os\n\nimport nothere\n", ["a b.py:3: no module nothere"]),
        ("from no.where import x\n", ["a b.py:1: no module no.where"]),
        ("import own\nfrom own import deeper, name\nimport own.deeper\nfrom spaced import inner\n", []),
        ("import own.absent\n", ["a b.py:1: no module own.absent"]),
        ("import broken\n", ["broken.py:2: no module nothere"]),
        ("from spaced import wrong\n", ["spaced/wrong.py:1: no module nothere"]),
        ("try:\n    import nothere\nexcept ImportError:\n    pass\n", []),
        ("def f():\n    import nothere\n", []),
        ("import sys\nsys.path.insert(0, 'more')\nimport nothere\n", []),
        ("from . import nothere\n", []),
        ("import this is wrong\n", ["a b.py:1: invalid syntax"]),
        ("import from_path\n", []),
    ],
)
def test_imports_that_cannot_be_found_are_named(tmp_path: Path, text: str, expected: list[str]) -> None:
    for name, content in {
        "a b.py": text,
        "own/__init__.py": "import torch\n",
        "own/deeper.py": "import a_b, own\n",
        "a_b.py": "",
        "spaced/inner.py": "",
        "spaced/wrong.py": "import nothere\n",
        "broken.py": "\nimport nothere\n",
        "more/from_path.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert problems(tmp_path, "a b.py", "--lr", "1", path=str(tmp_path / "more")) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["absent.py"], ["no file {}/absent.py"]),
        (["-m", "absent"], ["no module absent"]),
        (["python", "-u", "absent.py"], ["no file {}/absent.py"]),
        (["python"], []),
        (["-m", "pkg.absent"], ["no module pkg.absent"]),
        (["-m", "pkg"], ["pkg/__main__.py:1: no module nothere"]),
        (["-m", "json.tool"], []),
        (["-m", "nodekit.training", "--epochs", "1"], []),
        (["-m", "nodekit.training", "--task", "absent.py:Task"], ["no file {}/absent.py"]),
        (["-m", "nodekit.training", "--task=task.py:Task"], ["task.py:1: no module nothere"]),
        (["-m", "nodekit.training", "--task", "module:Task"], []),
        (["sh", "-c", "python absent.py"], []),
    ],
)
def test_commands_that_cannot_start_are_named(
    tmp_path: Path, command: list[str], expected: list[str]
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").touch()
    (tmp_path / "pkg/__main__.py").write_text("import nothere\n")
    (tmp_path / "task.py").write_text("import nothere\n")
    assert problems(tmp_path, *command) == [each.format(tmp_path) for each in expected]


# --- accounts -----------------------------------------------------------------------------------------------

USED = """\
4|COMPLETED|5|2|00:02.951|10|2|1000M|
4.batch|COMPLETED|5|1|00:00.012|5|1||10632K
4.0|COMPLETED|4|2|00:02.939|8|2||106184K
"""


def test_what_a_job_used_is_told_against_what_it_asked_for() -> None:
    used = parse_usage(USED)
    assert used == Usage(
        state="COMPLETED",
        elapsed_s=5,
        num_cpus=2,
        cpu_s=2.951,
        given_cpu_s=10,
        memory_bytes=106184 * 1024,
        asked_memory_bytes=500 * 1024**2,
    )
    assert (
        used.line()
        == "2 CPUs for 0:00:05, 30% busy; at most 0.11 GB of memory on a node, 21% of the 0.52 GB asked for"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("3|COMPLETED|3723|2|1-00:03.588|6|2|1000M|\n3.0|COMPLETED|3|2|00:03|6|2||\n", None),
        ("3|CANCELLED by 0|0|0|00:00:00|0|1||\n", "0 CPUs for 0:00:00; Slurm has not measured its memory"),
        (
            "3|FAILED|60|4|01:00.000|240|2|4Gn|\n3.0|FAILED|60|4|01:00.000|240|2||2G\n",
            "4 CPUs for 0:01:00, 25% busy; at most 2.15 GB of memory on a node, 50% of the 4.29 GB asked for",
        ),
        (
            "3|FAILED|60|4|01:00.000|240|2|500Mc|\n3.0|FAILED|60|4|01:00.000|240|2||500M\n",
            "4 CPUs for 0:01:00, 25% busy; at most 0.52 GB of memory on a node, 50% of the 1.05 GB asked for",
        ),
        (
            "3|FAILED|60|1|01:00.000|60|1|?|\n3.0|FAILED|60|1|01:00.000|60|1||500M\n",
            "1 CPU for 0:01:00, 100% busy; at most 0.52 GB of memory on a node",
        ),
    ],
)  # fmt: skip
def test_accounts_that_lack_something_are_read_all_the_same(text: str, line: str | None) -> None:
    used = parse_usage(text)
    assert used is not None
    if line is not None:
        assert used.line() == line
    assert "nan" not in used.line()


def test_without_accounting_nothing_is_said_of_it() -> None:
    told = (1, "", "Slurm accounting storage is disabled\n")
    without = slurm(sacct=told, sacctmgr=told)
    assert usage(without, "7", wait_s=60) is None
    assert account_problem(without, settings(account="nope", qos="nope")) is None
    assert parse_usage("") is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ""),
        ({"account": "lab"}, ""),
        ({"account": "LAB"}, ""),
        (
            {"account": "nope"},
            "slurm.account: found 'nope', wanted one of lab, root (see sacctmgr show account)",
        ),
        ({"qos": "nope"}, "slurm.qos: found 'nope', wanted one of lab, root (see sacctmgr show qos)"),
    ],
)
def test_an_account_that_is_not_there_is_named(given: dict[str, str], expected: str) -> None:
    assert str(account_problem(slurm(sacctmgr=(0, "lab\nroot\n", "")), settings(**given)) or "") == expected


# --- all of it, where accounts are kept ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "seconds", "saved", "expected"),
    [
        (["3/46 epoch 1", ""], 1, "", True),
        (["0/46", "0/46"], 1000, "", False),
        (["epoch 1"], 1, "", True),
        ([], 1, "", False),
        ([], 1, "checkpoint-10", True),  # it says nothing of its steps, as most scripts do not
        ([], 1000, "", True),
        ([""], 1000, "", True),
        ([], None, "", False),
    ],
)
def test_progress_is_what_ranks_wrote_or_time_where_they_write_nothing(
    said: list[str], seconds: float | None, saved: str, *, expected: bool, tmp_path: Path
) -> None:
    job = {"inventory": dump(inventory(tmp_path, nodes=1)), "shared_dir": str(tmp_path / "shared")}
    run_dir, snapshots = tmp_path / "runs" / "r", tmp_path / "shared" / "snapshots" / "r"
    folder = run_dir / "node1" / "progress"
    for each in (folder, snapshots, run_dir / "slurm"):
        each.mkdir(parents=True)
    (run_dir / "slurm" / "job.json").write_text(json.dumps(job))
    if saved:
        (snapshots / saved).touch()
    for rank, text in enumerate(said):
        (folder / f"rank{rank}").write_text(text)
    events = [{"kind": "agent-started", "time": 0}]
    if seconds is not None:
        events.append({"kind": "workers-started", "time": time.time() - seconds})
    (run_dir / "node1" / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    assert requeue.has_made_progress(run_dir) == expected


@pytest.mark.parametrize(
    "unreadable", ["shared/snapshots/r", "runs/r/node1/events.jsonl", "runs/r/state/events.jsonl"]
)
def test_a_job_whose_progress_cannot_be_read_may_have_made_some(tmp_path: Path, unreadable: str) -> None:
    """Else one that had trained for hours would fail at its time limit, and not be queued again."""
    job = {"inventory": dump(inventory(tmp_path, nodes=1)), "shared_dir": str(tmp_path / "shared")}
    run_dir, path = tmp_path / "runs" / "r", tmp_path / unreadable
    for each in (run_dir / "slurm", path.parent):
        each.mkdir(parents=True, exist_ok=True)
    (run_dir / "slurm" / "job.json").write_text(json.dumps(job))
    assert not requeue.has_made_progress(run_dir)
    path.mkdir() if path.suffix else path.symlink_to(path)  # in place of what can be read
    assert requeue.has_made_progress(run_dir)


MISSING_STEP = "srun: error: Aborting, io error and missing step on node 1"


def test_what_srun_said_of_this_start_of_the_job_is_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "20")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    monkeypatch.delenv("SUBMITIT_FOLDER", raising=False)
    place, log = tmp_path / "20.1.json", tmp_path / "20_0_log.out"
    log.write_text(f"{MISSING_STEP}\n")  # of an earlier start, after which the job was queued again
    place.write_text(json.dumps(requeue.place_of_log(place)))
    with log.open("a") as out:
        out.write("submitit INFO: Starting\nsrun: error: node1: task 0: Killed\n")
    assert not requeue.is_missing_step(place)
    cause = requeue.srun_cause(place)
    assert cause["what"] == "srun ended kit's tasks on all nodes: srun: error: node1: task 0: Killed"
    assert cause["cure"].endswith(f" is in {log}")
    with log.open("a") as out:
        out.write(f"{MISSING_STEP}\n")
    assert requeue.is_missing_step(place)
    assert requeue.srun_cause(place)["what"] == (
        "srun ended kit's tasks on all nodes; a node was started anew before Slurm had missed it: "
        + MISSING_STEP
    )


@pytest.mark.parametrize(
    ("said", "is_over", "text"),
    [
        (MISSING_STEP, False, "srun ended before the leader did; Slurm queues it again\n"),
        (
            "srun: error: node1: task 0: Killed",
            True,
            "and it is not queued again: it had not made its first step",
        ),
    ],
)
def test_a_job_that_srun_ends_is_queued_again_where_a_node_came_back_or_tells_why_not(
    said: str, text: str, *, is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "runs" / "r"
    (run_dir / "slurm" / "logs").mkdir(parents=True)
    job = {
        "inventory": dump(inventory(tmp_path, nodes=1)),
        "shared_dir": str(tmp_path / "shared"),
        "private": [],
    }
    (run_dir / "slurm" / "job.json").write_text(json.dumps(job))
    (run_dir / "slurm" / "20_0_log.out").write_text(f"{said}\n")
    log = {"log": str(run_dir / "slurm" / "20_0_log.out"), "log_from": 0}
    (run_dir / "slurm" / "20.0.json").write_text(json.dumps(log))
    monkeypatch.setenv("SLURM_JOB_ID", "20")
    monkeypatch.setenv("XDG_STATE_HOME", "as it was")  # which it changes
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(requeue, "_slurm", lambda *argv: asked.append(argv) or "JobState=RUNNING")
    before = signal.getsignal(signal.SIGTERM)
    try:
        srun_loss.main(tmp_path / "runs")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (("scontrol", "requeue", "20") in asked) is not is_over
    told = (run_dir / "slurm" / "logs" / "kit.log").read_text()
    assert text in told
    assert (run_dir / "slurm" / "result.json").exists() is is_over
    assert (f"  cause     srun ended kit's tasks on all nodes: {said}\n" in told) is is_over


@pytest.fixture
def ending() -> Iterator[Ending]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
    yield Ending()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("limit_min", [None, "2-0", "120", 120])
def test_a_job_goes_back_to_the_queue_whatever_its_time_limit_is_written_as(
    limit_min: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Ending
) -> None:
    """Submitit reckons with what it was given: with text, it was a TypeError, and the job had failed."""

    class Handler(SignalHandler):
        is_late: bool | None = None

        def checkpoint_and_try_requeue(self, signum: int, frame: FrameType | None = None) -> None:
            self.is_late = self.has_timed_out()

    handler = Handler(*[None] * 3)  # type: ignore[arg-type]  # all that is looked at is what follows
    handler._delayed = DelayedSubmission(Allocated(), str(tmp_path))
    handler._delayed.set_timeout(limit_min, 1)
    signal.signal(signal.SIGUSR2, handler.checkpoint_and_try_requeue)

    def stopped(*_: Any) -> int:
        raise QueueAgain(["node2"])

    lost: list[str] = []
    monkeypatch.setattr(allocation, "keep_records_in", lambda _: None)
    monkeypatch.setattr(allocation, "attempt", lambda: "1.0")
    monkeypatch.setattr(allocation, "lead", stopped)
    monkeypatch.setattr(allocation, "exclude", lambda _, nodes: lost.extend(nodes))
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(QueueAgain):
        Allocated()(str(tmp_path))
    assert (handler.is_late, lost) == (False, ["node2"])


def test_a_job_is_stopped_by_its_first_signal_and_none_that_follows_cuts_the_stop_short(
    ending: Ending,
) -> None:
    with pytest.raises(KeyboardInterrupt, match="Slurm"):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR2)
    assert ending.why == "Slurm"
    assert ending.is_warned  # that the job ends soon is known from whichever signal says so


def test_a_leader_whose_log_cannot_be_written_goes_on(tmp_path: Path) -> None:
    with allocation._Log(Path("/dev/full").open("ab"), encoding="utf-8", line_buffering=True) as out:
        for _ in range(3):
            print("x" * 10_000, file=out, flush=True)
    with allocation._Log((tmp_path / "kit.log").open("ab"), encoding="utf-8", line_buffering=True) as out:
        print("it goes on", file=out)
        assert (tmp_path / "kit.log").read_text() == "it goes on\n"


@pytest.mark.parametrize(
    ("job", "is_queued_again"),
    [
        ({"JobState": "RUNNING", "Reason": "None"}, True),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, True),
        ({"JobState": "COMPLETING", "Reason": "None", "PreemptTime": "2026-11-30T01:51:26"}, True),
        ({}, True),
        ({"JobState": "COMPLETING", "Reason": "None", "PreemptTime": "None"}, False),
    ],
)
def test_a_job_that_is_cancelled_while_it_stops_for_its_time_limit_is_not_queued_again(
    ending: Ending,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: dict[str, str],
    is_queued_again: bool,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(allocation, "job_now", lambda: job)
    monkeypatch.setattr(allocation, "settings_of", lambda _: SlurmSettings(nodes="2"))  # type: ignore[arg-type]
    monkeypatch.setattr(allocation, "has_made_progress", lambda _: True)
    found = allocation._queue_again(tmp_path, ending, tmp_path / "slurm" / "1.0.json")
    assert found == (is_queued_again, runs.STOPPED_EXIT)


@pytest.mark.parametrize(
    ("restarts", "progress", "preempted", "lost", "why"),
    [
        (3, True, False, [], ""),
        (4, True, False, [], "the job was queued again 4 times: slurm.max_requeues is 4"),
        (
            0,
            False,
            False,
            [],
            "it had to end before its first step, and would again: is slurm.time enough for its start?",
        ),
        (0, False, True, [], ""),
        (0, False, False, ["node2"], ""),
    ],
)
def test_a_job_goes_back_to_the_queue_as_often_as_it_may_and_while_that_brings_something(
    restarts: int,
    progress: bool,
    preempted: bool,
    lost: list[str],
    why: str,
    ending: Ending,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ending.why, ending.lost = "Slurm, which ends the job soon", lost
    job = {"JobState": "RUNNING", "PreemptTime": "2026-11-30T01:51:26" if preempted else "None"}
    ended: list[tuple[str, str]] = []
    run: Any = SimpleNamespace(finish=lambda *how: ended.append(how))
    monkeypatch.setattr(allocation, "job_now", lambda: job)
    monkeypatch.setattr(allocation, "settings_of", lambda _: SlurmSettings(nodes="2", max_requeues=4))  # type: ignore[arg-type]
    monkeypatch.setattr(allocation, "num_restarts", lambda: restarts)
    monkeypatch.setattr(allocation, "has_made_progress", lambda _: progress)
    monkeypatch.setattr(allocation, "is_missing_step", lambda _: False)
    monkeypatch.setattr(allocation, "readable_record_of", lambda _: run)
    found = allocation._queue_again(tmp_path, ending, tmp_path / "slurm" / "1.0.json")
    assert found == ((False, JobFailed.exit_code) if why else (True, runs.STOPPED_EXIT))
    assert ended == [("failed", why)] * bool(why)
    assert (
        f"failed: {why}" if why else f"stopped by {ending.why}; Slurm queues it again"
    ) in capsys.readouterr().out


def test_a_job_that_is_cancelled_is_not_queued_again_though_slurm_does_not_answer(
    ending: Ending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not warned of an end that it could come back from."""
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(allocation, "job_now", dict)
    found = allocation._queue_again(tmp_path, ending, tmp_path / "slurm" / "1.0.json")
    assert found == (False, runs.STOPPED_EXIT)


class Looks:
    """In place of `Ending.over`: so many looks, each by so many seconds later."""

    def __init__(self, number: int, each_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, self.each_s, self.now_s = number, each_s, 1000.0
        monkeypatch.setattr(allocation, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def wait(self, _: float) -> bool:
        self.number, self.now_s = self.number - 1, self.now_s + self.each_s
        return self.number < 0


@pytest.mark.parametrize(
    ("absent", "given", "each_s", "why"),
    [
        ([[], ["c"], []], "a,b,c", 2.0, None),  # two are enough
        ([["b", "c"]] * 3, "a,b,c", 2.0, None),  # Slurm still counts them: they may come back
        ([["b", "c"]] * 3, "", 2.0, None),  # nor does it answer
        ([["b", "c"], ["c"], ["b", "c"]], "a,b,c", allocation.LOST_S - 1, None),  # one was back meanwhile
        ([["b", "c"]] * 3, "a", 2.0, "b, c lost, and 2 nodes are needed (nodes: 1:3 would go on without)"),
        ([["a", "b", "c"]] * 3, "d", 2.0, "a, b, c lost, and 2 nodes are needed"),
        (
            [["b", "c"]] * 3,
            "",
            allocation.LOST_S / 2 + 1,
            "b, c lost, and 2 nodes are needed (nodes: 1:3 would go on without)",
        ),
    ],
)
def test_a_job_is_ended_when_too_few_nodes_are_left_and_none_can_come(
    absent: list[list[str]],
    given: str,
    each_s: float,
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "slurm").mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "20")
    monkeypatch.setattr(allocation, "job_now", lambda: {"NodeList": given} if given else {})
    looks, told = iter(absent), []
    tasks: Any = SimpleNamespace(absent=lambda _: next(looks))
    ending: Any = SimpleNamespace(
        over=Looks(len(absent), each_s, monkeypatch), lacks_nodes=lambda lost, why: told.append((lost, why))
    )
    allocation._look_for_nodes(tmp_path, tasks, ["a", "b", "c"], 2, ending)
    last = json.loads((tmp_path / "slurm" / "absent.json").read_text())
    assert last == {"job": "20", "nodes": absent[-1]}
    assert {f"{', '.join(lost)} lost{why}" for lost, why in told} == ({why} if why else set())


@pytest.mark.parametrize(
    ("lost_s", "state", "given", "is_asked"),
    [
        (3.9, "RUNNING", "c,d", False),  # of task 3 it is the turn after 4 s
        (4.1, "RUNNING", "c,d", True),  # Slurm has taken it for lost
        (4.1, "RUNNING", "a,b,c,d", False),
        (7.9, "RUNNING", "a,b,c,d", False),
        (8.1, "RUNNING", "a,b,c,d", True),
        (60.0, "COMPLETING", "c,d", False),
    ],
)
def test_a_job_whose_leader_is_lost_is_queued_again_by_one_task_after_the_other(
    lost_s: float, state: str, given: str, is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setattr(allocation, "job_now", lambda: {"JobState": state, "NodeList": given})
    monkeypatch.setattr(allocation, "queue_again_without_leader", lambda *how: asked.append(how))
    allocation._look_for_leader(tmp_path, "a", lost_s)
    assert asked == [(tmp_path, "a, whose task leads the job, is lost", ["a"])] * is_asked


@pytest.mark.parametrize(
    ("state", "restarts", "is_ended"),
    [
        ("RUNNING", "1", False),
        ("RUNNING", "2", True),  # another start of the job
        ("PENDING", "2", False),  # it may still be about to end these
        ("COMPLETING", "2", False),
        ("CANCELLED", "1", True),
        ("", "", False),  # Slurm does not answer
    ],
)
def test_what_slurm_has_taken_away_is_ended_where_slurmd_cannot_and_the_next_start_is_left_alone(
    state: str, restarts: str, is_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the death of slurmd on a node that goes on: its ranks would train beside those of the next start."""
    job = {"JobState": state, "Restarts": restarts, "NodeList": "a,b"} if state else {}
    ended: list[int] = []
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setattr(allocation, "job_now", lambda: job)
    monkeypatch.setattr(allocation, "queue_again_without_leader", lambda *_: None)
    monkeypatch.setattr(os, "_exit", lambda code: ended.append(code))
    with subprocess.Popen(["sleep", "60"]) as rank:
        monkeypatch.setattr(
            allocation.processes, "below", lambda _: {rank.pid}
        )  # this process has others, too
        try:
            allocation._look_for_leader(tmp_path, "a", 0.0)
            assert ended == [JobFailed.exit_code] * is_ended
            assert (rank.wait() if is_ended else rank.poll()) == (-signal.SIGKILL if is_ended else None)
        finally:
            rank.kill()


def test_a_job_that_lacks_nodes_says_so_whatever_else_it_is_told(ending: Ending) -> None:
    with pytest.raises(KeyboardInterrupt):
        ending.lacks_nodes(["node3"], ", and 3 nodes are needed")
    signal.raise_signal(signal.SIGTERM)
    ending.lacks_nodes(["node2"], "")
    assert ending.why == "kit: node3 lost, and 3 nodes are needed"
    assert ending.lost == ["node3"]


def test_a_job_that_is_over_is_not_stopped(ending: Ending) -> None:
    ending.close()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR2)
    assert ending.why == ""


@pytest.mark.lab
def test_what_cannot_run_is_refused_and_what_ran_is_told_even_when_slurm_has_forgotten_it(
    labs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab.up(1, folder=labs / "lab", slurm=True, accounting=True)
    monkeypatch.setenv("SLURM_CONF", str(lab.slurm.conf))
    site = Site(tmp_path / "project", lab)
    (site.folder / "lacks.py").write_text("import os\nimport nothere\n")
    for name, script, asked, problem in (
        ("script", "lacks.py", {}, "lacks.py:2: no module nothere (looked for with "),
        ("two", "job.py", {"exclude": "node1"}, "slurm.exclude (node1): Slurm does not take this job: "),
        ("gpus", "job.py", {"gpus_per_node": 1}, "slurm.gpus_per_node (1): Slurm does not take this job: "),
        ("account", "job.py", {"account": "nope"}, "slurm.account: found 'nope', wanted one of lab, root"),
    ):
        refused = site.kit("up", site.inventory(name, [script], {"nodes": 1, **asked}).name)
        assert refused.returncode == 1, refused.stdout
        assert problem in refused.stderr
    names = site.slurm("squeue", "--noheader", "--states=all", "--format=%j").split()
    assert set(names) <= {"kit-check"}
    # A slurmctld that finds slurmdbd busy tries again only 10 s later, and so long kit waits for the account: first, it
    # is to have found it.
    site.slurm("srun", "--account=lab", "true")
    sacct = ("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobName,State")
    until(lambda: "true|COMPLETED" in site.ask(*sacct), what="an account")
    path = site.inventory("counted", ["job.py", "fine", "1"], {"nodes": 1, "account": "lab", "mem_gb": 0.4})
    done = site.kit("up", path.name)
    assert done.returncode == 0, done.stdout + done.stderr
    used = r"\n  used +1 CPU for 0:0\d:\d\d, \d+% busy; .*\n"
    assert re.search(used, done.stdout), done.stdout
    status = site.kit("status").stdout
    assert re.search(r"succeeded: trained to the end\n  job \d+ completed on node1" + used, status), status

    # Slurm forgets a job MinJobAge seconds after its end; then the run's folder tells how that was.
    (run,) = runs.all_runs()
    run.slurm["job_id"], run.state, run.verdict = "99999", "running", ""
    run.save()
    status = site.kit("status").stdout
    assert "succeeded: trained to the end\n  job 99999 is not known to Slurm any more\n" in status
    run.state = "running"
    run.save()
    assert site.kit("down").stdout == f"{run.run_id} is not running (succeeded)\n"

    # Where the folder tells nothing either, it has failed.
    (site.shared / "runs" / run.run_id / "slurm/result.json").unlink()
    run.state = "running"
    run.save()
    assert "failed: Slurm ended the job: it knows it no more\n" in site.kit("status").stdout
    site.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "ddpp"], "invalid choice: 'ddpp'"),
        (["--batch-size", "7"], "--batch-size 7 is less than the 8 ranks"),
        (["--launcher", "spawn"], "--launcher spawn starts the ranks itself"),
    ],
)
def test_what_the_shared_module_would_refuse_is_not_queued(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "slurm.yaml"
    path.write_text(
        "slurm: {nodes: 4, gpus_per_node: 2, shared_dir: /nowhere, login: nobody@login.invalid}\n"
    )
    options = Options(inventory=path, command=("-m", "nodekit.training", *arguments))
    with contextlib.ExitStack() as stack, pytest.raises(KitError, match=re.escape(message)):
        prepare(stack, load_inventory(path), "run", options, Phases(silent=True), secrets={})


def test_a_folder_whose_name_slurm_would_change_is_refused(tmp_path: Path) -> None:
    """It replaces %j in the name of a job's output, and made a folder 507 beside the one named 50%j."""
    path = tmp_path / "slurm.yaml"
    path.write_text(f"slurm: {{nodes: 1, shared_dir: '{tmp_path}/50%j'}}\njob: {{command: ['true']}}\n")
    options = Options(inventory=path)
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(KitError, match=r"found a % or a backslash in .*/50%j/"),
    ):
        prepare(stack, load_inventory(path), "run", options, Phases(silent=True), secrets={})


@pytest.mark.parametrize(("number", "limit_s"), [(1, 60.1), (10_000, 1060.0)])
def test_the_more_runs_an_array_has_the_longer_its_submission_may_take(number: int, limit_s: float) -> None:
    asked: list[tuple[float, float]] = []

    def call(op: str, *, timeout_s: float, limit_s: float, **_: Any) -> dict[str, Any]:
        asked.append((limit_s, timeout_s))
        return {"status": 0, "out": json.dumps({"job_ids": ["1_0"]}), "err": ""}

    ready = Ready(
        channel=SimpleNamespace(call=call, host="login"),  # type: ignore[arg-type]  # all that is called
        python="python", shared_dir="/s", kit_dir="/s/kit", run_dir="/s/runs/r",
        parameters={}, settings=settings(), private={},
    )  # fmt: skip
    ready.submit([f"/s/runs/r.{each}" for each in range(number)])
    assert asked == [(pytest.approx(limit_s), pytest.approx(limit_s + 5))]


@pytest.mark.parametrize("skip_check", [True, False])
def test_a_job_is_told_whether_its_nodes_are_to_be_checked(tmp_path: Path, skip_check: bool) -> None:
    written: dict[str, Any] = {}

    def call(op: str, *, timeout_s: float, path: str, text: str) -> None:
        written[path] = json.loads(text)

    ready = Ready(
        channel=SimpleNamespace(call=call, host="login"),  # type: ignore[arg-type]  # all that is called
        python="python", shared_dir="/s", kit_dir="/s/kit", run_dir="/s/runs/r",
        parameters={}, settings=settings(), private={}, skip_check=skip_check,
    )  # fmt: skip
    ready.place("/s/runs/r", inventory(tmp_path, nodes=1), ["train.py"])
    assert written["/s/runs/r/slurm/job.json"]["skip_check"] is skip_check
