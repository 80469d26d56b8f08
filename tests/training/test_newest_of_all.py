"""From which state two nodes of two ranks go on, and who sends it: the ranks are threads of this process."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch

from nodekit.training import Fenced, Manifest, Snapshots
from nodekit.training.errors import TrainingError
from nodekit.training.process.kept import Kept
from nodekit.training.snapshots import exchange, snapshot
from nodekit.training.snapshots.files.fence import Fence
from nodekit.training.snapshots.files.found import NoneLoads
from nodekit.training.snapshots.files.manifest import Loaded
from nodekit.training.snapshots.tensor_bytes import Place, TensorBytes, without_tensors

DEADLINE_S = 10.0
RANK = threading.local()


class Group:
    """The collectives of four ranks; a rank that the others do not meet in one gets a BrokenBarrierError."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(4)
        self.values: list[Any] = [None] * 4

    def gather(self, value: Any) -> list[Any]:
        self.values[RANK.number] = pickle.dumps(value)
        self.barrier.wait(DEADLINE_S)
        found = [pickle.loads(each) for each in self.values]
        self.barrier.wait(DEADLINE_S)
        return found

    def send(self, tensor: torch.Tensor, *, src: int) -> None:
        found = self.gather(tensor.tolist())[src]
        tensor.copy_(torch.tensor(found, dtype=tensor.dtype))


class Nodes:
    """Ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1; or, with four folders, each is on a node of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders = [folder / "node0" / "snapshots", folder / "node1" / "snapshots"]
        self.kept: dict[int, Kept] = {}
        self.expected = ["", "", "", ""]
        self.is_shared = False
        self.generation: int | None = 1
        self.damages: list[int] = []
        """A rank for each time that what a rank has in memory arrives there damaged."""
        self.done: list[list[str]] = [[], [], [], []]
        """What each rank did: "verified" or "mapped" a file, received into a "file" or into "memory", or "nothing"."""
        monkeypatch.setattr(exchange, "_CHUNK_BYTES", 1000)
        monkeypatch.setattr(snapshot.commit, "RETRY_S", 0.1)
        self._count(monkeypatch, snapshot, "verify", "verified")
        self._count(monkeypatch, snapshot, "map_payload", "mapped")
        broadcast, kinds = (
            exchange._broadcast,
            {"HashingFile": "file", "BytesIO": "memory", "NoneType": "nothing"},
        )

        def sent(*arguments: Any) -> None:
            self.done[RANK.number].append(kinds[type(getattr(arguments[-1], "__self__", None)).__name__])
            broadcast(*arguments)

        monkeypatch.setattr(exchange, "_broadcast", sent)
        damages = self.damages

        class Sent(TensorBytes):
            def write(self, data: memoryview) -> None:
                is_damaged = RANK.number in damages
                super().write(memoryview(bytearray(len(data))) if is_damaged else data)

            @property
            def sha256(self) -> str:
                if RANK.number in damages and self._done:
                    damages.remove(RANK.number)
                return super().sha256

        monkeypatch.setattr(exchange, "TensorBytes", Sent)

    def _count(self, monkeypatch: pytest.MonkeyPatch, of: Any, name: str, what: str) -> None:
        real = getattr(of, name)

        def counted(*arguments: Any) -> Any:
            self.done[RANK.number].append(what)
            return real(*arguments)

        monkeypatch.setattr(of, name, counted)

    def hold(self, node: int, step: int, *, attempt: str = "") -> None:
        saved = Snapshots(self.folders[node], generation=0)
        saved.attempt = attempt
        state = {"step": step, "weights": torch.full((700,), float(step)), "from": f"node {node}"}
        assert saved.save(state, step=step)

    def keep(self, rank: int, age: tuple[int, int], attempt: str = "a") -> None:
        state = {"step": age[1], "weights": torch.full((700,), rank + 100.0), "from": f"rank {rank}"}
        self.kept[rank] = Kept(state, age, lambda: False, attempt)

    def damage(self, node: int) -> None:
        (payload,) = self.folders[node].glob("*.pt")
        payload.write_bytes(payload.read_bytes()[:-1] + b"?")

    def go(self, call: Callable[[Snapshots, Any], Any]) -> list[Any]:
        """Call it on all ranks, and return what each returned or raised."""
        group, found = Group(), [None] * 4

        def run(rank: int) -> None:
            RANK.number = rank
            node, local_rank = divmod(rank, 4 // len(self.folders))
            world = SimpleNamespace(
                rank=rank, node_rank=node, is_first_on_node=local_rank == 0, is_main=rank == 0, world_size=4,
                gather=group.gather, device=torch.device("cpu"), held_step=self.kept.get(rank),
                broadcast=lambda value, source: group.gather(value)[source],
                expected_snapshot=self.expected[rank], snapshot_is_shared=self.is_shared,
            )  # fmt: skip
            try:
                found[rank] = call(Snapshots(self.folders[node], generation=self.generation), world)
            except Exception as error:
                found[rank] = error  # type: ignore[call-overload]

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.distributed, "broadcast", group.send)
            ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join()
        return found

    def newest(self, **options: Any) -> list[Any]:
        """Return on each rank what it goes on from, and for which generation and attempt."""

        def call(snapshots: Snapshots, world: Any) -> Any:
            loaded = exchange.newest_of_all(snapshots, world, **options)
            return loaded, snapshots.generation, snapshots.attempt

        return self.go(call)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


def loaded_by(found: list[Any]) -> list[Loaded]:
    """What the ranks have loaded, which is one step's for one attempt, and the same but for the tensors."""
    assert not [each for each in found if isinstance(each, Exception)], found
    assert len({each[1:] for each in found}) == 1
    assert found[0][2], "the attempt has a number"
    loaded: list[Loaded] = [each[0] for each in found]
    assert len({(each.manifest.age, each.state["from"]) for each in loaded}) == 1
    assert {each.state["step"] for each in loaded} == {loaded[0].manifest.step}
    return loaded


