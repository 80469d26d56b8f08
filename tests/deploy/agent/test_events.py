"""Events: gathered from the nodes once each, whoever gathers; torn lines; what an agent notes by itself."""

import ast
import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from agents import Agents, until
from disks import full, small_disk
from fake_nvml import FakeNvml
from places import ROOT

from nodekit.deploy.agent.telemetry import event_log, notes
from nodekit.deploy.agent.telemetry.event_log import EventLog
from nodekit.deploy.agent.telemetry.notes import Notes, parse_progress, pause_s
from nodekit.deploy.agent.telemetry.usage import Usage
from nodekit.deploy.host import current_status, files, schema
from nodekit.deploy.host.logs import hostfollow
from nodekit.deploy.host.node import status
from nodekit.deploy.records import events
from nodekit.deploy.story.status import status_line


def write(folder: Path, *lines: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / events.FILE).open("a") as file:
        file.writelines(json.dumps({"run": "r", "node": folder.name, **line}) + "\n" for line in lines)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


def gather(gatherer: events.Gatherer, folder: Path, *, clock_offset: float = 0.0) -> None:
    found = hostfollow.events(str(folder), *gatherer.at(folder.name))
    gatherer.add_of_node(folder.name, found, clock_offset=clock_offset)


def kinds(home: Path) -> list[str]:
    return [event.kind for event in events.read(home / "run")]


def test_each_event_of_a_node_is_gathered_once_by_whoever_supervises(home: Path):
    write(home / "gpu1", {"time": 10.0, "kind": "agent-started"})
    first = events.Gatherer(home / "run")
    gather(first, home / "gpu1", clock_offset=2.0)
    write(home / "gpu1", {"time": 11.0, "kind": "rendezvous"})
    second = events.Gatherer(home / "run")  # it takes over
    gather(second, home / "gpu1", clock_offset=2.0)
    gather(second, home / "gpu1", clock_offset=2.0)
    gather(first, home / "gpu1", clock_offset=2.0)  # and the first one was not gone, after all
    assert kinds(home) == ["agent-started", "rendezvous"]
    assert [event.time for event in events.read(home / "run")] == [8.0, 9.0]


def test_a_node_with_a_new_disk_is_read_from_its_beginning(home: Path):
    write(home / "gpu1", {"time": 10.0, "kind": "agent-started"}, {"time": 11.0, "kind": "rendezvous"})
    gatherer = events.Gatherer(home / "run")
    gather(gatherer, home / "gpu1")
    (home / "gpu1" / events.FILE).unlink()
    write(home / "gpu1", {"time": 20.0, "kind": "agent-started"})
    gather(gatherer, home / "gpu1")
    assert kinds(home) == ["agent-started", "rendezvous", "agent-started"]


def test_a_node_whose_events_a_power_loss_has_cut_short_is_read_on_from_there(home: Path):
    lines = [{"time": 10.0 + number, "kind": "sample", "step": number} for number in range(9)]
    write(home / "gpu1", *lines)
    gatherer = events.Gatherer(home / "run")
    for _ in range(2):  # it may happen more than once
        gather(gatherer, home / "gpu1")
        os.truncate(home / "gpu1" / events.FILE, 130)  # in the middle of the second one
        gather(gatherer, home / "gpu1")  # the host is back, and has no agent yet
        files.end_torn_line(str(home / "gpu1" / events.FILE))
        write(home / "gpu1", {"time": 20.0, "kind": "agent-started"})
        gather(gatherer, home / "gpu1")
        write(home / "gpu1", {"time": 21.0, "kind": "rendezvous"})
        gather(events.Gatherer(home / "run"), home / "gpu1")  # who takes over goes on where it was left
        gatherer = events.Gatherer(home / "run")
    assert kinds(home) == ["sample"] * 9 + ["agent-started", "agent-started", "rendezvous", "rendezvous"]


