"""The backend for runs on the hosts of an inventory, over SSH or on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import CALL_TIMEOUT_S, HostChannel, RemoteError, on_all
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.host.logs import logbook
from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.launch import stopping
from nodekit.deploy.launch import watch as launch_watch
from nodekit.deploy.launch.options import ATTACH_TAIL_BYTES, Options, StopOptions
from nodekit.deploy.launch.watch import leave_a_supervisor, stopped_text, told_of_a_full_disk
from nodekit.deploy.metrics import metrics_port
from nodekit.deploy.output.interrupts import Interrupts
from nodekit.deploy.output.wording import count, size_text
from nodekit.deploy.plan import script
from nodekit.deploy.plan.command import argv_of
from nodekit.deploy.records import events, fetchlogs, find_runs, locks, runs, secret_files
from nodekit.deploy.records.events import Event, Gatherer
from nodekit.deploy.records.locks import SupervisorLock
from nodekit.deploy.records.runs import Outcome, Run, RunFolder
from nodekit.deploy.screen.full_screen import fits_screen
from nodekit.deploy.screen.verdict_screen import resume_command
from nodekit.deploy.screen.view import View, show_last
from nodekit.deploy.story.status import Status, absence, status_line
from nodekit.deploy.supervise import drain, policy
from nodekit.deploy.supervise.node_client import NodeClient, list_code, secrets_of
from nodekit.deploy.supervise.observation import seen_of
from nodekit.deploy.supervise.observer import Left, Over, StopAsked
from nodekit.deploy.supervise.state import Rules
from nodekit.deploy.supervise.supervise import Supervisor
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import changed, restore
from nodekit.inventory.schema import Host, Inventory

UNWATCHED = "ended while nobody watched"


class SshBackend:
    """The backend of inventories without a slurm section; see `Backend` in `deploy/backend.py`."""

    poll_s = 0.1

    def up(self, inventory: Inventory, options: Options) -> int:
        """Start the job of an inventory, resume it or attach to it, and watch it; return the exit status."""
        if options.sweep:
            raise KitError(
                f"{inventory.path}: --sweep submits to Slurm's queue, and this inventory has no slurm section"
            )
        # Import late: only a start needs the checks and the plan, which would double the imports of `kit status`.
        from nodekit.deploy.launch import start

        if options.dry_run:
            return _dry_run(inventory, options)
        if options.detach:
            # The background supervisor cannot ask for a passphrase, so fail now, before anything is started.
            options = dataclasses.replace(options, ssh=dataclasses.replace(options.ssh, may_ask=False))
        with contextlib.ExitStack() as stack:
            interrupts = stack.enter_context(Interrupts())
            with locks.starting(inventory.path):
                run = find_runs.current(
                    inventory.path, options.command or inventory.job.command, is_new=options.new
                )
                client = None
                if run is not None and run.state in runs.LIVE:
                    client = _attach(stack, run, inventory, options)
                    if run.state == "succeeded":
                        again = f"{resume_command(run)} starts a new run now"
                        print(f"{run.run_id} trained to the end while nobody watched; {again}", flush=True)
                        return 0
                attached = client is not None
                is_led = client is not None and locks.is_supervised(client.run)
                # With a supervisor, that process may be the one that uses the port.
                if options.metrics is not None and not is_led:
                    metrics_port.check(options.metrics)
                shown: dict[str, dict[str, int]] = {}
                if client is None:
                    # Resume a run that was stopped or failed; after one that succeeded, start a new run.
                    resumed = run if run is not None and run.state != "succeeded" else None
                    client = start.start(stack, inventory, resumed, options, interrupts=interrupts)
                    shown = _earlier_logs(client) if resumed and not options.detach else {}
                interrupts.hold()
            if options.detach:
                if is_led:
                    _tell_who_leads(client.run, options)
                else:
                    leave_a_supervisor(client.run, options)
                interrupts.each()
                print(
                    f"{client.run.run_id} is running: {resume_command(client.run)} attaches to it, kit down "
                    "stops it",
                    flush=True,
                )
                return 0
            tail_bytes = ATTACH_TAIL_BYTES if attached else None
            return launch_watch.watch(
                client, options, tail_bytes=tail_bytes, shown=shown, interrupts=interrupts
            )

    def supervise(self, run: Run, options: Options) -> int:
        """Supervise a run in the background, for `kit up -d`; return the exit status."""
        inventory = restore(run.inventory)
        # Outlive the terminal. A handler, not SIG_IGN, which the agents on this machine would inherit.
        signal.signal(signal.SIGHUP, lambda *_: None)
        with Interrupts() as interrupts:
            interrupts.hold()  # `watch` handles an interrupt that comes before
            lock = SupervisorLock(run)
            lock.acquire()  # before connecting, which may take long: until then the run counts as unsupervised
            with cluster.channels(inventory.hosts, options.ssh, some=True) as channels:
                client = NodeClient(run, inventory, channels)
                return launch_watch.watch(client, options, is_asked=False, interrupts=interrupts, lock=lock)

    def watch(self, run: Run, ssh: SshOptions, *, plain: bool = False) -> int:
        """Show a run until it ends or the user leaves; return the exit status of `kit up`, or 0 if the user left."""
        inventory = restore(run.inventory)
        hosts = {host.name: host for host in inventory.hosts}
        rules = Rules.of(inventory)
        if locks.is_starting(run):
            print(f"{run.run_id} is starting; kit watch shows it when it runs")
            return 0
        with cluster.channels(inventory.hosts, ssh, some=True) as channels:
            is_led = locks.is_supervised(run)
            if not is_led and not _is_alive(found := _statuses(run, channels)):
                if lost := _may_run_on(run, found):
                    raise KitError(
                        f"{run.run_id} {_may_run(lost)}", cure=f"kit watch {run.run_id} again when it can"
                    )
                show_last(run, run, events.read(run.folder))
                print(f"{run.run_id} has ended while nobody watched; {resume_command(run)} goes on with it")
                return 0
            client = NodeClient(run, inventory, channels)
            with _view(run, rules, plain=plain) as view, Interrupts() as interrupts:
                if not is_led:
                    view.say("nobody supervises this run: what is lost is not replaced before kit up does")
                supervisor = Supervisor(
                    client,
                    view,
                    _OnlyWatches(run),
                    rules=rules,
                    reopen=lambda name: cluster.open_channel(hosts[name], ssh),
                    tail_bytes=ATTACH_TAIL_BYTES,
                )
                try:
                    interrupts.once()
                    verdict = supervisor.watch()
                    supervisor.close()
                except (Left, KeyboardInterrupt):
                    interrupts.hold()
                    view.close()
                    print(f"{run.run_id} goes on", flush=True)
                    return 0
                except Over as over:
                    interrupts.each()
                    view.close()
                    print(over)
                    return launch_watch.end_of_another(run, channels, supervisor)
                except StopAsked:
                    interrupts.hold()
                    view.close()
                    run.say_stop("kit watch")
                    status = launch_watch.stop_everywhere(run, supervisor, view, interrupts, is_asked=True)
                    launch_watch.conclude_stop(run, channels)
                    return status
            return launch_watch.conclude(run, channels, verdict)

    def status(self, run: Run, ssh: SshOptions) -> Status:
        """Return the status of a run and its nodes; for an unreachable node, its last known status."""
        with cluster.channels(restore(run.inventory).hosts, ssh, some=True) as channels:
            answers = _answers(run, channels)
        found = _found(answers)
        is_starting = locks.is_starting(run)
        is_watched = is_starting or locks.is_supervised(run)
        state = run.as_recorded().state  # it may have changed since
        if state not in runs.ENDED and not is_watched:
            if _end_of(run, found) == "succeeded":
                state = "trained to the end while nobody watched"
            elif not _is_alive(found):
                lost = _may_run_on(run, found)
                state = (
                    f"{_may_run(lost)}; kit up goes on when it can"
                    if lost
                    else f"{UNWATCHED}; kit up goes on"
                )
        heard: dict[str, NodeStatus] = {}
        drained: dict[str, str] = {}
        said: list[str] = []
        try:
            drained = run.drained_because
        except KitError as error:
            said.append(str(error))
        if run.nodes.keys() - found:
            try:
                heard = events.now(run.folder)
            except KitError as error:
                said.append(str(error))
        last = {name: status for name, status in heard.items() if name in run.nodes.keys() - found}
        data = {**found, **{name: {**status, "alive": None} for name, status in last.items()}}
        is_unstarted = (
            state in runs.ENDED and not heard and not any(each.get("agent") for each in found.values())
        )
        lines = {}
        for name in run.nodes:
            if (status := found.get(name)) is not None:
                out = ""
                if not status["alive"] and is_starting:  # the rest of the status is from an earlier start
                    status["state"] = lines[name] = "starting"
                    continue
                if not status["alive"] and status.get("state") not in runs.ENDED:
                    out = drain.line(drained, name)
                    status["state"] = "drained" if out else "not started" if is_unstarted else absence(status)
                # The times in a status are by the node's clock, so take the present by that clock, too.
                lines[name] = out or status_line(status, now=time.time() + run.clock_offsets.get(name, 0.0))
                continue
            lines[name] = "unreachable"
            # The host answers, and its disk does not.
            if isinstance(answer := answers.get(name), RemoteError):
                lines[name] = f"its status cannot be read: {answer.problem.found}"
            if name in last:
                when = time.strftime("%m-%d %H:%M:%S", time.localtime(last[name]["time"]))
                lines[name] += f"; last heard of {when}: {status_line(last[name], now=last[name]['time'])}"
        return Status(state=state, lines=said, nodes=lines, data={"state": state, "status": data})

    def history(self, run: Run, ssh: SshOptions) -> tuple[Run, list[Event]]:
        """Return the run's record, and its events in the order of time."""
        return run, events.read(run.folder)

    def rules(self, run: Run, node: str) -> Rules:
        """Return the rules of the run's supervisor."""
        return Rules.of(restore(run.inventory))

    def down(self, run: Run, options: StopOptions) -> int:
        """Stop a run on all nodes; return 1 if a node may not have stopped, else 0.

        With `options.lost`, unreachable nodes count as off; a node that answers, and cannot be stopped, does not.
        """
        inventory = restore(run.inventory)
        run.say_stop("kit down")
        with cluster.channels(inventory.hosts, options.ssh, some=True) as channels:
            client = NodeClient(run, inventory, channels)
            # Find out before stopping anything whether the run has ended by itself.
            ended = None if locks.is_supervised(run) else _end_of(run, _statuses(run, channels))
            results = client.stop_all(force=options.force, say=functools.partial(print, flush=True))
            _gather_unwatched(client)
            was_running = any(
                not isinstance(each, Exception) and each["was"] == "running" for each in results.values()
            )
            clean = not stopping.unheard(run, results, lost=options.lost)
            with contextlib.suppress(KitError):
                run.reload()  # its supervisor may have recorded the end and its cause meanwhile
            if run.state not in runs.ENDED and clean:
                with told_of_a_full_disk(print):
                    if ended is None or ended == "stopped":
                        run.finish_stopped()
                    else:
                        run.finish(ended, UNWATCHED)
            if not was_running and clean:
                print(f"{run.run_id} is not running ({run.state})")
            else:
                print(stopped_text(run, results))
            if options.fetch:
                print(fetchlogs.fetch_run(run, channels).text())
        return 0 if clean else 1

    def sweep_status(self, members: list[Run], ssh: SshOptions, *, as_json: bool) -> int:
        """Never called: `up` refuses sweeps."""
        raise NotImplementedError

    def sweep_down(self, members: list[Run], options: StopOptions) -> int:
        """Never called: `up` refuses sweeps."""
        raise NotImplementedError

    def still_there(self, run: Run, channels: Mapping[str, HostChannel]) -> str:
        """Return "": nothing but the agents can be left of a run."""
        return ""

    def hosts(self, run: Run, *, spare: bool = False) -> dict[str, Host]:
        """Return node → its host, each node having its own; with `spare` also hosts that may join later."""
        return {host.name: host for host in restore(run.inventory).hosts if spare or host.name in run.nodes}

    def folders(self, run: Run) -> list[RunFolder]:
        """Return the run's folders on its present and former nodes."""
        found = []
        for name, node in {**run.earlier, **run.nodes}.items():
            shared = node["env"]["NODEKIT_SNAPSHOT_DIR"] if "NODEKIT_SNAPSHOT_SHARED" in node["env"] else ""
            reached = None if name in run.nodes else Host.model_validate(node["host"])
            found.append(RunFolder(name, str(Path(node["node_dir"]).parent), shared, reached))
        return found

    def record(self, run: Run, channels: Mapping[str, HostChannel]) -> Run:
        """Return the record on this machine, read again."""
        with contextlib.suppress(KitError):
            run.reload()
        return run

    def nodes_at(self, record: Run, host: str) -> list[str]:
        """Return the node of the same name, which the run has or may get."""
        return [host]

    def is_over(self, run: Run, channels: Mapping[str, HostChannel], *, all_gone: bool) -> bool:
        """Whether the record has the run's end; or, if `all_gone`, no supervisor is left to record it."""
        with contextlib.suppress(KitError):
            run.reload()
        return run.state in runs.ENDED or (all_gone and not locks.is_supervised(run))


