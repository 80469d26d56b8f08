"""`kit test` and `kit predict`: apply trained weights where they are, a run's by its own code, and print the result."""

from __future__ import annotations

import contextlib
import json
import posixpath
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.deploy.backend import backend_of
from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import CALL_TIMEOUT_S, HostChannel, on_all, open_local
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.output import terminal
from nodekit.deploy.plan.command import weights_folders
from nodekit.deploy.records import find_runs, runs
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import HostError, KitError
from nodekit.training.apply import as_json

if TYPE_CHECKING:
    from rich.table import Table

MODULE = "nodekit.training.apply"
FACTS = "nodekit.json"
"""Name of a file in each folder of weights that a run has written."""
_NO_TERMINAL_WIDTH = 10_000
_SAID_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `kit test` and `kit predict`."""

    weights: str
    """``best`` or ``last``."""
    timeout_s: float
    json: bool
    data: str | None = None
    """Path of the task's data; None: the run's."""
    ssh: SshOptions


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where weights were found; for a folder on this machine, `node` is its path."""

    node: str
    folder: str
    step: int


def find(name: str | None, weights: str) -> Run | Path:
    """Return the folder of weights with this name on this machine, or else the run.

    Args:
        name: a folder of weights, or one that contains ``best`` and ``last``; or the beginning of a run's id; None: the
            latest run.
        weights: ``best`` or ``last``.

    Raises:
        KitError: there is neither such a folder nor such a run.
    """
    if name is None:
        return find_runs.find(None)
    folder = Path(name).expanduser()
    for each in (folder, folder / weights):
        if (each / FACTS).is_file():
            return each
    no_weights = f"{name} has no {FACTS} and no {weights}/{FACTS}"
    wanted = "wanted a folder of weights that a run has written, such as its output/best, or a run's id"
    if "/" in name:
        raise KitError(f"{no_weights if folder.is_dir() else f'there is no folder {name}'}: {wanted}")
    try:
        return find_runs.find(name)
    except KitError as error:
        raise KitError(f"{error}; the folder {no_weights}" if folder.is_dir() else str(error)) from None


def test(source: Run | Path, options: Options) -> int:
    """Print the metrics of a run's weights, or those in a folder on this machine, on the task's test data."""
    told = _apply(source, options, ["--test", "--json"])
    if options.json:
        print(as_json(told, indent=2))
        return 0
    if "lacks" in told:
        means = ", ".join(
            f"{name} {'nan' if value is None else format(value, '.4f')}"
            for name, value in told["means"].items()
        )
        lacks = " and ".join(f"{name}()" for name in told["lacks"])
        print(f"{told['num']} samples: {means or 'nothing was measured'}")
        print(f"For precision and recall of each class the task lacks {lacks} (see nodekit.training.Task).")
        return 0
    _print(classes_table(told), "", confusion_table(told))
    return 0


def predict(source: Run | Path, texts: Sequence[str], options: Options) -> int:
    """Print the label of each text, by a run's weights, or those in a folder on this machine."""
    told = _apply(source, options, ["--predict"], text=json.dumps(list(texts)))
    if options.json:
        print(as_json(told, indent=2))
    else:
        _print(texts_table(told["texts"]))
    return 0


def read_texts(path: str) -> list[str]:
    """Return the lines of a UTF-8 file; ``-`` means stdin.

    Raises:
        KitError: the file cannot be read, has no lines, or has an empty one.
    """
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise KitError(f"{path}: {error.strerror}; wanted a file with a text on each line") from error
    name = "stdin" if path == "-" else path
    try:
        content = raw.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise KitError(f"{name}:{line}: found the byte 0x{raw[error.start]:02x}, wanted UTF-8") from error
    if not content.strip():
        raise KitError(f"{name}: found no text, wanted one on each line")
    lines = [line.strip() for line in content.split("\n")]
    if "" in lines:
        raise KitError(f"{name}:{lines.index('') + 1}: found an empty line, wanted a text")
    return lines


def classes_table(told: Mapping[str, Any]) -> Table:
    """Return a table with precision, recall and F1 of each class, and their means."""
    found = _table("", "precision", "recall", "f1", "support")
    means = [
        {"label": f"{name} mean", **told[name], "support": told["num"]} for name in ("macro", "weighted")
    ]
    for each in told["classes"]:
        found.add_row(*_cells(each))
    found.add_section()
    found.add_row(_text("accuracy"), "", "", f"{told['accuracy']:.4f}", str(told["num"]))
    for each in means:
        found.add_row(*_cells(each))
    return found


def confusion_table(told: Mapping[str, Any]) -> Table:
    """Return the confusion matrix: a row for each true class, a column for each predicted one."""
    labels = [each["label"] for each in told["classes"]]
    found = _table("true \\ predicted", *labels)
    for label, row in zip(labels, told["confusion"], strict=True):
        found.add_row(_text(label), *map(str, row))
    return found


