"""Read torch's flight recorders, and compare which collectives each rank has entered. Imports no torch.

A rank dumps its recorder when something is written to its pipe. torch reads that pipe for a process's first group on
NCCL, nodekit/training/group/recorder.py for all others. Names and formats:
torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nodekit.training.errors import release_of

NUM_ENTRIES = "2000"
MAX_BYTES = 64 * 1024**2
_NEWER_NAMES = (2, 8)
"""The release from which on torch has the newer names. Set only one, since it warns of the other version's."""
_NCCL2 = (2, 15)
"""From here on, NCCL's default backend is nccl2, which reads no FIFO; the earlier one is still there."""
_KEPT = 200  # how many of a group's last calls the nodes send each other
_POLL_S = 0.05
_MARKS = ("restore_type_tag", "build_intlist", "build_doublelist", "build_boollist")


class Call(NamedTuple):
    """A collective that a rank has entered."""

    number: int
    """Counts the group's collectives, in order."""
    name: str
    """Such as ``all_reduce``."""
    sizes: str
    """Of the input tensors, as JSON."""
    is_over: bool


class Group(NamedTuple):
    """A process group, and the collectives that one rank has entered in it."""

    ranks: tuple[int, ...]
    """The members of the group; empty if the recorder does not list them."""
    calls: tuple[Call, ...]


Record = Mapping[str, Group]
"""The content of one rank's recorder: name of a group → the group."""


class Finding(NamedTuple):
    """The ranks that keep others waiting in a collective."""

    ranks: tuple[int, ...]
    what: str
    """What they did, in words: ``never entered all_reduce 812``."""


