"""The part of a lab that faults use, and the error of a fault that could not be injected."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nodekit.inventory.errors import KitError

SAVE_TIMEOUT_S = 60.0


class NotTried(KitError):
    """A fault could not be injected."""


class Lab(Protocol):
    """The part of `nodekit.deploy.lab` that faults use, by the lab's host names; `kit drill` passes it in."""

    @property
    def hosts(self) -> Mapping[str, Any]: ...  # noqa: D102
    def run(self, host: str, argv: Sequence[str], **kwargs: Any) -> subprocess.CompletedProcess[Any]: ...  # noqa: D102
    def is_alive(self, host: str) -> bool: ...  # noqa: D102
    def status(self, host: str) -> str: ...  # noqa: D102
    def crash(self, host: str) -> None: ...  # noqa: D102
    def revive(self, host: str) -> None: ...  # noqa: D102
    def cut(self, host: str) -> None: ...  # noqa: D102
    def slow(self, host: str, *, delay_ms: float, loss_percent: float) -> None: ...  # noqa: D102
    def mend(self, host: str) -> None: ...  # noqa: D102
