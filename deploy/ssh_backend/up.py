"""`kit up`: start a run, or find the one that is there; watch it; tell how it ended. Safe to run again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.connect.link import Link, on_all
from nodekit.deploy.metrics import metrics_port
from nodekit.deploy.notify import notify
from nodekit.deploy.plan import script
from nodekit.deploy.records import runs
from nodekit.deploy.records.events import Gatherer
from nodekit.deploy.records.runs import Run
from nodekit.deploy.screen.verdict_screen import screen
from nodekit.deploy.screen.view import Doing, FullScreen, Left, StopAsked, View, fits_screen
from nodekit.deploy.ssh_backend import ending, start
from nodekit.deploy.ssh_backend.start import Options, count
from nodekit.deploy.story import leftout
from nodekit.deploy.story.summary import summary
from nodekit.deploy.story.verdict import Verdict
from nodekit.deploy.supervise import judge
from nodekit.deploy.supervise.hands import CALL_TIMEOUT_S, Hands, secrets_of
from nodekit.deploy.supervise.supervise import Observer, Supervisor
from nodekit.inventory.errors import JobFailed, KitError, NotWritten
from nodekit.inventory.load import load_inventory, restore
from nodekit.inventory.schema import Inventory

ATTACH_TAIL_BYTES = 4096
NO_PROGRESS_EXIT = 4
STOPPED_EXIT = 130


def up(options: Options) -> int:
    """Bring the job of an inventory to where it runs, and watch it; the exit status."""
    inventory = load_inventory(options.inventory)
    if inventory.slurm is not None:
        return _up_on_slurm(inventory, options)
    if options.sweep:
        raise KitError(
            f"{inventory.path}: --sweep submits to Slurm's queue, and this inventory has no slurm section"
        )
    if options.dry_run:
        return dry_run(inventory, options)
    if options.metrics is not None:
        metrics_port.check(options.metrics)
    with contextlib.ExitStack() as stack:
        with runs.starting(inventory.path):
            run = _current(inventory, options)
            hands = _attach(stack, run, options) if run is not None and run.state in runs.LIVE else None
            attached = hands is not None
            if hands is None:
                # A run that was stopped or failed goes on; one that trained to its end is done.
                resumed = run if run is not None and run.state != "succeeded" else None
                hands = start.start(stack, inventory, resumed, options)
        if options.detach:
            _leave_a_supervisor(hands.run, options)
            shown = shlex.quote(_shown(str(options.inventory)))
            print(
                f"{hands.run.run_id} is running: kit up {shown} attaches to it, kit down stops it", flush=True
            )
            return 0
        return watch(hands, options, tail_bytes=ATTACH_TAIL_BYTES if attached else None)


def _up_on_slurm(inventory: Inventory, options: Options) -> int:
    from nodekit.slurm import backend, show, sweep

    assert inventory.slurm is not None
    if options.metrics is not None:
        if options.sweep or inventory.slurm.array:
            raise KitError(f"{inventory.path}: --metrics-port serves one run, and this is a sweep of several")
        if options.detach:
            raise KitError(
                f"{inventory.path}: --metrics-port with -d: under Slurm nothing of kit stays on this machine; "
                "leave out -d (kit up attaches to the job later, too)"
            )
        metrics_port.check(options.metrics)
    if options.sweep or inventory.slurm.array:
        return sweep.up(inventory, options)
    if options.dry_run:
        return show.dry_run(inventory, options)
    with runs.starting(inventory.path):
        run = _current(inventory, options)
        attached = run is not None and run.state in runs.LIVE and backend.is_there(run, options.ssh)
        if run is None or not attached:
            run = backend.start(inventory, run if run and run.state != "succeeded" else None, options)
    if attached:
        print(f"attached to {run.run_id}, job {run.slurm['job_id']}; Ctrl-C cancels it", flush=True)
    if options.detach:
        shown = shlex.quote(_shown(str(options.inventory)))
        print(f"{run.run_id} is queued: kit up {shown} attaches to it, kit down cancels it", flush=True)
        return 0
    if fits_screen(plain=options.plain or options.quiet):
        from nodekit.slurm import watch as live

        return live.watch(run, options.ssh, cancels=True, metrics_at=options.metrics)
    return backend.watch(run, options, tail_bytes=ATTACH_TAIL_BYTES if attached else 0)


def _attach(stack: contextlib.ExitStack, run: Run, options: Options) -> Hands | None:
    """The hands of a run on record as running; None when none of its agents is alive any more."""
    inventory = inventory_of(run)
    links = stack.enter_context(cluster.links(inventory.hosts, options.ssh, some=True))
    lock = runs.SupervisorLock(run)
    is_led = not lock.take()
    lock.release()
    if is_led or any(status["alive"] for status in statuses(run, links).values()):
        print(f"attached to {run.run_id}, which is running; Ctrl-C stops it", flush=True)
        return Hands(run, inventory, links)
    _settle(run, links)
    return None


def _leave_a_supervisor(run: Run, options: Options) -> None:
    """Start a process that goes on supervising a run when this one is gone."""
    place = options.metrics
    served = [f"--metrics-port={place.port}", f"--metrics-address={place.address}"] if place else []
    if logging.getLogger(__name__).isEnabledFor(logging.DEBUG):
        served.append("--debug")
    with _log_of_supervisor(run) as log:
        subprocess.Popen(
            [sys.executable, "-m", "nodekit.deploy.commands.cli", "supervise", run.run_id, *served],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _log_of_supervisor(run: Run) -> IO[str]:
    try:
        return (run.folder / "supervisor.log").open("a")
    except OSError:  # a full disk: what it says is lost, and the run is supervised all the same
        return Path(os.devnull).open("a")


def supervise(run: Run, options: Options) -> int:
    """What `kit up -d` leaves running: supervise a run without a user who looks; the exit status."""
    with contextlib.ExitStack() as stack:
        inventory = inventory_of(run)
        links = stack.enter_context(cluster.links(inventory.hosts, options.ssh, some=True))
        return watch(Hands(run, inventory, links), options)


def _current(inventory: Inventory, options: Options) -> Run | None:
    """The run this `kit up` is about: the inventory's latest, when it runs the same command."""
    run = runs.latest_of(inventory.path)
    if run is None:
        return None
    same = (run.command or run.inventory["job"].get("command")) == _command(inventory, options)
    if run.state in runs.LIVE and options.new:
        raise KitError(f"{run.run_id} of this inventory is not over; kit down {run.run_id} stops it")
    if run.state in runs.LIVE and not same:
        raise KitError(
            f"{run.run_id} of this inventory is running another command; kit down {run.run_id} stops it; "
            "to run both, copy the inventory file"
        )
    return run if same and not options.new else None


