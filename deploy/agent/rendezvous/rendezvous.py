"""torch's c10d rendezvous with the fixes that a cluster needs; everything else is upstream's.

It reads private names of `torch.distributed.elastic.rendezvous.dynamic_rendezvous` (2.4 to 2.15);
tests/deploy/agent/test_rendezvous.py fails when upstream moves them. What differs from stock c10d:

- ranks follow the plan's node_rank, where upstream sorts address *strings* ("10.0.0.10" before "10.0.0.2");
- the store takes over a socket that already listens, so the port found free cannot be lost in between;
- every round has a new store for the workers, kept by the agent of rank 0: upstream keeps the first round's, with
  a stale MASTER_ADDR and old keys in it, or (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE`) leaves it to the worker of
  rank 0, for which the others then wait in growing pauses (0.4 s of a start);
- a lost participant is a reason to re-form (upstream looks at waiting nodes only), and its keepalive (`keepalive.py`)
  shows the loss seconds before its heartbeat expires;
- a round is complete as soon as all connected nodes are in it, not after the last call;
- the clocks of two hosts are never compared;
- the loss of the store's host ends every call that waits for it;
- values in the store are signed (`signed_store.py`), and unsigned ones are refused before they are unpickled;
- the state is polled every 0.05 s, at first more often in small jobs, not every second;
- upstream's events, which are recorded nowhere, take the caller's name from its frame, not from the source files of the
  whole stack (`inspect.stack`, twice for each event: half a second of a core for each round).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import json
import math
import os
import random
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # no stubs
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as upstream
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)

from nodekit.deploy.agent import descriptors
from nodekit.deploy.agent.rendezvous.formed import DONE, Formed
from nodekit.deploy.agent.rendezvous.keepalive import Keepalive, KeepaliveServer, News, cut_connections
from nodekit.deploy.agent.rendezvous.signed_store import SignedBackend, SignedStore
from nodekit.deploy.agent.rendezvous.state import HEARTBEAT_S, HEARTBEATS, State
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.host import ports
from nodekit.deploy.host.schema import Say

CONNECT_TIMEOUT_S = 60.0
ANSWER_S = 1.0
FIRST_CALL_S = 15.0  # how long the first round of a generation waits for nodes beyond min_nodes
FORM_TIMEOUT_S = 20.0  # for the members to exchange their details, once the round is complete
LAST_LOOK_S = 3.0  # how long the rendezvous host keeps the store up for the other nodes to read the outcome
_POLL_S = 0.05
_SOON_S = 1.0  # how long small jobs poll more often: by then most rounds have formed
_POLL_S_A_NODE = 0.0005
_HUB, _OUTCOME = "hub", "outcome"
_T = TypeVar("_T")


class StoreLost(Exception):
    """The rendezvous host or its agent is unreachable, or a stranger writes to the store."""


class FormAgain(Exception):
    """The round broke up before its members had exchanged their details: form it again."""


@dataclass(eq=True, frozen=True, repr=False)
class RankedNode(upstream._NodeDesc):
    """A node that sorts by its node_rank in the plan; upstream assigns ranks in sorted order."""

    node_rank: int = 0
    process: str = ""
    """A random number of the process: after a container or host restarts, a new agent may have the old one's pid."""

    def __lt__(self, other: RankedNode) -> bool:
        return (self.node_rank, self.pid) < (other.node_rank, other.pid)

    @property
    def identity(self) -> str:
        """The name by which the keepalive server knows this process."""
        return f"{self.node_rank}.{self.pid}.{self.process}"


@functools.cache
def number_of_process(pid: int) -> str:  # noqa: ARG001  # the cache's key
    """Return a random number for this process, always the same one for the same `pid`; a fork gets its own."""
    return secrets.token_hex(8)


def method_name(depth: int = 2) -> str:
    """Return the name of the function `depth` frames up, in place of upstream's slow `get_method_name`."""
    return sys._getframe(depth).f_code.co_name


