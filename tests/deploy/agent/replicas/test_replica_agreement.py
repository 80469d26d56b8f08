"""On which files nodes agree, and whether that holds whatever happens."""

import hashlib
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_cluster import PATIENT_S, Cluster

from nodekit.deploy.agent.replicas.replica_files import Listing, Version
from nodekit.deploy.agent.replicas.replica_gather import agree

# --- who has a say ------------------------------------------------------------------------------------------


def version(text: str, written: int, mtime: int = 0) -> Version:
    return Version((1, written), mtime, hashlib.sha256(text.encode()).hexdigest() if text else "")


def source(node: str, attempt: int, number: int = 0, **files: Version) -> Listing:
    return Listing(node, (1, attempt), files, number)


AGREEMENTS = {
    "the attempt a version is written in counts more than its time": (
        [source("a", 5, x=version("new", 5, mtime=1)), source("b", 5, x=version("old", 4, mtime=9))],
        [],
        {"x": "new"},
    ),
    "a node that was away has no say": (
        [source("a", 6, x=version("v", 6)), source("b", 5, y=version("stale", 5, 9))],
        [],
        {"x": "v"},
    ),
    "copies for a node that is absent count like the node": (
        [source("b", 5)],
        [source("a", 5, x=version("v", 5))],
        {"x": "v"},
    ),
    "a member's own word counts more than what others keep of it": (
        [source("a", 5, x=version("", 5), y=version("v", 5))],
        [source("a", 5, 99, x=version("v", 5), y=version("v", 5))],
        {"y": "v"},
    ),
    "unless it came back with less": (
        [source("a", -1, y=version("leftover", -1)), source("b", 5)],
        [source("a", 5, x=version("v", 5))],
        {"x": "v"},
    ),
    "of several listings kept for a node the last": (
        [source("b", 5), source("c", 5)],
        [source("a", 5, 2, x=version("new", 5, 1)), source("a", 5, 1, x=version("old", 5, 2))],
        {"x": "new"},
    ),
    "who missed the last agreement speaks of this attempt alone": (
        [source("a", 6, x=version("v", 5)),
         source("b", 3, x=version("w", 3, 9), y=version("mine", 6), z=version("s", 3))],
        [],
        {"x": "v", "y": "mine"},
    ),
    "a deletion counts until the file is written again": (
        [source("a", 5, x=version("", 5, 3), y=version("", 5, 3), k=version("k", 1)),
         source("b", 5, x=version("v", 2, 9), y=version("again", 5, 4))],
        [],
        {"y": "again", "k": "k"},
    ),
    "nothing older than a deletion is there to fall back to": (
        [source("a", 5, y=version("again", 5, 4)), source("b", 5, y=version("", 5, 3), k=version("k", 1)),
         source("c", 5, y=version("first", 2))],
        [],
        {"y": "again", "k": "k"},
    ),
    "of a file and a folder of one name the folder stays": (
        [source("a", 5, s=version("file", 5, 2)), source("b", 5, **{"s/x": version("in", 5, 1)})],
        [],
        {"s/x": "in"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("story", AGREEMENTS)
def test_agreement(story: str) -> None:
    own, kept, wanted = AGREEMENTS[story]
    agreed = agree(own, kept)[1]
    contents = {
        name: [each.sha256 for each in versions] for name, versions in agreed.items() if versions[0].sha256
    }
    assert {name: shas[0] for name, shas in contents.items()} == {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in wanted.items()
    }
    assert agree(reversed(own), reversed(kept))[1] == agreed
    if "fall back" in story:
        assert len(contents["y"]) == 1


# --- whatever happens ---------------------------------------------------------------------------------------

NAMES = ["last.pt", "step_1/a.pt", "step_1/b.pt", "x y"]
STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 4), st.sampled_from(NAMES)),
    st.tuples(st.just("delete"), st.integers(0, 4), st.sampled_from(NAMES)),
    st.tuples(st.just("settle"), st.just(0), st.just("")),
    st.tuples(st.just("crash"), st.integers(0, 4), st.just("")),
    st.tuples(st.just("return"), st.integers(0, 4), st.just("")),
    st.tuples(st.just("gather"), st.just(0), st.just("")),
)


