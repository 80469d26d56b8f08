"""Submit the Slurm job of one run, print its output, and cancel it.

Everything goes through one channel to the login node, or to this machine if it is one: files in the shared folder, and
Slurm's commands. The code that runs on the nodes is in slurm/allocation/allocation.py.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from pathlib import Path

from nodekit.deploy.connect.channel import ChannelLost, HostChannel
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.launch import watch as leading
from nodekit.deploy.launch.options import Options
from nodekit.deploy.output.interrupts import Interrupts, NothingLeft, sigterm_interrupts
from nodekit.deploy.output.phases import Phases
from nodekit.deploy.output.wording import count
from nodekit.deploy.records import events, fetchlogs, locks, runs, secret_files
from nodekit.deploy.records.runs import Run
from nodekit.deploy.screen.verdict_screen import resume_command, with_left_out
from nodekit.deploy.story.verdict import verdict_of
from nodekit.deploy.supervise.node_client import secrets_of
from nodekit.inventory.errors import HostError, KitError, NotWritten
from nodekit.inventory.load import dump, restore
from nodekit.inventory.schema import Inventory
from nodekit.slurm import metrics
from nodekit.slurm.cluster.accounts import usage
from nodekit.slurm.cluster.jobs import Job, Slurm, Unanswered, Watched, slurm_of
from nodekit.slurm.cluster.login import LOGIN_TIMEOUT_S, LoginAgain, cancelling, login
from nodekit.slurm.cluster.shared_folder import (
    fetch_logs,
    forget_secrets,
    record_end,
    record_of,
    record_stopped,
)
from nodekit.slurm.submission.prepare import Ready, prepare

LOOK_S = 2.0  # between two questions to Slurm
POLL_S = 0.3  # between two readings of the leader's output
STOP_S = 90.0  # the longest wait for a cancelled job to end
ACCOUNT_S = 10.0  # the longest wait for slurmdbd, which learns of a job's end a moment later


def start(inventory: Inventory, resumed: Run | None, options: Options) -> Run:
    """Submit the job of an inventory, as a new run or to resume `resumed`.

    Raises:
        KitError: a check failed, here, on the login node or in Slurm; nothing is queued.
    """
    phases = Phases(silent=options.quiet)
    run_id = resumed.run_id if resumed else runs.new_id(inventory.name)
    phases.say(f"{'resuming' if resumed else 'run'} {run_id}" + ("; --new starts over" if resumed else ""))
    with contextlib.ExitStack() as stack:
        ready = prepare(
            stack,
            inventory,
            run_id,
            options,
            phases,
            secrets=secrets_of(inventory),
            notify_secrets=secret_files.notify_secrets(inventory),
        )
        ready.place(ready.run_dir, inventory, options.command)
        run = resumed or new_run(inventory, run_id, options.command)
        submit([(run, inventory, {"run_dir": ready.run_dir})], ready, phases)
    return run


def new_run(inventory: Inventory, run_id: str, command: Sequence[str] | None) -> Run:
    """Return the record of a new run, not saved yet."""
    return Run(
        run_id=run_id,
        name=inventory.name,
        inventory_path=str(inventory.path),
        inventory={},
        command=list(command) if command else None,
        created=time.time(),
    )


def submit(todo: Sequence[tuple[Run, Inventory, dict[str, str]]], ready: Ready, phases: Phases) -> None:
    """Queue the job of a run, or those of several as one array.

    The runs are recorded before the submission, and their job ids after it. Ctrl-C and SIGTERM take effect once the ids
    are recorded.

    Args:
        todo: each run, its inventory, and the Slurm fields for its record.
        ready: the code and the secrets of the runs.
        phases: shows the progress.

    Raises:
        KitError: nothing is queued; or that is unknown, and the runs stay recorded as starting.
        NothingLeft: after a Ctrl-C, once the job is cancelled.
    """
    members = [run for run, _, _ in todo]
    with Interrupts() as interrupts:
        interrupts.hold()
        for number, (run, inventory, slurm) in enumerate(todo):
            _begin(run, inventory, ready, {**slurm, "task": f"_{number}"} if len(todo) > 1 else slurm)
        try:
            with phases.phase("submit", waits_for="Slurm to take the job") as said:
                job_ids = ready.submit([run.slurm["run_dir"] for run in members])
                runs_of = f"{count(len(members), 'run')}, " if members[0].sweep else ""
                said.append(f"{runs_of}job {job_ids[0].partition('_')[0]}")
            for run, job_id in zip(members, job_ids, strict=True):
                _queued(run, job_id)
            interrupts.once()
        except BaseException as error:
            _take_back(members, ready, error)
            if isinstance(error, KeyboardInterrupt):
                raise NothingLeft(*error.args) from error
            raise


def _begin(run: Run, inventory: Inventory, ready: Ready, slurm: dict[str, str]) -> None:
    """Record that the job of a run is being submitted."""
    with run.changing():
        run.inventory, run.code_digest = dump(inventory), ready.code_digest
        run.slurm = {**slurm, "job_id": "", "cluster": ready.cluster, "private": " ".join(ready.private)}
        run.left_out, run.skip_check = dict(ready.left_out), ready.skip_check
        run.state, run.started, run.ended = "starting", time.time(), None
        run.verdict, run.cause = "", {}
    run.say_stop("")


def _queued(run: Run, job_id: str) -> None:
    """Record the job id of a run that is in the queue."""
    with run.changing():
        run.slurm = {**{key: value for key, value in run.slurm.items() if key != "task"}, "job_id": job_id}
        run.state = "running"


def _take_back(members: Sequence[Run], ready: Ready, error: BaseException) -> None:
    """Cancel the job of a submission that has ended with `error`, if one is queued, and record the end of its runs.

    Raises:
        KitError: the job is not cancelled, or it is unknown whether there is one.
    """
    slurm, name = Slurm(ready.channel), members[0].sweep or members[0].run_id
    by = (str(error) or "Ctrl-C") if isinstance(error, KeyboardInterrupt) else ""
    try:
        job_id = slurm.job_below(ready.run_dir)
        # After a HostError Slurm may have received the job, and queue it in a moment.
        if not job_id and isinstance(error, HostError):
            raise error
    except KitError as unknown:
        raise KitError(
            f"whether the job of {name} is queued is not known: {unknown}",
            cure=f"kit status {name} asks Slurm again, kit down {name} cancels it",
        ) from error
    with cancelling(name, members, by):
        if job_id:
            print(f"cancelling job {job_id}", flush=True)
            _cancel(slurm, job_id)
    for run in members:
        forget_secrets(run, ready.channel)
        with contextlib.suppress(NotWritten):  # the caller raises `error`, which says more
            run.finish_stopped() if by else run.finish("failed", "it was not queued")


# --- while it runs ------------------------------------------------------------------------------------------


def is_there(run: Run, options: SshOptions) -> bool:
    """Whether Slurm still has the job of a run, waiting or running; if the job is over, record how it ended."""
    with login(restore(run.inventory), options) as channel:
        slurm = slurm_of(run, channel)
        find_job(run, slurm)
        job = slurm.job(run.slurm["job_id"])
        if job.is_over:
            record_end(run, channel, job)
        return not job.is_over


def find_job(run: Run, slurm: Slurm) -> None:
    """Record the id of a run's job if its `kit up` ended before it knew the id; "" stays if Slurm has no such job."""
    if run.state in runs.LIVE and not run.slurm["job_id"]:
        folder = Path(run.slurm["run_dir"]).with_name(run.sweep or run.run_id)
        if job_id := slurm.job_below(str(folder)):
            _queued(run, job_id + run.slurm.get("task", ""))


