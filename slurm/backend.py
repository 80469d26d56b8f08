"""The backend for runs that are Slurm jobs, submitted from this machine or a login node."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from nodekit.deploy.connect.channel import HostChannel
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.launch.options import ATTACH_TAIL_BYTES, Options, StopOptions
from nodekit.deploy.metrics import metrics_port
from nodekit.deploy.records import events, find_runs, locks, runs
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import Run, RunFolder
from nodekit.deploy.screen.full_screen import fits_screen
from nodekit.deploy.screen.verdict_screen import resume_command
from nodekit.deploy.screen.view import show_last
from nodekit.deploy.story.status import Status, status_line
from nodekit.deploy.supervise.state import Rules
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.load import restore
from nodekit.inventory.schema import Host, Inventory
from nodekit.slurm import run as runner
from nodekit.slurm.cluster import shared_folder
from nodekit.slurm.cluster.accounts import usage
from nodekit.slurm.cluster.jobs import Unanswered, Watched, slurm_of
from nodekit.slurm.cluster.login import LOGIN, host_of, login
from nodekit.slurm.cluster.shared_folder import events_of, forget_secrets, record_end, record_of
from nodekit.slurm.submission import prepare


class SlurmBackend:
    """See `deploy/backend.py`."""

    poll_s = 0.5  # a poll reads the files of all nodes from one place, over a file server

    def up(self, inventory: Inventory, options: Options) -> int:
        """Submit the job of an inventory, or its sweep, or attach to it, and watch it; return the exit status."""
        assert inventory.slurm is not None
        is_sweep = bool(options.sweep or inventory.slurm.array)
        if options.metrics is not None:
            if is_sweep:
                raise KitError(
                    f"{inventory.path}: --metrics-port serves one run, and this is a sweep of several"
                )
            if options.detach:
                raise KitError(
                    f"{inventory.path}: --metrics-port with -d: under Slurm nothing of kit stays on this "
                    "machine",
                    cure="leave out -d (kit up attaches to the job later, too)",
                )
            metrics_port.check(options.metrics)
        if is_sweep:
            from nodekit.slurm import sweep

            return sweep.up(inventory, options)
        if options.dry_run:
            return prepare.dry_run(inventory, options)
        with locks.starting(inventory.path):
            run = find_runs.current(
                inventory.path, options.command or inventory.job.command, is_new=options.new
            )
            attached = run is not None and run.state in runs.LIVE and runner.is_there(run, options.ssh)
            if run is None or not attached:
                run = runner.start(inventory, run if run and run.state != "succeeded" else None, options)
        if attached:
            print(f"attached to {run.run_id}, job {run.slurm['job_id']}; Ctrl-C cancels it", flush=True)
        if options.detach:
            print(
                f"{run.run_id} is queued: {resume_command(run)} attaches to it, kit down cancels it",
                flush=True,
            )
            return 0
        if fits_screen(plain=options.plain or options.quiet):
            from nodekit.slurm import watch as live

            return live.watch(run, options.ssh, cancels=True, metrics_at=options.metrics)
        return runner.watch(run, options, tail_bytes=ATTACH_TAIL_BYTES if attached else 0)

    def watch(self, run: Run, ssh: SshOptions, *, plain: bool = False) -> int:
        """Show a run until its job is over or the user leaves; return the exit status."""
        from nodekit.slurm import watch as live

        runner.refuse_while_submitted(run)
        if not run.slurm["job_id"] and not runner.is_there(run, ssh):
            return show_last(run, *self.history(run, ssh))
        return live.watch(run, ssh, plain=plain)

    def status(self, run: Run, ssh: SshOptions) -> Status:
        """Return what the job of a run and each of its nodes is doing; if the job is over, record how it ended."""
        if runner.is_being_submitted(run):
            return Status(
                state=run.state,
                lines=["kit up is submitting its job"],
                nodes={},
                data={"job": None, "used": None, "status": {}},
            )
        with login(restore(run.inventory), ssh) as channel:
            slurm = slurm_of(run, channel)
            runner.find_job(run, slurm)
            watched = Watched(slurm, run.slurm["job_id"])
            watched.look()
            job, line = watched.job, watched.line
            if watched.is_unknown and run.state in runs.ENDED:
                line = "is over; Slurm does not answer"
            record = record_of(run, channel)
            heard = shared_folder.node_statuses(run, channel)
            found = {name: heard.get(name, {}) for name in (record.nodes if record else ())}
            absent = shared_folder.absent_nodes(run, channel)
            used = None
            if job.is_over:
                used = usage(slurm, run.slurm["job_id"])
                forget_secrets(run, channel)
                if run.state not in runs.ENDED:
                    record_end(run, channel, job)
        if not job.state:  # Slurm forgets a job MinJobAge seconds after its end
            line = used.state.lower() if used else "is not known to Slurm any more"
        nodes = {
            name: "lost" if name in absent else status_line(each, now=time.time())
            for name, each in (() if job.is_over else shared_folder.of_job(found, job).items())
        }
        return Status(
            state=run.state,
            lines=[
                f"job {run.slurm['job_id']} {line}" if run.slurm["job_id"] else "no job in Slurm's queue",
                *([f"used {used.line()}"] if used else []),
            ],
            nodes=nodes,
            data={
                "job": dataclasses.asdict(job),
                "used": dataclasses.asdict(used) if used else None,
                "status": found,
            },
        )

    def history(self, run: Run, ssh: SshOptions) -> tuple[Run, list[Event]]:
        """Return the leader's record of a run and its events, from the login node or, after its end, from this machine.

        Raises:
            HostError: the login node cannot be reached.
        """
        if run.state in runs.ENDED and (run.folder / events.FILE).exists():
            return run, events.read(run.folder)
        with login(restore(run.inventory), ssh) as channel:
            return record_of(run, channel) or run, events.parse_all(events_of(run, channel))

    def rules(self, run: Run, node: str) -> Rules:
        """Refuse: under Slurm, nodes are drained with scontrol.

        Raises:
            KitError: always.
        """
        raise KitError(
            f"{run.run_id} is Slurm's",
            cure=f"scontrol update nodename={node} state=drain takes the node away after the job; "
            "slurm.nodes says how many the job takes",
        )

    def down(self, run: Run, options: StopOptions) -> int:
        """Cancel the job of a run; return the exit status."""
        _refuse_what_slurm_decides(options)
        return runner.down(run, options.ssh, fetch=options.fetch)

    def sweep_status(self, members: list[Run], ssh: SshOptions, *, as_json: bool) -> int:
        """Print a table of the runs of a sweep; return the exit status."""
        from nodekit.slurm import sweep

        return sweep.status(members, ssh, as_json=as_json)

    def sweep_down(self, members: list[Run], options: StopOptions) -> int:
        """Cancel the jobs of a sweep that are not over; return the exit status."""
        from nodekit.slurm import sweep

        _refuse_what_slurm_decides(options)
        return sweep.down(members, options.ssh, fetch=options.fetch)

    def still_there(self, run: Run, channels: Mapping[str, HostChannel]) -> str:
        """Return a line about the job if Slurm still has it, else ""; if the job is over, record how it ended."""
        if run.state in runs.ENDED or LOGIN not in channels:
            return ""
        slurm = slurm_of(run, channels[LOGIN])
        runner.find_job(run, slurm)
        job = slurm.job(run.slurm["job_id"])
        if not job.is_over:
            return f"{run.run_id}: job {run.slurm['job_id']} {job.line()}; kit down {run.run_id} cancels it"
        record_end(run, channels[LOGIN], job)
        return ""

    def hosts(self, run: Run, *, spare: bool = False) -> dict[str, Host]:
        """Return the login node only: it sees the shared folder, where all nodes write."""
        return {LOGIN: host_of(restore(run.inventory))}

    def folders(self, run: Run) -> list[RunFolder]:
        """Return the run's folder in the shared folder, which all nodes have in common."""
        folder = Path(run.slurm["run_dir"])
        shared = run.inventory["snapshots"].get("shared") or str(folder.parent.parent / "snapshots")
        return [RunFolder(LOGIN, str(folder), f"{shared}/{run.run_id}")]

    def record(self, run: Run, channels: Mapping[str, HostChannel]) -> Run | None:
        """Return the leader's record."""
        return record_of(run, channels[LOGIN]) if LOGIN in channels else None

    def nodes_at(self, record: Run, host: str) -> list[str]:
        """Return all nodes of the record; after a requeue they may differ from those of the first start."""
        return list(record.nodes)

    def is_over(self, run: Run, channels: Mapping[str, HostChannel], *, all_gone: bool) -> bool:
        """Whether the job has ended, or Slurm does not know it any more; False if Slurm does not answer."""
        try:
            if runner.is_being_submitted(run):
                return False
            slurm = slurm_of(run, channels[LOGIN])
            runner.find_job(run, slurm)
            return slurm.job(run.slurm["job_id"]).is_over
        except (HostError, Unanswered):  # the caller's own reads report an unreachable host, and retry
            return False


def _refuse_what_slurm_decides(options: StopOptions) -> None:
    """Raise KitError for --force and --lost: Slurm decides when to kill a job's processes, and which nodes are down."""
    if options.force:
        raise KitError(
            "--force: Slurm gives the processes of a job that is cancelled its KillWait (30 s by default), and "
            "kills them then",
            cure="leave it out",
        )
    if options.lost:
        raise KitError("--lost: Slurm itself finds out which nodes are down", cure="leave it out")
