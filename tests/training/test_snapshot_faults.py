"""Whatever fails, and whenever: some node still loads a snapshot that is no older than the newest one promised.

The real snapshot store and the real exchange, on a disk that fails (failing_disk.py). The nodes' ranks are threads
that take turns, so that a history found once is found again.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest import mock

import pytest
import torch
from failing_disk import ERRORS, KILL, TORN, Disk, Fault, Killed
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nodekit.deploy.agent.replicas.replica_copies import Copies
from nodekit.deploy.agent.replicas.replica_files import Listing, Version
from nodekit.training import Fenced, Snapshots
from nodekit.training.snapshots import exchange, snapshot
from nodekit.training.snapshots.files import commit
from nodekit.training.snapshots.files.manifest import Manifest, NewerKit

NODES = 3
FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None  # nothing is synced in truth
Age = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewerManifest(Manifest):
    """As a newer kit writes them."""

    engine: str = "fsdp"


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Group:
    """A process group of threads of which one runs at a time: till it waits for the others, or ends."""

    def __init__(self, size: int) -> None:
        self.size, self.turn = size, 0
        self.moved = threading.Condition()
        self.given: dict[int, Any] = {}
        self.ended: set[int] = set()
        self.rounds: list[list[Any] | None] = []

    def _next(self, after: int) -> None:
        """Whose turn it is; when all who live have come, a round is over."""
        waiting = [rank for rank in range(self.size) if rank not in self.given and rank not in self.ended]
        if not waiting:
            whole = not self.ended
            self.rounds.append([self.given[rank] for rank in range(self.size)] if whole else None)
            self.given = {}
            waiting = [rank for rank in range(self.size) if rank not in self.ended]
        self.turn = waiting[0] if waiting else -1
        self.moved.notify_all()

    def gather(self, rank: int, value: Any) -> list[Any]:
        with self.moved:
            number = len(self.rounds)
            self.given[rank] = value
            self._next(rank)
            self.moved.wait_for(lambda: len(self.rounds) > number and self.turn == rank)
            values = self.rounds[number]
        if values is None:
            raise ConnectionError("another rank is gone")
        return values

    def run(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """What each call returned or raised."""
        results: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            with self.moved:
                self.moved.wait_for(lambda: self.turn == rank)
            try:
                results[rank] = calls[rank]()
            except BaseException as error:
                results[rank] = error
            with self.moved:
                self.ended.add(rank)
                self._next(rank)

        if self.size == 1:
            run(0)
            return results
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "the ranks wait for each other"
        return results


def world(group: Group, rank: int, *, expected: str, is_shared: bool) -> Any:
    """What the exchange asks of a World."""
    return SimpleNamespace(
        rank=rank,
        node_rank=rank,
        held_step=None,
        world_size=group.size,
        is_first_on_node=True,
        is_main=rank == 0,
        settle=lambda: None,
        device=torch.device("cpu"),
        expected_snapshot=expected,
        snapshot_is_shared=is_shared,
        gather=lambda value: group.gather(rank, value),
    )


FAULTS = st.none() | st.builds(
    Fault,
    at=st.integers(0, 40),
    what=st.sampled_from([*ERRORS, KILL, TORN]),
    times=st.sampled_from([1, 1, 2, 5, 10_000]),
    folder=st.sampled_from(["", "", "node0", "node1", ".json", ".pt", ".tmp", "fence"]),
)
NODE = st.integers(0, NODES - 1)


class OnAFailingDisk(RuleBasedStateMachine):
    """What is on a disk that may fail, in a folder of its own; the modules that look at a clock have this one."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="faults-", dir=FAST))
        self.disk, self.clock = Disk(self.root), Clock()
        self.undo = ExitStack()
        self.undo.enter_context(self.disk.installed())
        for module in (commit, snapshot):
            self.undo.enter_context(mock.patch.object(module, "time", self.clock))

    def teardown(self) -> None:
        self.undo.close()
        shutil.rmtree(self.root)


