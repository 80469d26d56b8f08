"""Which nodes may be drained, and what is kept of that; the rest is in test_judge, test_simulation and test_watch."""

from __future__ import annotations

import dataclasses

import pytest

from nodekit.deploy.drain import ask, refusal
from nodekit.deploy.judge import Rules
from nodekit.deploy.runs import Run

RULES = Rules(nodes=("a", "b", "c"), min_nodes=2, max_nodes=3)


@pytest.mark.parametrize(
    ("drained", "node", "absent", "why"),
    [
        ((), "c", (), ""),
        ((), "d", (), "there is no node 'd'; there are a, b, c"),
        (("c",), "c", (), "c is drained already; kit drain --undo takes it back"),
        (("c",), "b", (), "needs at least 2 nodes (nodes.min), and without it 1 would be left (c: drained"),
        ((), "b", ("c",), "without it 1 would be left (c: drained, or not to be reached)"),
        ((), "c", ("c",), ""),
    ],
)
def test_a_node_that_the_job_needs_stays(
    drained: tuple[str, ...], node: str, absent: tuple[str, ...], why: str
) -> None:
    found = refusal(RULES, drained, node, absent=absent)
    assert found == "" if not why else why in found


def test_what_is_drained_is_on_record_until_it_is_undone() -> None:
    run = Run(run_id="r", name="r", inventory_path="x", inventory={}, command=None, created=0.0)
    run.save()
    assert run.drained == frozenset()
    ask(run, RULES, "c", undo=False)
    assert dataclasses.replace(run).drained == {"c"}
    assert "stays" in ask(run, RULES, "b", undo=False)
    assert ask(run, RULES, "b", undo=True) == "b is not drained"
    ask(run, RULES, "c", undo=True)
    assert run.drained == frozenset()
