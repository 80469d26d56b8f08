"""A process with torch imported that forks workers from itself, so that a start, and a restart, costs no imports.

It is forked from the agent before that has threads, and has none itself. It speaks JSON lines over a socket pair
and only when asked: workers that ended stay unreaped, so no pid is anybody else's, until it is told to clear up.
When its socket closes, with the agent in whatever way that ended, it kills what it started and ends.

A forked worker is to the user's script what a fresh interpreter is, but for what is imported already. Where that
cannot be had (`_refusal`), the child executes the command instead.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import io
import json
import os
import re
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from nodekit.deploy.agent.ranks import children, worker

ANSWER_TIMEOUT_S = 120.0
IMPORTS_S = 240.0  # for the imports, which may come over NFS
_COARSE_CLOCK_S = 2.0  # the longest for which a file system has one time
_FLUSH_FAILED = 120  # python's exit status when what was printed could not be written
TRAINING = "nodekit.training"
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/davinci")
# Variables that python, libc, torch and its libraries read once, when they start or are imported.
_READ_AT_START = re.compile(
    r"(?!TORCHELASTIC_|TORCH_NCCL_|TORCH_FR_)(PYTHON|LD_|LC_|LANG|TZ|HOME$|MALLOC_|GLIBC_|OMP_|KMP_|GOMP_|MKL_"
    r"|OPENBLAS_|DNNL_|ONEDNN_|ATEN_|NPY_|NUMPY_|KINETO_|TORCH|PYTORCH_|AOT|INDUCTOR_|TRITON_|HALIDE_|FX_|COMPILE_|PARTITIONER_)"
)


class ServerLost(Exception):
    """The fork server does not answer; it, and with it its workers, is dead."""


class ForkServer:
    """The agent's end."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        connection.settimeout(ANSWER_TIMEOUT_S)
        self._socket = connection
        self._answers = connection.makefile("rb")
        self._number = 0
        self._imports_since: float | None = None  # asked for by `preload`, and not known to be done

    @classmethod
    def start(cls, preload: Sequence[str]) -> ForkServer:
        """Fork the server, which then imports `preload` by itself; call it before anything else, CUDA above all.

        What an agent has it import is `PRELOAD` in deploy/agent/main.py.
        """
        if threading.active_count() > 1:
            raise RuntimeError("a fork server must be started before any thread")
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = socket.socketpair()
        # The server hears no signal, whoever sends one to the agent's whole group; workers get this mask back.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        agent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                _Server(theirs, mask).serve(preload, agent)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return cls(pid, ours)

    def ask(self, op: str, **args: Any) -> dict[str, Any]:
        """Have the server do something."""
        with self._or_lost():
            self._send(op, args)
            answer = self._answer()
        self._imports_since = None
        return answer

    def post(self, op: str, **args: Any) -> None:
        """Have the server do something, before what it is asked next, and do not wait for it."""
        with self._or_lost():
            self._send(op, args)

    def preload(self, names: Sequence[str], env: Mapping[str, str]) -> None:
        """Have the server import more, in this environment; `is_ready` tells when it has."""
        with self._or_lost():
            self._send("preload", {"names": [*names], "env": dict(env)})
        self._imports_since = time.monotonic()

    def is_ready(self) -> bool:
        """Whether the server has all its imports, so that it answers at once.

        Raises:
            ServerLost: it has ended, or its imports take longer than `IMPORTS_S`.
        """
        if self._imports_since is None:
            return True
        with self._or_lost():
            if select.select([self._socket], [], [], 0)[0]:
                self._answer()
                self._imports_since = None
            elif time.monotonic() > self._imports_since + IMPORTS_S:
                raise TimeoutError(f"the imports take longer than {IMPORTS_S:.0f} s")
        return self._imports_since is None

    @contextlib.contextmanager
    def _or_lost(self) -> Iterator[None]:
        """End the server where it does not answer as it should."""
        try:
            yield
        except (OSError, ValueError) as error:
            self.close()
            raise ServerLost from error

    def _send(self, op: str, args: Mapping[str, Any]) -> None:
        # An answer that was never read, because of an exception, is not taken for the next one.
        self._number += 1
        self._socket.sendall(json.dumps({"number": self._number, "op": op, **args}).encode() + b"\n")

    def _answer(self) -> dict[str, Any]:
        while True:
            answer: dict[str, Any] = json.loads(self._answers.readline())
            if answer["number"] == self._number:
                return answer

    def close(self) -> None:
        """End the server, and with it its workers."""
        if self._socket.fileno() < 0:
            return
        self._answers.close()
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class _Server:
    """The server's end."""

    def __init__(self, connection: socket.socket, mask: set[signal.Signals | int]) -> None:
        self._socket = connection
        self._mask = mask
        self._path, self._env = sys.path[:], dict(os.environ)  # before imports have changed them
        self._began_s = time.time()
        self._set_by_imports: list[tuple[str, str | None, str]] = []  # a variable, what it was, and is
        self._pids: dict[int, int] = {}
        self._agent = 0
        self._stuck: set[int] = set()

    def serve(self, preload: Sequence[str], agent: int) -> None:
        """Answer until the agent is gone."""
        self._agent = agent
        worker.die_with(agent)
        children.adopt_orphans()
        ours = self._socket.fileno()
        os.closerange(3, ours)
        os.closerange(ours + 1, os.sysconf("SC_OPEN_MAX"))
        _import(preload)
        worker.die_with(None)  # from here on we see its end ourselves, and end also what workers started
        requests = self._socket.makefile("rb")
        for line in requests:
            request = json.loads(line)
            answer: dict[str, Any] = {"number": request["number"]}
            if request["op"] == "preload":
                self._preload(request["names"], request["env"])
            elif request["op"] == "start":
                answer["fresh"] = self._start(request["starts"], requests)
            elif request["op"] == "clear":
                stay = {key: pid for key, pid in self._pids.items() if key in request["stay"]}
                ending = {key: pid for key, pid in self._pids.items() if key not in stay}
                found = children.clear_up(ending, but=self._stuck, stay=stay.values())
                answer["stuck"], self._pids = found, stay
                self._stuck |= found.keys()
            answer["pids"] = self._pids
            answer["ended"] = children.exit_codes(self._pids)
            self._socket.sendall(json.dumps(answer).encode() + b"\n")
        children.clear_up(self._pids, but=self._stuck)

    def _preload(self, names: Sequence[str], env: Mapping[str, str]) -> None:
        """Import these in what is common to the environments of all ranks: libraries read it then, and change it."""
        worker.die_with(self._agent)  # no worker is started yet that would have to be ended first
        os.environ.clear()
        os.environ.update(env)
        _import(names)
        worker.die_with(None)
        after = os.environ.items()
        self._set_by_imports = [(name, env.get(name), now) for name, now in after if env.get(name) != now]
        os.environ.clear()
        os.environ.update(self._env)

    def _start(self, starts: Sequence[Mapping[str, Any]], requests: Any) -> dict[int, str]:
        fresh = {}
        server, unfit = os.getpid(), unforkable()
        for start in starts:
            target = Target.parse(start["argv"])
            refusal = unfit or _refusal(target, start["env"], start["cwd"], self._env)
            pid = os.fork()
            if pid == 0:
                try:
                    requests.close()
                    self._socket.close()
                    worker.settle(server, self._agent, start["log"])
                    self._become(start, None if refusal else target)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            self._pids[start["local_rank"]] = pid
            if refusal:
                fresh[start["local_rank"]] = refusal
        return fresh

    def _become(self, start: Mapping[str, Any], target: Target | None) -> NoReturn:
        argv, env, cwd = list(start["argv"]), dict(start["env"]), start["cwd"]
        torch = sys.modules.get("torch")
        if target is None or (torch and torch.cuda._is_in_bad_fork()):  # a preload has woken CUDA
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            worker.execute(argv, env, cwd)
        assert target is not None
        argv[0] = sys.executable
        os.environ.clear()
        ctypes.CDLL(None).clearenv()  # what libraries set behind python's back
        os.environ.update(env)
        os.environ.update({name: now for name, was, now in self._set_by_imports if env.get(name) == was})
        os.chdir(cwd)
        _show_command(argv, env)
        if env.get("OMP_NUM_THREADS") != self._env.get("OMP_NUM_THREADS"):
            _set_num_threads(int(env["OMP_NUM_THREADS"]))
        if torch and (problem := _missing_gpus(torch, env)):
            os.write(2, os.fsencode(problem + "\n"))
            os._exit(1)
        _forget_the_agent()
        _forget_listings(self._began_s)
        os.register_at_fork(
            after_in_child=functools.partial(worker.be_read_by, self._agent)
        )  # its loaders' too
        sys.modules["__main__"] = ModuleType("__main__")  # and nowhere here, so that its end is as python's
        sys.modules["__main__"].__dict__.update(
            __annotations__={}, __builtins__=builtins, __loader__=BuiltinImporter
        )
        if "__mp_main__" in sys.modules:
            sys.modules["__mp_main__"] = sys.modules["__main__"]  # multiprocessing's name for it
        sys.orig_argv[:] = argv
        sys.argv[:] = ["-m" if target.is_module else target.name, *target.args]
        sys.path[:] = self._path
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = target.folder(cwd)
        _forget_ours(but=TRAINING if target.is_training else "")
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        _run(target)


