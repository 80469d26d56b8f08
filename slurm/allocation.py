"""What runs on the nodes that Slurm gives: one task on each, of which the first one leads.

Each task gives the first one hands on its node: a link (deploy/link.py) as there is over SSH, only that here the node
calls. With these the first task does what `kit up` does over SSH: check, plan, start an agent on each node, supervise.
Its record of the run is in the run's folder, which is shared, so every start of the job, the first and those after a
time limit, a preemption or a lost node, goes on from what the one before has left. In that folder are

    code/               the user's, as it was synced
    NODE/               what the agent of a node writes: logs, status, output
    state/              the leader's record of the run
    slurm/job.json      what to run; written once, by who submits
         /secrets.json  0600, values of `job.secrets`; removed at the end
         /ATTEMPT.json  0600, where the leader is and how it is known to the others; at the end, that it is over
         /absent.json   the nodes that the leader cannot reach, for `kit status`
         /result.json   how the leader ended, if it did not have Slurm queue the job again
         /logs/         what the leader says, for `kit up` to show
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ClusterShell.NodeSet import NodeSet

from nodekit.deploy import runs
from nodekit.deploy.link import BOOT, Link, open_socket
from nodekit.deploy.remote import write_private
from nodekit.deploy.runs import Run
from nodekit.inventory.errors import HostError, JobFailed, KitError
from nodekit.inventory.fields import Nodes
from nodekit.inventory.load import restore
from nodekit.inventory.schema import Host, SlurmSettings

MEET_S = 300.0
"""How long the tasks wait for the leader, and it for them: the slowest of them may still load its modules."""
LATE_S = 20.0  # for the rest, once the fewest are there
TALK_S = 10.0
AGAIN_S = 0.5
UNHEARD_S = 20.0
LOOK_S = 2.0  # between looks at which nodes are lost
LOST_S = 60.0  # without enough nodes, and with no word from Slurm on those that are lost
ASK_S = 20.0  # for an answer of Slurm
PR_SET_CHILD_SUBREAPER = 36
STOPPED = 130  # kit's exit status of what was stopped
# Slurm signals every process of a job. A warning is for the leader alone, so all that a node's hands start passes it
# over; SIGTERM is for the agents, and for the leader, who needs these hands to see how they end.
DEAF = "import signal as s;s.signal(s.SIGUSR2,s.SIG_IGN);s.signal(s.SIGTERM,lambda *_:None);"


@dataclass(frozen=True)
class Allocated:
    """What submitit pickles and calls in each task."""

    run_dir: str

    def __call__(self) -> int:
        """Run this task's part of the job, to its end; kit's exit status.

        Raises:
            RuntimeError: the job has failed; this is how submitit and Slurm learn of it.
        """
        attempt = f"{os.environ['SLURM_JOB_ID']}.{num_restarts()}"
        place = Path(self.run_dir) / "slurm" / f"{attempt}.json"
        # Slurm signals every process of the job; who does not handle the warning must not die of it.
        handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if int(os.environ["SLURM_PROCID"]) > 0:
            return serve(place, Path(self.run_dir))
        try:
            status = lead(Path(self.run_dir), place)
        except QueueAgain:
            assert callable(handler)
            # submitit's: calls `checkpoint`, has Slurm queue the job again, and exits
            handler(signal.SIGUSR2, None)
            raise
        if status:
            raise RuntimeError(f"the job has failed: kit's exit status is {status}")
        return status

    def checkpoint(self) -> Any:
        """What submitit is to run when the job has been queued again: the same. Whether it is, the leader says."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class QueueAgain(Exception):
    """The job has been stopped, with a snapshot, and is to go back to the queue."""


# --- on each node -------------------------------------------------------------------------------------------


