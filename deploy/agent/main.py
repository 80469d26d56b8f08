"""The agent's process: import torch, wait for ``go`` on stdin, and run the spec to its end.

``python -m nodekit.deploy.agent NODE_DIR``: the imports, the slowest part of a start, overlap with checks and sync.
If stdin closes without ``go``, the process exits, so that an abandoned start leaves nothing behind.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException

from nodekit.deploy.agent import name_lookups
from nodekit.deploy.agent.agent import Agent
from nodekit.deploy.agent.orders import Disowned
from nodekit.deploy.agent.ranks.forkserver import ForkServer
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.agent.telemetry.event_log import EventLog
from nodekit.deploy.agent.unfit import Unfit
from nodekit.deploy.host.errors import cure_of

PRELOAD = (
    "torch._dynamo",
    "torch.optim",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "numpy",
    "nodekit.training.options.arguments",
    "nodekit.training.rank",
    "nodekit.training.attempts.reform",
    "nodekit.training.attempts.standby",
    "nodekit.training.process.gpus",
    "nodekit.training.loop",
    "nodekit.training.engines.ddp",
    "nodekit.training.tasks.digits",
    "nodekit.training.reporting.node_lines",
)
EXIT_UNFIT, EXIT_STOPPED = 4, 143


class Stop:
    """Turns SIGTERM and SIGINT into an exception in the main thread, and a flag: torch swallows some exceptions."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, *_: object) -> None:
        if not self.requested:
            self.requested = True
            self.check()

    def check(self) -> None:
        """Raise SignalException if a stop was requested."""
        if self.requested:
            raise SignalException("asked to stop", signal.SIGTERM)


def main() -> int:
    """Start the fork server, wait for "go" on stdin, then run the agent; return its exit status."""
    node_dir = Path(sys.argv[1])
    forked = os.environ.pop("NODEKIT_START", "forkserver") == "forkserver"
    server = ForkServer.start(PRELOAD) if forked else None  # before there is any thread
    _format_plainly()
    try:
        return run(node_dir, server) if sys.stdin.readline() == "go\n" else 0
    finally:
        if server is not None:
            server.close()


def run(node_dir: Path, server: ForkServer | None) -> int:
    """Run the spec in `node_dir` to its end; return 0 for success, 3 for failure, 4 if unfit, 143 if stopped."""
    spec = AgentSpec.load(node_dir)
    # Except PYTHONPATH, which the start has composed: kit's own folder, then the job's.
    os.environ.update({name: value for name, value in spec.env.items() if name != "PYTHONPATH"})
    name_lookups.forbid()
    record = EventLog(spec)
    try:
        agent = Agent(spec, record, Stop().check, server)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return _end_unfit(record, spec, Unfit(str(error), cure=cure_of(error)))
    try:
        return agent.run()
    except SignalException:
        agent.shut_down()
        # kit leaves a `stop` file; without one, the signal is a loss to recover from, and the node may start again.
        record.end("stopped" if (node_dir / "stop").exists() else "ended")
        return EXIT_STOPPED
    except Disowned as error:
        agent.abandon()
        print(error, file=sys.stderr)  # not to a file of the folder, which may be another agent's
        return EXIT_STOPPED
    except Unfit as error:
        agent.shut_down()
        return _end_unfit(record, spec, error)
    except Exception as error:
        agent.shut_down()
        record.end("failed", message=f"the agent failed: {type(error).__name__}: {error}")
        raise  # its traceback belongs in agent.log


def _end_unfit(record: EventLog, spec: AgentSpec, error: Unfit) -> int:
    record.update(notice=f"{spec.name}: {error}")
    print(error, file=sys.stderr)
    record.end("ended", message=error.problem.found, cause=error.cause, cure=error.problem.cure)
    return EXIT_UNFIT


def _format_plainly() -> None:
    """Replace torch's log formatter, which imports torch._dynamo (1.6 s) to format the first traceback."""
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            for handler in logger.handlers:
                handler.setFormatter(plain)
