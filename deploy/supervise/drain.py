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
    """Return why a node cannot be drained; "" if it can. Pure.

    Args:
        rules: of the inventory.
        drained: nodes that are drained already.
        node: the node to drain.
        absent: unreachable nodes.
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
    """Ask the run's supervisor to drain a node, or with `undo` to take it back; return a line for the user.

    Raises:
        NotWritten: the disk is full, or gone.
        KitError: the list of drained nodes cannot be read; nothing is changed.
    """
    with run.alone():  # two requests at once must not overwrite each other, or leave too few nodes
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
    """Drain a node that is broken; `why` says how.

    Raises:
        NotWritten: the disk is full, or gone.
        KitError: the list of drained nodes cannot be read; nothing is changed.
    """
    with run.alone():
        run.drain({**run.drained_because, node: why})


class Exclusions:
    """Drains broken nodes; retries a failure after `RETRY_S`, and raises it only once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._told: dict[str, Problem] = {}
        """Broken node → why it could not be drained, as raised last."""
        self._try_at = 0.0
        """When to try again, by time.monotonic()."""

    def exclude(self, node: str, why: str) -> bool:
        """Drain a broken node; False if that failed less than `RETRY_S` ago, or fails for a reason raised before.

        Raises:
            KitError: the node cannot be drained, for a new reason, which the caller reports.
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
    """Return the status line of a drained node, from `Run.drained_because`; "" if it is not drained."""
    why = because.get(node)
    return "" if why is None else f"drained  {why}" if why else "drained"


class Drained:
    """The drained nodes, as the supervisor last read them; if they cannot be read, the last ones stay."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._because: dict[str, str] = {}
        self._said = ""
        self.is_known = False
        """Whether the list was read at least once; until then any node may be drained, so none may be started."""

    @property
    def nodes(self) -> frozenset[str]:
        """The names of the drained nodes."""
        return frozenset(self._because)

    def look(self) -> str:
        """Read the list again; return a message for the user if that fails for a new reason, else ""."""
        try:
            self._because, self.is_known = self._run.drained_because, True
        except KitError as error:
            if (text := str(error)) != self._said:
                self._said = text
                return f"{text}; until then {'the same nodes stay drained' if self.is_known else 'nothing is started'}"
        return ""

    def line(self, node: str) -> str:
        """Return the status line of a drained node; "" if it is not drained."""
        return line(self._because, node)


class SlowNodes:
    """Drains nodes whose hosts slow the others down (`job.on_slow`), each once.

    A node that the user has taken back stays. One that cannot be drained yet is tried again: other nodes may come back.
    """

    def __init__(self) -> None:
        self._left: set[str] = set()
        self._stayed: set[str] = set()
        """Slow nodes for which the user was told that they cannot be drained."""

    def drain(
        self, run: Run, rules: Rules, statuses: Mapping[str, NodeStatus], *, absent: Collection[str]
    ) -> Iterator[str]:
        """Drain the slow nodes that the statuses name; yield a line for the user each. A failing disk is retried."""
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
