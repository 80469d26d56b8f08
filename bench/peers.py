"""The launchers kit is measured against, in a virtual environment of their own that the lab's hosts see too.

It uses this project's torch through a .pth file, so nothing large is installed and kit's own environment
stays as it is.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from rounds import SHARED, note

VENV = SHARED / "peers"
PYTHON = VENV / "bin/python"
PACKAGES = ("deepspeed", "torchrunx")
# What they need beside torch, named here because pip runs with --no-deps for them: it must not bring a torch.
NEEDED = (
    "cloudpickle", "einops", "fabric", "hjson", "msgpack", "ninja", "numpy", "packaging", "psutil",
    "py-cpuinfo", "pydantic", "tqdm",
)  # fmt: skip


def install() -> None:
    """Make the environment and install what can be; what cannot is told by `version` afterwards."""
    note(f"installing {', '.join(PACKAGES)} into {VENV}")
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    (_site_packages() / "project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = f"torch=={importlib.metadata.version('torch')}"
    constraints = VENV / "constraints.txt"
    constraints.write_text(torch + "\n")
    subprocess.run([*pip, "-c", str(constraints), torch, *NEEDED], check=False)
    for package in PACKAGES:
        # DeepSpeed's build imports torch, so it is built in this environment and not in one of pip's.
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", package], check=False)
    subprocess.run([str(PYTHON), "-m", "compileall", "-q", str(_site_packages())], check=False)
    if shutil.which("pdsh") is None:  # DeepSpeed's default launcher
        apt = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "pdsh"]
        subprocess.run(apt, check=False, stdout=subprocess.DEVNULL)


def version(package: str) -> str | None:
    """The version installed, or None."""
    found = list(_site_packages().glob(f"{package}-*.dist-info")) if PYTHON.exists() else []
    return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else None


def _site_packages() -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return VENV / "lib" / version / "site-packages"
