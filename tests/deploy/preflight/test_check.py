"""`kit check` and `kit clean`: what is wrong with a host is found, named and given a cure."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from agents import until
from kit_runs import Kit, run_id
from lab_hosts import BUSY_S
from places import RECORDED
from test_plan import facts, gpus_there, inventory

from nodekit.deploy.commands.cli import main
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.host import processes
from nodekit.deploy.host.probes import leftovers as host_leftovers
from nodekit.deploy.host.probes import probes
from nodekit.deploy.host.probes.gpu.xids import parse_xids
from nodekit.deploy.launch import start
from nodekit.deploy.launch.options import Options
from nodekit.deploy.plan import script
from nodekit.deploy.plan.check import clocks, examine
from nodekit.deploy.plan.findings import Finding
from nodekit.deploy.plan.gpus import Gpu, HostGpus
from nodekit.deploy.plan.script import Script
from nodekit.deploy.preflight import check_report, checkup, leftovers, nvidia_smi, software, visits
from nodekit.deploy.preflight.checkup import Report, Seen
from nodekit.deploy.preflight.nvidia_smi import SmiError
from nodekit.deploy.records.runs import Run
from nodekit.deploy.ssh_backend.backend import SshBackend
from nodekit.inventory.errors import HostError, KitError
from nodekit.slurm.backend import SlurmBackend

A100 = "nvidia-smi-535.54.03-a100-mig.xml"
ADA = "nvidia-smi-595.84-rtx4000ada.xml"
T4 = "nvidia-smi-515.105.01-t4.xml"
GB = 10**9


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def probe(**changes: Any) -> dict[str, Any]:
    """What a healthy host answers; keyword arguments replace fields of its parts."""
    parts: dict[str, dict[str, Any]] = {
        "software": {
            "nccl": "2.27.3",
            "missing": [],
            "syntax": None,
            "locale": None,
            "encoding": "utf-8",
            "nofile": [1024, 524288],
            "memlock": [8 << 20, 8 << 20],
            "shm": {"size_bytes": 64 * GB, "free_bytes": 64 * GB, "writable": True},
            "build_locks": [],
            "infiniband": [],
        },
        "workdir": {"problem": None, "errno": "", "quota": "", "free_inodes": 10**7},
        "gpus": {
            "smi": "",
            "problem": "",
            "topo": "",
            "p2p": "",
            "owners": {},
            "xid": [],
            "inforom": [],
            "num_cards": 1,
        },
        "runs": {"runs": [], "broken": {}},
    }
    for name, value in changes.items():
        part = next(part for part in parts.values() if name in part)
        part[name] = value
    return parts


def examined(tmp_path: Path, text: str, **hosts: tuple[Any, dict[str, Any]]) -> list[Finding]:
    found = inventory(tmp_path, text)
    seen = {name: Seen(facts=own, probe=answer) for name, (own, answer) in hosts.items()}
    return checkup.examine(found, seen, Script(name="train.py", source="import torch"))


def wrong(findings: list[Finding]) -> list[tuple[str, str, str, str]]:
    return [(each.host, each.check, each.level, each.found) for each in findings if each.level != "ok"]


# --- nvidia-smi ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "driver", "model", "memory_mib", "persistence", "uncorrectable", "processes"),
    [
        ("nvidia-smi-418.43-gtx1660ti.xml", "418.43", "Graphics Device", 5912, False, None, ()),
        (T4, "515.105.01", "Tesla T4", 15360, False, 0, ((675, "G", 22), (5762, "C", 1005))),
        ("nvidia-smi-525.125.06-p2000.xml", "525.125.06", "Quadro P2000", 5120, True, None, ()),
        (A100, "535.54.03", "NVIDIA A100-SXM4-80GB", 81920, False, 0, ()),
        ("nvidia-smi-570.124.04-rtx3060.xml", "570.124.04", "NVIDIA GeForce RTX 3060", 12288, True, None, ()),
        (ADA, "595.84", "NVIDIA RTX 4000 SFF Ada Generation", 20475, True, None,
         ((1842, "G", 410), (3190, "G", 451), (4937, "C", 160), (34626, "C+G", 183))),
    ],
)  # fmt: skip
def test_nvidia_smi_is_read_as_drivers_of_all_years_write_it(
    name: str,
    driver: str,
    model: str,
    memory_mib: int,
    persistence: bool,
    uncorrectable: int | None,
    processes: Any,
) -> None:
    smi = nvidia_smi.parse(recorded(name))
    (gpu,) = smi.gpus
    assert (smi.driver, gpu.name, gpu.memory_mib) == (driver, model, memory_mib)
    assert (gpu.persistence, gpu.uncorrectable) == (persistence, uncorrectable)
    assert tuple((each.pid, each.kind, each.memory_mib) for each in gpu.processes) == processes
    assert not gpu.slowdowns
    assert not gpu.needs_reset
    assert not gpu.is_broken
    assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}", gpu.bus)


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed", "<html></html>", "<nvidia_smi_log>"])
def test_what_is_not_nvidia_smis_is_an_error_and_no_traceback(text: str) -> None:
    with pytest.raises(SmiError, match="nvidia-smi -q -x wrote"):
        nvidia_smi.parse(text)


@pytest.mark.parametrize(
    ("name", "cells", "links"),
    [
        ("nvidia-smi-topo-m-2017.txt", 4 * 7, "PHB PIX SYS"),
        ("nvidia-smi-topo-m-5gpus.txt", 20, "NODE PHB"),
        ("nvidia-smi-topo-m-a100.txt", 6 * 7, "NV8"),
        ("nvidia-smi-topo-p2p-gns.txt", 2, "GNS"),
        ("nvidia-smi-topo-p2p-ok.txt", 20, "OK"),
    ],
)
def test_the_matrix_of_links_is_read_network_cards_and_legend_left_out(
    name: str, cells: int, links: str
) -> None:
    matrix = nvidia_smi.parse_matrix(recorded(name))
    assert len(matrix) == cells
    assert nvidia_smi.links(matrix, range(16)) == links
    assert nvidia_smi.links(matrix, [0]) == ""


def test_underlined_heads_of_the_matrix_are_read_too() -> None:
    text = (
        recorded("nvidia-smi-topo-m-5gpus.txt")
        .replace("\tGPU0", "\t\x1b[4mGPU0", 1)
        .replace("GPU4\t", "GPU4\x1b[0m\t", 1)
    )
    assert nvidia_smi.parse_matrix(text)[0, 4] == "NODE"


def test_xids_are_read_with_the_bus_they_are_of() -> None:
    xids = parse_xids(recorded("kernel-log-xid.txt").splitlines())
    assert [(xid.bus, xid.number) for xid in xids] == [
        ("0000:af:00", 13), ("0000:af:00", 31), ("0000:01:00", 31), ("0000:01:00", 79), ("0000:44:00", 79),
    ]  # fmt: skip


def test_an_nvidia_smi_that_does_not_end_is_told_in_time(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    program = "from nodekit.deploy.host import processes; print(processes.output(['nvidia-smi', '-q'], 0.4))"
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.strip() == "('', 'no answer within 0 s')", done.stderr
    assert processes.output(["sh", "-c", "echo Unable to determine; exit 9"], 5) == (
        "",
        "Unable to determine",
    )
    assert processes.output(["no-such-program"], 5) == ("", "not installed")


ONE = "hosts: {gpu1: }\n"


def whole_a100() -> str:
    """A healthy one, that is not divided."""
    smi = recorded(A100).replace("<persistence_mode>Disabled", "<persistence_mode>Enabled")
    return smi.replace("<current_mig>Enabled", "<current_mig>Disabled")


def on_gpus(tmp_path: Path, text: str = ONE, **changes: Any) -> list[tuple[str, str]]:
    found = examined(tmp_path, text, gpu1=(facts("gpu1", num_gpus=1), probe(**changes)))
    return [(each.level, str(each.problem)) for each in found if each.check == "gpus" and each.level != "ok"]


def test_a_healthy_gpu_is_told_by_its_name(tmp_path: Path) -> None:
    smi = whole_a100()
    found = examined(tmp_path, ONE, gpu1=(facts("gpu1", num_gpus=1), probe(smi=smi)))
    assert [each.found for each in found if each.check == "gpus"] == ["1 × A100-SXM4-80GB"]


def test_another_model_than_the_inventorys_is_named(tmp_path: Path) -> None:
    smi = whole_a100()
    assert on_gpus(tmp_path, "hosts: {gpu1: {gpu_model: a100-sxm4}}\n", smi=smi) == []
    assert on_gpus(tmp_path, "gpu_model: H100\nhosts: {gpu1: }\n", smi=smi) == [
        ("failure", "GPU 0 is: NVIDIA A100-SXM4-80GB, wanted `gpu_model: H100`; name those to use as "
         "`gpus: [0, 1]`, or mend `gpu_model:` in the inventory"),
    ]  # fmt: skip


def test_anothers_process_is_named_with_its_owner_and_memory_and_a_desktops_is_not(tmp_path: Path) -> None:
    found = on_gpus(tmp_path, smi=recorded(ADA), owners={"4937": "alice", "34626": ""})
    assert found == [
        ("warning", "GPU 0 is used by pid 4937 of alice: python, 160 MiB, wanted a free GPU; "
         "end it there, once alice agrees; or name other GPUs as `gpus: [0, 1]`"),
        ("warning", "GPU 0 is used by pid 34626 (of another container): /usr/lib/chromium/chromium, 183 MiB, "
         "wanted a free GPU; end it there, once its owner agrees; or name other GPUs as `gpus: [0, 1]`"),
    ]  # fmt: skip


def test_a_process_of_a_run_of_ours_is_told_as_that(tmp_path: Path) -> None:
    run = {"run": "lab-1", "node": "gpu1", "node_dir": "/r", "agent": 7, "state": "running", "shm": [],
           "quiet_s": 1.0, "processes": [{"pid": 4937, "rank": 0, "rss_bytes": GB, "ports": []}]}  # fmt: skip
    found = on_gpus(tmp_path, smi=recorded(ADA), owners={"4937": "train"}, runs=[run])
    assert "160 MiB, of lab-1, wanted a free GPU; kit down lab-1, or kit clean" in found[0][1]


@pytest.mark.parametrize(
    ("of", "to", "level", "message"),
    [
        (r"<dram_uncorrectable>0", "<dram_uncorrectable>3", "failure", "GPU 0: 3 uncorrectable ECC errors"),
        ("<pending_retirement>No", "<pending_retirement>Yes", "warning", "GPU 0: a repair of its memory waits"),
        ("hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active", "warning",
         "GPU 0 is slowed down: hw_thermal_slowdown"),
        ("sw_power_cap>Not Active", "sw_power_cap>Active", "", ""),
        ("<persistence_mode>Enabled", "<persistence_mode>Disabled", "warning", "persistence mode is off (GPU 0)"),
        ("<compute_mode>Default", "<compute_mode>Exclusive_Process", "warning",
         "GPU 0: its compute mode is Exclusive_Process: one process at a time"),
        ("<compute_mode>Default", "<compute_mode>Prohibited", "failure",
         "GPU 0: its compute mode is Prohibited: no process"),
        ("</compute_mode>", "</compute_mode><fabric><state>In Progress</state><status>N/A</status></fabric>",
         "failure", "GPU 0 has not joined its NVSwitch fabric: In Progress;"),
        ("</compute_mode>", "</compute_mode><fabric><state>Completed</state><status>Insufficient Resources</status>"
         "</fabric>", "failure", "GPU 0 has not joined its NVSwitch fabric: Completed, Insufficient Resources;"),
        ("</compute_mode>", "</compute_mode><fabric><state>Completed</state><status>Success</status></fabric>",
         "", ""),
    ],
)  # fmt: skip
def test_what_nvidia_smi_marks_as_unwell_is_told(
    tmp_path: Path, of: str, to: str, level: str, message: str
) -> None:
    smi = (
        recorded(T4)
        .replace("<type>C<", "<type>G<")
        .replace("<persistence_mode>Disabled", "<persistence_mode>Enabled")
    )
    assert of in smi
    assert on_gpus(tmp_path, smi=smi) == []
    found = on_gpus(tmp_path, smi=smi.replace(of, to, 1))
    assert [(each, text[: len(message)]) for each, text in found] == ([(level, message)] if level else [])
    assert all("; " in text for _, text in found)


# The warning stands below the table, whose status it is; `-q -x` is right without it on some drivers.
CORRUPT_SMI = """#!/bin/sh
case "$*" in
"-q -x") cat {xml}{also}; exit {status} ;;
"topo -m" | "topo -p2p r") echo; exit 14 ;;
"") echo "+----+"; echo "WARNING: infoROM is corrupted at gpu {address}"; exit 14 ;;
--query-gpu=*) echo "0, GPU-1, 570.124.06, 15360, Tesla T4"; exit 14 ;;
*) echo "unknown: $*" >&2; exit 2 ;;
esac
"""


@pytest.mark.parametrize(
    ("status", "address", "told"),
    [(0, "0000:01:00.0", True), (14, "00000000:01:00.0", True), (14, "0000:02:00.0", False)],
)
def test_a_corrupt_inforom_is_told_of_the_gpu_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, address: str, told: bool
) -> None:
    (tmp_path / "smi.xml").write_text(whole_a100())
    (tmp_path / "warning").write_text(f"WARNING: infoROM is corrupted at gpu {address}\n")
    program = tmp_path / "nvidia-smi"
    also = f" {tmp_path}/warning" if status else ""
    program.write_text(
        CORRUPT_SMI.format(xml=tmp_path / "smi.xml", also=also, status=status, address=address)
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    answer = probes.probe(str(tmp_path / "work"))["gpus"]
    assert answer["problem"] == ""
    found = on_gpus(tmp_path, **{key: answer[key] for key in ("smi", "inforom")})
    text = "GPU 0: its infoROM is corrupt (nvidia-smi exits with 14): it may forget its errors, wanted"
    assert [(level, each[: len(text)]) for level, each in found] == ([("warning", text)] if told else [])


@pytest.mark.parametrize(
    ("num_gpus", "token", "level"), [(1, "0", "warning"), (2, "0", "failure"), (1, "MIG-2b6a", "")]
)
def test_gpus_that_are_divided_by_mig_are_told_unless_an_instance_is_meant(
    tmp_path: Path, num_gpus: int, token: str, level: str
) -> None:
    smi = recorded(A100).replace("<persistence_mode>Disabled", "<persistence_mode>Enabled")
    gpu = smi[smi.index("<gpu id") : smi.index("</gpu>") + len("</gpu>")]
    usable = tuple(Gpu(index=index, token=token) for index in range(num_gpus))
    there = dataclasses.replace(facts("gpu1"), gpus=HostGpus(usable=usable))
    found = examined(tmp_path, ONE, gpu1=(there, probe(smi=smi.replace(gpu, gpu * num_gpus))))
    told = [(each.level, each.found) for each in found if each.check == "gpus" and each.level != "ok"]
    names = "0, 1" if num_gpus == 2 else "0"
    text = f"GPU {names}: divided by MIG, and CUDA shows a process one instance"
    assert told == ([(level, text)] if level else [])


def test_of_hardware_that_kit_has_not_been_run_on_that_is_told(tmp_path: Path) -> None:
    usable = tuple(Gpu(index=index, token=str(index), name="AMD gfx90a") for index in range(2))
    there = dataclasses.replace(facts("gpu1"), gpus=HostGpus(usable=usable, kind="amd"))
    found = examined(tmp_path, ONE, gpu1=(there, probe(num_cards=0)))
    (told,) = [each for each in found if each.check == "gpus"]
    assert told.level == "warning"
    assert told.found == (
        "2 × AMD gfx90a: kit has not been run on AMD hardware (counted by the kernel's amdkfd, hidden by "
        "HIP_VISIBLE_DEVICES, nccl)"
    )


def test_a_newer_xid_is_told_with_its_meaning(tmp_path: Path) -> None:
    lines = [f"NVRM: Xid (PCI:0000:01:00): {number}, pid='<unknown>', text" for number in (145, 154, 13)]
    assert [text.split(" ×")[0] for _, text in on_gpus(tmp_path, smi=whole_a100(), xid=lines)] == [
        "GPU 0: Xid 145 (an NVLink error)",
        "GPU 0: Xid 154 (it wants a reset or a reboot)",
    ]


def test_an_xid_is_told_for_the_gpu_it_is_of_and_a_programs_own_fault_is_not(tmp_path: Path) -> None:
    smi = whole_a100()  # at 01:00
    lines = recorded("kernel-log-xid.txt").splitlines()
    found = on_gpus(tmp_path, smi=smi, xid=lines)
    assert [(level, text.split(",")[0]) for level, text in found] == [
        ("failure", "GPU 0: Xid 79 (it has fallen off the bus) × 1 since the last boot"),
        ("failure", "the GPU at 0000:44:00 has fallen off the bus (Xid 79)"),
    ]


@pytest.mark.parametrize(
    ("text", "num_cards", "level"),
    [
        ("gpus: 1\n", 1, "failure"),
        ("", 1, "warning"),
        ("", 0, ""),  # the driver's programs are there, and no GPU
        ("gpus: 0\n", 1, ""),
    ],
)
def test_an_nvidia_smi_that_hangs_is_told_where_gpus_are_wanted(
    tmp_path: Path, text: str, num_cards: int, level: str
) -> None:
    answer = probe(num_cards=num_cards)
    answer["gpus"]["problem"] = "no answer within 6 s"
    found = examined(tmp_path, text + ONE, gpu1=(facts("gpu1", num_gpus=text.count("1")), answer))
    assert wrong(found) == ([("gpu1", "gpus", level, "nvidia-smi: no answer within 6 s")] if level else [])


def test_hosts_whose_gpus_or_links_differ_are_named(tmp_path: Path) -> None:
    # A whole node of two for each: the recorded GPU twice.
    smi = whole_a100()
    gpu = smi[smi.index("<gpu id") : smi.index("</gpu>") + len("</gpu>")]
    smi = smi.replace(gpu, gpu * 2)
    topo = recorded("nvidia-smi-topo-m-a100.txt")
    hosts = {f"gpu{n}": (facts(f"gpu{n}", num_gpus=2), probe(smi=smi, topo=topo)) for n in (1, 2, 3, 4)}
    hosts["gpu3"] = (facts("gpu3", num_gpus=2), probe(smi=smi, topo=topo.replace("NV8", "SYS")))
    hosts["gpu4"] = (
        facts("gpu4", num_gpus=2),
        probe(smi=smi.replace("A100-SXM4-80GB", "A100-PCIE-40GB"), topo=topo),
    )
    found = examined(tmp_path, "hosts: {'gpu[1-4]': }\n", **hosts)
    assert wrong(found) == [
        (
            "gpu4",
            "gpus",
            "warning",
            "its GPUs are 2 × A100-PCIE-40GB, but 3 of the hosts have 2 × A100-SXM4-80GB",
        ),
        ("gpu3", "gpus", "warning", "its GPUs are joined by SYS, but 3 of the hosts have NV8"),
    ]


# --- software, the working folder, the clock ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "level", "message"),
    [
        ({"nccl": "2.21.5"}, "failure", "NCCL 2.21.5, but 2 of the hosts have 2.27.3"),
        ({"missing": ["cv2"]}, "failure", "no cv2 in /venv/bin/python"),
        ({"syntax": "line 3: bad"}, "failure", "train.py is no Python to /venv/bin/python (3.11.2): line 3"),
        ({"locale": "LANG=de_DE is not installed"}, "warning", "locale: LANG=de_DE is not installed"),
        ({"encoding": "ascii"}, "warning", "locale: the encoding of file names is ascii"),
        ({"nofile": [256, 256]}, "warning", "ulimit -n (open files) is 256"),
        ({"nofile": [32, 32]}, "failure", "ulimit -n (open files) is 32"),
        ({"nofile": [-1, -1]}, "", ""),
        ({"infiniband": ["mlx5_0"]}, "warning", "ulimit -l (locked memory) is 8192 KiB, and there is InfiniBand"),
        ({"infiniband": ["mlx5_0"], "memlock": [-1, -1]}, "", ""),
        ({"shm": None}, "failure", "no /dev/shm"),
        ({"build_locks": ["/h/my cache/lock"]}, "warning", "1 lock of torch extensions"),
        ({"shm": {"size_bytes": 64 << 20, "free_bytes": 60 << 20, "writable": True}}, "warning",
         "/dev/shm has 60 of 64 MiB free"),
        ({"problem": "/w: Read-only file system", "errno": "EROFS"}, "failure", "nothing can be written to /w"),
        ({"free_inodes": 3}, "failure", "3 inodes free in /home/train/nodekit"),
        ({"free_inodes": None}, "", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_on_one_host_is_told_of_that_host_with_a_cure(
    tmp_path: Path, changes: dict[str, Any], level: str, message: str
) -> None:
    answers = {name: probe() for name in ("gpu1", "gpu2", "gpu3")}
    answers["gpu2"] = probe(
        **{key: value for key, value in changes.items() if key not in ("problem", "errno")}
    )
    answers["gpu2"]["workdir"].update({key: changes[key] for key in ("problem", "errno") if key in changes})
    found = examined(
        tmp_path,
        "hosts: {'gpu[1-3]': }\n",
        **{name: (facts(name), answer) for name, answer in answers.items()},
    )
    said = [(each.host, each.level, each.found[: len(message)]) for each in found if each.level != "ok"]
    assert said == ([("gpu2", level, message)] if level else [])
    assert all(each.wanted and each.cure for each in found if each.level != "ok")


def test_no_owner_is_to_be_changed_where_the_disk_is_read_only(tmp_path: Path) -> None:
    answer = probe()
    answer["workdir"].update({"problem": "/w: Read-only file system", "errno": "EROFS"})
    found = examined(tmp_path, "hosts: {gpu1: }\n", gpu1=(facts("gpu1"), answer))
    (cure,) = [each.cure for each in found if each.level == "failure"]
    assert cure.startswith("see `findmnt -T /home/train/nodekit` and `sudo dmesg` there; mount it writable")


def test_another_cuda_runtime_than_most_hosts_have_is_a_failure(tmp_path: Path) -> None:
    hosts = {name: (facts(name, torch_build="cuda 12.8"), probe()) for name in ("gpu1", "gpu3")}
    hosts["gpu2"] = (facts("gpu2", torch_build="cuda 12.6"), probe())
    found = wrong(examined(tmp_path, "hosts: {'gpu[1-3]': }\n", **hosts))
    assert found == [("gpu2", "software", "failure", "CUDA runtime 12.6, but 2 of the hosts have 12.8")]


def test_what_follows_from_another_torch_is_not_told_again(tmp_path: Path) -> None:
    hosts = {name: (facts(name), probe()) for name in ("gpu1", "gpu3")}
    hosts["gpu2"] = (facts("gpu2", torch="2.12.0+cu126", torch_build="cuda 12.6"), probe(nccl="2.21.5"))
    found = wrong(examined(tmp_path, "hosts: {'gpu[1-3]': }\n", **hosts))
    assert found == [("gpu2", "software", "failure", "torch 2.12.0+cu126, but 2 of the hosts have 2.13.0")]


def test_a_locale_that_the_inventory_sets_is_not_looked_for_on_the_host(tmp_path: Path) -> None:
    text = "env: {LC_ALL: C.UTF-8}\n" + ONE
    assert wrong(examined(tmp_path, text, gpu1=(facts("gpu1"), probe(encoding="ascii")))) == []


@pytest.mark.parametrize(
    ("driver", "cuda", "is_fine"),
    [
        ("525.60.13", "12.8", True),
        ("525.60.11", "12.8", False),
        ("535.54.03", "13.0", False),
        ("580.65.06", "13.0", True),
        ("418.43", "11.8", False),
        ("418.43", None, True),
    ],
)
def test_a_driver_older_than_torchs_cuda_wants_is_a_failure(
    tmp_path: Path, driver: str, cuda: str | None, is_fine: bool
) -> None:
    own = facts("gpu1", gpus=gpus_there(1, driver=driver), torch_build=f"cuda {cuda}" if cuda else "")
    found = examine(inventory(tmp_path, ONE), {"gpu1": own})
    assert [str(each.problem).startswith(f"NVIDIA driver {driver}") for each in found] == (
        [] if is_fine else [True]
    )
    assert examine(inventory(tmp_path, "gpus: 0\n" + ONE), {"gpu1": own}) == []


def test_a_quota_is_told_once_it_is_passed() -> None:
    text = (  # Debian's quota 4.06, of a user over the limit for blocks; times are given as seconds
        "Disk quotas for user train (uid 1001): \n"
        "     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace\n"
        "/dev/sdb1  5242880* 5000000 6000000 1732300000 1200 0 0 0\n"
        "nfs:/home 100 5000000 6000000 0 9000* 8000 10000 1732300000\n"
    )
    assert software.over_quota(text) == [
        "5242880 KiB used of a quota of 5000000 on /dev/sdb1",
        "9000 files used of a quota of 8000 on nfs:/home",
    ]


def test_a_clock_is_compared_with_the_others_within_what_the_round_trip_lets_one_know() -> None:
    ours_is_wrong = {name: facts(name, clock_offset_s=100.0) for name in ("gpu1", "gpu2", "gpu3")}
    assert wrong(clocks(ours_is_wrong)) == []
    late = {**ours_is_wrong, "gpu2": facts("gpu2", clock_offset_s=95.8, rtt_s=0.002)}
    assert wrong(clocks(late)) == [
        ("gpu2", "clock", "warning", "its clock is -4.2 s (± 0.001 s) from the other hosts'")
    ]
    slow = {**ours_is_wrong, "gpu2": facts("gpu2", clock_offset_s=97.0, rtt_s=3.0)}  # to 1.5 s: perhaps 1.5 s
    assert wrong(clocks(slow)) == []


# --- the script ---------------------------------------------------------------------------------------------


def test_imports_are_followed_through_the_projects_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "src/train.py": "import torch, os.path\nfrom model.net import Net\nimport helper\n"
        "try:\n    import wandb\nexcept ImportError:\n    wandb = None\n"
        "if TYPE_CHECKING:\n    import typed\n"
        "def late():\n    import lazy\n"
        "if __name__ == '__main__':\n    import cv2\n",
        "src/model/__init__.py": "from . import parts\nimport einops",
        "src/model/net.py": "from .parts import Part\nfrom ..elsewhere import x",
        "src/model/parts.py": "import timm.models",
        "helper.py": "'\\d'; import yaml; from nodekit.training import World; from __future__ import annotations",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = script.read(inventory(tmp_path, ONE), ["src/train.py", "--lr", "1"])
    assert found.name == "src/train.py"
    assert set(found.imports) == {"torch", "os", "cv2", "einops", "timm", "yaml"}
    assert script.without_own(found, ["cv2", "net", "model", "nope"], tmp_path) == ["cv2", "nope"]


@pytest.mark.parametrize(
    ("source", "is_warned_of"),
    [
        (
            "import torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(main, nprocs=2)",
            True,
        ),
        ("import torch\ntorch.multiprocessing.spawn(main, (2,), 2)", True),
        ("# mp.spawn(main) is gone\nimport torch\nmain()", False),
        ("import subprocess\nos.spawn(main)\nxmp.spawn(main)", False),
        ("mp.spawn(", False),
    ],
)
def test_a_script_that_starts_its_ranks_itself_is_warned_of(
    source: str, is_warned_of: bool, tmp_path: Path
) -> None:
    seen = {"gpu1": Seen(facts=facts("gpu1"), probe=probe())}
    found = checkup.examine(inventory(tmp_path, ONE), seen, Script(name="train.py", source=source))
    warned = [each.cure for each in found if "train.py calls mp.spawn" in each.found]
    assert bool(warned) == is_warned_of
    assert all("env -u TORCHELASTIC_USE_AGENT_STORE python train.py" in each for each in warned)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            "dist.init_process_group('gloo', init_method='tcp://localhost:1', rank=0)",
            "line 1 sets init_method='tcp://",
        ),
        (
            "\ninit_process_group('gloo', f'tcp://{host}:1')",
            "line 2 sets init_method=f'tcp://{host}:1': no rank opens",
        ),
        (
            "init_method = f'file:///{here}/meet'\nf(init_method=init_method)",
            "line 1 sets init_method=f'file:///{here}",
        ),
        ("where = {'init_method': 'file:///data/meet', **more}", "find those before them in that file"),
        (
            "def setup(rank):\n    os.environ['MASTER_PORT'] = '12355'",
            "line 2 sets MASTER_PORT='12355': no rank opens",
        ),
        ("dist.init_process_group('nccl', init_method='env://')\ndist.init_process_group('nccl')", ""),
        ("# init_method='tcp://localhost:1'\ninit(init_method=args.init_method)", ""),
        ("if 'MASTER_PORT' not in os.environ:\n    os.environ['MASTER_PORT'] = '29500'", ""),
        ("os.environ['MASTER_PORT'] = str(free_port())\nmlflow.start(uri='file:///data/runs')", ""),
        ("a, b = c = {**d}\ninit_method: str", ""),
        (f"text = {'+'.join(['a'] * 900)}", ""),  # nested deeper than ast.unparse can follow
        ("init_process_group('gloo', init_method='tcp://a:1'", ""),
    ],
)
def test_a_script_whose_ranks_meet_at_a_place_of_its_own_is_warned_of(
    source: str, told: str, tmp_path: Path
) -> None:
    """Under kit as under torchrun they would wait for each other until the time-out."""
    seen = {"gpu1": Seen(facts=facts("gpu1"), probe=probe())}
    found = checkup.examine(inventory(tmp_path, ONE), seen, Script(name="train.py", source=source))
    warned = [each for each in found if each.level == "warning" and "MASTER_ADDR" in each.cure]
    assert [told in each.found for each in warned] == ([True] if told else [])


@pytest.mark.parametrize(
    ("arguments", "is_warned_of"),
    [
        (["-im", "tcp://10.0.0.1:23456", "-rn", "0"], True),
        (["--dist-url=tcp://[::1]:1"], True),
        (["--dist-url", "env://", "--logs", "file:///data/runs", "--broker", "tcp://queue"], False),
    ],
)
def test_an_address_for_the_ranks_to_meet_at_is_warned_of_in_the_arguments_too(
    arguments: list[str], is_warned_of: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import torch")
    parsed = inventory(tmp_path, f"{ONE}job: {{code: {tmp_path}}}\n")
    seen = {"gpu1": Seen(facts=facts("gpu1"), probe=probe())}
    found = checkup.examine(parsed, seen, script.read(parsed, ["train.py", *arguments]))
    assert any("tcp://" in each.found and "train.py is given" in each.found for each in found) == is_warned_of


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["-m", "nodekit.training"], Script()),
        (["./run.sh"], Script()),
        (["bash", "run.sh"], Script()),
        (["train"], Script(name="train", source="#!/bin/false\nimport t", imports=("t",))),
        (["/opt/train.py"], Script()),
        (["-m", "lightning.run"], Script(name="lightning.run", imports=("lightning",))),
        (["-m", "pkg"], Script(name="pkg/__main__.py", source="import a", imports=("a",))),
        (["-m", "pkg.job"], Script(name="pkg/job.py", source="import b", imports=("b",))),
        (["python", "pkg/job.py"], Script(name="pkg/job.py", source="import b", imports=("b",))),
        (["python", "-m", "pkg.job", "1"], Script(name="pkg/job.py", source="import b", imports=("b",))),
        *(
            (["python", *rest], Script())
            for rest in ((), ("-m",), ("-u",), ("-c", "pass"), ("-u", "-O", "train"))
        ),
    ],
)
def test_what_the_command_runs_is_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], expected: Script
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    for name, text in {"__init__": "", "__main__": "import a", "job": "import b"}.items():
        (tmp_path / f"pkg/{name}.py").write_text(text)
    (tmp_path / "train").write_text("#!/bin/false\nimport t")
    (tmp_path / "run.sh").write_text("#!/bin/sh\nexec python train")
    (tmp_path / "run.sh").chmod(0o755)
    assert dataclasses.replace(script.read(inventory(tmp_path, ONE), command), arguments=()) == expected


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("nope.py 3", "no nope.py in "),
        ("torchrun train.py", "the command begins with torchrun"),
        ("bash -eo pipefail nope.sh", "no nope.sh in "),
        ("../tools/x.py", "../tools/x.py lies outside of "),
    ],
)
@pytest.mark.parametrize("how", [start.start, SshBackend().up, SlurmBackend().up])
def test_what_cannot_run_is_refused_before_any_host_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, said: str, how: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Which does not exist: that would be told, had it been looked for.
    found = inventory(tmp_path, "slurm: {nodes: 1}\n" if "Slurm" in str(how) else ONE)
    options = Options(inventory=found.path, command=tuple(command.split()), dry_run=how is not start.start)
    with contextlib.ExitStack() as stack, pytest.raises(KitError, match=f"^{said}"):
        how(stack, found, None, options) if how is start.start else how(found, options)


# --- leftovers and the report -------------------------------------------------------------------------------


def left(**changes: Any) -> dict[str, Any]:
    process = {"pid": 11, "start_time": 5, "rank": 0, "rss_bytes": GB, "ports": [29500]}
    return {"run": "lab-1", "node": "gpu1", "node_dir": "/r/lab-1/gpu1", "agent": None, "state": "running",
            "processes": [process], "shm": [], "quiet_s": 500.0, **changes}  # fmt: skip


def record(state: str) -> dict[str, Run]:
    run = Run(
        run_id="lab-1", name="lab", inventory_path="/x", inventory={}, command=None, created=0.0, state=state
    )
    return {"lab-1": run}


@pytest.mark.parametrize(
    ("found", "records", "standing", "still_trains"),
    [
        (left(), {}, "left", False),
        (left(quiet_s=3.0), {}, "left", True),
        (left(agent=10), record("running"), "running", True),
        (left(agent=10), {}, "running", True),
        (left(agent=10), record("stopped"), "forgotten", True),
        (left(agent=10, state="succeeded", quiet_s=1.0), record("succeeded"), "running", True),
        (left(agent=10, state="succeeded"), {}, "forgotten", True),
    ],
)
def test_a_run_that_runs_is_told_from_what_a_run_has_left(
    found: dict[str, Any], records: dict[str, Run], standing: str, still_trains: bool
) -> None:
    (judged,) = leftovers.lefts("gpu1", [found], records, {11: 3})
    assert (judged.standing, judged.still_trains) == (standing, still_trains)
    assert "pid 11 (rank 0, 1000 MB, GPU 3, port 29500)" in judged.text


def test_a_host_that_an_earlier_run_has_found_broken_is_told(tmp_path: Path) -> None:
    broken = {"gpu1": {"run": "lab-1", "why": "GPU 3: Xid 79", "time": 0.0}}
    found = examined(tmp_path, "hosts: {gpu1: }\n", gpu1=(facts("gpu1"), probe(broken=broken)))
    (told,) = [each for each in found if each.check == "leftovers"]
    assert told.level == "warning"
    assert re.fullmatch(
        r"kit up leaves it out: GPU 3: Xid 79 \(drained by lab-1, 1970-01-01 \d\d:00\)", told.found
    )
    assert told.problem.cure.startswith("when it is mended: kit clean --forgive ")
    here = inventory(tmp_path, "hosts: {gpu1: {connection: local}, gpu2: {connection: local}}\n").hosts
    assert [bool(leftovers.broken_of(host, broken)) for host in here] == [True, False]


@pytest.mark.parametrize(
    ("load", "busy"),
    [
        ("0.50 0.40 0.30 1/300 4711", 1.0),
        ("3.00 0.40 0.30 12/300 4711", 3.0),  # more have begun than the last minute's mean tells
        ("22.00 9.00 3.00 2/300 4711", 5.5),
        ("900.00 9.00 3.00 2/300 4711", checkup.MAX_BUSY_FACTOR),
        ("", 1.0),
    ],
)
def test_a_check_has_more_time_where_this_machine_is_busy(load: str, busy: float, tmp_path: Path) -> None:
    """With 22 processes on 4 cores a healthy host's answer takes 5.5 times as long, and no host is to blame."""
    (tmp_path / "loadavg").write_text(load)
    assert checkup.how_busy(tmp_path / "loadavg", cores=4) == busy


