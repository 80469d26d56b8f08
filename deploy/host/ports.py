"""Listen on a port of a host, reserve one for an agent, or find a free one."""

from __future__ import annotations

import errno
import socket
from typing import Dict

from nodekit.deploy.host import errors

BACKLOG = 1024
held: Dict[int, socket.socket] = {}
"""Port → the listening socket that reserves it until an agent takes it over."""


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family of an IPv4 or IPv6 address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on a port of this address only, by default a free port.

    Raises:
        OSError: the port is in use, or no interface of this host has the address.
    """
    try:
        return socket.create_server((address, port), family=family_of(address), backlog=BACKLOG)
    except socket.gaierror as error:
        raise OSError(errno.EINVAL, "%s is no address to listen on: %s" % (address, error)) from error
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        why = "no interface of %s has the address %s to listen on" % (socket.gethostname(), address)
        raise errors.with_cure(OSError(error.errno, why), "see `ip addr` there") from error


def hold_port(address: str) -> int:
    """Choose a free port of this address, and listen on it, so that no other process gets it before the agent does."""
    listener = listen(address)
    port: int = listener.getsockname()[1]
    held[port] = listener
    return port


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of this address that was free a moment ago."""
    with socket.socket(family_of(address)) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