def serve(place: Path, run_dir: Path | None = None) -> int:
    """Be the leader's hands on this node until it says that the job is over.

    Args:
        place: where the leader is told.
        run_dir: the run's folder; None in the leader's own process, which need not look whether it is still there.
    """
    # An agent outlives the hands that started it. It stays below this process, where Slurm finds it by its parents.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began, lost_since = time.monotonic(), None
    while True:
        with contextlib.suppress(OSError, ValueError):
            meeting = json.loads(place.read_text(encoding="utf-8"))
            if meeting.get("over"):
                return 0
            with _call(meeting) as connection:
                ends = connection.fileno()
                subprocess.run([sys.executable, "-c", DEAF + BOOT], stdin=ends, stdout=ends, check=False)
                lost_since = time.monotonic()
        if lost_since is None and time.monotonic() - began > MEET_S:
            raise RuntimeError(
                f"no leader in {place} within {MEET_S:.0f} s: is slurm.shared_dir a folder that all nodes share?"
            )
        if run_dir is not None and lost_since is not None and time.monotonic() - lost_since > LOOK_S:
            _look_for_leader(run_dir, time.monotonic() - lost_since)
            time.sleep(LOOK_S)
        time.sleep(AGAIN_S)


def _look_for_leader(run_dir: Path, lost_s: float) -> None:
    """Have Slurm queue the job again when its leader is lost: with --no-kill, Slurm itself lets the others wait.

    Raises:
        RuntimeError: it was queued again too often.
    """
    job = job_now()
    if job.get("JobState") != "RUNNING":
        return  # it does not answer, or it is about to end this task
    leader = NodeSet(os.environ["SLURM_JOB_NODELIST"])[0]
    given = NodeSet(job["NodeList"])
    # One after the other: the first one that Slurm listens to is enough.
    turn_s = LOOK_S * 2 * list(given).index(node_name()) if node_name() in given else LOST_S
    if lost_s < turn_s + (0 if leader not in given else LOST_S):
        return
    why = f"{leader}, whose task leads the job, is lost"
    limit = _settings(run_dir).max_requeues
    is_over = num_restarts() >= limit
    then = (
        f"and it was queued again {limit} times (slurm.max_requeues)" if is_over else "Slurm queues it again"
    )
    with (run_dir / "slurm" / "logs" / "kit.log").open("a", encoding="utf-8") as log:
        log.write(f"{why}; {then}\n")
    verb = ["scancel"] if is_over else ["scontrol", "requeue"]
    subprocess.run([*verb, os.environ["SLURM_JOB_ID"]], timeout=ASK_S, check=False, stdin=subprocess.DEVNULL)
    if is_over:
        raise RuntimeError(f"{why}; {then}")


@contextlib.contextmanager
def _call(meeting: Mapping[str, Any]) -> Iterator[socket.socket]:
    """A connection to the leader; each side has shown the other that it can read the run's folder."""
    for address in meeting["addresses"]:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, meeting["port"]), timeout=TALK_S)
            break
    else:
        raise ConnectionError(f"nobody answers at {meeting['addresses']}")
    with connection:
        # What is sent and not taken for so long was sent to a host that is no more.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNHEARD_S))
        with connection.makefile("rwb", buffering=0) as talk:
            own = secrets.token_hex(16)
            theirs = json.loads(_line(talk))["nonce"]
            proof = _proof(meeting["token"], "task", theirs, own)
            talk.write(json.dumps({"node": node_name(), "nonce": own, "proof": proof}).encode() + b"\n")
            if not hmac.compare_digest(
                json.loads(_line(talk))["proof"], _proof(meeting["token"], "leader", own)
            ):
                raise ConnectionError("that is not the leader")
        connection.settimeout(None)
        yield connection


def _line(talk: Any) -> bytes:
    line: bytes = talk.readline(1000)
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection ended")
    return line


def _proof(token: str, *words: str) -> str:
    return hmac.new(token.encode(), " ".join(words).encode(), "sha256").hexdigest()


