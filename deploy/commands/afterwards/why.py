"""Say why a run failed: the first cause, the cure, how to go on.

It is told again from the run's events: which rank on which node failed first, by the clocks' corrected time,
with its own words; what that did to the others; the known cause and its cure; what the kernel of that node
said; where the full log is, and the command that goes on.

While a run goes on, it shows what the run last recovered from: a rank's failure or the loss of a node. Where
this machine's record has a gap, it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nodekit.deploy.commands import arguments

if TYPE_CHECKING:
    from nodekit.deploy.records.events import Event
    from nodekit.deploy.records.runs import Run

UNWRITTEN_S = 30.0  # nodes report something every few seconds


def add_arguments(command: argparse.ArgumentParser) -> None:
    arguments.add_run(command)
    command.add_argument("--json", action="store_true", help="for programs")
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Print the verdict on a run; return 0, however the run ended."""
    from nodekit.deploy.backend import backend_of
    from nodekit.deploy.records import find_runs
    from nodekit.deploy.screen import verdict_screen
    from nodekit.deploy.story.verdict import verdict_of
    from nodekit.inventory.load import restore

    run = find_runs.find(args.run_id)
    record, events = backend_of(run).history(run, arguments.ssh_options(args))
    limit = restore(run.inventory).job.max_restarts
    found = verdict_of(events, max_restarts=limit, state=run.state, reason=run.verdict, known=run.cause)
    if found is not None:
        record.left_out = record.left_out or run.left_out
        found = verdict_screen.with_left_out(record, found)
    gap = record_gap(run, events)
    if args.json:
        told = found.to_dict() if found else None
        resume = verdict_screen.resume_command(run) if run.state in ("failed", "stopped") else ""
        fields = {"run_id": run.run_id, "state": run.state, "why": told, "resume": resume, "record_gap": gap}
        print(json.dumps(fields, indent=2))
    elif found is None:
        known = ", as far as its record goes" if gap else " so far"
        print(f"{run.run_id} is {run.state}, and no rank or node has failed{known}")
    elif run.state == "failed":
        record.verdict, record.state = run.verdict, run.state
        print("\n".join(verdict_screen.failed_screen(record, found)))
    elif run.state == "stopped":
        again = verdict_screen.resume_command(run)
        print(f"{run.run_id} was {run.verdict or found.text}; {again} goes on with it")
    elif not found.when:
        print(f"{run.run_id} {found.text}" if found.outcome == "succeeded" else f"{run.run_id}: {found.text}")
    else:
        ago = time.time() - found.when
        what = (
            "what it last recovered from" if found.is_recovered else "what it has not recovered from so far"
        )
        print(f"{run.run_id} is {run.state}; {what}, {ago / 60:.0f} min ago:\n")
        width, height = verdict_screen.terminal()
        lines = verdict_screen.screen(
            found, title=run.run_id, run_id=run.run_id, width=width, height=height - 2
        )
        print("\n".join(lines))
    if gap and not args.json:
        print(f"note: {gap}")
    return 0


def record_gap(run: Run, events: Sequence[Event]) -> str:
    """Return what this machine's record of a run lacks, and why; "" if it lacks nothing, or is kept elsewhere."""
    from nodekit.deploy.records import locks
    from nodekit.deploy.records.runs import LIVE

    if not run.is_led_here:
        return ""
    lost = [event for event in events if event.kind == "said" and event.get("num_lost")]
    before = f"{lost[-1].get('num_lost')} events before {_clock(lost[-1].time)} are lost" if lost else ""
    why = _why_unwritten(run) if run.state in LIVE and not locks.is_starting(run) else ""
    if not why:
        return f"the record has a gap: {before}" if before else ""
    return f"the record has a gap: {why}. kit status asks the nodes themselves"


def _why_unwritten(run: Run) -> str:
    """Return why nothing is added to the record of a run that goes on; "" if something is."""
    from nodekit.deploy.records import locks
    from nodekit.deploy.records.events import FILE

    try:
        last = (run.folder / FILE).stat().st_mtime
        is_full = os.statvfs(run.folder).f_bavail == 0
    except OSError as error:
        return f"{run.folder / FILE} cannot be seen: {error.strerror}"
    if not locks.is_supervised(run):
        return f"nobody has supervised this run since about {_clock(last)}: kit up does"
    if time.time() - last < UNWRITTEN_S:
        return ""
    disk = "its disk is full" if is_full else "its disk does not answer, or no node can be reached"
    return f"nothing was added to {run.folder} since {_clock(last)}: {disk} (df {run.folder})"


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))
