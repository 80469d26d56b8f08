"""A whole run in simulated time: nodes, disks, network and supervisor runner around `judge.decide`, and their faults.

Deterministic: a seed and a number of nodes are the run. What must never be is checked at every event (`Broken`), and
once the faults have stopped the job must train again and end. To see a run again::

    python tests/simulation.py --seed 7 --nodes 5

The model is in seconds: agents and stores take a step every `TICK_S`, messages arrive when they arrive.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nodekit.deploy.agent.quorum import Voters, newest
from nodekit.deploy.supervise.policy import begin, decide
from nodekit.deploy.supervise.state import (
    Action,
    Drain,
    Exclude,
    Fence,
    Finish,
    Join,
    Notice,
    Observation,
    Rules,
    SetVoters,
    Start,
    State,
    Stop,
)

TICK_S = 0.2
SILENCE_S = 3.0  # after which a connection that was cut is given up
LOOK_S = 0.5
FORM_S = 1.0
STEPS_PER_S = 10
STEADY_S = 10.0  # a group that has gone on for so long must be known to a supervisor that can see it
AGAIN_S = 150.0  # once the faults have stopped, when the job must train at the latest (and pauses)
CALM_S = 90.0  # for how long it must then train on undisturbed
HEARD_S = 15.0  # until the supervisor has looked at all nodes again, some answers being lost


class Broken(AssertionError):
    """Something that must never be has happened."""


@dataclass(frozen=True)
class Call:
    """What a `Start` or `Join` says."""

    generation: int
    host: str
    port: int
    voters: Voters
    called_off: int
    is_new: bool = False


class Store:
    """The rendezvous of one generation; it lives in its host's agent."""

    def __init__(self, host: Node, generation: int) -> None:
        self.host = host
        self.agent = host.agent
        self.generation = generation
        self.connected: dict[str, Node] = {}
        self.ghosts: dict[str, float] = {}
        """Whose machine is gone without a word → since when."""
        self.forming_since: float | None = None
        self.round: Round | None = None
        self.done = ""

    @property
    def is_alive(self) -> bool:
        return self.host.agent == self.agent and self.host.store is self


class Round:
    """Those who have met in a store."""

    def __init__(self, store: Store, nodes: list[Node]) -> None:
        self.store = store
        self.nodes = nodes
        self.members = tuple(node.name for node in nodes)
        self.set = frozenset(self.members)
        self.trains = False
        self.step = 0.0
        self.committed = 0
        self.progress_since = 0.0
        self.progress_at = -1.0
        self.ends: dict[str, float] = {}
        """Node → when the last of its ranks ends well, once the first one has."""


class Node:
    """A machine, its disk, and its agent while `agent` is not empty."""

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index
        self.up = True
        self.is_lost_for_good = False
        self.processes = 0
        self.seen: tuple[Any, ...] = ()
        self.last_seen = Observation()
        self.wipe()
        self.end()

    def wipe(self) -> None:
        """A new disk."""
        self.has_folder = False
        self.fence = -1
        self.generation = -1
        self.hosted = -1
        self.voters: Voters | None = None
        self.snapshot = (-1, 0)  # (generation, step)
        self.written_state = ""
        self.ran = ""  # the last agent
        self.broken = ""

    def end(self) -> None:
        """No agent any more."""
        self.agent = ""
        self.state = ""
        self.store: Store | None = None
        self.host = ""
        self.host_port = 0
        self.port = 0
        self.ready_at = self.retry_at = 0.0
        self.retries = 0
        self.lost_since: float | None = None
        self.fenced_at: float | None = None
        self.ends_at: float | None = None
        self.ends_as = ""
        self.blocked = False
        self.problem = ""

    def look(self) -> Observation:
        """What the supervisor would be told now."""
        store = self.store
        members = store.round.members if store and store.round and self.name in store.round.set else ()
        fields = (self.agent or self.ran, self.generation, self.state or self.written_state, self.blocked)
        rest = (self.fence, self.voters, self.port, self.snapshot, bool(self.agent), self.broken)
        now = (*fields, members, *rest)
        if now != self.seen or self.problem != self.last_seen.problem:
            self.seen = now
            self.last_seen = Observation(
                alive=bool(self.agent),
                agent=self.agent or self.ran,
                generation=self.generation,
                state=self.state or self.written_state,
                blocked=self.blocked,
                members=members,
                fence=self.fence,
                voters=self.voters,
                port=self.port,
                held=self.snapshot,
                problem=self.problem,
                broken=self.broken,
            )
        return self.last_seen


class Supervisor:
    """The runner: looks, decides, writes down, acts."""

    def __init__(self, state: State, names: Iterable[str], now: float, clock_off: float) -> None:
        self.state = state
        self.seen = {name: Observation(reachable=False) for name in names}
        self.heard = dict.fromkeys(self.seen, -1e9)
        self.told = dict.fromkeys(self.seen, -1e9)  # when that was true
        self.began = now
        self.clock_off = clock_off


