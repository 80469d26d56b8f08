"""The hands of kit on one host: a small server on stdin and stdout that reads the host, starts and stops agents.

Its source travels to the host's own python over the connection (`deploy/link.py`), so the host needs nothing
of ours installed. Standard library only, and Python 3.8 syntax, so that an old interpreter can still say its
version. One JSON object per line: ``{"id", "op", "args"}`` in; ``{"id", "part"}`` any number of times and then
``{"id", "result"}`` or ``{"id", "error"}`` out. It ends when its stdin does; agents it started live on.
"""

import errno
import fcntl
import glob
import json
import os
import platform
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

LOG_CHUNK_BYTES = 256 * 1024  # of one file in one message: a flood of output must not delay the status
_POLL_S = 0.1
_BEAT_S = 2.0
_held_ports = {}  # port -> the listening socket that keeps it ours until an agent takes it over


# --- what the host is ---------------------------------------------------------------------------------------


def facts(workdir, kit_digest="", peers=()):
    """What `deploy/check.py` needs to know of this host, in one answer.

    Args:
        workdir: kit's folder here, ``~`` allowed; made if it does not exist.
        kit_digest: asks whether this version of kit's package is here already.
        peers: addresses of the other hosts, to find the interface that routes to each.
    """
    workdir = os.path.expanduser(workdir)
    found = {
        "hostname": socket.gethostname(),
        "user": _user(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": module_version("torch"),
        "time": time.time(),
        "cpus": len(os.sched_getaffinity(0)),
        "interfaces": interfaces(),
        "routes": {peer: source_address(peer) for peer in peers},
        "gpus": gpus(),
        "workdir": workdir,
        "workdir_problem": None,
        "rsync": shutil.which("rsync") is not None,
        "boot_id": _boot_id(),
        "has_kit": False,
    }
    try:
        os.makedirs(workdir, mode=0o700, exist_ok=True)
        found["workdir_id"] = _folder_id(workdir)
        disk = os.statvfs(workdir)
        found["free_bytes"] = disk.f_bavail * disk.f_frsize
        found["has_kit"] = bool(kit_digest) and os.path.isdir(os.path.join(workdir, "kit", kit_digest))
    except OSError as error:
        found["workdir_problem"] = "%s: %s" % (error.filename or workdir, error.strerror)
    return found


def _user():
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _boot_id():
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _folder_id(folder):
    """A name of the folder itself, the same on every host that mounts it: made once, by whoever comes first."""
    path = os.path.join(folder, ".id")
    draft = "%s.%s.%d" % (path, socket.gethostname(), os.getpid())
    if not os.path.exists(path):
        with open(draft, "w") as file:
            file.write(os.urandom(8).hex())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            if not os.path.exists(path):
                os.rename(draft, path)
        if os.path.exists(draft):
            os.unlink(draft)
    with open(path) as file:
        return file.read().strip()


def module_version(name):
    """The version of an installed package, read without importing it (torch takes seconds), or None."""
    import importlib.util
    from importlib import metadata

    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    if spec.origin:
        try:
            with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
                match = re.search(r"^__version__ = '([^']+)'", file.read(), re.MULTILINE)
            if match:
                return match.group(1)
        except OSError:
            pass
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def interfaces():
    """Each interface with its addresses: ``[{"name", "up", "addresses": [...]}]``, IPv4 first."""
    names = [name for _, name in socket.if_nameindex()]
    addresses = {name: [] for name in names}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        size = 40 * 128
        buffer = bytearray(size)
        import array

        request = array.array("B", buffer)
        got = fcntl.ioctl(
            probe.fileno(), 0x8912, struct.pack("iL", size, request.buffer_info()[0])  # SIOCGIFCONF
        )
        used = struct.unpack("iL", got)[0]
        data = request.tobytes()[:used]
        for start in range(0, used, 40):
            name = data[start : start + 16].split(b"\0", 1)[0].decode()
            name = name.split(":", 1)[0]  # eth0:1 is an alias of eth0
            addresses.setdefault(name, []).append(socket.inet_ntoa(data[start + 20 : start + 24]))
    try:
        with open("/proc/net/if_inet6") as file:
            for line in file:
                packed, _, _, scope, _, name = line.split()
                if scope != "20":  # link-local addresses need a zone and will not do as a MASTER_ADDR
                    addresses.setdefault(name, []).append(
                        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))
                    )
    except OSError:
        pass
    return [
        {"name": name, "up": _is_up(name), "addresses": found} for name, found in sorted(addresses.items())
    ]


def _is_up(name):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8913, struct.pack("256s", name.encode()))  # SIOCGIFFLAGS
        except OSError:
            return False
    return bool(struct.unpack("H", answer[16:18])[0] & 1)


