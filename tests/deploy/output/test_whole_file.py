"""A file is there whole or not at all, and what is no file stays what it is."""

import os
import threading
from pathlib import Path

import pytest

from nodekit.deploy.output import whole_file


def test_a_file_is_its_owners_and_what_was_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    whole_file.write(path, "one")
    whole_file.write(path, "two")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("two", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_of_the_same_pid_has_left_is_not_in_the_way(tmp_path: Path) -> None:
    """In a container, pids begin anew; and a folder may be shared with another machine."""
    draft = tmp_path / f".report.html.{os.getpid()}.tmp"
    draft.touch()
    whole_file.write(tmp_path / "report.html", "text")
    assert (tmp_path / "report.html").read_text() == "text"
    assert draft.exists()


def test_a_link_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "newest.html"
    link.symlink_to("report.html")
    whole_file.write(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "report.html").read_text() == "text"


def test_a_pipe_or_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As with `-o /dev/stdout`; by root, `-o /dev/null` had made a plain file of it."""
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    whole_file.write(pipe, "text")
    reader.join(10)
    assert read == ["text"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("path", ["", "none/report.html"])
def test_what_cannot_be_written_leaves_nothing(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"Is a directory|No such file"):
        whole_file.write(Path(path), "text")
    assert not list(tmp_path.iterdir())


def test_a_byte_that_is_no_text_keeps_no_file_from_being_written(tmp_path: Path) -> None:
    """As a file's name, or a log, may have: Python reads it as a lone surrogate."""
    whole_file.write(tmp_path / "report.html", b"a \xff z".decode(errors="surrogateescape"))
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "a ? z"