def _import(names: Sequence[str]) -> None:
    """Import what there is of these, for the forks that are to come."""
    gc.disable()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    sys.stdout.flush()
    sys.stderr.flush()
    # What imports have made is ours, and no rank's to take apart: torch has 170 of these, a rank's last 0.04 s.
    for each in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        each.atexit = False
    gc.collect()
    gc.freeze()
    gc.enable()


@dataclass(frozen=True)
class Target:
    """What a python command line runs."""

    name: str
    is_module: bool
    args: list[str]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Target | None:
        """The target of ``python [-u] SCRIPT|-m MODULE ARGS...``; None of anything else."""
        rest = list(argv[1:])
        if rest[:1] == ["-u"] and getattr(sys.stdout, "write_through", False):
            del rest[0]  # as we are ourselves: the streams are taken over as they are
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
        """What python puts first on ``sys.path``."""
        return str(Path(cwd).resolve() if self.is_module else Path(cwd, self.name).resolve().parent)


def unforkable(descriptors: Path = Path("/proc/self/fd")) -> str | None:
    """Why an import has left this process such that no worker can be a fork of it, if one has."""
    if threading.active_count() > 1:
        return "an import has started a thread"  # which a fork would lack, with the locks that it holds
    for each in descriptors.iterdir():
        with contextlib.suppress(OSError):  # the one of this very list
            opened = os.readlink(each)  # noqa: PTH115
            # CUDA and NVML do not find out that they are in another process, which has none of their files.
            if opened.startswith(_GPU_FILES):
                return f"an import has opened {opened}"
    return None


