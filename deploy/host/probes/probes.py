"""Inspect a host for `kit check`.

The parts are independent: one that fails returns its ``error``, and the others still answer.
"""

from __future__ import annotations

import concurrent.futures
import errno
import glob
import locale
import os
import pwd
import re
import resource
import shutil
import socket
import sys
import time
from importlib import metadata
from importlib.machinery import PathFinder
from typing import Any, Callable, Dict, List, Optional, Sequence

from nodekit.deploy.host import broken, files, processes
from nodekit.deploy.host.probes import hostfacts, kernel, leftovers
from nodekit.deploy.host.probes.gpu import gpus

_OTHERS_TIMEOUT_S = 2.0
_TRIAL_BYTES = 64 * 1024  # size of a file that is written to the work folder, and removed again
_LONG_BUILD_S = 300.0  # a torch extension is compiled within a minute or two; an older lock is left over
_XID = "NVRM: Xid"
_BAD_INFOROM = re.compile(r"infoROM is corrupted at gpu ([0-9A-Fa-f:.]+)")


def now() -> float:
    """Return the time of this host's clock, in seconds since 1970."""
    return time.time()


def probe(
    workdir: str,
    peers: Sequence[str] = (),
    modules: Sequence[str] = (),
    imports: Sequence[str] = (),
    source: str = "",
    path: Sequence[str] = (),
    files: Sequence[str] = (),
) -> Dict[str, Any]:
    """Return everything about this host that `deploy/preflight/checkup.py` needs.

    Args:
        workdir: kit's folder here.
        peers: as for `hostfacts.facts`; so are `modules` and `files`.
        imports: top-level modules that the job imports.
        source: the text of the job's script, whose syntax this interpreter checks.
        path: the folders of the job's PYTHONPATH.
    """
    workdir = os.path.expanduser(workdir)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        cards = pool.submit(_guarded, _gpus, pool)
        basic = pool.submit(hostfacts.facts, workdir, peers, modules, files)
        software = pool.submit(_guarded, _software, list(imports), source, list(path))
        found = {"facts": basic.result()}
        # `hostfacts.facts` has created the folder, if that is possible.
        place = pool.submit(_guarded, _workdir, workdir)
        left = pool.submit(_guarded, _runs, workdir)
        found.update(
            software=software.result(), workdir=place.result(), runs=left.result(), gpus=cards.result()
        )
    return found


def _guarded(look: Callable[..., Dict[str, Any]], *args: Any) -> Dict[str, Any]:
    try:
        return look(*args)
    except Exception as error:  # reported, and the other parts go on
        return {"error": "%s: %s" % (type(error).__name__, error)}


def _runs(workdir: str) -> Dict[str, Any]:
    return {"runs": leftovers.runs(workdir), "broken": broken.recall(workdir)}


# --- the working folder -------------------------------------------------------------------------------------


def _workdir(workdir: str) -> Dict[str, Any]:
    found: Dict[str, Any] = {"problem": None, "errno": "", "quota": ""}
    trial = os.path.join(workdir, ".trial.%s.%d" % (socket.gethostname(), os.getpid()))
    try:
        handle = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, bytes(_TRIAL_BYTES))
            os.fsync(handle)  # a network file system reports an exceeded quota only then
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
    found["quota"] = processes.output(["quota", "-w", "-p"], _OTHERS_TIMEOUT_S)[0]
    return found


# --- software -----------------------------------------------------------------------------------------------


def _software(imports: List[str], source: str, path: List[str]) -> Dict[str, Any]:
    paths = [os.path.expanduser(each) for each in path]
    return {
        "nccl": _first_version("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
        "missing": [name for name in imports if not _is_there(name, paths)],
        "syntax": _syntax_problem(source),
        "locale": _locale_problem(),
        "encoding": sys.getfilesystemencoding(),
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "shm": _shm(),
        "infiniband": files.names("/sys/class/infiniband"),
        "build_locks": _build_locks(),
    }


def _build_locks() -> List[str]:
    """Old locks of extensions that torch compiles: whoever is killed meanwhile leaves one, and all wait for it then."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    found = []
    for path in glob.glob(os.path.join(glob.escape(cache), "torch_extensions", "*", "*", "lock")):
        try:
            if time.time() - os.stat(path).st_mtime > _LONG_BUILD_S:
                found.append(path)
        except OSError:  # it is released
            pass
    return sorted(found)


def _first_version(*names: str) -> Optional[str]:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None


def _is_there(name: str, path: List[str]) -> bool:
    """Whether the job could import a top-level module; found without importing it."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            # Without "", which is the login folder here, but the code folder for the job.
            where = [*path, *(each for each in sys.path if each)] if finder is PathFinder else None
            if find is not None and find(name, where) is not None:
                return True
        except Exception:  # noqa: S110  # a broken third-party finder has not found it
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


# --- GPUs ---------------------------------------------------------------------------------------------------


def _gpus(pool: concurrent.futures.Executor) -> Dict[str, Any]:
    found: Dict[str, Any] = {"smi": "", "problem": "", "topo": "", "p2p": "", "owners": {}, "xid": []}
    found.update(inforom=[], num_cards=gpus.num_cards())
    if shutil.which("nvidia-smi") is None:
        return dict(found, problem="not installed" if found["num_cards"] else "")
    asked = [
        pool.submit(
            processes.output,
            ["nvidia-smi", *arguments],
            gpus.SMI_TIMEOUT_S,
            also_good=[gpus.SMI_BAD_INFOROM],
        )
        # Without arguments it prints the table, which warns of a corrupt infoROM; -q -x may not do that
        # (github.com/microsoft/pai/issues/3756).
        for arguments in (["-q", "-x"], ["topo", "-m"], ["topo", "-p2p", "r"], [])
    ]
    (smi, problem), (topo, _), (p2p, _), (table, _) = [each.result() for each in asked]
    pids = sorted({int(pid) for pid in re.findall(r"<pid>(\d+)</pid>", smi)})
    return dict(
        found,
        # The clocks are half of the output.
        smi=re.sub(r"<supported_clocks>.*?</supported_clocks>", "", smi, flags=re.DOTALL),
        problem=problem,
        topo=topo,
        p2p=p2p,
        inforom=sorted(set(_BAD_INFOROM.findall(table + smi))),
        owners={str(pid): _owner(pid) for pid in pids},
        xid=_xid_lines(),
    )


def _owner(pid: int) -> str:
    """Return the user of a process; "" if the process is not visible from here, as from inside a container."""
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _xid_lines() -> List[str]:
    """Return the driver's Xid lines in the kernel's log since the last boot, as far as this user may read the log."""
    lines = kernel.messages()
    if lines is None:
        # If only root may read the log, members of some groups may still read the journal.
        argv = ["journalctl", "-k", "-b", "-q", "--no-pager", "-g", _XID]
        lines = processes.output(argv, _OTHERS_TIMEOUT_S)[0].splitlines()
    return [line for line in lines if _XID in line][-50:]