def environment(folder: Path, environ: Mapping[str, str], torch_version: str) -> dict[str, str]:
    """Return the variables that make ranks dump their recorders into `folder`; values set by the user stay."""
    newer = release_of(torch_version) >= _NEWER_NAMES
    name = "TORCH_FR_DUMP_TEMP_FILE" if newer else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    wanted = dict.fromkeys((name, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"), str(folder / "rank"))
    return {
        **read_once(environ, torch_version),
        **{name: environ.get(name, value) for name, value in wanted.items()},
    }


def read_once(environ: Mapping[str, str], torch_version: str) -> dict[str, str]:
    """Return those of these variables that torch reads once in a process: at its first group, or first collective."""
    release = release_of(torch_version)
    name = "TORCH_FR_BUFFER_SIZE" if release >= _NEWER_NAMES else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    wanted = {name: NUM_ENTRIES}
    if release >= _NCCL2:
        wanted["TORCH_DIST_USE_NCCL2"] = "0"
    return {name: environ.get(name, value) for name, value in wanted.items()}


def ask(environ: Mapping[str, str], ranks: Sequence[int], *, timeout_s: float) -> dict[int, Record]:
    """Return the records of these ranks; leave out ranks that do not answer in time.

    Args:
        environ: the ranks' variables, from `environment`.
        ranks: ranks of this node.
        timeout_s: at least a second or two, since torch polls the pipe once a second.
    """
    file = environ.get("TORCH_FR_DUMP_TEMP_FILE") or environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "")
    pipe = environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
    if not file or not pipe:
        return {}
    waited = {
        rank: Path(f"{file}{rank}") for rank in ranks if _poke(Path(f"{pipe}{rank}.pipe"), f"{file}{rank}")
    }
    found: dict[int, Record] = {}
    sizes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < len(waited) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for rank in waited.keys() - found.keys():
            with contextlib.suppress(OSError, ValueError):
                size = waited[rank].stat().st_size
                # The file is written in place: while it grows, it is incomplete.
                is_still = size == sizes.get(rank)
                sizes[rank] = size
                if size and is_still and size <= MAX_BYTES:
                    found[rank] = parse(waited[rank].read_bytes())
    return found


def _poke(pipe: Path, file: str) -> bool:
    """Ask a rank for a dump into `file`; return False if no process reads the pipe."""
    with contextlib.suppress(OSError):
        if not stat.S_ISFIFO(pipe.lstat().st_mode):
            return False
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            Path(file).unlink(missing_ok=True)  # an older dump
            os.write(handle, b"1")
        finally:
            os.close(handle)
        return True
    return False


class _Plain(pickle.Unpickler):
    """Unpickles numbers, strings, lists and dictionaries; refuses everything that would call code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.jit._pickle" and name in _MARKS:  # type tags around plain values
            return _unmarked
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a dump")


def _unmarked(value: Any, *_: Any) -> Any:
    return value


def parse(data: bytes) -> dict[str, Group]:
    """Parse a dump of the flight recorder, which is torch's pickle or JSON.

    Raises:
        ValueError: the data is neither, incomplete, or no dump of the recorder.
    """
    try:
        dump = json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        members = {name: tuple(json.loads(each["ranks"])) for name, each in dump.get("pg_config", {}).items()}
        everyone = members.pop("", ())  # gloo's default group is listed without its name
        calls: dict[str, dict[int, Call]] = {name: {} for name in members}
        entries = [each for each in dump.get("entries", ()) if not each["is_p2p"]]
        # A process that left a group and joined another has both under one name, each numbered from 1: take the newest.
        newest = {str(each["process_group"][0]): each.get("pg_id") for each in entries}
        for each in entries:
            name, number = str(each["process_group"][0]), int(each["collective_seq_id"])
            if each.get("pg_id") != newest[name]:
                continue
            if name not in members and each["process_group"][1] == "default_pg":
                members[name] = everyone
            calls.setdefault(name, {})[number] = Call(
                number,
                str(each["profiling_name"]).partition(":")[2] or str(each["profiling_name"]),
                json.dumps(each["input_sizes"]),
                is_over=bool(each["retired"]) or each["state"] == "completed",
            )
    except (pickle.UnpicklingError, EOFError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise ValueError(f"not a dump of the flight recorder: {error!r}") from error
    return {
        name: Group(members.get(name, ()), tuple(sorted(found.values())[-_KEPT:]))
        for name, found in calls.items()
    }


def load(fields: Mapping[str, Any]) -> dict[str, Group]:
    """Build a record from JSON."""
    return {
        name: Group(tuple(ranks), tuple(Call(*each) for each in calls))
        for name, (ranks, calls) in fields.items()
    }


def compare(records: Mapping[int, Record]) -> Finding | None:
    """Return the ranks that never entered a collective in which others wait, or called another one; else None. Pure.

    A rank that itself waits in another group is named only if there is no other finding.
    """
    found = [each for name in _names(records) if (each := _compare(_calls(records, name)))]
    waiting = {rank for name in _names(records) for rank in _waiting(_calls(records, name))}
    return next((each for each in found if waiting.isdisjoint(each.ranks)), found[0] if found else None)


def _names(records: Mapping[int, Record]) -> list[str]:
    return sorted({name for record in records.values() for name in record})


def _calls(records: Mapping[int, Record], name: str) -> dict[int, dict[int, Call]]:
    """Return rank → number → call, for those members of a group that have sent a record."""
    members = {rank for record in records.values() if name in record for rank in record[name].ranks}
    return {
        rank: {call.number: call for call in record[name].calls} if name in record else {}
        for rank, record in records.items()
        if rank in members or (not members and name in record)
    }


def _waiting(calls: Mapping[int, Mapping[int, Call]]) -> Iterator[int]:
    return (rank for rank, own in calls.items() if own and not own[max(own)].is_over)


def _compare(calls: Mapping[int, Mapping[int, Call]]) -> Finding | None:
    last = {rank: max(own, default=0) for rank, own in calls.items()}
    waiting = set(_waiting(calls))
    lowest = min(last.values(), default=0)
    behind = tuple(sorted(rank for rank in last if last[rank] == lowest))
    if any(last[rank] > lowest for rank in waiting):
        ahead = [own[lowest + 1] for own in calls.values() if lowest + 1 in own]
        name = Counter(call.name for call in ahead).most_common(1)[0][0] if ahead else "collective"
        return Finding(behind, f"never entered {name} {lowest + 1}")
    if not waiting:
        return None
    now = {rank: own[lowest] for rank, own in calls.items() if lowest in own}
    for what in ("name", "sizes"):
        said = Counter(getattr(call, what) for call in now.values())
        (most, num_most), *others = said.most_common()
        if not others or num_most == others[0][1]:
            continue
        odd = tuple(sorted(rank for rank, call in now.items() if getattr(call, what) != most))
        own = now[odd[0]]
        if what == "name":
            return Finding(odd, f"called {own.name} where others called {most} {lowest}")
        if own.name in ("all_reduce", "broadcast", "reduce", "all_reduce_barrier", "reduce_scatter"):
            return Finding(odd, f"called {own.name} {lowest} with {own.sizes} where others have {most}")
    return None
