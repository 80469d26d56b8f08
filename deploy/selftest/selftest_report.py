"""Evaluates the parts of a self-test, and makes the report that users can send to others; pure."""

from __future__ import annotations

import ipaddress
import json
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nodekit.deploy.output.redact import Redactor
from nodekit.deploy.output.wording import count
from nodekit.deploy.plan.check import Facts
from nodekit.deploy.plan.gpus import Gpu
from nodekit.deploy.records.events import Event
from nodekit.deploy.selftest import MEMORY_MARK
from nodekit.inventory.schema import Inventory

Outcome = Literal["passed", "failed", "not tried"]

KEPT_MIB = 64
"""How much less free GPU memory a restarted rank may find, in MiB: drivers and displays use some."""
PHASES = ("noticed", "ranks ended", "nodes met", "ranks started", "first step")
WHAT_IS_IN_IT = (
    "In it are: versions of kit, Python, torch and the driver; GPU models and counts; libraries; times, rates and "
    "differences that were measured; and messages. Hosts are node1, node2, …; names of hosts and users, addresses, "
    "paths and secrets are taken out. Read it before you send it."
)

_URL = re.compile(r"\b[a-z][\w+.-]*://[^\s'\"<>]+")
_AT = re.compile(r"[^\s'\"<>(,;:=@]+@[\w.-]+")
_PATH = re.compile(r"(?<![\w.…])~?/(?:[^\s'\"<>:,;()/]+/)*([^\s'\"<>:,;()/]*)")
_MAYBE_ADDRESS = re.compile(r"[0-9A-Fa-f:.]*[.:][0-9A-Fa-f:.]*")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the self-test."""

    name: str
    outcome: Outcome
    text: str
    """What was found, in a sentence; or why it failed, or was not tried."""
    seconds: float = 0.0
    values: Mapping[str, Any] = field(default_factory=dict)


# --- judging ------------------------------------------------------------------------------------------------


def why_unmeasured(network: Mapping[str, Any]) -> str:
    """Return why `kit bench --json` measured nothing, as with a single GPU; "" if it measured something, or failed."""
    if any(network.get(key) for key in ("pairs", "all_reduce", "problems")):
        return ""
    return "; ".join(network.get("notes", ()))


def of_drill(
    name: str,
    result: Mapping[str, Any],
    phases: Mapping[str, float],
    seconds: float,
    *,
    stayed: Collection[int] | None = None,
) -> Part:
    """Evaluate a fault's result in `kit drill --json`: passed if it was survived with the unbroken run's losses.

    Unlike in `kit drill`, losses must be equal bit for bit if the number of ranks is, since the task is deterministic
    on GPUs too. `stayed` has the ranks that kept their processes, and then no step may be lost; None: none could.
    """
    curve, problem = result["curve"], str(result["problem"])
    if not problem and curve["sameness"] == "unknown":
        problem = "it was resumed, and there is no loss curve to compare"
    if not problem and curve["sameness"] == "near":
        problem = (
            f"the losses are near the unbroken run's ({curve['text']}): wanted them to rounding at least"
        )
    if not problem and curve["sameness"] == "same" and len(result["world_sizes"]) < 2:
        problem = (
            f"the losses are the unbroken run's to rounding alone ({curve['text']}): wanted them bit for bit"
        )
    if not problem and stayed is not None and result["steps_lost"]:
        problem = f"{count(result['steps_lost'], 'step')} done again: wanted none, with this engine"
    # Of two ranks, gloo sometimes leaves the other one waiting: it saves its step, and is started again.
    if not problem and stayed is not None and not stayed and result["world_sizes"][0] > 2:
        problem = (
            "all ranks were started again: wanted the others to keep their processes; "
            'their logs say "and this rank ends: …"'
        )
    found = [f"{phase} {value:.1f} s" for phase, value in phases.items()]
    text = "the losses after the resume are the unbroken run's" + (
        ", bit for bit" if curve["sameness"] == "equal" else f" to rounding ({curve['text']})"
    )
    if result["resumed_s"] is not None:
        text += f"; trained again after {result['resumed_s']:.1f} s" + (
            f": {', '.join(found)}" if found else ""
        )
    if stayed:
        text += f"; {count(len(stayed), 'other rank')} kept {'its' if len(stayed) == 1 else 'their'} step"
    names = ("detected_s", "detected_by", "resumed_s", "steps_lost", "world_sizes", "curve")
    return Part(
        name=name,
        outcome="failed" if problem else "passed",
        text=f"{result['outcome']}: {problem}" if problem else text,
        seconds=seconds,
        values={**{key: result[key] for key in names}, "phases": phases},
    )


def stayed(events: Sequence[Event], struck_at: float) -> set[int]:
    """Return the ranks that kept their processes in the attempts after a fault, from the run's events."""
    started = [each for each in events if each.kind == "workers-started" and each.time > struck_at]
    return {rank for each in started for rank in each.get("stayed", ())}


