"""The output of `kit shell`: each line with its host's name, and at the end the results, grouped by equal ones."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

from nodekit.deploy.output.terminal import harmless
from nodekit.deploy.shell.shell import Ended, Lines, fold

_COLOURS = (36, 35, 32, 33, 34, 91, 96, 95)  # as in deploy/screen/view.py
_PLAIN, _GOOD, _BAD = "\x1b[0m", "\x1b[32m", "\x1b[1;31m"


class Prefixes:
    """Puts the host's name before each line."""

    def __init__(self, hosts: Sequence[str]) -> None:
        width = max(map(len, hosts), default=0)
        self._plain = {host: f"{host.ljust(width)} | ".encode() for host in hosts}
        self._coloured = {
            host: f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{host.ljust(width)} │ {_PLAIN}".encode()
            for number, host in enumerate(hosts)
        }

    def apply(self, lines: Lines, *, is_terminal: bool, colour: bool) -> bytes:
        """Return lines with their prefix.

        On a terminal, only the last state of a line that overwrites itself, such as a progress bar, is shown, and
        escape sequences other than colours are removed; a file gets everything.
        """
        prefix = (self._coloured if colour else self._plain)[lines.host]
        shown = []
        for line in lines.data.split(b"\n")[:-1]:
            if is_terminal:
                line = line.rstrip(b"\r").rpartition(b"\r")[2]
                line = harmless(line.decode("utf-8", "surrogateescape")).encode()
                if b"\x1b" in line:
                    line += _PLAIN.encode()
            shown.append(prefix + line + b"\n")
        return b"".join(shown)


def summary(ended: Iterable[Ended], *, colour: bool) -> str:
    """Summarize the results: a line for each kind of end, with the hosts that it occurred on."""
    groups: dict[tuple[bool, str, str], list[str]] = {}
    for each in ended:
        groups.setdefault((not each.is_good, _status(each), each.problem), []).append(each.host)
    folded = {group: fold(hosts) for group, hosts in sorted(groups.items(), key=lambda item: item[0][0])}
    status_width = max((len(status) for _, status, _ in folded), default=0)
    hosts_width = max(map(len, folded.values()), default=0)
    lines = []
    for (is_bad, status, problem), hosts in folded.items():
        mark, plain = (_BAD if is_bad else _GOOD, _PLAIN) if colour else ("", "")
        text = f"{mark}{status.ljust(status_width)}{plain}  {hosts.ljust(hosts_width)}  {problem}"
        lines.append(text.rstrip())
    return "\n".join(lines)


def _status(ended: Ended) -> str:
    if ended.status is None:
        return "failed"
    if ended.status >= 0:
        return f"exit {ended.status}"
    try:
        return signal.Signals(-ended.status).name
    except ValueError:
        return f"signal {-ended.status}"
