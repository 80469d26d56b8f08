"""The quorum rule: whatever connections fail, at most one group of nodes trains. Pure, standard library only.

Every generation has *voters*, the nodes it was started for. A group of nodes trains only while it holds more than half
of the voters, and the supervisor starts another generation only after it has fenced so many of the old voters that the
rest is not more than half. So two groups can never train at once. The rule needs no clocks and no leases: a group that
is cut off from the rest trains on exactly while it holds the majority.

When a node is gone for good, the supervisor removes it from the voters (`Voters`, with a higher `version`). A group
goes by the newest voters that any of its nodes has written down. So the change is in force once so many of the *old*
voters have written it down that the others cannot train; until then a group may go by either, and both must be fenced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Voters:
    """The voters of one generation; compares by generation and version, so that the newer is greater."""

    generation: int
    version: int
    nodes: tuple[str, ...]

    def may_train(self, group: Collection[str]) -> bool:
        """Whether a group of nodes holds more than half of the voters."""
        return 2 * self._count(group) > len(self.nodes)

    def is_fenced_by(self, fenced: Collection[str]) -> bool:
        """Whether no group of the other nodes may train once these are fenced."""
        return 2 * self._count(fenced) >= len(self.nodes)

    def is_changed_by(self, written: Collection[str]) -> bool:
        """Whether no group can go by these voters any more once the nodes `written` have written down newer ones."""
        return self.is_fenced_by(written)

    def _count(self, group: Collection[str]) -> int:
        return len(set(group) & set(self.nodes))

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Voters:
        """Build the voters from JSON."""
        return cls(int(fields["generation"]), int(fields["version"]), tuple(fields["nodes"]))

    def to_dict(self) -> dict[str, Any]:
        """Return the voters for JSON."""
        return {"generation": self.generation, "version": self.version, "nodes": list(self.nodes)}


def newest(of: Iterable[Voters]) -> Voters:
    """Return the newest of the voters that a group's nodes know: the group goes by these."""
    return max(of)
