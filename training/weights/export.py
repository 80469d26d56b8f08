"""Write folders of trained weights, which plain torch and transformers can read, and load weights into a module."""

import ctypes
import json
import os
import re
import secrets
import shutil
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from nodekit.training.errors import TrainingError, refuse_unsafe
from nodekit.training.reporting.metrics import finite
from nodekit.training.snapshots.files.commit import sync_folder
from nodekit.training.snapshots.files.manifest import save_payload

WEIGHTS = "pytorch_model.bin"
"""The file with a plain state dict by ``torch.save``, under the name that transformers expects."""
FACTS = "nodekit.json"
"""The file with facts about the weights; a folder without it was not written by kit."""

_READABLE = (WEIGHTS, "model.safetensors")
_WRAPPERS = {"module", "_orig_mod"}
"""Parts of a weight's name that DataParallel, DDP and torch.compile add, in any order and at any place."""
_EXTRA_STATE = "_extra_state"
"""The last part of a state dict's key for the result of a module's ``get_extra_state``, which may have any type."""
_NESTED = ("model_state_dict", "state_dict", "model_state", "model", "module")
"""Keys, in lower case, under which a checkpoint may have the weights; ``module`` is DeepSpeed's."""
_FOREIGN_CLASS = re.compile(r"GLOBAL (\S+) was not an allowed global")
_SHOWN = 4
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_weights(
    folder: Path, weights: Mapping[str, torch.Tensor], task: object, facts: Mapping[str, Any]
) -> None:
    """Write a folder of weights, in place of an existing one.

    A kill at any moment leaves either the old or the new folder, complete.

    Args:
        folder: its parent is created.
        weights: a full state dict of the task's plain model.
        task: its ``labels`` are stored, and its ``export`` adds files, if the task has these.
        facts: for ``nodekit.json``: task, data, model, engine, step, epoch, means.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.tmp-*"):  # left by a kill
        shutil.rmtree(left, ignore_errors=True)
    draft = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(8)}")
    draft.mkdir()
    try:
        export = getattr(task, "export", None)
        if export is not None:
            export(draft)
        with (draft / WEIGHTS).open("wb") as file:
            save_weights(weights, file)
        text = json.dumps(finite({**facts, **_facts_of(task)}), indent=1, ensure_ascii=False)
        (draft / FACTS).write_text(text, encoding="utf-8")
        for path in filter(Path.is_file, draft.rglob("*")):
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        sync_folder(draft)
        _place(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def save_weights(weights: Mapping[str, torch.Tensor], file: BinaryIO) -> None:
    """Write a plain state dict, which ``torch.load(weights_only=True)`` reads without a GPU or kit."""
    save_payload({name: _plain(tensor) for name, tensor in weights.items()}, file)


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts about the weights in a folder.

    Raises:
        TrainingError: the folder was not written by `write_weights`, or cannot be read.
    """
    path = folder / FACTS
    try:
        path = _there(folder) / FACTS
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TrainingError(
            f"{folder} has no {FACTS}: wanted a folder that a run has written, its output/best or output/last"
        ) from error
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read ({error}): wanted JSON") from error
    if not isinstance(facts, dict) or "task" not in facts:
        raise TrainingError(f"{path} names no task: wanted an object that a run has written")
    return facts


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a folder of `write_weights` or transformers, or in a file, by name, on the CPU.

    The file has a state dict, or a dictionary with one under a usual key, such as ``model_state_dict``.

    Raises:
        TrainingError: there are no weights; the message says what was found.
    """
    return weights_in(read_file(path), path)


def read_file(path: Path) -> Any:
    """Return the content of a file of weights, or of a folder's file of weights, on the CPU; no code in it is run.

    Raises:
        TrainingError: there is no such file, or it cannot be read.
    """
    file = path
    try:
        if path.is_dir() or not path.exists():
            folder = _there(path)
            file = next((folder / name for name in _READABLE if (folder / name).is_file()), folder)
        is_file = file.is_file()
    except OSError as error:
        raise _unreadable(error) from error
    if not is_file:
        found = "has neither" if file.is_dir() else "is not there"
        raise TrainingError(
            f"{path} {found}: wanted a folder with {' or '.join(_READABLE)}, or a file of a state dict"
        )
    if file.suffix != ".safetensors":
        refuse_unsafe(torch.__version__)
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file  # comes with transformers

            return load_file(file)
        # Map the file, so that the ranks of a node share its memory; not in torch's format before 1.6, which cannot be
        # mapped, nor on Windows, where a mapped file cannot be replaced.
        is_mapped = os.name == "posix" and zipfile.is_zipfile(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except ModuleNotFoundError as error:
        raise TrainingError(f"to read {file}, safetensors is needed: pip install safetensors") from error
    except OSError as error:
        raise _unreadable(error) from error
    except Exception as error:  # invalid bytes raise errors of many classes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if foreign := _FOREIGN_CLASS.search(str(error)):
            reason = f"it holds a {foreign[1]}, and to load that could run code"
        raise TrainingError(
            f"{file} is no file of weights ({reason}): wanted a state dict, by torch.save or as .safetensors, and "
            "beside it plain numbers, strings and lists at most"
        ) from error


def _unreadable(error: OSError) -> TrainingError:
    return TrainingError(
        f"the weights cannot be read: {error}; wanted a file that this user may read, on a disk that works"
    )


def weights_in(found: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a file's content, which is a state dict or has one under a usual key.

    Raises:
        TrainingError: there are no weights; the message says what was found.
    """
    if not isinstance(found, Mapping) or not found:
        raise TrainingError(f"{path} holds {_what(found)}: wanted a state dict, names with their tensors")
    keys = {str(key).lower(): key for key in found}
    if nested := [keys[name] for name in _NESTED if isinstance(found.get(keys.get(name)), Mapping)]:
        found, path = found[nested[0]], path / str(nested[0])
        if not found:
            raise TrainingError(f"{path} is empty: wanted a state dict, names with their tensors")
    for name, value in found.items():
        is_extra = isinstance(name, str) and name.endswith(_EXTRA_STATE)
        if not ((isinstance(name, str) and isinstance(value, torch.Tensor)) or is_extra):
            maps = [str(each) for each in found if isinstance(found[each], Mapping)]
            cure = f", perhaps its {maps[0]!r}, saved alone" if maps else ""
            raise TrainingError(
                f"{path} holds at {name!r} {_what(value)}: wanted a state dict, names with their tensors{cure}"
            )
    return dict(found)


