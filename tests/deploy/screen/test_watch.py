"""`kit up` and `kit watch` in a real terminal (tmux): what the screen shows, what the keys do, what is left behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_agents
from agents import no_process_left, processes_of, until
from kit_runs import Kit
from slurm_runs import Site

pytestmark = pytest.mark.slow

JOB = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
nasty = "\x1b]0;mine\x07\x1b]52;c;aGk=\x1b\\\\ \x1b[6n\x9b5n\x1bP+q544e\x1b\\\\\x07\u202e"  # title, clipboard, …
progress = pathlib.Path(os.environ["NODEKIT_PROGRESS_FILE"])
for step in range(1, 100_000):
    progress.write_text(f"{step}/100000 epoch 1 loss {9 / step:.4f} {nasty}")
    print(f"line {step} of rank {os.environ['RANK']}{nasty}", flush=True)
    time.sleep(0.05)
"""
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")


class Terminal:
    """A shell in a window of a tmux of its own."""

    def __init__(self, socket: Path, folder: Path, width: int = 110, height: int = 30) -> None:
        self.socket = socket
        shell = ["env", "PS1=$ ", "TERM=tmux-256color", "LC_ALL=C.UTF-8", "bash", "--norc", "--noprofile"]
        self(
            "-f",
            os.devnull,
            "new-session",
            "-d",
            "-x",
            str(width),
            "-y",
            str(height),
            "-c",
            str(folder),
            *shell,
        )
        self.run(f'kit() {{ {shlex.quote(sys.executable)} -m nodekit.deploy.commands.cli "$@"; }}; clear')

    def __call__(self, *args: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self.socket), *args], capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def press(self, *keys: str) -> None:
        self("send-keys", *keys)

    def run(self, line: str) -> None:
        self("send-keys", "-l", line)
        self.press("Enter")

    def lines(self, *options: str) -> list[str]:
        return [line.rstrip() for line in self("capture-pane", "-p", *options).splitlines()]

    def text(self) -> str:
        return "\n".join(self.lines())

    def shows(self, pattern: str, *, timeout_s: float = 60) -> re.Match[str]:
        """Waits for a regular expression on the screen, ^ and $ being those of a line."""
        found: Any = None

        def there() -> bool:
            nonlocal found
            found = re.search(pattern, self.text(), re.MULTILINE)
            return found is not None

        try:
            until(there, timeout_s=timeout_s)
        except AssertionError:
            raise AssertionError(f"{pattern!r} is not on the screen:\n{self.text()}") from None
        return found

    def close(self) -> None:
        self("kill-server")


@pytest.fixture
def local(tmp_path: Path, own_home: Path) -> Iterator[Kit]:
    """Two local nodes, of which the job needs one."""
    kit = Kit(tmp_path / "my 'project'", None)
    (kit.folder / "two.yaml").write_text(
        f"name: two\nconnection: local\npython: {warm_agents.program()}\nworkdir: {str(tmp_path / 'work')!r}\n"
        "nodes: 1:2\nhosts: {a: , b: }\n"
    )
    (kit.folder / "job.py").write_text(JOB)
    yield kit
    kit.run("down", "--force")
    no_process_left(f"HOME={own_home}")


@pytest.fixture
def terminal(local: Kit, tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path / "tmux", local.folder)
    yield found
    found.close()


def watchers(local: Kit) -> dict[int, str]:
    home = os.environ["HOME"]
    return {
        pid: argv
        for pid, argv in processes_of(f"HOME={home}").items()
        if re.search(r"cli (watch|up) ", argv + " ")
    }


