"""Which failure was the first: tells a cause from the errors of those who lost their peer. Standard library only."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

# What a rank prints when another one went away. A rank that says this did not start it.
_BYSTANDER = re.compile(
    r"Connection (?:reset|closed|refused) by peer|Connection closed by (?:remote )?peer|Broken pipe"
    r"|ncclRemoteError|remote process exited|Socket Timeout|Timed out waiting \d+ms for (?:recv|send)"
    r"|Watchdog caught collective operation timeout|Some NCCL operations have failed or timed out"
    r"|failed to connect to all peers|recvValue failed|sendBytes failed|Failed to recv"
    r"|store.*(?:connection was likely closed|has been destroyed)|NCCL communicator was aborted"
    r"|\[.*gloo/transport/.*\].*(?:Read error|Write error|Read timeout|Connection)",
    re.IGNORECASE,
)
_NEVER_STARTS = re.compile(
    r"(ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError|NameError)\b"
)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?", re.MULTILINE)
_HEADER = "Traceback (most recent call last):"
_MAX_ERROR_LINES = 60


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker that ended with another status than 0."""

    node: str
    rank: int
    world_size: int
    """Of its attempt: all of these ended with it."""
    attempt: str
    exitcode: int
    """Negative: the signal that killed it."""
    when: float
    """Seconds since the epoch, by the control machine's clock."""
    log: str
    error: str
    """Its last traceback, or the last lines it wrote."""


def last_traceback(text: str) -> str:
    """The last Python traceback in a log, without torch's ``[rankN]:`` prefixes; else the last lines."""
    lines = _RANK_PREFIX.sub("", text.replace("\r", "\n")).splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(_HEADER)]
    if not starts:
        return "\n".join([line for line in lines if line.strip()][-10:])
    end = starts[-1] + 1
    while end < len(lines) and lines[end].startswith((" ", "\t")):
        end += 1
    # The exception; a message of several lines goes on to the next empty or log-like one, or to the last words of
    # an interpreter whose gloo threads abort it while it ends.
    message = end + 1
    while (
        message < len(lines)
        and message - end < 8
        and re.match(r"(?!terminate called)[^\s\[]", lines[message])
    ):
        message += 1
    found = lines[starts[-1] : message]
    if len(found) > _MAX_ERROR_LINES:
        found = [*found[:5], "  ...", *found[-(_MAX_ERROR_LINES - 6) :]]
    return "\n".join(found)


def is_echo(error: str, exitcode: int) -> bool:
    """Whether a worker that ended so only followed another one: a lost peer, or our own SIGTERM after it."""
    if exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM):
        return True
    last = error.strip().splitlines()[-12:]
    return bool(_BYSTANDER.search("\n".join(last)))


def is_bystander(failure: Failure) -> bool:
    """Whether a failure is only the echo of another one."""
    return is_echo(failure.error, failure.exitcode)


def never_starts(error: str, exitcode: int) -> bool:
    """Whether a command that ended so would end so again: not found, wrong usage, code that cannot be imported."""
    if exitcode in (2, 126, 127):
        return True
    last_line = (error.strip().splitlines() or [""])[-1]
    return bool(_NEVER_STARTS.match(last_line))


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """The failure that began it; None without failures.

    The earliest one that is nobody's echo; when all are echoes (a node died), the earliest of these.
    """
    if not failures:
        return None
    causes = [failure for failure in failures if not is_bystander(failure)] or list(failures)
    return min(causes, key=lambda failure: failure.when)


def how_it_ended(exitcode: int) -> str:
    """``exit status 1`` or ``killed by SIGKILL``."""
    if exitcode >= 0:
        return f"exit status {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (the kernel's out-of-memory killer?)" if -exitcode == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
