"""Remote calls: one channel per host, to `deploy/host/server.py` running there, over SSH or, locally, a pipe."""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import importlib.util
import itertools
import json
import logging
import os
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar, cast

from nodekit.inventory.errors import HostError, KitError, KitErrors, Problem

if TYPE_CHECKING:
    from nodekit.deploy.connect.ssh import SshConnection

_LOG = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

START_TIMEOUT_S = 10.0
ENDS_S = 5.0  # how long a local process may take to end by itself before it is killed
LAST_WORDS_S = 2.0  # after a failed write, how long to wait for the process's own last output
CALL_TIMEOUT_S = 30.0  # for calls that need no time limit of their own
# How often a longer call asks whether the host still answers: if a host hangs, its kernel keeps the connection up.
STILL_THERE_S = 60.0
# A channel is lost if a streaming call gets no part or result for so long; hosts send something more often.
LOST_AFTER_S = 15.0
WAITS_S, WAITS_AGAIN_S = 8.0, 15.0  # until it is told for which hosts a command waits, and between two times

OFFERED = (
    "accept", "broken", "current_status", "errors", "files", "hostshell", "ports", "processes", "programs", "schema",
    "code.tree", "code.treefiles",
    "logs.board_host", "logs.hostfollow", "logs.logbook", "logs.logread", "logs.points",
    "node.agents", "node.artifacts", "node.fence", "node.removal", "node.status",
    "probes.discovery", "probes.hostfacts", "probes.kernel", "probes.leftovers", "probes.probes",
    "probes.gpu.accelerators", "probes.gpu.gpus",
    "probes.network.linkspeed", "probes.network.netjob", "probes.network.netprobe", "probes.network.netstate",
    "probes.network.nics",
)  # fmt: skip
"""The modules of `deploy.host` that are sent to each host; their functions are called as ``MODULE.FUNCTION``."""

_IMPORT = re.compile(r"^ *from (nodekit\.deploy\.host[\w.]*) import ([\w, ]+)", re.MULTILINE)

# The argument of the host's `python -c`: read a line with the program's size, then the program, from stdin, and run it.
# A python that is too old reports its version, in place of a syntax error in the program.
BOOT = (
    "import sys;sys.version_info<(3,8) and sys.exit('it is Python %d.%d, wanted 3.10 or newer'%sys.version_info[:2]);"
    "i=sys.stdin.buffer;exec(compile(i.read(int(i.readline())),'nodekit','exec'))"
)
_READY = b'{"ready": '  # how the first line that this program prints begins

QUIET_SHELL = (
    "let its ~/.bashrc print nothing without a terminal: `[[ $- == *i* ]] || return` as the first line there; of csh "
    "and tcsh, ~/.cshrc and `if (! $?prompt) exit`; of zsh it is ~/.zshenv, of fish ~/.config/fish/config.fish"
)


class ChannelLost(HostError):
    """The connection to the host is lost; agents on the host keep running."""


class RemoteError(HostError):
    """A call raised an exception on the host.

    Attributes:
        type: the name of the exception's class.
        message: its text.
        errno: the name of its errno (``ENOSPC``), or "".
    """

    def __init__(self, host: str, error: Mapping[str, str]) -> None:
        super().__init__(host, error["message"] or error["type"], cure=error.get("cure", ""))
        self.type = error["type"]
        self.message = error["message"]
        self.errno = error.get("errno", "")
        self.__notes__ = [f"on {host}: {error['traceback']}"]


