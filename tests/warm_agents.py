"""Agents without their imports: most of what a test on hosts costs is torch, imported by the agent of every node, and
what engines need, imported by every rank.

`program` is a path for an inventory's ``python:``, on this machine and on lab hosts alike. What runs by it is the real
python, but for an agent, and the other modules of kit's that warm_client.c names: those become a fork
(`warm_python`) of one process which has imported torch, in the namespaces of who asked for it, with its files, folder
and environment. kit itself is imported anew, from where PYTHONPATH has it. The fork's pid is not the one that kit has
started: that one passes signals on, and ends as the fork ends, and the fork with it.

What kit sends to a host's python becomes a fork too, of a process without torch, which has compiled all of it: a test's
commands start hundreds, and most of what each costs is to begin.
"""

from __future__ import annotations

import _imp
import builtins
import ctypes
import errno
import functools
import gc
import inspect
import os
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import warm_python

import nodekit.deploy.host
import nodekit.inventory
import nodekit.slurm
import nodekit.training
from nodekit.deploy.agent.ranks import worker
from nodekit.deploy.agent.ranks.target import Target
from nodekit.deploy.connect import channel
from nodekit.deploy.lab.lab_cluster import Lab

KINDS = {"agents": ("-u",), "programs": ()}
"""What is behind it, and how python is to be started for that."""
SUBMIT = "nodekit.slurm.submission.submit"
WITH_TORCH = "python-torch"
STDIN = "import sys\nexec(compile(sys.stdin.buffer.read(), '<stdin>', 'exec'))\n"
"""What ``python -`` does."""
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def _folder() -> Path:
    """Beside the folder of the real python, so that this is its environment's, too."""
    return Path(sys.prefix, warm_python.session().name)


@functools.cache
def _started() -> Path:
    """The program's path."""
    folder = _folder()
    with warm_python.once(folder) as is_first:
        if is_first:
            words = {"PYTHON": sys.executable, "BOOT": channel.BOOT, "AGENTS": _address("agents")}
            warm_python.compile_client(folder / "python", **words, PROGRAMS=_address("programs"))
            warm_python.compile_client(folder / WITH_TORCH, **words, PROGRAMS=_address("agents"))
            for beside in Path(sys.executable).parent.iterdir():
                if not beside.name.startswith("python"):
                    (folder / beside.name).symlink_to(beside)  # what is on the ranks' PATH
            (folder / "stdin.py").write_text(STDIN)
            (folder / "boot.py").write_text(channel.BOOT)
            env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            for kind, flags in KINDS.items():
                warm_python.launch(__file__, _control(kind), env, home=folder, flags=flags)
    return folder / "python"


def _address(kind: str) -> str:
    """What its sockets are named in every network namespace."""
    return f"{warm_python.session().name}-{kind}"


def _control(kind: str) -> str:
    """Where it takes sockets to listen on."""
    return str(warm_python.session() / kind)


@functools.cache
def _listen_in(space: str, inode: int) -> None:
    """Have it answer in a network namespace: a socket without a path is reached from its own only.

    A lab that is made again has others under the same paths, with inodes of their own: a namespace that is listened in
    stays.
    """
    _started()
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        # In the namespace of this machine, another worker may have.
        assert os.waitstatus_to_exitcode(status) in (0, errno.EADDRINUSE), f"cannot listen in {space}"
        return
    try:
        with Path(space).open() as file:
            _enter(file.fileno())
        for kind in KINDS:
            with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as maker:
                listening.bind(f"\0{_address(kind)}")
                listening.listen(100)
                maker.connect(_control(kind))
                socket.send_fds(maker, [b"x"], [listening.fileno()])
        os._exit(0)
    except OSError as error:
        os._exit(error.errno or 1)
    finally:
        os._exit(1)


def program(lab: Lab | None = None, *, with_torch: bool = False) -> str:
    """The program's path, to be used here and on a lab's hosts; the process behind it is started by the first call.

    What kit sends to hosts has torch already ``with_torch``, at a price for each.
    """
    for space in (
        "/proc/self/ns/net",
        *(str(lab.folder / "hosts" / name / "net") for name in (lab.hosts if lab else ())),
    ):
        _listen_in(space, Path(space).stat().st_ino)
    if not with_torch:
        return str(_started())
    found = str(_started().with_name(WITH_TORCH))
    # It may be importing torch, and a host's python has 10 s to answer.
    subprocess.run([found, "-c", channel.BOOT], input=b"4\npass", timeout=120, check=True)
    return found


def end_session() -> None:
    """Remove the program."""
    shutil.rmtree(_folder(), ignore_errors=True)


