"""What runs on the nodes that Slurm gives: one task on each, of which the first one leads.

Each task gives the first one hands on its node: a link (deploy/link.py) as there is over SSH, only that here the node
calls. With these the first task does what `kit up` does over SSH: check, plan, start an agent on each node, supervise.
Its record of the run is in the run's folder, which is shared, so every start of the job, the first and those after a
time limit, a preemption or a lost node, goes on from what the one before has left. In that folder are

    code/               the user's, as it was synced
    NODE/               what the agent of a node writes: logs, status, output
    state/              the leader's record of the run
    slurm/job.json      what to run; written once, by who submits
         /secrets.json  0600, values of `job.secrets`
         /ATTEMPT.json  0600, where the leader is and how it is known to the others; at the end, that it is over
         /logs/         what the leader says, for `kit up` to show
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
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

from nodekit.deploy.link import BOOT, Link, open_socket
from nodekit.deploy.remote import write_private
from nodekit.deploy.up import sigterm_interrupts
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.schema import Host

MEET_S = 300.0
"""How long the tasks wait for the leader, and it for them: the slowest of them may still load its modules."""
LATE_S = 20.0  # for the rest, once the fewest are there
TALK_S = 10.0
AGAIN_S = 0.5
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
        attempt = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        place = Path(self.run_dir) / "slurm" / f"{attempt}.json"
        # Slurm signals every process of the job; who does not handle the warning must not die of it.
        handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if int(os.environ["SLURM_PROCID"]) > 0:
            return serve(place)
        try:
            status = lead(Path(self.run_dir), place)
        except Warned:
            assert callable(handler)
            handler(
                signal.SIGUSR2, None
            )  # submitit's: calls `checkpoint`, has Slurm queue the job again, and exits
            raise
        if status:
            raise RuntimeError(f"the job has failed: kit's exit status is {status}")
        return status

    def checkpoint(self) -> Any:
        """What submitit is to run when the job has been queued again: the same; None if it must not be."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self) if has_made_progress(Path(self.run_dir)) else None


class Warned(Exception):
    """Slurm is about to end the job, and it has been stopped for that, with a snapshot."""


# --- on each node -------------------------------------------------------------------------------------------


def serve(place: Path) -> int:
    """Be the leader's hands on this node until it says that the job is over."""
    deadline = time.monotonic() + MEET_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            meeting = json.loads(place.read_text(encoding="utf-8"))
            if meeting.get("over"):
                return 0
            with _call(meeting) as connection:
                ends = connection.fileno()
                subprocess.run([sys.executable, "-c", DEAF + BOOT], stdin=ends, stdout=ends, check=False)
                deadline = time.monotonic() + MEET_S
        time.sleep(AGAIN_S)
    raise RuntimeError(
        f"no leader in {place} within {MEET_S:.0f} s: is slurm.shared_dir a folder that all nodes share?"
    )


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
        if connection is None:
            raise HostError(host.name, f"its task has not called for {TALK_S:.0f} s")
        return open_socket(connection, host.name)

    def close(self) -> None:
        """Take no more calls."""
        self._listening.close()


def lead(run_dir: Path, place: Path) -> int:
    """Do on the allocation what `kit up` does over SSH; kit's exit status.

    Raises:
        Warned: Slurm is about to end the job; it has been stopped.
    """
    warned = threading.Event()

    def warn(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # as signal wants it
        warned.set()
        raise KeyboardInterrupt("Slurm, which ends the job soon")

    log = run_dir / "slurm" / "logs" / "kit.log"
    log.parent.mkdir(mode=0o700, exist_ok=True)
    token = secrets.token_hex(32)
    tasks = Tasks(token)
    own = node_name()
    addresses = [*filter(None, [os.environ.get("SLURM_LAUNCH_NODE_IPADDR")]), own, "127.0.0.1"]
    meeting = {"addresses": addresses, "port": tasks.port, "token": token}
    write_private(str(place), json.dumps(meeting).encode())
    threading.Thread(target=serve, args=(place,), daemon=True).start()
    status = 1
    with log.open("a", buffering=1, encoding="utf-8") as out, contextlib.redirect_stdout(out):
        signal.signal(signal.SIGUSR2, warn)
        try:
            with sigterm_interrupts():
                status = _up(run_dir, tasks)
        except KitError as error:
            print(f"kit: {error}")
            status = error.exit_code
        except KeyboardInterrupt:
            status = 130
        finally:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            if not warned.is_set():
                result = {"exit": status, "attempt": place.stem}
                write_private(str(run_dir / "slurm" / "result.json"), json.dumps(result).encode())
            write_private(str(place), json.dumps({**meeting, "over": True}).encode())
            tasks.close()
    if warned.is_set():
        raise Warned
    return status


def _up(run_dir: Path, tasks: Tasks) -> int:
    # Late, and here only: the tasks of the other nodes do without these.
    from ClusterShell.NodeSet import NodeSet

    from nodekit.deploy import runs, start, up
    from nodekit.deploy.cluster import SshOptions
    from nodekit.inventory.fields import Nodes
    from nodekit.inventory.load import restore

    job = json.loads((run_dir / "slurm" / "job.json").read_text(encoding="utf-8"))
    inventory = restore(job["inventory"])
    assert inventory.slurm is not None
    if (again := int(os.environ.get("SLURM_RESTART_COUNT", "0"))) > inventory.slurm.max_requeues:
        raise KitError(
            f"the job was queued again {again} times: slurm.max_requeues is {inventory.slurm.max_requeues}"
        )
    with contextlib.suppress(FileNotFoundError):
        os.environ.update(json.loads((run_dir / "slurm" / "secrets.json").read_text(encoding="utf-8")))
    os.environ["XDG_STATE_HOME"] = str(run_dir / "state")
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
    resumed = next((run for run in runs.all_runs() if run.run_id == run_dir.name), None)
    with contextlib.ExitStack() as stack:
        hands = start.start(stack, inventory, resumed, options, placed=run_dir.name)
        return up.watch(hands, options)


def has_made_progress(run_dir: Path) -> bool:
    """Whether the job of a run ever reached its first step."""
    with contextlib.suppress(OSError):
        for file in (run_dir / "state").rglob("events.jsonl"):
            if '"first-progress"' in file.read_text(encoding="utf-8"):
                return True
    return False
