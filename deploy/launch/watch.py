"""Watch a run to its end, and act for it unless another process does; tell how it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import CALL_TIMEOUT_S, HostChannel
from nodekit.deploy.launch import ending, stopping
from nodekit.deploy.launch.options import Options
from nodekit.deploy.metrics import metrics_port
from nodekit.deploy.notify import notify
from nodekit.deploy.output.interrupts import Interrupts, Terminated, leave_terminal
from nodekit.deploy.output.wording import count
from nodekit.deploy.records import events, fetchlogs, locks
from nodekit.deploy.records.runs import LIVE, STOPPED_EXIT, Run
from nodekit.deploy.screen.full_screen import Doing, FullScreen, fits_screen
from nodekit.deploy.screen.verdict_screen import failed_screen, is_over, resume_command, with_left_out
from nodekit.deploy.screen.view import View
from nodekit.deploy.screen.view_model import ViewModel
from nodekit.deploy.story.summary import summary
from nodekit.deploy.story.verdict import Verdict
from nodekit.deploy.supervise import drain
from nodekit.deploy.supervise.node_client import NodeClient
from nodekit.deploy.supervise.observer import Left, Observer, Over, StopAsked
from nodekit.deploy.supervise.state import Rules
from nodekit.deploy.supervise.supervise import Supervisor
from nodekit.inventory.errors import JobFailed, KitError, NotWritten
from nodekit.inventory.schema import Inventory

NO_PROGRESS_EXIT = 4
SUPERVISED_TIMEOUT_S = 10.0


def watch(
    client: NodeClient,
    options: Options,
    *,
    tail_bytes: int | None = None,
    shown: Mapping[str, Mapping[str, int]] | None = None,
    is_asked: bool = True,
    interrupts: Interrupts | None = None,
    lock: locks.SupervisorLock | None = None,
) -> int:
    """Watch a run to its end, and supervise it unless another process does; return the exit status.

    Ctrl-C stops the run on all nodes. So does SIGTERM if a user has started this process and it supervises the run;
    else SIGTERM ends this process alone.

    Args:
        client: acts on the nodes.
        options: of the command line.
        tail_bytes: how much to show of each log that exists already.
        shown: node → log → how much of it has been shown.
        is_asked: whether a user has started this process, and sees what it prints.
        interrupts: Ctrl-C and SIGTERM; None if the caller handles signals.
        lock: the supervisor's lock of the run, if the caller may hold it already.
    """
    interrupts = interrupts or Interrupts()
    interrupts.hold()  # until there is a supervisor, which can stop the run
    run, lock = client.run, lock or locks.SupervisorLock(client.run)

    def stays() -> str:
        return _locked_out(client) if lock.is_held else ""

    with _view(run, Rules.of(client.inventory), options, is_asked=is_asked, stays=stays) as view:
        if not lock.acquire():
            view.say(f"supervised by process {lock.owner()} on this machine; this one watches")
        supervisor = _supervisor(client, options, view, lock, tail_bytes=tail_bytes, shown=shown)
        try:
            with _hangup_leaves() if is_asked else contextlib.nullcontext():
                interrupts.once()
                verdict = supervisor.watch()
                interrupts.hold()  # it is over: a Ctrl-C from here on must not keep that off the record
        except Left:
            interrupts.hold()
            view.close()
            supervisor.close()
            return _leave(client, options, lock, interrupts)
        except Over as over:
            interrupts.each()
            view.close()
            view.say(str(over))
            return end_of_another(run, client.channels, supervisor)
        except (KeyboardInterrupt, StopAsked) as interrupt:
            interrupts.hold()
            view.close()
            if isinstance(interrupt, Terminated) and not (is_asked and lock.is_held):
                again = f"; {resume_command(run)} supervises it again" if lock.is_held else ""
                view.say(f"{run.run_id} goes on: SIGTERM has ended this process alone{again}")
                supervisor.close()
                return 0
            run.say_stop(str(interrupt) or "Ctrl-C")
            status = stop_everywhere(run, supervisor, view, interrupts, is_asked=is_asked)
            _fetch_logs(client, lock, view)
            supervisor.close()
            if is_asked:
                conclude_stop(run, client.channels)
            return status
        else:
            verdict = with_left_out(run, verdict)
            with told_of_a_full_disk(view.say):
                stopping.record_end(run, verdict.may_go_on, lambda: _write_end(run, verdict), view.say)
            interrupts.each()
            _fetch_logs(client, lock, view)
            supervisor.close()
            with contextlib.suppress(Exception):  # what `kit runs` says of it, while its events are at hand
                summary(run)
        finally:
            lock.release()
    return conclude(run, client.channels, verdict)


def _supervisor(
    client: NodeClient,
    options: Options,
    view: View,
    lock: locks.SupervisorLock,
    *,
    tail_bytes: int | None,
    shown: Mapping[str, Mapping[str, int]] | None,
) -> Supervisor:
    inventory = client.inventory
    hosts = {host.name: host for host in inventory.hosts}
    return Supervisor(
        client,
        view,
        lock,
        rules=Rules.of(inventory),
        reopen=lambda name: cluster.open_channel(hosts[name], options.ssh),
        tail_bytes=tail_bytes,
        shown=shown or {},
        observers=observers_of(client.run, inventory, options, view),
    )


def _write_end(run: Run, verdict: Verdict) -> None:
    if verdict.outcome == "stopped":
        run.finish_stopped()
    else:
        run.finish(verdict.outcome, verdict.summary, asdict(verdict.cause) if verdict.cause else None)


def _locked_out(client: NodeClient) -> str:
    """Why a process in the background could not supervise a run; "" where it could."""
    if not cluster.was_asked(client.channels.copy()):
        return ""
    return "a supervisor in the background needs ssh-agent (ssh-add before kit up): a key's passphrase was typed here"


def _view(
    run: Run, rules: Rules, options: Options, *, is_asked: bool, stays: Callable[[], str] = str
) -> View:
    """A live screen where a user sits at a terminal that can show one, else lines."""
    if not is_asked or not fits_screen(plain=options.plain or options.quiet):
        # What is left running in the background writes to a file that nothing bounds, and nobody follows.
        repeats = is_asked or not options.quiet
        return View(list(rules.nodes), logs=not options.quiet, repeats=repeats)
    return full_screen(
        run,
        rules,
        leaves="leave the job running, and this view; kit watch opens it again",
        interrupts="stop the job on all nodes, after a snapshot",
        stays=stays,
    )


def full_screen(
    run: Run, rules: Rules, *, leaves: str, interrupts: str, stays: Callable[[], str] = str
) -> FullScreen:
    """The live screen of a run, not yet open; what leaving it and Ctrl-C do is said in words."""
    doing = Doing(
        leaves=leaves,
        interrupts=interrupts,
        stays=stays,
        drain=lambda node, undo, absent: drain.ask(run, rules, node, undo=undo, absent=absent),
        drained=lambda: run.drained,
    )
    return FullScreen(ViewModel(run.run_id, rules.nodes, run.clock_offsets), doing)


@contextlib.contextmanager
def _hangup_leaves() -> Iterator[None]:
    """A terminal that is closed leaves the job running, and supervised; nohup's wish is respected."""

    def leave(*_: object) -> None:
        leave_terminal()
        raise Left

    before = signal.getsignal(signal.SIGHUP)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _leave(client: NodeClient, options: Options, lock: locks.SupervisorLock, interrupts: Interrupts) -> int:
    """Have the run supervised by a process that stays, unless another does it already; the exit status."""
    run, acted = client.run, lock.acquire()
    lock.release()
    if acted and (why := _locked_out(client)):  # its terminal is gone: there is nobody to be told, or asked
        run.event("said", text=why)
    elif acted:
        leave_a_supervisor(run, options)
    interrupts.each()
    print(
        f"{run.run_id} goes on: kit watch {run.run_id} looks at it, kit down {run.run_id} stops it",
        flush=True,
    )
    return 0


