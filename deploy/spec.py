"""What an agent is given, as it lies in ``spec.json`` (0600) in its node's folder. Standard library only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """One node's plan plus the run's id and generation."""

    run_id: str
    generation: int
    """How often the run was started: what is left of an older one has no say."""
    name: str
    node_rank: int
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    master_addr: str
    master_port: int
    local_addr: str
    max_restarts: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    code_dir: str
    node_dir: str
    grace_s: float
    """How long workers have to end after SIGTERM."""
    listen_fd: int | None = None
    """On the rendezvous host: the socket that holds `master_port`."""

    @classmethod
    def load(cls, node_dir: Path) -> AgentSpec:
        """Read the spec from a node's folder."""
        fields: dict[str, Any] = json.loads((node_dir / "spec.json").read_text(encoding="utf-8"))
        return cls(**{**fields, "argv": tuple(fields["argv"])})

    def to_dict(self) -> dict[str, Any]:
        """The spec as JSON has it."""
        return dataclasses.asdict(self)
