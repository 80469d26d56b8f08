"""Tell the first failure of a job from the secondary ones of ranks that lost a peer. Standard library only."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodekit.deploy.host.schema import WorkerFailure

# What a rank prints when it has lost a peer: its failure is not the first one.
_SECONDARY = re.compile(
    r"Connection (?:reset|closed) by (?:remote )?peer|Broken pipe|Connection refused by peer"
    r"|ncclRemoteError|remote process exited|Socket Timeout|Timed out waiting \d+ms for (?:recv|send)"
    r"|Watchdog caught collective operation timeout|Some NCCL operations have failed or timed out"
    r"|failed to connect to all peers|recvValue failed|sendBytes failed|Failed to recv|Connection was likely closed"
    r"|store.*(?:connection was likely closed|has been destroyed)|NCCL communicator was aborted"
    r"|\[.*gloo/transport/.*\].*(?:Read error|Write error|Read timeout|Socket closed)"
    r"|Application timeout caused pair closure|another rank is lost, and this one",
    re.IGNORECASE,
)
_IN_VAIN = re.compile(
    r"failed to pass monitoredBarrier|reached monitoredBarrier, but|wait timeout after \d+ms, keys"
)
# Messages that name the ranks that were waited for.
_AWAITED = re.compile(
    r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier"
    r"|wait timeout after \d+ms, keys: \S*//(?:cpu|cuda)//\S*/(?P<rank>\d+)\s*$",
    re.MULTILINE,
)
# Network errors: either this rank or another one may have caused them.
_NETWORK = re.compile(
    r"\bNCCL\b|nccl[A-Z]\w+Error|\bgloo\b|c10d|Dist(?:Backend|Network|Store)Error|TCPStore|client socket has",
    re.IGNORECASE,
)
NOT_CONNECTED = re.compile(
    r"(?:connectFullMesh failed|gloo[^\n]*timed out connecting)[^\n]*?\bremote=\[[^\]\n]*\]"
    r"|connectFullMesh failed[^\n]*?Connect timeout"
)
"""What a rank prints that cannot connect to another one, which torch 2.14's ``_reconfigure`` does not name."""
# Errors that this rank or its host has caused itself, even if they also mention the network.
_OWN = re.compile(
    r"address already in use|EADDRINUSE|Duplicate GPU|no socket interface|neither AF_INET|out of memory"
    r"|No space left|Unable to find (?:address|interface)|Unable to resolve|invalid usage|unhandled cuda error",
    re.IGNORECASE,
)
_LOCAL = re.compile(r"/multiprocessing/|/concurrent/futures/|/subprocess\.py$")
_NEVER_STARTS = re.compile(
    r"(ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError|NameError)\b"
    r"|(kit|python -m nodekit\.training): .*\d+ GPU\(s\) are planned for this node, and torch "
)
# The message of `training/steps/not_finite.py`: a deterministic training gets the same loss again.
_ENDS_SO_AGAIN = re.compile(
    r"(python -m nodekit\.training|(\w+\.)*NotFinite): the (loss|weights) .*: training ends here \("
)
# argparse, click and shells; the head of argparse's usage may lie above a rank's last lines. Status 2 alone proves
# nothing: python exits so when it cannot open a file, make and bash for most errors.
_USAGE = re.compile(
    r"^\s*usage:|^[^\n:]+: error: (?:unrecognized arguments|the following arguments are required"
    r"|ambiguous option|one of the arguments |argument )",
    re.MULTILINE | re.IGNORECASE,
)
_NO_SCRIPT = re.compile(r"^\S*python[\d.]*: can't (?:open file|find '__main__')", re.MULTILINE)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?", re.MULTILINE)
# Colours, and what else a terminal would act upon: a title, binary output.
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\x1b\][^\x07\n]*\x07|[\x00-\x08\x0e-\x1f\x7f]")
# The stack of a C++ exception: a dozen lines that would push the message out of the last lines.
_FRAME = re.compile(r"frame #\d+:|#\d+ .* from |C\+\+ CapturedTraceback:|Exception raised from ")
_HEADER = "Traceback (most recent call last):"
_FATAL = "Fatal Python error: "
_LINES_BEFORE_FATAL, _FATAL_FRAMES = 6, 8
_MAX_ERROR_LINES = 60
_MAX_LINE_CHARS = 2000  # the text goes into an event, and with others into the status, each second
_MAX_MESSAGE_LINES = 30
_LAST_LINES = 10
_TELLING_LINES = 12
_KERNELS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_NODES_FAULT = re.compile(
    r"killed by signal|exited unexpectedly|ConnectionResetError|BrokenPipeError|EOFError|CUDA|NCCL|MemoryError"
    r"|Cannot allocate|Input/output error|Read-only file"
)
_UNHEARD = (signal.SIGKILL, signal.SIGSTOP)
CLOSE_S = 5.0
"""Of two failures no further apart than this, the messages, not the times, tell which one came first."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one worker: any exit status other than 0."""

    node: str
    rank: int
    world_size: int
    """Of its attempt, whose ranks all ended with it."""
    attempt: str
    exitcode: int
    """Negative for the signal that killed it."""
    when: float
    """Seconds since the epoch, by the control machine's clock."""
    log: str
    error: str
    """Its last traceback, or the last lines it wrote."""
    kernel: tuple[str, ...] = ()
    """Lines of its node's kernel log about it."""

    @classmethod
    def of(
        cls,
        node: str,
        told: Mapping[str, Any] | WorkerFailure,
        *,
        when: float = 0.0,
        clock_offset: float = 0.0,
    ) -> Failure:
        """Build it from what a node's agent wrote down; fields of a wrong type get a default.

        Args:
            node: the name of the node.
            told: the fields, from a status or an event.
            when: the time, if the fields have none.
            clock_offset: the node's clock minus the control machine's, in seconds.
        """

        def number(name: str, otherwise: float) -> float:
            value = told.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                return value
            return otherwise

        def text(name: str) -> str:
            value = told.get(name)
            return value if isinstance(value, str) else ""

        kernel = told.get("kernel")
        return cls(
            node=node,
            rank=int(number("rank", 0)),
            world_size=int(number("world_size", 1)),
            attempt=text("attempt") or "0.0",
            exitcode=int(number("exitcode", 1)),
            when=float(number("when", when)) - clock_offset,
            log=text("log"),
            error=text("error"),
            kernel=tuple(map(str, kernel)) if isinstance(kernel, list) else (),
        )


