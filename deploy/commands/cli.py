"""Kit's entry: parses, calls one command, prints errors, exits; nothing else of kit prints errors or exits."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from nodekit.deploy.commands.arguments import EXIT_CODES
from nodekit.deploy.commands.command import Command, HelpFormatter, load
from nodekit.deploy.output import terminal
from nodekit.inventory.errors import KitError

GROUPS = {
    "prepare": ("init", "check", "shell", "clean", "notify", "schema", "completion"),
    "run a job": ("up", "down", "drain", "export"),
    "look at a run": ("status", "watch", "logs", "board", "runs"),
    "afterwards": ("why", "report", "test", "predict", "rm"),
    "try out": ("lab", "drill", "selftest", "bench", "compare"),
}
"""The commands by what somebody wants, as `kit --help` lists them. Each is a file beside this one."""
HIDDEN = ("supervise",)
"""What kit itself calls."""
NAMES = tuple(name for names in GROUPS.values() for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    if "_ARGCOMPLETE" in os.environ:
        from nodekit.deploy.commands import completion

        completion.answer(parser())
    argv = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in argv if word != "--debug"), "")
    own: list[str] = []
    if "--" in argv and name in NAMES and load(name).takes_command:
        split = argv.index("--")  # what follows is the user's, byte for byte: argparse never sees it
        argv, own = argv[:split], argv[split + 1 :]
    args = parser(name).parse_args(argv)
    args.command = own
    with terminal.screen(), _debug(wanted=args.debug):
        try:
            return int(args.run(args))
        except KitError as error:
            print(f"kit: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            print("kit: stopped; nothing is left running", file=sys.stderr)
            return 130
        except BrokenPipeError:
            # The reader of a pipe (head, less) has left; what we still hold for it must not raise again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def parser(name: str = "") -> argparse.ArgumentParser:
    """Kit's command line: with one command and nothing of the others loaded, or (no such name) with all of them."""
    wanted = {each: load(each) for each in ([name] if name in (*NAMES, *HIDDEN) else NAMES)}
    made = argparse.ArgumentParser(
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
    # The description lists them, in groups, which argparse has not for commands.
    commands = made.add_subparsers(metavar="COMMAND", required=True, prog="kit", help=argparse.SUPPRESS)
    for each in wanted.values():
        each.add(commands)
    return made


def _listed(commands: Mapping[str, Command]) -> str:
    """What each command does, in groups; "" where not all are there."""
    if not set(NAMES) <= commands.keys():
        return ""
    width = max(map(len, NAMES))
    return "".join(
        f"\n\n{title}:" + "".join(f"\n  {name.ljust(width)}  {commands[name].summary}" for name in names)
        for title, names in GROUPS.items()
    )


class _Version(argparse.Action):
    """What argparse has for this wants the version at once, and finding it takes longer than all else here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        print(f"kit {metadata.version('nodekit')}")
        parser.exit()


@contextlib.contextmanager
def _debug(*, wanted: bool) -> Iterator[None]:
    """Have kit's loggers write to stderr meanwhile."""
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
