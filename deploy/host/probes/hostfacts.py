"""Gather the facts of a host: interfaces, routes, GPUs, versions, the work folder."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import pwd
import re
import shutil
import socket
import sys
import sysconfig
import time
from importlib.machinery import PathFinder
from typing import Any, Dict, List, Mapping, Optional, Sequence

from nodekit.deploy.host import processes, programs
from nodekit.deploy.host.files import make_private, owner
from nodekit.deploy.host.probes.gpu import gpus
from nodekit.deploy.host.probes.network import nics

_OWN_DISKS = frozenset(
    ("btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "tmpfs", "vfat", "xfs", "zfs")
)
"""File systems that are mounted by one machine at a time."""


def facts(
    workdir: str,
    peers: Sequence[str] = (),
    modules: Sequence[str] = (),
    files: Sequence[str] = (),
    smi_timeout_s: float = gpus.SMI_TIMEOUT_S,
) -> Dict[str, Any]:
    """Return all facts of this host that `deploy/plan/check.py` needs.

    Args:
        workdir: kit's folder here, ``~`` allowed; created if it does not exist.
        peers: addresses of the other hosts, to find the interface that routes to each.
        modules: names of packages; the answer has those that are installed.
        files: absolute paths, and programs on the PATH, that the job's command runs.
        smi_timeout_s: how long nvidia-smi may take.
    """
    workdir = os.path.expanduser(workdir)
    found: Dict[str, Any] = {
        "hostname": socket.gethostname(),
        "user": _user(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "pip": pip(),
        "torch": module_version("torch"),
        "torch_build": torch_build(),
        "modules": [name for name in modules if importlib.util.find_spec(name) is not None],
        "time": time.time(),
        "cpus": len(os.sched_getaffinity(0)),
        "interfaces": interfaces(),
        "routes": {peer: source_address(peer) for peer in peers},
        "workdir": workdir,
        "workdir_problem": None,
        "workdir_errno": "",
        "workdir_owner": owner(workdir),
        "rsync": shutil.which("rsync") is not None,
        "boot_id": processes.boot_id(),
        "ssh_port": os.environ.get("SSH_CONNECTION", "").rpartition(" ")[2],
        "files": {each: programs.kind_here(each) for each in files},
        "gpus": gpus.look_up(smi_timeout_s, torch_build()),
    }
    try:
        make_private(workdir)
        found["workdir_id"] = folder_id(workdir)
        disk = os.statvfs(workdir)
        found["free_bytes"] = disk.f_bavail * disk.f_frsize
    except OSError as error:
        found["workdir_problem"] = "%s: %s" % (error.filename or workdir, error.strerror)
        found["workdir_errno"] = errno.errorcode.get(error.errno or 0, "")
    return found


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def folder_id(folder: str) -> str:
    """Return an id of a folder, the same on every host that mounts it; created by the first host that asks."""
    name = read_folder_id(folder)
    return name or _made_folder_id(folder)


def read_folder_id(folder: str) -> str:
    """As `folder_id`, but return "" if the folder has no id yet.

    On a local disk the id also has boot id, device and inode after an "@": a copy of the folder, in an image, another
    home or another container of that image, contains the same id file.

    Raises:
        OSError: the id file cannot be read.
    """
    try:
        with open(os.path.join(folder, ".id")) as file:
            text = file.read().strip()
    except FileNotFoundError:
        return ""
    if not text or not _is_on_own_disk(folder):
        return text
    here = os.stat(folder)
    return "%s@%s:%d:%d" % (text, processes.boot_id(), here.st_dev, here.st_ino)


def folders(ids: Mapping[str, str]) -> Dict[str, str]:
    """Return host → an id that is equal for hosts that share a folder, from their `folder_id`; "" stays "".

    If the file server is itself a host, it has the folder on a local disk, and the others mount it from there. So ids
    with and without the part after "@" count as one folder.
    """
    shared = set(ids.values())
    names = {each: each.partition("@")[0] for each in shared}
    return {host: names[each] if names[each] in shared else each for host, each in ids.items()}


def _is_on_own_disk(folder: str) -> bool:
    device = os.stat(folder).st_dev
    number = "%d:%d" % (os.major(device), os.minor(device))
    try:
        with open("/proc/self/mountinfo") as mounts:
            found = [line.split(" - ", 1)[1].split()[0] for line in mounts if line.split()[2] == number]
    except (OSError, IndexError):
        return False
    return bool(found) and found[0] in _OWN_DISKS


def _made_folder_id(folder: str) -> str:
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
    return read_folder_id(folder)


def module_version(name: str) -> Optional[str]:
    """Return the version of a package without importing it, as torch takes seconds; None if it is not installed."""
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
    from importlib import metadata  # takes 20 ms, and is rarely needed

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def pip() -> str:
    """Return ``installs`` if pip can install here, ``managed`` if it refuses to (PEP 668), ``none`` without pip."""
    marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    if sys.prefix == sys.base_prefix and os.path.exists(marker):
        return "managed"
    return "installs" if importlib.util.find_spec("pip") else "none"


def torch_build() -> str:
    """Return the platform torch was built for, without importing it; "" if unknown.

    For example ``cuda 12.8``, ``hip 6.4``, ``xpu 20250302`` (Intel), ``npu 2.7`` (Ascend) or ``cpu``.
    """
    if npu := module_version("torch_npu"):  # an extension, installed beside a torch for the CPU
        return "npu %s" % npu
    spec = PathFinder.find_spec("torch", [each for each in sys.path if each])
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:  # type: ignore
            found = re.findall(r"^(cuda|hip|xpu)\b[^=]*= (None|'[^']+')", file.read(), re.MULTILINE)
    except (OSError, AttributeError, TypeError):  # no torch, or a build unlike PyTorch's own
        return ""
    built = ["%s %s" % (name, version.strip("'")) for name, version in found if version != "None"]
    return built[0] if built else "cpu" if found else ""


def interfaces() -> List[Dict[str, Any]]:
    """Return each interface: ``[{"name", "up", "addresses": [...]}]``; addresses without prefix length, IPv4 first."""
    return [
        {
            "name": each["name"],
            "up": each["up"],
            "addresses": [address.partition("/")[0] for address in each["addresses"]],
        }
        for each in nics.nics()
    ]


def source_address(peer: str) -> Optional[str]:
    """Return the source address for packets to `peer` by the kernel's routes, None without a route. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, 9, 0, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None
