"""``kit drain``: takes a node out of a job that goes on, and back into it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.records.runs import Run
from nodekit.deploy.story.event_text import names
from nodekit.deploy.supervise.state import Rules
from nodekit.inventory.errors import NotWritten


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
    """
    with run.alone():
        run.drain({**run.drained_because, node: why})


class SlowNodes:
    """Drains nodes that make the others wait (`job.on_slow`), where their hosts are the reason; asked once for each."""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def drain(
        self, run: Run, rules: Rules, statuses: Mapping[str, NodeStatus], *, absent: Collection[str]
    ) -> Iterator[str]:
        """Do so, by what the nodes say; what to say of it. A disk that is full is tried again."""
        for status in statuses.values():
            slow = status.get("slow") if status["alive"] and status.get("state") == "running" else None
            if not slow or not slow["of_host"] or slow["node"] in (*rules.drained, *self._asked):
                continue
            node = slow["node"]
            with contextlib.suppress(NotWritten):
                text = ask(run, rules, node, undo=False, absent=absent)
                self._asked.add(node)
                yield f"{node} makes the others wait: {text}"