def load_weights(
    module: nn.Module, weights: Mapping[str, torch.Tensor], path: Path, *, ignore_mismatched_sizes: bool
) -> list[str]:
    """Load weights into a module.

    Args:
        module: a plain module.
        weights: by name; parts of names that come from DDP or torch.compile are ignored.
        path: of the weights, for the message.
        ignore_mismatched_sizes: load only the weights that fit in name and shape; the module's others are not changed.

    Returns:
        A line for each weight that was left out; empty without ``ignore_mismatched_sizes``.

    Raises:
        TrainingError: some weights do not fit and ``ignore_mismatched_sizes`` is False, or none fits.
    """
    state = module.state_dict()
    own = {name: value for name, value in state.items() if not name.endswith(_EXTRA_STATE)}
    weights = _named_as(state, weights)
    extra = {name: weights.pop(name) for name in [*weights] if name.endswith(_EXTRA_STATE)}
    fitting = {
        name: value for name, value in weights.items() if name in own and own[name].shape == value.shape
    }
    names = dict.fromkeys([*own, *weights])
    shapes = [{name: value.shape for name, value in each.items()} for each in (own, weights)]
    left_out = [
        difference(name, *(each.get(name) for each in shapes)) for name in names if name not in fitting
    ]
    if left_out and not (fitting and ignore_mismatched_sizes):
        listed = "; ".join(left_out[:_SHOWN]) + ("; …" if len(left_out) > _SHOWN else "")
        cure = (
            f"--ignore-mismatched-sizes takes the {len(fitting)} that fit, and lists the others"
            if fitting
            else "none fits: they are of another model"
        )
        raise TrainingError(f"{path}: {len(left_out)} of {len(names)} weights do not fit ({listed}); {cure}")
    module.load_state_dict({**fitting, **extra}, strict=False)
    return left_out


def difference(name: str, here: Sequence[int] | None, there: Sequence[int] | None) -> str:
    """Describe a weight whose shapes differ: ``here`` in the module, ``there`` in the file; None if it is missing."""
    own, other = ("none" if shape is None else str(tuple(shape)) for shape in (here, there))
    return f"{name}: {own} here, {other} there"


def _plain(tensor: Any) -> Any:
    """Return the tensor on the CPU, in a storage of its own size: torch.save writes the whole storage of a view."""
    if not isinstance(tensor, torch.Tensor):  # a module's extra state
        return tensor
    assert not hasattr(tensor, "full_tensor"), "a DTensor is a part of a weight"
    plain = tensor.detach().cpu().contiguous()
    return plain.clone() if plain.untyped_storage().nbytes() > plain.nbytes else plain


def _facts_of(task: object) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    labels = getattr(task, "labels", None)
    if labels is not None:
        facts = {"num_classes": len(labels), "labels": list(labels)}
    try:
        return {**facts, "nodekit": metadata.version("nodekit")}
    except metadata.PackageNotFoundError:  # kit has copied its package to this host, without metadata
        return facts


def _named_as(own: Iterable[str], weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with the module's own names if theirs differ only by wrappers such as DDP."""
    own_names = {_unwrapped(name): name for name in own}
    own_names |= {name: name for name in own}
    named: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        ours = own_names.get(name) or own_names.get(_unwrapped(name), name)
        named[name if ours in named else ours] = value
    return named


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _what(value: Any) -> str:
    return "an empty one" if isinstance(value, Mapping) and not value else f"a {type(value).__name__}"


def _place(draft: Path, folder: Path) -> None:
    """Replace the folder by the draft; the old folder gets the draft's name, or is removed."""
    old = _old(folder)
    if not folder.exists():
        draft.rename(folder)
    elif not _exchange(draft, folder):
        # Between these two renames the folder does not exist, and `_there` returns the old one.
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        draft.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths atomically; return False if the system or the file system cannot."""
    if sys.platform != "linux":
        return False
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = [os.fsencode(path) for path in (one, other)]
    return bool(exchange and exchange(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _there(folder: Path) -> Path:
    """Return the folder, or the old one if a kill has interrupted `_place`."""
    return _old(folder) if not folder.exists() and _old(folder).is_dir() else folder
