"""`kit logs`: what the ranks of a run have written, on all nodes, in the order of time."""

from __future__ import annotations

import functools
import heapq
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nodekit.deploy.logs.loglines import (
    Line,
    Source,
    Style,
    Wanted,
    lines_of,
    pick_attempts,
    style_of,
)
from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from nodekit.deploy.connect.cluster import SshOptions
    from nodekit.deploy.connect.link import Link
    from nodekit.deploy.logs.fetchlogs import Copy
    from nodekit.deploy.records.runs import Run

BATCH_S = 0.1


# --- what is there ------------------------------------------------------------------------------------------


class _Pages:
    """The lines of one source, in the order of time; the next page is fetched while one is read."""

    def __init__(
        self, source: Source, wanted: Mapping[str, Any], *, offsets: Mapping[str, int], final: bool
    ) -> None:
        self.source = source
        self.offsets = dict(offsets)
        self.error: Exception | None = None
        self._wanted = dict(wanted)
        self._final = final
        self._pages: queue.Queue[list[Line] | None] = queue.Queue(maxsize=2)
        threading.Thread(target=self._fetch, daemon=True).start()

    def _fetch(self) -> None:
        sizes = None
        try:
            while True:
                found = self.source.call(
                    "page",
                    offsets=self.offsets,
                    sizes=sizes,
                    final=self._final,
                    limited=self.source.link is not None,
                    **self._wanted,
                )
                self.offsets, sizes = found["offsets"], found["sizes"]
                self._pages.put(lines_of(self.source, found["lines"]))
                if not found["more"]:
                    break
        except Exception as error:  # told by who reads
            self.error = error
        self._pages.put(None)

    def __iter__(self) -> Iterator[Line]:
        while True:
            try:
                page = self._pages.get(timeout=0.2)  # a bare get would not let Ctrl-C through
            except queue.Empty:
                continue
            if page is None:
                return
            yield from page


class Reader:
    """Prints the lines of some nodes."""

    def __init__(self, nodes: Sequence[str], wanted: Wanted, style: Style) -> None:
        """Nothing happens yet; `nodes` are all there are, in their order."""
        self.failed: set[str] = set()
        """Nodes whose lines could not all be read."""
        self.num_lines = 0
        self._nodes = tuple(nodes)
        self._wanted = wanted
        self._style = style
        self._attempts: list[str] | None = None
        self._last: list[str] | None = None

    def choose(self, sources: Sequence[Source]) -> None:
        """Find out which attempts are meant."""
        if not self._wanted.attempt:
            return
        from nodekit.deploy.connect.link import on_all

        found = on_all({each.node: each for each in sources}, lambda each: each.call("listing"))
        for node, result in found.items():
            if isinstance(result, Exception):
                self._lost(node, result)
        there = [
            log["attempt"] for result in found.values() if not isinstance(result, Exception) for log in result
        ]
        if there or not self.failed:
            self._attempts = pick_attempts(self._wanted.attempt, there)

    def told(self, source: Source) -> dict[str, Any]:
        """What a node is told of what is wanted."""
        return self._wanted.on_host(self._attempts, source.clock_offset)

    def read(
        self,
        sources: Sequence[Source],
        *,
        offsets: Mapping[str, Mapping[str, int]] | None = None,
        final: bool = True,
    ) -> dict[str, dict[str, int]]:
        """Print all there is; how far each node has been read.

        Args:
            sources: where.
            offsets: node → how far it has been read already.
            final: also a last line that has no end yet.
        """
        order = {node: place for place, node in enumerate(self._nodes)}
        sources = sorted(sources, key=lambda each: order.get(each.node, len(order)))
        pages = [
            _Pages(source, self.told(source), offsets=(offsets or {}).get(source.node, {}), final=final)
            for source in sources
        ]
        batch: list[Line] = []
        printed = time.monotonic()
        for line in heapq.merge(*pages, key=lambda line: line.time):
            batch.append(line)
            if len(batch) == 256 or time.monotonic() - printed > BATCH_S:
                self.print(batch)
                batch, printed = [], time.monotonic()
        self.print(batch)
        for each in pages:
            if each.error is not None:
                self._lost(each.source.node, each.error)
        return {each.source.node: each.offsets for each in pages}

    def print(self, lines: Sequence[Line]) -> None:
        """Print lines that stand in their order."""
        if lines:
            self.num_lines += len(lines)
            print("\n".join(text for line in lines for text in self._style.shown(line)), flush=True)

    def _lost(self, node: str, error: Exception) -> None:
        from nodekit.deploy.connect.link import LinkLost
        from nodekit.deploy.host.logs.logread import MATCH_S

        if not isinstance(error, KitError):
            raise error
        self.failed.add(node)
        hint = ""
        if self._wanted.grep and isinstance(error, LinkLost):
            hint = f" (a --grep that takes longer than {MATCH_S} s is ended there)"
        print(f"kit: {error}{hint}", file=sys.stderr, flush=True)


