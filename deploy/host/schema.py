"""The types of what an agent writes and others read: statuses and events (docs/events.md)."""

from __future__ import annotations

from typing import Any, Dict, List, Literal, Optional, Protocol, Sequence, Tuple, TypedDict

VERSION = 1
"""Of statuses and of files of events; those without one are of version 1, too. More fields or kinds are no new one."""

Finished = Literal["succeeded", "failed", "stopped"]
FINISHED: Tuple[Finished, ...] = ("succeeded", "failed", "stopped")
"""The states of a run, or of a node, that has come to its end."""
EndCause = Literal["", "ended-elsewhere", "too-few-nodes", "broken"]
"""Why an agent ended, where that is known; with its words for people in ``message``."""
EventKind = Literal[
    # Of a node.
    "agent-started", "generation", "rendezvous", "workers-started", "resumed", "first-step", "sample", "evaluation",
    "not-finite",
    "snapshot", "replicas-gathered", "replica-kept", "replica-failed", "replica-refused", "replica-damaged",
    "replica-lost", "worker-failed", "hang", "slow", "lingering", "membership", "no-quorum", "store-lost",
    "no-descriptors", "false-alarm", "logs-removed", "logs-cut", "logs-not-bounded", "attempt-ended", "agent-ended",
    "gpu-error", "gpu-slow", "unkillable",
    # Of the supervisor.
    "run-started", "host", "phase", "start", "join", "fence", "grant", "stop", "drain", "undrain", "problem", "refused",
    "unreachable", "reached", "node-state", "first-progress", "said", "notify-failed", "run-ended",
]  # fmt: skip


class Say(Protocol):
    """Writes an event."""

    def __call__(self, kind: EventKind, **fields: Any) -> None:
        """One event; its fields are JSON."""


class Worker(TypedDict):
    """One rank's process."""

    rank: int
    local_rank: int
    pid: int
    start_time: Optional[int]
    """In clock ticks since the host's boot."""


class WorkerFailure(TypedDict):
    """How a rank ended badly."""

    attempt: str
    rank: int
    local_rank: int
    world_size: int
    exitcode: int
    """Negative: the signal that killed it."""
    when: float
    """Seconds since 1970: it wrote its last words."""
    log: str
    error: str
    kernel: List[str]


class GpuHealth(TypedDict, total=False):
    """How one GPU is, without what it does not tell."""

    temperature: int
    """Degrees Celsius."""
    clock: int
    clock_max: int
    """MHz, of its multiprocessors."""
    slow: List[str]
    """Why the clock is low, in nvidia-smi's words (`gpu_watch.SLOW`)."""
    power: int
    power_limit: int
    """Watts."""
    uncorrectable: int
    """ECC errors that could not be corrected, since the driver was loaded."""


class GpuUsage(GpuHealth):
    """What one GPU is used for."""

    index: int
    use: Optional[float]
    memory: int
    memory_total: int


class Usage(TypedDict, total=False):
    """What a node uses; None for what is not known."""

    cpu: Optional[float]
    memory: Optional[int]
    memory_total: Optional[int]
    interface: str
    received: Optional[int]
    sent: Optional[int]
    gpus: List[GpuUsage]


class Guess(TypedDict):
    """How far a rank seems to be, by what it printed last."""

    step: Optional[int]
    total_steps: Optional[int]
    epoch: Optional[int]
    loss: Optional[float]


class Slow(TypedDict):
    """A node that makes the others wait, or one end of such a link."""

    node: str
    cause: str
    of_host: bool
    """Whether the job would be quicker without the node."""


class HostStatus(TypedDict, total=False):
    """What a node's host says of it, whether its agent lives or not."""

    alive: Optional[bool]
    """None: the host cannot be reached now, and this was heard last."""
    known: bool
    """Whether the node's folder is there."""
    fence: int
    granted: Optional[Dict[str, Any]]
    snapshot: Sequence[int]
    """Generation and step of the newest that is committed."""
    agent: str
    agent_log: str


class NodeStatus(HostStatus, total=False):
    """What a node does now: written by its agent, completed by its host (docs/events.md says what each field means)."""

    version: int
    kind: str
    sum: int
    run: str
    time: float
    node: str
    state: str
    generation: int
    attempt: Optional[str]
    rank: Optional[int]
    world_size: Optional[int]
    workers: List[Worker]
    stayed: List[int]
    members: List[str]
    failures: List[WorkerFailure]
    ended: List[int]
    done_at: float
    waits_for: List[str]
    copying: bool
    progress: Optional[str]
    progress_time: Optional[float]
    guess: Optional[Guess]
    stage: str
    """What its ranks do before the first step; "" where they do not say, and later."""
    usage: Optional[Usage]
    slow: Optional[Slow]
    """Who makes the others wait, on rank 0's node."""
    message: str
    cause: EndCause
    cure: str
    no_progress: bool
    notice: str
    blocked: str
    no_quorum: bool
    electorate: Dict[str, Any]
    address: str
    port: int
    held_port: int


class AgentRecord(TypedDict):
    """Which process a node's agent is (``agent.json``)."""

    pid: int
    start_time: Optional[int]
    boot_id: str
    log_from: int
    """Where its own words begin in ``agent.log``, in bytes."""


class Stopped(TypedDict):
    """What was found of an agent that was to be stopped."""

    was: Literal["running", "not running"]
    killed: bool
