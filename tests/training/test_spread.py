"""Which nodes are sent which files of a sharded snapshot, and what comes of one that cannot be: without ranks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nodekit.training.snapshots import parts
from nodekit.training.snapshots.files.fence import Fenced
from nodekit.training.snapshots.files.found import NoneLoads
from nodekit.training.snapshots.files.manifest import Damaged
from nodekit.training.snapshots.parts import _Spread, transfers
from nodekit.training.snapshots.peers import Peers, Transfer

FILES = {"a": ("hash a", 10), "b": ("hash b", 20), "c": ("hash c", 30)}


class Ranks:
    """Ranks 0 and 1 on node 0, rank 2 on node 1, rank 3 on node 2; as rank 0 has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: dict[int, set[str]], unread: str = "") -> None:
        self.sent: list[Transfer] = []
        self.problems = ["", "", "", ""]
        self.fails: OSError | None = None
        self.told: list[Any] = []
        self.rejected: list[tuple[str, Exception]] = []
        self.answers: Callable[[Any], list[Any]] = lambda own: [
            own,
            (0, False, "host0", set(), []),
            (1, True, "host1", held[2], []),
            (2, True, "host2", held[3], [unread] if unread else []),
        ]
        monkeypatch.setattr(parts, "gethostname", lambda: "host0")
        monkeypatch.setattr(parts, "_held", lambda *_: (held[0], []))
        self.world: Any = SimpleNamespace(
            node_rank=0, is_first_on_node=True, is_main=True, gather=lambda own: self.answers(own),
            stage=lambda _: None,
        )  # fmt: skip
        peers = SimpleNamespace(send_files=self._send, gather=self._gather)
        self.manifest: Any = SimpleNamespace(
            parts=FILES, payload="g0-s3.dcp", name="g0-s3.json", tell=lambda names: ", ".join(names)
        )
        self.snapshots: Any = SimpleNamespace(
            folder=Path("/snapshots"), peers=peers, manifests=lambda: [self.manifest],
            reject=lambda *what: self.rejected.append(what),
        )  # fmt: skip

    def spread(self) -> _Spread:
        return _Spread(self.snapshots, self.world, self.manifest)

    def _send(self, folder: Path, sent: list[Transfer]) -> None:
        assert folder == Path("/snapshots/g0-s3.dcp")
        self.sent += sent
        if self.fails is not None:
            raise self.fails

    def _gather(self, own: str) -> list[str]:
        self.told.append(own)
        return [own or self.problems[0], *self.problems[1:]]

    def took(self) -> list[tuple[str, int, int]]:
        """Which file went from which rank to which, since this was asked last."""
        sent, self.sent = self.sent, []
        return [(each.name, each.source, each.target) for each in sent]


def wanted_by(*names: set[str]) -> Callable[[Any], list[Any]]:
    return lambda own: [own, *names]


def test_each_node_is_sent_what_its_ranks_want_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {0: {"a"}, 2: {"a", "b"}, 3: {"b", "c"}})
    spread = ranks.spread()
    assert (spread.problem, ranks.rejected) == ("", [])
    ranks.answers = wanted_by({"b", "c"}, {"a"}, set())
    spread.fetch(["a"])
    assert ranks.took() == [("b", 2, 0), ("c", 3, 0)], "rank 1's are node 0's"
    spread.fetch(["a"])
    assert ranks.took() == [], "it has them now"
    spread.make_up_for_lost_copies()
    assert ranks.took() == [], "each is on two nodes now"


def test_what_is_on_one_node_only_is_sent_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {0: {"a"}, 2: {"a", "b"}, 3: {"c"}})
    spread = ranks.spread()
    spread.make_up_for_lost_copies()
    assert ranks.took() == [("b", 2, 3), ("c", 3, 0)]
    spread.make_up_for_lost_copies()
    assert ranks.took() == []


def test_a_copy_goes_to_another_host_and_only_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {0: {"a", "b"}, 2: {"c"}, 3: {"a", "c"}})
    monkeypatch.setattr(parts, "gethostname", lambda: "host1")  # as node 1's
    ranks.spread().make_up_for_lost_copies()
    assert ranks.took() == [("b", 0, 3)]


