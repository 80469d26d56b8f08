"""Before a round: what the members agree each folder is to hold, and making this node's folder so.

Per name the newest version wins. Who has a say is decided first: only who was in the newest agreement that any member
knows of, so a node that was away cannot bring back what it had, however new that looks.
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
"""How often a member is asked for a file: a connection may break, or the member be unable to read one file."""


@dataclass(frozen=True, slots=True)
class Here:
    """One node, as its threads share it."""

    name: str
    token: str
    files: UserFiles
    copies: Copies
    tell: Say

    def scan(self) -> Scan:
        """What is in the user's folder; what is not copied is told."""
        found = scan(self.files.folder)
        for name, why in found.refused.items():
            self.tell("replica-refused", file=name, reason=why)
        return found

    def fail(self, error: Exception, **fields: str) -> None:
        """Tell of an error."""
        # Without the name of a draft, which is another one every time.
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self.tell("replica-failed", **fields, reason=reason)

    @contextlib.contextmanager
    def failing(self, **fields: str) -> Iterator[None]:
        """An OSError is told, and not raised."""
        try:
            yield
        except OSError as error:
            self.fail(error, **fields)


def after(name: str, peers: Iterable[str]) -> list[str]:
    """The other members, from the next one on, in a ring."""
    ring = list(peers)
    here = ring.index(name)
    return ring[here + 1 :] + ring[:here]


def agree(own: Iterable[Listing], kept: Iterable[Listing]) -> tuple[Attempt, dict[str, list[Version]]]:
    """The newest agreement; and name → its versions, newest first, or its deletion alone.

    Args:
        own: what members say of their own folders.
        kept: what they keep of others'.
    """
    # A member's own word counts most, unless it came back with less than others know of it.
    ranked = [(each.attempt, True, each.told_ns, each) for each in own]
    ranked += [(each.attempt, False, each.told_ns, each) for each in kept]
    by_node = {each[-1].node: each[-1] for each in sorted(ranked, key=lambda each: each[:-1])}
    newest = max((listing.attempt for listing in by_node.values()), default=NEVER)
    versions: dict[str, set[Version]] = {}
    for listing in by_node.values():
        # A folder that was emptied altogether is taken for an accident (rm -rf on one node), not for pruning.
        is_emptied = all(version.is_gone for version in listing.files.values())
        for name, version in listing.files.items():
            # Who missed the newest agreement has a say on what it wrote since, and on nothing else.
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
    """Newest first, each content once, none that is older than a deletion; the deletion if none is left."""
    chosen: dict[tuple[str, str], Version] = {}
    for version in sorted(versions, reverse=True):
        if version.is_gone:
            return list(chosen.values()) or [version]
        chosen.setdefault(version.content, version)
    return list(chosen.values())


@dataclass(slots=True, kw_only=True)
class Gathered:
    """How a gather went."""

    num_files: int = 0
    """The user's files that this node now has, as all do."""
    num_fetched: int = 0
    """Those that had to be put into its folder."""
    set_aside: list[str] = field(default_factory=list)
    """Files of this node that were no part of what was agreed on."""
    lost: list[str] = field(default_factory=list)
    """Files whose newest version no member has intact; an older one is in place if there was one."""
    missing: list[str] = field(default_factory=list)
    """Files that could not be written to this node's folder, or fetched from those that have them."""
    silent: dict[str, str] = field(default_factory=dict)
    """Member → why it was not heard, or no longer."""
    gone: list[str] = field(default_factory=list)
    """Those that were heard, and could not be reached when they were asked for a file."""
    seconds: float = 0.0


