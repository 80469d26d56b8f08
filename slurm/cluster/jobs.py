"""Run Slurm's commands on the login node, and parse what they print about jobs and partitions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nodekit.deploy.connect.channel import HostChannel, RemoteError
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError, Problem
from nodekit.inventory.schema import SlurmSettings
from nodekit.slurm.cluster.login import execute

ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
)  # fmt: skip
UNLIMITED_MIN = 365 * 1440
_RELEASE = "scontrol release {} lets it start"
HELD = {
    "JobHeldAdmin": "an administrator has held it, and can release it",
    "JobHeldUser": f"it is held; {_RELEASE}",
    "job_requeued_in_held_state": f"it is held; {_RELEASE}",
    "launch_failed_requeued_held": f"a node could not start it, see sinfo -R, and it is held; {_RELEASE}",
}
"""Slurm's reason for a pending job that does not start by itself → what it means, and what to do about it."""
_FILTERS = [
    f"SQUEUE_{what}" for what in ("ACCOUNT", "LICENSES", "NAMES", "PARTITION", "QOS", "STATES", "USERS")
]
"""Environment variables that make squeue omit some of the user's jobs."""
_SPARING = [
    f"SCANCEL_{what}"
    for what in (
        "ACCOUNT", "BATCH", "CTLD", "FULL", "HURRY", "INTERACTIVE", "NAME", "PARTITION", "QOS", "STATE", "USER",
        "VERBOSE", "WCKEY",
    )
]  # fmt: skip
"""Environment variables that make scancel skip a job and yet exit with 0, or ask for confirmation for ever."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, as Slurm knows it."""

    state: str
    """Slurm's own name: PENDING, RUNNING, COMPLETING, COMPLETED…; "" if Slurm does not know the job any more."""
    job_id: str = ""
    """The job's SLURM_JOB_ID; for a task of an array this number differs from ARRAY_INDEX."""
    reason: str = ""
    """Why the job is pending, or how it ended, in Slurm's words."""
    start: str = ""
    """When the job started, or is expected to start."""
    nodes: str = ""
    restarts: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, and will not run again."""
        return self.state in ENDED or not self.state

    def line(self) -> str:
        """Return a line for the user: ``waits in the queue (Resources), expected to start 2026-11-21T12:00:00``."""
        again = f", {self.restarts} time(s) queued again" if self.restarts else ""
        if self.state == "PENDING":
            expected = f", expected to start {self.start}" if self.start else ""
            held = f": {HELD[self.reason].format(self.job_id)}" if self.reason in HELD else ""
            return f"waits in the queue ({self.reason or 'no reason yet'}{held}){expected}{again}"
        where = f" on {self.nodes}" if self.nodes else ""
        why = f" ({self.reason})" if self.reason else ""
        return f"{(self.state or 'gone').lower()}{where}{why}{again}"


class Unanswered(KitError):
    """Slurm's controller does not answer, for example while it restarts; its jobs go on."""

    def __init__(self, found: str) -> None:
        super().__init__(
            found, cure="try again when Slurm answers (scontrol ping); its jobs run on meanwhile"
        )

    @property
    def doubt(self) -> str:
        """The addition to a line which says that jobs go on."""
        return f"as far as is known: Slurm does not answer ({self.problem.found})"


