"""Signed values in the rendezvous store: any process that reaches the store can write to it and read it.

torch's TCPStore has no authentication, and upstream unpickles the rendezvous state that it finds there. So every value
carries an HMAC under the run's token, which covers its key too; a value without a valid one is refused unread.
"""

from __future__ import annotations

import hmac
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # no stubs
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

_STATE = "state"
_NOTHING = "0 "  # the state before the first one


class Forged(RendezvousStateError):
    """A value in the store was not put there by an agent of this run."""


class SignedStore:
    """The keys of one scope in a store, with values that are signed and verified by a token.

    All methods raise `Forged`, and whatever torch's store raises when it is unreachable.
    """

    def __init__(self, store: Store, token: str, scope: str, where: str) -> None:
        """Prefix every key with `scope` (run, generation, round); errors name the store by `where`."""
        self._store = store
        self._token = token.encode()
        self._scope = scope
        self._where = where

    def part(self, name: str) -> SignedStore:
        """Return the sub-scope `name`; values signed for it are valid nowhere else."""
        return SignedStore(self._store, self._token.decode(), f"{self._scope}/{name}", self._where)

    def set(self, key: str, value: str) -> None:
        """Store a value under a key."""
        self._store.set(self._full(key), self._sealed(key, value))

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it has none."""
        if not self._store.check([self._full(key)]):  # `get` would block until it has one
            return None
        return self._opened(key, self._store.get(self._full(key)))

    def get_all(self, keys: Sequence[str]) -> list[str] | None:
        """Return the values of the keys, in that order; None unless every key has one."""
        full = [self._full(key) for key in keys]
        if not self._store.check(full):
            return None
        found = self._store.multi_get(full)
        return [self._opened(key, data) for key, data in zip(keys, found, strict=True)]

    def compare_set(self, key: str, expected: str | None, desired: str) -> str:
        """Set a key to `desired` if its value is `expected` (None: if it has none); return its value afterwards."""
        before = "" if expected is None else self._sealed(key, expected)
        return self._opened(key, self._store.compare_set(self._full(key), before, self._sealed(key, desired)))

    def refuse(self, key: str, why: str) -> Forged:
        """Return the error that says which key of which store is not this run's, and why."""
        return Forged(
            f"somebody else writes to the rendezvous store at {self._where}: {self._full(key)} {why} (docs/security.md)"
        )

    def _full(self, key: str) -> str:
        return f"{self._scope}/{key}"

    def _sealed(self, key: str, value: str) -> str:
        return f"{self._tag(key, value)} {value}"

    def _opened(self, key: str, data: bytes) -> str:
        tag, _, value = data.decode("utf-8", "replace").partition(" ")
        if not hmac.compare_digest(tag.encode(), self._tag(key, value).encode()):
            raise self.refuse(key, "is not signed with this run's token")
        return value

    def _tag(self, key: str, value: str) -> str:
        return hmac.new(self._token, f"store\0{self._full(key)}\0{value}".encode(), "sha256").hexdigest()


class SignedBackend(RendezvousBackend):
    """Like upstream's C10dRendezvousBackend, but accepts a state only if it is signed, and no older than the last one.

    A state is stored as ``VERSION BASE64``; this text is also the token that upstream passes back to `set_state`.
    """

    def __init__(self, store: SignedStore) -> None:
        self._store = store
        self._seen = 0
        store.compare_set(_STATE, None, _NOTHING)

    @property
    def name(self) -> str:
        """The backend's name in upstream's records."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its token; None before the first state."""
        least = self._seen
        found = self._store.get(_STATE)
        if found is None:
            raise self._store.refuse(_STATE, "was removed")
        return self._read(found, least)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Set the state if `token` is the current state's; return the state, its token, and whether it was set."""
        least = self._seen
        before = token or _NOTHING
        desired = f"{_version(before) + 1} {b64encode(state).decode()}"
        found = self._store.compare_set(_STATE, before, desired)
        # For a missing key torch's store returns the expected value. Had the key been there, it would be `desired` now.
        if found == before:
            raise self._store.refuse(_STATE, "was removed")
        now = self._read(found, least)
        return None if now is None else (*now, found == desired)

    def _read(self, found: str, least: int) -> tuple[bytes, Any] | None:
        version = _version(found)
        if version < least:
            raise self._store.refuse(_STATE, f"went back from version {least} to {version}")
        self._seen = max(self._seen, version)
        return (b64decode(found.partition(" ")[2]), found) if version else None


def _version(stored: str) -> int:
    return int(stored.partition(" ")[0])
