"""Completion: what each argument can be, what a shell gets, and that real bash, zsh and fish show it."""

from __future__ import annotations

import ast
import io
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import argcomplete
import pytest
from agents import until

from nodekit.deploy.commands import cli
from nodekit.deploy.commands.prepare import completion
from nodekit.deploy.records.runs import Run

HEAVY = ("torch", "pydantic", "rich", "paramiko", "fabric", "yaml", "ClusterShell")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an inventory, beside two runs on record."""
    for number, (run_id, state) in enumerate(
        [("lab-1121-101500-3f00", "failed"), ("lab-1122-060115-77ab", "succeeded")]
    ):
        run = Run(
            run_id=run_id,
            name="lab",
            inventory_path=str(tmp_path / "lab.yaml"),
            inventory={},
            command=None,
            created=time.mktime((2026, 11, 21 + number, 6, 1, 0, 0, 0, -1)),
            state=state,
            nodes={"gpu1": {}, "gpu2": {}},
        )
        run.save()
        os.utime(run.folder / "run.json", (number, number))
    (tmp_path / "lab.yaml").write_text("hosts:\n  gpu[1-2]:\n")
    (tmp_path / "train it.py").write_text("")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What bash would be told of a line that ends at the cursor."""
    for name, value in {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'@><=;|&(:",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line.encode())),
    }.items():
        monkeypatch.setenv(name, value)
    parser, told = cli.parser(), io.StringIO()
    completion.attach(parser)

    class Asked(Exception):
        pass

    def leave(status: int) -> None:
        raise Asked

    finder = argcomplete.CompletionFinder()
    monkeypatch.setattr(finder, "_init_debug_stream", lambda: None)  # it would take file 9 for its own
    with pytest.raises(Asked):
        finder(parser, always_complete_options=False, exit_method=leave, output_stream=told)
    return told.getvalue().split("\n") if told.getvalue() else []


RUNS = ["lab-1122-060115-77ab", "lab-1121-101500-3f00"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("kit noti", ["notify"]),
        ("kit logs ", RUNS),
        ("kit down lab-1121", ["lab-1121-101500-3f00"]),
        ("kit rm lab-1121-101500-3f00 ", ["lab-1122-060115-77ab"]),
        ("kit runs --compare lab-1122-060115-77ab ", ["lab-1121-101500-3f00"]),
        ("kit runs ", [*RUNS, "lab.yaml", "sub/", "lab", "local", "slurm"]),
        ("kit test ", [*RUNS, "sub/"]),
        ("kit logs lab-1121 --node ", ["gpu1", "gpu2"]),
        ("kit up la", ["lab.yaml", "lab"]),
        ("kit check s", ["sub/", "slurm"]),
        ("kit shell lab.yaml gpu", ["gpu1", "gpu2"]),
        ("kit drill lab.yaml work", ["worker"]),
        ("kit compare --engines ddp,f", ["ddp,fsdp", "ddp,fabric"]),
        ("kit up lab.yaml -- tr", ["train\\ it.py"]),
        ("kit up lab.yaml --skip", ["--skip-check"]),
        ("kit runs --last ", []),
        ("kit completion f", ["fish"]),
    ],
)
def test_each_argument_is_completed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, told: list[str]
) -> None:
    assert asked(line, monkeypatch) == told


def test_what_is_no_record_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Path(os.environ["XDG_STATE_HOME"]) / "nodekit/runs"
    (records / "lab-torn").mkdir()
    (records / "lab-torn/run.json").write_text('{"run_id": ')

    assert list(completion.runs_on_record("lab-")) == RUNS
    assert completion.runs_on_record("lab-*") == {}


def test_nothing_heavy_is_imported_while_somebody_types(folder: Path) -> None:
    code = f"""
import os, sys
def leave(status):
    os.write(1, repr([name for name in {HEAVY!r} if name in sys.modules]).encode())
    os.abort() if status else os.kill(os.getpid(), 9)
os._exit = leave
from nodekit.deploy.commands.cli import main
main([])
"""
    line = "kit logs lab-11"
    asking = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash", "_ARGCOMPLETE_STDOUT_FILENAME": os.devnull}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asking, "COMP_LINE": line, "COMP_POINT": str(len(line))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ast.literal_eval(done.stdout) == [], done.stderr


class Terminal:
    """A real shell in a real terminal, which tmux is."""

    name = ""

    def __init__(self, folder: Path, argv: list[str]) -> None:
        self._tmux = ["tmux", "-L", f"kit-{os.getpid()}-{argv[0]}", "-f", os.devnull]
        self._run("new-session", "-d", "-x", "100", "-y", "30", "-c", str(folder), shlex.join(argv))

    def _run(self, *argv: str) -> str:
        done = subprocess.run([*self._tmux, *argv], capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def type(self, text: str, *keys: str) -> None:
        if text:
            self._run("send-keys", "-l", "--", text)
        if keys:
            self._run("send-keys", *keys)

    def wait_for(self, *texts: str) -> None:
        def there() -> bool:
            screen = self._run("capture-pane", "-p")
            return all(text in screen for text in texts)

        try:
            until(there, timeout_s=30, what=repr(texts))
        except AssertionError as error:
            raise AssertionError(f"{error}; the screen:\n{self._run('capture-pane', '-p')}") from None

    def close(self) -> None:
        pid = self._run("display-message", "-p", "#{pane_pid}").strip()
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True, timeout=20)
        until(lambda: not Path("/proc", pid).exists(), timeout_s=20, what="the end of the shell")


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}


@pytest.fixture(params=SHELLS)
def shell(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Terminal]:
    """A shell that has read what `kit completion` prints for it, and finds kit on its PATH."""
    name = str(request.param)
    programs = folder / "bin"
    programs.mkdir()
    (programs / "kit").write_text(
        f"#!{sys.executable}\nimport sys\nfrom nodekit.deploy.commands.cli import main\nsys.exit(main())\n"
    )
    (programs / "kit").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TERM", "screen")
    (folder / "lines").write_text(completion.lines(name))
    terminal = Terminal(folder, SHELLS[name])
    try:
        # In two parts, so that the line as it is typed is not taken for its answer.
        terminal.type("source ./lines; echo re''ady", "Enter")
        terminal.wait_for("\nready")
        terminal.name = name
        yield terminal
    finally:
        terminal.close()


def test_a_real_shell_completes_a_runs_name(shell: Terminal) -> None:
    shell.type("kit logs lab-1121", "Tab")
    shell.wait_for("kit logs lab-1121-101500-3f00")
    shell.type("--nod", "Tab")
    shell.wait_for("3f00 --node")
    tabs = ["Tab", "Tab"] if shell.name == "bash" else ["Tab"]
    shell.type("gpu", *tabs)  # more than one: they are listed
    shell.wait_for("gpu1", "gpu2")
    shell.type("", "C-u")
    shell.type("kit down lab-112", *tabs)
    described = [] if shell.name == "bash" else ["failed, 2026-11-21 06:01", "succeeded, 2026-11-22 06:01"]
    shell.wait_for("lab-1121-101500-3f00", "lab-1122-060115-77ab", *described)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["completion", "tcsh"])
    assert left.value.code == 2
    assert "choose from" in capsys.readouterr().err
