"""The present status of a run and its nodes, as lines for the user and as data for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodekit.deploy.agent.telemetry import guess
from nodekit.deploy.host.errors import SEE_TO_DISK
from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.output import terminal


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of a run, as `kit status` shows it."""

    state: str
    nodes: Mapping[str, str]
    """Node → its status line."""
    lines: Sequence[str] = ()
    """Lines to show above the nodes."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What `--json` prints in addition to the run's record."""


def absence(seen: NodeStatus) -> str:
    """Return the state of a node whose agent is not running, and did not end with the run: gone or spare."""
    return "gone" if seen.get("agent") else "spare"


def unwritable(seen: NodeStatus) -> str:
    """Return why nothing can be written to the node's folder, and what to do; "" if it can be."""
    found = seen.get("unwritable")
    return f"{found}; {SEE_TO_DISK}" if found else ""


def status_line(seen: NodeStatus, *, now: float) -> str:
    """Return a node's status line: its state, then its ranks, attempt and progress, and how old the progress is."""
    parts = [str(seen.get("state", "starting"))]
    if (first := seen.get("rank")) is not None:
        last = first + max(0, len(seen.get("workers", ())) - 1)
        ranks = str(first) if last == first else f"{first}-{last}"
        parts.append(f"rank {ranks} of {seen['world_size']}")
    if seen.get("state") == "running" and (ended := seen.get("ended")):
        parts.append(f"rank {', '.join(map(str, ended))} has ended well, not yet the others")
    if seen.get("state") == "waiting":
        waits_for = f", waiting for {', '.join(seen['waits_for'])}" if seen.get("waits_for") else ""
        parts.append(f"ended well {max(0, now - float(seen['done_at'])):.0f} s ago{waits_for}")
    if seen.get("attempt") and not str(seen["attempt"]).endswith(".0"):
        parts.append(f"attempt {seen['attempt']}")
    if seen.get("progress"):
        parts.append(f"step {seen['progress']}")
        quiet = now - float(seen["progress_time"] or now)
        if seen.get("unwritable"):
            parts.append(f"({quiet:.0f} s ago)")  # the ranks may go on: they cannot tell
        elif quiet > 5 and seen.get("state") == "running":
            parts.append(f"(no progress for {quiet:.0f} s)")
    elif stage := seen.get("stage"):
        parts.append(str(stage))
    elif guessed := seen.get("guess"):
        parts.append(guess.words(guessed))
    if seen.get("blocked"):
        parts.append(str(seen["blocked"]))
    if seen.get("message"):
        parts.append(str(seen["message"]))
    if seen.get("unwritable"):
        parts.append(unwritable(seen))
    return terminal.harmless("  ".join(parts), colours=False).replace("\n", " ")
