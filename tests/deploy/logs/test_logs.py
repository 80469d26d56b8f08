"""`kit logs`: dated lines in the order of time, picked on the nodes, bounded there, followed, and fetched."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_agents
from agents import no_process_left, until
from kit_runs import Kit, run_id

from nodekit.deploy.connect.channel import HostChannel, open_local
from nodekit.deploy.host.logs import hostfollow, logbook, logread
from nodekit.deploy.host.logs.logbook import Logbook, Marks
from nodekit.deploy.logs import showlogs
from nodekit.deploy.logs.showlogs import Reader
from nodekit.deploy.records import fetchlogs, loglines
from nodekit.deploy.records.loglines import Line, Source, Style, Wanted, Window
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError
from nodekit.inventory.fields import size_bytes

NOON = time.mktime((2026, 11, 22, 12, 3, 0, 0, 0, -1))


# --- which lines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10m", NOON - 600),
        ("1.5h", NOON - 5400),
        ("0s", NOON),
        ("2d", NOON - 2 * 86400),
        ("12:00", NOON - 180),
        ("12:02:30", NOON - 30),
        ("13:00", NOON + 57 * 60 - 86400),
        ("2026-11-22", NOON - 12 * 3600 - 180),
        ("2026-11-22T12:01", NOON - 120),
        ("2026-11-22 12:01:30", NOON - 90),
    ],
)
def test_a_time_is_written_as_people_do(text: str, expected: float) -> None:
    assert loglines.parse_when(text, now=NOON) == expected


@pytest.mark.parametrize("text", ["", "10", "10x", "25:00", "2026-13-01", "soon"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(KitError, match=r"--since: found '.*', wanted a time, as 10m, 2h, 12:03"):
        loglines.parse_when(text, now=NOON)


def test_ranks_and_attempts_are_picked() -> None:
    assert loglines.parse_ranks("3") == (3,)
    assert loglines.parse_ranks("0-2,7") == (0, 1, 2, 7)
    with pytest.raises(KitError, match=r"wanted ranks, as 3, 0-3 or 0,2"):
        loglines.parse_ranks("zero")
    there = ["0.0", "0.10", "1.0", "0.9"]
    assert loglines.pick_attempts("0.10", there) == ["0.10"]
    assert loglines.pick_attempts("0", there) == ["0.0", "0.9", "0.10"]
    assert loglines.pick_attempts("last", there) == ["1.0"]
    with pytest.raises(
        KitError, match=r"found '2', wanted one of those there are: 0\.0, 0\.9, 0\.10, 1\.0; or last"
    ):
        loglines.pick_attempts("2", there)


def test_sizes_are_those_of_disks_and_of_memory() -> None:
    assert [size_bytes(each) for each in ("500MB", "1.5GB", "1GiB", "2 TB")] == [
        5 * 10**8,
        15 * 10**8,
        2**30,
        2 * 10**12,
    ]


# --- how they look ------------------------------------------------------------------------------------------


def test_in_a_pipe_a_line_is_as_ever_and_with_time_it_is_exact() -> None:
    line = Line(NOON + 0.25, "gpu1", 3, "0.0", "text")
    plain = {"terminal": False, "colour": False}
    assert Style(["gpu1"], **plain).shown(line) == ["gpu1:3 | text"]
    assert Style(["gpu1"], **plain, times=True).shown(line) == ["2026-11-22 12:03:00.250 gpu1:3 | text"]
    (told,) = Style(["gpu1"], **plain, as_json=True).shown(line)
    assert json.loads(told) == {
        "time": NOON + 0.25,
        "node": "gpu1",
        "rank": 3,
        "attempt": "0.0",
        "text": "text",
    }


def test_in_a_terminal_days_and_attempts_are_parted_and_colours_end() -> None:
    style = Style(["gpu1", "b"], terminal=True, colour=False)
    assert style.shown(Line(NOON, "b", 1, "0.0", "x"))[-1] == "12:03:00 b:1    │ x"
    assert style.shown(Line(NOON + 86400, "gpu1", 0, "0.1", "y")) == [
        "── 2026-11-23 ──",
        "── attempt 0.1 ──",
        "12:03:00 gpu1:0 │ y",
    ]
    assert style.shown(Line(NOON + 86400, "b", 1, "0.0", "late")) == ["12:03:00 b:1    │ late"]
    (line,) = Style(["gpu1"], terminal=True, colour=True, times=True).shown(
        Line(NOON, "gpu1", 0, "0.0", "\x1b[31mred")
    )
    assert line.endswith(" \x1b[36mgpu1:0 │\x1b[0m \x1b[31mred\x1b[0m")


@pytest.mark.parametrize(
    ("name", "value", "colour"), [("X", "", True), ("NO_COLOR", "1", False), ("TERM", "dumb", False)]
)
def test_colour_is_for_terminals_that_want_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, colour: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(name, value)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = loglines.style_of(["a"], Terminal(), times=True, as_json=False).shown(
        Line(NOON, "a", 0, "0.0", "x")
    )
    assert ("\x1b[" in shown[0]) is colour


def test_lines_that_come_late_are_put_in_order_and_none_waits_for_ever() -> None:
    window = Window(["a", "b"])
    window.add([Line(10.0, "b", 1, "0.0", "second"), Line(11.0, "b", 1, "0.0", "third")], now=100.0)
    assert window.ready(100.1) == []
    window.add(
        [Line(9.0, "a", 0, "0.0", "first"), Line(10.0, "a", 0, "0.0", "equal: a is before b")], now=100.2
    )
    late = 100.0 + loglines.WINDOW_S
    assert [line.text for line in window.ready(late)] == ["first", "equal: a is before b", "second", "third"]
    # What lags behind with ever more old lines does not hold up what has waited.
    window.add([Line(20.0, "a", 0, "0.0", "new")], now=200.0)
    window.add([Line(1.0, "b", 0, "0.0", "old")], now=200.0 + loglines.WINDOW_S)
    assert [line.text for line in window.ready(200.0 + loglines.WINDOW_S)] == ["old", "new"]
    assert window.ready(float("inf")) == []


# --- dates --------------------------------------------------------------------------------------------------


def marks(*each: tuple[int, float, float]) -> Marks:
    return Marks(b"".join(logbook._MARK.pack(*one) for one in each))


def test_a_line_has_the_time_of_the_first_mark_behind_it() -> None:
    found = marks((10, 100.0, 100.0), (20, 101.0, 101.0), (40, 102.0, 104.0))
    assert [found.time_of(end, 200.0) for end in (1, 10, 11, 20)] == [100.0, 100.0, 101.0, 101.0]
    assert [found.time_of(end, 200.0) for end in (25, 30, 40)] == [102.5, 103.0, 104.0], (
        "within a span: by place"
    )
    assert found.time_of(41, 200.0) == 200.0, "not marked yet: when the file was last written"
    assert found.time_of(41, 50.0) == 104.0, "but never before what stands above it"
    assert [found.before(when) for when in (99.0, 100.5, 300.0)] == [0, 10, 40]
    assert len(Marks(found.to_bytes()[:-1])) == 2, "a torn mark is none"


def test_marks_of_a_week_are_merged_and_still_date_every_line() -> None:
    many = marks(*((100 * (i + 1), 0.25 * i, 0.25 * i) for i in range(4000)))
    few = many.merged(400)
    assert len(few) <= 400
    assert list(few.offsets[-100:]) == list(many.offsets[-100:]), "the newest are as they were"
    assert few.merged(400).to_bytes() == few.to_bytes()
    step = 0.25 * 3900 / 200
    assert all(
        abs(few.time_of(end, 0.0) - many.time_of(end, 0.0)) <= step for end in range(100, 400_000, 700)
    )
    times = [few.time_of(end, 0.0) for end in range(100, 400_000, 700)]
    assert times == sorted(times)


def test_a_watched_log_is_dated_as_it_was_written_and_a_quiet_one_costs_nothing(tmp_path: Path) -> None:
    log = tmp_path / "rank0-attempt0.0.log"
    book = Logbook(str(tmp_path), 10**9, lambda kind, **_: pytest.fail(kind))
    book.begin([str(log)])
    written = []
    for number in range(3):
        with log.open("a") as file:
            file.write(f"line {number}\n")
        written.append(log.stat().st_mtime)
        until(
            lambda: int(logbook.read_marks(str(log)).offsets[-1:].tolist()[-1:][0:1] == [log.stat().st_size])
        )
    before = (tmp_path / "rank0-attempt0.0.times").read_bytes()
    book.look()
    book.close()
    assert (tmp_path / "rank0-attempt0.0.times").read_bytes() == before
    assert (tmp_path / "rank0-attempt0.0.times").stat().st_mode & 0o777 == 0o600
    lines = logread.page(str(tmp_path))["lines"]
    assert [text for *_, text in lines] == ["line 0", "line 1", "line 2"]
    assert [when for when, *_ in lines] == pytest.approx(written, abs=0.01)


def test_a_clock_that_is_set_back_dates_what_is_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was written before, by the clock of after: else all lines of a day would have one time."""
    real, set_back_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() - set_back_s[0])
    log, earlier = tmp_path / "rank0-attempt0.1.log", tmp_path / "rank0-attempt0.0.times"
    began = real()
    earlier.write_bytes(marks((10, began - 30, began - 20)).to_bytes())
    book = Logbook(str(tmp_path), 10**9, print)
    book.begin([str(log)])
    for text in ("before\n", "after\n", "later\n"):
        with log.open("a") as file:
            file.write(text)
        book.look()
        set_back_s[0] = 86_400.0
        time.sleep(0.05)
    book.close()
    found = logbook.read_marks(str(log))
    assert [*found.ends] == sorted(set(found.ends)), "each line has a time of its own"
    assert all(abs(end - (began - 86_400)) < 60 for end in found.ends)
    assert logbook.read_marks(str(earlier)).ends[0] == pytest.approx(began - 86_420, abs=1)


