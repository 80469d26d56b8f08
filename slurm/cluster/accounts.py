"""Read Slurm's accounting, if the site has one: accounts, and how much an ended job used of what it requested."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from nodekit.inventory.errors import KitError, Problem
from nodekit.inventory.schema import SlurmSettings
from nodekit.slurm.cluster.jobs import ENDED, Slurm

FIELDS = ("JobID", "State", "ElapsedRaw", "AllocCPUS", "TotalCPU", "CPUTimeRAW", "NNodes", "ReqMem", "MaxRSS")
AGAIN_S = 0.3  # between two questions to sacct
_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "": 1}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The resources that a job requested and used; 0 is unknown."""

    state: str
    elapsed_s: int
    num_cpus: int
    cpu_s: float
    """Busy time of all CPUs together."""
    given_cpu_s: float
    """Allocated time of all CPUs together."""
    memory_bytes: float
    """Used on the node that used most."""
    asked_memory_bytes: float
    """Requested on each node."""

    def line(self) -> str:
        """Return a line for the user: ``3 CPUs for 0:12:05, 61% busy; at most 1.20 GB of memory on a node, …``."""
        clock = f"{self.elapsed_s // 3600}:{self.elapsed_s // 60 % 60:02}:{self.elapsed_s % 60:02}"
        busy = f", {self.cpu_s / self.given_cpu_s:.0%} busy" if self.given_cpu_s else ""
        said = f"{self.num_cpus} CPU{'' if self.num_cpus == 1 else 's'} for {clock}{busy}"
        if not self.memory_bytes:
            return f"{said}; Slurm has not measured its memory"
        used = f"{said}; at most {self.memory_bytes / 1e9:.2f} GB of memory on a node"
        if not self.asked_memory_bytes:
            return used
        share = self.memory_bytes / self.asked_memory_bytes
        return f"{used}, {share:.0%} of the {self.asked_memory_bytes / 1e9:.2f} GB asked for"


def usage(slurm: Slurm, job_id: str, *, wait_s: float = 0) -> Usage | None:
    """Return what an ended job used; None if the site has no accounting, or the job is not in it.

    Args:
        slurm: Slurm's commands.
        job_id: the job.
        wait_s: how long to wait for the accounting of a job that has just ended.
    """
    if not job_id:  # without an id, sacct would list all jobs of today
        return None
    deadline = time.monotonic() + wait_s
    argv = ("sacct", "--noheader", "--parsable2", f"--format={','.join(FIELDS)}", "--jobs", job_id)
    while (text := _ask(slurm, *argv)) is not None:
        found = parse_usage(text)
        if found is not None and found.state.startswith(ENDED):
            return found
        if time.monotonic() >= deadline:
            return None
        time.sleep(AGAIN_S)
    return None


def parse_usage(text: str) -> Usage | None:
    """Parse the output of `sacct --parsable2` with `FIELDS`: the job, then its steps; None if it is empty."""
    rows = [dict(zip(FIELDS, line.split("|"), strict=True)) for line in text.splitlines() if line.strip()]
    if not rows:
        return None
    job, steps = rows[0], rows[1:]
    asked = re.fullmatch(r"([\d.]+[KMGT]?)([nc]?)", job["ReqMem"])
    asked_bytes = _bytes(asked[1]) if asked else 0.0
    num_cpus, num_nodes = int(job["AllocCPUS"] or 0), int(job["NNodes"] or 1) or 1
    # Before Slurm 21.08 ReqMem names its unit: 4Gn for each node, 500Mc for each CPU; since then it is the job's total.
    each = {"n": 1.0, "c": num_cpus / num_nodes, "": 1 / num_nodes}[asked[2] if asked else ""]
    return Usage(
        state=job["State"],
        elapsed_s=int(job["ElapsedRaw"] or 0),
        num_cpus=num_cpus,
        cpu_s=_seconds(job["TotalCPU"]),
        given_cpu_s=float(job["CPUTimeRAW"] or 0),
        memory_bytes=max((_bytes(step["MaxRSS"]) for step in steps), default=0.0),
        asked_memory_bytes=asked_bytes * each,
    )


def account_problem(slurm: Slurm, settings: SlurmSettings) -> Problem | None:
    """Return a problem if the account or quality of service does not exist; None also if there is no accounting."""
    for kind, asked, column in (("account", settings.account, "account"), ("qos", settings.qos, "name")):
        if asked is None:
            continue
        told = _ask(slurm, "sacctmgr", "--noheader", "--parsable2", "show", kind, f"format={column}")
        there = [name for name in (told or "").split("\n") if name]
        # Slurm stores the names in lower case, and sbatch ignores case.
        if there and asked.lower() not in (name.lower() for name in there):
            return Problem(
                f"slurm.{kind}: found '{asked}'", f"one of {', '.join(there)} (see sacctmgr show {kind})"
            )
    return None


def _ask(slurm: Slurm, *argv: str) -> str | None:
    """Run a command of the accounting; return its output, None if there is no accounting."""
    try:
        status, out, _ = slurm.run(*argv)
    except KitError:
        return None
    return out if status == 0 else None


def _bytes(written: str) -> float:
    """Convert ``106184K`` to bytes; "" is 0."""
    found = re.fullmatch(r"([\d.]+)([KMGT]?)", written)
    return float(found[1]) * _UNITS[found[2]] if found else 0.0


def _seconds(written: str) -> float:
    """Convert ``1-02:03:04`` or ``02:03.588`` to seconds."""
    days, _, clock = written.rpartition("-")
    total = 0.0
    for part in filter(None, clock.split(":")):
        total = total * 60 + float(part)
    return int(days or 0) * 86400 + total
