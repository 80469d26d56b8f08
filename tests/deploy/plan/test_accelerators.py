"""Accelerators other than NVIDIA's: counted from what their kernel or program tells, hidden by their own variable."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
from test_plan import TWO_FACTS, build, facts, inventory

from nodekit.deploy.host.probes import hostfacts
from nodekit.deploy.host.probes.gpu import accelerators, gpus
from nodekit.deploy.host.probes.gpu.accelerators import ACCELERATORS, CPU, NVIDIA
from nodekit.deploy.plan.check import examine
from nodekit.deploy.plan.gpus import HostGpus

CPU_NODE = "cpu_cores_count 64\nsimd_count 0\nunique_id 0\n"
MI210 = "cpu_cores_count 0\nsimd_count 416\ngfx_target_version 90010\nunique_id {}\n"
XPU_SMI = f"""#!{sys.executable} -S
import json, sys
if sys.argv[1:] != ["discovery", "-j"]:
    sys.exit("unknown arguments: " + repr(sys.argv[1:]))
name = "Intel(R) Data Center GPU Max 1550"
print(json.dumps({{"device_list": [{{"device_id": n, "device_name": name, "device_type": "GPU"}} for n in (0, 1)]}}))
"""


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where no accelerator is."""
    for row in ACCELERATORS.values():
        for name in (row.variable, *row.also, row.first):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(accelerators, "_KFD", str(tmp_path / "kfd"))
    monkeypatch.setattr(accelerators, "_DAVINCI", str(tmp_path / "davinci"))


@pytest.fixture
def amd(tmp_path: Path) -> None:
    """A host of two CPUs and ten GPUs, as amdkfd shows it: a folder for each, in no order."""
    for number in range(12):
        node = tmp_path / "kfd" / str(number)
        (node / "mem_banks/0").mkdir(parents=True)
        (node / "properties").write_text(CPU_NODE if number < 2 else MI210.format(1000 + number))
        (node / "mem_banks/0/properties").write_text("heap_type 1\nsize_in_bytes 68702699520\n")


def test_the_table_tells_kinds_apart_by_what_torch_is_built_for() -> None:
    builds = {"cuda 12.8": NVIDIA, "hip 6.4": "amd", "xpu 20250302": "intel", "npu 2.7": "ascend"}
    assert {build: accelerators.of_build(build) for build in builds} == builds
    assert accelerators.of_build("cpu") == accelerators.of_build("") == NVIDIA, "cards there are a finding"
    assert [kind for kind, row in ACCELERATORS.items() if row.is_proven] == [NVIDIA, CPU]


def test_amd_gpus_are_counted_by_the_kernel_and_chosen_by_numbers_and_uuids(
    amd: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = HostGpus.of(gpus.look_up(1.0, "hip 6.4"))
    assert [gpu.index for gpu in found.usable] == list(range(10))
    assert (found.usable[0].name, found.usable[0].memory_mib) == ("AMD gfx90a", 65520)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "GPU-00000000000003f1,0")
    found = HostGpus.of(gpus.look_up(1.0, "hip 6.4"))
    assert [gpu.index for gpu in found.usable] == [7, 0]
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "4,GPU-00000000000003f1,6")
    found = HostGpus.of(gpus.look_up(1.0, "hip 6.4"))
    assert [(gpu.index, gpu.token) for gpu in found.usable] == [(1, "GPU-00000000000003f1"), (0, "0")]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert gpus.look_up(1.0, "hip 6.4")["usable"] == [], "ROCm shows three of them, 0 to 2"
    assert gpus.look_up(1.0, "cpu")["usable"] == [], "a torch for the CPU does not see them"


def test_ranks_see_them_by_their_own_variable_and_nothing_of_cuda(amd: None, tmp_path: Path) -> None:
    own = HostGpus.of(gpus.look_up(1.0, "hip 6.4"))
    there = {name: facts(name, *each.interfaces[1:], gpus=own) for name, each in TWO_FACTS.items()}
    found = build(inventory(tmp_path, "gpus: 2\nnetwork: 10.0.0.0/24\nhosts: {gpu1: , gpu2: }\n"), there)
    env = found.nodes[0].env
    assert env["HIP_VISIBLE_DEVICES"] == "0,1"
    assert env["NODEKIT_NUM_GPUS"] == "2"
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} & env.keys()
    assert found.nodes[0].nproc_per_node == 2


def test_too_few_are_told_by_who_has_counted_them(amd: None, tmp_path: Path) -> None:
    own = {"gpu1": facts("gpu1", gpus=HostGpus.of(gpus.look_up(1.0, "hip 6.4")), torch_build="hip 6.4")}
    (refusal,) = examine(inventory(tmp_path, "gpus: 16\nhosts: {gpu1: }\n"), own)
    assert "`gpus: 16`, but the kernel's amdkfd lists 10" in str(refusal)


def test_intel_gpus_are_listed_by_xpu_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.look_up(5.0, "xpu 20250302")["usable"] == []
    program = tmp_path / "xpu-smi"
    program.write_text(XPU_SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1")
    (gpu,) = HostGpus.of(gpus.look_up(20.0, "xpu 20250302")).usable
    assert (gpu.index, gpu.token, gpu.name) == (1, "1", "Intel(R) Data Center GPU Max 1550")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0.0,0.1")
    tiles = HostGpus.of(gpus.look_up(20.0, "xpu 20250302")).usable
    assert [(gpu.index, gpu.token) for gpu in tiles] == [(0, "0.0"), (0, "0.1")]
    program.write_text(f"#!{sys.executable} -S\nprint('not JSON')\n")
    assert gpus.look_up(20.0, "xpu 20250302")["problem"] == "it answered 'not JSON'"


def test_ascend_npus_are_counted_by_their_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("davinci10", "davinci2", "davinci0", "davinci_manager"):
        (tmp_path / name).touch()
    monkeypatch.setattr(hostfacts, "module_version", lambda name: "2.7.1" if name == "torch_npu" else None)
    assert hostfacts.torch_build() == "npu 2.7.1"
    found = HostGpus.of(gpus.look_up(1.0, hostfacts.torch_build()))
    assert [gpu.token for gpu in found.usable] == ["0", "2", "10"]
    assert found.row.variable == "ASCEND_RT_VISIBLE_DEVICES"
