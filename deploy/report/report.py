"""`kit report`: writes a report of a run as one HTML page to keep, send and print."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.deploy.output import whole_file
from nodekit.inventory.errors import HostError, KitError

if TYPE_CHECKING:  # `kit --help` needs none of these
    from nodekit.deploy.connect.cluster import SshOptions
    from nodekit.deploy.output.redact import Redactor
    from nodekit.deploy.records.events import Event
    from nodekit.deploy.records.runs import Run
    from nodekit.deploy.story.history import History, Point
    from nodekit.inventory.schema import Host

ASK_TIMEOUT_S = 8.0
"""Seconds for all requests to hosts together: a report does not wait for hosts that are down."""
LOSS_POINTS = 600
END_MARGIN_S = 0.5
"""Seconds; the last step's line may be slightly later than the end of its attempt, by another node's clock."""


def write(path: Path, text: str) -> None:
    """Write a file atomically, readable only by its owner.

    Raises:
        KitError: the file cannot be written.
    """
    try:
        whole_file.write(path, text)
    except OSError as error:
        raise KitError(
            f"{path}: cannot be written: {error.strerror}", cure="kit report -o FILE writes it elsewhere"
        ) from error


def _story(run: Run, options: SshOptions) -> tuple[Run, list[Event], Redactor, History]:
    """Return the record, the events without secrets, the redactor and the history."""
    from nodekit.deploy.backend import backend_of
    from nodekit.deploy.output.redact import Redactor
    from nodekit.deploy.records import runs
    from nodekit.deploy.story.history import History

    run, events = backend_of(run).history(run, options)
    redactor = Redactor(run.inventory, known=[run.token] if run.token else [])
    if redactor.warning:
        options.notice(f"warning: {redactor.warning}")
    # Before texts are shortened: a part of a secret would not be recognized.
    events = redactor.tree(events)
    least = min((int(node["min_nodes"]) for node in run.nodes.values()), default=None)
    history = History.of(events, now=run.end_or_now(), min_nodes=least)
    if history.ended is None and run.state in runs.ENDED:
        history = dataclasses.replace(
            history, ended=run.ended, state=run.state, verdict=redactor.text(run.verdict)
        )
    return run, events, redactor, history


def to_json(run: Run, options: SshOptions) -> str:
    """Return the data of the page as JSON, without single events and without secrets."""
    run, _, redactor, history = _story(run, options)
    values = dataclasses.asdict(dataclasses.replace(history, samples={}))
    del values["samples"]
    for attempt, found in zip(values["attempts"], history.attempts, strict=True):
        del attempt["steps"]  # derived from the samples
        attempt.update(trained_s=found.trained_s, steps_per_s=found.steps_per_s)
    values["goodput"]["share"] = history.goodput.share
    values["curves"] = {
        "loss": [dataclasses.asdict(point) for point in history.losses()],
        "steps_per_s": [dataclasses.asdict(point) for point in history.speeds()],
    }
    unknown = {"secrets_not_looked_for": redactor.unknown} if redactor.unknown else {}
    shown = redactor.tree({"run_id": run.run_id, **values, "inventory": run.inventory})
    return json.dumps({**shown, **unknown}, indent=2, ensure_ascii=False, default=str)


def build(run: Run, options: SshOptions, *, offline: bool = False) -> str:
    """Return a run's report as an HTML page."""
    from nodekit.deploy.backend import backend_of
    from nodekit.deploy.report import report_page
    from nodekit.deploy.story.summary import guess_now

    hosts: Mapping[str, Host] = {}
    with contextlib.suppress(KitError):  # the inventory may be of an older version, and no longer valid
        hosts = hosts if offline else backend_of(run).hosts(run)
    run, events, redactor, history = _story(run, options)
    own = {name: host for name, host in hosts.items() if name in run.nodes}
    losses, versions, asked = (
        _ask(run, own, options, history) if own else ([], {}, "No host was asked for this page.")
    )
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime())
    return report_page.page(
        report_page.Source(
            run=run,
            history=history,
            events=events,
            redactor=redactor,
            written=f"kit {metadata.version('nodekit')} on {made}: kit report {shlex.quote(run.run_id)}",
            losses=losses,
            guess=guess_now(run) if history.step is None else None,
            versions=versions,
            asked=asked,
        )
    )