def node_name() -> str:
    """What Slurm calls this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


# --- on the first one ---------------------------------------------------------------------------------------


class Tasks:
    """The tasks of the allocation, as the leader sees them: each calls, and is a link to its node."""

    def __init__(self, token: str) -> None:
        self.address: dict[str, str] = {}
        """Node → where it called from."""
        self._token = token
        self._came = threading.Condition()
        self._free: dict[str, socket.socket] = {}
        self._absent: set[str] = set()
        self._listening = socket.create_server(("", 0), backlog=1024)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, (address, _) = self._listening.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(connection, address), daemon=True).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            connection.settimeout(TALK_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            nonce = secrets.token_hex(16)
            with connection.makefile("rwb", buffering=0) as talk:
                talk.write(json.dumps({"nonce": nonce}).encode() + b"\n")
                said = json.loads(_line(talk))
                if not hmac.compare_digest(said["proof"], _proof(self._token, "task", nonce, said["nonce"])):
                    raise ConnectionError("a stranger")
                proof = _proof(self._token, "leader", said["nonce"])
                talk.write(json.dumps({"proof": proof}).encode() + b"\n")
            connection.settimeout(None)
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return
        with self._came:
            if (old := self._free.pop(said["node"], None)) is not None:
                old.close()
            self._free[said["node"]] = connection
            self.address[said["node"]] = address
            self._absent.discard(said["node"])
            self._came.notify_all()

    def wait(self, names: list[str], *, least: int, say: Callable[[str], None]) -> list[str]:
        """Those of `names` that came: all, or after a while at least as many as are needed.

        Raises:
            KitError: too few came in time.
        """
        with self._came:
            if not self._came.wait_for(lambda: len(self.address) == len(names), timeout=LATE_S):
                absent = ", ".join(name for name in names if name not in self.address)
                say(f"waiting for the tasks on {absent}")
                self._came.wait_for(lambda: len(self.address) >= least, timeout=MEET_S - LATE_S)
            here = [name for name in names if name in self.address]
        if len(here) < least:
            absent = ", ".join(name for name in names if name not in here)
            raise KitError(
                f"no word from the tasks on {absent} within {MEET_S:.0f} s; what they said is in the folder slurm/ "
                "of the run: can they see the shared folder, and reach this node?"
            )
        return here

    def open(self, host: Host) -> Link:
        """A link to a node.

        Raises:
            HostError: its task has not called since the last one was lost.
        """
        with self._came:
            self._came.wait_for(lambda: host.name in self._free, timeout=TALK_S)
            connection = self._free.pop(host.name, None)
            (self._absent.discard if connection else self._absent.add)(host.name)
        if connection is None:
            raise HostError(host.name, f"its task has not called for {TALK_S:.0f} s")
        return open_socket(connection, host.name)

    def absent(self, names: list[str]) -> list[str]:
        """Those of `names` that never called, or have not since their link was lost."""
        with self._came:
            return [name for name in names if name in self._absent or name not in self.address]

    def lost(self) -> list[str]:
        """The nodes that called once and do not again, now that their links are closed."""
        with self._came:
            self._came.wait_for(lambda: self._free.keys() >= self.address.keys(), timeout=TALK_S)
            return [name for name in self.address if name not in self._free]

    def close(self) -> None:
        """Take no more calls."""
        self._listening.close()


class Ending:
    """Whether the job is to end before its end, by Slurm's signals or for want of nodes, and why."""

    def __init__(self) -> None:
        self.why = ""
        self.is_warned = False
        """Slurm ends the job soon, or it cannot go on: it is to go back to the queue."""
        self.lack = ""
        """Which nodes are lost, where that is why."""
        self.over = threading.Event()
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  # as signal wants it
        is_first = not self.why
        told = self.lack or ("Slurm, which ends the job soon" if number == signal.SIGUSR2 else "Slurm")
        self.why = self.why or told
        self.is_warned = self.is_warned or number == signal.SIGUSR2
        # Slurm may send several; the first one ends the job, and those that follow must not cut that short.
        if is_first and not self.over.is_set():
            raise KeyboardInterrupt(self.why)

    def lacks_nodes(self, why: str) -> None:
        """From another thread: the job is to end, for too few nodes are left."""
        if not self.why and not self.over.is_set():
            self.lack = f"kit: {why}"
            os.kill(os.getpid(), signal.SIGUSR2)

    def close(self) -> None:
        """From here on it ends by itself."""
        self.over.set()
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def lead(run_dir: Path, place: Path) -> int:
    """Do on the allocation what `kit up` does over SSH; kit's exit status.

    Raises:
        QueueAgain: it was stopped, and goes on when Slurm starts it again.
    """
    os.environ["XDG_STATE_HOME"] = str(run_dir / "state")
    log = run_dir / "slurm" / "logs" / "kit.log"
    log.parent.mkdir(mode=0o700, exist_ok=True)
    token = secrets.token_hex(32)
    tasks = Tasks(token)
    own = node_name()
    addresses = [*filter(None, [os.environ.get("SLURM_LAUNCH_NODE_IPADDR")]), own, "127.0.0.1"]
    meeting = {"addresses": addresses, "port": tasks.port, "token": token}
    write_private(str(place), json.dumps(meeting).encode())
    threading.Thread(target=serve, args=(place,), daemon=True).start()
    with log.open("a", buffering=1, encoding="utf-8") as out, contextlib.redirect_stdout(out):
        ending, is_queued_again = Ending(), False
        try:
            status = _up(run_dir, tasks, ending)
        except KitError as error:
            print(f"kit: {error}")
            status = error.exit_code
            if lost := tasks.lost():
                ending.why = ending.lack = f"kit: {', '.join(lost)} lost as the job started"
                ending.is_warned, status = True, STOPPED
        except KeyboardInterrupt:
            status = STOPPED
        finally:
            ending.close()
            write_private(str(place), json.dumps({**meeting, "over": True}).encode())
            tasks.close()
        if ending.why and status == STOPPED:
            is_queued_again, status = _queue_again(run_dir, ending)
        if not is_queued_again:
            if status == STOPPED and (run := _record(run_dir)) is not None and run.state != "stopped":
                run.finish_stopped()  # it was on record as one that did not start
            result = {"exit": status, "attempt": place.stem}
            write_private(str(run_dir / "slurm" / "result.json"), json.dumps(result).encode())
            (run_dir / "slurm" / "secrets.json").unlink(
                missing_ok=True
            )  # the next submission brings them again
    if is_queued_again:
        raise QueueAgain
    return status


