import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import submitit
import yaml
from lab_hosts import control_index, make_whole, on, wait_until

from nodekit.deploy.commands import cli
from nodekit.deploy.lab import lab_cluster
from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.deploy.lab.lab_network import LabHost
from nodekit.deploy.lab.lab_process import ProcessRecord
from nodekit.deploy.lab.lab_slurm import STATE_FOLDERS, LabSlurm, slurm_conf
from nodekit.inventory.errors import KitError

in_a_lab = pytest.mark.lab
"""A mark on each test that needs root."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

HOSTS = [LabHost("node1", "198.18.3.11", "eth0", "port1"), LabHost("node2", "198.18.3.12", "ens5", "port2")]
TELL = """\
#!/bin/sh
# Tells each start and signal in a file; the first time, it does not end by itself.
told=$1
echo "run ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST" >>$told
trap 'echo USR1 >>$told' USR1
trap 'echo TERM >>$told; exit 1' TERM
[ -n "$SLURM_RESTART_COUNT" ] || while true; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def module_cluster(session_labs: Path) -> Iterator[Lab]:
    """Three hosts with Slurm. Tests use `cluster`."""
    lab = Lab.up(3, folder=session_labs / "slurm", slurm=True)
    yield lab
    lab.down()


@pytest.fixture
def cluster(module_cluster: Lab) -> Iterator[Lab]:
    """The module's cluster with every node idle and no job; the test's jobs are cancelled."""
    module_cluster.slurm.wait_idle()
    yield module_cluster
    make_whole(module_cluster)
    module_cluster.slurm.run(["scancel", "--user=root"])
    wait_until(lambda: not module_cluster.slurm.run(["squeue", "--noheader"]), what="no job")


def everything_of(folder: Path) -> dict[ProcessRecord, str]:
    """Every process of a lab's hosts and of its controller, with its command."""
    inits = [ProcessRecord.read(path) for path in folder.glob("hosts/*/init.json")]
    spaces, found = set(), {}
    for init in filter(None, inits):
        with contextlib.suppress(OSError):  # it was never told to go on, and has left
            spaces.add(Path(f"/proc/{init.pid}/ns/pid").readlink())
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (entry / "ns/pid").readlink() in spaces:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[ProcessRecord.of(int(entry.name))] = command
    return found


def assert_gone(folder: Path, everything: dict[ProcessRecord, str]) -> None:
    """Neither the processes nor a mount nor a file of a lab is left."""
    assert not [command for process, command in everything.items() if process.is_alive]
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
    assert not folder.exists()


@in_a_lab
def test_a_step_runs_on_every_host(cluster: Lab) -> None:
    output = cluster.slurm.run(["srun", "-N3", "hostname"])
    assert sorted(output.split()) == ["node1", "node2", "node3"]
    # Who is logged in on a host needs no setting at all.
    output = on(cluster, "node2", "srun", "-N3", "--time=1", "hostname")
    assert sorted(output.split()) == ["node1", "node2", "node3"]


@in_a_lab
def test_no_daemon_sees_what_a_slurm_of_this_machine_has_left(cluster: Lab) -> None:
    disks = sorted(cluster.folder.glob("hosts/*/upper"))
    assert [disk.parent.name for disk in disks] == ["control", "node1", "node2", "node3"]
    for disk in disks:
        for folder in STATE_FOLDERS:  # opaque: what the machine has there does not shine through
            assert os.getxattr(disk / folder.relative_to("/"), "trusted.overlay.opaque") == b"y"


@in_a_lab
def test_up_tells_how_to_use_it(cluster: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--slurm", "3", "--folder", str(cluster.folder)]
    assert cli.main(["lab", "up", *argv]) == 0
    output = capsys.readouterr().out
    assert output.startswith("already up: 3 hosts")
    usage = re.search("slurm: +(export SLURM_CONF=.*)", output)
    assert usage
    bare = {"PATH": os.environ["PATH"]}
    command = ["sh", "-c", f"{usage[1]}\nsinfo --noheader --format='%P %D %t'"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, env=bare)
    assert answer.stdout == "main* 3 idle\nurgent 3 idle\n"
    assert f"kit up {cluster.folder}/slurm.yaml " in output


@in_a_lab
def test_its_slurm_inventory_submits_to_it(
    cluster: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.slurm.conf))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("import os; print('node', os.environ['GROUP_RANK'], 'is there')\n")
    values = yaml.safe_load(cluster.slurm_inventory.read_text())
    assert values["slurm"]["nodes"] == "2:3"
    values["slurm"]["nodes"] = 1  # each node's agent imports torch, by the python that is written there
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["up", "one.yaml", "--", "job.py"]) == 0
    (log,) = cluster.slurm.shared.glob("kit/runs/*/node*/logs/**/*.log")
    assert "node 0 is there\n" in log.read_text()


