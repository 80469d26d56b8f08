"""The verdict on a run, formatted for a terminal."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from nodekit.deploy.agent.ranks.failures import message_of
from nodekit.deploy.output.terminal import shown_path
from nodekit.deploy.records.runs import ENDED, Run
from nodekit.deploy.story import leftout
from nodekit.deploy.story.verdict import Verdict
from nodekit.inventory.load import example_of

_LABEL_WIDTH = 10
_FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line (?P<line>\d+)(?P<where>, in .*)?$')
_MARKS = re.compile(r"\s*[\^~]+\s*$")
# Paths of files that are not the user's code: consecutive frames of these become one line.
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/lib(?:64)?/python3[.\d]*/|^<frozen|/deploy/(?:\w+/)*forkserver\.py$"
)
_IN_RUN = re.compile(r'File "[^"]*/runs/[^/"]+/code/')
_IN_WORKER = re.compile(
    r"Caught \w+ in (?P<worker>[\w ]+ \d+)\.\nOriginal Traceback \(most recent call last\):"
)
# Lines: the traceback's header, one frame, and a line each for the frames left out before and after it.
_LEAST_FRAMES = 5
_LEAST_TRACE = 6
"""Lines to show of a rank's last words, however small the terminal is."""


def screen(
    verdict: Verdict,
    *,
    run_id: str,
    title: str = "",
    resume: str = "",
    more: Sequence[tuple[str, str]] = (),
    width: int = 80,
    height: int = 24,
) -> list[str]:
    """Return the verdict on a failed run, as lines.

    Args:
        verdict: on the failure.
        run_id: the run's id.
        title: the text before the verdict; by default, that the run failed.
        resume: the command that resumes the run; "" if it resumes by itself.
        more: (label, text) of further rows, added at the end.
        width: of the terminal, in columns.
        height: of the terminal, in lines; only the rank's last words are cut to fit.
    """
    first = verdict.first
    rows: list[tuple[str, str]] = []
    if verdict.cause:
        rows += [
            ("cause", verdict.cause.what),
            *([("cure", verdict.cause.cure)] if verdict.cause.cure else []),
        ]
    rows += [("kernel", line) for line in (first.kernel[-1:] if first else ())]
    if verdict.others:
        rows.append(("others", verdict.others))
    rows += [("also", note) for note in verdict.notes]
    for rank, node in verdict.awaited:
        rows.append(("look at", f"kit logs {run_id}{f' --node {node}' if node else ''} --rank {rank}"))
    if first:
        rows.append(("full log", f"{first.node}:{first.log}"))
        rows.append(("", f"kit logs {run_id} --node {first.node} --rank {first.rank}"))
    if resume:
        rows.append(("resume", resume))
    below = [line for label, text in (*rows, *more) for line in _row(label, text, width)]
    above = textwrap.wrap(f"{title or f'{run_id} failed'}: {verdict.text}", width, subsequent_indent="  ")
    if first is None:
        return [*above, "", *below]
    # Long paths are wrapped by the terminal, not here.
    rows_below = sum(-(-len(line) // width) or 1 for line in below)
    room = max(height - len(above) - rows_below - 3, _LEAST_TRACE)
    return [*above, "", *(f"    {line}" for line in trace(first.error, width - 4, room)), "", *below]


def trace(error: str, width: int, height: int) -> list[str]:
    """Return a rank's last words in at most `height` lines: the user's own frames first, and the message."""
    if not error.strip():
        return ["it wrote nothing"]
    error = _IN_RUN.sub('File "', error.rstrip())
    if found := _IN_WORKER.search(error):
        # A DataLoader worker raised: show its traceback, not that of the process that read from it.
        inner = "Traceback (most recent call last):" + error[found.end() :]
        return [*_wrap(f"in {found['worker']}:", width), *trace(inner, width, height - 1)]
    message = message_of(error)
    if message == error:
        lines = [part for line in error.splitlines() for part in _wrap(line, width)]
        return lines if len(lines) <= height else ["…", *lines[-(height - 1) :]]
    said = [part for line in message.splitlines() for part in _wrap(line, width)]
    if len(said) > max(height - _LEAST_FRAMES, 3):
        said = [*said[: max(height - _LEAST_FRAMES - 1, 2)], "…"]
    above = error.splitlines()
    blocks = _blocks(above[1 : len(above) - len(message.splitlines())])
    frames = _fitting(blocks, height - len(said) - 1)
    lines = [line if len(line) <= width else _shortened(line, width) for line in frames]
    return ["Traceback (most recent call last):", *lines, *said]


def _blocks(lines: Sequence[str]) -> list[tuple[bool, list[str]]]:
    """Split a traceback into frames, each with whether it is the user's code; lines of ^^^ markers are dropped."""
    blocks: list[tuple[bool, list[str]]] = []
    for line in lines:
        if found := _FRAME.match(line):
            blocks.append((not _LIBRARY.search(found["path"]), [line]))
        elif blocks and not _MARKS.match(line):
            blocks[-1][1].append(line)
    return blocks


def _fitting(blocks: Sequence[tuple[bool, list[str]]], room: int) -> list[str]:
    """Return the frames that fit, by priority: the user's last one, the one that raised, the user's earlier ones."""
    if not blocks:
        return []
    own = [number for number, (is_own, _) in enumerate(blocks) if is_own]
    last = len(blocks) - 1
    wanted = dict.fromkeys([*own[-1:], last, *reversed(own)])
    kept: set[int] = set()
    for number in wanted:
        more = kept | {number}
        if len(_shown(blocks, more)) > room:
            break
        kept = more
    return _shown(blocks, kept)


def _shown(blocks: Sequence[tuple[bool, list[str]]], kept: set[int]) -> list[str]:
    """Return the kept frames, with a line in place of those skipped between them."""
    lines: list[str] = []
    skipped: list[bool] = []
    for number, (is_own, block) in enumerate(blocks):
        if number not in kept:
            skipped.append(is_own)
            continue
        if skipped and (any(skipped) or number > min(kept)):
            calls = f"{len(skipped)} call{'s' * (len(skipped) > 1)}"
            lines.append(f"  … {calls}" + ("" if any(skipped) else " in libraries"))
        skipped = []
        lines += block
    if skipped:
        lines.append(f"  … {len(skipped)} call{'s' * (len(skipped) > 1)} in libraries")
    return lines


def _shortened(line: str, width: int) -> str:
    """Truncate a line: a path loses its beginning, any other line its end."""
    found = _FRAME.match(line)
    if found is None:
        return line[: width - 1] + "…"
    tail = f'", line {found["line"]}{found["where"] or ""}'
    room = width - len('  File "…') - len(tail)
    return f'  File "…{found["path"][-room:]}{tail}' if room > 8 else line[: width - 1] + "…"


def _wrap(line: str, width: int) -> list[str]:
    line = line.expandtabs(4).rstrip()
    indent = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _row(label: str, text: str, width: int) -> list[str]:
    indent = " " * (_LABEL_WIDTH + 2)
    is_path = label in ("full log", "", "kernel")
    lines = (
        [text]
        if label in ("full log", "")
        else textwrap.wrap(
            text, max(width - len(indent), 20), break_on_hyphens=False, break_long_words=not is_path
        )
    )
    return [
        (f"  {label:<{_LABEL_WIDTH}}" if number == 0 else indent) + line
        for number, line in enumerate(lines or [""])
    ]


# --- of a run on record, on this terminal ---------------------------------------------------------------------


def failed_screen(run: Run, verdict: Verdict, more: Sequence[tuple[str, str]] = ()) -> list[str]:
    """Return the verdict on a failed run, laid out for this terminal, with further rows."""
    width, height = terminal()
    return screen(
        verdict,
        run_id=run.run_id,
        resume=resume_command(run) if is_over(run, verdict) else "",
        more=more,
        width=width,
        height=height,
    )


def is_over(run: Run, verdict: Verdict) -> bool:
    """Whether `kit up` can resume the run; False while nodes that did not learn of its end may still train."""
    return run.state in ENDED or not verdict.may_go_on


def with_left_out(run: Run, verdict: Verdict) -> Verdict:
    """Return the verdict, with the missing file as its cause if the run failed for a file that was not sent."""
    code_dirs = {name: str(node.get("code_dir", "")) for name, node in run.nodes.items()}
    return leftout.explained(verdict, run.left_out, code_dirs)


def terminal() -> tuple[int, int]:
    """Return the columns and lines to fill; output that goes to a file gets more lines."""
    size = shutil.get_terminal_size((100, 24))
    return size.columns, size.lines if sys.stdout.isatty() else 60


def resume_command(run: Run) -> str:
    """Return the command that resumes a run from its newest snapshot, or attaches to the run while it is live."""
    example = example_of(run.inventory_path)
    inventory = example if example and not Path(example).exists() else shown_path(run.inventory_path)
    command = f"kit up {shlex.quote(inventory)}{' --skip-check' if run.skip_check else ''}"
    return f"{command} -- {shlex.join(run.command)}" if run.command else command
