"""What `kit status`, `kit logs` and `kit up --dry-run` show of a job that Slurm runs, or would."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from pathlib import Path

from nodekit.deploy import runs, showlogs
from nodekit.deploy.cluster import SshOptions
from nodekit.deploy.link import Link
from nodekit.deploy.runs import Run
from nodekit.deploy.start import Options
from nodekit.deploy.view import status_line
from nodekit.inventory.errors import JobFailed, KitError
from nodekit.inventory.load import restore
from nodekit.inventory.schema import Inventory
from nodekit.slurm.accounts import usage
from nodekit.slurm.batch import parameters
from nodekit.slurm.jobs import Job, Slurm
from nodekit.slurm.login import login, read, settings_of

STOPPED_EXIT = 130


def record_of(run: Run, link: Link) -> Run | None:
    """The leader's record of a run; None before it has one."""
    path = f"{run.slurm['run_dir']}/state/nodekit/runs/{run.run_id}/run.json"
    text = read(link, path)
    return Run(**json.loads(text)) if text else None


def settle(run: Run, link: Link, job: Job) -> tuple[int, bool]:
    """Write down how a run ended whose job is over; kit's exit status, and whether the leader told how it ended."""
    result = json.loads(read(link, f"{run.slurm['run_dir']}/slurm/result.json") or "{}")
    record = record_of(run, link)
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


def status(run: Run, options: SshOptions, *, as_json: bool) -> int:
    """Print what the job of a run, and each of its nodes, is doing."""
    with login(restore(run.inventory), options) as link:
        job = Slurm(link).job(run.slurm["job_id"])
        record = record_of(run, link)
        found = {}
        for name, node in (record.nodes if record else {}).items():
            found[name] = json.loads(read(link, f"{node['node_dir']}/status.json") or "{}")
        told = json.loads(read(link, f"{run.slurm['run_dir']}/slurm/absent.json") or "{}")
        absent = told.get("nodes", []) if told.get("job") == job.job_id else []
        used = None
        if job.is_over:
            used = usage(Slurm(link), run.slurm["job_id"])
            if run.state not in runs.ENDED:
                settle(run, link, job)
    if as_json:
        told = {"job": dataclasses.asdict(job), "used": dataclasses.asdict(used) if used else None}
        print(json.dumps({**runs.public(run), **told, "status": found}, indent=2))
        return 0
    print(f"{run.run_id}  {run.state}" + (f": {run.verdict}" if run.verdict else ""))
    said = job.line()
    if not job.state:  # MinJobAge seconds after its end
        said = used.state.lower() if used else "is not known to Slurm any more"
    print(f"  job {run.slurm['job_id']} {said}")
    if used:
        print(f"  used {used.line()}")
    width = max(map(len, found), default=0)
    for name, each in found.items() if not job.is_over else ():
        print(f"  {name.ljust(width)}  {'lost' if name in absent else status_line(each, now=time.time())}")
    return 0


def logs(run: Run, options: SshOptions, *, node: str | None, rank: int | None, follow: bool) -> int:
    """Print what the ranks of a run have written."""
    with login(restore(run.inventory), options) as link:
        record = record_of(run, link)
        if record is None:
            raise KitError(f"{run.run_id} has not started: {Slurm(link).job(run.slurm['job_id']).line()}")
        names = [name for name in record.nodes if node in (None, name)]
        if not names:
            raise KitError(f"{run.run_id} has no node '{node}'; it has {', '.join(record.nodes)}")
        showlogs.show(record, dict.fromkeys(names, link), rank=rank, follow=follow)
    return 0


def dry_run(inventory: Inventory, options: Options) -> int:
    """Print what would be submitted, and submit nothing."""
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
