"""What Slurm says of a job and of the cluster: its commands, run where they are there, and what they print, read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nodekit.deploy.connect.channel import HostChannel, RemoteError
from nodekit.inventory.errors import KitError, Problem
from nodekit.inventory.schema import SlurmSettings
from nodekit.slurm.cluster.login import execute

ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
)  # fmt: skip
UNLIMITED_MIN = 365 * 1440
_FILTERS = [
    f"SQUEUE_{what}" for what in ("ACCOUNT", "LICENSES", "NAMES", "PARTITION", "QOS", "STATES", "USERS")
]
"""Variables by which squeue leaves out jobs of the user's."""
_SPARING = [
    f"SCANCEL_{what}"
    for what in (
        "ACCOUNT", "BATCH", "CTLD", "FULL", "HURRY", "INTERACTIVE", "NAME", "PARTITION", "QOS", "STATE", "USER",
        "VERBOSE", "WCKEY",
    )
]  # fmt: skip
"""Variables by which scancel leaves a job alone and says that all is well, or asks without end whether to cancel it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, as Slurm knows it."""

    state: str
    """Slurm's own word: PENDING, RUNNING, COMPLETING, COMPLETED…; "" for one that Slurm knows no more."""
    job_id: str = ""
    """What the job itself sees as SLURM_JOB_ID: of an array's task that is another number than ARRAY_INDEX."""
    reason: str = ""
    """Why it waits, or how it ended, in Slurm's words."""
    start: str = ""
    """When it started, or is expected to."""
    nodes: str = ""
    restarts: int = 0

    @property
    def is_over(self) -> bool:
        """Whether it has ended and is not to run again."""
        return self.state in ENDED or not self.state

    def line(self) -> str:
        """For people: ``waits in the queue (Resources), expected to start 2026-11-21T12:00:00``."""
        again = f", {self.restarts} time(s) queued again" if self.restarts else ""
        if self.state == "PENDING":
            expected = f", expected to start {self.start}" if self.start else ""
            return f"waits in the queue ({self.reason or 'no reason yet'}){expected}{again}"
        where = f" on {self.nodes}" if self.nodes else ""
        why = f" ({self.reason})" if self.reason else ""
        return f"{(self.state or 'gone').lower()}{where}{why}{again}"


class Unanswered(KitError):
    """Slurm's controller does not answer, as while it is restarted; its jobs run on."""

    def __init__(self, found: str) -> None:
        super().__init__(
            found, cure="try again when Slurm answers (scontrol ping); its jobs run on meanwhile"
        )

    @property
    def doubt(self) -> str:
        """What is added to a line that says that jobs go on."""
        return f"as far as is known: Slurm does not answer ({self.problem.found})"