def _command(inventory: Inventory, options: Options) -> list[str] | None:
    command = options.command or inventory.job.command
    return list(command) if command else None


def statuses(run: Run, links: Mapping[str, Link]) -> dict[str, dict[str, Any]]:
    """Each reachable node's status."""
    results = on_all(
        {name: link for name, link in links.items() if name in run.nodes},
        lambda link: link.call("status", timeout_s=CALL_TIMEOUT_S, node_dir=run.nodes[link.host]["node_dir"]),
    )
    return {name: result for name, result in results.items() if not isinstance(result, Exception)}


def _settle(run: Run, links: Mapping[str, Link]) -> None:
    """A run that is on record as running, and has no agent left: write down how it ended."""
    found = statuses(run, links)
    if len(found) < len(run.nodes):
        missing = ", ".join(name for name in run.nodes if name not in found)
        raise KitError(
            f"{run.run_id} may still be running on {missing}, which cannot be reached; "
            f"kit down {run.run_id} when it can, or, where you know that it is off, kit down --lost {run.run_id}"
        )
    _gather_unwatched(Hands(run, inventory_of(run), dict(links)))
    states = {status.get("state") for status in found.values()}
    run.finish("succeeded" if states == {"succeeded"} else "failed", "ended while nobody watched")


def _gather_unwatched(hands: Hands) -> None:
    """Have the events of a run whole that nobody supervises."""
    lock = runs.SupervisorLock(hands.run)
    if lock.take():
        hands.gather_events(Gatherer(hands.run.folder))
        lock.release()


