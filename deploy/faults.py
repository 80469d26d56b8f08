"""The faults of `kit drill`: what each is, where it strikes, and how it is taken back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nodekit.deploy.lab_cluster import Lab
from nodekit.inventory.errors import KitError

BACK_AFTER_S = 6.0
"""A lost host is back after this; long enough that its loss is noticed before."""
SAVE_TIMEOUT_S = 60.0
FLAPS = 4
FLAP_S = 0.7
SLOW_MS, SLOW_LOSS_PERCENT = 40.0, 1.0
SPARE_BYTES = 64 << 20
"""What a small disk has more than one run needs: then it is filled."""


class NotTried(KitError):
    """A fault that could not be brought about."""


@dataclass(frozen=True)
class Struck:
    """A fault that has been brought about."""

    where: str
    """The node or nodes."""
    what: str
    """For people: what was done to them."""
    at: float
    """When, by this machine's clock."""


class Site(Protocol):
    """The run that a fault strikes, and what can be done to it."""

    lab: Lab | None
    """The lab whose hosts the nodes are."""

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes that train now, in the inventory's order."""

    @property
    def host(self) -> str:
        """The one that keeps the rendezvous."""

    @property
    def rank0(self) -> str:
        """The one with rank 0."""

    def inject(self, node: str, target: str, number: int, **how: Any) -> float:
        """Signal what runs on a node (see `inject` in deploy/remote.py): when that was; NotTried if nobody got it."""

    def lab_name(self, node: str) -> str:
        """What the lab calls a node."""

    def run_folder(self, node: str) -> str:
        """Where the runs' folders are on a node."""

    def size_bytes(self, node: str) -> int:
        """How large a run's folder becomes there."""

    def kill_kit(self) -> None:
        """SIGKILL to the `kit up` of this run."""

    def start_kit(self) -> None:
        """Another `kit up` for this run."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to break a job."""

    name: str
    text: str
    """One sentence for `--help`."""
    strike: Callable[[Site], Struck]
    back: Callable[[Site], str] | None = None
    """Takes it back, `BACK_AFTER_S` after it struck: what it says then."""
    prepare: Callable[[Site], None] | None = None
    """Before the run is started."""
    needs_lab: str = ""
    """Why only a lab's hosts can be treated so."""
    min_nodes: int = 1
    back_after_s: float = BACK_AFTER_S


# --- where --------------------------------------------------------------------------------------------------


def bystander(site: Site, but: Sequence[str] = ()) -> str:
    """The last node that neither keeps the rendezvous nor has rank 0; a node that is left if there is none."""
    left = [node for node in site.nodes if node not in but]
    free = [node for node in left if node not in (site.host, site.rank0)]
    rest = [node for node in left if node != site.host]
    return (free or rest or left or [site.host])[-1]


# --- processes ----------------------------------------------------------------------------------------------


def _signals(
    target: str,
    number: signal.Signals,
    what: str,
    node: Callable[[Site], str] = bystander,
    **how: Any,
) -> Callable[[Site], Struck]:
    def strike(site: Site) -> Struck:
        where = node(site)
        return Struck(where, what, site.inject(where, target, int(number), **how))

    return strike


def _kill_supervisor(site: Site) -> Struck:
    at = time.time()
    site.kill_kit()
    return Struck("here", "SIGKILL to kit up", at)


def _supervise_again(site: Site) -> str:
    site.start_kit()
    return "another kit up takes over"


# --- hosts of a lab -----------------------------------------------------------------------------------------


def lab_of(site: Site) -> Lab:
    """The lab, of faults that need one."""
    assert site.lab is not None
    return site.lab


def _power_off(site: Site, nodes: Sequence[str], what: str = "its power is gone") -> Struck:
    lab = lab_of(site)
    at = time.time()
    for node in nodes:
        lab.cut(site.lab_name(node))  # first: a host without power resets no connection
    for node in nodes:
        lab.crash(site.lab_name(node))
    return Struck(", ".join(nodes), what, at)


