"""The mends of torch's rendezvous hold for every line of torch releases that pyproject.toml allows."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import upstream

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], "subprocess.CompletedProcess[str]"]:
    """What tests/test_rendezvous.py said to each release; they are tried side by side."""
    kept = HERE.parent / ".venv" / "upstream"
    kept.mkdir(exist_ok=True, parents=True)

    def run(release: str) -> "subprocess.CompletedProcess[str]":
        base = tmp_path_factory.getbasetemp() / release
        argv = [HERE / "upstream.py", upstream.fetch(release, kept), "-q", "-p", "no:cacheprovider"]
        return subprocess.run(
            [sys.executable, *argv, f"--basetemp={base}", HERE / "test_rendezvous.py"],
            capture_output=True,
            text=True,
            timeout=200,
        )

    with ThreadPoolExecutor(2) as pool:
        running = {release: pool.submit(run, release) for release in upstream.RELEASES}
        return lambda release: running[release].result()


@pytest.mark.parametrize("release", upstream.RELEASES)
def test_the_mends_hold_for(release: str, tried: Callable[[str], "subprocess.CompletedProcess[str]"]) -> None:
    done = tried(release)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_releases_are_those_that_are_allowed() -> None:
    lines = {".".join(release.split(".")[:2]) for release in (*upstream.RELEASES, torch.__version__)}
    allowed = (HERE.parent / "pyproject.toml").read_text()
    first, last = min(lines, key=_order), max(lines, key=_order)
    assert f'"torch>={first},<{_order(last)[0]}.{_order(last)[1] + 1}"' in allowed
    assert len(lines) == _order(last)[1] - _order(first)[1] + 1


def _order(line: str) -> tuple[int, int]:
    major, minor = line.split(".")
    return int(major), int(minor)
