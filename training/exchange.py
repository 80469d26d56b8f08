"""Which snapshot all ranks go on from, and getting it to those who lack it, over the process group."""

import hashlib
import io

import torch
import torch.distributed as dist

from nodekit.training.snapshot import Loaded, Manifest, Snapshots, load_payload, log
from nodekit.training.world import World

_CHUNK_BYTES = 32 << 20


def newest_of_all(snapshots: Snapshots, world: World) -> Loaded | None:
    """The newest snapshot that any node holds whole, loaded on every rank; None if nobody has one.

    Every rank calls it, with its node's folder. The greatest (generation, step) that verifies wins;
    ranks whose node lacks it get it by broadcast, and their node keeps a copy.
    """
    unreadable: set[tuple[int, int]] = set()
    while True:
        own = snapshots.load(but=unreadable) if world.is_first_on_node else None
        offers = world.gather(own.manifest if own else None)
        held = [(manifest.age, -rank, manifest) for rank, manifest in enumerate(offers) if manifest]
        if not held:
            return None
        age, negative_rank, manifest = max(held, key=lambda entry: entry[:2])
        loaded = _everywhere(snapshots, world, own, manifest, source=-negative_rank)
        if loaded:
            if snapshots.generation is None:
                snapshots.generation = manifest.generation
            return loaded
        unreadable.add(age)  # its holder cannot read it a second time: to the next older one


def _everywhere(
    snapshots: Snapshots, world: World, own: Loaded | None, manifest: Manifest, source: int
) -> Loaded | None:
    """The snapshot on every rank, or None on every rank."""
    loaded = own if own and own.manifest.age == manifest.age else snapshots.read_age(manifest.age)
    if all(world.gather(loaded is not None)):
        return loaded
    data = _receive(snapshots, world, manifest, source, keeps_it=loaded is None)
    if loaded is None and hashlib.sha256(data).hexdigest() == manifest.sha256[manifest.payload]:
        where = f"what rank {source} sent ({manifest.payload})"
        loaded = Loaded(load_payload(io.BytesIO(data)), manifest, where)
        if world.is_first_on_node:
            snapshots.adopt(manifest, data)
    return loaded if all(world.gather(loaded is not None)) else None


def _receive(
    snapshots: Snapshots, world: World, manifest: Manifest, source: int, *, keeps_it: bool
) -> bytearray:
    """The payload, as rank ``source`` reads it from its disk, in chunks; empty where it is not kept."""
    size_bytes = manifest.size_bytes[manifest.payload]
    data = bytearray(size_bytes if keeps_it else 0)
    chunk = torch.zeros(min(_CHUNK_BYTES, size_bytes), dtype=torch.uint8)
    path = snapshots.folder / manifest.payload
    for start in range(0, size_bytes, _CHUNK_BYTES):
        part = chunk[: size_bytes - start]
        if world.rank == source:
            try:
                with path.open("rb") as file:
                    file.seek(start)
                    file.readinto(part.numpy().data)
            except OSError as error:  # the others wait: send what there is, and let its hash tell them
                log.warning("cannot read %s: %s", path, error)
        sent = part.to(world.device)
        dist.broadcast(sent, src=source)
        if keeps_it:
            data[start : start + len(part)] = sent.cpu().numpy().data
    return data
