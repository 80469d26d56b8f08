"""The folders on this machine where kit keeps its state (runs, labs) and its cache."""

import os
from pathlib import Path


def state_folder() -> Path:
    """Return ``$XDG_STATE_HOME/nodekit``, by default in ``~/.local/state``."""
    return _base("XDG_STATE_HOME", ".local/state") / "nodekit"


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/nodekit``, by default in ``~/.cache``."""
    return _base("XDG_CACHE_HOME", ".cache") / "nodekit"


def _base(variable: str, default: str) -> Path:
    """Return the folder that a variable names, or the default below the home; XDG has relative paths ignored."""
    given = Path(os.environ.get(variable, ""))
    return given if given.is_absolute() else Path.home() / default


def runs_folder() -> Path:
    """Return the folder of the runs' records."""
    return state_folder() / "runs"
