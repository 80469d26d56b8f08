"""The faults of `kit drill`: how each is injected, into which node, and how it is undone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nodekit.deploy.drill.drill_lab import SAVE_TIMEOUT_S, Lab, NotTried

if TYPE_CHECKING:
    from nodekit.deploy.drill.drill_site import Site

BACK_AFTER_S = 6.0
"""Seconds after which a lost host is restored; long enough for its loss to be detected."""
FLAPS = 4
FLAP_S = 0.7
SLOW_MS, SLOW_LOSS_PERCENT = 40.0, 1.0
SPARE_BYTES = 64 << 20
"""Free bytes of a small disk beyond the size of one run, before it is filled."""


@dataclass(frozen=True)
class Struck:
    """A fault that has been injected."""

    where: str
    """Name of the node, or names joined by commas."""
    what: str
    """Description of the fault, for people."""
    at: float
    """When it was injected, by this machine's clock."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to break a job."""

    name: str
    text: str
    """One sentence for `--help`."""
    strike: Callable[[Site], Struck]
    back: Callable[[Site], str] | None = None
    """Undo the fault, `back_after_s` after its injection; returns what to print."""
    prepare: Callable[[Site], None] | None = None
    """Called before the run is started."""
    needs_lab: str = ""
    """Why the fault is possible only on hosts of a lab; empty if it is possible anywhere."""
    min_nodes: int = 1
    back_after_s: float = BACK_AFTER_S


# --- where --------------------------------------------------------------------------------------------------


def ordinary_node(site: Site, but: Sequence[str] = ()) -> str:
    """Return the last node that neither hosts the rendezvous nor has rank 0; if there is none, any other node."""
    left = [node for node in site.nodes if node not in but]
    free = [node for node in left if node not in (site.host, site.rank0)]
    rest = [node for node in left if node != site.host]
    return (free or rest or left or [site.host])[-1]


# --- processes ----------------------------------------------------------------------------------------------


def _signal(
    name: str,
    text: str,
    number: signal.Signals,
    target: str,
    to_what: str,
    node: Callable[[Site], str] = ordinary_node,
    **how: Any,
) -> Fault:
    """Return a fault that signals a node's processes; `how`: see `inject` in deploy/host/node/agents.py."""

    def strike(site: Site) -> Struck:
        where = node(site)
        return Struck(where, f"{number.name} to {to_what}", site.inject(where, target, int(number), **how))

    return Fault(name=name, text=text, strike=strike)


def _kill_supervisor(site: Site) -> Struck:
    at = time.time()
    site.kill_kit()
    return Struck("here", "SIGKILL to kit up", at)


def _supervise_again(site: Site) -> str:
    site.start_kit()
    return "another kit up takes over"


# --- hosts of a lab -----------------------------------------------------------------------------------------


def _lab(site: Site) -> Lab:
    """Return the lab, for faults that need one."""
    assert site.lab is not None
    return site.lab


def _power_off(site: Site, nodes: Sequence[str], what: str = "its power is gone") -> Struck:
    lab = _lab(site)
    at = time.time()
    for node in nodes:
        lab.cut(site.lab_name(node))  # cut first: a host that loses power does not reset its connections
    for node in nodes:
        lab.crash(site.lab_name(node))
    return Struck(", ".join(nodes), what, at)


def make_whole(lab: Lab, *, small_disks_at: str = "") -> list[str]:
    """Restore every host of a lab, and unmount small disks; return the hosts that were not up."""
    mended = []
    for host in lab.hosts:
        if small_disks_at and lab.is_alive(host):
            while lab.run(host, ["mountpoint", "-q", small_disks_at]).returncode == 0:
                lab.run(host, ["umount", "--lazy", small_disks_at], check=True)
        if lab.status(host) != "up":
            lab.mend(host)
            lab.revive(host)
            mended.append(host)
    return mended


def _cut(site: Site, node: str) -> Struck:
    at = time.time()
    _lab(site).cut(site.lab_name(node))
    return Struck(node, "its cable is out", at)


def _slow(site: Site) -> Struck:
    node, at = ordinary_node(site), time.time()
    _lab(site).slow(site.lab_name(node), delay_ms=SLOW_MS, loss_percent=SLOW_LOSS_PERCENT)
    return Struck(node, f"{2 * SLOW_MS:.0f} ms more per round trip, {SLOW_LOSS_PERCENT:.0f} % loss", at)


def _flap(site: Site) -> Struck:
    node, at = ordinary_node(site), time.time()
    name = site.lab_name(node)
    for number in range(FLAPS):
        if number:
            time.sleep(FLAP_S)
        _lab(site).cut(name)
        time.sleep(FLAP_S)
        _lab(site).mend(name)
    return Struck(node, f"its cable was out {FLAPS} times for {FLAP_S:g} s", at)


def _two(site: Site) -> Struck:
    first = ordinary_node(site)
    return _power_off(site, [first, ordinary_node(site, but=[first])], "their power is gone")


def _small_disk(site: Site) -> None:
    """Mount a small disk for a host's runs, in its own mount namespace, so that no other host's disk is filled."""
    node = site.small_disk_node
    folder, run_bytes = site.runs_of(node)
    for argv in (
        ["mkdir", "-p", folder],
        ["mount", "-t", "tmpfs", "-o", f"size={2 * run_bytes + SPARE_BYTES},mode=700", "none", folder],
    ):
        done = _lab(site).run(site.lab_name(node), argv, capture_output=True, text=True)
        if done.returncode != 0:
            raise NotTried(f"{node}: no small disk: {done.stderr.strip()}")


