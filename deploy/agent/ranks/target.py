"""Parse what a rank's command line runs, and decide whether a fork of the fork server can run it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TRAINING = "nodekit.training"
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/davinci")
# Variables that python, libc, torch and its libraries read once, when they start or are imported.
READ_AT_START = re.compile(
    r"(?!TORCHELASTIC_|TORCH_NCCL_|TORCH_FR_|TORCH_DIST_USE_NCCL2$)"
    r"(PYTHON|LD_|LC_|LANG|TZ|HOME$|MALLOC_|GLIBC_|OMP_|KMP_|GOMP_|MKL_"
    r"|OPENBLAS_|DNNL_|ONEDNN_|ATEN_|NPY_|NUMPY_|KINETO_|TORCH|PYTORCH_|AOT|INDUCTOR_|TRITON_|HALIDE_|FX_|COMPILE_|PARTITIONER_)"
)
# Those of them that libraries read on import, so that a script can set them before it imports torch. Not the
# allocator's, which torch reads with the first tensor on a GPU.
_READ_AT_IMPORT = re.compile(
    r"(?!PYTORCH_\w*ALLOC_CONF$|PYTHON|LD_|LC_|LANG|TZ|HOME$|MALLOC_|GLIBC_)" + READ_AT_START.pattern
)
_SETS = re.compile(
    r"""^[^#\n]*(?:\benviron\[["'](\w+)["']\]\s*=(?!=)|\b(?:environ\.setdefault|putenv)\(["'](\w+)["'])""",
    re.MULTILINE,
)
_IMPORTS_TORCH = re.compile(r"^\s*(?:import|from)\s+torch\b", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """The script or module that a python command line runs, with its arguments."""

    name: str
    is_module: bool
    args: list[str]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Target | None:
        """Return the target of ``python [-u] SCRIPT|-m MODULE ARGS...``; None for any other command."""
        rest = list(argv[1:])
        if rest[:1] == ["-u"] and getattr(sys.stdout, "write_through", False):
            del rest[0]  # this process runs with -u too, and a fork inherits its streams
        if argv[0] != "python" or not rest:
            return None
        if rest[0] == "-m" and len(rest) > 1:
            return cls(rest[1], True, rest[2:])
        return None if rest[0].startswith("-") else cls(rest[0], False, rest[1:])

    @property
    def is_training(self) -> bool:
        """Whether it is kit's training module."""
        return self.is_module and self.name == TRAINING

    def folder(self, cwd: str) -> str:
        """Return what python puts first on ``sys.path`` for this target."""
        return str(Path(cwd).resolve() if self.is_module else Path(cwd, self.name).resolve().parent)


def unforkable(descriptors: Path = Path("/proc/self/fd")) -> str | None:
    """Return why no fork of this process can be a worker, after what its imports did; None if one can."""
    if threading.active_count() > 1:
        return "an import has started a thread"  # a fork lacks it, but has the locks that it held
    for each in descriptors.iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing is closed by now
            opened = os.readlink(each)  # noqa: PTH115
            # CUDA and NVML do not notice a fork, and a worker closes their files.
            if opened.startswith(_GPU_FILES):
                return f"an import has opened {opened}"
    return None


def refusal(
    target: Target | None, env: Mapping[str, str], cwd: str, server_env: Mapping[str, str]
) -> str | None:
    """Return why this worker cannot be a fork of the server and must execute its command; None if it can."""
    if target is None:
        return "only python [-u] SCRIPT or -m MODULE can be forked"
    differs = {
        name
        for name in env.keys() | server_env.keys()
        if env.get(name) != server_env.get(name) and READ_AT_START.match(name)
    }
    if differs == {"OMP_NUM_THREADS"} and env.get("OMP_NUM_THREADS", "").isdecimal():
        # The agent sets it for nodes with several workers, and `fresh.set_num_threads` applies it later.
        differs = set()
    if differs:
        return f"the environment differs in {', '.join(sorted(differs))}"
    if not all(entry.startswith("/") for entry in (env.get("PYTHONPATH") or "/").split(":")):
        return "PYTHONPATH has a relative entry"  # the server's was resolved from another folder
    if not target.is_module:
        path = Path(cwd, target.name)
        if not path.is_file():
            return f"there is no {target.name}"
        if path.suffix != ".py" and b"\0" in path.read_bytes()[:1024]:
            return f"{target.name} is no source"  # an archive or compiled code, which python itself can run
        with contextlib.suppress(OSError):  # the worker's python will report it
            if found := _set_for_imports(path.read_text(encoding="utf-8", errors="replace")):
                return f"{target.name} sets {', '.join(found)}, which libraries read when they are imported"
    # A fresh interpreter would import the user's file, not the module of the same name that is imported here.
    with contextlib.suppress(OSError):
        for path in Path(target.folder(cwd)).iterdir():
            name = path.name.partition(".")[0]
            # Look up each file's name: going through all modules makes the kernel copy pages that forks share, 5 ms.
            is_loaded = name in sys.modules and name not in ("__main__", "nodekit")
            if is_loaded and (path.suffix in (".py", ".so") or (path / "__init__.py").exists()):
                return f"{path.name} hides a module of the same name"
    return None


def _set_for_imports(script: str) -> list[str]:
    """Return the variables that a script sets before its torch import, but that a fork has read already."""
    names = {first or second for first, second in _SETS.findall(_IMPORTS_TORCH.split(script, maxsplit=1)[0])}
    return sorted(filter(_READ_AT_IMPORT.match, names))
