"""The hands of kit on one host: a small server on stdin and stdout that reads the host, starts and stops agents.

Its source travels to the host's own python over the connection (`deploy/connect/link.py`), so the host needs nothing
of ours installed. Standard library only, and Python 3.8 syntax, so that an old interpreter can still say its
version. One JSON object per line: ``{"id", "op", "args"}`` in; ``{"id", "part"}`` any number of times and then
``{"id", "result"}`` or ``{"id", "error"}`` out. It ends when its stdin does; agents it started live on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Set, Tuple, TypeVar

from nodekit.deploy.host import present
from nodekit.deploy.host.probes import hostfacts

NO_WORKERS_GRACE_S = 3.0
COPYING_GRACE_S = 23.0  # to copy the last snapshot to other nodes: the agent gives up after 20 s by itself
_SNAPSHOT = re.compile(
    r"g(\d{4,})-s(\d{9,})\.json"
)  # as nodekit.training.snapshots.manifest names a committed one
HELD_S = 30.0
_BEAT_S = 1.0
_PATIENCE_S = 1.0
_NOT_FOUND = (FileNotFoundError, NotADirectoryError)  # every other OSError says that nobody knows
_T = TypeVar("_T")
# port -> the listening socket that keeps it ours until an agent takes it over
_held_ports: Dict[int, socket.socket] = {}
# node_dir -> the agent this server started
_agents: Dict[str, subprocess.Popen[bytes]] = {}
# snapshot folder -> the newest that it held, and when
_last_held: Dict[str, Tuple[List[int], float]] = {}
_attended: Set["subprocess.Popen[str]"] = set()


# --- agents -------------------------------------------------------------------------------------------------


def hold_port(address: str) -> int:
    """A free port of this address, kept listening so that nobody else gets it before the agent does."""
    held = listen(address)
    port: int = held.getsockname()[1]
    _held_ports[port] = held
    return port


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of this address alone.

    Raises:
        OSError: no interface of this host has the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except socket.gaierror as error:
        raise OSError(errno.EINVAL, "%s is no address to listen on: %s" % (address, error)) from error
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        why = "no interface of %s has the address %s to listen on; see `ip addr` there" % (
            socket.gethostname(),
            address,
        )
        raise OSError(error.errno, why) from error


def warm(
    node_dir: str, python: str, kit_dir: str, env: Mapping[str, str], env_file: str = ""
) -> Dict[str, Any]:
    """Start this node's agent; it imports torch and then waits for `go`, or ends when we do.

    `env` is the job's, which libraries read as they are imported; secrets are in it, and it is written nowhere, or
    they are in `env_file` (JSON).

    Raises:
        RuntimeError: an agent is alive already, or the secrets are no more where they were.
    """
    node_dir = os.path.expanduser(node_dir)
    os.makedirs(node_dir, mode=0o700, exist_ok=True)
    alive = agent_alive(node_dir)
    if alive:
        raise RuntimeError("an agent of this run is alive already (pid %d): stop it with kit down" % alive)
    full = _environment(kit_dir, env)
    if env_file:
        found = load(env_file)
        if found is None:  # never start a rank without what the user has it count on
            raise RuntimeError(
                "the job's secrets (%s) were removed when it ended; kit up brings them again" % env_file
            )
        full.update(found)
    full["PYTHONUNBUFFERED"] = "1"
    log = os.open(
        os.path.join(node_dir, "agent.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    sockets = list(_held_ports.values())
    try:
        agent = subprocess.Popen(
            [os.path.expanduser(python), "-m", "nodekit.deploy.agent", node_dir],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=node_dir,
            env=full,
            start_new_session=True,  # it must survive this connection
            pass_fds=[held.fileno() for held in sockets],
        )
    finally:
        os.close(log)
    _agents[node_dir] = agent
    return {"pid": agent.pid}


def _environment(kit_dir: str, env: Mapping[str, str]) -> Dict[str, str]:
    """This host's environment and `env`, with kit to be found first."""
    full = {**os.environ, **env}
    full["PYTHONPATH"] = os.pathsep.join(filter(None, [kit_dir, full.get("PYTHONPATH", "")]))
    return full


