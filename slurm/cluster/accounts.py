"""What Slurm's accounting knows, where a site keeps any: accounts, and what an ended job used of what it asked for."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from nodekit.inventory.errors import KitError, Problem
from nodekit.inventory.schema import SlurmSettings
from nodekit.slurm.cluster.jobs import ENDED, Slurm

FIELDS = ("JobID", "State", "ElapsedRaw", "AllocCPUS", "TotalCPU", "CPUTimeRAW", "NNodes", "ReqMem", "MaxRSS")
AGAIN_S = 0.3
_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "": 1}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a job asked for and used; 0 is unknown."""

    state: str
    elapsed_s: int
    num_cpus: int
    cpu_s: float
    """Of all CPUs together, busy."""
    given_cpu_s: float
    """Of all CPUs together, allocated."""
    memory_bytes: float
    """On the node that used most."""
    asked_memory_bytes: float
    """On each node."""

    def line(self) -> str:
        """For people: ``3 CPUs for 12:05, 61 % busy; 1.2 of 8.0 GB of memory at most (15 %)``."""
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
    """What an ended job used; None where no accounts are kept, or it is not in there.

    Args:
        slurm: its commands.
        job_id: the job's.
        wait_s: how long to wait for the accounts of a job that has just ended.
    """
    if not job_id:  # for sacct, all jobs of today
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
    """What `sacct --parsable2` printed of `FIELDS`: the job, then its steps; None for nothing."""
    rows = [dict(zip(FIELDS, line.split("|"), strict=True)) for line in text.splitlines() if line.strip()]
    if not rows:
        return None
    job, steps = rows[0], rows[1:]
    asked = re.fullmatch(r"([\d.]+[KMGT]?)([nc]?)", job["ReqMem"])
    asked_bytes = _bytes(asked[1]) if asked else 0.0
    num_cpus, num_nodes = int(job["AllocCPUS"] or 0), int(job["NNodes"] or 1) or 1
    # Before 21.08 it says per what: 4Gn for each node, 500Mc for each CPU; since then it is of all together.
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
    """What is wrong with the account or quality of service asked for; None if nothing, or no accounts are kept."""
    for kind, asked, column in (("account", settings.account, "account"), ("qos", settings.qos, "name")):
        if asked is None:
            continue
        told = _ask(slurm, "sacctmgr", "--noheader", "--parsable2", "show", kind, f"format={column}")
        there = [name for name in (told or "").split("\n") if name]
        # Slurm keeps them in small letters, and sbatch takes either.
        if there and asked.lower() not in (name.lower() for name in there):
            return Problem(
                f"slurm.{kind}: found '{asked}'", f"one of {', '.join(there)} (see sacctmgr show {kind})"
            )
    return None


def _ask(slurm: Slurm, *argv: str) -> str | None:
    """What a command of the accounting prints; None where there are no accounts."""
    try:
        status, out, _ = slurm.run(*argv)
    except KitError:
        return None
    return out if status == 0 else None


def _bytes(written: str) -> float:
    """``106184K`` in bytes; 0 for nothing."""
    found = re.fullmatch(r"([\d.]+)([KMGT]?)", written)
    return float(found[1]) * _UNITS[found[2]] if found else 0.0


def _seconds(written: str) -> float:
    """``1-02:03:04`` or ``02:03.588`` in seconds."""
    days, _, clock = written.rpartition("-")
    total = 0.0
    for part in filter(None, clock.split(":")):
        total = total * 60 + float(part)
    return int(days or 0) * 86400 + total
