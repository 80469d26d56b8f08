"""The last step of a job's batch script: requeue the job if srun ended before the leader did.

Even with --no-kill, srun ends the tasks of all nodes, and so the job, when a node has rebooted before Slurm noticed its
loss ("io error and missing step"). A crash of the leader ends the job too if there is no other task.

Usage: ``python -m nodekit.slurm.allocation.srun_loss RUNS``, with the folder of all runs in the shared folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

WHY = "srun ended before the leader did"


def main(runs: Path) -> None:
    """Requeue the job, or record it as failed, unless the leader has written that the job is over."""
    attempt = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    # The tasks of an array share this script, but each has a run, and an attempt, of its own.
    for place in runs.glob(f"*/slurm/{attempt}.json"):
        if json.loads(place.read_text(encoding="utf-8")).get("over"):
            continue
        # Imported here: it takes half a second, and most jobs end above.
        from nodekit.slurm.allocation import requeue

        run_dir = place.parent.parent
        requeue.keep_records_in(run_dir)
        if requeue.job_now().get("JobState") != "RUNNING":
            continue
        cause = requeue.srun_cause(place)
        if requeue.is_missing_step(place) or requeue.has_made_progress(run_dir):
            requeue.queue_again_without_leader(run_dir, WHY, [], cause)
        else:
            why = f"{WHY}, and it is not queued again: it had not made its first step, as far as kit can tell"
            requeue.fail_without_leader(run_dir, why, cause)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