def weights_of(loaded: list[Loaded]) -> list[float]:
    weights = [set(each.state["weights"].tolist()) for each in loaded]
    assert [len(each) for each in weights] == [1] * 4
    return [each.pop() for each in weights]


@pytest.mark.parametrize("is_mapped", [None, True])
def test_a_node_without_the_newest_is_sent_it_and_its_other_rank_reads_the_file(
    nodes: Nodes, is_mapped: bool | None
) -> None:
    nodes.hold(0, 4)
    nodes.hold(1, 6)
    loaded = loaded_by(nodes.newest(is_mapped=is_mapped))
    assert weights_of(loaded) == [6.0] * 4
    assert ["what rank 2 sent (" in each.source for each in loaded] == [True, True, False, False]
    mapped = ["mapped"] if is_mapped else []
    one, other = ["verified", *mapped], [*mapped, "nothing"]
    assert nodes.done == [[*one, "file", *one], ["nothing", *mapped], [*one, "nothing"], other]
    here, there = (Snapshots(folder).manifests() for folder in nodes.folders)
    assert [each.age for each in here] == [(0, 6), (0, 4)]
    assert here[0] == there[0]


def test_a_rank_that_is_not_to_write_does_not(nodes: Nodes) -> None:
    nodes.hold(1, 6)
    assert weights_of(loaded_by(nodes.newest(writes=False))) == [6.0] * 4
    assert [each[0] for each in nodes.done] == ["nothing", "nothing", "verified", "nothing"]
    assert [nodes.done[0][-1], nodes.done[1][-1]] == ["memory"] * 2
    assert not nodes.folders[0].exists()


