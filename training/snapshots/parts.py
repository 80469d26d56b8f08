"""Sharded snapshots whose files are on several nodes: which node keeps which files, and which are sent at a start.

Each file is on two nodes, that of the rank that has written it and the next one. So any one node may be lost, and the
others have all files between them. At a start, each node is sent the files that its ranks read, and lost copies are
replaced.
"""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import gethostname

from nodekit.training.snapshots.files import commit
from nodekit.training.snapshots.files.found import NoneLoads
from nodekit.training.snapshots.files.manifest import Damaged, Loaded, Manifest, verify
from nodekit.training.snapshots.files.shards import METADATA, REST
from nodekit.training.snapshots.peers import Peers, Transfer
from nodekit.training.snapshots.snapshot import Snapshots, log
from nodekit.training.world import World


def keepers(places: Sequence[int], hosts: Sequence[str]) -> list[int | None]:
    """Return for each rank the rank that keeps a copy of its files; None for all if all see one folder.

    The keeper is on the next folder in a ring, preferably the next one on another host, since a host fails as a whole.

    Args:
        places: for each rank, the lowest rank that sees the same folder.
        hosts: for each rank, the host it runs on.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        members[place].append(rank)
    ring = sorted(members)
    found: list[int | None] = []
    for rank, place in enumerate(places):
        at = ring.index(place)
        others = [*ring[at + 1 :], *ring[:at]]
        following = next((each for each in others if hosts[each] != hosts[place]), next(iter(others), None))
        if following is None:
            found.append(None)
        else:
            there = members[following]
            found.append(there[members[place].index(rank) % len(there)])
    return found


def transfers(
    manifest: Manifest, holders: Mapping[str, Sequence[int]], wanted: Mapping[int, set[str]]
) -> list[Transfer]:
    """Plan transfers that give each rank the files it wants; the least busy holder of a file sends it.

    Args:
        manifest: of the snapshot.
        holders: file name → the ranks that have it.
        wanted: rank → the names of the files that it wants.
    """
    found: list[Transfer] = []
    busy_bytes: Counter[int] = Counter()
    for name, (sha256, size_bytes) in manifest.parts.items():
        for target in sorted(wanted):
            if name in wanted[target] and target not in holders[name]:
                source = min(holders[name], key=lambda rank: (busy_bytes[rank], rank))
                busy_bytes[source] += size_bytes
                found.append(Transfer(name, sha256, size_bytes, source, target))
    return found


def everywhere_in_parts(snapshots: Snapshots, world: World, manifest: Manifest) -> tuple[Loaded | None, str]:
    """Load a sharded snapshot on every rank, or return None on every rank with the reason; every rank calls it.

    Raises:
        NoneLoads: on all ranks, if the files that a node lacks cannot be sent to it.
    """
    spread = _Spread(snapshots, world, manifest)
    if spread.problem:
        return None, spread.problem
    spread.fetch({METADATA, REST} if snapshots.leave_shards else set(manifest.parts))
    spread.make_up_for_lost_copies()
    if world.is_first_on_node:
        snapshots.adopt(manifest)
    loaded = None
    try:
        loaded = replace(commit.retried(partial(snapshots.read_parts, manifest)), fetch=spread.fetch)
    except OSError as error:
        log.warning("snapshot %s cannot be read: %s", snapshots.folder / manifest.name, error)
    are_good = all(world.gather(loaded is not None))
    return loaded if are_good else None, "not all ranks could read what had been verified"


class _Spread:
    """The spread of a sharded snapshot's files over the nodes, and sends between these; all ranks make equal calls."""

    def __init__(self, snapshots: Snapshots, world: World, manifest: Manifest) -> None:
        """Verify the files in each node's folder, on its first rank; all ranks call it.

        Files count also if the manifest is not there, as on a node that was killed before it could commit.
        """
        self._snapshots, self._world, self._manifest = snapshots, world, manifest
        held, unread = _held(snapshots.folder, manifest) if world.is_first_on_node else (set(), [])
        said = world.gather((world.node_rank, world.is_first_on_node, gethostname(), held, unread))
        self._firsts = [rank for rank, (_, is_first, *_) in enumerate(said) if is_first]
        first_of = {said[rank][0]: rank for rank in self._firsts}
        self._first_of_rank = [first_of[node] for node, *_ in said]
        self._hosts = [said[rank][2] for rank in self._firsts]
        self._holders = {
            name: [rank for rank in self._firsts if name in said[rank][3]] for name in manifest.parts
        }
        self.problem = ""
        """Why the snapshot cannot be loaded; "" if each of its files is on some node."""
        if missing := [f"{manifest.payload}/{name}" for name, ranks in self._holders.items() if not ranks]:
            problems = [text for *_, unread in said for text in unread]
            self.problem = "; ".join([f"no node that is here has {manifest.tell(missing)}", *problems])
            if world.is_first_on_node:
                _pass_over(snapshots, manifest, OSError(self.problem) if problems else Damaged(self.problem))

    def fetch(self, names: Collection[str]) -> None:
        """Get these files onto this rank's node; every rank calls it, with names of its own.

        Raises:
            NoneLoads: on all ranks, if the files that a node lacks cannot be sent to it.
        """
        wanted: dict[int, set[str]] = {first: set() for first in self._firsts}
        for first, each in zip(self._first_of_rank, self._world.gather(set(names)), strict=True):
            wanted[first] |= each
        if problems := self._send(wanted):
            raise NoneLoads(
                f"the snapshot {self._manifest.name} is there, and some nodes could not be given what they lack of it: "
                f"{'; '.join(problems)}. Make room or mend the disk, and start again: nothing was removed"
            )

    def make_up_for_lost_copies(self) -> None:
        """Copy each file that is on one node only to another; log a failure, since no rank needs the copies now."""
        following = keepers(range(len(self._firsts)), self._hosts)
        wanted: dict[int, set[str]] = {first: set() for first in self._firsts}
        for name, ranks in self._holders.items():
            if len(ranks) == 1 and (number := following[self._firsts.index(ranks[0])]) is not None:
                wanted[self._firsts[number]].add(name)
        if (problems := self._send(wanted)) and self._world.is_main:
            log.warning("%s is not on two nodes again: %s", self._manifest.name, "; ".join(problems))

    def _send(self, wanted: Mapping[int, set[str]]) -> list[str]:
        """Send files to the ranks that want them; return the errors of all ranks."""
        sent = transfers(self._manifest, self._holders, wanted)
        if not sent:
            return []
        self._world.stage("sending parts of the snapshot to nodes that lack them")
        if self._snapshots.peers is None:
            self._snapshots.peers = Peers(self._world)
        peers, problem = self._snapshots.peers, ""
        try:
            peers.send_files(self._snapshots.folder / self._manifest.payload, sent)
        except OSError as error:
            problem = f"node {self._world.node_rank} ({gethostname()}): {error}"
        problems = peers.gather(problem)
        for each in sent:
            if not problems[each.target]:
                self._holders[each.name].append(each.target)
        return [text for text in problems if text]


def _held(folder: Path, manifest: Manifest) -> tuple[set[str], list[str]]:
    """Return the names of the files that are here and intact, and the errors of files that cannot be read."""
    until_s = time.monotonic() + commit.RETRY_S

    def is_held(name: str) -> bool | str:
        try:
            commit.retried(partial(verify, folder, manifest, f"{manifest.payload}/{name}"), until_s)
        except commit.NOT_FOUND:
            return False
        except Damaged as error:
            log.warning("%s of snapshot %s is passed over: %s", name, folder / manifest.name, error)
            return False
        except OSError as error:
            return f"{folder / manifest.payload / name}: {error}"
        return True

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing takes a core each
        found = dict(zip(manifest.parts, pool.map(is_held, manifest.parts), strict=True))
    held = {name for name, is_held in found.items() if is_held is True}
    return held, [text for text in found.values() if isinstance(text, str)]


def _pass_over(snapshots: Snapshots, manifest: Manifest, error: Exception) -> None:
    """Log why a snapshot cannot be loaded, if its manifest is here; the next save removes it if it is `Damaged`."""
    try:
        is_here = manifest in snapshots.manifests()
    except OSError:
        is_here = False
    if is_here:
        snapshots.reject(manifest.name, error)
