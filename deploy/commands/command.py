"""A command, as read from its file in one of the folders here, and the format of its help."""

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
    """The file's docstring; its first line is shown in ``kit --help``."""
    epilog: str
    """``EPILOG``: the text below the options in the command's help."""
    takes_command: bool
    """``TAKES_COMMAND``: what follows ``--`` is the user's own command, in ``args.command``."""
    acts: bool
    """``ACTS``: the command changes something, so it goes on if its output cannot be written (``| head``)."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Run the command: takes the parsed arguments, and returns the exit status."""

    @property
    def summary(self) -> str:
        """The command's line in ``kit --help``."""
        return self.help.partition("\n")[0].removesuffix(".")

    def add(self, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add the command to a parser's subcommands."""
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
        # `kit --help` describes --debug, so the help of each command does not.
        parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.add_arguments(parser)


def load(module: str) -> Command:
    """Import a command's file; `module` is ``FOLDER.NAME``."""
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
    """Wraps paragraphs, and the last column of a table (indented lines), to the width of the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # noqa: ARG002  # argparse passes it
        return "\n\n".join(
            "\n".join(_fitted(line, width) for line in part.splitlines())
            if re.search(r"^ ", part, re.MULTILINE)
            else textwrap.fill(part, width, break_on_hyphens=False)
            for part in text.strip("\n").split("\n\n")
        )


def _fitted(line: str, width: int) -> str:
    """Wrap a line of a table; a line that ends with a comment is left as it is, to be copied with it."""
    before = re.match(r" +\S.*? {2,}(?=[^ #])", line)
    if before is None or len(line) <= width:
        return line
    rest = line[before.end() :]
    return textwrap.fill(rest, width, initial_indent=before[0], subsequent_indent=" " * before.end())