def _refusal(
    target: Target | None, env: Mapping[str, str], cwd: str, server_env: Mapping[str, str]
) -> str | None:
    """Why the worker cannot be a fork of this process, if it cannot."""
    if target is None:
        return "only python [-u] SCRIPT or -m MODULE can be forked"
    differs = {
        name
        for name in env.keys() | server_env.keys()
        if env.get(name) != server_env.get(name) and _READ_AT_START.match(name)
    }
    if differs == {"OMP_NUM_THREADS"} and env.get("OMP_NUM_THREADS", "").isdecimal():
        differs = set()  # the agent sets it for nodes with several workers, and it can be set afterwards
    if differs:
        return f"the environment differs in {', '.join(sorted(differs))}"
    if not all(entry.startswith("/") for entry in (env.get("PYTHONPATH") or "/").split(":")):
        return "PYTHONPATH has a relative entry"  # ours was looked up from another folder
    if not target.is_module:
        path = Path(cwd, target.name)
        if not path.is_file():
            return f"there is no {target.name}"
        if path.suffix != ".py" and b"\0" in path.read_bytes()[:1024]:
            return f"{target.name} is no source"  # an archive, or compiled: python itself knows how
    # A file of the user's that has the name of a module we have imported is what a fresh interpreter would import.
    loaded = {name.partition(".")[0] for name in sys.modules} - {"__main__", "nodekit"}
    with contextlib.suppress(OSError):
        for path in Path(target.folder(cwd)).iterdir():
            name = path.name.partition(".")[0]
            if name in loaded and (path.suffix in (".py", ".so") or (path / "__init__.py").exists()):
                return f"{path.name} hides a module of the same name"
    return None