class Rendezvous:
    """One node's part in the rendezvous of one generation.

    `pause` is called again and again during each wait; an exception that it raises ends the wait. `say` records events.
    """

    def __init__(
        self, spec: AgentSpec, pause: Callable[[], None], say: Say, on_news: Callable[[], None] = lambda: None
    ) -> None:
        """Connect to the store on the rendezvous host; on that host, start it.

        `on_news` is called, by another thread, when a node is lost or a round is broken, so that the agent reacts at
        once.

        Raises:
            StoreLost: there is no rendezvous of this generation at the address and port of the spec.
        """
        self._spec = spec
        self._pause = pause
        self._say = say
        self._on_news = on_news
        self._broken_round = self._explained_round = -1
        self._told_lost: set[str] = set()
        self._keepalive_server: KeepaliveServer | None = None
        self._keepalive: Keepalive | None = None
        self._formed_size = 0
        self._workers_stores: list[Any] = []
        self._soon_until = 0.0
        run_id = f"{spec.run_id}.{spec.generation}"
        where = f"{spec.master_addr}:{spec.master_port}"
        if spec.listen_fd is None:  # torch would wait too, but without handling signals
            self._wait_for(
                lambda: answers(spec.master_addr, spec.master_port, self._pause) or None,
                f"nobody answers at {where} since {CONNECT_TIMEOUT_S:.0f} s",
            )
        with self.lost_store_is_told():
            self._store = _store(
                spec.master_addr, spec.master_port, listen_fd=spec.listen_fd, multi_tenant=True
            )
            self._signed = SignedStore(self._store, spec.token, f"nodekit/{run_id}", where)
            pid = os.getpid()
            node = RankedNode(
                spec.local_addr, pid, 0, node_rank=spec.node_rank, process=number_of_process(pid)
            )
            backend = SignedBackend(self._signed)
            self._identity = node.identity
            self._connect_keepalive(node.identity)
        settings = upstream.RendezvousSettings(
            run_id,
            spec.min_nodes,
            spec.max_nodes,
            _Timeouts(
                join=timedelta(seconds=spec.wait_s),
                last_call=timedelta(seconds=max(spec.last_call_s, FIRST_CALL_S)),
                heartbeat=timedelta(seconds=60),
            ),
            keep_alive_interval=timedelta(seconds=HEARTBEAT_S),
            keep_alive_max_attempt=HEARTBEATS,
        )
        self._settings = settings
        self._state = State(
            backend,
            settings,
            node=node,
            is_gone=self.is_gone,
            are_all_here=self.are_all_here,
            poll_s=lambda: self.poll_s,
        )
        self._handler = upstream.DynamicRendezvousHandler(
            node, settings, backend.name, self._store, self._state
        )
        upstream._delay = self._delay  # type: ignore[attr-defined]  # upstream imports it without exporting it
        upstream.get_method_name = method_name

    def _wait_for(self, read: Callable[[], _T | None], what: str) -> _T:
        """Poll `read` until its result is not None, and return that.

        Raises:
            StoreLost: with the message `what`, after `CONNECT_TIMEOUT_S` without a result.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while (found := read()) is None:
            self._pause()
            if time.monotonic() > deadline:
                raise StoreLost(what)
            time.sleep(_POLL_S)
        return found

    def _connect_keepalive(self, identity: str) -> None:
        spec = self._spec
        # A token of this generation alone: agents of an earlier one may not know yet that theirs is over.
        token = hmac.new(
            spec.token.encode(), f"lifeline\0{spec.run_id}.{spec.generation}".encode(), "sha256"
        ).hexdigest()
        if spec.listen_fd is not None:
            # The store has taken over the socket by now, so nothing can start over: wait for descriptors here.
            self._keepalive_server = descriptors.when_there(
                lambda: KeepaliveServer(
                    spec.local_addr, token, spec.keep_alive_s, spec.lost_after, self._say, self._hear
                ),
                self._pause,
            )
            self._signed.set(_HUB, str(self._keepalive_server.port))
            return
        where = f"{spec.master_addr}:{spec.master_port}"
        port = self._wait_for(lambda: self._signed.get(_HUB), f"{where} has no rendezvous of this generation")
        try:
            self._keepalive = Keepalive(
                spec.master_addr,
                int(port),
                token,
                identity,
                keep_alive_s=spec.keep_alive_s,
                lost_after=spec.lost_after,
                on_lost=lambda: cut_connections(spec.master_addr, spec.master_port),
                on_news=self._hear,
            )
        except OSError as error:
            raise StoreLost(str(error)) from error

    def form(self, own: dict[str, Any]) -> Formed:
        """Form a round with the other nodes, and exchange details with them; `own` are those of this node.

        Raises:
            StoreLost: the rendezvous host is unreachable.
            FormAgain: a member was lost, or another node came, before all details were exchanged.
            RendezvousClosedError: the job has ended elsewhere.
            RendezvousTimeoutError: too few nodes came.
        """
        # Keep upstream from making its own store for workers, which it does in the first round only.
        handler: Any = self._handler
        handler._bootstrap_store_info = handler._shared_tcp_store_server = ...
        self._soon_until = time.monotonic() + _SOON_S
        with self.lost_store_is_told():
            info = handler.next_rendezvous()
            # A member was lost after the round was complete, before upstream assigned the ranks.
            if info.rank >= info.world_size or info.world_size < self._spec.min_nodes:
                raise FormAgain
            self._formed_size = info.world_size
            workers_store = None
            own = {**own, "identity": self._identity}
            if info.rank == 0:
                workers_store = _new_store(self._spec.local_addr)
                own = {**own, "master": [self._spec.local_addr, workers_store.port]}
            self._workers_stores.append(workers_store)
            number = int(self._state.state.round)
            store = self._signed.part(str(number))
            keys = [f"member/{rank}" for rank in range(info.world_size)]
            store.set(keys[info.rank], json.dumps(own))
            deadline = time.monotonic() + FORM_TIMEOUT_S
            while (told := store.get_all(keys)) is None:
                self._pause()
                if self.num_nodes_waiting() or time.monotonic() > deadline:
                    raise FormAgain
                time.sleep(self.poll_s)
            members = tuple(json.loads(text) for text in told)
        self._settings.timeout.to_last_call(self._spec.last_call_s)  # type: ignore[attr-defined]  # ours
        master_addr, master_port = members[0]["master"]
        return Formed(
            round=number,
            group_rank=info.rank,
            members=members,
            store=store,
            master_addr=master_addr,
            master_port=master_port,
        )

    def tell_broken(self, number: int, *, is_explained: bool) -> None:
        """Tell all agents that a round is broken because a rank of this node has failed.

        Args:
            number: of the round.
            is_explained: whether that rank's error shows the cause, so that no agent need wait for other ranks' errors.
        """
        news = {"broken": number, "explained": is_explained}
        if self._keepalive_server is not None:
            self._keepalive_server.tell(news)
        elif self._keepalive is not None:
            self._hear(news)
            self._keepalive.tell(news)

    def is_broken(self, number: int) -> bool:
        """Whether an agent has reported this round, or a later one, as broken."""
        return self._broken_round >= number

    def is_explained(self, number: int) -> bool:
        """Whether an agent has reported this round, or a later one, as broken, and knows the cause."""
        return self._explained_round >= number

    def _hear(self, news: News) -> None:
        number = news.get("broken", -1)
        if news.get("explained"):
            self._explained_round = max(self._explained_round, number)
        self._broken_round = max(self._broken_round, number)
        if "lost" in news:
            self._told_lost.add(news["lost"])
        self._told_lost.discard(news.get("found", ""))
        self._on_news()

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait to join, plus the number of this round's members that are lost.

        Raises:
            StoreLost: the rendezvous host is unreachable.
        """
        with self.lost_store_is_told():
            waiting: int = self._handler.num_nodes_waiting()
        return waiting + self.num_lost

    def has_lost(self, formed: Formed) -> bool:
        """Whether the round is broken, or it has lost the rendezvous host or a member that was not done."""
        try:
            self.num_nodes_waiting()  # reads the state, for `here`
            with self.lost_store_is_told():
                away = set(formed.names) - self.here
                return self.is_broken(formed.round) or bool(formed.without(DONE, among=away))
        except StoreLost:
            return True

    def workers_begin(self) -> None:
        """Drop the worker stores of earlier rounds; call it when the workers of the newest round begin."""
        del self._workers_stores[:-1]

    def wait_for(self, formed: Formed, what: str, pause: Callable[[], None], until: float = math.inf) -> None:
        """Wait until all members that are not lost have set the flag `what`, or `time.monotonic()` is `until`."""
        while time.monotonic() < until and not self.here.isdisjoint(formed.without(what)):
            pause()
            self.num_nodes_waiting()  # reads the state, for `here`
            time.sleep(_POLL_S)

    @property
    def num_lost(self) -> int:
        """How many of the round's members are lost, as of the last poll."""
        return max(0, self._formed_size - len(self._state.state.participants))

    @property
    def is_closed(self) -> bool:
        """Whether some node has ended the job, as of the last poll."""
        return bool(self._state.state.closed)

    @property
    def here(self) -> set[str]:
        """The names of the round's members that are not lost, as of the last poll."""
        state: Any = self._state.state
        return {self._spec.name_of(node.node_rank) for node in state.participants}

    @property
    def present(self) -> list[int]:
        """The node_rank of each node that takes part or waits to join, as of the last poll."""
        state: Any = self._state.state
        return sorted({node.node_rank for node in (*state.participants, *state.wait_list)})

    @property
    def outcome(self) -> str:
        """How the job ended, once the rendezvous is closed; "failed" if the store cannot say."""
        with contextlib.suppress(StoreLost), self.lost_store_is_told():
            return self._signed.get(_OUTCOME) or "failed"
        return "failed"

    def close(self, outcome: str = "") -> None:
        """Leave the rendezvous; with an outcome, close it for every node."""
        with contextlib.suppress(StoreLost, RendezvousError):
            if outcome and not self.is_lost:
                with self.lost_store_is_told():
                    self._signed.set(_OUTCOME, outcome)
                    self._handler.set_closed()
        if self._keepalive_server is not None:
            deadline = time.monotonic() + (LAST_LOOK_S if outcome else 0)
            while self._keepalive_server.connected and time.monotonic() < deadline:
                time.sleep(_POLL_S)  # the store ends with this process: let the other nodes read the outcome
            self._keepalive_server.close()
        if self._keepalive is not None:
            self._keepalive.close()
            cut_connections(self._spec.master_addr, self._spec.master_port)
        self._handler._stop_heartbeats()

    @property
    def is_lost(self) -> bool:
        """Whether the keepalive to the rendezvous host has ended; False on that host itself."""
        return self._keepalive is not None and self._keepalive.lost.is_set()

    @contextlib.contextmanager
    def lost_store_is_told(self) -> Iterator[None]:
        """Wrap calls of a store: raise StoreLost for whatever torch raises when the store's host is gone."""
        try:
            yield
            if self.is_lost:
                raise StoreLost("its connection ended")
        except (RendezvousConnectionError, RendezvousStateError, DistError) as error:
            raise StoreLost(str(error).splitlines()[0]) from error

    def _delay(self, seconds: float | tuple[float, float]) -> None:
        """Sleep until the next poll, at most `poll_s`, in place of upstream's function, which sleeps up to a second."""
        self._pause()
        if self.is_lost:
            raise RendezvousConnectionError("the rendezvous host is gone")
        time.sleep(self.poll_s * random.random() if isinstance(seconds, tuple) else min(seconds, self.poll_s))  # noqa: S311

    @property
    def poll_s(self) -> float:
        """Seconds between two polls of the state: more for more nodes, since the store answers one at a time."""
        is_soon = time.monotonic() < self._soon_until
        return min(_POLL_S, _POLL_S_A_NODE * self._spec.max_nodes) if is_soon else _POLL_S

    def is_gone(self, node: RankedNode) -> bool:
        """Whether a node's keepalive has ended; the rendezvous host notices, and tells the other nodes."""
        return node.identity in self._lost

    def gone(self, formed: Formed) -> list[str]:
        """Return the names of a round's members whose keepalives have ended, even if a new agent runs there since."""
        lost = self._lost
        return sorted(str(each["name"]) for each in formed.members if each["identity"] in lost)

    @property
    def _lost(self) -> set[str]:
        return self._told_lost if self._keepalive_server is None else self._keepalive_server.lost

    # --- what only the rendezvous host knows ---

    def are_all_here(self, participants: set[RankedNode], *, is_first_round: bool) -> bool:
        """Whether a round need not wait for more nodes: all connected ones (in the first round: all voters) are in."""
        if self._keepalive_server is None or len(participants) < self._spec.min_nodes:
            return False
        if is_first_round:
            names = {self._spec.name_of(node.node_rank) for node in participants}
            return set(self._spec.electorate) <= names
        return self._keepalive_server.connected <= {node.identity for node in participants}


