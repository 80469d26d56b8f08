"""The folder of a sharded snapshot, as torch.distributed.checkpoint (DCP) writes it.

The tensors of model and optimizer are in a ``.distcp`` file of each rank; ``.metadata`` says where each part of a
tensor is, so that any number of ranks can read them. Everything else is in ``rest.pt``.

DCP itself unpickles ``.metadata``, and values that are no tensors, without restriction. Here, ``.metadata`` may contain
listed classes only, and values that are no tensors are refused.
"""

import pickle
from collections.abc import Mapping
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch

METADATA = ".metadata"
REST = "rest.pt"
"""The file with everything but the tensors of model and optimizer."""

_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    *((f"{_CHECKPOINT}.metadata", name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}  # fmt: skip


def _member(cls: Any, name: str) -> Enum:
    """Return an enumeration's member; the first releases of Python 3.11 pickle one as ``getattr(cls, name)``."""
    if not isinstance(cls, EnumMeta) or name not in cls.__members__:
        raise ValueError(f"{METADATA} asks for {name} of {cls!r}, which is no member of an enumeration")
    found: Enum = cls[name]
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _ALLOWED or (
            module == "torch" and isinstance(getattr(torch, name), torch.dtype)
        ):
            return super().find_class(module, name)
        raise ValueError(f"{METADATA} holds {module}.{name}, which is nothing that belongs there")


def flat(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state's model and optimizer, by their names in the files."""
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for number, values in state["optimizer"]["state"].items():
        found.update({f"optimizer.state.{number}.{name}": value for name, value in values.items()})
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def rest(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state without the tensors of ``flat``: None in their place keeps the order of the keys.

    A weight that is tied to another one is only in ``tied``: its name → the other's name.
    """
    optimizer = state["optimizer"]
    return {
        **state,
        "model": _emptied(state["model"]),
        "optimizer": {
            **optimizer,
            "state": {number: _emptied(values) for number, values in optimizer["state"].items()},
        },
    }


def assemble(others: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a state from the results of ``rest`` (``others``) and ``flat`` (``tensors``)."""
    optimizer = others["optimizer"]
    states = {
        number: _filled(values, f"optimizer.state.{number}.", tensors)
        for number, values in optimizer["state"].items()
    }
    state = {**others, "model": _model(others, tensors), "optimizer": {**optimizer, "state": states}}
    state.pop("tied", None)
    return state


def weights(others: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the model's state dict, without reading the optimizer's tensors."""
    return _model(others, read_whole(folder, "model."))


def shapes(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a snapshot in their full shapes, on the meta device."""
    return {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
        for name, each in _read_metadata(folder).state_dict_metadata.items()
    }


def read_whole(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Read all tensors whose names start with ``prefix``, in their full shapes, onto the CPU."""
    tensors = {
        name: torch.empty_like(each, device="cpu")
        for name, each in shapes(folder).items()
        if name.startswith(prefix)
    }
    read_into(folder, tensors)
    return tensors


def read_into(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors from the files; of a DTensor, only this rank's part is read. This is not a collective.

    Raises:
        ValueError, RuntimeError: a tensor is not in the files, or has another shape there.
    """
    plan, planner, reader = _plan(folder, tensors)
    reader.read_data(plan, planner).wait()


def files_of(folder: Path, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the files that ``read_into`` would read; raise the same errors."""
    plan, _, reader = _plan(folder, tensors)
    return {reader.storage_data[each.storage_index].relative_path for each in plan.items}


def _plan(folder: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any, Any]:
    # Slow to import, and rarely needed.
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = _read_metadata(folder)
    planner, reader = DefaultLoadPlanner(flatten_state_dict=False), FileSystemReader(folder)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    return planner.finish_plan(planner.create_local_plan()), planner, reader


def _read_metadata(folder: Path) -> Any:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with (folder / METADATA).open("rb") as file:
        metadata = _Unpickler(file).load()
    for name, each in metadata.state_dict_metadata.items():
        if not isinstance(each, TensorStorageMetadata):
            raise ValueError(
                f"{folder / METADATA}: {name} is no tensor, and only an unsafe pickle would bring it back"
            )
    return metadata


def _model(others: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    model = _filled(others["model"], "model.", tensors)
    return {**model, **{name: model[first] for name, first in others.get("tied", {}).items()}}


def _emptied(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: None if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _filled(values: Mapping[Any, Any], prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {name: tensors.get(f"{prefix}{name}", value) for name, value in values.items()}
