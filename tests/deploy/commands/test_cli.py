"""The command line as a whole: which commands there are, what `kit --help` shows, and what is loaded for it."""

from __future__ import annotations

import argparse
import ast
import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.commands import arguments, cli
from nodekit.deploy.commands.look_at_a_run import status
from nodekit.deploy.commands.run_a_job import up
from nodekit.deploy.connect.channel import RemoteError, open_local
from nodekit.deploy.output.interrupts import NothingLeft
from nodekit.inventory.errors import HostError, KitError, KitErrors
from nodekit.inventory.load import example_path

HEAVY = ("torch", "pydantic", "rich", "paramiko", "fabric", "yaml", "ClusterShell", "submitit", "jinja2")


def test_each_file_is_a_command_and_listed_once() -> None:
    here = Path(arguments.__file__).parent
    files = {f"{path.parent.name}/{path.stem}" for path in here.glob("*/*.py") if path.stem != "__init__"}
    groups = [*cli.GROUPS.items(), *((group, (name,)) for name, group in cli.HIDDEN.items())]
    assert sorted(f"{group.replace(' ', '_')}/{name}" for group, names in groups for name in names) == sorted(
        files
    )
    assert {path.stem for path in here.glob("*.py")} == {"__init__", "arguments", "cli", "command"}


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
        (group,) = (title.replace(" ", "_") for title, names in cli.GROUPS.items() if argv[0] in names)
        own = {"arguments", "cli", "command", group, *(f"{group}.{name}" for name in (argv[0], *others))}
        here = "nodekit.deploy.commands."
        assert {name.removeprefix(here) for name in loaded if name.startswith(here)} == own


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


@pytest.mark.parametrize(
    ("interrupt", "said"),
    [(KeyboardInterrupt, "interrupted"), (NothingLeft, "stopped; nothing is left running")],
)
def test_after_a_ctrl_c_nothing_is_said_to_have_ended_that_may_go_on(
    interrupt: type[KeyboardInterrupt],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise interrupt

    monkeypatch.setattr(status, "run", run)
    assert cli.main(["status"]) == 130
    assert capsys.readouterr().err == f"kit: {said}\n"


def test_what_each_of_several_hosts_came_upon_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise KitErrors([KitError("a.py changed"), HostError("gpu2", "refused"), KitError("a.py changed")])

    monkeypatch.setattr(status, "run", run)
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == "kit: a.py changed\nkit: gpu2: refused\n"


def test_of_errors_on_several_hosts_each_stands_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise KitErrors([HostError("gpu1", "no route"), HostError("gpu2", "refused", cure="start sshd")])

    monkeypatch.setattr(status, "run", run)
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == "kit: gpu1: no route\nkit: gpu2: refused; start sshd\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["check", "closed/x.yaml"],
        ["init", "a", "-o", "closed/x.yaml"],
        ["test", "closed/x"],
        ["bench", "local", "--png", "closed/x.png"],
        ["selftest", "local", "-o", "closed/x"],
    ],
)
def test_a_file_in_a_folder_that_may_not_be_entered_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    real = os.stat

    def closed(path: Any, *args: Any, **options: Any) -> os.stat_result:  # root may enter any
        if "closed/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "stat", closed)
    assert cli.main(argv) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"kit: closed/x\S*: Permission denied; namei -l /\S+/closed/x\S* shows whose it is\n", said
    )


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chek lab.yaml", "kit: there is no command 'chek'; did you mean kit check?"),
        ("fly", "kit: there is no command 'fly'; kit --help lists them"),
        ("up lab.yaml train.py --epochs 3", "comes after `--`: kit up lab.yaml -- train.py --epochs 3"),
        ("up lab.yaml -q python train.py -x", "comes after `--`: kit up lab.yaml -q -- python train.py -x"),
        ("up train.py --epochs 3", "your command comes after `--`: kit up local -- train.py --epochs 3"),
        ("up train.py", "train.py: found a Python script, wanted an inventory file; your command comes after `--`: "
         "kit up local -- train.py (local: two nodes on this machine)"),
        ("check lab.yaml train.py", "your command comes after `--`: kit check lab.yaml -- train.py"),
        ("clean train.py", "train.py: found a Python script, wanted an inventory file\n"),
        ("up lab.yaml --detahc", "kit up: error: unrecognized arguments: --detahc\n"),
        ("shell lab.yaml hostname", "lab.yaml has no hostname; it has gpu1; a command comes after `--`, as in "
         "kit shell lab.yaml -- hostname"),
        # What would be ignored.
        ("up local --json -- train.py", "found --json without --dry-run, wanted both; kit status --json tells"),
        ("up local --metrics-address 0.0.0.0", "found --metrics-address without --metrics-port, wanted both"),
        ("logs -f --fetch", "found --fetch and -f, wanted one of them"),
        ("logs --fetch --rank 0 --grep x", "found --fetch and --rank, --grep, wanted one of them"),
        ("logs -o here", "found -o without --fetch, wanted both"),
        ("report --json -o x.html", "found --json and --output, wanted one of them"),
        ("rm lab --records-only --keep-snapshots", "found --records-only and --keep-snapshots, wanted one of them"),
        ("runs --html x.html", "found --html without --compare"),
        ("runs lab.yaml --last 2 --compare a b", "found --compare and NAME, --last, wanted one of them"),
        ("drill lab.yaml --list --json", "found --list and --json, wanted one of them"),
        ("shell lab.yaml gpu1 --hosts gpu1 -- true", "found HOSTS and --hosts, wanted one of them"),
        ("shell lab.yaml gpu1 --timeout 3", "found --timeout without a command, wanted both"),
        ("export lab.yaml --port 29500", "found --to sbatch and --port, wanted one of them"),
    ],
)  # fmt: skip
def test_wrong_usage_is_told_with_what_is_right(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "lab.yaml").write_text("hosts: {gpu1: }\n")
    (tmp_path / "train.py").write_text("import torch\n")
    try:
        status = cli.main(words.split())
    except SystemExit as error:
        status = int(str(error.code))
    assert said in capsys.readouterr().err
    assert status == (1 if "has no hostname" in said else 2)


def test_a_ctrl_c_while_kit_is_loaded_is_no_traceback() -> None:
    code = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "nodekit.deploy.output.terminal":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from nodekit.deploy.commands.cli import main
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_look_at_a_run_loads_nothing_of_a_start() -> None:
    code = "import sys, nodekit.deploy.ssh_backend.backend; sys.exit('nodekit.deploy.launch.start' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_folder_does_not_hide_the_example_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example's own workdir lies there, where this repository is cloned to ~/nodekit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    named = argparse.Namespace(inventory="local", prog="kit up", takes_command=True)
    assert arguments.inventory(named) == example_path("local")
    named.inventory = "other"
    (tmp_path / "other").mkdir()
    assert arguments.inventory(named) == Path("other")
