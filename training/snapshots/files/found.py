"""The result of a search in a snapshot folder, and the check that training may go on from it."""

from collections.abc import Iterable
from dataclasses import dataclass

from nodekit.training.snapshots.files.manifest import Loaded, NewerKit


class NoneLoads(OSError):
    """No snapshot can be loaded, though there are or may be some: training must not start at step 0 instead."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search for the newest snapshot in a folder."""

    loaded: Loaded | None = None
    """The newest snapshot that can be loaded."""
    problems: tuple[str, ...] = ()
    """Why newer snapshots, or all, were skipped."""
    newer_kit: tuple[tuple[int, int], str] | None = None
    """(generation, step) of the newest snapshot written by a newer nodekit, and a message."""


def check_loss(found: Iterable[Found], newest: tuple[int, int] | None) -> None:
    """Make sure that resuming from ``newest``, or from nothing, does not lose a snapshot that could still be used.

    Raises:
        NewerKit: a newer nodekit wrote a snapshot newer than ``newest``.
        NoneLoads: ``newest`` is None, though there are or may be snapshots.
    """
    found = list(found)
    if unknown := [each.newer_kit for each in found if each.newer_kit]:
        age, text = max(unknown)
        if newest is None or age > newest:
            raise NewerKit(
                f"{text}: go on with that nodekit, or a newer one; to go on from an older snapshot, or anew, move "
                "this one to another folder"
            )
    if newest is None and (problems := [text for each in found for text in each.problems]):
        raise NoneLoads(
            f"no snapshot can be loaded, and training does not begin at step 0 instead: {'; '.join(problems)}. "
            "Mend the disk or the file server, or bring back the nodes that have it, and start again: nothing was "
            "removed. To train anew, start a new run "
            "(kit up --new), or move what is in the folder elsewhere"
        )