class Process(Protocol):
    """The interface that a channel needs of the process at its other end."""

    @property
    def stdin(self) -> IO[bytes]: ...  # noqa: D102
    @property
    def stdout(self) -> IO[bytes]: ...  # noqa: D102
    def stderr_tail(self) -> str: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class LocalProcess:
    """A process on this machine, with the interface of `SshProcess`."""

    def __init__(self, argv: list[str]) -> None:
        # Its own session: a Ctrl-C in the terminal must reach kit only, which then stops the agents by this process.
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.stdin = cast(IO[bytes], self._popen.stdin)
        self.stdout = cast(IO[bytes], self._popen.stdout)
        self._stderr: collections.deque[bytes] = collections.deque(maxlen=50)
        self._drainer = threading.Thread(target=self._drain, daemon=True)
        self._drainer.start()

    def _drain(self) -> None:
        with cast(IO[bytes], self._popen.stderr) as stderr:
            self._stderr.extend(stderr)

    def stderr_tail(self) -> str:
        """Return the last lines that it wrote to stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(0.2)
            self._drainer.join(1.0)  # let it read the rest
        return b"".join(self._stderr).decode("utf-8", "replace")

    def close(self) -> None:
        """Close its stdin, which ends it; kill it after `ENDS_S`, since closing blocks while a write to it does."""
        killing = threading.Timer(ENDS_S, self._popen.kill)
        killing.daemon = True
        killing.start()
        with contextlib.suppress(BrokenPipeError):  # it ended first
            self.stdin.close()
        self._popen.wait()
        killing.cancel()
        self.stdout.close()


class HostChannel:
    """A channel for calls to one host. It is thread-safe; each call has a timeout.

    Attributes:
        host: the host's name in the inventory.
        connection: the SSH connection that it uses; None for this machine.
        printed: the last line that the host's login shell prints before a command; "" in the normal case.
    """

    def __init__(self, host: str, process: Process, connection: SshConnection | None = None) -> None:
        self.host = host
        self.connection = connection
        self.printed = ""
        self._process = process
        self._ids = itertools.count()
        self._waiting: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._lost: str | None = None
        self._lock = threading.Lock()
        self._begin(process)

    def switch(self, python: str, connection: SshConnection | None = None) -> None:
        """Restart the server with another interpreter or connection; no call may be under way.

        Args:
            python: the interpreter.
            connection: a new connection in place of a lost one; None to keep the present one.

        Raises:
            HostError: the interpreter does not run.
        """
        process, before = self._process, self.connection
        self.connection = connection or before
        try:
            self._begin(_python(self.host, python, self.connection))
        finally:
            process.close()
            if before is not None and before is not self.connection:
                before.close()

    def _begin(self, process: Process) -> None:
        """Send the server's program to a process that waits for it, and use that process for calls from now on."""
        self._ready: queue.Queue[dict[str, Any]] = queue.Queue()
        program, to_write = _program(), queue.SimpleQueue[bytes | None]()
        # Before other threads see the queue, so that their calls come after the program.
        to_write.put(b"%d\n" % len(program) + program)
        with self._lock:
            self._process, self._to_write, self._lost = process, to_write, None
        name, args = f"channel-{self.host}", (process, self._ready, to_write)
        reader = threading.Thread(target=self._read, args=args, name=name, daemon=True)
        reader.start()
        threading.Thread(target=self._write, args=(*args, reader), name=name, daemon=True).start()
        try:
            answer = self._ready.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            said = process.stderr_tail().strip().splitlines()
            process.close()
            raise HostError(
                self.host,
                f"its python has not begun to answer within {START_TIMEOUT_S:.0f} s"
                + (f" ({said[-1].strip()})" if said else ""),
                cure="is it overloaded, its disk slow, or the way to it? If not: does its login shell wait for "
                "something, or its ~/.bashrc start another shell, and is `python:` an interpreter?",
            ) from None
        if "lost" in answer:
            is_silent = self.connection is not None and not process.stderr_tail().strip()
            process.close()
            raise HostError(self.host, *_no_python(answer["lost"], maybe_no_shell=is_silent))

    def _write(
        self,
        process: Process,
        ready: queue.Queue[dict[str, Any]],
        to_write: queue.SimpleQueue[bytes | None],
        reader: threading.Thread,
    ) -> None:
        """Write what is put into the queue, until None; in its own thread, so that no call blocks past its timeout."""
        while (data := to_write.get()) is not None:
            try:
                process.stdin.write(data)
                process.stdin.flush()
            except (OSError, ValueError) as error:
                reader.join(LAST_WORDS_S)  # if the process has ended, the reader knows why
                self._lose(process, ready, f"the connection is gone ({error})")
                return

    def _read(
        self,
        process: Process,
        ready: queue.Queue[dict[str, Any]],
        to_write: queue.SimpleQueue[bytes | None],
    ) -> None:
        has_begun, printed = False, b""
        try:
            for line in process.stdout:
                if not has_begun:  # a login shell may print something before, even on the same line
                    before, begin, rest = line.partition(_READY)
                    has_begun, line = bool(begin), begin + rest
                    printed = before.strip()[:200] or printed
                if not line.startswith(b"{"):
                    continue
                message = json.loads(line)
                if "ready" in message:
                    self.printed = printed.decode("utf-8", "replace")
                    ready.put(message)
                elif (waiter := self._waiting.get(message["id"])) is not None:
                    waiter.put(message)
        except (OSError, ValueError, EOFError):
            pass  # handled below like any other end
        to_write.put(None)
        said = process.stderr_tail().strip()
        if not has_begun:  # nologin prints its refusal to stdout
            said = said or printed.decode("utf-8", "replace")
        self._lose(process, ready, said or f"{'the connection' if has_begun else 'it'} ended without a word")

    def _lose(self, process: Process, ready: queue.Queue[dict[str, Any]], why: str) -> None:
        with self._lock:
            if process is not self._process or self._lost is not None:
                return  # the process was replaced, or the loss is known
            self._lost = why
        ready.put({"lost": why})
        for waiter in list(self._waiting.values()):
            waiter.put({"lost": True})

    @property
    def is_lost(self) -> bool:
        """Whether the connection is lost."""
        return self._lost is not None

    def call(self, op: str, *, timeout_s: float, **args: Any) -> Any:
        """Run `op` on the host and return its result.

        Raises:
            RemoteError: `op` raised an exception there.
            ChannelLost: the connection is lost, or there was no answer within `timeout_s` seconds.
        """
        return self.stream(op, lambda _: None, silence_s=timeout_s, **args)

    def stream(
        self, op: str, on_part: Callable[[Any], None], *, silence_s: float = LOST_AFTER_S, **args: Any
    ) -> Any:
        """Run `op` on the host, pass each part that it sends to `on_part`, and return its result.

        Raises as `call` does; `silence_s` limits the time until the next part or the result.
        """
        number, began, outcome = next(self._ids), time.monotonic(), ""
        waiter: queue.Queue[dict[str, Any]] = queue.Queue()
        self._waiting[number] = waiter
        try:
            if self._lost is not None:
                raise ChannelLost(self.host, self._lost)
            self._to_write.put(json.dumps({"id": number, "op": op, "args": args}).encode() + b"\n")
            while True:
                try:
                    message = self._next(waiter, silence_s)
                except queue.Empty:
                    raise ChannelLost(self.host, f"no answer within {silence_s:.0f} s") from None
                if "lost" in message:
                    raise ChannelLost(self.host, self._lost or "it ended")
                if "error" in message:
                    raise RemoteError(self.host, message["error"])
                if "result" in message:
                    return message["result"]
                on_part(message["part"])
        except HostError as error:
            outcome = f": {type(error).__name__}"
            raise
        finally:
            del self._waiting[number]
            # Log neither arguments nor results: they may hold secrets.
            _LOG.debug("%s: %s: %.0f ms%s", self.host, op, (time.monotonic() - began) * 1000, outcome)

    def _next(self, waiter: queue.Queue[dict[str, Any]], silence_s: float) -> dict[str, Any]:
        """Return the next message of a call; during a long wait, ask the host each minute whether it still answers.

        Raises:
            queue.Empty: no message within `silence_s`.
            ChannelLost: the host does not answer, or the connection is lost.
        """
        while silence_s > STILL_THERE_S:
            with contextlib.suppress(queue.Empty):
                return waiter.get(timeout=STILL_THERE_S)
            began = time.monotonic()
            self.call("processes.boot_id", timeout_s=STILL_THERE_S)
            silence_s -= STILL_THERE_S + time.monotonic() - began
        return waiter.get(timeout=max(0.0, silence_s))

    def close(self) -> None:
        """End the server on the host and close the connection; agents that it started keep running."""
        self._process.close()
        if self.connection is not None:
            self.connection.close()


