"""Open a rank's snapshots as its options ask for."""

import re
import secrets
import shutil
from pathlib import Path

from nodekit.training.errors import TrainingError
from nodekit.training.options.options import Options
from nodekit.training.snapshots.exchange import writes_snapshots
from nodekit.training.snapshots.files import commit
from nodekit.training.snapshots.files.manifest import MANIFEST, age_of
from nodekit.training.snapshots.snapshot import Snapshots, log
from nodekit.training.world import World

_NOTHING = (-1, -1)
"""A (generation, step) older than every snapshot."""


def open_snapshots(folder: Path, options: Options, world: World) -> tuple[Snapshots, bool]:
    """Return the snapshots in kit's folder for this node, else in ``folder``, and whether this rank commits them.

    All ranks call it.
    """
    if world.snapshot_dir is None and world.is_first_on_node:
        bring_newer(folder, folder.parent if world.node_rank else folder)
    snapshots = Snapshots(
        world.snapshot_dir or folder / "snapshots", keep=options.keep, generation=world.generation,
        leave_shards=options.engine == "fsdp", allow_nan=True,  # the weights are looked at on the device
    )  # fmt: skip
    if options.is_sharded:
        from nodekit.training.snapshots.sharded import ShardedSnapshots  # takes half a second to import

        sharded = ShardedSnapshots(snapshots, world)
        return sharded, sharded.commits
    return snapshots, writes_snapshots(snapshots, world)


def bring_newer(own: Path, base: Path) -> None:
    """Copy newer snapshots into ``own`` from the run's other folders on this machine: ``base`` and ``base/nodeN``.

    A folder is named by the node's number, and a machine may have had another number before. Nothing is removed from
    the other folders: on a shared disk they belong to nodes that may be running.

    Raises:
        TrainingError: the other folders cannot be read, and ``own`` has no snapshot to go on from.
    """
    numbered = [path for path in base.glob("node*") if re.fullmatch(r"node\d+", path.name)]
    try:
        has = newest = max(map(age_of, _manifests(own)), default=_NOTHING)
    except OSError:  # loading the snapshots reports it
        return
    source = None
    for other in [each for each in (base, *sorted(numbered)) if each != own]:
        try:
            for name in filter(lambda name: age_of(name) >= has, _manifests(other)):
                _bring_snapshot(other / "snapshots", own / "snapshots", name)
                if age_of(name) > newest:
                    newest, source = age_of(name), other
        except OSError as error:
            if has == _NOTHING:
                raise TrainingError(
                    f"whether the newest snapshot is in {other / 'snapshots'} is not known: {error}. Mend the disk "
                    "and start again; to train anew, give another folder with --output"
                ) from error
            log.warning("whether a newer snapshot is in %s is not known: %s", other / "snapshots", error)
    if source is not None:
        print(
            f"nodekit: the newest snapshot is in {source / 'snapshots'}: {own} goes on from there", flush=True
        )
        with commit.warned(f"what belongs to it in {source} is not in {own}, and going on without"):
            _bring_results(source, own)


def _manifests(folder: Path) -> list[str]:
    try:
        return [path.name for path in (folder / "snapshots").iterdir() if MANIFEST.fullmatch(path.name)]
    except commit.NOT_FOUND:
        return []


def _bring_snapshot(source: Path, target: Path, name: str) -> None:
    """Link a snapshot's files, then its manifest, which makes it count; folders may have different shards of it."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_there = (target / name).exists()
    for path in source.glob(f"{name.removesuffix('.json')}-*"):
        if path.is_dir():
            (target / path.name).mkdir(mode=0o700, exist_ok=True)
            for part in path.iterdir():
                _link(part, target / path.name / part.name)
        elif not is_there:
            _link(path, target / path.name)
    _link(source / name, target / name)


def _link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where links are not supported; a committed file is never changed."""
    if target.exists():
        return
    try:
        target.hardlink_to(source)
    except OSError:  # a file system without such links
        with source.open("rb") as file, commit.written_beside(target.parent) as (temporary, copied):
            shutil.copyfileobj(file, copied)
            commit.place(temporary, copied, target.name)


def _bring_results(source: Path, target: Path) -> None:
    """Copy metrics.jsonl and the best weights, to which the snapshot's state refers."""
    if (source / "metrics.jsonl").exists():
        draft = target / ".metrics.jsonl.tmp"
        shutil.copyfile(source / "metrics.jsonl", draft)
        draft.replace(target / "metrics.jsonl")
    if (source / "best").exists():
        draft = target / f".best.tmp-{secrets.token_hex(8)}"
        shutil.copytree(source / "best", draft)
        shutil.rmtree(target / "best", ignore_errors=True)
        draft.rename(target / "best")