def _queue_again(run_dir: Path, ending: Ending) -> tuple[bool, int]:
    """Whether a job that was stopped before its end goes back to the queue, and else kit's exit status."""
    job = job_now()
    # Somebody has cancelled it, or put it back himself; one that is to be preempted counts as running.
    if not ending.is_warned and job.get("JobState") != "RUNNING":
        return False, STOPPED
    run, limit = _record(run_dir), _settings(run_dir).max_requeues
    is_preempted = job.get("PreemptTime", "None") != "None"
    if num_restarts() >= limit:
        why = f"the job was queued again {num_restarts()} times: slurm.max_requeues is {limit}"
    elif not (has_made_progress(run_dir) or is_preempted or ending.lack):
        why = "it had to end before its first step, and would again: is slurm.time enough for its start?"
    else:
        print(f"{run_dir.name}: stopped by {ending.why}; Slurm queues it again", flush=True)
        return True, STOPPED
    if run is not None:
        run.finish("failed", why)
    print(f"\n{run_dir.name} failed: {why}", flush=True)
    return False, JobFailed.exit_code


def job_now() -> dict[str, str]:
    """What Slurm says of this job: its JobState, NodeList, PreemptTime; {} where it does not answer."""
    argv = ["scontrol", "show", "job", "--oneliner", os.environ["SLURM_JOB_ID"]]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=ASK_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(re.findall(r"(?:^|\s)(JobState|NodeList|PreemptTime)=(\S*)", done.stdout))


def num_restarts() -> int:
    """How often Slurm has queued this job again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _job(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "slurm" / "job.json").read_text(encoding="utf-8"))
    return found


def _settings(run_dir: Path) -> SlurmSettings:
    settings = restore(_job(run_dir)["inventory"]).slurm
    assert settings is not None
    return settings


def _record(run_dir: Path) -> Run | None:
    """The leader's own record of the run."""
    return next((run for run in runs.all_runs() if run.run_id == run_dir.name), None)


