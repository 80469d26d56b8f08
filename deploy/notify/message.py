"""The messages about a run: its start, a failure, the recovery, and the end."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from nodekit.deploy.agent.ranks.failures import line_of
from nodekit.deploy.output.wording import count
from nodekit.deploy.records import events
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import Run

MAX_ERROR_CHARS = 300
NEWS_AFTER_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message to deliver."""

    kind: str
    """start, failure, recovery or end; test."""
    run: str
    time: float
    text: str
    """What happened, in one or two lines, of which the last is a command that shows more."""
    node: str | None = None
    step: int | None = None
    total_steps: int | None = None
    state: str = ""
    goodput: float | None = None
    """Share of the run's time that trained steps which count; only in the message of the end."""

    def body(self) -> bytes:
        """Return the JSON object to send; chat services read ``text`` or ``content``."""
        return json.dumps({**vars(self), "content": self.text}).encode()

    def env(self) -> dict[str, str]:
        """Return the same as environment variables, for commands that do not parse JSON."""
        values = {
            "NODEKIT_NOTIFY": self.kind,
            "NODEKIT_RUN_ID": self.run,
            "NODEKIT_TEXT": self.text,
            "NODEKIT_NODE": self.node or "",
            "NODEKIT_STEP": "" if self.step is None else str(self.step),
        }
        return {name: value.replace("\0", "") for name, value in values.items()}


@dataclass
class Story:
    """Makes messages from a run's events, pure: one message for a failure and everything that follows from it."""

    run: str
    look: str = "kit status"
    """The command that shows more, without the run's id."""
    _nodes: int = 0
    _failed_at: float | None = None
    """Time of the failure that the run has not recovered from yet."""
    _is_back: bool = False
    """Whether ranks have been started again since; a script that reports no steps gives no later sign of recovery."""
    _tells_steps: bool = False
    _attempt: str = ""
    """The current attempt; after a failure the one that failed, whose late steps are no recovery."""
    _last: dict[str, Any] = field(default_factory=dict)
    _away: set[str] = field(default_factory=set)
    """Nodes that the supervisor cannot reach; alone that is no failure, as they may still train."""
    _has_ended: bool = False

    def tell(self, event: Event) -> Message | None:
        """Return the message about an event, if it needs one."""
        self._note(event)
        if event.kind == "run-started":
            self._failed_at, self._has_ended = None, False
            nodes = event.get("nodes") or ()
            command = list(event.get("command") or ())
            shown = shlex.join(command[2:] if command[:2] == ["python", "-u"] else command)
            verb = "goes on" if event.get("goes_on") else "has started"
            return self._message("start", event, f"{verb} on {count(len(nodes), 'node')}: {shown}")
        if event.kind == "run-ended" and not self._has_ended:
            self._has_ended = True
            state, why = str(event.get("state")), str(event.get("verdict") or "")
            words = {"succeeded": "is done", "failed": "has failed", "stopped": "was stopped"}.get(
                state, state
            )
            return self._message("end", event, f"{words}: {_short(why)}" if why else words, state=state)
        if self._has_ended:
            return None
        if (problem := _problem(event, self._away)) and self._is_news(event):
            self._failed_at = event.time
            self._is_back = False
            self._attempt = str(event.get("attempt") or self._attempt)
            return self._message("failure", event, problem)
        if event.kind == "first-step" and self._failed_at is not None:
            if str(event.get("attempt")) == self._attempt:
                return None
            seconds = event.time - self._failed_at
            took = f" after {seconds:.1f} s" if seconds >= 0 else ""  # negative if the clocks have jumped
            step = event.get("step")  # None if the script's progress has no number
            text = f"trains again{took}" + (f", from step {step:,}" if isinstance(step, int) else "")
            if self._nodes:
                text += f", on {count(self._nodes, 'node')}"
            self._failed_at = None
            return self._message("recovery", event, text)
        return None

    def _is_news(self, event: Event) -> bool:
        """Whether a failure is a new one: without steps to tell, it must come long after ranks were started again."""
        if self._failed_at is None:
            return True
        return self._is_back and not self._tells_steps and event.time - self._failed_at >= NEWS_AFTER_S

    def reached(self, step: int, total_steps: int | None) -> None:
        """Take the newest known progress: the nodes' statuses are fresher than their events."""
        self._last.update(step=step, total_steps=total_steps)

    def _note(self, event: Event) -> None:
        if event.kind == "unreachable" and event.about:
            self._away.add(event.about)
        elif event.kind == "reached" and event.about:
            self._away.discard(event.about)
        for name in ("step", "total_steps"):
            if isinstance(value := event.get(name), int):
                self._last[name] = value
        if event.kind == "rendezvous":
            self._nodes = len(event.get("members") or ())
        self._tells_steps |= event.kind == "first-step"
        if event.kind in ("workers-started", "rendezvous"):
            attempt = str(event.get("attempt") or "")
            if self._failed_at is None:
                self._attempt = attempt
            elif event.kind == "workers-started" and attempt != self._attempt:
                self._is_back = True

    def _message(self, kind: str, event: Event, text: str, state: str = "") -> Message:
        step, total = self._last.get("step"), self._last.get("total_steps")
        if kind in ("failure", "end") and step is not None:
            text += f" (step {step:,}{f' of {total:,}' if total else ''})"
        return Message(
            kind=kind,
            run=self.run,
            time=event.time,
            text=f"{self.run} {text}\n{self.look} {self.run}",
            node=event.about,
            step=step,
            total_steps=total,
            state=state,
        )


def _problem(event: Event, away: Collection[str]) -> str:
    """Return what has failed, as text; "" if nothing has."""
    node = event.about
    if event.kind == "worker-failed":
        code, error = event.get("exitcode"), str(event.get("error") or "")
        line = _short(line_of(error)) or "it wrote nothing"
        how = f"signal {-code}" if isinstance(code, int) and code < 0 else f"exit status {code}"
        return f"failed on {node}: rank {event.get('rank')} ended with {how}: {line}"
    if event.kind == "gpu-error" and event.get("fatal"):
        gpu = "a GPU" if event.get("gpu") is None else f"GPU {event.get('gpu')}"
        return f"loses {node}, of which {gpu} is broken: {_short(str(event.get('text')))}"
    if event.kind == "hang":
        return f"hangs: {_short(str(event.get('text') or 'no rank gets on'))}"
    if event.kind == "membership" and event.get("lost"):
        lost = ", ".join(sorted(away)) or count(int(event.get("lost")), "node")
        return f"has lost {lost}"
    if event.kind == "no-quorum":
        return f"waits: {', '.join(event.get('members') or ())} are no majority"
    if event.kind == "store-lost":
        return "has lost its rendezvous host"
    return ""


def with_goodput(message: Message, run: Run) -> Message:
    """Return the message of a run's end with the goodput added."""
    try:
        from nodekit.deploy.story.history import History

        goodput = History.of(events.read(run.folder), now=message.time).goodput
    except Exception:  # send it without the goodput
        return message
    if goodput.total_s <= 0 or goodput.share is None:
        return message
    first, _, look = message.text.partition("\n")
    text = f"{first}; goodput {goodput.share:.0%} of {goodput.total_s:.0f} s\n{look}"
    return dataclasses.replace(message, text=text, goodput=goodput.share)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[: MAX_ERROR_CHARS - 1]}…"
