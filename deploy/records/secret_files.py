"""Reads secrets: from this process's environment, or from the files of a run that was submitted to Slurm.

Those files are in the run's shared folder, with mode 0600; later submissions do not read them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from nodekit.inventory.schema import Inventory, Notify

RANKS = "secrets"
"""The kind of file with the values of `job.secrets`."""
NOTIFY = "notify"
"""The kind of file with the values of `notify:`, which the ranks do not get."""


def notify_names(notify: Notify | None) -> tuple[str, ...]:
    """Return the names of the environment variables with the secrets of `notify:`."""
    hook = notify.webhook if notify else None
    return tuple(filter(None, [hook.url_from, *hook.headers_from.values()])) if hook else ()


def notify_secrets(inventory: Inventory) -> dict[str, str]:
    """Return name → value of the secrets of `notify:`, from this process's environment.

    Raises:
        KitError: some are not set.
    """
    names = notify_names(inventory.notify)
    absent = [name for name in names if not os.environ.get(name)]
    if absent:
        raise KitError(
            f"{inventory.path}: notify.webhook names {', '.join(absent)}, not set in this environment",
            cure=f"export {absent[0]}=… and run again",
        )
    return {name: os.environ[name] for name in names}


def secrets_file(run_dir: Path, kind: str) -> Path | None:
    """Return the JSON file with the secrets of a kind (`RANKS`, `NOTIFY`); None if the job was submitted without.

    Raises:
        OSError: the run's ``job.json`` cannot be read.
    """
    job = json.loads((run_dir / "slurm" / "job.json").read_text(encoding="utf-8"))
    names = [name for name in job["private"] if name.startswith(f"{kind}-")]
    return run_dir / "slurm" / names[0] if names else None
