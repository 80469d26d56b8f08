"""`kit shell`: runs a command on many hosts at once, each over its own channel, so that none waits for another."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from nodekit.deploy.connect.channel import HostChannel, on_all
from nodekit.deploy.connect.cluster import SshOptions, open_channel
from nodekit.inventory import hostlists
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.schema import Host, Inventory

GRACE_S = 3.0
"""Seconds that a command has after Ctrl-C to end by itself."""
_QUEUE_PARTS = 64
_TAKEN_AT_ONCE = 4

Stream = Literal["out", "err"]


@dataclass(frozen=True)
class Lines:
    """Whole lines that a host's command wrote, each with its newline."""

    host: str
    stream: Stream
    data: bytes


@dataclass(frozen=True)
class Ended:
    """The end of the command on one host."""

    host: str
    status: int | None = None
    """The exit status, negative for a signal; None: unknown, and `problem` says why."""
    problem: str = ""
    """What went wrong besides the status: host unreachable, timeout, processes that could not be ended."""

    @property
    def is_good(self) -> bool:
        """Whether the command ran and exited with status 0."""
        return self.status == 0 and not self.problem


class Commands:
    """A command that runs on several hosts. Use it as a context manager: on exit, it has ended on all of them.

    Within the block, the first Ctrl-C ends the command on all hosts, and a second one stops waiting for that.

    Attributes:
        was_interrupted: whether Ctrl-C was pressed.
    """

    def __init__(
        self, hosts: Sequence[Host], argv: Sequence[str], *, timeout_s: float | None, ssh: SshOptions
    ) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._argv, self._timeout_s, self._ssh = list(argv), timeout_s, ssh
        self._channels: dict[str, HostChannel] = {}
        self._lock = threading.Lock()
        self._is_over = self.was_interrupted = False
        self._handlers: dict[int, Any] = {}
        self._waiting_for = set(self._hosts)
        # Bounded: if output is read slowly, the commands are slowed down instead of filling the memory here.
        self._events: queue.Queue[Lines | Ended] = queue.Queue(_QUEUE_PARTS)

    def __enter__(self) -> Commands:
        # The handler raises nothing: an exception could lose an event between taking it and yielding it.
        self._handlers = {
            each: signal.signal(each, self._interrupt) for each in (signal.SIGINT, signal.SIGTERM)
        }
        for host in self._hosts.values():
            threading.Thread(target=self._one, args=(host,), name=f"shell-{host.name}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_over = True
            channels = dict(self._channels)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        on_all(channels, HostChannel.close)  # with its channel, a server ends its commands

    def events(self) -> Iterator[Lines | Ended]:
        """Yield output and ends in the order of arrival, until the command has ended on all hosts."""
        while self._waiting_for:
            event = self._events.get()
            if isinstance(event, Ended):
                if event.host not in self._waiting_for:
                    continue
                self._waiting_for.discard(event.host)
            yield event

    def _interrupt(self, *_: object) -> None:
        if self.was_interrupted:
            raise KeyboardInterrupt
        self.was_interrupted = True
        threading.Thread(target=self._end, daemon=True).start()  # a signal handler must not wait for a lock

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            channels = dict(self._channels)

        def end(channel: HostChannel) -> None:
            # A lost channel is reported by the call that runs the command.
            with contextlib.suppress(HostError):
                channel.call(
                    "hostshell.end", timeout_s=GRACE_S + 10, number=int(signal.SIGINT), grace_s=GRACE_S
                )

        for name in self._hosts.keys() - channels.keys():
            self._events.put(Ended(name, problem="not started"))
        on_all(channels, end)

    def _one(self, host: Host) -> None:
        try:
            channel = open_channel(host, self._ssh)
        except HostError as error:
            self._events.put(Ended(host.name, problem=str(error.problem)))
            return
        except Exception as error:  # the other hosts must not wait for this one
            self._events.put(Ended(host.name, problem=f"{type(error).__name__}: {error}"))
            return
        with self._lock:
            if self._is_over:
                channel.close()
                return
            self._channels[host.name] = channel
        self._events.put(self._run(channel))

    def _run(self, channel: HostChannel) -> Ended:
        rest: dict[Stream, bytearray] = {"out": bytearray(), "err": bytearray()}
        num_taken = 0

        def take(part: Any) -> None:
            nonlocal num_taken
            if part is None:
                return
            stream, text = part
            data = text.encode("utf-8", "surrogateescape")
            whole = data.rfind(b"\n") + 1  # search only the new part: a line may be gigabytes long
            if whole:
                self._events.put(Lines(channel.host, stream, bytes(rest[stream]) + data[:whole]))
                rest[stream].clear()
            rest[stream] += data[whole:]
            num_taken += 1
            if num_taken % _TAKEN_AT_ONCE == 0:
                channel.call("hostshell.taken", timeout_s=30, number=_TAKEN_AT_ONCE)

        try:
            answer = channel.stream("hostshell.run", take, argv=self._argv, limit_s=self._timeout_s)
            problems = [] if answer["status"] is not None else ["not started"]
            if answer["timed_out"]:
                problems.append(f"ended after {self._timeout_s:g} s (--timeout)")
            if answer["left"]:
                problems.append(f"could not end {', '.join(map(str, answer['left']))}: another user's?")
            ended = Ended(channel.host, answer["status"], "; ".join(problems))
        except HostError as error:
            ended = Ended(channel.host, problem=f"lost on the way: {error.problem}")
        for stream, data in rest.items():
            if data:
                self._events.put(Lines(channel.host, stream, bytes(data) + b"\n"))
        return ended


def pick(inventory: Inventory, hostlist: str | None) -> tuple[Host, ...]:
    """Return the hosts of an inventory that a hostlist names, in the inventory's order; all if it is None.

    Raises:
        KitError: the inventory lacks one of them, or has no hosts at all.
    """
    if not inventory.hosts:
        raise KitError(
            f"{inventory.path}: found slurm",
            wanted="hosts: the nodes of a job are reached by Slurm alone, as with srun --jobid=ID --overlap "
            "COMMAND",
        )
    if hostlist is None:
        return inventory.hosts
    try:
        wanted = dict.fromkeys(hostlists.expand(hostlist))
    except ValueError as error:
        raise KitError(f"{hostlist!r} is no hostlist, as gpu[1-3]: {error}") from error
    known = [host.name for host in inventory.hosts]
    if absent := [name for name in wanted if name not in known]:
        raise KitError(
            f"{inventory.path} has no {', '.join(absent)}; it has {fold(known)}",
            cure=f"a command comes after `--`, as in kit shell {inventory.path.name} -- hostname",
        )
    return tuple(host for host in inventory.hosts if host.name in wanted)


def fold(names: Sequence[str]) -> str:
    """Fold names into a hostlist: ``gpu[1-3],login``."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    try:
        return str(NodeSet.fromlist(list(names), resolver=RESOLVER_NOGROUP))
    except NodeSetException:  # ClusterShell parses some names otherwise, such as IPv6 addresses
        return ",".join(names)
