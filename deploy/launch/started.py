"""Waits until the ranks of a start run on its nodes, or says why they do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from nodekit.deploy.connect.channel import all_or_raise, on_all
from nodekit.deploy.launch.stopping import refuse_stopped
from nodekit.deploy.output.wording import names
from nodekit.deploy.records import runs
from nodekit.deploy.supervise.node_client import NodeClient
from nodekit.inventory.errors import HostError, KitError

STARTED_TIMEOUT_S = 120.0
SLOW_S = 20.0
"""After so long it is said which nodes are waited for, and what they do; the first meeting takes up to 15 s."""
NOT_REACHED = (
    "is there a firewall between them? kit check tries every pair of hosts, also with full-size packets"
)


def wait_started(
    client: NodeClient,
    nodes: Sequence[str],
    *,
    least: int,
    say: Callable[[str], object],
    lost: Mapping[str, KitError] = MappingProxyType({}),
) -> dict[str, KitError]:
    """Wait until workers run (or a node has more to say than that); the nodes that the job begins without, and why.

    That a node is lost meanwhile, or cannot reach those that train, is no reason to stop these. Where it is the
    rendezvous host, or half of all, the supervisor has another generation begin on those that are left.

    Args:
        client: what acts on the nodes.
        nodes: those that have a vote, the rendezvous host first.
        least: how few of them will do.
        say: what the user is told.
        lost: those that may not have heard their go, and why.

    Raises:
        HostError: an agent ended at once, a host was lost, or the nodes did not find each other in time; of so many
            that fewer than `least` are left, or that the others may be training together.
        KitError: the run was stopped.
    """
    deadline = time.monotonic() + STARTED_TIMEOUT_S
    is_in_vain = threading.Event()  # too few are left, and would wait for the others until the deadline
    members: set[str] = set()
    absent: dict[str, KitError] = {}
    lost = dict(lost)
    states: dict[str, str] = {}

    def tell() -> None:
        found: dict[str, list[str]] = {}
        for name in nodes:
            if state := states.get(name):
                found.setdefault(state, []).append(name)
        where = [f"{names(those)} ({state})" for state, those in found.items()]
        hint = f": {NOT_REACHED}" if found.keys() <= {"rendezvous", "orphaned"} else ""
        say(f"{'start':<8} after {SLOW_S:.0f} s still waiting for {', '.join(where)}{hint}")

    def are_too_few() -> bool:
        num_left = len(nodes) - len(lost)
        return num_left < least or 2 * num_left < len(nodes)

    def wait(name: str) -> None:
        while not is_in_vain.is_set():
            status = client.status(name)
            states[name] = status.get("state") or "starting"
            if states[name] in ("running", "waiting", *runs.ENDED):
                members.update(status.get("members", ()), [name] if status["state"] == "succeeded" else [])
                return
            if not status["alive"]:
                raise HostError(
                    name, f"its agent ended at once: {status['agent_log'].strip() or 'was it stopped?'}"
                )
            if nodes[0] in lost or 2 * len(lost) == len(nodes):
                absent[name] = HostError(name, "waits for another generation to begin")
                return
            if members and name not in members:
                absent[name] = HostError(name, f"not yet with the others: {NOT_REACHED}")
                return
            if time.monotonic() > deadline:
                raise HostError(
                    name,
                    f"still {status.get('state', 'starting')} after {STARTED_TIMEOUT_S:.0f} s: the nodes do "
                    "not reach each other",
                    cure=NOT_REACHED,
                )
            time.sleep(0.05)

    def wait_or_lose(name: str) -> None:
        try:
            wait(name)
        except KitError as error:
            lost[name] = error
            if are_too_few() and time.monotonic() < deadline:
                is_in_vain.set()
            raise
        finally:
            states.pop(name, None)

    late = threading.Timer(SLOW_S, tell)
    late.start()
    try:
        if are_too_few():
            all_or_raise(lost)
        found = dict(lost) | on_all({name: name for name in nodes if name not in lost}, wait_or_lose)
    finally:
        late.cancel()
    if lost:
        refuse_stopped(client.run)  # that is why an agent has ended
    all_or_raise(found if are_too_few() else {name: found[name] for name in nodes if name not in lost})
    return {name: each for name in nodes if (each := lost.get(name) or absent.get(name))}
