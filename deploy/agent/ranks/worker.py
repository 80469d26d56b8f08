"""Turns a process into a worker: ties its life to its parent's, opens its log, and executes the user's command.

A program of its own, ``python -I -S worker.py PARENT_PID LOG MAX_FILES CWD ARGV...``, because what stands between
fork and exec must not be python code in an agent that has threads. The fork server's children call the same two steps.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None)  # now: a child of a process with threads must not load anything


def die_with(parent: int | None, number: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when the parent's thread that started us ends, however it ends; None: no longer."""
    _libc.prctl(_PR_SET_PDEATHSIG, number if parent else 0)
    if parent and os.getppid() != parent:
        os._exit(1)  # it was gone before the line above took hold


def be_read_by(pid: int) -> None:
    """Let a process and what it starts (py-spy) read this one's stack, which Ubuntu (Yama) allows only ancestors."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def settle(parent: int, agent: int, log: str) -> None:
    """Die with `parent`, be read by `agent`, in a session of our own, with `log` (appended, 0600) as our output."""
    die_with(parent)
    be_read_by(agent)
    os.setsid()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the agent was handed sockets to inherit
    nothing = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for handle, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(handle, number)
    os.closerange(3, 5)


def execute(argv: list[str], env: dict[str, str], cwd: str) -> None:
    """Become the command; never returns. "python" is this interpreter."""
    program = sys.executable if argv[0] == "python" else argv[0]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # python ignores them, and exec would hand that on
        signal.signal(number, signal.SIG_DFL)
    try:
        os.chdir(cwd)
    except OSError as error:  # execvpe's would be taken for the program's
        os.write(2, os.fsencode(f"kit: {cwd}, the copy of the code, cannot be entered: {error.strerror}\n"))
        os._exit(1)  # no program is missing: 126 and 127 would say so
    try:
        os.execvpe(program, [program, *argv[1:]], env)
    except OSError as error:
        os.write(2, os.fsencode(f"kit: cannot run {program!r} in {cwd}: {error.strerror}\n"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)  # as a shell tells them apart


if __name__ == "__main__":
    import resource  # the agent has it already, and the fork server need not

    settle(int(sys.argv[1]), int(sys.argv[1]), sys.argv[2])
    # The agent has raised its own; only now, for what it had open above this limit had to be closed first.
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (int(sys.argv[3]), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    execute(sys.argv[5:], dict(os.environ), sys.argv[4])
