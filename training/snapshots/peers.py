"""Messages and files that ranks exchange to save a sharded snapshot, over a gloo group of their own.

The group is not that of the training, so that the loop waits for the copy to host memory only.
"""

import io
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]  # no stub

from nodekit.training.group.collectives import gather_objects
from nodekit.training.snapshots.files.commit import HashingFile, place, retried, written_beside
from nodekit.training.snapshots.files.fence import Fenced
from nodekit.training.world import World

log = logging.getLogger("nodekit.training")

T = TypeVar("T")

# In effect none: a disk may take long, a dead peer is noticed by its connection, and after a timeout gloo's group is
# broken, so that no rank could save any more.
_TIMEOUT = timedelta(days=7)
_CHUNK_BYTES = 16 << 20
_TAG = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A file that one rank sends to another."""

    name: str
    sha256: str
    size_bytes: int
    source: int
    """The rank that sends it."""
    target: int
    """The rank that receives it."""


class Peers:
    """A process group of all ranks for saving snapshots; every rank has to make the same calls."""

    def __init__(self, world: World) -> None:
        """Create the group; all ranks call it. The object must outlive the last collective of this process."""
        self._rank, self._world_size = world.rank, world.world_size
        self._group = _own_group(world)

    def together(self, call: Callable[[], T]) -> list[T]:
        """Return the results of ``call`` on all ranks, by rank; if it raises on one, raise an OSError on the others."""
        value: T | None = None
        problem: OSError | ValueError | Fenced | None = None
        try:
            value = call()
        except (OSError, ValueError, Fenced) as error:
            problem = error
        parts = self.gather((value, problem and str(problem)))
        if problem:
            raise problem
        if problems := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(parts) if text is not None]:
            raise OSError("; ".join(problems))
        return [value for value, _ in parts]

    def send_files(self, folder: Path, transfers: Sequence[Transfer], *, syncs: bool = True) -> None:
        """Send files of ``folder`` to ranks that write them to their own folders, in chunks.

        A rank that cannot read or write takes part all the same, since the others wait for it.

        Args:
            folder: of this rank.
            transfers: the same on all ranks.
            syncs: whether to sync the received files to the disk.

        Raises:
            OSError: a file for this rank did not arrive whole, or could not be written.
        """
        problems: list[str] = []
        for outgoing, incoming in _turns(transfers, self._rank):
            with _arriving(folder, incoming, problems, syncs) if incoming else nullcontext() as file:
                self._send_and_receive(folder, outgoing, incoming, file)
        if problems:
            raise OSError("; ".join(problems))

    def _send_and_receive(
        self, folder: Path, outgoing: Transfer | None, incoming: Transfer | None, file: HashingFile | None
    ) -> None:
        out_bytes, in_bytes = (each.size_bytes if each else 0 for each in (outgoing, incoming))
        out_chunk, in_chunk = (
            torch.zeros(min(_CHUNK_BYTES, size), dtype=torch.uint8, device="cpu")
            for size in (out_bytes, in_bytes)
        )
        for start in range(0, max(out_bytes, in_bytes), _CHUNK_BYTES):
            out_part, in_part = out_chunk[: max(0, out_bytes - start)], in_chunk[: max(0, in_bytes - start)]
            works = []
            if incoming and len(in_part):
                works.append(self._group.recv([in_part], incoming.source, _TAG))  # type: ignore[attr-defined]
            if outgoing and len(out_part):
                read_part(out_part, folder / outgoing.name, start)
                works.append(self._group.send([out_part], outgoing.target, _TAG))  # type: ignore[attr-defined]
            for work in works:
                work.wait(_TIMEOUT)
            if file:
                file.write(in_part.numpy().data)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank; wait without a timeout."""
        return gather_objects(value, self._gather_tensors)

    def _gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self._world_size)]
        options = AllgatherOptions()
        options.timeout = _TIMEOUT
        self._group.allgather([parts], [tensor], options).wait()  # type: ignore[attr-defined]  # no stub
        return parts


def read_part(part: torch.Tensor, path: Path, start: int) -> None:
    """Fill a tensor of bytes from a file, from offset ``start`` on, to send it.

    An error is only logged: the other ranks wait for the chunk, and find that the hash is wrong.
    """

    def read() -> None:
        with path.open("rb") as file:
            file.seek(start)
            file.readinto(part.numpy().data)

    try:
        retried(read)
    except OSError as error:
        log.warning("cannot read %s: %s", path, error)


def _turns(transfers: Sequence[Transfer], rank: int) -> Iterator[tuple[Transfer | None, Transfer | None]]:
    """Yield what a rank sends and what it receives in each turn: at most one file of each.

    Both ends of a transfer do it in the same turn, and a rank takes its turns in order, so that ranks cannot deadlock.
    """
    sends: Counter[int] = Counter()  # rank → its next free turn
    receives: Counter[int] = Counter()
    outgoing: dict[int, Transfer] = {}
    incoming: dict[int, Transfer] = {}
    for each in transfers:
        turn = max(sends[each.source], receives[each.target])
        sends[each.source] = receives[each.target] = turn + 1
        if each.source == rank:
            outgoing[turn] = each
        if each.target == rank:
            incoming[turn] = each
    for turn in sorted({*outgoing, *incoming}):
        yield outgoing.get(turn), incoming.get(turn)


@contextmanager
def _arriving(folder: Path, transfer: Transfer, problems: list[str], syncs: bool) -> Iterator[HashingFile]:
    """Give the block a file, which is placed in ``folder`` afterwards if its hash is right. Writing never raises."""
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            temporary, file = stack.enter_context(written_beside(folder))
            payload = HashingFile(file)
        except OSError as error:
            payload = HashingFile(io.BytesIO(), error)
        yield payload
        try:
            payload.finish()
            if payload.sha256 != transfer.sha256:
                raise OSError(f"rank {transfer.source} has sent something else than it had announced")
            place(temporary, file, transfer.name, syncs=syncs)
        except OSError as error:
            problems.append(f"{folder / transfer.name}: {error}")


def _own_group(world: World) -> dist.ProcessGroupGloo:
    """Create a group of all ranks for the saving threads.

    ``dist.new_group`` would use the same name after each restart by torchrun, in a store that still has the addresses
    of the previous ranks: in half of all cases, ranks then wait for the previous ones, or fail.
    """
    name = world.gather(secrets.token_hex(8))[0]
    assert dist.group.WORLD
    store = dist.PrefixStore(f"nodekit-{name}", dist.group.WORLD.get_group_store())  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, world.rank, world.world_size, timedelta(seconds=world.timeout_s))
