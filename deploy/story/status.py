"""What a run, and each of its nodes, does now: in one line for people, and for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodekit.deploy.agent.telemetry import guess
from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.output import terminal


@dataclass(frozen=True, kw_only=True)
class Status:
    """What `kit status` says of a run."""

    state: str
    nodes: Mapping[str, str]
    """Node → its line."""
    lines: Sequence[str] = ()
    """What stands above the nodes."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """For programs: what `--json` has beyond the run's record."""


def absence(seen: NodeStatus) -> str:
    """The state of a node whose agent does not run and has not ended with the run."""
    return "gone" if seen.get("agent") else "spare"


def status_line(seen: NodeStatus, *, now: float) -> str:
    """A node's status for people: state, then rank, attempt, progress, and how long ago that was."""
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
        if quiet > 5 and seen.get("state") == "running":
            parts.append(f"(no progress for {quiet:.0f} s)")
    elif stage := seen.get("stage"):
        parts.append(str(stage))
    elif guessed := seen.get("guess"):
        parts.append(guess.words(guessed))
    if seen.get("blocked"):
        parts.append(str(seen["blocked"]))
    if seen.get("message"):
        parts.append(str(seen["message"]))
    return terminal.harmless("  ".join(parts), colours=False).replace("\n", " ")
