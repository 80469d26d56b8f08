"""Copies the nodes' logs into the run's folder on this machine; each time only what is new."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.deploy.connect.channel import on_all
from nodekit.deploy.host.files import make_private, write_private
from nodekit.deploy.records.loglines import Source
from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from nodekit.deploy.connect.channel import HostChannel
    from nodekit.deploy.records.runs import Run

FILE = "fetched.json"


@dataclass
class Fetched:
    """The result of a fetch."""

    folder: Path
    num_nodes: int = 0
    num_bytes: int = 0
    """The number of new bytes."""
    failed: dict[str, str] = field(default_factory=dict)
    """Node → why its logs were not fetched."""

    def text(self) -> str:
        """Return the result as text for the user."""
        nodes = f"{self.num_nodes} node" + ("" if self.num_nodes == 1 else "s")
        lines = [f"logs of {nodes} are in {_shown(self.folder)} ({self.num_bytes / 1e6:.1f} MB new)"]
        return "\n".join([*lines, *(f"not fetched: {why}" for why in self.failed.values())])


@dataclass(frozen=True, kw_only=True)
class Copy:
    """The fetched logs of one node."""

    source: Source
    time: float
    """When they were fetched, in seconds since 1970."""
    is_whole: bool
    """Whether the run had ended, and was not resumed since, so that they are complete."""

    def line(self) -> str:
        """Return the notice to print when the copy is shown in place of the node's own logs."""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.time))
        return f"{self.source.node}: this is the copy that was fetched {when}"


def folder_of(run: Run) -> Path:
    """Return the folder for the fetched logs of a run."""
    return run.folder / "logs"


def copies(run: Run) -> dict[str, Copy]:
    """Return node → its fetched logs."""
    folder = folder_of(run)
    found = {}
    for node, each in _read(folder).items():
        found[node] = Copy(
            source=Source(node=node, folder=str(folder / node), clock_offset=each["clock_offset"]),
            time=each["time"],
            # A run that was resumed after it was stopped has another generation.
            is_whole=each["is_over"] and each["generation"] == run.generation,
        )
    return found


def sources_of(record: Run, channels: Mapping[str, HostChannel]) -> list[Source]:
    """Return the logs of those nodes of a run that have a channel."""
    return [
        Source(
            node=name,
            folder=f"{record.nodes[name]['node_dir']}/logs",
            clock_offset=record.clock_offsets.get(name, 0.0),
            channel=channel,
        )
        for name, channel in channels.items()
        if name in record.nodes
    ]


def fetch_run(
    run: Run,
    channels: Mapping[str, HostChannel],
    output: str | None = None,
    *,
    nodes: Sequence[str] = (),
    record: Run | None = None,
) -> Fetched:
    """Copy the logs of `nodes`, by default of all, if they have a channel; other nodes' copies stay as they are.

    Args:
        run: the run, as recorded on this machine.
        channels: node → channel.
        output: the folder to copy to; None for the run's own.
        nodes: the nodes to copy from; empty for all.
        record: the run as its supervisor has it, if that is on another machine.
    """
    record = record or run
    wanted = {name: channel for name, channel in channels.items() if name in (nodes or record.nodes)}
    fetched = fetch(sources_of(record, wanted), Path(output) if output else folder_of(run), run)
    for name in nodes or record.nodes:
        if name not in channels:
            fetched.failed[name] = f"{name} cannot be reached"
    return fetched


def fetch(sources: Sequence[Source], folder: Path, run: Run) -> Fetched:
    """Copy the logs of some nodes into ``folder/NODE``."""
    from nodekit.deploy.records import runs

    fetched = Fetched(folder)
    try:
        make_private(folder)
    except OSError as error:
        raise KitError(f"{folder}: cannot be made to fetch logs to ({error.strerror})") from error
    with _alone(folder):
        results = on_all({each.node: each for each in sources}, lambda each: _fetch(each, folder / each.node))
        _take_down(sources, results, fetched, run, is_over=run.state in runs.ENDED)
    return fetched


def _take_down(
    sources: Sequence[Source],
    results: Mapping[str, int | Exception],
    fetched: Fetched,
    run: Run,
    *,
    is_over: bool,
) -> None:
    """Record which logs were fetched and when, and add the outcome to `fetched`."""
    told = _read(fetched.folder)
    for source in sources:
        result = results[source.node]
        if isinstance(result, KitError):
            fetched.failed[source.node] = str(result)
        elif isinstance(result, OSError):
            fetched.failed[source.node] = f"{source.node}: cannot be written here ({result})"
        elif isinstance(result, Exception):
            raise result
        else:
            fetched.num_nodes += 1
            fetched.num_bytes += result
            told[source.node] = {
                "time": time.time(),
                "clock_offset": source.clock_offset,
                "generation": run.generation,
                "is_over": is_over,
            }
    write_private(str(fetched.folder / FILE), json.dumps(told, indent=1).encode())


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    from nodekit.deploy.records import locks

    file = locks.locked(folder / "lock")
    if file is None:
        raise KitError(f"{_shown(folder)}: another kit is fetching logs to it", cure="wait for that one")
    with file:
        yield


def at_the_end(run: Run, channels: Mapping[str, HostChannel], say: Callable[[str], None]) -> None:
    """Fetch the logs of a run that has ended, for `logs: {fetch: true}`; failures do not change its outcome."""
    say("fetching the logs")
    quietly(lambda: fetch_run(run, dict(channels)), run, say)


def quietly(fetch: Callable[[], Fetched], run: Run, say: Callable[[str], None]) -> None:
    """Call `fetch` and report its result or failure to the user; Ctrl-C ends only the fetch."""
    try:
        say(fetch().text())
    except (KitError, OSError) as error:
        say(f"not fetched: {error}")
    except KeyboardInterrupt:
        say(f"not all fetched: kit logs {run.run_id} --fetch goes on with it")


def _fetch(source: Source, folder: Path) -> int:
    """Bring a node's copies up to date; return the number of bytes that were transferred."""
    folder.mkdir(mode=0o700, exist_ok=True)
    num_bytes = 0
    for name, (size, changed) in source.call("files").items():
        path = folder / os.path.basename(name)  # noqa: PTH119  # never outside of `folder`, whatever a host sends
        is_marks = name.endswith(".times")  # small files that the host may have rewritten: copy them whole
        if path.exists():
            there = path.stat()
            if is_marks and there.st_size == size and abs(there.st_mtime - changed) < 1e-3:
                continue
        else:
            path.touch(mode=0o600)
        with path.open("r+b") as file:
            at = file.seek(0, os.SEEK_END)
            if at > size or is_marks:
                at = 0
                file.truncate(0)
            while at < size:
                piece = source.call("piece", file=name, start=at)
                data = zlib.decompress(base64.b64decode(piece["data"])) if piece["data"] else b""
                if not data and piece["begin"] <= at:
                    break  # the file is gone on the host
                file.seek(piece["begin"])  # keep holes as holes
                file.write(data)
                at = piece["begin"] + len(data)
                num_bytes += len(data)
            file.truncate(at)
        os.utime(path, (changed, changed))
    return num_bytes


def _read(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _shown(path: Path) -> str:
    home = str(Path.home())
    return f"~{str(path)[len(home) :]}" if str(path).startswith(home + "/") else str(path)