def dry_run(inventory: Inventory, options: Options) -> int:
    """Print exactly what would run, and run nothing."""
    secrets_of(inventory)
    notify.secrets_of(inventory)
    script.find(inventory, options.command)
    planned = start.planned(inventory, options)
    print(planned.to_json() if options.json else planned.to_text())
    return 0


def watch(
    hands: Hands,
    options: Options,
    *,
    tail_bytes: int | None = None,
    shown: Mapping[str, Mapping[str, int]] | None = None,
    is_asked: bool = True,
) -> int:
    """Watch a run to its end, and act for it unless another does; Ctrl-C stops it everywhere. The exit status.

    Args:
        hands: what acts on the nodes.
        options: the command line's.
        tail_bytes: of each log that is there already, show only this much.
        shown: node → log → how much of it has been shown.
        is_asked: whether a user sits there; else the signals are the caller's.
    """
    run, inventory = hands.run, hands.inventory
    hosts = {host.name: host for host in inventory.hosts}
    rules = start.rules_of(inventory)
    lock = runs.SupervisorLock(run)
    handling = sigterm_interrupts() if is_asked else contextlib.nullcontext()
    with _view(run, rules, options, is_asked=is_asked) as view, handling:
        if not lock.take():
            view.say(f"supervised by process {lock.owner()} on this machine; this one watches")
        observers = observers_of(run, inventory, options, view)
        supervisor = Supervisor(
            hands,
            view,
            lock,
            rules=rules,
            reopen=lambda name: cluster.open_link(hosts[name], options.ssh),
            tail_bytes=tail_bytes,
            shown=shown or {},
            observers=observers,
        )
        try:
            with _hangup_leaves() if is_asked else contextlib.nullcontext():
                verdict = supervisor.watch()
        except Left:
            view.close()
            supervisor.close()
            acted = lock.take()
            lock.release()
            return _leave(run, options, is_led=not acted)
        except (KeyboardInterrupt, StopAsked) as interrupt:
            view.close()
            run.say_stop(str(interrupt) or "Ctrl-C")
            status = stop_everywhere(run, supervisor, view, is_asked=is_asked)
            if is_asked:
                signal.signal(
                    signal.SIGINT, signal.default_int_handler
                )  # all is stopped: the rest may be given up
            _fetch_logs(hands, lock, view)
            supervisor.close()
            return status
        else:
            verdict = with_left_out(run, verdict)
            with _told_of_a_full_disk(view.say):
                if verdict.outcome == "stopped":
                    run.finish_stopped()
                else:
                    run.finish(verdict.outcome, verdict.summary)
            _fetch_logs(hands, lock, view)
            supervisor.close()
            with contextlib.suppress(Exception):  # what `kit runs` says of it, while its events are at hand
                summary(run)
        finally:
            lock.release()
    return conclude(run, hands.links, verdict)


def _view(run: Run, rules: judge.Rules, options: Options, *, is_asked: bool) -> View:
    """A live screen where a user sits at a terminal that can show one, else lines."""
    if not is_asked or not fits_screen(plain=options.plain or options.quiet):
        return View(list(rules.nodes), logs=not options.quiet)
    return full_screen(
        run,
        rules,
        leaves="leave the job running, and this view; kit watch opens it again",
        interrupts="stop the job on all nodes, after a snapshot",
    )


def full_screen(run: Run, rules: judge.Rules, *, leaves: str, interrupts: str) -> FullScreen:
    """The live screen of a run, not yet open; what leaving it and Ctrl-C do is said in words."""
    from nodekit.deploy.screen.watched import Watched
    from nodekit.deploy.ssh_backend import drain

    doing = Doing(
        leaves=leaves,
        interrupts=interrupts,
        drain=lambda node, undo, absent: drain.ask(run, rules, node, undo=undo, absent=absent),
        drained=lambda: run.drained,
    )
    return FullScreen(Watched(run.run_id, rules.nodes, run.clock_offsets), doing)


