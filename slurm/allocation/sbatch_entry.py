"""The program that a script of `kit export` starts on each node, in place of submitit's task under `kit up`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from nodekit.slurm.allocation.allocation import Allocated

ASK_S = 60.0


def queue_again(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # as signal wants it
    """Requeue the job before its time limit, as submitit does under `kit up`; the script then resumes the run."""
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True, timeout=ASK_S)
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, queue_again)
    # As submitit does: the leader, which handles it, needs the tasks of the other nodes to see how their agents end.
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.exit(Allocated()(sys.argv[1]))
