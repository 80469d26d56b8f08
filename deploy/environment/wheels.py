"""Wheels for nodes without internet: pip downloads them here, for the nodes' platform, and sync sends them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from nodekit.deploy.environment.requirements import Asked, Indexes
from nodekit.deploy.host.code.venvs import presentable
from nodekit.deploy.host.files import make_private
from nodekit.deploy.records.state_folder import cache_folder
from nodekit.deploy.sync.progress import nothing
from nodekit.inventory.errors import KitError

LAST_LINES = 8
# pip evaluates markers such as `; python_version < "3.11"` for its own Python. Here they must be evaluated for the
# nodes' Python, and pip has no option for that.
_PIP = """
import json, sys
from pip._vendor.packaging import markers
here, nodes = markers.default_environment, json.loads(sys.argv.pop(1))
markers.default_environment = lambda: {**here(), **nodes}
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Platform:
    """The platform that wheels must support."""

    markers: tuple[tuple[str, str], ...]
    """Names and values of the environment markers."""
    libc: tuple[str, str]

    @classmethod
    def of(cls, markers: Mapping[str, str], libc: Sequence[str]) -> Platform:
        """Return the platform of a host, without its kernel version, which may differ between hosts."""
        kernel = ("platform_release", "platform_version")
        told = sorted(each for each in markers.items() if each[0] not in kernel)
        return cls(tuple(told), (libc[0], libc[1]))

    def options(self) -> list[str]:
        """Return the options of `pip download`."""
        told = dict(self.markers)
        version, machine = told["python_version"], told["platform_machine"]
        implementation = {"cpython": "cp", "pypy": "pp"}.get(told["implementation_name"], "py")
        options = ["--only-binary=:all:", "--python-version", told["python_full_version"].rstrip("+")]
        options += ["--implementation", implementation]
        if implementation == "cp":
            options += ["--abi", f"cp{version.replace('.', '')}"]
        for tag in platform_tags(machine, *self.libc):
            options += ["--platform", tag]
        return options


def platform_tags(machine: str, libc: str, version: str) -> list[str]:
    """Return the platform tags of compatible wheels, best first."""
    major, minor = (int(part) for part in [*re.findall(r"\d+", version), "0", "0"][:2])
    if libc != "glibc" or major != 2:
        return [*(f"musllinux_1_{n}_{machine}" for n in (2, 1, 0)), f"linux_{machine}"]
    oldest = 5 if machine in ("x86_64", "i686") else 17
    tags = []
    for number in range(minor, oldest - 1, -1):
        tags.append(f"manylinux_2_{number}_{machine}")
        if older := {17: "2014", 12: "2010", 5: "1"}.get(number):
            tags.append(f"manylinux{older}_{machine}")
    return [*tags, f"linux_{machine}"]


def fetch(
    asked: Asked,
    requirements: str,
    platform: Platform,
    indexes: Indexes,
    *,
    timeout_s: float,
    has: Sequence[Sequence[Any]] = (),
    say: Callable[[float, str], None] = nothing,
) -> Path:
    """Return a folder with all wheels for a platform, from the cache or downloaded.

    Args:
        asked: the content of the venv.
        requirements: its requirements as text, also if they come from a uv.lock.
        platform: of the nodes.
        indexes: where to download from.
        timeout_s: for the whole download.
        has: packages that the nodes already have, from `venvs.installed`; those that fit are not downloaded.
        say: called with the seconds so far, and pip's last line.

    Raises:
        KitError: the download failed; the message ends with pip's last lines.
    """
    if importlib.util.find_spec("pip") is None:
        raise KitError(
            f"environment: the nodes' packages are fetched here, and {sys.executable} has no pip",
            cure=f"{sys.executable} -m ensurepip",
        )
    cache = cache_folder() / "wheels"
    key = sha256(
        json.dumps([asked.digest, platform.markers, platform.libc, [each[:2] for each in has]]).encode()
    ).hexdigest()[:16]
    folder = cache / key
    try:
        if folder.is_dir():
            return folder
        make_private(cache)
        with tempfile.TemporaryDirectory(prefix=f"{key}.", dir=cache) as draft:
            dest = _download(
                Path(draft), asked, requirements, platform, indexes, has, time.monotonic() + timeout_s, say
            )
            try:
                dest.rename(folder)
            except OSError:
                if not folder.is_dir():  # another kit has downloaded them meanwhile
                    raise
    except OSError as error:
        raise KitError(
            f"environment: {error.filename or cache}: {error.strerror}",
            wanted="a folder here for the wheels",
            cure="mend that, or set XDG_CACHE_HOME to another folder",
        ) from error
    return folder