def last_words(text: str, exitcode: int) -> str:
    """Return the part of a log that shows why its process ended with this exit code.

    After SIGKILL that is just the last lines: a process cannot print anything about it, so any traceback is older.
    """
    return _last_lines(_lines_of(text)) if -exitcode in _UNHEARD else last_traceback(text)


def _lines_of(text: str) -> list[str]:
    lines = _RANK_PREFIX.sub("", _COLOUR.sub("", text).replace("\r", "\n")).splitlines()
    return [
        line if len(line) <= _MAX_LINE_CHARS else line[:_MAX_LINE_CHARS] + "…"
        for line in lines
        if not _FRAME.match(line.lstrip())
    ]


def _last_lines(lines: Sequence[str]) -> str:
    return "\n".join([line for line in lines if line.strip()][-_LAST_LINES:])


def last_traceback(text: str) -> str:
    """Return the last Python traceback in a log, without torch's ``[rankN]:`` prefixes; without one, the last lines."""
    lines = _lines_of(text)
    starts = [number for number, line in enumerate(lines) if line.startswith(_HEADER)]
    fatal = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if fatal and not (starts and _only_ends(lines[starts[-1] : fatal[-1]])):
        return _fatal(lines, fatal[-1])
    if not starts:
        return _last_lines(lines)
    end = starts[-1] + 1
    while end < len(lines) and lines[end].startswith((" ", "\t")):
        end += 1
    # The exception's message ends before the next empty or log-like line, or before "terminate called" from gloo's
    # threads, which may abort an interpreter while it exits.
    message = end + 1
    while (
        message < len(lines)
        and message - end < _MAX_MESSAGE_LINES
        and re.match(r"(?!terminate called|\s*\[(?!/)|\s*$)", lines[message])
    ):
        message += 1
    found = lines[starts[-1] : message]
    if len(found) > _MAX_ERROR_LINES:
        found = [*found[:5], "  ...", *found[-(_MAX_ERROR_LINES - 6) :]]
    return "\n".join(found)


def _fatal(lines: Sequence[str], begin: int) -> str:
    """Return what python prints when a signal ends it: the lines before, and the user's frames, innermost first."""
    before = [line for line in lines[:begin] if line.strip()][-_LINES_BEFORE_FATAL:]
    threads = [number for number in range(begin, len(lines)) if lines[number].startswith("Current thread ")]
    frames: list[str] = []
    for line in lines[threads[-1] + 1 :] if threads else ():
        if (
            not line.startswith("  File ")
            or line.rpartition("/")[2].startswith("forkserver.py")
            or len(frames) == _FATAL_FRAMES
        ):
            break
        frames.append(line)
    return "\n".join([*before, lines[begin], *frames])


def _only_ends(lines: Sequence[str]) -> bool:
    """Whether nothing follows this traceback but the abort of the exiting interpreter by its threads."""
    last = last_traceback("\n".join(lines)).splitlines()[-1]
    rest = lines[max(number for number, line in enumerate(lines) if line == last) + 1 :]
    return not any(re.match(r"(?!terminate called|\[(?!/)|\s*$)", line) for line in rest)


def message_of(error: str) -> str:
    """Return the message of a traceback, without its frames and their lines of code; any other text unchanged."""
    lines = error.splitlines()
    if not lines or not lines[0].startswith(_HEADER):
        return error
    rest = [number for number, line in enumerate(lines) if number and not line.startswith((" ", "\t"))]
    return "\n".join(lines[rest[0] :]) if rest else ""


def line_of(error: str) -> str:
    """Return the line that names the exception, even if other threads wrote after it; without one the last line."""
    lines = message_of(error).strip().splitlines() or [""]
    if not error.startswith(_HEADER):
        return lines[-1]
    return f"{lines[0]}{lines[1]}" if lines[0].endswith(": ") and len(lines) > 1 else lines[0]


