"""Make a fork look like a fresh interpreter, except for its imports; run its target, and exit as python does."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import io
import os
import runpy
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

from nodekit.deploy.agent.ranks.target import Target

_COARSE_CLOCK_S = 2.0  # the coarsest resolution of a file system's times
_FLUSH_FAILED = 120  # python's exit status when what was printed could not be written
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14


def missing_gpus(torch: Any, env: Mapping[str, str]) -> str:
    """Return why the rank would train on the CPU although the plan gives it a GPU; "" if it would not.

    This does not initialize CUDA, since a script may want to do that only in processes that it forks.
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


def forget_the_agent() -> None:
    """Reset the state of modules that a fresh interpreter would have anew: random seeds, thread id, folders."""
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
        torch.default_generator.seed()  # python's own random reseeds itself after a fork
        _keep_process_groups(torch)


def forget_listings(began_s: float) -> None:
    """Drop python's cached listings of folders that may have new files since the server began at `began_s`.

    Python itself lists a folder again whose modification time differs; to list all folders again takes 0.01 s.
    """
    for path, finder in [*sys.path_importer_cache.items()]:
        if finder is None or not path.startswith("/"):
            del sys.path_importer_cache[path]  # it may exist by now, or a relative one be another folder
        elif getattr(finder, "_path_mtime", began_s) > began_s - _COARSE_CLOCK_S:
            finder.invalidate_caches()  # type: ignore[attr-defined]  # all that come with python have it


def loaded_of_ours() -> list[str]:
    """Return the names of kit's own modules that are imported."""
    return [name for name in sys.modules if name == "nodekit" or name.startswith("nodekit.")]


def forget_ours(ours: Sequence[str], *, but: str) -> None:
    """Unload kit's own modules `ours`, except package `but` if this rank would import it from the same files again.

    Importing that package again takes 0.04 s and more. None of its functions has been called yet.
    """
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
    """Keep gloo's process groups alive until the process ends, even those that are destroyed.

    Whoever drops the last reference to one, often a DistributedDataParallel, joins gloo's threads while holding the
    GIL. One of these threads may need the GIL just then to free the last collective's objects: a deadlock (torch 2.13;
    pytorch/examples' multinode.py, where all is imported already, in most of its runs).
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


def set_num_threads(number: int) -> None:
    """Set the number of threads as OMP_NUM_THREADS would, in libraries that have read the variable already."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(number)
    with Path("/proc/self/maps").open() as maps:  # numpy has no call that sets its BLAS's threads
        libraries = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for library in libraries:
        for name in (
            "scipy_openblas_set_num_threads64_",
            "openblas_set_num_threads64_",
            "openblas_set_num_threads",
        ):
            with contextlib.suppress(OSError, AttributeError):
                getattr(ctypes.CDLL(library), name)(number)


def show_command(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Make ``ps`` show this command line, and environment too where the kernel permits it."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    arg_start, arg_end = int(fields[45]), int(fields[46])
    command = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    text = ctypes.create_string_buffer(command + variables)
    text_start = ctypes.addressof(text)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(text))  # the kernel reads it until the process ends
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


def run(target: Target) -> NoReturn:
    """Run the target as python would, and exit as python would."""
    status, interrupted = 0, False
    names = sys.modules["__main__"].__dict__
    try:
        try:
            if target.is_module:
                runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
            else:
                # As python does: leave the path unnormalised, and remove the names when the script ends.
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
    """Exit as python does, but without finalizing the interpreter and its libraries.

    During that finalization gloo's threads, which still hold python objects of the last collective, deadlock or abort
    (torch 2.13).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all threads that are not daemons
    atexit._run_exitfuncs()
    failed = _flush_streams()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    main = weakref.ref(sys.modules.pop("__main__"))
    sys.modules.pop("__mp_main__", None)
    gc.collect()
    if (module := main()) is not None:  # still referenced: then python clears its names, in this order
        for name in sorted(vars(module), key=lambda name: not name.startswith("_")):
            if not name.startswith("__"):
                vars(module)[name] = None
        gc.collect()
    # Files that are still open elsewhere: text layers before the binary files below them.
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
    """Flush stdout and stderr; return python's exit status for a failed flush, or 0."""
    status = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            # The script may have set an object of its own, which need not have `closed`.
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception as error:
            status = _FLUSH_FAILED
            if stream is sys.stdout:
                with contextlib.suppress(Exception):
                    print(
                        f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.stderr
                    )
    return status
