"""Snapshots go from node to node at the start: into files, read by all of a node's ranks; one copy where shared."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from free_ports import free_port
from test_training import finish, started

from nodekit.training import Snapshots

pytestmark = pytest.mark.slow

PROGRAM = """
import json, logging, sys, torch
from dataclasses import replace
from pathlib import Path
from nodekit.training import Fenced, Snapshots, World
from nodekit.training.snapshots import exchange, snapshot
from nodekit.training.snapshots.files import commit
from nodekit.training.process.kept import Kept
exchange._CHUNK_BYTES = 1000
commit.RETRY_S, unreadable, iterdir = 0.3, [], Path.iterdir
def listed(folder):
    if folder in unreadable:
        raise OSError(5, "Input/output error", str(folder))
    return iterdir(folder)
Path.iterdir = listed
stat, unseen = Path.stat, []
def looked(path, **how):
    if path.name.startswith(".seen-") and path.parent in unseen:
        raise OSError(5, "Input/output error", str(path))
    return stat(path, **how)
Path.stat = looked
verify, map_payload, reads = snapshot.verify, snapshot.map_payload, []
def verified(folder, manifest, name):
    reads.append("verified")
    verify(folder, manifest, name)
def mapped(path):
    reads.append("mapped")
    return map_payload(path)
snapshot.verify, snapshot.map_payload = verified, mapped
broadcast, passes = exchange._broadcast, []
def counted(*arguments):
    passes.append(getattr(getattr(arguments[-1], "__self__", None), "__class__", None).__name__)
    broadcast(*arguments)
exchange._broadcast = counted
class Damaged(exchange.TensorBytes):
    left = 0
    def __init__(self, tensors):
        super().__init__(tensors)
        self.is_damaged, Damaged.left = Damaged.left > 0, Damaged.left - 1
    def write(self, data):
        super().write(memoryview(bytearray(b"?" * len(data))) if self.is_damaged else data)
exchange.TensorBytes = Damaged
logging.basicConfig()
torch.set_default_device("meta")  # as a script's own that is not the CPU
with World.from_env() as world:
    for scenario in sorted(Path(sys.argv[1]).iterdir()):
        passes.clear()
        reads.clear()
        own = "node0" if (scenario / "is one folder").exists() else f"node{world.node_rank}"
        here = replace(world, snapshot_is_shared=(scenario / "is said to be shared").exists())
        snapshots = Snapshots(scenario / own / "snapshots", generation=1)
        if (scenario / f"{own} cannot be read").exists():
            unreadable.append(snapshots.folder)
        unseen[:] = [snapshots.folder] * (scenario / f"node{world.node_rank} cannot look").exists()
        if world.node_rank == 1 and (scenario / "was there").exists():
            here = replace(here, expected_snapshot=(scenario / "was there").read_text())
        said = {"scenario": scenario.name, "writes": exchange.writes_snapshots(snapshots, here)}
        if (path := scenario / f"rank {world.rank} keeps").exists():
            *age, attempt = path.read_text().split()
            age = tuple(map(int, age))
            weights = torch.full((2000,), world.rank, device="cpu")
            state = {"step": age[1], "weights": weights, "data": [{"epoch": world.rank}]}
            here = replace(here, kept=Kept(state, age, lambda: False, attempt))
        if world.rank == 3 and (scenario / "arrives damaged").exists():
            Damaged.left = int((scenario / "arrives damaged").read_text())
        writes = None if scenario.name == "joins" else said["writes"]
        try:
            found = exchange.newest_of_all(snapshots, here, writes=writes, is_mapped=True)
            said["weights"] = found and float(found.state["weights"][-1])
            said["step"] = found and found.state["step"]
            said["source"] = found and found.source
            said["data"] = found and found.state.get("data")
            said["attempt"] = snapshots.attempt
        except (Fenced, OSError, ValueError) as error:
            said["fenced"] = said["refused"] = f"{type(error).__name__}: {error}"
        print(json.dumps({**said, "passes": passes, "reads": reads}), flush=True)