def _ask(
    run: Run, hosts: Mapping[str, Host], options: SshOptions, history: History
) -> tuple[list[Point], dict[str, dict[str, Any]], str]:
    """Ask the hosts for a finer loss curve and versions; return these, and a note on which hosts answered."""
    found: dict[str, dict[str, Any]] = {}
    curves: dict[str, list[list[float]]] = {}
    asking = threading.Thread(target=_ask_hosts, args=(run, hosts, options, found, curves), daemon=True)
    asking.start()
    asking.join(ASK_TIMEOUT_S)
    versions, known = dict(found), dict(curves)
    unheard = len(run.nodes) - len(versions)
    asked = f"{len(versions)} of {len(run.nodes)} hosts answered when this was written"
    if unheard:
        asked += "; what the others would have said is as it was recorded"
    losses = finer(history, known, run.clock_offsets) if known else []
    if losses:
        asked += f"; the loss curve is from metrics.jsonl of {', '.join(sorted(known))}"
    return losses, versions, f"{asked}."


def finer(
    history: History, curves: Mapping[str, Sequence[Sequence[float]]], offsets: Mapping[str, float]
) -> list[Point]:
    """Return the loss curve from nodes' ``metrics.jsonl``; attempts without any keep their samples; pure.

    Args:
        history: of the run.
        curves: node → ``[step, time by the node's clock, loss]``.
        offsets: node → its clock minus this machine's.
    """
    from nodekit.deploy.story.history import Point, standing

    sampled = history.losses()
    parts = []
    for attempt in history.attempts:
        end = math.inf if attempt.ended is None else attempt.ended + END_MARGIN_S
        found: list[Point] = []
        for name in attempt.members:
            own = [
                (int(step), time - offsets.get(name, 0.0), value)
                for step, time, value in curves.get(name, ())
            ]
            inside = [each for each in own if attempt.started <= each[1] <= end]
            found = found or [Point(step, value, time, attempt.attempt) for step, time, value in inside]
        parts.append(found or [point for point in sampled if point.attempt == attempt.attempt])
    return standing(parts)


def _ask_hosts(
    run: Run,
    hosts: Mapping[str, Host],
    options: SshOptions,
    found: dict[str, dict[str, Any]],
    curves: dict[str, list[list[float]]],
) -> None:
    """Ask all hosts in parallel; fill `found` and `curves` as answers arrive."""
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.connect.channel import on_all

    # Never prompt: waiting for the user could exceed the time limit.
    quiet = dataclasses.replace(options, notice=lambda _: None, may_ask=False)
    until = time.monotonic() + ASK_TIMEOUT_S

    def ask(host: Host) -> None:
        def call(op: str, **args: Any) -> Any:
            return channel.call(op, timeout_s=max(0.5, until - time.monotonic()), **args)

        with contextlib.suppress(KitError, HostError):
            channel = cluster.open_channel(host, quiet, timeout_s=ASK_TIMEOUT_S / 2)
            try:
                path = f"{run.nodes[host.name]['node_dir']}/output/metrics.jsonl"
                if points := call("points.losses", path=path, most=LOSS_POINTS):
                    curves[host.name] = points
                facts = call("hostfacts.facts", workdir="~")
                own = {name: facts[name] for name in ("hostname", "python", "torch", "cpus")}
                gpus = facts["gpus"]
                names = [each["name"] for each in gpus["usable"]]
                found[host.name] = {**own, "driver": gpus["driver"], "gpus": names}
            finally:
                channel.close()

    on_all(hosts, ask)
