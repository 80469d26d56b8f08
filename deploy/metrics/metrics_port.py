"""`kit up --metrics-port`: serves a run's state as `nodekit_*` metrics, for Prometheus to scrape."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from nodekit.deploy.agent.telemetry.notes import parse_progress
from nodekit.deploy.host.accept import Acceptor
from nodekit.deploy.host.schema import EventKind, NodeStatus
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import Run
from nodekit.deploy.story.history import History
from nodekit.deploy.supervise.observer import Observer
from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LOOPBACK = "127.0.0.1"
_HISTORY_SHARE = 0.02
"""Share of a core that recomputing the history from all events may take at most."""


@dataclass(frozen=True)
class Place:
    """The address and port that metrics are served at."""

    port: int
    address: str = LOOPBACK

    @property
    def url(self) -> str:
        """The URL for people and Prometheus."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"


def check(place: Place) -> None:
    """Check, before anything is started, that metrics can be served there.

    Raises:
        KitError: the port is taken, or the address is not this machine's.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(place.address).version == 6 else socket.AF_INET
    except ValueError:
        raise KitError(
            f"--metrics-address {place.address} is no address",
            cure=f"give an address of this machine, as {LOOPBACK} or 0.0.0.0",
        ) from None
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((place.address, place.port))
        except OSError as error:
            raise KitError(
                f"--metrics-port {place.port}: cannot serve at {place.address} ({error.strerror})",
                cure="is another run's there? Give each run a port of its own",
            ) from error


class _Server(WSGIServer):
    request_queue_size = 128


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Question(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print nothing: the terminal belongs to the run's view."""


class MetricsPort(Observer):
    """Serves the metrics of one run until it is over."""

    def __init__(self, run: Run, place: Place) -> None:
        """Start serving.

        Raises:
            OSError: the address and port cannot be used.
        """
        from prometheus_client import CollectorRegistry, make_wsgi_app  # 0.1 s, only if wanted

        self._run = run
        self._lock = threading.Lock()
        self._statuses: Mapping[str, NodeStatus] = {}
        self._events: list[Event] = []
        self._history = _Sparing(lambda: History.of(self._taken(), now=time.time()))
        registry = CollectorRegistry()
        registry.register(self)
        server = _Server6 if ":" in place.address else _Server
        self._server = make_server(place.address, place.port, make_wsgi_app(registry), server, _Question)
        # The server loop of prometheus_client would wait forever for the request of a client that only connects.
        self._acceptor = Acceptor(self._server.socket, self._answer, name="metrics")

    def _answer(self, connection: socket.socket, address: str, proven: Callable[[], None]) -> None:  # noqa: ARG002
        self._server.finish_request(connection, (address, 0))

    def see(self, statuses: Mapping[str, NodeStatus]) -> None:
        """Take each reachable node's status."""
        with self._lock:
            self._statuses = dict(statuses)

    def event(self, event: Event) -> None:
        """Take an event, for the counters and the goodput."""
        with self._lock:
            self._events.append(event)

    def close(self) -> None:
        """Stop serving, and free the port."""
        self._acceptor.close()

    def collect(self) -> Iterator[Metric]:
        """Return all metrics; called at each scrape."""
        with self._lock:
            statuses, events = dict(self._statuses), Counter(event.kind for event in self._events)
        return metrics(self._run, statuses, events, self._history.get() if events else None, now=time.time())

    def describe(self) -> Sequence[Metric]:
        """Return no descriptions: the metrics are known only when they are collected."""
        return ()

    def _taken(self) -> list[Event]:
        with self._lock:
            return list(self._events)


class _Sparing:
    """Caches a value, and recomputes it only if the time that takes is a small share of the time since."""

    def __init__(self, compute: Callable[[], History]) -> None:
        self._compute = compute
        self._lock = threading.Lock()
        self._value: History | None = None
        self._next = 0.0

    def get(self) -> History | None:
        """Return the value, which may be some time old."""
        with self._lock:
            if (start := time.monotonic()) >= self._next:
                self._value = self._compute()
                self._next = start + (time.monotonic() - start) / _HISTORY_SHARE
            return self._value