class Slurm:
    """Slurm's commands on one host."""

    def __init__(self, channel: HostChannel) -> None:
        self._channel = channel

    def run(self, *argv: str, env: Mapping[str, None] | None = None) -> tuple[int, str, str]:
        """Run a command, without the environment variables in `env`; return its status, stdout and stderr.

        Raises:
            KitError: there is no such command.
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
        """Return the present state of a job; raises as `jobs` does."""
        return next(iter(self.jobs(job_id).values()), Job(state=""))

    def jobs(self, job_id: str) -> dict[str, Job]:
        """Return job id → job for a job, or for all tasks of an array; {} if Slurm does not know it any more.

        Raises:
            Unanswered: Slurm does not answer.
        """
        if not job_id:  # without an id, scontrol would show all jobs
            return {}
        status, out, err = self.asked("scontrol", "show", "job", "--oneliner", job_id)
        if status == 0:
            return parse_jobs(out)
        # The first message is for an unknown number, the second for an index that the array does not have.
        if "Invalid job id" in err or re.search(r"^Job \S+ not found", out + err, re.MULTILINE):
            return {}
        raise Unanswered(f"{self._channel.host}: scontrol show job {job_id}: {(err or out).strip()}")

    def job_below(self, folder: str) -> str:
        """Return the id of the user's pending or running job or array whose script is in this folder; "" if none.

        With --all, since squeue omits jobs in partitions that are hidden.

        Raises:
            Unanswered: Slurm does not answer.
        """
        status, out, err = self.asked(
            "squeue", "--noheader", "--me", "--all", "--format=%F %o", env=dict.fromkeys(_FILTERS)
        )
        if status:
            raise Unanswered(f"{self._channel.host}: squeue: {err.strip()}")
        found = (line.strip().partition(" ") for line in out.splitlines())
        return next((job_id for job_id, _, script in found if script.startswith(f"{folder}/")), "")

    def asked(self, *argv: str, env: Mapping[str, None] | None = None) -> tuple[int, str, str]:
        """Run a command, as `run`, with an error of its own for a timeout.

        Raises:
            Unanswered: the command took too long.
        """
        try:
            return self.run(*argv, env=env)
        except RemoteError as error:
            if error.type == "TimeoutExpired":
                raise Unanswered(f"{self._channel.host}: {error.problem.found}") from error
            raise

    def cluster(self) -> str:
        """Return the name of the cluster that the commands ask, "" if it cannot be told; raises as `asked` does."""
        return self._configured("ClusterName")

    def _configured(self, name: str) -> str:
        """Return a value of the cluster's configuration, "" if it cannot be told; raises as `asked` does."""
        _, out, _ = self.asked("scontrol", "show", "config")
        found = re.search(rf"^{name}\s*=\s*(\S+)", out, re.MULTILINE)
        return found[1] if found else ""

    def partitions(self) -> dict[str, dict[str, str]]:
        """Return partition → its fields as scontrol shows them, hidden ones too; the default partition is first."""
        status, out, err = self.asked("scontrol", "--all", "show", "partition", "--oneliner")
        if status:
            raise Unanswered(f"{self._channel.host}: Slurm does not answer: {err.strip()}")
        found = [_fields(line) for line in out.splitlines() if line.strip()]
        found.sort(key=lambda each: each.get("Default") != "YES")
        return {each["PartitionName"]: each for each in found}

    def refuse_array_of(self, num_jobs: int) -> None:
        """Raise KitError if an array of so many jobs exceeds the cluster's MaxArraySize."""
        limit = self._configured("MaxArraySize")
        if limit and num_jobs > int(limit):
            raise KitError(
                f"found {num_jobs} runs, and Slurm allows at most {limit} in an array (MaxArraySize)",
                cure="name fewer in --sweep or slurm.array, and the rest when these are over",
            )

    def cancel(self, job_id: str) -> bool:
        """Ask Slurm to cancel a job, which does nothing if the job is over; return whether scancel succeeded."""
        status, _, _ = self.run("scancel", job_id, env=dict.fromkeys(_SPARING))
        return status == 0


def slurm_of(run: Run, channel: HostChannel) -> Slurm:
    """Return Slurm's commands, for the job of a run.

    Raises:
        KitError: they ask another cluster than the job's, where a job of that number is unknown, or another one.
    """
    slurm, found = Slurm(channel), ""
    if wanted := run.slurm.get("cluster"):
        with contextlib.suppress(Unanswered):  # whoever asks for the job hears of that
            found = slurm.cluster()
    if found and found != wanted:
        raise KitError(
            f"{channel.host}: Slurm's commands ask the cluster {found}, and the job of {run.run_id} is on {wanted}",
            cure="set SLURM_CLUSTERS and SLURM_CONF there as they were when it was submitted",
        )
    return slurm


