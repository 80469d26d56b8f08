"""What runs on the nodes that Slurm gives: one task on each, of which the first one leads.

Each task connects to the first one, and runs the host-side server (deploy/host/server.py) at its end of the connection:
the leader has a channel to each node (deploy/connect/channel.py), as over SSH. With these the first task does what `kit
up` does over SSH: check, plan, start an agent on each node, supervise. Its record of the run is in the run's folder,
which is shared, so every start of the job, the first and those after a time limit, a preemption or a lost node, goes on
from what the one before has left. In that folder are

    code/               the user's, as it was synced
    NODE/               what the agent of a node writes: logs, status, output
    state/              the leader's record of the run
    slurm/job.json      what to run; written once, by who submits
         /secrets-*.json  0600, values of `job.secrets`, of this submission; removed at its end
         /notify-*.json   0600, those of `notify:`, likewise
         /ATTEMPT.json  0600, where the leader is and how it is known to the others; at the end, that it is over
         /ATTEMPT.beat  the leader's sign of life, every two seconds
         /absent.json   the nodes that the leader cannot reach, for `kit status`
         /result.json   how the leader ended, if it did not have Slurm queue the job again
         /logs/         what the leader says, for `kit up` to show
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from ClusterShell.NodeSet import NodeSet

from nodekit.deploy.connect.channel import BOOT
from nodekit.deploy.host import processes
from nodekit.deploy.host.files import write_private
from nodekit.deploy.records.runs import STOPPED_EXIT, Run
from nodekit.deploy.records.secret_files import RANKS, secrets_file
from nodekit.inventory.errors import JobFailed, KitError
from nodekit.inventory.fields import Nodes
from nodekit.inventory.load import restore
from nodekit.inventory.schema import Host, Inventory
from nodekit.slurm.allocation.handshake import MEET_S, Tasks, call, run_for
from nodekit.slurm.allocation.requeue import (
    attempt,
    exclude,
    finish,
    has_made_progress,
    is_missing_step,
    is_taken_away,
    job_now,
    keep_records_in,
    node_name,
    num_restarts,
    place_of_log,
    queue_again_without_leader,
    readable_record_of,
    record_of,
    settings_of,
    snapshots_of,
    what_to_run,
)
from nodekit.slurm.sbatch_parameters import planned_gpus

AGAIN_S = 0.5
LOOK_S = 2.0  # between two looks for lost nodes
TAKEN_LOOK_S = 60.0  # between two looks whether Slurm has taken the job away
LOST_S = 60.0  # without enough nodes, while Slurm does not report the lost ones
LEADER_LOST_S = 4.0  # without a channel to the leader, nor a heartbeat of it in the shared folder
# Slurm signals every process of a job. A warning is for the leader alone, so the host-side servers and what they start
# ignore it; SIGTERM is for the agents, and for the leader, who needs these servers to see how they end.
DEAF = "import signal as s;s.signal(s.SIGUSR2,s.SIG_IGN);s.signal(s.SIGTERM,lambda *_:None);"


_NO_LIMIT_MIN = 10**6
"""The time limit that submitit gets if it has no number: without `slurm.time`, or in Slurm's notation (``2-0``)."""


def own_job_id(environ: Mapping[str, str]) -> str:
    """This job's id as kit records it; for a task of an array, ARRAY_INDEX."""
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


