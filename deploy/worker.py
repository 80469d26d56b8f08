"""Turns itself into one worker: opens its log, ties its life to the agent's, and executes the user's command.

torch's launcher starts it as ``python -I -S worker.py NODE_DIR`` once per local rank. Standing between the two
it does what upstream has no place for: the argv comes from the spec, byte for byte (upstream substitutes
``${local_rank}`` and ``$$`` in arguments); stdout and stderr go to one file per rank and attempt, in order; and
the worker dies with its agent, also when that is killed with SIGKILL.
"""

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(node_dir: str) -> None:
    """Become the command of the spec in `node_dir`; never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["NODEKIT_AGENT_PID"]):
        sys.exit(1)  # the agent was gone before the line above took hold
    rank, attempt = os.environ["RANK"], os.environ["NODEKIT_ATTEMPT"]
    log = os.open(
        os.path.join(node_dir, "logs", f"rank{rank}-attempt{attempt}.log"),
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
        0o600,
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    with open(os.path.join(node_dir, "spec.json"), encoding="utf-8") as file:
        spec = json.load(file)
    argv = list(spec["argv"])
    env = dict(os.environ)
    env["NODE_RANK"] = env["GROUP_RANK"]
    # Upstream counts restarts on each node by itself, and has the workers meet under that number: nodes that do
    # not agree would wait for each other for ever. The round is the same on all of them.
    env["TORCHELASTIC_RESTART_COUNT"] = attempt.partition(".")[2]
    env["NODEKIT_PROGRESS_FILE"] = os.path.join(node_dir, "progress", f"rank{rank}")
    if argv[0] == "python":
        argv[0] = os.environ["NODEKIT_PYTHON"]
    try:
        os.chdir(spec["code_dir"])
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        print(f"kit: cannot run {argv[0]!r} in {spec['code_dir']}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


main(sys.argv[1])
