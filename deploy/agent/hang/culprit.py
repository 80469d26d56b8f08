"""Name the rank that holds up others in a hang, by stacks, flight recorders and steps. Pure; standard library only."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from nodekit.deploy.agent.hang import flight
from nodekit.deploy.agent.hang.hang import Progress
from nodekit.deploy.agent.hang.stacks import Frame, Stack
from nodekit.training.process.stages import MEETING

# Files that are not the user's code. kit's own count as the user's, since kit's training module is a job too.
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/(?!nodekit/)|/lib(?:64)?/python3[.\d]*/(?!(?:site|dist)-packages/)|^<frozen"
)
_INSTALLED_IN = re.compile(r".*(?:(?:site|dist)-packages|/lib(?:64)?/python3[.\d]*)/")
_TORCH_DISTRIBUTED = re.compile(r"(?:^|/)torch/distributed/(?!checkpoint/)")
_OPERATION = re.compile(
    r"all_reduce\w*|all_gather\w*|_?all_to_all\w*|reduce_scatter\w*|broadcast\w*|reduce|gather(?:_object)?"
    r"|scatter\w*|i?send(?:_object_list)?|i?recv(?:_object_list)?|batch_isend_irecv|(?:monitored_)?barrier"
    r"|wait\w*|init_process_group|new_group|destroy_process_group|_sync_\w+|_verify_param_shape_across_processes"
)
# C functions leave no frame: recognize them by the line that calls them.
_C_CALL = re.compile(
    r"(?:\.(wait|item|tolist|cpu|synchronize|nonzero)|store\w*(?:\(\))?\.(get|wait)|\.(to)(?=\(.cpu)"
    r"|reducer\.(_rebuild_buckets))\("
)
_TORCH = re.compile(r"(?:^|/)torch/(?!utils/data/|multiprocessing/)")
_FOR_A_GPU = ("item", "tolist", "cpu", "to", "synchronize", "nonzero")
_STATES = (
    ("Tt", "is stopped (by SIGSTOP or a debugger)", "are stopped (by SIGSTOP or a debugger)"),
    ("ZX", "is gone", "are gone"),
    (
        "D",
        "is stuck in the kernel (state D: a disk or NFS?)",
        "are stuck in the kernel (state D: a disk or NFS?)",
    ),
)
_HANGS = ("hangs", "hang")
_WAITS = ("waits", "wait")


@dataclass(frozen=True)
class Culprit:
    """The ranks that hold up the others, and where they hang."""

    ranks: tuple[int, ...]
    """Empty if no rank differs from the others."""
    line: str
    """One line for the user."""
    stack: tuple[str, ...] = ()
    """Of the first of `ranks`, or else of the lowest rank: innermost first, with library frames folded."""


class Wait(NamedTuple):
    """The operation in which a rank waits for others."""

    operation: str
    is_sure: bool
    """False for an operation that may also just compute: backward, .item()."""

    @property
    def is_for_gpu(self) -> bool:
        """Whether a rank may spin in the operation until its GPU, which may wait for other ranks, is done."""
        return not self.is_sure and self.operation in _FOR_A_GPU


def explain(
    stacks: Mapping[int, Stack],
    progress: Mapping[int, Progress],
    *,
    records: Mapping[int, flight.Record] | None = None,
    nodes: Mapping[int, str] | None = None,
    world_size: int | None = None,
    on_gpus: bool | None = None,
) -> Culprit:
    """Return the ranks that hold up the others, from the stacks of all ranks or of those that could be read.

    Ranks that cannot run (stopped, gone, stuck in the kernel) come first; then, by the flight recorders, those that
    never entered the collective in which others wait; then, by the stacks, those that do not wait. A stack says more
    than a step: steps are written only now and then, and the rank with the lowest may itself wait for another. Steps
    decide if all ranks wait, or none.

    Args:
        stacks: rank → stack.
        progress: rank → its progress.
        records: rank → what its flight recorder has.
        nodes: rank → name of its node.
        world_size: of the job; None for as many ranks as there are stacks.
        on_gpus: whether ranks use GPUs; None if that is not known.
    """
    if not stacks:
        return Culprit((), "there is no rank to look at")
    waits = _waits(stacks, on_gpus=on_gpus)
    if len(stacks) == 1 == (world_size or 1):
        waits = {}
    is_partial = world_size is not None and len(stacks) < world_size

    def say(ranks: Iterable[int], verbs: tuple[str, str]) -> str:
        return _say(ranks, verbs, stacks, waits, nodes or {})

    blamed, verbs = _stuck(stacks)
    found = None if blamed else flight.compare(records or {})
    if found:
        return _by_record(
            found, say, stacks, waits, num_others=(world_size or len(stacks)) - len(found.ranks)
        )
    if not blamed:
        blamed, verbs = _odd_ones(stacks, waits, is_partial=is_partial)
    behind, where = _behind(stacks, progress)
    operations = _by_operation({rank: wait for rank, wait in waits.items() if wait.is_sure})
    if not blamed and behind:
        blamed, verbs = behind, (f"is behind ({where}),", f"are behind ({where}),")
    if blamed:
        line = say(blamed, verbs)
        if others := {rank: wait for rank, wait in waits.items() if rank not in blamed}:
            what = " or ".join(sorted(_by_operation(others)))
            it = "it" if len(blamed) == 1 else "them"
            line += (
                f"; {len(others)} {'other waits' if len(others) == 1 else 'others wait'} for {it} in {what}"
            )
    elif is_partial:
        line = f"{say(stacks, _WAITS)} for ranks elsewhere"
    elif not waits:
        line = f"none waits for another: {say(stacks, _HANGS)}"
    elif len(operations) > 1:
        fewest, *more = sorted(operations.values(), key=len)
        blamed = fewest if len(fewest) < len(more[0]) else []
        line = f"the ranks wait for each other in different operations: {say(stacks, _WAITS)}"
    else:
        line = f"all wait, is it the network between them? {say(stacks, _WAITS)}"
    return Culprit(tuple(blamed), line, _shown(blamed, stacks))


def _waits(stacks: Mapping[int, Stack], *, on_gpus: bool | None) -> dict[int, Wait]:
    """Return rank → the operation in which it waits for others.

    A rank in the kernel's state R computes, and is left out, unless it may spin while it waits for a GPU.
    """
    waits = {rank: wait for rank, stack in stacks.items() if (wait := waiting(stack.frames))}
    busy = {rank for rank, wait in waits.items() if not wait.is_sure and stacks[rank].state == "R"}
    spins = {rank for rank in busy if waits[rank].is_for_gpu}
    if on_gpus is None:
        on_gpus = len(spins) * 2 > len(waits)
    if on_gpus:
        busy -= spins
    if len(busy) < len(waits):
        waits = {rank: wait for rank, wait in waits.items() if rank not in busy}
    return waits


def _by_record(
    found: flight.Finding,
    say: Callable[[Iterable[int], tuple[str, str]], str],
    stacks: Mapping[int, Stack],
    waits: Mapping[int, Wait],
    *,
    num_others: int,
) -> Culprit:
    """Put a finding into words: ``rank 1 never entered all_reduce 812: it hangs in load (a.py:3); 2 others wait …``."""
    ranks = [rank for rank in found.ranks if rank in stacks]
    verb = "wait" if all(rank in waits for rank in ranks) else "hang"
    line = say(ranks, (f"{found.what}: it {verb}s", f"{found.what}: they {verb}"))
    if num_others:
        line += f"; {num_others} {'other waits' if num_others == 1 else 'others wait'} there"
    return Culprit(tuple(ranks), line, _shown(ranks, stacks))


def _shown(blamed: Sequence[int], stacks: Mapping[int, Stack]) -> tuple[str, ...]:
    return tuple(_fold(stacks[blamed[0] if blamed else min(stacks)].frames))


def _stuck(stacks: Mapping[int, Stack]) -> tuple[list[int], tuple[str, str]]:
    """Return the ranks that cannot run, by the kernel's state, and the verbs for the message about them."""
    for states, *verbs in _STATES:
        if found := [rank for rank in sorted(stacks) if (stacks[rank].state or "Z") in states]:
            return found, (verbs[0], verbs[1])
    return [], _HANGS


