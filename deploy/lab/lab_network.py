"""The lab's network: a switch, a cable to each host and one to this machine, and faults of these cables.

The switch is a bridge in a network namespace of its own. Neither this machine's firewall (Docker's may drop bridged
frames) nor its routes affect it, and the switch disappears with its namespace.
"""

import ipaddress
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodekit.deploy.lab import lab_process
from nodekit.deploy.lab.lab_disk import environment
from nodekit.deploy.lab.lab_process import ProcessRecord
from nodekit.inventory.errors import HostError, KitError

BENCHMARK_RANGE = ipaddress.IPv4Network("198.18.0.0/15")
"""Reserved for benchmarks of networks (RFC 2544), so no real network uses it."""
FIRST_HOST = 10
"""node1 has the address 198.18.K.11: the last digits are the host's number."""
INTERFACES = ("eth0", "ens5", "enp3s0f1", "ib0", "eno1", "bond0", "enp129s0np0", "hsn0")
LINK_DEADLINE_S = 10
"""Seconds; the kernel may take 1 s to notice that a cable is plugged in again."""
NOWHERE = "02:00:00:00:00:00"
"""An unused hardware address."""
SHARE_OF_NEIGHBOURS = 0.25
"""A lab's share of the kernel's neighbour table, which all namespaces of the machine share."""


@dataclass(frozen=True, slots=True)
class LabHost:
    """One host of a lab, as the network knows it."""

    name: str
    address: str
    interface: str
    """Name of its network interface; different on every host."""
    port: str
    """Name of the interface at the switch's end of its cable."""


def hardware_address(host: LabHost) -> str:
    """Return a host's hardware address: locally administered, derived from its IP address."""
    return ":".join(f"{byte:02x}" for byte in (2, 0, *ipaddress.IPv4Address(host.address).packed))


