"""Takes away from nodekit.training what Windows has not; other libraries, built for Linux, need it.

Python imports this at its start, in every process that has this folder on PYTHONPATH.
"""

import builtins
import contextlib
import fcntl
import os
import signal
import stat
import sys
from pathlib import Path
from types import ModuleType

MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "curses"}
NAMES = set(
    """
    fork forkpty set_blocking get_blocking sysconf confstr getuid geteuid getgid getegid getgroups setsid getsid setpgid
    getpgid getpgrp killpg nice uname sched_getaffinity sched_setaffinity sched_yield mkfifo mknod chown fchown lchown
    fchmod statvfs fstatvfs pread pwrite preadv pwritev posix_fadvise posix_fallocate fdatasync sync sendfile getloadavg
    wait wait3 wait4 waitid pipe2 WNOHANG memfd_create eventfd posix_spawn O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC
    O_DSYNC O_CLOEXEC O_PATH O_DIRECT O_TMPFILE SIGUSR1 SIGUSR2 SIGKILL SIGHUP SIGQUIT SIGALRM SIGCHLD SIGCONT SIGSTOP
    SIGTSTP SIGPIPE pthread_kill pthread_sigmask sigwait sigwaitinfo sigtimedwait sigpending setitimer getitimer
    siginterrupt alarm pause
    """.split()  # noqa: SIM905  # as a list it would be a line for each
)


def _is_ours(frame):
    return "/nodekit/training/" in frame.f_code.co_filename


class Windows(ModuleType):
    def __getattribute__(self, name):
        if name in NAMES and _is_ours(sys._getframe(1)):
            raise AttributeError(f"there is no {name} on Windows")
        return ModuleType.__getattribute__(self, name)


os.__class__ = signal.__class__ = Windows


def _locking(number, mode, num_bytes):
    """As on Windows: not waiting, of the bytes from where the file is at."""
    assert mode == _MSVCRT.LK_NBLCK
    try:
        _lockf(number, _NOW, num_bytes, os.lseek(number, 0, os.SEEK_CUR))
    except BlockingIOError:
        raise PermissionError(13, "Permission denied") from None


_lockf, _NOW = fcntl.lockf, fcntl.LOCK_EX | fcntl.LOCK_NB
_MSVCRT = ModuleType("msvcrt")  # not for subprocess, which knows Windows by it
_MSVCRT.__dict__.update(locking=_locking, LK_NBLCK=2)

_import, _open, _set_wakeup_fd = builtins.__import__, os.open, signal.set_wakeup_fd


def import_ours(name, *arguments, **more):
    if name == "msvcrt" and _is_ours(sys._getframe(1)):
        return _MSVCRT
    if name.partition(".")[0] in MODULES and _is_ours(sys._getframe(1)):
        raise ModuleNotFoundError(f"there is no module {name} on Windows", name=name)
    return _import(name, *arguments, **more)


def open_no_folder(path, *arguments, **more):
    if isinstance(path, str | os.PathLike) and Path(path).is_dir():
        raise PermissionError(13, "a folder cannot be opened", os.fspath(path))
    return _open(path, *arguments, **more)


def set_wakeup_socket(number, **more):
    if number != -1 and not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise ValueError("it is no socket")
    return _set_wakeup_fd(number, **more)


def _closed_only(call):
    def checked(*paths, **more):
        for path in paths:
            if os.path.realpath(path) in _open_files():
                raise PermissionError(13, "it is open", os.fspath(path))
        return call(*paths, **more)

    return checked


def _open_files():
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(each.readlink()))
    return found


builtins.__import__, os.open, signal.set_wakeup_fd = import_ours, open_no_folder, set_wakeup_socket
for name in ("replace", "rename", "unlink", "remove"):
    setattr(os, name, _closed_only(getattr(os, name)))