class Slurm:
    """Slurm's commands on one host."""

    def __init__(self, channel: HostChannel) -> None:
        self._channel = channel

    def run(self, *argv: str, env: Mapping[str, None] | None = None) -> tuple[int, str, str]:
        """Run one, without the variables in `env`; its status, output and error output.

        Raises:
            KitError: it is not there.
        """
        try:
            done = execute(self._channel, *argv, env=env)
        except RemoteError as error:
            if error.type == "FileNotFoundError":
                raise KitError(
                    f"{self._channel.host}: no {argv[0]} there",
                    cure="is it a login node of a Slurm cluster? From elsewhere, name one as slurm.login",
                ) from error
            raise
        return done["status"], done["out"], done["err"]

    def job(self, job_id: str) -> Job:
        """What it knows of a job now."""
        return next(iter(self.jobs(job_id).values()), Job(state=""))

    def jobs(self, job_id: str) -> dict[str, Job]:
        """What it knows of a job now: its id → it; of an array, all tasks; {} where it knows it no more, or of "".

        Raises:
            Unanswered: it does not say.
        """
        if not job_id:  # for scontrol, all jobs
            return {}
        status, out, err = self.asked("scontrol", "show", "job", "--oneliner", job_id)
        if status == 0:
            return parse_jobs(out)
        # The first is for a number that is nobody's, the second for an index that the array does not have.
        if "Invalid job id" in err or re.search(r"^Job \S+ not found", out + err, re.MULTILINE):
            return {}
        raise Unanswered(f"{self._channel.host}: scontrol show job {job_id}: {(err or out).strip()}")

    def job_below(self, folder: str) -> str:
        """The id of the user's job, or array, that waits or runs by a script in this folder; "" where there is none.

        Raises:
            Unanswered: it does not say.
        """
        status, out, err = self.asked(
            "squeue", "--noheader", "--me", "--format=%F %o", env=dict.fromkeys(_FILTERS)
        )
        if status:
            raise Unanswered(f"{self._channel.host}: squeue: {err.strip()}")
        found = (line.strip().partition(" ") for line in out.splitlines())
        return next((job_id for job_id, _, script in found if script.startswith(f"{folder}/")), "")

    def asked(self, *argv: str, env: Mapping[str, None] | None = None) -> tuple[int, str, str]:
        """Run one, as `run`.

        Raises:
            Unanswered: it took too long.
        """
        try:
            return self.run(*argv, env=env)
        except RemoteError as error:
            if error.type == "TimeoutExpired":
                raise Unanswered(f"{self._channel.host}: {error.problem.found}") from error
            raise

    def partitions(self) -> dict[str, dict[str, str]]:
        """Name → what scontrol shows of it; the default one is first."""
        status, out, err = self.run("scontrol", "show", "partition", "--oneliner")
        if status:
            raise Unanswered(f"{self._channel.host}: Slurm does not answer: {err.strip()}")
        found = [_fields(line) for line in out.splitlines() if line.strip()]
        found.sort(key=lambda each: each.get("Default") != "YES")
        return {each["PartitionName"]: each for each in found}

    def refuse_array_of(self, num_jobs: int) -> None:
        """Raise KitError where the cluster's arrays have no place for so many jobs."""
        _, out, _ = self.run("scontrol", "show", "config")
        limit = re.search(r"^MaxArraySize\s*=\s*(\d+)", out, re.MULTILINE)
        if limit and num_jobs > int(limit[1]):
            raise KitError(
                f"found {num_jobs} runs, and Slurm allows at most {limit[1]} in an array (MaxArraySize)",
                cure="name fewer in --sweep or slurm.array, and the rest when these are over",
            )

    def cancel(self, job_id: str) -> bool:
        """Cancel a job; nothing where it is over. Whether Slurm has taken it."""
        status, _, _ = self.run("scancel", job_id, env=dict.fromkeys(_SPARING))
        return status == 0


class Watched:
    """A job that is asked for again and again, also while Slurm's controller is away."""

    def __init__(self, slurm: Slurm, job_id: str) -> None:
        """It is not asked for yet."""
        self._slurm, self._job_id = slurm, job_id
        self.job = Job(state="UNKNOWN")
        """As Slurm last knew it."""
        self.line = ""
        """For people, as `Job.line`, or that Slurm does not answer."""

    def look(self) -> bool:
        """Ask once more; whether the job is over."""
        try:
            self.job = self._slurm.job(self._job_id)
        except Unanswered as error:
            self.line = f"goes on, {error.doubt}"
            return False
        self.line = self.job.line()
        return self.job.is_over


def parse_jobs(text: str) -> dict[str, Job]:
    """What `scontrol show job --oneliner` printed: ``7`` → it, or of an array ``7_0`` → it, ``7_1`` → it."""
    found = {}
    for line in filter(str.strip, text.splitlines()):
        fields = _fields(line)
        job = _job(fields)
        if "ArrayJobId" not in fields:
            found[job.job_id] = job
            continue
        for index in indexes(fields.get("ArrayTaskId", "")):  # those that wait are together in one line
            found[f"{fields['ArrayJobId']}_{index}"] = job
    return found