class _Timeouts(upstream.RendezvousTimeout):
    def to_last_call(self, seconds: float) -> None:
        """Set how long later rounds wait for more nodes once they have min_nodes (upstream's last call)."""
        self._last_call = timedelta(seconds=seconds)


def answers(address: str, port: int, pause: Callable[[], None]) -> bool:
    """Whether a process listens there; wait `ANSWER_S` at most, and call `pause` meanwhile."""
    with contextlib.suppress(OSError), socket.socket(ports.family_of(address)) as connection:
        connection.setblocking(False)
        error, deadline = connection.connect_ex((address, port)), time.monotonic() + ANSWER_S
        ends = select.poll()
        ends.register(connection, select.POLLOUT)
        while error == errno.EINPROGRESS and time.monotonic() < deadline:
            pause()
            if ends.poll(_POLL_S * 1000):
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return error == 0
    return False


def _store(address: str, port: int, *, listen_fd: int | None, **more: bool) -> Any:
    """Connect to a store, or, given the descriptor of a listening socket, start one on it."""
    more["is_master"] = listen_fd is not None
    timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    try:
        return TCPStore(address, port, timeout=timeout, master_listen_fd=listen_fd, **more)
    except NotImplementedError:
        # The libuv server of torch 2.4 cannot take over a socket; the older server, slower with many ranks, can.
        return TCPStore(address, port, timeout=timeout, master_listen_fd=listen_fd, use_libuv=False, **more)


def _new_store(address: str) -> Any:
    held = ports.listen(address)
    port = held.getsockname()[1]
    try:
        return _store(address, port, listen_fd=held.detach(), wait_for_workers=False)
    except DistError:
        descriptors.check()  # torch does not say if descriptors ran out, which is no loss of the rendezvous
        raise
