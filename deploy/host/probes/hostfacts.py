"""Look up what a host is: interfaces, routes, GPUs, versions, the working folder."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import pwd
import re
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from typing import Any, Dict, List, Optional, Sequence, Tuple

from nodekit.deploy.host import programs
from nodekit.deploy.host.probes import nics

_boot_ids: List[str] = []  # read once: it is asked for several times a second
SMI_TIMEOUT_S = 6.0  # nvidia-smi takes seconds where persistence mode is off; one that hangs is a finding


def facts(
    workdir: str,
    kit_digest: str = "",
    peers: Sequence[str] = (),
    modules: Sequence[str] = (),
    files: Sequence[str] = (),
) -> Dict[str, Any]:
    """What `deploy/plan/check.py` needs to know of this host, in one answer.

    Args:
        workdir: kit's folder here, ``~`` allowed; made if it does not exist.
        kit_digest: asks whether this version of kit's package is here already.
        peers: addresses of the other hosts, to find the interface that routes to each.
        modules: names of packages that may be here or not.
        files: absolute paths, and programs of the PATH, that the job's command runs.
    """
    workdir = os.path.expanduser(workdir)
    found: Dict[str, Any] = {
        "hostname": socket.gethostname(),
        "user": _user(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": module_version("torch"),
        "modules": [name for name in modules if importlib.util.find_spec(name) is not None],
        "time": time.time(),
        "cpus": len(os.sched_getaffinity(0)),
        "interfaces": interfaces(),
        "routes": {peer: source_address(peer) for peer in peers},
        "gpus": gpus(),
        "workdir": workdir,
        "workdir_problem": None,
        "workdir_errno": "",
        "rsync": shutil.which("rsync") is not None,
        "boot_id": boot_id(),
        "files": {each: programs.kind_here(each) for each in files},
        "has_kit": False,
    }
    try:
        os.makedirs(workdir, mode=0o700, exist_ok=True)
        found["workdir_id"] = folder_id(workdir)
        disk = os.statvfs(workdir)
        found["free_bytes"] = disk.f_bavail * disk.f_frsize
        found["has_kit"] = bool(kit_digest) and os.path.isdir(os.path.join(workdir, "kit", kit_digest))
    except OSError as error:
        found["workdir_problem"] = "%s: %s" % (error.filename or workdir, error.strerror)
        found["workdir_errno"] = errno.errorcode.get(error.errno or 0, "")
    return found


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def boot_id() -> str:
    """This boot of the host: a pid means nothing after another one."""
    if not _boot_ids:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                _boot_ids.append(file.read().strip())
        except FileNotFoundError:  # no Linux
            _boot_ids.append("")
    return _boot_ids[0]


def folder_id(folder: str) -> str:
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


def module_version(name: str) -> Optional[str]:
    """The version of an installed package, read without importing it (torch takes seconds), or None."""
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


def interfaces() -> List[Dict[str, Any]]:
    """Each interface with its addresses without prefix: ``[{"name", "up", "addresses": [...]}]``, IPv4 first."""
    return [
        {
            "name": each["name"],
            "up": each["up"],
            "addresses": [address.partition("/")[0] for address in each["addresses"]],
        }
        for each in nics.nics()
    ]


def source_address(peer: str) -> Optional[str]:
    """The address this host would send from to reach `peer`, as the kernel routes, or None. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, 9, 0, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def gpus() -> List[Dict[str, Any]]:
    """The GPUs nvidia-smi lists: ``[{"index", "name", "memory_mib"}]``; none where there is no nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    text, _ = output(query, SMI_TIMEOUT_S)
    ours = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # where Slurm, or the user, has chosen some of them
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdigit():
            if ours.replace(",", "").isdigit() and cells[0] not in ours.split(","):
                continue
            memory = int(cells[2]) if cells[2].isdigit() else 0
            found.append({"index": int(cells[0]), "name": cells[1], "memory_mib": memory})
    return found


def output(argv: List[str], timeout_s: float) -> Tuple[str, str]:
    """A program's output, or why there is none; one that hangs in the kernel is left there, as it cannot be ended."""
    if shutil.which(argv[0]) is None:
        return "", "not installed"
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ, LC_ALL="C"),
        )
        text = process.communicate(timeout=timeout_s)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        process.kill()
        return "", "no answer within %.0f s" % timeout_s
    except OSError as error:
        return "", str(error.strerror)
    if process.returncode != 0:
        return "", " ".join(text.split())[:300] or "exit status %d" % process.returncode
    return text, ""
