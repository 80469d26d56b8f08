"""What a start puts on record."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nodes import facts

from nodekit.deploy.launch import start
from nodekit.deploy.launch.options import Options
from nodekit.deploy.sync import sync
from nodekit.deploy.sync.sync import SyncResult


def test_the_code_on_record_is_what_the_hosts_have_also_where_it_changed_while_it_was_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A node whose agent is started anew has to have that."""
    has = SyncResult(digest="as it was sent", files_sent=1, bytes_sent=1, kept=())
    monkeypatch.setattr(sync, "send", lambda *_, **__: {"a": has})
    read: Any = SimpleNamespace(digest="as it was read", root=tmp_path)
    channels: dict[str, Any] = {"a": None}
    options = Options(inventory=tmp_path / "lab.yaml", quiet=True)
    _, digest = start._send(read, channels, {"a": facts("a")}, "lab-1", options)
    assert digest == "as it was sent"
