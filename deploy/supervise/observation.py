"""Turns a node's status into the policy's input. Pure."""

from __future__ import annotations

from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.supervise.state import Observation


def seen_of(status: NodeStatus, *, problem: str = "", broken: str = "") -> Observation:
    """Return the `Observation` of a node's status; `problem` and `broken` say why its last start failed, if it did."""
    generation = int(status.get("generation", -1))
    alive = bool(status.get("alive"))
    all_voters = [Voters.of(each) for each in (status.get("electorate"), status.get("granted")) if each]
    fence = int(status.get("fence", -1))
    held = status.get("snapshot", (-1, 0))
    is_clear = not alive or generation >= fence or not status.get("workers")
    return Observation(
        alive=alive,
        agent=str(status.get("agent", "")),
        generation=generation,
        state=str(status.get("state", "")),
        blocked=bool(status.get("no_quorum")),
        members=tuple(status.get("members", ())),
        # The node counts as fenced only once the workers of the old generation have ended.
        fence=fence if is_clear else min(fence, generation),
        voters=max((each for each in all_voters if each.generation == generation), default=None),
        port=int(status.get("port") or 0),
        held=(held[0], held[1]),
        problem=problem,
        broken=str(status.get("message")) if status.get("cause") == "broken" else broken,
    )