class Allocated:
    """What submitit pickles and calls in each task."""

    def __call__(self, run_dir: str) -> int:
        """Run this task's part of the job, to its end; kit's exit status.

        Raises:
            RuntimeError: the job has failed; this is how submitit and Slurm learn of it.
        """
        keep_records_in(Path(run_dir))
        place = Path(run_dir) / "slurm" / f"{attempt()}.json"
        # Slurm signals every process of the job; those that do not handle the warning must not die of it.
        handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if int(os.environ["SLURM_PROCID"]) > 0:
            return serve(place, Path(run_dir))
        try:
            status = lead(Path(run_dir), place)
        except QueueAgain as again:
            assert callable(handler)
            own = getattr(handler, "__self__", None)
            if own is not None and not isinstance(own._delayed._timeout_min, int):
                own._delayed._timeout_min = _NO_LIMIT_MIN
            try:
                # submitit's: calls `checkpoint`, has Slurm queue the job again, and exits
                handler(signal.SIGUSR2, None)
            finally:
                exclude(Path(run_dir), again.lost)
            raise
        if status:
            raise RuntimeError(f"the job has failed: kit's exit status is {status}")
        return status

    def checkpoint(self, run_dir: str) -> Any:
        """What submitit runs after a requeue: the same. The leader decides whether there is one."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, run_dir)


class QueueAgain(Exception):
    """The job has been stopped, with a snapshot, and is to go back to the queue.

    Attributes:
        lost: the nodes that were lost.
    """

    def __init__(self, lost: Iterable[str]) -> None:
        self.lost = list(lost)


# --- on each node -------------------------------------------------------------------------------------------


def serve(place: Path, run_dir: Path | None = None) -> int:
    """Run the host-side server of this node for the leader, until it says that the job is over.

    Args:
        place: the file with the leader's address.
        run_dir: the run's folder; None in the leader's own process, which need not check that the leader is alive.
    """
    # An agent outlives the server that started it. It stays below this process, where Slurm finds it by its parents.
    processes.adopt_orphans()
    began, lost_since, beat, leader = time.monotonic(), None, b"", ""
    while True:
        with contextlib.suppress(OSError, ValueError):
            contact = json.loads(place.read_text(encoding="utf-8"))
            if contact.get("over"):
                return 0
            with call(contact, is_here=run_dir is None) as wire:
                run_for(wire, [sys.executable, "-c", DEAF + BOOT])
                lost_since, beat, leader = time.monotonic(), b"", contact["leader"]
        if lost_since is None and time.monotonic() - began > MEET_S:
            raise RuntimeError(
                f"no leader in {place} within {MEET_S:.0f} s: is slurm.shared_dir a folder that all nodes share?"
            )
        if run_dir is not None and lost_since is not None:
            before, beat = beat, _beat(place)
            if before not in (beat, b""):
                lost_since = time.monotonic()  # it is alive, and it is this node that cannot reach it
            _look_for_leader(run_dir, leader, time.monotonic() - lost_since)
        time.sleep(AGAIN_S)


def _beat(place: Path) -> bytes:
    """The leader's last heartbeat in the shared folder; b"" before the first."""
    with contextlib.suppress(OSError):
        return place.with_suffix(".beat").read_bytes()
    return b""


def _look_for_leader(run_dir: Path, leader: str, lost_s: float) -> None:
    """Have Slurm requeue the job if its leader is lost; by itself Slurm, with --no-kill, leaves the others waiting."""
    # The tasks take turns, since one requeue is enough.
    turn_s = LOOK_S * (int(os.environ["SLURM_PROCID"]) - 1)
    if lost_s < turn_s:
        return
    job = job_now()
    _end_if_taken_away(job)
    if job.get("JobState") != "RUNNING":
        return  # Slurm does not answer, or is about to end this task
    if lost_s < LEADER_LOST_S + turn_s and leader in NodeSet(job["NodeList"]):
        return
    queue_again_without_leader(run_dir, f"{leader}, whose task leads the job, is lost", [leader])


def _end_if_taken_away(job: Mapping[str, str]) -> None:
    """End this task, and all that runs below it, if Slurm has ended this start of the job: another one may run.

    At once, and without a word in the run's folder, which is the other one's now. What ranks have not saved is lost.
    """
    if is_taken_away(job):
        print("Slurm has ended this job, but slurmd has not ended it on this node: kit does", flush=True)
        for pid in processes.below(os.getpid()):
            processes.send(pid, signal.SIGKILL)
        os._exit(JobFailed.exit_code)


def _look_for_end(over: threading.Event) -> None:
    while not over.wait(TAKEN_LOOK_S):
        _end_if_taken_away(job_now())


# --- on the first one ---------------------------------------------------------------------------------------


class Ending:
    """Whether and why the job is to be stopped: by a signal of Slurm's, or because too few nodes are left."""

    def __init__(self) -> None:
        self.why = ""
        self.is_warned = False
        """Whether the job is to be requeued: Slurm ends it soon, or too few nodes are left."""
        self.lost: list[str] = []
        """The lost nodes, if they are the reason."""
        self._lack = ""
        self.over = threading.Event()
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  # as signal wants it
        is_first = not self.why
        told = self._lack or ("Slurm, which ends the job soon" if number == signal.SIGUSR2 else "Slurm")
        self.why = self.why or told
        self.is_warned = self.is_warned or number == signal.SIGUSR2
        # Slurm may send several signals; the first one stops the job, and later ones must not interrupt that.
        if is_first and not self.over.is_set():
            raise KeyboardInterrupt(self.why)

    def lacks_nodes(self, lost: list[str], why: str) -> None:
        """Stop the job, for too few nodes are left; called by another thread."""
        if not self.why and not self.over.is_set():
            self.lost, self._lack = lost, f"kit: {', '.join(lost)} lost{why}"
            os.kill(os.getpid(), signal.SIGUSR2)

    def lacked_nodes(self, lost: list[str]) -> None:
        """Record that the job has ended since nodes were lost while it started."""
        self.lost, self.why, self.is_warned = lost, f"kit: {', '.join(lost)} lost as the job started", True

    def close(self) -> None:
        """Ignore signals from here on: the job is ending by itself."""
        self.over.set()
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


