"""``python -m nodekit.training.engines.build_horovod``: build Horovod's last release for the installed torch.

Horovod's sdist sets C++14, and torch's headers need C++17 or newer: this script patches that, and more (`_PATCHES`).
Run it on every node, or once with ``--wheel``, and install the wheel on the others, with the same python and torch.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

_CMAKE = ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)")
_DEVICE = "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n"
_PATCHES = {
    "CMakeLists.txt": _CMAKE,
    "horovod/torch/CMakeLists.txt": _CMAKE,
    # Here Horovod ignores HOROVOD_GLOO_IFACE, and uses the address of the host's own name: 127.0.1.1 on Debian.
    "horovod/common/gloo/gloo_context.cc": (
        _DEVICE,
        f"  device_attr.iface = global_context.gloo_iface_;\n{_DEVICE}",
    ),
    # With nvcc and a torch for CUDA, it would require the whole CUDA toolkit, though kit uses Horovod on the CPU only.
    "cmake/Modules/FindPytorch.cmake": (
        "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        "print(False)",
    ),
}
"""File → a text that occurs once in it, and the replacement."""

# Without -g, which makes the library three times as large.
_FLAGS = 'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "{} -DNDEBUG")'
_ENVIRON = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # gloo sets a version that CMake 4 refuses
}
_TOOLS = ("g++", "cmake", "make")
"""Programs that the build needs; Debian's packages have the same names."""

_PERCENT = re.compile(r"\[ *(\d+)%\]")
"""Matches the progress that make prints."""
_NUM_LINES = 20
"""How many last lines of a failed program are shown, and how many lines about errors before these."""


class BuildError(RuntimeError):
    """The build failed; the message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the wheel and install it, or write it to a folder; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nodekit.training.engines.build_horovod",
        description=f"Build Horovod {VERSION} for this python and torch, and install it.",
    )
    parser.add_argument("--wheel", type=Path, metavar="DIR", help="only write a wheel into this folder")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="without the compiler's optimisation, as for tests: half the time",
    )
    given = parser.parse_args(arguments)
    try:
        check()
        with tempfile.TemporaryDirectory(prefix="nodekit-horovod-") as scratch:
            source = download(Path(scratch))
            patch(source, optimise=not given.quick)
            wheel = build(source, Path(scratch, "wheel"))
            if given.wheel:
                given.wheel.mkdir(parents=True, exist_ok=True)
                print(f"written: {shutil.copy(wheel, given.wheel)}")
                return 0
            _run("install", _pip("install", "--force-reinstall", "--no-deps", str(wheel)))
            _run("install what it needs", _pip("install", f"horovod=={VERSION}"))  # Horovod itself is there
        _run(
            "import horovod.torch", [sys.executable, "-c", "import horovod.torch as h; assert h.gloo_built()"]
        )
    except BuildError as error:
        print(f"build_horovod: {error}", file=sys.stderr)
        return 1
    print(f"installed: Horovod {VERSION} in {sys.prefix}")
    return 0


def check(path: str | None = None) -> None:
    """Check that all tools for the build are there.

    Args:
        path: where to look for programs (default: ``$PATH``).

    Raises:
        BuildError: a tool is missing; the message says what to install.
    """
    packages = [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        packages.append("python3-dev")
    if packages:
        names = " ".join(packages)
        raise BuildError(
            f"missing: {names}; install them (Debian: apt-get install {names}), then run this again"
        )
    modules = [name for name in ("torch", "setuptools", "pip") if importlib.util.find_spec(name) is None]
    if modules:
        raise BuildError(f"missing in {sys.prefix}: {', '.join(modules)}; pip install {' '.join(modules)}")


def download(folder: Path) -> Path:
    """Download the pinned version's sdist with pip, which verifies the hash before any code in it runs, and unpack it.

    Raises:
        BuildError: the sdist cannot be downloaded, or has another hash.
    """
    wanted = folder / "requirements.txt"
    wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    from_index = _pip(
        "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes"
    )
    _run(f"download horovod {VERSION}", [*from_index, "--dest", str(folder), "--requirement", str(wanted)])
    with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as archive:
        # Set the attribute, not the argument, which Python 3.11.2 (in Debian 12) does not have yet.
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)  # noqa: S202, pip has verified its hash
    return folder / f"horovod-{VERSION}"


def patch(source: Path, *, optimise: bool = True) -> None:
    """Set a newer C++ standard, and fix what does not work on several hosts.

    Raises:
        BuildError: a file is not as expected; no file is changed then.
    """
    texts = {}
    for name, (old, new) in _PATCHES.items():
        text = (source / name).read_text()
        if (found := text.count(old)) != 1:
            raise BuildError(
                f"{name} of Horovod {VERSION} has {found} times {old.strip()!r}, and 1 was expected: "
                "this script is written for another release"
            )
        texts[name] = text.replace(old, new)
    # Compile several sources as one, so that torch's headers are read once: a third less work.
    if not optimise:
        torch = "horovod/torch/CMakeLists.txt"
        texts[torch] = texts[torch].replace(_CMAKE[1], f"{_CMAKE[1]}\nset(CMAKE_UNITY_BUILD ON)")
    flags = _FLAGS.format("-O3" if optimise else "-O0")
    texts["CMakeLists.txt"] = texts["CMakeLists.txt"].replace(_CMAKE[1], f"{_CMAKE[1]}\n{flags}")
    for name, text in texts.items():
        (source / name).write_text(text)


def build(source: Path, folder: Path) -> Path:
    """Build the wheel in ``folder``, and return its path.

    Raises:
        BuildError: the build failed; the message has the last lines of the compiler's output.
    """
    jobs = {} if "MAKEFLAGS" in os.environ else {"MAKEFLAGS": f"-j{os.cpu_count() or 1}"}
    argv = _pip("wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    _run(
        "build (some minutes)",
        [*argv, "--wheel-dir", str(folder), str(source)],
        environ={**_ENVIRON, **jobs},
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip(command: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", command, *arguments]


def _run(what: str, argv: Sequence[str], *, environ: Mapping[str, str] | None = None) -> None:
    """Run a program, and print ``what`` it does and its progress.

    Raises:
        BuildError: the program failed; the message has its errors and last lines.
    """
    print(what, flush=True)
    output: list[str] = []
    shown = 0
    with subprocess.Popen(
        argv,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            percent = _PERCENT.search(line)
            if percent and int(percent[1]) >= shown + 10:
                shown = int(percent[1]) // 10 * 10
                print(f"  {shown} %", flush=True)
    if process.returncode:
        last = output[-_NUM_LINES:]
        errors = _errors(output[:-_NUM_LINES])
        raise BuildError(
            f"{what} failed with exit status {process.returncode}; its errors and its last lines:\n"
            f"{''.join([*errors, *last])}"
        )


def _errors(lines: Sequence[str]) -> list[str]:
    """Return the lines with the word error, each with the two after it, in which CMake says what is missing."""
    near = (lines[max(number - 2, 0) : number + 1] for number in range(len(lines)))
    return [each[-1] for each in near if "error" in "".join(each).lower()][:_NUM_LINES]


if __name__ == "__main__":
    sys.exit(main())