def _enter(space: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(space, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class _Maker(warm_python._Maker):
    MAX_FILES = 250

    def _take(self, control: socket.socket) -> None:
        """Another socket to listen on."""
        connection, _ = control.accept()
        with connection:
            _, files, *_ = socket.recv_fds(connection, 1, 1)
        listening = socket.socket(fileno=files[0])
        self._selector.register(listening, selectors.EVENT_READ, lambda: self._accept(listening))

    def _fork(self, asked: dict[str, Any], files: list[int]) -> int:
        told, tell = os.pipe()
        server = os.getpid()
        if middle := os.fork():
            os.close(tell)
            with os.fdopen(told, "rb") as file:
                # Signals are for the agent, by its pid as it is seen from here; `middle` ends as it does.
                self._agents[middle] = int(file.read() or middle)
            return middle
        try:
            worker.die_with(server)
            os.setsid()
            for each in files[len(asked["numbers"]) :]:
                _enter(each)
            if pid := os.fork():
                os.write(tell, b"%d" % pid)
                os.close(tell)
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                _end_as(pid)
            _die_with_parent()
            os.setsid()
            self._ignore(asked["ignored"])
            for number, limit in asked["limits"]:
                resource.setrlimit(number, tuple(limit))
            self._hand_over(dict(zip(asked["numbers"], files, strict=False)))
            self._path = [
                "",
                *filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep)),
                *self._path,
            ]
            self._env = asked["env"]
            self._become(asked, self._target(asked))
        finally:
            os._exit(1)

    def _target(self, asked: dict[str, Any]) -> Target | None:
        return Target.parse(asked["argv"])

    @staticmethod
    def _hand_over(files: dict[int, int]) -> None:
        """Have each file under the number that it had there, and no others."""
        free = 1 + max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        for offset, each in enumerate(files.values()):
            os.dup2(each, free + offset)
        os.closerange(0, free)
        for offset, number in enumerate(files):
            os.dup2(free + offset, number, inheritable=True)
        os.closerange(free, free + len(files))


class _Agents(_Maker):
    def load(self, preload: Iterable[str]) -> None:
        """Compile what agents import from where kit has put it on their hosts."""
        super().load(preload)
        _compile_beforehand([nodekit.deploy, nodekit.inventory, nodekit.slurm, nodekit.training])
        # For pydantic's look at the sources of kit's settings: the first time, that goes through all modules' files.
        inspect.getmodule(compile("", "no module", "exec"))

    def _target(self, asked: dict[str, Any]) -> Target | None:
        match asked["argv"]:
            case [_, "-u", "-", *args]:
                return Target(str(_folder() / "stdin.py"), False, args)
            case [_, "-c", *_]:
                sys.executable = str(_folder() / WITH_TORCH)
                return Target(str(_folder() / "boot.py"), False, [])
        target = super()._target(asked)
        if target is not None and target.name == SUBMIT:
            sys.executable = str(_folder() / "python")  # by which submitit has Slurm start the job
        return target


class _Programs(_Maker):
    def load(self, preload: Iterable[str]) -> None:
        """Compile what kit sends to hosts, and import what that imports."""
        super().load(preload)
        _compile_beforehand([nodekit.deploy.host], channel._program())
        # A fork would forget kit's own modules, and so take them apart.
        self._ours = [sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "nodekit"]

    def _target(self, asked: dict[str, Any]) -> Target | None:
        sys.executable = str(_folder() / "python")
        return Target(str(_folder() / "boot.py"), False, [])


def _compile_beforehand(packages: Iterable[ModuleType], *more: bytes) -> None:
    """Have sources be compiled here, and in no fork, whatever its copies of them are called."""
    anew = compile
    files = [file for package in packages for file in Path(package.__path__[0]).resolve().rglob("*.py")]
    sources = [*more, *(file.read_bytes() for file in files)]
    codes = {source: anew(source, "", "exec", dont_inherit=True) for source in sources}

    def compile_once(source: Any, name: Any, mode: str, flags: int = 0, *args: Any, **kwargs: Any) -> Any:
        data = source.encode("utf-8", "replace") if isinstance(source, str) else source
        if flags or mode != "exec" or not isinstance(data, bytes) or data not in codes:
            return anew(source, name, mode, flags, *args, **kwargs)
        _imp._fix_co_filename(codes[data], name)
        return codes[data]

    builtins.compile = compile_once  # type: ignore[assignment]
    gc.freeze()


def _end_as(pid: int) -> NoReturn:
    """Wait for the agent, and end as it has ended."""
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its pid stays its own
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _die_with_parent() -> None:
    """As `worker.die_with`, for a parent in another pid namespace, which is told of as 0."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == _control("programs"):
        names = (*channel.OFFERED, "server")
        warm_python.serve(sys.argv[1], [f"nodekit.deploy.host.{name}" for name in names], _Programs)
    else:
        from nodekit.deploy.agent.main import PRELOAD  # with torch, which the others can do without

        warm_python.serve(sys.argv[1], (*PRELOAD, *warm_python.LIBRARIES, "submitit", "pydantic"), _Agents)
