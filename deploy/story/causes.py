"""Known causes of failures, each with a cure, recognised in the output of a rank or of the kernel. Pure.

A cause is found in the message of an exception (not in the lines of code above it), in the last lines of a log, in
the exit status of the process, and in the kernel's log. The most specific causes come first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

from nodekit.deploy.agent.ranks.failures import is_wrong_usage, message_of
from nodekit.deploy.story.cause import FAULT_CURE, FEWER_CURE, SHM_CURE, WORKER_CURE, Cause, Known, known
from nodekit.deploy.story.causes_by_words import BY_WORDS


def _said_by_slurm(cause: Cause, pattern: str) -> Known:
    return known(cause.name, pattern, cause.what, cause.cure, flags=re.IGNORECASE)


_TIME_LIMIT = Cause(
    "time-limit",
    "Slurm's time limit was reached",
    "kit up goes on from the newest snapshot; ask for more time with slurm.time",
)
_PREEMPTED = Cause(
    "preempted",
    "Slurm gave the nodes to another job",
    "kit up goes on from the newest snapshot; another slurm.qos or partition is not preempted",
)
_NODE_FAILURE = Cause(
    "slurm-node-fail",
    "Slurm lost a node of the job",
    "kit up goes on from the newest snapshot; slurm.exclude leaves a node out",
)
BY_SLURM_STATE: Mapping[str, Cause] = {
    "TIMEOUT": _TIME_LIMIT,
    "DEADLINE": _TIME_LIMIT,
    "PREEMPTED": _PREEMPTED,
    "NODE_FAIL": _NODE_FAILURE,
    "BOOT_FAIL": _NODE_FAILURE,
    "OUT_OF_MEMORY": Cause(
        "slurm-out-of-memory",
        "the job used more memory than it asked of Slurm",
        "Ask for more with slurm.mem_gb, or use less: fewer DataLoader workers",
    ),
    "JobLaunchFailure": Cause(
        "slurm-launch-failed",
        "a node could not start the job's script: its prolog failed, or it cannot write the job's log in the run's "
        "folder",
        "sinfo -R says which nodes Slurm has drained, and slurmd's log on the job's first node why; kit up goes on",
    ),
}
"""State of a job that Slurm ended, or Slurm's reason → cause."""

# The order is that of precedence.
_BY_WORDS = (
    *BY_WORDS,
    _said_by_slurm(_TIME_LIMIT, r"DUE TO TIME LIMIT"),
    _said_by_slurm(_PREEMPTED, r"DUE TO PREEMPTION|DUE TO JOB REQUEUE"),
    _said_by_slurm(_NODE_FAILURE, r"DUE TO NODE FAILURE"),
    known(
        "slurm-cancelled",
        r"error: \*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED",
        "somebody or Slurm cancelled the job",
        "sacct -j JOB tells who; kit up goes on",
    ),
)

_BY_KERNEL = (
    known(
        "cgroup-out-of-memory",
        r"CONSTRAINT_MEMCG|Memory cgroup out of memory|: oom_kill \d+ -> \d+",
        "the kernel killed it: its memory cgroup (a container, a Slurm job, a systemd slice) reached its limit",
        "Give it more: docker run --memory, the pod's limits.memory, slurm.mem_gb, MemoryMax=; or use less: fewer "
        "DataLoader workers, less kept in memory by each rank",
    ),
    known(
        "host-out-of-memory",
        r"Out of memory: Kill(?:ed)? process|oom-kill:|oom_reaper: reaped|Killed process \d+",
        "the kernel killed it: the node's memory was full",
        "Use less on that node: fewer ranks or DataLoader workers, data read in parts; or take what else runs there "
        "away. free -g shows what is left",
    ),
    known(
        "gpu-fault",
        r"NVRM: Xid \((?P<gpu>[^)]+)\): (?P<number>\d+)(?P<what>[^\n]*)",
        "the NVIDIA driver reports a fault of GPU {gpu}: Xid {number}",
        "13, 31, 43 and 45 are mostly the program's own; 48, 63, 64, 79, 94 and 95 are the GPU's: take the node out, "
        "reset the GPU or reboot it, and have it replaced if it comes again",
    ),
    known(
        "disk-fault",
        r"I/O error|EXT4-fs error|XFS .*orruption",
        "the node's disk has a fault",
        "See dmesg there; take the node out and replace the disk",
    ),
    known(
        "illegal-instruction",
        r"trap invalid opcode",
        "the node's CPU lacks an instruction that the program was built with",
        "Install a build for older CPUs, or take nodes of one kind: lscpu shows what each has",
    ),
    known(
        "segfault",
        r"segfault at \w+ ip \S+ sp \S+ error \d+ in (?P<library>[^\[\s]+)",
        "it read or wrote memory that is not its own, in {library}",
        FAULT_CURE,
    ),
    known(
        "segfault",
        r"segfault at \w+ ip \S+ sp \S+ error \d+|general protection",
        "it read or wrote memory that is not its own",
        FAULT_CURE,
    ),
)