def test_a_host_may_take_as_long_to_answer_as_timeout_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def visited(*_: Any, timeout_s: float, **__: Any) -> Any:
        limits.append(timeout_s)
        raise HostError("gpu1", "enough")

    monkeypatch.setattr(visits, "visit", visited)
    deadline = time.monotonic() + 60
    opened = visits.Visits(
        inventory(tmp_path, f"hosts: {{gpu1: {{connection: local, python: {sys.executable}}}}}\n"),
        Script(), SshOptions(), files=(), timeout_s=60.0, busy=1.0, deadline=deadline,
    )  # fmt: skip
    with opened._all_done:
        assert opened._all_done.wait_for(lambda: limits, 30)
    opened.leave()
    assert limits == [60.0]


def test_a_host_whose_disk_does_not_answer_is_not_said_to_refuse_the_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_looking, is_over = threading.Event(), threading.Event()

    def visited(*_: Any, **__: Any) -> Any:
        is_looking.set()
        is_over.wait(60)
        raise HostError("gpu1", "enough")

    monkeypatch.setattr(visits, "visit", visited)
    opened = visits.Visits(
        inventory(tmp_path, f"hosts: {{gpu1: {{connection: local, python: {sys.executable}}}}}\n"),
        Script(), SshOptions(), files=(), timeout_s=60.0, busy=1.0, deadline=time.monotonic() + 60,
    )  # fmt: skip
    assert is_looking.wait(60)
    (found,) = opened.access()
    is_over.set()
    opened.leave()
    assert found.found == "kit has logged in, and then no answer within 60 s, while looking around there"
    assert found.wanted == "a host that answers, and whose disks do"
    assert found.cure.startswith("its disk may not answer: try `timeout 5 touch ~/nodekit; df -h` there")


