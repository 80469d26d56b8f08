"""Start and stop the agent of a node, and what it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from typing import IO, Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional

from nodekit.deploy.host import current_status, errors, files, ports, processes
from nodekit.deploy.host.node import fence, status
from nodekit.deploy.host.schema import FINISHED, AgentRecord, NodeStatus, Stopped

NO_WORKERS_GRACE_S = 3.0
UNKILLABLE_S = 10.0
KILLED_S = 3.0  # for ranks to end once they were killed
_POLL_S = 0.05
COPYING_GRACE_S = 23.0  # to copy the last snapshot to other nodes: the agent gives up after 20 s by itself


class _Started(NamedTuple):
    """An agent that this server started."""

    process: "subprocess.Popen[bytes]"
    stdin: "IO[bytes]"
    """Open while the agent waits for its start; closing it before that ends the agent."""
    fds: FrozenSet[int]
    """The sockets in `ports.held` that it was given, those that were there then."""
    log_from: int
    """Where its own words begin in ``agent.log``, behind those of the agents before it."""


_started: Dict[str, _Started] = {}  # node_dir → the last one
_starting = threading.Lock()
"""A request that was given up, or is slow, may be under way beside the next one for the same node."""


def prestart(
    node_dir: str, python: str, kit_dir: str, env: Mapping[str, str], env_file: str = ""
) -> Dict[str, int]:
    """Start this node's agent; it imports torch and then waits for `start`, or ends when we do.

    `env` is the job's, which libraries read as they are imported; secrets are in it, and it is written nowhere, or
    they are in `env_file` (JSON).

    Raises:
        RuntimeError: an agent is alive already, or the secrets are no more where they were.
    """
    node_dir = os.path.expanduser(node_dir)
    files.make_private(node_dir)
    alive = status.agent_alive(node_dir)
    if alive:
        error = RuntimeError("an agent of this run is alive already (pid %d)" % alive)
        raise errors.with_cure(error, "stop it with kit down")
    _end_waiting(node_dir)
    full = environment(kit_dir, env)
    if env_file:
        found = files.load(env_file)
        if found is None:  # never start a rank without what the user has it count on
            error = RuntimeError("the job's secrets (%s) were removed when it ended" % env_file)
            raise errors.with_cure(error, "kit up brings them again")
        full.update(found)
    full["PYTHONUNBUFFERED"] = "1"
    log = os.open(
        os.path.join(node_dir, "agent.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    try:
        with _starting:
            fds = frozenset(each.fileno() for each in list(ports.held.values()))
            log_from = os.lseek(log, 0, os.SEEK_END)
            agent = subprocess.Popen(
                [os.path.expanduser(python), "-m", "nodekit.deploy.agent", node_dir],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=node_dir,
                env=full,
                start_new_session=True,  # it must survive this connection
                pass_fds=fds,
            )
            assert agent.stdin is not None
            if node_dir in _started:
                _started[node_dir].stdin.close()
            _started[node_dir] = _Started(agent, agent.stdin, fds, log_from)
        try:
            record = json.dumps(_record(agent.pid, log_from)).encode()
            files.write_private(os.path.join(node_dir, "waiting.json"), record)
        except OSError:
            pass  # the disk is full: `start`, which must write, tells
    finally:
        os.close(log)
    return {"pid": agent.pid}


def environment(kit_dir: str, env: Mapping[str, str]) -> Dict[str, str]:
    """Return this host's environment and `env`, with kit to be found first."""
    full = {**os.environ, **env}
    full["PYTHONPATH"] = os.pathsep.join(filter(None, [kit_dir, full.get("PYTHONPATH", "")]))
    return full


def leave() -> None:
    """End the agents that were started and were never given a spec."""
    for started in list(_started.values()):
        started.stdin.close()


def _take_spec(node_dir: str, spec: Mapping[str, Any]) -> None:
    path = os.path.join(node_dir, "spec.json")
    files.write_private(path, json.dumps(spec, indent=1).encode(), durable=True)


def start(
    node_dir: str, spec: Dict[str, Any], port: Optional[int] = None, called_off: int = -1
) -> AgentRecord:
    """Give the agent that waits its spec (written 0600) and, on the rendezvous host, the socket that holds the port.

    Fences up to `called_off` hold no longer: the generation they were for was never begun. The port is held no longer
    either: from now on nobody but the agent listens there, and without it a connection is refused.

    Raises:
        RuntimeError: a later generation has been here, or another request has started an agent since.
    """
    with _starting:
        listener = ports.held.pop(port) if port is not None else None
        try:
            return _start(
                os.path.expanduser(node_dir), spec, listener.fileno() if listener else None, called_off
            )
        finally:
            if listener:
                listener.close()


