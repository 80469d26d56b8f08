"""A third backend, made here: what it can say of its runs, every command shows, and none asks who it is."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nodekit.deploy.backend import Backend, backend_of
from nodekit.deploy.commands.cli import main
from nodekit.deploy.connect.channel import HostChannel
from nodekit.deploy.launch.options import StopOptions
from nodekit.deploy.records import runs
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import Run, RunFolder
from nodekit.deploy.story.status import Status
from nodekit.deploy.supervise.state import Rules
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import dump, load_inventory
from nodekit.inventory.schema import Host, Inventory


class Cloud:
    """Its two nodes, ``a`` and ``b``, write into one folder, which is read through the host ``gate``."""

    poll_s = 0.1
    downs: ClassVar[list[str]] = []

    def up(self, inventory: Inventory, options: Any) -> int:
        print(f"up {inventory.name}, dry run {options.dry_run}")
        return 0

    def watch(self, run: Run, ssh: Any, *, plain: bool = False) -> int:
        print(f"watching {run.run_id}")
        return 0

    def down(self, run: Run, options: StopOptions) -> int:
        self.downs.append(run.run_id)
        return 0

    def sweep_status(self, members: list[Run], ssh: Any, *, as_json: bool) -> int:
        raise NotImplementedError

    def sweep_down(self, members: list[Run], options: StopOptions) -> int:
        raise NotImplementedError

    def status(self, run: Run, ssh: Any) -> Status:
        lines = dict.fromkeys("ab", "running  rank 0")
        return Status(state=run.state, lines=["instance i-1"], nodes=lines, data={"status": {}})

    def history(self, run: Run, ssh: Any) -> tuple[Run, list[Event]]:
        fields = {"attempt": "0.0", "rank": 1, "exitcode": 1, "error": "ValueError: boom", "when": 2.0}
        return run, [Event(2.0, "b", "worker-failed", fields)]

    def rules(self, run: Run, node: str) -> Rules:
        raise KitError(f"{node} is the cloud's")

    def still_there(self, run: Run, channels: Mapping[str, HostChannel]) -> str:
        return ""

    def hosts(self, run: Run, *, spare: bool = False) -> dict[str, Host]:
        values = {"name": "gate", "address": "127.0.0.1", "connection": "local", "python": sys.executable}
        return {"gate": Host.model_validate({**values, "workdir": "/tmp"})}

    def folders(self, run: Run) -> list[RunFolder]:
        return [RunFolder("gate", str(Path(run.nodes["a"]["node_dir"]).parent))]

    def record(self, run: Run, channels: Mapping[str, HostChannel]) -> Run:
        return run

    def nodes_at(self, record: Run, host: str) -> list[str]:
        return list(record.nodes)

    def is_over(self, run: Run, channels: Mapping[str, HostChannel], *, all_gone: bool) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("nodekit.deploy.ssh_backend.backend.SshBackend", Cloud)
    (tmp_path / "cloud.yaml").write_text("name: cloud\nhosts: {a: , b: }\n")
    inventory = load_inventory(tmp_path / "cloud.yaml")
    nodes = {}
    for number, name in enumerate("ab"):
        logs = tmp_path / "runs" / "cloud-1" / name / "logs"
        logs.mkdir(parents=True)
        (logs / f"rank{number}-attempt0.0.log").write_text(f"said by {name}\n")
        nodes[name] = {
            "name": name,
            "node_rank": number,
            "node_dir": str(logs.parent),
            "code_dir": str(tmp_path),
            "argv": ["python", "train.py"],
            "env": {"NODEKIT_OUTPUT_DIR": str(tmp_path)},
            "min_nodes": 1,
            "max_nodes": 2,
        }
    made = Run(
        run_id="cloud-1",
        name="cloud",
        inventory_path=str(inventory.path),
        inventory=dump(inventory),
        command=None,
        created=1.0,
        state="failed",
        nodes=nodes,
    )
    made.save()
    return made


@pytest.fixture
def kit(run: Run, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, and returns what it has printed."""

    def call(*argv: str, status: int = 0) -> str:
        assert main(argv) == status
        said = capsys.readouterr()
        return said.out + said.err

    return call


def test_it_is_a_backend(run: Run) -> None:
    cloud: Backend = Cloud()
    assert isinstance(backend_of(run), type(cloud))


def test_every_command_about_a_run_works_with_it(run: Run, kit: Callable[..., str], tmp_path: Path) -> None:
    assert kit("up", run.inventory_path, "--dry-run") == "up cloud, dry run True\n"
    assert kit("status").splitlines() == [
        "cloud-1  failed",
        "  instance i-1",
        "  a  running  rank 0",
        "  b  running  rank 0",
        "why: kit why cloud-1",
    ]
    assert json.loads(kit("status", "--json"))["run_id"] == "cloud-1"
    assert sorted(line.partition("| ")[2] for line in kit("logs").splitlines()) == ["said by a", "said by b"]
    assert kit("logs", "--node", "b").endswith("| said by b\n")
    assert "has no node 'c'; it has a, b" in kit("logs", "--node", "c", status=1)
    assert kit("logs", "--fetch").startswith("logs of 2 nodes are in ")
    assert "ValueError: boom" in kit("why")
    assert "cloud-1 failed" in kit("watch")
    assert (
        "ValueError: boom"
        in (kit("report", "-o", str(tmp_path / "page.html")), (tmp_path / "page.html").read_text())[1]
    )
    assert "cloud-1" in kit("runs")
    assert "cloud-1 has no best weights" in kit("test", status=1)
    assert kit("drain", "cloud-1", "a", status=1) == "kit: a is the cloud's\n"
    kit("down")
    assert Cloud.downs == ["cloud-1"]


def test_a_run_that_goes_on_is_watched_by_it(run: Run, kit: Callable[..., str]) -> None:
    with run.changing():
        run.state = "running"
    assert kit("watch") == "watching cloud-1\n"


def test_its_runs_are_removed(run: Run, kit: Callable[..., str]) -> None:
    folder = Path(run.nodes["a"]["node_dir"]).parent
    assert "cloud-1 is removed" in kit("rm", "cloud-1", "--yes")
    assert not folder.exists()
    assert runs.all_runs() == []