class Histories(OnAFailingDisk):
    """A run of three nodes, again and again started, saved, killed, and left without power."""

    def __init__(self) -> None:
        super().__init__()
        self.stores: dict[int, Snapshots] = {}  # of the ranks that train now
        self.old: list[Snapshots] = []  # of ranks that were given up for lost, and live
        self.is_newer_kit = False
        self.promised: Age | None = None
        self.generation, self.step = -1, 0

    @initialize(is_shared=st.booleans())
    def begin(self, is_shared: bool) -> None:
        self.is_shared = is_shared

    def folder(self, node: int) -> Path:
        return self.root / ("one" if self.is_shared else f"node{node}") / "snapshots"

    def kit(self, is_newer: bool) -> Any:
        return mock.patch.object(snapshot, "Manifest", NewerManifest if is_newer else Manifest)

    @rule(
        nodes=st.sets(NODE, min_size=1),
        is_newer_kit=st.booleans(),
        are_old_ones_alive=st.booleans(),
        fault=FAULTS,
    )
    def start(
        self, nodes: set[int], is_newer_kit: bool, are_old_ones_alive: bool, fault: Fault | None
    ) -> None:
        """A generation begins on some of the nodes."""
        self.old = list(self.stores.values()) if are_old_ones_alive else []
        self.stores, self.is_newer_kit = {}, is_newer_kit
        self.generation += 1
        group, members = Group(len(nodes)), sorted(nodes)
        stores = [Snapshots(self.folder(node), generation=self.generation) for node in members]
        held = [age for node in members if (age := self.newest_on(node))]
        expected = "one was committed" if self.is_shared and self.promised else ""

        def call(rank: int) -> Callable[[], Any]:
            own = world(group, rank, expected=expected, is_shared=self.is_shared)

            def broadcast(tensor: torch.Tensor, src: int) -> None:
                sent = group.gather(rank, tensor.clone() if rank == src else None)[src]
                tensor.copy_(sent)

            def broadcast_value(value: Any, source: int) -> Any:
                return group.gather(rank, copy.deepcopy(value) if rank == source else None)[source]

            own.broadcast = broadcast_value

            def run() -> Any:
                own_dist.broadcast = broadcast
                writes = exchange.writes_snapshots(stores[rank], own)
                found = exchange.newest_of_all(stores[rank], own, writes=writes)
                return found, writes

            return run

        own_dist = threading.local()
        fake = SimpleNamespace(
            broadcast=lambda tensor, src: own_dist.broadcast(tensor, src),
        )
        fired = self.disk.num_fired
        with self.kit(is_newer_kit), mock.patch.object(exchange, "dist", fake), self.disk.failing(fault):
            results = group.run([call(rank) for rank in range(len(members))])
        has_failed = self.disk.num_fired > fired
        errors = [each for each in results if isinstance(each, BaseException)]
        for error in errors:
            assert isinstance(error, (OSError, NewerKit, Fenced, Killed, ConnectionError)), repr(error)
            assert has_failed or isinstance(error, NewerKit), repr(error)
        if errors:
            return
        ages = {found.manifest.age if found else None for found, _ in results}
        assert len(ages) == 1, "all ranks go on from one step"
        (age,) = ages
        assert age is not None or not held, f"they begin at step 0, and {held} is there"
        assert has_failed or age == max(held, default=None)
        if age is not None:
            self.step = max(self.step, age[1])
        self.stores = {
            node: store for node, store, (_, writes) in zip(members, stores, results, strict=True) if writes
        }

    @precondition(lambda self: self.stores)
    @rule(fault=FAULTS, does_kill_all=st.booleans())
    def save(self, fault: Fault | None, does_kill_all: bool) -> None:
        """All who write save the same step, one after the other."""
        self.step += 1
        for node, store in list(self.stores.items()):
            self.save_to(store, self.step, fault)
            if self.disk.has_killed:
                self.stores = (
                    {} if does_kill_all else {n: each for n, each in self.stores.items() if n != node}
                )

    @precondition(lambda self: self.old)
    @rule(fault=FAULTS)
    def save_as_an_old_one(self, fault: Fault | None) -> None:
        """One that was given up for lost saves, too."""
        for store in self.old:
            self.save_to(store, self.step + 7, fault)

    def save_to(self, store: Snapshots, step: int, fault: Fault | None) -> None:
        fired = self.disk.num_fired
        with self.kit(self.is_newer_kit), self.disk.failing(fault):
            # It takes as long as all else.
            store._refuse_what_cannot_be_loaded = mock.Mock()  # type: ignore[method-assign]
            with suppress(Fenced):
                done = store.save({"step": step}, step=step)
                assert done or self.disk.num_fired > fired, "nothing was in its way"
                if done:
                    self.promised = max(self.promised or done.age, done.age)

    @rule(node=NODE, random=st.randoms(use_true_random=False))
    def lose_power(self, node: int, random: Any) -> None:
        """A node ends at once, and what was not synced is lost, or not."""
        if self.is_shared:
            self.stores, self.old = {}, []
        elif store := self.stores.pop(node, None):
            self.old = [each for each in self.old if each.folder != store.folder]
        self.disk.lose_power(self.folder(node), keeps=lambda: random.random() < 0.5)

    def newest_on(self, node: int) -> Age | None:
        with self.kit(True):
            found = Snapshots(self.folder(node)).look().loaded
        assert found is None or found.state["step"] == found.manifest.step
        return found.manifest.age if found else None

    @invariant()
    def what_was_promised_is_there(self) -> None:
        if self.promised is None:
            return
        found = (self.newest_on(node) for node in range(1 if self.is_shared else NODES))
        assert any(age and age >= self.promised for age in found), f"{self.promised} was promised"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is passed over is told with each fault."""
    logging.getLogger("nodekit.training").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("nodekit.training").setLevel(logging.NOTSET)


def histories(number: int, steps: int) -> settings:
    """So many, and how to see one again."""
    return settings(max_examples=number, stateful_step_count=steps, phases=[Phase.generate, Phase.shrink])


@pytest.mark.slow
def test_no_history_loses_a_snapshot() -> None:
    run_state_machine_as_test(Histories, settings=histories(600, 12))


class Sender:
    """The other side of a connection, which sends what it is asked for."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents
        self.asked = ""

    def ask(self, request: dict[str, str]) -> dict[str, int]:
        self.asked = request["sha256"]
        return {"size_bytes": len(self.contents[self.asked])}

    def receive_bytes(self, size_bytes: int, file: BinaryIO) -> str:
        file.write(self.contents[self.asked])
        file.flush()
        return self.asked


