"""The agent of one node: runs the command under torch's elastic agent and keeps the record of how it goes.

``python -m nodekit.deploy.agent NODE_DIR`` imports torch, waits on stdin for ``go`` and then reads its spec, so
that the slowest part of a start overlaps with checks and sync; when stdin ends without ``go`` it ends too, so a
start that was given up leaves nothing behind. Torch and the standard library only.

In NODE_DIR it writes ``status.json`` (the present, replaced in one step) and ``events.jsonl`` (the past).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

from nodekit.deploy import remote, rendezvous
from nodekit.deploy.failures import last_traceback
from nodekit.deploy.spec import AgentSpec

STATUS_INTERVAL_S = 0.5
LOG_TAIL_BYTES = 64 * 1024
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1


class Record:
    """The node's status and events on disk."""

    def __init__(self, spec: AgentSpec) -> None:
        self._folder = Path(spec.node_dir)
        self._progress = self._folder / "progress"
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._spec = spec
        self._status: dict[str, Any] = {
            "state": "starting",
            "generation": spec.generation,
            "attempt": None,
            "rank": None,
            "world_size": None,
            "workers": [],
            "failures": [],
            "progress": None,
            "progress_time": None,
        }
        for name in ("logs", "progress", "snapshots", "output"):
            (self._folder / name).mkdir(mode=0o700, exist_ok=True)
        for stale in self._progress.iterdir():
            stale.unlink()
        self.event("agent-started", pid=os.getpid())
        threading.Thread(target=self._watch_progress, daemon=True).start()

    def update(self, **changes: Any) -> None:
        """Change the status; what did not change is not written."""
        with self._lock:
            new = {**self._status, **changes}
            if new != self._status or "state" in changes:
                self._status = new
                remote.write_private(
                    str(self._folder / "status.json"), json.dumps({**new, "time": time.time()}).encode()
                )

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        line = {
            "run": self._spec.run_id,
            "time": time.time(),
            "node": self._spec.name,
            "kind": kind,
            **fields,
        }
        remote.append_private(str(self._folder / "events.jsonl"), json.dumps(line).encode() + b"\n")

    def failed(self, failures: list[dict[str, Any]]) -> None:
        """Record failures of workers, and the end of the attempt."""
        for failure in failures:
            self.event("worker-failed", **failure)
        self.update(failures=[*self._status["failures"], *failures])

    def end(self, state: str, **changes: Any) -> None:
        """The last status."""
        self._ended.set()
        self.read_progress()
        self.event("agent-ended", state=state)
        self.update(state=state, **changes)

    def read_progress(self) -> None:
        """Take over what the ranks say of their progress: the least advanced one speaks for the node."""
        said = []
        for path in self._progress.iterdir():
            with contextlib.suppress(OSError, ValueError):
                text = path.read_text(encoding="utf-8", errors="replace").strip()
                said.append((path.stat().st_mtime, text[:200]))
        if said:
            changed, text = min(said)
            self.update(progress=text, progress_time=changed)

    def _watch_progress(self) -> None:
        while not self._ended.wait(STATUS_INTERVAL_S):
            self.read_progress()


class Stop:
    """SIGTERM and SIGINT: an exception in the main thread, and a flag, for upstream swallows the exception in places.

    (`TailLog.stop` logs any exception and goes on, for one; the job would train on as if nothing had been said.)
    """

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        # torch would put a handler of its own in our place whenever it starts workers.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"

    def _handle(self, *_: object) -> None:
        if not self.requested:
            self.requested = True
            self.check()

    def check(self) -> None:
        """Raise if a stop was asked for."""
        if self.requested:
            raise SignalException("asked to stop", signal.SIGTERM)


