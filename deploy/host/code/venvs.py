"""Make a venv on the host that this runs on, or say whether it is there. Sent to the host as a program, and run once.

Its source travels to the host's own python with that of `deploy/host/probes/hostfacts.py`
(`deploy/environment/environment.py` sends both): standard library only, and Python 3.8 syntax. A venv's folder is
named by a hash of what it is made of, so a folder of that name is the wanted venv: it is built under another name,
under a lock, and renamed when it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import tempfile
import threading
from importlib import metadata
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from nodekit.deploy.host.files import make_private
from nodekit.deploy.host.probes import hostfacts

PYPI = "https://pypi.org/simple/"
PROBE_S = 5.0
LAST_LINES = 8
_OWN_FILE = re.compile(r" ?\(from -r /dev/stdin \(line \d+\)\)")  # which is not the user's
_CREDENTIALS = re.compile(r"://[^/\s]*@")


class _Failed(Exception):
    """A step of the build did not work; what it said is in the log."""


def presentable(line: str, secrets: Sequence[str]) -> str:
    """A line of pip's output without passwords, and without the name of a file that is not the user's."""
    line = _CREDENTIALS.sub("://****@", _OWN_FILE.sub("", line))
    for secret in secrets:
        line = line.replace(secret, "****")
    return line


def run(do: str, **args: Any) -> None:
    """Do one thing, and answer with one line of JSON."""
    actions: Dict[str, Callable[..., Dict[str, Any]]] = {
        "look": look,
        "reach": reach,
        "installed": installed,
        "export": export,
        "build": build,
    }
    print(json.dumps(actions[do](**args)), flush=True)
    os._exit(0)  # a thread may hang in the name service


# --- what is here -------------------------------------------------------------------------------------------


def look(workdir: str, digest: str) -> Dict[str, Any]:
    """Return where a venv belongs on this host, whether it is there, and what its requirements depend on here.

    Args:
        workdir: kit's folder, ``~`` allowed.
        digest: of all that the venv is made of, apart from what this host adds.
    """
    workdir = os.path.expanduser(workdir)
    markers = _markers()
    libc = list(platform.libc_ver())
    own = [digest, markers["python_full_version"], sys.implementation.cache_tag, platform.machine(), libc]
    key = hashlib.sha256(json.dumps([*own, sys.executable]).encode()).hexdigest()[:16]
    found: Dict[str, Any] = {
        "key": key,
        "workdir": workdir,
        "workdir_id": "",
        "problem": "",
        "is_there": False,
        "markers": markers,
        "libc": libc,
        "uv": find_uv() is not None,
    }
    try:
        make_private(os.path.join(workdir, "envs"))
        found["workdir_id"] = hostfacts.folder_id(workdir)
        found["is_there"] = _is_there(os.path.join(workdir, "envs", key))
    except OSError as error:
        found["problem"] = "%s: %s" % (error.filename or workdir, error.strerror)
    return found


def _is_there(path: str) -> bool:
    return os.path.exists(os.path.join(path, "bin/python"))  # no longer, if what it links to has gone


def _markers() -> Dict[str, str]:
    """Return the environment markers of this host, by which conditions in requirements are evaluated (PEP 508)."""
    info = sys.implementation.version
    kind = "" if info.releaselevel == "final" else info.releaselevel[0] + str(info.serial)
    return {
        "implementation_name": sys.implementation.name,
        "implementation_version": "%d.%d.%d%s" % (info.major, info.minor, info.micro, kind),
        "os_name": os.name,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
        "platform_release": platform.release(),
        "platform_system": platform.system(),
        "platform_version": platform.version(),
        "python_full_version": platform.python_version(),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "sys_platform": sys.platform,
    }


def installed() -> Dict[str, Any]:
    """Return the packages of this python: ``{"packages": [[name, version, requires, extras], ...]}``."""
    found: Dict[str, List[Any]] = {}
    for each in metadata.distributions():
        name = each.metadata["Name"]
        if name:
            extras = each.metadata.get_all("Provides-Extra") or []
            found.setdefault(name, [name, each.version, list(each.requires or []), extras])
    return {"packages": list(found.values())}


def find_uv() -> Optional[str]:
    """Return the path of uv; its installer, and pip, put it into folders that are not in PATH of a login over SSH."""
    folders = [os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)]
    folders += [os.path.expanduser("~/.local/bin"), os.path.expanduser("~/.cargo/bin")]
    return shutil.which("uv", path=os.pathsep.join(folders))


def reach(url: str) -> Dict[str, Any]:
    """Try to reach a package index from here; without `url`, the one that pip is configured with here."""
    import urllib.error
    import urllib.request  # takes longer than the rest of a look at what is there

    url = _CREDENTIALS.sub("://", url or _pip_index() or PYPI)
    problems: List[str] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")  # noqa: S310  # it is an http URL
            urllib.request.urlopen(request, timeout=PROBE_S).close()  # noqa: S310
        except urllib.error.HTTPError:
            pass  # an answer is an answer; pip will say more
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if "CERTIFICATE" not in str(reason):  # pip has certificates of its own
                problems.append(str(getattr(reason, "strerror", None) or reason))
        problems.append("")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_S + 1)
    return {"url": url, "problem": problems[0] if problems else "no answer within %.0f s" % PROBE_S}


def _pip_index() -> str:
    done = _run([sys.executable, "-I", "-m", "pip", "config", "list"])
    found = re.findall(r"^(?:global|install|:env:)\.index-url='(.*)'$", done.stdout, re.MULTILINE)
    return str(found[-1]) if found else ""


def _run(argv: Sequence[str], folder: Optional[str] = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        argv,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        check=False,
    )


def export(files: Mapping[str, str], argv: Sequence[str]) -> Dict[str, Any]:
    """Export a uv.lock by uv; return ``out``, a requirements file, and ``problem``, or "" if there was none."""
    uv = find_uv()
    assert uv is not None
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        done = _run([uv, *argv], folder)
    return {"out": done.stdout, "problem": done.stderr.strip() if done.returncode else ""}


# --- the build ----------------------------------------------------------------------------------------------


def build(
    workdir: str,
    key: str,
    requirements: str,
    constraints: str = "",
    wheels: str = "",
    no_index: bool = False,
    system_site_packages: bool = False,
    secrets: Sequence[str] = (),
) -> Dict[str, Any]:
    """Make the venv, unless it is there by now; return ``{"built": bool, "problem", "said"}``.

    Args:
        workdir: absolute.
        key: as `look` gave it.
        requirements: the text of a requirements file that includes no other file.
        constraints: likewise.
        wheels: a folder with all packages, so that no index is asked; it is removed after use.
        no_index: whether to ask no index, only the pages that pip's environment variables name.
        system_site_packages: whether the packages of this python can be imported in the venv, too.
        secrets: texts that must not appear in the log.
    """
    folder = os.path.join(workdir, "envs")
    path = os.path.join(folder, key)
    lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # perhaps another kit makes it; then the log tells of that
    except OSError as error:
        os.close(lock)
        _remove_tree(wheels)
        text = "%s cannot be locked (%s), and two kits could make it at once; name a workdir on another file system"
        return {"built": False, "problem": text % (folder, error.strerror), "said": ""}
    if _is_there(path):
        _remove_tree(wheels)
        return {"built": False, "problem": "", "said": ""}
    problem = ""
    with open(_private(path + ".log"), "w", encoding="utf-8") as log:
        # What we start holds the lock, too: nobody meddles while that still writes.
        steps = _Steps(log, secrets, pass_fds=[lock])
        _clear(folder, key)
        draft = path + ".part"
        uv = None if system_site_packages else find_uv()  # which does not look at the packages outside a venv
        try:
            pip = _make(steps, draft, uv, system_site_packages) + (
                ["--no-index"] if no_index or wheels else []
            )
            _install(steps, draft, pip, requirements, constraints, wheels)
            _move_scripts(draft, path)
            if shutil.which("sync"):  # its name must not outlive its content in a loss of power
                subprocess.run(["sync", "-f", draft], stderr=subprocess.DEVNULL, check=False)
            if os.path.lexists(path):  # its interpreter has gone
                os.rename(path, path + ".part.old")
            os.rename(draft, path)
        except _Failed as error:
            problem = str(error)
        except OSError as error:
            problem = "%s: %s" % (error.filename or draft, error.strerror)
        _clear(folder, key)
        _remove_tree(wheels)
    return {"built": not problem, "problem": problem, "said": steps.last() if problem else ""}


def _remove_tree(folder: str) -> None:
    """Remove a folder that sync filled, and its list."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.exists(folder + ".tree.json"):
            os.unlink(folder + ".tree.json")


