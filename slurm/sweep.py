"""Many runs of one inventory as a Slurm array: `kit up --sweep lr=1e-3,3e-4`, or `slurm.array: 0-15%4`.

A sweep has no record of its own. The record of each of its runs has the sweep's id, with which the run's id begins.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nodekit.deploy.connect.channel import ChannelLost, HostChannel
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.launch import ending
from nodekit.deploy.launch.options import Options
from nodekit.deploy.output.interrupts import sigterm_interrupts
from nodekit.deploy.output.phases import Phases
from nodekit.deploy.output.wording import count
from nodekit.deploy.plan.command import TRAINING_MODULE, argv_of, filled, training_options
from nodekit.deploy.records import find_runs, locks, runs, secret_files
from nodekit.deploy.records.runs import Run
from nodekit.deploy.supervise.node_client import secrets_of
from nodekit.inventory.errors import JobFailed, KitError
from nodekit.inventory.load import restore
from nodekit.inventory.schema import Inventory
from nodekit.slurm import run as runner
from nodekit.slurm.cluster.jobs import Job, Slurm, Unanswered, indexes, slurm_of
from nodekit.slurm.cluster.login import LOGIN_TIMEOUT_S, LoginAgain, cancelling, login, settings_of
from nodekit.slurm.cluster.shared_folder import node_statuses, record_end, record_of
from nodekit.slurm.submission.prepare import dry_run, prepare

LOOK_S = 2.0  # between two questions to Slurm
MAX_NUMBERS = 3
"""How many numbers of a run's result.json the table shows, such as accuracy and loss; the first ones."""


@dataclass(frozen=True)
class Variant:
    """The values, arguments and environment in which one run of a sweep differs from the others."""

    index: int
    values: str
    """As shown to the user: ``lr=1e-3 batch-size=32``."""
    args: tuple[str, ...] = ()
    """Arguments appended to the command."""
    env: dict[str, str] = field(default_factory=dict)


def variants(sweep: Sequence[str], array: str | None) -> list[Variant]:
    """Return the runs of a sweep: all combinations of the `--sweep` options' values, or the indexes of `slurm.array`.

    Raises:
        KitError: an option without values, a value given twice, or `--sweep` together with `slurm.array`.
    """
    if sweep and array:
        raise KitError(
            "found --sweep and slurm.array",
            wanted="one of them",
            cure="take slurm.array out of the inventory",
        )
    if array:
        name = "SLURM_ARRAY_TASK_ID"
        numbers = sorted(set(indexes(array)))  # sbatch, too, ignores order and repetition
        return [Variant(index, f"{name}={index}", env={name: str(index)}) for index in numbers]
    options: dict[str, list[str]] = {}
    for each in sweep:
        key, _, values = each.partition("=")
        key = key.removeprefix("--")
        options.setdefault(key, [])
        listed = values.split(",")
        if not key or "" in listed or options[key] or len(set(listed)) < len(listed):
            raise KitError(
                f"--sweep: found '{each}'", wanted="an option and its values, once each, as lr=1e-3,3e-4"
            )
        options[key] = listed
    found = []
    for index, chosen in enumerate(itertools.product(*options.values())):
        pairs = list(zip(options, chosen, strict=True))
        args = [word for key, value in pairs for word in (f"--{key}", value)]
        found.append(Variant(index, " ".join(f"{key}={value}" for key, value in pairs), tuple(args)))
    return found


def up(inventory: Inventory, options: Options) -> int:
    """Submit the runs of a sweep, or attach to it if it is not over, and watch them; return the exit status."""
    wanted = variants(options.sweep, settings_of(inventory).array)
    _refuse_shared_output(inventory, options, wanted)
    if options.dry_run:
        for each in wanted if not options.json else ():
            print(f"run {each.index}: {each.values}")
        return dry_run(inventory, options)
    with locks.starting(inventory.path):
        before = find_runs.all_of(inventory.path)
        before.sort(key=lambda run: run.state in runs.LIVE)  # prefer a sweep that is not over to a newer one
        sweep_id = next((run.sweep for run in reversed(before) if run.sweep), "")
        members = find_runs.sweep(sweep_id) if sweep_id else []
        pairs = [(_command(inventory, options, each), each.values) for each in wanted]
        same = [(run.command, run.sweep_values) for run in members] == pairs
        live = _live(members)
        if live:
            _look(live, options.ssh)
            live = _live(live)
        if live and (options.new or not same):
            raise KitError(f"{sweep_id} of this inventory is not over", cure=f"kit down {sweep_id} stops it")
        if not live:
            if options.new or not same or all(run.state == "succeeded" for run in members):
                sweep_id, members = runs.new_id(inventory.name), []
            members = _start(inventory, options, sweep_id, members, wanted)
    if live:
        print(f"attached to {sweep_id}; Ctrl-C cancels it", flush=True)
    if options.detach:
        print(
            f"{sweep_id} is queued: kit status {sweep_id} shows it, kit down {sweep_id} cancels it",
            flush=True,
        )
        return 0
    return watch(members, options)


