"""Where kit keeps what it knows of runs and labs on this machine."""

import os
from pathlib import Path


def state_folder() -> Path:
    """``$XDG_STATE_HOME/nodekit``; the default where that is not an absolute path, as XDG's specification wants it."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local/state") / "nodekit"


def runs_folder() -> Path:
    """Where the runs' records are."""
    return state_folder() / "runs"
