"""Measure and remove the files of a run on a host, for `kit rm`.

Only folders of this run are removed, recognised by the files that the run wrote there. A symbolic link is removed
without its target.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nodekit.deploy.host import files
from nodekit.deploy.host.probes import hostfacts, leftovers

# kit's own entries beside the nodes' folders. No host of an inventory has such a name (inventory/resolve.py), but a
# node of Slurm may.
_OWN = ("code", "code.tree.json", "slurm", "state")
_BEAT_S = 1.0
_GRACE_S = 5.0


def list_run(
    folder: str, run_id: str, names: Sequence[str], snapshots: str, part: Callable[[Any], None]
) -> dict[str, Any]:
    """Return what a run has on this host.

    Args:
        folder: ``<workdir>/runs/<run_id>``.
        run_id: the run.
        names: its nodes.
        snapshots: a folder shared between hosts with the run's snapshots; "" if it has none.
        part: called every second, as a heartbeat.

    Returns:
        ``there``: whether there is anything; ``bytes`` in all, and ``snapshots_bytes``; ``shared``: an id of the work
        folder, the same on all hosts that share it; ``alive``: the run's processes, in words; ``agents``: the nodes
        with an ``agent.json``; ``problem``: why the run must not be removed.
    """
    with _beating(part):
        place = Path(folder)
        found: dict[str, Any] = {
            "there": False, "bytes": 0, "snapshots_bytes": 0, "alive": [], "problem": "", "shared": "",
            "agents": [],
        }  # fmt: skip
        with contextlib.suppress(OSError):
            found["shared"] = hostfacts.read_folder_id(str(place.parent.parent))
        try:
            _look(found, place, run_id, names, snapshots)
        except OSError as error:  # unknown what is there, or runs
            what = "%s cannot be read: %s; kit rm again when that is mended"
            found["there"] = True
            found["problem"] = found["problem"] or what % (error.filename or place, error.strerror)
        return found


def _look(found: dict[str, Any], place: Path, run_id: str, names: Sequence[str], snapshots: str) -> None:
    for own in (place, _half(place)):
        if _is_there(own):
            found["there"] = True
            found["problem"] = found["problem"] or _problem(own, place, run_id, names)
            found["bytes"] += _size(own)
            found["snapshots_bytes"] += sum(_size(each / "snapshots") for each in _nodes(own, run_id))
    elsewhere = Path(snapshots)
    for own in (elsewhere, _half(elsewhere)) if snapshots else ():
        if _is_there(own):
            found["there"] = True
            found["problem"] = found["problem"] or _snapshots_problem(own, elsewhere, place)
            size = _size(own)
            found["bytes"] += size
            found["snapshots_bytes"] += size
    for node in [*_nodes(place, run_id), *_nodes(_half(place), run_id)]:
        path = node / "agent.json"
        if isinstance(files.load(str(path)), dict):
            found["agents"].append(node.name)
        elif _is_there(path):
            found["problem"] = found["problem"] or f"{path} is damaged: whether that agent runs is not known"
    found["alive"] = _alive(place, run_id)


def _is_there(path: Path) -> bool:
    """Whether there is anything at a path; raise OSError if that is unknown."""
    try:
        os.lstat(path)
    except files.NOT_FOUND:
        return False
    return True


def remove(
    folder: str,
    run_id: str,
    names: Sequence[str],
    snapshots: str,
    keep_snapshots: bool,
    part: Callable[[Any], None],
) -> None:
    """Remove what `list_run` finds, or with `keep_snapshots` all of it except the snapshots.

    Raises:
        RuntimeError: the run must not be removed, with the reason.
    """
    found = list_run(folder, run_id, names, snapshots, part)
    if found["problem"] or found["alive"]:
        raise RuntimeError(found["problem"] or "; ".join(found["alive"]))
    with _beating(part):
        place = Path(folder)
        shm = [(each["run"], each["node"]) for each in _runs(place, run_id)]
        if shm:  # shared memory: once the folder is gone, nothing tells which run it belonged to
            leftovers.clean(str(place.parent.parent), shm, _GRACE_S)
        if keep_snapshots:
            _strip(place, run_id)
            return
        if snapshots:
            _take_away(Path(snapshots))  # first, as the specs in `place` prove that they are this run's
        _take_away(place)


def _take_away(place: Path) -> None:
    """Rename a folder, and then remove it, so that an interrupted removal leaves no half of a run under its name."""
    half = _half(place)
    _delete(half)
    with contextlib.suppress(FileNotFoundError):  # another host that shares the folder was faster
        place.rename(half)
    _delete(half)


def _half(place: Path) -> Path:
    """Return the name of a run's folder while it is being removed."""
    return place.with_name(".removing-" + place.name)