def _command(inventory: Inventory, options: Options, variant: Variant) -> list[str]:
    return [*(options.command or inventory.job.command or TRAINING_MODULE), *variant.args]


def _refuse_shared_output(inventory: Inventory, options: Options, wanted: Sequence[Variant]) -> None:
    """Refuse runs of the training module that would overwrite each other's files, since they share the working folder.

    Raises:
        KitError: two runs have the same ``--output``.
    """
    outputs = set()
    for each in wanted:
        own = f"run-{each.index}"
        argv = argv_of(inventory, _command(inventory, options, each))
        argv = filled(argv, snapshot_dir=own, run_id=own, node="")
        asked = training_options(argv, {**inventory.job.env, **each.env})
        if asked is None or asked.output is None:
            return
        if asked.output in outputs:
            raise KitError(
                f"--output {asked.output} is one folder for several runs",
                wanted="one for each",
                cure="leave --output out, and each run has its own; or write {run_id} into it",
            )
        outputs.add(asked.output)


def _start(
    inventory: Inventory, options: Options, sweep_id: str, members: list[Run], wanted: list[Variant]
) -> list[Run]:
    """Submit the runs of a sweep that have not succeeded, as one array; return all its runs."""
    phases = Phases(silent=options.quiet)
    phases.say(
        f"{'resuming' if members else 'sweep'} {sweep_id}" + ("; --new starts over" if members else "")
    )
    all_runs = []
    with contextlib.ExitStack() as stack:
        ready = prepare(
            stack,
            inventory,
            sweep_id,
            options,
            phases,
            secrets=secrets_of(inventory),
            notify_secrets=secret_files.notify_secrets(inventory),
        )
        num_done = sum(run.state == "succeeded" for run in members)
        Slurm(ready.channel).refuse_array_of(len(wanted) - num_done)
        todo: list[tuple[Run, Inventory, dict[str, str]]] = []
        for number, variant in enumerate(wanted):
            command = _command(inventory, options, variant)
            run_id = f"{sweep_id}.{variant.index}"
            run = members[number] if members else runner.new_run(inventory, run_id, command)
            all_runs.append(run)
            if run.state == "succeeded":
                continue
            job = inventory.job.model_copy(update={"env": {**inventory.job.env, **variant.env}})
            own = inventory.model_copy(update={"job": job})
            run_dir = f"{ready.shared_dir}/runs/{run_id}"
            ready.place(run_dir, own, command)
            # All runs share one copy of the code: none of them changes it.
            status, _, err = Slurm(ready.channel).run("ln", "-sfn", f"../{sweep_id}/code", f"{run_dir}/code")
            if status:
                raise KitError(f"{ready.channel.host}: {err.strip()}")
            todo.append((run, own, {"run_dir": run_dir, "sweep": sweep_id, "values": variant.values}))
        runner.submit(todo, ready, phases)
    return all_runs


def _live(members: Sequence[Run]) -> list[Run]:
    """Return the runs whose end is not recorded."""
    return [run for run in members if run.state in runs.LIVE]


def _jobs(slurm: Slurm, members: Sequence[Run]) -> dict[str, Job]:
    """Return run id → job, for the runs whose end is not recorded."""
    live = _live(members)
    found: dict[str, Job] = {}
    for run in live:
        runner.find_job(run, slurm)
    for job_id in _arrays(live):
        found |= slurm.jobs(job_id)
    # A job that is missing here has ended, or scontrol has cut it from a long list of pending ones: ask for it alone.
    return {run.run_id: found.get(run.slurm["job_id"]) or slurm.job(run.slurm["job_id"]) for run in live}


def _arrays(members: Sequence[Run]) -> list[str]:
    return sorted({run.slurm["job_id"].partition("_")[0] for run in members})


def _look(members: Sequence[Run], options: SshOptions) -> None:
    """Record how those runs ended whose jobs are over."""
    with login(restore(members[0].inventory), options) as channel:
        _record_ends(channel, members, _jobs(slurm_of(members[0], channel), members))


def _record_ends(channel: HostChannel, members: Sequence[Run], jobs: dict[str, Job]) -> None:
    for run in _live(members):
        if jobs[run.run_id].is_over:
            record_end(run, channel, jobs[run.run_id])


