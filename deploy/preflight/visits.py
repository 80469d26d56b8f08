"""Connects to all hosts in parallel for `kit check`, and collects their answers or errors."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import QUIET_SHELL, HostChannel, on_all
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.plan import check
from nodekit.deploy.plan.check import Facts
from nodekit.deploy.plan.findings import Finding, failures
from nodekit.deploy.plan.script import Script
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Host, Inventory
from nodekit.training.engine_info import LIBRARIES
from nodekit.training.reporting.trackers import TRACKERS

T = TypeVar("T")

CONNECT_SHARE = 0.6
"""Share of the time limit for logging in; the rest is for the network check between hosts that can be reached."""
RESERVE_S = 0.5  # kept back at the end, to close the channels and print
SLOW_RTT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The answer of one host."""

    facts: Facts
    probe: Mapping[str, Any]


def visit(
    channel: HostChannel,
    host: Host,
    inventory: Inventory,
    own: Script,
    *,
    peers: Sequence[str],
    files: Sequence[str],
    timeout_s: float = check.FACTS_TIMEOUT_S,
) -> Seen:
    """Ask one host for everything that `kit check` needs."""
    paths = {**host.env, **inventory.job.env}.get("PYTHONPATH", "")
    found = channel.call(
        "probes.probe",
        timeout_s=timeout_s,
        workdir=host.workdir,
        peers=peers,
        modules=(*LIBRARIES, *TRACKERS),
        imports=own.imports,
        source=own.source,
        path=[each for each in paths.split(os.pathsep) if each],
        files=files,
    )
    return Seen(facts=check.facts_of(channel, found["facts"]), probe=found)


class Visits:
    """Asks each host in a separate thread; hosts that are late are not waited for."""

    def __init__(
        self,
        inventory: Inventory,
        own: Script,
        ssh: SshOptions,
        *,
        files: Sequence[str],
        timeout_s: float,
        busy: float,
        deadline: float,
    ) -> None:
        self.deadline = deadline
        self._inventory = inventory
        self._own = own
        self._files = files
        self._ssh = ssh
        self._timeout_s = timeout_s
        self._facts_s = max(check.FACTS_TIMEOUT_S * busy, timeout_s)  # the wait for it is limited elsewhere
        self._lock = threading.Lock()
        self._all_done = threading.Condition(self._lock)
        self._channels: dict[str, HostChannel] = {}
        self._seen: dict[str, Seen] = {}
        self._unmade: dict[str, str] = {}
        self._failed: dict[str, Exception] = {}
        self._stage = {host.name: "connecting" for host in inventory.hosts}
        self._is_over = False
        if any(host.connection == "ssh" for host in inventory.hosts):
            import fabric  # noqa: F401  # import it once, before the threads start: concurrent first imports of it fail
        self._peers = Later(lambda: cluster.peer_addresses(inventory.hosts))
        for host in inventory.hosts:
            threading.Thread(target=self._visit, args=(host,), daemon=True).start()

    def _visit(self, host: Host) -> None:
        try:
            timeout_s = round(CONNECT_SHARE * self._timeout_s, 1)
            channel = cluster.open_channel(host, self._ssh, timeout_s=timeout_s)
            with self._lock:
                is_late = self._is_over
                if not is_late:
                    self._channels[host.name] = channel
                    self._stage[host.name] = "looking around there"
            if is_late:
                return channel.close()
            unmade = check.enter_what_is_there({host.name: channel}, self._inventory)
            peers = self.peers().get(host.name, ())
            seen = visit(
                channel, host, self._inventory, self._own,
                peers=peers, files=self._files, timeout_s=self._facts_s,
            )  # fmt: skip
            with self._lock:
                self._unmade |= unmade
                self._seen[host.name] = seen
        except Exception as error:  # reported for this host; the others continue
            with self._lock:
                self._failed[host.name] = error
        finally:
            with self._lock:
                self._stage.pop(host.name, None)
                self._all_done.notify_all()

    def peers(self) -> Mapping[str, tuple[str, ...]]:
        """Return host → addresses of the others; nothing if a name server takes too long."""
        return self._peers.get(max(0.1, self.deadline - time.monotonic())) or {}

    def wait(self, until: float) -> None:
        """Wait until all hosts have answered, or until that time."""
        with self._all_done:
            while self._stage and (left_s := until - time.monotonic()) > 0:
                self._all_done.wait(left_s)

    def seen(self) -> dict[str, Seen]:
        """Return the answers so far, in the inventory's order."""
        with self._lock:
            return {
                host.name: self._seen[host.name] for host in self._inventory.hosts if host.name in self._seen
            }

    def unmade(self) -> list[str]:
        """Return the hosts that have answered and whose environment is not built yet."""
        with self._lock:
            return [host.name for host in self._inventory.hosts if host.name in self._unmade]

    def channels(self, hosts: Iterable[str]) -> dict[str, HostChannel]:
        """Return channels to hosts that have answered."""
        with self._lock:
            return {name: self._channels[name] for name in hosts}

    def access(self) -> list[Finding]:
        """Return the column access.

        Raises:
            Exception: a bug of ours, with its traceback.
        """
        with self._lock:
            self._is_over = True
            for error in self._failed.values():
                if not isinstance(error, KitError):
                    raise error
            return [each for host in self._inventory.hosts for each in self._access(host)]

    def _access(self, host: Host) -> list[Finding]:
        finding = functools.partial(Finding, "access", host.name)
        can_log_in = "a host that kit can log in to"
        if host.name in self._seen:
            if printed := self._channels[host.name].printed:
                found = f"its login shell prints '{printed}' before a command"
                wanted = "nothing: rsync does not work there, and SFTP with many an sshd neither"
                return [finding("warning", found, wanted, QUIET_SHELL)]
            rtt_s = self._seen[host.name].facts.rtt_s
            if rtt_s < SLOW_RTT_S:
                return [finding("ok", f"{rtt_s * 1000:.1f} ms")]
            cure = "see whether it is busy (`uptime` there) or far away"
            wanted = f"less than {SLOW_RTT_S * 1000:.0f} ms"
            return [finding("warning", f"an answer takes {rtt_s * 1000:.0f} ms", wanted, cure)]
        if isinstance(error := self._failed.get(host.name), KitError):
            return failures("access", host.name, error, can_log_in)
        silence = f"no answer within {self._timeout_s:.3g} s"
        more_time = "or give it more time with --timeout"
        if host.name in self._channels:
            text = f"kit has logged in, and then {silence}, while {self._stage.get(host.name, 'looking around there')}"
            cure = f"its disk may not answer: try `timeout 5 touch {host.workdir}; df -h` there; {more_time}"
            return [finding("failure", text, "a host that answers, and whose disks do", cure)]
        cure = f"log in by hand: ssh {host.address}; {more_time}"
        return [finding("failure", f"{silence}, while connecting", can_log_in, cure)]

    def leave(self) -> None:
        """Close the channels, but do not wait long for it."""
        with self._lock:
            channels = dict(self._channels)
        Later(lambda: on_all(channels, HostChannel.close)).get(RESERVE_S)


class Later(Generic[T]):
    """A value computed in a thread."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._found: list[T | Exception] = []
        self._make = make
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._make())
        except Exception as error:  # raised where the value is asked for
            self._found.append(error)

    def get(self, timeout_s: float) -> T | None:
        """Return the value, or None if it is not available in time."""
        self._thread.join(timeout_s)
        if self._found and isinstance(self._found[0], Exception):
            raise self._found[0]
        return self._found[0] if self._found else None  # type: ignore[return-value]  # no exception, as just seen
