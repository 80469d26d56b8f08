"""Choose the snapshot from which all ranks resume, and send it to the nodes that lack it."""

import copy
import hashlib
import io
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nodekit.training.errors import TrainingError
from nodekit.training.process.kept import Kept, Made
from nodekit.training.snapshots.files.commit import NOT_FOUND, retried
from nodekit.training.snapshots.files.fence import Fence, Fenced
from nodekit.training.snapshots.files.found import Found, check_loss
from nodekit.training.snapshots.files.manifest import Loaded, Manifest, load_payload
from nodekit.training.snapshots.parts import everywhere_in_parts
from nodekit.training.snapshots.peers import read_part
from nodekit.training.snapshots.snapshot import Snapshots, log
from nodekit.training.snapshots.tensor_bytes import (
    Place,
    TensorBytes,
    places_in,
    tensors_of,
    with_tensors,
    without_tensors,
)
from nodekit.training.world import World

_CHUNK_BYTES = 32 << 20


class _Said(NamedTuple):
    """What each rank first tells the others, in one message, since the training waits meanwhile."""

    fence: int | None
    """The fence of the rank's folder; None if it cannot be read."""
    problem: str
    """Why the fence cannot be read; "" if it can."""
    expected: str
    """The snapshot that must exist, as the node's agent knows; "" if none must."""
    made: Made | None
    """Which state the rank has kept in memory; None for none."""
    on_disk: tuple[int, int] | None
    """(generation, step) of the newest snapshot in the folder, from the first rank of each node; None for none."""
    attempt: str
    """A random number; rank 0's becomes the number of the attempt."""


def newest_of_all(
    snapshots: Snapshots,
    world: World,
    *,
    writes: bool | None = None,
    is_mapped: bool | None = None,
) -> Loaded | None:
    """Load the newest intact snapshot of any node on every rank; return None if there has never been one.

    Every rank calls it, with its node's folder. The greatest (generation, step) with a correct hash wins; nodes that
    lack it get it by broadcast and keep a copy. The first rank of each node reads and verifies it, and the node's other
    ranks load the same file. For sharded snapshots, whose files may be on several nodes, see ``parts``.

    If ranks have kept a step in memory (``world.kept``), the newest such step is sent to the others instead, unless a
    snapshot is newer. Ranks that have kept this very step receive only the values that are not tensors.

    Args:
        snapshots: of this rank's node; if its generation is None, it is set to the newest of all nodes'.
        world: its process group must exist.
        writes: whether this rank writes to the folder; None: every node's first rank does.
        is_mapped: leave large tensors in the file, in memory that the ranks of a node share: for a state that is
            copied and not kept. None: only if this rank has a GPU, to which loading copies the state.

    Raises:
        Fenced: on all ranks, if any of the folders is fenced for a newer generation.
        NoneLoads: on all ranks, if there are snapshots and none can be loaded, or a folder or fence cannot be read.
        NewerKit: on all ranks, if a newer nodekit wrote the newest snapshot.
    """
    kept = world.held_step
    said = world.gather(_say(snapshots, world, kept))
    fence = _newest_fence(said)
    if snapshots.generation is not None and snapshots.generation < fence:
        raise Fenced(snapshots.generation, fence, f"the snapshot folder of a node ({snapshots.folder})")
    snapshots.attempt = said[0].attempt
    made = [each.made for each in said]
    source = source_of_all(made, [each.on_disk for each in said])
    if source is not None:
        has_snapshot = any(each.on_disk for each in said)
        if loaded := _from_memory(world, kept, made, source, has_snapshot=has_snapshot):
            return loaded
    writes = world.is_first_on_node if writes is None else writes
    is_mapped = world.device.type != "cpu" if is_mapped is None else is_mapped
    expected = max(each.expected for each in said)
    in_memory = source_of_all(made, []) if source is None else None
    newer_than = None if in_memory is None else made[in_memory]
    found = _from_disks(
        snapshots, world, expected, fence, newer_than and newer_than.age, writes=writes, is_mapped=is_mapped
    )
    if found is None and in_memory is not None:  # the snapshot that seemed newer cannot be loaded
        return _from_memory(world, kept, made, in_memory, has_snapshot=False)
    return found


def _say(snapshots: Snapshots, world: World, kept: Kept | None) -> _Said:
    fence, problem, on_disk = None, "", None
    try:
        fence = retried(Fence(snapshots.folder).read)
    except OSError as error:
        problem = f"the fence in {snapshots.folder} cannot be read: {error}"
        log.warning(problem)
    if world.is_first_on_node:
        with suppress(OSError):  # at worst, some steps are done again
            on_disk = snapshots.newest_age()
    made = kept.made if kept else None
    return _Said(fence, problem, world.expected_snapshot, made, on_disk, secrets.token_hex(8))


