"""Start and stop the agent of a node, and its ranks."""

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

NO_WORKERS_GRACE_S = 3.0  # how long an agent without workers may take to end before it is killed
UNKILLABLE_S = 10.0  # after SIGKILL, how long to wait before a process counts as unkillable
KILLED_S = 3.0  # how long to wait for killed ranks to end
_POLL_S = 0.05
COPYING_GRACE_S = 23.0  # for copying the last snapshot to other nodes: the agent itself gives up after 20 s


class _Started(NamedTuple):
    """An agent that this server started."""

    process: "subprocess.Popen[bytes]"
    stdin: "IO[bytes]"
    """Open while the agent waits for its start; closing the pipe before that ends the agent."""
    fds: FrozenSet[int]
    """Descriptors of the sockets in `ports.held` that the agent inherited."""
    log_from: int
    """Offset in ``agent.log`` from which the lines are this agent's, in bytes."""


_started: Dict[str, _Started] = {}  # node_dir → the agent started last
_starting = threading.Lock()
"""Serialises starts: a slow or abandoned request may still run beside the next one for the same node."""


def prestart(
    node_dir: str, python: str, kit_dir: str, env: Mapping[str, str], env_file: str = ""
) -> Dict[str, int]:
    """Start this node's agent, which imports torch and then waits for `start`; it ends if this server does before.

    Args:
        node_dir: the node's folder.
        python: the interpreter of the agent.
        kit_dir: kit's package.
        env: the job's environment, which libraries read on import. It may contain secrets, so it is not written.
        env_file: a JSON file with further variables, for secrets that are not in `env`.

    Raises:
        RuntimeError: an agent is alive already, or `env_file` was removed.
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
        if found is None:  # never start a rank without variables that the user's script relies on
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
            pass  # the disk is full: `start` must write too, and reports it
    finally:
        os.close(log)
    return {"pid": agent.pid}


def environment(kit_dir: str, env: Mapping[str, str]) -> Dict[str, str]:
    """Return this host's environment with `env` over it, and kit's package first on PYTHONPATH."""
    full = {**os.environ, **env}
    full["PYTHONPATH"] = os.pathsep.join(filter(None, [kit_dir, full.get("PYTHONPATH", "")]))
    return full


def leave() -> None:
    """End the agents that were started, and never got a spec."""
    for started in list(_started.values()):
        started.stdin.close()


def _take_spec(node_dir: str, spec: Mapping[str, Any]) -> None:
    path = os.path.join(node_dir, "spec.json")
    files.write_private(path, json.dumps(spec, indent=1).encode(), durable=True)


def start(
    node_dir: str, spec: Dict[str, Any], port: Optional[int] = None, called_off: int = -1
) -> AgentRecord:
    """Give the waiting agent its spec (a 0600 file) and, on the rendezvous host, the socket that holds `port`.

    Fences up to `called_off` are ignored: their generation never started. This server closes its copy of the socket, so
    that connections are refused once the agent has ended.

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
        # Another connection may have started an agent while this one was silent. Of two agents only one is on record,
        # and nobody would stop the other.
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
        if before:  # the last status is another agent's: clear it
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
    """Kill an agent that another server has launched, and that never got its start.

    If the connection to that server was cut, this host may take hours to notice, and until then neither would end.
    """
    with fence.locked(node_dir):
        waiting: Optional[AgentRecord] = files.load(os.path.join(node_dir, "waiting.json"))
        if waiting and waiting != status.agent_record(node_dir) and status.pid_if_alive(waiting):
            processes.send(-waiting["pid"], signal.SIGKILL)


def join(node_dir: str, spec: Dict[str, Any], called_off: int = -1) -> NodeStatus:
    """Have a live agent join the generation of another spec, by replacing its own; return the node's status.

    Raises:
        RuntimeError: no agent is alive here, or a later generation has been here.
    """
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
                return status.status(node_dir)  # the agent has this spec already, and retries by itself
            spec = dict(spec, call=own.get("call", 0) + 1)
        _take_spec(node_dir, spec)
    return status.status(node_dir)


def stop(node_dir: str, grace_s: float, force: bool = False, for_good: bool = True) -> Stopped:
    """End this node's agent and all its processes: SIGTERM, and SIGKILL after `grace_s`, or at once with `force`.

    With `for_good` a file ``stop`` tells the agent that the job is to end; without it the node leaves, and may rejoin.
    """
    node_dir = os.path.expanduser(node_dir)
    with _starting:  # so that no `start` gives the agent a spec meanwhile
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
        _kill_workers(node_dir)  # workers may have outlived a killed agent
        if for_good:
            _settle_status(node_dir)
        return {"was": "not running", "killed": False}
    if for_good:
        _say_stop(node_dir)
    if not force:
        processes.send(record["pid"], signal.SIGTERM)
    killed = _wait_for_end(node_dir, record, grace_s, force)
    # If another agent was started meanwhile, the ranks are its own.
    if status.agent_alive(node_dir) is None:
        _kill_workers(node_dir)
        if for_good:
            _settle_status(node_dir)
    return {"was": "running", "killed": killed}


def _end_without_spec(process: "subprocess.Popen[bytes]", grace_s: float) -> bool:
    """Wait until an agent without a spec has ended, and kill it after `grace_s`; return whether it was killed.

    The agent notices the closed pipe once it has imported torch, which takes long from a slow file server. It has
    nothing to save.

    Raises:
        RuntimeError: SIGKILL does not end the agent.
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
    """Wait until this agent has ended, and kill it when its time is over; return whether it was killed.

    Raises:
        RuntimeError: SIGKILL does not end the agent.
    """
    killed = had_workers = False
    since = time.monotonic()
    pid = record["pid"]
    while status.pid_if_alive(record) is not None:
        found = status.said(node_dir)
        has_workers = bool(found.get("workers"))
        if had_workers and not has_workers:
            since = time.monotonic()  # the agent still has to copy the snapshot that the workers saved
        had_workers = has_workers
        # Without workers and copies nothing can be lost, and an agent that waits for its peers inside torch does not
        # handle signals.
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
    """Write the file ``stop``, without which the supervisor starts an agent that has ended again."""
    try:
        files.write_private(os.path.join(node_dir, "stop"), b"")
    except OSError:
        pass  # the disk is full: `_settle_status` records the stop if there is room later


def _settle_status(node_dir: str) -> None:
    """Write the final status of an agent that was killed, and so could not write it."""
    found = status.said(node_dir)
    if found and found.get("state") not in FINISHED:
        try:
            current_status.of(node_dir).write(dict(found, time=time.time(), state="stopped", workers=[]))
        except OSError:
            pass


def _kill_workers(node_dir: str) -> None:
    """Kill the ranks that are left, and wait up to `KILLED_S` for their end; unkillable ones are reported elsewhere."""
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

    `target` is "worker" (that of `rank`, else the first), "workers" (each with its process group), "agent", or "node"
    (agent and workers). With `saving_s`, wait until a file is being written to the snapshot folder, and send nothing if
    none is within that time. Return the pids, and the time by this host's clock.
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
    """Wait until a file of the snapshot folder appears or grows; False if none does in time."""
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
    except OSError:  # the folder does not exist yet, or one of its files was just removed
        return {}
