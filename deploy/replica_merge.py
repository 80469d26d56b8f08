"""What the members of a new round agree on: which version of which user file every folder is to hold. Pure.

Every version of a file carries the attempt (generation, round) it was written in, a deletion likewise; per name the
newest wins. Who has a say is decided first: only what belongs to the newest attempt any member knows of, so a node
that was away cannot bring back what it had, however new that looks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from nodekit.training.commit import TEMPORARY

Attempt = tuple[int, int]
NEVER: Attempt = (-1, -1)

# nodekit.training's own snapshots, which it exchanges itself.
_OURS = re.compile(r"g\d{4,}-s\d{9,}.*|fence", re.ASCII | re.DOTALL)
_UNFINISHED = (".tmp", ".part", ".partial", "~")
# torch.distributed.checkpoint renames it into place last, and nothing of a checkpoint can be read without it.
_DOTTED_BUT_FINISHED = ".metadata"
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_NAME_BYTES, _MAX_PART_BYTES = 2048, 255


@dataclass(frozen=True, slots=True)
class Version:
    """One version of one user file, symlink or deletion."""

    sha256: str
    """Of the content; empty for a symlink and for a deletion."""
    size_bytes: int
    mtime_ns: int
    """For a deletion: when it was noticed."""
    written: Attempt
    """The attempt it appeared in."""
    link: str = ""
    """Where a symlink points, relative to its own folder."""

    @property
    def is_gone(self) -> bool:
        """Whether it is a deletion."""
        return not self.sha256 and not self.link

    @property
    def content(self) -> tuple[str, str]:
        """Equal for equal content."""
        return self.sha256, self.link

    @property
    def age(self) -> tuple[Attempt, int, tuple[str, str]]:
        """The greater is the newer; the content only breaks a tie, everywhere the same way."""
        return self.written, self.mtime_ns, self.content

    def to_list(self) -> list[Any]:
        """As JSON has it."""
        return [self.sha256, self.size_bytes, self.mtime_ns, *self.written, self.link]

    @classmethod
    def from_list(cls, name: str, values: Any) -> Version:
        """From JSON that came over the network or from a disk.

        Raises:
            ValueError: it is not the version of a file that may be called `name`.
        """
        sha256, size_bytes, mtime_ns, generation, round_, link = values
        if any(type(number) is not int for number in (size_bytes, mtime_ns, generation, round_)):
            raise ValueError(f"{name!r}: a number was wanted")
        if not 0 <= size_bytes < 1 << 62 or abs(mtime_ns) >= 1 << 62:
            raise ValueError(f"{name!r}: a number out of range")
        if not (isinstance(sha256, str) and isinstance(link, str)):
            raise ValueError(f"{name!r}: not a version")
        if sha256 and not _SHA256.fullmatch(sha256):
            raise ValueError(f"{name!r}: not a SHA-256: {sha256!r}")
        if link and (sha256 or inside(name, link) is None):
            raise ValueError(f"{name!r}: a link out of the folder: {link!r}")
        return cls(sha256, size_bytes, mtime_ns, (generation, round_), link)


@dataclass(frozen=True, slots=True)
class Source:
    """What one node's folder held: told by itself, or by another that keeps copies for it."""

    node: str
    attempt: Attempt
    """The last one the node was in."""
    base: Attempt
    """The last one at whose start it agreed with most of the others; `attempt`, unless they were out of reach."""
    number: int
    """Counts what the node said in this attempt."""
    files: Mapping[str, Version]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "node": self.node,
            "attempt": self.attempt,
            "base": self.base,
            "number": self.number,
            "files": {name: version.to_list() for name, version in self.files.items()},
        }

    @classmethod
    def from_dict(cls, fields: Any) -> Source:
        """From JSON that came over the network or from a disk.

        Raises:
            ValueError: it is damaged, or names what may not be written.
        """
        try:
            for name in fields["files"]:
                if problem := refuses(name):
                    raise ValueError(f"{name!r}: {problem}")
            files = {name: Version.from_list(name, values) for name, values in fields["files"].items()}
            node, number = fields["node"], fields["number"]
            if type(number) is not int or not isinstance(node, str) or not 0 < len(node) <= 64:
                raise ValueError("not a listing")
            return cls(node, attempt_from(fields["attempt"]), attempt_from(fields["base"]), number, files)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a listing: {error!r}") from error


def attempt_from(values: Any) -> Attempt:
    """From JSON."""
    generation, round_ = values
    if type(generation) is not int or type(round_) is not int:
        raise ValueError(f"not an attempt: {values!r}")
    return generation, round_