def _from_disks(
    snapshots: Snapshots,
    world: World,
    known: str,
    fence: int,
    newer_than: tuple[int, int] | None,
    *,
    writes: bool,
    is_mapped: bool,
) -> Loaded | None:
    """Try the snapshots of all nodes' folders, newest first, until one loads on all ranks, and return that one.

    ``known`` describes a snapshot that must exist, as the nodes' agents know; "" if none must. If ranks have kept a
    step in memory, ``newer_than`` is its age, and None is returned if no snapshot is newer.
    """
    lost: dict[str, str] = {}  # payload → why it cannot be used
    expected = ""
    while True:
        here = Found()
        if world.is_first_on_node:
            here = snapshots.look(lost, expected=expected, is_mapped=is_mapped, leave_parts=True)
        own = here.loaded
        offers = world.gather((own.manifest if own else None, here.problems, here.newer_kit))
        held = [(manifest.age, -rank, manifest) for rank, (manifest, *_) in enumerate(offers) if manifest]
        age, negative_rank, manifest = max(held, default=(None, 0, None))
        if newer_than is not None and (age is None or age <= newer_than):
            return None
        found = [Found(None, problems, newer_kit) for _, problems, newer_kit in offers]
        check_loss([*found, Found(problems=tuple(lost.values()))], age)
        if age is None or manifest is None:
            if not known or expected:
                return None
            expected = known  # all ranks look again, for longer, and report where it is missing
            continue
        if snapshots.generation is None:
            snapshots.generation = max(fence, manifest.generation)
        if manifest.is_sharded:
            loaded, why = everywhere_in_parts(snapshots, world, manifest)
        else:
            why = f"rank {-negative_rank} could read it once, and not again"
            loaded = _everywhere(
                snapshots, world, own, manifest, source=-negative_rank, writes=writes, is_mapped=is_mapped
            )
            loaded = loaded and _alike(loaded, _rest_of(world, loaded.state, -negative_rank), -negative_rank)
        if loaded:
            return loaded
        lost[manifest.payload] = f"{manifest.name}: {why}"


def _from_memory(
    world: World, kept: Kept | None, made: Sequence[Made | None], source: int, *, has_snapshot: bool
) -> Loaded | None:
    """Return rank ``source``'s kept state on every rank; None on every rank if a snapshot is to be loaded instead."""
    newest = made[source]
    assert newest is not None
    manifest = Manifest(
        generation=newest.age[0],
        step=newest.age[1],
        world_size=world.world_size,
        sha256={},
        size_bytes={},
        saved_at="",
    )
    state = kept.state if kept and kept.made == newest else None
    rest = _rest_of(world, state, source)
    if set(made) != {newest}:
        holders = [rank for rank, each in enumerate(made) if each == newest]
        received = _tensors_from(world, state, rest, holders, has_snapshot=has_snapshot)
        if received is None:
            return None
        state = with_tensors(rest, received) if state is None else state
    return _alike(Loaded(state, manifest, f"what rank {source} has kept in memory"), rest, source)


def _tensors_from(
    world: World, state: Any, rest: Any, holders: Sequence[int], *, has_snapshot: bool
) -> Sequence[torch.Tensor] | None:
    """Send the tensors that all ``holders`` have kept to each rank that has no state, and return them there.

    Tensors that arrive damaged are sent once more, by another holder if there is one. If the only holder's arrive
    damaged twice, and there is a snapshot, return None on all ranks: sender or receiver may be the cause.

    Raises:
        TrainingError: on a rank that has received damaged tensors twice; the others go on without it.
    """
    places = places_in(rest)
    received = [place.empty() for place in places] if state is None else []
    size_bytes = sum(place.size_bytes for place in places)
    lacks = state is None
    for sender in (holders[0], holders[-1]):
        data = TensorBytes(tensors_of(state) if world.rank == sender else received if lacks else [])
        _send(world, size_bytes, sender, _reader(data), data.write if lacks else None)
        hashes = world.gather(data.sha256 if world.rank == sender or lacks else None)
        damaged = [rank for rank, each in enumerate(hashes) if each not in (None, hashes[sender])]
        if not damaged:
            return received
        lacks = world.rank in damaged
        if lacks:
            log.warning("what rank %d has sent from its memory arrived damaged (by its SHA-256)", sender)
    if len(holders) == 1 and has_snapshot:
        return None
    if lacks:
        raise TrainingError(
            f"what rank {sender} has sent from its memory arrived damaged, and so it had been before: see to the "
            "memory and the network of both hosts"
        )
    return received


