"""The live view of a run that is a Slurm job; all it shows is read from the shared folder, through the login node."""

from __future__ import annotations

import time
from pathlib import Path

from nodekit.deploy.connect.channel import ChannelLost, HostChannel
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.launch.options import ATTACH_TAIL_BYTES, Options
from nodekit.deploy.metrics.metrics_port import Place
from nodekit.deploy.output.interrupts import sigterm_interrupts
from nodekit.deploy.records.runs import STOPPED_EXIT, Run
from nodekit.deploy.screen.full_screen import Doing, FullScreen, fits_screen
from nodekit.deploy.screen.view_model import ViewModel
from nodekit.deploy.supervise.observer import Left, StopAsked
from nodekit.inventory.errors import HostError
from nodekit.inventory.load import restore
from nodekit.slurm import metrics
from nodekit.slurm import run as runner
from nodekit.slurm.cluster.jobs import Job, Watched, slurm_of
from nodekit.slurm.cluster.login import LoginAgain, login, still_on
from nodekit.slurm.cluster.shared_folder import SharedFolder

TICK_S = 0.1  # between two redraws
LOOK_S = 1.0  # between two readings of the shared folder
LOOK_AT_JOB_S = 5.0  # between two questions to Slurm


def watch(
    run: Run,
    options: SshOptions,
    *,
    plain: bool = False,
    cancels: bool = False,
    metrics_at: Place | None = None,
) -> int:
    """Show a run until its job is over or the user leaves; return kit's exit status, 0 if the user left.

    Args:
        run: the run, as it was submitted.
        options: how to reach the login node.
        plain: print lines even in a terminal.
        cancels: whether Ctrl-C cancels the job, as in `kit up`.
        metrics_at: the address on which to serve metrics for Prometheus meanwhile.
    """
    if not fits_screen(plain=plain):
        return _print(run, options)
    watched = ViewModel(run.run_id, [])
    leaves = "leave this view; the job goes on"
    doing = Doing(leaves=leaves, interrupts="cancel the job" if cancels else leaves)
    inventory = restore(run.inventory)
    with (
        login(inventory, options) as channel,
        metrics.served(run, channel, metrics_at),
        FullScreen(watched, doing) as view,
        sigterm_interrupts(),
    ):
        try:
            again = LoginAgain(channel, inventory, options, lambda text: watched.say(text, time.time()))
            job = _follow(run, channel, watched, view, again)
        except Left:
            return _goes_on(run, view)
        except KeyboardInterrupt as interrupt:
            if not cancels:
                return _goes_on(run, view)
            return _cancel(run, options, view, str(interrupt) or "Ctrl-C")
        except StopAsked:
            return _cancel(run, options, view, "kit watch")
        view.close()
        return runner.conclude(run, channel, job, is_shown=False)


def _goes_on(run: Run, view: FullScreen) -> int:
    view.close()
    print(f"{run.run_id} goes on", flush=True)
    return 0


def _cancel(run: Run, options: SshOptions, view: FullScreen, by: str) -> int:
    view.close()
    print(f"cancelling job {run.slurm['job_id']}", flush=True)
    try:
        runner.down(run, options, by=by)
    except HostError as error:
        raise still_on(run.run_id, error) from error
    return STOPPED_EXIT


def _print(run: Run, options: SshOptions) -> int:
    """Print the leader's output in lines, in place of the live view."""
    as_up = Options(inventory=Path(run.inventory_path), ssh=options)
    return runner.watch(run, as_up, tail_bytes=ATTACH_TAIL_BYTES, cancels=False)


def _follow(
    run: Run,
    channel: HostChannel,
    watched: ViewModel,
    view: FullScreen,
    login_again: LoginAgain,
) -> Job:
    """Feed the view until the job is over; return the job in its final state."""
    source = SharedFolder(run, channel)
    job = Watched(slurm_of(run, channel), run.slurm["job_id"])
    looked_at, asked_at = -LOOK_S, -LOOK_AT_JOB_S
    statuses: dict[str, NodeStatus] = {}

    def wait(seconds: float) -> None:
        """Wait, and meanwhile redraw the view and handle keys."""
        until = time.monotonic() + seconds
        while True:
            view.see(statuses)
            view.keys()
            if time.monotonic() >= until:
                return
            time.sleep(TICK_S)

    while True:
        try:
            if (now := time.monotonic()) - looked_at >= LOOK_S:
                looked_at = now
                for event in source.events():
                    watched.event(event)
                statuses, lines = source.statuses(job.job)
                for node, rank, line in source.logs():
                    watched.log(node, rank, [line])
                if not statuses:  # the job starts: show the leader's output until the nodes report
                    for line in source.said:
                        watched.say(line, time.time())
                watched.lines(lines)
            if now - asked_at >= LOOK_AT_JOB_S:
                asked_at = now
                is_over = job.look()
                watched.queued = f"job {run.slurm['job_id']} {job.line}"
                if is_over:
                    for event in source.events():
                        watched.event(event)
                    return job.job
        except ChannelLost as lost:
            login_again(lost, wait)
        wait(TICK_S)