def test_a_node_that_could_not_take_a_copy_does_not_have_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(monkeypatch, {0: {"a"}, 2: {"a", "b"}, 3: {"c"}})
    spread = ranks.spread()
    ranks.problems[3] = "node 2 (host2): No space left on device"
    with caplog.at_level(logging.WARNING):
        spread.make_up_for_lost_copies()
    assert "g0-s3.json is not on two nodes again: node 2 (host2): No space left on device" in caplog.text
    assert ranks.took() == [("b", 2, 3), ("c", 3, 0)]
    caplog.clear()
    ranks.world.is_main = False
    spread.make_up_for_lost_copies()
    assert (ranks.took(), caplog.text) == ([("b", 2, 3)], ""), "rank 0 tells of it"
    ranks.problems = [""] * 4
    spread.make_up_for_lost_copies()
    assert ranks.took() == [("b", 2, 3)], "that one has arrived"


def test_a_node_that_cannot_be_given_what_it_lacks_is_named_and_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, {0: {"a"}, 2: {"a", "b"}, 3: {"b", "c"}})
    spread = ranks.spread()
    ranks.answers, ranks.fails = wanted_by(set(), set(), set()), OSError("No space left on device")
    with pytest.raises(
        NoneLoads, match=r"g0-s3.json is there.*node 0 \(host0\): No space.*nothing was removed"
    ):
        spread.fetch(["b"])
    assert ranks.told == ["node 0 (host0): No space left on device"]
    assert ranks.rejected == []
    ranks.fails = None
    spread.fetch(["b"])
    assert ranks.took() == [("b", 2, 0)] * 2, "once more: it did not arrive"


@pytest.mark.parametrize(("unread", "kind"), [("", Damaged), ("c: Input/output error", OSError)])
def test_what_no_node_has_may_be_removed_only_where_all_could_be_read(
    unread: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, {0: {"a"}, 2: {"a", "b"}, 3: set()}, unread)
    problem = "no node that is here has g0-s3.dcp/c" + (f"; {unread}" if unread else "")
    assert ranks.spread().problem == problem
    [(name, error)] = ranks.rejected
    assert (name, type(error), str(error)) == ("g0-s3.json", kind, problem)


@pytest.mark.parametrize("why", ["is not here", "cannot be listed", "is another rank's to say"])
def test_what_is_not_known_to_be_here_is_not_passed_over(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {0: {"a"}, 2: {"a", "b"}, 3: set()})

    def manifests() -> list[Any]:
        if why == "cannot be listed":
            raise OSError("Input/output error")
        return [] if why == "is not here" else [ranks.manifest]

    ranks.snapshots.manifests = manifests
    if why == "is another rank's to say":
        ranks.world.is_first_on_node = False
        ranks.answers = lambda own: [
            (0, True, "host0", {"a"}, []), own, (1, True, "host1", {"b"}, []), (2, True, "host2", set(), [])
        ]  # fmt: skip
    assert "no node that is here has" in ranks.spread().problem
    assert ranks.rejected == []


def test_of_those_that_have_a_file_the_least_busy_sends_it() -> None:
    manifest: Any = SimpleNamespace(parts=FILES)
    holders = {"a": [2, 1], "b": [2, 1], "c": [2, 1]}
    found = transfers(manifest, holders, {0: {"a", "b", "c"}, 1: {"a"}, 3: {"c"}})
    assert [(each.name, each.source, each.target) for each in found] == [
        ("a", 1, 0), ("b", 2, 0), ("c", 1, 0), ("c", 2, 3)
    ]  # fmt: skip
    assert found[0] == Transfer("a", "hash a", 10, 1, 0)


@pytest.mark.parametrize(
    "error", [OSError("no room"), ValueError("no safe object"), Fenced(0, 1, "/snapshots")]
)
def test_what_fails_on_one_rank_is_raised_there_as_it_is_and_on_the_others_with_its_rank(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose generation is over ends, and does not take that for a save that has failed."""
    peers = Peers.__new__(Peers)

    def call() -> int:
        raise error

    monkeypatch.setattr(peers, "gather", lambda own: [(5, None), own])
    with pytest.raises(type(error)) as raised:
        peers.together(call)
    assert raised.value is error
    assert peers.together(lambda: 7) == [5, 7]
    monkeypatch.setattr(peers, "gather", lambda own: [own, (None, str(error))])
    with pytest.raises(OSError, match=re.escape(f"rank 1: {error}")):
        peers.together(lambda: 7)