def test_events_are_not_gathered_again_where_a_power_loss_has_spoilt_the_first_of_them(home: Path):
    write(home / "gpu1", *({"time": 10.0 + number, "kind": "sample"} for number in range(3)))
    gatherer = events.Gatherer(home / "run")
    gather(gatherer, home / "gpu1")
    with (home / "gpu1" / events.FILE).open("rb+") as file:
        file.write(bytes(20))  # a block that was never written holds zeros
    write(home / "gpu1", {"time": 20.0, "kind": "agent-started"})
    gather(gatherer, home / "gpu1")
    write(home / "gpu1", {"time": 21.0, "kind": "rendezvous"})
    gather(events.Gatherer(home / "run"), home / "gpu1")
    assert kinds(home) == ["sample"] * 3 + ["agent-started", "rendezvous"]


@pytest.mark.parametrize("set_s", [86_400.0, -86_400.0])
def test_a_nodes_clock_that_is_set_moves_none_of_its_events_by_a_day(home: Path, set_s: float):
    began = time.time() - 50
    write(home / "gpu1", {"time": began, "kind": "agent-started"}, {"time": began + 4, "kind": "rendezvous"})
    gatherer = events.Gatherer(home / "run")
    gather(gatherer, home / "gpu1")
    assert gatherer.clock_offset("gpu1", 0.0) == 0.0
    when = began + 8 + set_s
    write(
        home / "gpu1",
        {"time": when, "kind": "worker-failed", "when": when - 1},
        {"time": when + 2, "kind": "said"},
    )
    gather(gatherer, home / "gpu1")
    found = events.read(home / "run")
    assert [event.kind for event in found] == ["agent-started", "rendezvous", "worker-failed", "said"]
    assert all(began <= event.time <= time.time() + 5 for event in found)
    assert found[2].get("when") == pytest.approx(found[2].time - 1)
    assert gatherer.clock_offset("gpu1", 0.0) == pytest.approx(set_s, abs=60)
    assert gatherer.clock_offset("gpu1", 3.0) == 3.0  # it was measured anew
    write(home / "gpu1", {"time": when + 4, "kind": "said"})
    gather(events.Gatherer(home / "run"), home / "gpu1")  # who takes over finds that out anew
    assert abs(events.read(home / "run")[-1].time - time.time()) < 60


def test_an_event_that_is_to_come_takes_no_clock_for_set(home: Path):
    """Of an earlier kit, or of before our own clock was set back."""
    told = {"kind": "said", "node": "gpu1", "at": ["1.0", 10]}
    write(home / "run", {**told, "time": time.time() + 86_400})
    gatherer = events.Gatherer(home / "run")
    for _ in range(3):
        write(home / "gpu1", {"time": time.time(), "kind": "said"})
        gather(gatherer, home / "gpu1")
        assert gatherer.clock_offset("gpu1", 0.0) == 0.0


def test_a_torn_line_costs_only_itself(home: Path):
    path = home / "run" / events.FILE
    path.write_text('{"run": "r", "time": 1.0, "node": null, "kind": "said"}\n{"run": "r", "ti')
    follower = events.Follower(home / "run")
    assert [event.kind for event in follower.more()] == ["said"]
    events.Gatherer(home / "run")
    write(home / "run", {"time": 2.0, "node": None, "kind": "reached", "about": "gpu1"})
    assert [event.about for event in follower.more()] == ["gpu1"]
    assert kinds(home) == ["said", "reached"]


def test_events_are_followed_in_the_order_they_came_in(home: Path):
    gatherer = events.Gatherer(home / "run")
    write(home / "gpu1", {"time": 3610.0, "kind": "agent-started"}, {"time": 11.0, "kind": "rendezvous"})
    gather(gatherer, home / "gpu1")  # whose clock was an hour ahead for a moment
    write(home / "run", {"time": 5.0, "node": None, "kind": "said"})
    found = events.Follower(home / "run").more()
    assert [event.kind for event in found] == ["agent-started", "rendezvous", "said"]
    assert [event.end for event in found][-1] == (home / "run" / events.FILE).stat().st_size
    assert sorted({event.end for event in found}) == [event.end for event in found]

    size = (home / "run" / events.FILE).stat().st_size
    gather(events.Gatherer(home / "run"), home / "gpu1")  # who takes over goes on where that node was left
    assert (home / "run" / events.FILE).stat().st_size == size