def _start(node_dir: str, spec: Dict[str, Any], listen_fd: Optional[int], called_off: int) -> AgentRecord:
    agent, stdin, fds, log_from = _started[node_dir]
    if stdin.closed or (listen_fd is not None and listen_fd not in fds):
        raise RuntimeError("another request has started an agent here meanwhile")
    with fence.locked(node_dir):
        # Over another connection, while this one was silent. Of two agents nobody would know one, nor stop it.
        alive = status.agent_alive(node_dir)
        if alive:
            stdin.close()
            raise RuntimeError("another request has started an agent here meanwhile (pid %d)" % alive)
        own = status.load_spec(node_dir) or {"generation": -1}
        if spec.get("is_host") and own["generation"] == spec["generation"]:
            raise RuntimeError("the rendezvous of generation %d was here and is lost" % own["generation"])
        fence.enter(node_dir, own, spec, called_off)
        if listen_fd is not None:
            spec = dict(spec, listen_fd=listen_fd)
        _take_spec(node_dir, spec)
        if os.path.exists(os.path.join(node_dir, "stop")):
            os.unlink(os.path.join(node_dir, "stop"))
        before = status.said(node_dir)
        if before:  # by another agent
            current_status.of(node_dir).write(
                {"run": before["run"], "node": before["node"], "time": time.time()}
            )
        record = _record(agent.pid, log_from)
        files.write_private(os.path.join(node_dir, "agent.json"), json.dumps(record).encode())
    try:
        stdin.write(b"go\n")
        stdin.close()
    except BrokenPipeError:
        last_words = files.tail(os.path.join(node_dir, "agent.log"), since=log_from)
        raise RuntimeError("the agent ended before it could start: " + last_words) from None
    return record


def _record(pid: int, log_from: int) -> AgentRecord:
    start_time, boot_id = processes.start_time(pid), processes.boot_id()
    return {"pid": pid, "start_time": start_time, "boot_id": boot_id, "log_from": log_from}


def _end_waiting(node_dir: str) -> None:
    """End an agent that another server has launched, and that never got its start.

    Where the connection to that server was cut, this host may not notice for hours; until then neither of them ends.
    """
    with fence.locked(node_dir):
        waiting: Optional[AgentRecord] = files.load(os.path.join(node_dir, "waiting.json"))
        if waiting and waiting != status.agent_record(node_dir) and status.pid_if_alive(waiting):
            processes.send(-waiting["pid"], signal.SIGKILL)


def join(node_dir: str, spec: Dict[str, Any], called_off: int = -1) -> NodeStatus:
    """Call a live agent into the generation of another spec, which it finds in place of its own."""
    node_dir = os.path.expanduser(node_dir)
    if status.agent_alive(node_dir) is None:
        raise RuntimeError("no agent is alive here")
    with fence.locked(node_dir):
        own = status.load_spec(node_dir) or {"generation": -1}
        fence.enter(node_dir, own, spec, called_off)
        if own["generation"] == spec["generation"]:
            state = status.said(node_dir).get("state")
            has_moved = any(own.get(key) != spec.get(key) for key in ("master_addr", "master_port"))
            if state != "fenced" and not (state == "orphaned" and has_moved):
                return status.status(node_dir)  # it knows all that, and tries again by itself
            spec = dict(spec, call=own.get("call", 0) + 1)
        _take_spec(node_dir, spec)
    return status.status(node_dir)


def stop(node_dir: str, grace_s: float, force: bool = False, for_good: bool = True) -> Stopped:
    """End this node's agent and all it started: asked first, killed after `grace_s`, at once with `force`.

    With `for_good` a file ``stop`` says that the job is to end; without it the node leaves, and may rejoin.
    """
    node_dir = os.path.expanduser(node_dir)
    with _starting:  # else it could be given a spec meanwhile
        started = _started.get(node_dir)
        record = status.agent_record(node_dir)
        if started and (
            started.process.poll() is not None or (record and record["pid"] == started.process.pid)
        ):
            started = None
        if started:
            started.stdin.close()
    if started:
        killed = _end_without_spec(started.process, 0.0 if force else grace_s)
        return {"was": "not running", "killed": killed}
    if os.path.isdir(node_dir):
        _end_waiting(node_dir)
    if record is None or status.pid_if_alive(record) is None:
        _kill_workers(node_dir)  # the agent was killed and a worker may have outlived it
        if for_good:
            _settle_status(node_dir)
        return {"was": "not running", "killed": False}
    if for_good:
        _say_stop(node_dir)
    if not force:
        processes.send(record["pid"], signal.SIGTERM)
    killed = _wait_for_end(node_dir, record, grace_s, force)
    # Where the next one was started meanwhile, the ranks are its own.
    if status.agent_alive(node_dir) is None:
        _kill_workers(node_dir)
        if for_good:
            _settle_status(node_dir)
    return {"was": "running", "killed": killed}


