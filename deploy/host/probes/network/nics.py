"""List the network interfaces of a host.

The kernel is asked over netlink, which respects network namespaces: /sys shows the interfaces of the namespace in
which it was mounted.
"""

from __future__ import annotations

import array
import fcntl
import glob
import ipaddress
import os
import re
import socket
import struct
from typing import Dict, Iterator, List, Optional, Tuple, TypedDict

_NETLINK_ROUTE = 0
_RTM_GETLINK, _RTM_GETADDR = 18, 22
_NLM_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_IFLA_IFNAME, _IFLA_MTU, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_CARRIER = 3, 4, 10, 18, 33
_IFLA_INFO_KIND = 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFF_UP = 1
_ARPHRD_INFINIBAND, _ARPHRD_LOOPBACK = 32, 772
_SCOPE_LINK = 253
_ANSWER_TIMEOUT_S = 5

_SIOCETHTOOL = 0x8946
_ETHTOOL_GSET = 1
_SPEED_UNKNOWN = (0, 0xFFFF, 0xFFFFFFFF)
# These drivers report a speed of 10 Gb/s, or none, whatever the real one is.
_MADE_UP_SPEED = ("veth", "dummy", "ifb")

# The kernel's name of a virtual interface's driver → the kind here; with any other driver the kind is "virtual".
_KINDS = {
    "bridge": "bridge",
    "openvswitch": "bridge",
    "bond": "bond",
    "team": "bond",
    "vlan": "vlan",
    "ipoib": "infiniband",
}


class Nic(TypedDict):
    """A network interface."""

    name: str
    up: bool
    """Whether the interface is enabled."""
    carrier: bool
    """Whether it is enabled and its cable has a link."""
    kind: str
    """"physical", "infiniband", "bond", "vlan", "bridge", "virtual" or "loopback"."""
    driver: str
    """For an interface that is not physical, the kernel's name of its driver, such as "veth"; else ""."""
    mtu: int
    speed_mbit: Optional[int]
    """None if unknown."""
    master: Optional[str]
    """The bridge or bond of which it is a part."""
    addresses: List[str]
    """With prefix length, such as "10.0.0.1/24", IPv4 first; without link-local IPv6 addresses, which need a zone."""


def nics() -> List[Nic]:
    """Return all interfaces, sorted by name."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as kernel:
        kernel.settimeout(_ANSWER_TIMEOUT_S)
        # The headers are all zeros, which means no filter.
        links = [_link(body) for body in dump(kernel, _RTM_GETLINK, struct.calcsize("=BxHiII"))]
        addresses: Dict[int, List[str]] = {}
        for body in dump(kernel, _RTM_GETADDR, struct.calcsize("=BBBBI")):
            index, address = _address(body)
            if address is not None:
                addresses.setdefault(index, []).append(address)
    names = {index: nic["name"] for index, _, nic in links}
    for index, master, nic in links:
        nic["master"] = names.get(master)
        if nic["driver"] not in _MADE_UP_SPEED:
            nic["speed_mbit"] = _speed_mbit(nic["name"], nic["kind"])
        nic["addresses"] = sorted(addresses.get(index, []), key=lambda address: ":" in address)
    found = sorted((nic for _, _, nic in links), key=lambda nic: nic["name"])
    for nic in found:
        if nic["kind"] == "bridge":  # a bridge has no speed of its own
            speeds = [part["speed_mbit"] or 0 for part in found if part["master"] == nic["name"]]
            nic["speed_mbit"] = max(speeds, default=0) or None
    return found


def dump(kernel: socket.socket, what: int, header_bytes: int) -> Iterator[bytes]:
    """Send a dump request to the kernel, and yield the body of each message of the answer."""
    length = struct.calcsize("=IHHII") + header_bytes
    kernel.send(struct.pack("=IHHII", length, what, _NLM_REQUEST_DUMP, 1, 0) + bytes(header_bytes))
    while True:
        data = kernel.recv(1 << 18)
        while len(data) >= 16:
            size, kind = struct.unpack_from("=IH", data)
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", data, 16)[0]
                raise OSError(code, os.strerror(code))
            yield data[16:size]
            data = data[_aligned(size) :]


def _aligned(size: int) -> int:
    return (size + 3) & ~3


def attributes_in(data: bytes) -> Dict[int, bytes]:
    """Return kind → value for the attributes of a netlink message."""
    found = {}
    while len(data) >= 4:
        size, kind = struct.unpack_from("=HH", data)
        if size < 4:
            break
        found[kind & 0x3FFF] = data[4:size]
        data = data[_aligned(size) :]
    return found


def _link(body: bytes) -> Tuple[int, int, Nic]:
    """Parse the message of an interface: its index, its master's index, and the interface."""
    _, hardware, index, flags, _ = struct.unpack_from("=BxHiII", body)
    attributes = attributes_in(body[16:])
    info = attributes_in(attributes.get(_IFLA_LINKINFO, b""))
    driver = info.get(_IFLA_INFO_KIND, b"").split(b"\0")[0].decode("ascii", "replace")
    if hardware == _ARPHRD_LOOPBACK:
        kind = "loopback"
    elif hardware == _ARPHRD_INFINIBAND:
        kind = "infiniband"
    else:
        kind = _KINDS.get(driver, "virtual") if driver else "physical"
    nic: Nic = {
        "name": os.fsdecode(attributes[_IFLA_IFNAME].split(b"\0")[0]),
        "up": bool(flags & _IFF_UP),
        "carrier": bool(flags & _IFF_UP) and attributes.get(_IFLA_CARRIER, b"\0")[:1] == b"\1",
        "kind": kind,
        "driver": driver,
        "mtu": _number(attributes.get(_IFLA_MTU)),
        "speed_mbit": None,
        "master": None,
        "addresses": [],
    }
    return index, _number(attributes.get(_IFLA_MASTER)), nic