def test_the_report_names_each_cell_once_and_fits_the_terminal() -> None:
    long = "a very long sentence about what was found there " * 4
    findings = [Finding(check="access", host=name, level="ok", found="0.5 ms") for name in ("gpu1", "gpu2")]
    findings += [
        Finding(check="software", host=name, level="failure", found=long, wanted="w", cure="pip install x")
        for name in ("gpu1", "gpu2")
    ]
    findings.append(
        Finding(check="network", host="gpu1 → gpu2", hosts=("gpu1", "gpu2"), level="warning", found="slow")
    )
    report = Report(
        inventory=Path("lab.yaml"), hosts=("gpu1", "gpu2"), findings=tuple(findings), seconds=1.25
    )
    lines = check_report.text(report, 100).splitlines()
    assert lines[:3] == [
        "      access  software  network",
        "gpu1  0.5 ms  FAILS     warning",
        "gpu2  0.5 ms  FAILS     warning",
    ]
    assert "FAILS  software  gpu1, gpu2" in lines
    assert "warning  network  gpu1 → gpu2" in lines
    assert lines[-1] == "2 hosts: 2 failures, 1 warning  (1.2 s)"
    assert max(map(len, lines)) <= 100
    assert json.loads(check_report.to_json(report))["failed"] is True


# --- on real hosts ------------------------------------------------------------------------------------------


