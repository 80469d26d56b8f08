"""Saving sharded snapshots: every rank writes its own part, one rank commits them, and none holds the full state.

The saving threads use a process group of their own, so that the loop waits for the copy to host memory only. If one
rank cannot save its part, no manifest is written: all ranks count a failed save and go on.
"""

import io
import os
import pickle
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]  # no stub
from torch.distributed.tensor import DTensor

from nodekit.training.engine_info import EngineError
from nodekit.training.options import ONE_FOLDER
from nodekit.training.snapshots.commit import HashingFile, place, sync_folder, written_beside
from nodekit.training.snapshots.fence import Fenced
from nodekit.training.snapshots.manifest import Manifest, stem_of
from nodekit.training.snapshots.shards import REST, flat, rest, shapes
from nodekit.training.snapshots.snapshot import Snapshots
from nodekit.training.world import World

T = TypeVar("T")

# A disk may take long, and a dead peer is noticed by its connection; after a timeout no rank could save any more.
_TIMEOUT = timedelta(days=7)


class ShardedSnapshots(Snapshots):
    """Snapshots of states whose tensors are DTensors, in a folder that all ranks see.

    All ranks save, each its part; one rank (``commits``) writes the manifest. Loading is as for whole ones.
    """

    def __init__(self, like: Snapshots, world: World, *, commits: bool) -> None:
        """All ranks call it.

        Args:
            like: folder, keep and generation.
            world: its process group must exist.
            commits: the result of ``writes_snapshots``.

        Raises:
            EngineError: on all ranks, if they do not see one folder.
        """
        if (num_folders := world.gather(commits).count(True)) != 1:
            raise EngineError(
                f"--snapshot-format sharded needs one folder that all ranks see, and they see {num_folders}: "
                f"{ONE_FOLDER}"
            )
        # Without a run id, each rank has made up a folder name of its own.
        folder = world.gather(like.folder)[world.rank - world.local_rank]
        super().__init__(
            folder,
            keep=like.keep,
            generation=like.generation,
            leave_shards=like.leave_shards,
            allow_nan=True,  # one rank alone cannot pass a snapshot over
        )
        self._commits = commits
        self.group = _own_group(world)
        """Used by the saving threads; it must outlive the last collective of this process."""
        self._mesh = init_device_mesh("cpu", (world.world_size,))

    def save(self, state: Any, *, step: int, world_size: int = 1) -> Manifest | None:
        """As ``Snapshots.save``, on all ranks, each with its own part of ``state``.

        ``model`` and ``optimizer`` may hold DTensors; all else is taken from the rank that commits.
        """
        self.wait()
        return self._save(self._staged(state), step=step, world_size=world_size)

    def prepare(self, state: Any) -> None:
        """As ``Snapshots.prepare``, for this rank's own part."""
        self._host_copy.prepare(self._own(state))

    def _staged(self, state: Any) -> Any:
        copied, others = self._host_copy.take(self._own(state))
        return {name: self._on_cpu(each, copied[name]) for name, each in flat(state).items()}, others

    def _own(self, state: Any) -> tuple[dict[str, torch.Tensor], Any]:
        """What this rank saves: its parts of the tensors, and everything else where it commits."""
        own = {
            name: each.to_local() if isinstance(each, DTensor) else each for name, each in flat(state).items()
        }
        return own, rest(state) if self._commits else None

    def _on_cpu(self, source: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
        if not isinstance(source, DTensor):
            return copied
        return DTensor.from_local(
            copied, self._mesh, source.placements, run_check=False, shape=source.shape, stride=source.stride()
        )

    def _commit(self, state: Any, *, step: int, world_size: int) -> Manifest:
        tensors, others = state
        (name,) = filter(None, self._together(partial(self._make_shards_folder, step)))
        writer, planner = FileSystemWriter(self.folder / name, sync_files=False), DefaultSavePlanner()
        writer.fs = files = _Files()  # which syncs its files: DCP would sync the whole machine
        writer.set_up_storage_writer(self._commits)
        planner.set_up_planner(tensors, is_coordinator=self._commits)
        own = self._together(lambda: writer.prepare_local_plan(planner.create_local_plan()))
        plans, metadata = planner.create_global_plan(own)  # the same on all ranks
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[dist.get_rank()])
        results = self._together(lambda: (writer.write_data(plan, planner).value(), files.written))

        def finish() -> Manifest | None:
            if not self._commits:
                return None
            writer.finish(metadata, [written for written, _ in results])
            for _, hashed in results:
                files.written.update(hashed)
            return self._finish(self.folder / name, others, files.written, step=step, world_size=world_size)

        (manifest,) = filter(None, self._together(finish))
        return manifest

    def _make_shards_folder(self, step: int) -> str | None:
        if not self._commits:
            return None
        generation = self._own_generation()
        self.fence.check(generation)
        self._make_folder()
        name = f"{stem_of(generation, step)}-{secrets.token_hex(8)}.dcp"
        (self.folder / name).mkdir(mode=0o700)
        return name

    def _finish(
        self, folder: Path, others: Any, written: dict[str, tuple[str, int]], *, step: int, world_size: int
    ) -> Manifest:
        shapes(folder)  # if it cannot be loaded, fail now
        with written_beside(folder) as (temporary, file):
            payload = self._write(others, file, temporary)
            place(temporary, file, REST)  # which also syncs the names of all files
        sync_folder(self.folder)
        files = {**written, REST: (payload.sha256, payload.size_bytes)}
        manifest = self._manifest(
            {f"{folder.name}/{file}": entry for file, entry in files.items()},
            step=step,
            world_size=world_size,
        )
        self._announce(manifest)
        return manifest

    def _together(self, call: Callable[[], T]) -> list[T]:
        """The call's results on all ranks; if it raises on one rank, an OSError on all others."""
        value: T | None = None
        problem: OSError | ValueError | Fenced | None = None
        try:
            value = call()
        except (OSError, ValueError, Fenced) as error:
            problem = error
        parts = self._gather((value, problem and str(problem)))
        if problem:
            raise problem
        if problems := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(parts) if text is not None]:
            raise OSError("; ".join(problems))
        return [value for value, _ in parts]

    def _gather(self, value: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._gather_tensors(torch.tensor([len(data)]))]
        padded = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
        parts = zip(self._gather_tensors(padded), sizes, strict=True)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in parts]  # noqa: S301  # our own ranks'

    def _gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        options = AllgatherOptions()
        options.timeout = _TIMEOUT
        self.group.allgather([parts], [tensor], options).wait()  # type: ignore[attr-defined]  # no stub
        return parts


def _own_group(world: World) -> dist.ProcessGroupGloo:
    """A group of all ranks, for the saving threads.

    ``dist.new_group`` would use the same name after each restart by torchrun, in a store that still has the addresses
    of the previous ranks: half of the time the ranks then wait for these, or fail.
    """
    name = world.gather(secrets.token_hex(8))[0]
    assert dist.group.WORLD
    store = dist.PrefixStore(f"nodekit-{name}", dist.group.WORLD.get_group_store())  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, world.rank, world.world_size, timedelta(seconds=world.timeout_s))


class _Stream(HashingFile):
    def tell(self) -> int:
        return self.size_bytes

    def close(self) -> None:
        """Do nothing: `_Files.create_stream` closes it."""


class _Files(FileSystem):
    """DCP's file system, with files that only their owner can read, that are synced, and hashed while written."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[str, int]] = {}
        """File name → SHA-256 and size."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            stream = _Stream(file)
            yield cast(io.IOBase, stream)
            stream.finish()
            os.fsync(file.fileno())
        self.written[Path(path).name] = stream.sha256, stream.size_bytes

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)
