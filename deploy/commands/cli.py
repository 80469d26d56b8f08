"""Kit's entry point: parses arguments, runs one command, prints errors and exits; no other module does the last two."""

from __future__ import annotations

import sys

try:  # the imports take most of the time before `main`: Ctrl-C during them must not print a traceback either
    import argparse
    import contextlib
    import os
    import shlex
    from collections.abc import Iterator, Mapping, Sequence
    from difflib import get_close_matches
    from typing import Any

    from nodekit.deploy.commands.arguments import EXIT_CODES, tell
    from nodekit.deploy.commands.command import Command, HelpFormatter, load
    from nodekit.deploy.output import terminal
    from nodekit.deploy.output.interrupts import NothingLeft
    from nodekit.inventory.errors import KitError
except KeyboardInterrupt:
    sys.exit(130)

GROUPS = {
    "prepare": ("init", "check", "shell", "clean", "notify", "schema", "completion"),
    "run a job": ("up", "down", "drain", "export"),
    "look at a run": ("status", "watch", "logs", "board", "runs"),
    "afterwards": ("why", "report", "test", "predict", "rm"),
    "try out": ("lab", "drill", "selftest", "bench", "compare"),
}
"""The commands, grouped by purpose as `kit --help` lists them; each is a file in the folder named after its group."""
HIDDEN = {"supervise": "run a job"}
"""Commands that only kit itself calls → the group in whose folder the file is."""
NAMES = tuple(name for names in GROUPS.values() for name in names)
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names} | HIDDEN


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    if "_ARGCOMPLETE" in os.environ:
        from nodekit.deploy.commands.prepare import completion

        completion.answer(parser())
    argv = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in argv if word != "--debug"), "")
    own: list[str] = []
    if "--" in argv and name in NAMES and _load(name).takes_command:
        split = argv.index("--")  # what follows is the user's command, kept unchanged: argparse never sees it
        argv, own = argv[:split], argv[split + 1 :]
    if name and not name.startswith("-") and name not in (*NAMES, *HIDDEN):
        return _no_command(name)
    args = _parsed(name, argv)
    args.command = own
    with terminal.screen(may_be_lost=args.acts), _debug(wanted=args.debug):
        try:
            _refuse_removed_folder()
            status = int(args.run(args))
            sys.stdout.flush()
            return status
        except KitError as error:
            tell(error)
            return error.exit_code
        except KeyboardInterrupt as interrupt:
            is_over = isinstance(interrupt, NothingLeft)
            said = "stopped; nothing is left running" if is_over else "interrupted"
            print(f"kit: {said}", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader of the pipe (head, less) has ended
            return 0
        except PermissionError as error:
            # The error of any access to a file in a folder that this user may not enter.
            if not isinstance(error.filename, str | os.PathLike) or args.debug or name in HIDDEN:
                raise
            file = shlex.quote(os.path.abspath(error.filename))  # noqa: PTH100
            tell(KitError(f"{error.filename}: {error.strerror}", cure=f"namei -l {file} shows whose it is"))
            return 1


def _parsed(name: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; --help and --version print here, with the errors that any output can have."""
    try:
        with terminal.screen():
            try:
                found: argparse.Namespace = parser(name).parse_args(argv)
                return found
            finally:
                sys.stdout.flush()
    except KitError as error:
        tell(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)


def _refuse_removed_folder() -> None:
    try:
        os.getcwd()  # noqa: PTH109  # pathlib's makes no difference
    except FileNotFoundError as error:
        raise KitError("the working folder has been removed", cure="cd to one that is there") from error


def parser(name: str = "") -> argparse.ArgumentParser:
    """Return the parser of kit's command line: with the command `name` only, or with all if `name` is none."""
    wanted = {each: _load(each) for each in ([name] if name in (*NAMES, *HIDDEN) else NAMES)}
    made = _Parser(
        prog="kit",
        usage="kit [--debug] COMMAND [options]\n       kit [COMMAND] --help",
        description=f"Multi-node PyTorch training from one inventory file.{_listed(wanted)}",
        epilog=f"{EXIT_CODES}\nstart with: kit up",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action=_Version, nargs=0, help="show kit's version and exit")
    made.add_argument(
        "--debug", action="store_true", help="say on stderr what is called on which host, and what is decided"
    )
    # No help here: the description lists the commands in groups, which argparse does not offer for subcommands.
    commands = made.add_subparsers(
        metavar="COMMAND",
        required=True,
        prog="kit",
        help=argparse.SUPPRESS,
        parser_class=argparse.ArgumentParser,
    )
    for each in wanted.values():
        each.add(commands)
    return made


class _Parser(argparse.ArgumentParser):
    """Reports unknown arguments with the command's own usage, and says where a script's options belong."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        argv = list(sys.argv[1:] if args is None else args)
        found, unknown = self.parse_known_args(argv, namespace)
        if unknown:
            found.refuse(
                f"unrecognized arguments: {shlex.join(unknown)}{_where_it_belongs(argv, found, unknown)}"
            )
        return found


def _where_it_belongs(argv: Sequence[str], args: argparse.Namespace, unknown: Sequence[str]) -> str:
    """Return a hint if the user's command follows the inventory, as with torchrun, without the `--`; else ""."""
    if not args.takes_command:
        return ""
    inventory = str(getattr(args, "inventory", None))
    behind = argv.index(inventory) + 1 if inventory in argv else 0
    if inventory.endswith(".py"):
        first, before = behind - 1, [*argv[: behind - 1], "local"]
    elif not unknown[0].startswith("-") and unknown[0] in argv[behind:]:
        first = argv.index(unknown[0], behind)
        before = list(argv[:first])
    else:
        return ""
    return f"; your command comes after `--`: kit {shlex.join([*before, '--', *argv[first:]])}"


def _no_command(name: str) -> int:
    near = get_close_matches(name, NAMES, n=1)
    cure = f"did you mean kit {near[0]}?" if near else "kit --help lists them"
    print(f"kit: there is no command '{name}'; {cure}", file=sys.stderr)
    return 2


def _load(name: str) -> Command:
    """Import a command's file; no other command's file is imported."""
    return load(f"{_GROUP_OF[name].replace(' ', '_')}.{name}")


def _listed(commands: Mapping[str, Command]) -> str:
    """Return the commands in groups with their summaries; "" unless all commands are loaded."""
    if not set(NAMES) <= commands.keys():
        return ""
    width = max(map(len, NAMES))
    return "".join(
        f"\n\n{title}:" + "".join(f"\n  {name.ljust(width)}  {commands[name].summary}" for name in names)
        for title, names in GROUPS.items()
    )


class _Version(argparse.Action):
    """The option --version, as argparse's own needs the version at start, and finding it takes longer than the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        print(f"kit {metadata.version('nodekit')}")
        parser.exit()


@contextlib.contextmanager
def _debug(*, wanted: bool) -> Iterator[None]:
    """Let kit's loggers write to stderr within this block."""
    if not wanted:
        yield
        return
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("nodekit")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


if __name__ == "__main__":
    sys.exit(main())
