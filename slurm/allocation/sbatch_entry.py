"""What a script of `kit export` starts on each node: the run's part there, as submitit starts it for `kit up`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from nodekit.slurm.allocation.allocation import Allocated

ASK_S = 60.0


def queue_again(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # as signal wants it
    """What submitit does where `kit up` submits: Slurm starts the same script again, which goes on."""
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True, timeout=ASK_S)
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, queue_again)
    sys.exit(Allocated()(sys.argv[1]))
