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

    Every rank calls it, with its node's folder. The greatest (generation, step) that verifies wins; ranks whose
    node lacks it get it by broadcast, and its node keeps a copy.
    """
    unreadable: set[tuple[int, int]] = set()
    while True:
        own = snapshots.newest_but(unreadable) if world.is_first_on_node else None
        held = [(manifest.age, -rank, manifest) for rank, manifest in enumerate(world.gather(own)) if manifest]
        if not held:
            return None
        age, negative_rank, manifest = max(held, key=lambda entry: entry[:2])
        loaded = _everywhere(snapshots, world, manifest, source=-negative_rank)
        if loaded:
            if snapshots.generation is None:
                snapshots.generation = manifest.generation
            return loaded
        unreadable.add(age)  # its holder cannot read it a second time: to the next older one


def _everywhere(snapshots: Snapshots, world: World, manifest: Manifest, source: int) -> Loaded | None:
    """The snapshot on every rank, or None on every rank."""
    own = next((held for held in snapshots.manifests() if held.age == manifest.age), None)
    loaded = snapshots.read(own) if own else None
    have = world.gather(loaded is not None)
    if all(have):
        return loaded
    if not have[source]:
        return None
    data = _receive(snapshots, world, manifest, source)
    is_whole = hashlib.sha256(data).hexdigest() == manifest.sha256[manifest.payload]
    if not all(world.gather(is_whole or loaded is not None)):
        return None
    if loaded is None:
        loaded = Loaded(load_payload(io.BytesIO(data)), manifest, f"rank {source}'s node, step {manifest.step}")
        if world.is_first_on_node:
            snapshots.adopt(manifest, data)
    return loaded


def _receive(snapshots: Snapshots, world: World, manifest: Manifest, source: int) -> memoryview:
    """The payload, as rank ``source`` reads it from its disk, in chunks; the others hold it in memory."""
    size_bytes = manifest.size_bytes[manifest.payload]
    data = bytearray(size_bytes)
    if world.rank == source:
        try:
            with (snapshots.folder / manifest.payload).open("rb") as file:
                file.readinto(data)
        except OSError as error:  # the others wait: send what there is, and let its hash tell them
            log.warning("cannot read %s: %s", snapshots.folder / manifest.payload, error)
    for start in range(0, size_bytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, size_bytes - start)
        part = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start)
        chunk = part.to(world.device)
        dist.broadcast(chunk, src=source)
        if world.rank != source:
            part.copy_(chunk)
    return memoryview(data)