class Simulation:
    """One run; `run` it to the end."""

    def __init__(
        self,
        seed: int,
        num_nodes: int,
        *,
        faults_s: float | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.random = rng = random.Random(seed)
        self.seed, self.num_nodes = seed, num_nodes
        self.print = say
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = itertools.count()
        self.nodes = {f"n{i}": Node(f"n{i}", i) for i in range(num_nodes)}
        self.names = tuple(self.nodes)
        max_nodes = rng.choice([num_nodes, num_nodes, max(2, num_nodes - 1), max(2, num_nodes * 2 // 3)])
        self.rules = Rules(
            nodes=self.names, min_nodes=rng.randint(1, max(1, max_nodes // 2 + 1)), max_nodes=max_nodes
        )
        if rng.random() < 0.1:
            self.rules = dataclasses.replace(self.rules, min_nodes=max_nodes)
        self.cuts: Counter[tuple[str, str]] = Counter()
        self.cut_off: Counter[str] = Counter()
        """Nodes that the control machine cannot reach."""
        self.no_starts: dict[str, float] = {}
        self.loss, self.repeat, self.slow = rng.choice([(0.0, 0.0, 0.0), (0.05, 0.05, 0.05), (0.2, 0.2, 0.2)])
        self.snapshot_steps = rng.choice([20, 20, 150])
        self.faults_s = rng.uniform(40, 160) if faults_s is None else faults_s
        self.death_rate = self.wipe_rate = self.treachery = 0.0
        self.total_steps = 1 << 60
        self.stores: list[Store] = []
        self.trained = -1
        """The newest generation that has trained."""
        self.trained_in: dict[int, Store] = {}
        self.newest_snapshot = (-1, 0)
        self.group: Round | None = None
        self.decisions = self.takeovers = self.regressions = 0
        self.finish: Finish | None = None
        self.ended_states: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.all_starts: dict[str, list[float]] = {name: [] for name in self.names}
        self.recent: deque[tuple[float, bool]] = deque()
        self.recent_says = 0
        self.excuses: Counter[str] = Counter()
        """How often the supervisor lost sight of a node: what it asked for may be asked for again."""
        self.flappers: set[str] = set()
        state = begin(
            self.rules, generation=0, host=self.names[0], port=0, nodes=self.names[: self.rules.max_nodes]
        )
        self.saved = json.dumps(state.to_dict())
        self.supervisor: Supervisor | None = Supervisor(state, self.names, 0.0, rng.uniform(-1e6, 1e6))
        self.log(f"{self.rules}; loss {self.loss}, faults for {self.faults_s:.0f} s")
        for name in self.names:
            self.at(rng.random() * LOOK_S, self.look, name)
        self.at(0.0, self.tick)
        self.at(0.1, self.decide)

    def log(self, text: str) -> None:
        if self.print:
            self.print(f"{self.now:8.2f}  {text}")

    def broken(self, text: str) -> None:
        self.log(f"BROKEN: {text}")
        raise Broken(f"at {self.now:.2f} s: {text}\nreplay: python tests/simulation.py {self.replay}")

    @property
    def replay(self) -> str:
        return f"--seed {self.seed} --nodes {self.num_nodes}"

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.queue, (when, next(self.number), what, args))

    def until(self, end: float, *, enough: Callable[[], bool] = lambda: False) -> None:
        while self.queue and self.queue[0][0] <= end and not enough():
            self.now, _, what, args = heapq.heappop(self.queue)
            what(*args)
        self.now = max(self.now, end) if not enough() else self.now

    # --- agents and stores ---

    def are_connected(self, a: Node, b: Node) -> bool:
        return a.up and b.up and not self.cuts[a.name, b.name] and not self.cuts[b.name, a.name]

    def tick(self) -> None:
        self.at(self.now + TICK_S, self.tick)
        for node in self.nodes.values():
            if node.agent:
                self.step_agent(node)
        for store in self.stores:
            if store.is_alive:
                self.step_store(store)
        self.stores = [store for store in self.stores if store.is_alive]

    def step_agent(self, node: Node) -> None:
        if node.ends_at is not None and self.now >= node.ends_at:
            self.end_agent(node, node.ends_as)
            return
        if node.fenced_at is not None and self.now >= node.fenced_at:
            self.leave(node, "fenced")
            node.fenced_at = None
        store = node.store
        if store is None:
            tries_at = {"starting": node.ready_at, "orphaned": node.retry_at}
            if self.now >= tries_at.get(node.state, self.now + 1):
                self.connect(node)
        elif store.host is not node:
            if store.is_alive and not self.cuts:
                node.lost_since = None
            elif not store.is_alive and self.are_connected(node, store.host):
                self.orphan(node)
            elif self.are_connected(node, store.host):
                node.lost_since = None
            elif node.lost_since is None:
                node.lost_since = self.now
            elif self.now - node.lost_since >= SILENCE_S:
                self.orphan(node)

    def connect(self, node: Node) -> None:
        if node.host == node.name:
            node.store = store = Store(node, node.generation)
            node.hosted = node.generation
            self.stores.append(store)
        else:
            host = self.nodes[node.host]
            found = host.store
            if (
                found is None
                or not self.are_connected(node, host)
                or host.port != node.host_port
                or (found.host, found.generation) != (host, node.generation)
            ):
                self.orphan(node)
                return
            node.store = store = found
        store.connected[node.name] = node
        store.ghosts.pop(node.name, None)
        if store.round and node.name in store.round.set:
            self.end_round(store)  # it was lost and is back before the others knew
        node.state, node.lost_since, node.retries = "rendezvous", None, 0

    def orphan(self, node: Node) -> None:
        self.leave(node, "orphaned")
        node.retries += 1
        node.retry_at = self.now + min(2 * 1.5**node.retries, 30) * self.random.uniform(0.7, 1.0)

    def leave(self, node: Node, state: str) -> None:
        if node.store:
            node.store.connected.pop(node.name, None)
        node.store = None
        node.state, node.blocked, node.lost_since = state, False, None

    def end_agent(self, node: Node, state: str) -> None:
        """It ends by itself (`state`) or is killed ("")."""
        if state:
            node.written_state = state
            self.ended_states |= {state} - {"ended"}
        else:
            node.written_state = node.state
        self.log(f"{node.name}: agent ends: {state or 'killed'}")
        self.leave(node, "")
        node.end()

    def step_store(self, store: Store) -> None:
        for name in [n for n, since in store.ghosts.items() if self.now - since >= SILENCE_S]:
            del store.ghosts[name]
        if store.done:
            for node in list(store.connected.values()):
                if node.ends_at is None:
                    node.ends_at, node.ends_as = self.now + self.random.uniform(0.1, 1.5), store.done
            return
        there = store.connected
        current = store.round
        if current is not None:
            lost = any(node.name not in there and node.name not in store.ghosts for node in current.nodes)
            room = len(current.nodes) < self.rules.max_nodes and len(there) > len(current.nodes)
            room = room and not current.ends  # who comes in at the end is too late
            if lost or room:
                self.end_round(store)
        if store.round is None:
            if len(there) < self.rules.min_nodes:
                store.forming_since = None
            elif store.forming_since is None:
                store.forming_since = self.now
            elif self.now - store.forming_since >= FORM_S:
                self.form(store)
        if store.round is not None:
            self.step_round(store.round)

    def end_round(self, store: Store) -> None:
        store.round, store.forming_since = None, None
        for node in store.connected.values():
            node.state, node.blocked = "rendezvous", False

    def form(self, store: Store) -> None:
        others = sorted(
            (n for n in store.connected.values() if n is not store.host), key=lambda node: node.index
        )
        store.round = Round(store, [store.host, *others][: self.rules.max_nodes])

    def step_round(self, current: Round) -> None:
        if not current.trains:
            voters = newest(node.voters for node in current.nodes if node.voters)
            blocked = not voters.may_train(current.members)
            if blocked and not current.nodes[0].blocked:
                self.log(f"{_few(current.members)} are no majority of {voters}")
            for node in current.nodes:
                node.blocked = blocked
            if not blocked and all(node.fence <= current.store.generation for node in current.nodes):
                self.resume(current)
            return
        for node in current.nodes:
            if node.store is not current.store or node.state not in ("running", "waiting"):
                return
        if self.cuts and any(n and a in current.set and b in current.set for (a, b), n in self.cuts.items()):
            return
        self.progress(current)

    def resume(self, current: Round) -> None:
        held = max(node.snapshot for node in current.nodes)
        for node in current.nodes:
            node.state, node.blocked = "running", False
            if node.snapshot != held:  # it is sent, and that takes a while
                self.at(self.now + self.random.uniform(0, 12), self.adopt, current, node, held)
        current.trains = True
        current.step = current.committed = held[1]
        generation = current.store.generation
        self.log(f"generation {generation}: {_few(current.members)} train from {held}")
        if held < self.newest_snapshot:
            self.check_regression(current, held)

    def adopt(self, current: Round, node: Node, held: tuple[int, int]) -> None:
        if current.store.round is current and node.store is current.store:
            node.snapshot = max(node.snapshot, held)

    def check_regression(self, current: Round, held: tuple[int, int]) -> None:
        """What was committed may be left behind only where nobody in sight has it."""
        self.regressions += 1
        holders = [node.name for node in self.nodes.values() if node.snapshot == self.newest_snapshot]
        text = f"{_few(current.members)} go on from {held}: {self.newest_snapshot} is on {_few(holders)}"
        if holders:
            self.broken(text)
        self.log(text)

    def progress(self, current: Round) -> None:
        generation = current.store.generation
        if generation < self.trained:
            self.broken(f"generation {generation} trains after {self.trained}: {_few(current.members)}")
        if self.trained_in.setdefault(generation, current.store) is not current.store:
            self.broken(f"generation {generation} trains in two stores")
        if (
            self.group is not current
            and self.group is not None
            and self.now - self.group.progress_at < TICK_S / 2
        ):
            self.broken(f"{self.group.members} and {current.members} train at once")
        self.trained, self.group = generation, current
        if self.now - current.progress_at > 2 * TICK_S:
            current.progress_since = self.now
        current.progress_at = self.now
        current.step += STEPS_PER_S * TICK_S
        if current.step - current.committed >= self.snapshot_steps:
            current.committed = int(current.step)
            age = (generation, current.committed)
            if age <= self.newest_snapshot:
                self.broken(f"{age} is committed after {self.newest_snapshot}")
            able = [node for node in current.nodes if node.fence <= generation]
            for node in able:
                node.snapshot = age
            if len(able) == len(current.nodes):  # less than all is a save that was cut short
                self.newest_snapshot = age
        if current.step >= self.total_steps and not current.store.done:
            current.ends = current.ends or {
                name: self.now + self.random.uniform(0, 10) for name in current.members
            }
            for node in current.nodes:
                if self.now >= current.ends[node.name]:
                    node.state = "waiting"
            if all(node.state == "waiting" for node in current.nodes):
                self.log("trained to the end")
                current.store.done = "succeeded"

    # --- what the supervisor does to nodes ---

    def send(self, name: str, what: Callable[..., None], *args: Any, takes_s: float = 0.0) -> None:
        for _ in range(2 if self.random.random() < self.repeat else 1):
            is_hit = what in (self.grant, self.fence) and self.random.random() < self.treachery / 2
            if self.random.random() >= self.loss and not (is_hit and self.now < self.faults_s):
                self.at(self.now + takes_s + self.delay(), self.arrive, self.now + 20, name, what, args)

    def delay(self) -> float:
        rng = self.random
        return rng.uniform(1, 10) if rng.random() < self.slow else rng.uniform(0.01, 0.3)

    def arrive(self, until: float, name: str, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.nodes[name].up:
            return
        if self.cut_off[name]:  # it waits in the network, for a while
            if self.now < until:
                self.at(self.now + 1, self.arrive, until, name, what, args)
            return
        what(self.nodes[name], *args)

    def start(self, node: Node, call: Call) -> None:
        if node.agent:
            self.join(node, call)
        elif self.no_starts.get(node.name, 0) > self.now:
            node.problem = f"disk full {self.now:.0f}"
        elif not node.has_folder and not call.is_new:
            node.problem = "there is no run folder"
        elif self.accepts(node, call):
            node.processes += 1
            node.agent = node.ran = f"{node.name}.{node.processes}"
            node.port = 1000 + self.random.randrange(9000)
            node.broken = ""
            self.take_up(node, call)
            if node.name in self.flappers:
                node.ends_at, node.ends_as = self.now + self.random.uniform(1, 8), ""

    def join(self, node: Node, call: Call) -> None:
        if node.agent and self.accepts(node, call):
            if call.generation == node.generation and node.state not in ("fenced", "orphaned"):
                self.grant(node, call.voters)
                return
            self.take_up(node, call)

    def accepts(self, node: Node, call: Call) -> bool:
        if call.generation < node.generation or (
            call.generation < node.fence and node.fence > call.called_off
        ):
            return False
        return not (call.host == node.name and node.hosted == call.generation and not node.store)

    def take_up(self, node: Node, call: Call) -> None:
        if node.store and node.store.host is node and node.store.generation == call.generation:
            node.state = "rendezvous"
            return
        self.leave(node, "starting")
        known = node.voters
        is_newer = known is None or known.generation != call.generation or call.voters > known
        node.voters = call.voters if is_newer else known
        node.has_folder, node.fence, node.generation = True, call.generation, call.generation
        node.fenced_at, node.problem, node.written_state = None, "", ""
        node.host, node.host_port, node.retries = call.host, call.port, 0
        node.ready_at = self.now + self.random.uniform(0.2, 3)

    def fence(self, node: Node, generation: int) -> None:
        node.has_folder = True
        node.fence = max(node.fence, generation)
        if node.agent and node.generation < generation and node.state != "fenced":
            is_slow = self.random.random() < 0.1  # to die
            node.fenced_at = self.now + self.random.uniform(0, 8 if is_slow else 0.4)

    def grant(self, node: Node, voters: Voters) -> None:
        own = node.voters
        if own and node.has_folder and own.generation == voters.generation and voters > own:
            node.voters = voters

    def drain(self, node: Node) -> None:
        if node.agent and node.ends_at is None:
            node.ends_at, node.ends_as = self.now + self.random.uniform(0.5, 3), "ended"

    def stop(self, node: Node) -> None:
        if node.agent and node.ends_at is None:
            node.ends_at, node.ends_as = self.now + 0.5, "stopped"

    # --- the runner ---

    def look(self, name: str) -> None:
        self.at(self.now + LOOK_S, self.look, name)
        if self.supervisor and self.nodes[name].up and not self.cut_off[name]:
            seen = self.nodes[name].look()
            self.at(self.now + self.delay(), self.hear, self.supervisor, name, seen, self.now)

    def hear(self, supervisor: Supervisor, name: str, seen: Observation, told: float) -> None:
        if told < supervisor.told[name]:
            return  # it was overtaken
        supervisor.seen[name] = seen
        supervisor.heard[name] = self.now
        supervisor.told[name] = told

    def decide(self) -> None:
        supervisor = self.supervisor
        if supervisor is None:
            return
        self.at(self.now + self.random.uniform(0.15, 0.25), self.decide)
        for name, seen in supervisor.seen.items():
            if seen.reachable and self.now - supervisor.heard[name] > SILENCE_S:
                self.excuses[name] += 1
                supervisor.seen[name] = dataclasses.replace(seen, reachable=False)
        if self.now - supervisor.began < SILENCE_S and not all(s.reachable for s in supervisor.seen.values()):
            return
        before = supervisor.state
        after, actions = decide(before, supervisor.seen, self.now + supervisor.clock_off, self.rules)
        self.decisions += 1
        supervisor.state = after
        dies = self.will_die()
        if dies and self.random.random() < 0.3:
            self.kill_supervisor()
            return  # before it has written anything down
        fields = after.to_dict()
        if fields != before.to_dict():
            self.saved = json.dumps(fields)
            is_turn = (after.granted, after.next_generation) != (before.granted, before.next_generation)
            if is_turn and self.now < self.faults_s and self.random.random() < self.treachery:
                self.strike()
        self.check_state(after)
        for number, action in enumerate(actions):
            if dies and self.random.random() < 0.3:
                break  # between two actions
            self.check_action(supervisor, action)
            self.act(after, action)
            if number > 20 * len(self.names):
                self.broken(f"{len(actions)} actions at once")
        if dies:
            self.kill_supervisor()

    def will_die(self) -> bool:
        return self.now < self.faults_s and self.random.random() < self.death_rate

    def kill_supervisor(self, for_s: float | None = None) -> None:
        if self.supervisor is None:
            return
        self.log("the supervisor dies")
        self.supervisor = None
        self.at(self.now + (self.random.uniform(0.5, 15) if for_s is None else for_s), self.take_over)

    def take_over(self) -> None:
        if self.supervisor is None and self.finish is None:
            state = State.from_dict(json.loads(self.saved), self.rules)
            self.log(
                f"another supervisor takes over: generation {state.generation}, next {state.next_generation}"
            )
            self.takeovers += 1
            self.supervisor = Supervisor(state, self.names, self.now, self.random.uniform(-1e6, 1e6))
            self.at(self.now, self.decide)

    def act(self, state: State, action: Action) -> None:
        self.log(f"    {action}")
        self.counts[type(action).__name__] += 1
        if isinstance(action, Start | Join):
            call = Call(state.generation, state.host, state.port, state.newest, state.called_off)
            if isinstance(action, Start):
                call = dataclasses.replace(call, is_new=action.is_new)
                self.send(action.node, self.start, call, takes_s=self.random.uniform(0.3, 5))
            else:
                self.send(action.node, self.join, call)
        elif isinstance(action, Fence):
            self.send(action.node, self.fence, action.generation)
        elif isinstance(action, SetVoters):
            self.send(action.node, self.grant, action.voters)
        elif isinstance(action, Stop):
            self.send(action.node, self.stop)
        elif isinstance(action, Drain):
            self.send(action.node, self.drain)
        elif isinstance(action, Exclude):
            self.rules = dataclasses.replace(self.rules, drained=self.rules.drained | {action.node})
            # Soon enough that it is in before the end of the peace.
            self.at(self.now + min(self.breaking.expovariate(1 / 20), 40), self.take_back, action.node)
        elif isinstance(action, Finish):
            self.finish = action
            self.supervisor = None

    # --- what must hold ---

    def check_state(self, state: State) -> None:
        for voters in (state.voters, state.newest):
            if voters.generation != state.generation or len(voters.nodes) > self.rules.max_nodes:
                self.broken(f"{voters} in generation {state.generation}")

    def check_action(self, supervisor: Supervisor, action: Action) -> None:
        state = supervisor.state
        if isinstance(action, Finish):
            is_right = action.outcome in self.ended_states or "waited" in action.text
            if not is_right or (action.outcome == "stopped" and "failed" in self.ended_states):
                self.broken(f"{action}, but the agents ended as {sorted(self.ended_states)}")
        if not any(seen.reachable for seen in supervisor.seen.values()) and not isinstance(
            action, Notice | Finish
        ):
            self.broken(f"{action} with no node in sight")
        self.check_rates(action)
        if isinstance(action, Start | Join) and action.node in self.rules.drained:
            self.broken(f"{action}, which is drained")
        if isinstance(action, Drain) and action.node not in self.rules.drained:
            self.broken(f"{action}, which is not to be drained")
        if isinstance(action, Exclude):
            left = set(self.names) - self.rules.drained - {action.node}
            if len(left) < self.rules.min_nodes or action.node in self.rules.drained:
                self.broken(f"{action}, and {_few(left)} are left")
        group = self.group
        if group is None or self.now - group.progress_at > 2 * TICK_S or group.store.done:
            return
        if not any(node.agent for node in group.nodes):
            return  # it has ended since
        is_full = len(group.members) >= self.rules.max_nodes and self.now - group.progress_since > STEADY_S
        is_full = is_full and all(node.store is group.store for node in group.nodes)
        if (
            is_full
            and isinstance(action, Start)
            and action.node not in group.set
            and self.is_known(supervisor, group)
        ):
            self.broken(f"{action} while {_few(group.members)} train, which are all that may")
        if (
            isinstance(action, Join)
            and action.node in group.set
            and state.generation > group.store.generation
        ):
            self.broken(f"{action} into {state.generation} while {_few(group.members)} train")
        if isinstance(action, Fence | Stop) and self.is_known(supervisor, group) and not self.ended_states:
            self.broken(f"{action} while {_few(group.members)} train")

    def is_known(self, supervisor: Supervisor, group: Round) -> bool:
        """Whether the supervisor can know that a group trains: one is seen to, or it is long out of sight."""
        reachable = [name for name in group.members if supervisor.seen[name].reachable]
        if any(supervisor.told[name] > group.progress_since for name in reachable):
            return True
        return not reachable and self.now - group.progress_since > STEADY_S

    def check_rates(self, action: Action) -> None:
        """Budgets: starts per node, sayings and actions per minute."""
        self.recent.append((self.now, isinstance(action, Notice)))
        self.recent_says += isinstance(action, Notice)
        while self.recent[0][0] < self.now - 60:
            self.recent_says -= self.recent.popleft()[1]
        says = self.recent_says
        if says > 60 + 12 * self.takeovers + len(self.names) or len(self.recent) - says > (
            60 + 10 * self.takeovers
        ) * len(self.names):
            self.broken(f"{says} sayings and {len(self.recent) - says} actions in a minute")
        if isinstance(action, Start):
            starts = self.all_starts[action.node]
            starts.append(self.now)
            generation = self.supervisor.state.generation if self.supervisor else 0
            if (
                sum(when > self.now - 300 for when in starts)
                > 9 + 2 * self.takeovers + self.excuses[action.node] + generation
            ):
                self.broken(f"{len(starts)} starts on {action.node} in five minutes")

    # --- faults ---

    def plan_faults(self) -> None:
        rng = self.random
        every_s = rng.choice([3.0, 8.0, 20.0]) / max(1, self.num_nodes // 20)
        self.death_rate = rng.choice([0.0, 0.0, 0.003, 0.02])
        self.wipe_rate = rng.choice([0.0, 0.0, 0.15])
        self.treachery = rng.choice([0.0, 0.5, 1.0])
        kinds = [
            self.crash_agent, self.crash_machine, self.cut_pair, self.partition, self.split, self.hide, self.hide_all,
            self.power_out, self.jump, self.fail_starts, self.flap, self.isolate, self.want_out,
        ]  # fmt: skip
        kinds = rng.sample(kinds, rng.randint(2, len(kinds)))
        when = rng.uniform(0, 25)
        while when < self.faults_s:
            self.at(when, rng.choice(kinds))
            when += rng.expovariate(1 / every_s)
        # By numbers of its own, so that a seed's other faults are what they were before there were these.
        self.breaking = random.Random(self.seed + 1)
        for _ in range(self.breaking.choice([0, 0, 1, 5])):
            self.at(self.breaking.uniform(5, max(6.0, self.faults_s)), self.break_gpu)

    def strike(self) -> None:
        """Faults when they hurt most: while a generation or voters changes."""
        kinds = [self.partition, self.isolate, self.crash_machine, self.crash_agent, self.hide, self.hide_all]
        kinds += [self.kill_supervisor, self.split, self.split, self.heal, self.heal]
        for _ in range(self.random.randint(1, 3)):
            kind, when = self.random.choice(kinds), self.now + self.random.uniform(0, 2)
            if when < self.faults_s:  # after that all is to be well
                self.at(when, kind)

    def some(self) -> Node:
        return self.nodes[self.random.choice(self.names)]

    def crash_agent(self) -> None:
        if (node := self.some()).agent:
            self.end_agent(node, "")

    def crash_machine(self, node: Node | None = None, for_s: float | None = None) -> None:
        node = node or self.some()
        if not node.up:
            return
        self.log(f"{node.name}: the machine is gone")
        if node.store:
            node.store.ghosts[node.name] = self.now
        if node.agent:
            self.end_agent(node, "")
        node.up = False
        is_wiped = self.random.random() < self.wipe_rate
        self.at(
            self.now + (self.random.expovariate(1 / 15) if for_s is None else for_s),
            self.come_back,
            node,
            is_wiped,
        )

    def come_back(self, node: Node, is_wiped: bool) -> None:
        if not node.up and not node.is_lost_for_good:
            self.log(f"{node.name}: back" + (" with a new disk" if is_wiped else ""))
            node.up = True
            if is_wiped:
                # What was on its way to the machine that it was does not arrive.
                self.queue = [e for e in self.queue if not (e[2] == self.arrive and e[3][1] == node.name)]
                heapq.heapify(self.queue)
                node.wipe()
                self.counts["wiped"] += 1

    def cut(self, pairs: list[tuple[str, str]], for_s: float) -> None:
        """Let nothing go from the first of each pair to the second."""
        self.cuts.update(pairs)
        self.at(self.now + for_s, self.mend, pairs)

    def mend(self, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            self.cuts[pair] -= 1
            if self.cuts[pair] <= 0:  # below, if all was mended meanwhile
                del self.cuts[pair]

    def cut_pair(self) -> None:
        a, b, for_s = self.some().name, self.some().name, self.random.expovariate(1 / 10)
        self.log(f"cut: {a} to {b} for {for_s:.1f} s")
        self.cut([(a, b)], for_s)

    def partition(self, side: list[str] | None = None, for_s: float | None = None) -> None:
        rng = self.random
        for_s = rng.expovariate(1 / 20) if for_s is None else for_s
        side = side or rng.sample(self.names, rng.randint(1, min(30, max(1, len(self.names) // 2))))
        others = [name for name in self.names if name not in side]
        self.log(f"partition: {_few(sorted(side))} for {for_s:.1f} s")
        self.cut(list(itertools.product(side, others)), for_s)
        if rng.random() < 0.5:
            for name in side if rng.random() < 0.5 else others:
                self.hide_one(name, for_s)

    def split(self) -> None:
        """Part of a group is cut off with its host, from the control machine too."""
        if self.group and self.group.store.is_alive:
            others = [name for name in self.group.members if name != self.group.store.host.name]
            side = [
                self.group.store.host.name,
                *self.random.sample(others, self.random.randint(0, len(others))),
            ]
            for_s = self.random.uniform(5, 60)
            self.partition(side, for_s)
            for name in side:
                self.hide_one(name, for_s)

    def heal(self) -> None:
        """The network is whole again."""
        self.log("healed")
        self.cuts.clear()

    def isolate(self) -> None:
        """Cut the present host off its peers, and only it."""
        if self.stores:
            self.partition([self.stores[-1].host.name])

    def want_out(self) -> None:
        """The user drains a node, for a while."""
        name, for_s = self.some().name, self.random.expovariate(1 / 20)
        if len(set(self.names) - self.rules.drained - {name}) >= self.rules.min_nodes:
            self.log(f"{name}: drained for {for_s:.1f} s")
            self.rules = dataclasses.replace(self.rules, drained=self.rules.drained | {name})
            self.at(self.now + for_s, self.take_back, name)

    def break_gpu(self) -> None:
        """A node's agent leaves, because a GPU of it is broken."""
        node = self.nodes[self.breaking.choice(self.names)]
        if node.agent and self.now < self.faults_s:
            node.broken = f"GPU 3: Xid 79 at {self.now:.0f}"
            self.log(f"{node.name}: {node.broken}")
            self.end_agent(node, "ended")

    def take_back(self, name: str) -> None:
        self.rules = dataclasses.replace(self.rules, drained=self.rules.drained - {name})

    def hide_one(self, name: str, for_s: float) -> None:
        self.cut_off[name] += 1
        self.at(self.now + for_s, self.unhide, name)

    def unhide(self, name: str) -> None:
        self.cut_off[name] = max(0, self.cut_off[name] - 1)

    def hide(self) -> None:
        name, for_s = self.some().name, self.random.expovariate(1 / 10)
        self.log(f"{name}: out of sight for {for_s:.1f} s")
        self.hide_one(name, for_s)

    def hide_all(self, for_s: float | None = None) -> None:
        for_s = self.random.expovariate(1 / 10) if for_s is None else for_s
        self.log(f"all out of sight for {for_s:.1f} s")
        for name in self.names:
            self.hide_one(name, for_s)

    def power_out(self) -> None:
        for node in self.nodes.values():
            self.crash_machine(node, self.random.uniform(1, 40))

    def jump(self) -> None:
        if self.supervisor:
            self.supervisor.clock_off += self.random.choice([-1e5, -30.0, 30.0, 1e5])

    def fail_starts(self) -> None:
        self.no_starts[self.some().name] = self.now + self.random.uniform(5, 60)

    def flap(self) -> None:
        self.flappers.add(self.some().name)

    # --- the run ---

    def run(self) -> Simulation:
        """Faults, then peace: the job must train again, undisturbed, and end."""
        self.plan_faults()
        self.until(self.faults_s)
        dead = self.stop_faults()
        began = self.now
        pause_s = self.longest_pause()

        def goes_on() -> bool:
            group = self.group
            return group is not None and group.progress_at > began and self.now - group.progress_at < 1

        self.until(began + AGAIN_S + pause_s, enough=goes_on)
        if not goes_on() and self.finish is None:
            self.broken(
                f"the job does not train {AGAIN_S:.0f} s after the last fault (and {pause_s:.0f} s of pauses)"
            )
        if self.finish is not None:
            self.broken(f"it ended: {self.finish}")
        # Those who are back come in, and then nothing is done any more.
        # A failure that the supervisor was blind to, and hears of only now, makes for a pause of its own.
        self.until(self.now + HEARD_S)
        self.until(self.now + CALM_S + self.longest_pause())
        if not goes_on():
            self.broken("the job does not train on")
        self.check_settled(dead)
        assert self.group is not None
        self.total_steps = int(self.group.step) + 50
        if self.random.random() < 0.5:  # one is lost when others have ended well already: all start again
            group = self.group
            self.until(self.now + 90, enough=lambda: any(node.state == "waiting" for node in group.nodes))
            self.crash_agent()
        self.until(self.now + 90 + AGAIN_S + self.longest_pause(), enough=lambda: self.finish is not None)
        if self.finish is None or self.finish.outcome != "succeeded":
            self.broken(f"it trained to the end, but it is {self.finish}")
        return self

    def longest_pause(self) -> float:
        state = (
            self.supervisor.state if self.supervisor else State.from_dict(json.loads(self.saved), self.rules)
        )
        return max(0.0, *(each.paused_until - state.elapsed_s for each in state.known.values()))

    def stop_faults(self) -> set[str]:
        """Mend everything, but for a few nodes that are lost for good, where the rest can do without them."""
        self.log("the faults stop")
        self.cuts.clear()
        self.cut_off.clear()
        self.no_starts.clear()
        self.flappers.clear()
        self.rules = dataclasses.replace(self.rules, drained=frozenset())
        for node in self.nodes.values():
            node.broken = ""
        self.loss = self.repeat = self.slow = 0.0
        self.death_rate = 0.0
        if self.supervisor is None:
            self.take_over()
        assert self.supervisor is not None
        state = self.supervisor.state
        dead = (
            {name for name in self.names if self.random.random() < 0.3}
            if self.random.random() < 0.3
            else set()
        )
        rest = [name for name in self.names if name not in dead]
        # What the voters may become at any moment: those who train, or did when they were looked at last.
        rounds = [self.group.members] if self.group else []
        rounds += [each.members for each in self.supervisor.seen.values()]
        if len(rest) < self.rules.min_nodes or any(2 * len(set(each) & dead) > len(each) for each in rounds):
            dead = set()
        if self.counts["wiped"] or self.newest_snapshot not in [self.nodes[name].snapshot for name in rest]:
            dead = set()
        if not state.is_fenced_by(set(rest) - state.forgot) or state.next_generation is not None:
            dead = set()
        for node in self.nodes.values():
            if node.name in dead:
                self.crash_machine(node, 1e9)
                node.is_lost_for_good = True
            elif not node.up:
                self.come_back(node, is_wiped=False)
            if node.ends_at is not None and not node.ends_as:
                node.ends_at = None
        self.log(f"lost for good: {sorted(dead)}")
        return dead

    def check_settled(self, dead: set[str]) -> None:
        """After a while of peace all who may be in are in, in voters of just them."""
        assert self.group is not None
        wanted = min(self.rules.max_nodes, len(self.names) - len(dead))
        if len(self.group.members) != wanted:
            self.broken(f"{self.group.members} train: {wanted} nodes were wanted")
        assert self.supervisor is not None
        if set(self.supervisor.state.voters.nodes) != self.group.set:
            self.broken(f"{self.group.members} train, with {self.supervisor.state.voters}")


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:12]) + (f" … ({len(names)})" if len(names) > 12 else "")


def main() -> int:
    """Replay one run, with its timeline."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    options = parser.parse_args()
    simulation = Simulation(options.seed, options.nodes, say=print)
    try:
        simulation.run()
    except Broken:
        return 1
    print(f"{simulation.decisions} decisions; {dict(simulation.counts)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
