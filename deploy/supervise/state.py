"""What the supervisor goes by: the rules, what is seen and remembered of each node, and what can be done. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.host.schema import EventKind
from nodekit.deploy.records.runs import Outcome
from nodekit.deploy.story.cause import Cause
from nodekit.inventory.schema import Inventory

FREE_FAILURES = 2
PAUSE_S, MAX_PAUSE_S = 10.0, 600.0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the inventory says."""

    nodes: tuple[str, ...]
    """All hosts, in the inventory's order; those beyond `max_nodes` are spares."""
    min_nodes: int
    max_nodes: int
    wait_s: float = 1800.0
    """How long the job may wait for enough nodes."""
    drained: frozenset[str] = frozenset()
    """Those that the user wants out of the job (`kit drain`); not of the inventory."""

    @classmethod
    def of(cls, inventory: Inventory) -> Rules:
        """An inventory's, with no node drained."""
        return cls(
            nodes=tuple(host.name for host in inventory.hosts),
            min_nodes=inventory.nodes.min,
            max_nodes=inventory.nodes.max,
            wait_s=inventory.timings.wait,
        )


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What was last seen of one node."""

    reachable: bool = True
    alive: bool = False
    """Whether its agent runs."""
    agent: str = ""
    """Names the process."""
    generation: int = -1
    """Its agent's; of one that ended, its last."""
    state: str = ""
    """starting, rendezvous, running, waiting (done, for the others), orphaned, fenced; succeeded, failed, stopped."""
    blocked: bool = False
    """It waits in a round that may not train."""
    members: tuple[str, ...] = ()
    """Who is in its round."""
    fence: int = -1
    """Generations below this are refused there; -1 where there is no run folder (never started, or lost)."""
    voters: Voters | None = None
    """The newest it has written down."""
    port: int = 0
    """Where its rendezvous listens or would: a port it keeps."""
    held: tuple[int, int] = (-1, 0)
    """The newest snapshot committed there: (generation, step)."""
    problem: str = ""
    """Why its last start failed."""
    broken: str = ""
    """What of it is broken, where its agent has left for that, or was not started."""

    @property
    def trains(self) -> bool:
        """Whether its workers run."""
        return self.alive and self.state in ("running", "waiting")

    def is_orphan(self, generation: int) -> bool:
        """Whether its agent has lost the rendezvous host of this generation."""
        return self.reachable and self.alive and self.state == "orphaned" and self.generation == generation


@dataclass(frozen=True, kw_only=True)
class NodeHistory:
    """What is remembered of one node."""

    failures: tuple[float, ...] = ()
    """When it was lost, its agent ended, or a start failed; a long time without one clears them."""
    agent: str = ""
    present: bool = False
    """Whether it was in the job when last seen."""
    asked: str = ""
    asked_at: float = 0.0
    problem: str = ""
    excluded: tuple[str, str] = ("", "")
    """The agent and the fault that it was last excluded for: not twice for the same, the user may take it back."""

    @property
    def paused_until(self) -> float:
        """Until when it is not started or called again: an exponential backoff on repeated losses."""
        num_paused = len(self.failures) - FREE_FAILURES
        if num_paused <= 0:
            return 0.0
        return self.failures[-1] + min(PAUSE_S * 2.0 ** (num_paused - 1), MAX_PAUSE_S)


