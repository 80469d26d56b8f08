"""What `kit check` looks at on a host, and what `kit clean` ends there. Sent to the host with `deploy/host/remote.py`.

Standard library only, and Python 3.8 syntax, so that an old interpreter can still say its version. Each part answers
for itself: what cannot be looked at is told as its ``error``, and hides nothing else.
"""

from __future__ import annotations

import concurrent.futures
import errno
import glob
import json
import locale
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import sys
import time
from importlib import metadata
from importlib.machinery import PathFinder
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

from nodekit.deploy.host import present
from nodekit.deploy.host.probes import hostfacts

_OTHERS_TIMEOUT_S = 2.0
_PAGE_BYTES = 4096
_TRIAL_BYTES = 64 * 1024  # written to the working folder, and removed again
_KERNEL_LOG_BYTES = 1 << 20
_XID = "NVRM: Xid"


def now() -> float:
    """This host's clock."""
    return time.time()


def probe(
    workdir: str,
    kit_digest: str = "",
    peers: Sequence[str] = (),
    modules: Sequence[str] = (),
    imports: Sequence[str] = (),
    source: str = "",
    path: Sequence[str] = (),
    files: Sequence[str] = (),
) -> Dict[str, Any]:
    """All that `deploy/preflight/checkup.py` wants to know of this host, in one answer.

    Args:
        workdir: kit's folder here.
        kit_digest: as of `hostfacts.facts`; so are `peers`, `modules` and `files`.
        imports: top-level names that the job imports.
        source: the job's script: this interpreter says whether it is Python to it.
        path: where the job's PYTHONPATH has it look for modules, besides the interpreter's own.
    """
    workdir = os.path.expanduser(workdir)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        gpus = pool.submit(_guarded, _gpus, pool)
        basic = pool.submit(hostfacts.facts, workdir, kit_digest, peers, modules, files)
        software = pool.submit(_guarded, _software, list(imports), source, list(path))
        found = {"facts": basic.result()}
        # The folder is there from here on, if it can be.
        place = pool.submit(_guarded, _workdir, workdir)
        left = pool.submit(_guarded, _runs, workdir)
        found.update(
            software=software.result(), workdir=place.result(), runs=left.result(), gpus=gpus.result()
        )
    return found


def _guarded(look: Callable[..., Dict[str, Any]], *args: Any) -> Dict[str, Any]:
    try:
        return look(*args)
    except Exception as error:  # told, and the rest goes on
        return {"error": "%s: %s" % (type(error).__name__, error)}


# --- the working folder -------------------------------------------------------------------------------------


def _workdir(workdir: str) -> Dict[str, Any]:
    found: Dict[str, Any] = {"problem": None, "errno": "", "quota": ""}
    trial = os.path.join(workdir, ".trial.%s.%d" % (socket.gethostname(), os.getpid()))
    try:
        handle = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, bytes(_TRIAL_BYTES))
            os.fsync(handle)  # a network file system tells of a quota no sooner
        finally:
            os.close(handle)
            os.unlink(trial)
    except OSError as error:
        found["problem"] = "%s: %s" % (workdir, error.strerror)
        found["errno"] = errno.errorcode.get(error.errno or 0, "")
    disk = os.statvfs(workdir)
    found["free_bytes"] = disk.f_bavail * disk.f_frsize
    found["size_bytes"] = disk.f_blocks * disk.f_frsize
    found["free_inodes"] = disk.f_favail if disk.f_files else None  # some file systems have no such limit
    found["quota"] = hostfacts.output(["quota", "-w", "-p"], _OTHERS_TIMEOUT_S)[0]
    return found


# --- software -----------------------------------------------------------------------------------------------


