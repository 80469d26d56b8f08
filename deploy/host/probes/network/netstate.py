"""Read the state of a host's network: ports in use, RDMA devices, neighbour tables, its name, its firewall."""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import pwd
import shutil
import socket
import struct
import subprocess
import threading
import time
from typing import Dict, List, NamedTuple, Optional, Tuple, TypedDict

from nodekit.deploy.host import files
from nodekit.deploy.host.probes.network import nics

_FIREWALL_S = 3.0
_LISTEN = "0A"  # the state LISTEN in /proc/net/tcp
# From linux/neighbour.h: the request for the neighbour tables, and the attributes of an answer.
_GET_TABLES = 66
_TABLE_NAME, _TABLE_MOST, _TABLE_CONFIG, _TABLE_STATS = 1, 4, 5, 7


class Holder(TypedDict):
    """The process that has a port, as far as this user may see it."""

    user: str
    pid: Optional[int]
    command: str
    listens: bool


class Taken(Holder):
    """A port that is not available, and the process that has it."""

    problem: str


class RdmaPort(TypedDict):
    """A port of an RDMA device."""

    device: str
    port: int
    state: str
    """Such as "ACTIVE"."""
    physical: str
    link_layer: str
    rate: str
    interfaces: List[str]
    """The kernel's network interfaces on the device."""


class NeighbourTable(TypedDict):
    """A neighbour table (ARP or NDP) of the kernel; all containers of a machine share it."""

    entries: int
    most: int
    """The limit of entries, gc_thresh3."""
    overflows: int
    """Number of overflows since the machine's boot."""
    is_ours: bool
    """Whether its limits can be set here; False in a container: set them on the machine."""


class OwnName(TypedDict):
    """The answers of this host's resolver."""

    name: str
    """The host's own name."""
    addresses: Optional[List[str]]
    """The addresses of this name; None: the resolver did not answer in time."""
    names_peers: bool
    """Whether a reverse lookup of another host's address ends in time, with a name or without."""
    neighbours: Dict[str, NeighbourTable]
    """The neighbour tables at this moment."""


class Firewall(TypedDict, total=False):
    """The packet filter of a host."""

    tool: str
    """"firewalld", "ufw", "nftables", "iptables" or ""."""
    rules: str
    """The rules of nft, with handles; "" if this user may not read them."""
    may_see: bool


def port_range() -> Tuple[int, int]:
    """Return the first and last ephemeral port of the kernel; gloo and NCCL use ports of this range."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
        return low, high
    except (OSError, ValueError):
        return 32768, 60999


def taken(port: int) -> Optional[Taken]:
    """Return None if a rendezvous could listen on a port, on all addresses as torch does; else who holds the port."""
    try:
        _bind_all(socket.AF_INET6, port)
        return None
    except OSError as error:
        problem = error
    if problem.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):  # a host without IPv6
        try:
            _bind_all(socket.AF_INET, port)
            return None
        except OSError as error:
            problem = error
    return {"problem": problem.strerror or str(problem), **holder(port)}


def _bind_all(family: int, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        trial.bind(("", port))


class Socket(NamedTuple):
    """A TCP socket in the kernel's list."""

    port: int
    listens: bool
    uid: int
    inode: str


def sockets() -> List[Socket]:
    """Return all TCP sockets of this host."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in files.read_text(table).splitlines()[1:]:
            row = line.split()
            found.append(Socket(int(row[1].rpartition(":")[2], 16), row[3] == _LISTEN, int(row[7]), row[9]))
    return found


def holder(port: int) -> Holder:
    """Return which process has a TCP port of this host."""
    inodes: Dict[str, int] = {}
    listening = False
    for each in sockets():
        if each.port == port and each.inode != "0":
            if each.listens and not listening:
                listening, inodes = True, {}
            if listening == each.listens:
                inodes[each.inode] = each.uid
    found: Holder = {"user": "", "pid": None, "command": "", "listens": listening}
    for uid in inodes.values():
        try:
            found["user"] = pwd.getpwuid(uid).pw_name
        except KeyError:
            found["user"] = str(uid)
    wanted = {"socket:[%s]" % inode for inode in inodes}
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(link) not in wanted:
                continue
            pid = int(link.split("/")[2])
            with open("/proc/%d/cmdline" % pid, "rb") as file:
                words = file.read().split(b"\0")[:-1]
        except OSError:  # the process has ended, or is another user's
            continue
        found["pid"] = pid
        found["command"] = " ".join(word.decode("utf-8", "replace") for word in words)[:200]
        break
    return found


def rdma_ports(sys: str = "/sys") -> List[RdmaPort]:
    """Return the ports of this host's RDMA devices."""
    found: List[RdmaPort] = []
    for folder in sorted(glob.glob(os.path.join(glob.escape(sys), "class/infiniband/*/ports/*"))):
        device = os.path.dirname(os.path.dirname(folder))
        found.append(
            {
                "device": os.path.basename(device),
                "port": int(os.path.basename(folder)),
                "state": _line(folder, "state").rpartition(":")[2].strip() or "unknown",
                "physical": _line(folder, "phys_state").rpartition(":")[2].strip() or "unknown",
                "link_layer": _line(folder, "link_layer") or "InfiniBand",
                "rate": _line(folder, "rate"),
                "interfaces": sorted(map(os.path.basename, glob.glob(glob.escape(device) + "/device/net/*"))),
            }
        )
    return found


