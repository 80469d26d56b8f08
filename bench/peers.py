"""The launchers that kit is compared with, in a virtual environment that the lab's hosts see too.

The environment uses this project's torch through a .pth file, so nothing large is installed, and kit's own environment
does not change.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from rounds import SHARED, note

VENV = SHARED / "peers"
PYTHON = VENV / "bin/python"
PACKAGES = ("deepspeed", "torchrunx")
# Their dependencies except torch: they are installed with --no-deps, so that pip does not install another torch.
NEEDED = (
    "cloudpickle", "einops", "fabric", "hjson", "msgpack", "ninja", "numpy", "packaging", "psutil",
    "py-cpuinfo", "pydantic", "tqdm",
)  # fmt: skip
# Those of bench/recovery are separate: their dependencies would slow down the imports of the others.
RESILIENT_VENV = SHARED / "resilient-peers"
RESILIENT_PACKAGES = ("nvidia-resiliency-ext", "torchft")
RESILIENT_NEEDED = (
    "defusedxml", "numpy", "nvidia-ml-py", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk",
    "packaging", "psutil", "pyyaml",
)  # fmt: skip


def install(venv: Path = VENV, packages: Sequence[str] = PACKAGES, needed: Sequence[str] = NEEDED) -> None:
    """Create the environment, and install the packages; `version` later shows which could not be installed."""
    note(f"installing {', '.join(packages)} into {venv}")
    python, site_packages = venv / "bin/python", _site_packages(venv)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    (site_packages / "project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = f"torch=={importlib.metadata.version('torch')}"
    constraints = venv / "constraints.txt"
    constraints.write_text(torch + "\n")
    subprocess.run([*pip, "-c", str(constraints), torch, *needed], check=False)
    for package in packages:
        # DeepSpeed's build imports torch, so build it in this environment, not in an isolated one.
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", package], check=False)
    subprocess.run([str(python), "-m", "compileall", "-q", str(site_packages)], check=False)
    if "deepspeed" in packages and shutil.which("pdsh") is None:  # DeepSpeed's default launcher
        apt = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "pdsh"]
        subprocess.run(apt, check=False, stdout=subprocess.DEVNULL)


def version(package: str, venv: Path = VENV) -> str | None:
    """Return the installed version; None if it is not installed."""
    name = package.replace("-", "_")
    found = list(_site_packages(venv).glob(f"{name}-*.dist-info")) if (venv / "bin/python").exists() else []
    return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else None


def _site_packages(venv: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return venv / "lib" / version / "site-packages"
