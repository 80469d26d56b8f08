"""What a run that goes on shows of its ranks' output: all that is new, and nothing of what it has shown before."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_nodes import Nodes

from nodekit.deploy.host.logs import hostfollow
from nodekit.deploy.ssh_backend.backend import _earlier_logs
from nodekit.inventory.errors import HostError


def test_all_is_shown_of_the_new_generation_and_nothing_of_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    logs = tmp_path / "a" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank0-attempt0.0.log").write_text("Connection reset\n")
    (logs / "rank0-attempt0.1.log").write_text("cut off by a ki")
    (logs / "rank0-attempt1.0.log").write_text("resumed at step 20\n")  # written before anybody looks
    (logs / "other.log").write_text("not a rank's\n")

    def look(host: str, args: dict[str, object]) -> object:
        if host == "b":
            raise HostError(host, "no answer")
        return hostfollow.logs(str(tmp_path / host), tail_bytes=args["tail_bytes"])  # type: ignore[arg-type]

    nodes.answers["hostfollow.logs"] = look
    nodes.run.generation = 1
    shown = _earlier_logs(nodes.client)
    assert shown == {"a": {"rank0-attempt0.0.log": 17, "rank0-attempt0.1.log": 15}}
    _, found = hostfollow.logs(str(tmp_path / "a"), shown["a"], final=True)
    assert dict(found) == {"other.log": "not a rank's\n", "rank0-attempt1.0.log": "resumed at step 20\n"}