def texts_table(texts: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of label, probability and text."""
    found = _table("label", "probability", "text")
    found.columns[2].justify = "left"
    for each in texts:
        found.add_row(_text(each["label"]), f"{each['probability']:.4f}", _text(each["text"]))
    return found


def _table(*columns: str) -> Table:
    from rich.table import Table

    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        found.add_column(_text(column), justify="right" if number else "left", overflow="fold")
    return found


def _text(content: str) -> Any:
    from rich.text import Text

    return Text(content)  # not parsed as rich's markup: a label may look like it


def _cells(each: Mapping[str, Any]) -> list[Any]:
    numbers = [f"{each[name]:.4f}" for name in ("precision", "recall", "f1")]
    return [_text(each["label"]), *numbers, str(each["support"])]


def _print(*parts: Any) -> None:

    console = terminal.console(width=None if sys.stdout.isatty() else _NO_TERMINAL_WIDTH)
    for part in parts:
        console.print(part)


def _apply(
    source: Run | Path, options: Options, arguments: Sequence[str], *, text: str = ""
) -> dict[str, Any]:
    """Run the module `nodekit.training.apply` where the weights are, and return what it prints.

    Raises:
        KitError: no node has the weights, or the module fails.
    """
    data = [] if options.data is None else ["--data", options.data]
    with _place(source, options) as (about, place, channel, node):
        print(f"loading {about} (at most {options.timeout_s:g} s)", file=sys.stderr, flush=True)
        done = channel.stream(
            "attend",
            lambda _: None,
            argv=[node["python"], "-m", MODULE, place.folder, *data, *arguments],
            cwd=node["code_dir"],
            kit_dir=node["kit_dir"],
            env=node["env"],
            limit_s=options.timeout_s,
            text=text,
        )
    if done["status"] is None:
        raise HostError(
            place.node,
            f"no result within {options.timeout_s:g} s, and it was stopped; give more with --timeout",
        )
    said = done["err"].strip().splitlines()
    if done["status"] != 0:
        prefix = f"python -m {MODULE}: "
        worded = [line.removeprefix(prefix) for line in said if line.startswith(prefix)]
        raise HostError(
            place.node, "\n".join(worded or said[-_SAID_LINES:]) or f"exit status {done['status']}"
        )
    told: dict[str, Any] = json.loads(done["out"].splitlines()[-1])
    return told


@contextlib.contextmanager
def _place(
    source: Run | Path, options: Options
) -> Iterator[tuple[str, Place, HostChannel, Mapping[str, Any]]]:
    """Find the weights; yield a description, their place, a channel to that host, and the plan of its ranks.

    Raises:
        KitError: no node has the weights.
    """
    if isinstance(source, Path):
        place = Place(node=str(source), folder=str(source), step=0)
        node = {"python": sys.executable, "code_dir": str(Path.cwd()), "kit_dir": "", "env": {}}
        with contextlib.closing(open_local(place.node, sys.executable)) as channel:
            yield str(source), place, channel, node
        return
    with _nodes(source, options) as (nodes, channels):
        place = _find(source, nodes, channels, options.weights)
        about = f"{options.weights} of {source.run_id}, step {place.step}, on {place.node}:{place.folder}"
        yield about, place, channels[place.node], nodes[place.node]


@contextlib.contextmanager
def _nodes(run: Run, options: Options) -> Iterator[tuple[Mapping[str, Any], Mapping[str, HostChannel]]]:
    """Yield the plans of a run's nodes, and channels to the reachable ones."""
    backend = backend_of(run)
    hosts = backend.hosts(run)
    with cluster.channels(list(hosts.values()), options.ssh, some=True) as channels:
        record = backend.record(run, channels)
        if record is None:
            yield {}, {}
            return
        yield (
            record.nodes,
            {node: channels[host] for host in channels for node in backend.nodes_at(record, host)},
        )


def _find(run: Run, nodes: Mapping[str, Any], channels: Mapping[str, HostChannel], weights: str) -> Place:
    """Return the place of a run's newest weights: a node that was lost may have older ones."""
    there = [name for name in nodes if name in channels]
    places = {name: weights_folders(nodes[name], weights) for name in there}

    def look(name: str) -> list[Place]:
        found = []
        for folder in places[name]:
            path = posixpath.join(folder, FACTS)
            text = channels[name].call("read_file", timeout_s=CALL_TIMEOUT_S, path=path)
            if text is not None:
                found.append(Place(node=name, folder=folder, step=_step(name, path, text)))
        return found

    results = on_all({name: name for name in there}, look)
    found = [place for result in results.values() if not isinstance(result, Exception) for place in result]
    if found:
        return max(found, key=lambda place: place.step)
    looked = [f"{name}:{folder}" for name in there for folder in places[name]]
    failed = [str(result) for result in results.values() if isinstance(result, Exception)]
    failed += [f"{name}: not reached" for name in nodes if name not in channels]
    other = "last" if weights == "best" else "best"
    state = "is running" if run.state in runs.LIVE else f"has {run.state}"
    has_none = f"{run.run_id} has no {weights} weights (yet; it {state}): looked for"
    if failed:
        has_none = f"no {weights} weights of {run.run_id} were found where they could be looked for:"
    raise KitError(
        "\n".join(
            [
                f"{has_none} {', '.join(looked) or 'them on no node'}. The training module writes them after an "
                f"evaluation; perhaps it has --weights {other}",
                *failed,
            ]
        )
    )


def _step(node: str, path: str, facts: str) -> int:
    """Return the step after which the weights were written.

    Raises:
        HostError: the file is damaged.
    """
    try:
        step = json.loads(facts).get("step", 0)
    except (ValueError, AttributeError) as error:
        raise HostError(node, f"{path} cannot be read ({error}): wanted a JSON object") from error
    return step if isinstance(step, int) else 0
