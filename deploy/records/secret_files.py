"""Where secrets are read from: the environment here, or the files of a run that Slurm starts.

These are in the run's shared folder, 0600, and no later submission reads them.
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
"""The values of `job.secrets`."""
NOTIFY = "notify"
"""Those of `notify:`, which the ranks do not get."""


def notify_names(notify: Notify | None) -> tuple[str, ...]:
    """The environment variables that hold the secrets of `notify:`."""
    hook = notify.webhook if notify else None
    return tuple(filter(None, [hook.url_from, *hook.headers_from.values()])) if hook else ()


def notify_secrets(inventory: Inventory) -> dict[str, str]:
    """The values of the secrets of `notify:`, from the environment here.

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
    """The file with the values of a kind (JSON); None where the job was submitted with none.

    Raises:
        OSError: what was submitted cannot be read.
    """
    job = json.loads((run_dir / "slurm" / "job.json").read_text(encoding="utf-8"))
    names = [name for name in job["private"] if name.startswith(f"{kind}-")]
    return run_dir / "slurm" / names[0] if names else None