def is_unfinished(name: str) -> bool:
    """Whether some part of the path looks like a file or folder that is still being written."""
    return any(
        (part.startswith(".") and part != _DOTTED_BUT_FINISHED)
        or part.endswith(_UNFINISHED)
        or TEMPORARY.fullmatch(part)
        for part in name.split("/")
    )


def is_ours(name: str) -> bool:
    """Whether nodekit.training looks after this file itself."""
    return "/" not in name and _OURS.fullmatch(name) is not None


def refuses(name: object) -> str | None:
    """Why no file of this name is taken, or None: names arrive from the network."""
    if not isinstance(name, str) or not name or "\0" in name:
        return "not a name"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "not a plain path inside the folder"
    try:
        sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    except UnicodeEncodeError:
        return "not a name"
    if sum(sizes) + len(sizes) > _MAX_NAME_BYTES or max(sizes) > _MAX_PART_BYTES:
        return "longer than a name can be"
    if is_ours(name) or is_unfinished(name):
        return "not a user's finished file"
    return None


def inside(name: str, target: str) -> str | None:
    """The name in the folder that symlink `name` points to; None if it points out of it."""
    if target.startswith("/") or "\0" in target:
        return None
    parts = list(PurePosixPath(name).parent.parts)
    for part in target.split("/"):
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What every folder is to hold, and who had a say in it."""

    wanted: Mapping[str, tuple[Version, ...]]
    """Name → the version to have, then older ones, should the first be had nowhere."""
    gone: frozenset[str]
    """Names that a script deleted."""
    current: frozenset[str]
    """The nodes all of whose files had a say; the files of any other are behind."""
    conflicts: Mapping[str, frozenset[str]]
    """Name → the nodes that wrote different content under it in the same, newest attempt."""


def agree(own: Iterable[Source], kept: Iterable[Source]) -> Agreed:
    """Decide from what the members say of their own folders and of what they keep for others."""
    own = list(own)
    sources: dict[str, Source] = {}
    for is_own, source in [*((False, each) for each in kept), *((True, each) for each in own)]:
        known = sources.get(source.node)
        # A member's own word counts most, unless it came back with less than others know of it.
        if known is None or (source.attempt, is_own, source.number) > (known.attempt, False, known.number):
            sources[source.node] = source
    newest = max((source.attempt for source in sources.values()), default=NEVER)
    has_say = [source for source in sources.values() if source.attempt == newest]
    base = max((source.base for source in has_say), default=NEVER)
    candidates: dict[str, set[Version]] = {}
    writers: dict[str, dict[tuple[str, str], str]] = {}
    for source in has_say:
        # A folder that was emptied altogether is taken for an accident (rm -rf on one node), not for pruning.
        is_emptied = all(version.is_gone for version in source.files.values())
        for name, version in source.files.items():
            if (source.base == base or version.written == newest) and not (is_emptied and version.is_gone):
                candidates.setdefault(name, set()).add(version)
                if version.written == newest and not version.is_gone:
                    writers.setdefault(name, {})[version.content] = source.node
    wanted = {name: _until_gone(versions) for name, versions in candidates.items()}
    return Agreed(
        _without_clashes({name: versions for name, versions in wanted.items() if versions}),
        frozenset(name for name, versions in wanted.items() if not versions),
        frozenset(source.node for source in own if (source.attempt, source.base) == (newest, base)),
        {name: frozenset(by.values()) for name, by in writers.items() if len(by) > 1},
    )


def _until_gone(versions: set[Version]) -> tuple[Version, ...]:
    """Newest first, each content once, none that is older than a deletion."""
    kept: dict[tuple[str, str], Version] = {}
    for version in sorted(versions, key=lambda version: version.age, reverse=True):
        if version.is_gone:
            break
        kept.setdefault(version.content, version)
    return tuple(kept.values())


def _without_clashes(wanted: Mapping[str, tuple[Version, ...]]) -> dict[str, tuple[Version, ...]]:
    """Where `a` and `a/b` are both wanted, the newer one."""
    taken: dict[str, tuple[Version, ...]] = {}
    folders: set[str] = set()
    for name in sorted(wanted, key=lambda name: wanted[name][0].age, reverse=True):
        above = {str(folder) for folder in PurePosixPath(name).parents} - {"."}
        if name not in folders and not above & taken.keys():
            taken[name] = wanted[name]
            folders |= above
    return taken
