"""The types of statuses and events, which agents write and others read (docs/events.md)."""

from __future__ import annotations

from typing import Any, Dict, List, Literal, Optional, Protocol, Sequence, Tuple, TypedDict

VERSION = 1
"""The version of statuses and of files of events; 1 if they have none. New fields or kinds do not change it."""

Finished = Literal["succeeded", "failed", "stopped"]
FINISHED: Tuple[Finished, ...] = ("succeeded", "failed", "stopped")
"""The final states of a run or a node."""
EndCause = Literal["", "ended-elsewhere", "too-few-nodes", "broken"]
"""Why an agent ended, if known; ``message`` has the same as text for the user."""
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
    """A function that writes an event."""

    def __call__(self, kind: EventKind, **fields: Any) -> None:
        """Write an event; its fields must be JSON values."""


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
    """When the rank wrote its last words, in seconds since 1970."""
    log: str
    error: str
    kernel: List[str]


class GpuHealth(TypedDict, total=False):
    """The health of one GPU, with those fields that it reports."""

    temperature: int
    """Degrees Celsius."""
    clock: int
    clock_max: int
    """MHz, of the streaming multiprocessors."""
    slow: List[str]
    """Why the clock is low, in nvidia-smi's words (`gpu_watch.SLOW`)."""
    power: int
    power_limit: int
    """Watts."""
    uncorrectable: int
    """ECC errors that could not be corrected, since the driver was loaded."""


class GpuUsage(GpuHealth):
    """The load and the memory of one GPU, with its health."""

    index: int
    use: Optional[float]
    memory: int
    memory_total: int


class Usage(TypedDict, total=False):
    """What a node uses; None if unknown."""

    cpu: Optional[float]
    memory: Optional[int]
    memory_total: Optional[int]
    interface: str
    received: Optional[int]
    sent: Optional[int]
    gpus: List[GpuUsage]


class Guess(TypedDict):
    """How far a rank seems to be, guessed from the last line that it printed."""

    step: Optional[int]
    total_steps: Optional[int]
    epoch: Optional[int]
    loss: Optional[float]


class Slow(TypedDict):
    """A node that slows down the others, or one end of a link that does."""

    node: str
    cause: str
    of_host: bool
    """Whether the job would be faster without the node."""


class HostStatus(TypedDict, total=False):
    """The fields of a node's status that its host adds, whether the agent is alive or not."""

    alive: Optional[bool]
    """Whether the agent is alive; None: the host is unreachable, and this is its last known status."""
    known: bool
    """Whether the node's folder exists."""
    fence: int
    granted: Optional[Dict[str, Any]]
    snapshot: Sequence[int]
    """Generation and step of the newest committed snapshot."""
    agent: str
    agent_log: str
    unwritable: str
    """Why the agent and its ranks can write nothing to the node's folder, with its path; absent if they can."""


class NodeStatus(HostStatus, total=False):
    """The current status of a node: written by its agent, completed by its host; docs/events.md explains each field."""

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
    """What the ranks do before the first step; "" if they do not report it, and afterwards."""
    usage: Optional[Usage]
    slow: Optional[Slow]
    """The node that slows down the others; reported by rank 0's node only."""
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
    """Offset in ``agent.log`` from which the lines are this agent's, in bytes."""


class Stopped(TypedDict):
    """The result of stopping an agent."""

    was: Literal["running", "not running"]
    killed: bool
