"""Read the files that options name, which give defaults for other options, and check that kit can follow them."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from nodekit.training.errors import TrainingError
from nodekit.training.options.deepspeed_config import read_settings
from nodekit.training.options.trainer_args import read_arguments


def parse_with_files(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    environ: Mapping[str, str],
    folder: Path,
) -> argparse.Namespace:
    """Parse a command line whose files give defaults; files that are missing here are left for the ranks to check.

    Args:
        parser: of ``Options``.
        arguments: the command line.
        environ: of a rank, or of the process that will start the ranks.
        folder: the folder in which the command will run, or its copy here if the ranks run elsewhere.

    Raises:
        TrainingError: a file cannot be read, or has settings that kit cannot follow; the message names all of them.
    """
    given = parser.parse_args(arguments)
    if given.engine == "trainer" and (path := _there(given.training_args, folder)):
        read_arguments(path)
    if given.engine != "deepspeed" or not (path := _there(given.deepspeed_config, folder)):
        return given
    settings = read_settings(path, _num_ranks(given, environ))
    parser.set_defaults(**settings.defaults())
    given = parser.parse_args(arguments)
    if clashes := settings.clashes(vars(given)):
        raise TrainingError(f"--deepspeed-config {path}: {'; '.join(clashes)}")
    return given


def _there(path: Path | None, folder: Path) -> Path | None:
    """Return the file's path in ``folder``; None if it is missing, or absolute while ``folder`` is a copy."""
    if path is None or (path.is_absolute() and folder != Path()):
        return None
    return folder / path if (folder / path).is_file() else None


def _num_ranks(given: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if (known := environ.get("WORLD_SIZE", "")).isdecimal():
        return int(known)
    if given.launcher == "spawn" and not given.nproc_per_node:
        # Importing torch to count the GPUs costs nothing extra: this process needs torch anyway.
        from nodekit.training.process.devices import kind_here, number_of

        return number_of(kind_here()) or 1
    return given.nproc_per_node or 1
