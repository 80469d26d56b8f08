"""Turn a process into a worker: tie its life to its parent's, open its log, and execute the user's command.

This is a program of its own, ``python -I -S worker.py PARENT_PID LOG MAX_FILES CWD ARGV...``, because an agent that has
threads must not run python code between fork and exec. The fork server's children call the same two functions.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None)  # now: a child of a process with threads must not load anything


def die_with(parent: int | None, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this signal when the thread that started this process ends; with None, cancel that."""
    _libc.prctl(_PR_SET_PDEATHSIG, number if parent else 0)
    if parent and os.getppid() != parent:
        os._exit(1)  # the parent had ended before prctl took effect


def be_read_by(pid: int) -> None:
    """Let the process `pid` and its children (py-spy) read this one's stack: Ubuntu (Yama) allows only ancestors to."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def settle(parent: int, agent: int, log: str) -> None:
    """Tie this process to `parent`, let `agent` read it, start a session, and append output to `log` (0600)."""
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
    """Replace this process by the command; never return. "python" means this interpreter."""
    program = sys.executable if argv[0] == "python" else argv[0]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # python ignores them, and a program would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.chdir(cwd)
    except OSError as error:  # not left to execvpe, whose error would name the program
        os.write(2, os.fsencode(f"kit: {cwd}, the copy of the code, cannot be entered: {error.strerror}\n"))
        os._exit(1)  # not 126 or 127, which say that the program cannot be run
    try:
        os.execvpe(program, [program, *argv[1:]], env)
    except OSError as error:
        os.write(2, os.fsencode(f"kit: cannot run {program!r} in {cwd}: {error.strerror}\n"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)  # as a shell does


if __name__ == "__main__":
    import resource  # here, since the fork server, which imports this module, does not need it

    settle(int(sys.argv[1]), int(sys.argv[1]), sys.argv[2])
    # Undo the agent's raised limit; only now, since descriptors above the lower one had to be closed first.
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (int(sys.argv[3]), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    execute(sys.argv[5:], dict(os.environ), sys.argv[4])