@dataclass(frozen=True, kw_only=True)
class State:
    """What the supervisor remembers from one decision to the next."""

    generation: int
    host: str
    """The node whose agent keeps the rendezvous store."""
    port: int
    voters: Voters
    """The voters in force."""
    granted: Voters | None = None
    """Newer voters that nodes are writing down; until they are in force, a group may go by either."""
    next_generation: int | None = None
    """The generation that is being fenced for; None if none is."""
    called_off: int = -1
    """The last generation that was fenced for in vain; `Start` and `Join` pass it on: such fences hold no longer."""
    had_folder: frozenset[str] = frozenset()
    """Nodes that have had a run folder."""
    forgot: frozenset[str] = frozenset()
    """Voters that have lost their run folder since, with its fence and snapshots."""
    known: Mapping[str, NodeHistory] = field(default_factory=dict)
    met: tuple[str, ...] = ()
    """While fencing: the nodes that could reach each other."""
    has_trained: bool = False
    """Whether this generation was seen to train."""
    elapsed_s: float = 0.0
    """The time that decisions are based on: it never goes back, and stands still while no supervisor runs."""
    clock: float | None = None
    broken_since: float | None = None
    stuck_since: float | None = None
    fencing_since: float | None = None
    stable_since: float | None = None
    floor: tuple[int, int] = (-1, 0)
    """The snapshot, as (generation, step), that a node must hold to count, since `stable_since`."""
    short_since: float | None = None
    ended_since: float | None = None
    said: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Topic → what was said last, and when."""

    @property
    def newest(self) -> Voters:
        """The voters that `Start` and `Join` pass on."""
        return self.granted or self.voters

    def to_dict(self) -> dict[str, Any]:
        """What another supervisor must know to take over, for JSON; see ``policy.py``."""
        return {
            "generation": self.generation,
            "host": self.host,
            "port": self.port,
            "electorate": self.voters.to_dict(),
            "granted": self.granted.to_dict() if self.granted else None,
            "next_generation": self.next_generation,
            "called_off": self.called_off,
            "voters": sorted(self.had_folder),
            "forgot": sorted(self.forgot),
            "failures": {name: list(each.failures) for name, each in self.known.items() if each.failures},
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], rules: Rules) -> State:
        """The state of a supervisor that takes over."""
        failures = {name: tuple(fields["failures"].get(name, ())) for name in rules.nodes}
        return cls(
            generation=fields["generation"],
            host=fields["host"],
            port=fields["port"],
            voters=Voters.of(fields["electorate"]),
            granted=Voters.of(fields["granted"]) if fields["granted"] else None,
            next_generation=fields["next_generation"],
            called_off=fields["called_off"],
            had_folder=frozenset(fields["voters"]),
            forgot=frozenset(fields["forgot"]),
            known={name: NodeHistory(failures=failures[name]) for name in rules.nodes},
            elapsed_s=max((when for each in failures.values() for when in each), default=0.0),
        )

    def is_fenced_by(self, nodes: Collection[str]) -> bool:
        """Whether, once these are fenced, the other nodes may not train, by either set of voters."""
        return self.voters.is_fenced_by(nodes) and self.newest.is_fenced_by(nodes)

    def may_train(self, nodes: Collection[str]) -> bool:
        """Whether these nodes may train, by either set of voters."""
        return self.voters.may_train(nodes) or self.newest.may_train(nodes)


@dataclass(frozen=True)
class Start:
    """Start an agent on a node, for the present generation."""

    kind: ClassVar[EventKind] = "start"
    node: str
    is_new: bool = False
    """Whether it may make the run folder; where there is none although there should, the node must refuse."""


@dataclass(frozen=True)
class Join:
    """Call a live agent into the present generation."""

    kind: ClassVar[EventKind] = "join"
    node: str


@dataclass(frozen=True)
class Fence:
    """Refuse all older generations on a node, from now on."""

    kind: ClassVar[EventKind] = "fence"
    node: str
    generation: int


@dataclass(frozen=True)
class SetVoters:
    """Have a node write down other voters."""

    kind: ClassVar[EventKind] = "grant"
    node: str
    voters: Voters


@dataclass(frozen=True)
class Stop:
    """Stop the agent on a node: the job has ended elsewhere."""

    kind: ClassVar[EventKind] = "stop"
    node: str


@dataclass(frozen=True)
class Drain:
    """End the agent on a node while the job goes on without it."""

    kind: ClassVar[EventKind] = "drain"
    node: str


@dataclass(frozen=True)
class Exclude:
    """Have a node drained, in this run and those to come: something of it is broken."""

    node: str
    why: str


@dataclass(frozen=True)
class Notice:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class Finish:
    """The job is over."""

    outcome: Outcome
    text: str = ""
    cause: Cause | None = field(default=None, repr=False)
    may_go_on: tuple[str, ...] = field(default=(), repr=False)
    """Nodes that cannot be reached, and that may be training together all the same."""


NodeAction = Start | Join | Fence | SetVoters | Stop | Drain | Exclude
Action = NodeAction | Notice | Finish
