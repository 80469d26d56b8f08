"""Tries the network from one host: listens there, connects to the others. Sent there with `deploy/host/remote.py`.

`begin` listens on some ports, `try_peers` connects to the others' and sends them datagrams that may not be cut up,
`arrived` says whose datagrams came, `finish` lets go. All of it is sockets of the server's own process: when the
link ends, they do. Standard library only, and Python 3.8 syntax, as in `deploy/host/probes/hostfacts.py`.
"""

from __future__ import annotations

import collections
import errno
import glob
import hashlib
import hmac
import os
import pwd
import secrets
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from typing import Any, Deque, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from nodekit.deploy.host.probes.nics import nics

SMALL_BYTES = 256  # a datagram that passes wherever any does
_HELLO = b"nodekit "
_MAX_LINE = 512
OPEN_AT_ONCE = 256
_BACKLOG = 1024
_MOST_CALLERS = 256
_TICK_S = 0.05
_FIREWALL_S = 3.0
# Of linux/in.h: do not fragment, and do not go by what earlier packets have found out about the path.
_MTU_DISCOVER: Dict[int, Tuple[int, int]] = {socket.AF_INET: (0, 10), socket.AF_INET6: (41, 23)}
_PMTUDISC_PROBE = 3
_HEADERS_BYTES: Dict[int, int] = {socket.AF_INET: 28, socket.AF_INET6: 48}  # IP's and UDP's
_LISTEN = "0A"  # as /proc/net/tcp has it
# Of linux/neighbour.h and netlink.h: ask for the tables of neighbours, and what an answer has in it.
_GET_TABLES, _DUMP, _DONE, _ERROR = 66, 0x301, 3, 2
_TABLE_NAME, _TABLE_MOST, _TABLE_CONFIG, _TABLE_STATS = 1, 4, 5, 7

# session -> its listening end
_sessions: Dict[str, "_Session"] = {}


# --- what the host says of itself -----------------------------------------------------------------------------


def begin(
    session: str,
    name: str,
    token: str,
    address: Optional[str],
    port: Optional[int],
    num_sampled: int,
    lifetime_s: float,
) -> Dict[str, Any]:
    """Listen at `address` on `port` and on some ports of the range that the kernel gives out; say what is here.

    Args:
        session: what the other functions call this.
        name: this host's, for those who connect.
        token: known to the hosts of this check alone: by it they know each other.
        address: that of the interface to try; None: listen nowhere.
        port: the rendezvous port; None: that of nobody.
        num_sampled: how many ports of the range.
        lifetime_s: when to let go at the latest.
    """
    low, high = port_range()
    found: Dict[str, Any] = {
        "nics": nics(),
        "neighbours": neighbours(),
        "rdma": rdma_ports(),
        "range": [low, high],
        "ports": [],
        "udp_port": None,
        "taken": None,
    }
    opened = _Session(name, token, lifetime_s)
    _sessions[session] = opened
    if address is None:
        return found
    if port is not None:
        found["taken"] = taken(port)
        if found["taken"] is None:
            opened.listen(address, port)
    for start in _sample(low, high, num_sampled):
        for candidate in range(start, min(start + 50, high + 1)):
            try:
                opened.listen(address, candidate)
                break
            except OSError:  # somebody's connection has it
                continue
    found["ports"] = opened.ports
    found["udp_port"] = opened.receive(address)
    opened.start()
    return found


def port_range() -> Tuple[int, int]:
    """The ports that the kernel gives to who asks for any, which gloo and NCCL do."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
        return low, high
    except (OSError, ValueError):
        return 32768, 60999


def _sample(low: int, high: int, number: int) -> List[int]:
    """The middle of each of `number` equal parts of a range."""
    part = (high - low + 1) / number
    return sorted({int(low + part * (index + 0.5)) for index in range(number)})


def taken(port: int) -> Optional[Dict[str, Any]]:
    """None if a rendezvous could listen on a port, on all addresses as torch does; else who holds it."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            trial.bind(("::", port))
        return None
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):  # a host without IPv6
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind(("", port))
                    return None
                except OSError as other:
                    error = other
        return {"problem": error.strerror, **holder(port)}


