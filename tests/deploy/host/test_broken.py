"""What a host remembers of being broken, until it is forgiven."""

import socket
import time
from pathlib import Path

import pytest

from nodekit.deploy.host import broken


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