@in_a_lab
def test_a_batch_job_starts_steps_and_shares_a_folder(cluster: Lab) -> None:
    (cluster.slurm.shared / "job.sh").write_text("#!/bin/sh\nsrun sh -c 'hostname >\"$SLURM_PROCID.txt\"'\n")
    # sbatch looks for the end after 2, 10, 42 and 74 s: 30 s are too few for a job that takes more than 10.
    cluster.slurm.run(["sbatch", "--wait", "-N3", "--output=job.out", "job.sh"], timeout_s=120)
    told = [(cluster.slurm.shared / f"{rank}.txt").read_text().strip() for rank in range(3)]
    assert sorted(told) == ["node1", "node2", "node3"], (cluster.slurm.shared / "job.out").read_text()
    assert (cluster.slurm.shared / "job.out").read_text() == ""
    assert on(cluster, "node3", "cat", str(cluster.slurm.shared / "0.txt")) == told[0]


@in_a_lab
def test_a_submitit_job_returns_its_result(cluster: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.slurm.conf))
    executor = submitit.SlurmExecutor(folder=cluster.slurm.shared / "submitit", python=sys.executable)
    executor.update_parameters(nodes=2, ntasks_per_node=1, time=5)
    job = executor.submit(socket.gethostname)
    # Without sacct, submitit does not know how a job is; it looks whether the results are there. If Slurm has to start
    # it once more, as it does after 10 s without an answer, that takes longer than a minute.
    wait_until(
        lambda: all(job.task(rank).paths.result_pickle.exists() for rank in range(2)),
        timeout_s=150,
        what=f"the result of job {job.job_id}",
    )
    assert sorted(job.results()) == ["node1", "node2"]


@in_a_lab
def test_an_urgent_job_takes_the_hosts_and_gives_them_back(cluster: Lab) -> None:
    told = cluster.slurm.shared / "preempted"
    (cluster.slurm.shared / "tell.sh").write_text(TELL)
    cluster.slurm.run(["sbatch", "-N3", "--exclusive", "--signal=B:USR1@30", "tell.sh", str(told)])
    wait_until(told.exists, what="the job's start")
    urgent = ["srun", "--partition=urgent", "-N3", "--exclusive", "hostname"]
    assert len(cluster.slurm.run(urgent).split()) == 3
    assert told.read_text().split("\n")[:3] == ["run 0 on node[1-3]", "USR1", "TERM"]
    wait_until(lambda: "run 1 on node[1-3]" in told.read_text(), what="its second run")


