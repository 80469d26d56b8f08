"""What is done to nodes by several threads at once: the record is only read, and channels may come and go."""

import contextlib
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nodes import NAMES, STATUS, FakeChannel, Nodes
from test_plan import facts

from nodekit.deploy.connect.channel import RemoteError
from nodekit.deploy.host.node.agents import COPYING_GRACE_S
from nodekit.deploy.plan import check
from nodekit.deploy.plan.check import Interface
from nodekit.deploy.plan.gpus import Gpu, HostGpus
from nodekit.deploy.plan.plan import NodePlan
from nodekit.deploy.records.events import Gatherer
from nodekit.deploy.supervise import node_client, policy
from nodekit.deploy.supervise.node_client import BrokenHost
from nodekit.deploy.supervise.state import Rules, State
from nodekit.deploy.sync import sync
from nodekit.deploy.sync.sync import Target
from nodekit.inventory.errors import HostError, KitError, NotWritten
from nodekit.inventory.load import load_inventory


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


def state(nodes: Nodes) -> State:
    return policy.begin(Rules.of(nodes.inventory), generation=3, host="a", port=4711, nodes=("a", "b"))


def start_anew(nodes: Nodes, name: str, *, is_new: bool) -> NodePlan:
    """Start it, with a supervisor that records what it runs; that."""
    recorded: list[NodePlan] = []

    def record(name: str, node: NodePlan, clock_offset_s: float) -> None:
        recorded.append(node)
        nodes.run.nodes = {**nodes.run.nodes, name: vars(node)}

    nodes.client.start_anew(name, state(nodes), is_new=is_new, stands_by=lambda: False, record=record)
    (node,) = recorded
    return node


def test_what_a_node_runs_is_on_record_before_it_does(nodes: Nodes) -> None:
    recorded: list[tuple[str, NodePlan, int]] = []

    def record(name: str, node: NodePlan, clock_offset_s: float) -> None:
        recorded.append((name, node, len(nodes.of("prestart"))))
        nodes.run.nodes = {**nodes.run.nodes, name: vars(node)}

    before = (nodes.run.folder / "run.json").read_bytes()
    nodes.client.start_anew("c", state(nodes), is_new=True, stands_by=lambda: False, record=record)

    ((name, node, num_warm),) = recorded
    assert (name, num_warm) == ("c", 0)
    asked = [operation for _, operation, _ in nodes.calls]
    # What was sent to it before may be gone, as from a scratch folder that is swept.
    assert asked.index("tree.keep_package") < asked.index("prestart") < asked.index("start")
    ((_, given),) = nodes.of("start")
    assert (given["spec"]["generation"], given["spec"]["local_addr"]) == (3, node.local_addr)
    assert (nodes.run.folder / "run.json").read_bytes() == before, "that is the supervisor's to write"


@pytest.mark.parametrize(
    ("argv", "run_by_c"),
    [
        (
            ["python", "-u", "t.py", "--name={node}", "{run_id}", "{snapshot_dir}/last"],
            ["python", "-u", "t.py", "--name=c", "lab-1", "/home/train/nodekit/runs/lab-1/c/snapshots/last"],
        ),
        ([], ["t.py", "as an older kit has recorded it"]),
    ],
)
def test_a_node_that_comes_later_runs_the_command_with_its_own_names(
    nodes: Nodes, argv: list[str], run_by_c: list[str]
) -> None:
    nodes.run.argv = argv
    nodes.run.nodes["a"]["argv"] = ["t.py", "as an older kit has recorded it"]
    started = start_anew(nodes, "c", is_new=True)
    assert list(started.argv) == list(nodes.of("start")[0][1]["spec"]["argv"]) == run_by_c


