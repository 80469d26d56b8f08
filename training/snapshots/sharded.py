"""Saving sharded snapshots: every rank writes its own part, one rank commits them, and none holds the full state.

Where nodes have folders of their own, each part is also written to the next node's, and one rank of each node commits.
The snapshot counts as soon as each part is written to files on two hosts, even if it is only in their page caches: any
one host may be lost from then on. It is synced to the disks afterwards, and earlier snapshots are kept until then; only
the first snapshot is synced before it counts.

The saving threads use a process group of their own, so that the loop waits for the copy to host memory only. If one
rank cannot save its part, no manifest is written: all ranks count a failed save and go on.
"""

import io
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nodekit.training.errors import TrainingError
from nodekit.training.snapshots.exchange import lowest_seen
from nodekit.training.snapshots.files.commit import HashingFile, place, sync, sync_folder, written_beside
from nodekit.training.snapshots.files.manifest import Manifest, stem_of
from nodekit.training.snapshots.files.shards import METADATA, REST, flat, rest, shapes
from nodekit.training.snapshots.hostcopy import map_tensors
from nodekit.training.snapshots.parts import keepers, transfers
from nodekit.training.snapshots.peers import Peers
from nodekit.training.snapshots.snapshot import Snapshots
from nodekit.training.world import World

Written = dict[str, tuple[str, int]]
"""File name → SHA-256 in hex, and size in bytes."""