def holder(port: int) -> Dict[str, Any]:
    """Who has a TCP port of this host: ``user``, ``pid`` and ``command``, as far as we may see them."""
    inodes: Dict[str, int] = {}
    listening = False
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        for row in rows:
            if int(row[1].rpartition(":")[2], 16) == port and row[9] != "0":
                if row[3] == _LISTEN and not listening:
                    listening, inodes = True, {}
                if listening == (row[3] == _LISTEN):
                    inodes[row[9]] = int(row[7])
    found: Dict[str, Any] = {"user": "", "pid": None, "command": "", "listens": listening}
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
        except OSError:  # ended meanwhile, or another user's
            continue
        found.update(pid=pid, command=" ".join(word.decode("utf-8", "replace") for word in words)[:200])
        break
    return found


def rdma_ports(sys: str = "/sys") -> List[Dict[str, Any]]:
    """The ports of this host's RDMA devices: ``device``, ``port``, ``state`` (as "ACTIVE"), ``link_layer``, ``rate``.

    And ``interfaces``: those of the kernel's that lie on the device.
    """
    found = []
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
    try:
        with open(os.path.join(folder, name)) as file:
            return file.readline().strip()
    except OSError:
        return ""


def neighbours() -> Dict[str, Dict[str, Any]]:
    """The kernel's tables of who has which address, ``arp_cache`` and ``ndisc_cache``; {} where it does not say.

    Each with ``entries``, ``most`` (gc_thresh3), ``overflows`` (since the start of the machine) and ``is_ours``
    (False: its limits are set elsewhere, on the machine that this host is a container of). The tables are one for
    all of a machine's containers. The log of the kernel, which not everybody may read, has a line for an overflow;
    the count is everybody's.
    """
    found: Dict[str, Dict[str, Any]] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
            kernel.settimeout(1)
            kernel.send(struct.pack("=IHHIIB3x", 20, _GET_TABLES, _DUMP, 1, 0, socket.AF_UNSPEC))
            is_done = False
            while not is_done:
                data = kernel.recv(1 << 16)
                at = 0
                while at < len(data):
                    length, kind = struct.unpack_from("=IH", data, at)
                    is_done = is_done or kind in (_DONE, _ERROR)
                    if not is_done:
                        found.update(_table(data[at + 20 : at + length]))
                    at += (length + 3) & ~3
    except (OSError, struct.error):
        return {}
    return found


def _table(data: bytes) -> Dict[str, Dict[str, Any]]:
    """One table, from the attributes of a netlink message; {} for a message of a single interface's settings."""
    parts: Dict[int, bytes] = {}
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        parts[kind] = data[at + 4 : at + length]
        at += max((length + 3) & ~3, 4)
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


def own_name(limit_s: float) -> Dict[str, Any]:
    """This host's name and the addresses that it has here; None: the resolver did not answer in time.

    And ``neighbours``, as they are now.
    """
    name = socket.gethostname()
    found: Dict[str, Any] = {"name": name, "addresses": None, "neighbours": neighbours()}

    def resolve() -> None:
        try:
            answers = socket.getaddrinfo(name, None, 0, socket.SOCK_STREAM)
            found["addresses"] = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        except OSError:
            found["addresses"] = []

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(limit_s)
    return dict(found)


def firewall() -> Dict[str, Any]:
    """What filters packets here: ``tool`` ("firewalld", "ufw", "nftables", "iptables" or "") and ``rules``.

    The rules are nft's, with handles, "" where we may not see them.
    """
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
    if not tool and ("DROP" in say("iptables", "-S") or "REJECT" in say("iptables", "-S")):
        tool = "iptables"
    if _line("/etc/ufw", "ufw.conf") and _is_ufw_on():
        tool = "ufw"
    for comm in glob.iglob("/proc/[0-9]*/comm"):
        if _line(os.path.dirname(comm), "comm") == "firewalld":
            tool = "firewalld"
    return {"tool": tool, "rules": rules, "may_see": os.geteuid() == 0}


def _is_ufw_on() -> bool:
    try:
        with open("/etc/ufw/ufw.conf") as file:
            return any(line.strip().lower() == "enabled=yes" for line in file)
    except OSError:
        return False


# --- the end that listens -------------------------------------------------------------------------------------