@pytest.mark.parametrize(
    ("there", "here", "outcome"),
    [
        ("run's", "changed", "kept"),
        ("old", "run's", "sent"),
        ("", "run's", "sent"),
        (
            "old",
            "changed",
            "c: it has another version of this run's code, and the code here has changed since",
        ),
        ("", "changed", "c: it has no copy of this run's code, and the code here has changed since"),
        ("", "run's", "c: disk full"),
    ],
)
def test_a_node_trains_with_the_code_that_the_others_have(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, there: str, here: str, outcome: str
) -> None:
    """One that was away when the run was resumed has that of the start before."""
    sent: list[str] = []

    def send(tree: Any, targets: dict[str, Target], **_: Any) -> dict[str, None]:
        assert not nodes.of("start")
        sent.extend(each.dest for each in targets.values())
        return {"c": HostError("c", "disk full")} if "disk full" in outcome else {}

    nodes.run.is_placed, nodes.run.code_digest = False, "run's"
    nodes.answers["tree.digest_at"] = lambda *_: there
    tree = SimpleNamespace(digest=here, root=Path("/here"))
    monkeypatch.setattr(node_client, "list_code", lambda *_: tree)
    monkeypatch.setattr(sync, "send", send)
    if outcome in ("kept", "sent"):
        node = start_anew(nodes, "c", is_new=True)
        assert sent == ([node.code_dir] if outcome == "sent" else [])
        return
    with pytest.raises(HostError, match=outcome):
        start_anew(nodes, "c", is_new=True)
    assert nodes.of("start") == []
    if not sent:
        assert "c" not in nodes.run.nodes, "its agent of then would be called in"
        assert nodes.of("prestart") == []