def _odd_ones(
    stacks: Mapping[int, Stack], waits: Mapping[int, Wait], *, is_partial: bool
) -> tuple[list[int], tuple[str, str]]:
    """Return the ranks that do not wait while others do, and the verbs for the message about them."""
    if not waits and not is_partial:
        return list(stacks) if len(stacks) == 1 else [], _HANGS
    known = [rank for rank in sorted(stacks) if rank not in waits and stacks[rank].frames]
    return known or [rank for rank in sorted(stacks) if rank not in waits], _HANGS


def _behind(stacks: Mapping[int, Stack], progress: Mapping[int, Progress]) -> tuple[list[int], str]:
    """Return the ranks with the lowest step, or the few at another stage of their start, and how others differ."""
    steps = {rank: each.step for rank, each in progress.items() if rank in stacks and each.step is not None}
    lowest, highest = min(steps.values(), default=0), max(steps.values(), default=0)
    if lowest != highest:
        return [
            rank for rank, step in sorted(steps.items()) if step == lowest
        ], f"step {lowest}, others {highest}"
    stages: dict[str, list[int]] = {}
    for rank, each in sorted(progress.items()):
        if rank in stacks and each.stage:
            stages.setdefault(each.stage, []).append(rank)
    if len(stages) > 1 and (meeting := stages.pop(MEETING, [])):
        # Who is at a later stage has met all others, and waits for these, even if they are more.
        return meeting, f"{MEETING}: is it the network between them? others {' or '.join(sorted(stages))}"
    (few, own), *others = sorted(stages.items(), key=lambda each: len(each[1])) or [("", [])]
    if len(others) == 1 and len(own) < len(others[0][1]):
        return own, f"{few}, others {others[0][0]}"
    return [], ""