# --- kit logs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `kit logs` is asked for."""

    wanted: Wanted
    """Which lines."""
    follow: bool = False
    """Go on until the run ends."""
    times: bool = False
    """Date and time before each line."""
    json: bool = False
    fetch: bool = False
    """Copy all logs to this machine, in place of showing them."""
    output: str | None = None
    """With `fetch`: to this folder."""
    ssh: SshOptions


def pick_nodes(run: Run, wanted: Wanted, there: Sequence[str]) -> list[str]:
    """The nodes that are meant, of all there are.

    Raises:
        KitError: there is no such node.
    """
    for name in wanted.nodes:
        if name not in there:
            raise KitError(f"{run.run_id} has no node '{name}'; it has {', '.join(there)}")
    return [name for name in there if not wanted.nodes or name in wanted.nodes]


def logs(run: Run, options: Options) -> int:
    """Show the output of a run, or fetch it; the exit status is 1 where a node's could not be read."""
    if run.slurm:
        from nodekit.slurm import show as slurm_show

        return slurm_show.logs(run, options)
    return _fetch(run, options) if options.fetch else _show(run, options)


def _fetch(run: Run, options: Options) -> int:
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.logs import fetchlogs
    from nodekit.deploy.ssh_backend import up

    hosts = [host for host in up.inventory_of(run).hosts if host.name in run.nodes]
    names = pick_nodes(run, options.wanted, [host.name for host in hosts])
    chosen = [host for host in hosts if host.name in names]
    with cluster.links(chosen, options.ssh, some=True) as links:
        fetched = fetchlogs.fetch_run(run, links, options.output, nodes=names)
    print(fetched.text())
    return 1 if fetched.failed else 0


def _show(run: Run, options: Options) -> int:
    """Of a run that has its own hosts."""
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.logs import fetchlogs
    from nodekit.deploy.logs.logfollow import Followed, Follower
    from nodekit.deploy.records import runs
    from nodekit.deploy.ssh_backend import up

    hosts = {host.name: host for host in up.inventory_of(run).hosts}
    nodes = list(hosts)
    names = pick_nodes(run, options.wanted, nodes)
    style = style_of(nodes, sys.stdout, times=options.times, as_json=options.json)
    reader = Reader(nodes, options.wanted, style)
    copies, is_over = fetchlogs.copies(run), run.state in runs.ENDED
    if is_over and all(name in copies and copies[name].is_whole for name in names if name in run.nodes):
        return show_copies(reader, [copies[name] for name in names if name in copies])

    def source(name: str, link: Link) -> Source:
        folder = f"{run.nodes[name]['node_dir']}/logs"
        return Source(node=name, folder=folder, clock_offset=run.clock_offsets.get(name, 0.0), link=link)

    with cluster.links([hosts[name] for name in names], options.ssh, some=True) as links:
        sources = [source(name, link) for name, link in links.items() if name in run.nodes]
        missing = [name for name in names if name not in links]
        if not options.follow or is_over:
            reader.failed.update(name for name in missing if name in run.nodes and name not in copies)
            return show_copies(reader, [copies[name] for name in missing if name in copies], sources)
        reader.choose(sources)
        offsets = reader.read(sources, final=False)

        def opened(name: str) -> list[Source]:
            if links.get(name) is None or links[name].is_lost:
                links[name] = cluster.open_link(hosts[name], options.ssh)
            if name not in run.nodes:
                run.reload()  # it may come in later
            return [source(name, links[name])] if name in run.nodes else []

        def has_ended(all_gone: bool) -> bool:
            run.reload()
            return run.state in runs.ENDED or (all_gone and not runs.is_supervised(run))

        follower = Follower(reader, nodes, offsets)
        follower.lost.update(missing)
        follower.run(
            [
                Followed(
                    name=name,
                    open=functools.partial(opened, name),
                    node_dir=run.nodes[name]["node_dir"] if name in run.nodes else None,
                )
                for name in names
            ],
            has_ended,
        )
        return 1 if follower.lost or reader.failed else 0


def show_copies(reader: Reader, copies: Sequence[Copy], sources: Sequence[Source] = ()) -> int:
    """Print what was fetched, and what is on the nodes; the exit status."""
    for copy in copies:
        print(f"kit: {copy.line()}", file=sys.stderr, flush=True)
    return conclude(reader, [*sources, *(copy.source for copy in copies)])


def conclude(reader: Reader, sources: Sequence[Source]) -> int:
    """Print all there is; the exit status."""
    reader.choose(sources)
    reader.read(sources)
    if not reader.num_lines and not reader.failed:
        names = ", ".join(each.node for each in sources)
        print(f"kit: no such line in the logs of {names}" if names else "kit: no logs", file=sys.stderr)
    return 1 if reader.failed else 0
