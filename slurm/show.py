"""What `kit status`, `kit logs` and `kit up --dry-run` show of a job that Slurm runs, or would."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.connect.link import Link
from nodekit.deploy.host.files import write_private
from nodekit.deploy.host.node.schema import NodeStatus
from nodekit.deploy.logs import fetchlogs, showlogs
from nodekit.deploy.logs.fetchlogs import Copy, Fetched
from nodekit.deploy.logs.logfollow import Followed, Follower
from nodekit.deploy.logs.loglines import Source, Wanted, style_of
from nodekit.deploy.plan import script
from nodekit.deploy.records import events, runs
from nodekit.deploy.records.events import of_node
from nodekit.deploy.records.runs import Run
from nodekit.deploy.screen.view import status_line
from nodekit.deploy.ssh_backend.start import Options
from nodekit.inventory.errors import HostError, JobFailed, KitError
from nodekit.inventory.load import restore
from nodekit.inventory.schema import Inventory
from nodekit.slurm.accounts import usage
from nodekit.slurm.batch import parameters
from nodekit.slurm.jobs import Job, Slurm
from nodekit.slurm.login import CALL_TIMEOUT_S, login, read, remove_private, settings_of

STOPPED_EXIT = 130
SHARED_POLL_S = 0.5  # all nodes' logs are looked at from one place, over a file server


def leader_folder(run: Run) -> str:
    """Where the leader has its record of a run."""
    return f"{run.slurm['run_dir']}/state/nodekit/runs/{run.run_id}"


def record_of(run: Run, link: Link) -> Run | None:
    """The leader's record of a run; None before it has one."""
    text = read(link, f"{leader_folder(run)}/run.json")
    return Run(**json.loads(text)) if text else None


def events_of(run: Run, link: Link) -> list[str]:
    """The lines of the leader's events."""
    parts = of_node(link, leader_folder(run), timeout_s=CALL_TIMEOUT_S)
    return [line for found in parts for _, _, line in found]


def now(run: Run, link: Link) -> dict[str, NodeStatus]:
    """What each node does, as the leader has heard it last."""
    found: dict[str, NodeStatus] = link.call(
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


def status(run: Run, options: SshOptions, *, as_json: bool) -> int:
    """Print what the job of a run, and each of its nodes, is doing."""
    with login(restore(run.inventory), options) as link:
        job = Slurm(link).job(run.slurm["job_id"])
        record = record_of(run, link)
        heard = now(run, link)
        found = {name: heard.get(name, {}) for name in (record.nodes if record else ())}
        told = json.loads(read(link, f"{run.slurm['run_dir']}/slurm/absent.json") or "{}")
        absent = told.get("nodes", []) if told.get("job") == job.job_id else []
        used = None
        if job.is_over:
            used = usage(Slurm(link), run.slurm["job_id"])
            forget_secrets(run, link)
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
    if run.state == "failed":
        print(f"why: kit why {run.run_id}")
    return 0


def logs(run: Run, options: SshOptions, wanted: Wanted, args: argparse.Namespace) -> int:
    """Print what the ranks of a run have written, or fetch it; the exit status."""
    copies = fetchlogs.copies(run)
    is_whole = copies and run.state in runs.ENDED and all(each.is_whole for each in copies.values())
    if is_whole and not args.fetch:
        return _logs_here(run, copies, wanted, args)
    with contextlib.ExitStack() as stack:
        try:
            link = stack.enter_context(login(restore(run.inventory), options))
        except KitError as error:
            if not copies or args.follow or args.fetch:
                raise
            print(f"kit: {error}", file=sys.stderr, flush=True)
            return _logs_here(run, copies, wanted, args)
        return _logs_there(run, link, options, wanted, args)


def _logs_here(run: Run, copies: Mapping[str, Copy], wanted: Wanted, args: argparse.Namespace) -> int:
    names = showlogs.pick_nodes(run, wanted, list(copies))
    style = style_of(list(copies), sys.stdout, times=args.time, as_json=args.json)
    return showlogs.show_copies(
        showlogs.Reader(list(copies), wanted, style), [copies[name] for name in names]
    )


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


def _logs_there(run: Run, link: Link, options: SshOptions, wanted: Wanted, args: argparse.Namespace) -> int:
    if args.fetch:
        fetched = fetch_logs(run, link, args.output)
        print(fetched.text())
        return 1 if fetched.failed else 0
    record, slurm = record_of(run, link), Slurm(link)
    if record is None:
        raise KitError(f"{run.run_id} has not started: {slurm.job(run.slurm['job_id']).line()}")
    names = showlogs.pick_nodes(run, wanted, list(record.nodes))
    sources = sources_of(record, names, link)
    style = style_of(list(record.nodes), sys.stdout, times=args.time, as_json=args.json)
    reader = showlogs.Reader(list(record.nodes), wanted, style)
    if not args.follow:
        return showlogs.conclude(reader, sources)
    reader.choose(sources)
    follower = Follower(reader, list(record.nodes), reader.read(sources, final=False))

    with contextlib.ExitStack() as stack:
        links = [link]

        def opened() -> list[Source]:
            if links[-1].is_lost:
                links.append(stack.enter_context(login(restore(run.inventory), options)))
            now = record_of(run, links[-1]) or record  # Slurm may have given it other nodes
            names = [name for name in now.nodes if name in (wanted.nodes or now.nodes)]
            return sources_of(now, names, links[-1])

        def is_over(_: bool) -> bool:
            try:
                return Slurm(links[-1]).job(run.slurm["job_id"]).is_over
            except HostError:  # `opened` tells, and tries again
                return False

        follower.run([Followed(name=link.host, open=opened, node_dir=None)], is_over, poll_s=SHARED_POLL_S)
    return 1 if follower.lost or reader.failed else 0


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
