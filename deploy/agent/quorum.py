"""Who may train: the rule by which at most one group of nodes goes on, whatever is cut from what. Pure, stdlib only.

Every generation has *voters*, the nodes it was started for. A group of nodes trains only while more than
half of the voters are in it, and the supervisor starts another generation only after it has fenced so many of
the old one's voters that the rest is not more than half. So no two groups can go on at once, with no clock and
no lease in it: a group that is cut off from everyone trains on while it holds the majority, and only then.

When a node is gone for good the supervisor leaves it out of the voters (`Voters`, a higher `version`). A group goes by
the newest that any of it has written down. So the change has taken hold once so many of the *old* voters have
written it down that the others cannot train; until then either may be gone by, and both must be fenced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Voters:
    """The nodes that count, of one generation; the greater is the newer."""

    generation: int
    version: int
    nodes: tuple[str, ...]

    def may_train(self, group: Collection[str]) -> bool:
        """Whether a group of nodes may go on by itself."""
        return 2 * self._count(group) > len(self.nodes)

    def is_fenced_by(self, fenced: Collection[str]) -> bool:
        """Whether, with these nodes fenced, no group of the others may go on."""
        return 2 * self._count(fenced) >= len(self.nodes)

    def is_changed_by(self, written: Collection[str]) -> bool:
        """Whether, with a newer one written down by these nodes, no group goes by this one any more."""
        return self.is_fenced_by(written)

    def _count(self, group: Collection[str]) -> int:
        return len(set(group) & set(self.nodes))

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Voters:
        """From JSON."""
        return cls(int(fields["generation"]), int(fields["version"]), tuple(fields["nodes"]))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"generation": self.generation, "version": self.version, "nodes": list(self.nodes)}


def newest(of: Iterable[Voters]) -> Voters:
    """The one that all of a group go by."""
    return max(of)
