"""What the command lines of `kit up` and `kit down` say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nodekit.deploy.connect.cluster import SshOptions

if TYPE_CHECKING:
    from nodekit.deploy.metrics.metrics_port import Place


ATTACH_TAIL_BYTES = 4096
"""Of each log that is there already, so much is shown by who attaches to a run."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line of `kit up` says."""

    inventory: Path
    command: tuple[str, ...] | None = None
    dry_run: bool = False
    json: bool = False
    detach: bool = False
    new: bool = False
    quiet: bool = False
    plain: bool = False
    """Lines in a terminal too, in place of the live view."""
    sweep: tuple[str, ...] = ()
    """Options of the job, each with its values: ``lr=1e-3,3e-4``."""
    skip_check: bool = False
    """Look only for what no job can do without."""
    metrics: Place | None = None
    """Where metrics for Prometheus are served."""
    ssh: SshOptions = field(default_factory=SshOptions)


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """What the command line of `kit down` says."""

    force: bool = False
    """Kill it, without a snapshot."""
    lost: bool = False
    """What cannot be reached is off, says the user."""
    fetch: bool = False
    """Copy its logs to this machine."""
    ssh: SshOptions = field(default_factory=SshOptions)
