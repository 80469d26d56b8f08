"""What a job's batch script does last: has Slurm queue the job again, should srun have broken off.

srun ends the tasks of all nodes when one of them was started anew before Slurm had missed it ("io error and missing
step"), --no-kill or not, and with it would end the job. So would a crash of the leader where there is no other task.

``python -m nodekit.slurm.allocation.srun_loss RUNS``, with the folder of all runs in the shared one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

WHY = "srun ended before the leader did"


def main(runs: Path) -> None:
    """Look whether the leader has said that the job is over, and else ask Slurm."""
    attempt = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    # Of an array, which has one script, each task has a run of its own.
    for place in runs.glob(f"*/slurm/{attempt}.json"):
        if json.loads(place.read_text(encoding="utf-8")).get("over"):
            continue
        # Late: most jobs end above, and this is half a second.
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