class _OnlyWatches(SupervisorLock):
    """A lock that is never acquired, so that its owner only watches, and never acts for the run."""

    def acquire(self) -> bool:
        """Return False."""
        return False


def _view(run: Run, rules: Rules, *, plain: bool) -> View:
    if not fits_screen(plain=plain):
        return View(list(rules.nodes))
    leaves = "leave this view; the job goes on"
    return launch_watch.full_screen(run, rules, leaves=leaves, interrupts=leaves)


def _tell_who_leads(run: Run, options: Options) -> None:
    serves = ", and serves metrics as it was told when it was started" if options.metrics else ""
    print(f"process {SupervisorLock(run).owner()} supervises it already{serves}")


def _is_alive(found: Mapping[str, NodeStatus]) -> bool:
    return any(status["alive"] for status in found.values())


def _may_run_on(run: Run, found: Mapping[str, NodeStatus]) -> list[str]:
    """Return the nodes without a status on which the run may still be running, if no other node runs it."""
    return [] if _end_of(run, found) == "succeeded" else [name for name in run.nodes if name not in found]


def _may_run(lost: list[str]) -> str:
    return f"may still be running on {', '.join(lost)}, which cannot be reached"


def _attach(stack: contextlib.ExitStack, run: Run, given: Inventory, options: Options) -> NodeClient | None:
    """Return a client for a run recorded as running; if no agent of it is alive, record its end and return None."""
    inventory = restore(run.inventory)
    channels = stack.enter_context(cluster.channels(inventory.hosts, options.ssh, some=True))
    if locks.is_supervised(run) or _is_alive(_statuses(run, channels)):
        if not options.detach:
            print(f"attached to {run.run_id}, which is running; Ctrl-C stops it", flush=True)
        if keys := changed(run.inventory, given):
            what = f"{given.path.name} has changed since {run.run_id} was started ({', '.join(keys)})"
            print(f"warning: {what}: that counts from the next start on (kit down, then kit up)", flush=True)
        return NodeClient(run, inventory, channels)
    _settle(run, channels)
    return None


