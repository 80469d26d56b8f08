"""What a run has left on its nodes, for the screen it ends with: nothing is named that is not there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nodekit.deploy.connect.channel import HostChannel, on_all
from nodekit.deploy.host.probes import hostfacts
from nodekit.deploy.output.wording import size_text
from nodekit.deploy.plan.command import training_options, weights_folders
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError

LOOK_TIMEOUT_S = 10.0
_MOST_ENTRIES = 4

Row = tuple[str, str]
"""A label and what stands beside it."""


def left_behind(run: Run, channels: Mapping[str, HostChannel], without: Collection[str]) -> list[Row]:
    """Rows for what there is of a run on its nodes: each kind on the first node that has it, and what its script wrote.

    Says so of nodes that cannot be asked. What is on nodes ``without`` which the run ended is older than the others'.
    """
    there = {name: (run.nodes[name], channels[name]) for name in run.nodes if name in channels}
    found = on_all(there, lambda each: _look(*each))  # under Slurm all have the login node's channel
    return rows(run.run_id, run.nodes, found, without)


def _look(node: Mapping[str, Any], channel: HostChannel) -> Mapping[str, Any]:
    is_ours = training_options(node["argv"], node["env"]) is not None
    told: Mapping[str, Any] = channel.call(
        "artifacts.list_artifacts",
        timeout_s=LOOK_TIMEOUT_S,
        node_dir=node["node_dir"],
        code_dir=node["code_dir"],
        snapshots=node["env"]["NODEKIT_SNAPSHOT_DIR"],
        weights=weights_folders(node, "best") if is_ours else [],
    )
    return told


def rows(
    run_id: str,
    nodes: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, Mapping[str, Any] | Exception],
    without: Collection[str] = (),
) -> list[Row]:
    """The rows, from the nodes' plans and what `artifacts.list_artifacts` said of each; pure."""
    names = sorted(nodes, key=lambda name: (name in without, int(nodes[name]["node_rank"])))
    told = {name: each for name in names if isinstance(each := found.get(name), Mapping)}
    result: list[Row] = []
    for kind, hint in (("logs", "logs"), ("snapshots", ""), ("curves", "board"), ("weights", "test")):
        name = next((name for name, each in told.items() if each[kind]), None)
        if name is None:
            continue
        place = {
            "logs": f"{nodes[name]['node_dir']}/logs",
            "snapshots": nodes[name]["env"]["NODEKIT_SNAPSHOT_DIR"],
            "curves": f"{nodes[name]['node_dir']}/output",
            "weights": told[name]["weights"],
        }[kind]
        result.append((kind, f"{name}:{place}" + (f"   (kit {hint} {run_id})" if hint else "")))
    seen: set[str] = set()
    folders = hostfacts.folders({name: each["code"] for name, each in told.items()})
    for name, each in told.items():
        if not each["written"] or not each["written"]["entries"] or folders[name] in seen:
            continue
        seen |= {folders[name]} - {""}
        result.append(("written", f"{name}:{nodes[name]['code_dir']}: {_entries(each['written'])}"))
    if silent := [name for name in names if name not in told]:
        result.append(("not known", f"what is on {', '.join(silent)}, which could not be asked"))
    return result


def _entries(written: Mapping[str, Any]) -> str:
    entries: Sequence[tuple[str, int, int]] = written["entries"]
    shown = [
        f"{name} ({f'{number} files, ' if number > 1 else ''}{size_text(size)})"
        for name, number, size in entries[:_MOST_ENTRIES]
    ]
    rest = entries[_MOST_ENTRIES:]
    if rest:
        shown.append(f"{len(rest)} more ({size_text(sum(size for *_, size in rest))})")
    return ("" if written["is_all"] else "at least ") + ", ".join(shown)


def result(channel: HostChannel, node_dir: str, *, timeout_s: float) -> dict[str, Any]:
    """What a node's ``output/result.json`` says, nan as None; {} where none can be read: a script writes any there."""
    with contextlib.suppress(KitError, ValueError, RecursionError):
        text = channel.call("read_file", timeout_s=timeout_s, path=f"{node_dir}/output/result.json")
        found = json.loads(text or "{}", parse_constant=lambda _: None)
        return found if isinstance(found, dict) else {}
    return {}
