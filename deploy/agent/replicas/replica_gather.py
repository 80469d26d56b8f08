"""Before a round: let the members agree on the files that every folder must have, and bring this node's to that state.

For each name the newest version wins. Only nodes that took part in the newest agreement that any member knows of have a
vote, so a node that was away cannot bring back its old files, however new they look.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nodekit.deploy.agent import agent_wire, descriptors
from nodekit.deploy.agent.agent_wire import Wire
from nodekit.deploy.agent.replicas.replica_copies import Copies
from nodekit.deploy.agent.replicas.replica_files import (
    BROKEN,
    NEVER,
    Attempt,
    Known,
    Listing,
    Mark,
    Scan,
    UserFiles,
    Version,
    mark_of,
    open_file,
    scan,
    sha256_of,
)
from nodekit.deploy.host.schema import Say
from nodekit.training.snapshots.files import commit

_MAX_CALLS = 16
_NUM_TRIES = 2
"""How often to ask a member for a file: its connection may break, or it may be unable to read that file."""


@dataclass(frozen=True, slots=True)
class Here:
    """What the threads of one node's replication share."""

    name: str
    token: str
    files: UserFiles
    copies: Copies
    tell: Say

    def scan(self) -> Scan:
        """Scan the user's folder, and report the files that will not be copied."""
        found = scan(self.files.folder)
        for name, why in found.refused.items():
            self.tell("replica-refused", file=name, reason=why)
        return found

    def fail(self, error: Exception, **fields: str) -> None:
        """Report an error."""
        # Without the name of a draft, which differs each time and would make each report a new one.
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self.tell("replica-failed", **fields, reason=reason)

    @contextlib.contextmanager
    def failing(self, **fields: str) -> Iterator[None]:
        """Report an OSError instead of raising it."""
        try:
            yield
        except OSError as error:
            self.fail(error, **fields)


def after(name: str, peers: Iterable[str]) -> list[str]:
    """Return the other members in ring order, from the one after `name`."""
    ring = list(peers)
    here = ring.index(name)
    return ring[here + 1 :] + ring[:here]


def agree(own: Iterable[Listing], kept: Iterable[Listing]) -> tuple[Attempt, dict[str, list[Version]]]:
    """Return the newest agreement's attempt, and name → its versions, newest first, or its deletion alone.

    Args:
        own: the members' listings of their own folders.
        kept: the listings of other nodes' folders that they keep.
    """
    # A member's own listing counts first, unless others keep one from a newer agreement.
    ranked = [(each.attempt, True, each.told_ns, each) for each in own]
    ranked += [(each.attempt, False, each.told_ns, each) for each in kept]
    by_node = {each[-1].node: each[-1] for each in sorted(ranked, key=lambda each: each[:-1])}
    newest = max((listing.attempt for listing in by_node.values()), default=NEVER)
    versions: dict[str, set[Version]] = {}
    for listing in by_node.values():
        # Take an entirely emptied folder for an accident (rm -rf on one node), not for the pruning of old snapshots.
        is_emptied = all(version.is_gone for version in listing.files.values())
        for name, version in listing.files.items():
            # A node that missed the newest agreement has a vote only on the files that it wrote since.
            has_say = listing.attempt == newest or version.written >= newest
            if has_say and not (is_emptied and version.is_gone):
                versions.setdefault(name, set()).add(version)
    agreed = {name: _until_gone(each) for name, each in versions.items()}
    there = [name for name, each in agreed.items() if not each[0].is_gone]
    folders = {str(above) for name in there for above in PurePosixPath(name).parents}
    for name in folders.intersection(there):  # a file and a folder of one name cannot both be
        del agreed[name]
    return newest, agreed


def _until_gone(versions: Iterable[Version]) -> list[Version]:
    """Return the versions newest first, each content once, none older than a deletion; or the deletion if none is."""
    chosen: dict[tuple[str, str], Version] = {}
    for version in sorted(versions, reverse=True):
        if version.is_gone:
            return list(chosen.values()) or [version]
        chosen.setdefault(version.content, version)
    return list(chosen.values())


@dataclass(slots=True, kw_only=True)
class Gathered:
    """The result of a gather."""

    num_files: int = 0
    """How many of the agreed files this node has now."""
    num_fetched: int = 0
    """How many files had to be put into its folder."""
    set_aside: list[str] = field(default_factory=list)
    """Files of this node that were not agreed on, and were moved away."""
    lost: list[str] = field(default_factory=list)
    """Files whose newest version no member has intact; an older one is in place if there was one."""
    missing: list[str] = field(default_factory=list)
    """Files that could not be written to this node's folder, or fetched from the members that have them."""
    silent: dict[str, str] = field(default_factory=dict)
    """Member → why it did not answer, or does not any more."""
    gone: list[str] = field(default_factory=list)
    """Members that sent their listings, but were unreachable when asked for a file."""
    seconds: float = 0.0


