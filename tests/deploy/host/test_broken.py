"""What a host remembers of being broken, until it is forgiven."""

import os
import socket
import time
from pathlib import Path

import pytest

from nodekit.deploy.host import broken, errors, files


def test_a_host_remembers_until_it_is_forgiven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (broken.recall(str(tmp_path)), broken.forgive(str(tmp_path))) == ({}, {})
    before = time.time()
    broken.remember(str(tmp_path), "gpu1", "lab-1", "GPU 3: Xid 79")
    broken.remember(str(tmp_path), "gpu2", "lab-2", "GPU 0: Xid 48")
    found = broken.recall(str(tmp_path))
    assert {name: (each["run"], each["why"]) for name, each in found.items()} == {
        "gpu1": ("lab-1", "GPU 3: Xid 79"),
        "gpu2": ("lab-2", "GPU 0: Xid 48"),
    }
    assert before <= found["gpu1"]["time"] <= time.time()
    with monkeypatch.context() as other:
        other.setattr(socket, "gethostname", lambda: "another")  # which shares the folder
        assert broken.recall(str(tmp_path)) == {}
    assert broken.forgive(str(tmp_path)) == found
    assert broken.recall(str(tmp_path)) == {}


def test_another_users_folder_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / f"{socket.gethostname()}.json").touch()
    os.chown(tmp_path / "broken", 1, 1)
    os.chown(tmp_path / "broken" / f"{socket.gethostname()}.json", 1, 1)
    monkeypatch.setattr(files, "load", refuse)
    with pytest.raises(PermissionError) as told:
        broken.recall(str(tmp_path))
    assert errors.cure_of(told.value) == "that is daemon's: set `workdir:` to a folder of your own"


def test_of_a_folder_that_cannot_be_seen_the_owner_is_that_of_the_nearest_above_it(tmp_path: Path) -> None:
    os.chown(tmp_path, 1, 1)
    assert files.owner(str(tmp_path / "a" / "b")) == "daemon"
    os.chown(tmp_path, 54321, 1)
    assert files.owner(str(tmp_path)) == "54321"