def is_being_submitted(run: Run) -> bool:
    """Whether a `kit up` is submitting the job of a run at this moment, so that its id is unknown."""
    return not run.slurm["job_id"] and locks.is_starting(run)


def refuse_while_submitted(run: Run) -> None:
    """Raise KitError if a `kit up` is submitting the job of a run at this moment."""
    if is_being_submitted(run):
        raise KitError(
            f"{run.run_id} is starting: kit up is submitting its job", cure="try again when it has"
        )


def watch(run: Run, options: Options, *, tail_bytes: int | None = None, cancels: bool = True) -> int:
    """Print the leader's output until the job ends; return kit's exit status. Ctrl-C cancels the job if `cancels`."""
    try:
        return _watch(run, options, tail_bytes, cancels=cancels)
    except KeyboardInterrupt as interrupt:  # while kit connected to the login node
        if not cancels:
            print(f"{run.run_id} goes on", flush=True)
            return 0
        print(f"cancelling job {run.slurm['job_id']}", flush=True)
        down(run, options.ssh, by=str(interrupt) or "Ctrl-C")
        return runs.STOPPED_EXIT


def _watch(run: Run, options: Options, tail_bytes: int | None, *, cancels: bool) -> int:
    inventory = restore(run.inventory)
    with (
        login(inventory, options.ssh) as channel,
        metrics.served(run, channel, options.metrics),
        sigterm_interrupts(),
    ):
        slurm, job_id = slurm_of(run, channel), run.slurm["job_id"]
        login_again = LoginAgain(channel, inventory, options.ssh, functools.partial(print, flush=True))
        shown = _Shown(channel, run, tail_bytes, quiet=options.quiet)
        watched = Watched(slurm, job_id)
        try:
            line = ""
            looked_at = -LOOK_S
            while True:
                try:
                    shown.more()
                    if time.monotonic() - looked_at >= LOOK_S:
                        is_over, looked_at = watched.look(), time.monotonic()
                        if watched.line != line:
                            line = watched.line
                            print(f"job {job_id} {line}", flush=True)
                        if is_over:
                            break
                except ChannelLost as lost:
                    login_again(lost)
                time.sleep(POLL_S)
            while shown.more(final=True):
                pass
        except KeyboardInterrupt as interrupt:
            if not cancels:
                raise
            with cancelling(run.run_id, [run], str(interrupt) or "Ctrl-C"):
                print(f"cancelling job {job_id}", flush=True)
                job = _cancel(slurm, job_id)
            while shown.more(final=True):
                pass
            if job.state == "COMPLETED":
                return conclude(run, channel, job, is_shown=not options.quiet)
            record_stopped(run, channel)
            print(f"{run.run_id} is stopped; {resume_command(run)} goes on with it", flush=True)
            bring_logs(run, channel)
            return runs.STOPPED_EXIT
        return conclude(run, channel, watched.job, is_shown=not options.quiet)