def _up(run_dir: Path, tasks: Tasks, ending: Ending) -> int:
    # Late, and here only: the tasks of the other nodes do without these.
    from nodekit.deploy import start, up
    from nodekit.deploy.cluster import SshOptions

    job = _job(run_dir)
    inventory = restore(job["inventory"])
    assert inventory.slurm is not None
    if num_restarts() > (limit := inventory.slurm.max_requeues):
        raise KitError(f"the job was queued again {num_restarts()} times: slurm.max_requeues is {limit}")
    with contextlib.suppress(FileNotFoundError):
        os.environ.update(json.loads((run_dir / "slurm" / "secrets.json").read_text(encoding="utf-8")))
    names = [str(name) for name in NodeSet(os.environ["SLURM_JOB_NODELIST"])]
    least = min(inventory.nodes.min, len(names))
    here = tasks.wait(names, least=least, say=lambda text: print(text, flush=True))
    given = inventory.defaults.model_dump(exclude_none=True)
    hosts = tuple(
        Host.model_validate(
            {
                **given,
                "name": name,
                "address": tasks.address[name],
                "connection": "ssh",
                "python": sys.executable,
                "workdir": job["shared_dir"],
                "gpus": inventory.slurm.gpus_per_node or 0,
            }
        )
        for name in here
    )
    inventory = inventory.model_copy(
        update={
            "hosts": hosts,
            "nodes": Nodes(min(least, len(here)), len(here)),
            "snapshots": inventory.snapshots.model_copy(
                update={"shared": inventory.snapshots.shared or f"{job['shared_dir']}/snapshots"}
            ),
        }
    )
    options = start.Options(
        inventory=inventory.path,
        command=tuple(job["command"]) if job["command"] else None,
        ssh=SshOptions(open=tasks.open),
    )
    shown = _logs_of(run_dir, here)
    with contextlib.ExitStack() as stack:
        hands = start.start(stack, inventory, _record(run_dir), options, placed=run_dir.name)
        args = (run_dir, tasks, here, inventory.nodes.min, ending)
        threading.Thread(target=_look_for_nodes, args=args, daemon=True).start()
        return up.watch(hands, options, shown=shown, is_asked=False)


def _logs_of(run_dir: Path, names: list[str]) -> dict[str, dict[str, int]]:
    """Node → its logs of earlier starts, which have been shown, and how long they are."""
    return {
        name: {path.name: path.stat().st_size for path in (run_dir / name / "logs").glob("*.log")}
        for name in names
    }


def _look_for_nodes(run_dir: Path, tasks: Tasks, names: list[str], least: int, ending: Ending) -> None:
    """Tell which nodes are lost; end the job when the others are too few and none can come: Slurm gives new ones."""
    file = run_dir / "slurm" / "absent.json"
    before: list[str] | None = None
    few_since: float | None = None
    while not ending.over.wait(LOOK_S):
        absent = tasks.absent(names)
        if absent != before:
            told = {"job": os.environ["SLURM_JOB_ID"], "nodes": absent}
            write_private(str(file), json.dumps(told).encode())
            before = absent
        if len(names) - len(absent) >= least:
            few_since = None
            continue
        few_since = few_since or time.monotonic()
        given = NodeSet(listed) if (listed := job_now().get("NodeList", "")) else NodeSet(",".join(names))
        if len(given & NodeSet(",".join(names))) < least or time.monotonic() - few_since > LOST_S:
            ending.lacks_nodes(f"{', '.join(absent)} lost, and {least} nodes are needed")


def has_made_progress(run_dir: Path) -> bool:
    """Whether the job of a run ever reached its first step."""
    with contextlib.suppress(OSError):
        for file in (run_dir / "state").rglob("events.jsonl"):
            if '"first-progress"' in file.read_text(encoding="utf-8"):
                return True
    return False
