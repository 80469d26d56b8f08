"""Waits until the ranks of a start run on its nodes, or says why they do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from nodekit.deploy.connect.channel import all_or_raise, on_all
from nodekit.deploy.launch.stopping import refuse_stopped
from nodekit.deploy.output.wording import names
from nodekit.deploy.records import runs
from nodekit.deploy.supervise.node_client import NodeClient
from nodekit.inventory.errors import HostError, KitError

STARTED_TIMEOUT_S = 120.0
FAILED_S = 5.0  # nodes whose ranks fail at once have met, and their states arrive within this
SLOW_S = 20.0
"""After so long the user is told which nodes do not train yet; the first rendezvous takes up to 15 s."""
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
    """Wait until the ranks run on every node, or have ended; return the nodes that the job begins without, and why.

    A node that is lost meanwhile, or cannot reach those that train, does not stop these. If the rendezvous host or half
    of all nodes are lost, the supervisor begins another generation on those that are left.

    Args:
        client: acts on the nodes.
        nodes: the voters, the rendezvous host first.
        least: the fewest of them that the job needs.
        say: is called with what the user is to be told.
        lost: nodes that may not have received their start, and why.

    Raises:
        HostError: agents ended at once, hosts were lost, or nodes did not meet in time, and either fewer than `least`
            nodes are left, or the lost ones may be training together.
        KitError: the run was stopped.
    """
    deadline = time.monotonic() + STARTED_TIMEOUT_S
    is_in_vain = threading.Event()  # too few nodes are left: do not wait until the deadline
    members: set[str] = set()
    absent: dict[str, KitError] = {}
    lost = dict(lost)
    states: dict[str, str] = {}
    failed: dict[str, float] = {}
    """Node → since when its agent has given up, by `time.monotonic`."""

    def are_too_few(without: Collection[str]) -> bool:
        num_left = len(nodes) - len(without)
        return num_left < least or 2 * num_left < len(nodes)

    def wait(name: str) -> None:
        while not is_in_vain.is_set():
            status = client.status(name)
            states[name] = status.get("state") or "starting"
            if states[name] in ("running", "waiting", *runs.ENDED):
                members.update(status.get("members", ()), [name] if status["state"] == "succeeded" else [])
                if states[name] == "failed":
                    failed[name] = time.monotonic()
                return
            if not status["alive"]:
                raise HostError(
                    name, f"its agent ended at once: {status['agent_log'].strip() or 'was it stopped?'}"
                )
            if nodes[0] in lost or 2 * len(lost) == len(nodes):
                absent[name] = HostError(name, "waits for another generation to begin")
                return
            gone = [each for each, since in list(failed.items()) if time.monotonic() - since > FAILED_S]
            if gone and (nodes[0] in gone or are_too_few(gone)):
                absent.update({each: HostError(each, "its agent has failed") for each in gone})
                what = "has" if len(gone) == 1 else "have"
                absent[name] = HostError(name, f"waits for {names(gone)}, which {what} failed")
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
            if are_too_few(lost) and time.monotonic() < deadline:
                is_in_vain.set()
            raise
        finally:
            states.pop(name, None)

    late = threading.Timer(SLOW_S, lambda: say(_still_waiting(nodes, states)))
    late.start()
    try:
        if are_too_few(lost):
            all_or_raise(lost)
        found = dict(lost) | on_all({name: name for name in nodes if name not in lost}, wait_or_lose)
    finally:
        late.cancel()
    if lost:
        refuse_stopped(client.run)  # then that is why the agents have ended
    all_or_raise(found if are_too_few(lost) else {name: found[name] for name in nodes if name not in lost})
    return {name: each for name in nodes if (each := lost.get(name) or absent.get(name))}


def _still_waiting(nodes: Sequence[str], states: Mapping[str, str]) -> str:
    """The line that names the nodes which do not train yet; other threads change `states` meanwhile."""
    found: dict[str, list[str]] = {}
    for name in nodes:
        if state := states.get(name):
            found.setdefault(state, []).append(name)
    where = [f"{names(those)} ({state})" for state, those in found.items()]
    hint = f": {NOT_REACHED}" if found.keys() <= {"rendezvous", "orphaned"} else ""
    return f"{'start':<8} after {SLOW_S:.0f} s still waiting for {', '.join(where)}{hint}"
