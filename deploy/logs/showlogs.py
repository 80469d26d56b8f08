"""`kit logs`: shows the output of a run's ranks on all nodes, in the order of time."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nodekit.deploy.logs.reader import Reader
from nodekit.deploy.records.loglines import (
    Source,
    Wanted,
    style_of,
)
from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from nodekit.deploy.backend import Backend
    from nodekit.deploy.connect.channel import HostChannel
    from nodekit.deploy.connect.cluster import SshOptions
    from nodekit.deploy.records.fetchlogs import Copy
    from nodekit.deploy.records.runs import Run
    from nodekit.inventory.schema import Host


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `kit logs`."""

    wanted: Wanted
    """The lines to show."""
    follow: bool = False
    """Whether to show new lines until the run ends."""
    times: bool = False
    """Whether to print date and time before each line."""
    json: bool = False
    fetch: bool = False
    """Whether to copy all logs to this machine, in place of showing them."""
    output: str | None = None
    """The folder that `fetch` copies to; None for the run's own on this machine."""
    ssh: SshOptions


def pick_nodes(run: Run, wanted: Wanted, there: Sequence[str]) -> list[str]:
    """Return the selected nodes of those that exist.

    Raises:
        KitError: a selected node does not exist.
    """
    for name in wanted.nodes:
        if name not in there:
            raise KitError(f"{run.run_id} has no node '{name}'; it has {', '.join(there)}")
    return [name for name in there if not wanted.nodes or name in wanted.nodes]


def logs(run: Run, options: Options) -> int:
    """Show or fetch the output of a run; return 1 if the logs of a node could not be read, else 0."""
    from nodekit.deploy.backend import backend_of
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.records import fetchlogs, runs

    backend = backend_of(run)
    hosts = backend.hosts(run, spare=not options.fetch)
    # Under Slurm only the job's leader knows its nodes, so `known` may be empty.
    known = [node for host in hosts for node in backend.nodes_at(run, host)]
    names = pick_nodes(run, options.wanted, known) if known else []
    copies = fetchlogs.copies(run)
    ran = [name for name in known if name in run.nodes] if known else list(copies)
    asked = [name for name in ran if name in names or not known]
    is_whole = bool(copies) and all(name in copies and copies[name].is_whole for name in asked)
    if run.state in runs.ENDED and is_whole and not options.fetch:
        return _show_copies_of(run, options, known or ran, copies)
    with contextlib.ExitStack() as stack:
        wanted = [name for name in hosts if not known or not {*names}.isdisjoint(backend.nodes_at(run, name))]
        try:
            channels = stack.enter_context(
                cluster.channels([hosts[name] for name in wanted], options.ssh, some=bool(known))
            )
        except KitError as error:
            if not copies or options.follow or options.fetch:
                raise
            print(f"kit: {error}", file=sys.stderr, flush=True)
            return _show_copies_of(run, options, ran, copies)
        record = backend.record(run, channels)
        if record is None:
            now = "; ".join(backend.status(run, options.ssh).lines)
            raise KitError(f"{run.run_id} has not started: {now}")
        if not options.fetch:
            return _show(run, options, backend, record, hosts, channels)
        nodes = [node for host in hosts for node in backend.nodes_at(record, host)]
        by_node = {node: channels[host] for host in channels for node in backend.nodes_at(record, host)}
        names = pick_nodes(run, options.wanted, nodes)
        fetched = fetchlogs.fetch_run(run, by_node, options.output, nodes=names, record=record)
        print(fetched.text())
        return 1 if fetched.failed else 0


def _show_copies_of(run: Run, options: Options, nodes: Sequence[str], copies: Mapping[str, Copy]) -> int:
    style = style_of(nodes, sys.stdout, times=options.times, as_json=options.json)
    names = pick_nodes(run, options.wanted, nodes)
    return show_copies(
        Reader(nodes, options.wanted, style), [copies[name] for name in names if name in copies]
    )


def _show(
    run: Run,
    options: Options,
    backend: Backend,
    record: Run,
    hosts: Mapping[str, Host],
    channels: dict[str, HostChannel],
) -> int:
    """Show the logs on the nodes, and for unreachable nodes the fetched copies; return the exit status."""
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.logs.logfollow import Followed, Follower
    from nodekit.deploy.records import fetchlogs, runs

    nodes = [node for host in hosts for node in backend.nodes_at(record, host)]
    names = pick_nodes(run, options.wanted, nodes)

    def sources_at(host: str, record: Run) -> list[Source]:
        own = [
            node for node in backend.nodes_at(record, host) if node in (options.wanted.nodes or record.nodes)
        ]
        return fetchlogs.sources_of(record, dict.fromkeys(own, channels[host]))

    style = style_of(nodes, sys.stdout, times=options.times, as_json=options.json)
    reader = Reader(nodes, options.wanted, style)
    sources = [source for host in channels for source in sources_at(host, record)]
    is_over = run.state in runs.ENDED
    if not options.follow or is_over:
        copies = fetchlogs.copies(run)
        missing = [name for name in names if name in record.nodes.keys() - {each.node for each in sources}]
        reader.failed.update(name for name in missing if name not in copies)
        return show_copies(reader, [copies[name] for name in missing if name in copies], sources)
    reader.choose(sources)
    offsets = reader.read(sources, final=False)

    def opened(host: str) -> list[Source]:
        if host not in channels or channels[host].is_lost:
            channels[host] = cluster.open_channel(hosts[host], options.ssh)
        return sources_at(host, backend.record(run, channels) or record)  # nodes may join later

    follower = Follower(reader, nodes, offsets)
    followed = [
        Followed(
            name=host,
            open=functools.partial(opened, host),
            node_dir=record.nodes[host]["node_dir"] if host in record.nodes else None,
        )
        for host in hosts
        if not {*names}.isdisjoint(backend.nodes_at(record, host))
    ]
    follower.lost.update(each.name for each in followed if each.name not in channels)
    follower.run(followed, lambda gone: backend.is_over(run, channels, all_gone=gone), poll_s=backend.poll_s)
    return 1 if follower.lost or reader.failed else 0


def show_copies(reader: Reader, copies: Sequence[Copy], sources: Sequence[Source] = ()) -> int:
    """Print fetched copies, with a notice for each, and logs on the nodes; return the exit status."""
    for copy in copies:
        print(f"kit: {copy.line()}", file=sys.stderr, flush=True)
    return conclude(reader, [*sources, *(copy.source for copy in copies)])


def conclude(reader: Reader, sources: Sequence[Source]) -> int:
    """Print all selected lines, or a notice if there are none; return the exit status."""
    reader.choose(sources)
    reader.read(sources)
    if not reader.num_lines and not reader.failed:
        names = ", ".join(each.node for each in sources)
        ranks = reader.other_ranks(sources)
        is_span = len(ranks) > 1 and len(ranks) == ranks[-1] - ranks[0] + 1
        those = f"ranks {ranks[0]} to {ranks[-1]}" if is_span else f"rank {', '.join(map(str, ranks))}"
        there = f", which are of {those}" if ranks else ""
        print(
            f"kit: no such line in the logs of {names}{there}" if names else "kit: no logs", file=sys.stderr
        )
    return 1 if reader.failed else 0
