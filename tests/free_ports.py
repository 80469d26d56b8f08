"""A port for what is started in a moment."""

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()  # workers, and tests that seed the other one, are not to choose the same


def free_port() -> int:
    """One that nobody listens on, and that the kernel gives to no connection until somebody does.

    One that it finds free itself, by binding port 0, may be the local port of any connection a moment later.
    """
    end = int(_RANGE.read_text().split()[0])
    while True:
        port = _random.randrange(end // 2, end)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