def _missing_gpus(torch: Any, env: Mapping[str, str]) -> str:
    """Why the rank would train on the CPU though it was planned for a GPU; "" if it would not.

    Nothing here wakes CUDA, which a script may yet want to leave to the processes that it forks.
    """
    planned = int(env.get("NODEKIT_NUM_GPUS") or 0)
    needed = min(planned, int(env.get("LOCAL_WORLD_SIZE") or 1))
    if not needed:
        return ""
    if not torch.backends.cuda.is_built():
        seen = "is built for the CPU alone"
    elif (count := torch.cuda.device_count()) < needed:
        seen = f"sees {count}"
    else:
        return ""
    return (
        f"kit: {planned} GPU(s) are planned for this node, and torch {torch.__version__} {seen}: see kit check, or set "
        "`gpus: 0` in the inventory to train on the CPU"
    )


def _forget_the_agent() -> None:
    """Put back what imports, and time, have left in modules that a fresh interpreter would have anew."""
    if not (os.environ.get("PYTHONFAULTHANDLER") or sys.flags.dev_mode):
        faulthandler.disable()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    tempfile.tempdir = None
    process: Any = sys.modules.get("multiprocessing.process")
    if process:
        process.ORIGINAL_DIR = str(Path.cwd())
        process.current_process().authkey = os.urandom(32)
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # python's own random sees to itself
        _keep_process_groups(torch)


def _forget_listings(began_s: float) -> None:
    """Have python list those folders again in which a file may be that it has not seen, by when the server began.

    Others it lists again by itself, if their time of change is another one; to list all takes 0.01 s.
    """
    for path, finder in [*sys.path_importer_cache.items()]:
        if finder is None or not path.startswith("/"):
            del sys.path_importer_cache[path]  # it may be there by now, or elsewhere
        elif getattr(finder, "_path_mtime", began_s) > began_s - _COARSE_CLOCK_S:
            finder.invalidate_caches()  # type: ignore[attr-defined]  # all that come with python have it


def _forget_ours(*, but: str) -> None:
    """Forget kit's own modules, but for those of a package that this rank would only import again, from the same files.

    To import them takes 0.04 s and more. Nothing of them has been called.
    """
    ours = [name for name in sys.modules if name == "nodekit" or name.startswith("nodekit.")]
    kept: set[str] = set()
    if but in ours:
        parent = but.rpartition(".")[0]
        above = PathFinder.find_spec(parent)
        found = above and PathFinder.find_spec(but, [*(above.submodule_search_locations or ())])
        if found and found.origin == sys.modules[but].__file__:
            kept = {parent, but, *(name for name in ours if name.startswith(f"{but}."))}
    for name in ours:
        if name in kept:
            continue
        del sys.modules[name]
        package, _, last = name.rpartition(".")
        if package in kept:
            delattr(sys.modules[package], last)


def _keep_process_groups(torch: Any) -> None:
    """Have gloo's process groups live until the process ends, also those that are destroyed.

    The last reference to one, often that of a DistributedDataParallel, joins gloo's threads while it has the GIL. One
    of them may just then wait for the GIL, to let go of what the last collective brought with it: both wait for ever
    (torch 2.13; pytorch/examples' multinode.py, where all is imported already, in most of its runs).
    """
    if not torch.distributed.is_available():
        return
    c10d = torch.distributed.distributed_c10d
    kept: list[object] = []
    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        kept.extend(group for group, (backend, _) in c10d._world.pg_map.items() if "gloo" in backend)
        destroy(*args, **kwargs)

    torch.distributed.destroy_process_group = c10d.destroy_process_group = destroy_process_group


