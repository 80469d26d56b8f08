"""`kit selftest`: what it makes of what its parts found, what its report tells, and a real one without GPUs."""

from __future__ import annotations

import json
import re
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import warm_agents
import warm_kit
import yaml
from agents import until
from kit_runs import Kit

from nodekit.deploy.plan.check import Facts, Interface
from nodekit.deploy.plan.gpus import Gpu, HostGpus
from nodekit.deploy.records.events import Event
from nodekit.deploy.selftest import MEMORY_MARK, selftest_report
from nodekit.deploy.selftest.selftest_command import Done
from nodekit.deploy.selftest.selftest_report import Anonymous, Part, why_unmeasured
from nodekit.inventory.load import load_inventory

# --- what was found -----------------------------------------------------------------------------------------

EVENTS = [
    Event(1.0, "a", "workers-started", {}),
    Event(10.2, "a", "worker-failed", {}),
    Event(10.3, "b", "membership", {}),
    Event(10.5, "a", "attempt-ended", {}),
    Event(10.9, "b", "attempt-ended", {}),
    Event(11.2, "a", "rendezvous", {}),
    Event(11.3, "b", "workers-started", {}),
    Event(30.0, "b", "attempt-ended", {}),
]


def test_a_network_without_a_second_gpu_is_not_called_measured() -> None:
    note = "no all-reduce: gpu1 is one host, with 1 GPU"
    assert why_unmeasured({"pairs": [], "all_reduce": [], "notes": [note], "problems": []}) == note
    assert why_unmeasured({"pairs": [{"source": "a"}], "notes": [note]}) == ""
    assert why_unmeasured({"pairs": [], "notes": [note], "problems": ["gpu1: NCCL failed"]}) == ""
    assert why_unmeasured({}) == ""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            ["unbroken", "kit: the job fails even unbroken", "x failed: no GPU", "  resume  kit up"],
            "even unbroken\nx failed",
        ),
        (["one", "", " two "], "^one\ntwo$"),
        ([], "exit status 3"),
    ],
)
def test_why_a_command_failed_is_its_error(said: list[str], why: str) -> None:
    assert re.search(why, Done(code=3, out="", said=said, seconds=1.0).last_words)


def test_a_restart_is_divided_into_its_phases_which_add_up_to_the_whole() -> None:
    found = selftest_report.phases(EVENTS, 10.0, 4.0)
    assert found == pytest.approx(
        {"noticed": 0.2, "ranks ended": 0.7, "nodes met": 0.3, "ranks started": 0.1, "first step": 2.7}
    )
    assert sum(found.values()) == pytest.approx(4.0)


def test_phases_are_not_made_up_where_an_event_is_missing_or_nothing_resumed() -> None:
    assert selftest_report.phases(EVENTS, 10.0, None) == {}
    assert selftest_report.phases([e for e in EVENTS if e.kind != "rendezvous"], 10.0, 4.0) == {}


def drilled(
    sameness: str = "equal", problem: str = "", world_sizes: tuple[int, ...] = (2,)
) -> dict[str, Any]:
    return {
        "outcome": "not survived" if problem else "survived", "problem": problem, "detected_s": 0.2,
        "detected_by": "worker-failed on a", "resumed_s": 4.0, "steps_lost": 7, "world_sizes": [*world_sizes],
        "curve": {"sameness": sameness, "text": "±3e-05", "greatest_difference": None},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("result", "outcome", "says"),
    [
        (drilled(), "passed", "the unbroken run's, bit for bit; trained again after 4.0 s: noticed 0.2 s"),
        (drilled("same", world_sizes=(2, 1)), "passed", "to rounding (±3e-05)"),
        (drilled("near", world_sizes=(2, 1)), "failed", "near the unbroken run's (±3e-05): wanted"),
        (drilled("same"), "failed", "to rounding alone (±3e-05): wanted them bit for bit"),
        (drilled("unknown"), "failed", "no loss curve to compare"),
        (drilled("different", "its loss curve differs from step 41 on"), "failed", "differs from step 41 on"),
    ],
)
def test_a_fault_has_passed_when_the_curve_is_the_unbroken_runs(
    result: dict[str, Any], outcome: str, says: str
) -> None:
    part = selftest_report.of_drill("engine ddp", result, {"noticed": 0.2}, 30.0)
    assert part.outcome == outcome
    assert says in part.text


