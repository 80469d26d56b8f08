"""Send messages from an agent to its node's running ranks: a line of JSON in a FIFO for each rank.

In another FIFO a rank may report that it waits for the next attempt. `training/group/agent_messages.py` is the other
end. A rank that does not read its FIFO gets no messages.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import termios
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

Kind = Literal["lost", "pause", "stalled"]
"""``lost``: another rank is lost; ``pause``: another node joins; ``stalled``: this rank has not stopped yet."""
# Sent by a rank that lost a peer and waits for the next attempt; b"p" if all ranks have paused.
_HAS_LOST = b"l"


class Messages:
    """Messages to the ranks by one FIFO each, and from them by one FIFO of the agent's, in a folder of this node."""

    def __init__(self, folder: Path) -> None:
        """Open nothing yet; `prepare` makes the folder."""
        self._folder = folder
        self.inbox: int | None = None
        """The descriptor that `hears_of_a_loss` reads, for `poll`; None if there are no FIFOs here."""
        self._kept: dict[int, int] = {}

    def path(self, local_rank: int) -> Path:
        """Return the path of this rank's FIFO."""
        return self._folder / f"local{local_rank}"

    def prepare(self, local_ranks: Iterable[int]) -> None:
        """Make the FIFOs; on a file system without FIFOs there are no messages."""
        inbox = self._folder / "agent"
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
        for path in (inbox, *map(self.path, local_ranks)):
            with contextlib.suppress(OSError):
                os.mkfifo(path, 0o600)
        if self.inbox is None:
            # For writing too: without a writer, reads would report the end of the file.
            with contextlib.suppress(OSError):
                self.inbox = os.open(inbox, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def renew(self, local_rank: int) -> None:
        """Replace the FIFO of a rank that is about to be started.

        A thread of the rank before it, which has not quite ended yet, may still read the old one.
        """
        path = self.path(local_rank)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            os.mkfifo(path, 0o600)

    def keep(self, local_rank: int) -> None:
        """Replace the rank's FIFO by one that holds messages until the rank reads them."""
        self.renew(local_rank)
        if (handle := self._kept.pop(local_rank, None)) is not None:
            os.close(handle)
        with contextlib.suppress(OSError):
            self._kept[local_rank] = os.open(self.path(local_rank), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def keep_no_more(self) -> None:
        """Hold no more messages: those that no rank has begun to read are dropped."""
        while self._kept:
            os.close(self._kept.popitem()[1])

    def hears_of_a_loss(self) -> bool:
        """Whether a rank has reported, since the last call, that it has lost another one and waits."""
        if self.inbox is None:
            return False
        try:
            return _HAS_LOST in os.read(self.inbox, 1 << 16)
        except BlockingIOError:
            return False

    def send(self, local_rank: int, message: Mapping[str, Any]) -> bool:
        """Send a message to a rank; False if it does not read."""
        try:
            handle = os.open(self.path(local_rank), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # ENXIO: nobody reads
            return False
        try:
            line = json.dumps(message).encode() + b"\n"
            return os.write(handle, line) == len(line)
        except OSError:  # the rank has stopped reading
            return False
        finally:
            os.close(handle)

    def is_unread(self, local_rank: int) -> bool:
        """Whether a rank that reads its FIFO has not read all of it yet."""
        unread = bytearray(4)
        try:
            handle = os.open(self.path(local_rank), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # ENXIO: nobody reads
            return False
        try:
            fcntl.ioctl(handle, termios.FIONREAD, unread)
        except OSError:
            return False
        finally:
            os.close(handle)
        return any(unread)
