"""Watches a run: follows every node, says what happens, and tells how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nodekit.deploy.failures import Failure, first_cause, how_it_ended, is_bystander
from nodekit.deploy.link import Link, RemoteError, on_all
from nodekit.deploy.runs import Run
from nodekit.deploy.view import View, status_line
from nodekit.inventory.errors import HostError

LAST_WORDS_S = 3.0  # after a node failed, how long the others may still tell of their own failure
RETRY_S = 3.0
STOP_MARGIN_S = 10.0
FINAL = ("succeeded", "failed", "stopped")

Outcome = Literal["succeeded", "failed", "stopped"]


@dataclass(frozen=True)
class Seen:
    """What is known of one node."""

    state: str = "starting"
    reachable: bool = True
    failures: tuple[Failure, ...] = ()
    message: str = ""
    ended_at: float | None = None
    """When the agent was seen to be gone (monotonic)."""

    @property
    def outcome(self) -> str | None:
        """How the node ended, ``gone`` for an agent that ended without a word; None while it runs."""
        if self.ended_at is None:
            return None
        return self.state if self.state in FINAL else "gone"


@dataclass(frozen=True)
class Verdict:
    """How a run ended, and why."""

    outcome: Outcome
    text: str


def decide(nodes: Mapping[str, Seen], *, min_nodes: int, now: float) -> Literal["watch", "stop", "done"]:
    """What to do next; pure.

    ``done``: every node has ended. ``stop``: a node failed or is gone and the others cannot go on without it;
    they have had time for their last words. ``watch`` otherwise.
    """
    ended = {name: seen for name, seen in nodes.items() if seen.outcome is not None}
    if len(ended) == len(nodes):
        return "done"
    bad = [seen for seen in ended.values() if seen.outcome != "succeeded"]
    if not bad:
        return "watch"
    only_gone = all(seen.outcome == "gone" for seen in bad)
    if only_gone and len(nodes) - len(bad) >= min_nodes:
        return "watch"  # an elastic job goes on without them
    first = min(seen.ended_at for seen in bad if seen.ended_at is not None)
    return "stop" if now - first >= LAST_WORDS_S else "watch"


def verdict(nodes: Mapping[str, Seen], *, max_restarts: int) -> Verdict:
    """How it ended, by what all nodes said; pure."""
    outcomes = {name: seen.outcome for name, seen in nodes.items()}
    if all(outcome == "succeeded" for outcome in outcomes.values()):
        return Verdict("succeeded", "trained to the end")
    gone = [name for name, outcome in outcomes.items() if outcome == "gone"]
    last_attempts = [
        failure for seen in nodes.values() for failure in seen.failures if failure.attempt == _last(seen)
    ]
    cause = first_cause(last_attempts)
    survivors = [name for name, outcome in outcomes.items() if outcome == "succeeded"]
    if survivors and len(survivors) + len(gone) == len(nodes):
        return Verdict("succeeded", f"trained to the end without {', '.join(gone)}")
    if gone and (cause is None or _only_echoes(last_attempts)):
        words = "\n".join(f"  {nodes[name].message}" for name in gone if nodes[name].message)
        return Verdict("failed", f"the agent on {', '.join(gone)} is gone without a word\n{words}".rstrip())
    if cause is None:
        if any(outcome == "stopped" for outcome in outcomes.values()):
            return Verdict("stopped", "stopped")
        said = [f"{name}: {seen.message}" for name, seen in nodes.items() if seen.message]
        return Verdict("failed", "\n".join(said) or "every node failed without a word")
    failure, num_others = cause
    attempts = {each.attempt for seen in nodes.values() for each in seen.failures}
    text = [
        f"rank {failure.rank} on {failure.node} failed first ({how_it_ended(failure.exitcode)})"
        + (f", in the last of {len(attempts)} attempts" if len(attempts) > 1 else ""),
        "",
        *(f"    {line}" for line in (failure.error or "it wrote nothing").splitlines()),
        "",
    ]
    if num_others:
        text.append(f"  {num_others} other rank(s) ended because of it")
    text.append(f"  full log: {failure.node}:{failure.log}")
    if len(attempts) == 1 and max_restarts == 0:
        text.append("  (job.max_restarts is 0: a failed rank ends the job)")
    return Verdict("failed", "\n".join(text))


def _last(seen: Seen) -> str | None:
    return seen.failures[-1].attempt if seen.failures else None


def _only_echoes(failures: list[Failure]) -> bool:
    return all(is_bystander(failure) for failure in failures)


class Supervisor:
    """Follows the nodes of one run until it ends or is stopped."""

    def __init__(
        self,
        run: Run,
        links: dict[str, Link],
        view: View,
        *,
        reopen: Callable[[str], Link],
        min_nodes: int,
        max_restarts: int,
        grace_s: float,
        clock_offsets: Mapping[str, float],
        tail_bytes: int | None = None,
    ) -> None:
        self._run = run
        self._links = links
        self._view = view
        self._reopen = reopen
        self._min_nodes = min_nodes
        self._max_restarts = max_restarts
        self._grace_s = grace_s
        self._clock_offsets = clock_offsets
        self._tail_bytes = tail_bytes
        self._queue: queue.Queue[tuple[str, str, Any]] = queue.Queue()
        self._closing = threading.Event()
        self._nodes = {name: Seen() for name in run.nodes}
        self._lines: dict[str, str] = dict.fromkeys(run.nodes, "connecting")
        self._first_step = False

    def watch(self) -> Verdict:
        """Follow every node to the end; KeyboardInterrupt passes through, with everything still running."""
        for name in self._nodes:
            threading.Thread(target=self._follow, args=(name,), name=f"follow-{name}", daemon=True).start()
        stopped = False
        while True:
            with contextlib.suppress(queue.Empty):
                self._take(*self._queue.get(timeout=0.2))
                while True:
                    self._take(*self._queue.get_nowait())
            self._view.status(self._lines)
            action = decide(self._nodes, min_nodes=self._min_nodes, now=time.monotonic())
            if action == "done":
                self._closing.set()
                return verdict(self._nodes, max_restarts=self._max_restarts)
            if action == "stop" and not stopped:
                stopped = True
                running = [name for name, seen in self._nodes.items() if seen.outcome is None]
                ended = [
                    name for name, seen in self._nodes.items() if seen.outcome not in (None, "succeeded")
                ]
                self._view.say(f"stopping {', '.join(running)}: the job has ended on {', '.join(ended)}")
                threading.Thread(target=self.stop, kwargs={"force": False}, daemon=True).start()

    def stop(self, *, force: bool) -> dict[str, Any]:
        """Stop the run on every node: host → what was found there, or the exception."""

        def stop_one(link: Link) -> Any:
            return link.call(
                "stop",
                timeout_s=self._grace_s + STOP_MARGIN_S + 5,
                node_dir=self._run.nodes[link.host]["node_dir"],
                grace_s=self._grace_s + STOP_MARGIN_S,
                force=force,
            )

        return on_all(self._links, stop_one)

    def _follow(self, name: str) -> None:
        offsets: dict[str, int] | None = None

        def take(part: Any) -> None:
            nonlocal offsets
            offsets = part["offsets"]
            self._queue.put((name, "part", part))

        while not self._closing.is_set():
            try:
                final = self._links[name].stream(
                    "follow",
                    take,
                    node_dir=self._run.nodes[name]["node_dir"],
                    offsets=offsets,
                    tail_bytes=self._tail_bytes if offsets is None else None,
                )
                self._queue.put((name, "ended", final))
                return
            except RemoteError as error:
                self._queue.put((name, "lost", str(error)))
            except HostError as error:
                self._queue.put((name, "lost", error.problem))
            if self._closing.wait(RETRY_S):
                return
            with contextlib.suppress(HostError):
                lost, self._links[name] = self._links[name], self._reopen(name)
                lost.close()

    def _take(self, name: str, kind: str, value: Any) -> None:
        seen = self._nodes[name]
        if kind == "lost":
            if seen.reachable:
                self._view.say(f"{name}: cannot be reached from here ({value}); trying again")
                self._run.event("unreachable", about=name, why=value)
            self._nodes[name] = dataclasses.replace(seen, reachable=False)
            self._lines[name] = "unreachable  trying again"
            return
        if not seen.reachable:
            self._view.say(f"{name}: reached again")
        status = value["status"] if kind == "part" else value
        if kind == "part":
            for file, text in value["logs"]:
                self._log(name, file, text)
        for failure in status.get("failures", ())[len(seen.failures) :]:
            self._tell_failure(name, failure)
        message = str(status.get("message") or "")
        ended_at = seen.ended_at
        if kind == "ended":
            ended_at = time.monotonic()
            if status.get("state") not in FINAL:
                message = str(status.get("agent_log", "")).strip()[-2000:]
        if (state := str(status.get("state", "starting"))) != seen.state:
            self._run.event("node-state", about=name, state=state, attempt=status.get("attempt"))
        if status.get("progress") and not self._first_step:
            self._first_step = True
            self._run.event("first-progress", about=name, progress=status["progress"])
        self._nodes[name] = dataclasses.replace(
            seen,
            state=state,
            reachable=True,
            failures=tuple(self._failure(name, each) for each in status.get("failures", ())),
            message=message,
            ended_at=ended_at,
        )
        shown = dict(status, state="gone") if kind == "ended" and state not in FINAL else status
        self._lines[name] = status_line(shown, now=time.time() + self._clock_offsets.get(name, 0.0))

    def _failure(self, node: str, failure: Mapping[str, Any]) -> Failure:
        return Failure(
            node=node,
            rank=failure["rank"],
            attempt=failure["attempt"],
            exitcode=failure["exitcode"],
            when=failure["when"] - self._clock_offsets.get(node, 0.0),
            log=failure["log"],
            error=failure["error"],
        )

    def _tell_failure(self, node: str, failure: Mapping[str, Any]) -> None:
        last_line = (failure["error"].strip().splitlines() or ["it wrote nothing"])[-1]
        how = how_it_ended(failure["exitcode"])
        self._view.say(f"{node}: rank {failure['rank']} ended with {how}: {last_line}")

    def _log(self, node: str, file: str, text: str) -> None:
        rank = file.removeprefix("rank").partition("-")[0]
        lines = []
        for line in text.split("\n")[:-1]:
            lines.append(line.rstrip("\r").rpartition("\r")[2])  # a progress bar's last state is its line
        self._view.log(node, rank, lines)