def _reader(data: TensorBytes) -> Callable[[torch.Tensor, int], None]:
    return lambda part, _: data.read(part)


def _rest_of(world: World, state: Any, source: int) -> Any:
    """Return on every rank the state of rank ``source`` without its tensors."""
    # A broadcast, no gather: the state may hold the order of all samples, which each rank would get from all others.
    return world.broadcast(without_tensors(state) if world.rank == source else None, source)


def _alike(loaded: Loaded, values: Any, source: int) -> Loaded:
    """Replace all values of this rank's state that are not tensors by those of rank ``source``.

    The tensors of one step are equal on all ranks. Other values may differ: when a rank is lost at the end of an epoch,
    some ranks have evaluated the model and begun the next epoch, and others have not.
    """
    try:
        return replace(loaded, state=_with_values(loaded.state, values))
    except LookupError:
        log.warning("rank %d's state has other tensors than this rank's, which goes on with its own", source)
        return loaded


def _with_values(own: Any, values: Any) -> Any:
    """Return ``own``'s tensors with all else from ``values``; raise a LookupError if ``own`` lacks a tensor."""
    if isinstance(values, Place):
        if not isinstance(own, torch.Tensor):
            raise LookupError
        return own
    if isinstance(values, dict):
        made = copy.copy(own if isinstance(own, dict) else values)  # an OrderedDict of torch's has attributes
        for key in made.keys() - values.keys():
            del made[key]
        for key, value in values.items():
            made[key] = _with_values(made.get(key), value)  # a Counter's `update` would add
        return made
    if isinstance(values, (list, tuple)):
        parts = own if isinstance(own, (list, tuple)) and len(own) == len(values) else [None] * len(values)
        made_of = map(_with_values, parts, values)
        return type(values)(*made_of) if hasattr(values, "_fields") else type(values)(made_of)
    return values


def source_of_all(kept: Sequence[Made | None], on_disk: Sequence[tuple[int, int] | None]) -> int | None:
    """Return the rank whose kept state all ranks go on from; None if they go on from a snapshot.

    Args:
        kept: for each rank, which state it has in memory; None for none.
        on_disk: for each rank, (generation, step) of the newest snapshot in its folder; None if there is none.
    """
    ages = [made.age if made else None for made in kept]
    newest = max((age for age in ages if age), default=None)
    if newest is None or newest < max((age for age in on_disk if age), default=newest):
        return None
    return ages.index(newest)


def _newest_fence(said: Sequence[_Said]) -> int:
    """Return the highest fence of those nodes' folders that can be read.

    Raises:
        OSError: on all ranks, if no fence can be read: then it is unknown which generation may train.
    """
    fences = [each.fence for each in said if each.fence is not None]
    if not fences:
        raise OSError(
            f"whether this generation may train is not known: {'; '.join(sorted({each.problem for each in said}))}. "
            "Mend the disk or the file server and start again"
        )
    return max(fences)


def writes_snapshots(snapshots: Snapshots, world: World) -> bool:
    """Whether this rank writes to ``snapshots.folder``; every rank calls it.

    If each node has a folder of its own, the first rank of each node writes. If all nodes are configured to share the
    folder (``world.snapshot_is_shared``), that is checked, and the lowest of the ranks that see the same folder writes.
    """
    if not world.snapshot_is_shared:
        return world.is_first_on_node
    lowest = lowest_seen(snapshots, world)[world.rank]
    return world.is_first_on_node and lowest in (world.rank, None)


def lowest_seen(snapshots: Snapshots, world: World) -> list[int | None]:
    """Return for each rank the lowest rank that sees the same folder, or None; every rank calls it.

    The first rank of each node creates a file in its folder, and all ranks look for these files.
    """
    own = snapshots.folder / f".seen-{secrets.token_hex(8)}"
    if world.is_first_on_node:
        try:
            snapshots.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            own.touch(mode=0o600)
        except OSError as error:
            log.warning("cannot write to %s: %s", snapshots.folder, error)
    try:
        names = world.gather(own.name if world.is_first_on_node else None)
        seen, can_look = [], True
        try:
            seen = [rank for rank, name in enumerate(names) if name and _is_there(snapshots.folder / name)]
        except OSError as error:  # other ranks may write to this folder, although this one cannot list it
            log.warning("cannot look into %s, so this rank does not write there: %s", snapshots.folder, error)
            can_look = world.is_main
        lowest = world.gather(min(seen, default=None) if can_look else 0)
    finally:  # all ranks have looked, or one is lost
        with suppress(OSError):
            own.unlink()
    blind = [rank for rank, each in enumerate(lowest) if each != 0]
    if blind and world.is_main and world.snapshot_is_shared:
        log.warning(
            "%s was said to be one folder for all nodes, but what rank 0 writes there is not seen by rank %s: "
            "they keep snapshots of their own",
            snapshots.folder,
            ", ".join(map(str, blind)),
        )
    return lowest


