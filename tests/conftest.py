"""What every test gets: a home of its own, a clean environment, and a check that nothing is left running."""

import os
from pathlib import Path

import pytest

pytest_plugins = ["agents", "kit_runs", "lab_hosts", "sshd"]


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh HOME and XDG state folder, and none of the caller's distributed settings."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / ".local/state"))
    for name in list(os.environ):
        if name.startswith(("NODEKIT_", "TORCH", "NCCL_", "GLOO_", "SSH_", "SLURM_")) or name in (
            "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
        ):  # fmt: skip
            monkeypatch.delenv(name)
    return home