@contextlib.contextmanager
def _hangup_leaves() -> Iterator[None]:
    """A terminal that is closed leaves the job running, and supervised; nohup's wish is respected."""

    def leave(*_: object) -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(
            3
        ):  # nobody reads what is said from here on, and saying it to nobody must not fail
            os.dup2(nothing, number)
        os.close(nothing)
        raise Left

    before = signal.getsignal(signal.SIGHUP)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _leave(run: Run, options: Options, *, is_led: bool) -> int:
    """Have the run supervised by a process that stays, unless another does it already; the exit status."""
    if not is_led:
        _leave_a_supervisor(run, options)
    print(
        f"{run.run_id} goes on: kit watch {run.run_id} looks at it, kit down {run.run_id} stops it",
        flush=True,
    )
    return 0


def _fetch_logs(hands: Hands, lock: runs.SupervisorLock, view: View) -> None:
    """Have the logs here, where the inventory wants that: it is the supervisor's to do."""
    if hands.inventory.logs.fetch and lock.take():
        from nodekit.deploy.logs import fetchlogs

        fetchlogs.at_the_end(hands.run, hands.links, view.say)


def observers_of(run: Run, inventory: Inventory, options: Options, view: View) -> list[Observer]:
    """Who is told of a run while it goes on."""
    observers: list[Observer] = []
    if inventory.notify is not None:
        secrets = notify.secrets_here(run, inventory.notify)
        observers.append(notify.Notifier(run, inventory.notify, secrets))
    if options.metrics is not None:
        observers += metrics_port.serve(run, options.metrics, view.say)
    return observers


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM is a Ctrl-C too: what that ends or mends is ended or mended in either case."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_everywhere(run: Run, supervisor: Supervisor, view: View, *, is_asked: bool) -> int:
    """Stop the run on all nodes, saying so; Ctrl-C again kills it. The exit status."""
    again = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM) if is_asked else ():
        signal.signal(number, lambda *_: again.set())  # an exception could come at a bad moment
    hint = "; Ctrl-C again kills it at once" if is_asked else ""
    view.say(f"stopping {run.run_id} on {count(len(run.nodes), 'node')}{hint}")
    results: dict[str, Any] = {}

    def stop(force: bool) -> None:
        results.update(supervisor.stop(force=force))

    stopping = threading.Thread(target=stop, args=(False,), daemon=True)
    stopping.start()
    while stopping.is_alive():
        if again.wait(0.1):
            view.say("killing it")
            stop(True)
            break
    with _told_of_a_full_disk(view.say):
        run.finish_stopped()
    view.say(stopped_text(run, results))
    return STOPPED_EXIT


@contextlib.contextmanager
def _told_of_a_full_disk(say: Callable[[str], None]) -> Iterator[None]:
    """An end that cannot be written down is an end all the same."""
    try:
        yield
    except NotWritten as error:
        say(f"how it ended is not on record: {error}; kit up looks at its nodes then")


def stopped_text(run: Run, results: Mapping[str, Any]) -> str:
    """What to say after a stop: where it is stopped, and where that is not known."""
    failed = [str(result) for result in results.values() if isinstance(result, Exception)]
    killed = [
        name for name, result in results.items() if not isinstance(result, Exception) and result["killed"]
    ]
    unheard = [name for name in run.nodes if name not in results]
    text = f"{run.run_id} is stopped on {count(len(results) - len(failed), 'node')}"
    if killed:
        text += f"; had to be killed on {', '.join(killed)}"
    problems = [f"not known: {problem}" for problem in failed]
    problems += [f"not known: {name} cannot be reached" for name in unheard]
    return "\n".join([text, *problems])


