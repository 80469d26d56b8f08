"""The pythons of tests that are forks: to whoever starts one, it is a python, and none outlives its session."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import until

pytestmark = pytest.mark.slow

MAKER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import warm_python
warm_python.serve(sys.argv[1], [])
"""
SESSION = """
import os, sys, time
sys.path[:0] = [sys.argv[1]]
import warm_python
os.environ["OMP_NUM_THREADS"] = "1"
warm_python.begin_session()
print(warm_python.started(sys.argv[2]), flush=True)
time.sleep(100)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    (folder / "maker.py").write_text(MAKER)
    return folder


@contextlib.contextmanager
def session(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A process that has begun a session, and a program of it."""
    argv = [sys.executable, "-c", SESSION, str(Path(__file__).parent), str(folder / "maker.py")]
    env = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.fixture(scope="module")
def program(folder: Path) -> Iterator[str]:
    with session(folder) as (_, program):
        yield program


def started(program: str, folder: Path, text: str, *args: str, **how: str) -> "subprocess.Popen[str]":
    (folder / "script.py").write_text(text)
    return subprocess.Popen(
        [program, "script.py", *args],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **how},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_it_is_given_what_a_python_is_and_ends_as_one_does(program: str, folder: Path) -> None:
    text = "import os, sys\nprint([*sys.argv, os.environ['WHAT'], os.getcwd(), input()])\nsys.exit(7)\n"
    odd = ["", "a b", "ü\n", "--x=$HOME"]
    with started(program, folder, text, *odd, WHAT="a=b\n") as process:
        said, _ = process.communicate("said\n", timeout=60)
    assert said == f"{['script.py', *odd, 'a=b' + chr(10), str(folder), 'said']}\n"
    assert process.returncode == 7


def test_its_end_by_a_signal_is_seen(program: str, folder: Path) -> None:
    with started(program, folder, "import os\nos.kill(os.getpid(), 9)\n") as process:
        assert process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_is_passed_on_however_soon_it_comes(
    program: str, folder: Path, number: signal.Signals
) -> None:
    for _ in range(30):
        with started(program, folder, "import time\ntime.sleep(100)\n") as process:
            process.send_signal(number)
            assert process.wait(60) == -number


def test_a_signal_that_is_ignored_stays_so(program: str, folder: Path) -> None:
    text = "import signal\nprint(signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, flush=True)\ninput()\n"
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with started(program, folder, text) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "True\n"
            process.send_signal(signal.SIGUSR1)
            process.communicate("\n", timeout=60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert process.returncode == 0


def test_the_fork_ends_with_the_program(program: str, folder: Path) -> None:
    with started(
        program, folder, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n"
    ) as process:
        assert process.stdout is not None
        fork = Path("/proc", process.stdout.readline().strip())
        assert fork.exists()
        process.kill()
    until(lambda: not fork.exists(), timeout_s=30, what="the fork's end")


def test_what_is_behind_it_ends_with_the_session(folder: Path) -> None:
    text = "import os\nprint(os.getppid(), flush=True)\ninput()\n"
    with session(folder) as (process, program), started(program, folder, text) as fork:
        assert fork.stdout is not None
        behind = Path("/proc", fork.stdout.readline().strip())
        assert b"maker.py" in (behind / "cmdline").read_bytes()
        process.kill()  # it has removed nothing
        assert fork.wait(60) == -signal.SIGKILL
    until(lambda: not behind.exists(), timeout_s=30, what="the server's end")
