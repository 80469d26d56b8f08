"""What is so at present, in a file of events: rewritten where it stands, while others read and add."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import until

from nodekit.deploy.host import current_status
from nodekit.deploy.host.current_status import StatusFile
from nodekit.deploy.host.logs import hostfollow
from nodekit.deploy.records import events

FIRST = {"run": "r", "time": 1.5, "node": None, "kind": "run-started"}


def status(node: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"run": "r", "time": 10.0 + step, "node": node, "step": step, **fields}


def add(path: Path, **fields: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps({**FIRST, **fields}) + "\n")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    add(tmp_path / events.FILE)
    return tmp_path / events.FILE


def steps(reader: StatusFile) -> dict[str, int]:
    return {node: said["step"] for node, said in reader.read().items()}


def test_the_newest_of_each_node_is_there_and_the_file_does_not_grow(path: Path) -> None:
    writer, reader = StatusFile(str(path)), StatusFile(str(path))
    for node in ("a", "b"):
        writer.write(status(node, 1))
    assert steps(reader) == {"a": 1, "b": 1}
    size = path.stat().st_size
    for step in range(2, 1_000):
        writer.write(status("a", step))
    assert steps(reader) == {"a": 999, "b": 1}
    assert path.stat().st_size == size
    whole = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(each["kind"], each.get("step")) for each in whole] == [
        ("run-started", None),
        ("status", 999),
        ("status", 1),
    ]


def test_who_reads_by_offset_is_not_disturbed(path: Path) -> None:
    writer, follower = StatusFile(str(path)), events.Follower(path.parent)
    at: tuple[str, int] = ("", 0)
    seen: list[list[list[str]]] = []
    for step, text in enumerate(["", "x" * 3_000, "x", "x" * 9_000]):
        writer.write(status("a", step, text=text))
        add(path, kind="said", text=f"{step}")
        found = hostfollow.events(str(path.parent), *at)
        at = (found[-1][0], found[-1][1])
        taken = events.parse_all(line for _, _, line in found)
        seen.append([[event.kind for event in each] for each in (follower.more(), taken)])
    first, others = ["run-started", "said"], ["said"]
    assert seen == [[first, first], *[[others, others]] * 3]
    assert [event.kind for event in events.read(path.parent)] == ["run-started", *["said"] * 4]


def test_who_reads_by_offset_gets_past_a_line_that_is_longer_than_what_is_read_at_once(path: Path) -> None:
    for kind in ("worker-failed", "agent-ended"):
        add(path, kind=kind, error="\ufffd" * hostfollow.LOG_CHUNK_BYTES)
    at: tuple[str, int] = ("", 0)
    kinds = []
    while found := hostfollow.events(str(path.parent), *at):
        at = (found[-1][0], found[-1][1])
        kinds += [json.loads(line)["kind"] for _, _, line in found]
    assert kinds == ["run-started", "worker-failed", "agent-ended"]


def test_a_status_that_has_no_room_moves(path: Path) -> None:
    writer, reader = StatusFile(str(path)), StatusFile(str(path))
    for step, length in enumerate([10, 2_000, 50_000, 40_000, 10]):
        writer.write(status("a", step, text="x" * length))
        add(path, kind="said")
        assert steps(reader) == steps(StatusFile(str(path))) == {"a": step}
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert [kind for kind in kinds if kind != "said"] == [
        "run-started",
        "status-moved",
        "status-moved",
        "status",
    ]


def test_another_writer_goes_on_where_the_first_one_was(path: Path) -> None:
    first, second = StatusFile(str(path)), StatusFile(str(path))
    first.write(status("a", 1))
    second.write(status("a", 2, text="x" * 5_000))  # and has it move
    first.write(status("a", 3))
    assert steps(StatusFile(str(path))) == {"a": 3}
    assert path.read_text().count('"kind": "status",') == 1


def test_a_line_that_is_torn_costs_no_more_than_itself(path: Path) -> None:
    writer, reader = StatusFile(str(path)), StatusFile(str(path))
    for node in ("a", "b"):
        writer.write(status(node, 1))
    reader.read()
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"step": 1', b'"step": 7', 1))
    assert steps(reader) == {"a": 1, "b": 1}, "what it said before"
    assert steps(StatusFile(str(path))) == {"b": 1}
    StatusFile(str(path)).write(status("a", 8))
    assert steps(reader) == steps(StatusFile(str(path))) == {"a": 8, "b": 1}


def test_after_a_line_that_a_crash_has_torn(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"run": "r", "ti')
    StatusFile(str(path)).write(status("a", 1))
    assert steps(StatusFile(str(path))) == {"a": 1}


def test_another_file_in_the_same_place_is_read_anew(path: Path) -> None:
    reader = StatusFile(str(path))
    StatusFile(str(path)).write(status("a", 1))
    assert steps(reader) == {"a": 1}
    path.write_text("")
    add(path, time=2.5, text="x" * 3_000)
    assert steps(reader) == {}
    StatusFile(str(path)).write(status("a", 2))
    assert steps(reader) == {"a": 2}


def test_it_is_never_the_first_event_by_which_a_file_is_known(tmp_path: Path) -> None:
    path = tmp_path / events.FILE
    for _ in range(2):
        with pytest.raises(OSError, match=str(path)):
            StatusFile(str(path)).write(status("a", 1))
        path.write_text("")
    assert (StatusFile(str(path)).read(), path.read_text()) == ({}, "")


def test_what_is_read_while_it_is_written_is_whole(path: Path) -> None:
    program = f"""