class Gather:
    """One node's part in one gather."""

    def __init__(self, here: Here, attempt: Attempt, peers: Mapping[str, str]) -> None:
        # Each begins at its own neighbour, so that not all ask the same one.
        self._peers = {node: peers[node] for node in after(here.name, peers)}
        self._here, self._files, self._copies, self._attempt = here, here.files, here.copies, attempt
        self._wires: dict[str, Wire] = {}
        self._holders: dict[str, set[str]] = {}  # content → the members that have it
        self._is_joined = False
        self.gathered = Gathered()

    def run(self, own: Listing, found: Scan, deadline_s: float) -> bool:
        """Do it; returns whether most members were heard, for else a newer version may be with the others.

        A kill at any point leaves every version of every file somewhere on this node's disk.

        Raises:
            OSError: what is no part of what was agreed on cannot be taken away, or no descriptor is left.
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
        """Member → what its folder holds, and what it keeps of others'."""
        heard: dict[str, tuple[Listing, list[Listing]]] = {}

        def ask(node: str) -> None:
            try:
                heard[node] = self._listings_of(node, deadline_s)
            except BROKEN as error:
                if isinstance(error, OSError) and descriptors.are_used_up(error):
                    raise  # nothing is known of the member, then
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
            if answer["is_reading"]:  # it came to this attempt and looks through its files
                until = time.monotonic() + deadline_s
            if time.monotonic() > until:
                raise TimeoutError("it did not come to this attempt in time")

    def _give_up(self, node: str, error: Exception) -> None:
        if wire := self._wires.pop(node, None):
            wire.close()
        self.gathered.silent[node] = str(error) or type(error).__name__

    # --- having ---

    def _fill(self, found: Scan, agreed: Mapping[str, list[Version]], *, is_behind: bool) -> None:
        """Have all that is lacking at hand, then set aside, put in place, and delete."""
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
            # For good goes only what was overtaken: not what a node that was away has, nor what lost against
            # another of the same attempt, nor an older version of a file that is missing, for it would let this
            # node's ranks start from another step.
            if is_behind or own is None or winner is None or own.written >= winner.written:
                aside.append(name)
            elif winner.is_gone:
                deleted.append(name)
        if aside or deleted or drafts:
            with self._here.failing():
                self._files.save(is_changing=True)
        # What could not be taken away would be new in this attempt, and win over what all have agreed on.
        into = self._copies.aside(self._attempt) if aside else None
        for name in aside:
            try:
                self._files.remove(name, into)
            except commit.NOT_FOUND:
                pass  # somebody else has taken it away
            except PermissionError as error:
                if name in mine:
                    raise
                self._here.fail(error, file=name)  # nobody here can read it either, so it cannot win
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
            if not versions[0].is_gone or not self._is_joined:  # a deletion counts until all have heard of it
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
        """What is here now gets the time that all agreed on."""
        with self._here.failing():
            if path.lstat().st_mtime_ns != version.mtime_ns:
                os.utime(path, ns=(version.mtime_ns, version.mtime_ns), follow_symlinks=False)
            return mark_of(path.lstat())
        return None

    def _obtain(self, version: Version) -> Path | None:
        """A draft with this content, verified, from this node's disk or a member's; None if nobody has it.

        Raises:
            OSError: it cannot be written here, or who has it cannot be reached any more.
        """
        draft, is_there = self._files.draft(), False
        try:
            is_there = self._copy(version, draft) or self._fetch(version, draft)
        finally:
            if not is_there:
                draft.unlink(missing_ok=True)
        return draft if is_there else None

    def _copy(self, version: Version, draft: Path) -> bool:
        """From what is on this disk."""
        kept = self._copies.path_of(version.sha256)
        for path in filter(None, (kept, self._files.path_of(version.sha256))):
            try:
                is_damaged = commit.retried(functools.partial(sha256_of, path))[0] != version.sha256
            except OSError as error:  # the disk cannot read it now: it may be the only one there is
                self._here.fail(error, file=str(path))
                continue
            if is_damaged:
                self._here.tell("replica-damaged", peer=self._here.name, file=str(path))
                if path == kept:
                    self._copies.discard(version.sha256)
                continue
            # It may become the user's file, for all have it by then; but no two names may share one.
            if path == kept and self._is_joined and path.stat().st_nlink == 1:
                with contextlib.suppress(OSError):  # another file system
                    os.link(path, draft)
                    return True
            with self._copies.room_for(draft, version.size_bytes) as file, open_file(path) as source:
                shutil.copyfileobj(source, file, agent_wire.CHUNK_BYTES)
            return True
        return False

    def _fetch(self, version: Version, draft: Path) -> bool:
        """From a member.

        Raises:
            ConnectionError: a member that has it was heard, and cannot be reached any more.
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
                    if isinstance(error, TimeoutError):  # its disk may hang: then so would each further file
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
        """The connection to a member that was heard, made anew if it broke; None if that fails, also later."""
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