def _earlier_logs(client: NodeClient) -> dict[str, dict[str, int]]:
    """Return node → log → its size in bytes, for the logs of earlier generations, which were shown before."""
    run = client.run
    found = on_all(
        {name: channel for name, channel in client.channels.items() if name in run.nodes},
        lambda channel: channel.call(
            "hostfollow.logs",
            timeout_s=CALL_TIMEOUT_S,
            node_dir=run.nodes[channel.host]["node_dir"],
            tail_bytes=0,
        ),
    )

    def is_earlier(log: str) -> bool:
        named = logbook.parse_name(log)
        return named is not None and named[1][0] < run.generation

    return {
        name: {log: size for log, size in told[0].items() if is_earlier(log)}
        for name, told in found.items()
        if not isinstance(told, Exception)
    }


def _answers(run: Run, channels: Mapping[str, HostChannel]) -> dict[str, NodeStatus | Exception]:
    return on_all(
        {name: channel for name, channel in channels.items() if name in run.nodes},
        lambda channel: channel.call(
            "status", timeout_s=CALL_TIMEOUT_S, node_dir=run.nodes[channel.host]["node_dir"]
        ),
    )


def _found(answers: Mapping[str, NodeStatus | Exception]) -> dict[str, NodeStatus]:
    return {name: answer for name, answer in answers.items() if not isinstance(answer, Exception)}