class _Log(io.TextIOWrapper):
    """The leader's log. If it cannot be written (a full disk, a quota), the job goes on without it."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def lead(run_dir: Path, place: Path) -> int:
    """Do on the allocation what `kit up` does over SSH; kit's exit status.

    Raises:
        QueueAgain: the job was stopped, and resumes when Slurm starts it again.
    """
    log = run_dir / "slurm" / "logs" / "kit.log"
    log.parent.mkdir(mode=0o700, exist_ok=True)
    token = secrets.token_hex(32)
    tasks = Tasks(token)
    own = node_name()
    addresses = [*filter(None, [os.environ.get("SLURM_LAUNCH_NODE_IPADDR")]), own]
    contact = {"leader": own, "addresses": addresses, "port": tasks.port, "token": token}
    contact |= place_of_log(place)
    write_private(str(place), json.dumps(contact).encode())
    threading.Thread(target=serve, args=(place,), daemon=True).start()
    with _Log(log.open("ab"), encoding="utf-8", line_buffering=True) as out, contextlib.redirect_stdout(out):
        ending, is_queued_again = Ending(), False
        threading.Thread(target=_beat_until, args=(place, ending.over), daemon=True).start()
        threading.Thread(target=_look_for_end, args=(ending.over,), daemon=True).start()
        try:
            status = _up(run_dir, tasks, ending)
        except KitError as error:
            print(f"kit: {error}")
            status = error.exit_code
            if lost := tasks.lost():
                ending.lacked_nodes(lost)
                status = STOPPED_EXIT
            else:
                _tell_of_failed_start(run_dir, error)
        except KeyboardInterrupt:
            status = STOPPED_EXIT
        finally:
            ending.close()
            with contextlib.suppress(OSError):  # a full disk: the other tasks see that the job ends
                write_private(str(place), json.dumps({**contact, "over": True}).encode())
            tasks.close()
        if ending.why and status == STOPPED_EXIT:
            is_queued_again, status = _queue_again(run_dir, ending, place)
        if not is_queued_again:
            run = readable_record_of(run_dir) if status == STOPPED_EXIT else None
            if run is not None and run.state != "stopped":
                run.finish_stopped()  # it was on record as one that did not start
            finish(run_dir, status)
    if is_queued_again:
        raise QueueAgain(ending.lost)
    return status


def _tell_of_failed_start(run_dir: Path, error: KitError) -> None:
    """Send the inventory's notifications of a failed start: nobody watches a job that has waited in the queue."""
    from nodekit.deploy.notify import notify

    job = what_to_run(run_dir)
    run = readable_record_of(run_dir) or Run(
        run_id=run_dir.name,
        name=job["inventory"]["name"],
        inventory_path=job["inventory"]["path"],
        inventory=job["inventory"],
        command=job["command"],
        created=time.time(),
        nodes={node_name(): {"code_dir": f"{run_dir}/code"}},
        is_placed=True,
    )
    with contextlib.suppress(OSError, KitError):
        notify.tell_of_end(
            dataclasses.replace(run, state="failed", verdict=str(error.errors[0]), ended=time.time())
        )


def _beat_until(place: Path, over: threading.Event) -> None:
    """Write a heartbeat to the shared folder, for tasks that cannot reach this one."""
    file = place.with_suffix(".beat")
    for number in itertools.count(1):
        # In place: a client of NFS sees at its next open what another one wrote, but may know an old name for longer.
        with contextlib.suppress(OSError), file.open("wb" if number == 1 else "r+b") as beat:
            beat.write(b"%d" % number)
        if over.wait(LOOK_S):
            return


def _queue_again(run_dir: Path, ending: Ending, place: Path) -> tuple[bool, int]:
    """Whether a job that was stopped before its end goes back to the queue, and else kit's exit status."""
    job = job_now()
    _end_if_taken_away(job)  # else it would be the other one that goes back to the queue
    is_preempted = job.get("PreemptTime", "None") != "None"
    # What it was warned of has come; or Slurm does not answer.
    is_cut_off = ending.is_warned and (not job or is_preempted or job.get("Reason") == "TimeLimit")
    # Somebody has cancelled it, warned or not, or requeued it by hand. One about to be preempted is still RUNNING.
    if job.get("JobState") != "RUNNING" and not is_cut_off:
        return False, STOPPED_EXIT
    run, limit = readable_record_of(run_dir), settings_of(run_dir).max_requeues
    if num_restarts() >= limit:
        why = f"the job was queued again {num_restarts()} times: slurm.max_requeues is {limit}"
    elif not (has_made_progress(run_dir) or is_preempted or ending.lost or is_missing_step(place)):
        why = "it had to end before its first step, and would again: is slurm.time enough for its start?"
    else:
        print(f"{run_dir.name}: stopped by {ending.why}; Slurm queues it again", flush=True)
        return True, STOPPED_EXIT
    if run is not None:
        run.finish("failed", why)
    print(f"\n{run_dir.name} failed: {why}", flush=True)
    return False, JobFailed.exit_code