def leave_a_supervisor(run: Run, options: Options) -> None:
    """Start a process that goes on supervising a run when this one is gone, and wait until it does."""
    place = options.metrics
    served = [f"--metrics-port={place.port}", f"--metrics-address={place.address}"] if place else []
    if logging.getLogger(__name__).isEnabledFor(logging.DEBUG):
        served.append("--debug")
    with _log_of_supervisor(run) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "nodekit.deploy.commands.cli", "supervise", run.run_id, *served],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    # Before, all others would say that nobody looks after this run.
    deadline = time.monotonic() + SUPERVISED_TIMEOUT_S
    while not locks.is_supervised(run) and time.monotonic() < deadline:
        if process.poll() is not None:
            if run.as_recorded().state in LIVE:
                why = f"{run.folder / 'supervisor.log'} says why; {resume_command(run)} supervises it"
                print(
                    f"warning: nobody supervises {run.run_id}: the process for that has ended; {why}",
                    flush=True,
                )
            return
        time.sleep(0.02)


def _log_of_supervisor(run: Run) -> IO[str]:
    try:
        return (run.folder / "supervisor.log").open("a")
    except OSError:  # a full disk: what it says is lost, and the run is supervised all the same
        return Path(os.devnull).open("a")


def _fetch_logs(client: NodeClient, lock: locks.SupervisorLock, view: View) -> None:
    """Have the logs here, where the inventory wants that: it is the supervisor's to do."""
    if client.inventory.logs.fetch and lock.acquire():
        fetchlogs.at_the_end(client.run, client.channels, view.say)