class _Session:
    """Listens, and answers whoever says hello with this host's name, signed with the token."""

    def __init__(self, name: str, token: str, lifetime_s: float) -> None:
        self.name = name
        self.token = token
        self.ports: List[int] = []
        self.datagrams: Optional[socket.socket] = None
        self.sizes: Dict[str, Set[int]] = {}
        self.held: Optional[socket.socket] = None
        self.job: Optional[_Job] = None
        self._until = time.monotonic() + lifetime_s
        self._listeners: List[socket.socket] = []
        self._closed = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def listen(self, address: str, port: int) -> None:
        listener = socket.socket(_family(address), socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listeners.append(listener)
        self.ports.append(port)

    def receive(self, address: str) -> int:
        family = _family(address)
        self.datagrams = socket.socket(family, socket.SOCK_DGRAM)
        self.datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.datagrams.setsockopt(*_MTU_DISCOVER[family], _PMTUDISC_PROBE)
        self.datagrams.bind((address, 0))
        self.datagrams.setblocking(False)
        port: int = self.datagrams.getsockname()[1]
        return port

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2)
        else:
            self._close_sockets()
        if self.held is not None:
            self.held.close()
        if self.job is not None:
            self.job.end()

    def _close_sockets(self) -> None:
        for each in (*self._listeners, self.datagrams):
            if each is not None:
                each.close()

    def _serve(self) -> None:
        said: Dict[socket.socket, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            assert self.datagrams is not None
            selector.register(self.datagrams, selectors.EVENT_READ)
            while not self._closed.is_set() and time.monotonic() < self._until:
                for key, _ in selector.select(_TICK_S):
                    ready: Any = key.fileobj
                    if ready is self.datagrams:
                        self._take_datagrams()
                    elif ready in said:
                        if self._answer(ready, said):
                            selector.unregister(ready)
                            ready.close()
                            del said[ready]
                    else:
                        for caller in _accept_all(ready):
                            said[caller] = b""
                            selector.register(caller, selectors.EVENT_READ)
                        while len(said) > _MOST_CALLERS:  # who only connects must not take all descriptors
                            oldest = next(iter(said))
                            selector.unregister(oldest)
                            oldest.close()
                            del said[oldest]
            for caller in said:
                caller.close()
            self._close_sockets()

    def _answer(self, caller: socket.socket, said: Dict[socket.socket, bytes]) -> bool:
        """Read what there is, answer a whole line; True when the caller is gone, or does not speak our language."""
        try:
            data = caller.recv(_MAX_LINE)
            if not data:
                return True
            said[caller] += data
            if b"\n" in data:
                if not said[caller].startswith(_HELLO):
                    return True
                nonce = said[caller][len(_HELLO) :].split(b"\n")[0]
                caller.send(_signed(self.name, self.token, nonce) + b"\n")
        except OSError:
            return True
        # The caller closes first, and with a reset: no port of ours is left in TIME_WAIT.
        return len(said[caller]) > _MAX_LINE

    def _take_datagrams(self) -> None:
        assert self.datagrams is not None
        while True:
            try:
                data = self.datagrams.recv(1 << 16)
            except OSError:  # that was all
                return
            token, _, rest = data.rstrip(b"\0").partition(b" ")
            size, _, name = rest.partition(b" ")
            if hmac.compare_digest(token, self.token.encode()):
                self.sizes.setdefault(name.decode("utf-8", "replace"), set()).add(int(size))


def _accept_all(listener: socket.socket) -> List[socket.socket]:
    callers: List[socket.socket] = []
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:  # that was all
            return callers
        caller.setblocking(False)
        _reset_at_close(caller)
        callers.append(caller)


def _reset_at_close(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _signed(name: str, token: str, nonce: bytes) -> bytes:
    return (
        name.encode()
        + b" "
        + hmac.new(token.encode(), nonce + name.encode(), hashlib.sha256).hexdigest().encode()
    )


def _family(address: str) -> int:
    return int(socket.AF_INET6 if ":" in address else socket.AF_INET)


def arrived(session: str, wanted: Mapping[str, Sequence[int]], wait_s: float) -> Dict[str, List[int]]:
    """Whose datagrams have come, of which sizes; waits a moment for those that are wanted."""
    own = _sessions[session]
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if all(set(sizes) <= own.sizes.get(name, set()) for name, sizes in wanted.items()):
            break
        time.sleep(0.01)
    return {name: sorted(sizes) for name, sizes in list(own.sizes.items())}


def finish(session: str) -> None:
    """Let go of everything."""
    opened = _sessions.pop(session, None)
    if opened is not None:
        opened.close()


# --- the end that connects ------------------------------------------------------------------------------------


class _Attempt:
    """One connection on its way."""

    def __init__(self, peer: Mapping[str, Any], port: int, until: float) -> None:
        self.peer = peer
        self.port = port
        self.until = until
        self.nonce = secrets.token_hex(16).encode()
        self.is_connected = False
        self.said = b""


def try_peers(
    session: str, peers: Sequence[Mapping[str, Any]], answer_s: float, limit_s: float
) -> Dict[str, Dict[str, Any]]:
    """Connect to every port of every peer, and send it datagrams.

    Args:
        session: that of `begin`.
        peers: each with ``name``, ``address``, ``ports``, ``udp_port`` and ``sizes`` of datagrams, IP header and all.
        answer_s: how long to wait for a connection, and then for the answer.
        limit_s: how long all of it may take.

    Returns:
        peer's name → ``connects`` (ports), ``failed`` (outcome → ports), ``words`` (outcome → the kernel's, or the
        peer's), ``source`` (the address we had), ``dropped_from`` (our ports of the calls that got no answer) and
        ``unsent`` (size → why not).
    """
    own = _sessions[session]
    end = time.monotonic() + limit_s
    found: Dict[str, Dict[str, Any]] = {
        peer["name"]: {
            "connects": [],
            "failed": {},
            "words": {},
            "source": None,
            "unsent": {},
            "dropped_from": [],
        }
        for peer in peers
    }
    for peer in peers:
        found[peer["name"]]["unsent"] = _send_datagrams(own, peer)
    longest = max((len(peer["ports"]) for peer in peers), default=0)
    wanted: Deque[Tuple[Mapping[str, Any], int]] = collections.deque(
        (peer, peer["ports"][index])
        for index in range(longest)
        for peer in peers
        if index < len(peer["ports"])
    )
    most = OPEN_AT_ONCE
    waiting: Dict[socket.socket, _Attempt] = {}
    with selectors.DefaultSelector() as selector:

        def end_of(connection: socket.socket, outcome: str, words: str = "") -> None:
            attempt = waiting.pop(connection)
            if outcome == "dropped":
                found[attempt.peer["name"]]["dropped_from"].append(connection.getsockname()[1])
            selector.unregister(connection)
            connection.close()
            _note(found[attempt.peer["name"]], attempt.port, outcome, words)

        while wanted or waiting:
            now = time.monotonic()
            while wanted and len(waiting) < most and now < end:
                peer, port = wanted.popleft()
                try:
                    connection = socket.socket(_family(peer["address"]), socket.SOCK_STREAM)
                except OSError:  # no more file handles
                    if not waiting:
                        raise
                    wanted.appendleft((peer, port))
                    most = len(waiting)
                    break
                connection.setblocking(False)
                _reset_at_close(connection)
                code = connection.connect_ex((peer["address"], port))
                if code not in (0, errno.EINPROGRESS):
                    connection.close()
                    _note(found[peer["name"]], port, *_outcome(code))
                    continue
                waiting[connection] = _Attempt(peer, port, now + answer_s)
                selector.register(connection, selectors.EVENT_WRITE)
            for key, _ in selector.select(_TICK_S):
                ready: Any = key.fileobj
                attempt = waiting[ready]
                try:
                    if not attempt.is_connected:
                        code = ready.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                        if code:
                            end_of(ready, *_outcome(code))
                            continue
                        attempt.is_connected = True
                        attempt.until = time.monotonic() + answer_s
                        found[attempt.peer["name"]]["source"] = ready.getsockname()[0]
                        ready.send(_HELLO + attempt.nonce + b"\n")
                        selector.modify(ready, selectors.EVENT_READ)
                        continue
                    data = ready.recv(_MAX_LINE)
                except OSError as error:
                    end_of(ready, "stranger", "it hangs up (%s)" % error.strerror)
                    continue
                attempt.said += data
                if not data or b"\n" in data or len(attempt.said) > _MAX_LINE:
                    end_of(ready, *_who(attempt, own.token))
            now = time.monotonic()
            for connection, attempt in list(waiting.items()):
                if now > attempt.until or now > end:
                    late = ("silent", "") if attempt.is_connected else ("dropped", "")
                    end_of(connection, *(late if now > attempt.until else ("untried", "")))
            if now > end:
                for peer, port in wanted:
                    _note(found[peer["name"]], port, "untried", "")
                break
    return found


def _who(attempt: _Attempt, token: str) -> Tuple[str, str]:
    """Whether the peer itself has answered."""
    answer = attempt.said.split(b"\n")[0]
    name = answer.rpartition(b" ")[0].decode("utf-8", "replace")
    if hmac.compare_digest(answer, _signed(name, token, attempt.nonce)):
        return ("connects", "") if name == attempt.peer["name"] else ("stranger", "%s answers there" % name)
    return "stranger", "it answers %r" % answer[:40].decode("utf-8", "replace") if answer else "it hangs up"


def _note(found: Dict[str, Any], port: int, outcome: str, words: str) -> None:
    if outcome == "connects":
        found["connects"].append(port)
        return
    found["failed"].setdefault(outcome, []).append(port)
    if words:
        found["words"][outcome] = words


def _outcome(code: int) -> Tuple[str, str]:
    if code == errno.ECONNREFUSED:
        return "refused", ""
    if code == errno.ETIMEDOUT:
        return "dropped", ""
    return "unreachable", os.strerror(code)


def _send_datagrams(own: _Session, peer: Mapping[str, Any]) -> Dict[int, str]:
    """A datagram of each size that may not be fragmented; returns which could not even be sent, and why."""
    unsent: Dict[int, str] = {}
    if own.datagrams is None or peer["udp_port"] is None:
        return unsent
    headers = _HEADERS_BYTES[_family(peer["address"])]
    for size in peer["sizes"]:
        text = ("%s %d %s" % (own.token, size, own.name)).encode()
        for _ in range(2):  # the first may be told of what became of an earlier one
            try:
                own.datagrams.sendto(text.ljust(size - headers, b"\0"), (peer["address"], peer["udp_port"]))
                unsent.pop(size, None)
                break
            except OSError as error:
                unsent[size] = errno.errorcode.get(error.errno or 0, "")
    return unsent


# --- a program of all hosts together -------------------------------------------------------------------------


class _Job:
    """A program that says lines of JSON, and lives no longer than its stdin, which is ours."""

    def __init__(
        self, argv: Sequence[str], program: str, env: Mapping[str, str], held: Optional[socket.socket]
    ) -> None:
        self.lines: List[str] = []
        self.errors: Deque[str] = collections.deque(maxlen=40)
        self.changed = threading.Condition()
        self.ended = False
        self.process = subprocess.Popen(
            [os.path.expanduser(argv[0]), *argv[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **env},
            start_new_session=True,
            pass_fds=[held.fileno()] if held is not None else [],
        )
        threading.Thread(target=self._read_errors, daemon=True).start()
        threading.Thread(target=self._read, daemon=True).start()
        data = program.encode()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(b"%d\n" % len(data) + data)
            self.process.stdin.flush()
        except OSError:  # it ended at once: its last words tell
            pass

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line.decode("utf-8", "replace").rstrip("\n"))
                self.changed.notify_all()
        self.process.wait()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.decode("utf-8", "replace").rstrip("\n"))

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except OSError:
            pass


def hold(session: str, address: str, port: int) -> int:
    """Listen on a port of an address, 0 for a free one, for the job of this host."""
    own = _sessions[session]
    own.held = socket.socket(_family(address), socket.SOCK_STREAM)
    own.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    own.held.bind((address, port))
    own.held.listen(_BACKLOG)
    held: int = own.held.getsockname()[1]
    return held


def start_job(
    session: str, argv: Sequence[str], program: str, settings: Dict[str, Any], env: Mapping[str, str]
) -> int:
    """Start a python program, which comes with its settings on its stdin (`deploy/connect/link.py`'s BOOT reads it)."""
    own = _sessions[session]
    if own.held is not None:
        settings = dict(settings, listen_fd=own.held.fileno())
    own.job = _Job(argv, "SETTINGS = %r\n%s" % (settings, program), env, own.held)
    if own.held is not None:
        own.held.close()  # with the job's end the others are refused
    return own.job.process.pid


def job_said(session: str, seen: int, wait_s: float) -> Dict[str, Any]:
    """The lines after the first `seen`, once there are any or it has ended: ``lines``, ``status``, ``errors``."""
    job = _sessions[session].job
    assert job is not None
    with job.changed:
        job.changed.wait_for(lambda: len(job.lines) > seen or job.ended, wait_s)
        status = job.process.returncode if job.ended else None
        return {
            "lines": job.lines[seen:],
            "status": status,
            "errors": "\n".join(job.errors) if job.ended else "",
        }


def end_job(session: str) -> None:
    """End what `start_job` started."""
    own = _sessions.get(session)
    if own is not None and own.job is not None:
        own.job.end()
        own.job = None