def _job(fields: dict[str, str]) -> Job:
    def known(name: str) -> str:
        value = fields.get(name, "")
        return "" if value in ("(null)", "None", "Unknown", "N/A") else value

    return Job(
        job_id=known("JobId"),
        state=known("JobState"),
        reason=known("Reason"),
        start=known("StartTime"),
        nodes=known("NodeList"),
        restarts=int(known("Restarts") or 0),
    )


def indexes(written: str) -> list[int]:
    """The indexes of an array, as Slurm writes them: ``0-3,7,10-20:5%4``; after ``%`` is how many at once.

    Where scontrol cuts a long list (``0-99,150,15...%4``), without those it left out.
    """
    listed = written.partition("%")[0]
    parts = listed.split(",")
    found: list[int] = []
    for part in filter(None, parts[:-1] if listed.endswith("...") else parts):
        numbers, _, step = part.partition(":")
        first, _, last = numbers.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def _fields(line: str) -> dict[str, str]:
    """``A=1 B=two words C=3``: a value may hold blanks, a name does not. Of two with one name the later counts."""
    parts = re.split(r"(?:^|\s)([A-Za-z][\w/:]*)=", line.strip())
    return {name: value.strip() for name, value in zip(parts[1::2], parts[2::2], strict=True)}


def minutes(written: str) -> int | None:
    """Slurm's ``[D-]HH:MM:SS`` or ``UNLIMITED`` in minutes; None where there is none."""
    if written in ("", "NONE", "(null)"):
        return None
    if written in ("UNLIMITED", "INFINITE"):
        return UNLIMITED_MIN
    days, _, clock = written.rpartition("-")
    hours, mins, secs = ([0, 0] + [int(part) for part in clock.split(":")])[-3:]
    return int(days or 0) * 1440 + hours * 60 + mins + (secs > 0)


def time_limit(asked: int | None, partition: dict[str, str]) -> int:
    """The limit in minutes: what was asked for, else the partition's."""
    own = minutes(partition.get("DefaultTime", "")) or minutes(partition.get("MaxTime", ""))
    return asked or own or UNLIMITED_MIN


def choose_partition(name: str | None, there: dict[str, dict[str, str]]) -> dict[str, str]:
    """The partition a job would run in; of several names (``a,b``) the first.

    Raises:
        KitError: there is none of that name.
    """
    names = [name for name in (name or "").split(",") if name] or list(there)[:1]
    absent: Sequence[str] = [each for each in names if each not in there]
    if absent or not names:
        raise KitError(
            f"slurm.partition: found {', '.join(absent)!r}", wanted=f"one of {', '.join(there)} (see sinfo)"
        )
    return there[names[0]]


def beyond_limits(settings: SlurmSettings, time_min: int, partition: dict[str, str]) -> Problem | None:
    """What is asked for that the partition never gives; None if nothing.

    Slurm would take such a job and let it wait for ever, where EnforcePartLimits is not set (the default). A quality
    of service may allow more, and of several partitions another one: then nothing is said here.
    """
    if settings.qos or "," in (settings.partition or ""):
        return None
    name, nodes = partition.get("PartitionName", ""), settings.nodes.max
    longest = minutes(partition.get("MaxTime", ""))
    if longest is not None and time_min > longest:
        return Problem(
            f"slurm.time: found {time_min} minutes, and partition {name} allows at most {longest} "
            f"({partition['MaxTime']})",
            cure="ask for less, or name another slurm.partition",
        )
    for key, is_wrong, word in (
        ("MaxNodes", nodes.__gt__, "at most"),
        ("TotalNodes", nodes.__gt__, "has"),
        ("MinNodes", nodes.__lt__, "at least"),
    ):
        limit = partition.get(key, "")
        if limit.isdecimal() and is_wrong(int(limit)):
            says = f"has {limit}" if word == "has" else f"gives {word} {limit} to a job"
            return Problem(
                f"slurm.nodes: found {nodes}, and partition {name} {says}",
                cure="ask for as many, or name another slurm.partition",
            )
    return None
