"""A round of the rendezvous that has formed: its members, and what they tell each other."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from nodekit.deploy.agent.rendezvous.signed_store import SignedStore

DONE = "done"
"""What a member tells whose ranks have all ended well."""
LEAVES = "leaves"
"""What a member tells that leaves to meet the others once more, while its ranks train on."""


@dataclass(frozen=True, kw_only=True)
class Formed:
    """A round that all its members know."""

    round: int
    group_rank: int
    members: tuple[dict[str, Any], ...]
    """What each of them told of itself, in the order of ranks."""
    store: SignedStore
    """For what the agents of this round have to say to each other."""
    master_addr: str
    master_port: int
    _told: dict[str, set[int]] = field(default_factory=dict)
    """What → the ranks that are known to have told so: they need not be asked for again."""

    @property
    def names(self) -> list[str]:
        """The members' names, in the order of ranks."""
        return [str(each["name"]) for each in self.members]

    @property
    def world_size(self) -> int:
        """How many workers they have together."""
        return sum(int(each["nproc"]) for each in self.members)

    def tell(self, what: str) -> None:
        """Let the other members know that this node has come to `what`."""
        self.store.set(f"{what}/{self.group_rank}", "")

    def have_all(self, what: str) -> bool:
        """Whether all members have told so."""
        return next(self._without(what), None) is None

    def without(self, what: str, among: Container[str] | None = None) -> list[str]:
        """The names of the members that have not told so; only those ``among`` these are asked for."""
        return [self.names[rank] for rank in self._without(what, among)]

    def _without(self, what: str, among: Container[str] | None = None) -> Iterator[int]:
        told = self._told.setdefault(what, set())
        for rank, name in enumerate(self.names):
            if rank not in told and (among is None or name in among):
                if self.store.get(f"{what}/{rank}") is None:
                    yield rank
                else:
                    told.add(rank)
