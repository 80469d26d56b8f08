"""This process's rank, read once from the environment, and the process group of all ranks."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from nodekit.training.group import connections, nccl, reconfigure, recorder
from nodekit.training.group.agent_messages import AgentMessages, messages_from
from nodekit.training.group.collectives import broadcast_object, gather_objects, start_sum
from nodekit.training.group.initmethod import InitMethod
from nodekit.training.process import devices
from nodekit.training.process.stages import KEEPING, MEETING, STARTING
from nodekit.training.process.stop import signals_put_off

if TYPE_CHECKING:
    from nodekit.training.process.kept import HasLastStep, Kept

log = logging.getLogger("nodekit.training")

_PROGRESS_BYTES = 80
_SAVES_S = 60.0  # longer than torchrun waits between SIGTERM and SIGKILL

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank's number, device and folders; as a context manager, the process group.

    torchrun or kit set them in the environment; without a launcher it is a world of one, with no port opened::

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
    """How many ranks are on this node."""
    node_rank: int
    """Which node this is, from 0."""
    device: torch.device
    """``cuda:<local_rank>`` where there are GPUs (``xpu:`` for Intel's, ``npu:`` for Ascend's), else ``cpu``."""
    backend: str
    """``nccl`` where there are GPUs and torch has it (``xccl``, ``hccl``), else ``gloo``, unless given."""
    init_method: InitMethod
    """Where the ranks meet."""
    meets_at: str = ""
    """The same as text, an address or a file; "" when nothing launched this process."""
    timeout_s: float
    """How long a collective may wait for the slowest rank."""
    launched: bool
    """False when nothing launched this process: a world of one."""
    run_id: str | None
    """kit's id of the run, or torchrun's, or None."""
    generation: int | None
    """kit's count of how often the job was started again; None without kit (counts as 0)."""
    snapshot_dir: Path | None
    """This node's folder for snapshots, which survives restarts."""
    snapshot_is_shared: bool = False
    """Whether kit or the user says that this folder is the same on all nodes."""
    expected_snapshot: str = ""
    """The last snapshot that kit knows to be committed, as text for people; "" for none."""
    num_restarts: int = 0
    """How often the job has been started again, by kit and torchrun."""
    output_dir: Path | None
    """This node's folder for TensorBoard, metrics and the result."""
    progress_file: Path | None
    """Where this rank writes its step; only kit reads it."""
    events_file: Path | None = None
    """Where it writes events for kit, one JSON object per line."""
    on_nan: str = "stop"
    """What the inventory wants done about a loss that is not finite: ``stop`` or ``rollback``."""
    agent_pipe: Path | None = None
    """Where kit says that another rank is lost (see ``agent_messages``)."""
    standby_world_size: int | None = None
    """Where kit has started this rank before its attempt is known: how many ranks that may have; 0: the others wait."""
    recorder_files: tuple[str, str] | None = None
    """Paths of torch's flight recorder, its FIFO and its dump, to which this rank's number is still to be added."""
    may_stay: bool = False
    """Whether this process goes on in the next attempt when another rank is lost (see ``run_attempts``)."""
    kept: "Kept | None" = field(default=None, compare=False, repr=False)
    """What this process has kept of the attempt before."""
    emergency: "list[HasLastStep]" = field(default_factory=list, compare=False, repr=False)
    """The newest `EmergencySave`, if there is one: asked for the last step when an error ends the training."""

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 600.0,
        init_method: str = "env://",
        backend: str = "auto",
    ) -> "World":
        """Read everything from ``environ`` (default: this process's).

        Args:
            environ: variables as torchrun sets them.
            timeout_s: how long a collective may wait for the slowest rank.
            init_method: where the ranks meet: ``env://``, ``tcp://HOST:PORT`` or ``file:///PATH``.
            backend: ``gloo``, ``nccl``, ``mpi``, or ``auto``.

        Raises:
            ValueError: a variable is missing or is not a number, there is no GPU for this local rank, torch lacks the
                backend, or the ranks cannot meet there.
        """
        env = os.environ if environ is None else environ
        method = InitMethod.parse(init_method)
        method.check()
        launched = _check_launcher(env, init_method)
        rank, local_rank = _number(env, "RANK", 0), _number(env, "LOCAL_RANK", 0)
        local_world_size = _first_number(env, ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), 1)
        device = _device(local_rank, local_world_size, _number(env, "NODEKIT_NUM_GPUS", 0))
        generation = _number(env, "NODEKIT_GENERATION", 0) if env.get("NODEKIT_GENERATION") else None
        run_id = env.get("NODEKIT_RUN_ID") or env.get("TORCHELASTIC_RUN_ID")
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=_number(env, "WORLD_SIZE", 1),
            local_world_size=local_world_size,
            node_rank=_first_number(
                env, ("GROUP_RANK", "NODE_RANK", "CROSS_RANK"), rank // max(1, local_world_size)
            ),
            device=device,
            backend=_backend(backend, device),
            init_method=method,
            meets_at=_meets_at(method, env) if launched else "",
            timeout_s=timeout_s,
            launched=launched,
            run_id=run_id if run_id != "none" else None,
            generation=generation,
            snapshot_dir=_path(env, "NODEKIT_SNAPSHOT_DIR"),
            snapshot_is_shared=env.get("NODEKIT_SNAPSHOT_SHARED", "") not in ("", "0"),
            expected_snapshot=env.get("NODEKIT_SNAPSHOT_EXPECTED", ""),
            num_restarts=(generation or 0) + _number(env, "TORCHELASTIC_RESTART_COUNT", 0),
            output_dir=_path(env, "NODEKIT_OUTPUT_DIR"),
            progress_file=_path(env, "NODEKIT_PROGRESS_FILE"),
            events_file=_path(env, "NODEKIT_EVENTS_FILE"),
            on_nan=env.get("NODEKIT_ON_NAN") or "stop",
            agent_pipe=_path(env, "NODEKIT_AGENT_PIPE"),
            standby_world_size=_number(env, "NODEKIT_STANDBY", 0) if env.get("NODEKIT_STANDBY") else None,
            recorder_files=_recorder_files(env),
        )

    @property
    def is_by_kit(self) -> bool:
        """Whether `kit up` has started this rank, and shows nodes, folders and the end itself."""
        return self.generation is not None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that prints."""
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        """Whether this is the rank that writes its node's files."""
        return self.local_rank == 0

    def __enter__(self) -> "World":
        """Set the device and join the process group; returns when all ranks are there."""
        self.stage(MEETING)
        nccl.prepare(aborts=self.aborts_nccl)
        if self.messages is not None:
            self.messages.when("lost", self.leave_others, is_default=True)
        if self.device.type != "cpu":
            devices.module_of(self.device.type).set_device(self.device)
        store = (
            self.init_method.store(rank=self.rank, world_size=self.world_size, timeout_s=self.timeout_s)
            if self.launched
            else dist.HashStore()  # type: ignore[attr-defined]  # no stub
        )
        connections.remember()
        is_answered_by_torch = False
        if self.backend == "nccl":
            nccl.make_room(self.device)
            is_answered_by_torch = nccl.count_group() == 0
        with reconfigure.enabled() if self.reconfigures else nullcontext():
            dist.init_process_group(
                self.backend,
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self.timeout_s),
                # Connect now, and name the right device.
                device_id=self.device if self.backend == "nccl" else None,
            )
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.world_size):  # mpi assigns its own
            found = f"{dist.get_rank()} of {dist.get_world_size()}"
            dist.destroy_process_group()
            raise ValueError(
                f"this is rank {self.rank} of {self.world_size} by RANK and WORLD_SIZE, but rank {found} to "
                f"{self.backend}"
            )
        nccl.check()  # a loss reported before the group existed could abort nothing
        if self.recorder_files and self.backend in ("gloo", "nccl") and not is_answered_by_torch:
            recorder.answer(*self._own_recorder_files(self.recorder_files), self.backend)
        self.stage("")  # from here on the script runs, which may take long without reporting anything
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not self.emergency:
            self.close()
            return
        # Torchrun sends SIGTERM to the ranks that are left, and SIGKILL 30 s later.
        with signals_put_off(_SAVES_S):
            if kept := self.kept_on(error):
                kept.save()
            self.close()

    def kept_on(self, error: BaseException) -> "Kept | None":
        """The last step of the user's training loop, by its `EmergencySave`, if the error is a lost rank's."""
        return next(filter(None, (each.keep(error) for each in self.emergency)), None)

    @property
    def held_step(self) -> "Kept | None":
        """What this process has kept of the attempt before, until the training has loaded it."""
        return self.kept if self.kept and self.kept.is_held else None

    def close(self, *, goes_on: bool = False) -> None:
        """Leave the process group; does nothing where there is none.

        Args:
            goes_on: whether this process is to join another one, and not to end.
        """
        for each in self.emergency:
            each.close()
        self.emergency.clear()  # they refer to the model, and the next model may need its memory
        if self.messages is not None:
            self.messages.ignore()
        if not goes_on:
            nccl.wait_until_ended()  # even without a group: an earlier one may still be ending
        reconfigure.forget()
        if dist.is_initialized():
            nccl.close_in_thread() if goes_on else nccl.close()
            recorder.end()
            if self.is_main:
                self.init_method.remove()

    def leave_others(self) -> None:
        """Break the connections to the other ranks, after reading what has arrived; waiting peers get an error.

        For a rank that has lost another one; any thread may call it. With NCCL it does so only if this process may stay
        (else torch and kit's agent end it), and collectives of this rank end without an error: see `settle`.
        """
        if self.backend == "gloo":
            connections.let_arrive()
            connections.shut_down()
        elif self.aborts_nccl:
            nccl.leave()
            connections.shut_down()  # of a script's own groups on gloo

    @property
    def reconfigures(self) -> bool:
        """Whether the ranks join by torch's `_reconfigure`; the same on all of them."""
        return self.is_by_kit and self.backend == "gloo" and reconfigure.is_available()

    @property
    def aborts_nccl(self) -> bool:
        """Whether this rank, when it has lost another one, ends NCCL's collectives by itself."""
        return self.backend == "nccl" and self.may_stay

    @property
    def keeps_steps(self) -> bool:
        """Whether a rank that has lost another one still has its last step, and can leave the collective it is in."""
        return self.backend == "gloo" or self.aborts_nccl

    def settle(self) -> None:
        """Wait for the collectives on the GPU, and check that NCCL has not aborted them; does nothing with gloo.

        Raises:
            LostRank: they were aborted, so their results are not valid.
        """
        if self.aborts_nccl:
            torch.cuda.current_stream(self.device).synchronize()
            nccl.check()

    @property
    def messages(self) -> AgentMessages | None:
        """The messages of kit's agent to this rank; None without kit."""
        return messages_from(self.agent_pipe) if self.agent_pipe else None

    def keeps_when_lost(self, newest: Callable[[], int | None], save: Callable[[], object]) -> None:
        """When another rank is lost, tell kit to wait for this one, if ``newest`` returns a step that it can keep.

        For ranks that can leave their collective (`keeps_steps`). If gloo blocks the main thread all the same, another
        thread calls ``save`` and ends the process. A rank that is to stop, and waits in a collective for one that does
        not come, as where that one's disk stands still, takes it for lost.
        """
        messages = self.messages
        if messages is None:
            return

        def end_if_deaf(has_left: threading.Event) -> None:
            if connections.is_deaf(has_left):
                log.warning(
                    "another rank is lost, and this one still waits for it: saving step %s alone", newest()
                )
                save()
                os._exit(1)

        def when_lost() -> None:
            keeps = self.keeps_steps and (step := newest()) is not None
            if keeps:
                self.stage(KEEPING, step=step)
            self.leave_others()  # first: there may be no thread to be had
            if keeps and self.backend == "gloo":
                threading.Thread(
                    target=end_if_deaf, args=(messages.has_left,), name="nodekit-guard", daemon=True
                ).start()

        def leave_if_stalled(has_left: threading.Event) -> None:
            if connections.is_stalled(has_left):
                log.warning("this rank is to stop, and waits in vain for another one: it leaves the others")
                when_lost()

        def when_stalled() -> None:
            if self.backend == "gloo":
                threading.Thread(
                    target=leave_if_stalled, args=(messages.has_left,), name="nodekit-guard", daemon=True
                ).start()

        messages.when("lost", when_lost)
        messages.when("stalled", when_stalled)

    def stage(self, text: str, *, step: int | None = None) -> None:
        """Tell kit what this rank does outside of its steps, so that a hang there is found.

        Args:
            text: at most 60 characters.
            step: the last one; None before the first.
        """
        if self.progress_file is None:
            return
        line = f"{STARTING if text else ''}{text}" if step is None else f"{step} {text}"
        line = line[: _PROGRESS_BYTES - 1].ljust(_PROGRESS_BYTES - 1) + "\n"
        try:
            handle = os.open(self.progress_file, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # One write: a concurrent reader finds the old one or the new one.
                os.write(handle, line.encode())
            finally:
                os.close(handle)
        except OSError:  # `Report` says so
            return

    def _own_recorder_files(self, stems: tuple[str, str]) -> tuple[Path, Path]:
        return Path(f"{stems[0]}{self.rank}.pipe"), Path(f"{stems[1]}{self.rank}")

    def start_sum(self, values: torch.Tensor) -> Callable[[], list[float]]:
        """Start to sum a 1-D tensor over all ranks; the returned function waits for the sums, equal on every rank.

        Both raise an error if another rank is lost.
        """
        nccl.check()  # a collective that starts while torch aborts the group would block for half a second
        sums_of = start_sum(self._as_sent(values), self.world_size)

        def sums() -> list[float]:
            found = sums_of()
            nccl.check()
            return found

        return sums

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value`` (small, any picklable type), in the order of ranks, on every rank."""

        def gather(own: torch.Tensor) -> list[torch.Tensor]:
            sent = self._as_sent(own)
            parts = [torch.empty_like(sent) for _ in range(self.world_size)]
            dist.all_gather(parts, sent)
            return self._whole(parts)

        values: list[T] = gather_objects(value, gather)
        return values

    def broadcast(self, value: T, source: int) -> T:
        """Rank ``source``'s ``value``, of any picklable type, on every rank."""

        def broadcast(own: torch.Tensor) -> torch.Tensor:
            sent = self._as_sent(own)
            dist.broadcast(sent, src=source)
            return self._whole([sent])[0]

        found: T = broadcast_object(value, broadcast, is_source=self.rank == source)
        return found

    def _as_sent(self, own: torch.Tensor) -> torch.Tensor:
        """This rank's tensor where the backend takes it: NCCL sends none that are on the CPU."""
        return own if self.backend in ("gloo", "mpi") else own.to(self.device)

    @staticmethod
    def _whole(received: list[torch.Tensor]) -> list[torch.Tensor]:
        """The result of a collective, copied to host memory; LostRank if it was aborted, since it may be garbage."""
        here = [each.cpu() for each in received]
        nccl.check()
        return here


# Where they say how many ranks they have started. None of them sets RANK.
_OTHER_LAUNCHERS = {"HOROVOD_SIZE": "horovodrun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}


def _check_launcher(env: Mapping[str, str], init_method: str) -> bool:
    """Whether something launched this process; a ValueError if it set too little."""
    if "RANK" not in env:
        for name, launcher in _OTHER_LAUNCHERS.items():
            if (size := _number(env, name, 1)) > 1:
                raise ValueError(
                    f"{launcher} has started {size} processes ({name}), each of which would train by itself: RANK is "
                    f"not set. Start them with kit or torchrun, as for any engine; or unset {name}, to train alone"
                )
        if init_method != "env://":
            raise ValueError(
                f"--init-method {init_method} is where ranks meet, and RANK is not set: take --launcher spawn, or "
                "start every rank with RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE"
            )
        return False
    needed = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if init_method == "env://" else ("WORLD_SIZE",)
    if missing := [name for name in needed if name not in env]:
        raise ValueError(
            f"RANK is set but not {', '.join(missing)}: start with kit or torchrun, or unset RANK"
        )
    return True


def _meets_at(method: InitMethod, env: Mapping[str, str]) -> str:
    if method.scheme == "env":
        return f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    return method.path or f"{method.host}:{method.port}"


def _device(local_rank: int, local_world_size: int, num_planned: int) -> torch.device:
    kind = devices.kind_here()
    if kind == "cpu":
        if num_planned:  # N ranks on a CPU would look like a slow job
            is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
            why = "cannot use them" if is_built else "is built for the CPU alone"
            raise ValueError(
                f"{num_planned} GPU(s) are planned for this node, and torch {torch.__version__} {why}: see kit check, "
                "or set `gpus: 0` in the inventory to train on the CPU"
            )
        return torch.device("cpu")
    if local_rank >= (number := devices.number_of(kind)):
        raise ValueError(
            f"local rank {local_rank} has no GPU: {number} visible, "
            f"{local_world_size} ranks on this node; start fewer (--nproc-per-node) or show more GPUs"
        )
    return torch.device(kind, local_rank)


def _backend(name: str, device: torch.device) -> str:
    """What ``auto`` means here; else ``name``, if torch has it."""
    own = devices.BACKENDS[device.type]
    if device.type in devices.UNPROVEN:
        if name not in ("auto", own) or not dist.is_backend_available(own):
            raise ValueError(
                f"--backend {name}: the tensors are on {device.type}, and only {own} sends these: take auto, and a "
                f"torch with {own}"
            )
        return own
    if name == "auto":
        return own if dist.is_backend_available(own) else "gloo"
    if name == "nccl" and device.type != "cuda":
        raise ValueError("--backend nccl is for GPUs, and torch sees none here: take gloo, or auto")
    if not dist.is_backend_available(name):
        cure = "pip has no build of torch with it; " if name == "mpi" else ""
        raise ValueError(f"--backend {name}: this torch is built without it; {cure}take gloo, or auto")
    return name


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} is {text!r}: a whole number from 0 was wanted")
    return int(text)


def _first_number(env: Mapping[str, str], names: Sequence[str], default: int) -> int:
    """The first variable that is set: torchrun and kit use one name, deepspeed's launcher another."""
    return next((_number(env, name, default) for name in names if name in env), default)


def _recorder_files(env: Mapping[str, str]) -> tuple[str, str] | None:
    pipe = env.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    file = env.get("TORCH_FR_DUMP_TEMP_FILE") or env.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return (pipe, file) if pipe and file else None


def _path(env: Mapping[str, str], name: str) -> Path | None:
    return Path(env[name]) if env.get(name) else None