"""


def hold(folder: Path, step: int, attempt: str = "") -> None:
    snapshots = Snapshots(folder, generation=0)
    snapshots.attempt = attempt
    assert snapshots.save({"step": step, "weights": torch.randn(2000)}, step=step)


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, list[dict[str, Any]]], list[str]]:
    """Two nodes of two ranks go through all scenarios: the folder, what each rank found by scenario, all output."""
    folder = tmp_path_factory.mktemp("exchange") / "it's; $HOME"
    for name in ("joins", "cannot write", "shared", "said to be shared", "fenced"):
        for node in ("node0", "node1"):
            (folder / name / node).mkdir(parents=True)
        hold(folder / name / "node1" / "snapshots", 6)
    kept = {
        "kept": {1: (1, 5, "a"), 2: (1, 4, "a")},
        "kept by all": dict.fromkeys(range(4), (1, 5, "a")),
        "kept of two attempts": {0: (1, 5, "a"), 1: (1, 5, "a"), 2: (1, 5, "b"), 3: (1, 5, "b")},
        "kept, and a snapshot is newer": {1: (0, 5, "a"), 2: (0, 5, "a")},
        "kept, and a newer snapshot is damaged": {1: (0, 5, "a"), 2: (0, 5, "a")},
        "kept, and a folder cannot be read": {3: (0, 5, "a")},
        "kept, and damaged on the way": {0: (1, 5, "a"), 2: (1, 5, "a")},
        "kept, and damaged again": {0: (1, 5, "a"), 2: (1, 5, "a")},
        "kept by one, and damaged again": {0: (1, 5, "a")},
        "kept by one, damaged again, and no newer snapshot loads": {0: (0, 5, "a")},
    }
    for name, ranks in kept.items():
        (folder / name / "node0").mkdir(parents=True)
        hold(folder / name / "node1" / "snapshots", 6)
        for rank, made in ranks.items():
            (folder / name / f"rank {rank} keeps").write_text(" ".join(map(str, made)))
    (folder / "kept, and a folder cannot be read" / "node1 cannot be read").touch()
    for name in (
        "kept, and a newer snapshot is damaged",
        "kept by one, damaged again, and no newer snapshot loads",
    ):
        damaged = folder / name / "node1" / "snapshots"
        for path in damaged.glob("*.pt"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        hold(damaged, 4)
    (folder / "kept, and damaged on the way" / "arrives damaged").write_text("1")
    for name in (
        "kept, and damaged again",
        "kept by one, and damaged again",
        "kept by one, damaged again, and no newer snapshot loads",
    ):
        (folder / name / "arrives damaged").write_text("2")
    for node in ("node0", "node1"):
        hold(folder / "two attempts" / node / "snapshots", 6, attempt=node)
    for name in ("one cannot be read", "none can be read", "was there", "a newer kit's"):
        for node in ("node0", "node1"):
            (folder / name / node).mkdir(parents=True)
    hold(folder / "one cannot be read" / "node1" / "snapshots", 6)
    (folder / "one cannot be read" / "node0 cannot be read").touch()
    (folder / "none can be read" / "node0 cannot be read").touch()
    (folder / "was there" / "was there").write_text("step 6 was committed")
    for node, step in (("node0", 6), ("node1", 4)):
        hold(folder / "a newer kit's" / node / "snapshots", step)
    newest = folder / "a newer kit's" / "node0" / "snapshots" / "g0000-s000000006.json"
    newest.write_text(json.dumps({**json.loads(newest.read_text()), "engine": "fsdp"}))
    (folder / "cannot write" / "node0" / "snapshots").write_text("a file")
    hold(folder / "joins" / "node0" / "snapshots", 4)
    (folder / "shared, unseen by one" / "node0").mkdir(parents=True)
    (folder / "shared, unseen by one" / "node1 cannot look").touch()
    for name in ("shared", "said to be shared", "shared, unseen by one"):
        (folder / name / "is said to be shared").touch()
    for name in ("shared", "shared, unseen by one"):
        (folder / name / "is one folder").touch()
        hold(folder / name / "node0" / "snapshots", 7)
    (folder / "fenced" / "node1" / "snapshots" / "fence").write_text("3\n")
    program = folder.parent / "exchange.py"
    program.write_text(PROGRAM)
    port = free_port()
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                started(
                    [warm_python.program(), str(program), str(folder)],
                    RANK=rank, WORLD_SIZE=4, LOCAL_RANK=rank % 2, LOCAL_WORLD_SIZE=2, GROUP_RANK=rank // 2,
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                )
            )
            for rank in range(4)
        ]  # fmt: skip
        outputs = [finish(process) for process in processes]
    said: dict[str, list[dict[str, Any]]] = {}
    for output in outputs:
        for line in output.splitlines():
            if line.startswith("{"):
                values = json.loads(line)
                said.setdefault(values["scenario"], []).append(values)
    assert {name: len(ranks) for name, ranks in said.items()} == {path.name: 4 for path in folder.iterdir()}
    return folder, said, outputs


Outcome = tuple[Path, dict[str, list[dict[str, Any]]], list[str]]


def test_a_joining_node_writes_it_to_its_disk_and_its_other_ranks_read_it_there(outcome: Outcome) -> None:
    folder, said, _ = outcome
    ranks = said["joins"]
    assert [rank["step"] for rank in ranks] == [6] * 4
    assert [rank["passes"] for rank in ranks] == [["HashingFile"], ["NoneType"], ["NoneType"], ["NoneType"]]
    assert ["what rank 2 sent" in rank["source"] for rank in ranks] == [True, True, False, False]
    first, second = ["verified", "mapped"], ["mapped"]
    assert [rank["reads"] for rank in ranks] == [first * 2, second, first, second], (
        "node 0 also its older one"
    )
    ages = [Snapshots(folder / "joins" / node / "snapshots").manifests() for node in ("node0", "node1")]
    assert [each.age for each in ages[0]] == [(0, 6), (0, 4)]
    assert ages[0][0] == ages[1][0], "the manifest, too, is as it was"
    assert not list((folder / "joins").glob("*/snapshots/.tmp-*"))


def test_of_one_step_that_two_attempts_have_made_all_ranks_load_the_same(outcome: Outcome) -> None:
    """It was done again, in another rounding, while a node was out of reach."""
    folder, said, _ = outcome
    ranks = said["two attempts"]
    assert len({rank["weights"] for rank in ranks}) == 1
    first, second = (
        Snapshots(folder / "two attempts" / node / "snapshots").manifests() for node in ("node0", "node1")
    )
    assert first == second
    assert [each.attempt for each in first] == ["node0"]


def test_a_node_that_cannot_write_it_keeps_it_in_memory(outcome: Outcome) -> None:
    _, said, outputs = outcome
    ranks = said["cannot write"]
    assert [rank["step"] for rank in ranks] == [6] * 4
    assert [rank["passes"][1] for rank in ranks] == ["BytesIO", "BytesIO", "NoneType", "NoneType"]
    assert "no snapshot of step 6, sent by another node" in outputs[0]


def test_in_a_shared_folder_one_rank_writes_and_nothing_is_sent(outcome: Outcome) -> None:
    folder, said, _ = outcome
    ranks = said["shared"]
    assert [rank["writes"] for rank in ranks] == [True, False, False, False]
    assert [(rank["step"], rank["passes"]) for rank in ranks] == [(7, [])] * 4
    assert [rank["reads"] for rank in ranks] == [["verified", "mapped"], ["mapped"]] * 2, "once on each node"
    assert not list((folder / "shared").glob("*/snapshots/.seen-*"))


def test_a_folder_that_is_only_said_to_be_shared_is_found_out(outcome: Outcome) -> None:
    _, said, outputs = outcome
    ranks = said["said to be shared"]
    assert [rank["writes"] for rank in ranks] == [True, False, True, False]
    assert [rank["step"] for rank in ranks] == [6] * 4
    assert "what rank 0 writes there is not seen by rank 2, 3: they keep snapshots of their own" in outputs[0]


def test_a_node_that_cannot_look_into_the_shared_folder_does_not_write_there_too(outcome: Outcome) -> None:
    _, said, outputs = outcome
    assert [rank["writes"] for rank in said["shared, unseen by one"]] == [True, False, False, False]
    assert "cannot look into" in outputs[2]


def test_what_all_ranks_save_from_here_on_is_of_one_attempt(outcome: Outcome) -> None:
    """Each has drawn a number for it: states of one step that differ are told from those that do not by that."""
    _, said, _ = outcome
    told = [{rank["attempt"] for rank in said[name]} for name in ("joins", "shared", "kept")]
    assert [len(each) for each in told] == [1, 1, 1]
    assert len(set.union(*told)) == 3


def test_a_fenced_generation_starts_on_no_rank(outcome: Outcome) -> None:
    _, said, _ = outcome
    assert ["generation 1 is over" in rank["fenced"] for rank in said["fenced"]] == [True] * 4


def test_a_node_that_cannot_read_its_folder_takes_it_from_another(outcome: Outcome) -> None:
    _, said, _ = outcome
    assert [rank["step"] for rank in said["one cannot be read"]] == [6] * 4


@pytest.mark.parametrize(
    ("scenario", "wanted"),
    [
        ("none can be read", r"NoneLoads: .*at step 0 instead: .*node0/snapshots: .*Input/output error"),
        (
            "was there",
            r"NoneLoads: .*node0/snapshots: no snapshot is here, though step 6 was .*node1/snapshots: no",
        ),
        ("a newer kit's", r"NewerKit: .*/node0/snapshots/g0000-s000000006.json: a newer nodekit wrote it"),
    ],
)
def test_what_is_known_or_feared_to_be_there_is_not_left_behind_on_any_rank(
    outcome: Outcome, scenario: str, wanted: str
) -> None:
    _, said, _ = outcome
    assert [bool(re.search(wanted, rank.get("refused", ""))) for rank in said[scenario]] == [True] * 4, said[
        scenario
    ]


@pytest.mark.parametrize(
    ("scenario", "step", "weights", "source"),
    [
        ("kept", 5, [1.0] * 4, "what rank 1 has kept in memory"),
        ("kept of two attempts", 5, [0.0, 1.0, 0.0, 0.0], "what rank 0 has kept in memory"),
        ("kept by all", 5, [0.0, 1.0, 2.0, 3.0], "what rank 0 has kept in memory"),
        ("kept, and a folder cannot be read", 5, [3.0] * 4, "what rank 3 has kept in memory"),
        ("kept, and damaged on the way", 5, [0.0, 0.0, 2.0, 2.0], "what rank 0 has kept in memory"),
        ("kept by one, and damaged again", 6, None, "g0000-s000000006"),
        ("kept, and a snapshot is newer", 6, None, "g0000-s000000006"),
        ("kept, and a newer snapshot is damaged", 5, None, "what rank 1 has kept in memory"),
    ],
)
def test_the_newest_is_taken_of_what_ranks_have_kept_and_of_the_snapshots(
    outcome: Outcome, scenario: str, step: int, weights: list[float] | None, source: str
) -> None:
    """A rank that has the newest keeps its own tensors: none is sent where all do."""
    _, said, _ = outcome
    ranks = said[scenario]
    assert [rank["step"] for rank in ranks] == [step] * 4
    assert all(source in rank["source"] for rank in ranks)
    if weights is not None:
        assert [rank["weights"] for rank in ranks] == weights
        same = [{"epoch": int(re.findall(r"rank (\d)", source)[0])}]
        assert [rank["data"] for rank in ranks] == [same] * 4, "what is no tensor is the same on all ranks"
        assert [rank["reads"] for rank in ranks] == [[]] * 4


def test_who_gets_damaged_what_two_have_sent_ends_and_the_others_have_it(outcome: Outcome) -> None:
    """They do not go back to a snapshot for it: another process will take its place."""
    _, said, output = outcome
    *others, last = said["kept, and damaged again"]
    assert [(rank["step"], rank["weights"]) for rank in others] == [(5, 0.0), (5, 0.0), (5, 2.0)]
    assert last["refused"].startswith(
        "TrainingError: what rank 2 has sent from its memory arrived damaged, and so"
    )
    warned = "what rank 2 has sent from its memory arrived damaged (by its SHA-256)"
    assert [warned in each for each in output] == [False, False, False, True]


def test_where_no_newer_snapshot_loads_nobody_begins_anew_for_one_that_gets_damaged_what_was_kept(
    outcome: Outcome,
) -> None:
    *others, last = outcome[1]["kept by one, damaged again, and no newer snapshot loads"]
    assert [(rank["step"], rank["weights"]) for rank in others] == [(5, 0.0)] * 3
    assert last["refused"].startswith("TrainingError: what rank 0 has sent from its memory arrived damaged")
