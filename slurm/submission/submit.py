"""Submit jobs through submitit: runs on the login node, reads JSON on stdin, writes JSON on stdout.

``python -m nodekit.slurm.submission.submit`` takes {"folder", "run_dirs", "parameters", "max_timeouts", "private",
"test"}. The answer is {"job_ids"}, one for each run, of several as the tasks of an array; or {"problem"} with Slurm's
message, and "is_unanswered" if Slurm did not answer.
With {"test": true} it only asks Slurm whether it would take the job. If not, "without" lists each parameter without
which Slurm would take the job: one of these is wrong.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from nodekit.deploy.host.files import write_private
from nodekit.deploy.records.secret_files import NOTIFY, RANKS
from nodekit.slurm.allocation.allocation import Allocated
from nodekit.slurm.sbatch_parameters import overriding, written

OWN = ("job_name", "ntasks_per_node", "setup", "signal_delay_s", "srun_args", "stderr_to_stdout")
"""Parameters that kit sets, or that sbatch does not see: not tried one by one."""

UNANSWERED = re.compile("timed out|Zero Bytes were transmitted|Unable to contact slurm controller")
"""Matches sbatch's message if its request was sent, or may have been, and no answer came."""


def submit(
    folder: str,
    run_dirs: list[str],
    parameters: dict[str, Any],
    max_timeouts: int,
    private: dict[str, dict[str, str]],
    test: bool,
) -> dict[str, Any]:
    """Submit the jobs of runs, or with `test` ask whether Slurm would take them; return the answer described above.

    The secrets are written here, and not earlier, as a file for each item of `private` in each run's folder slurm/.
    When this process ends, either a job will remove them, or they are removed, even if kit is gone meanwhile.
    """
    if test:
        return _test(folder, parameters)
    executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=max_timeouts)
    # submitit's default for array_parallelism is 256.
    executor.update_parameters(**{"array_parallelism": len(run_dirs), **written(parameters)})
    folders = [Path(run_dir, "slurm") for run_dir in run_dirs]
    try:
        for each in folders:
            _remove_secrets(each)  # left by an earlier job whose end was not recorded
            for name, values in private.items():
                write_private(str(each / name), json.dumps(values).encode(), durable=True)
        jobs = executor.map_array(Allocated(), run_dirs)  # for one run a plain job
        return {"job_ids": [str(job.job_id) for job in jobs]}
    except BaseException as error:
        is_told = isinstance(error, (FailedJobError, FailedSubmissionError))
        answer = _problem(_words(str(error))) if is_told else {}
        if "is_unanswered" not in answer:  # else Slurm may have the job all the same
            for each in folders:
                _remove_secrets(each)
        if is_told:
            return answer
        raise


def _remove_secrets(folder: Path) -> None:
    for kind in (RANKS, NOTIFY):
        for file in folder.glob(f"{kind}-*.json*"):  # also those only half written
            file.unlink(missing_ok=True)


def _test(folder: str, parameters: dict[str, Any]) -> dict[str, Any]:
    problem = _ask(folder, parameters)
    if not problem:
        return {}
    answer = _problem(problem)
    if "is_unanswered" in answer:
        return answer
    further = parameters.get("additional_parameters", {})
    fewer = {key: _without(parameters, key) for key in parameters if key != "additional_parameters"}
    fewer |= {key: {**parameters, "additional_parameters": _without(further, key)} for key in further}
    without = [key for key, each in fewer.items() if key not in OWN and not _ask(folder, each)]
    return {**answer, "without": without}


def _problem(said: str) -> dict[str, Any]:
    return {"problem": said, **({"is_unanswered": True} if UNANSWERED.search(said) else {})}


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def _ask(folder: str, parameters: dict[str, Any]) -> str:
    """Return why Slurm would not take a job; "" if it would."""
    executor = submitit.SlurmExecutor(folder=folder)
    executor.update_parameters(**written(parameters))
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(executor._make_submission_file_text("true", "test"))
        file.flush()
        done = subprocess.run(["sbatch", "--test-only", file.name], capture_output=True, text=True)
    return "" if done.returncode == 0 else _words(done.stderr)


def _words(text: str) -> str:
    """Return Slurm's own messages from an output that contains more."""
    marks = ("sbatch: error:", "allocation failure:", "sbatch:")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(marks)] or lines[-1:]
    for mark in marks:
        said = [line.removeprefix(mark).strip() for line in said]
    return "; ".join(dict.fromkeys(said))


if __name__ == "__main__":
    given = json.load(sys.stdin)
    for name in overriding(given["parameters"], list(os.environ)):
        del os.environ[name]
    print(json.dumps(submit(**given)))
