"""A round of the rendezvous that has formed: its members, and the flags that they set for each other."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from nodekit.deploy.agent.rendezvous.signed_store import SignedStore

DONE = "done"
"""The flag of a member whose ranks have all succeeded."""
LEAVES = "leaves"
"""The flag of a member that leaves for the next rendezvous round while its ranks train on."""


@dataclass(frozen=True, kw_only=True)
class Formed:
    """A rendezvous round whose members have all exchanged their details."""

    round: int
    group_rank: int
    members: tuple[dict[str, Any], ...]
    """The details that each member gave of itself (name, address, nproc, …), by group_rank."""
    store: SignedStore
    """Where the agents of this round leave values for each other."""
    master_addr: str
    master_port: int
    _told: dict[str, set[int]] = field(default_factory=dict)
    """Flag → the group ranks that are known to have set it: the store need not be asked for them again."""

    @property
    def names(self) -> list[str]:
        """The members' names, by group_rank."""
        return [str(each["name"]) for each in self.members]

    @property
    def world_size(self) -> int:
        """The number of ranks of all members together."""
        return sum(int(each["nproc"]) for each in self.members)

    def tell(self, what: str) -> None:
        """Set the flag `what`, such as `DONE`, of this node."""
        self.store.set(f"{what}/{self.group_rank}", "")

    def have_all(self, what: str) -> bool:
        """Whether all members have set the flag `what`."""
        return next(self._without(what), None) is None

    def without(self, what: str, among: Container[str] | None = None) -> list[str]:
        """Return the names of the members that have not set the flag `what`; with ``among``, of these names alone."""
        return [self.names[rank] for rank in self._without(what, among)]

    def _without(self, what: str, among: Container[str] | None = None) -> Iterator[int]:
        told = self._told.setdefault(what, set())
        for rank, name in enumerate(self.names):
            if rank not in told and (among is None or name in among):
                if self.store.get(f"{what}/{rank}") is None:
                    yield rank
                else:
                    told.add(rank)