def observers_of(run: Run, inventory: Inventory, options: Options, view: View) -> list[Observer]:
    """Who is told of a run while it goes on."""
    observers: list[Observer] = []
    if inventory.notify is not None:
        secrets = notify.secrets_here(run, inventory.notify)
        observers.append(notify.Notifier(run, inventory.notify, secrets))
    if options.metrics is not None:
        observers += metrics_port.serve(run, options.metrics, view.say)
    return observers


def stop_everywhere(
    run: Run, supervisor: Supervisor, view: View, interrupts: Interrupts, *, is_asked: bool
) -> int:
    """Stop the run on all nodes, saying so; Ctrl-C again kills it. The exit status."""
    interrupts.again = False  # who has pressed it twice in a hurry had not read what that does
    hint = "; Ctrl-C again kills it at once" if is_asked else ""
    view.say(f"stopping {run.run_id} on {count(len(run.nodes), 'node')}{hint}")
    results = stopping.stop(supervisor.stop, interrupts, view.say)
    with told_of_a_full_disk(view.say):
        stopping.record_end(
            run,
            stopping.unheard(run, results),
            run.finish_stopped,
            view.say,
            alive=stopping.refused(results),
        )
    view.say(stopped_text(run, results))
    interrupts.each()  # all is stopped: the rest may be given up
    return STOPPED_EXIT


@contextlib.contextmanager
def told_of_a_full_disk(say: Callable[[str], None]) -> Iterator[None]:
    """An end that cannot be written down is an end all the same."""
    try:
        yield
    except NotWritten as error:
        say(f"how it ended is not on record: {error}; kit up looks at its nodes then")