def _set_num_threads(number: int) -> None:
    """Do what OMP_NUM_THREADS does, in libraries that have read it already."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(number)
    with Path("/proc/self/maps").open() as maps:  # numpy says nowhere how its BLAS is set
        libraries = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for library in libraries:
        for name in (
            "scipy_openblas_set_num_threads64_",
            "openblas_set_num_threads64_",
            "openblas_set_num_threads",
        ):
            with contextlib.suppress(OSError, AttributeError):
                getattr(ctypes.CDLL(library), name)(number)


def _show_command(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Have ``ps`` show this command line and environment, where the kernel lets us."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    arg_start, arg_end = int(fields[45]), int(fields[46])
    command = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    text = ctypes.create_string_buffer(command + variables)
    text_start = ctypes.addressof(text)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(text))  # the kernel looks there for as long as we live
    brk = ctypes.CDLL(None).sbrk
    brk.restype = ctypes.c_size_t
    addresses = [
        *(int(fields[number]) for number in (23, 24, 42, 43, 44)),  # code, data, start of the heap
        brk(0),
        int(fields[25]),  # stack
        text_start,
        text_start + len(command),
        text_start + len(command),
        text_start + len(command) + len(variables),
        0,  # no auxv, of
        0xFFFFFFFF << 32,  # size 0; no other executable
    ]
    table = (ctypes.c_uint64 * len(addresses))(*addresses)
    prctl = ctypes.CDLL(None).prctl
    if prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(table), ctypes.sizeof(table), 0) != 0:
        size = arg_end - arg_start
        ctypes.memmove(arg_start, command.ljust(size, b"\0")[: size - 1] + b"\0", size)


def _run(target: Target) -> NoReturn:
    """Run the target as python does, and end as it does."""
    status, interrupted = 0, False
    names = sys.modules["__main__"].__dict__
    try:
        try:
            if target.is_module:
                runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
            else:
                # The path is not normalised, as python's is not; and the names go when the script ends.
                path = os.path.join(os.getcwd(), target.name)  # noqa: PTH109, PTH118
                names.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
                with io.open_code(path) as file:
                    code = compile(file.read(), path, "exec", dont_inherit=True)
                try:
                    exec(code, names)  # noqa: S102
                finally:
                    for name in ("__file__", "__cached__"):
                        names.pop(name, None)
        except SystemExit:
            raise
        except BaseException as error:
            status, interrupted = 1, isinstance(error, KeyboardInterrupt)
            trace = error.__traceback__.tb_next if error.__traceback__ else None
            error.__traceback__ = trace
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
            sys.excepthook(type(error), error, trace)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = (end.code or 0) & 0xFF
        else:
            status = 1
            print(end.code, file=sys.stderr)
    del names
    _end(status, interrupted=interrupted)


def _end(status: int, *, interrupted: bool) -> NoReturn:
    """End as python does, but for taking apart the interpreter and its libraries: all that dies with the process.

    There gloo's threads, which still hold python objects of the last collective, deadlock or abort (torch 2.13).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all threads that are not daemons
    atexit._run_exitfuncs()
    failed = _flush_streams()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    main = weakref.ref(sys.modules.pop("__main__"))
    sys.modules.pop("__mp_main__", None)
    gc.collect()
    if (module := main()) is not None:  # somebody holds it: then python lets go of what it has, in this order
        for name in sorted(vars(module), key=lambda name: not name.startswith("_")):
            if not name.startswith("__"):
                vars(module)[name] = None
        gc.collect()
    # What somebody else still has open: a text before the bytes that it is written to.
    files = [each for each in gc.get_objects() if issubclass(type(each), io.TextIOBase | io.BufferedIOBase)]
    for file in sorted(files, key=lambda each: isinstance(each, io.BufferedIOBase)):
        with contextlib.suppress(Exception):
            file.flush()
    failed = failed or _flush_streams()
    ctypes.CDLL(None).fflush(None)
    if interrupted:  # python dies of the signal then
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(failed or status)


def _flush_streams() -> int:
    """Write out what was printed; the exit status if that cannot be done, 0 else."""
    status = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as error:
            if stream is sys.stdout:
                status = _FLUSH_FAILED
                with contextlib.suppress(OSError):
                    print(
                        f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.stderr
                    )
    return status