def neighbours_fit(num_hosts: int, limit: Path = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")) -> bool:
    """Whether a lab of this size fits into the kernel's neighbour table.

    Args:
        num_hosts: number of hosts; each needs an entry for every other host, and for this machine.
        limit: the file with the maximal number of entries.
    """
    try:
        room = int(limit.read_text())
    except (OSError, ValueError):  # in a container, which may not see the kernel's setting
        room = 1024  # the kernel's default
    return num_hosts * (num_hosts + 1) <= room * SHARE_OF_NEIGHBOURS


def script_argv(name: str) -> list[str]:
    """Return the command that runs a script in this folder, without site-packages, to start in 15 ms."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name(name))]


def call(argv: Sequence[str], *, doing: str, cwd: Path, stdin: str = "") -> str:
    """Run a program on this machine; return its output, or raise KitError with its error message."""
    answer = subprocess.run(
        argv, input=stdin, capture_output=True, text=True, timeout=30, cwd=cwd, env=environment()
    )
    if answer.returncode != 0:
        said = answer.stderr.strip() or f"{argv[0]} exited with {answer.returncode}"
        raise KitError(f"the lab could not {doing}: {said}")
    return answer.stdout


def plan_hosts(n: int, network: str) -> list[LabHost]:
    """Return the hosts of a lab in this network: names, addresses, and interfaces with different names."""
    first = ipaddress.IPv4Network(network).network_address
    return [
        LabHost(
            name=f"node{i}",
            address=str(first + FIRST_HOST + i),
            interface=INTERFACES[i - 1] if i <= len(INTERFACES) else f"enp{i}s0",
            port=f"port{i}",
        )
        for i in range(1, n + 1)
    ]


def control_address(network: str) -> str:
    """Return this machine's address in the lab."""
    return str(ipaddress.IPv4Network(network).network_address + 1)


class LabNetwork:
    """The network of the lab in a folder. Paths for ``ip`` are relative: it cannot quote every name."""

    def __init__(
        self, folder: Path, network: str, control_interface: str, hosts: Iterable[LabHost] = ()
    ) -> None:
        """Describe an existing network; change nothing.

        Args:
            folder: the lab's.
            network: the subnet, such as ``198.18.K.0/24``.
            control_interface: this machine's end of its cable to the switch.
            hosts: all hosts of the lab.
        """
        self.folder = folder
        self.network = network
        self.control_interface = control_interface
        hosts = list(hosts)
        # The entries that many hosts learn would overflow the table of the whole machine. Permanent entries do not
        # count, and need no change outside of the lab.
        self._known = [] if neighbours_fit(len(hosts)) else hosts

    @classmethod
    def make(cls, folder: Path) -> "LabNetwork":
        """Create the switch and connect this machine to it, on the first free subnet of `BENCHMARK_RANGE`."""
        _make_namespace(folder / "switch")
        taken = {
            route.get("dst")
            for route in json.loads(
                call(["ip", "-4", "-json", "route"], doing="see the routes", cwd=folder) or "[]"
            )
        }
        for k, subnet in enumerate(BENCHMARK_RANGE.subnets(new_prefix=24)):
            # Creating the link claims the subnet: of two labs made at the same time, only one succeeds.
            lab = cls(folder, str(subnet), f"lab{k}")
            if str(subnet) in taken or Path("/sys/class/net", lab.control_interface).exists():
                continue
            try:
                lab._on_machine(
                    f"link add name {lab.control_interface} type veth peer name control netns ./switch"
                )
            except KitError:
                if Path("/sys/class/net", lab.control_interface).exists():  # another lab has claimed it
                    continue
                raise
            lab._on_machine(
                f"address add {control_address(lab.network)}/24 dev {lab.control_interface}",
                f"link set {lab.control_interface} up",
            )
            lab._on_switch(
                "link add name bridge type bridge", "link set bridge up", "link set control master bridge up"
            )
            return lab
        raise KitError(
            f"every network in {BENCHMARK_RANGE} is in use", cure="`kit lab down` those that are not needed"
        )

    def plug_in(self, host: LabHost) -> None:
        """Create a host's network namespace, with a cable to the switch."""
        _make_namespace(self.folder / "hosts" / host.name / "net")
        self._on_switch(
            f"link add name {host.port} type veth peer name {host.interface} "
            f"address {hardware_address(host)} netns ./hosts/{host.name}/net",
            f"link set {host.port} master bridge up",
        )
        self._on_host(
            host,
            "link set lo up",
            f"address add {host.address}/24 dev {host.interface}",
            f"link set {host.interface} up",
            *(_knows(host, other) for other in self._known if other != host),
        )

    def cut(self, host: LabHost) -> None:
        """Pull a host's cable out of the switch."""
        self._on_switch(f"link set {host.port} down")

    def cut_control(self, host: LabHost) -> None:
        """Drop every packet between this machine and a host, in both directions, without an error to either."""
        lost = f"lladdr {NOWHERE} nud permanent dev"
        self._on_machine(f"neighbour replace {host.address} {lost} {self.control_interface}")
        self._on_host(host, f"neighbour replace {control_address(self.network)} {lost} {host.interface}")

    def slow(self, host: LabHost, *, delay_ms: float, rate_mbit: float, loss_percent: float) -> None:
        """Insert lab_wire.py between a host's cable and the switch; 0: no limit."""
        self._take_out_wire(host)
        near, far = f"{host.port}near", f"{host.port}far"
        settings = [str(delay_ms / 1000), str(rate_mbit), str(loss_percent / 100)]
        self._on_switch(f"link add name {near} type veth peer name {far}", f"link set {near} up")
        lab_process.start(
            ["nsenter", "--net=switch", *script_argv("lab_wire.py"), host.port, near, *settings],
            record=self._wire_record(host),
            log=self.folder / "hosts" / host.name / "console.log",
            cwd=self.folder,
            env=environment(),
        )
        self._on_switch(f"link set {host.port} nomaster", f"link set {far} master bridge up")

    def mend(self, host: LabHost) -> None:
        """Undo cut, cut_control and slow; return when the link is up again."""
        self._take_out_wire(host)
        self._on_switch(f"link set {host.port} master bridge up")
        deadline = time.monotonic() + LINK_DEADLINE_S
        while json.loads(self._on_host(host, f"link show dev {host.interface}"))[0]["operstate"] != "UP":
            if time.monotonic() > deadline:
                raise HostError(host.name, f"its link is still down after {LINK_DEADLINE_S} s")
            time.sleep(0.02)
        # Remove cut_control's entries, and those of unanswered ARP requests, which would be repeated only after 1 s.
        forget = f"neighbour flush to {host.address} nud all"
        self._on_machine(f"{forget} dev {self.control_interface}")
        for namespace in self.folder.glob("hosts/*/net"):
            self._ip(["nsenter", f"--net=hosts/{namespace.parent.name}/net"], forget)
        self._on_host(host, f"neighbour flush dev {host.interface} nud all")
        others = [other for other in self._known if other != host]
        if others:
            self._on_host(host, *(_knows(host, other) for other in others))
        for other in others:
            self._on_host(other, _knows(other, host))

    def status(self, host: LabHost) -> list[str]:
        """Return the faults of a host's link: any of ``cut``, ``slow``, ``control cut``."""
        port = json.loads(self._on_switch(f"link show dev {host.port}"))
        neighbours = json.loads(
            self._on_machine(f"neighbour show to {host.address} dev {self.control_interface} nud permanent")
        )
        wire = ProcessRecord.read(self._wire_record(host))
        slow = wire is not None and wire.is_alive
        found = {
            "cut": "UP" not in port[0]["flags"] or not (slow or "master" in port[0]),
            "slow": slow,
            "control cut": bool(neighbours),
        }
        return [word for word, is_so in found.items() if is_so]

    def _take_out_wire(self, host: LabHost) -> None:
        wire = ProcessRecord.read(self._wire_record(host))
        if wire is None:
            return
        lab_process.kill(wire)
        self._on_switch(f"link delete {host.port}near")
        self._wire_record(host).unlink()

    def _wire_record(self, host: LabHost) -> Path:
        return self.folder / "hosts" / host.name / "wire.json"

    def _on_machine(self, *lines: str) -> str:
        return self._ip([], *lines)

    def _on_switch(self, *lines: str) -> str:
        return self._ip(["nsenter", "--net=switch"], *lines)

    def _on_host(self, host: LabHost, *lines: str) -> str:
        return self._ip(["nsenter", f"--net=hosts/{host.name}/net"], *lines)

    def _ip(self, enter: list[str], *lines: str) -> str:
        return call(
            [*enter, "ip", "-json", "-batch", "-"],
            doing=f"set up its network ({lines[0]})",
            cwd=self.folder,
            stdin="\n".join(lines) + "\n",
        )


def _knows(host: LabHost, other: LabHost) -> str:
    """Return the command that adds a permanent neighbour entry of another host."""
    return f"neighbour replace {other.address} lladdr {hardware_address(other)} nud permanent dev {host.interface}"


def unmount(folder: Path) -> None:
    """Unmount the network namespaces, which removes their links, and disks in memory."""
    on_switch = ["nsenter", "--net=switch"]
    mounts = [*folder.glob("hosts/*/net"), folder / "switch", folder / "hosts"]
    if os.path.ismount(folder / "switch"):
        # A namespace may outlive its last mount for a while; remove this machine's end of the cable at once.
        links = json.loads(call([*on_switch, "ip", "-json", "link"], doing="see its switch", cwd=folder))
        if any(link["ifname"] == "control" for link in links):
            call([*on_switch, "ip", "link", "delete", "control"], doing="unplug this machine", cwd=folder)
    if mounted := [f"./{path.relative_to(folder)}" for path in mounts if os.path.ismount(path)]:
        call(["umount", "--lazy", "--", *mounted], doing="unmount what it had made", cwd=folder)


def _make_namespace(path: Path) -> None:
    """Create a network namespace that exists as long as it is mounted at this path."""
    path.touch()
    call(
        ["unshare", f"--net={path.name}", "true"],
        doing="make a network namespace (is this a container without --privileged?)",
        cwd=path.parent,
    )