class _Shown:
    """The leader's output, and how far it has been printed."""

    def __init__(self, channel: HostChannel, run: Run, tail_bytes: int | None, *, quiet: bool) -> None:
        self._channel = channel
        self._folder = f"{run.slurm['run_dir']}/slurm"
        self._offsets: dict[str, int] | None = None
        self._tail_bytes = tail_bytes
        self._quiet = quiet

    def more(self, *, final: bool = False) -> bool:
        """Print what is new; return whether anything was."""
        self._offsets, found = self._channel.call(
            "hostfollow.logs",
            timeout_s=LOGIN_TIMEOUT_S,
            node_dir=self._folder,
            offsets=self._offsets,
            tail_bytes=self._tail_bytes,
            final=final,
        )
        for _, text in found:
            if not self._quiet:
                print(text, end="", flush=True)
        return bool(found)


def _cancel(slurm: Slurm, job_id: str) -> Job:
    """Cancel a job or an array, wait until it is over, and return it: COMPLETED if it ended before it was cancelled.

    Raises:
        KitError: it is not over after `STOP_S`; recorded as ended, the next `kit up` would start a second one.
    """
    is_taken = False
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        is_taken = is_taken or slurm.cancel(job_id)
        with contextlib.suppress(Unanswered):
            jobs = slurm.jobs(job_id)
            if all(job.is_over for job in jobs.values()):
                return next(iter(jobs.values()), Job(state=""))
        time.sleep(POLL_S)
    raise KitError(
        f"job {job_id} is still there {STOP_S:.0f} s after scancel",
        cure=f"see squeue --job {job_id}, then kit down again",
    )


