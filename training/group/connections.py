"""The connections of this process's process groups, so that a collective can be ended that waits for a lost rank.

gloo has no call for that (torch 2.14), but each of its waiting threads ends with an error when its socket is shut,
unless half of a message has gone through it: whoever waits for the other half is not told (``Pair::signalException`` in
gloo/transport/tcp/pair.cc leaves out the message that is being read or written), and only `is_deaf` finds that out.
"""

import functools
import linecache
import math
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

_OF_GLOO = re.compile(r"gloo[/\\]\S*\.(?:cc|h)\b|Horovod has been shut down")
"""What an error of gloo's says, which names its source file, or Horovod's.

Not "Connection refused" alone: a user's data server may be gone, and each attempt would fail at the same step, as if
another rank were lost, without a traceback.
"""
DEAF_S = 1.5
"""A main thread that still waits for others so long after the connections were shut will never get an error."""
_BACKEND = 3  # its place among the arguments of torch's function that makes a group
KEEPALIVE_S = 30
"""How often the kernel sends a probe where nothing else is sent. Firewalls forget a connection that was silent for some
minutes, and drop what comes later: gloo, which sets nothing of this, would wait in vain after a long step."""
_LOOK_S, _IDLE_S = 0.1, 0.005
_QUIET_S, _ARRIVE_S = 0.015, 0.05
_WAITS_BY = re.compile(r"\.wait\(")
_WAITS_IN = re.compile(r"/torch/(?:distributed|autograd|nn/parallel)/|/training/group/collectives\.py$")
_ASKS_IN = re.compile(r"/training/engines/horovod\.py$|/horovod/torch/")
Connections = set[tuple[int, int]]
"""Descriptor and inode of each."""
_opened: Connections = set()


def remember() -> None:
    """Remember the connections of the process groups that are made from here on, and of no earlier ones."""
    _opened.clear()
    c10d: Any = dist.distributed_c10d
    make = c10d._new_process_group_helper
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_and_remember(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend", args[_BACKEND] if len(args) > _BACKEND else "")
        with nullcontext() if str(backend) == "nccl" else opened():  # it is aborted (see `nccl`)
            return make(*args, **kwargs)

    # What init_process_group and new_group have in common. It has had this name since torch 1.8, and has it in 2.14.
    c10d._new_process_group_helper = make_and_remember


@contextmanager
def opened() -> Iterator[Connections]:
    """Remember also the connections that are opened within the block; they are in what it yields, when it is over."""
    before, found = _sockets(), Connections()
    try:
        yield found
    finally:
        found.update(_sockets() - before)
        _opened.update(found)
        _each_connection(found, _keep_alive)


def shut_down(which: Connections = _opened) -> None:
    """Shut these or all that are remembered, in both directions; does nothing for those that are closed by now.

    Not a socket that listens: gloo ends the process if that one fails.
    """
    _each_connection(which & _sockets(), lambda connection: connection.shutdown(socket.SHUT_RDWR))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Linux waits for the interval (75 s) after each probe, whatever was sent since.
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S)


def _each_connection(which: Connections, call: Callable[[socket.socket], object]) -> None:
    """Call this for each of these that is a TCP connection, and the same one still."""
    for descriptor, inode in which:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            is_same = os.fstat(connection.fileno()).st_ino == inode  # the number may be another's by now
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_same and not listens and connection.family in (socket.AF_INET, socket.AF_INET6):
                call(connection)


def let_arrive() -> None:
    """Where the main thread waits for others, wait until nothing has come from them for 15 ms; 50 ms at most.

    A rank that is lost may have ended its step. What it sent for that is still to be read by this one, which may have
    heard of the loss before the thread that reads: without it nobody would have that step.
    """
    begin = quiet_since = now = time.monotonic()
    while now < min(begin + _ARRIVE_S, quiet_since + _QUIET_S) and _waits_for_others(_sleeps()):
        time.sleep(0.001)
        now = time.monotonic()
        if _are_unread():
            quiet_since = now


def _are_unread() -> bool:
    """Whether a connection that is remembered has something that nobody has read."""
    if not _opened:
        return False
    import fcntl  # neither of these is on Windows, where none is remembered
    import termios

    unread = bytearray(4)
    for descriptor, inode in tuple(_opened):
        with suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                fcntl.ioctl(descriptor, termios.FIONREAD, unread)
                if any(unread):
                    return True
    return False


def is_deaf(has_left: threading.Event) -> bool:
    """Block until the main thread has waited for others for `DEAF_S`; False once ``has_left`` is set.

    To be called when all connections are shut, which ends any wait that can be ended. The thread waits for others while
    it is idle in a call of torch's, or polls Horovod; a long backward pass is not idle.

    Args:
        has_left: set once it does not wait for them any more.
    """
    return _goes_on(has_left, DEAF_S, math.inf, _waits_for_others)


def is_stalled(has_left: threading.Event) -> bool:
    """As `is_deaf`, where the connections are not shut: a wait that may be for a disk does not count."""
    return _goes_on(has_left, DEAF_S, math.inf, functools.partial(_waits_for_others, by_name=False))


def is_idle(is_over: threading.Event, seconds: float, most_s: float) -> bool:
    """Block until the main thread was idle for ``seconds``, or ``most_s`` have passed; False once ``is_over`` is set.

    Args:
        is_over: set when the main thread is done with what it is watched in.
        seconds: how long it may be idle.
        most_s: how long it may take in all.
    """
    return _goes_on(is_over, seconds, most_s, bool)


def _goes_on(is_over: threading.Event, seconds: float, most_s: float, waits: Callable[[bool], bool]) -> bool:
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    waited_s, used_s, looked_s = 0.0, time.clock_gettime(clock), time.monotonic()
    until = looked_s + most_s
    while not is_over.wait(_LOOK_S):
        # A machine that stands still for seconds has kept the main thread from hearing, too.
        waited_s += min(time.monotonic() - looked_s, 2 * _LOOK_S)
        looked_s = time.monotonic()
        if looked_s > until:
            return True
        if not waits(time.clock_gettime(clock) - used_s <= _IDLE_S and _sleeps()):
            waited_s, used_s = 0.0, time.clock_gettime(clock)
        elif waited_s > seconds:
            return True
    return False


def _sleeps() -> bool:
    """Whether the main thread sleeps; one that waits for a core, on a busy machine, does not."""
    with suppress(OSError):
        status = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat").read_bytes()
        return status.rpartition(b") ")[2][:1] != b"R"
    return True


def _waits_for_others(is_idle: bool, *, by_name: bool = True) -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return False
    file = frame.f_code.co_filename
    if _ASKS_IN.search(file):
        return True
    # What is called in C has no frame: the line that calls it tells.
    waits = _WAITS_IN.search(file) or (by_name and _WAITS_BY.search(linecache.getline(file, frame.f_lineno)))
    return is_idle and bool(waits)


def _sockets() -> Connections:
    """Each socket of this process; none where there is no /proc."""
    found = Connections()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # a Path for each costs more
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found


def is_lost_rank(error: BaseException | None) -> bool:
    """Whether an error, or one in its chain of causes, is of a connection to another rank."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _OF_GLOO.search(text)):
            return True
        error = error.__cause__ or error.__context__
    return False