def test_a_node_is_examined_for_the_script_that_it_has_itself(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the first start: the file may be on the disk that was replaced."""
    asked: list[Any] = []

    def gather(*_: Any, files: Any, **__: Any) -> None:
        asked.append(list(files))
        raise KitError("that is all")

    monkeypatch.setattr(check, "gather", gather)
    nodes.run.argv = ["python", "/opt/train.py"]
    with pytest.raises(KitError, match="that is all"):
        start_anew(nodes, "b", is_new=False)
    assert asked == [["/opt/train.py"]]


@pytest.mark.parametrize("name", ["a", "b"])
def test_all_meet_at_the_port_that_the_rendezvous_host_has_reserved(nodes: Nodes, name: str) -> None:
    nodes.answers["hold_port"] = lambda *_: 4712
    start_anew(nodes, name, is_new=False)
    ((_, given),) = nodes.of("start")
    wanted = (4712, 4712) if name == "a" else (None, 4711)
    assert (given["port"], given["spec"]["master_port"]) == wanted


@pytest.mark.parametrize("is_placed", [True, False])
def test_secrets_go_over_a_channel_that_is_encrypted_and_no_other(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_placed: bool
) -> None:
    """In a Slurm job the agent reads them from the run's folder."""
    nodes.run.is_placed = is_placed
    monkeypatch.setattr(node_client, "secrets_file", lambda _, which: tmp_path / which)
    nodes.client.prestart("a", {"TOKEN": "s3cret"})
    ((_, given),) = nodes.of("prestart")
    assert given["env"].get("TOKEN") == (None if is_placed else "s3cret")
    assert given.get("env_file") == (str(tmp_path / node_client.RANKS) if is_placed else None)


def test_ranks_have_their_whole_grace_and_their_agent_more_before_the_call_times_out(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    call = FakeChannel.call

    def timed(channel: FakeChannel, op: str, *, timeout_s: float, **args: Any) -> Any:
        limits.append(timeout_s)
        return call(channel, op, timeout_s=timeout_s, **args)

    monkeypatch.setattr(FakeChannel, "call", timed)
    nodes.client.stop_all(grace_s=20, force=True)
    nodes.client.stop("a", grace_s=20)
    given = [args for _, args in nodes.of("stop")]
    assert [each["force"] for each in given] == [True, True, False]
    assert [each["grace_s"] > 20 for each in given] == [True] * 3
    assert all(limit > each["grace_s"] + COPYING_GRACE_S for limit, each in zip(limits, given, strict=True))


def test_what_is_gathered_is_of_this_runs_folder_on_each_node(nodes: Nodes) -> None:
    nodes.client.gather_events(Gatherer(nodes.run.folder))
    for op in ("hostfollow.events", "status"):
        found = {name: args["node_dir"] for name, args in nodes.of(op)}
        assert found == {name: nodes.client.node(name).node_dir for name in ("a", "b")}


def test_a_broken_host_is_noted_in_the_workdir_of_the_host_itself(nodes: Nodes) -> None:
    nodes.client.remember("b", "GPU 1 is lost")
    assert nodes.of("broken.remember") == [
        ("b", {"workdir": "/home/train/nodekit", "node": "b", "run": "lab-1", "why": "GPU 1 is lost"})
    ]


def test_an_agent_that_the_stop_before_a_resume_did_not_reach_is_ended(nodes: Nodes) -> None:
    def stopped(host: str, args: dict[str, Any]) -> dict[str, Any]:
        assert (host, args["for_good"]) == ("c", False)
        assert host not in nodes.run.nodes
        return {"was": "running", "killed": False}

    nodes.answers["stop"] = stopped
    start_anew(nodes, "c", is_new=True)
    start_anew(nodes, "b", is_new=False)
    assert len(nodes.of("stop")) == 1


@pytest.mark.parametrize("op", ["prestart", "start"])
@pytest.mark.parametrize("alive", [True, False])
def test_a_node_that_an_earlier_request_has_started_meanwhile_is_not_told_of_as_not_started(
    nodes: Nodes, op: str, *, alive: bool
) -> None:
    """It was given up while its host was silent, and came through; the agent that there is goes on."""

    def refuse(host: str, args: dict[str, Any]) -> None:
        raise RemoteError(host, {"type": "RuntimeError", "message": "one is alive already", "traceback": ""})

    nodes.answers |= {op: refuse, "status": lambda *_: {**STATUS, "alive": alive}}
    with contextlib.nullcontext() if alive else pytest.raises(RemoteError, match="alive already"):
        start_anew(nodes, "c", is_new=True)


def test_a_node_that_cannot_be_recorded_is_not_started(nodes: Nodes) -> None:
    def record(name: str, node: NodePlan, clock_offset_s: float) -> None:
        raise NotWritten("no room")

    with pytest.raises(KitError, match="no room"):
        nodes.client.start_anew("b", state(nodes), is_new=False, stands_by=lambda: False, record=record)
    assert nodes.of("prestart") == nodes.of("start") == []


@pytest.mark.parametrize(
    ("others_gpus", "changes", "refusal"),
    [
        ([], {}, ""),
        ([0], {"num_gpus": 1}, ""),
        ([], {"torch": "2.12.1"}, "c: torch 2.12.1, but 2 of the hosts have 2.13.0, wanted the same on all"),
        ([0], {}, "c: no GPU, but a, b have some; a job runs on GPUs everywhere or nowhere"),
        ([], {"num_gpus": 1}, "a, b: no GPU, but c have some"),
    ],
)
def test_a_node_that_comes_later_has_what_those_have_who_train(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch,
    others_gpus: list[int], changes: dict[str, Any], refusal: str,
) -> None:  # fmt: skip
    for each in nodes.run.nodes.values():
        each["gpus"] = others_gpus
    found = facts("c", Interface("eth0", True, ("10.0.0.3",)), **changes)
    monkeypatch.setattr(check, "gather", lambda *_, **__: {"c": found})
    with pytest.raises(KitError, match=re.escape(refusal)) if refusal else contextlib.nullcontext():
        start_anew(nodes, "c", is_new=True)
    assert ("c" in nodes.run.nodes) == bool(nodes.of("start")) == (not refusal)


@pytest.mark.parametrize("torch", ["2.12.1", "2.13.0"])
def test_a_node_that_comes_back_has_what_the_others_have_and_not_what_it_had(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, torch: str
) -> None:
    nodes.run.nodes["a"]["torch"] = "2.12.1"
    found = facts("b", Interface("eth0", True, ("10.0.0.2",)), torch=torch)
    monkeypatch.setattr(check, "gather", lambda *_, **__: {"b": found})
    is_same = torch == "2.12.1"
    with contextlib.nullcontext() if is_same else pytest.raises(KitError, match=r"1 of the hosts have 2\.12"):
        assert start_anew(nodes, "b", is_new=False).torch == torch


@pytest.mark.parametrize(
    ("there", "problem", "refusal"),
    [
        ((0, 1), "", ""),
        ((0,), "", "b: of the 2 GPUs that this node was planned with, nvidia-smi does not list 1"),
        ((), "GPU is lost.", "b: its GPUs cannot be listed: nvidia-smi: GPU is lost."),
        ((), "no answer within 15 s", ""),
    ],
)
def test_a_host_that_comes_back_with_fewer_gpus_than_planned_is_broken(
    nodes: Nodes, there: tuple[int, ...], problem: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.run.nodes["b"]["gpus"] = [0, 1]
    found = facts(
        "b", gpus=HostGpus(usable=tuple(Gpu(index=each, token=str(each)) for each in there), problem=problem)
    )
    if not refusal:
        nodes.client._refuse_broken("b", found)
        return
    monkeypatch.setattr(check, "gather", lambda *_, **__: {"b": found})
    with pytest.raises(BrokenHost) as refused:
        start_anew(nodes, "b", is_new=False)
    assert str(refused.value).startswith(refusal)
    assert "kit clean --forgive" in refused.value.problem.cure
    assert nodes.of("prestart") == []


def test_a_node_that_is_not_to_be_had_is_told_by_its_name(nodes: Nodes) -> None:
    with pytest.raises(HostError, match="c: it was never started in this run"):
        nodes.client.fence("c", 4)
    del nodes.client.channels["b"]
    with pytest.raises(HostError, match="b: the connection is gone"):
        nodes.client.fence("b", 4)


@pytest.mark.parametrize("act", ["stop_all", "gather_events"])
def test_links_come_and_go_while_all_nodes_are_asked(nodes: Nodes, act: str) -> None:
    channels = nodes.client.channels

    class Busy(dict[str, Any]):
        """Whenever it is looked into, the thread that follows d loses its channel, or has a new one."""

        def __contains__(self, name: object) -> bool:
            if channels.pop("d", None) is None:
                channels["d"] = FakeChannel("d", nodes)
            return super().__contains__(name)

    nodes.run.nodes = Busy(dict.fromkeys(NAMES, nodes.run.nodes["a"]))
    if act == "stop_all":
        found = nodes.client.stop_all()
        assert {"a", "b", "c"} <= set(found)
        assert all(each == {"was": "running", "killed": False} for each in found.values())
    else:
        nodes.client.gather_events(Gatherer(nodes.run.folder))
        assert {name for name, _ in nodes.of("hostfollow.events")} >= {"a", "b", "c"}


def test_a_workdir_of_a_user_that_does_not_exist_makes_no_folder_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("i.yaml").write_text("connection: local\nworkdir: ~no-such-user/kit\nhosts: {n: }\n")
    node_client.list_code(load_inventory("i.yaml"), ["train.py"])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["i.yaml", "train.py"]


@pytest.mark.parametrize("with_git", [True, False])
def test_a_nodes_folder_within_the_code_is_not_sent(tmp_path: Path, with_git: bool) -> None:
    """As where this repository is cloned to ~/nodekit, and inventory/local.yaml has ~/nodekit/local."""
    (tmp_path / "train.py").write_text("")
    if with_git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    file = tmp_path / "local.yaml"

    def sent(workdir: str) -> set[str]:
        file.write_text(
            f"connection: local\nworkdir: {tmp_path}/{workdir}\nhosts: {{n: }}\njob: {{code: {tmp_path}}}\n"
        )
        tree = node_client.list_code(load_inventory(file), ["train.py"])
        return {each.path for each in tree.entries}

    assert {"train.py"} <= sent("local")
    (tmp_path / "local/runs/lab-1/n").mkdir(parents=True)
    (tmp_path / "local/runs/lab-1/n/spec.json").write_text("the run's token")
    (tmp_path / "local/notes.txt").write_text("the user's")
    assert {"train.py", "local/notes.txt"} <= sent("local")
    assert not any(path.startswith("local/runs") for path in sent("local"))
    with pytest.raises(KitError, match=r"is in .*, the folder that is sent"):
        sent(".")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.kitignore").write_text("# the user's\n")
    with pytest.raises(KitError, match="leave it out by a line in"):
        sent("other")
    assert (tmp_path / "other/.kitignore").read_text() == "# the user's\n"