class Agent(LocalElasticAgent):
    """torch's elastic agent, which also says what it does."""

    def __init__(self, spec: AgentSpec, handler: rendezvous.Rendezvous, record: Record, stop: Stop) -> None:
        self._record_file = record
        self._stop = stop
        self._node = spec
        self._handler = handler
        super().__init__(
            WorkerSpec(
                role="worker",
                local_world_size=spec.nproc_per_node,
                entrypoint=sys.executable,
                args=("-I", "-S", str(Path(__file__).with_name("worker.py")), spec.node_dir),
                rdzv_handler=handler,
                max_restarts=spec.max_restarts,
                monitor_interval=_POLL_S,
                local_addr=spec.local_addr,
            ),
            DefaultLogsSpecs(log_dir=os.devnull),  # the worker opens its own log
            shutdown_timeout=int(spec.grace_s),
        )

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._record_file.update(state="rendezvous", workers=[])
        super()._rendezvous(worker_group)
        self._stop.check()
        attempt = f"{self._node.generation}.{self._handler.round}"
        os.environ["NODEKIT_ATTEMPT"] = attempt
        self._record_file.update(
            attempt=attempt,
            rank=worker_group.workers[0].global_rank,
            world_size=worker_group.workers[0].world_size,
        )
        self._record_file.event(
            "rendezvous",
            attempt=attempt,
            group_rank=worker_group.group_rank,
            num_nodes=worker_group.group_world_size,
            master=f"{worker_group.master_addr}:{worker_group.master_port}",
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        workers = [
            {
                "local_rank": local_rank,
                "rank": worker_group.workers[local_rank].global_rank,
                "pid": pid,
                "start_time": remote.start_time(pid),
            }
            for local_rank, pid in pids.items()
        ]
        self._record_file.update(state="running", workers=workers)
        self._record_file.event("workers-started", attempt=os.environ["NODEKIT_ATTEMPT"], workers=workers)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self._stop.check()
        if result.state == WorkerState.FAILED:
            self._record_file.failed(
                [
                    self._failure(rank, failure.local_rank, failure.exitcode)
                    for rank, failure in result.failures.items()
                ]
            )
        return result

    def _failure(self, rank: int, local_rank: int, exitcode: int) -> dict[str, Any]:
        attempt = os.environ["NODEKIT_ATTEMPT"]
        log = Path(self._node.node_dir, "logs", f"rank{rank}-attempt{attempt}.log")
        text, when = "", time.time()
        with contextlib.suppress(OSError), log.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size:
                # The last words come before the sockets close, so their order is that of cause and effect.
                when = stat.st_mtime
                file.seek(max(0, stat.st_size - LOG_TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        return {
            "attempt": attempt,
            "rank": rank,
            "local_rank": local_rank,
            "exitcode": exitcode,
            "when": when,
            "log": str(log),
            "error": last_traceback(text),
        }

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._stop_workers(worker_group)
        reap_strays()

    def _exit_barrier(self) -> None:
        """Wait for the other nodes, however long they need; upstream gives up after 300 s, in one deaf call."""
        self._record_file.update(state="waiting")
        nodes, store = self._worker_group.group_world_size, self._worker_group.store
        assert store is not None
        with contextlib.suppress(RuntimeError):  # the store's host has left: it left when all were done
            for step in ("nodekit/done", "nodekit/left"):
                store.add(step, 1)
                while store.add(step, 0) < nodes and self._handler.num_nodes_waiting() == 0:
                    self._stop.check()
                    time.sleep(_POLL_S)


def reap_strays() -> None:
    """SIGKILL to what workers left behind: as their subreaper we are the parent of all of it."""
    for number in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(int(number), os.WNOHANG)[0] == 0:
                os.kill(int(number), signal.SIGKILL)
                os.waitpid(int(number), 0)


def run(node_dir: Path) -> int:
    """Run the spec in `node_dir` to its end; the exit status is 0 trained, 3 failed, 143 stopped."""
    spec = AgentSpec.load(node_dir)
    record = Record(spec)
    os.environ.update(spec.env)
    os.environ.update(
        NODEKIT_AGENT_PID=str(os.getpid()),
        NODEKIT_PYTHON=sys.executable,
        NODEKIT_GENERATION=str(spec.generation),
    )
    if spec.nproc_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    stop = Stop()
    try:
        record.update(state="rendezvous")
        handler = rendezvous.connect(
            run_id=f"{spec.run_id}.{spec.generation}",
            node_rank=spec.node_rank,
            local_addr=spec.local_addr,
            min_nodes=spec.min_nodes,
            max_nodes=spec.max_nodes,
            master_addr=spec.master_addr,
            master_port=spec.master_port,
            listen_fd=spec.listen_fd,
        )
        result: RunResult | None = Agent(spec, handler, record, stop).run()
    except SignalException:
        reap_strays()
        record.end("stopped", workers=[])
        return 143
    except RendezvousClosedError:
        result = None
    except Exception as error:
        reap_strays()
        record.end("failed", workers=[], message=f"the agent failed: {type(error).__name__}: {error}")
        if not isinstance(error, RendezvousError):
            raise  # its traceback belongs in agent.log
        return 3
    reap_strays()
    if result is None:  # upstream's way to say that others ended the job
        record.end("failed", workers=[], message="another node ended the job")
        return 3
    if result.is_failed():
        record.end("failed", workers=[])
        return 3
    record.end("succeeded", workers=[])
    return 0


def _format_plainly() -> None:
    """Take torch's log formatter away: it imports torch._dynamo, 1.6 s, to format the first traceback."""
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            for handler in logger.handlers:
                handler.setFormatter(plain)


def main() -> int:
    """Wait for the go, then run."""
    _format_plainly()
    node_dir = Path(sys.argv[1])
    if sys.stdin.readline() != "go\n":
        return 0
    return run(node_dir)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # torch takes most of a second to tear itself down, and everything is on disk