def _statuses(run: Run, channels: Mapping[str, HostChannel]) -> dict[str, NodeStatus]:
    """Return the status of each reachable node."""
    return _found(_answers(run, channels))


def _settle(run: Run, channels: Mapping[str, HostChannel]) -> None:
    """Record the end of a run that is recorded as running, and has no live agent."""
    found = _statuses(run, channels)
    if lost := _may_run_on(run, found):
        raise KitError(
            f"{run.run_id} {_may_run(lost)}",
            cure=f"kit down {run.run_id} when it can, or, where you know that it is off, kit down --lost "
            f"{run.run_id}",
        )
    _gather_unwatched(NodeClient(run, restore(run.inventory), dict(channels)))
    run.finish(_end_of(run, found) or "failed", UNWATCHED)


def _end_of(run: Run, found: Mapping[str, NodeStatus]) -> Outcome | None:
    """Return how a run ended according to its nodes; None if an agent is alive, or no node knows."""
    states = policy.ended_states(map(seen_of, found.values()), run.generation)
    return policy.outcome_of(states) if states and not _is_alive(found) else None


def _gather_unwatched(client: NodeClient) -> None:
    """Fetch the missing events of a run that has no supervisor."""
    lock = SupervisorLock(client.run)
    if lock.acquire():
        client.gather_events(Gatherer(client.run.folder))
        lock.release()


def _dry_run(inventory: Inventory, options: Options) -> int:
    """Print what would run on each node, and start nothing."""
    from nodekit.deploy.launch import planning
    from nodekit.deploy.story import leftout

    secrets_of(inventory)
    secret_files.notify_secrets(inventory)
    script.find(inventory, options.command)
    tree = list_code(inventory, options.command)
    planned = planning.planned(inventory, options, some=True)
    if options.json:
        print(planned.to_json())
        return 0
    left_out = leftout.find(tree, argv_of(inventory, options.command))
    sent = f"{count(tree.num_files, 'file')}, {size_text(tree.size_bytes)}, from {inventory.job.code}"
    lines = [f"  {each}" for each in (sent, *left_out.said())]
    print(planned.to_text(), "", "code sent to each host", *lines, sep="\n")
    return 0
