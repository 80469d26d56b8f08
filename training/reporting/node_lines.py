"""Lines that each node prints in a run without kit: the ranks it waits for, and where output and weights are."""

import socket
from pathlib import Path

from nodekit.training.process.devices import number_of
from nodekit.training.world import World


def start(world: World, folder: Path, *, engine: str) -> str:
    """Return the line before the rendezvous; the first rank of each node prints it."""
    ranks = _ranks(world.rank, world.local_world_size)
    device = world.device.type
    if device != "cpu":
        device += f":{_span(0, number_of(device) if engine == 'dp' else world.local_world_size)}"
    where = f"{ranks} of {world.world_size} on {device}, {world.backend}"
    return f"{_node(world)}: {where}{_waits(world)}; output in {folder}, where the same command goes on"


def met(world: World) -> str:
    """Return the line after the rendezvous; "" if there are no ranks on other nodes."""
    return f"{_node(world)}: all {world.world_size} ranks are there" if _waits(world) else ""


def end(world: World, folder: Path, *, exit_status: int, early_stop: int | None = None) -> str:
    """Return the line at the end, printed by the first rank of each node; "" after a failure without a snapshot."""
    if exit_status == 0:
        best = f"the best weights are in {folder / 'best'}, " if (folder / "best").is_dir() else ""
        text = f"{best}the last in {folder / 'last'}"
        more = "more --epochs"
        if early_stop is not None:
            more += f" (if --early-stop {early_stop} has ended it: without that, or with a greater one)"
        return (
            f"{_node(world)}: trained to the end: {text}. The same command with {more} trains on; with another "
            "--output it trains anew"
        )
    snapshots = world.snapshot_dir or folder / "snapshots"
    if not any(snapshots.glob("g*.json")):
        return ""
    # After a failure, the same command may fail again unless the cause is fixed, such as too few --epochs.
    when = "when what is said above is mended, " if exit_status == 1 else ""
    return f"{_node(world)}: the newest snapshot is in {snapshots}: {when}the same command goes on from there"


def _node(world: World) -> str:
    return f"nodekit: node {world.node_rank} ({socket.gethostname()})"


def _waits(world: World) -> str:
    first, others = world.rank, world.world_size - world.local_world_size
    if others <= 0 or not world.launched:
        return ""
    if first:
        return f"; waiting for rank 0 at {world.meets_at}"
    return f"; waiting at {world.meets_at} for {_ranks(world.local_world_size, others)} on other nodes"


def _ranks(first: int, num: int) -> str:
    return f"rank{'s' if num > 1 else ''} {_span(first, num)}"


def _span(first: int, num: int) -> str:
    return f"{first}-{first + num - 1}" if num > 1 else str(first)
