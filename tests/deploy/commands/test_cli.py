"""The command line as a whole: which commands there are, what `kit --help` shows, and what is loaded for it."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nodekit.deploy.commands import arguments, cli, status, up
from nodekit.deploy.connect.channel import RemoteError, open_local

HEAVY = ("torch", "pydantic", "rich", "paramiko", "fabric", "yaml", "ClusterShell", "submitit", "jinja2")


def test_each_file_is_a_command_and_listed_once() -> None:
    files = {path.stem for path in Path(arguments.__file__).parent.glob("*.py")}
    listed = [*cli.NAMES, *cli.HIDDEN]
    assert sorted(listed) == sorted(files - {"__init__", "arguments", "cli", "command"})


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_lists_the_commands_by_what_somebody_wants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = cli.parser().format_help()
    for title, names in cli.GROUPS.items():
        listed = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in listed.splitlines()] == list(names)
    assert max(map(len, text.splitlines())) < 80
    assert "supervise" not in text
    with pytest.raises(SystemExit):
        cli.main(["--help", "up"])
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("name", cli.NAMES)
def test_each_commands_help_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    wide = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]
    assert [line for line in wide if " # " not in line] == []


@pytest.mark.parametrize(
    ("argv", "others"), [(["--help"], None), (["status", "--help"], set()), (["predict", "--help"], {"test"})]
)
def test_help_loads_nothing_heavy_and_of_other_commands_nothing(
    argv: list[str], others: set[str] | None
) -> None:
    code = f"""
import sys
from nodekit.deploy.commands.cli import main
try:
    main({argv!r})
except SystemExit:
    print("loaded", list(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = ast.literal_eval(done.stdout.rpartition("loaded ")[2])
    assert not set(HEAVY).intersection(loaded)
    if others is not None:
        own = {"arguments", "cli", "command", argv[0], *others}
        assert {name.split(".")[3] for name in loaded if name.startswith("nodekit.deploy.commands.")} == own


def test_debug_prints_on_stderr_what_kit_logs_and_only_while_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call_a_host(_: argparse.Namespace) -> int:
        channel = open_local("gpu1", sys.executable)
        try:
            with pytest.raises(RemoteError):
                channel.call("tree.look", timeout_s=30, token="hunter2")
        finally:
            channel.close()
        return 0

    monkeypatch.setattr(status, "run", call_a_host)
    assert cli.main(["--debug", "status"]) == 0
    told = capsys.readouterr()
    assert re.search(r"nodekit\.deploy\.connect\.channel: gpu1: tree\.look: \d+ ms: RemoteError\n$", told.err)
    assert "hunter2" not in told.err
    assert told.out == ""
    assert cli.main(["status"]) == 0
    assert capsys.readouterr().err == ""


def test_what_follows_the_dashes_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def take(args: argparse.Namespace) -> int:
        found.append((args.inventory, args.command, args.debug))
        return 0

    monkeypatch.setattr(up, "run", take)
    own = ["train.py", "--debug", "--", "-x"]
    assert cli.main(["up", "lab.yaml", "--", *own]) == 0
    assert cli.main(["--debug", "up", "--", *own]) == 0
    assert cli.main(["up", "lab.yaml", "--debug"]) == 0
    assert found == [("lab.yaml", own, False), ("local", own, True), ("lab.yaml", [], True)]


def test_a_look_at_a_run_loads_nothing_of_a_start() -> None:
    code = "import sys, nodekit.deploy.ssh_backend.backend; sys.exit('nodekit.deploy.launch.start' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