def test_a_mark_that_a_crash_has_torn_is_written_over(tmp_path: Path) -> None:
    log, times = tmp_path / "rank0-attempt0.0.log", tmp_path / "rank0-attempt0.0.times"
    log.write_text("one\n")
    book = Logbook(str(tmp_path), 10**9, print)
    book.begin([str(log)])
    book.look()
    times.write_bytes(times.read_bytes() + b"torn")
    again = Logbook(str(tmp_path), 10**9, print)
    with log.open("a") as file:
        file.write("two\n")
    again.begin([str(log)])
    again.look()
    for each in (book, again):
        each.close()
    assert list(logbook.read_marks(str(log)).offsets) == [4, 8]


def test_a_log_that_somebody_empties_is_dated_and_followed_from_its_new_beginning(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank0-attempt0.0.log"
    log.parent.mkdir()
    log.write_text("old\n" * 100)
    book = Logbook(str(log.parent), 10**9, print)
    book.begin([str(log)])
    book.look()
    offsets = logread.page(str(log.parent))["offsets"]
    shown, _ = hostfollow.logs(str(tmp_path))
    log.write_text("")  # as by `: > LOG`; its rank appends to it
    book.look()
    with log.open("a") as file:
        file.write("new\n")
    os.utime(log, (time.time() + 60, time.time() + 60))
    book.look()
    book.close()
    assert list(logbook.read_marks(str(log)).offsets) == [4]
    assert [line[3] for line in logread.page(str(log.parent), offsets)["lines"]] == ["new"]
    assert hostfollow.logs(str(tmp_path), shown)[1] == [(log.name, "new\n")]


def test_a_log_that_is_emptied_while_it_is_read_ends_there(tmp_path: Path) -> None:
    log = tmp_path / "rank0-attempt0.0.log"
    log.write_text("line\n" * 100)
    sizes = {log.name: log.stat().st_size}
    log.write_text("")
    page = logread.page(str(tmp_path), {log.name: 50}, sizes)
    assert (page["lines"], page["more"]) == ([], False)


# --- what is read -------------------------------------------------------------------------------------------


def write_log(folder: Path, rank: int, attempt: str, lines: list[tuple[float, str]]) -> Path:
    """A log whose lines were written then."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}-attempt{attempt}.log"
    entries, text = [], ""
    for when, line in lines:
        text += line + "\n"
        entries.append((len(text.encode()), when, when))
    path.write_text(text)
    path.with_suffix(".times").write_bytes(marks(*entries).to_bytes())
    return path


def texts(folder: Path, **wanted: Any) -> list[str]:
    """All lines, page by page."""
    found: list[str] = []
    page: dict[str, Any] = {"offsets": None, "sizes": None, "more": True}
    while page["more"]:
        page = logread.page(str(folder), page["offsets"], page["sizes"], **wanted)
        found += [line[3] for line in page["lines"]]
    return found


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The logs of a node with two ranks that was restarted once."""
    folder = tmp_path / "logs"
    write_log(folder, 0, "0.0", [(100.0, "up 0"), (102.0, "step 1"), (104.0, "Error")])
    write_log(folder, 1, "0.0", [(101.0, "up 1"), (102.0, "also"), (103.0, "step 2")])
    write_log(folder, 0, "0.1", [(110.0, "up again"), (111.0, "Error: none")])
    (folder / "other.log").write_text("no rank's\n")
    return folder


def test_the_lines_of_a_node_come_in_the_order_of_time(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = ["up 0", "up 1", "step 1", "also", "step 2", "Error", "up again", "Error: none"]
    assert texts(node) == everything
    monkeypatch.setattr(logread, "PAGE_BYTES", 1)
    assert texts(node) == everything, "likewise a line at a time"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"ranks": [1]}, ["up 1", "also", "step 2"]),
        ({"attempts": ["0.1"]}, ["up again", "Error: none"]),
        ({"since": 103.0}, ["step 2", "Error", "up again", "Error: none"]),
        ({"until": 102.0}, ["up 0", "up 1", "step 1", "also"]),
        ({"since": 101.5, "until": 103.5, "ranks": [0]}, ["step 1"]),
        ({"grep": "^Error$|up 1"}, ["up 1", "Error"]),
        ({"ranks": [7]}, []),
    ],
)
def test_lines_are_picked(node: Path, wanted: dict[str, Any], expected: list[str]) -> None:
    assert texts(node, **wanted) == expected


