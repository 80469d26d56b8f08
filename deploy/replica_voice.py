"""What the exchange of files has to tell, from any thread, without repeating itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


def reason(error: Exception) -> str:
    """What happened, without the name of a draft, which is another one every time."""
    strerror = getattr(error, "strerror", None)
    return strerror or str(error) or type(error).__name__


class Voice:
    """Passes on to the agent's record; what keeps failing is told once until it has worked again."""

    def __init__(self, say: Callable[..., object]) -> None:
        self._say = say
        self._said: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()

    def tell(self, kind: str, **fields: Any) -> None:
        """Tell it."""
        with contextlib.suppress(OSError):  # a full disk must not end the thread that reports it
            self._say(kind, **fields)

    def tell_once(self, key: tuple[str, ...], kind: str, **fields: Any) -> None:
        """Tell it, unless this was told already and has not worked since."""
        with self._lock:
            if key in self._said:
                return
            self._said.add(key)
        self.tell(kind, **fields)

    def works(self, *start: str) -> None:
        """Whatever was told under a key that starts so is news again when it happens the next time."""
        with self._lock:
            self._said = {key for key in self._said if key[: len(start)] != start}

    @contextlib.contextmanager
    def complaining(self, *key: str) -> Iterator[None]:
        """An OSError is told, once, and not raised."""
        try:
            yield
        except OSError as error:
            self.tell_once((*key, reason(error)), "replica-failed", what=" ".join(key), reason=reason(error))
        else:
            self.works(*key)