def source_address(peer):
    """The address this host would send from to reach `peer`, as the kernel routes, or None. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, 9, 0, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return None


def gpus():
    """The GPUs nvidia-smi lists: ``[{"index", "name", "memory_mib"}]``; none where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=8,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    found = []
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdigit():
            memory = int(cells[2]) if cells[2].isdigit() else 0
            found.append({"index": int(cells[0]), "name": cells[1], "memory_mib": memory})
    return found


def hold_port():
    """A free port of this host, kept listening so that nobody else gets it before the agent does."""
    try:
        held = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("::", 0))
    except OSError:  # a host without IPv6
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.bind(("", 0))
    held.listen(1024)
    port = held.getsockname()[1]
    _held_ports[port] = held
    return port


# --- agents -------------------------------------------------------------------------------------------------


def warm(node_dir, python, kit_dir, env):
    """Start this node's agent; it imports torch and then waits for `go`, or ends when we do.

    `env` holds what must not be written anywhere (secrets): it reaches the agent in its environment alone.
    """
    node_dir = os.path.expanduser(node_dir)
    os.makedirs(node_dir, mode=0o700, exist_ok=True)
    alive = agent_alive(node_dir)
    if alive:
        raise RuntimeError("an agent of this run is alive here already (pid %d)" % alive)
    full = dict(os.environ)
    full.update(env)
    full["PYTHONPATH"] = os.pathsep.join(filter(None, [kit_dir, full.get("PYTHONPATH", "")]))
    full["PYTHONUNBUFFERED"] = "1"
    full["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
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


_agents = {}  # node_dir -> the Popen of an agent this server started


def go(node_dir, spec, port=None):
    """Give the warm agent its spec (written 0600) and, on the rendezvous host, the socket that holds the port."""
    node_dir = os.path.expanduser(node_dir)
    agent = _agents[node_dir]
    if port is not None:
        spec = dict(spec, listen_fd=_held_ports[port].fileno())
    write_private(os.path.join(node_dir, "spec.json"), json.dumps(spec, indent=1).encode())
    for name in ("stop", "status.json"):
        if os.path.exists(os.path.join(node_dir, name)):
            os.unlink(os.path.join(node_dir, name))
    record = {"pid": agent.pid, "start_time": start_time(agent.pid), "boot_id": _boot_id()}
    write_private(os.path.join(node_dir, "agent.json"), json.dumps(record).encode())
    try:
        agent.stdin.write(b"go\n")
        agent.stdin.close()
    except BrokenPipeError:
        raise RuntimeError("the agent ended before it could start: " + _tail(os.path.join(node_dir, "agent.log")))
    return record


def write_private(path, data):
    """Write a 0600 file in one step: a reader sees all of it or the one before."""
    draft = "%s.%d" % (path, os.getpid())
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(draft, path)


def start_time(pid):
    """When the kernel started `pid`, in clock ticks since boot: with the pid, the name of one process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return None


def _is_running(pid, started):
    """Whether exactly that process runs; one that ended but was not waited for yet does not."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return int(fields[19]) == started and fields[0] not in (b"Z", b"X")


def _load(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def agent_alive(node_dir):
    """The pid of this node's agent if exactly the recorded process is running, else None."""
    record = _load(os.path.join(os.path.expanduser(node_dir), "agent.json"))
    if record and record["boot_id"] == _boot_id() and _is_running(record["pid"], record["start_time"]):
        return record["pid"]
    return None


def status(node_dir):
    """The node's last status, with whether its agent is alive, and the end of its log if it said nothing."""
    node_dir = os.path.expanduser(node_dir)
    agent = _agents.get(node_dir)
    if agent is not None:
        agent.poll()  # reaps it, so that a dead agent is not taken for a live one
    alive = agent_alive(node_dir)
    found = _load(os.path.join(node_dir, "status.json")) or {}
    found["alive"] = alive is not None
    found["known"] = os.path.isdir(node_dir)
    if not alive:
        found["agent_log"] = _tail(os.path.join(node_dir, "agent.log"))
    return found


def _tail(path, size=4096):
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def stop(node_dir, grace_s, force=False):
    """End this node's agent and all it started: asked first, killed after `grace_s`, at once with `force`.

    Returns what was found: ``{"was": "running" | "not running", "killed": bool}``.
    """
    node_dir = os.path.expanduser(node_dir)
    warm_agent = _agents.get(node_dir)
    record = _load(os.path.join(node_dir, "agent.json"))
    if warm_agent is not None and warm_agent.poll() is None and (not record or record["pid"] != warm_agent.pid):
        warm_agent.stdin.close()  # it never got its go: that ends it
        warm_agent.wait(grace_s)
        return {"was": "not running", "killed": False}
    if agent_alive(node_dir) is None:
        _kill_workers(node_dir)  # the agent was killed and a worker may have outlived it
        return {"was": "not running", "killed": False}
    killed = False
    if not force:
        os.kill(record["pid"], signal.SIGTERM)
    deadline = time.monotonic() + (0 if force else grace_s)
    while agent_alive(node_dir) is not None:
        if warm_agent is not None:
            warm_agent.poll()
        if time.monotonic() >= deadline:
            killed = True
            _kill(record["pid"], signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.05)
    _kill_workers(node_dir)
    return {"was": "running", "killed": killed}


def _kill_workers(node_dir):
    """SIGKILL to the process groups of the recorded workers that are still the recorded processes."""
    for worker in (_load(os.path.join(node_dir, "status.json")) or {}).get("workers", []):
        if _is_running(worker["pid"], worker["start_time"]):
            try:
                os.killpg(worker["pid"], signal.SIGKILL)
            except ProcessLookupError:
                pass


def _kill(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


# --- logs ---------------------------------------------------------------------------------------------------


def logs(node_dir, offsets=None, tail_bytes=None, final=False):
    """New whole lines of each log file since `offsets`: ``(new offsets, [[file, text], ...])``.

    With `tail_bytes`, a file seen for the first time starts that far before its end. `final`: nothing more will
    be written, so a last line without its newline is given one.
    """
    offsets = dict(offsets or {})
    found = []
    folder = os.path.join(os.path.expanduser(node_dir), "logs")
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.log"))):
        name = os.path.basename(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = offsets.get(name)
            if start is None:
                start = max(0, size - tail_bytes) if tail_bytes is not None else 0
            if size <= start:
                offsets[name] = start
                continue
            file.seek(start)
            data = file.read(LOG_CHUNK_BYTES)
        whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if whole == 0 and len(data) == LOG_CHUNK_BYTES:
            whole = len(data)  # one endless line
        if final and start + len(data) == size and whole < len(data):
            whole, data = len(data), data + b"\n"
        offsets[name] = start + whole
        if whole:
            text = data if final and start + whole == size else data[:whole]
            found.append([name, text.decode("utf-8", "replace")])
    return offsets, found


def follow(node_dir, offsets=None, tail_bytes=None, part=None):
    """Send status and new log lines as they come, at least one message every two seconds, until the agent is gone."""
    node_dir = os.path.expanduser(node_dir)
    last_status, last_sent = None, 0.0
    while True:
        alive = status(node_dir)["alive"]  # asked before the logs are read: what was written last is not missed
        offsets, lines = logs(node_dir, offsets, tail_bytes, final=not alive)
        now = status(node_dir)
        now["alive"] = alive
        if lines or now != last_status or time.monotonic() - last_sent > _BEAT_S:
            part({"status": now, "logs": lines, "offsets": offsets, "time": time.time()})
            last_status, last_sent = now, time.monotonic()
        if not alive and not lines:
            return now
        time.sleep(0 if lines else _POLL_S)


def read_file(path, limit_bytes=1 << 20):
    """The text of a file, or None when there is none."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8", errors="replace") as file:
            return file.read(limit_bytes)
    except OSError:
        return None


# --- the server ---------------------------------------------------------------------------------------------

OPS = {
    function.__name__: function
    for function in (facts, hold_port, warm, go, status, stop, logs, follow, read_file)
}


def serve(modules):
    """Answer requests until stdin ends. `modules` are more modules whose public functions may be called."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not break the protocol
    lock = threading.Lock()

    def send(message):
        data = json.dumps(message).encode() + b"\n"
        with lock:
            try:
                out.write(data)
                out.flush()
            except OSError:
                os._exit(0)  # nobody listens any more

    def answer(request):
        try:
            name, args = request["op"], request["args"]
            if "." in name:
                module, _, function = name.partition(".")
                call = getattr(modules[module], function)
            else:
                call = OPS[name]
            if name == "follow":
                args["part"] = lambda message: send({"id": request["id"], "part": message})
            send({"id": request["id"], "result": call(**args)})
        except BaseException as error:  # it must reach the caller, whatever it is
            import traceback

            failure = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
            if isinstance(error, OSError) and error.errno is not None:
                failure["errno"] = errno.errorcode.get(error.errno, "")
            send({"id": request["id"], "error": failure})

    send({"ready": {"python": list(sys.version_info[:3]), "pid": os.getpid(), "time": time.time()}})
    for line in sys.stdin.buffer:
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()
    for agent in _agents.values():  # those that never got their go
        if agent.stdin and not agent.stdin.closed:
            agent.stdin.close()
    os._exit(0)
