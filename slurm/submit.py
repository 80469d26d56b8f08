"""Submits one job through submitit: runs on the login node, reads JSON on stdin, writes JSON on stdout.

``python -m nodekit.slurm.submit``, with {"run_dir", "parameters", "max_timeouts"}, answers {"job_id"}, or {"problem"}
with what Slurm said. With {"test": true} it only asks Slurm whether it would take the job.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from nodekit.slurm.allocation import Allocated


def submit(run_dir: str, parameters: dict[str, Any], max_timeouts: int, test: bool) -> dict[str, str]:
    """Submit the job of a run, or ask whether it would be taken."""
    folder = Path(run_dir) / "slurm"
    executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=max_timeouts)
    executor.update_parameters(**parameters)
    if test:
        return _ask(executor._make_submission_file_text("true", "test"))
    try:
        return {"job_id": str(executor.submit(Allocated(run_dir)).job_id)}
    except (FailedJobError, FailedSubmissionError) as error:
        return {"problem": _words(str(error))}


def _ask(script: str) -> dict[str, str]:
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        done = subprocess.run(["sbatch", "--test-only", file.name], capture_output=True, text=True)
    return {} if done.returncode == 0 else {"problem": _words(done.stderr)}


def _words(text: str) -> str:
    """What Slurm itself said, of all that is said around it."""
    marks = ("sbatch: error:", "allocation failure:", "sbatch:")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(marks)] or lines[-1:]
    for mark in marks:
        said = [line.removeprefix(mark).strip() for line in said]
    return "; ".join(dict.fromkeys(said))


if __name__ == "__main__":
    print(json.dumps(submit(**json.load(sys.stdin))))
