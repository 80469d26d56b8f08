"""What an agent is given, as it lies in ``spec.json`` (0600) in its node's folder. Standard library only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nodekit.deploy.agent.quorum import Voters


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """One node's plan plus the run's id and generation."""

    run_id: str
    generation: int
    """How often the run was started: what is left of an older one has no say."""
    call: int = 0
    """How often the agent was called into this generation: again, where fencing it was called off."""
    joins: bool = False
    """Whether the job is under way, so that the others wait from the moment this node is there."""
    stands_by: bool = False
    """Whether some of the run's ranks have stayed: then they can be started before their attempt is known."""
    name: str
    node_rank: int
    nodes: tuple[str, ...] = ()
    """The names of all nodes, by their node_rank."""
    electorate: tuple[str, ...] = ()
    """The nodes that count in this generation (deploy/agent/quorum.py); none: this node alone."""
    electorate_version: int = 0
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    gpus: tuple[int, ...] = ()
    """Those of its ranks, by nvidia-smi's index."""
    master_addr: str
    master_port: int
    is_host: bool = False
    """Whether this node's agent keeps the rendezvous store."""
    local_addr: str
    max_restarts: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    code_dir: str
    node_dir: str
    grace_s: float
    """How long workers have to end after SIGTERM."""
    listen_fd: int | None = None
    """On the rendezvous host, the socket that holds `master_port`; None: the agent holds it itself."""
    keep_alive_s: float = 0.5
    lost_after: int = 5
    last_call_s: float = 1.0
    wait_s: float = 1800.0
    hang: float | Literal["auto", "never"] = "auto"
    window_s: float = 10.0
    """How long is measured, each time, who makes the others wait."""
    copies: int = 2
    """On how many nodes a user's snapshot file is kept."""
    keep_log_bytes: int = 10**9
    """What the logs of this node may take."""
    token: str = field(repr=False)
    """What the agents of a run know each other by."""

    @classmethod
    def load(cls, node_dir: Path) -> AgentSpec:
        """Read the spec from a node's folder."""
        fields: dict[str, Any] = json.loads((node_dir / "spec.json").read_text(encoding="utf-8"))
        for name in ("argv", "nodes", "electorate", "gpus"):
            fields[name] = tuple(fields.get(name, ()))
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """The spec as JSON has it."""
        return dataclasses.asdict(self)

    def known_voters(self) -> Voters:
        """The voters as they were when this spec was made."""
        return Voters(self.generation, self.electorate_version, self.electorate or (self.name,))

    def name_of(self, node_rank: int) -> str:
        """A node's name."""
        return self.nodes[node_rank] if node_rank < len(self.nodes) else self.name

    def who_is_missing(self, present: Sequence[int]) -> str:
        """Who keeps the fewest nodes from being there, in words, with those of these node_ranks.

        "" for nobody, and while this node itself is not among those: it has not looked yet.
        """
        names = [self.name_of(number) for number in present]
        absent = [name for name in self.nodes if name not in names]
        if self.name not in names or len(names) >= self.min_nodes or not absent:
            return ""
        return f"{len(names)} of at least {self.min_nodes} nodes are here, without {', '.join(absent)}"