_BY_SIGNAL = {
    signal.SIGKILL: Cause(
        "killed",
        "somebody killed it: most often the kernel, for want of memory",
        "kit could not read why: dmesg on that node (as root) tells, as do Slurm and the container's runtime. If it "
        "was memory, use less there, or ask for more",
    ),
    signal.SIGSEGV: Cause(
        "segfault",
        "it read or wrote memory that is not its own",
        FAULT_CURE,
    ),
    signal.SIGBUS: Cause(
        "bus-error",
        "a file that it had mapped into memory was not there any more: /dev/shm is full, or a file was made shorter",
        SHM_CURE,
    ),
    signal.SIGILL: Cause(
        "illegal-instruction",
        "the node's CPU lacks an instruction that the program was built with",
        "Install a build for older CPUs, or take nodes of one kind: lscpu shows what each has",
    ),
    signal.SIGXFSZ: Cause(
        "file-too-large",
        "it wrote a larger file than the node allows",
        "Raise ulimit -f there, or write smaller files",
    ),
    signal.SIGXCPU: Cause(
        "time-limit",
        "it used more processor time than the node allows",
        "Raise ulimit -t there",
    ),
    signal.SIGTERM: Cause(
        "terminated",
        "it was asked to end, and not by kit: a scheduler, a shutdown, or a person",
        "kit up goes on from the newest snapshot",
    ),
    signal.SIGINT: Cause(
        "terminated",
        "it was interrupted, and not by kit",
        "kit up goes on from the newest snapshot",
    ),
}
# The error of a rank that was reading from a DataLoader worker when that was killed; "" if its traceback was cut short
# by the handler that reports the worker's end.
_LOST_PIPE = re.compile(r"ConnectionResetError|ConnectionRefusedError|EOFError|BrokenPipeError|$")
_LOST_WORKER = Cause(
    "dataloader-worker-killed",
    "the process of a DataLoader worker is gone: something killed it",
    WORKER_CURE,
)
_WENT_AWAY = (
    "the node, its network, or kit's agent there went away: power, a cable, a reboot, or somebody ended it"
)
_SEE_TO_NODE = "See to it (its console, ping, last -x reboot, agent.log in the run's folder there)"
NODE_LOST = Cause("node-lost", _WENT_AWAY, f"{_SEE_TO_NODE}; kit up goes on when it is back. {FEWER_CURE}")
NODE_LOST_MEANWHILE = Cause(
    "node-lost",
    _WENT_AWAY,
    f"{_SEE_TO_NODE}; a job that goes on takes it back when it answers again (under Slurm, when the job is requeued)",
)
"""The cause for a node that was lost while the run goes on."""
DISK_CURE = (
    "See to that disk (`sudo dmesg` there tells more); the node is started again when it can be written to: by the job "
    "where that goes on, else by kit up"
)
TOO_FEW_NODES = Cause(
    "too-few-nodes",
    "fewer nodes are left than the job needs (nodes: in the inventory; all, where it does not say)",
    f"See to the node that is missing; kit up goes on when it is back. {FEWER_CURE}",
)
_BY_STATUS = {
    126: Cause(
        "not-executable", "the command cannot be executed there", "See its mode (chmod +x) and its first line"
    ),
    127: Cause(
        "no-such-command",
        "the command was not found on that node",
        "Install it there, or give its whole path in job.command",
    ),
}
_WRONG_USAGE = Cause(
    "wrong-usage",
    "the command does not take these arguments",
    "See what it says above, and mend job.command",
)


