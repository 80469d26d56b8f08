"""PID 1 of a lab host: mounts the host's disk, becomes its root, starts its daemons and reaps orphans.

A stand-alone script, run as ``python -I -S lab_host.py`` inside the host's network namespace, in the host's folder. It
imports only the standard library, so that a host starts in tens of milliseconds.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x20000, 0x4000000, 0x8000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "kmsg")
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Unshare, fork, and let the child wait until its pid is recorded (see lab_process.start)."""
    boot = json.loads(Path("boot.json").read_text())
    check(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID), "unshare")
    if child := os.fork():
        print(child, flush=True)
        return
    if sys.stdin.readline() != "go\n":
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    socket.sethostname(boot["hostname"])
    become_root_of_disk(boot["python_prefixes"], boot.get("shared", []))
    if boot["sshd"]:
        print(f"sshd is process {spawn([boot['sshd'], '-D', '-e'])}", flush=True)
    for argv in boot.get("daemons", []):
        # Each goes to the background when it is ready, and the next one needs it.
        _, status = os.waitpid(spawn(argv), 0)
        print(f"{argv[0]} {'failed' if status else 'is in the background'}", flush=True)
    print(f"{boot['hostname']} is up", flush=True)
    bury_orphans()


def spawn(argv: list[str]) -> int:
    """Start a program, found by a fixed PATH; return its pid."""
    return os.posix_spawnp(
        argv[0],
        argv,
        {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these, and a child would inherit that
    )


def become_root_of_disk(python_prefixes: list[str], shared: list[str]) -> None:
    """Mount the overlay of this machine's ``/`` and the host's disk, and make it the root of this mount namespace."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    # Relative paths: a comma in a folder's name would end the option.
    mount("overlay", "root", "overlay", 0, "lowerdir=/,upperdir=upper,workdir=work")
    os.chdir("root")
    mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("sysfs", "sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("tmpfs", "run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    Path("run/sshd").mkdir(mode=0o755)
    Path("run/lock").mkdir()
    mount_dev()
    for prefix in python_prefixes:
        target = prefix.lstrip("/")
        Path(target).mkdir(parents=True, exist_ok=True)
        mount(prefix, target, None, MS_BIND | MS_REC)
        # The host must not change this machine's python; the first mount ignores the read-only flag.
        mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY)
    for folder in shared:
        target = folder.lstrip("/")
        Path(target).mkdir(parents=True, exist_ok=True)
        mount(folder, target, None, MS_BIND)
    check(LIBC.pivot_root(b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", MNT_DETACH), "umount the machine's root")
    os.chdir("/")


def mount_dev() -> None:
    """Mount a small /dev for the host: no GPUs, and separate terminals and shared memory."""
    # Containers mostly have no kmsg.
    sources = {device: f"/dev/{device}" for device in DEVICES if Path("/dev", device).exists()}
    mount("tmpfs", "dev", "tmpfs", MS_NOSUID, "mode=755")
    for device, source in sources.items():
        Path("dev", device).touch()
        mount(source, f"dev/{device}", None, MS_BIND)
    Path("dev/pts").mkdir()
    Path("dev/shm").mkdir()
    mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    mount("tmpfs", "dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    for link, points_to in {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0",
                            "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}.items():  # fmt: skip
        Path("dev", link).symlink_to(points_to)


def bury_orphans() -> None:
    """Reap all processes that are re-parented to this one, forever."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        signal.sigwait({signal.SIGCHLD})  # sshd itself has ended: like a real host, this one lives on


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call the system call; the OSError names the target."""
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = LIBC.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3])
    check(result, f"mount {kind or source or ''} on {target}")


def check(result: int, doing: str) -> None:
    """Raise the C library's error, with what was being done, if `result` is not 0."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
