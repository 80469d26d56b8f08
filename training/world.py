"""Who this process is among all ranks: read once from the environment, and the process group they share."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank's place, device and folders; as a context manager, the process group.

    Under torchrun or kit it is what they set; without a launcher it is a world of one, with no port opened::

        with World.from_env() as world:
            model = DistributedDataParallel(model.to(world.device))
    """

    rank: int
    """0 to ``world_size - 1``, over all nodes."""
    local_rank: int
    """0 to ``local_world_size - 1``, on this node; also the number of the GPU."""
    world_size: int
    """How many ranks there are."""
    local_world_size: int
    """How many of them are on this node."""
    node_rank: int
    """Which node this is, from 0."""
    device: torch.device
    """``cuda:<local_rank>`` where there are GPUs, else ``cpu``."""
    backend: str
    """``nccl`` where there are GPUs, else ``gloo``."""
    timeout_s: float
    """How long a collective may wait for the slowest rank."""
    launched: bool
    """False when nothing launched this process: a world of one."""
    run_id: str | None
    """kit's id of the run, or torchrun's, or None."""
    generation: int | None
    """kit's count of how often the job was started anew; None when not told (counts as 0)."""
    snapshot_dir: Path | None
    """This node's folder for snapshots, which survives restarts."""
    snapshot_is_shared: bool = False
    """Whether that folder is said to be one and the same on all nodes."""
    num_restarts: int = 0
    """How often the job has been started again, as far as this rank was told."""
    output_dir: Path | None
    """This node's folder for TensorBoard, metrics and the result."""
    progress_file: Path | None
    """Where this rank says how far it is; only kit reads it."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, *, timeout_s: float = 600.0) -> "World":
        """Read everything from ``environ`` (default: this process's).

        Raises:
            ValueError: a variable is missing or is not a number, or there is no GPU for this local rank.
        """
        env = os.environ if environ is None else environ
        launched = "RANK" in env
        if launched and (
            missing := [n for n in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in env]
        ):
            raise ValueError(
                f"RANK is set but not {', '.join(missing)}: start with kit or torchrun, or unset RANK"
            )
        local_rank = _number(env, "LOCAL_RANK", 0)
        local_world_size = _number(env, "LOCAL_WORLD_SIZE", 1)
        device = torch.device("cpu")
        if torch.cuda.is_available():
            if local_rank >= torch.cuda.device_count():
                raise ValueError(
                    f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} visible, "
                    f"{local_world_size} ranks on this node; start fewer (--nproc-per-node) or show more GPUs"
                )
            device = torch.device("cuda", local_rank)
        rank = _number(env, "RANK", 0)
        generation = _number(env, "NODEKIT_GENERATION", 0) if env.get("NODEKIT_GENERATION") else None
        run_id = env.get("NODEKIT_RUN_ID") or env.get("TORCHELASTIC_RUN_ID")
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=_number(env, "WORLD_SIZE", 1),
            local_world_size=local_world_size,
            node_rank=_number(env, "GROUP_RANK", _number(env, "NODE_RANK", rank // local_world_size)),
            device=device,
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout_s=timeout_s,
            launched=launched,
            run_id=run_id if run_id != "none" else None,
            generation=generation,
            snapshot_dir=_path(env, "NODEKIT_SNAPSHOT_DIR"),
            snapshot_is_shared=env.get("NODEKIT_SNAPSHOT_SHARED", "") not in ("", "0"),
            num_restarts=(generation or 0) + _number(env, "TORCHELASTIC_RESTART_COUNT", 0),
            output_dir=_path(env, "NODEKIT_OUTPUT_DIR"),
            progress_file=_path(env, "NODEKIT_PROGRESS_FILE"),
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that talks to people."""
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        """Whether this is the rank that writes what its node keeps."""
        return self.local_rank == 0

    def __enter__(self) -> "World":
        """Set the device and join the process group; returns when all ranks are there."""
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            self.backend,
            store=None if self.launched else dist.HashStore(),  # type: ignore[attr-defined]  # no stub
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout_s),
            device_id=self.device if on_cuda else None,  # nccl: connect now, and name the right device
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group; does nothing where there is none."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, values: torch.Tensor) -> list[float]:
        """Sum a 1-D tensor over all ranks; every rank gets the same numbers."""
        dist.all_reduce(values)
        return [float(value) for value in values.tolist()]

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value`` (small, any picklable type), in the order of ranks, on every rank."""
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # all_gather_object has filled every place


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} is {text!r}: a whole number from 0 was wanted")
    return int(text)


def _path(env: Mapping[str, str], name: str) -> Path | None:
    return Path(env[name]) if env.get(name) else None
