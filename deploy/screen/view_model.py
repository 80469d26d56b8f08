"""Collects the statuses and events of a run, as far as the live view (deploy/screen/screen.py) shows them."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodekit.deploy.agent.telemetry import guess
from nodekit.deploy.agent.telemetry.notes import parse_progress
from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.output.terminal import harmless
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.loglines import is_shown
from nodekit.deploy.screen.screen import Model, Node
from nodekit.deploy.story.event_text import Narrator

RATE_S = 20.0  # the rate is averaged over this time
LOG_LINES = 2000  # kept per node
EVENTS = 500
AGAIN_S = 5.0  # the same sentence within this time is a repetition
CURVE_POINTS = 1000
_OUT_OF_SIGHT = ("unreachable", "gone", "spare", "drained", "queued")
_USAGE = ("cpu", "memory", "memory_total", "interface", "received", "sent", "gpus")


@dataclass
class _Row:
    """One node's last known state."""

    line: str = "connecting"
    """The node's line in `kit status`: the state, two spaces, the rest."""
    status: NodeStatus = field(default_factory=lambda: NodeStatus())
    attempts: set[str] = field(default_factory=set)
    """The attempts that its ranks were started for, since the run was started."""
    steps: deque[tuple[float, int]] = field(default_factory=deque)
    """(when, step) of the current attempt, over the last seconds."""
    attempt: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))