def watch(members: list[Run], options: Options) -> int:
    """Print the state of each run of a sweep as it changes, and a table once all are over; return the exit status.

    Ctrl-C cancels the runs.
    """
    inventory = restore(members[0].inventory)
    with login(inventory, options.ssh) as channel, sigterm_interrupts():
        login_again = LoginAgain(channel, inventory, options.ssh, functools.partial(print, flush=True))
        slurm, watched, told = slurm_of(members[0], channel), _live(members), dict[str, str]()
        is_silent = False
        try:
            while live := _live(members):
                try:
                    jobs = _jobs(slurm, live)
                    _record_ends(channel, live, jobs)
                except ChannelLost as lost:
                    login_again(lost)
                    continue
                except Unanswered as error:  # the jobs go on without Slurm's controller
                    if not is_silent:
                        print(f"all go on, {error.doubt}", flush=True)
                    is_silent = True
                    time.sleep(LOOK_S)
                    continue
                is_silent = False
                for run in watched:  # including runs whose end was recorded just before the connection broke
                    line = (
                        jobs[run.run_id].line() if run.state in runs.LIVE else f"{run.state}: {run.verdict}"
                    )
                    if told.get(run.run_id) != line:
                        print(f"{run.run_id}  {run.sweep_values}  {line}", flush=True)
                        told[run.run_id] = line
                if _live(live):
                    time.sleep(LOOK_S)
        except KeyboardInterrupt as interrupt:
            _stop(channel, members, str(interrupt) or "Ctrl-C")
            return runs.STOPPED_EXIT
        print(f"\n{_table(channel, members)}")
    return 0 if all(run.state == "succeeded" for run in members) else JobFailed.exit_code


def down(members: list[Run], options: SshOptions, *, fetch: bool = False) -> int:
    """Cancel the runs of a sweep that are not over, and with `fetch` copy all logs here; return the exit status."""
    for run in members:
        runner.refuse_while_submitted(run)
    with login(restore(members[0].inventory), options) as channel:
        try:
            _record_ends(channel, members, _jobs(slurm_of(members[0], channel), members))
        except Unanswered as error:  # `_stop` tries until Slurm answers
            if not all(_arrays(_live(members))):
                raise  # a job id is unknown, so there is nothing to cancel by
            print(f"all go on, {error.doubt}", flush=True)
        if _live(members):
            _stop(channel, members, "kit down")
        else:
            print(f"{members[0].sweep} is not running")
        for run in members if fetch else ():
            runner.bring_logs(run, channel, is_asked=True)
    return 0


def _stop(channel: HostChannel, members: list[Run], by: str) -> None:
    live = _live(members)
    slurm, sweep_id = slurm_of(members[0], channel), members[0].sweep
    with cancelling(sweep_id, live, by):
        print(f"cancelling {sweep_id}, {count(len(live), 'run')}", flush=True)
        to_cancel = set(_arrays(live))
        deadline = time.monotonic() + runner.STOP_S
        while True:
            to_cancel = {job_id for job_id in to_cancel if not slurm.cancel(job_id)}
            with contextlib.suppress(Unanswered):
                jobs = _jobs(slurm, live)
                if all(job.is_over for job in jobs.values()):
                    break
            if time.monotonic() > deadline:
                raise KitError(
                    f"{sweep_id} is still there {runner.STOP_S:.0f} s after scancel",
                    cure=f"see squeue --job {','.join(_arrays(live))}, then kit down {sweep_id} again",
                )
            time.sleep(runner.POLL_S)
    _record_ends(channel, live, jobs)
    print(f"{sweep_id} is stopped", flush=True)


def status(members: list[Run], options: SshOptions, *, as_json: bool) -> int:
    """Print a table of the runs of a sweep; return the exit status."""
    for run in members:
        runner.refuse_while_submitted(run)
    with login(restore(members[0].inventory), options) as channel:
        jobs = _jobs(slurm_of(members[0], channel), members)
        _record_ends(channel, members, jobs)
        if as_json:
            rows = [
                {**runs.public(run), "values": run.sweep_values, **_progress(channel, run)} for run in members
            ]
            print(json.dumps(rows, indent=2))
            return 0
        print(_table(channel, members, jobs))
    return 0


def _table(channel: HostChannel, members: list[Run], jobs: dict[str, Job] | None = None) -> str:
    rows = [("run", "values", "state", "step", "result")]
    for run in members:
        found = _progress(channel, run)
        job = (jobs or {}).get(run.run_id)
        state = run.state
        if job is not None and run.state in runs.LIVE:
            state = job.state.lower() + (f" ({job.reason})" if job.reason else "")
        result = " ".join(f"{key}={value:.4g}" for key, value in list(found["result"].items())[:MAX_NUMBERS])
        last = run.verdict if run.state == "failed" else result
        rows.append((run.run_id, run.sweep_values, state, found["progress"].partition(" ")[0], last))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _progress(channel: HostChannel, run: Run) -> dict[str, Any]:
    """Return a run's progress (``12/46 …``) and the numbers in its result.json, both from its first node."""
    record = record_of(run, channel)
    node = (
        min(record.nodes.values(), key=lambda each: int(each["node_rank"]), default=None) if record else None
    )
    if node is None:
        return {"progress": "", "result": {}}
    told = node_statuses(run, channel).get(node["name"], {})
    result = ending.result(channel, node["node_dir"], timeout_s=LOGIN_TIMEOUT_S)
    return {
        "progress": str(told.get("progress") or ""),
        "result": {key: value for key, value in result.items() if isinstance(value, float)},
    }
