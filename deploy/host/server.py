"""The server of kit on one host, on stdin and stdout: inspects the host, starts and stops agents, runs programs.

Its source is sent to the host's own Python (`deploy/connect/channel.py`), so nothing of kit need be installed there.
Standard library only, and Python 3.8 syntax, so that even an old interpreter can report its version. One JSON object
per line: ``{"id", "op", "args"}`` in; ``{"id", "part"}`` any number of times and then ``{"id", "result"}`` or
``{"id", "error"}`` out. The server ends when its stdin does; running agents survive it.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, List, Mapping, Optional, Set

from nodekit.deploy.host import errors, files, ports, processes
from nodekit.deploy.host.node import agents, fence, status

_BEAT_S = 1.0
_attended: "Set[subprocess.Popen[str]]" = set()


def read_file(path: str, limit_bytes: int = 1 << 20) -> Optional[str]:
    """Return the text of a file, at most `limit_bytes` characters; None if it does not exist.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open(os.path.expanduser(path), encoding="utf-8", errors="replace") as file:
            return file.read(limit_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_file(path: str, text: str) -> None:
    """Write a file atomically, with mode 0600; create its folder if necessary."""
    path = os.path.expanduser(path)
    files.make_private(os.path.dirname(path))
    files.write_private(path, text.encode(), durable=True)


def execute(
    argv: List[str],
    limit_s: float,
    text: str = "",
    env: Optional[Mapping[str, Optional[str]]] = None,
    ends_with_us: bool = False,
) -> Dict[str, Any]:
    """Run a program with `text` on its stdin; return ``{"status", "out", "err"}``.

    Variables that are None in `env` are removed from its environment. The program and its children are killed after
    `limit_s` (TimeoutExpired), and with `ends_with_us` also when this server ends.
    """
    full = {**os.environ, **(env or {})}
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={name: value for name, value in full.items() if value is not None},
        start_new_session=True,
    )
    if ends_with_us:
        _attended.add(process)
    with process:
        try:
            out, err = process.communicate(text, timeout=limit_s)
        except subprocess.TimeoutExpired:
            processes.send(-process.pid, signal.SIGKILL)
            raise
        finally:
            _attended.discard(process)
    return {"status": process.returncode, "out": out, "err": err}


def attend(
    argv: List[str],
    part: Callable[[Any], None],
    cwd: str,
    kit_dir: str,
    env: Mapping[str, str],
    limit_s: float,
    text: str = "",
) -> Dict[str, Any]:
    """Run a program in the folder and environment of a run's workers, with `text` on its stdin.

    Send the seconds passed as a heartbeat every second. The program is killed when this server ends, and after
    `limit_s`. Return ``{"status", "out", "err"}``; ``status`` is None after the limit.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        [os.path.expanduser(argv[0]), *argv[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        cwd=os.path.expanduser(cwd),
        env={**agents.environment(kit_dir, env), "PYTHONIOENCODING": "utf-8"},
        start_new_session=True,
    )
    _attended.add(process)
    given: Optional[str] = text
    is_late = False
    try:
        while True:
            try:
                left_s = begin + limit_s - time.monotonic()
                wait_s = _BEAT_S if is_late else min(_BEAT_S, max(0.0, left_s))
                out, err = process.communicate(given, timeout=wait_s)
                return {"status": None if is_late else process.returncode, "out": out, "err": err}
            except subprocess.TimeoutExpired:
                given = None
                part(time.monotonic() - begin)
                if not is_late and time.monotonic() - begin >= limit_s:
                    is_late = True
                    processes.send(-process.pid, signal.SIGKILL)
                elif is_late and time.monotonic() - begin > limit_s + agents.UNKILLABLE_S:
                    return {"status": None, "out": "", "err": processes.unkillable(process.pid)}
    finally:
        _attended.discard(process)


OPS: Dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        ports.hold_port,
        agents.prestart,
        agents.start,
        agents.join,
        agents.stop,
        agents.inject,
        fence.fence,
        fence.set_voters,
        status.status,
        files.tail,
        read_file,
        write_file,
        execute,
        attend,
    )
}


def serve(module_of: Callable[[str], Any]) -> None:
    """Answer requests until stdin ends; `module_of` loads a module by name, for operations ``module.function``."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not break the protocol
    lock = threading.Lock()

    def send(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with lock:
            try:
                out.write(data)
                out.flush()
            except OSError:
                _leave(module_of)  # the control machine is gone

    def answer(request: Dict[str, Any]) -> None:
        try:
            module, _, name = request["op"].rpartition(".")
            call = getattr(module_of(module), name) if module else OPS[name]
            args = request["args"]
            if "part" in call.__code__.co_varnames[: call.__code__.co_argcount]:
                args["part"] = lambda message: send({"id": request["id"], "part": message})
            send({"id": request["id"], "result": call(**args)})
        except BaseException as error:  # any error must reach the caller
            failure = {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "cure": errors.cure_of(error),
            }
            if isinstance(error, OSError) and error.errno is not None:
                failure["errno"] = errno.errorcode.get(error.errno, "")
            send({"id": request["id"], "error": failure})

    send({"ready": {"python": list(sys.version_info[:3]), "pid": os.getpid(), "time": time.time()}})
    for line in sys.stdin.buffer:
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()
    _leave(module_of)


def _leave(module_of: Callable[[str], Any]) -> None:
    """End this process, and kill the programs that must not outlive it."""
    agents.leave()
    for process in list(_attended):
        processes.send(-process.pid, signal.SIGKILL)
    if "nodekit.deploy.host.hostshell" in sys.modules:  # otherwise no command was run
        module_of("hostshell").close()
    os._exit(0)