def conclude(run: Run, channel: HostChannel, job: Job, *, is_shown: bool = True) -> int:
    """Record and print how a run ended, whose job is over; return kit's exit status.

    Args:
        run: the run.
        channel: to the login node.
        job: its job, in the final state.
        is_shown: whether the leader's output was printed; it contains the verdict.
    """
    exit_status, is_told = record_end(run, channel, job)
    bring_logs(run, channel)
    record = None if is_shown else record_of(run, channel)
    if run.state == "stopped":
        print(f"\n{run.run_id} was stopped; {_how_to_resume(run)}")
    elif not is_told:
        folder = f"{run.slurm['run_dir']}/slurm"
        known = run.cause
        why = (
            f"  cause                 {known['what']}\n  cure                  {known['cure']}\n"
            if known
            else ""
        )
        # A job that could not be started has no log, or only that of an earlier start.
        is_started = known.get("name") != "slurm-launch-failed"
        said = (
            f"  what its tasks said   {channel.host}:{folder}/{run.slurm['job_id']}_*_log.out\n"
            if is_started
            else ""
        )
        print(f"\n{run.run_id} failed: Slurm says {job.line()}\n{why}{said}  {_how_to_resume(run)}")
    elif record is not None:
        _tell(run, record, channel)
    if used := usage(Slurm(channel), run.slurm["job_id"], wait_s=ACCOUNT_S):
        print(f"  used       {used.line()}")
    return exit_status


def _tell(run: Run, record: Run, channel: HostChannel) -> None:
    """Print the verdict as `kit up` over SSH does, from `record`, which is the leader's."""
    found = verdict_of(
        events.read(run.folder),
        max_restarts=restore(run.inventory).job.max_restarts,
        state=run.state,
        reason=run.verdict,
        known=run.cause,
    )
    if found is None:
        return
    record.left_out = record.left_out or run.left_out
    leading.conclude(record, dict.fromkeys(record.nodes, channel), with_left_out(record, found))


def bring_logs(run: Run, channel: HostChannel, *, is_asked: bool = False) -> None:
    """Copy the logs to this machine if the command line or the inventory asks for it; a failure is only printed."""
    if is_asked or restore(run.inventory).logs.fetch:
        fetchlogs.quietly(lambda: fetch_logs(run, channel), run, lambda text: print(text, flush=True))


def _how_to_resume(run: Run) -> str:
    return f"{resume_command(run)} goes on from its snapshot"


def down(run: Run, options: SshOptions, *, by: str = "kit down", fetch: bool = False) -> int:
    """Cancel the job of a run, and with `fetch` copy its logs to this machine; return the exit status.

    Args:
        run: the run.
        options: how to reach the login node.
        by: who asked for it, for the record of the run.
        fetch: whether to copy the logs even if the inventory does not ask for it.
    """
    refuse_while_submitted(run)
    with login(restore(run.inventory), options) as channel:
        slurm = slurm_of(run, channel)
        find_job(run, slurm)
        job_id = run.slurm["job_id"]
        watched = Watched(slurm, job_id)
        is_over = watched.look()  # False while Slurm does not answer: then `_cancel` tries until it does
        if is_over or (watched.is_unknown and run.state in runs.ENDED):
            forget_secrets(run, channel)
            if run.state not in runs.ENDED:
                record_end(run, channel, watched.job)
            print(f"{run.run_id} is not running ({run.state})")
            bring_logs(run, channel, is_asked=fetch)
            return 0
        if watched.is_unknown:
            print(f"job {job_id} {watched.line}", flush=True)
        with cancelling(run.run_id, [run], by):
            job = _cancel(slurm, job_id)
        if job.state == "COMPLETED":
            record_end(run, channel, job)
            print(f"{run.run_id} is not running ({run.state})")
        else:
            record_stopped(run, channel)
            print(f"{run.run_id} is stopped")
        bring_logs(run, channel, is_asked=fetch)
    return 0
