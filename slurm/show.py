"""What `kit status`, `kit logs` and `kit up --dry-run` show of a job that Slurm runs, or would."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nodekit.deploy.connect.link import Link
from nodekit.deploy.host.remote import write_private
from nodekit.deploy.launch.options import Options
from nodekit.deploy.plan import script
from nodekit.deploy.records import events, fetchlogs, runs
from nodekit.deploy.records.fetchlogs import Fetched
from nodekit.deploy.records.loglines import Source
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import JobFailed, KitError
from nodekit.inventory.schema import Inventory
from nodekit.slurm.accounts import usage
from nodekit.slurm.batch import parameters
from nodekit.slurm.jobs import Job, Slurm
from nodekit.slurm.login import CALL_TIMEOUT_S, read, remove_private, settings_of

STOPPED_EXIT = 130


def leader_folder(run: Run) -> str:
    """Where the leader has its record of a run."""
    return f"{run.slurm['run_dir']}/state/nodekit/runs/{run.run_id}"


def record_of(run: Run, link: Link) -> Run | None:
    """The leader's record of a run; None before it has one."""
    text = read(link, f"{leader_folder(run)}/run.json")
    return Run(**json.loads(text)) if text else None


def events_of(run: Run, link: Link) -> list[str]:
    """The lines of the leader's events."""
    folder = leader_folder(run)
    lines: list[str] = []
    at: Sequence[Any] = ("", 0)
    while found := link.call(
        "hostfollow.events", timeout_s=CALL_TIMEOUT_S, node_dir=folder, file=at[0], offset=at[1]
    ):
        lines += [line for _, _, line in found]
        at = found[-1][:2]
    return lines


def now(run: Run, link: Link) -> dict[str, dict[str, Any]]:
    """What each node does, as the leader has heard it last."""
    found: dict[str, dict[str, Any]] = link.call(
        "present.statuses", timeout_s=CALL_TIMEOUT_S, folder=leader_folder(run)
    )
    return found


def settle(run: Run, link: Link, job: Job) -> tuple[int, bool]:
    """Write down how a run ended whose job is over; kit's exit status, and whether the leader told how it ended.

    Its secrets are removed, should it have been killed before it could, or cancelled before it began.
    """
    forget_secrets(run, link)
    result = json.loads(read(link, f"{run.slurm['run_dir']}/slurm/result.json") or "{}")
    record = record_of(run, link)
    if lines := events_of(run, link):
        write_private(str(run.folder / events.FILE), "".join(lines).encode())
    # A job that Slurm knows no more (MinJobAge) cannot say which was its last attempt.
    is_last = not job.state or result.get("attempt") == f"{job.job_id}.{job.restarts}"
    if record is not None and result and is_last and record.state in runs.ENDED:
        by = run.stopped_by or "scancel"
        is_cancelled = job.state == "CANCELLED" and record.state == "stopped"
        run.finish(record.state, f"stopped by {by}" if is_cancelled else record.verdict)
        return int(result["exit"]), True
    used = usage(Slurm(link), run.slurm["job_id"])
    state = job.state or (used.state if used else "")
    if state.startswith("CANCELLED"):
        run.finish("stopped", f"stopped by {run.stopped_by or 'scancel'}")
        return STOPPED_EXIT, True
    why = f" ({job.reason})" if job.reason else ""
    run.finish("failed", f"Slurm ended the job: {state.lower() or 'it knows it no more'}{why}")
    return JobFailed.exit_code, False


def forget_secrets(run: Run, link: Link) -> None:
    """Remove the secrets that the job of a run, which is over, may have left; said where that fails."""
    try:
        remove_private(link, [run.slurm["run_dir"]], run.slurm.get("private", "").split())
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr, flush=True)


def sources_of(record: Run, names: Sequence[str], link: Link) -> list[Source]:
    """The logs of some nodes, through the login node."""
    return [
        Source(
            node=name,
            folder=f"{record.nodes[name]['node_dir']}/logs",
            clock_offset=record.clock_offsets.get(name, 0.0),
            link=link,
        )
        for name in names
    ]


def fetch_logs(run: Run, link: Link, output: str | None = None) -> Fetched:
    """Copy the logs of a run to this machine.

    Raises:
        KitError: it has none, or they cannot be written here.
    """
    record = record_of(run, link)
    if record is None:
        raise KitError(f"{run.run_id} has not started: {Slurm(link).job(run.slurm['job_id']).line()}")
    folder = Path(output) if output else fetchlogs.folder_of(run)
    return fetchlogs.fetch(sources_of(record, list(record.nodes), link), folder, run)


def dry_run(inventory: Inventory, options: Options) -> int:
    """Print what would be submitted, and submit nothing."""
    script.find(inventory, options.command)
    settings = settings_of(inventory)
    asked = parameters(
        inventory,
        name=inventory.name,
        run_dir=f"{settings.shared_dir}/runs/…",
        python=inventory.defaults.python or "python3",
        kit_dir=f"{settings.shared_dir}/kit/…",
        minutes=settings.time_min or 0,
    )
    command = list(options.command or inventory.job.command or ("python", "-m", "nodekit.training"))
    if options.json:
        print(json.dumps({"parameters": asked, "command": command}, indent=2))
        return 0
    print(f"through {settings.login or 'this machine'}, for submitit's SlurmExecutor:")
    for key, value in asked.items():
        print(f"  {key:<22} {value}")
    print(
        f"  {'command':<22} {shlex.join(command)}\n  {'in':<22} {Path(settings.shared_dir) / 'runs' / '…' / 'code'}"
    )
    return 0
