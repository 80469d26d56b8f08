"""GPUs from nvidia-smi's answer to the ranks' environment, on hosts that have odd ones, hidden ones and broken ones."""

import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_plan import TWO_FACTS, build, facts, gpus_there, inventory

from nodekit.deploy.host.probes.gpu import gpus as probe
from nodekit.deploy.plan.check import examine
from nodekit.deploy.plan.gpus import HostGpus
from nodekit.inventory.errors import KitError

UUIDS = [f"GPU-{number}f3a2b1c-0000-1111-2222-333344445555" for number in range(4)]
MIG = "MIG-2b6a6a0e-5d0b-5a0f-9f0e-aaaaaaaaaaaa"
OTHER_MIG = "MIG-9c1d6a0e-5d0b-5a0f-9f0e-bbbbbbbbbbbb"
# As nvidia-smi 570 answers; anything that it is not known to be asked is refused.
SMI = f"""#!{sys.executable} -S
import os, sys, time
uuids, migs = {UUIDS!r}, {[MIG, OTHER_MIG]!r}
kind = os.environ.get("SMI", "")
if kind == "slow":
    time.sleep(60)
if kind == "lost":
    print("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover it")
    sys.exit(255)
if kind == "no driver":
    print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    sys.exit(9)
if kind == "infoROM":
    import atexit
    atexit.register(os._exit, 14)
if kind == "odd":
    sys.exit(print("No devices were found"))
if sys.argv[1:] == ["--query-gpu=index,uuid,driver_version,memory.total,name", "--format=csv,noheader,nounits"]:
    for number, uuid in enumerate(uuids):
        print(f"{{number}}, {{uuid}}, 570.124.06, 81559, NVIDIA H100 80GB HBM3, odd")
elif sys.argv[1:] == ["-L"]:
    for number, uuid in enumerate(uuids):
        print(f"GPU {{number}}: NVIDIA H100 80GB HBM3 (UUID: {{uuid}})")
        if number == 2:
            for place, mig in enumerate(migs):
                print(f"  MIG 3g.40gb     Device  {{place}}: (UUID: {{mig}})")
else:
    sys.exit("unknown arguments: " + repr(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with four GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(probe, "num_cards", lambda: 4)


@pytest.mark.parametrize(
    ("preset", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,3", [2, 3]),
        ("3,1", [3, 1]),
        (" 1, 2", [1, 2]),
        ("0,9,1", [0]),
        ("0,0", []),
        ("0,-1,1", [0]),
        (f"{UUIDS[2]},GPU-0", [2, 0]),
        ("GPU-", []),
        (MIG, [2]),
        (f"{MIG},{OTHER_MIG}", [2, 2]),
        ("MIG-unknown", []),
    ],
)
def test_the_gpus_that_a_host_hides_are_not_used_and_the_others_keep_their_names(
    monkeypatch: pytest.MonkeyPatch, preset: str | None, indices: list[int]
) -> None:
    if preset is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", preset)
    found = HostGpus.of(probe.look_up())
    assert [gpu.index for gpu in found.usable] == indices
    tokens = ["0", "1", "2", "3"] if preset is None else [each.strip() for each in preset.split(",")]
    assert [gpu.token for gpu in found.usable] == tokens[: len(indices)]
    assert found.preset == preset
    assert (found.driver, found.problem) == ("570.124.06", "")
    assert {(gpu.name, gpu.memory_mib) for gpu in found.usable} <= {("NVIDIA H100 80GB HBM3, odd", 81559)}


def test_a_corrupt_inforom_hides_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMI", "infoROM")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"0,{MIG}")
    found = HostGpus.of(probe.look_up())
    assert ([gpu.index for gpu in found.usable], found.problem) == ([0, 2], "")


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("lost", "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost."),
        ("no driver", "NVIDIA-SMI has failed because"),
        ("odd", "it answered 'No devices were found'"),
        ("slow", "no answer within 0 s"),
    ],
)
def test_gpus_that_cannot_be_listed_are_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, problem: str
) -> None:
    monkeypatch.setenv("SMI", kind)
    answer = probe.look_up(timeout_s=0.2 if kind == "slow" else 30)
    assert answer["problem"].startswith(problem)
    own = {"gpu1": facts("gpu1", gpus=HostGpus.of(answer))}
    (refusal,) = examine(inventory(tmp_path, "hosts: {gpu1: }\n"), own)
    assert str(refusal).startswith(f"gpu1: its GPUs cannot be listed: nvidia-smi: {problem}")
    assert ("nvidia-smi -pm 1" in str(refusal)) == (kind == "slow")
    assert examine(inventory(tmp_path, "gpus: 0\nhosts: {gpu1: }\n"), own) == []
    # On a machine without a card it is a package that somebody has left there.
    monkeypatch.setattr(probe, "has_cards", lambda: False)
    assert probe.look_up(timeout_s=0.2 if kind == "slow" else 30)["problem"] == ""


TOO_FEW = "CUDA_VISIBLE_DEVICES=2,3 there leaves 2, 3"


@pytest.mark.parametrize(
    ("gpus", "shown", "refusal"),
    [
        ("", "2,3", ""),
        ("gpus: 1", "2", ""),
        ("gpus: [3]", "3", ""),
        ("gpus: [0, 3]", "", f"`gpus:` names [0], but {TOO_FEW}"),
        ("gpus: 4", "", f"`gpus: 4`, but {TOO_FEW}"),
        ("gpus: 0", "", ""),
    ],
)
def test_a_preset_of_the_host_is_chosen_among(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, shown: str, refusal: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    found = inventory(tmp_path, f"{gpus}\nhosts: {{gpu1: }}\n")
    own = {"gpu1": facts("gpu1", gpus=HostGpus.of(probe.look_up()))}
    problems = examine(found, own)
    assert [str(each)[: len(f"gpu1: {refusal}")] for each in problems] == (
        [f"gpu1: {refusal}"] if refusal else []
    )
    if not refusal:
        (node,) = build(found, own, peers={"gpu1": ()}).nodes
        assert node.env["CUDA_VISIBLE_DEVICES"] == shown
        assert ",".join(map(str, node.gpus)) == shown


def test_several_mig_instances_are_refused_and_one_is_used_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{OTHER_MIG},{MIG}")
    own = {"gpu1": facts("gpu1", gpus=HostGpus.of(probe.look_up()))}
    (refusal,) = examine(inventory(tmp_path, "hosts: {gpu1: }\n"), own)
    assert str(refusal).startswith("gpu1: 2 MIG instances, wanted one: CUDA shows a process no more than one")
    found = inventory(tmp_path, "gpus: 1\nhosts: {gpu1: }\n")
    assert examine(found, own) == []
    assert build(found, own, peers={"gpu1": ()}).nodes[0].env["CUDA_VISIBLE_DEVICES"] == OTHER_MIG


@pytest.mark.parametrize(
    ("torch_build", "refused"), [("cpu", True), ("cuda 12.8", False), ("hip 6.4", False), ("", False)]
)
def test_a_torch_for_the_cpu_alone_is_refused_where_there_are_gpus(
    tmp_path: Path, torch_build: str, refused: bool
) -> None:
    own = {"gpu1": facts("gpu1", gpus=gpus_there(8, driver="570.124.06"), torch_build=torch_build)}
    problems = [str(each) for each in examine(inventory(tmp_path, "hosts: {gpu1: }\n"), own)]
    said = (
        "gpu1: torch 2.13.0 is built for the CPU alone, and nvidia-smi lists 8 GPUs, wanted a build for CUDA;"
    )
    assert [each[: len(said)] for each in problems] == ([said] if refused else [])
    assert examine(inventory(tmp_path, "gpus: 0\nhosts: {gpu1: }\n"), own) == []


# As libcuda of cuda-compat, CUDA's package for a driver that is older: it needs no device for this.
LIBCUDA = """
#include <stdlib.h>
#include <unistd.h>
int cuDriverGetVersion(int *version) {
  const char *told = getenv("LIBCUDA");
  if (!told) sleep(60);
  *version = atoi(told);
  return *version ? 0 : 999;
}
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library."""
    folder = tmp_path_factory.mktemp("compat")
    (folder / "cuda.c").write_text(LIBCUDA)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return folder


@pytest.mark.parametrize(
    ("told", "torch_build", "cuda", "refused"),
    [
        ("13000", "cuda 13.0", "13.0", False),
        ("13010", "cuda 13.0", "13.1", False),
        ("13000", "cuda 13.1", "13.0", True),
        ("12080", "cuda 13.0", "12.8", True),
        ("0", "cuda 13.0", None, True),
        (None, "cuda 13.0", None, True),
        ("12080", "cuda 12.8", "12.8", False),
        ("13000", "cpu", None, True),
    ],
)
def test_an_old_driver_is_not_refused_where_libcuda_is_newer(
    libcuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    told: str | None, torch_build: str, cuda: str | None, refused: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libcuda))
    if told is not None:
        monkeypatch.setenv("LIBCUDA", told)
    else:  # it never answers; nvidia-smi does, after whatever it takes here to start it
        ask = probe.cuda_version
        monkeypatch.setattr(probe, "cuda_version", lambda _: ask(0.5))
    found = HostGpus.of(probe.look_up(timeout_s=30, torch_build=torch_build))
    assert (found.driver, found.cuda) == ("570.124.06", cuda)
    own = {"gpu1": facts("gpu1", gpus=found, torch_build=torch_build)}
    assert bool(examine(inventory(tmp_path, "hosts: {gpu1: }\n"), own)) == refused


def test_a_host_without_libcuda_goes_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_ASK_LIBCUDA", probe._ASK_LIBCUDA.replace("libcuda", "no-libcuda"))
    found = HostGpus.of(probe.look_up(torch_build="cuda 13.0"))
    assert (found.cuda, found.problem) == (None, "")
    (refusal,) = examine(
        inventory(tmp_path, "hosts: {gpu1: }\n"), {"gpu1": facts("gpu1", gpus=found, torch_build="cuda 13.0")}
    )
    assert "NVIDIA driver 570.124.06, and torch is built for CUDA 13.0, wanted driver 580.65.06" in str(
        refusal
    )


@pytest.mark.parametrize(
    ("gpus", "nproc", "shown"),
    [
        ("", None, "0,1,2,3"),
        ("", 1, "0,1,2,3"),
        ("", 2, "0,1"),
        ("", 4, "0,1,2,3"),
        ("gpus: [0, 2, 3]", 2, "0,2,3"),
    ],
)
def test_ranks_see_one_gpu_each_but_for_a_single_rank_and_gpus_that_are_named(
    tmp_path: Path, gpus: str, nproc: int | None, shown: str
) -> None:
    job = f"job: {{nproc_per_node: {nproc}}}\n" if nproc else ""
    found = inventory(tmp_path, f"{gpus}\nhosts: {{gpu1: }}\n{job}")
    (node,) = build(found, {"gpu1": facts("gpu1", gpus=gpus_there(4))}, peers={"gpu1": ()}).nodes
    assert node.env["CUDA_VISIBLE_DEVICES"] == shown
    assert node.nproc_per_node == (nproc or 4)
    assert node.env["NODEKIT_NUM_GPUS"] == str(len(node.gpus))


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    text = "network: 10.0.0.0/24\nhosts: {gpu1: , gpu2: }\njob: {nproc_per_node: 4}\n"
    own: dict[str, Any] = {name: facts(name, each.interfaces[-1], gpus=gpus_there(4 if name == "gpu1" else 2))
                           for name, each in TWO_FACTS.items()}  # fmt: skip
    with pytest.raises(KitError) as refused:
        build(inventory(tmp_path, text), own)
    assert str(refused.value).startswith("gpu2: `job.nproc_per_node: 4`, but it has 2 GPU(s) for its ranks")