def metrics(
    run: Run,
    statuses: Mapping[str, NodeStatus],
    events: Mapping[EventKind, int],
    history: History | None,
    *,
    now: float,
) -> Iterator[Metric]:
    """Return all metrics of a run; pure.

    Args:
        run: its record.
        statuses: of the reachable nodes.
        events: kind → number of events.
        history: computed from the events; None if there are none.
        now: seconds since 1970.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def gauge(name: str, text: str, *labels: str) -> Any:
        return GaugeMetricFamily(f"nodekit_{name}", text, labels=["run", *labels])

    def counter(name: str, text: str, *labels: str) -> Any:
        return CounterMetricFamily(f"nodekit_{name}", text, labels=["run", *labels])

    def of_run(family: Any, value: float | None) -> Any:
        if value is not None:
            family.add_metric([run.run_id], value)
        return family

    for name, text, value in _of_progress(statuses):
        yield of_run(gauge(name, text), value)
    yield of_run(gauge("generation", "How often the run was given a new rendezvous host."), run.generation)
    yield from _of_nodes(run, statuses, gauge, now)
    counted = counter("events", "Events of the run, as in its events.jsonl.", "kind")
    for kind, count in sorted(events.items()):
        counted.add_metric([run.run_id, kind], count)
    yield counted
    if history is None:
        return
    yield of_run(counter("restarts", "Meetings of the nodes after the first."), history.restarts)
    yield of_run(
        gauge(
            "goodput_ratio",
            "Share of the run's time that trained steps which count; none before a step is told.",
        ),
        history.goodput.share,
    )
    lost = gauge("lost_seconds", "Seconds of the run's time that trained nothing which counts.", "cause")
    for cause, seconds in history.goodput.lost.items():
        lost.add_metric([run.run_id, cause], seconds)
    yield lost
    evaluated = gauge("evaluation", "What the newest evaluation gave.", "metric")
    for metric in history.metrics:
        evaluated.add_metric([run.run_id, metric], history.metric(metric)[-1].value)
    yield evaluated


def _of_progress(statuses: Mapping[str, NodeStatus]) -> Iterator[tuple[str, str, float | None]]:
    """Return (name, help text, value) of the metrics of progress, from the nodes' statuses."""
    told = [status for status in statuses.values() if status.get("alive")]
    said = [parse_progress(str(status.get("progress") or "")) for status in told]
    steps = [each["step"] for each in said if each["step"] is not None]
    totals = [each["total_steps"] for each in said if each["total_steps"] is not None]
    losses = [(each["step"] or 0, each["loss"]) for each in said if each["loss"] is not None]
    held = [status["snapshot"] for status in statuses.values() if status.get("snapshot")]
    committed = max((tuple(each) for each in held if each[0] >= 0), default=None)
    yield "step", "The newest step that a node has told of.", max(steps, default=None)
    yield "target_step", "The step at which the run is trained to its end.", max(totals, default=None)
    loss = max(losses, key=lambda each: each[0])[1] if losses else None
    yield "loss", "The loss that was told with the newest step.", loss
    yield "snapshot_step", "The step of the newest committed snapshot.", committed[1] if committed else None


def _of_nodes(
    run: Run, statuses: Mapping[str, NodeStatus], gauge: Callable[..., Any], now: float
) -> Iterator[Metric]:
    up = gauge("node_up", "1: the node's agent runs and can be reached.", "node")
    state = gauge("node_state", "1: the node is in this state.", "node", "state")
    since = gauge("node_seconds_since_progress", "Seconds since a rank of the node told of a step.", "node")
    usage = {
        "cpu": gauge("node_cpu_ratio", "Share of all cores that is busy, 0 to 1.", "node"),
        "memory": gauge("node_memory_bytes", "Memory in use.", "node"),
        "memory_total": gauge("node_memory_size_bytes", "Memory there is.", "node"),
    }
    network = {
        "received": gauge(
            "node_network_receive_bytes_per_second", "On the training interface.", "node", "interface"
        ),
        "sent": gauge(
            "node_network_transmit_bytes_per_second", "On the training interface.", "node", "interface"
        ),
    }
    gpus = {
        "use": gauge(
            "gpu_utilization_ratio", "Share of the time that the GPU computed, 0 to 1.", "node", "gpu"
        ),
        "memory": gauge("gpu_memory_bytes", "The GPU's memory in use.", "node", "gpu"),
        "memory_total": gauge("gpu_memory_size_bytes", "The GPU's memory there is.", "node", "gpu"),
        "temperature": gauge("gpu_temperature_celsius", "The GPU's temperature.", "node", "gpu"),
        "clock": gauge("gpu_clock_megahertz", "The clock of the GPU's multiprocessors.", "node", "gpu"),
        "power": gauge("gpu_power_watts", "What the GPU takes.", "node", "gpu"),
        "uncorrectable": gauge(
            "gpu_ecc_uncorrectable", "ECC errors that could not be corrected.", "node", "gpu"
        ),
    }
    slowed = gauge("gpu_slowed", "1: the GPU's clock is low, for this reason.", "node", "gpu", "reason")
    for name in dict.fromkeys([*run.nodes, *statuses]):
        status = statuses.get(name, {})
        labels = [run.run_id, name]
        up.add_metric(labels, float(bool(status.get("alive"))))
        state.add_metric([*labels, str(status.get("state") or "unknown")], 1.0)
        if not status.get("alive"):
            continue  # its other values are out of date
        if (told := status.get("progress_time")) is not None:
            since.add_metric(labels, max(0.0, now + run.clock_offsets.get(name, 0.0) - told))
        sample = status.get("usage") or {}
        for families, more, found in (
            (usage, [], sample),
            (network, [str(sample.get("interface"))], sample),
            *((gpus, [str(each.get("index"))], each) for each in sample.get("gpus") or ()),
        ):
            for key, family in families.items():
                if (value := found.get(key)) is not None:
                    family.add_metric([*labels, *more], value)
        for each in sample.get("gpus") or ():
            for reason in each.get("slow") or ():
                slowed.add_metric([*labels, str(each.get("index")), reason], 1.0)
    yield from (up, state, since, *usage.values(), *network.values(), *gpus.values(), slowed)


def serve(run: Run, place: Place, say: Callable[[str], None]) -> list[Observer]:
    """Return the observer that serves a run's metrics; none, and say so, if the port cannot be used any more."""
    try:
        observer = MetricsPort(run, place)
    except OSError as error:
        say(f"no metrics at {place.url}: {error.strerror}")
        return []
    say(f"metrics for Prometheus at {place.url}")
    return [observer]
