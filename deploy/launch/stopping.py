"""Stops a run on all its nodes: one that is watched, or whose start is broken off; a second Ctrl-C kills it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nodekit.deploy.connect.channel import RemoteError
from nodekit.deploy.output.interrupts import Interrupts
from nodekit.deploy.records.runs import ENDED, Run
from nodekit.deploy.supervise.node_client import NodeClient
from nodekit.deploy.supervise.state import Rules, State
from nodekit.inventory.errors import HostError, KitError, NotWritten
from nodekit.inventory.load import restore

LOOK_S = 0.1
NOT_STARTED_GRACE_S = 5.0


def stop(
    stop_all: Callable[..., dict[str, Any]], interrupts: Interrupts, say: Callable[[str], None]
) -> dict[str, Any]:
    """Stop a run, and kill it at the next Ctrl-C: host → what was found there, or the exception.

    Args:
        stop_all: stops the run; with ``force=True`` kills it.
        interrupts: of the user's while it stops.
        say: is called with what the user is to be told.
    """
    interrupts.hold()
    results: dict[str, Any] = {}
    stopping = threading.Thread(target=lambda: results.update(stop_all(force=False)), daemon=True)
    stopping.start()
    while stopping.is_alive():
        stopping.join(LOOK_S)
        if interrupts.again:
            say("killing it")
            results.update(stop_all(force=True))
            break
    return results


def unheard(run: Run, results: Mapping[str, Any], *, lost: bool = False) -> list[str]:
    """The nodes of a run that may not have stopped, by the result of `stop`.

    Args:
        run: the run.
        results: host → what was found there, or the exception; hosts without a channel are absent.
        lost: the user says that nodes which cannot be reached are off: leave these out, but none that has answered.
    """
    left = [name for name in run.nodes if name not in results or isinstance(results[name], Exception)]
    reached = {
        name
        for name, each in results.items()
        if isinstance(each, RemoteError) or not isinstance(each, HostError)
    }
    return [name for name in left if name in reached or not lost]


def refused(results: Mapping[str, Any]) -> dict[str, RemoteError]:
    """The hosts of `results` that have answered, but could not stop the run: SIGKILL may not end an agent."""
    return {name: each for name, each in results.items() if isinstance(each, RemoteError)}


def record_end(
    run: Run,
    nodes: Collection[str],
    record: Callable[[], None],
    say: Callable[[str], None],
    *,
    alive: Mapping[str, RemoteError] | None = None,
) -> None:
    """Record that a run is over, unless nodes that did not get the stop may be training together.

    Else the next `kit up` would begin a second group beside them. Does nothing if the run was started again meanwhile.

    Args:
        run: the run.
        nodes: those that did not get the stop.
        record: writes the end down.
        say: is called with what the user is to be told.
        alive: those of `nodes` whose host has answered why they were not stopped, as of `refused`.

    Raises:
        NotWritten: the disk is full, or gone.
    """
    started = run.started
    with contextlib.suppress(KitError):  # a process that only watches has read the voters long ago
        run.reload()
    if run.started != started:
        return
    if run.state in ENDED or not _may_go_on(run, nodes):
        record()
        return
    alive = alive or {}
    told = [f"{name} was not stopped: {error.problem}" for name, error in alive.items()]
    if silent := [name for name in nodes if name not in alive]:
        told.append(
            f"{', '.join(silent)} cannot be reached and may be training together, so {run.run_id} is not over: "
            f"kit down {run.run_id} when they can, or, where you know that they are off, kit down --lost {run.run_id}"
        )
    else:
        told.append(f"{run.run_id} is not over: kit down {run.run_id} when that is mended")
    say("\n".join(told))


def _may_go_on(run: Run, nodes: Collection[str]) -> bool:
    """Whether these nodes may train without the others; not under Slurm, which ends all, nor if none was started."""
    if run.is_placed or run.judgement.get("generation", -1) < run.generation:
        return False
    return State.from_dict(run.judgement, Rules.of(restore(run.inventory))).may_train(nodes)


def undo(
    client: NodeClient, error: BaseException, interrupts: Interrupts, say: Callable[[str], None]
) -> bool:
    """Stop what a start that failed with `error` has begun, and record that; whether all is known to be stopped."""
    run = client.run
    if isinstance(error, KeyboardInterrupt) and not run.stopped_by:
        run.say_stop(str(error) or "Ctrl-C")  # it is no failure: the user, or Slurm, wanted that
    # Agents that were started are stopped; those that still wait for their start end with their channel.
    results = stop(
        lambda *, force: client.stop_all(grace_s=NOT_STARTED_GRACE_S, force=force, say=say), interrupts, say
    )
    left = unheard(run, results)

    def record() -> None:
        if run.stopped_by:
            run.finish_stopped()
        else:
            run.finish("failed", "it did not start", _cause(error))

    with contextlib.suppress(NotWritten):  # what is raised says more
        record_end(run, left, record, say, alive=refused(results))
    interrupts.each()
    return not left


def _cause(error: BaseException) -> dict[str, str]:
    """Why a run did not start, as `Run.cause`: for `kit why`, when what was printed is gone."""
    if not isinstance(error, KitError):
        return {}
    first = error.errors[0]
    what = str(first.problem._replace(cure=""))
    what = f"{first.host}: {what}" if isinstance(first, HostError) else what
    return {"name": "did-not-start", "what": what, "cure": first.problem.cure}


def refuse_stopped(run: Run) -> None:
    """Raise KitError where somebody has stopped a run while it is being started: its end is on record, and was told."""
    if by := run.stopped_by:
        raise KitError(
            f"{run.run_id} was stopped while it was being started, by {by}", cure="kit up starts it"
        )
