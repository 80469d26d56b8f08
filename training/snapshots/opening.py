"""The snapshots that a rank's options ask for."""

from pathlib import Path

from nodekit.training.options.options import Options
from nodekit.training.snapshots.exchange import writes_snapshots
from nodekit.training.snapshots.snapshot import Snapshots
from nodekit.training.world import World


def open_snapshots(folder: Path, options: Options, world: World) -> tuple[Snapshots, bool]:
    """Those in kit's folder for this node, else in ``folder``; whether this rank commits them. All ranks call it."""
    snapshots = Snapshots(
        world.snapshot_dir or folder / "snapshots", keep=options.keep, generation=world.generation,
        leave_shards=options.engine == "fsdp", allow_nan=True,  # the weights are looked at on the device
    )  # fmt: skip
    if options.snapshot_format == "sharded":
        from nodekit.training.snapshots.sharded import ShardedSnapshots  # takes half a second to import

        sharded = ShardedSnapshots(snapshots, world)
        return sharded, sharded.commits
    return snapshots, writes_snapshots(snapshots, world)