def test_a_state_is_mapped_where_it_is_copied_to_a_gpu(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    monkeypatch.setattr(exchange, "_from_disks", lambda *_, is_mapped, **__: found.append(is_mapped))
    nodes.newest()

    def on_a_gpu(snapshots: Snapshots, world: Any) -> Any:
        world.device = torch.device("cuda:0")
        return exchange.newest_of_all(snapshots, world)

    nodes.go(on_a_gpu)
    assert found == [False] * 4 + [True] * 4


def test_a_node_whose_disk_takes_nothing_has_it_in_memory(nodes: Nodes) -> None:
    nodes.folders[0].parent.mkdir()
    nodes.folders[0].write_text("in place of the folder")
    nodes.hold(1, 6)
    loaded = loaded_by(nodes.newest())
    assert weights_of(loaded) == [6.0] * 4
    assert ["what rank 2 sent (" in each.source for each in loaded] == [True, True, False, False]
    assert [each[-2:] for each in nodes.done[:2]] == [["file", "memory"], ["nothing", "memory"]]
    assert [each[-1] for each in nodes.done[2:]] == ["nothing"] * 2


def test_nodes_that_share_a_folder_read_there_what_one_of_them_was_sent(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is there: it is not sent again to each."""
    nodes.hold(0, 6)
    nodes.folders[1:] = [nodes.folders[1]] * 3
    nodes.is_shared = True
    place = Snapshots._place

    def placed(*arguments: Any) -> None:
        time.sleep(0.1)
        place(*arguments)

    monkeypatch.setattr(Snapshots, "_place", placed)

    def call(snapshots: Snapshots, world: Any) -> Any:
        writes = exchange.writes_snapshots(snapshots, world)
        loaded = exchange.newest_of_all(snapshots, world, writes=writes)
        return loaded, writes, snapshots.attempt

    found = nodes.go(call)
    assert [writes for _, writes, _ in found] == [True, True, False, False]
    assert [each[0].state["step"] for each in found] == [6] * 4
    assert nodes.done[1:] == [["file", "verified"], ["nothing", "verified"], ["nothing", "verified"]]


def test_of_one_step_made_twice_all_have_the_same(nodes: Nodes) -> None:
    for node in (0, 1):
        nodes.hold(node, 6, attempt=f"of {node}")
    loaded = loaded_by(nodes.newest())
    assert [each.manifest.attempt for each in loaded] == ["of 0"] * 4
    assert Snapshots(nodes.folders[1]).manifests() == Snapshots(nodes.folders[0]).manifests()


def test_where_there_has_never_been_one_all_begin_at_step_0(nodes: Nodes) -> None:
    found = nodes.newest()
    assert [each[:2] for each in found] == [(None, 1)] * 4
    assert len({each[2] for each in found}) == 1


def test_where_one_was_and_none_is_nobody_begins_at_step_0(nodes: Nodes) -> None:
    nodes.expected[2] = "step 6 was committed"
    found = nodes.newest()
    assert [type(each) for each in found] == [NoneLoads] * 4
    assert "node1/snapshots: no snapshot is here, though step 6 was committed" in str(found[0])


@pytest.mark.parametrize(
    ("generation", "fence", "goes_on_as"), [(None, 0, 0), (None, 3, 3), (3, 3, 3), (1, 3, None)]
)
def test_a_generation_below_any_nodes_fence_does_not_go_on(
    nodes: Nodes, generation: int | None, fence: int, goes_on_as: int | None
) -> None:
    nodes.hold(0, 6)
    nodes.folders[1].mkdir(parents=True)
    (nodes.folders[1] / "fence").write_text(f"{fence}\n")
    nodes.generation = generation
    found = nodes.newest()
    if goes_on_as is None:
        assert [type(each) for each in found] == [Fenced] * 4
    else:
        loaded_by(found)
        assert found[0][1] == goes_on_as


def test_a_node_whose_fence_and_folder_cannot_be_read_goes_on_from_anothers(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.hold(1, 6)
    real = Fence.read

    def read(fence: Fence) -> int:
        if RANK.number < 2:
            raise OSError(5, "Input/output error")
        return real(fence)

    def newest_age(_: Snapshots) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Fence, "read", read)
    monkeypatch.setattr(Snapshots, "newest_age", newest_age)
    assert weights_of(loaded_by(nodes.newest())) == [6.0] * 4


@pytest.mark.parametrize(
    ("kept", "weights"),
    [
        ({1: (1, 5, "a"), 2: (1, 4, "a")}, [101.0] * 4),
        ({1: (1, 5, "a"), 2: (1, 5, "b")}, [101.0] * 4),
        ({2: (1, 5, "a"), 3: (1, 5, "a")}, [102.0, 102.0, 102.0, 103.0]),
        (dict.fromkeys(range(4), (1, 5, "a")), [100.0, 101.0, 102.0, 103.0]),
        ({3: (0, 6, "a")}, [103.0] * 4),
    ],
)
def test_what_ranks_have_kept_goes_before_a_snapshot_that_is_no_newer(
    nodes: Nodes, kept: dict[int, tuple[int, int, str]], weights: list[float]
) -> None:
    nodes.hold(1, 6)
    for rank, (generation, step, attempt) in kept.items():
        nodes.keep(rank, (generation, step), attempt)
    found = nodes.newest()
    loaded = loaded_by(found)
    assert weights_of(loaded) == weights
    source = min(rank for rank, each in kept.items() if each == max(kept.values(), key=lambda one: one[:2]))
    assert {each.source for each in loaded} == {f"what rank {source} has kept in memory"}
    assert {each.manifest.age for each in loaded} == {kept[source][:2]}
    assert {each.manifest.world_size for each in loaded} == {4}
    assert nodes.done == [[]] * 4, "no snapshot is looked at"


def test_a_newer_snapshot_goes_before_what_was_kept(nodes: Nodes) -> None:
    nodes.hold(1, 6)
    nodes.keep(0, (0, 5))
    loaded = loaded_by(nodes.newest())
    assert weights_of(loaded) == [6.0] * 4
    assert loaded[0].manifest.step == 6


@pytest.mark.parametrize("older", [None, 4, 5])
def test_where_the_newer_snapshot_is_damaged_what_was_kept_is_taken(nodes: Nodes, older: int | None) -> None:
    """Even if it arrives damaged once, or there is an older snapshot, or none."""
    nodes.hold(1, 6)
    nodes.damage(1)
    if older:
        nodes.hold(0, older)
    nodes.keep(0, (0, 5))
    nodes.damages += [3]
    assert weights_of(loaded_by(nodes.newest())) == [100.0] * 4


def test_what_arrives_damaged_is_sent_again_by_another_that_has_it(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (0, 2):
        nodes.keep(rank, (1, 5))
    nodes.damages += [3]
    assert weights_of(loaded_by(nodes.newest())) == [100.0, 100.0, 102.0, 102.0]
    assert caplog.text.count("what rank 0 has sent from its memory arrived damaged") == 1


@pytest.mark.parametrize("kept", [(0, 2), (0,)])
def test_who_gets_it_damaged_twice_ends_and_the_others_go_on(nodes: Nodes, kept: tuple[int, ...]) -> None:
    for rank in kept:
        nodes.keep(rank, (1, 5))
    if len(kept) > 1:
        nodes.hold(1, 6)  # it is older, and nobody goes back to it
    nodes.damages += [3, 3]
    *others, last = nodes.newest()
    assert type(last) is TrainingError
    assert f"what rank {kept[-1]} has sent from its memory arrived damaged" in str(last)
    assert [each[0].manifest.age for each in others] == [(1, 5)] * 3


def test_where_the_only_one_that_has_it_sends_it_damaged_twice_all_take_the_snapshot(nodes: Nodes) -> None:
    nodes.keep(0, (1, 5))
    nodes.hold(1, 6)
    nodes.damages += [3, 3]
    assert weights_of(loaded_by(nodes.newest())) == [6.0] * 4


def test_where_it_arrives_damaged_twice_and_no_snapshot_loads_nobody_begins_anew(nodes: Nodes) -> None:
    nodes.hold(1, 6)
    nodes.damage(1)
    nodes.keep(0, (0, 5))
    nodes.damages += [3, 3]
    *others, last = nodes.newest()
    assert type(last) is TrainingError
    assert weights_of([*(each[0] for each in others), others[0][0]]) == [100.0] * 4


def writers(nodes: Nodes) -> list[Any]:
    return nodes.go(exchange.writes_snapshots)


def test_each_node_writes_to_its_own_folder_and_one_rank_to_a_shared_one(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    assert writers(nodes) == [True, False, True, False]
    assert not nodes.folders[0].exists(), "nobody had to look"
    nodes.is_shared = True
    assert writers(nodes) == [True, False, True, False]
    assert caplog.text.count("is not seen by rank 2, 3: they keep snapshots of their own") == 1
    assert nodes.folders[0].stat().st_mode & 0o777 == 0o700
    caplog.clear()
    nodes.folders[1] = nodes.folders[0]
    assert writers(nodes) == [True, False, False, False]
    assert (caplog.text, list(nodes.folders[0].iterdir())) == ("", [])


def test_folders_that_nobody_said_to_be_one_are_looked_through_without_a_warning(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    assert nodes.go(exchange.lowest_seen) == [[0, 0, 2, 2]] * 4
    assert caplog.text == ""


def test_who_cannot_look_into_the_shared_folder_does_not_write_there(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.is_shared = True
    nodes.folders[1] = nodes.folders[0]
    real, blind = Path.stat, [2, 3]

    def stat(path: Path, **how: Any) -> Any:
        if path.name.startswith(".seen-") and RANK.number in blind:
            raise OSError(5, "Input/output error")
        return real(path, **how)

    monkeypatch.setattr(Path, "stat", stat)
    assert writers(nodes) == [True, False, False, False]
    assert "so this rank does not write there: [Errno 5]" in caplog.text
    blind[:] = range(4)
    assert writers(nodes) == [True, False, False, False], "one must"


def test_nodes_that_cannot_write_to_the_shared_folder_say_so(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.is_shared = True
    for folder in nodes.folders:
        folder.parent.mkdir()
        folder.write_text("in place of the folder")
    assert writers(nodes) == [True, False, True, False]
    assert caplog.text.count("cannot write to") == 2


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_node_that_can_write_nothing_takes_no_snapshot_that_arrives_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """As where the disk of the rank that sends it cannot read a part of it."""
    theirs = Snapshots(tmp_path / "theirs", generation=0)
    manifest = theirs.save({"x": torch.ones(9)}, step=5)
    assert manifest
    data = bytearray((theirs.folder / manifest.payload).read_bytes())
    data[len(data) // 2] ^= is_damaged
    (tmp_path / "ours").write_text("in place of the folder")

    def broadcast(*arguments: Any) -> None:
        if receive := arguments[-1]:
            receive(memoryview(data))

    monkeypatch.setattr(exchange, "_broadcast", broadcast)
    world: Any = SimpleNamespace(gather=lambda value: [value], is_first_on_node=True, node_rank=0)
    found = exchange._everywhere(
        Snapshots(tmp_path / "ours"), world, None, manifest, source=0, writes=True, is_mapped=False
    )
    assert found is None if is_damaged else found is not None and found.state["x"].eq(1).all()


def test_what_cannot_be_loaded_by_all_is_passed_over_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for none at all: the training would begin anew."""
    saved = Snapshots(tmp_path, generation=0)
    for step in (5, 6):
        assert saved.save({"x": torch.ones(9)}, step=step)

    def everywhere(snapshots: Snapshots, world: Any, own: Any, manifest: Any, **_: Any) -> Any:
        return own if manifest.step == 5 else None

    monkeypatch.setattr(exchange, "_everywhere", everywhere)
    of_rank_0 = {"x": Place(torch.float32, (9,)), "epoch": 1}
    monkeypatch.setattr(exchange, "_rest_of", lambda *_: of_rank_0)
    world: Any = SimpleNamespace(gather=lambda value: [value], is_first_on_node=True, node_rank=0)
    snapshots = Snapshots(tmp_path)
    found = exchange._from_disks(snapshots, world, "", 3, None, writes=True, is_mapped=False)
    assert found
    assert found.manifest.step == 5
    assert found.state["epoch"] == 1, "as on the rank whose snapshot it is"
    assert snapshots.generation == 3, "of the fence: with an older one it could save nothing"


def test_where_the_only_one_cannot_be_loaded_by_all_the_training_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Snapshots(tmp_path, generation=0).save({"x": torch.ones(9)}, step=6)
    monkeypatch.setattr(exchange, "_everywhere", lambda *_, **__: None)
    world: Any = SimpleNamespace(gather=lambda value: [value], is_first_on_node=True, node_rank=0)
    with pytest.raises(NoneLoads, match=r"g0000-s000000006\.json: rank 0 could read it once, and not again"):
        exchange._from_disks(Snapshots(tmp_path), world, "", 0, None, writes=True, is_mapped=False)


class Pair(NamedTuple):
    name: str
    tensor: torch.Tensor | None


def state_of(rank: int) -> dict[str, Any]:
    """One step's, whose tensors are equal, and here are not, to tell whose they are."""
    x = torch.full((2,), rank)
    return OrderedDict(
        weights=x,
        seen=Counter(cat=rank, **({"dog": 1} if rank else {})),
        order=list(range(rank, 3)),
        groups=[{"lr": rank, "moment": x}],
        pair=Pair(f"of {rank}", x),
        shape=torch.Size([rank, 2]),
        **({"stale": 1} if rank == 0 else {"best": {"loss": [0.5]}}),
    )


def test_values_that_are_no_tensors_are_another_ranks_and_the_tensors_stay_ones_own() -> None:
    loaded = Loaded(state_of(0), cast(Manifest, None), "")
    found = exchange._alike(loaded, without_tensors(state_of(1)), 1).state
    tensors = [found["weights"], found["groups"][0].pop("moment"), found["pair"].tensor]
    assert [each.tolist() for each in tensors] == [[0, 0]] * 3
    assert found["pair"].name == "of 1"
    wanted = {**state_of(1), "weights": tensors[0], "groups": [{"lr": 1}], "pair": found["pair"]}
    assert dict(found) == wanted
    assert [type(found[name]) for name in wanted] == [type(each) for each in wanted.values()]
    assert type(found) is OrderedDict


@pytest.mark.parametrize("own", [{}, {"groups": []}, {"groups": [{"lr": 0, "moment": None}]}])
def test_who_lacks_a_tensor_that_another_rank_has_goes_on_with_its_own_state(
    own: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = Loaded(own, cast(Manifest, None), "")
    assert exchange._alike(loaded, without_tensors({"groups": state_of(1)["groups"]}), 1) is loaded
    assert "rank 1's state has other tensors than this rank's" in caplog.text


def test_where_no_fence_can_be_read_nobody_trains() -> None:
    def said(fence: int | None) -> Any:
        return exchange._Said(fence, "" if fence else "the fence in /s cannot be read", "", None, None, "")

    assert exchange._newest_fence([said(None), said(2), said(1)]) == 2
    with pytest.raises(OSError, match="may train is not known: the fence in /s cannot be read"):
        exchange._newest_fence([said(None)] * 2)
