"""Making one node's folder what the members agreed on: fetch first, then move away, then put in place."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nodekit.deploy import replica_wire
from nodekit.deploy.replica_files import Look, UserFiles, open_file, sha256_of
from nodekit.deploy.replica_kept import Kept
from nodekit.deploy.replica_members import Members
from nodekit.deploy.replica_merge import Agreed, Attempt, Version
from nodekit.deploy.replica_voice import Voice, reason


@dataclass(slots=True)
class Filled:
    """What was done."""

    num_fetched: int = 0
    fetched_bytes: int = 0
    num_set_aside: int = 0
    lost: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Filling:
    """One node's part after the members agreed."""

    name: str
    attempt: Attempt
    files: UserFiles
    found: Look
    """What is in the folder."""
    kept: Kept
    members: Members
    agreed: Agreed
    voice: Voice
    may_link: bool
    """Whether copies kept here may become the user's files, since the others have them too when this is done."""

    def run(self) -> Filled:
        """Do it. A kill at any point leaves every version of every file somewhere on this node's disk."""
        filled = Filled()
        decided: dict[str, Version] = {}
        drafts: dict[str, Path | None] = {}
        for name in self.agreed.wanted:
            self._decide(name, decided, drafts, filled)
        self._clear(decided, filled)
        for name, draft in drafts.items():
            version = decided[name]
            try:
                self.files.place(name, version, draft)
                filled.num_fetched += 1
                filled.fetched_bytes += version.size_bytes
            except OSError as error:
                self._miss(name, error, filled)
                if draft is not None:
                    draft.unlink(missing_ok=True)
        for name in decided.keys() - drafts.keys():
            self._take_over(name, decided[name])
        for name in filled.missing:
            self.files.set_absent(name, self.agreed.wanted[name][0])
        self._tell_conflicts()
        return filled

    def _tell_conflicts(self) -> None:
        """Tell of files that several nodes wrote under the same name."""
        for name, nodes in self.agreed.conflicts.items():
            self.voice.tell_once(("conflict", name), "replica-conflict", file=name, nodes=sorted(nodes))

    def _decide(
        self, name: str, decided: dict[str, Version], drafts: dict[str, Path | None], filled: Filled
    ) -> None:
        """Choose the newest version that can be had, and have it at hand."""
        versions = self.agreed.wanted[name]
        for version in versions:
            if not self._is_here(name, version):
                try:
                    draft = None if version.link else self._obtain(version)
                except OSError as error:
                    return self._miss(name, error, filled)
                if draft is None and not version.link:
                    continue
                drafts[name] = draft
            decided[name] = version
            break
        if decided.get(name) is not versions[0]:
            filled.lost.append(name)
            instead = decided[name].written if name in decided else None
            self.voice.tell("replica-lost", file=name, written=versions[0].written, instead=instead)
        return None

    def _miss(self, name: str, error: OSError, filled: Filled) -> None:
        filled.missing.append(name)
        self.voice.tell_once(("fill", reason(error)), "replica-failed", file=name, reason=reason(error))

    def _is_here(self, name: str, version: Version) -> bool:
        known, seen = self._known(name), self.found.files.get(name)
        return seen is not None and known is not None and known.content == version.content

    def _known(self, name: str) -> Version | None:
        """The version that lies under this name; None if that is not known: it is damaged or just changed."""
        seen = self.found.files.get(name)
        return self.files.versions[name] if seen and self.files.marks.get(name) == seen.mark else None

    def _obtain(self, version: Version) -> Path | None:
        """A draft with this content, verified, from this node's disk or a member's; None if nobody has it.

        Raises:
            OSError: it cannot be written here.
        """
        draft = self.files.draft()
        try:
            if self._copy(version, draft) or self.members.fetch(version, draft, self.kept.room_for):
                return draft
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        draft.unlink(missing_ok=True)
        return None

    def _copy(self, version: Version, draft: Path) -> bool:
        """From what is on this disk."""
        copy, own = self.kept.path_of(version.sha256), self.files.path_of(version.sha256)
        for path in filter(None, (copy, own)):
            try:
                is_intact = sha256_of(path, None) == version.sha256
            except FileNotFoundError:
                continue
            except OSError:  # the disk cannot read it
                is_intact = False
            if not is_intact:
                self.voice.tell("replica-damaged", peer=self.name, file=str(path))
                if path == copy:
                    self.kept.discard(version.sha256)
                continue
            if path == copy and self.may_link:
                with contextlib.suppress(OSError):  # another file system
                    os.link(path, draft)
                    return True
            with self.kept.room_for(draft, version.size_bytes) as file, open_file(path) as source:
                shutil.copyfileobj(source, file, replica_wire.CHUNK_BYTES)
            return True
        return False

    def _take_over(self, name: str, version: Version) -> None:
        """The content is here already; make its time and attempt the agreed ones."""
        if self.files.versions[name] != version:
            with self.voice.complaining("time", name):
                path = self.files.folder / name
                os.utime(path, ns=(version.mtime_ns, version.mtime_ns), follow_symlinks=False)
                self.files.set_version(name, version)

    def _clear(self, decided: Mapping[str, Version], filled: Filled) -> None:
        """Take away what is not wanted: for good what a script deleted, anything else is set aside."""
        is_behind = self.name not in self.agreed.current
        contents = {version.content for version in decided.values()}
        aside, deleted = [], []
        for name in self.found.files:
            known = self._known(name)
            if known is not None and name in decided and decided[name].content == known.content:
                continue  # it stays
            is_loser = self.name in self.agreed.conflicts.get(name, ())
            is_superseded = (name in decided or name in self.agreed.gone) and not is_behind and not is_loser
            # Of a file that is missing, an older version would let this node's ranks start from another step.
            if known is None or not (is_superseded or known.content in contents):
                aside.append(name)
            elif name not in decided:  # else the new version replaces it in one step
                deleted.append(name)
        if aside:
            with self.voice.complaining("state"):
                # Not known any more, so that a kill between here and the end does not look like a deletion.
                self.files.forget(set(aside))
                self.files.save()
            with self.voice.complaining("set-aside"):
                into = self.kept.aside(self.attempt)
                for name in aside:
                    self.files.remove(name, into)
                    filled.num_set_aside += 1
        with self.voice.complaining("delete"):
            for name in deleted:
                self.files.remove(name, None)