def test_what_two_have_gathered_is_followed_once(home: Path):
    write(home / "gpu1", {"time": 10.0, "kind": "agent-started"})
    first, second = events.Gatherer(home / "run"), events.Gatherer(home / "run")
    follower = events.Follower(home / "run")
    gather(first, home / "gpu1")
    assert len(follower.more()) == 1
    gather(second, home / "gpu1")
    assert follower.more() == []


def test_events_wait_for_room_on_the_disk(tmp_path: Path):
    with small_disk(tmp_path / "small"):
        home = tmp_path / "small"
        (home / "run").mkdir()
        gatherer = events.Gatherer(home / "run")
        write(home / "run", {"time": 1.0, "node": None, "kind": "said", "text": "x" * 3000})
        write(tmp_path / "gpu1", {"time": 2.0, "kind": "agent-started", "text": "y" * 3000})
        with full(home):
            gather(gatherer, tmp_path / "gpu1")  # the page is half full: the line would fit in part
            assert not gatherer.add(b"{}\n")
            assert kinds(home) == ["said"]
            assert (home / "run" / events.FILE).read_bytes().endswith(b"\n")
        assert gatherer.add(json.dumps({"time": 3.0, "node": None, "kind": "reached"}).encode() + b"\n")
        assert kinds(home) == ["said", "agent-started", "reached"]
        assert gatherer.num_lost == 0


def test_a_status_that_finds_no_room_spoils_no_event(tmp_path: Path):
    with small_disk(tmp_path / "small"):
        gatherer = events.Gatherer(tmp_path / "small")
        write(tmp_path / "small", {"time": 1.0, "node": None, "kind": "said", "text": "x" * 3600})
        status = {"run": "r", "time": 2.0, "state": "running"}
        with full(tmp_path / "small"):
            gatherer.heard("gpu1", status, clock_offset=0.0)  # half of it would fit into the page
        assert gatherer.add(json.dumps({"time": 3.0, "node": None, "kind": "reached"}).encode() + b"\n")
        assert [event.kind for event in events.read(tmp_path / "small")] == ["said", "reached"]
        gatherer.heard("gpu1", status, clock_offset=0.0)
        assert events.now(tmp_path / "small")["gpu1"]["state"] == "running"


def test_as_many_events_as_can_be_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events, "MAX_KEPT", 3)
    with small_disk(tmp_path / "small"):
        gatherer = events.Gatherer(tmp_path / "small")
        line = json.dumps({"time": 1.0, "node": None, "kind": "said", "text": "x" * 5000}).encode() + b"\n"
        with full(tmp_path / "small"):
            assert [gatherer.add(line) for _ in range(5)] == [False] * 5
        assert gatherer.add()
        assert (len(events.read(tmp_path / "small")), gatherer.num_lost) == (3, 2)


def test_a_line_that_is_being_written_is_waited_for(home: Path):
    write(home / "gpu1", {"time": 1.0, "kind": "agent-started"})
    with (home / "gpu1" / events.FILE).open("a") as file:
        file.write('{"run": "r", "time": 2.0')
        file.flush()
        gatherer = events.Gatherer(home / "run")
        gather(gatherer, home / "gpu1")
        file.write(', "node": "gpu1", "kind": "first-step", "step": 1}\n')
    gather(gatherer, home / "gpu1")
    assert kinds(home) == ["agent-started", "first-step"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("120/500 epoch 1 loss 0.5231", (120, 500, 0.5231)),
        ("7", (7, None, None)),
        ("7 Loss=1.5e-3", (7, None, 0.0015)),
        ("8/9 loss: nan", (8, 9, None)),
        ("8/9 closs 3", (8, 9, None)),
        ("", (None, None, None)),
    ],
)
def test_what_a_progress_file_says(text: str, found: tuple[int | None, int | None, float | None]):
    assert tuple(parse_progress(text).values()) == found


def test_every_kind_is_documented():
    """Those that the code names, and those of the table of what the supervisor does, which it names by class."""
    root = ROOT
    said = set()
    for path in [*(root / "deploy").rglob("*.py"), *(root / "slurm").rglob("*.py")]:
        names = r"\.event|\._note"
        if path.stem in (
            "notes",
            "keepalive",
            "replicas",
            "logbook",
        ):  # they are handed the agent's record.event
            names += r"|\._say|\._tell"
        said |= set(re.findall(rf'(?:{names})\(\s*"([a-z]+(?:-[a-z]+)*)"', path.read_text()))
    assert len(said) > 25
    documented = set(re.findall(r"`([a-z-]+)`", (root / "docs/events.md").read_text()))
    assert said <= documented