def _number(data: Optional[bytes]) -> int:
    return int(struct.unpack("=I", data)[0]) if data else 0


def _address(body: bytes) -> Tuple[int, Optional[str]]:
    """Parse the message of an address: its interface's index, and the address; None if it is link-local."""
    family, prefix, _, scope, index = struct.unpack_from("=BBBBI", body)
    attributes = attributes_in(body[8:])
    # A tunnel's ADDRESS is that of its other end.
    packed = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))
    if family not in (socket.AF_INET, socket.AF_INET6) or packed is None:
        return index, None
    if family == socket.AF_INET6 and scope == _SCOPE_LINK:
        return index, None
    return index, "%s/%d" % (ipaddress.ip_address(packed), prefix)


def _speed_mbit(name: str, kind: str) -> Optional[int]:
    """Return the speed negotiated with the other end of the cable; None if the driver does not report it."""
    data = array.array("B", struct.pack("=I40x", _ETHTOOL_GSET))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(
                probe.fileno(), _SIOCETHTOOL, struct.pack("16sP16x", os.fsencode(name), data.buffer_info()[0])
            )
        except OSError:  # the interface is down, or its driver does not report a speed
            return _infiniband_mbit(name) if kind == "infiniband" else None
    low, high = struct.unpack_from("=H", data, 12)[0], struct.unpack_from("=H", data, 28)[0]
    speed = high << 16 | low
    if speed in _SPEED_UNKNOWN:
        return _infiniband_mbit(name) if kind == "infiniband" else None
    return int(speed)


def _infiniband_mbit(name: str) -> Optional[int]:
    """Return the rate of the port of an IPoIB interface from sysfs, which has ``200 Gb/sec (4X HDR)``."""
    try:
        with open("/sys/class/net/%s/dev_port" % name) as file:
            port = int(file.read()) + 1
    except (OSError, ValueError):
        port = 1
    pattern = "/sys/class/net/%s/device/infiniband/*/ports/%d/rate" % (glob.escape(name), port)
    for path in glob.glob(pattern):
        try:
            with open(path) as file:
                match = re.match(r"([\d.]+) Gb/sec", file.read())
        except OSError:
            continue
        if match:
            return int(float(match.group(1)) * 1000)
    return None