def test_a_run_is_watched_changed_left_and_stopped_by_keys(
    terminal: Terminal, local: Kit, tmp_path: Path
) -> None:
    terminal("pipe-pane", f"cat >{shlex.quote(str(tmp_path / 'sent'))}")
    terminal.run("kit up two.yaml -- job.py")
    terminal.shows(r"^two-\S+  running · 2 of 2 nodes · for ", timeout_s=120)
    terminal.shows(r"% · [\d,]+ of 100,000 steps · .* left · [\d.]+ steps/s$")
    terminal.shows(r"^▸ a +running +0 +0 +\d+ % +\S+ GiB .* [\d.]+ +[\d.]+ s$")
    terminal.shows(r"^loss 0\.\d+ +steps \d+ – [\d,]+$")
    terminal.shows(r"^\d\d:\d\d:\d\d  training on 2 nodes with 2 ranks; the first step after ")

    terminal.press("?")
    terminal.shows(r"^  s +stop the job on all nodes")
    terminal.press("x", "Down", "l")
    terminal.shows(r"^── log of b ──")
    terminal.shows(r"^line \d+ of rank 1$")
    terminal.press("Escape", "s")
    terminal.shows(r"^Stop the job on all nodes, after a snapshot\?  y: yes")
    terminal.press("n")

    terminal("resize-window", "-x", "40", "-y", "12")
    terminal.shows(r"^  NODE +STATE +CPU +STEP")
    until(lambda: "MEMORY" not in terminal.text(), what="the rest of the narrow screen")
    assert max(map(len, terminal.lines())) <= 40
    terminal("resize-window", "-x", "110", "-y", "30")
    terminal.shows("MEMORY")

    terminal.press("C-z")
    terminal.shows(r"\]\+ +Stopped ")
    terminal.run("clear; stty -a; fg")
    terminal.shows(r"^▸ b ")

    def is_drained() -> bool:
        terminal.press("d")
        terminal.shows(r"^Drain b: it saves and leaves the job\?")
        terminal.press("y")
        # After 3 s in which it stood still, or the machine did, a may be out of its sight for a moment: then b stays.
        return "b is drained" in terminal.shows(r"  b is drained: |b stays: the job needs").group()

    until(is_drained, what="b drained")
    terminal.shows(r"running · 1 of 2 nodes", timeout_s=90)
    terminal.shows(r"^▸ b +drained ")
    terminal.shows(r"  b is drained: its ranks save, and it leaves the job$")
    refused = local.run("drain", "two", "a")
    assert (refused.returncode, "at least 1 nodes (nodes.min), and without it 0" in refused.stderr) == (
        1,
        True,
    )
    assert local.run("drain", "two", "b", "--undo").stdout == "b comes back into the job\n"
    terminal.shows(r"running · 2 of 2 nodes", timeout_s=120)

    terminal.press("q")
    terminal.shows(r"^two-\S+ goes on: kit watch ")
    terminal.run("clear; stty -a")
    terminal.shows(r" icanon .*[^-]echo ")
    until(lambda: not watchers(local), what="kit up gone")

    terminal.run("clear; NO_COLOR=1 kit watch")
    terminal.shows(r"running · 2 of 2 nodes")
    assert not COLOUR.search("\n".join(terminal.lines("-e")))
    (pid,) = watchers(local)
    os.kill(pid, signal.SIGTERM)
    terminal.shows(r"^two-\S+ goes on$")
    terminal.run("clear; stty -a")
    terminal.shows(r" icanon .*[^-]echo ")

    terminal.run("clear; TERM=dumb kit watch")
    terminal.shows(r"^a:0 +\| line \d+ of rank 0$")
    terminal.press("C-c")
    terminal.shows(r"two-\S+ goes on$")

    terminal.run("clear; kit status; kit logs --since 5s; echo read")
    terminal.shows(r"line \d+ of rank [01]\nread$")

    terminal.run("clear; kit watch")
    terminal.shows(r"running · 2 of 2 nodes")
    assert COLOUR.search("\n".join(terminal.lines("-e")))
    terminal.press("s", "y")
    terminal.shows(r"^two-\S+ is stopped on 2 nodes$")
    terminal.run("clear; kit watch")
    terminal.shows(r"^two-\S+ stopped: stopped by kit watch$")
    assert re.search(r"^  a +stopped ", terminal.text(), re.MULTILINE)

    sent = (tmp_path / "sent").read_text(errors="replace")
    assert "epoch 1 loss" in sent
    assert not re.findall(r".{60}(?:\x1b\]|\x1b\[6n|\x9b|\x1bP|\x07|\u202e)", sent)


def test_a_terminal_that_is_closed_leaves_the_job_supervised(terminal: Terminal, local: Kit) -> None:
    terminal.run("kit up two.yaml -- job.py")
    terminal.shows(r"running · 2 of 2 nodes", timeout_s=120)
    (pid,) = watchers(local)
    os.killpg(os.getpgid(pid), signal.SIGHUP)
    until(lambda: not watchers(local), what="kit up gone")
    home = os.environ["HOME"]
    until(
        lambda: any("cli supervise " in argv for argv in processes_of(f"HOME={home}").values()),
        what="a supervisor",
    )
    terminal.run("clear; kit watch")
    terminal.shows(r"running · 2 of 2 nodes")


def test_a_run_that_slurm_has_is_watched_through_the_shared_folder(site: Site, tmp_path: Path) -> None:
    (site.folder / "job.py").write_text(JOB)
    site.inventory("seen", ["job.py"], {"nodes": 2})
    terminal = Terminal(tmp_path / "tmux", site.folder)
    try:
        terminal.run("kit up seen.yaml")
        terminal.shows(r"^seen-\S+  running · 2 of 2 nodes · for ", timeout_s=120)
        terminal.shows(r"% · [\d,]+ of 100,000 steps · .* left · [\d.]+ steps/s$")
        terminal.shows(r"^▸ node\d +running +0 +0 +\d+ % ")
        terminal.shows(r"  training on 2 nodes with 2 ranks; the first step after ")
        terminal.press("l")
        terminal.shows(r"^line \d+ of rank 0$")
        terminal.press("q")
        terminal.shows(r"^seen-\S+ goes on$")
        terminal.run("clear; kit watch")
        terminal.shows(r"running · 2 of 2 nodes")
        terminal.press("s", "y")
        terminal.shows(r"^seen-\S+ is stopped$", timeout_s=90)
        terminal.run("clear; kit watch")
        terminal.shows(r"^seen-\S+ stopped: stopped by kit watch$")
    finally:
        terminal.close()