def conclude(run: Run, links: Mapping[str, Link], verdict: Verdict) -> int:
    """Say how it ended and where everything is; the exit status."""
    there = [name for name in run.nodes if name not in verdict.without] or list(run.nodes)
    first = min(there, key=lambda name: run.nodes[name]["node_rank"])
    rows = ending.left_behind(run, {name: link for name, link in links.items() if not link.is_lost})
    print()
    if verdict.outcome == "failed":
        # The verdict names the log itself.
        print("\n".join(failed_screen(run, verdict, [row for row in rows if row[0] != "logs"])))
        return NO_PROGRESS_EXIT if verdict.no_progress else JobFailed.exit_code
    if verdict.outcome == "stopped":
        has_snapshot = any(label == "snapshots" for label, _ in rows)
        goes_on = "goes on from its snapshot" if has_snapshot else "begins it anew: it has no snapshot"
        print(f"{run.run_id} was stopped; kit up {shlex.quote(_shown(run.inventory_path))} {goes_on}")
    else:
        seconds = (run.ended or time.time()) - run.started
        print(f"{run.run_id} {verdict.text} in {seconds:.0f} s{_result(run, links, first)}")
    for label, text in rows:
        print(f"  {label:<9}  {text}")
    return STOPPED_EXIT if verdict.outcome == "stopped" else 0


def with_left_out(run: Run, verdict: Verdict) -> Verdict:
    """A verdict on a run, whose cause may be a file that was not sent."""
    code_dirs = {name: str(node.get("code_dir", "")) for name, node in run.nodes.items()}
    return leftout.explained(verdict, run.left_out, code_dirs)


def failed_screen(run: Run, verdict: Verdict, more: Sequence[tuple[str, str]] = ()) -> list[str]:
    """The verdict on a failed run, as wide and high as the terminal, with further rows."""
    width, height = terminal()
    return screen(
        verdict,
        run_id=run.run_id,
        resume=resume_command(run),
        more=more,
        width=width,
        height=height,
    )


def terminal() -> tuple[int, int]:
    """Columns and lines to fill; in a file there is room for more."""
    size = shutil.get_terminal_size((100, 24))
    return size.columns, size.lines if sys.stdout.isatty() else 60


def resume_command(run: Run) -> str:
    """What goes on with a run, from its newest snapshot."""
    command = f"kit up {shlex.quote(_shown(run.inventory_path))}"
    return f"{command} -- {shlex.join(run.command)}" if run.command else command


def _result(run: Run, links: Mapping[str, Link], first: str) -> str:
    """`, accuracy 98.3 %` when the job wrote a result.json."""
    if first not in links:
        return ""
    with contextlib.suppress(KitError, ValueError):
        text = links[first].call(
            "read_file", timeout_s=CALL_TIMEOUT_S, path=f"{run.nodes[first]['node_dir']}/output/result.json"
        )
        accuracy = json.loads(text or "{}").get("accuracy")
        if isinstance(accuracy, float):
            return f", accuracy {accuracy:.2%}"
    return ""


def _shown(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def inventory_of(run: Run) -> Inventory:
    """The inventory as the run was started with."""
    return restore(run.inventory)


def down(run: Run, options: SshOptions, *, force: bool, lost: bool = False, fetch: bool = False) -> int:
    """Stop a run everywhere; the exit status is 1 when a node could not be asked.

    `lost`: the user knows that nodes that cannot be reached are off, and the run may go on without them. `fetch`: copy
    its logs to this machine.
    """
    inventory = inventory_of(run)
    run.say_stop("kit down")
    with cluster.links(inventory.hosts, options, some=True) as links:
        hands = Hands(run, inventory, links)
        results = hands.stop_all(force=force)
        _gather_unwatched(hands)
        unheard = [name for name in run.nodes if name not in links]
        was_running = any(
            not isinstance(each, Exception) and each["was"] == "running" for each in results.values()
        )
        clean = (lost or not unheard) and not any(isinstance(each, Exception) for each in results.values())
        with contextlib.suppress(OSError, ValueError):
            run.reload()  # whoever supervised it may have seen its end, and why
        if run.state not in runs.ENDED and clean:
            with _told_of_a_full_disk(print):
                run.finish_stopped()
        if not was_running and clean:
            print(f"{run.run_id} is not running ({run.state})")
        else:
            print(stopped_text(run, results))
        if fetch:
            from nodekit.deploy.logs import fetchlogs

            print(fetchlogs.fetch_run(run, links).text())
    return 0 if clean else 1