def test_what_a_node_does_now_is_an_event_that_replaces_the_one_before(agents: Agents):
    spec = agents.spec("n0")
    folder = Path(spec.node_dir)
    folder.mkdir()
    record = EventLog(spec)
    for state in ("rendezvous", "running"):
        record.update(state=state)
        lines = (folder / events.FILE).read_text().splitlines()
        (now,) = [event for event in map(events.parse, lines) if event and event.kind == "status"]
        assert (now.node, now.get("state")) == ("n0", state)
        assert now.time == pytest.approx(time.time(), abs=60)
    record.update(copying=True)
    record.end("stopped")
    assert [event.kind for event in events.read(folder)] == ["agent-started", "sample", "agent-ended"]
    assert events.now(folder)["n0"]["copying"] is False  # its agent ends after that


def test_a_look_changes_the_status_once(agents: Agents, monkeypatch: pytest.MonkeyPatch):
    spec = agents.spec("n0")
    folder = Path(spec.node_dir)
    folder.mkdir()
    record = EventLog(spec)
    record.end("stopped")  # nothing else looks any more
    (folder / "progress/rank0").write_text("7/9 loss 1.0\n")
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(notes, "SAMPLE_S", 0.0)
    monkeypatch.setattr(
        current_status.StatusFile,
        "write",
        lambda _, status: seen.append((status["progress"], status["usage"]["memory"])),
    )
    record.look()
    assert [(progress, memory > 0) for progress, memory in seen] == [("7/9 loss 1.0", True)]


def test_what_was_set_aside_for_a_full_disk_is_so_again_when_there_is_room(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
):
    spec = agents.spec("n0")
    reserve, free = Path(spec.node_dir) / "reserve", os.statvfs_result([512] * 10)
    Path(spec.node_dir).mkdir()
    record = EventLog(spec)
    append, errors = files.append_private, [OSError(errno.ENOSPC, "full")]

    def append_once_more(path: str, data: bytes) -> None:
        if errors:
            raise errors.pop()
        append(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: free)
        patch.setattr(files, "append_private", append_once_more)
        record.event("logs-cut")
        record.event("logs-cut")
        assert not reserve.exists(), "it has not given room up to take it back"
    record.event("logs-cut")
    assert reserve.stat().st_size == event_log.RESERVE_BYTES


def test_a_clean_up_of_old_files_ends_no_agent_and_its_ranks_progress_is_read_again(agents: Agents):
    spec = agents.spec("n0")
    folder = Path(spec.node_dir)
    folder.mkdir()
    record = EventLog(spec)
    record.begin("0.0", ranks=[0], group_rank=0, log_of_rank_0="")
    for name in ("logs", "progress", "told", "flight"):
        shutil.rmtree(folder / name)
    record.look()
    (folder / "progress/rank0").write_text("7/9\n")
    record.look()
    assert record.step == 7
    shutil.rmtree(folder / "progress")
    record.begin("0.1", ranks=[0], group_rank=0, log_of_rank_0="")
    assert {each.name for each in folder.iterdir()} >= {"logs", "progress", "told", "flight"}
    record.end("stopped")