def stopped_text(run: Run, results: Mapping[str, Any]) -> str:
    """What to say after a stop: where it is stopped, and where that is not known."""
    alive = stopping.refused(results)
    failed = {name: result for name, result in results.items() if isinstance(result, Exception)}
    killed = [
        name for name, result in results.items() if not isinstance(result, Exception) and result["killed"]
    ]
    unheard = [name for name in run.nodes if name not in results]
    text = f"{run.run_id} is stopped on {count(len(results) - len(failed), 'node')}"
    if killed:
        text += f"; had to be killed on {', '.join(killed)}"
    problems = [f"{name} was not stopped: {error.problem}" for name, error in alive.items()]
    unknown = [f"not known: {error}" for name, error in failed.items() if name not in alive]
    unknown += [f"not known: {name} cannot be reached" for name in unheard]
    if unknown:
        unknown.append(f"an agent may still run there: kit down {run.run_id} ends it once the host answers")
    problems += unknown
    return "\n".join([text, *problems])


def _clock_set_s(run: Run) -> float:
    """By how much the clock here was set since a run was started."""
    with contextlib.suppress(KitError):
        found = events.read(run.folder)
        first = max((at for at, each in enumerate(found) if each.kind == "run-started"), default=0)
        return sum(map(events.clock_set_s, found[first:]))
    return 0.0


def conclude(run: Run, channels: Mapping[str, HostChannel], verdict: Verdict) -> int:
    """Say how it ended and where everything is; the exit status."""
    there = [name for name in run.nodes if name not in verdict.without] or list(run.nodes)
    first = min(there, key=lambda name: run.nodes[name]["node_rank"])
    rows = ending.left_behind(
        run, {name: channel for name, channel in channels.items() if not channel.is_lost}, verdict.without
    )
    print()
    if verdict.outcome == "failed":
        # The verdict names the log itself.
        print("\n".join(failed_screen(run, verdict, [row for row in rows if row[0] != "logs"])))
        return NO_PROGRESS_EXIT if verdict.no_progress else JobFailed.exit_code
    if verdict.outcome == "stopped":
        labels = {label for label, _ in rows}
        goes_on = "begins it anew: it has no snapshot"
        if "snapshots" in labels:
            goes_on = "goes on from its snapshot"
        elif "not known" in labels:  # one may lie where nobody could look
            goes_on = "goes on from its snapshot, if a node that could not be asked has one"
        resume = f"; {resume_command(run)} {goes_on}"
        print(f"{run.run_id} was stopped{resume if is_over(run, verdict) else ''}")
    else:
        took = f"{(run.ended or time.time()) - run.started - _clock_set_s(run):.0f} s"
        if run.was_resumed:  # `kit runs` has the time of all its starts
            took += " since it was resumed"
        print(f"{run.run_id} {verdict.text} in {took}{_result(run, channels, first)}")
    for label, text in rows:
        print(f"  {label:<9}  {text}")
    return STOPPED_EXIT if verdict.outcome == "stopped" else 0


def conclude_stop(run: Run, channels: Mapping[str, HostChannel]) -> None:
    """Say where everything is, and how to go on, of a run that was stopped here; not where nodes may train on."""
    if run.state == "stopped":
        conclude(run, channels, Verdict("stopped", "stopped"))


def end_of_another(run: Run, channels: Mapping[str, HostChannel], supervisor: Supervisor) -> int:
    """Say what there is to say of a run that another process has ended, or started anew; the exit status."""
    with contextlib.suppress(KitError):
        run.reload()
    supervisor.close()
    conclude_stop(run, channels)
    return {"stopped": STOPPED_EXIT, "failed": JobFailed.exit_code}.get(run.state, 0)


def _result(run: Run, channels: Mapping[str, HostChannel], first: str) -> str:
    """`, accuracy 98.33%` when the job wrote a result.json, and why it ended early, if it did."""
    if first not in channels:
        return ""
    found = ending.result(channels[first], run.nodes[first]["node_dir"], timeout_s=CALL_TIMEOUT_S)
    accuracy, early = found.get("accuracy"), found.get("stopped_early")
    shown = f", accuracy {accuracy:.2%}" if isinstance(accuracy, float) else ""
    return f"{shown}; it ended early: {early}" if isinstance(early, str) else shown
