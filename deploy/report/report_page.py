"""A run's report as one HTML page (report.html) that needs nothing but itself; pure.

Nothing in it can become markup: Jinja2 escapes all that it is given, the charts are built by markupsafe, and the page's
policy lets no script run but the page's own, known by its hash, and no request leave it.
"""

from __future__ import annotations

import base64
import bisect
import hashlib
import shlex
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from nodekit.deploy.agent.ranks.failures import Failure, first_cause, how_it_ended, is_bystander
from nodekit.deploy.output.redact import LEFT_OUT, Redactor
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import Run
from nodekit.deploy.report import charts
from nodekit.deploy.report.charts import Chart, Clock, Mark, Series
from nodekit.deploy.story.causes import recognise
from nodekit.deploy.story.history import Attempt, History, Point
from nodekit.deploy.story.narrate import Narrator, count, duration, metric, names
from nodekit.deploy.story.verdict import failure_of

MOST_EVENTS = 2000
MOST_STORY = 60
MOST_SNAPSHOTS = 20
MOST_FAILURES = 40
MOST_LINES = 5
"""Of more nodes than this not each has a line in a chart."""
PARTS = (
    ("summary", "Summary"),
    ("timeline", "Nodes and generations"),
    ("curves", "Curves"),
    ("goodput", "Goodput"),
    ("snapshots", "Snapshots"),
    ("usage", "Network, GPUs and CPUs"),
    ("environment", "Environment"),
    ("failures", "Failures"),
    ("inventory", "Inventory"),
    ("events", "Events"),
)
CAUSES = {
    "trained": "steps that count",
    "start": "until the first step",
    "restart": "from a loss or failure to the next first step",
    "redone": "steps done again that no snapshot held",
    "snapshots": "training stood still for them",
    "waiting": "too few nodes were there",
    "end": "after the last step: last copies, and the farewell",
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a page is made from."""

    run: Run
    history: History
    events: Sequence[Event]
    redactor: Redactor
    written: str
    """By what, and when."""
    losses: Sequence[Point] = ()
    """A finer loss curve than the samples', where a node could be asked."""
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """node → what it said now of its software; what it said when the run started comes before it."""
    asked: str = ""
    """What the nodes were asked for this page, and what came of it."""


def page(source: Source) -> str:
    """The page."""
    # Here and nowhere else secrets are taken out: all of the page, its charts too, is made from what passes here.
    source = source.redactor.tree(source)
    history, run = source.history, source.run
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    style, script = Markup(_file("report.css")), Markup(_file("report.js"))  # noqa: S704  # kit's own
    view = _View(source)
    return environment.from_string(_file("report.html")).render(
        style=style,
        script=script,
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src {_hash(style)}; script-src {_hash(script)}",
        parts=PARTS,
        run=run,
        history=history,
        written=source.written,
        **view.summary(),
        **view.timeline(),
        **view.curves(),
        **view.goodput(),
        **view.snapshots(),
        **view.usage(),
        **view.environment(),
        **view.failures(),
        **view.inventory(),
        **view.events(),
    )


def _file(name: str) -> str:
    return resources.files("nodekit.deploy.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a content security policy knows an inline script or style by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class _View:
    """The parts of the page, each as what its template asks for."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._run = source.run
        self._history = source.history
        self._clock = Clock(source.history.sessions)

    # --- summary ---

    def summary(self) -> dict[str, Any]:
        history, run = self._history, self._run
        ended = history.ended
        until = f"to {_time(ended)}" if ended else "and goes on"
        verdict = history.verdict or run.verdict
        story = self._story()
        kept = (
            story if len(story) <= MOST_STORY else [*story[: MOST_STORY // 3], *story[-MOST_STORY * 2 // 3 :]]
        )
        return {
            "verdict": verdict.partition("\n")[0],
            "verdict_text": verdict if history.state == "failed" and "\n" in verdict else "",
            "when": f"From {_time(history.started)} {until}; it was up for {duration(history.goodput.total_s)}"
            + (f", in {count(len(history.sessions), 'part')}" if len(history.sessions) > 1 else "")
            + ".",
            "tiles": list(self._tiles()),
            "story": kept,
            "story_left_out": f"{len(story) - len(kept):,} more, in the middle, are left out here."
            if len(kept) < len(story)
            else "",
        }

    def _tiles(self) -> Iterable[tuple[str, str, str]]:
        history = self._history
        step = "–" if history.step is None else f"{history.step:,}"
        yield "Step", step, f"of {history.total_steps:,}" if history.total_steps else ""
        last = history.attempts[-1] if history.attempts else None
        most = max((len(each.members) for each in history.attempts), default=0)
        now = f"{len(last.members)}" if last else "–"
        ranks = f"{count(last.world_size, 'rank')}" if last and last.world_size else ""
        at_most = f", {most} at most" if last and most > len(last.members) else ""
        yield "Nodes", now, ranks + at_most
        yield "Goodput", f"{history.goodput.share:.1%}", "of the time trained steps that count"
        redone = sum(each.redone_steps for each in history.attempts)
        yield (
            "Restarts",
            f"{history.restarts}",
            f"{count(redone, 'step')} done again" if redone else "no step done again",
        )
        for name, (value, at) in list(history.best.items())[:4]:
            yield f"Best {name}", metric(name, value), f"at step {at:,}"
        if not history.best:
            for name, value in list(history.result.items())[:4]:
                if isinstance(value, int | float):
                    yield (
                        name.replace("_", " ").capitalize(),
                        metric(name, value),
                        "as the job said at its end",
                    )
        rate = next((each.steps_per_s for each in reversed(history.attempts) if each.steps_per_s), None)
        if rate:
            yield "Steps/s", f"{rate:.3g}", "in the last attempt"

    def _story(self) -> list[tuple[str, str]]:
        narrator = Narrator()
        told = [(event, text) for event in self._source.events for text in narrator.tell(event)]
        # The evaluations have a curve of their own.
        return [(_time_of_day(event.time), text) for event, text in told if event.kind != "evaluation"]

    # --- timeline ---

    def timeline(self) -> dict[str, Any]:
        history = self._history
        bars, rows = [], []
        now = history.sessions[-1][1]
        for each in history.attempts:
            end = now if each.ended is None else each.ended
            told = f"attempt {each.attempt} with {names(each.members)}, for {duration(end - each.started)}"
            bars.append((each.attempt, each.started, end, told + (f"; {each.why}" if each.why else "")))
            rows.append(self._attempt_row(each))
        spans = {
            name: own for name, own in history.spans.items() if any(span.state != "ended" for span in own)
        }
        trained = {
            name: sum(span.end - span.start for span in own if span.state == "training")
            for name, own in spans.items()
        }
        each_node = ", ".join(f"{name} trained for {duration(seconds)}" for name, seconds in trained.items())
        if len(trained) > MOST_LINES:
            least, most = duration(min(trained.values())), duration(max(trained.values()))
            each_node = (
                f"each of {len(trained)} nodes trained for {least if least == most else f'{least} to {most}'}"
            )
        up = duration(self._clock.total_s)
        generations = len({each.generation for each in history.attempts})
        attempts = count(len(history.attempts), "attempt")
        summary = f"{attempts} in {count(generations, 'generation')}; of {up}, {each_node}."
        where = [
            [
                name,
                _time_of_day(span.start),
                duration(span.end - span.start),
                charts.STATES.get(span.state, span.state),
                span.why,
            ]
            for name, own in spans.items()
            for span in own
            if span.state != "ended"
        ]
        return {
            "has_timeline": bool(spans),
            "states": charts.STATES,
            "timeline": charts.timeline(spans, bars, self._clock, summary=summary),
            "timeline_summary": summary,
            "attempts": rows,
            "spans": where[:400],
        }

    def _attempt_row(self, attempt: Attempt) -> list[str]:
        rate = attempt.steps_per_s
        first = attempt.resumed_at
        why = attempt.why or ("" if attempt.ended else "it is running")
        return [
            attempt.attempt,
            _time_of_day(attempt.started),
            names(attempt.members),
            str(attempt.world_size or "–"),
            "–" if first is None else f"{first:,}",
            "–" if attempt.last_step is None else f"{attempt.last_step:,}",
            duration(attempt.trained_s) if attempt.first_step_time is not None else "–",
            f"{rate:.3g}" if rate else "–",
            f"{attempt.redone_steps:,}",
            "trained to its end" if why == "done" else why,
        ]

    # --- curves ---

    def _restarts(self, *, by_step: bool) -> list[Mark]:
        marks = []
        for each in self._history.attempts[1:]:
            what = f"attempt {each.attempt}, with {count(len(each.members), 'node')}"
            if by_step and each.resumed_at is not None:
                marks.append(Mark(each.resumed_at, f"{what}, went on from step {each.resumed_at:,}"))
            elif not by_step:
                marks.append(Mark(self._clock.at(each.started), f"{what}, began"))
        return marks

    def curves(self) -> dict[str, Any]:
        history = self._history
        found = []
        losses = list(self._source.losses) or history.losses()
        marks = self._restarts(by_step=True)
        if losses:
            values = [point.value for point in losses]
            first, last = losses[0], losses[-1]
            found.append(
                Chart(
                    id="loss",
                    title="Loss",
                    summary=f"From {first.value:.4g} at step {first.step:,} to {last.value:.4g} at step {last.step:,}; "
                    f"{min(values):.4g} at the least.",
                    x_name="step",
                    series=[Series("loss", [(point.step, point.value) for point in losses])],
                    marks=marks,
                )
            )
        for name in history.metrics[:6]:
            points = history.metric(name)
            value, at = history.best.get(name, (points[-1].value, points[-1].step))
            is_share = all(0 <= point.value <= 1 for point in points) and "loss" not in name
            found.append(
                Chart(
                    id=f"metric-{len(found)}",
                    title=f"Evaluated: {name}",
                    summary=f"{count(len(points), 'evaluation')}; the best is {metric(name, value)}, at step {at:,}.",
                    x_name="step",
                    series=[Series(name, [(point.step, point.value) for point in points])],
                    y_text=lambda value, name=name: metric(name, value),  # type: ignore[misc]
                    y_tick=_share_text if name.endswith("accuracy") else None,
                    most=1.0 if is_share else None,
                    marks=marks,
                )
            )
        if speeds := history.speeds():
            rate = statistics.median(point.value for point in speeds)
            found.append(
                Chart(
                    id="speed",
                    title="Throughput",
                    summary=f"{rate:.3g} steps a second in the middle, over the time that the run was up.",
                    x_name="time",
                    x_text=_elapsed,
                    series=[
                        Series("steps/s", [(self._clock.at(point.time), point.value) for point in speeds])
                    ],
                    y_text=lambda value: f"{value:.3g} steps/s",
                    y_tick=lambda value: f"{value:.3g}",
                    marks=self._restarts(by_step=False),
                    from_zero=True,
                    is_time=True,
                )
            )
        note = "Steps that were done again are shown as they were done last. "
        note += f"Red lines are restarts ({len(marks)})." if marks else "There was no restart."
        return {"curves": found, "curves_note": note}

    # --- goodput ---

    def goodput(self) -> dict[str, Any]:
        goodput = self._history.goodput
        total = goodput.total_s or 1.0
        seconds = {"trained": goodput.trained_s, **goodput.lost}
        bars = [
            (name, each / total, f"{name}: {duration(each)}, {each / total:.1%}")
            for name, each in seconds.items()
        ]
        lost = sorted(((each, name) for name, each in goodput.lost.items() if each >= 0.05), reverse=True)
        summary = f"{goodput.share:.1%} of {duration(goodput.total_s)} trained steps that count; " + (
            "the rest: " + ", ".join(f"{name} {duration(each)}" for each, name in lost)
            if lost
            else "nothing was lost"
        )
        rows = [
            [
                Markup('<span class="swatch c-{0}"></span>{0}').format(name),
                CAUSES.get(name, ""),
                duration(each),
                f"{each / total:.1%}",
            ]
            for name, each in seconds.items()
        ]
        return {
            "goodput_share": f"{goodput.share:.1%}",
            "goodput_total": duration(goodput.total_s),
            "goodput_bar": charts.bar(bars, title="Goodput", summary=summary + "."),
            "goodput_rows": [*rows, ["all", "while the run was up", duration(goodput.total_s), "100 %"]],
        }

    # --- snapshots ---

    def snapshots(self) -> dict[str, Any]:
        history, run = self._history, self._run
        groups: dict[tuple[int, int], list[Event]] = {}
        number: dict[int, dict[str, int]] = {}
        newest: dict[str, Event] = {}
        for event in history.snapshots:
            node = str(event.node)
            groups.setdefault((_int(event.get("step")), _int(event.get("generation"))), []).append(event)
            own = number.setdefault(_int(event.get("generation")), {})
            own[node] = own.get(node, 0) + (_int(event.get("count")) or 1)
            newest[node] = event
        rows = []
        for (step, generation), those in sorted(groups.items())[-MOST_SNAPSHOTS:]:
            size = max(_int(each.get("bytes")) for each in those)
            pauses = [_float(each.get("pause_s")) for each in those]
            rows.append(
                [
                    f"{step:,}",
                    str(generation),
                    _bytes(size) if size else "–",
                    names(sorted({str(each.node) for each in those})),
                    f"{max(pauses):.3f} s",
                    f"{max(_int(each.get('count')) or 1 for each in those)}",
                ]
            )
        total = sum(max(own.values()) for own in number.values())  # every node may note the same ones
        held_up = history.goodput.lost["snapshots"]
        text = "No snapshot of the training module, or of `Snapshots`, is on record."
        if total:
            text = f"{count(total, 'snapshot')}; training stood still for {held_up:.2f} s for them."
        shown = "What is on record of the snapshots"
        if len(groups) > MOST_SNAPSHOTS:
            shown += f", the last {MOST_SNAPSHOTS} of {len(groups)} notes"
        is_shared = _mapping(run.inventory.get("snapshots")).get("shared")
        places = []
        for name, plan in run.nodes.items():
            last = newest.get(name)
            what = "–"
            if last is not None:
                what = f"step {_int(last.get('step')):,}, {_bytes(_int(last.get('bytes')))}"
            elif is_shared:
                what = "in the shared folder"
            places.append([name, what, _mapping(plan.get("env")).get("NODEKIT_SNAPSHOT_DIR", "–")])
        gathered = [each for each in self._source.events if each.kind == "replicas-gathered"]
        failed = [each for each in self._source.events if each.kind in ("replica-failed", "replica-refused")]
        copies = _int(_mapping(run.inventory.get("snapshots")).get("copies"))
        told = []
        if not is_shared and copies > 1 and len(run.nodes) > 1:
            told.append(
                f"Files that your script writes to $NODEKIT_SNAPSHOT_DIR are kept on {copies} nodes: its own, and "
                "another's, in the folder kept beside its snapshots"
            )
        if gathered:
            told.append(f"files were put back from other nodes {count(len(gathered), 'time')}")
        if failed:
            told.append(f"{count(len(failed), 'copy').replace('copys', 'copies')} could not be kept")
        return {
            "snapshots_text": text,
            "snapshot_rows": rows,
            "snapshots_caption": shown,
            "snapshot_places": places,
            "copies_text": "; ".join(told) + "." if told else "",
        }

    # --- usage ---

    def usage(self) -> dict[str, Any]:
        samples = {name: own for name, own in self._history.samples.items() if own}
        has_gpus = any(_gpus(each) for own in samples.values() for each in own)
        found = []
        if has_gpus:
            found.append(self._usage_chart("gpu", "GPU use", samples, _gpu_use, _share_text, most=1.0))
            found.append(
                self._usage_chart("gpu-memory", "GPU memory", samples, _gpu_memory, _share_text, most=1.0)
            )
        found.append(
            self._usage_chart("cpu", "CPU use", samples, lambda each: each.get("cpu"), _share_text, most=1.0)
        )
        found.append(self._usage_chart("memory", "Host memory", samples, _memory, _share_text, most=1.0))
        found.append(
            self._usage_chart(
                "received", "Network, received", samples, lambda each: each.get("received"), _rate
            )
        )
        found.append(
            self._usage_chart("sent", "Network, sent", samples, lambda each: each.get("sent"), _rate)
        )
        rows = []
        for name, own in samples.items():
            memory = [_float(each.get("memory")) for each in own if each.get("memory")]
            whole = max((_float(each.get("memory_total")) for each in own), default=0.0)
            gpu, gpu_memory = _known(map(_gpu_use, own)), _known(map(_gpu_memory, own))
            interfaces = list(
                dict.fromkeys(str(each.get("interface")) for each in own if each.get("interface"))
            )
            rows.append(
                [
                    name,
                    _mean([each.get("cpu") for each in own], _share_text),
                    f"{_bytes(max(memory))} of {_bytes(whole)}" if memory else "–",
                    _mean(gpu, _share_text) + (f" of {len(_gpus(own[-1]))}" if gpu else ""),
                    _share_text(max(gpu_memory)) if gpu_memory else "–",
                    ", ".join(interfaces) or "–",
                    _mean([each.get("received") for each in own], _rate),
                    _mean([each.get("sent") for each in own], _rate),
                ]
            )
        return {"usage": [each for each in found if each.has_points], "usage_rows": rows}

    def _usage_chart(
        self,
        name: str,
        title: str,
        samples: Mapping[str, Sequence[Event]],
        what: Any,
        text: Any,
        most: float | None = None,
    ) -> Chart:
        lines: dict[str, list[tuple[float, float]]] = {}
        for node, own in samples.items():
            points = [(self._clock.at(each.time), what(each)) for each in own]
            if known := [(x, float(y)) for x, y in points if isinstance(y, int | float)]:
                lines[node] = known
        values = [y for points in lines.values() for _, y in points]
        mean = text(statistics.fmean(values)) if values else "–"
        summary = f"{mean} on average, {text(max(values)) if values else '–'} at the most."
        series = [Series(node, points) for node, points in lines.items()]
        if len(series) > MOST_LINES:
            series = [_middle(lines)]
            summary += f" The line is the middle of {len(lines)} nodes, the area all of them."
        return Chart(
            id=f"use-{name}",
            title=title,
            summary=summary,
            x_name="time",
            x_text=_elapsed,
            series=series,
            y_text=text,
            marks=self._restarts(by_step=False),
            from_zero=True,
            most=most,
            is_time=True,
        )

    # --- environment ---

    def environment(self) -> dict[str, Any]:
        run, source = self._run, self._source
        started = [event for event in source.events if event.kind == "run-started"]
        command = started[-1].get("command") if started else None
        if not command and run.nodes:
            command = next(iter(run.nodes.values())).get("argv")
        rows = [
            ["command", shlex.join(str(each) for each in command or [])],
            ["inventory", run.inventory_path],
        ]
        if run.code_digest:
            rows.append(["code", f"SHA-256 {run.code_digest}"])
        if run.slurm:
            rows.append(["Slurm", ", ".join(f"{key} {value}" for key, value in run.slurm.items())])
        rows.append(
            ["folder on the nodes", _common(str(node.get("code_dir", "")) for node in run.nodes.values())]
        )
        skew = f"{run.skew_s * 1000:.1f} ms apart; times in this report are by the clock of who supervised it"
        rows.append(["clocks", skew])
        recorded = {str(event.about): event.fields for event in source.events if event.kind == "host"}
        nodes = []
        for name, node in run.nodes.items():
            known = {**source.versions.get(name, {}), **recorded.get(name, {})}
            gpus = node.get("gpus") or ()
            devices = f"GPU {', '.join(map(str, gpus))}" if gpus else "CPU, gloo"
            if known.get("gpus"):
                devices += f" ({', '.join(dict.fromkeys(map(str, known['gpus'])))})"
            elif known.get("cpus"):
                devices += f", {count(_int(known['cpus']), 'core')}"
            versions = [
                f"{each} {known[each]}" for each in ("python", "torch", "driver", "kernel") if known.get(each)
            ]
            offset = run.clock_offsets.get(name)
            nodes.append(
                [
                    name,
                    str(known.get("hostname") or "–"),
                    ", ".join(versions) or str(node.get("python", "–")),
                    devices,
                    str(node.get("nproc_per_node", "–")),
                    f"{node.get('local_addr', '–')} on {node.get('interface', '–')}",
                    "–" if offset is None else f"{offset * 1000:+.1f} ms",
                ]
            )
        phases = [
            [str(each.get("phase")), f"{_float(each.get('seconds')):.2f} s"]
            for each in source.events
            if each.kind == "phase"
        ]
        return {"environment": rows, "node_rows": nodes, "phases": phases[-24:], "asked": source.asked}

    # --- failures ---

    def failures(self) -> dict[str, Any]:
        by_attempt: dict[str, list[Failure]] = {}
        for failure in map(failure_of, self._history.failures):
            by_attempt.setdefault(failure.attempt, []).append(failure)
        found = []
        for attempt, those in by_attempt.items():
            first = first_cause(those)
            for failure in sorted(those, key=lambda each: (each is not first, each.when)):
                is_first = failure is first
                how = "failed first" if is_first else "failed too"
                if is_bystander(failure):  # the only one, too: a node was lost, or a rank that left no word
                    how = "ended because of another"
                cause = recognise(failure.error, failure.exitcode, failure.kernel) if is_first else None
                found.append(
                    {
                        "is_first": is_first,
                        "cause": cause,
                        "title": f"rank {failure.rank} on {failure.node}",
                        "what": f"{how}, attempt {attempt}: {how_it_ended(failure.exitcode)}",
                        "where": f"At {_time(failure.when)}; full log: {failure.node}:{failure.log}",
                        "error": "\n".join([failure.error or "it wrote nothing", *failure.kernel]),
                    }
                )
        left_out = f"{len(found) - MOST_FAILURES:,} more are left out." if len(found) > MOST_FAILURES else ""
        return {"failures": found[:MOST_FAILURES], "failures_left_out": left_out}

    # --- inventory, events ---

    def inventory(self) -> dict[str, Any]:
        shown = _without_empty(self._run.inventory)
        return {
            "inventory_path": self._run.inventory_path,
            "inventory": yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100),
            "left_out": LEFT_OUT,
            "warning": self._source.redactor.warning,
        }

    def events(self) -> dict[str, Any]:
        shown = [event for event in self._source.events if event.kind != "sample"]
        num_samples = len(self._source.events) - len(shown)
        kept = shown[-MOST_EVENTS:]
        rows = [_event_row(event) for event in kept]
        note = f"{count(len(shown), 'event')}, {count(num_samples, 'sample')} not among them."
        if len(kept) < len(shown):
            note += f" These are the last {len(kept):,}; all are in events.jsonl of the run's record."
        return {
            "events": rows,
            "events_note": note,
            "events_title": f"{count(len(kept), 'event')}, in the order of time",
            "kinds": sorted({row["kind"] for row in rows}),
            "about": sorted({row["node"] for row in rows}),
        }


def _event_row(event: Event) -> dict[str, str]:
    hidden = ("run", "at", "about", "about_start")
    fields = [
        (key, value) for key, value in event.fields.items() if key not in hidden and value not in (None, "")
    ]
    words = [f"{key} {_flat(value)}" for key, value in fields]
    text = " · ".join(words)
    more = ""
    if len(text) > 220 or "\n" in text:
        more = "\n".join(f"{key}: {_flat(value)}" for key, value in fields)
        text = " ".join(text.split())[:200] + " …"
    return {
        "time": _time(event.time),
        "node": str(event.about or "supervisor"),
        "kind": event.kind,
        "text": text,
        "more": more,
    }


def _flat(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_flat(each) for each in value)
    return str(value)


def _without_empty(value: Any) -> Any:
    """An inventory without what was left open in it."""
    if isinstance(value, Mapping):
        return {key: _without_empty(each) for key, each in value.items() if each not in (None, {}, [], ())}
    if isinstance(value, list | tuple):
        return [_without_empty(each) for each in value]
    return value


def _middle(lines: Mapping[str, Sequence[tuple[float, float]]]) -> Series:
    """One line for many nodes: their median over time, and from the least to the most of them."""
    begin = min(points[0][0] for points in lines.values())
    end = max(points[-1][0] for points in lines.values())
    middle, band = [], []
    for number in range(121):
        at = begin + (end - begin) * number / 120
        values = []
        for points in lines.values():
            place = bisect.bisect_right(points, (at, float("inf"))) - 1
            if place >= 0 and (place + 1 < len(points) or at - points[place][0] <= (end - begin) / 60):
                values.append(points[place][1])
        if values:
            middle.append((at, statistics.median(values)))
            band.append((at, min(values), max(values)))
    return Series(f"middle of {len(lines)} nodes", middle, band)


def _gpus(sample: Event) -> list[Mapping[str, Any]]:
    gpus = sample.get("gpus")
    return [each for each in gpus if isinstance(each, Mapping)] if isinstance(gpus, list | tuple) else []


def _gpu_use(sample: Event) -> float | None:
    known = _known(each.get("use") for each in _gpus(sample))
    return statistics.fmean(known) if known else None


def _gpu_memory(sample: Event) -> float | None:
    used = [(_float(each.get("memory")), _float(each.get("memory_total"))) for each in _gpus(sample)]
    shares = [part / whole for part, whole in used if whole]
    return max(shares) if shares else None


def _memory(sample: Event) -> float | None:
    whole = _float(sample.get("memory_total"))
    return _float(sample.get("memory")) / whole if whole and sample.get("memory") else None


def _known(values: Iterable[Any]) -> list[float]:
    return [float(each) for each in values if isinstance(each, int | float)]


def _mean(values: Iterable[Any], text: Any) -> str:
    known = _known(values)
    return str(text(statistics.fmean(known))) if known else "–"


def _share_text(value: float) -> str:
    return f"{100 * value:.3g} %"


def _rate(value: float) -> str:
    return f"{_bytes(value)}/s"


def _bytes(size: float) -> str:
    """`12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _elapsed(seconds: float) -> str:
    return duration(seconds) if seconds else "0"


def _common(folders: Iterable[str]) -> str:
    return ", ".join(list(dict.fromkeys(each for each in folders if each))[:3]) or "–"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def _time_of_day(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))


def _int(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