def test_a_node_that_can_write_nothing_is_told_so_by_its_host(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its agent cannot; the ranks may train on."""
    disk = tmp_path / "disk"
    with small_disk(disk):
        spec = agents.spec("n0")
        record = EventLog(dataclasses.replace(spec, node_dir=str(disk)))
        record.update(state="running", rank=0, world_size=1, progress="7/9", progress_time=time.time())
        assert not record.cannot_be_told()
        assert "unwritable" not in status.status(str(disk))
        record._ended.set()
        monkeypatch.setattr(status, "SILENT_S", -1.0)
        assert "unwritable" not in status.status(str(disk))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert record.cannot_be_told()
        line = status_line(status.status(str(disk)), now=time.time() + 30)
    assert f"(30 s ago)  nothing can be written to {disk}: Read-only file system; see to that disk" in line


def test_what_rank_0_prints_is_a_guess_and_no_progress(agents: Agents):
    spec = agents.spec("n0")
    folder = Path(spec.node_dir)
    folder.mkdir()
    record = EventLog(spec)
    log = folder / "logs/rank0-attempt0.0.log"
    log.write_text("iter 100: loss 3.1405, time 200.15ms\n")
    record.begin("0.0", ranks=[0], group_rank=0, log_of_rank_0=str(log))
    record.update(state="running", rank=0, world_size=2)

    def now() -> dict[str, Any]:
        record.look()
        return current_status.statuses(str(folder))["n0"]

    seen = now()
    assert seen["guess"] == {"step": 100, "total_steps": None, "epoch": None, "loss": 3.1405}
    assert (seen["progress"], seen["progress_time"], record.step) == (None, None, None)
    assert status_line(seen, now=0.0).endswith("  rank 0 of 2  ~step 100, loss 3.14")

    (folder / "progress/rank0").write_text("7/9\n")
    seen = now()
    assert (seen["progress"], seen["guess"]) == ("7/9", None), "what it tells itself is no guess"

    record.begin("0.1", ranks=[1], group_rank=1, log_of_rank_0=str(log))
    assert now()["guess"] is None, "rank 0 is another node's now"
    record.end("stopped")
    assert not [each for each in events.read(folder) if each.kind == "sample" and each.get("step") == 100]


def test_of_a_result_that_is_no_number_nothing_is_recorded_since_json_has_none(agents: Agents):
    spec = agents.spec("n0")
    folder = Path(spec.node_dir)
    (folder / "output").mkdir(parents=True)
    record = EventLog(spec)
    (folder / "output/result.json").write_text(
        '{"accuracy": 0.5, "loss": NaN, "perplexity": Infinity, "by": "me"}'
    )
    record.end("succeeded")
    (ended,) = [each for each in events.read(folder) if each.kind == "agent-ended"]
    assert ended.get("result") == {"accuracy": 0.5, "by": "me"}


def test_a_look_that_is_asked_for_is_not_waited_for(agents: Agents, monkeypatch: pytest.MonkeyPatch):
    # Longer than a test may take.
    monkeypatch.setattr("nodekit.deploy.agent.telemetry.event_log.MAX_STATUS_INTERVAL_S", 600.0)
    spec = agents.spec("n0")
    folder = Path(spec.node_dir)
    folder.mkdir()
    record = EventLog(spec)
    (folder / "progress/rank0").write_text("7/9 loss 1.0\n")
    record.look_soon()
    until(lambda: record.step == 7)
    record.end("stopped")


def test_every_field_of_a_status_is_documented():
    root = ROOT
    writers, said = ("self", "record", "self._record", "self._status"), set()
    for path in (root / "deploy/agent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=of, attr="update" | "end"), keywords=given) if (
                    ast.unparse(of) in writers
                ):
                    said |= {each.arg for each in given if each.arg}
                case ast.AnnAssign(target=ast.Attribute(attr="_status"), value=ast.Dict(keys=keys)):
                    said |= {ast.literal_eval(key) for key in keys if key}
    assert len(said) > 15
    text = (root / "docs/events.md").read_text()
    table = text.partition("## Node status")[2].partition("## Events from")[0]
    assert said <= set(re.findall(r"`(\w+)`", table))


def test_every_kind_of_event_is_documented_and_no_other():
    text = (ROOT / "docs/events.md").read_text()
    of_node = text.partition("## Events of a node")[2].partition("## Node status")[0]
    rows = re.findall(
        r"^\| ((?:`[a-z-]+`(?:, )?)+) +\|", of_node + text.partition("## Events of the supervisor")[2], re.M
    )
    assert set(re.findall(r"`([a-z-]+)`", " ".join(rows))) == set(get_args(schema.EventKind))


def test_events_and_statuses_of_before_there_was_a_version_are_read(home: Path):
    line = {"run": "r", "node": "n0", "time": 1.0, "kind": "agent-started"}
    (home / "run" / events.FILE).write_text(json.dumps(line) + "\n")
    current_status.StatusFile(str(home / "run" / events.FILE)).write({**line, "state": "running"})
    assert kinds(home) == ["agent-started"]
    assert events.now(home / "run")["n0"]["state"] == "running"


def test_a_week_has_few_samples_however_many_nodes():
    for num_nodes in (1, 8, 64):
        now, count = 0.0, 0
        while now < 7 * 86_400:
            now, count = now + pause_s(now, num_nodes), count + 1
        assert count * num_nodes < 50_000
        assert pause_s(60, num_nodes) == 2.0  # and a short run has enough of them


class Said:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = tmp_path / "told"
        self.snapshots = tmp_path / "snapshots"
        self.told.mkdir()
        self.snapshots.mkdir()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.now = 1000.0
        monkeypatch.setattr(notes.time, "monotonic", lambda: self.now)
        self.notes = Notes(
            say=lambda kind, **fields: self.events.append((kind, fields)),
            told=self.told,
            snapshots=self.snapshots,
            usage=lambda: {"cpu": 0.5},
            num_nodes=1,
        )

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for each, fields in self.events if each == kind]

    def tell(self, **fields: Any) -> None:
        with (self.told / "rank0").open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def commit(self, step: int) -> None:
        name = f"g0000-s{step:09d}.json"
        (self.snapshots / name).write_text(json.dumps({"size_bytes": {"a": 3, "b": 4}}))


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Said:
    return Said(tmp_path, monkeypatch)


def test_what_ranks_tell_becomes_events_and_what_is_no_such_thing_does_not(said: Said):
    said.tell(kind="resumed", step=3)  # of an earlier attempt
    said.notes.begin("0.1", sees_snapshots=True)
    said.tell(kind="resumed", step=40, time=time.time())
    said.tell(kind="evaluation", step=50, epoch=2, metrics={"accuracy": 0.5, "bad": "x", "nan": float("nan")})
    bad = {"what": "loss", "value": "nan", "action": "stop"}
    said.tell(kind="not-finite", step=51, ranks=[3, "x"], **bad)
    said.tell(kind="not-finite", step=52, ranks="all", **bad)
    said.tell(kind="run-ended", step=50, state="failed")
    said.tell(kind="resumed", step="far", text="x" * 9000)
    said.notes.look("50/100 loss 0.3", is_training=True)
    assert [each["step"] for each in said.of("resumed")] == [40]
    assert said.of("evaluation") == [{"attempt": "0.1", "step": 50, "epoch": 2, "metrics": {"accuracy": 0.5}}]
    assert said.of("first-step") == [{"attempt": "0.1", "step": 50, "total_steps": 100}]
    assert said.of("not-finite") == [{"attempt": "0.1", "step": 51, "ranks": [3], **bad}]
    assert {kind for kind, _ in said.events} == {"resumed", "evaluation", "first-step", "not-finite"}


def test_the_time_that_a_rank_tells_may_be_a_whole_number_of_seconds(said: Said):
    said.notes.begin("0.1", sees_snapshots=True)
    when = int(time.time()) - 20  # as `date +%s` prints it
    said.tell(kind="resumed", step=40, time=when)
    said.notes.look("", is_training=True)
    assert said.of("resumed") == [{"attempt": "0.1", "step": 40, "time": when}]


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "x", "rows": "%s"}' % ("x" * (3 << 20)),
        "[" * 3000,
        '{"kind": "evaluation", "step": 1, "metrics": {"perplexity": 1%s}}' % ("0" * 400),
        '{"kind": "pause", "step": 1, "seconds": 1%s}' % ("0" * 400),
        '{"kind": "pause", "step": 1, "seconds": NaN}',
    ],
    ids=["longer than is read at once", "deep", "a large metric", "a large pause", "no pause"],
)
def test_a_line_that_tells_nothing_does_not_hide_those_that_come_after_it(said: Said, line: str):
    said.notes.begin("0.0", sees_snapshots=True)
    (said.told / "rank0").write_text(line + "\n")
    said.tell(kind="resumed", step=40)
    said.commit(40)
    for _ in range(5):
        said.notes.look("", is_training=True)
    assert [each["step"] for each in said.of("resumed")] == [40]
    assert [each["pause_s"] for each in said.of("snapshot")] == [0.0]


def test_when_the_first_step_was_done_is_taken_from_the_rank_that_tells_it(said: Said):
    """It is looked once a second: a recovery of a tenth of a second would be told as one of nine."""
    when = time.time() - 0.9
    said.notes.begin("0.1", sees_snapshots=True)
    said.tell(kind="resumed", step=40, time=when - 0.05)
    said.tell(kind="first-step", step=41, total_steps=100, time=when)
    said.notes.look("50/100 loss 0.3", is_training=True)
    said.tell(kind="first-step", step=51, time=when)
    said.notes.look("51/100 loss 0.3", is_training=True)
    assert said.of("first-step") == [{"attempt": "0.1", "step": 41, "total_steps": 100, "time": when}]
    assert [kind for kind, _ in said.events] == ["resumed", "first-step"]
    said.notes.begin("0.2", sees_snapshots=True)
    said.tell(kind="first-step", step=60, total_steps="many", time="now")
    said.notes.look("", is_training=True)
    assert said.of("first-step")[1:] == [{"attempt": "0.2", "step": 60, "total_steps": None}]


def test_of_many_snapshots_the_pauses_are_added_up(said: Said):
    said.commit(5)  # was there before
    said.notes.begin("0.0", sees_snapshots=True)
    for step in (10, 20, 30):
        said.commit(step)
        said.tell(kind="pause", step=step, seconds=0.5)
        said.notes.look("", is_training=True)
        said.now += 0.5
    said.notes.look("", is_training=True, is_last=True)
    first, last = said.of("snapshot")
    assert (first["step"], first["count"], first["bytes"], first["pause_s"]) == (10, 1, 7, 0.5)
    assert (last["step"], last["count"], last["pause_s"]) == (30, 2, 1.0)


def test_the_best_evaluation_is_never_left_out(said: Said):
    said.notes.begin("0.0", sees_snapshots=True)
    for number, accuracy in enumerate([0.5, 0.4, 0.3, 0.9, 0.2]):
        said.tell(kind="evaluation", step=number, metrics={"accuracy": accuracy})
        said.notes.look("", is_training=True)
    assert [each["metrics"]["accuracy"] for each in said.of("evaluation")] == [0.5, 0.4, 0.9]


def test_samples_come_only_while_ranks_train(said: Said):
    said.notes.begin("0.0", sees_snapshots=True)
    for is_training in (False, True, True):
        said.now += 2.0
        assert said.notes.look("3/9 loss 1.5", is_training=is_training) == {"cpu": 0.5}
    assert [(each["step"], each["loss"], each["cpu"]) for each in said.of("sample")] == [(3, 1.5, 0.5)] * 2
    assert said.notes.look("3/9 loss 1.5", is_training=True) is None  # nothing is measured so soon again


def test_a_run_that_ends_before_its_first_sample_has_one_all_the_same(said: Said):
    said.notes.begin("0.0", sees_snapshots=True)
    assert said.notes.look("3/9 loss 1.5", is_training=True) is None
    assert said.notes.look("9/9 loss 0.5", is_training=True, is_last=True) == {"cpu": 0.5}
    assert [each["step"] for each in said.of("sample")] == [9]
    said.notes.look("9/9 loss 0.5", is_training=True, is_last=True)
    assert len(said.of("sample")) == 1


def test_what_this_machine_uses():
    usage = Usage("lo")
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        pass
    found = usage.now()
    assert 0 < found["cpu"] <= 1
    assert (
        0
        < found["memory"]
        < found["memory_total"]
        == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    assert found["received"] >= 0
    assert found["gpus"] == []
    assert Usage("absent0").now()["received"] is None


def test_a_nodes_own_gpus_are_sampled_whatever_cuda_calls_them(
    agents: Agents, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "SAMPLE_S", 0.0)
    spec = agents.spec("n0", gpus=(1,), env={"CUDA_VISIBLE_DEVICES": "GPU-8f3a"})
    Path(spec.node_dir).mkdir()
    record = EventLog(spec)
    record.update(state="running")
    until(record.gpus.usage)
    record.end("stopped")
    samples = [event for event in events.read(Path(spec.node_dir)) if event.kind == "sample"]
    assert {gpu["index"] for sample in samples for gpu in sample.fields["gpus"]} == {1}
