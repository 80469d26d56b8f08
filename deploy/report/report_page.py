"""A run's report as one self-contained HTML page (report.html); pure.

No value can become markup: Jinja2 escapes everything, the charts are built with markupsafe, and the page's content
security policy allows only its own script, by its hash, and no requests.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from nodekit.deploy.agent.ranks.failures import Failure, blames_another, first_cause, how_it_ended
from nodekit.deploy.agent.telemetry import guess
from nodekit.deploy.host.schema import Guess
from nodekit.deploy.output.redact import LEFT_OUT, Redactor
from nodekit.deploy.output.wording import count, duration, names, size_text
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import Run
from nodekit.deploy.report import charts, report_curves
from nodekit.deploy.report.charts import Clock
from nodekit.deploy.report.page_rows import (
    attempt_row,
    common,
    event_row,
    mapping,
    share_text,
    snapshot_row,
    time_of_day,
    time_text,
    without_empty,
)
from nodekit.deploy.report.report_curves import MOST_LINES, as_float, as_int
from nodekit.deploy.story.causes import recognise
from nodekit.deploy.story.event_text import Narrator, metric
from nodekit.deploy.story.history import History, Point
from nodekit.deploy.story.verdict import failure_of

MOST_EVENTS = 2000
MOST_STORY = 60
MOST_SNAPSHOTS = 20
MOST_FAILURES = 40
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
UNTOLD_CAUSES = {
    "running": "the ranks ran: the script tells no steps, so how much of it counts is not known",
    "start": "until the ranks ran",
    "restart": "from a loss or failure until the ranks ran again",
    "end": "after the ranks had ended: last copies, and the farewell",
}
"""Replace those of `CAUSES` if no step was ever reported."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The data of a report."""

    run: Run
    history: History
    events: Sequence[Event]
    redactor: Redactor
    written: str
    """The program that writes the report, and when."""
    losses: Sequence[Point] = ()
    """A loss curve finer than the samples, if a node has answered."""
    guess: Guess | None = None
    """The step as guessed from the job's output, if none was reported."""
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Node → its software versions now; those recorded at the start of the run take precedence."""
    asked: str = ""
    """A note on which nodes have answered."""


def page(source: Source) -> str:
    """Return the report as an HTML page."""
    # Secrets are removed here only: the whole page, with its charts, is made from the result.
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
        **report_curves.curves(history, view.clock, source.losses or history.losses()),
        **view.goodput(),
        **view.snapshots(),
        **report_curves.usage(history, view.clock),
        **view.environment(),
        **view.failures(),
        **view.inventory(),
        **view.events(),
    )


def _file(name: str) -> str:
    return resources.files("nodekit.deploy.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash of an inline script or style, for the content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class _View:
    """Computes the template's variables for each part of the page."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._run = source.run
        self._history = source.history
        self.clock = Clock(source.history.sessions)

    # --- summary ---

    def summary(self) -> dict[str, Any]:
        history, run = self._history, self._run
        ended = history.ended
        until, was = (f"to {time_text(ended)}", "was") if ended else ("until now", "has been")
        verdict = history.verdict or run.verdict
        when = (
            f"From {time_text(history.started)} {until}; it {was} up for {duration(history.goodput.total_s)}"
        )
        if len(history.sessions) > 1:
            when += f", in {count(len(history.sessions), 'part')}"
        story, left_out = self._story(), ""
        if (more := len(story) - MOST_STORY) > 0:
            story = [*story[: MOST_STORY // 3], *story[-MOST_STORY * 2 // 3 :]]
            left_out = f"{more:,} more, in the middle, are left out here."
        return {
            "verdict": verdict.partition("\n")[0],
            "verdict_text": verdict if history.state == "failed" and "\n" in verdict else "",
            "when": f"{when}.",
            "tiles": list(self._tiles()),
            "story": story,
            "story_left_out": left_out,
        }

    def _tiles(self) -> Iterable[tuple[str, str, str]]:
        history = self._history
        if history.step is None:
            is_guessed = self._source.guess is not None
            yield "Step", guess.brief(self._source.guess), "by what it printed" if is_guessed else ""
        else:
            yield "Step", f"{history.step:,}", f"of {history.total_steps:,}" if history.total_steps else ""
        last = history.attempts[-1] if history.attempts else None
        most = max((len(each.members) for each in history.attempts), default=0)
        now = f"{len(last.members)}" if last else "–"
        ranks = f"{count(last.world_size, 'rank')}" if last and last.world_size else ""
        at_most = f", {most} at most" if last and most > len(last.members) else ""
        yield "Nodes", now, ranks + at_most
        is_told = history.goodput.is_told
        yield (
            "Goodput",
            share_text(history.goodput),
            "of the time trained steps that count" if is_told else "no step was told",
        )
        redone = sum(each.redone_steps for each in history.attempts)
        again = f"{count(redone, 'step')} done again" if redone else "no step done again"
        again = again if is_told else ""
        yield "Restarts", f"{history.restarts}", again
        for name, (value, at) in list(history.best.items())[:4]:
            yield f"Best {name}", metric(name, value), f"at step {at:,}"
        if not history.best:
            for name, value in list(history.result.items())[:4]:
                if isinstance(value, int | float):
                    title = name.replace("_", " ").capitalize()
                    yield title, metric(name, value), "as the job said at its end"
        rate = next((each.steps_per_s for each in reversed(history.attempts) if each.steps_per_s), None)
        if rate:
            yield "Steps/s", f"{rate:.3g}", "in the last attempt"

    def _story(self) -> list[tuple[str, str]]:
        narrator = Narrator()
        told = [(event, text) for event in self._source.events for text in narrator.tell(event)]
        # evaluations are in a chart
        return [(time_of_day(event.time), text) for event, text in told if event.kind != "evaluation"]

    # --- timeline ---

    def timeline(self) -> dict[str, Any]:
        history = self._history
        bars, rows = [], []
        now = history.sessions[-1][1]
        for each in history.attempts:
            end = now if each.ended is None else each.ended
            told = f"attempt {each.attempt} with {names(each.members)}, for {duration(end - each.started)}"
            bars.append((each.attempt, each.started, end, told + (f"; {each.why}" if each.why else "")))
            rows.append(attempt_row(each))
        spans = {
            name: own for name, own in history.spans.items() if any(span.state != "ended" for span in own)
        }
        trained = {
            name: sum(span.end - span.start for span in own if span.state in ("training", "running"))
            for name, own in spans.items()
        }
        did = "trained" if history.goodput.is_told else "ran"
        each_node = ", ".join(f"{name} {did} for {duration(seconds)}" for name, seconds in trained.items())
        if len(trained) > MOST_LINES:
            least, most = duration(min(trained.values())), duration(max(trained.values()))
            each_node = f"each of {len(trained)} nodes {did} for {least}"
            each_node += "" if least == most else f" to {most}"
        up = duration(self.clock.total_s)
        generations = len({each.generation for each in history.attempts})
        attempts = count(len(history.attempts), "attempt")
        summary = f"{attempts} in {count(generations, 'generation')}; of {up}, {each_node}."
        where = [
            [
                name,
                time_of_day(span.start),
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
            "states": {
                state: name
                for state, name in charts.STATES.items()
                if state != ("running" if history.goodput.is_told else "training")
            },
            "timeline": charts.timeline(spans, bars, self.clock, summary=summary),
            "timeline_summary": summary,
            "attempts": rows,
            "spans": where[:400],
        }

    # --- goodput ---

    def goodput(self) -> dict[str, Any]:
        goodput = self._history.goodput
        total = goodput.total_s or 1.0
        used = {"trained": goodput.trained_s} if goodput.is_told else {"running": goodput.untold_s}
        seconds = {**used, **goodput.lost}
        bars, rows = [], []
        for name, each in seconds.items():
            share = f"{each / total:.1%}"
            bars.append((name, each / total, f"{name}: {duration(each)}, {share}"))
            swatch = Markup('<span class="swatch c-{0}"></span>{0}').format(name)
            what = CAUSES if goodput.is_told else {**CAUSES, **UNTOLD_CAUSES}
            rows.append([swatch, what.get(name, ""), duration(each), share])
        lost = sorted(((each, name) for name, each in goodput.lost.items() if each >= 0.05), reverse=True)
        rest = ", ".join(f"{name} {duration(each)}" for each, name in lost)
        summary = f"{share_text(goodput)} of {duration(goodput.total_s)} trained steps that count; "
        if not goodput.is_told:
            summary = f"In {duration(goodput.untold_s)} of {duration(goodput.total_s)} the ranks ran; "
        summary += f"the rest: {rest}." if rest else "nothing was lost."
        return {
            "goodput_is_told": goodput.is_told,
            "goodput_share": share_text(goodput),
            "goodput_total": duration(goodput.total_s),
            "goodput_bar": charts.bar(bars, title="Goodput", summary=summary),
            "goodput_rows": [*rows, ["all", "while the run was up", duration(goodput.total_s), "100 %"]],
        }

    # --- snapshots ---

    def snapshots(self) -> dict[str, Any]:
        snapshots = self._history.snapshots
        groups: dict[tuple[int, int], list[Event]] = {}
        number: collections.Counter[tuple[int, str]] = collections.Counter()  # (generation, node) → snapshots
        for event in snapshots:
            generation = as_int(event.get("generation"))
            groups.setdefault((as_int(event.get("step")), generation), []).append(event)
            number[generation, str(event.node)] += as_int(event.get("count")) or 1
        # Nodes record the same snapshots, but a node that was away lacks some.
        most = collections.Counter(generation for _, generation in groups)
        for (generation, _), own in number.items():
            most[generation] = max(own, most[generation])
        text = "No snapshot of the training module, or of `Snapshots`, is on record."
        if total := sum(most.values()):
            held_up = self._history.goodput.lost["snapshots"]
            text = f"{count(total, 'snapshot')}; training stood still for {held_up:.2f} s for them."
        shown = "What is on record of the snapshots"
        if len(groups) > MOST_SNAPSHOTS:
            shown += f", the last {MOST_SNAPSHOTS} of {len(groups)} notes"
        settings = mapping(self._run.inventory.get("snapshots"))
        newest = {str(event.node): event for event in snapshots}
        return {
            "snapshots_text": text,
            "snapshot_rows": [snapshot_row(*each) for each in sorted(groups.items())[-MOST_SNAPSHOTS:]],
            "snapshots_caption": shown,
            "snapshot_places": self._snapshot_places(newest, is_shared=bool(settings.get("shared"))),
            "copies_text": self._copies(settings),
        }

    def _snapshot_places(self, newest: Mapping[str, Event], *, is_shared: bool) -> list[list[str]]:
        places = []
        for name, plan in self._run.nodes.items():
            what = "in the shared folder" if is_shared else "–"
            if (last := newest.get(name)) is not None:
                what = f"step {as_int(last.get('step')):,}, {size_text(as_int(last.get('bytes')))}"
            places.append([name, what, mapping(plan.get("env")).get("NODEKIT_SNAPSHOT_DIR", "–")])
        return places

    def _copies(self, settings: Mapping[str, Any]) -> str:
        kinds = collections.Counter(each.kind for each in self._source.events)
        gathered, failed = kinds["replicas-gathered"], kinds["replica-failed"] + kinds["replica-refused"]
        copies = as_int(settings.get("copies"))
        told = []
        if not settings.get("shared") and copies > 1 and len(self._run.nodes) > 1:
            told.append(
                f"Files that your script writes to $NODEKIT_SNAPSHOT_DIR are kept on {copies} nodes: its own, and "
                "another's, in the folder kept beside its snapshots"
            )
        if gathered:
            told.append(f"files were put back from other nodes {count(gathered, 'time')}")
        if failed:
            told.append(f"{failed:,} {'copy' if failed == 1 else 'copies'} could not be kept")
        return "; ".join(told) + "." if told else ""

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
            ["folder on the nodes", common(str(node.get("code_dir", "")) for node in run.nodes.values())]
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
                devices += f", {count(as_int(known['cpus']), 'core')}"
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
            [str(each.get("phase")), f"{as_float(each.get('seconds')):.2f} s"]
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
                # True even of the only failure: a node may have been lost, or a rank left no error.
                if blames_another(failure):
                    how = "ended because of another"
                cause = recognise(failure.error, failure.exitcode, failure.kernel) if is_first else None
                found.append(
                    {
                        "is_first": is_first,
                        "cause": cause,
                        "title": f"rank {failure.rank} on {failure.node}",
                        "what": f"{how}, attempt {attempt}: {how_it_ended(failure.exitcode)}",
                        "where": f"At {time_text(failure.when)}; full log: {failure.node}:{failure.log}",
                        "error": "\n".join([failure.error or "it wrote nothing", *failure.kernel]),
                    }
                )
        left_out = f"{len(found) - MOST_FAILURES:,} more are left out." if len(found) > MOST_FAILURES else ""
        return {"failures": found[:MOST_FAILURES], "failures_left_out": left_out}

    # --- inventory, events ---

    def inventory(self) -> dict[str, Any]:
        shown = without_empty(self._run.inventory)
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
        rows = [event_row(event) for event in kept]
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