def go(
    node_dir: str, spec: Dict[str, Any], port: Optional[int] = None, called_off: int = -1
) -> Dict[str, Any]:
    """Give the warm agent its spec (written 0600) and, on the rendezvous host, the socket that holds the port.

    Fences up to `called_off` hold no longer: the generation they were for was never begun.
    """
    node_dir = os.path.expanduser(node_dir)
    agent = _agents[node_dir]
    with _alone(node_dir):
        own = load(os.path.join(node_dir, "spec.json")) or {"generation": -1}
        if spec.get("is_host") and own["generation"] == spec["generation"]:
            raise RuntimeError("the rendezvous of generation %d was here and is lost" % own["generation"])
        _enter(node_dir, own, spec, called_off)
        if port is not None:
            spec = dict(spec, listen_fd=_held_ports[port].fileno())
        write_private(os.path.join(node_dir, "spec.json"), json.dumps(spec, indent=1).encode(), durable=True)
    if os.path.exists(os.path.join(node_dir, "stop")):
        os.unlink(os.path.join(node_dir, "stop"))
    before = said(node_dir)
    if before:  # by another agent
        present.of(node_dir).write(dict({key: before[key] for key in ("run", "node")}, time=time.time()))
    record = {"pid": agent.pid, "start_time": start_time(agent.pid), "boot_id": hostfacts.boot_id()}
    write_private(os.path.join(node_dir, "agent.json"), json.dumps(record).encode())
    assert agent.stdin is not None
    try:
        agent.stdin.write(b"go\n")
        agent.stdin.close()
    except BrokenPipeError:
        last_words = tail(os.path.join(node_dir, "agent.log"))
        raise RuntimeError("the agent ended before it could start: " + last_words) from None
    return record


def call_in(node_dir: str, spec: Dict[str, Any], called_off: int = -1) -> Dict[str, Any]:
    """Call a live agent into the generation of another spec, which it finds in place of its own."""
    node_dir = os.path.expanduser(node_dir)
    if agent_alive(node_dir) is None:
        raise RuntimeError("no agent is alive here")
    with _alone(node_dir):
        own = load(os.path.join(node_dir, "spec.json")) or {"generation": -1}
        _enter(node_dir, own, spec, called_off)
        if own["generation"] == spec["generation"]:
            state = said(node_dir).get("state")
            has_moved = any(own.get(key) != spec.get(key) for key in ("master_addr", "master_port"))
            if state != "fenced" and not (state == "orphaned" and has_moved):
                return status(node_dir)  # it knows all that, and tries again by itself
            spec = dict(spec, call=own.get("call", 0) + 1)
        write_private(os.path.join(node_dir, "spec.json"), json.dumps(spec, indent=1).encode(), durable=True)
    return status(node_dir)


def fence(node_dir: str, generation: int) -> Dict[str, Any]:
    """Refuse every generation below `generation` on this node, for good; what runs of one ends within a moment."""
    node_dir = os.path.expanduser(node_dir)
    os.makedirs(node_dir, mode=0o700, exist_ok=True)
    with _alone(node_dir):
        if _fence_in(node_dir) < generation:
            _set_fence(node_dir, load(os.path.join(node_dir, "spec.json")) or {}, generation)
    return status(node_dir)