def make_whole(lab: Lab, runs_folder: str = "") -> list[str]:
    """Revive and mend every host of a lab, and take our small disks away: the hosts that needed it."""
    mended = []
    for host in lab.hosts:
        if runs_folder and lab.is_alive(host):
            while lab.run(host, ["mountpoint", "-q", runs_folder]).returncode == 0:
                if lab.run(host, ["umount", "--lazy", runs_folder], capture_output=True).returncode != 0:
                    break
        if lab.status(host) != "up":
            lab.mend(host)
            lab.revive(host)
            mended.append(host)
    return mended


def _power_on(site: Site) -> str:
    mended = make_whole(lab_of(site))
    return f"power is back on {', '.join(mended)}"


def _cut(site: Site, node: str) -> Struck:
    at = time.time()
    lab_of(site).cut(site.lab_name(node))
    return Struck(node, "its cable is out", at)


def _mend(site: Site) -> str:
    mended = make_whole(lab_of(site))
    return f"the link of {', '.join(mended)} is whole again"


def _slow(site: Site) -> Struck:
    node, at = bystander(site), time.time()
    lab_of(site).slow(site.lab_name(node), delay_ms=SLOW_MS, loss_percent=SLOW_LOSS_PERCENT)
    return Struck(node, f"{2 * SLOW_MS:.0f} ms more per round trip, {SLOW_LOSS_PERCENT:.0f} % loss", at)


def _flap(site: Site) -> Struck:
    node, at = bystander(site), time.time()
    name = site.lab_name(node)
    for number in range(FLAPS):
        if number:
            time.sleep(FLAP_S)
        lab_of(site).cut(name)
        time.sleep(FLAP_S)
        lab_of(site).mend(name)
    return Struck(node, f"its cable was out {FLAPS} times for {FLAP_S:g} s", at)


def _two(site: Site) -> Struck:
    first = bystander(site)
    return _power_off(site, [first, bystander(site, but=[first])], "their power is gone")


def _small_disk(site: Site) -> None:
    """Give a host a small disk for its runs, in its own mount namespace, so that nobody else's is filled."""
    node = site.nodes[-1]
    folder, size = site.run_folder(node), 2 * site.size_bytes(node) + SPARE_BYTES
    for argv in (
        ["mkdir", "-p", folder],
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", folder],
    ):
        done = lab_of(site).run(site.lab_name(node), argv, capture_output=True, text=True)
        if done.returncode != 0:
            raise NotTried(f"{node}: no small disk: {done.stderr.strip()}")


def _fill_disk(site: Site) -> Struck:
    node, at = site.nodes[-1], time.time()
    script = 'mountpoint -q "$1" && cat /dev/zero >"$1/.drill-fills-this"; test -s "$1/.drill-fills-this"'
    done = lab_of(site).run(
        site.lab_name(node), ["sh", "-c", script, "sh", site.run_folder(node)], capture_output=True
    )
    if done.returncode != 0:
        raise NotTried(f"{node}: its small disk is not there any more")
    return Struck(node, "no byte is free on the disk of its runs", at)


def _empty_disk(site: Site) -> str:
    node = site.nodes[-1]
    lab_of(site).run(site.lab_name(node), ["rm", "-f", f"{site.run_folder(node)}/.drill-fills-this"])
    return f"there is room on {node} again"


