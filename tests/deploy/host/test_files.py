"""The files of a host: private, and made in folders that are."""

import os
import subprocess
import threading
from pathlib import Path

import pytest
from disks import full, small_disk

from nodekit.deploy.host import files


def test_a_folder_and_what_is_missing_above_it_are_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.make_private(tmp_path / "a/b/c")
        files.make_private(f"{tmp_path}/a/b/c/")
    finally:
        os.umask(before)
    assert [(tmp_path / each).stat().st_mode & 0o777 for each in ("a", "a/b", "a/b/c")] == [0o700] * 3


@pytest.mark.parametrize("folder", ["file", "file/x/y", "/proc/none/x"])
def test_a_folder_that_cannot_be_made_is_an_error(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"File exists|Not a directory|No such file"):
        files.make_private(tmp_path / folder)


def test_two_writers_of_a_shared_folder_may_have_the_same_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = str(tmp_path / "fence"), os.replace

    def other_comes_first(draft: str, to: str) -> None:
        monkeypatch.setattr(os, "replace", replace)
        files.write_private(path, b"the other's")
        replace(draft, to)

    monkeypatch.setattr(os, "replace", other_comes_first)
    files.write_private(path, b"ours")
    assert Path(path).read_bytes() == b"ours"
    assert files.names(str(tmp_path)) == ["fence"]


def test_a_folder_on_a_read_only_disk_is_told_with_its_path_and_a_full_or_missing_one_is_not(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk):
        with full(disk):
            assert files.unwritable(str(disk)) == ""
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert files.unwritable(str(disk)) == f"nothing can be written to {disk}: Read-only file system"
    assert list(disk.iterdir()) == []
    assert files.unwritable(str(disk)) == files.unwritable(str(disk / "none")) == ""


def test_a_disk_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, opened = threading.Event(), os.open
    monkeypatch.setattr(files, "PATIENCE_S", 0.1)
    monkeypatch.setattr(os, "open", lambda *args, **more: answers.wait(60) and opened(*args, **more))
    for _ in range(2):
        why = f"nothing can be written to {tmp_path}: its disk does not answer"
        assert files.unwritable(str(tmp_path)) == why
    answers.set()
    files._trying[str(tmp_path)][0].join()
    assert files.unwritable(str(tmp_path)) == ""
