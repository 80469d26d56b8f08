"""gloo's process group, kept from one attempt to the next by torch's private ``_reconfigure`` (2.14 or newer).

A group that is left, and made anew, leaves threads, descriptors and memory behind: they cannot be ended safely, since a
thread of gloo's may still wait for a lost rank. A group that is reconfigured closes its connections, and goes on with
the same threads and with other ranks; this process may have another rank then.

`init_process_group` makes the objects of ``torch.distributed`` anew in each attempt all the same: only their backend is
kept. A backend has one store for all its life, but each attempt meets in a store of its own, which may be on another
host. `_Forwarding` is between the two.
"""

import atexit
import ctypes
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nodekit.training.group import connections

_c10d: Any = dist.distributed_c10d
_Store: Any = dist.Store  # type: ignore[attr-defined]  # no stub
_NEEDED = ("_reconfigure", "ReconfigureOptions", "_create_gloo_process_group", "Backend")
_END_S = 0.05
"""The longest wait for the collectives of a group whose connections are shut: they fail within a millisecond."""


class _Forwarding(_Store):  # type: ignore[misc]
    """A store that hands each call to the store ``now``."""

    def __init__(self, now: Any) -> None:
        super().__init__()
        self.now = now


def _forward(name: str) -> Callable[..., Any]:
    def call(self: _Forwarding, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.now, name)(*args, **kwargs)

    return call


for _name in (
    *("set", "get", "wait", "compare_set"),  # which gloo calls in torch 2.14
    *("add", "append", "check", "delete_key", "has_extended_api", "multi_get", "multi_set", "num_keys"),
):
    setattr(_Forwarding, _name, _forward(_name))


@dataclass(slots=True)
class _Gloo:
    """A backend that can be reconfigured."""

    backend: Any
    store: _Forwarding
    """Its store, to whose Python part torch has no reference."""
    sockets: connections.Connections


_present: _Gloo | None = None
_kept: _Gloo | None = None
"""That of the group which this process has left."""
_left: list[_Gloo] = []
"""Those that cannot be used again; threads may still use them."""


def is_available() -> bool:
    """Whether this torch can reconfigure a group of gloo's; the same on all ranks that have the same torch."""
    has_all = all(hasattr(_c10d, name) for name in _NEEDED)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps the backend in one that cannot. With TORCH_GLOO_LAZY_INIT, ranks
    # connect in their first collective; in a group that was reconfigured, that one waits in vain (torch 2.14).
    is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in ("y", "yes", "1", "t", "true")
    return has_all and not is_lazy and _c10d.get_debug_level() != _c10d.DebugLevel.DETAIL


def keep() -> bool:
    """Before the default group is destroyed, keep its backend for the next one; False if it is an ordinary one."""
    global _present, _kept
    group: Any = dist.group.WORLD
    if _present is None or group._get_backend(torch.device("cpu")) is not _present.backend:
        return False
    _present, _kept = None, _present
    return True


def never_free(what: object) -> None:
    """Add a reference that the interpreter's shutdown does not drop: whoever frees a group joins its threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


@atexit.register
def _leave_alone() -> None:
    """Let the process end while a thread of gloo's waits in vain, which it does until its collective times out."""
    never_free((_kept, _left))


def forget() -> None:
    """Let torch end the default group's threads and connections when the group is destroyed."""
    global _present
    _present = None


def num_left() -> int:
    """How many groups this process has left, since a collective of theirs did not end, or the ranks did not meet."""
    return len(_left)


@contextmanager
def enabled() -> Iterator[None]:
    """Within the block, `init_process_group` joins the ranks by `_reconfigure`, with what was kept if it can be used.

    All ranks have to do so: ordinary groups have other names for their addresses in the store.
    """
    global _kept
    before, _kept = _kept, None  # once: if the ranks do not meet, it is left
    if before is not None and not _has_ended(before):
        _left.append(before)
        before = None

    def create(options: Any, backend_options: object) -> Any:
        global _present
        given = options.store
        if before is None:
            options.store = store = _Forwarding(given)
            options.enable_reconfigure = True
            gloo = _Gloo(_c10d._create_gloo_process_group(options, backend_options), store, set())
        else:
            gloo = before
            gloo.store.now = given
            gloo.backend.set_timeout(options.timeout)
        try:
            with connections.opened() as gloo.sockets:
                _meet(gloo.backend, given, options.group_rank, options.group_size)
        except BaseException:
            _left.append(gloo)
            raise
        _present = gloo
        return gloo.backend

    _register(create)
    try:
        yield
    finally:
        _register(_c10d._create_gloo_process_group)


def _register(create: Callable[[Any, object], Any]) -> None:
    """Have torch create gloo's backends by this function."""
    _c10d.Backend.register_backend(
        _c10d.Backend.GLOO,
        create,
        extended_api=True,
        devices=_c10d.Backend.backend_capability[_c10d.Backend.GLOO],
        _backend_type=_c10d.ProcessGroup.BackendType.GLOO,
    )


def _has_ended(gloo: _Gloo) -> bool:
    """Shut the connections of a group that was left, and return whether all its collectives have ended.

    A barrier waits for what was started before it, or until the first of that has failed; what is left then is one that
    the other thread is at, for which the second barrier waits.
    """
    connections.shut_down(gloo.sockets)
    deadline = time.monotonic() + _END_S
    for is_second in (False, True):
        # torch forgets a work shortly after it has completed, and the first barrier may have failed.
        if is_second:
            time.sleep(0.0005)
        barrier = gloo.backend.barrier()
        while not barrier.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0002)
    return True


def _meet(backend: Any, store: Any, rank: int, world_size: int) -> None:
    """Reconfigure the backend to these ranks, each of which has its place by the order of the handles."""
    names = [f"reconfigure{each}" for each in range(world_size)]
    store.set(names[rank], json.dumps([backend.get_reconfigure_handle(), secrets.randbits(62)]))
    told = [json.loads(each) for each in store.multi_get(names)]
    options = _c10d.ReconfigureOptions()
    # Part of the next handle, of which no two may be equal: ranks may come from different attempts.
    options.uuid = told[0][1]
    options.handles = [handle for handle, _ in told]
    backend.reconfigure(options).wait()
