import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodekit.deploy.connect.channel import HostChannel, open_local
from nodekit.deploy.host.errors import cure_of
from nodekit.deploy.host.node import agents
from nodekit.deploy.records.runs import Run
from nodekit.deploy.records.secret_files import RANKS, secrets_file
from nodekit.slurm.cluster.shared_folder import forget_secrets
from nodekit.slurm.submission import submit


@pytest.fixture
def channel() -> Iterator[HostChannel]:
    channel = open_local("login", sys.executable)
    yield channel
    channel.close()


SBATCH = """#!/bin/sh
ls "$KIT_TEST"/*/slurm >"$KIT_TEST/seen"
echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy" >&2
exit 1
"""


def test_a_job_that_slurm_refuses_leaves_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Made up: with --test-only a real one refuses before there are secrets, unless the queue fills up in between.
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text(SBATCH)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("KIT_TEST", str(tmp_path))
    run_dirs = [tmp_path / "a 0", tmp_path / "b"]
    for each in run_dirs:
        (each / "slurm").mkdir(parents=True)
        (each / "slurm" / "secrets-before.json").write_text("{}")  # of a job that nobody has looked at since
    private = {"secrets-1.json": {"KEY": "s3cr3t"}, "notify-1.json": {"URL": "s3cr3t"}}
    said = submit.submit(str(tmp_path / "b/slurm"), list(map(str, run_dirs)), {}, 1, private, test=False)
    assert said == {"problem": "Batch job submission failed: Job violates accounting/QOS policy"}
    seen = (tmp_path / "seen").read_text()
    assert (seen.count("secrets-1.json"), seen.count("notify-1.json"), seen.count("before")) == (2, 2, 0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]


def place(run_dir: Path, *names: str) -> Path:
    (run_dir / "slurm").mkdir(parents=True)
    (run_dir / "slurm" / "job.json").write_text(json.dumps({"private": names}))
    for name in names:
        (run_dir / "slurm" / name).write_text('{"KEY": "s3cr3t"}')
    return run_dir


def run_in(run_dir: Path, private: str) -> Run:
    return Run(
        run_id="lab-1",
        name="lab",
        inventory_path="lab.yaml",
        inventory={},
        command=None,
        created=0.0,
        slurm={"job_id": "1", "run_dir": str(run_dir), "private": private},
    )


def test_who_removes_the_secrets_of_a_job_that_is_over_leaves_those_of_the_next_one(
    tmp_path: Path, channel: HostChannel
) -> None:
    run_dir = place(tmp_path / 'kit\'s "folder" $HOME;' / "runs/lab-1", "secrets-2.json", "notify-2.json")
    (run_dir / "slurm" / "secrets-1.json").write_text('{"KEY": "s3cr3t"}')
    run = run_in(run_dir, "secrets-1.json notify-1.json")
    forget_secrets(run, channel)
    forget_secrets(run, channel)  # whoever looks
    assert sorted(path.name for path in run_dir.glob("slurm/*-*.json")) == ["notify-2.json", "secrets-2.json"]
    assert secrets_file(run_dir, RANKS) == run_dir / "slurm" / "secrets-2.json"


def test_secrets_that_cannot_be_removed_are_told(
    tmp_path: Path, channel: HostChannel, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = tmp_path / "slurm/secrets-1.json"
    (stuck / "a folder").mkdir(parents=True)  # root may remove any file
    forget_secrets(run_in(tmp_path, stuck.name), channel)
    said = capsys.readouterr().err
    assert f"login: secrets of a job that is over are still there: rm: cannot remove '{stuck}'" in said


def test_no_agent_starts_without_the_secrets_it_was_to_have(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="were removed when it ended") as caught:
        agents.prestart(str(tmp_path / "n0"), sys.executable, "/kit", {}, str(tmp_path / "secrets-1.json"))
    assert cure_of(caught.value) == "kit up brings them again"