@pytest.mark.parametrize(
    ("steps_lost", "stayed", "outcome", "says"),
    [
        (0, {0, 2}, "passed", "; 2 other ranks kept their step"),
        (7, {0, 2}, "failed", "7 steps done again: wanted none"),
        (0, set(), "failed", "all ranks were started again: wanted the others to keep their processes"),
    ],
)
def test_where_ranks_keep_their_step_a_fault_has_passed_if_they_do(
    steps_lost: int, stayed: set[int], outcome: str, says: str
) -> None:
    part = selftest_report.of_drill(
        "engine ddp", {**drilled(world_sizes=(3,)), "steps_lost": steps_lost}, {}, 30.0, stayed=stayed
    )
    assert part.outcome == outcome
    assert says in part.text


def test_who_stayed_is_told_by_the_attempts_after_the_fault() -> None:
    events = [
        Event(1.0, "a", "workers-started", {"stayed": [9]}),
        Event(3.0, "a", "workers-started", {"stayed": [0, 2]}),
        Event(3.0, "b", "attempt-ended", {"stayed": [8]}),
    ]
    assert selftest_report.stayed(events, 2.0) == {0, 2}


def told(rank: int, attempt: int, free_mib: int) -> str:
    values = {"rank": rank, "attempt": attempt, "free_bytes": free_mib << 20, "total_bytes": 80 << 30}
    return MEMORY_MARK + json.dumps(values)


def test_memory_that_is_not_free_when_a_rank_starts_again_is_a_failure_with_the_engine_and_size() -> None:
    good = [told(0, 0, 80000), told(1, 0, 79000), told(1, 1, 78990), told(0, 1, 80000)]
    part = selftest_report.of_memory({"ddp": good, "fsdp": ["epoch 1"]})
    assert (part.outcome, part.values) == ("passed", {"kept_mib": {"ddp": 10}})
    part = selftest_report.of_memory({"ddp": good, "fsdp": [told(3, 0, 80000), told(3, 1, 60000)]})
    assert part.outcome == "failed"
    assert "fsdp: 20000 MiB" in part.text
    assert selftest_report.of_memory({"ddp": ["epoch 1"]}).outcome == "not tried"


# --- what is told of it -------------------------------------------------------------------------------------

SECRETS = [
    "acme",
    "gpu-17",
    "dgx.acme.example",
    "10.20.30.40",
    "fd00::17",
    "alice",
    "hf_abcdefghijklmnopqrstu",
]


@pytest.fixture
def hide(tmp_path: Path) -> Anonymous:
    path = tmp_path / "acme.yaml"
    path.write_text("hosts:\n  gpu-17: {address: dgx.acme.example, user: alice}\n")
    facts = Facts(
        host="gpu-17", hostname="dgx-h1", user="svc-train", python="3.11.2", executable="/v/bin/python",
        torch="2.13.0", modules=(), clock_offset_s=0.0, cpus=96, routes={}, gpus=HostGpus(), workdir="/w",
        workdir_problem=None, rsync=True, boot_id="b",
        interfaces=(Interface("eth0", True, ("fd00::17",)),),
    )  # fmt: skip
    return Anonymous(load_inventory(path), {"gpu-17": facts})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("gpu-17: torch 2.13.0, wanted 2.10", "node1: torch 2.13.0, wanted 2.10"),
        ("alice@dgx.acme.example: Permission denied", "USER@HOST: Permission denied"),
        ("dgx-h1: ran as svc-train", "node1: ran as USER"),
        ("connect to 10.20.30.40 port 29500: timed out", "connect to ADDRESS port 29500: timed out"),
        ("tcp://[fd00::17]:29500, or fd00::18:", "URL or ADDRESS:"),
        ("see https://git.acme.example/x?token=1", "see URL"),
        ("File /home/alice/my_run/train.py:12: in main", "File …/train.py:12: in main"),
        ("kit down acme-0123-1", "kit down INVENTORY-0123-1"),
        ("the driver is 550.54.15, 3:12:01, 1/2", "the driver is 550.54.15, 3:12:01, 1/2"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrstu", "HF_TOKEN=…"),
        ("mail bob@other.example about it", "mail USER@HOST about it"),
    ],
)
def test_a_text_is_told_without_names_addresses_paths_and_secrets(
    hide: Anonymous, text: str, wanted: str
) -> None:
    assert hide.text(text) == wanted


