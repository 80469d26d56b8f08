"""Read an inventory file, and report all its mistakes at once, as ``file:line: key: found X, wanted Y``."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.inventory.errors import InventoryError

if TYPE_CHECKING:
    from nodekit.inventory.schema import Inventory

MAX_BYTES = 1 << 20
"""The largest inventory file: 5,000 hosts take a quarter of that, so a larger file is something else."""

_FOLDER = Path(__file__).resolve().parent


def load_inventory(path: str | Path, *, overrides: Mapping[str, object] | None = None) -> "Inventory":
    """Load the inventory in a file.

    Args:
        path: the YAML file; relative to the current folder.
        overrides: dotted keys that replace the file's, as ``{"job.command": ["train.py"], "nodes": "2:4"}``.

    Raises:
        InventoryError: with a line for every mistake in the file.
    """
    # Imported here: they take a tenth of a second, and `kit --help` and `kit status` read no inventory.
    from nodekit.inventory.explain import found, tell, validate
    from nodekit.inventory.resolve import resolve
    from nodekit.inventory.source import NotYamlError, Problem, parse

    path = Path(path)
    text = _read(path)
    try:
        document = parse(text)
    except NotYamlError as error:
        raise InventoryError(f"{path}:{error.line}: {error}") from error
    data = document.data
    if not isinstance(data, dict):
        what = "found an empty file" if data is None else f"found {found(data)}"
        problem = Problem((), f"{what}, wanted key: value lines, as in {example_path('lab')}")
        raise InventoryError(tell(path, document, document.problems or [problem]))
    if data.get("name") is None:
        data["name"] = path.stem
    document.override(overrides or {})
    written = {key for key, value in data.items() if value is not None}
    file, problems, left_out = validate(document)
    inventory = None
    if file is not None:
        inventory, more = resolve(file, path.absolute(), written, left_out)
        problems += more
    if inventory is None or document.problems:
        raise InventoryError(tell(path, document, document.problems + problems))
    return inventory


def example_names() -> tuple[str, ...]:
    """Return the names of the inventories that come with kit."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.yaml")))


def example_path(name: str) -> Path:
    """Return the file of an inventory that comes with kit: `local`, `lab` or `slurm`."""
    if name not in example_names():
        raise InventoryError(f"{name}: no such example", wanted=f"one of {', '.join(example_names())}")
    return _FOLDER / f"{name}.yaml"


def example_of(path: str) -> str:
    """Return the name of an inventory that comes with kit by its path; "" for any other file."""
    file = Path(path)
    return file.stem if file.suffix == ".yaml" and file.parent.resolve() == _FOLDER else ""


def dump(inventory: "Inventory") -> dict[str, Any]:
    """Return the inventory as plain JSON values, for a run's record."""
    return inventory.model_dump(mode="json")


def changed(record: Mapping[str, Any], inventory: "Inventory") -> list[str]:
    """Return the keys, such as ``hosts`` or ``job.env``, whose values differ from those in a record by `dump`."""
    keys = []
    for key, value in dump(inventory).items():
        before = record.get(key, value)  # an older kit's record may lack it
        if not (isinstance(before, Mapping) and isinstance(value, Mapping)):
            keys += [key] * (before != value)
        else:
            keys += [f"{key}.{each}" for each in value if before.get(each, value[each]) != value[each]]
    return keys


def restore(record: Mapping[str, Any]) -> "Inventory":
    """Return the inventory from the values of `dump`."""
    from pydantic import ValidationError

    from nodekit.inventory.schema import Inventory

    try:
        return Inventory.model_validate(record)
    except ValidationError as error:
        raise InventoryError(f"the run's record of its inventory cannot be read: {error}") from error


def read_limited(path: Path, max_bytes: int, *, wanted: str) -> bytes:
    """Read a file of at most `max_bytes`; it may be an endless one, such as /dev/zero.

    Raises:
        InventoryError: the file is larger.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InventoryError(f"{path}: found more than {max_bytes >> 20} MiB", wanted=wanted)
    return data


def _read(path: Path) -> str:
    try:
        # The FIFO of a shell's `<(…)` has a writer; opening any other may block for ever.
        if path.is_fifo() and not path.is_relative_to("/dev") and not path.is_relative_to("/proc"):
            raise InventoryError(f"{path}: found a FIFO", wanted="a file", cure=_what_there_is(path.parent))
        return read_limited(path, MAX_BYTES, wanted="an inventory file").decode()
    except FileNotFoundError:
        raise InventoryError(f"{path}: no such file", cure=_what_there_is(path.parent)) from None
    except IsADirectoryError:
        raise InventoryError(f"{path}: found a folder", wanted="a file", cure=_what_there_is(path)) from None
    except InventoryError:
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            line = error.object.count(b"\n", 0, error.start) + 1
            byte = error.object[error.start]
            raise InventoryError(
                f"{path}:{line}: found the byte 0x{byte:02x}", wanted="UTF-8 text"
            ) from error
        raise InventoryError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _what_there_is(folder: Path) -> str:
    """List the inventories in a folder, for the error about a missing one."""
    try:
        beside = sorted(str(file) for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    except OSError:
        beside = []
    here = f"there is {', '.join(beside[:8])}{' …' if len(beside) > 8 else ''}; " if beside else ""
    return f"{here}`local` is kit's own example, two nodes on this machine: kit up local"