def test_a_log_without_marks_has_the_time_of_its_file(tmp_path: Path) -> None:
    log = tmp_path / "rank0-attempt0.0.log"
    log.write_bytes(b"one\ntwo")
    os.utime(log, (500.0, 500.0))
    assert logread.page(str(tmp_path))["lines"] == [(500.0, 0, "0.0", "one"), (500.0, 0, "0.0", "two")]


def test_a_progress_bar_is_its_last_state_and_is_not_read_again_and_again(tmp_path: Path) -> None:
    log = tmp_path / "rank0-attempt0.0.log"
    log.write_bytes(b"start\r\n" + b"".join(b"\r%d%%" % number for number in range(50)))
    page = logread.page(str(tmp_path), final=False)
    assert [line[3] for line in page["lines"]] == ["start"]
    assert page["offsets"][log.name] == log.stat().st_size - len("49%")
    with log.open("ab") as file:
        file.write(b"\r100%\nend")
    page = logread.page(str(tmp_path), page["offsets"], final=False)
    assert [line[3] for line in page["lines"]] == ["100%"]
    assert [line[3] for line in logread.page(str(tmp_path), page["offsets"])["lines"]] == ["end"]


def test_nodes_are_merged_by_the_clock_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # On b the clock is 50 s ahead: what it calls 152 was at 102 here.
    write_log(
        tmp_path / "a", 0, "0.0", [(100.0, "first"), (102.0, "third, with the fourth"), (103.0, "sixth")]
    )
    write_log(tmp_path / "b", 1, "0.0", [(151.0, "second"), (152.0, "fourth"), (152.5, "fifth")])
    sources = [
        Source(node="b", folder=str(tmp_path / "b"), clock_offset=50.0),
        Source(node="a", folder=str(tmp_path / "a"), clock_offset=0.0),
    ]
    style = Style(["a", "b"], terminal=False, colour=False)
    assert showlogs.conclude(Reader(["a", "b"], Wanted(), style), sources) == 0
    said = [line.partition(" | ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == ["first", "second", "third, with the fourth", "fourth", "fifth", "sixth"]
    showlogs.conclude(Reader(["a", "b"], Wanted(since=101.5, until=102.0), style), sources)
    assert capsys.readouterr().out == "a:0 | third, with the fourth\nb:1 | fourth\n"


def test_of_a_rank_that_is_not_there_it_is_said_which_are(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Source(node="a", folder=str(node), clock_offset=0.0)
    style = Style(["a"], terminal=False, colour=False)
    showlogs.conclude(Reader(["a"], Wanted(ranks=(9,)), style), [source])
    assert capsys.readouterr().err == "kit: no such line in the logs of a, which are of ranks 0 to 1\n"
    showlogs.conclude(Reader(["a"], Wanted(ranks=(1,), grep="never"), style), [source])
    assert capsys.readouterr().err == "kit: no such line in the logs of a\n"


# --- bounds -------------------------------------------------------------------------------------------------


def test_a_log_that_grows_too_large_loses_its_middle_while_it_is_written_and_followed(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = folder / "rank0-attempt0.0.log"
    said: list[str] = []
    book = Logbook(str(folder), 2_000_000, lambda kind, **_: said.append(kind))
    book.begin([str(log)])
    followed: list[str] = []
    offsets: dict[str, int] = {}
    with log.open("ab", buffering=0) as file:  # as a rank has it
        for number in range(60_000):
            file.write(b"%08d %s\n" % (number, b"x" * 90))
            if number % 2000 == 1999:
                book.look()
                offsets, found = hostfollow.logs(str(tmp_path), offsets)
                while found:
                    followed += [line[:8] for _, text in found for line in text.splitlines()]
                    offsets, found = hostfollow.logs(str(tmp_path), offsets)
                book.bound()
    book.close()
    assert followed == [f"{number:08d}" for number in range(60_000)], "who keeps up misses nothing"
    assert log.stat().st_size == 6_000_000
    assert log.stat().st_blocks * 512 <= 2_000_000
    assert said == ["logs-cut"]
    for lines in (
        texts(folder),
        [line for _, text in remote_all(tmp_path) for line in text.splitlines()],
    ):
        cut = next(place for place, line in enumerate(lines) if "left out" in line)
        kept = [int(line[:8]) for line in lines if "left out" not in line and len(line) == 99]
        assert re.fullmatch(r"… [3-5]\.\d MB left out …", lines[cut])
        assert kept[:2000] == list(range(2000)), "the head stays"
        assert kept[-10_000:] == list(range(50_000, 60_000)), "and so does the newest part"
        assert sum(len(line) < 99 for line in lines) <= 2, "one line is cut where the hole begins"


def remote_all(node_dir: Path) -> Iterator[tuple[str, str]]:
    offsets: dict[str, int] = {}
    while True:
        offsets, found = hostfollow.logs(str(node_dir), offsets, final=True)
        if not found:
            return
        yield from found


def test_earlier_attempts_go_first_the_oldest_before_others_and_never_the_present_one(tmp_path: Path) -> None:
    for attempt in ("0.0", "0.9", "0.10", "1.0"):
        path = tmp_path / f"rank0-attempt{attempt}.log"
        path.write_bytes(b"x" * 400_000)
        path.with_suffix(".times").write_bytes(b"")
    said: list[tuple[str, Any]] = []
    book = Logbook(str(tmp_path), 1_000_000, lambda kind, **fields: said.append((kind, fields)))
    book.begin([str(tmp_path / "rank0-attempt1.0.log")])
    book.close()
    assert sorted(path.name for path in tmp_path.glob("*.log")) == [
        "rank0-attempt0.10.log",
        "rank0-attempt1.0.log",
    ]
    assert not (tmp_path / "rank0-attempt0.9.times").exists()
    files = ["rank0-attempt0.0.log", "rank0-attempt0.9.log"]
    assert said == [("logs-removed", {"files": files, "bound": 1_000_000})]


def test_a_file_system_that_cannot_make_holes_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:  # such a file system is not to be had in a test
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(logbook, "punch", refuse)
    log = tmp_path / "rank0-attempt0.0.log"
    log.write_bytes(b"x" * 3_000_000)
    said: list[tuple[str, Any]] = []
    book = Logbook(str(tmp_path), 1_000_000, lambda kind, **fields: said.append((kind, fields)))
    book.begin([str(log)])
    book.bound()
    book.close()
    ((kind, fields),) = said
    assert kind == "logs-not-bounded"
    assert "its file system cannot leave out the middle of a file" in fields["why"]
    assert log.read_bytes() == b"x" * 3_000_000


# --- fetched ------------------------------------------------------------------------------------------------


@pytest.fixture
def channel() -> Iterator[HostChannel]:
    opened = open_local("here", sys.executable)
    yield opened
    opened.close()


def a_run(state: str, **changes: Any) -> Run:
    values = {"name": "r", "inventory_path": "", "inventory": {}, "command": None, "created": 0.0, **changes}
    return Run(run_id="r", state=state, **values)


def test_a_fetch_brings_what_is_new_and_the_copies_read_as_the_nodes_do(
    tmp_path: Path, node: Path, channel: HostChannel
) -> None:
    log = node / "rank0-attempt0.2.log"
    log.write_bytes(b"head\n" + b"m" * 4_000_000 + b"\ntail\n")
    with log.open("r+b") as file:
        assert logbook.punch(file.fileno(), 0x10000, 3_000_000)
    run = a_run("running", nodes={"a": {"node_dir": str(tmp_path)}}, clock_offsets={"a": 7.0})
    fetched = fetchlogs.fetch_run(run, {"a": channel})
    assert fetched.failed == {}
    copy = fetchlogs.copies(run)["a"]
    assert not copy.is_whole, "the run goes on"
    assert copy.source.clock_offset == 7.0
    here = Path(copy.source.folder)
    assert here == run.folder / "logs" / "a"
    assert texts(here) == texts(node)
    assert (here / log.name).stat().st_blocks * 512 < 2_000_000, "a hole there is one here"
    assert {path.stat().st_mode & 0o777 for path in here.iterdir()} == {0o600}
    with log.open("ab") as file:
        file.write(b"more\n")
    run.state = "succeeded"
    again = fetchlogs.fetch_run(run, {"a": channel})
    assert again.num_bytes == len(b"more\n")
    assert texts(here) == texts(node)
    assert fetchlogs.copies(run)["a"].is_whole
    run.generation += 1  # it went on, and nothing was fetched since
    assert not fetchlogs.copies(run)["a"].is_whole


def test_a_file_that_a_host_names_is_written_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(node="a", folder=str(tmp_path), clock_offset=0.0)

    def call(_: Source, function: str, **args: Any) -> Any:  # a host that is not to be trusted
        if function == "files":
            return {"../../evil.log": (5, 1.0)}
        return logread.piece(str(tmp_path), "../../evil.log", args["start"])

    monkeypatch.setattr(Source, "call", call)
    (tmp_path / "evil.log").write_text("evil\n")
    fetchlogs.fetch([source], tmp_path / "x" / "y", a_run("failed"))
    assert not (tmp_path / "x" / "evil.log").exists()
    assert (tmp_path / "x" / "y" / "a" / "evil.log").read_text() == "evil\n"


# --- a run --------------------------------------------------------------------------------------------------

JOB = """\
import os, pathlib, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("up", rank, "in", attempt, flush=True)
while not pathlib.Path(os.environ["GO"], rank + attempt).exists(): time.sleep(0.05)
print("said", rank, "in", attempt, flush=True)
if attempt == "0" and rank == "1": raise ValueError("first crash")
while attempt == "0": time.sleep(0.05)
"""


@pytest.fixture
def local(tmp_path: Path, own_home: Path) -> Iterator[Kit]:
    kit = Kit(tmp_path / "project", None)
    (tmp_path / "go").mkdir()
    (kit.folder / "two.yaml").write_text(
        f"name: two\nconnection: local\npython: {warm_agents.program()}\n"
        f"workdir: {tmp_path / 'work'}\nhosts: {{a: , b: }}\n"
        f"job: {{env: {{GO: {tmp_path / 'go'}}}}}\nlogs: {{fetch: true}}\n"
    )
    (kit.folder / "job.py").write_text(JOB)
    yield kit
    kit.close()
    kit.run("down", "--force")
    no_process_left(f"HOME={own_home}")


@pytest.mark.slow
def test_the_logs_of_a_run_that_was_restarted_are_shown_followed_fetched_and_kept(local: Kit) -> None:
    go, seen = local.folder.parent / "go", local.folder.parent / "followed"
    up = local.run("up", "two.yaml", "-d", "--", "job.py")
    assert up.returncode == 0, up.stdout + up.stderr
    with seen.open("w") as file:
        following = subprocess.Popen(local.argv("logs", "-f"), cwd=local.folder, stdout=file)
    local.started.append(following)  # type: ignore[arg-type]
    until(lambda: len(seen.read_text().splitlines()) == 2)
    refused = local.run("logs", "--grep", "(")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "--grep: found '(', wanted a regular expression" in refused.stderr
    order = ["00", "10", "11", "01"]  # rank and attempt
    for number, name in enumerate(order):
        (go / name).touch()
        until(lambda name=name: f"said {name[0]} in {name[1]}" in seen.read_text())  # type: ignore[misc]
        if number == 1:
            until(lambda: seen.read_text().count("in 1") == 2, timeout_s=60)
    assert following.wait(60) == 0, "it ends with the run"
    status = json.loads(local.run("status", "--json").stdout)
    assert status["state"] == "succeeded"
    said = [line for line in seen.read_text().splitlines() if "said" in line]
    assert said == ["a:0 | said 0 in 0", "b:1 | said 1 in 0", "b:1 | said 1 in 1", "a:0 | said 0 in 1"]
    everything = local.run("logs").stdout
    assert sorted(everything.splitlines()) == sorted(seen.read_text().splitlines())
    assert [line for line in everything.splitlines() if "said" in line] == said
    last = local.run("logs", "--attempt", "last", "--rank", "1").stdout
    assert last == "b:1 | up 1 in 1\nb:1 | said 1 in 1\n"
    assert (
        local.run("logs", "--attempt", "0.0", "--grep", "^ValueError").stdout
        == "b:1 | ValueError: first crash\n"
    )
    assert "wanted one of those there are: 0.0, 0.1" in local.run("logs", "--attempt", "3.0").stderr
    # The inventory has `fetch`: that the nodes are gone changes nothing.
    until(lambda: list((Path(os.environ["XDG_STATE_HOME"]) / "nodekit/runs").glob("*/logs/fetched.json")))
    shutil.rmtree(local.folder.parent / "work")
    assert local.run("logs", run_id(up.stdout)).stdout == everything