def check(kit: Kit, *args: str, file: str = "lab.yaml", rc: int = 1) -> list[Finding]:
    """What `kit check` finds wrong."""
    # Where this machine is busy, too: of 10 s, as it once was, there are 6 to log in, less than it may stand still.
    limit = () if "--timeout" in args else ("--timeout", "60")
    done = kit.run("check", file, "--json", *limit, *args)
    assert done.returncode == rc, done.stdout + done.stderr
    found = [
        Finding(**{**each, "hosts": tuple(each["hosts"])}) for each in json.loads(done.stdout)["findings"]
    ]
    return [each for each in found if each.level != "ok" and each.check != "network"]


def hosts_of(kit: Kit, **changes: Any) -> dict[str, Any]:
    """The lab's hosts as an inventory has them, some of them changed."""
    assert kit.lab is not None
    values = yaml.safe_load(kit.lab.inventory.read_text())["hosts"]
    return {name: {**own, **changes.get(name, {})} for name, own in values.items()}


def put(kit: Kit, host: str, path: str, text: str, mode: str = "644") -> None:
    assert kit.lab is not None
    kit.on_host(host, "mkdir", "-p", str(Path(path).parent))
    done = kit.lab.run(host, ["tee", path], input=text, text=True, capture_output=True)
    assert done.returncode == 0
    kit.on_host(host, "chmod", mode, path)


