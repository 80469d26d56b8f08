"""Which nodes may be drained, and what is kept of that; the rest is in test_judge, test_simulation and test_watch."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from nodekit.deploy.host.schema import NodeStatus, Slow
from nodekit.deploy.records import runs
from nodekit.deploy.records.runs import Run
from nodekit.deploy.supervise.drain import Drained, SlowNodes, ask, exclude, refusal
from nodekit.deploy.supervise.state import Rules
from nodekit.inventory.errors import KitError

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


def test_it_is_on_record_why_kit_itself_has_drained_a_node() -> None:
    run = Run(run_id="r", name="r", inventory_path="x", inventory={}, command=None, created=0.0)
    run.save()
    (run.folder / "drained").write_text('["a"]')  # as an earlier kit wrote it
    exclude(run, "c", "GPU 3: Xid 79")
    assert run.drained_because == {"a": "", "c": "GPU 3: Xid 79"}
    assert "comes back" in ask(run, RULES, "c", undo=True)
    assert run.drained == {"a"}


@pytest.mark.parametrize(
    "text", [None, "", "5"], ids=["it cannot be read", "it is empty", "it names no nodes"]
)
def test_where_nobody_knows_who_is_drained_nothing_is_forgotten(text: str | None) -> None:
    run = Run(run_id="r", name="r", inventory_path="x", inventory={}, command=None, created=0.0)
    run.save()
    known = Drained(run)
    assert (known.look(), known.is_known, known.nodes) == ("", True, frozenset())
    exclude(run, "c", "GPU 3: Xid 79")
    assert (known.look(), known.line("c"), known.line("a")) == ("", "drained  GPU 3: Xid 79", "")
    path = run.folder / "drained"
    path.unlink()
    path.mkdir() if text is None else path.write_text(text)  # a folder is there, and cannot be read as a file

    for does in (
        lambda: run.drained,
        lambda: ask(run, RULES, "b", undo=False),
        lambda: ask(run, RULES, "c", undo=True),
        lambda: exclude(run, "b", "GPU 0: Xid 48"),
    ):
        with pytest.raises(KitError, match=str(path)) as caught:
            does()
        assert caught.value.problem.cure
    said = known.look()
    assert said.startswith(f"{path} ")
    assert said.endswith("; until then the same nodes stay drained")
    assert (known.look(), known.nodes) == ("", {"c"}), "it is said once"
    unknown = Drained(run)
    assert unknown.look().endswith("; until then nothing is started")
    assert not unknown.is_known


def test_of_two_that_drain_at_once_none_is_forgotten_and_enough_nodes_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(run_id="r", name="r", inventory_path="x", inventory={}, command=None, created=0.0)
    run.save()
    write = runs.write_private

    def writes(path: str, data: bytes, durable: bool = False) -> None:
        time.sleep(0.1)
        write(path, data, durable=durable)

    monkeypatch.setattr(runs, "write_private", writes)
    said: list[str] = []
    threads = [
        threading.Thread(target=lambda name=name: said.append(ask(run, RULES, name, undo=False)))
        for name in ("b", "c")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(run.drained) == 1
    threads = [threading.Thread(target=exclude, args=(run, name, "GPU 3: Xid 79")) for name in ("a", "d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {"a", "d"} < run.drained
    assert sorted("leaves the job" in text for text in said) == [False, True]


def test_a_node_that_makes_the_others_wait_is_drained_once_where_its_host_is_the_reason() -> None:
    run = Run(run_id="r", name="r", inventory_path="x", inventory={}, command=None, created=0.0)
    run.save()
    nodes, rules = SlowNodes(), RULES

    def said(node: str, *, of_host: bool = True, alive: bool = True, state: str = "running") -> list[str]:
        slow: Slow = {"node": node, "cause": "cpu", "of_host": of_host}
        statuses: dict[str, NodeStatus] = {
            "a": {"alive": alive, "state": state, "slow": slow},
            "b": {"alive": True},
        }
        return list(nodes.drain(run, rules, statuses, absent=()))

    for is_left in ({"of_host": False}, {"alive": False}):
        assert said("c", **is_left) == []
    assert said("c", state="fenced") == []
    (text,) = said("c")
    assert text.startswith("c makes the others wait: c leaves the job")
    assert run.drained == {"c"}
    rules = dataclasses.replace(RULES, drained=run.drained)
    assert said("c") == []
    (text,) = said("b")
    assert text.startswith("b makes the others wait: b stays: the job needs at least 2 nodes")
    assert said("b") == [], "it is said once"
    rules = dataclasses.replace(rules, nodes=[*RULES.nodes, "d"])  # another one has come
    (text,) = said("b")
    assert text.startswith("b makes the others wait: b leaves the job")
    assert run.drained == {"b", "c"}
    ask(run, RULES, "c", undo=True)
    rules = RULES
    assert said("c") == [], "the user wants it in"


def test_a_slow_node_that_the_user_has_drained_and_taken_back_stays() -> None:
    run = Run(run_id="r", name="r", inventory_path="x", inventory={}, command=None, created=0.0)
    run.save()
    nodes = SlowNodes()
    slow: Slow = {"node": "c", "cause": "cpu", "of_host": True}
    statuses: dict[str, NodeStatus] = {"a": {"alive": True, "state": "running", "slow": slow}}
    assert list(nodes.drain(run, dataclasses.replace(RULES, drained=frozenset("c")), {}, absent=())) == []
    assert list(nodes.drain(run, RULES, statuses, absent=())) == []
    assert run.drained == frozenset()