@in_a_lab
def test_a_crashed_host_goes_down_and_serves_again_when_revived(
    cluster: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    told = cluster.slurm.shared / "crashed"
    (cluster.slurm.shared / "tell.sh").write_text(TELL)
    cluster.slurm.run(["sbatch", "--nodelist=node3", "tell.sh", str(told)])
    wait_until(told.exists, what="the job's start")
    cluster.crash("node3")
    wait_until(lambda: "down" in cluster.slurm.node_states()["node3"], what="a node that is down")
    cli.main(["lab", "status", "--folder", str(cluster.folder)])
    assert re.search(
        r"node1 .*up   slurm: idle\n(?s:.*)node3 .*crashed   slurm: down", capsys.readouterr().out
    )
    cluster.revive("node3")
    wait_until(lambda: "down" not in cluster.slurm.node_states()["node3"], what="a node that is up")
    assert cluster.slurm.run(["srun", "--nodelist=node3", "hostname"]) == "node3\n"


@in_a_lab
@needs_root
def test_accounting_tells_how_jobs_ended_and_down_leaves_nothing(labs: Path) -> None:
    lab = Lab.up(1, folder=labs / "lab", slurm=True, accounting=True)
    assert Lab.up(1, folder=lab.folder, slurm=True, accounting=True) == lab
    with pytest.raises(KitError, match=r"is one with Slurm and its accounting, not with Slurm;"):
        Lab.up(1, folder=lab.folder, slurm=True)
    lab.slurm.run(["srun", "true"])
    sacct = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State,Account"]
    # slurmctld that finds slurmdbd busy tries again only 10 s later, and may do so more than once.
    wait_until(lambda: lab.slurm.run(sacct) == "1|COMPLETED|lab\n", timeout_s=60, what="the account")
    lab.slurm.run(["sbatch", "--wrap=sleep 1000.6"])
    wait_until(lambda: any("sleep 1000.6" in command for command in everything_of(lab.folder).values()))
    everything = everything_of(lab.folder)
    for program in ("munged", "slurmctld", "slurmdbd", "mariadbd", "slurmd", "slurmstepd"):
        assert any(program in command for command in everything.values()), program
    assert (interface := control_index(lab))
    lab.down()
    assert_gone(lab.folder, everything)
    assert control_index(lab) != interface


@in_a_lab
@needs_root
def test_down_removes_what_an_up_that_was_killed_had_made(labs: Path) -> None:
    folder = labs / "lab"
    up = "import sys; from pathlib import Path; from nodekit.deploy.lab.lab_cluster import Lab; "
    command = [sys.executable, "-c", f"{up}Lab.up(2, folder=Path(sys.argv[1]), slurm=True)", str(folder)]
    with subprocess.Popen(command) as process:
        wait_until(lambda: list(folder.glob("hosts/node*/init.json")), what="a host")
        process.kill()
    everything = everything_of(folder)
    assert any("slurmctld" in command or "lab_host" in command for command in everything.values())
    assert lab_cluster.down(folder) == []
    assert_gone(folder, everything)


@in_a_lab
def test_a_lab_without_slurm_says_so(lab: Lab) -> None:
    with pytest.raises(KitError, match=r"has no Slurm; `kit lab up --slurm` makes one that has"):
        _ = lab.slurm
    with pytest.raises(
        KitError, match=r"is one without Slurm, not with Slurm; `kit lab down --folder .+` it first"
    ):
        Lab.up(3, folder=lab.folder, slurm=True)


@needs_root
def test_missing_slurm_is_told_with_its_packages(labs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    absent = ("munged", "slurmd", "mariadbd")
    monkeypatch.setattr(
        shutil, "which", lambda name, path: None if name in absent else which(name, path=path)
    )
    with pytest.raises(KitError, match=r"needs slurmd, munged; .*`apt-get install munge slurm-wlm`"):
        Lab.up(1, folder=labs / "lab", slurm=True)
    with pytest.raises(KitError, match=r"mariadbd; .*`apt-get install mariadb-server munge slurm-wlm`"):
        Lab.up(1, folder=labs / "lab", slurm=True, accounting=True)


def test_accounting_without_slurm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="give `--slurm`, too"):
        Lab.up(1, folder=tmp_path / "lab", accounting=True)


@pytest.mark.parametrize("name", ["a 0", "a,b", "ü", "x" * 100])
def test_a_folder_that_slurm_cannot_name_is_refused(tmp_path: Path, name: str) -> None:
    slurm = LabSlurm(tmp_path / name, "198.18.3.0/24", {}, has_accounting=False)
    with pytest.raises(KitError, match=r"Slurm cannot use a folder of this name: .*--folder of letters"):
        slurm.write_files()


def test_slurm_conf_has_the_hosts_and_an_own_socket() -> None:
    text = slurm_conf(Path("/lab/munge.socket"), "198.18.3.0/24", HOSTS, has_accounting=False)
    lines = text.splitlines()
    assert "SlurmctldHost=control(198.18.3.1)" in lines
    assert "AuthInfo=socket=/lab/munge.socket,cred_expire=5" in lines
    assert "NodeName=node2 NodeAddr=198.18.3.12 CPUs=2 RealMemory=500" in lines
    assert "Accounting" not in text
    text = slurm_conf(Path("/lab/munge.socket"), "198.18.3.0/24", HOSTS, has_accounting=True)
    assert {"AccountingStorageHost=198.18.3.1", "AccountingStoragePass=/lab/munge.socket"} <= set(
        text.splitlines()
    )
