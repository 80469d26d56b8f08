"""``kit drain``: takes a node out of a job that goes on, and back into it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping

from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.output.wording import names
from nodekit.deploy.records.runs import Run
from nodekit.deploy.supervise.state import Rules
from nodekit.inventory.errors import KitError, Problem

RETRY_S = 1.0


def refusal(rules: Rules, drained: Collection[str], node: str, *, absent: Collection[str] = ()) -> str:
    """Why a node cannot be drained, "" where it can; pure.

    Args:
        rules: the inventory's.
        drained: the nodes that are already.
        node: the one that is to be.
        absent: those that cannot be reached.
    """
    if node not in rules.nodes:
        return f"there is no node '{node}'; there are {names(rules.nodes)}"
    if node in drained:
        return f"{node} is drained already; kit drain --undo takes it back"
    left = [name for name in rules.nodes if name not in (*drained, *absent, node)]
    if len(left) >= rules.min_nodes:
        return ""
    out = [name for name in rules.nodes if name in (*drained, *absent)]
    why = f" ({names(out)}: drained, or not to be reached)" if out else ""
    return (
        f"{node} stays: the job needs at least {rules.min_nodes} nodes (nodes.min), "
        f"and without it {len(left)} would be left{why}"
    )


def ask(run: Run, rules: Rules, node: str, *, undo: bool, absent: Collection[str] = ()) -> str:
    """Have whoever supervises the run drain a node, or take it back; what to say of that.

    Raises:
        NotWritten: the disk is full, or gone.
        KitError: which nodes are drained cannot be read; nothing is changed.
    """
    with run.alone():  # of two at once neither may be forgotten, nor both leave too few nodes
        drained = run.drained_because
        if undo:
            if node not in drained:
                return f"{node} is not drained"
            run.drain({name: why for name, why in drained.items() if name != node})
            run.event("undrain", about=node)
            return f"{node} comes back into the job"
        if why := refusal(rules, drained, node, absent=absent):
            return why
        run.drain({**drained, node: ""})
    return f"{node} leaves the job when its ranks have saved, and stays out until it is taken back"


def exclude(run: Run, node: str, why: str) -> None:
    """Have a node drained because something of it is broken.

    Raises:
        NotWritten: the disk is full, or gone.
        KitError: which others are drained cannot be read; nothing is changed.
    """
    with run.alone():
        run.drain({**run.drained_because, node: why})


class Exclusions:
    """Drains nodes that are broken: what cannot be is told of once, and tried again a moment later."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._told: dict[str, Problem] = {}
        """Node that is broken → why it could not be drained, as it was told."""
        self._try_at = 0.0
        """When to try that again."""

    def exclude(self, node: str, why: str) -> bool:
        """Whether a node is drained now, as of `exclude`; False: it cannot be, as was told.

        Raises:
            KitError: it cannot be, which is to be told.
        """
        if time.monotonic() < self._try_at:
            return False
        try:
            exclude(self._run, node, why)
        except KitError as error:
            self._try_at = time.monotonic() + RETRY_S
            if self._told.get(node) == error.problem:
                return False
            self._told[node] = error.problem
            raise
        self._told.pop(node, None)
        return True


def line(because: Mapping[str, str], node: str) -> str:
    """What a node's line says, by `Run.drained_because`; "" where it is not drained."""
    why = because.get(node)
    return "" if why is None else f"drained  {why}" if why else "drained"


class Drained:
    """Which nodes are drained, as whoever supervises has last read it: what cannot be read changes nothing."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._because: dict[str, str] = {}
        self._said = ""
        self.is_known = False
        """Whether it could ever be read; before, any node may be drained, and none may be started."""

    @property
    def nodes(self) -> frozenset[str]:
        """Their names."""
        return frozenset(self._because)

    def look(self) -> str:
        """Read it anew; why that cannot be, to be said, once each."""
        try:
            self._because, self.is_known = self._run.drained_because, True
        except KitError as error:
            if (text := str(error)) != self._said:
                self._said = text
                return f"{text}; until then {'the same nodes stay drained' if self.is_known else 'nothing is started'}"
        return ""

    def line(self, node: str) -> str:
        """What a node's line says; "" where it is not drained."""
        return line(self._because, node)


class SlowNodes:
    """Drains nodes that make the others wait (`job.on_slow`), where their hosts are the reason; once each.

    One that the user has taken back stays. What cannot be drained is asked for again: others may come back.
    """

    def __init__(self) -> None:
        self._left: set[str] = set()
        self._stayed: set[str] = set()
        """Those of which it was told that they cannot leave."""

    def drain(
        self, run: Run, rules: Rules, statuses: Mapping[str, NodeStatus], *, absent: Collection[str]
    ) -> Iterator[str]:
        """Do so, by what the nodes say; what to say of it. A disk that is full, or fails, is tried again."""
        self._left |= rules.drained
        for status in statuses.values():
            slow = status.get("slow") if status["alive"] and status.get("state") == "running" else None
            if not slow or not slow["of_host"] or (node := slow["node"]) in self._left:
                continue
            why = refusal(rules, rules.drained, node, absent=absent)
            if why and node in self._stayed:
                continue
            with contextlib.suppress(KitError):
                why = why or ask(run, rules, node, undo=False, absent=absent)
                (self._left if node in run.drained else self._stayed).add(node)
                yield f"{node} makes the others wait: {why}"
