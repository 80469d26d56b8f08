"""Inspect a host for `kit init`: GPUs, cores, interfaces, and interpreters with torch."""

from __future__ import annotations

import glob
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, Iterator, List, Optional

from nodekit.deploy.host import processes
from nodekit.deploy.host.probes.gpu import gpus
from nodekit.deploy.host.probes.network import nics as interfaces

_PROBE_TIMEOUT_S = 6
_PROBES_TIMEOUT_S = 12
"""For all interpreters together: a home folder on a lost server must not delay everything else."""
_MAX_INTERPRETERS = 60
_AT_ONCE = 4
"""How many interpreters are probed in parallel. Each takes some 20 ms of a core, so more would not be faster."""

# Where people put interpreters. In a venv or conda environment look for `python`, elsewhere for `python3`.
_ENVIRONMENTS = (
    "~/venv", "~/.venv", "~/env", "~/*conda*", "~/*forge*", "~/*", "~/*/.venv", "~/*/venv", "~/.virtualenvs/*",
    "~/venvs/*", "~/.venvs/*", "~/envs/*", "~/*conda*/envs/*", "~/*forge*/envs/*", "~/micromamba/envs/*",
    "~/.conda/envs/*", "/opt/*conda*", "/opt/*forge*", "/opt/*conda*/envs/*", "/opt/*forge*/envs/*", "/opt/*",
    "/venv", "/venv/*", "/workspace/venv", "/workspace/.venv",
)  # fmt: skip
_PLAIN = ("/usr/bin/python3", "/usr/local/bin/python3")

# Run by each interpreter: locates torch without importing it, which takes seconds and may touch the GPUs.
_PROBE = r"""
import importlib.util, json, os, re, sys
try:
    spec = importlib.util.find_spec("torch")
except (ImportError, ValueError):
    spec = None
torch = None
if spec is not None:
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
            torch = re.search(r"^__version__ = '([^']+)'", file.read(), re.MULTILINE).group(1)
    except (OSError, TypeError, AttributeError):
        try:
            from importlib import metadata
            torch = metadata.version("torch")
        except Exception:
            pass  # a folder that happens to have the name
print("\n" + json.dumps([sys.executable, "%d.%d.%d" % sys.version_info[:3], sys.prefix, torch]))
"""


def survey(python: str = "") -> Dict[str, Any]:
    """Return the hardware and the interpreters of this host; `python` is an interpreter named by the user, or ""."""
    with ThreadPoolExecutor(1) as beside:
        found = beside.submit(gpus.look_up)
        answer = {
            "hostname": socket.gethostname(),
            "boot_id": processes.boot_id(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024**2,
            "nics": interfaces.nics(),
            "pythons": interpreters(python),
        }
        answer.update(gpus=found.result()["usable"], gpu_problem=found.result()["problem"])
        return answer


def interpreters(named: str = "") -> List[Dict[str, Any]]:
    """Return each interpreter once: ``[{"path", "version", "torch", "default", "named"}]``, the running one first.

    A path in the home folder begins with ``~/``, so that it is the same on hosts with different users. `torch` is its
    version or None; `default` marks the running interpreter, which kit uses if the inventory names no other.
    """
    found: Dict[str, Dict[str, Any]] = {}
    named = os.path.expanduser(named)
    candidates = list(dict.fromkeys(_candidates(named)))[:_MAX_INTERPRETERS]
    deadline = time.monotonic() + _PROBES_TIMEOUT_S

    def probe(path: str) -> Optional[List[Any]]:
        left_s = deadline - time.monotonic()
        return _probe(path, min(left_s, _PROBE_TIMEOUT_S)) if left_s > 0 else None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for candidate, answer in zip(candidates, pool.map(probe, candidates)):  # noqa: B905, it is 3.10's
            if answer is None:
                continue
            executable, version, prefix, torch = answer
            one = {
                "path": _from_home(executable or candidate),
                "version": version,
                "torch": torch,
                "default": candidate == sys.executable,
                "named": False,
            }
            found.setdefault(prefix, one)
            found[prefix]["named"] |= candidate == named
    return list(found.values())


def _candidates(named: str) -> Iterator[str]:
    yield sys.executable
    if named:
        yield named
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if os.environ.get(name):
            yield os.path.join(os.environ[name], "bin/python")
    for pattern in _ENVIRONMENTS:
        for path in sorted(glob.glob(os.path.join(os.path.expanduser(pattern), "bin/python"))):
            if os.access(path, os.X_OK):
                yield path
    for path in _PLAIN:
        if os.access(path, os.X_OK):
            yield path
    for folder in [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]:
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "python3.[0-9]*"))):
            if os.path.basename(path)[8:].isdigit() and os.access(path, os.X_OK):
                yield path
    for path in sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin/python"))):
        yield path


def _probe(path: str, limit_s: float) -> Optional[List[Any]]:
    try:
        done = subprocess.run(
            [path, "-B", "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            cwd="/",  # with `-c`, Python would look for torch in the current folder, too
            check=False,
        )
        answer = json.loads(done.stdout.splitlines()[-1]) if done.stdout else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None  # not an interpreter, or a broken one
    return answer if isinstance(answer, list) and len(answer) == 4 else None


def _from_home(path: str) -> str:
    home = os.path.expanduser("~").rstrip("/")
    return "~" + path[len(home) :] if home and path.startswith(home + "/") else path
