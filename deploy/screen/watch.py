"""``kit watch``: looks at a run, and changes nothing unless a key asks for it."""

from __future__ import annotations

import shutil
import sys
import time

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.output import terminal
from nodekit.deploy.records import past, runs
from nodekit.deploy.records.runs import Run, SupervisorLock
from nodekit.deploy.screen.view import Left, StopAsked, View, fits_screen
from nodekit.deploy.screen.watched import Watched
from nodekit.deploy.ssh_backend import up
from nodekit.deploy.ssh_backend.start import rules_of
from nodekit.deploy.supervise.hands import Hands
from nodekit.deploy.supervise.judge import Rules
from nodekit.deploy.supervise.supervise import Supervisor

PLAIN_WIDTH = 100  # where there is no terminal to ask


class OnlyWatches(SupervisorLock):
    """Is never taken: who has it never acts for the run."""

    def take(self) -> bool:
        """No."""
        return False


def watch(run: Run, options: SshOptions, *, plain: bool = False) -> int:
    """Show a run until it ends or the user leaves; the exit status is that of `kit up`, 0 where the user left."""
    if run.state in runs.ENDED:
        return show_last(run, options)
    if run.slurm:
        from nodekit.slurm import watch as slurm_watch

        return slurm_watch.watch(run, options, plain=plain)
    inventory = up.inventory_of(run)
    hosts = {host.name: host for host in inventory.hosts}
    rules = rules_of(inventory)
    with cluster.links(inventory.hosts, options, some=True) as links:
        is_led = _is_led(run)
        if not is_led and not any(status["alive"] for status in up.statuses(run, links).values()):
            show_last(run, options)
            print(f"{run.run_id} has ended while nobody watched; kit up goes on with it")
            return 0
        hands = Hands(run, inventory, links)
        with _view(run, rules, plain=plain) as view, up.sigterm_interrupts():
            if not is_led:
                view.say("nobody supervises this run: what is lost is not replaced before kit up does")
            supervisor = Supervisor(
                hands,
                view,
                OnlyWatches(run),
                rules=rules,
                reopen=lambda name: cluster.open_link(hosts[name], options),
                tail_bytes=up.ATTACH_TAIL_BYTES,
            )
            try:
                verdict = supervisor.watch()
                supervisor.close()
            except (Left, KeyboardInterrupt):
                view.close()
                print(f"{run.run_id} goes on", flush=True)
                return 0
            except StopAsked:
                view.close()
                run.say_stop("kit watch")
                return up.stop_everywhere(run, supervisor, view, is_asked=True)
        return up.conclude(run, links, verdict)


def show_last(run: Run, options: SshOptions) -> int:
    """The last that is known of a run that is over, and how it ended; the exit status."""
    from nodekit.deploy.screen import screen

    record, events = past.past(run, options)
    watched = Watched(run.run_id, list(record.nodes), record.clock_offsets)
    for event in events:
        watched.event(event)
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns if sys.stdout.isatty() else PLAIN_WIDTH
    terminal.console(highlight=False, width=width).print(
        screen.render(watched.model(run.ended or time.time()), width, None)
    )
    if run.state in runs.ENDED:
        print(f"\n{run.run_id} {run.state}" + (f": {run.verdict}" if run.verdict != run.state else ""))
    return 0


def _is_led(run: Run) -> bool:
    lock = SupervisorLock(run)
    is_free = lock.take()
    lock.release()
    return not is_free


def _view(run: Run, rules: Rules, *, plain: bool) -> View:
    if not fits_screen(plain=plain):
        return View(list(rules.nodes))
    leaves = "leave this view; the job goes on"
    return up.full_screen(run, rules, leaves=leaves, interrupts=leaves)
