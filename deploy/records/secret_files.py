"""The secrets of a run that Slurm starts: files in the run's shared folder, 0600, which no later submission reads."""

from __future__ import annotations

import json
from pathlib import Path

RANKS = "secrets"
"""The values of `job.secrets`."""
NOTIFY = "notify"
"""Those of `notify:`, which the ranks do not get."""


def secrets_file(run_dir: Path, kind: str) -> Path | None:
    """The file with the values of a kind (JSON); None where the job was submitted with none.

    Raises:
        OSError: what was submitted cannot be read.
    """
    job = json.loads((run_dir / "slurm" / "job.json").read_text(encoding="utf-8"))
    names = [name for name in job["private"] if name.startswith(f"{kind}-")]
    return run_dir / "slurm" / names[0] if names else None