class _Steps:
    """Runs programs one after the other, and writes their output to the log without secrets."""

    def __init__(self, log: Any, secrets: Sequence[str], pass_fds: Sequence[int]) -> None:
        self._log = log
        self._secrets = secrets
        self._pass_fds = pass_fds
        self._lines: List[str] = []

    def say(self, text: str) -> None:
        text = presentable(text, self._secrets)
        self._lines = [*self._lines[-50:], text]
        self._log.write(text + "\n")
        self._log.flush()

    def last(self) -> str:
        """Return the last lines of the output."""
        told = [line for line in self._lines if line.strip() and not line.startswith("[notice]")]
        return "\n".join(told[-LAST_LINES:])

    def run(self, what: str, argv: List[str], text: str = "") -> None:
        """Run a program to its end, with `text` on its stdin.

        Raises:
            _Failed: it did not succeed.
        """
        with tempfile.TemporaryFile() as given:
            given.write(text.encode())
            given.seek(0)
            with subprocess.Popen(
                argv, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=self._pass_fds
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    self.say(line.decode("utf-8", "replace").rstrip())
        if process.returncode:
            raise _Failed("%s failed (exit status %d)" % (what, process.returncode))


def _private(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _clear(folder: str, own: str) -> None:
    """Remove what killed builds have left behind; this process holds the lock of `own`."""
    for name in os.listdir(folder):
        key, _, kind = name.partition(".")
        if not kind.startswith("part"):
            continue
        lock = os.open(os.path.join(folder, key + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if key == own or _try_lock(lock):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        os.close(lock)


def _make(steps: _Steps, draft: str, uv: Optional[str], system_site_packages: bool) -> List[str]:
    """Make an empty venv; return the command that installs into it."""
    python = os.path.join(draft, "bin/python")
    if uv:
        steps.run("uv venv", [uv, "venv", "--color", "never", "--python", sys.executable, draft])
        quiet = ["--color", "never", "--no-progress"]
        return [uv, "pip", "install", *quiet, "--compile-bytecode", "--python", python]
    steps.say("python -m venv, with " + sys.executable)
    options = ["--system-site-packages"] if system_site_packages else []
    pip = [python, "-I", "-m", "pip"]
    if _own_pip() >= (22, 3):  # it can install for another python; without its own pip, a venv takes no time
        options.append("--without-pip")
        pip = [sys.executable, "-I", "-m", "pip", "--python", python]
    try:
        steps.run("python -m venv", [sys.executable, "-I", "-m", "venv", *options, draft])
    except _Failed as error:
        raise _Failed(
            "%s; if that module is missing: apt install python3-venv, or install uv there" % error
        ) from error
    if system_site_packages and sys.prefix != sys.base_prefix:
        # The user named our python, which is a venv itself: its packages are meant, not those of its base.
        own = "lib/python%d.%d/site-packages/_nodekit_base.pth" % sys.version_info[:2]
        with open(os.path.join(draft, own), "w", encoding="utf-8") as file:
            for folder in site.getsitepackages():
                file.write("import site; site.addsitedir(%r)\n" % folder)
    quiet = ["--no-input", "--disable-pip-version-check", "--no-color", "--progress-bar", "off"]
    return [*pip, "install", *quiet]


def _own_pip() -> Tuple[int, ...]:
    try:
        found = re.findall(r"\d+", metadata.version("pip"))
    except metadata.PackageNotFoundError:
        return (0,)
    return tuple(int(part) for part in found[:2])


def _install(
    steps: _Steps, draft: str, install: List[str], requirements: str, constraints: str, wheels: str
) -> None:
    argv = [*install, "-r", "/dev/stdin"]  # passwords may be in it: it becomes no file
    limits = os.path.join(draft, "constraints.txt")
    if constraints:
        with open(_private(limits), "w", encoding="utf-8") as file:
            file.write(constraints)
        argv += ["-c", limits]
    if wheels:
        argv += ["--find-links", wheels]
    steps.run("uv pip install" if install[1] == "pip" else "pip install", argv, requirements)
    if constraints:
        os.unlink(limits)


def _move_scripts(draft: str, path: str) -> None:
    """Have scripts name their interpreter by the path that it will have after the rename."""
    before, after = os.fsencode(draft), os.fsencode(path)
    folder = os.path.join(draft, "bin")
    for name in os.listdir(folder):
        script = os.path.join(folder, name)
        if os.path.islink(script) or not os.path.isfile(script):
            continue
        with open(script, "rb") as file:
            data = file.read()
        if before in data and b"\0" not in data:
            with open(script, "wb") as file:
                file.write(data.replace(before, after))