class Watched:
    """A job that is polled, with its last known state while Slurm's controller does not answer."""

    def __init__(self, slurm: Slurm, job_id: str) -> None:
        """Ask nothing yet."""
        self._slurm, self._job_id = slurm, job_id
        self.job = Job(state="UNKNOWN")
        """The job as of Slurm's last answer."""
        self.line = ""
        """`Job.line`, or a line that Slurm does not answer."""

    @property
    def is_unknown(self) -> bool:
        """Whether Slurm has not answered yet."""
        return self.job.state == "UNKNOWN"

    def look(self) -> bool:
        """Ask Slurm once; return whether the job is over, False if Slurm does not answer."""
        try:
            self.job = self._slurm.job(self._job_id)
        except Unanswered as error:
            self.line = f"goes on, {error.doubt}"
            return False
        self.line = self.job.line()
        return self.job.is_over


def parse_jobs(text: str) -> dict[str, Job]:
    """Parse the output of `scontrol show job --oneliner`: ``7`` → job, or for an array ``7_0``, ``7_1``… → job."""
    found = {}
    for line in filter(str.strip, text.splitlines()):
        fields = _fields(line)
        job = _job(fields)
        if "ArrayJobId" not in fields:
            found[job.job_id] = job
            continue
        for index in indexes(fields.get("ArrayTaskId", "")):  # one line has all pending tasks
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
    """Return the indexes of an array from Slurm's notation, ``0-3,7,10-20:5%4``; the number after ``%`` is ignored.

    If scontrol has cut a long list (``0-99,150,15...%4``), the rest is missing, and so is the last, cut number.
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
    """Parse ``A=1 B=two words C=3``: values may contain blanks, names do not; of a repeated name the last counts."""
    parts = re.split(r"(?:^|\s)([A-Za-z][\w/:]*)=", line.strip())
    return {name: value.strip() for name, value in zip(parts[1::2], parts[2::2], strict=True)}


def minutes(written: str) -> int | None:
    """Convert Slurm's ``[D-]HH:MM:SS`` or ``UNLIMITED`` to minutes, rounded up; None if there is no value."""
    if written in ("", "NONE", "(null)"):
        return None
    if written in ("UNLIMITED", "INFINITE"):
        return UNLIMITED_MIN
    days, _, clock = written.rpartition("-")
    hours, mins, secs = ([0, 0] + [int(part) for part in clock.split(":")])[-3:]
    return int(days or 0) * 1440 + hours * 60 + mins + (secs > 0)


def time_limit(asked: int | None, partition: dict[str, str]) -> int:
    """Return the time limit in minutes: `asked`, else the partition's default, else its maximum."""
    own = minutes(partition.get("DefaultTime", "")) or minutes(partition.get("MaxTime", ""))
    return asked or own or UNLIMITED_MIN


def choose_partition(name: str | None, there: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the partition in which a job would run: of several names (``a,b``) the first, without a name the default.

    Raises:
        KitError: there is no partition of that name.
    """
    names = [name for name in (name or "").split(",") if name] or list(there)[:1]
    absent: Sequence[str] = [each for each in names if each not in there]
    if absent or not names:
        raise KitError(
            f"slurm.partition (or SBATCH_PARTITION): found {', '.join(absent)!r}",
            wanted=f"one of {', '.join(there)} (see sinfo)",
        )
    return there[names[0]]


def beyond_limits(settings: SlurmSettings, time_min: int, partition: dict[str, str]) -> Problem | None:
    """Return a problem if the job requests more than the partition ever grants; None if not, or if that is uncertain.

    Unless EnforcePartLimits is set (it is not by default), Slurm takes such a job and leaves it pending for ever. With
    a quality of service, or several partitions, more may be allowed, so nothing is checked.
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