def _by_operation(waits: Mapping[int, Wait]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank in sorted(waits):
        found.setdefault(waits[rank].operation, []).append(rank)
    return found


def waiting(frames: Sequence[Frame]) -> Wait | None:
    """Return the operation in which a rank with this stack waits for others; None if it does work of its own."""
    inner = list(itertools.takewhile(_is_library, frames))
    names = [_short(each.function).rpartition(".")[2] for each in inner]
    distributed = [bool(_TORCH_DISTRIBUTED.search(each.file)) for each in inner]
    calls = [
        name for name, ours in zip(names, distributed, strict=True) if ours and _OPERATION.fullmatch(name)
    ]
    if calls:
        return Wait(calls[-1], is_sure=True)  # as the user called it
    if any(name in ("_engine_run_backward", "run_backward") for name in names):
        return Wait("backward", is_sure=False)
    if any(
        name == "synchronize" and "torch/cuda/" in each.file for name, each in zip(names, inner, strict=True)
    ):
        return Wait("synchronize", is_sure=False)
    if inner and distributed[0]:
        return Wait(names[0], is_sure=True)
    is_torch = bool(inner) and bool(_TORCH.search(frames[0].file))
    if frames and (not inner or is_torch) and (call := _C_CALL.search(frames[0].code)):
        return Wait(next(filter(None, call.groups())), is_sure=False)
    return None


def _is_library(frame: Frame) -> bool:
    return bool(_LIBRARY.search(frame.file))


def _short(function: str) -> str:
    return function.rpartition("<locals>.")[2]


def _say(
    ranks: Iterable[int],
    verbs: tuple[str, str],
    stacks: Mapping[int, Stack],
    waits: Mapping[int, Wait],
    nodes: Mapping[int, str],
) -> str:
    """Put ranks into words: ``rank 1 on node2 hangs in load (a.py:3) and ranks 2 and 3 hang in step (a.py:9)``."""
    places: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        places.setdefault(_place(stacks[rank], waits.get(rank)), []).append(rank)
    said = []
    for place, group in places.items():
        names = [f"{rank} on {nodes[rank]}" if rank in nodes else str(rank) for rank in group]
        if len(names) > 4:
            names = [*names[:3], f"{len(names) - 3} more"]
        who = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        said.append(f"{'ranks' if len(group) > 1 else 'rank'} {who} {verbs[len(group) > 1]}{place}")
    return " and ".join(said)


def _place(stack: Stack, wait: Wait | None) -> str:
    if not stack.frames:
        return "" if stack.state in ("", "Z", "X") else ", its stack could not be read"
    users = next((number for number, each in enumerate(stack.frames) if not _is_library(each)), 0)
    frame = stack.frames[users]
    where = f"{PurePath(frame.file).name}:{frame.line}"
    if wait:
        return f" in {wait.operation} ({where})"
    inside = f", inside {_short(stack.frames[users - 1].function)}" if users else ""
    return f" in {_short(frame.function)} ({where}){inside}"


def _fold(frames: Sequence[Frame]) -> Iterable[str]:
    for is_library, group in itertools.groupby(frames, key=_is_library):
        each = list(group)
        if is_library and len(each) > 1:
            named = f"{_short(each[-1].function)} ({_INSTALLED_IN.sub('', each[-1].file)}:{each[-1].line})"
            yield f"{named} and {len(each) - 1} more below it"
        else:
            for frame in each:
                at = f"{_short(frame.function)} ({_INSTALLED_IN.sub('', frame.file)}:{frame.line})"
                yield f"{at}  {frame.code}".rstrip()