def _no_python(last_words: str, *, maybe_no_shell: bool = False) -> Problem:
    # After its message, fish prints the command that it could not run, and underlines it.
    said = [
        line
        for line in last_words.splitlines()
        if re.search(r"\w", line) and line.strip() != "fish:" and "import sys;" not in line
    ]
    cure = "set `python:` to an interpreter there that has torch"
    if maybe_no_shell:
        cure += (
            ", or give the user a login shell there that runs commands (is it nologin or false, or does its "
            "~/.bashrc exit?)"
        )
    return Problem(f"its python does not run ({(said or [last_words])[-1]})", cure=cure)


def _python(host: str, python: str, connection: SshConnection | None) -> Process:
    """Start an interpreter that waits for its program, on this machine if there is no connection."""
    if connection is not None:
        return cast(Process, connection.exec([python, "-c", BOOT]))
    try:
        # Path.expanduser raises for a user that does not exist; Popen names the missing file better.
        return LocalProcess([os.path.expanduser(python), "-c", BOOT])  # noqa: PTH111
    except OSError as error:
        # With these errors the interpreter itself may be fine.
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            cure = "end what has taken it all here, or ask for more (ulimit -n: open files, ulimit -u: processes)"
            raise HostError(host, f"its python cannot be started: {error.strerror}", cure=cure) from error
        raise HostError(host, *_no_python(str(error))) from error