class Gather:
    """One node's part in one gather: hear the other members, agree, and fill this node's folder."""

    def __init__(self, here: Here, attempt: Attempt, peers: Mapping[str, str]) -> None:
        # In ring order from this node, so that the nodes do not all ask the same member first.
        self._peers = {node: peers[node] for node in after(here.name, peers)}
        self._here, self._files, self._copies, self._attempt = here, here.files, here.copies, attempt
        self._wires: dict[str, Wire] = {}
        self._holders: dict[str, set[str]] = {}  # content → the members that have it
        self._is_joined = False
        self.gathered = Gathered()

    def run(self, own: Listing, found: Scan, deadline_s: float) -> bool:
        """Run the gather; return whether a majority of members answered: if not, the others may have newer versions.

        If this process is killed at any point, every version of every file is still somewhere on this node's disk.

        Args:
            own: the listing of this node's folder.
            found: a scan of this node's folder.
            deadline_s: how long to wait for a member that sends nothing.

        Raises:
            OSError: a file that was not agreed on cannot be removed, or no descriptor is left.
        """
        try:
            heard = self._hear(deadline_s)
            self._is_joined = 2 * (1 + len(heard)) > 1 + len(self._peers)
            kept = [*self._copies.listings.values(), *(each for _, kept in heard.values() for each in kept)]
            newest, agreed = agree([own, *(each for each, _ in heard.values())], kept)
            self._fill(found, agreed, is_behind=own.attempt != newest)
            return self._is_joined
        finally:
            for wire in self._wires.values():
                wire.close()

    # --- asking ---

    def _hear(self, deadline_s: float) -> dict[str, tuple[Listing, list[Listing]]]:
        """Ask all members; return member → the listing of its folder, and the listings that it keeps for others."""
        heard: dict[str, tuple[Listing, list[Listing]]] = {}

        def ask(node: str) -> None:
            try:
                heard[node] = self._listings_of(node, deadline_s)
            except BROKEN as error:
                if isinstance(error, OSError) and descriptors.are_used_up(error):
                    raise  # this is this node's fault, and says nothing about the member
                self._give_up(node, error)

        with ThreadPoolExecutor(min(len(self._peers), _MAX_CALLS) or 1) as pool:
            try:
                list(pool.map(ask, self._peers))
            except BaseException:  # the agent is asked to stop
                for wire in list(self._wires.values()):
                    wire.abort()
                raise
        for node, (own, kept) in heard.items():
            for sha256 in own.content.union(*(each.content for each in kept)):
                self._holders.setdefault(sha256, set()).add(node)
        return heard

    def _listings_of(self, node: str, deadline_s: float) -> tuple[Listing, list[Listing]]:
        def announce(wire: Wire) -> None:
            self._wires[node] = wire

        until = time.monotonic() + deadline_s
        connect_s = min(deadline_s, agent_wire.CONNECT_S)
        wire = agent_wire.connect(self._peers[node], self._here.token, connect_s, announce)
        wire.send({"op": "list", "attempt": self._attempt})
        while True:
            answer = wire.receive(until - time.monotonic())
            if "own" in answer:
                own = Listing.of(answer["own"])
                if own.node != node:
                    raise ValueError(f"{own.node} answered in its place")
                return own, [Listing.of(each) for each in answer["kept"]]
            if answer["is_reading"]:  # the member has entered this attempt, and scans its files
                until = time.monotonic() + deadline_s
            if time.monotonic() > until:
                raise TimeoutError("it did not come to this attempt in time")

    def _give_up(self, node: str, error: Exception) -> None:
        if wire := self._wires.pop(node, None):
            wire.close()
        self.gathered.silent[node] = str(error) or type(error).__name__

    # --- having ---

    def _fill(self, found: Scan, agreed: Mapping[str, list[Version]], *, is_behind: bool) -> None:
        """Get drafts of all missing files; then move away, put in place, and delete files.

        Args:
            found: a scan of this node's folder.
            agreed: name → its versions, newest first, or its deletion.
            is_behind: whether this node missed the newest agreement; then no file of it is deleted, only moved away.
        """
        mine = {
            name: known.version
            for name, known in self._files.known.items()
            if name in found.files and known.mark == found.files[name].mark
        }
        decided: dict[str, Version] = {}
        drafts: dict[str, Path | None] = {}
        for name, versions in agreed.items():
            with self._missing(name):
                for version in versions:
                    if version.is_gone or (name in mine and mine[name].content == version.content):
                        decided[name] = version
                    elif version.link or (draft := self._obtain(version)):
                        decided[name], drafts[name] = version, None if version.link else draft
                    if name in decided:
                        break
                if decided.get(name) != versions[0]:
                    self.gathered.lost.append(name)
                    self._here.tell("replica-lost", file=name, written=versions[0].written)
        aside, deleted = [], []
        for name in found.files:
            own, winner = mine.get(name), decided.get(name)
            if own and winner and own.content == winner.content:
                continue
            # Only files that a later attempt has replaced or deleted are lost for good. Move away instead the files of
            # a node that was away, those that lost against a version of the same attempt, and old versions of a file
            # that is missing now, since with these this node's ranks would start from another step.
            if is_behind or own is None or winner is None or own.written >= winner.written:
                aside.append(name)
            elif winner.is_gone:
                deleted.append(name)
        if aside or deleted or drafts:
            with self._here.failing():
                self._files.save(is_changing=True)
        # A file that stays here would count as new in this attempt, and win over the agreed version.
        into = self._copies.aside(self._attempt) if aside else None
        for name in aside:
            try:
                self._files.remove(name, into)
            except commit.NOT_FOUND:
                pass  # another process has removed it
            except PermissionError as error:
                if name in mine:
                    raise
                self._here.fail(error, file=name)  # this agent cannot read it either, so it cannot win
            else:
                self.gathered.set_aside.append(name)
        for name, draft in drafts.items():
            with self._missing(name):
                try:
                    self._files.place(name, decided[name], draft)
                finally:
                    if draft is not None:
                        draft.unlink(missing_ok=True)
                self.gathered.num_fetched += 1
        for name in deleted:
            self._files.remove(name, None)
        known = {}
        for name, versions in agreed.items():
            # Remember a deletion until a majority knows of it.
            if not versions[0].is_gone or not self._is_joined:
                is_here = name in decided and name not in self.gathered.missing and not versions[0].is_gone
                mark = self._mark_as(decided[name], self._files.folder / name) if is_here else None
                known[name] = Known(decided.get(name, versions[0]), mark)
        self._files.known = known
        self.gathered.num_files = sum(each.mark is not None for each in known.values())

    @contextlib.contextmanager
    def _missing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if descriptors.are_used_up(error):
                raise
            self.gathered.missing.append(name)
            self._here.fail(error, file=name)

    def _mark_as(self, version: Version, path: Path) -> Mark | None:
        """Set the file's mtime to the agreed one, and return its mark; None, and a report, if that fails."""
        with self._here.failing():
            if path.lstat().st_mtime_ns != version.mtime_ns:
                os.utime(path, ns=(version.mtime_ns, version.mtime_ns), follow_symlinks=False)
            return mark_of(path.lstat())
        return None

    def _obtain(self, version: Version) -> Path | None:
        """Return a draft with this content, verified, from this node's disk or a member; None if no member has it.

        Raises:
            OSError: the draft cannot be written here, or the member that has the content has become unreachable.
        """
        draft, is_there = self._files.draft(), False
        try:
            is_there = self._copy(version, draft) or self._fetch(version, draft)
        finally:
            if not is_there:
                draft.unlink(missing_ok=True)
        return draft if is_there else None

    def _copy(self, version: Version, draft: Path) -> bool:
        """Make the draft from a file or copy on this node's disk; return False if there is no intact one."""
        kept = self._copies.path_of(version.sha256)
        for path in filter(None, (kept, self._files.path_of(version.sha256))):
            try:
                is_damaged = commit.retried(functools.partial(sha256_of, path))[0] != version.sha256
            except OSError as error:  # the disk cannot read it now; keep it, since it may be the only copy
                self._here.fail(error, file=str(path))
                continue
            if is_damaged:
                self._here.tell("replica-damaged", peer=self._here.name, file=str(path))
                if path == kept:
                    self._copies.discard(version.sha256)
                continue
            # A copy may become the user's file itself, since all members will have it; but only under one name.
            if path == kept and self._is_joined and path.stat().st_nlink == 1:
                with contextlib.suppress(OSError):  # another file system
                    os.link(path, draft)
                    return True
            with self._copies.room_for(draft, version.size_bytes) as file, open_file(path) as source:
                shutil.copyfileobj(source, file, agent_wire.CHUNK_BYTES)
            return True
        return False

    def _fetch(self, version: Version, draft: Path) -> bool:
        """Fetch the draft from a member that has the content; return False if none has it intact.

        Raises:
            ConnectionError: a member that listed the content has become unreachable.
        """
        gone = []
        for node in self._peers:
            if node not in self._holders.get(version.sha256, ()):
                continue
            for _ in range(_NUM_TRIES):
                if not (wire := self._wire_to(node)):
                    gone.append(node)
                    break
                try:
                    found = self._copies.fetch(wire, version, draft)
                except (ConnectionError, TimeoutError, ValueError) as error:
                    self._give_up(node, error)
                    draft.unlink(missing_ok=True)
                    # Its disk may hang: do not wait as long for each further file.
                    if isinstance(error, TimeoutError):
                        self.gathered.gone.append(node)
                    continue
                if found == version.sha256:
                    return True
                if found:
                    self._here.tell("replica-damaged", peer=node, sha256=version.sha256)
                break
            draft.unlink(missing_ok=True)
        if gone:
            raise ConnectionError(f"{', '.join(gone)} has it, and cannot be reached any more")
        return False

    def _wire_to(self, node: str) -> Wire | None:
        """Return the connection to a member, made anew if it broke; None if that fails, now or in an earlier call."""
        if node not in self._wires and node not in self.gathered.gone:
            try:
                self._wires[node] = agent_wire.connect(
                    self._peers[node], self._here.token, agent_wire.CONNECT_S
                )
                self.gathered.silent.pop(node, None)
            except OSError as error:
                if descriptors.are_used_up(error):
                    raise
                self.gathered.gone.append(node)
                self._give_up(node, error)
        return self._wires.get(node)