class ShardedSnapshots(Snapshots):
    """Snapshots of states whose tensors are DTensors, in one folder that all ranks see or in several.

    All ranks save, each its part. Of the ranks that see the same folder, one (``commits``) writes the manifest. They
    are loaded like whole snapshots.
    """

    peers: Peers

    def __init__(self, like: Snapshots, world: World) -> None:
        """Find out which ranks see the same folder; all ranks call it.

        Args:
            like: has the folder, and the values of ``keep``, ``generation`` and ``leave_shards``.
            world: its process group must exist.
        """
        said = world.gather((like.folder, f"node {world.node_rank} ({gethostname()})", gethostname()))
        # All ranks of a node take its first rank's folder: without a run id, each has made up a name of its own.
        folder, *_ = said[world.rank - world.local_rank]
        super().__init__(
            folder,
            keep=like.keep,
            generation=like.generation,
            leave_shards=like.leave_shards,
            allow_nan=True,  # one rank alone cannot skip a snapshot
        )
        first = world.rank - world.local_rank
        if world.world_size == world.local_world_size:
            places = [first] * world.world_size
        else:
            lowest = lowest_seen(self, world)[world.rank]
            places = world.gather(first if lowest is None else lowest)
        self._leader = min(places)
        self._committers = sorted(set(places))
        self.commits = world.rank in self._committers
        """Whether this rank writes the manifest."""
        self._rank = world.rank
        self._leads = world.rank == self._leader
        hosts = [host for *_, host in said]
        self._keepers = keepers(places, hosts)
        self._is_on_two_hosts = all(
            keeper is not None and hosts[keeper] != host
            for keeper, host in zip(self._keepers, hosts, strict=True)
        )
        self._nodes = [said[place][1] for place in places]  # by rank
        self.peers = Peers(world)
        self._mesh = init_device_mesh("cpu", (world.world_size,))

    def save(self, state: Any, *, step: int, world_size: int = 1) -> Manifest | None:
        """As ``Snapshots.save``, on all ranks, each with its own part of ``state``.

        ``model`` and ``optimizer`` may hold DTensors; all other values are taken from rank 0.
        """
        self.wait()
        return self._save(self._staged(state), step=step, world_size=world_size, attempt=self.attempt)

    def prepare(self, state: Any) -> None:
        """As ``Snapshots.prepare``, for this rank's own part.

        Raises:
            TrainingError: on all ranks, if the optimizer keeps DTensors in lists or dicts, which cannot be saved.
        """
        map_tensors(_refuse_part, rest(state))
        self._host_copy.prepare(self._own(state))

    def _staged(self, state: Any) -> Any:
        copied, others = self._host_copy.take(self._own(state))
        return {name: self._on_cpu(each, copied[name]) for name, each in flat(state).items()}, others

    def _own(self, state: Any) -> tuple[dict[str, torch.Tensor], Any]:
        """Return what this rank saves: its parts of the tensors, and if it leads, everything else (otherwise None)."""
        own = {
            name: each.to_local() if isinstance(each, DTensor) else each for name, each in flat(state).items()
        }
        return own, rest(state) if self._leads else None

    def _on_cpu(self, source: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
        if not isinstance(source, DTensor):
            return copied
        return DTensor.from_local(
            copied, self._mesh, source.placements, run_check=False, shape=source.shape, stride=source.stride()
        )

    def _commit(self, state: Any, *, step: int, world_size: int, attempt: str) -> Manifest:
        with ExitStack() as lock:  # the folder is locked until the manifest is written
            begun = self.peers.together(partial(self._begin, step, lock))
            name, _ = begun[self._leader]
            manifest, written_here = self._write_parts(
                name, state, step=step, world_size=world_size, attempt=attempt
            )
            # May the snapshot count before it is synced? Yes if an older one remains, should all hosts lose power.
            if self._is_on_two_hosts and all(has_older for _, has_older in begun):
                self._announce_in_memory(manifest, written_here)
            else:
                self.peers.together(partial(self._sync, written_here))
                self.peers.together(partial(self._announce_here, manifest, syncs=True))
            if self.commits:
                self._prune(manifest)
            return manifest

    def _write_parts(
        self, name: str, state: Any, *, step: int, world_size: int, attempt: str
    ) -> tuple[Manifest, list[Path]]:
        """Write the files and their copies; return the manifest to announce, and the paths this rank has written."""
        tensors, others = state
        together = self.peers.together
        folder = self.folder / name
        writer = FileSystemWriter(folder, sync_files=False)
        # Write replicated tensors to one rank's file: a node then reads that file beside its own, and not all files.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        writer.fs = files = _Files()
        writer.set_up_storage_writer(self._leads)
        planner.set_up_planner(tensors, is_coordinator=self._leads)
        own = together(lambda: writer.prepare_local_plan(planner.create_local_plan()))
        plans, metadata = planner.create_global_plan(own)  # the same on all ranks
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[dist.get_rank()])
        results = together(lambda: (writer.write_data(plan, planner).value(), dict(files.written)))
        parts = [written for _, written in results]

        def finish() -> Manifest | None:
            if not self._leads:
                return None
            writer.finish(metadata, [written for written, _ in results])
            self._finish(folder, others, files)
            written = [*parts, files.written]
            return self._manifest_of(folder.name, written, step=step, world_size=world_size, attempt=attempt)

        manifest = together(finish)[self._leader]
        assert manifest
        written_here = [folder / name for name in files.written]
        if len(self._committers) > 1:
            written_here += together(partial(self._send_copies, folder, manifest, parts))[self._rank]
        return manifest, written_here

    def _announce_in_memory(self, manifest: Manifest, written_here: Sequence[Path]) -> None:
        """Write the manifest before the files are synced, so that the snapshot counts, and sync them then."""
        self.peers.together(partial(self._announce_here, manifest, syncs=False))
        own_manifest = [self.folder / manifest.name] if self.commits else []
        try:
            self.peers.together(partial(self._sync, [*written_here, *own_manifest]))
        except OSError as error:
            if self.commits:
                self._prune(manifest)
            raise OSError(f"it is in the memory of two hosts, and not on all disks: {error}") from error
        self._unsynced.discard(manifest.name)

    def _announce_here(self, manifest: Manifest, *, syncs: bool) -> None:
        if self.commits:
            self._announce(manifest, syncs=syncs)

    def _sync(self, written: Sequence[Path]) -> None:
        """Sync the files that this rank has written; no rank can do it for another one on a file server."""
        for path in written:
            sync(path)
        for folder in {path.parent for path in written}:
            sync_folder(folder)
        if self.commits:
            sync_folder(self.folder)

    def _begin(self, step: int, lock: ExitStack) -> tuple[str, bool]:
        """Lock this node's folder, until ``lock`` is closed, and check that the node may save.

        Returns:
            A name for the folder of the snapshot's files (the leader's is used), and whether this node has an older
            snapshot that is synced; True on ranks that do not commit.
        """
        has_older = True
        if self.commits:
            lock.enter_context(self._locked_folder(waits=True))
            has_older = bool({*self._listed()} - self._unsynced)
        generation = self._own_generation() if self._leads else 0
        return f"{stem_of(generation, step)}-{secrets.token_hex(8)}.dcp", has_older

    def _finish(self, folder: Path, others: Any, files: "_Files") -> None:
        shapes(folder)  # if DCP's metadata cannot be loaded, fail now
        with written_beside(folder) as (temporary, file):
            payload = self._write(others, file, temporary)
            place(temporary, file, REST, syncs=False)
        files.written[REST] = payload.sha256, payload.size_bytes

    def _manifest_of(
        self, folder: str, written: Sequence[Written], *, step: int, world_size: int, attempt: str
    ) -> Manifest:
        files = {f"{folder}/{name}": entry for each in written for name, entry in each.items()}
        manifest = self._manifest(files, step=step, world_size=world_size, attempt=attempt)
        if len(self._committers) > 1:
            for rank, names in enumerate(written[:-1]):
                keeper = self._keepers[rank]
                assert keeper is not None
                manifest.kept_by.update(
                    {f"{folder}/{name}": [self._nodes[rank], self._nodes[keeper]] for name in names}
                )
        return manifest

    def _send_copies(self, folder: Path, manifest: Manifest, parts: Sequence[Written]) -> list[Path]:
        """Send each rank's part to its keeper, and the common files to all committers; return the received paths."""
        holders = {name: [rank] for rank, names in enumerate(parts) for name in names}
        wanted: dict[int, set[str]] = {
            rank: {METADATA, REST} if rank in self._committers else set() for rank in range(len(parts))
        }
        for rank, names in enumerate(parts):
            keeper = self._keepers[rank]
            assert keeper is not None
            wanted[keeper] |= names.keys()
        common = {METADATA: [self._leader], REST: [self._leader]}
        sent = transfers(manifest, holders | common, wanted)
        self.peers.send_files(folder, sent, syncs=False)
        return [folder / each.name for each in sent if each.target == self._rank]


def _refuse_part(tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise TrainingError(
            "the optimizer keeps parts of tensors in lists or dicts, which a sharded snapshot does not take: "
            "give --snapshot-format whole"
        )


class _Stream(HashingFile):
    def tell(self) -> int:
        return self.size_bytes

    def close(self) -> None:
        """Do nothing: `_Files.create_stream` closes the file."""


class _Files(FileSystem):
    """DCP's file system, but files are readable by their owner only, and hashed while they are written."""

    def __init__(self) -> None:
        self.written: Written = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            stream = _Stream(file)
            yield cast(io.IOBase, stream)
            stream.finish()
        self.written[Path(path).name] = stream.sha256, stream.size_bytes

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir(mode=0o700, exist_ok=True)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)
