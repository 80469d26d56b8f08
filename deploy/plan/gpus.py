"""Assign GPUs to each node's ranks, build the variables that hide all others, and find problems with them; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodekit.deploy.host.probes.gpu.accelerators import ACCELERATORS, NVIDIA, Accelerator
from nodekit.inventory.errors import Problem
from nodekit.inventory.schema import Host

# CUDA's major version → the oldest Linux driver that runs it (CUDA's release notes, minor version compatibility).
OLDEST_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, or a MIG instance of one, that a job may use."""

    index: int
    """The GPU's index in nvidia-smi."""
    token: str
    """The GPU's entry in CUDA_VISIBLE_DEVICES: its index, or the UUID if the host's own variable has that."""
    name: str = ""
    memory_mib: int = 0


@dataclass(frozen=True, kw_only=True)
class HostGpus:
    """The answer of `deploy/host/probes/gpu/gpus.py` about one host."""

    usable: tuple[Gpu, ...] = ()
    """In CUDA's order, without those that the host's CUDA_VISIBLE_DEVICES hides."""
    driver: str = ""
    """The version of NVIDIA's driver; "" without one."""
    cuda: str | None = None
    """The CUDA version of the libcuda that a process there loads; None if unknown."""
    preset: str | None = None
    """CUDA_VISIBLE_DEVICES as it is set on the host."""
    problem: str = ""
    """Why the host's GPUs could not be listed; "" if they were."""
    kind: str = NVIDIA
    """A key of `ACCELERATORS`."""

    @property
    def row(self) -> Accelerator:
        """The entry of `ACCELERATORS` for these GPUs."""
        return ACCELERATORS[self.kind]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> HostGpus:
        """Convert the answer of a host."""
        return cls(**{**answer, "usable": tuple(Gpu(**each) for each in answer["usable"])})


def share(hosts: Sequence[Host], found: Mapping[str, HostGpus]) -> dict[str, tuple[Gpu, ...]]:
    """Return the GPUs of each host: those in the inventory, or all. Local hosts share the machine's GPUs evenly.

    If there are fewer GPUs than local hosts, none gets one: NCCL does not allow two ranks on a GPU.
    """
    local = [host for host in hosts if host.connection == "local" and host.gpus is None]
    shares: dict[str, tuple[Gpu, ...]] = {}
    for host in hosts:
        usable = found[host.name].usable
        if isinstance(host.gpus, tuple):
            shares[host.name] = tuple(gpu for index in host.gpus for gpu in usable if gpu.index == index)
        elif isinstance(host.gpus, int):
            shares[host.name] = usable[: host.gpus]
        elif host in local:
            each, place = len(usable) // len(local), local.index(host)
            shares[host.name] = usable[place * each : (place + 1) * each]
        else:
            shares[host.name] = usable
    return shares


def for_ranks(host: Host, own: Sequence[Gpu], nproc_per_node: int | None) -> tuple[Gpu, ...]:
    """Return which of a node's GPUs its ranks see.

    A single rank sees all of them, as DataParallel requires, and so do ranks whose host names its GPUs. Otherwise there
    is one for each rank: no process should use the memory of a further GPU.
    """
    if nproc_per_node is None or nproc_per_node == 1 or host.gpus is not None:
        return tuple(own)
    return tuple(own[:nproc_per_node])


def environment(found: HostGpus, own: Sequence[Gpu]) -> dict[str, str]:
    """Return the variables that show the ranks only their own GPUs, in the order of nvidia-smi."""
    if not found.usable:
        return {}
    return {
        **found.row.order,  # CUDA's default is the fastest first
        found.row.variable: ",".join(each.token for each in own),
        "NODEKIT_NUM_GPUS": str(len(own)),
    }


def problem(host: Host, found: HostGpus, torch: str, torch_build: str) -> Problem | None:
    """Return why the job cannot use the GPUs that the inventory names, or all if it names none; None if it can.

    Args:
        host: the host in the inventory.
        found: the GPUs of that host.
        torch: the version of torch there.
        torch_build: the platform torch was built for, as `hostfacts.torch_build`.
    """
    if host.gpus in (0, ()):
        return None
    if found.problem:
        slow = "no answer" in found.problem
        cure = (
            "turn persistence mode on with `sudo nvidia-smi -pm 1`"
            if slow
            else "reset it, or reboot the host"
        )
        return Problem(
            f"its GPUs cannot be listed: {found.row.counted_by}: {found.problem}",
            cure=f"see `sudo dmesg | grep -i nvrm`; {cure}; or set `gpus: 0` to train on the CPU",
        )
    return _too_few(host, found) or _several_instances(host, found) or _no_code(found, torch, torch_build)


def _too_few(host: Host, found: HostGpus) -> Problem | None:
    listed = f"{found.row.counted_by} lists {len(found.usable)}"
    cure = "correct `gpus:`, or look for the lost one: sudo dmesg | grep -i nvrm"
    if found.preset is not None:
        shown = ", ".join(str(each.index) for each in found.usable) or "none"
        listed = f"{found.row.variable}={found.preset} there leaves {shown}"
        cure = "correct `gpus:`, or where that host sets the variable"
    if isinstance(host.gpus, int) and host.gpus > len(found.usable):
        return Problem(f"`gpus: {host.gpus}`, but {listed}", cure=cure)
    if isinstance(host.gpus, tuple):
        there = {each.index for each in found.usable}
        if absent := [index for index in host.gpus if index not in there]:
            return Problem(f"`gpus:` names {absent}, but {listed} (numbered from 0)", cure=cure)
    return None


def _several_instances(host: Host, found: HostGpus) -> Problem | None:
    (own,) = share([host.model_copy(update={"connection": "ssh"})], {host.name: found}).values()
    instances = [each.token for each in own if each.token.startswith("MIG-")]
    if len(instances) < 2:
        return None
    return Problem(
        f"{len(instances)} MIG instances",
        "one: CUDA shows a process no more than one",
        "set `gpus: 1`, or CUDA_VISIBLE_DEVICES there to one of them",
    )


def _no_code(found: HostGpus, torch: str, torch_build: str) -> Problem | None:
    if not found.usable or found.kind != NVIDIA:
        return None
    number = f"{len(found.usable)} GPU{'s' * (len(found.usable) != 1)}"
    if torch_build == "cpu":
        return Problem(
            f"torch {torch} is built for the CPU alone, and nvidia-smi lists {number}",
            "a build for CUDA",
            "install one (https://pytorch.org/get-started), or set `gpus: 0` to train on the CPU",
        )
    kind, _, version = torch_build.partition(" ")
    oldest = OLDEST_DRIVERS.get(int(version.partition(".")[0])) if kind == "cuda" else None
    if oldest is None or _numbers(found.driver) >= oldest:
        return None
    if found.cuda and _numbers(found.cuda) >= _numbers(version):  # works by CUDA's forward compatibility
        return None
    wanted = ".".join(str(part) if place == 0 else f"{part:02}" for place, part in enumerate(oldest))
    return Problem(
        f"NVIDIA driver {found.driver}, and torch is built for CUDA {version}",
        f"driver {wanted} or newer",
        "install a newer driver, or a torch for an older CUDA (https://pytorch.org/get-started/previous-versions)",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
