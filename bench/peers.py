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
from collections.abc import Sequence
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
# Those of bench/recovery are apart: what they bring would make the imports of the others longer.
RESILIENT_VENV = SHARED / "resilient-peers"
RESILIENT_PACKAGES = ("nvidia-resiliency-ext", "torchft")
RESILIENT_NEEDED = (
    "defusedxml", "numpy", "nvidia-ml-py", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk",
    "packaging", "psutil", "pyyaml",
)  # fmt: skip


def install(venv: Path = VENV, packages: Sequence[str] = PACKAGES, needed: Sequence[str] = NEEDED) -> None:
    """Make the environment and install what can be; what cannot is told by `version` afterwards."""
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
        # DeepSpeed's build imports torch, so it is built in this environment and not in one of pip's.
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", package], check=False)
    subprocess.run([str(python), "-m", "compileall", "-q", str(site_packages)], check=False)
    if "deepspeed" in packages and shutil.which("pdsh") is None:  # DeepSpeed's default launcher
        apt = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "pdsh"]
        subprocess.run(apt, check=False, stdout=subprocess.DEVNULL)


def version(package: str, venv: Path = VENV) -> str | None:
    """The version installed, or None."""
    name = package.replace("-", "_")
    found = list(_site_packages(venv).glob(f"{name}-*.dist-info")) if (venv / "bin/python").exists() else []
    return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else None


def _site_packages(venv: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return venv / "lib" / version / "site-packages"