def _up(run_dir: Path, tasks: Tasks, ending: Ending) -> int:
    # Late, and here only: the tasks of the other nodes do without these.
    from nodekit.deploy.connect.cluster import SshOptions
    from nodekit.deploy.launch import start, watch
    from nodekit.deploy.launch.options import Options

    job = what_to_run(run_dir)
    inventory = restore(job["inventory"])
    assert inventory.slurm is not None
    if num_restarts() > (limit := inventory.slurm.max_requeues):
        raise KitError(f"the job was queued again {num_restarts()} times: slurm.max_requeues is {limit}")
    if (file := secrets_file(run_dir, RANKS)) is not None:
        try:
            os.environ.update(json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise KitError(
                f"the job's secrets ({file}) were removed when it had ended", cure="kit up brings them again"
            ) from None
    if inventory.snapshots.shared is None:  # else it is the user's, and may be a mount point
        snapshots_of(job).mkdir(mode=0o700, exist_ok=True)
    names = [str(name) for name in NodeSet(os.environ["SLURM_JOB_NODELIST"])]
    least = min(inventory.nodes.min, len(names))
    here = tasks.wait(names, least=least, say=lambda text: print(text, flush=True))
    inventory = _with_hosts(inventory, job, run_dir, {name: tasks.address[name] for name in here}, least)
    options = Options(
        inventory=inventory.path,
        command=tuple(job["command"]) if job["command"] else None,
        skip_check=job.get("skip_check", False),
        ssh=SshOptions(open=tasks.open),
    )
    shown = _logs_of(run_dir, here)
    with contextlib.ExitStack() as stack:
        client = start.start(stack, inventory, record_of(run_dir), options, placed=run_dir.name)
        with client.run.changing():
            client.run.left_out = job.get("left_out", {})
        args = (run_dir, tasks, here, inventory.nodes.min, ending)
        threading.Thread(target=_look_for_nodes, args=args, daemon=True).start()
        # The verdict is as wide as the terminal that the job was submitted from.
        os.environ["COLUMNS"] = str(job.get("columns", 100))
        return watch.watch(client, options, shown=shown, is_asked=False)


def _with_hosts(
    inventory: Inventory, job: dict[str, Any], run_dir: Path, addresses: Mapping[str, str], least: int
) -> Inventory:
    """The inventory as it would be of the nodes that are here, by their addresses, with the run's folders."""
    assert inventory.slurm is not None
    given = inventory.defaults.model_dump(exclude_none=True)
    given |= {"connection": "ssh", "python": sys.executable, "workdir": job["shared_dir"]}
    given |= {"gpus": planned_gpus(inventory.slurm)}
    hosts = tuple(
        Host.model_validate({**given, "name": name, "address": address})
        for name, address in addresses.items()
    )
    return inventory.model_copy(
        update={
            "hosts": hosts,
            "nodes": Nodes(min(least, len(hosts)), len(hosts)),
            "job": inventory.job.model_copy(update={"code": f"{run_dir}/code"}),
            "snapshots": inventory.snapshots.model_copy(update={"shared": str(snapshots_of(job))}),
            # They are in the shared folder: who has submitted the job fetches them from there.
            "logs": inventory.logs.model_copy(update={"fetch": False}),
        }
    )


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
            told = {"job": own_job_id(os.environ), "nodes": absent}
            with contextlib.suppress(OSError):  # a full disk: it is told when there is room again
                write_private(str(file), json.dumps(told).encode())
                before = absent
        if len(names) - len(absent) >= least:
            few_since = None
            continue
        few_since = few_since or time.monotonic()
        given = NodeSet(listed) if (listed := job_now().get("NodeList", "")) else NodeSet(",".join(names))
        if len(given & NodeSet(",".join(names))) < least or time.monotonic() - few_since > LOST_S:
            here = len(names) - len(absent)
            cure = f" (nodes: {here}:{len(names)} would go on without)" if here else ""
            ending.lacks_nodes(absent, f", and {least} nodes are needed{cure}")