def _is_there(path: Path) -> bool:
    try:
        retried(path.stat)
    except NOT_FOUND:
        return False
    return True


def _everywhere(
    snapshots: Snapshots,
    world: World,
    own: Loaded | None,
    manifest: Manifest,
    *,
    source: int,
    writes: bool,
    is_mapped: bool,
) -> Loaded | None:
    """Load a whole snapshot of rank ``source`` on every rank, sending it where needed; None on all if one cannot."""
    is_here = own is not None and own.manifest.made == manifest.made and not own.manifest.is_sharded
    loaded = own if is_here else None
    loaded = _from_node(snapshots, world, manifest, loaded, is_mapped=is_mapped)
    if all(world.gather(loaded is not None)):
        return loaded
    # First by way of the disks: a state may be as large as a node's memory.
    with snapshots.receiving(manifest) if writes and loaded is None else nullcontext() as file:
        _broadcast(snapshots, world, manifest, source, file.write if file else None)
    world.gather(None)  # now other nodes that share the folder can read it
    is_sent = loaded is None
    if is_sent and world.is_first_on_node:
        loaded = snapshots.read_age(manifest.age, is_mapped=is_mapped)
    loaded = _from_node(snapshots, world, manifest, loaded, is_mapped=is_mapped)
    loaded = _from_rank(source, loaded) if is_sent else loaded
    if all(world.gather(loaded is not None)):
        return loaded
    # Send it again, into memory, for ranks whose disk cannot store it.
    data = io.BytesIO()
    _broadcast(snapshots, world, manifest, source, None if loaded else data.write)
    if loaded is None and hashlib.sha256(data.getbuffer()).hexdigest() == manifest.sha256[manifest.payload]:
        data.seek(0)
        loaded = _from_rank(source, Loaded(load_payload(data), manifest, manifest.payload))
    return loaded if all(world.gather(loaded is not None)) else None


def _from_node(
    snapshots: Snapshots, world: World, manifest: Manifest, loaded: Loaded | None, *, is_mapped: bool
) -> Loaded | None:
    """Load the snapshot on the other ranks of a node whose first rank has loaded, and so verified, the file."""
    nodes = world.gather(world.node_rank if world.is_first_on_node and loaded else None)
    if loaded is None and world.node_rank in nodes:
        return snapshots.read_age(manifest.age, is_verified=True, is_mapped=is_mapped)
    return loaded


def _from_rank(source: int, loaded: Loaded | None) -> Loaded | None:
    return loaded and Loaded(
        loaded.state, loaded.manifest, f"what rank {source} sent ({loaded.manifest.payload})"
    )


def _broadcast(
    snapshots: Snapshots,
    world: World,
    manifest: Manifest,
    source: int,
    receive: Callable[[memoryview], object] | None,
) -> None:
    """Send the payload from rank ``source``'s disk to all ranks, in chunks.

    All ranks take part in every chunk, also those that have the payload: a rank that waited for the whole transfer
    would run into the process group's timeout.
    """
    path = snapshots.folder / manifest.payload

    def read(part: torch.Tensor, start: int) -> None:
        read_part(part, path, start)

    _send(world, manifest.size_bytes[manifest.payload], source, read, receive)


def _send(
    world: World,
    size_bytes: int,
    source: int,
    read: Callable[[torch.Tensor, int], None],
    receive: Callable[[memoryview], object] | None,
) -> None:
    """Broadcast ``size_bytes`` bytes from rank ``source`` in chunks.

    Args:
        world: its process group must exist.
        size_bytes: of all chunks together.
        source: the sending rank.
        read: fills the given tensor with the bytes from the given offset on; called on rank ``source`` only.
        receive: gets each chunk in order; None on ranks that have the bytes already.
    """
    chunk = torch.zeros(min(_CHUNK_BYTES, size_bytes), dtype=torch.uint8, device="cpu")
    for start in range(0, size_bytes, _CHUNK_BYTES):
        part = chunk[: size_bytes - start]
        if world.rank == source:
            read(part, start)
        sent = part.to(world.device)
        dist.broadcast(sent, src=source)
        if receive:
            receive(sent.cpu().numpy().data)