class ViewModel:
    """The data of one run's live view; complete if the run's events are replayed from the beginning."""

    def __init__(
        self, run_id: str, nodes: Sequence[str], clock_offsets: Mapping[str, float] | None = None
    ) -> None:
        """Begin with nothing known.

        Args:
            run_id: the run's.
            nodes: names of all nodes, in the inventory's order.
            clock_offsets: node → its clock minus ours.
        """
        self._run_id = run_id
        self._offsets = clock_offsets or {}
        self._rows = {name: _Row() for name in nodes}
        self.queued = ""
        """What the run waits for while it has no nodes."""
        self._narrator = Narrator()
        self._last_kind = ""
        """The kind of event that the last sentence describes; "" if it describes none."""
        self.sentences: deque[tuple[float, str]] = deque(maxlen=EVENTS)
        """(when, sentence), oldest first."""
        self._losses: list[tuple[int, float]] = []
        self._losses_of = (0, 0)
        self._best: dict[str, float] = {}
        self._snapshot: tuple[int, float] | None = None
        self._attempts: set[str] = set()
        self._started: float | None = None
        self._ended: tuple[float, str] | None = None
        self._has_trained = False
        self._is_live = False
        """Whether rank 0's progress is known from its node's status, not only from events."""
        self._step: int | None = None
        self._total: int | None = None
        self._said = ""

    @property
    def nodes(self) -> list[str]:
        """The nodes' names."""
        return list(self._rows)

    def lines(self, found: Mapping[str, str]) -> None:
        """Take each node's status line (`status_line` in deploy/story/status.py)."""
        for name, line in found.items():
            self._rows.setdefault(name, _Row()).line = line

    def see(self, statuses: Mapping[str, NodeStatus]) -> None:
        """Take each reachable node's status."""
        for name, status in statuses.items():
            row = self._rows.setdefault(name, _Row())
            if row.status is status:
                continue
            row.status = status
            row.usage = status.get("usage") or {}
            self._progress(name, row, status)

    def _progress(self, name: str, row: _Row, status: NodeStatus) -> None:
        attempt = str(status.get("attempt") or "")
        if attempt != row.attempt:
            row.attempt = attempt
            row.steps.clear()
        told = parse_progress(str(status.get("progress") or ""))
        if told["step"] is None:
            if status.get("rank") == 0 and (guessed := status.get("guess")) and not self._is_live:
                self._said = guess.words(guessed)
            return
        when = float(status.get("progress_time") or 0.0) - self._offsets.get(name, 0.0)
        row.step = told["step"]
        if not row.steps or when > row.steps[-1][0]:
            row.steps.append((when, told["step"]))
            while len(row.steps) > 2 and when - row.steps[1][0] > RATE_S:
                row.steps.popleft()
        # Rank 0 speaks for the run. If a node waits to rejoin or has left, the rank in its status is an old attempt's.
        if status.get("rank") == 0 and status.get("alive") and status.get("state") in ("running", "waiting"):
            self._is_live = True
            self._step, self._total = told["step"], told["total_steps"] or self._total
            self._said = str(status["progress"]).partition(" ")[2]
            self._loss(attempt, told["step"], told["loss"])

    def event(self, event: Event) -> None:
        """Take one event, in the order of arrival."""
        for sentence in self._narrator.tell(event):
            if event.kind == "evaluation" == self._last_kind:
                self.sentences.pop()  # of several evaluations in a row, keep the last
            self.say(sentence, event.time)
            self._last_kind = event.kind
        row = self._rows.setdefault(event.about, _Row()) if event.about else None
        match event.kind:
            case "run-started":
                self._started, self._ended = event.time, None
                self._attempts.clear()
                for each in self._rows.values():
                    each.attempts.clear()
            case "run-ended":
                self._ended = (event.time, str(event.get("state")))
            case "workers-started" if row is not None:
                row.attempts.add(str(event.get("attempt")))
                self._attempts.add(str(event.get("attempt")))
            case "first-step":
                self._has_trained = True
            case "sample" if row is not None:
                if not row.status:  # the run is over, or its node is unreachable
                    row.step = event.get("step") if event.get("step") is not None else row.step
                    row.usage = {name: event.get(name) for name in _USAGE}
                self._total = event.get("total_steps") or self._total
                if event.get("step") is not None:
                    self._step = self._step if self._is_live else event.get("step")
                    self._loss(str(event.get("attempt")), event.get("step"), event.get("loss"))
            case "attempt-ended" if row is not None and not row.status:
                row.step = event.get("step") if event.get("step") is not None else row.step
                self._step = row.step if row.step is not None and not self._is_live else self._step
            case "snapshot":
                step = int(event.get("step") or 0)
                if self._snapshot is None or step != self._snapshot[0]:
                    self._snapshot = (step, event.time)
            case "evaluation":
                self._evaluated(event.get("metrics") or {})
            case "node-state" | "agent-ended" if row is not None and not row.status:
                row.line = str(event.get("state") or row.line)

    def _evaluated(self, metrics: Mapping[str, Any]) -> None:
        name = "accuracy" if "accuracy" in metrics else "loss"
        value = metrics.get(name)
        if isinstance(value, int | float):
            better = max if name == "accuracy" else min
            self._best = {name: better(value, self._best.get(name, value))}

    def _loss(self, attempt: str, step: int, loss: float | None) -> None:
        """Add a point to the loss curve; points that a newer attempt repeats are dropped first."""
        if loss is None:
            return
        generation, _, number = attempt.partition(".")
        which = (int(generation), int(number)) if generation.isdecimal() and number.isdecimal() else (0, 0)
        if which < self._losses_of:
            return
        if which > self._losses_of:
            self._losses_of = which
            del self._losses[bisect.bisect_left(self._losses, step, key=lambda point: point[0]) :]
        if self._losses and step <= self._losses[-1][0]:
            return  # the same step, from another node
        self._losses.append((step, loss))
        if len(self._losses) > CURVE_POINTS:
            del self._losses[1:-1:2]

    def say(self, text: str, when: float) -> None:
        """Add a sentence, or one per line of `text`."""
        self._last_kind = ""
        for line in text.splitlines():
            if line.strip() and not self._is_told(line.rstrip(), when):
                if len(self.sentences) == EVENTS:
                    self.sentences.popleft()
                at = len(self.sentences)
                # Events of a node that was unreachable come late.
                while at and self.sentences[at - 1][0] > when:
                    at -= 1
                self.sentences.insert(at, (when, line.rstrip()))

    def _is_told(self, line: str, when: float) -> bool:
        """Whether the same sentence was added a moment ago: a view may notice itself what an event says too."""
        return any(each == line and abs(when - at) < AGAIN_S for at, each in self.sentences)

    def log(self, node: str, rank: str, lines: Sequence[str]) -> None:
        """Add lines that a rank has written."""
        row = self._rows.setdefault(node, _Row())
        several = len(row.status.get("workers") or ()) > 1
        for line in map(harmless, filter(is_shown, lines)):
            row.log.append(f"{rank} │ {line}" if several else line)

    def log_of(self, node: str) -> list[str]:
        """Return the last lines of a node's ranks."""
        return list(self._rows[node].log)

    def model(self, now: float) -> Model:
        """Return the model to draw, at the time `now`."""
        ended, state = self._ended or (None, "")
        nodes = [self._node(name, row, ended or now) for name, row in self._rows.items()]
        running = [node.rate for node in nodes if node.state == "running" and node.rate]
        generations = [node.generation for node in nodes if node.generation is not None]
        return Model(
            run_id=self._run_id,
            state=state or self._state(nodes),
            now=ended or now,
            nodes=nodes,
            started=self._started,
            generation=max(generations, default=None),
            restarts=max(len(self._attempts) - 1, 0),
            step=self._step,
            total_steps=self._total,
            rate=statistics.median(running) if running else None,
            said=self._said,
            losses=self._losses,
            best=self._best,
            snapshot=self._snapshot,
            events=self.sentences,
        )

    def _node(self, name: str, row: _Row, now: float) -> Node:
        state, _, rest = row.line.partition("  ")
        if state.startswith("starting "):
            state, rest = "starting", state
        if self._ended and state == "connecting":  # no event has reported its state
            state = "not started"
        status, in_sight = row.status, state not in _OUT_OF_SIGHT
        rate = None
        if in_sight and len(row.steps) > 1:
            (then, first), (last, step) = row.steps[0], row.steps[-1]
            rate = (step - first) / (last - then) if step > first else None
        told_at = status.get("progress_time")
        trains = state in ("running", "waiting")
        return Node(
            name=name,
            state=state,
            why=str(status.get("blocked") or status.get("message") or "") if in_sight else rest,
            generation=status.get("generation"),
            restarts=max(len(row.attempts) - 1, 0),
            usage=row.usage if in_sight else {},
            step=row.step,
            rate=rate if trains else None,
            quiet_s=max(now + self._offsets.get(name, 0.0) - float(told_at), 0.0)
            if told_at and in_sight
            else None,
        )

    def _state(self, nodes: Sequence[Node]) -> str:
        """Return the run's state, in a word or two."""
        states = [node.state for node in nodes]
        if "running" in states:
            return "running"
        if "waiting" in states:
            return "finishing"
        if "queued" in states or all(state == "connecting" for state in states):
            return self.queued or "connecting"
        if any(node.why for node in nodes if node.state == "rendezvous"):
            return "waiting for nodes"
        if all(state in ("unreachable", "gone") for state in states):
            return "unreachable"
        return "re-forming" if self._has_trained else "starting"