def phases(events: Sequence[Event], struck_at: float, resumed_s: float | None) -> dict[str, float]:
    """Return the seconds that each of `PHASES` took between a fault and the next first step; {} if unknown.

    Args:
        events: of the run.
        struck_at: when the fault was injected, by this machine's clock.
        resumed_s: seconds from the fault to the first step.
    """
    if resumed_s is None:
        return {}
    during = [event for event in events if struck_at < event.time <= struck_at + resumed_s]
    marks = {
        "noticed": [
            e.time for e in during if e.kind in ("worker-failed", "membership", "store-lost", "hang")
        ][:1],
        "ranks ended": [e.time for e in during if e.kind == "attempt-ended"],
        "nodes met": [e.time for e in during if e.kind == "rendezvous"],
        "ranks started": [e.time for e in during if e.kind == "workers-started"],
        "first step": [struck_at + resumed_s],
    }
    if not all(marks.values()):
        return {}
    found, before = {}, struck_at
    for phase in PHASES:
        over = max(before, *marks[phase])
        found[phase] = round(over - before, 3)
        before = over
    return found


def of_memory(lines: Mapping[str, Iterable[str]]) -> Part:
    """Compare the free GPU memory of each rank at its first start and at later ones; `lines`: engine → log lines."""
    kept: dict[str, int] = {}
    for engine, said in lines.items():
        free: dict[tuple[int, int], int] = {}
        for line in said:
            if line.startswith(MEMORY_MARK):
                told = json.loads(line.removeprefix(MEMORY_MARK))
                free[told["rank"], told["attempt"]] = told["free_bytes"]
        again = [(rank, attempt) for rank, attempt in free if attempt and (rank, 0) in free]
        if again:
            kept[engine] = round(max(free[rank, 0] - free[rank, n] for rank, n in again) / 2**20)
    if not kept:
        return Part(
            name="memory", outcome="not tried", text="no rank told its free memory before and after a crash"
        )
    bad = {engine: mib for engine, mib in kept.items() if mib > KEPT_MIB}
    text = f"a rank that is started again finds at most {max(0, *kept.values())} MiB less free GPU memory"
    if bad:
        sizes = ", ".join(f"{engine}: {mib} MiB" for engine, mib in bad.items())
        text = f"GPU memory was not free when ranks were started again, unless others have used it since: {sizes}"
    return Part(name="memory", outcome="failed" if bad else "passed", text=text, values={"kept_mib": kept})


def of_restarts(parts: Iterable[Part]) -> Part:
    """Return the restart time by phase: medians over the crashes of all engines."""
    found = [part.values["phases"] for part in parts if part.values.get("phases")]
    if not found:
        return Part(
            name="restart", outcome="not tried", text="no crash was survived, or its events are not known"
        )
    medians = {phase: statistics.median(each[phase] for each in found) for phase in PHASES}
    whole = statistics.median(sum(each.values()) for each in found)
    told = ", ".join(f"{phase} {value:.1f} s" for phase, value in medians.items())
    text = f"{whole:.1f} s from a crash to the next step: {told} (medians of {len(found)})"
    return Part(name="restart", outcome="passed", text=text, values={"total_s": whole, "phases": medians})


