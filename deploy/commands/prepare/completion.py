"""Print what your shell needs to complete kit's arguments.

Commands, options, runs, inventory files, nodes and engines are completed. Put it into the shell's own file,
once:

  bash   kit completion bash >> ~/.bashrc
  zsh    kit completion zsh >> ~/.zshrc
  fish   kit completion fish > ~/.config/fish/completions/kit.fish

A new shell has it. It runs kit itself to ask, wherever that is on the PATH: another version of it need not
print anew.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nodekit.deploy.host.files import read
from nodekit.deploy.records.state_folder import runs_folder

# The shell asks while the user types: import nothing heavy, ask no host, and read only the latest runs.

SHELLS = ("bash", "zsh", "fish")
MAX_RUNS = 100
_ZSH_HEAD = """\
#compdef kit
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
"""

Completer = Callable[..., dict[str, str] | list[str]]


def lines(shell: str) -> str:
    """Return the lines for a shell's startup file that enable completion of kit's arguments."""
    from argcomplete.shell_integration import shellcode

    code: str = shellcode(["kit"], shell=shell)
    return code.replace("#compdef kit\n", _ZSH_HEAD, 1) if shell == "zsh" else code


def answer(parser: argparse.ArgumentParser) -> None:
    """Complete the shell's current command line, and exit."""
    import argcomplete

    attach(parser)
    argcomplete.autocomplete(parser, always_complete_options=False)


def attach(parser: argparse.ArgumentParser) -> None:
    """Give each argument its completer, by the argument's metavar."""
    from argcomplete.completers import FilesCompleter

    files = FilesCompleter()
    completers: dict[str, Completer] = {
        "RUN": _runs,
        "RUN|DIR": _runs_and_folders,
        "INVENTORY": _inventories,
        "NAME": _runs_and_inventories,
        "N": _nodes,
        "HOSTS": _hosts,
        "HOST": _nothing,
        "FAULT": _faults,
        "NAME,NAME…": _engines,
        "FILE": files,
        "F": files,
        "DIR": files,
        "PATH": files,
    }
    for command in _commands(parser):
        for action in command._actions:
            if action.choices is not None:
                continue
            key = action.metavar if isinstance(action.metavar, str) else ""
            if action.dest == "run_id":
                key = "RUN"
            if key in completers and action.type not in (int, float):
                action.completer = completers[key]  # type: ignore[attr-defined]  # argcomplete's way
            elif action.nargs != 0:
                action.completer = _nothing  # type: ignore[attr-defined]
        if command.get_default("takes_command") and " -- " in os.environ["COMP_LINE"]:
            rest = command.add_argument("after", nargs="*", help=argparse.SUPPRESS)
            rest.completer = files  # type: ignore[attr-defined]


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from _commands(command)


def _nothing(**_: Any) -> list[str]:
    return []


def runs_on_record(prefix: str = "") -> dict[str, str]:
    """Return the latest runs with this prefix, newest first: id → state and date; reads only their records."""
    found = []
    for path in runs_folder().glob(f"{glob.escape(prefix)}*/run.json"):
        try:
            found.append((path.stat().st_mtime, path))
        except OSError:
            continue
    told = {}
    for _, path in sorted(found, reverse=True)[:MAX_RUNS]:
        try:
            record = json.loads(read(str(path)))
            created = time.strftime("%Y-%m-%d %H:%M", time.localtime(record["created"]))
            told[str(record["run_id"])] = f"{record['state']}, {created}"
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return told


def _runs(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    named = {
        name
        for value in (getattr(parsed_args, "runs", None), getattr(parsed_args, "compare", None))
        for name in value or ()
    }
    return {name: about for name, about in runs_on_record(prefix).items() if name not in named}


def _inventories(prefix: str, **_: Any) -> dict[str, str]:
    """Return YAML files, folders, and kit's own examples."""
    from nodekit.inventory.load import example_names

    found = _files(prefix, (".yaml", ".yml"), "inventory")
    for name in example_names():
        if name.startswith(prefix):
            found.setdefault(name, "kit's own example")
    return found


def _files(prefix: str, suffixes: tuple[str, ...] = (), about: str = "") -> dict[str, str]:
    """Return the files with one of these suffixes, and the folders."""
    found = {}
    folder, start = os.path.split(prefix)
    place = Path(folder or ".").expanduser()
    before = prefix[: len(prefix) - len(start)]
    for path in sorted(place.glob(f"{glob.escape(start)}*")):
        if path.name.startswith(".") and not start.startswith("."):
            continue
        if path.suffix in suffixes:
            found[before + path.name] = about
        elif path.is_dir():
            found[f"{before}{path.name}/"] = "folder"
    return found


def _runs_and_inventories(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    found = _runs(prefix, parsed_args)
    return found if getattr(parsed_args, "compare", None) else {**found, **_inventories(prefix)}


def _runs_and_folders(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    return {**_runs(prefix, parsed_args), **_files(prefix)}


def _nodes(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    """Return the nodes of the run that is named, or of the latest run."""
    name = getattr(parsed_args, "run_id", None) or ""
    run_id = next(iter(runs_on_record(name)), None)
    if run_id is None:
        return {}
    try:
        record = json.loads(read(str(runs_folder() / run_id / "run.json")))
        return {node: f"of {run_id}" for node in record["nodes"] if node.startswith(prefix)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _hosts(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    """Return the hosts of the inventory that is named; none if it is invalid."""
    try:
        from nodekit.inventory.load import load_inventory

        inventory = load_inventory(str(parsed_args.inventory))
        return {host.name: host.address for host in inventory.hosts if host.name.startswith(prefix)}
    except Exception:  # an error message would only disturb the line that the user types
        return {}


def _faults(prefix: str, **_: Any) -> dict[str, str]:
    from nodekit.deploy.drill.faults import FAULTS

    return {name: fault.text for name, fault in FAULTS.items() if name.startswith(prefix)}


def _engines(prefix: str, **_: Any) -> dict[str, str]:
    """Return the engines that complete the last item of a comma-separated list."""
    from nodekit.training.engine_info import ENGINES

    before, comma, start = prefix.rpartition(",")
    return {before + comma + name: info.about for name, info in ENGINES.items() if name.startswith(start)}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=SHELLS, help="yours")


def run(args: argparse.Namespace) -> int:
    """Print the lines for the shell's startup file."""
    print(lines(args.shell).strip())
    return 0