_HOSTS = "it takes down or cuts off a host, which kit can do, and undo, only on a lab"

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="worker",
            text="one rank's process is killed, as by the out-of-memory killer",
            strike=_signals("worker", signal.SIGKILL, "SIGKILL to a rank's process"),
        ),
        Fault(
            name="rank0",
            text="the same, of rank 0",
            strike=_signals(
                "worker", signal.SIGKILL, "SIGKILL to rank 0's process", lambda site: site.rank0, rank=0
            ),
        ),
        Fault(
            name="mid-save",
            text="a node's ranks are killed while a snapshot is being written there",
            strike=_signals(
                "workers", signal.SIGKILL, "SIGKILL to its ranks, in the middle of a save",
                saving_s=SAVE_TIMEOUT_S,
            ),
        ),
        Fault(
            name="hang",
            text="one rank stops (SIGSTOP) and does not end: nothing crashes, nothing goes on",
            strike=_signals("worker", signal.SIGSTOP, "SIGSTOP to a rank's process"),
        ),
        Fault(
            name="agent",
            text="kit's agent is killed on a node",
            strike=_signals("agent", signal.SIGKILL, "SIGKILL to its agent"),
        ),
        Fault(
            name="node",
            text="all that kit runs on a node is killed: its agent and its ranks",
            strike=_signals("node", signal.SIGKILL, "SIGKILL to its agent and ranks"),
        ),
        Fault(
            name="preempt",
            text="a node's agent is told to end (SIGTERM), as when its host shuts down",
            strike=_signals("agent", signal.SIGTERM, "SIGTERM to its agent"),
        ),
        Fault(
            name="rendezvous",
            text="the agent that keeps the rendezvous is killed: the nodes cannot meet without another",
            strike=_signals("agent", signal.SIGKILL, "SIGKILL to its agent", lambda site: site.host),
        ),
        Fault(
            name="control",
            text="the supervisor (kit up, here) is killed; later another kit up takes over",
            strike=_kill_supervisor,
            back=_supervise_again,
            back_after_s=3.0,
        ),
        Fault(
            name="disk-full",
            text="a node's disk is full for a while: nothing can be saved there",
            prepare=_small_disk,
            strike=_fill_disk,
            back=_empty_disk,
            needs_lab="kit never fills a disk of yours; a lab's host is given a small one for it",
            min_nodes=2,
        ),
        Fault(
            name="power",
            text="a host loses its power, and gets it back",
            strike=lambda site: _power_off(site, [bystander(site)]),
            back=_power_on,
            needs_lab=_HOSTS,
            min_nodes=2,
        ),
        Fault(
            name="rendezvous-power",
            text="the same, of the host that keeps the rendezvous",
            strike=lambda site: _power_off(site, [site.host]),
            back=_power_on,
            needs_lab=_HOSTS,
            min_nodes=2,
        ),
        Fault(
            name="cut",
            text="a host's cable is out for a while: silence, and no error",
            strike=lambda site: _cut(site, bystander(site)),
            back=_mend,
            needs_lab=_HOSTS,
            min_nodes=2,
        ),
        Fault(
            name="rendezvous-cut",
            text="the same, of the host that keeps the rendezvous",
            strike=lambda site: _cut(site, site.host),
            back=_mend,
            needs_lab=_HOSTS,
            min_nodes=2,
        ),
        Fault(
            name="slow",
            text="a host's link becomes slow and loses packets: nothing should stop",
            strike=_slow,
            back=_mend,
            needs_lab="it changes a host's link, which kit can do, and undo, only on a lab",
            min_nodes=2,
        ),
        Fault(
            name="flap",
            text="a host's cable is out again and again, each time for less than a second",
            strike=_flap,
            needs_lab=_HOSTS,
            min_nodes=2,
        ),
        Fault(
            name="two-at-once",
            text="two hosts lose their power at the same moment",
            strike=_two,
            back=_power_on,
            needs_lab=_HOSTS,
            min_nodes=3,
        ),
        Fault(
            name="all",
            text="a power cut: every host goes down at once, and comes back",
            strike=lambda site: _power_off(site, list(site.nodes), "their power is gone"),
            back=_power_on,
            needs_lab=_HOSTS,
        ),
    )
}  # fmt: skip
"""In the order in which they are tried."""


def why_not(fault: Fault, *, num_nodes: int, lab: Lab | None) -> str:
    """Why a fault cannot be tried on an inventory; "" if it can."""
    if fault.needs_lab and lab is None:
        return fault.needs_lab
    if num_nodes < fault.min_nodes:
        return f"it needs {fault.min_nodes} nodes, and there {'is' if num_nodes == 1 else 'are'} {num_nodes}"
    return ""
