"""The live view of a run that Slurm has: all that is shown lies in the shared folder, read through the login node."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nodekit.deploy import events
from nodekit.deploy.cluster import SshOptions
from nodekit.deploy.link import Link
from nodekit.deploy.runs import Run
from nodekit.deploy.start import Options
from nodekit.deploy.up import ATTACH_TAIL_BYTES, sigterm_interrupts
from nodekit.deploy.view import Doing, FullScreen, Left, StopAsked, fits_screen, status_line
from nodekit.deploy.watched import Watched
from nodekit.inventory.load import restore
from nodekit.slurm import backend
from nodekit.slurm.jobs import Job, Slurm
from nodekit.slurm.login import CALL_TIMEOUT_S, execute, login, read
from nodekit.slurm.show import record_of

TICK_S = 0.1
LOOK_S = 1.0
LOOK_AT_JOB_S = 5.0
_TAIL_BYTES = 65536
_OF_A_RANK = re.compile(r"(\S+):(\d+) +\| (.*)")


def watch(run: Run, options: SshOptions, *, plain: bool = False, cancels: bool = False) -> int:
    """Show a run until its job is over or the user leaves; the exit status is kit's, 0 where the user left.

    Args:
        run: as it was submitted.
        options: how to reach the login node.
        plain: lines in a terminal too.
        cancels: whether Ctrl-C cancels the job, as in `kit up`.
    """
    if not fits_screen(plain=plain):
        return _print(run, options)
    watched = Watched(run.run_id, [])
    leaves = "leave this view; the job goes on"
    doing = Doing(leaves=leaves, interrupts="cancel the job" if cancels else leaves)
    with (
        login(restore(run.inventory), options) as link,
        FullScreen(watched, doing) as view,
        sigterm_interrupts(),
    ):
        try:
            job = _follow(run, link, watched, view)
        except Left:
            return _goes_on(run, view)
        except KeyboardInterrupt as interrupt:
            if not cancels:
                return _goes_on(run, view)
            return _cancel(run, options, view, str(interrupt) or "Ctrl-C")
        except StopAsked:
            return _cancel(run, options, view, "kit watch")
        view.close()
        return backend.conclude(run, link, job)


def _goes_on(run: Run, view: FullScreen) -> int:
    view.close()
    print(f"{run.run_id} goes on", flush=True)
    return 0


def _cancel(run: Run, options: SshOptions, view: FullScreen, by: str) -> int:
    view.close()
    print(f"cancelling job {run.slurm['job_id']}", flush=True)
    backend.down(run, options, by=by)
    return 130


def _print(run: Run, options: SshOptions) -> int:
    """The same in lines: what the leader says."""
    as_up = Options(inventory=Path(run.inventory_path), ssh=options)
    return backend.watch(run, as_up, tail_bytes=ATTACH_TAIL_BYTES, cancels=False)


def _follow(run: Run, link: Link, watched: Watched, view: FullScreen) -> Job:
    """Until the job is over; how it is then."""
    source = _Source(run, link)
    slurm = Slurm(link)
    looked_at, asked_at = -LOOK_S, -LOOK_AT_JOB_S
    statuses: dict[str, dict[str, Any]] = {}
    while True:
        if (now := time.monotonic()) - looked_at >= LOOK_S:
            looked_at = now
            for event in source.events():
                watched.event(event)
            for node, rank, line in source.logs():
                watched.log(node, rank, [line])
            statuses, lines = source.statuses()
            watched.lines(lines)
        if now - asked_at >= LOOK_AT_JOB_S:
            asked_at = now
            job = slurm.job(run.slurm["job_id"])
            watched.queued = f"job {run.slurm['job_id']} {job.line()}"
            if job.is_over:
                for event in source.events():
                    watched.event(event)
                return job
        view.see(statuses)
        view.keys()
        time.sleep(TICK_S)


class _Source:
    """What is new in the shared folder."""

    def __init__(self, run: Run, link: Link) -> None:
        self._run = run
        self._link = link
        self._folder = f"{run.slurm['run_dir']}/state/nodekit/runs/{run.run_id}"
        self._events_at: Sequence[Any] = ("", 0)
        self._offsets: dict[str, int] | None = None
        self._nodes: dict[str, str] = {}

    def events(self) -> list[events.Event]:
        """Those of the leader's record since the last call."""
        found = self._link.call(
            "events",
            timeout_s=CALL_TIMEOUT_S,
            node_dir=self._folder,
            file=self._events_at[0],
            offset=self._events_at[1],
        )
        if found:
            self._events_at = found[-1][:2]
        return events.parse_all(line for _, _, line in found)

    def logs(self) -> list[tuple[str, str, str]]:
        """Lines of the ranks, as the leader shows them: node, rank, line."""
        self._offsets, found = self._link.call(
            "logs",
            timeout_s=CALL_TIMEOUT_S,
            node_dir=f"{self._run.slurm['run_dir']}/slurm",
            offsets=self._offsets,
            tail_bytes=_TAIL_BYTES if self._offsets is None else None,
        )
        lines = (line for _, text in found for line in text.splitlines())
        return [(told[1], told[2], told[3]) for line in lines if (told := _OF_A_RANK.fullmatch(line))]

    def statuses(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Each node's status, and its line; none before the leader has a record."""
        if not self._nodes:
            record = record_of(self._run, self._link)
            self._nodes = {name: node["node_dir"] for name, node in (record.nodes if record else {}).items()}
            if not self._nodes:
                return {}, {}
        told = json.loads(read(self._link, f"{self._run.slurm['run_dir']}/slurm/absent.json") or "{}")
        absent = told.get("nodes", []) if told.get("job") == self._run.slurm["job_id"] else []
        paths = {f"{node_dir}/status.json": name for name, node_dir in self._nodes.items()}
        # All in one round trip, whatever their number.
        said = execute(self._link, "grep", "-sHZ", "", "--", *paths)["out"]
        found = parse_statuses(said, paths)
        lines = {name: status_line(found.get(name, {}), now=time.time()) for name in self._nodes}
        return found, {**lines, **dict.fromkeys(absent, "lost")}


def parse_statuses(text: str, paths: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Each node's status, from `grep -HZ` of their files; one that is being written is left out."""
    found = {}
    for line in text.split("\n"):
        path, _, content = line.partition("\0")
        try:
            status = json.loads(content)
        except ValueError:
            continue
        if path in paths and isinstance(status, dict):
            found[paths[path]] = {**status, "alive": True}
    return found
