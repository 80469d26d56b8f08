"""What every test gets: a home of its own, a clean environment, and a check that nothing is left running."""

import contextlib
import gc
import logging
import os
import secrets
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import warm_agents
import warm_python
from hypothesis import HealthCheck, settings

from nodekit.deploy.agent.ranks import target

# Tests share the cores. With a thread for each core in every rank, threads wait for each other in a loop: each step
# then takes three times the processor time.
os.environ["OMP_NUM_THREADS"] = "1"

# No name server knows the hosts of a test, and one that does not answer takes 5 s for each. (Read by the C library.)
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

# In the background of a shell script, these tests and all that they start would ignore Ctrl-C, which they are to hear.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# As under nohup a terminal's end.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Hypothesis draws the same examples in each run, so that a run that fails tells of a change; `make fuzz` draws others.
# How long an example takes, and how it is drawn, is not what these tests are about.
settings.register_profile(
    "fuzz", deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True
)
settings.register_profile("same", settings.get_profile("fuzz"), derandomize=True)
settings.load_profile("same")

pytest_plugins = ["agents", "fake_nvml", "kit_runs", "lab_hosts", "slurm_runs", "sshd"]

LONGEST_FIRST = (
    *(
        "slurm",
        "engines",
        "recovery_lab",
        "readme",
        "drill",
        "agent",
        "up_local",
        "up_lab",
        "compare",
        "spawn",
    ),
    *(
        "reform",
        "own_loop",
        "workers",
        "environment",
        "hang",
        "apply",
        "out_dir",
        "docs",
        "training",
        "contract",
        "netcheck",
        "netbench",
    ),
    *(
        "lab_slurm",
        "parts",
        "horovod",
        "watch",
        "snapshot_faults",
        "replicas",
        "report_page",
        "export_formats",
        "netdeep",
    ),
    *("slurm_jobs", "slurm_sweep", "simulation", "slurm_export", "sharded", "text", "board"),
)
"""The files that take longest: workers begin with these, so that none has a long one left at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the Makefile has xdist keep this order."""
    order = {f"test_{name}.py": number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """In the process that starts xdist's workers, or is the only one: their pythons (`warm_python`) are one for all."""
    if not hasattr(config, "workerinput"):
        warm_python.begin_session()


def pytest_unconfigure(config: pytest.Config) -> None:
    """What is behind them ends with this process."""
    if not hasattr(config, "workerinput"):
        warm_agents.end_session()
        warm_python.end_session()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported with the tests stays: it is not searched for garbage, neither meanwhile nor ever after."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


_GIVEN = frozenset(os.environ)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before any fixture: forget what tests, or the libraries that they import, have left in this process.

    With another environment than the first test's, nothing could be a fork of `warm_python` any more.
    """
    for name in os.environ.keys() - _GIVEN:
        if target.READ_AT_START.match(name):
            del os.environ[name]
    logging.getLogger("nodekit").handlers.clear()  # of streams that were a test's own, and are closed


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh HOME and XDG state folder, and none of the caller's distributed settings."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / ".local/state"))
    for name in list(os.environ):
        if name.startswith(("NODEKIT_RUN", "TORCH", "NCCL_", "GLOO_", "SSH_", "SLURM_")) or name in (
            "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        ):  # fmt: skip
            monkeypatch.delenv(name)
    return home


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Every process of the session carries a mark in its environment; at the end none may be left."""
    mark = f"{warm_python.MARK}={secrets.token_hex(8)}"
    name, _, value = mark.partition("=")
    os.environ[name] = value
    yield
    deadline = time.monotonic() + 30  # what was killed just now needs a moment to end
    while (left := _processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"still running at the end of the session: {left}"


def _processes_with(mark: str) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found
