"""A command as its file in one of the folders here has it, and how its help is shown."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Command:
    """One of kit's commands."""

    name: str
    help: str
    """The file's docstring; its first line stands in ``kit --help``."""
    epilog: str
    """``EPILOG``, below the options."""
    takes_command: bool
    """``TAKES_COMMAND``: what follows ``--`` is the user's own command, ``args.command``."""
    acts: bool
    """``ACTS``: it does something, and goes on where nobody reads any more what it prints (``| head``)."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Does it: gets what was parsed, gives the exit status."""

    @property
    def summary(self) -> str:
        """Its line in ``kit --help``."""
        return self.help.partition("\n")[0].removesuffix(".")

    def add(self, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add it to a parser's commands."""
        parser = commands.add_parser(
            self.name,
            help=self.summary,
            description=self.help,
            epilog=self.epilog,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(
            run=self.run,
            takes_command=self.takes_command,
            acts=self.acts,
            prog=parser.prog,
            refuse=parser.error,
        )
        # `kit --help` has it, and so no command's own.
        parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.add_arguments(parser)


def load(module: str) -> Command:
    """Read a command's file, ``FOLDER.NAME``."""
    file = import_module(f"nodekit.deploy.commands.{module}")
    return Command(
        name=module.rpartition(".")[2],
        help=file.__doc__ or "",
        epilog=getattr(file, "EPILOG", ""),
        takes_command=getattr(file, "TAKES_COMMAND", False),
        acts=getattr(file, "ACTS", False),
        add_arguments=getattr(file, "add_arguments", lambda _: None),
        run=file.run,
    )


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the width of the terminal, and of a table (indented lines) the last column."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # noqa: ARG002  # argparse passes it
        return "\n\n".join(
            "\n".join(_fitted(line, width) for line in part.splitlines())
            if re.search(r"^ ", part, re.MULTILINE)
            else textwrap.fill(part, width, break_on_hyphens=False)
            for part in text.strip("\n").split("\n\n")
        )


def _fitted(line: str, width: int) -> str:
    """A line of a table; a comment is left as it is, to be copied with what it stands behind."""
    before = re.match(r" +\S.*? {2,}(?=[^ #])", line)
    if before is None or len(line) <= width:
        return line
    rest = line[before.end() :]
    return textwrap.fill(rest, width, initial_indent=before[0], subsequent_indent=" " * before.end())