def _software(imports: List[str], source: str, path: List[str]) -> Dict[str, Any]:
    paths = [os.path.expanduser(each) for each in path]
    return {
        "cuda": _torch_cuda(),
        "nccl": _first_version("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
        "missing": [name for name in imports if not _is_there(name, paths)],
        "syntax": _syntax_problem(source),
        "locale": _locale_problem(),
        "encoding": sys.getfilesystemencoding(),
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "shm": _shm(),
        "infiniband": _names("/sys/class/infiniband"),
    }


def _torch_cuda() -> Optional[str]:
    """The CUDA runtime that torch was built for, read without importing it."""
    spec = PathFinder.find_spec("torch", [each for each in sys.path if each])
    if spec is None or not spec.origin:
        return None
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
            match = re.search(r"^cuda\b[^=]*= '([^']+)'", file.read(), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else None


def _first_version(*names: str) -> Optional[str]:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None


def _is_there(name: str, path: List[str]) -> bool:
    """Whether the job could import a top-level module, which is not imported."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            # Not "", which is the login folder here, and what lies there is not the job's.
            where = [*path, *(each for each in sys.path if each)] if finder is PathFinder else None
            if find is not None and find(name, where) is not None:
                return True
        except Exception:  # noqa: S110  # a finder of somebody's: it does not find it
            pass
    return False


def _syntax_problem(source: str) -> Optional[str]:
    try:
        compile(source, "script", "exec", dont_inherit=True)
    except SyntaxError as error:
        return "line %s: %s" % (error.lineno, error.msg)
    except ValueError as error:  # a null byte
        return str(error)
    return None


def _locale_problem() -> Optional[str]:
    try:
        locale.setlocale(locale.LC_CTYPE, "")
    except locale.Error:
        asked = next((name for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "LANG")
        return "%s=%s is not installed" % (asked, os.environ.get(asked, ""))
    return None


def _shm() -> Optional[Dict[str, Any]]:
    try:
        disk = os.statvfs("/dev/shm")  # noqa: S108  # where shared memory is, not a temporary file
    except OSError:
        return None
    return {
        "size_bytes": disk.f_blocks * disk.f_frsize,
        "free_bytes": disk.f_bavail * disk.f_frsize,
        "writable": os.access("/dev/shm", os.W_OK),  # noqa: S108
    }


def _names(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


# --- GPUs ---------------------------------------------------------------------------------------------------


def _gpus(pool: concurrent.futures.Executor) -> Dict[str, Any]:
    found: Dict[str, Any] = {"smi": "", "problem": "", "topo": "", "p2p": "", "owners": {}, "xid": []}
    found["num_cards"] = _num_cards()
    if shutil.which("nvidia-smi") is None:
        return dict(found, problem="not installed" if found["num_cards"] else "")
    asked = [
        pool.submit(hostfacts.output, ["nvidia-smi", *arguments], hostfacts.SMI_TIMEOUT_S)
        for arguments in (["-q", "-x"], ["topo", "-m"], ["topo", "-p2p", "r"])
    ]
    (smi, problem), (topo, _), (p2p, _) = [each.result() for each in asked]
    pids = sorted({int(pid) for pid in re.findall(r"<pid>(\d+)</pid>", smi)})
    return dict(
        found,
        smi=re.sub(r"<supported_clocks>.*?</supported_clocks>", "", smi, flags=re.DOTALL),  # half of it
        problem=problem,
        topo=topo,
        p2p=p2p,
        owners={str(pid): _owner(pid) for pid in pids},
        xid=_xid_lines(),
    )


def _num_cards() -> int:
    """NVIDIA's GPUs on the PCI bus, with a driver or without."""
    found = 0
    for device in glob.glob("/sys/bus/pci/devices/*"):
        kind = (_read(device + "/vendor") or "").strip(), (_read(device + "/class") or "")[:4]
        found += kind == ("0x10de", "0x03")
    return found


def _owner(pid: int) -> str:
    """Who runs a process; "" when it cannot be seen from here, as from inside a container."""
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _xid_lines() -> List[str]:
    """What the driver has said in the kernel's log since the last boot, as far as we may read that."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # Where only the administrators may, members of some groups have the journal.
        text = hostfacts.output(
            ["journalctl", "-k", "-b", "-q", "--no-pager", "-g", _XID], _OTHERS_TIMEOUT_S
        )[0]
        return [line for line in text.splitlines() if _XID in line][-50:]
    lines, size = [], 0
    try:
        while size < _KERNEL_LOG_BYTES:
            try:
                record = os.read(log, 8192)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while it was read: the next one will do
                    continue
                break
            size += len(record)
            if _XID.encode() in record:
                lines.append(record.decode("utf-8", "replace").partition(";")[2].split("\n")[0])
    finally:
        os.close(log)
    return lines[-50:]


# --- earlier runs -------------------------------------------------------------------------------------------


def _runs(workdir: str) -> Dict[str, Any]:
    return {"runs": runs(workdir)}


def runs(workdir: str) -> List[Dict[str, Any]]:
    """Each run of ours that has something alive on this host: ``run``, ``node``, ``node_dir``, and what it is.

    ``agent`` is the agent's pid if exactly the recorded one runs. ``processes`` are the recorded workers and what
    belongs to their process groups, ``shm`` the shared memory that a recorded worker made and nobody has open.
    """
    found = []
    processes: Optional[Dict[int, Dict[str, Any]]] = None
    pattern = os.path.join(glob.escape(os.path.expanduser(workdir)), "runs", "*", "*", "agent.json")
    for path in sorted(glob.glob(pattern)):
        node_dir = os.path.dirname(path)
        record = _load(path) or {}
        if record.get("boot_id") != hostfacts.boot_id():
            continue  # another host's, where the folder is shared; or of before the last boot, which ended it
        if processes is None:
            processes = _processes()
        run = _run(node_dir, record, processes)
        if run["agent"] or run["processes"] or run["shm"]:
            found.append(run)
    return found


def _run(node_dir: str, record: Dict[str, Any], processes: Dict[int, Dict[str, Any]]) -> Dict[str, Any]:
    status = present.statuses(node_dir).get(os.path.basename(node_dir), {})
    run_id = os.path.basename(os.path.dirname(node_dir))
    agent = _same(record, processes)
    workers = {each["pid"]: each for each in status.get("workers", [])}
    own = [
        dict(each, rank=workers[each["pgrp"]].get("rank"))
        for each in processes.values()
        if each["pgrp"] in workers and _belongs(each, workers[each["pgrp"]], processes, run_id)
    ]
    sockets = {} if agent else _listening([each["pid"] for each in own])
    return {
        "run": run_id,
        "node": os.path.basename(node_dir),
        "node_dir": node_dir,
        "state": status.get("state", ""),
        "agent": record["pid"] if agent else None,
        "processes": [
            {
                "pid": each["pid"],
                "start_time": each["start_time"],
                "rank": each["rank"],
                "rss_bytes": each["rss_bytes"],
                "ports": sockets.get(each["pid"], []),
            }
            for each in own
        ],
        "shm": [] if agent else _shared_memory(node_dir, processes),
        "quiet_s": time.time() - _last_sign(node_dir),
    }


def _same(record: Dict[str, Any], processes: Dict[int, Dict[str, Any]]) -> bool:
    """Whether exactly the recorded process runs: a pid alone may be another one's by now."""
    process = processes.get(record.get("pid", 0))
    return process is not None and process["start_time"] == record.get("start_time")


def _belongs(
    process: Dict[str, Any],
    worker: Dict[str, Any],
    processes: Dict[int, Dict[str, Any]],
    run_id: str,
) -> bool:
    """Whether a process in the group that has a recorded worker's pid is of that worker.

    The group keeps its number while anything is in it. Where the worker itself has ended, the number could since have
    been used anew, and then the environment that the run's processes have from their start tells.
    """
    if worker["pid"] in processes:
        return _same(worker, processes)
    try:
        with open("/proc/%d/environ" % process["pid"], "rb") as file:
            return b"NODEKIT_RUN_ID=" + run_id.encode() in file.read().split(b"\0")
    except OSError:
        return False


def _processes() -> Dict[int, Dict[str, Any]]:
    """All processes that have not ended: pid → what is needed of it."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % name, "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if fields[0] in (b"Z", b"X"):
            continue
        found[int(name)] = {
            "pid": int(name),
            "pgrp": int(fields[2]),
            "start_time": int(fields[19]),
            "rss_bytes": int(fields[21]) * _PAGE_BYTES,
        }
    return found


def _listening(pids: List[int]) -> Dict[int, List[int]]:
    """The TCP ports that processes listen at."""
    ports: Dict[str, int] = {}
    for name in ("tcp", "tcp6") if pids else ():
        try:
            with open("/proc/net/" + name) as file:
                for line in file.read().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A":
                        ports["socket:[%s]" % fields[9]] = int(fields[1].rpartition(":")[2], 16)
        except OSError:
            pass
    found: Dict[int, Set[int]] = {}
    for pid in pids:
        for link in glob.glob("/proc/%d/fd/*" % pid):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target in ports:
                found.setdefault(pid, set()).add(ports[target])
    return {pid: sorted(own) for pid, own in found.items()}


def _shared_memory(node_dir: str, processes: Dict[int, Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Segments of recorded workers that have ended: torch names one by the pid that made it."""
    segments = glob.glob("/dev/shm/torch_*_*")  # noqa: S108  # where shared memory is, not a temporary file
    if not segments:
        return []
    booted = time.time() - float((_read("/proc/uptime") or "0").split()[0])
    started: Dict[int, float] = {}
    for line in (_read(os.path.join(node_dir, "events.jsonl")) or "").splitlines():
        if '"workers-started"' in line:
            try:
                event = json.loads(line)
                if event["time"] > booted:  # before that a pid was another process's
                    for each in event["workers"]:
                        started.setdefault(each["pid"], event["time"])
            except (ValueError, KeyError):
                pass  # a line that was being written when the disk was full
    ended = _last_sign(node_dir)
    found = []
    for path in segments:
        match = re.match(r"torch_(\d+)_", os.path.basename(path))
        pid = int(match.group(1)) if match else 0
        if pid not in started or pid in processes:
            continue
        try:
            about = os.stat(path)
        except OSError:
            continue
        # Made while the run was at work, and so by its worker and by none that had the pid before or after it.
        in_time = started[pid] - 5 <= about.st_mtime <= ended + 5
        if about.st_uid == os.getuid() and in_time and not _is_open(path):
            found.append({"path": path, "inode": about.st_ino, "size_bytes": about.st_size})
    return found


def _is_open(path: str) -> bool:
    """Whether a process of ours has a file open or mapped; another user's cannot, for it is 0600."""
    for maps in glob.glob("/proc/[0-9]*/maps"):
        if path in (_read(maps) or ""):
            return True
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(link) == path:
                return True
        except OSError:
            pass
    return False


def _last_sign(node_dir: str) -> float:
    """When the run's ranks here have last said anything; 0 if they never did."""
    last = 0.0
    for name in ("progress", "logs"):
        for path in glob.glob(os.path.join(glob.escape(node_dir), name, "*")):
            try:
                last = max(last, os.stat(path).st_mtime)
            except OSError:
                pass
    return last


def _read(path: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _load(path: str) -> Any:
    try:
        return json.loads(_read(path) or "null")
    except ValueError:
        return None


def clean(workdir: str, names: Sequence[Sequence[str]], grace_s: float) -> List[Dict[str, Any]]:
    """End what is left of runs whose agent is gone, each named by run and node; what was ended, as of `runs`.

    Everything is looked up anew by its record, so that nothing is ended that took a pid meanwhile: asked first, and
    killed after `grace_s`.
    """
    asked = {tuple(each) for each in names}
    ended = [run for run in runs(workdir) if (run["run"], run["node"]) in asked and run["agent"] is None]
    left = {each["pid"]: each for run in ended for each in run["processes"]}
    deadline = time.monotonic() + grace_s
    number = int(signal.SIGTERM)
    while left:
        for pid in left:
            _signal(pid, number)
        number = 0 if time.monotonic() < deadline else int(signal.SIGKILL)
        time.sleep(0.05)
        there = _processes()
        left = {pid: each for pid, each in left.items() if _same(each, there)}
        if number == signal.SIGKILL and time.monotonic() > deadline + 5:
            raise RuntimeError("SIGKILL did not end %s (in the kernel?)" % ", ".join(map(str, left)))
    for run in ended:
        for segment in run["shm"]:
            try:
                if os.stat(segment["path"]).st_ino == segment["inode"]:
                    os.unlink(segment["path"])
            except FileNotFoundError:
                pass
    return ended


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
        if number == signal.SIGTERM:
            os.kill(pid, signal.SIGCONT)  # a stopped one hears only this
    except ProcessLookupError:
        pass