def _telling(error: str) -> str:
    """Return the few lines that say what happened, without the user's own output above them."""
    lines = [line for line in message_of(error).strip().splitlines() if not line.startswith('  File "')]
    return "\n".join(lines[:_TELLING_LINES] if error.startswith(_HEADER) else lines[-_TELLING_LINES:])


def _raised_in(error: str) -> str:
    """Return the file of a traceback's innermost frame; "" if there is no traceback."""
    files = re.findall(r'^  File "([^"]+)", line', error, re.MULTILINE)
    return files[-1] if files and error.startswith(_HEADER) else ""


def is_secondary(error: str, exitcode: int) -> bool:
    """Whether a failure is secondary: the rank lost a peer, or got our own SIGTERM after another had failed."""
    if exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM):
        return True
    if -exitcode in _UNHEARD:
        return False  # its last lines were printed before the signal
    if _LOCAL.search(_raised_in(error)):
        return False  # a peer was lost, but one that it had started itself
    return bool(_SECONDARY.search(_telling(error)))


def is_cause(error: str, exitcode: int) -> bool:
    """Whether this error alone shows why the round has ended, whatever other ranks report."""
    said = _telling(error)
    return not is_secondary(error, exitcode) and not _IN_VAIN.search(said) and not _NETWORK.search(said)


def blames_another(failure: Failure) -> bool:
    """Whether a failure is secondary, or names another rank that did not come.

    `is_secondary` is False for a rank that gave up waiting, so that it counts as a failure: the next attempt would wait
    as long.
    """
    return is_secondary(failure.error, failure.exitcode) or bool(_IN_VAIN.search(_telling(failure.error)))


def tells_its_end(error: str) -> bool:
    """Whether this text is a traceback or fatal error, and not just the last lines that were printed before the end."""
    return error.startswith(_HEADER) or _FATAL in error


def may_be_the_kernels(error: str, exitcode: int) -> bool:
    """Whether the kernel log of the node may say more about a failure."""
    number = -exitcode if exitcode < 0 else exitcode - 128
    return number in _KERNELS or bool(_NODES_FAULT.search(message_of(error)))


def never_starts(error: str, exitcode: int) -> bool:
    """Whether a command would fail the same way again: not found, wrong usage, code that cannot be imported."""
    if exitcode in (126, 127) or is_wrong_usage(error, exitcode):
        return True
    if exitcode in (1, 2) and _NO_SCRIPT.search(error):
        return True
    return bool(_NEVER_STARTS.match(line_of(error)))


def ends_so_again(error: str) -> bool:
    """Whether a rank that has trained would fail the same way again: it stopped for a loss or weights not finite."""
    return bool(_ENDS_SO_AGAIN.match(line_of(error)))


def is_wrong_usage(error: str, exitcode: int) -> bool:
    """Whether a command has refused its arguments."""
    return exitcode == 2 and not error.startswith(_HEADER) and bool(_USAGE.search(error))


def awaited(failures: Sequence[Failure]) -> tuple[int, ...]:
    """Return the ranks that other ranks, which gave up waiting, name as the ones that did not come."""
    found = [match for each in failures for match in _AWAITED.finditer(_telling(each.error))]
    ranks = {int(rank) for match in found for rank in re.findall(r"\d+", match["ranks"] or match["rank"])}
    return tuple(sorted(ranks - {each.rank for each in failures}))


def was_told(failure: Failure) -> bool:
    """Whether SIGTERM ended the worker."""
    return failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)


def is_network(failure: Failure) -> bool:
    """Whether the error is one of the network between the ranks, so that another rank may have caused it."""
    said = _telling(failure.error)
    return bool(_NETWORK.search(said)) and not _OWN.search(said)


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that caused the others; None without failures.

    This is the earliest failure that neither is secondary nor names another rank; a network error gives way to any
    other error within `CLOSE_S`. If there is none, it is the earliest by a SIGTERM, which kit's own agent sends only
    after it has collected failures; and if all are secondary (a node died), the earliest of these.
    """
    if not failures:
        return None
    causes = [failure for failure in failures if not blames_another(failure)]
    if not causes:
        causes = [failure for failure in failures if was_told(failure)] or list(failures)
    if all(blames_another(failure) and not was_told(failure) for failure in causes):
        # Prefer an error that names the ranks that were waited for.
        causes = [failure for failure in causes if _AWAITED.search(_telling(failure.error))] or causes
    first = min(causes, key=lambda failure: failure.when)
    own = [each for each in causes if not is_network(each) and each.when < first.when + CLOSE_S]
    return min(own, key=lambda failure: failure.when) if own and is_network(first) else first


def how_it_ended(exitcode: int) -> str:
    """Return an exit code in words: ``exit status 1`` or ``killed by SIGKILL``."""
    number = -exitcode if exitcode < 0 else exitcode - 128
    if exitcode >= 0 and number not in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        return f"exit status {exitcode}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"killed by {name}" + (f", exit status {exitcode}" if exitcode >= 0 else "")