class Truth:
    """What must be true of a name: the last thing a script did to it, and the nodes that know."""

    def __init__(self, content: str | None, known_to: set[str], by: str, attempt: int) -> None:
        self.content, self.known_to, self.by, self.attempt = content, known_to, by, attempt


def play(
    root: Path, num_nodes: int, copies: int, steps: list[tuple[str, int, str]], *, settle_s: float = 5.0
) -> list[str]:
    """Returns which of the promises were put to the test.

    A node that has returned is waited for in vain: after `settle_s`, what has not been copied is not counted on.
    """
    nodes = Cluster(root, num_nodes, copies)
    truths: dict[str, Truth] = {}
    members = [node.name for node in nodes.nodes]
    tested = []

    def meet() -> None:
        nonlocal members
        alive = nodes.alive
        if not alive:
            return
        in_last_round = {node.name for node in alive} & set(members)
        for gathered in nodes.gather():
            assert gathered.silent == {}
            assert gathered.lost == gathered.missing == []
        found = [node.files() for node in alive]
        assert all(each == found[0] for each in found), found
        for name, truth in truths.items():
            if in_last_round & truth.known_to:
                assert found[0].get(name) == truth.content, (name, truth.__dict__, found[0])
                tested.append("deleted" if truth.content is None else "kept")
                if truth.by and truth.by not in in_last_round:
                    tested.append("writer gone")
        members = [node.name for node in alive]
        for name in [*truths, *found[0]]:
            truths[name] = Truth(found[0].get(name), set(members), "", nodes.attempt)

    def settle() -> None:
        for node in nodes.alive:
            if node.name not in members:
                continue
            ring = members.index(node.name)
            targets = [members[(ring + i) % len(members)] for i in range(1, min(copies, len(members)))]
            is_done = node.alive.finish_copying(
                settle_s if all(nodes[int(each[1:])].replicas for each in targets) else 0.3
            )
            for name, truth in truths.items():
                if truth.by == node.name and truth.attempt == nodes.attempt:
                    keeping = [
                        each for each in nodes.alive if each.keeps(node.name).get(name) == truth.content
                    ]
                    truth.known_to |= {each.name for each in keeping if truth.content is not None}
                    if truth.content is None and is_done:
                        truth.known_to |= set(targets)

    try:
        nodes[0].write("anchor", "a folder that is emptied is taken for an accident")
        meet()
        for number, (what, index, name) in enumerate(steps):
            node = nodes[index % num_nodes]
            is_member = node.replicas is not None and node.name in members
            truth = truths.get(name)
            is_free = truth is None or truth.attempt != nodes.attempt or truth.by in (node.name, "")
            if what == "write" and is_member and is_free:
                node.write(name, f"{number} by {node.name}", mtime=1_700_000_000 + number)
                truths[name] = Truth(f"{number} by {node.name}", {node.name}, node.name, nodes.attempt)
            elif what == "delete" and is_member and is_free and (node.folder / name).exists():
                (node.folder / name).unlink()
                truths[name] = Truth(None, {node.name}, node.name, nodes.attempt)
            elif what == "settle":
                settle()
            elif what == "crash":
                node.die()
            elif what == "return" and node.replicas is None:
                node.start()
                # It is up again, but takes part only from the next attempt on.
            elif what == "gather":
                meet()
        meet()
        return tested
    finally:
        for node in nodes.nodes:
            node.die()


@settings(max_examples=30)
@given(st.integers(3, 5), st.integers(2, 3), st.lists(STEPS, min_size=4, max_size=25))
def test_whatever_happens_members_agree_and_what_was_kept_is_there(
    tmp_path_factory: pytest.TempPathFactory, num_nodes: int, copies: int, steps: list[tuple[str, int, str]]
) -> None:
    root = tmp_path_factory.mktemp("play")
    try:
        play(root, num_nodes, copies, steps)
    finally:
        shutil.rmtree(root)


def test_the_play_puts_every_promise_to_the_test(tmp_path: Path) -> None:
    steps = [
        ("write", 0, "last.pt"), ("write", 0, "x y"), ("settle", 0, ""), ("gather", 0, ""),
        ("delete", 1, "x y"), ("write", 1, "last.pt"), ("settle", 0, ""), ("crash", 1, ""), ("gather", 0, ""),
    ]  # fmt: skip
    assert set(play(tmp_path, 3, 2, steps, settle_s=PATIENT_S)) == {"kept", "deleted", "writer gone"}
