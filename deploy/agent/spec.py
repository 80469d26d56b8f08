"""The agent's configuration, as stored in ``spec.json`` (0600) in its node's folder. Standard library only."""

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
    """Which start of the run this is; agents of an older generation must not act any more."""
    call: int = 0
    """Which call into this generation this is; more than 0 if a fence was called off and the node called again."""
    joins: bool = False
    """Whether the job is running already, so that the other nodes stop and wait as soon as this one joins."""
    stands_by: bool = False
    """Whether ranks may be started before their attempt is known: ranks of this run have waited for one before."""
    name: str
    node_rank: int
    nodes: tuple[str, ...] = ()
    """The names of all nodes, by node_rank."""
    electorate: tuple[str, ...] = ()
    """The voters of this generation (deploy/agent/quorum.py); if empty, this node alone."""
    electorate_version: int = 0
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    gpus: tuple[int, ...] = ()
    """The GPUs of this node's ranks, by nvidia-smi's index."""
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
    """How long workers may take to exit after SIGTERM."""
    listen_fd: int | None = None
    """Set by the agent of the rendezvous host: the descriptor of its socket that listens on `master_port`."""
    keep_alive_s: float = 0.5
    lost_after: int = 5
    """How many keepalives may stay unacknowledged before a node counts as lost."""
    last_call_s: float = 1.0
    """How long a round, after the first, waits for more nodes once it has min_nodes."""
    wait_s: float = 1800.0
    """How long to wait for min_nodes, or for a call into the next generation."""
    hang: float | Literal["auto", "never"] = "auto"
    """How long ranks may make no progress, in seconds."""
    window_s: float = 10.0
    """Length of one measurement of which rank makes the others wait."""
    copies: int = 2
    """On how many nodes to keep each of the user's snapshot files."""
    keep_log_bytes: int = 10**9
    """The most that this node's logs may take."""
    token: str = field(repr=False)
    """The secret by which the agents of a run authenticate to each other."""

    @classmethod
    def load(cls, node_dir: Path) -> AgentSpec:
        """Read the spec from a node's folder."""
        fields: dict[str, Any] = json.loads((node_dir / "spec.json").read_text(encoding="utf-8"))
        for name in ("argv", "nodes", "electorate", "gpus"):
            fields[name] = tuple(fields.get(name, ()))
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as a dictionary for JSON."""
        return dataclasses.asdict(self)

    def known_voters(self) -> Voters:
        """Return the voters as of the time when this spec was written."""
        return Voters(self.generation, self.electorate_version, self.electorate or (self.name,))

    def name_of(self, node_rank: int) -> str:
        """Return the name of the node with this node_rank."""
        return self.nodes[node_rank] if node_rank < len(self.nodes) else self.name

    def who_is_missing(self, present: Sequence[int]) -> str:
        """Return which nodes are missing for min_nodes, in words, if those with the node_ranks `present` are there.

        Return "" if enough are there, or if this node is not in `present`, which means that nothing has been read yet.
        """
        names = [self.name_of(number) for number in present]
        absent = [name for name in self.nodes if name not in names]
        if self.name not in names or len(names) >= self.min_nodes or not absent:
            return ""
        return f"{len(names)} of at least {self.min_nodes} nodes are here, without {', '.join(absent)}"