@contextlib.contextmanager
def _alone(node_dir: str) -> Iterator[None]:
    """Held while is read and then written what a node has promised: of two requests, the older must not come last.

    Each request has a thread of its own, and a link that was lost may have left one under way.
    """
    handle = os.open(node_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # a file server that locks no folders
        yield
    finally:
        os.close(handle)


def _set_fence(node_dir: str, spec: Mapping[str, Any], generation: int) -> None:
    saved = snapshot_folder(node_dir, spec)
    os.makedirs(node_dir, mode=0o700, exist_ok=True)
    make_snapshot_folder(
        saved, is_shared=spec.get("env", {}).get("NODEKIT_SNAPSHOT_SHARED", "") not in ("", "0")
    )
    for folder in (saved, node_dir):  # nodekit.training looks where it writes, which may be a shared folder
        write_private(os.path.join(folder, "fence"), b"%d\n" % generation, durable=True)


def make_snapshot_folder(folder: str, is_shared: bool) -> None:
    """Make the folder that ranks save to, 0700; of a shared one not what it lies in, which may be a mount point.

    What cannot be made raises an OSError that says what to do.
    """
    try:
        if is_shared and not os.path.isdir(folder):
            os.mkdir(folder, 0o700)
        elif not is_shared:
            os.makedirs(folder, mode=0o700, exist_ok=True)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise OSError(
                errno.EEXIST, "the snapshot folder cannot be made: a file is in its place", folder
            ) from None
    except OSError as error:
        why = "the snapshot folder cannot be made on %s: %s" % (socket.gethostname(), error.strerror)
        if is_shared and isinstance(error, FileNotFoundError):
            cure = "mount it, or make it (mkdir -p), on every host"
            why += "; %s (snapshots.shared) is not there: %s" % (os.path.dirname(folder), cure)
        raise OSError(error.errno, why, folder) from error


def _enter(node_dir: str, own: Mapping[str, Any], spec: Mapping[str, Any], called_off: int) -> None:
    """Let a generation in, and fence off those before it, unless a later one has been here."""
    fence, generation = _fence_in(node_dir), spec["generation"]
    if own["generation"] > generation or (fence > generation and fence > called_off):
        raise RuntimeError(
            "generation %d is over: this node is in %d" % (generation, max(fence, own["generation"]))
        )
    # The node may have been fenced before it had a spec, which says where snapshots are.
    if fence != generation or _fence_in(snapshot_folder(node_dir, spec)) != generation:
        _set_fence(node_dir, spec, generation)


def fence_of(node_dir: str) -> int:
    """The generation that this node is fenced to, -1 for none."""
    return _fence_in(node_dir)


def _fence_in(folder: str) -> int:
    path = os.path.join(folder, "fence")
    try:
        text = _patiently(_read, path)
    except _NOT_FOUND:
        return -1
    try:
        return int(text)
    except ValueError:
        raise OSError(errno.EIO, "it holds %r, and a whole number was wanted" % text[:40], path) from None


def grant(node_dir: str, electorate: Dict[str, Any]) -> None:
    """Write down an electorate (deploy/agent/quorum.py), unless a newer one is there."""
    node_dir = os.path.expanduser(node_dir)
    path = os.path.join(node_dir, "electorate.json")
    if not os.path.isdir(node_dir):
        return
    with _alone(node_dir):
        own, old = load(os.path.join(node_dir, "spec.json")), load(path)
        if not own or own["generation"] != electorate["generation"]:
            return
        order = ("generation", "version")
        if not old or [old[key] for key in order] < [electorate[key] for key in order]:
            write_private(path, json.dumps(electorate).encode(), durable=True)


def write_private(path: str, data: bytes, durable: bool = False) -> None:
    """Write a 0600 file in one step: a reader sees all of it or the one before; `durable`: also after a power loss."""
    draft = "%s.%d.%d" % (path, os.getpid(), threading.get_ident())
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            while data:
                data = data[os.write(handle, data) :]
            if durable:
                os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise
    if durable:
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def append_private(path: str, data: bytes) -> None:
    """Add to a 0600 file in one write: lines of several writers do not mix. All is added, or (OSError) nothing."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        present.add_whole(handle, data, path)
    finally:
        os.close(handle)


def end_torn_line(path: str) -> None:
    """Give a last line that a crash has torn its end, so that the next one is not glued to it."""
    try:
        with open(path, "rb+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
    except OSError:
        pass


def start_time(pid: int) -> Optional[int]:
    """When the kernel started `pid`, in clock ticks since boot: with the pid, the name of one process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return None


def _is_running(pid: int, started: Optional[int]) -> bool:
    """Whether exactly that process runs; one that ended but was not waited for yet does not."""
    try:
        fields = _read("/proc/%d/stat" % pid).rpartition(b")")[2].split()
    except OSError:
        return False
    return int(fields[19]) == started and fields[0] not in (b"Z", b"X")


def _read(path: str) -> bytes:
    """A small file, in a third of the system calls that `open` makes: some are read several times a second."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = b""
        while part := os.read(handle, 1 << 16):
            found += part
        return found
    finally:
        os.close(handle)


def _patiently(read: Callable[[str], _T], path: str) -> _T:
    """What `read` returns, tried again for a moment while it raises an OSError other than "not found"."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return read(path)
        except _NOT_FOUND:
            raise
        except OSError as error:
            if time.monotonic() >= until:
                error.filename = error.filename or path  # os.read has no name to tell
                raise
            time.sleep(0.1)


def load(path: str) -> Any:
    """What a JSON file holds; None without one, or for one that is torn.

    One that cannot be read raises an OSError: it may say anything.
    """
    try:
        return json.loads(_patiently(_read, path))
    except (*_NOT_FOUND, ValueError):
        return None


def agent_alive(node_dir: str) -> Optional[int]:
    """The pid of this node's agent if exactly the recorded process is running, else None."""
    return pid_if_alive(load(os.path.join(os.path.expanduser(node_dir), "agent.json")))


def pid_if_alive(record: Any) -> Optional[int]:
    """The pid of the process that an ``agent.json`` names, if exactly that one is running, else None."""
    if (
        record
        and record["boot_id"] == hostfacts.boot_id()
        and _is_running(record["pid"], record["start_time"])
    ):
        return int(record["pid"])
    return None


def status(node_dir: str) -> Dict[str, Any]:
    """The node's last status, with whether its agent is alive, and the end of its log if it said nothing."""
    node_dir = os.path.expanduser(node_dir)
    agent = _agents.get(node_dir)
    if agent is not None:
        agent.poll()  # reaps it, so that a dead agent is not taken for a live one
    record = load(os.path.join(node_dir, "agent.json"))
    alive = pid_if_alive(record)
    found = said(node_dir)
    found["alive"] = alive is not None
    found["known"] = os.path.isdir(node_dir)
    found["fence"] = _fence_in(node_dir)
    found["granted"] = load(os.path.join(node_dir, "electorate.json"))
    found["snapshot"] = newest_snapshot(snapshot_folder(node_dir))
    found["agent"] = "%s.%s" % (record["pid"], record["start_time"]) if record else ""
    if not alive:
        spec = load(os.path.join(node_dir, "spec.json")) or {}
        found["generation"] = max(found.get("generation", -1), spec.get("generation", -1))
        found["agent_log"] = tail(os.path.join(node_dir, "agent.log"))
    return found


def said(node_dir: str) -> Dict[str, Any]:
    """The last status that this node's agent wrote; {} before the first."""
    return max(present.statuses(node_dir).values(), key=lambda each: float(each["time"]), default={})


def snapshot_folder(node_dir: str, spec: Optional[Mapping[str, Any]] = None) -> str:
    """Where the workers of a spec, by default the one that is here, have their snapshots."""
    if spec is None:
        spec = load(os.path.join(node_dir, "spec.json")) or {}
    folder: str = spec.get("env", {}).get("NODEKIT_SNAPSHOT_DIR", os.path.join(node_dir, "snapshots"))
    return folder


def newest_snapshot(folder: str) -> List[int]:
    """(generation, step) of the newest snapshot that is committed in a folder; (-1, 0) without one.

    Of a folder that cannot be listed, for a while what it last held; then an OSError: nobody knows, and the node counts
    as out of sight.
    """
    try:
        names = _patiently(os.listdir, folder)
    except _NOT_FOUND:
        names = []
    except OSError as error:
        held, at = _last_held.get(folder, ([], 0.0))
        if held and time.monotonic() - at < HELD_S:
            return held
        why = "%s; which snapshot is the newest there is not known" % error.strerror
        raise OSError(error.errno, why, folder) from error
    found = (_SNAPSHOT.fullmatch(name) for name in names)
    newest = list(max(((int(each[1]), int(each[2])) for each in found if each), default=(-1, 0)))
    _last_held[folder] = newest, time.monotonic()
    return newest


def tail(path: str, size: int = 4096) -> str:
    """The end of a file; "" without one."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def stop(node_dir: str, grace_s: float, force: bool = False, for_good: bool = True) -> Dict[str, Any]:
    """End this node's agent and all it started: asked first, killed after `grace_s`, at once with `force`.

    Not `for_good`, no word is left that the job is to end with it: the node leaves, and may come back.

    Returns what was found: ``{"was": "running" | "not running", "killed": bool}``.
    """
    node_dir = os.path.expanduser(node_dir)
    warm_agent = _agents.get(node_dir)
    record = load(os.path.join(node_dir, "agent.json"))
    if (
        warm_agent is not None
        and warm_agent.poll() is None
        and (not record or record["pid"] != warm_agent.pid)
    ):
        assert warm_agent.stdin is not None
        warm_agent.stdin.close()  # it never got its go: that ends it
        warm_agent.wait(grace_s)
        return {"was": "not running", "killed": False}
    if agent_alive(node_dir) is None:
        _kill_workers(node_dir)  # the agent was killed and a worker may have outlived it
        _settle_status(node_dir)
        return {"was": "not running", "killed": False}
    killed = False
    if for_good:
        _say_stop(node_dir)
    if not force:
        os.kill(record["pid"], signal.SIGTERM)
    since = time.monotonic()
    had_workers = False
    while agent_alive(node_dir) is not None:
        if warm_agent is not None:
            warm_agent.poll()
        found = said(node_dir)
        has_workers = bool(found.get("workers"))
        if had_workers and not has_workers:
            since = time.monotonic()  # what they saved is still to be copied
        had_workers = has_workers
        # Without workers and copies nothing can be lost, and an agent that waits for its peers inside torch hears no
        # signal.
        end_s = COPYING_GRACE_S if found.get("copying") else min(grace_s, NO_WORKERS_GRACE_S)
        wait_s = 0.0 if force else grace_s if has_workers else end_s
        if not killed and time.monotonic() - since >= wait_s:
            killed = True
            _kill(record["pid"], signal.SIGKILL)
        time.sleep(0.05)
    _kill_workers(node_dir)
    if for_good:
        _settle_status(node_dir)
    return {"was": "running", "killed": killed}


def _say_stop(node_dir: str) -> None:
    """Leave word that it is meant: an agent that ends without is started again."""
    try:
        write_private(os.path.join(node_dir, "stop"), b"")
    except OSError:
        pass  # the disk is full: `_settle_status` tells, when there is room


def _settle_status(node_dir: str) -> None:
    """An agent that could not write down its own end, being killed, was stopped all the same."""
    found = said(node_dir)
    if found and found.get("state") not in ("succeeded", "failed", "stopped"):
        try:
            present.of(node_dir).write(dict(found, time=time.time(), state="stopped", workers=[]))
        except OSError:
            pass


def _kill_workers(node_dir: str) -> None:
    """SIGKILL to the process groups of the recorded workers that still run."""
    for worker in _running_workers(node_dir):
        try:
            os.killpg(worker["pid"], signal.SIGKILL)
        except ProcessLookupError:
            pass


def _running_workers(node_dir: str) -> List[Dict[str, Any]]:
    """The recorded workers that are still the recorded processes.

    A status says nothing of the boot: it is by the agent that ``agent.json`` names, for `go` clears it before it names
    another. After another boot, or on another host, the same pid and start time may be somebody else's.
    """
    record = load(os.path.join(node_dir, "agent.json"))
    if not record or record["boot_id"] != hostfacts.boot_id():
        return []
    workers = said(node_dir).get("workers", [])
    return [each for each in workers if _is_running(each["pid"], each["start_time"])]


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def inject(
    node_dir: str, target: str, number: int, rank: Optional[int] = None, saving_s: float = 0.0
) -> Dict[str, Any]:
    """For `kit drill`: send signal `number` to recorded processes of this node, and to no others.

    `target` is "worker" (that of `rank`, else the first), "workers" (each with all it started), "agent", or "node"
    (agent and workers). With `saving_s`: not before something is being written to the snapshot folder, and not at
    all if that long nothing is. Returns who got it, at what time by this host's clock.
    """
    node_dir = os.path.expanduser(node_dir)
    if saving_s and not _wait_for_save(node_dir, saving_s):
        return {"pids": [], "time": time.time()}
    now, pids = time.time(), []
    agent = agent_alive(node_dir)
    if target in ("agent", "node") and agent is not None:
        _kill(agent, number)
        pids.append(agent)
    workers = _running_workers(node_dir)
    if target == "worker":
        workers = [each for each in workers if rank in (None, each["rank"])][:1]
    for worker in workers if target != "agent" else []:
        _kill(worker["pid"] if target == "worker" else -worker["pid"], number)
        pids.append(worker["pid"])
    return {"pids": pids, "time": now}


def _wait_for_save(node_dir: str, timeout_s: float) -> bool:
    """Wait until a file of the snapshot folder is new or grows."""
    folder = snapshot_folder(node_dir)
    deadline = time.monotonic() + timeout_s
    before = _sizes_in(folder)
    while time.monotonic() < deadline:
        now = _sizes_in(folder)
        if any(size > before.get(name, -1) for name, size in now.items()):
            return True
        before = now
        time.sleep(0.0005)
    return False


def _sizes_in(folder: str) -> Dict[str, int]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    except OSError:  # not there yet, or a file of it was just removed
        return {}


# --- files and programs --------------------------------------------------------------------------------------


def read_file(path: str, limit_bytes: int = 1 << 20) -> Optional[str]:
    """The text of a file, or None when there is none."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8", errors="replace") as file:
            return file.read(limit_bytes)
    except OSError:
        return None


