"""Where kit keeps what it knows of runs and labs on this machine, and what it can do without."""

import os
from pathlib import Path


def state_folder() -> Path:
    """``$XDG_STATE_HOME/nodekit``; the default where that is not an absolute path, as XDG's specification wants it."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local/state") / "nodekit"


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/nodekit``, by default in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nodekit"


def runs_folder() -> Path:
    """Where the runs' records are."""
    return state_folder() / "runs"
