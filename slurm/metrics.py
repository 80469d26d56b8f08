"""`kit up --metrics-port` for a Slurm job: serve to Prometheus what the job writes in the shared folder."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence

from nodekit.deploy.connect.channel import HostChannel
from nodekit.deploy.metrics import metrics_port
from nodekit.deploy.metrics.metrics_port import Place
from nodekit.deploy.records.runs import Run
from nodekit.deploy.supervise.observer import Observer
from nodekit.inventory.errors import KitError
from nodekit.slurm.cluster.jobs import Watched, slurm_of
from nodekit.slurm.cluster.shared_folder import LOST, SharedFolder, record_of

LOOK_S = 5.0  # between reads; Prometheus asks every 15 s, or less often
LOOK_AT_JOB_S = 15.0  # between two questions to Slurm


@contextlib.contextmanager
def served(run: Run, channel: HostChannel, place: Place | None) -> Iterator[None]:
    """Serve a job's metrics at `place` within the context; do nothing if `place` is None."""
    own = dataclasses.replace(run)  # a copy, since `_feed` sets generation and nodes from the leader's record
    observers = metrics_port.serve(own, place, lambda text: print(text, flush=True)) if place else []
    if not observers:
        yield
        return
    closing = threading.Event()
    thread = threading.Thread(
        target=_feed, args=(own, channel, observers, closing), name="metrics", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join(1.0)  # a login node that does not answer must not delay the exit
        for each in observers:
            each.close()


def _feed(run: Run, channel: HostChannel, observers: Sequence[Observer], closing: threading.Event) -> None:
    source = SharedFolder(run, channel)
    job, asked_at = Watched(slurm_of(run, channel), run.slurm["job_id"]), -LOOK_AT_JOB_S
    while True:
        # The login node may be unreachable for a while.
        with contextlib.suppress(KitError, OSError, ValueError):
            if (record := record_of(run, channel)) is not None:
                run.generation, run.nodes, run.clock_offsets = (
                    record.generation,
                    record.nodes,
                    record.clock_offsets,
                )
            if (now := time.monotonic()) - asked_at >= LOOK_AT_JOB_S:
                asked_at = now
                job.look()
            events = source.events()
            statuses, lines = source.statuses(job.job)
            for each in observers:
                for event in events:
                    each.event(event)
                each.see({name: status for name, status in statuses.items() if lines.get(name) != LOST})
        if closing.wait(LOOK_S):
            return