def open_local(host: str, python: str) -> HostChannel:
    """Open a channel to this machine."""
    return HostChannel(host, _python(host, python, None))


def open_ssh(connection: SshConnection, host: str, python: str) -> HostChannel:
    """Open a channel over an SSH connection."""
    return HostChannel(host, _python(host, python, connection), connection)


def on_all(
    items: Mapping[str, T],
    function: Callable[[T], R],
    *,
    waits: Callable[[list[str], float], object] | None = None,
) -> dict[str, R | Exception]:
    """Call `function` on all items in parallel; return name → result *or* exception, so that no failure hides another.

    A KeyboardInterrupt does not wait for running calls: they end with their channel, or with the process.

    Args:
        items: name → argument.
        function: is called in a thread for each.
        waits: is called now and then while calls take long, with their names and the seconds since they began.
    """
    results: dict[str, R | Exception] = {}

    def attempt(name: str, item: T) -> None:
        try:
            results[name] = function(item)
        except Exception as error:  # returned to the caller, one per host
            results[name] = error

    threads = [threading.Thread(target=attempt, args=item, daemon=True) for item in items.items()]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    tell_at = began + WAITS_S
    for thread in threads:
        while thread.is_alive():
            thread.join(max(0.0, tell_at - time.monotonic()) if waits else None)
            left = [name for name in items if name not in results]
            if waits and left and (now := time.monotonic()) >= tell_at:
                tell_at = now + WAITS_AGAIN_S
                waits(left, now - began)
    return {name: results[name] for name in items}


def all_or_raise(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results if all are fine.

    Raises:
        KitError: one or more hosts failed; has a line for each of them.
    """
    failures: list[KitError] = []
    for result in results.values():
        if isinstance(result, KitError):
            failures.append(result)
        elif isinstance(result, Exception):
            raise result  # our own bug: its traceback is worth more than a summary
    if len(failures) > 1:
        raise KitErrors(failures) from failures[0]
    if failures:
        raise failures[0]
    return dict(results)


@functools.cache
def _program() -> bytes:
    """Return the source of the server and of the modules that it offers, as one program."""
    return program((*OFFERED, "server"), "module.serve(module_of)")


def program(names: Sequence[str], last_line: str) -> bytes:
    """Return modules of `deploy.host`, and all that they import from it, as the ASCII source of one program.

    The last module is imported at once; the others are compiled at their first import, since most calls need few of
    them. In `last_line`, `module` is the last module; `module_of(name)` returns one by its name, without its folder's.
    """
    sources: dict[str, str] = {}
    missing = [f"nodekit.deploy.host.{name}" for name in names]
    while missing:
        sources.update({name: source(name) for name in missing})
        missing = sorted({each for name in missing for each in _imported(sources[name])} - sources.keys())
    return f"""
import functools, importlib, importlib.util, sys, types
sources = {sources!a}
class Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name in sources else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__name__
        exec(compile(sources[name], name.rpartition(".")[2] + ".py", "exec"), module.__dict__)
class Folder(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):  # for "from FOLDER import MODULE": by itself, import would ask for a "nodekit" as well
        if self.__name__ + "." + name not in sources:
            raise AttributeError(name)
        return importlib.import_module(self.__name__ + "." + name)
sys.meta_path.insert(0, Finder())
for name in sources:  # and no "nodekit": a host's own must be found, should anything look for it
    folder = name.rpartition(".")[0]
    sys.modules.setdefault(folder, Folder(folder))
full_names = {{name.rpartition(".")[2]: name for name in sources}}
def module_of(name):
    return importlib.import_module(full_names[name])
module = module_of({names[-1].rpartition(".")[2]!a})
{last_line}
""".encode("ascii")


def _imported(text: str) -> Iterator[str]:
    """Yield the names of the modules of `deploy.host` that a source imports."""
    for folder, names in _IMPORT.findall(text):
        # "from FOLDER import MODULE, …", or "from MODULE import name, …".
        if importlib.util.find_spec(folder).submodule_search_locations is None:  # type: ignore[union-attr]
            yield folder
        else:
            yield from (f"{folder}.{name.split()[0]}" for name in names.split(","))


def source(module: str) -> str:
    """Return the source of one of kit's modules."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")