def test_the_report_tells_machines_and_parts_and_nothing_of_whose_they_are(hide: Anonymous) -> None:
    node = {
        "python": "3.11.2", "torch": "2.13.0", "torch_build": "cuda 13.0", "driver": "580.65.06",
        "gpus": ["NVIDIA H100 80GB HBM3, 81559 MiB"] * 8, "cpus": 96, "libraries": ["deepspeed"],
    }  # fmt: skip
    parts = [
        Part(
            name="check", outcome="failed", text="\n".join(SECRETS), values={"findings": [{"host": "gpu-17"}]}
        ),
        Part(name="memory", outcome="not tried", text="no GPU"),
    ]
    text = selftest_report.to_json("0.1.0", "2026-11-24", [node], parts, hide)
    markdown = selftest_report.to_markdown(text)
    assert "8 × NVIDIA H100 80GB HBM3, 81559 MiB" in markdown
    assert "| memory | not tried | 0 | no GPU |" in markdown
    assert selftest_report.WHAT_IS_IN_IT in markdown
    assert [secret for secret in SECRETS if secret in text + markdown] == []


def test_nodes_are_told_by_their_facts(hide: Anonymous) -> None:
    gpus = {"a": (Gpu(index=0, token="0", name="NVIDIA A100", memory_mib=40960),)}
    found = Facts(
        host="a", hostname="a", user="u", python="3.11.2", executable="/p", torch="2.13.0",
        torch_build="cuda 13.0", modules=("horovod", "deepspeed"), clock_offset_s=0.0, cpus=8, routes={},
        gpus=HostGpus(driver="580.1"), workdir="/w", workdir_problem=None, rsync=True, boot_id="b",
        interfaces=(),
    )  # fmt: skip
    (node,) = selftest_report.nodes({"a": found}, gpus)
    assert node["gpus"] == ["NVIDIA A100, 40960 MiB"]
    assert node["libraries"] == ["deepspeed", "horovod"]
    assert node["driver"] == "580.1"


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--engines", "fdsp"], "--engines: fdsp: no such engine; did you mean fsdp?"),
        (["-o", "there"], "-o there is there and not empty"),
    ],
)
def test_a_refusal_comes_before_anything_is_asked(tmp_path: Path, argv: list[str], says: str) -> None:
    kit = Kit(tmp_path / "project", None)
    (kit.folder / "there").mkdir()
    (kit.folder / "there/file").touch()
    done = kit.run("selftest", "local", *argv)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr


# --- real ones ----------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Kit:
    """Two nodes on this machine."""
    kit = Kit(tmp_path / "a project", None)
    kit.env = warm_kit.own_kits()
    values = {"connection": "local", "workdir": str(tmp_path / "work"), "hosts": {"n1": None, "n2": None}}
    values["python"] = warm_agents.program()
    (kit.folder / "mine.yaml").write_text(yaml.safe_dump(values))
    return kit


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen processes import torch here, each in its own time
def test_without_gpus_it_comes_to_a_clear_end_and_says_what_was_not_tried(project: Kit) -> None:
    done = project.run("selftest", "mine.yaml", "--engines", "ddp,single", "-o", "found", timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = project.folder / "found"
    report = json.loads((folder / "selftest.json").read_text())
    outcomes = {part["name"]: part["outcome"] for part in report["parts"]}
    assert outcomes == {
        "check": "passed",
        "network": "not tried",
        "engine ddp": "passed",
        "engine single": "not tried",
        "restart": "passed",
        "memory": "not tried",
        "NCCL hang": "not tried",
        "compare": "not tried",
    }
    assert {part["text"] for part in report["parts"] if part["name"] in ("network", "NCCL hang")} == {
        "no GPU"
    }
    (crash,) = [part for part in report["parts"] if part["name"] == "engine ddp"]
    assert crash["values"]["curve"]["sameness"] == "equal"
    phases = crash["values"]["phases"]
    assert sum(phases.values()) == pytest.approx(crash["values"]["resumed_s"], abs=0.01)
    assert [node["gpus"] for node in report["nodes"]] == [[], []]
    assert "3 passed, 5 not tried" in done.stdout
    assert "the report, to send: found/selftest.md" in done.stdout
    for file in folder.glob("*.*"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    for name in ("selftest.json", "selftest.md"):
        assert "127.0.0.1" not in (folder / name).read_text()
        assert "a project" not in (folder / name).read_text()


@pytest.mark.slow
def test_ctrl_c_ends_what_runs_and_still_writes_the_report(project: Kit) -> None:
    selftest = project.start("selftest", "mine.yaml", "--engines", "ddp", "-o", "found")
    work = project.folder.parent / "work"
    until(lambda: list(work.glob("runs/*/n*/progress/*")) or selftest.poll() is not None, what="a step")
    selftest.send_signal(signal.SIGINT)
    assert selftest.wait(120) == 130, project.log()
    (run,) = json.loads(project.run("runs", "--json").stdout)
    assert run["state"] == "stopped"
    report = json.loads((project.folder / "found/selftest.json").read_text())
    assert [part["name"] for part in report["parts"]] == ["check", "network"]