def _fill_disk(site: Site) -> Struck:
    node, at = site.small_disk_node, time.time()
    script = 'mountpoint -q "$1" && cat /dev/zero >"$1/.drill-fills-this"; test -s "$1/.drill-fills-this"'
    done = _lab(site).run(
        site.lab_name(node), ["sh", "-c", script, "sh", site.runs_of(node)[0]], capture_output=True
    )
    if done.returncode != 0:
        raise NotTried(f"{node}: its small disk is not there any more")
    return Struck(node, "no byte is free on the disk of its runs", at)


def _empty_disk(site: Site) -> str:
    node = site.small_disk_node
    _lab(site).run(site.lab_name(node), ["rm", "-f", f"{site.runs_of(node)[0]}/.drill-fills-this"])
    return f"there is room on {node} again"


_HOSTS = "it takes down or cuts off a host, which kit can do, and undo, only on a lab"


def _on_lab(name: str, text: str, strike: Callable[[Site], Struck], back: str = "", **more: Any) -> Fault:
    """Return a fault of a lab's hosts; undoing it restores all of them, and prints `back` with their names."""

    def mend(site: Site) -> str:
        return back.format(", ".join(make_whole(_lab(site))))

    more = {"needs_lab": _HOSTS, "min_nodes": 2, **more}
    return Fault(name=name, text=text, strike=strike, back=mend if back else None, **more)


_KILL, _STOP, _TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
_POWER = "power is back on {}"
_LINK = "the link of {} is whole again"
_DISK = "kit never fills a disk of yours; a lab's host is given a small one for it"
_SLOW = "it changes a host's link, which kit can do, and undo, only on a lab"

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        _signal(
            "worker", "one rank's process is killed, as when memory runs out", _KILL, "worker", "a rank's process"
        ),
        _signal(
            "rank0", "the same, of rank 0", _KILL, "worker", "rank 0's process", lambda site: site.rank0, rank=0
        ),
        _signal(
            "mid-save", "a node's ranks are killed while they write a snapshot", _KILL, "workers",
            "its ranks, in the middle of a save", saving_s=SAVE_TIMEOUT_S,
        ),
        _signal(
            "hang", "a rank is stopped (SIGSTOP): no crash, and no progress", _STOP, "worker", "a rank's process"
        ),
        _signal("agent", "kit's agent on a node is killed", _KILL, "agent", "its agent"),
        _signal("node", "all that kit runs on a node is killed", _KILL, "node", "its agent and ranks"),
        _signal(
            "preempt", "a node's agent gets SIGTERM, as when its host shuts down", _TERM, "agent", "its agent"
        ),
        _signal(
            "rendezvous", "the agent that keeps the rendezvous is killed", _KILL, "agent", "its agent",
            lambda site: site.host,
        ),
        Fault(
            name="control",
            text="kit up, here, is killed; another one takes over",
            strike=_kill_supervisor,
            back=_supervise_again,
            back_after_s=3.0,
        ),
        Fault(
            name="disk-full",
            text="a node's disk is full for a while",
            prepare=_small_disk,
            strike=_fill_disk,
            back=_empty_disk,
            needs_lab=_DISK,
            min_nodes=2,
        ),
        _on_lab(
            "power", "a host loses its power, and gets it back",
            lambda site: _power_off(site, [ordinary_node(site)]), _POWER,
        ),
        _on_lab(
            "rendezvous-power", "the same, of the host that keeps the rendezvous",
            lambda site: _power_off(site, [site.host]), _POWER,
        ),
        _on_lab(
            "cut", "a host's cable is out for a while: silence, no error",
            lambda site: _cut(site, ordinary_node(site)), _LINK,
        ),
        _on_lab(
            "rendezvous-cut", "the same, of the host that keeps the rendezvous",
            lambda site: _cut(site, site.host), _LINK,
        ),
        _on_lab(
            "slow", "a host's link is slow and loses packets, for a while", _slow, _LINK, needs_lab=_SLOW
        ),
        _on_lab("flap", "a host's cable is out again and again, for moments", _flap),
        _on_lab("two-at-once", "two hosts lose their power at the same moment", _two, _POWER, min_nodes=3),
        _on_lab(
            "all", "a power cut: every host goes down, and comes back",
            lambda site: _power_off(site, list(site.nodes), "their power is gone"), _POWER, min_nodes=1,
        ),
    )
}  # fmt: skip
"""Name → fault, in the order of execution."""


def why_not(fault: Fault, *, num_nodes: int, lab: Lab | None) -> str:
    """Return why a fault cannot be tried on an inventory; "" if it can."""
    if fault.needs_lab and lab is None:
        return fault.needs_lab
    if num_nodes < fault.min_nodes:
        return f"it needs {fault.min_nodes} nodes, and there {'is' if num_nodes == 1 else 'are'} {num_nodes}"
    return ""


def help_text() -> str:
    """Return the list of faults for `kit drill --help`."""
    width = max(map(len, FAULTS))
    anywhere = [fault for fault in FAULTS.values() if not fault.needs_lab]
    on_labs = [fault for fault in FAULTS.values() if fault.needs_lab]
    lines = ["faults:", *(f"  {fault.name.ljust(width)}  {fault.text}" for fault in anywhere)]
    lines += ["and on the hosts of a lab (kit lab), which can be broken and mended:"]
    return "\n".join([*lines, *(f"  {fault.name.ljust(width)}  {fault.text}" for fault in on_labs), ""])