def write_file(path: str, text: str) -> None:
    """Write a 0600 file, and its folder if there is none."""
    path = os.path.expanduser(path)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    write_private(path, text.encode(), durable=True)


def execute(
    argv: List[str], limit_s: float, text: str = "", env: Optional[Mapping[str, Optional[str]]] = None
) -> Dict[str, Any]:
    """Run a program with `text` on its stdin: ``{"status", "out", "err"}``; what is None in `env` is taken away."""
    full = {**os.environ, **(env or {})}
    done = subprocess.run(
        argv,
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        env={name: value for name, value in full.items() if value is not None},
        timeout=limit_s,
    )
    return {"status": done.returncode, "out": done.stdout, "err": done.stderr}


def attend(
    argv: List[str],
    part: Callable[[Any], None],
    cwd: str,
    kit_dir: str,
    env: Mapping[str, str],
    limit_s: float,
    text: str = "",
) -> Dict[str, Any]:
    """Run a program where a run's workers run, with `text` on its stdin, and a sign of life every second.

    It ends with this server, and after `limit_s`: then ``status`` is None in ``{"status", "out", "err"}``.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        [os.path.expanduser(argv[0]), *argv[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        errors="replace",
        cwd=os.path.expanduser(cwd),
        env=_environment(kit_dir, env),
        start_new_session=True,
    )
    _attended.add(process)
    given: Optional[str] = text
    is_late = False
    try:
        while True:
            try:
                out, err = process.communicate(given, timeout=_BEAT_S)
                return {"status": None if is_late else process.returncode, "out": out, "err": err}
            except subprocess.TimeoutExpired:
                given = None
                part(time.monotonic() - begin)
                if not is_late and time.monotonic() - begin > limit_s:
                    is_late = True
                    _end(process)
    finally:
        _attended.discard(process)


def _end(process: "subprocess.Popen[str]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


# --- the server ---------------------------------------------------------------------------------------------

OPS: Dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        hold_port,
        warm,
        go,
        call_in,
        fence,
        grant,
        status,
        stop,
        inject,
        read_file,
        tail,
        write_file,
        execute,
        attend,
    )
}


def serve(modules: ModuleType) -> None:
    """Answer requests until stdin ends. `modules` has more modules whose public functions may be called."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not break the protocol
    lock = threading.Lock()

    def send(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with lock:
            try:
                out.write(data)
                out.flush()
            except OSError:
                leave()  # nobody listens any more

    def leave() -> None:
        """End, and with us what is not to live on."""
        for agent in list(_agents.values()):  # those that never got their go
            if agent.stdin and not agent.stdin.closed:
                agent.stdin.close()
        for process in list(_attended):
            _end(process)
        if "hostshell" in vars(modules):  # else nobody has asked for it
            modules.hostshell.close()
        os._exit(0)

    def answer(request: Dict[str, Any]) -> None:
        try:
            name, args = request["op"], request["args"]
            if "." in name:
                module, _, function = name.partition(".")
                call = getattr(getattr(modules, module), function)
            else:
                call = OPS[name]
            if "part" in call.__code__.co_varnames[: call.__code__.co_argcount]:
                args["part"] = lambda message: send({"id": request["id"], "part": message})
            send({"id": request["id"], "result": call(**args)})
        except BaseException as error:  # it must reach the caller, whatever it is
            failure = {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
            }
            if isinstance(error, OSError) and error.errno is not None:
                failure["errno"] = errno.errorcode.get(error.errno, "")
            send({"id": request["id"], "error": failure})

    send({"ready": {"python": list(sys.version_info[:3]), "pid": os.getpid(), "time": time.time()}})
    for line in sys.stdin.buffer:
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()
    leave()
