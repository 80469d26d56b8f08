"""Find which folders of a run on this host have files, and what its script wrote into the code folder."""

from __future__ import annotations

import os
import stat
import time
from typing import Any, Dict, List, Optional, Sequence

from nodekit.deploy.host.code import treefiles
from nodekit.deploy.host.probes import hostfacts

MOST_FILES = 50_000  # the most files that `written` looks at
MOST_S = 2.0  # the longest time that `written` takes
_NOT_SNAPSHOTS = ("fence",)  # kit's own file in the snapshot folder


def list_artifacts(node_dir: str, code_dir: str, snapshots: str, weights: Sequence[str]) -> Dict[str, Any]:
    """List what a node has of a run.

    Returns:
        ``logs``, ``snapshots``, ``curves``: whether there are any; ``weights``: the first of these folders that is not
        empty, or ""; ``written``: see `written`; ``code``: an id of kit's work folder, for `hostfacts.folders`.
    """
    node_dir, code_dir = os.path.expanduser(node_dir), os.path.expanduser(code_dir)
    return {
        "logs": any(name.endswith(".log") for name in _names(os.path.join(node_dir, "logs"))),
        "snapshots": any(
            name not in _NOT_SNAPSHOTS and not name.startswith(".")
            for name in _names(os.path.expanduser(snapshots))
        ),
        "curves": any(
            "tfevents" in name for _, _, names in os.walk(os.path.join(node_dir, "output")) for name in names
        ),
        "weights": next((each for each in weights if _names(os.path.expanduser(each))), ""),
        "written": written(code_dir),
        "code": _name_of(code_dir),
    }


def written(code_dir: str) -> Optional[Dict[str, Any]]:
    """Return what is in a run's code folder and was not synced, or was changed since; None if unknown.

    Returns:
        ``entries``: [name, number of files, bytes] of each file or folder at the top level, the largest first;
        ``is_all``: whether all files were looked at within `MOST_FILES` and `MOST_S`.
    """
    came = treefiles.read_list(code_dir)
    if not came:
        return None
    links = {row[0] for row in came["rows"] if row[1] == "l"}
    stats = came["stats"]
    found: Dict[str, List[int]] = {}
    deadline, num_files = time.monotonic() + MOST_S, 0
    for top, folders, names in os.walk(code_dir):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            num_files += 1
            if num_files > MOST_FILES or time.monotonic() > deadline:
                break
            full = os.path.join(top, name)
            path = os.path.relpath(full, code_dir)
            try:
                here = os.lstat(full)
            except OSError:  # removed meanwhile
                continue
            if path in links and stat.S_ISLNK(here.st_mode):
                continue
            if path in stats and stats[path][:4] == treefiles.signature(here):
                continue
            first, slash, _ = path.partition("/")
            of = found.setdefault(first + slash, [0, 0])
            of[0] += 1
            of[1] += here.st_size
        else:
            continue
        break
    names = sorted(found, key=lambda name: (-found[name][1], name))
    return {
        "entries": [[name, *found[name]] for name in names],
        "is_all": num_files <= MOST_FILES and time.monotonic() <= deadline,
    }


def _names(folder: str) -> List[str]:
    """Return the names in a folder; none if it does not exist."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _name_of(code_dir: str) -> str:
    """Return an id of kit's work folder, which hosts may share (see `hostfacts.folders`); "" if it has none."""
    try:
        return hostfacts.read_folder_id(os.path.dirname(os.path.dirname(os.path.dirname(code_dir))))
    except OSError:
        return ""