def _end_without_spec(process: "subprocess.Popen[bytes]", grace_s: float) -> bool:
    """Wait until an agent that gets no spec has ended, and kill it after `grace_s`; returns whether that was needed.

    It hears of that when it has imported torch, which from a slow file server takes long; and it has nothing to save.

    Raises:
        RuntimeError: SIGKILL does not end it.
    """
    try:
        process.wait(grace_s)
        return False
    except subprocess.TimeoutExpired:
        processes.send(-process.pid, signal.SIGKILL)
    try:
        process.wait(UNKILLABLE_S)
    except subprocess.TimeoutExpired:
        raise errors.with_cure(RuntimeError(processes.unkillable(process.pid)), "reboot the host") from None
    return True


def _wait_for_end(node_dir: str, record: AgentRecord, grace_s: float, force: bool) -> bool:
    """Wait until this agent has ended, and kill it when its time is over; returns whether that was needed.

    Raises:
        RuntimeError: SIGKILL does not end it.
    """
    killed = had_workers = False
    since = time.monotonic()
    pid = record["pid"]
    while status.pid_if_alive(record) is not None:
        found = status.said(node_dir)
        has_workers = bool(found.get("workers"))
        if had_workers and not has_workers:
            since = time.monotonic()  # what they saved is still to be copied
        had_workers = has_workers
        # Without workers and copies nothing can be lost, and an agent that waits for its peers inside torch hears no
        # signal.
        end_s = COPYING_GRACE_S if found.get("copying") else min(grace_s, NO_WORKERS_GRACE_S)
        wait_s = 0.0 if force else grace_s if has_workers else end_s
        if not killed and time.monotonic() - since >= wait_s:
            killed, since = True, time.monotonic()
            processes.send(pid, signal.SIGKILL)
        elif killed and time.monotonic() - since > UNKILLABLE_S:
            raise errors.with_cure(RuntimeError(processes.unkillable(pid)), "reboot the host")
        time.sleep(_POLL_S)
    return killed


def _say_stop(node_dir: str) -> None:
    """Leave word that it is meant: an agent that ends without is started again."""
    try:
        files.write_private(os.path.join(node_dir, "stop"), b"")
    except OSError:
        pass  # the disk is full: `_settle_status` tells, when there is room


def _settle_status(node_dir: str) -> None:
    """Write down that an agent was stopped that could not do so itself, being killed."""
    found = status.said(node_dir)
    if found and found.get("state") not in FINISHED:
        try:
            current_status.of(node_dir).write(dict(found, time=time.time(), state="stopped", workers=[]))
        except OSError:
            pass


def _kill_workers(node_dir: str) -> None:
    """Kill the ranks that are left, and wait until they have ended; what the kernel keeps is told by who finds it."""
    for _ in range(round(KILLED_S / _POLL_S)):
        left = status.running_workers(node_dir)
        if not left:
            break
        for worker in left:
            processes.send(-worker["pid"], signal.SIGKILL)
        time.sleep(_POLL_S)


def inject(
    node_dir: str, target: str, number: int, rank: Optional[int] = None, saving_s: float = 0.0
) -> Dict[str, Any]:
    """Send signal `number` to recorded processes of this node, and to no others, for `kit drill`.

    `target` is "worker" (that of `rank`, else the first), "workers" (each with all it started), "agent", or "node"
    (agent and workers). With `saving_s`: not before something is being written to the snapshot folder, and not at
    all if that long nothing is. Returns who got it, at what time by this host's clock.
    """
    node_dir = os.path.expanduser(node_dir)
    if saving_s and not _wait_for_save(node_dir, saving_s):
        return {"pids": [], "time": time.time()}
    now = time.time()
    pids: List[int] = []
    agent = status.agent_alive(node_dir)
    if target in ("agent", "node") and agent is not None:
        processes.send(agent, number)
        pids.append(agent)
    workers = status.running_workers(node_dir)
    if target == "worker":
        workers = [each for each in workers if rank in (None, each["rank"])][:1]
    for worker in workers if target != "agent" else []:
        processes.send(worker["pid"] if target == "worker" else -worker["pid"], number)
        pids.append(worker["pid"])
    return {"pids": pids, "time": now}


def _wait_for_save(node_dir: str, timeout_s: float) -> bool:
    """Wait until a file of the snapshot folder is new or grows."""
    folder = status.snapshot_folder(node_dir)
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