def other_python(kit: Kit, host: str, folder: str) -> str:
    """An interpreter of a host that finds modules in a folder before all others."""
    assert kit.lab is not None
    python = yaml.safe_load(kit.lab.inventory.read_text())["python"]
    path = f"{folder}/python"
    put(kit, host, path, f'#!/bin/sh\nPYTHONPATH={folder} exec {python} "$@"\n', mode="755")
    return path


@pytest.mark.lab
def test_three_healthy_hosts_are_ready(kit: Kit) -> None:
    kit.inventory()
    done = kit.run("check", "lab.yaml", "--timeout", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert re.match(r" +access +workdir +software +gpus +clock +", lines[0])
    assert [line.split()[0] for line in lines[1:4]] == ["node1", "node2", "node3"]
    assert re.search(r"^3 hosts: ready", lines[-1])


@pytest.mark.lab
def test_another_torch_on_one_node_is_named(kit: Kit) -> None:
    import torch

    put(kit, "node2", "/root/nodekit/other/torch/__init__.py", "")
    put(kit, "node2", "/root/nodekit/other/torch/version.py", "__version__ = '2.12.0'\n")
    kit.inventory(hosts=hosts_of(kit, node2={"python": other_python(kit, "node2", "/root/nodekit/other")}))
    (found,) = check(kit)
    assert (found.host, found.check, found.level) == ("node2", "software", "failure")
    assert found.found == f"torch 2.12.0, but 2 of the hosts have {torch.__version__}"
    assert f"pip install torch=={torch.__version__.split('+')[0]}" in found.cure
    done = kit.run("up", "lab.yaml", "--dry-run")
    assert (done.returncode, "node2: torch 2.12.0, but 2 of" in done.stderr) == (1, True)


@pytest.mark.lab
def test_a_full_disk_is_named(kit: Kit) -> None:
    kit.on_host("node3", "mkdir", "-p", "/root/nodekit/full")
    kit.on_host("node3", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/root/nodekit/full")
    try:
        put(kit, "node3", "/root/nodekit/full/data", "x" * 60_000)
        kit.inventory(hosts=hosts_of(kit, node3={"workdir": "/root/nodekit/full/kit"}))
        found = check(kit)
    finally:
        kit.on_host("node3", "umount", "/root/nodekit/full")
    assert {(each.host, each.check, each.level) for each in found} == {("node3", "workdir", "failure")}
    assert any("No space left on device" in each.found for each in found)
    assert all("`du -xhd2 /root/nodekit/full`" in each.cure for each in found)


@pytest.mark.lab
def test_a_wrong_clock_is_named(kit: Kit) -> None:
    late = "import time\n_real = time.time\ntime.time = lambda: _real() - 7\n"
    put(kit, "node1", "/root/nodekit/late/sitecustomize.py", late)  # as kit's own python there sees it
    kit.inventory(hosts=hosts_of(kit, node1={"python": other_python(kit, "node1", "/root/nodekit/late")}))
    (found,) = check(kit, rc=0)
    assert (found.host, found.check, found.level) == ("node1", "clock", "warning")
    assert found.found.startswith("its clock is -7.0 s")
    assert "timedatectl" in found.cure


@pytest.mark.lab
def test_a_login_shell_that_prints_is_a_warning_and_one_that_starts_another_names_it(kit: Kit) -> None:
    assert kit.lab is not None
    put(kit, "node1", "/root/.bashrc", "echo hi there\n")
    kit.inventory(hosts=hosts_of(kit))
    put(kit, "node2", "/root/.bashrc", "exec sh -c 'echo what is this >&2; cat >/dev/null'\n")
    try:
        found = {each.host: each for each in check(kit)}
    finally:
        kit.on_host("node1", "rm", "/root/.bashrc")
        kit.on_host("node2", "rm", "/root/.bashrc")
    assert (found["node1"].check, found["node1"].level) == ("access", "warning")
    assert "prints 'hi there' before a command" in found["node1"].found
    assert "what is this" in found["node2"].found
    assert "bashrc" in found["node2"].cure


@pytest.mark.lab
def test_a_host_that_takes_the_connection_and_says_nothing_is_named_in_time(kit: Kit) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = {"address": "127.0.0.1", "port": silent.getsockname()[1]}
        kit.inventory(hosts={**hosts_of(kit), "mute": mute})

        def alone() -> list[Finding]:
            begin = time.monotonic()
            found = check(kit, "--timeout", "4")
            assert time.monotonic() - begin < 4 + BUSY_S
            (mute,) = [each for each in found if each.host == "mute"]
            assert (mute.check, mute.level) == ("access", "failure")
            # On a busy machine others are late, too, or the time is over before it was called.
            said = "did not say the SSH greeting and agree on keys within 2.4 s"
            return found if len(found) == 1 and said in mute.found else []

        (found,) = until(alone, timeout_s=120, what="an answer of the others")
    assert found.cure


@pytest.mark.lab
def test_a_wrong_host_key_a_missing_key_and_a_name_that_does_not_resolve_are_named(
    kit: Kit, tmp_path: Path
) -> None:
    assert kit.lab is not None
    lines = kit.lab.known_hosts.read_text().splitlines()
    addresses = {name: host.address for name, host in kit.lab.hosts.items()}
    keys = {
        name: next(line.split()[1:3] for line in lines if address in line)
        for name, address in addresses.items()
    }
    keys["node2"] = keys["node1"]
    known = tmp_path / "known"
    known.write_text(
        "".join(f"{addresses[name]} {' '.join(key)}\n" for name, key in keys.items() if name != "node3")
    )
    kit.inventory(
        known_hosts=str(known), hosts={**hosts_of(kit), "typo": {"address": "no-such-host.invalid"}}
    )
    found = {each.host: each for each in check(kit)}
    assert {each.check for each in found.values()} == {"access"}
    assert "HAS CHANGED" in found["node2"].found
    assert "ssh-keygen -R" in found["node2"].cure
    assert "is unknown" in found["node3"].found
    assert "--accept-new-host-keys" in found["node3"].cure
    assert "does not resolve" in found["typo"].found
    assert set(found) == {"node2", "node3", "typo"}


@pytest.mark.lab
def test_a_missing_import_and_a_syntax_error_are_found_before_anything_starts(kit: Kit) -> None:
    kit.inventory()
    (kit.folder / "train it.py").write_text("import torch, no_such_module\nfrom mine import x\n")
    (kit.folder / "mine.py").write_text("import nor_this_one\n")
    found = check(kit, "--", "train it.py")
    assert {each.host for each in found} == {"node1", "node2", "node3"}
    assert {each.found.split(" in ")[0] for each in found} == {"no no_such_module, nor_this_one"}
    assert all(each.cure.endswith("pip install no_such_module nor_this_one") for each in found)
    done = kit.run("up", "lab.yaml", "--dry-run", "--", "train it.py")
    assert (done.returncode, "no no_such_module, nor_this_one in" in done.stderr) == (1, True)
    done = kit.run("up", "lab.yaml", "--dry-run", "--skip-check", "--", "train it.py")
    assert done.returncode == 0, done.stderr
    (kit.folder / "bad.py").write_text("x = 1\ndef f(:\n")
    found = check(kit, "--", "bad.py")
    assert ["line 2: invalid syntax" in each.found for each in found] == [True] * 3
    (refused,) = check(kit, "--", "-m", "nodekit.training", "--epochs", "many")
    assert (refused.host, "--epochs" in refused.found) == ("the job", True)
    (absent,) = check(kit, "--", "absent.py")
    assert "no absent.py in" in absent.found


HOLDS = """
import subprocess, time
print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.lab
def test_a_leftover_worker_is_found_and_ended_and_a_running_run_is_left_alone(kit: Kit) -> None:
    hosts = {name: own for name, own in hosts_of(kit).items() if name == "node2"}
    kit.inventory(hosts=hosts)
    (kit.folder / "holds.py").write_text(HOLDS)
    done = kit.run("up", "-d", "lab.yaml", "--", "holds.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = run_id(done.stdout)
    node_dir = f"/root/nodekit/runs/{found}/node2"
    folder = Path(os.environ["XDG_STATE_HOME"]) / "nodekit/runs" / found
    child = until(lambda: kit.on_host("node2", "sh", "-c", f"cat '{node_dir}'/logs/*.log || true").strip())
    worker = parent(kit, child)
    agent = json.loads(kit.on_host("node2", "cat", f"{node_dir}/agent.json"))["pid"]
    for path in (f"/dev/shm/torch_{worker}_1_1", "/dev/shm/torch_1_1_1"):  # as torch names them
        kit.on_host("node2", "sh", "-c", f"echo data > {path}")
    assert check(kit, rc=0) == []
    done = kit.run("clean", "lab.yaml", "--yes")
    assert (done.returncode, "it is running" in done.stdout, "0 ended" in done.stdout) == (0, True, True), (
        done.stdout + done.stderr
    )
    assert is_there(kit, child)

    # Who would start it again, and then, as a host that runs out of memory may, all but what the worker has started.
    lock = folder / "supervisor.lock"
    until(lambda: lock.exists() and lock.read_text(), what="the supervisor")
    os.kill(int(lock.read_text()), signal.SIGKILL)
    # The agent (what is on record is who waits for it) is paused first: it would end all of a worker that has ended.
    server = parent(kit, worker)
    own = parent(kit, server)
    kit.on_host(
        "node2", "sh", "-c", f"kill -STOP {own}; kill -9 {worker} {server} {own} {agent} 2>/dev/null || true"
    )
    until(lambda: not any(is_there(kit, each) for each in (worker, server, own, str(agent))))
    assert is_there(kit, child)
    (bad,) = check(kit)
    assert (bad.host, bad.check, bad.level) == ("node2", "leftovers", "failure")
    assert f"{found} has lost its agent and left: pid {child} (rank 0, " in bad.found
    assert "1 segments of shared memory" in bad.found
    assert re.fullmatch(r"kit clean .*lab\.yaml'?", bad.cure)

    done = kit.run("clean", "lab.yaml")
    assert (done.returncode, "may still train" in done.stderr) == (1, True), done.stdout + done.stderr
    assert is_there(kit, child)
    done = kit.run("clean", "lab.yaml", "--yes")
    assert (done.returncode, "1 ended" in done.stdout) == (0, True), done.stdout + done.stderr
    assert not is_there(kit, child)
    assert kit.on_host("node2", "ls", "/dev/shm").split() == ["torch_1_1_1"]
    kit.on_host("node2", "rm", "/dev/shm/torch_1_1_1")
    assert check(kit, rc=0) == []


def test_a_folder_of_runs_that_cannot_be_read_is_not_said_to_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert host_leftovers.runs(str(tmp_path)) == host_leftovers.runs(str(tmp_path), "lab-1") == []
    (tmp_path / "runs").symlink_to("runs")  # a loop: root, who runs this, may read any folder
    for run in (None, "lab-1"):
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            host_leftovers.runs(str(tmp_path), run)
    file = tmp_path / "lab.yaml"
    file.write_text(f"workdir: {tmp_path}\nhosts: {{a: {{connection: local}}}}\n")
    assert main(["clean", str(file)]) == 1
    assert capsys.readouterr().out == "nothing is left on the hosts that could be looked at\n"


def parent(kit: Kit, pid: str) -> str:
    return kit.on_host("node2", "cat", f"/proc/{pid}/stat").rpartition(")")[2].split()[1]


def is_there(kit: Kit, pid: str) -> bool:
    assert kit.lab is not None
    done = kit.lab.run("node2", ["cat", f"/proc/{pid}/stat"], capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.rpartition(")")[2].split()[0] != "Z"
