"""Somebody else on the machine: a process of another user that connects to ports and says nothing."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence

# Connects NUMBER times to each PORT of ADDRESS, says how often it got through, and holds on until its stdin ends.
SILENT = """
import os, resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
address, number, *ports = sys.argv[1:]
held = []
for port in ports:
    for _ in range(int(number)):
        each = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        each.settimeout(10)
        try:
            each.connect((address, int(port)))
        except OSError:
            break
        held.append(each)
print(len(held), flush=True)
sys.stdin.read()
"""


def argv(address: str, number: int, ports: Sequence[int]) -> list[str]:
    """The command of the stranger."""
    return [sys.executable, "-I", "-S", "-c", SILENT, address, str(number), *map(str, ports)]


@contextlib.contextmanager
def silent(port: int, number: int, address: str = "127.0.0.1") -> Iterator[int]:
    """Connections to a port of this machine, while the block runs; how many came about."""
    with subprocess.Popen(
        argv(address, number, [port]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.communicate()


@contextlib.contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """This process may open `spare` more, while the block runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(spare + 1)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held), hard))
    spares = held[:spare]
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for each in spares:
            os.close(each)
            held.remove(each)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)
