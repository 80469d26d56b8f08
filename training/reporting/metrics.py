"""metrics.jsonl: a line for each step and each evaluation, the same on all nodes, also on nodes that join later.

The file of a million steps has 150 MB. All ranks wait while an attempt begins, so it is then read from its end.
"""

import logging
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nodekit.training.world import World

log = logging.getLogger("nodekit.training")

MOST_SENT = 20_000
"""About the most lines sent to a node without the history: of a longer one, every n-th step and all evaluations."""

_COMPARED = 1000
"""How many last lines are compared to tell two histories apart; these lines are always sent."""
_BLOCK_BYTES = 1 << 16

_HEAD = re.compile(rb'\{"step": (\d+), (?:"attempt": "(\d+)\.(\d+)", )?')


@dataclass(frozen=True, order=True, slots=True)
class Held:
    """Summarizes a node's history; the greatest one is the most complete."""

    last_step: int
    """The last line's step; lower than the snapshot's on a node that was not there when the snapshot was made."""
    attempt: tuple[int, int]
    """The last line's attempt; lower on a node that was absent since, whose steps may have been done again."""
    num_lines: int
    """How many last lines are compared, at most ``_COMPARED``."""
    crc: int
    """A CRC of these lines' steps and attempts only, since times differ between nodes."""


def attempt_of(world: "World") -> str:
    """Return ``GENERATION.ROUND``, as in kit's events; all ranks call it.

    Without kit, the time replaces the generation, since torchrun counts restarts from 0 at each start.
    """
    if world.generation is not None:
        return f"{world.generation}.{world.num_restarts - world.generation}"
    now_ms = int(time.time() * 1000)
    return f"{world.gather(now_ms)[0] if world.world_size > 1 else now_ms}.{world.num_restarts}"


def finite(values: Any) -> Any:
    """Return the values with None for nan and infinity, which JSON lacks: strict readers would refuse the file."""
    if isinstance(values, Mapping):
        return {name: finite(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the points of a line: name of the curve → value."""
    if "test" in values:
        return {
            f"test/{name}": math.nan if value is None else value for name, value in values["test"].items()
        }
    found = {"train/loss": values["loss"]}
    if "samples_per_s" in values:  # not in every line, since it changes slowly, as lr does
        found |= {"train/lr": values["lr"], "train/samples_per_s": values["samples_per_s"]}
    return found


def backwards(path: Path, size: int | None = None) -> Iterator[bytes]:
    """Yield the lines in the first ``size`` bytes (None: all), the last one first; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size if size is None else size
        rest = b""
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            file.seek(begin)
            lines = (file.read(end - begin) + rest).splitlines(keepends=True)
            rest = lines.pop(0) if begin else b""  # this line may begin in an earlier block
            yield from reversed(lines)
            end = begin


def _last(lines: Iterator[bytes], is_wanted: Callable[[bytes], bool]) -> list[bytes]:
    """Return the leading wanted ones of ``lines``, which come backwards, in the order of the file."""
    return list(takewhile(is_wanted, lines))[::-1]


def take_back(path: Path, step: int, *, is_evaluated: bool) -> None:
    """Cut off the lines after ``step``, and the evaluation at ``step`` unless it ``is_evaluated`` already."""
    cut = _last(backwards(path), lambda line: not _is_kept(line, step, is_evaluated=is_evaluated))
    if cut:
        os.truncate(path, path.stat().st_size - sum(map(len, cut)))


def _is_kept(line: bytes, step: int, *, is_evaluated: bool) -> bool:
    head = _HEAD.match(line)
    if head is None or not line.endswith(b"}\n"):  # truncated by a kill
        return False
    return int(head[1]) < step or (int(head[1]) == step and (is_evaluated or b'"test": ' not in line))


def agree(path: Path, world: "World") -> None:
    """Give every node the same history; all ranks call it, after `take_back` by the first rank of each node.

    A node that joined late lacks lines, and one that was absent has lines of steps that were done again.
    """
    own = None
    if world.is_first_on_node:
        try:
            own = held(path)
        except OSError as error:  # do not raise: the other ranks would wait for this one
            log.warning("%s is not compared with the other nodes': %s", path, error)
    offers = world.gather(own)
    best = max((offer for offer in offers if offer is not None), default=None)
    if best is None or all(offer in (None, best) for offer in offers):
        return
    source = offers.index(best)
    sent: bytes | None = None
    if world.rank == source:
        try:
            lines = read(path, path.stat().st_size)
            sent = zlib.compress(b"".join(thinned(lines, MOST_SENT, whole=_COMPARED)), 1)
        except OSError as error:
            log.warning("%s is not sent to the other nodes: %s", path, error)
    sent = world.broadcast(sent, source)
    if own not in (None, best) and sent is not None:
        _replace(path, [zlib.decompress(sent)])


def held(path: Path) -> Held:
    """Return the summary of a history."""
    heads = [head for line in islice(backwards(path), _COMPARED) if (head := _HEAD.match(line))]
    if not heads:
        return Held(0, (-1, -1), 0, 0)
    crc = zlib.crc32(b"".join(head[0] for head in heads))
    return Held(int(heads[0][1]), _attempt(heads[0]), len(heads), crc)


def thinned(lines: Sequence[bytes], most: int, *, whole: int = 1) -> list[bytes]:
    """Return about ``most`` of the lines: every n-th line, all evaluations, and the last ``whole`` lines."""
    every = -(-len(lines) // most)
    if every <= 1:
        return list(lines)
    whole_from = len(lines) - whole
    return [
        line
        for number, line in enumerate(lines)
        if number % every == 0 or number >= whole_from or b'"test": ' in line
    ]


def first_after(path: Path, size: int, attempt: tuple[int, int]) -> int | None:
    """Return the first step of the attempts after ``attempt``, or None; ``size`` as in `backwards`."""
    found = None
    for line in backwards(path, size):
        if (head := _HEAD.match(line)) is not None:
            if _attempt(head) <= attempt:
                break
            found = int(head[1])
    return found


def read(path: Path, size: int) -> list[bytes]:
    """Return the lines in the first ``size`` bytes."""
    with path.open("rb") as file:
        return file.read(size).splitlines(keepends=True)


def from_step(path: Path, size: int, step: int) -> list[bytes]:
    """Return the lines of steps from ``step`` on; ``size`` as in `backwards`."""
    lines = _last(
        backwards(path, size), lambda line: not ((head := _HEAD.match(line)) and int(head[1]) < step)
    )
    return [line for line in lines if _HEAD.match(line)]


def _attempt(head: "re.Match[bytes]") -> tuple[int, int]:
    """Return the attempt of a line; (-1, -1) if an older kit wrote the line, without an attempt."""
    return (int(head[2]), int(head[3])) if head[2] else (-1, -1)


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("wb") as file:
        file.writelines(lines)
    beside.replace(path)
