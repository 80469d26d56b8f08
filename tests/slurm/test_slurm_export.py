"""`kit export`: the script it writes, submitted by plain sbatch on a real Slurm cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from agents import until
from slurm_runs import TASK, Site

from nodekit.deploy.commands.cli import main

TELLS = """
print(f"the secret has {len(os.environ['KIT_SECRET'])} letters", flush=True)
"""
SECRET = "s3cr3t-s3cr3t"


def job(site: Site, job_id: str) -> dict[str, str]:
    text = site.ask("scontrol", "show", "job", "--oneliner", job_id)
    return dict(re.findall(r"(\w+)=(\S*)", text))


def queued(site: Site, name: str) -> list[str]:
    """The jobs that runs of this name ever had."""
    names = site.ask("squeue", "--noheader", "--states=all", "--format=%j").splitlines()
    return [each for each in names if each.startswith(name)]


@pytest.mark.lab
def test_an_exported_script_trains_by_plain_sbatch_and_goes_on_after_a_requeue(site: Site) -> None:
    site.python = sys.executable  # Slurm is to see all processes of the job
    (site.folder / "told.py").write_text(TASK + TELLS)
    name = "ex 'port"
    command = ["-m", "nodekit.training", "--task", "told.py:Task", "--epochs", "2", "--snapshot-every", "5"]
    path = site.inventory("exported", [], {"nodes": 2})
    values = yaml.safe_load(path.read_text())
    values["name"] = name
    values["job"] = {"env": values["job"]["env"], "secrets": ["KIT_SECRET"]}
    path.write_text(yaml.safe_dump(values))
    script = site.folder / "my job.sh"
    done = site.kit("export", path.name, "--to", "sbatch", "-o", script.name, "--", *command)
    assert done.returncode == 0, done.stderr
    assert re.search(r"lies ready in .*; sbatch 'my job\.sh' runs it", done.stdout), done.stdout
    assert not queued(site, name)
    text = script.read_text()
    assert "export KIT_SECRET" in text
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    (run_dir,) = (site.shared / "runs").glob(f"{name}-*")

    # What kit up asks for: the others go on without a lost node, and it is queued again.
    asked = {line for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"#SBATCH --nodes=2", "#SBATCH --no-kill", "#SBATCH --requeue", "#SBATCH --time=20"} <= asked

    site.hold("exported").touch()
    # As from within a task of an array that was queued again often: sbatch passes these on.
    of_another = {"SLURM_RESTART_COUNT": "99", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "7"}
    env = {**site.lab.slurm.env, **of_another, "KIT_SECRET": SECRET}
    sbatch = subprocess.run(
        ["sbatch", "--parsable", script.name], cwd=site.folder, env=env, capture_output=True, text=True, check=True
    )  # fmt: skip
    job_id = sbatch.stdout.strip()

    def steps() -> list[int]:
        found: list[int] = []
        for file in run_dir.glob("*/output/metrics.jsonl"):
            for line in file.read_text().splitlines():
                with contextlib.suppress(ValueError):  # it is just being written
                    found += [each["step"]] if "loss" in (each := json.loads(line)) else []
        return found

    def said() -> str:
        logs = [run_dir / "slurm/logs/kit.log", *(run_dir / "slurm").glob("*_log.out")]
        return "\n".join(file.read_text() for file in logs if file.exists())

    try:
        until(lambda: (run_dir / "slurm/logs/kit.log").exists() and len(steps()) >= 3, timeout_s=90)
        site.slurm("scancel", "--signal=USR2", job_id)  # as Slurm does before the time limit
        until(lambda: job(site, job_id)["Restarts"] == "1", timeout_s=60, what="a requeue")
        site.hold("exported").unlink()
        # By the real python, and Slurm starts it again after some seconds: 90 s are few for that on a busy machine.
        until(lambda: job(site, job_id)["JobState"] == "COMPLETED", timeout_s=150, what="the end")
    except AssertionError as error:
        raise AssertionError(f"{error}; it said:\n{said()}") from None
    assert "resumed at step" in said()
    assert f"{run_dir.name} trained to the end in" in said()
    assert set(steps()) == set(range(1, 47))
    assert f"the secret has {len(SECRET)} letters" in said()
    attempts = [run_dir / "slurm" / f"{job_id}.{number}.json" for number in (0, 1)]
    assert [Path(json.loads(each.read_text())["log"]).name for each in attempts] == [
        f"{job_id}_0_log.out"
    ] * 2
    for file in (script, *run_dir.rglob("*")):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_the_task_of_a_script_on_another_node_stays_while_the_leader_stops_the_job(tmp_path: Path) -> None:
    """Slurm sends SIGTERM to all tasks: scancel left `an agent may still run there` for each node but the first."""
    place = tmp_path / "slurm" / "20.0.json"
    place.parent.mkdir()
    argv = [sys.executable, "-m", "nodekit.slurm.allocation.sbatch_entry", str(tmp_path)]
    env = {**os.environ, "SLURM_JOB_ID": "20", "SLURM_RESTART_COUNT": "0", "SLURM_PROCID": "1"}

    def ignored(task: subprocess.Popen[bytes]) -> int:
        status = Path(f"/proc/{task.pid}/status").read_text()
        return int(re.findall(r"SigIgn:\s*(\w+)", status)[0], 16)

    with subprocess.Popen(argv, env=env) as task:
        try:
            until(lambda: ignored(task) >> (signal.SIGUSR2 - 1) & 1, timeout_s=30, what="the task's start")
            task.terminate()
            place.write_text('{"over": true}')
            assert task.wait(timeout=30) == 0
        finally:
            task.kill()


@pytest.mark.lab
def test_an_export_goes_to_stdout_alone_and_queues_nothing(site: Site) -> None:
    path = site.inventory(
        "plain", ["job.py", "fine", "0"], {"nodes": 1, "partition": "urgent", "setup": ["# mine"]}
    )
    done = site.kit("export", path.name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "#!/bin/bash\n#\n# Runs by plain sbatch what `kit up plain.yaml` would submit.\n"
    )
    assert "\n#SBATCH --partition=urgent\n" in done.stdout
    assert "\n# mine\nexport PYTHONPATH=" in done.stdout
    assert not queued(site, "plain")
    # What slurm.setup may bring is no reason to refuse, but one to say it; not where it would be part of the script.
    (site.folder / "lacks.py").write_text("import os\nimport nothere\n")
    done = site.kit("export", path.name, "--", "lacks.py")
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "warning: lacks.py:2: no module nothere" in done.stderr
    done = site.kit("export", path.name, "--", "absent.py")
    assert done.returncode == 1
    assert "no absent.py in" in done.stderr


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("hosts: {a: }", "found hosts, wanted slurm"),
        ("slurm: {nodes: 1, array: 0-3}", "slurm.array: a script is for one run"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    section: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab.yaml").write_text(section)
    assert main(["export", str(tmp_path / "lab.yaml")]) == 1
    assert problem in capsys.readouterr().err
