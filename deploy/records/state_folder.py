"""The folders on this machine where kit keeps its state (runs, labs) and its cache."""

import os
from pathlib import Path


def state_folder() -> Path:
    """Return ``$XDG_STATE_HOME/nodekit``, by default in ``~/.local/state``; XDG has relative paths ignored."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local/state") / "nodekit"


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/nodekit``, by default in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nodekit"


def runs_folder() -> Path:
    """Return the folder of the runs' records."""
    return state_folder() / "runs"