def _line(folder: str, name: str) -> str:
    return files.read_text(os.path.join(folder, name)).partition("\n")[0].strip()


def neighbours() -> Dict[str, NeighbourTable]:
    """Return the kernel's neighbour tables, ``arp_cache`` and ``ndisc_cache``; {} if they cannot be read.

    The kernel also logs overflows, but not every user may read its log; all users may read the count.
    """
    found: Dict[str, NeighbourTable] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
            kernel.settimeout(1)
            for body in nics.dump(kernel, _GET_TABLES, 4):
                found.update(_table(nics.attributes_in(body[4:])))
    except (OSError, struct.error):
        return {}
    return found


def _table(parts: Dict[int, bytes]) -> Dict[str, NeighbourTable]:
    """Return the table in a netlink message's attributes; {} for a message with the settings of one interface."""
    if not {_TABLE_NAME, _TABLE_MOST, _TABLE_CONFIG, _TABLE_STATS} <= set(parts):
        return {}
    name = parts[_TABLE_NAME].rstrip(b"\0").decode("ascii", "replace")
    version = "ipv6" if name == "ndisc_cache" else "ipv4"
    return {
        name: {
            "entries": struct.unpack_from("=I", parts[_TABLE_CONFIG], 4)[0],
            "most": struct.unpack("=I", parts[_TABLE_MOST])[0],
            "overflows": struct.unpack_from("=Q", parts[_TABLE_STATS], 80)[0],
            "is_ours": os.path.exists("/proc/sys/net/%s/neigh/default/gc_thresh3" % version),
        }
    }


def own_name(limit_s: float, peer: str) -> OwnName:
    """Look up this host's name, and the name of `peer`, another host's address; give up after `limit_s`."""
    name = socket.gethostname()
    found: OwnName = {
        "name": name, "addresses": None, "names_peers": False, "neighbours": neighbours(),
    }  # fmt: skip

    def resolve() -> None:
        try:
            answers = socket.getaddrinfo(name, None, 0, socket.SOCK_STREAM)
            found["addresses"] = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        except OSError:
            found["addresses"] = []

    def look_up() -> None:
        # torch uses IPv6 sockets, and so looks up an IPv4 address in its IPv6-mapped form, as /etc/hosts must list it.
        asked = peer if ":" in peer else "::ffff:" + peer
        try:
            (found_as,) = socket.getaddrinfo(
                asked, None, socket.AF_INET6, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
            packed = socket.inet_pton(socket.AF_INET6, asked.partition("%")[0])
            address = struct.pack("=HHI16sI", socket.AF_INET6, 0, 0, packed, found_as[4][-1])
            # Before Python 3.11.4, socket.getnameinfo keeps the GIL while it waits (CPython issue 104308).
            answer = ctypes.create_string_buffer(1025)  # NI_MAXHOST
            ctypes.CDLL(None).getnameinfo(address, len(address), answer, len(answer), None, 0, 0)
        except OSError:
            pass
        found["names_peers"] = True

    threads = [threading.Thread(target=each, daemon=True) for each in (resolve, look_up)]
    until = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0, until - time.monotonic()))
    return found.copy()


def firewall() -> Firewall:
    """Return the packet filter of this host, and its rules."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

    def say(*argv: str) -> str:
        program = shutil.which(argv[0], path=path)
        if program is None:
            return ""
        try:
            done = subprocess.run(
                [program, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_FIREWALL_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""

    rules = say("nft", "--handle", "list", "ruleset")
    tool = "nftables" if " hook " in rules else ""
    tables = "" if tool else say("iptables", "-S") + say("ip6tables", "-S")
    if "DROP" in tables or "REJECT" in tables:
        tool = "iptables"
    if any(
        line.strip().lower() == "enabled=yes" for line in files.read_text("/etc/ufw/ufw.conf").splitlines()
    ):
        tool = "ufw"
    if any(files.read_text(comm).strip() == "firewalld" for comm in glob.iglob("/proc/[0-9]*/comm")):
        tool = "firewalld"
    return {"tool": tool, "rules": rules, "may_see": os.geteuid() == 0}