from nodekit.deploy.host.current_status import StatusFile
writer, number = StatusFile({str(path)!r}), 0
while True:
    number += 1
    writer.write(dict(run="r", time=1.0, node="a", step=number % 10, text=str(number % 10) * 100_000))
"""
    reader = StatusFile(str(path))
    seen: set[int] = set()

    def is_whole_each_time() -> bool:
        for _ in range(2_000):
            said = reader.read()["a"]
            assert said["text"] == str(said["step"]) * 100_000
            seen.add(said["step"])
        return len(seen) > 5  # fewer where its writer has waited for a core meanwhile

    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(reader.read)  # by the same reader: what another one reads first may be torn
        until(is_whole_each_time)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("change", ["time", "progress_time", "when"])
def test_the_run_has_what_its_nodes_do_by_its_own_clock(path: Path, change: str) -> None:
    said = status("gpu1", 7, progress_time=16.0, alive=True, failures=[{"rank": 3, "when": 15.0}])
    events.Gatherer(path.parent).heard("gpu1", said, clock_offset=2.0)
    (found,) = events.now(path.parent).values()
    told = {**found, **found["failures"][0]}
    assert told[change] == {"time": 15.0, "progress_time": 14.0, "when": 13.0}[change]
    assert (found["alive"], found["step"]) == (True, 7)


def test_what_nodes_do_is_gathered_once_as_what_has_happened(path: Path, tmp_path: Path) -> None:
    node = tmp_path / "gpu1"
    node.mkdir()
    add(node / events.FILE, node="gpu1", kind="agent-started")
    StatusFile(str(node / events.FILE)).write(status("gpu1", 1))
    add(node / events.FILE, node="gpu1", kind="rendezvous")
    gatherer = events.Gatherer(path.parent)
    gatherer.add_of_node("gpu1", [tuple(each) for each in hostfollow.events(str(node))], clock_offset=0.0)  # type: ignore[misc]
    assert gatherer.at("gpu1") == ("1.5", (node / events.FILE).stat().st_size)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["run-started", "agent-started", "rendezvous"]


def test_a_line_that_is_none_is_not_taken_for_one() -> None:
    line = current_status.encode(status("a", 1))
    assert current_status.decode(line + b"   \n") == {"kind": "status", **status("a", 1)}
    for other in (b"", b"{}", line[:-1], line.replace(b"a", b"b"), json.dumps(FIRST).encode()):
        assert current_status.decode(other) is None