def _problem(own: Path, place: Path, run_id: str, names: Sequence[str]) -> str:
    if place.name != run_id or place.parent.name != "runs":
        return f"{place} is no folder of the run {run_id}"
    if own.is_symlink():
        return f"{own} is a link, and what it points to may be anybody's"
    if not own.is_dir():
        return f"{own} is no folder"
    specs = (each / "spec.json" for each in _nodes(own, run_id))
    ids = {str(each): _load(each).get("run_id", "") for each in specs if _is_there(each)}
    for path, found in ids.items():
        if found != run_id:
            return f"{path} is of the run '{found}'"
    if ids or (own / "slurm" / "job.json").is_file():
        return ""
    # The run got no further than its code, or most of it was removed already.
    try:
        others = sorted(each.name for each in own.iterdir() if each.name not in (*_OWN, *names))
    except FileNotFoundError:  # another host that shares the folder removes it
        return ""
    if others:
        return f"{own} says nowhere that it is of this run, and has {', '.join(others[:5])} in it"
    return ""


def _snapshots_problem(own: Path, folder: Path, place: Path) -> str:
    if folder.name != place.name:
        return f"the snapshots in {folder} are not this run's alone"
    if own.is_symlink():
        return f"{own} is a link, and what it points to may be anybody's"
    if own != folder:
        return ""  # it is half removed, and was checked before
    specs = [_load(each) for parent in (place, _half(place)) for each in parent.glob("*/spec.json")]
    if not any(_saves_to(spec, folder) for spec in specs):
        return f"no spec.json in {place} says that {folder} is where this run has its snapshots"
    return ""


def _saves_to(spec: dict[str, Any], folder: Path) -> bool:
    env = spec.get("env")
    written = str(env.get("NODEKIT_SNAPSHOT_DIR")) if isinstance(env, dict) else "None"
    return Path(written).expanduser() == folder.expanduser()


def _load(path: Path) -> dict[str, Any]:
    found = files.load(str(path))
    return found if isinstance(found, dict) else {}


def _runs(place: Path, run_id: str) -> list[leftovers.Remains]:
    return leftovers.runs(str(place.parent.parent), run_id)


def _alive(place: Path, run_id: str) -> list[str]:
    found = []
    for each in _runs(place, run_id):
        if each["agent"]:
            found.append(f"its agent on {each['node']} runs (pid {each['agent']})")
        elif each["processes"]:
            pids = ", ".join(str(process["pid"]) for process in each["processes"])
            found.append(f"processes of {each['node']} run (pid {pids})")
    return found


def _nodes(place: Path, run_id: str) -> list[Path]:
    """Return the nodes' folders in a run's folder, without links; one named as in `_OWN` needs the run's spec.json."""
    if place.is_symlink() or not place.is_dir():
        return []
    folders = (each for each in sorted(place.iterdir()) if each.is_dir() and not each.is_symlink())
    return [
        each for each in folders if each.name not in _OWN or _load(each / "spec.json").get("run_id") == run_id
    ]


def _size(folder: Path) -> int:
    """Return the bytes of a folder on disk, without the targets of links."""
    if folder.is_symlink():
        return 0
    total = 0
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(str(folder)):
        for name in (*folders, *names):
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(parent, name))
                if (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    total += found.st_blocks * 512
    return total


def _strip(place: Path, run_id: str) -> None:
    """Remove everything in a run's folder except the snapshots in its nodes' folders."""
    nodes = _nodes(place, run_id)
    for each in list(place.iterdir()) if place.is_dir() else []:
        if each not in nodes:
            _delete(each)
    for node in nodes:
        if (node / "snapshots").is_dir() and not (node / "snapshots").is_symlink():
            for each in list(node.iterdir()):
                if each.name != "snapshots":
                    _delete(each)
        else:
            _delete(node)


def _delete(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return
    try:
        shutil.rmtree(str(path))  # does not follow links
    except FileNotFoundError:
        _delete(path)  # another host removes the same folder
    except PermissionError:
        for parent, _, _ in os.walk(str(path)):  # read-only folders, as some caches have
            os.chmod(parent, 0o700)
        shutil.rmtree(str(path))


@contextlib.contextmanager
def _beating(part: Callable[[Any], None]) -> Iterator[None]:
    """Send a heartbeat every second in the context: a large folder on a slow disk takes long."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT_S):
            part(None)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
