"""The fence between generations: a file beside the snapshots that stops ranks of an older generation."""

import os
from pathlib import Path

from nodekit.training.snapshots.files.commit import NOT_FOUND, place, written_beside

EXIT_FENCED = 144
"""The exit status of a rank whose generation is over: a newer one runs elsewhere, so there is no restart."""

FILE = "fence"
"""The fence's file in a snapshot folder: one line, a whole number; generations below it may not commit."""


class Fenced(RuntimeError):
    """The rank's generation is over: it may neither train on nor commit a snapshot."""

    def __init__(self, generation: int, fence: int, where: str) -> None:
        super().__init__(
            f"generation {generation} is over: {where} is fenced for generation {fence} and later, and what is "
            "left of this one may neither train on nor save"
        )
        self.generation = generation
        self.fence = fence


class Fence:
    """The fence of one folder, raised by kit's supervisor or by the first commit of a newer generation."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet; ``folder`` is that of the snapshots."""
        self._path = folder / FILE

    def read(self) -> int:
        """Return the lowest generation that may commit; 0 without a fence.

        Raises:
            OSError: the fence cannot be read, or is not a number: then it is unknown which generation may commit.
        """
        try:
            text = self._path.read_bytes().strip()
        except NOT_FOUND:
            return 0
        if not text.isdigit():
            raise OSError(f"{self._path} holds {text[:40]!r}: a whole number was wanted")
        return int(text)

    def check(self, generation: int) -> None:
        """Check that ``generation`` may commit.

        Raises:
            Fenced: ``generation`` is below the fence.
            OSError: see ``read``.
        """
        if generation < (fence := self.read()):
            raise Fenced(generation, fence, str(self._path.parent))

    def raise_to(self, generation: int) -> None:
        """Raise the fence to ``generation``, so that lower ones cannot commit; do nothing if it is as high already.

        Raises:
            OSError: the folder cannot be written.
        """
        if self.read() >= generation:
            return
        with written_beside(self._path.parent) as (temporary, file):
            file.write(f"{generation}\n".encode())
            place(temporary, file, self._path.name)


def fence_or_zero(folder: str | os.PathLike[str]) -> int:
    """As ``Fence.read``, but return 0 for an unreadable fence, which must not end the training."""
    try:
        return Fence(Path(folder)).read()
    except OSError:  # the next save fails too, and logs it
        return 0