# --- the report ---------------------------------------------------------------------------------------------


class Anonymous:
    """Removes from a text what identifies the machines and their owner."""

    def __init__(self, inventory: Inventory, facts: Mapping[str, Facts]) -> None:
        names: dict[str, str] = {inventory.name: "INVENTORY", inventory.path.name: "INVENTORY"}
        for number, host in enumerate(inventory.hosts, 1):
            found = facts.get(host.name)
            own = {host.name, host.address or "", found.hostname if found else ""}
            own |= {address for each in found.interfaces for address in each.addresses} if found else set()
            names |= dict.fromkeys(own, f"node{number}")
            names |= dict.fromkeys({host.user or "", found.user if found else ""}, "USER")
        self._names = {name: shown for name, shown in names.items() if name}
        known = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
        self._known = re.compile(rf"(?<!\w)(?:{known})(?!\w)")
        self._redactor = Redactor(inventory.model_dump(mode="json"))

    def text(self, text: str) -> str:
        """Remove names, addresses, paths and secrets from a text."""
        text = self._redactor.text(text)
        text = _URL.sub("URL", text)
        text = self._known.sub(lambda found: self._names[found[0]], text)
        text = _AT.sub("USER@HOST", text)
        text = _MAYBE_ADDRESS.sub(_address, text)
        return _PATH.sub(lambda found: f"…/{found[1]}", text)

    def tree(self, value: Any) -> Any:
        """Apply `text` to all strings of JSON values, keys too."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.tree(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(each) for each in value]
        return self.text(value) if isinstance(value, str) else value


def _address(found: re.Match[str]) -> str:
    text = found[0].rstrip(".:")
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return found[0]
    return f"ADDRESS{found[0][len(text) :]}"


def nodes(facts: Mapping[str, Facts], gpus: Mapping[str, Sequence[Gpu]]) -> list[dict[str, Any]]:
    """Return the report's entry for each node, in the inventory's order."""
    return [
        {
            "python": found.python,
            "torch": found.torch,
            "torch_build": found.torch_build,
            "driver": found.gpus.driver,
            "gpus": [f"{gpu.name}, {gpu.memory_mib} MiB" for gpu in gpus[name]],
            "cpus": found.cpus,
            "libraries": sorted(found.modules),
        }
        for name, found in facts.items()
    ]


def to_json(
    kit: str, made: str, told: Sequence[Mapping[str, Any]], parts: Sequence[Part], hide: Anonymous
) -> str:
    """Format the report as JSON."""
    values = {
        "version": 1,
        "about": WHAT_IS_IN_IT,
        "kit": kit,
        "made": made,
        "nodes": [{"name": f"node{number}", **each} for number, each in enumerate(told, 1)],
        "parts": [hide.tree(asdict(part)) for part in parts],
    }
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def to_markdown(text: str) -> str:
    """Format the report as Markdown, from its JSON."""
    report = json.loads(text)
    rows = [f"# kit selftest\n\nkit {report['kit']}, {report['made']}. {report['about']}\n"]
    rows += ["| node | torch | Python | driver | GPUs | CPUs | libraries |", "|---|---|---|---|---|---|---|"]
    for node in report["nodes"]:
        gpus = "; ".join(f"{node['gpus'].count(each)} × {each}" for each in dict.fromkeys(node["gpus"]))
        cells = (
            node["name"],
            f"{node['torch']} ({node['torch_build']})",
            node["python"],
            node["driver"] or "–",
            gpus or "none",
            node["cpus"],
            ", ".join(node["libraries"]),
        )
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    rows += ["", "| part | | seconds | |", "|---|---|---|---|"]
    for part in report["parts"]:
        said = part["text"].replace("\n", "<br>").replace("|", "\\|")
        rows.append(f"| {part['name']} | {part['outcome']} | {part['seconds']:.0f} | {said} |")
    return "\n".join(rows) + "\n"