CONTENTS = {hashlib.sha256(data).hexdigest(): data for data in (b"one", b"two" * 999, b"three", b"four")}
OWNER = st.sampled_from(["n0", "n1"])


class Kept(OnAFailingDisk):
    """One node's copies for others: what it said it keeps is there, until it is told another thing."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = Copies(self.root / "kept")
        self.promised: dict[str, list[Listing]] = {}
        self.told = 0

    @rule(owner=OWNER, names=st.sets(st.sampled_from(sorted(CONTENTS))), fault=FAULTS)
    def keep(self, owner: str, names: set[str], fault: Fault | None) -> None:
        """As an agent that is asked to."""
        self.told += 1
        files = {
            f"{sha256[:4]}.pt": Version((0, 0), 1, sha256, "", len(CONTENTS[sha256])) for sha256 in names
        }
        listing = Listing(owner, (0, 0), files, self.told)
        is_kept = False
        with self.disk.failing(fault), suppress(OSError):
            for version in self.copies.lacking(listing, {}).values():
                self.copies.receive(Sender(CONTENTS), version)  # type: ignore[arg-type]
            if not self.copies.lacking(listing, {}):
                # From here on either may be what is there: a listing that was replaced, but of which nobody was told.
                if owner in self.promised:
                    self.promised[owner].append(listing)
                self.copies.keep(listing)
                is_kept = True
        if is_kept:
            self.promised[owner] = [listing]
        if self.disk.has_killed:
            self.restart(None)

    @rule(fault=FAULTS)
    def restart(self, fault: Fault | None) -> None:
        """Another agent, which begins as one does: with what was kept, and with cleaning up."""
        self.copies = Copies(self.root / "kept")
        with self.disk.failing(fault), suppress(OSError):
            self.copies = Copies(self.root / "kept")
            self.copies.clean(all_have_all=False)
            commit.retried(self.copies.read)

    @rule(fault=FAULTS, all_have_all=st.booleans())
    def clean(self, fault: Fault | None, all_have_all: bool) -> None:
        """At a round's start, or at its end."""
        with self.disk.failing(fault), suppress(OSError):
            if all_have_all:
                self.promised = {}
            self.copies.clean(all_have_all=all_have_all)
        if self.disk.has_killed:
            self.restart(None)

    @rule(random=st.randoms(use_true_random=False))
    def lose_power(self, random: Any) -> None:
        """What was not synced is lost, or not."""
        for name in ("blobs", "listings"):
            self.disk.lose_power(self.root / "kept" / name, keeps=lambda: random.random() < 0.5)
        self.restart(None)

    @invariant()
    def what_it_said_is_so(self) -> None:
        found = Copies(self.root / "kept").listings
        for owner, either in self.promised.items():
            assert found[owner] in either
            for sha256 in found[owner].content:
                assert (self.root / "kept" / "blobs" / sha256).read_bytes() == CONTENTS[sha256]


@pytest.mark.slow
def test_no_history_loses_a_copy() -> None:
    run_state_machine_as_test(Kept, settings=histories(500, 12))


@pytest.mark.parametrize("at", range(20))
def test_a_listing_that_was_replaced_but_not_told_of_is_read_before_any_cleaning(at: int) -> None:
    one, two = sorted(CONTENTS)[:2]
    kept = Kept()
    try:
        kept.keep(owner="n0", names={one}, fault=None)
        kept.keep(owner="n0", names={two}, fault=Fault(at, errno.EIO))
        kept.clean(fault=None, all_have_all=False)
        kept.restart(fault=None)
        kept.what_it_said_is_so()
    finally:
        kept.teardown()