def recognise(error: str, exitcode: int = 1, kernel: Sequence[str] = ()) -> Cause | None:
    """Return the known cause of a failure; None if it is an error of the user's script, or unknown.

    Args:
        error: the error of a rank, or another text that describes a failure.
        exitcode: of the rank, negative for a signal.
        kernel: lines of the kernel's log about its process.
    """
    number = signal_of(exitcode)
    said = "\n".join(kernel)
    by_kernel = _first(_BY_KERNEL, said)
    if number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL):
        # The signal ends a process at once, so its output cannot be about that.
        last = _first(_BY_WORDS, error) if number == signal.SIGBUS else None
        return by_kernel or last or _BY_SIGNAL[signal.Signals(number)]
    message = message_of(error)
    found = _first(_BY_WORDS, message)
    if "/torch/utils/data/" in error and _LOST_PIPE.match(message):
        found = _LOST_WORKER
    if by_kernel and by_kernel.name.endswith("out-of-memory") and (found is None or "worker" in found.name):
        return by_kernel
    if (
        by_kernel
        and by_kernel.name == "gpu-fault"
        and found
        and found.name.startswith(("cuda", "nccl", "gpu"))
    ):
        return by_kernel
    if found is not None:
        return found
    if number in _BY_SIGNAL:
        return _BY_SIGNAL[signal.Signals(number)]
    if is_wrong_usage(error, exitcode):
        return _WRONG_USAGE
    return by_kernel or _BY_STATUS.get(exitcode)


def signal_of(exitcode: int) -> int:
    """Return the signal that ended a process, or a child whose status it passed on (a shell's 128 + N); 0 for none."""
    if exitcode < 0:
        return -exitcode
    return exitcode - 128 if exitcode - 128 in (s.value for s in _BY_SIGNAL) else 0


def _first(table: Sequence[Known], text: str) -> Cause | None:
    for each in table:
        if text and (match := each.pattern.search(text)):
            groups = {**_details(text), **{key: value or "" for key, value in match.groupdict().items()}}
            what = each.what(groups) if callable(each.what) else each.what.format_map(groups)
            return Cause(each.name, re.sub(r"[:,]?\s*$", "", what), each.cure)
    return None


_DETAILS = {
    "interface": r"Unable to find (?:address|interface) for: *(?P<value>\S+)",
    "want": r"Tried to allocate (?P<value>[\d.]+ [KMGT]i?B)",
    "gpu": r"GPU (?P<value>\d+)(?: has a total|;)",
    "total": r"total capaci?ty of (?P<value>[\d.]+ [KMGT]i?B)|GPU \d+; (?P<value2>[\d.]+ [KMGT]i?B) total",
    "free": r"of which (?P<value>[\d.]+ (?:[KMGT]i?B|bytes)) is free|; (?P<value2>[\d.]+ (?:[KMGT]i?B|bytes)) free",
    "used": r"this process has (?P<value>[\d.]+ [KMGT]i?B) memory",
    "path": r"(?:No space left on device|Disk quota exceeded|denied):? '(?P<value>[^']+)'",
    "port": r"(?:port: |:)(?P<value>\d{2,5})\b[^\n]*(?:in use|EADDRINUSE)",
}


def _details(text: str) -> dict[str, str]:
    """Return the values in an error's text that sentences may use; "" for those that are not there."""
    found = {}
    for key, pattern in _DETAILS.items():
        match = re.search(pattern, text)
        found[key] = next((value for value in match.groups() if value), "") if match else ""
    for key in ("path", "port", "interface"):
        found[key] = f": {found[key]}" if found[key] else ""
    return found