def _download(
    draft: Path,
    asked: Asked,
    requirements: str,
    platform: Platform,
    indexes: Indexes,
    has: Sequence[Sequence[Any]],
    deadline: float,
    say: Callable[[float, str], None],
) -> Path:
    """Run `pip download` into a folder in `draft`, and return that folder; KitError with pip's last lines."""
    dest, limits, stand_ins = draft / "wheels", draft / "limits.txt", draft / "stand-ins"
    markers = json.dumps(dict(platform.markers))
    argv = [sys.executable, "-I", "-c", _PIP, markers, "download", "--no-input", *platform.options()]
    argv += ["--disable-pip-version-check", "--no-color", "--progress-bar", "off"]
    argv += ["--dest", str(dest), "-r", "/dev/stdin", "-c", str(limits)]
    argv += [f"--find-links={each}" for each in (*indexes.folders, str(stand_ins))]
    stand_ins.mkdir()
    names = _stand_in(stand_ins, has, platform)
    for pins in (names, {}) if names else ({},):  # if the nodes' own packages do not fit, download all
        shutil.rmtree(dest, ignore_errors=True)
        dest.mkdir(mode=0o700)
        if not pins:
            shutil.rmtree(stand_ins)
            stand_ins.mkdir()
        text = "".join(f"{name}\n" for name in pins.values())
        limits.write_text(asked.constraints + text, encoding="utf-8")
        status, lines = _run(argv, requirements, indexes, deadline - time.monotonic(), say)
        if status == 0:
            for name in pins:
                (dest / name).unlink(missing_ok=True)
            return dest
    told = "\n".join(f"    {line}" for line in lines[-LAST_LINES:])
    raise KitError(
        f"environment: the wheels of {asked.file} could not be fetched here for the nodes "
        f"({'not done in time' if status < 0 else 'pip download'}):\n{told}"
    )


def _stand_in(folder: Path, has: Sequence[Sequence[Any]], platform: Platform) -> dict[str, str]:
    """Write empty wheels for packages that the nodes have; return file → its version pin.

    `pip download` ignores installed packages, but prefers these wheels to any other of the same version: they have the
    best tags and the highest build number.
    """
    tags = platform.options()[platform.options().index("--platform") + 1 :: 2]
    version = dict(platform.markers)["python_version"].replace(".", "")
    tag = f"cp{version}-cp{version}-{tags[0]}"
    pins = {}
    for name, number, requires, extras in has:
        file_name = re.sub(r"[-_.]+", "_", name).lower()
        info = f"{file_name}-{number}.dist-info"
        wheel = f"{file_name}-{number}-999-{tag}.whl"
        needs = [f"Requires-Dist: {each}" for each in requires] + [
            f"Provides-Extra: {each}" for each in extras
        ]
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}", *needs]
        with zipfile.ZipFile(folder / wheel, "w") as archive:
            archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
            archive.writestr(
                f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\nBuild: 999\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        pins[wheel] = f"{name}=={number}"
    return pins


def _run(
    argv: list[str], text: str, indexes: Indexes, timeout_s: float, say: Callable[[float, str], None]
) -> tuple[int, list[str]]:
    """Run pip, and return its exit status and output lines; pip ends with this process, or after the timeout."""
    if shutil.which("setpriv"):
        argv = ["setpriv", "--pdeathsig", "TERM", *argv]
    begin, lines = time.monotonic(), list[str]()
    with tempfile.TemporaryFile() as given:
        given.write(text.encode())
        given.seek(0)
        with subprocess.Popen(
            argv,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **indexes.env},
        ) as pip:
            late = threading.Timer(timeout_s, pip.kill)
            late.start()
            try:
                assert pip.stdout is not None
                for raw in pip.stdout:
                    line = presentable(raw.decode("utf-8", "replace").rstrip(), indexes.secrets)
                    if line.strip():
                        lines.append(line)
                        say(time.monotonic() - begin, line)
            finally:
                late.cancel()
                if pip.poll() is None:
                    pip.terminate()
    return pip.returncode, lines
