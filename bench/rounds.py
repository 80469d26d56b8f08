"""Code that all benchmarks share: interleaved rounds, a lab, and Markdown tables for the documentation."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from nodekit.deploy.lab import lab_network, lab_process
from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.deploy.lab.lab_process import ProcessRecord

T = TypeVar("T")

SHARED = Path("/var/lib/nodekit-bench")
"""The lab's hosts see files that were put here before the lab started; /tmp and root's home they do not see."""
QUIET_TIMEOUT_S = 20.0


class BenchError(Exception):
    """A contestant failed to do what it was started for."""


def note(text: str) -> None:
    """Print progress on stderr, apart from the tables."""
    print(text, file=sys.stderr, flush=True)


def interleave(
    *groups: Mapping[str, Callable[[int], T]],
    rounds: int,
    shown: Callable[[T], str],
    between: Callable[[], None] = lambda: None,
) -> tuple[dict[str, list[T]], dict[str, str]]:
    """Run the contestants in turn, round by round, after a warm-up that does not count.

    A temporary disturbance of this machine then affects all of them. Every other round reverses the order within each
    group (A B, B A, …), since the second one finds another state of memory than the first. A contestant that breaks is
    left out from then on, and the second dict says why.
    """
    measured: dict[str, list[T]] = {name: [] for group in groups for name in group}
    broken: dict[str, str] = {}
    for number in range(rounds + 1):
        turn = [each for group in groups for each in list(group.items())[:: -1 if number % 2 else 1]]
        for name, run in turn:
            if name in broken:
                continue
            between()
            try:
                result = run(number)
            except BenchError as error:
                broken[name] = str(error)
                note(f"{name}: {error}")
                continue
            note(f"{f'round {number}' if number else 'warm-up'}  {name:<28} {shown(result)}")
            if number:
                measured[name].append(result)
    return {name: results for name, results in measured.items() if name not in broken}, broken


# --- a lab of its own ---------------------------------------------------------------------------------------


class Bench:
    """Lab hosts, and what this machine needs to use them: a home folder for kit, and an ssh configuration."""

    def __init__(self, lab: Lab, folder: Path, shared: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.shared = shared
        """A folder that the hosts see at the same path."""
        self.ssh_config = folder / "ssh_config"
        self.bin = folder / "bin"
        hosts = "".join(
            f"Host {host.name} {host.address}\n  HostName {host.address}\n" for host in lab.hosts.values()
        )
        self.ssh_config.write_text(
            f"{hosts}Host *\n  User root\n  BatchMode yes\n  IdentitiesOnly yes\n  HashKnownHosts no\n"
            f"  IdentityFile {lab.identity_file}\n  UserKnownHostsFile {lab.known_hosts}\n"
        )
        self.bin.mkdir()
        # For programs that call plain `ssh`: it makes the lab's hosts reachable, as a user's hosts are.
        wrapper = self.bin / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.ssh_config} "$@"\n')
        wrapper.chmod(0o755)
        for host in lab.hosts.values():  # each has another interface: kit finds it, others are told
            line = f"export GLOO_SOCKET_IFNAME={host.interface}"
            lab.run(host.name, ["sh", "-c", f"echo {line} > /root/.bashrc"], check=True)
        self._quiet = {name: _processes(lab, name) for name in lab.hosts}

    @property
    def control_address(self) -> str:
        """This machine's address in the lab."""
        return lab_network.control_address(self.lab.network)

    def env(self, **more: str) -> dict[str, str]:
        """Return the caller's environment, without variables that would affect a job, and with its own home."""
        mine = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("NODEKIT_", "TORCH", "NCCL_", "GLOO_", "SSH_", "SLURM_", "XDG_", "DS_"))
            and name
            not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        }
        home = str(self.folder / "home")
        path = f"{self.bin}:{mine.get('PATH', os.defpath)}"
        return {**mine, "HOME": home, "XDG_STATE_HOME": f"{home}/state", "PATH": path, **more}

    def wait_quiet(self) -> None:
        """Wait until no process of the last contestant runs on the hosts; kill those that do not end."""
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while left := self._left():
            if time.monotonic() > deadline:
                note(f"  left behind by the last contestant, and ended now: {len(left)} processes")
                lab_process.kill(*left)
            time.sleep(0.05)

    def upper(self, host: str, path: str) -> Path:
        """Return this machine's path of a file on a host's disk; valid even if the host is down or cut off."""
        return self.lab.folder / "hosts" / host / "upper" / path.lstrip("/")

    def boot_all(self) -> None:
        """End all processes on the hosts, mend their links, and boot them again; their disks are kept."""
        for host in self.lab.hosts:
            self.lab.crash(host)
            self.lab.mend(host)
            self.lab.revive(host)
        self._quiet = {name: _processes(self.lab, name) for name in self.lab.hosts}

    def _left(self) -> set[ProcessRecord]:
        return set().union(*(_processes(self.lab, name) - quiet for name, quiet in self._quiet.items()))


def _processes(lab: Lab, host: str) -> set[ProcessRecord]:
    found = set()
    for pid in lab.processes(host):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found.add(ProcessRecord.of(pid))
    return found


def exit_on_signals() -> None:
    """Turn signals into exceptions, so that everything that was started is ended and removed."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def bench(
    num_hosts: int, prepare: Callable[[Path], None] = lambda _: None, *, slurm: bool = False
) -> Iterator[Bench]:
    """Make a lab with this many hosts, and remove it at the end, with all files.

    Args:
        num_hosts: number of hosts.
        prepare: called with a folder; the hosts see what it puts there, at the same path.
        slurm: also make a Slurm cluster on the hosts.
    """
    SHARED.mkdir(parents=True, exist_ok=True)
    exit_on_signals()
    with (
        tempfile.TemporaryDirectory(prefix="nodekit-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="run-", dir=SHARED) as shared,
    ):
        Path(shared).chmod(0o755)
        Path(folder, "home").mkdir()
        prepare(Path(shared))
        note(f"starting {num_hosts} hosts")
        lab = Lab.up(num_hosts, folder=Path(folder, "lab"), slurm=slurm)
        try:
            yield Bench(lab, Path(folder), Path(shared))
        finally:
            lab.down()


# --- tables -------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, aligned for terminals."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *padded[1:]])} |"

    rule = [("-" * width if n == 0 else "-" * (width - 1) + ":") for n, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def spread(values: Sequence[float]) -> str:
    """Format the least and the greatest value, as in ``6.10–7.00``."""
    return f"{min(values):.2f}–{max(values):.2f}"


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def machine() -> str:
    """Return the date and a description of this machine, for a table's caption."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {len(os.sched_getaffinity(0))} cores of {model}, "
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {importlib.metadata.version('torch')}; "
        f"load {load}"
    )


def middle(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest tenth, which contain disturbances by other work."""
    few = len(values) // 10
    return statistics.mean(sorted(values)[few : len(values) - few])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % confidence interval of `middle`, by bootstrapping."""
    draw = random.Random(0)
    middles = sorted(middle(draw.choices(values, k=len(values))) for _ in range(2000))
    return middles[100], middles[-101]
