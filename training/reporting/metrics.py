"""metrics.jsonl: a line for each step and each evaluation, the same on all nodes, also on nodes that join later.

A run of a million steps has 150 MB of it, and all ranks wait while an attempt begins: what is asked then is read from
the end of the file.
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
"""Lines that a node without the history gets: of a longer history, every n-th step and all evaluations."""

_COMPARED = 1000
"""Lines at the end by which two histories are told apart; these are sent whole."""
_BLOCK_BYTES = 1 << 16

_HEAD = re.compile(rb'\{"step": (\d+), (?:"attempt": "(\d+)\.(\d+)", )?')


@dataclass(frozen=True, order=True, slots=True)
class Held:
    """What a node has of the history; the greatest has the most complete one."""

    last_step: int
    """At most that of the snapshot, up to which only a node has all lines that was there when it was made."""
    attempt: tuple[int, int]
    """That of its last line: a node that was absent since then may have steps that were done again."""
    num_lines: int
    """At most ``_COMPARED``."""
    crc: int
    """Of so many last lines' steps and attempts only, since times differ between nodes."""


def attempt_of(world: "World") -> str:
    """``GENERATION.ROUND``, as kit's events have it; all ranks call it.

    Without kit, the time is in place of the generation: torchrun counts its restarts from 0 in each start.
    """
    if world.generation is not None:
        return f"{world.generation}.{world.num_restarts - world.generation}"
    now_ms = int(time.time() * 1000)
    return f"{world.gather(now_ms)[0] if world.world_size > 1 else now_ms}.{world.num_restarts}"


def finite(values: Any) -> Any:
    """The values with None for nan and infinity: JSON has neither, and strict readers refuse a file with one."""
    if isinstance(values, Mapping):
        return {name: finite(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Curve → value, for the points of a line."""
    if "test" in values:
        return {
            f"test/{name}": math.nan if value is None else value for name, value in values["test"].items()
        }
    found = {"train/loss": values["loss"]}
    if "samples_per_s" in values:  # these change slowly: not every line has them
        found |= {"train/lr": values["lr"], "train/samples_per_s": values["samples_per_s"]}
    return found


def backwards(path: Path, size: int | None = None) -> Iterator[bytes]:
    """Yield the lines in the first ``size`` bytes (None: all), the last one first; none of a file that is not there."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size if size is None else size
        rest = b""
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            file.seek(begin)
            lines = (file.read(end - begin) + rest).splitlines(keepends=True)
            rest = lines.pop(0) if begin else b""  # it may begin before
            yield from reversed(lines)
            end = begin


def _last(lines: Iterator[bytes], is_wanted: Callable[[bytes], bool]) -> list[bytes]:
    """Those up to the first that is not, in the order of the file."""
    return list(takewhile(is_wanted, lines))[::-1]


def take_back(path: Path, step: int, *, is_evaluated: bool) -> None:
    """Cut off the lines after ``step``, and the evaluation at it unless that ``is_evaluated`` for good."""
    cut = _last(backwards(path), lambda line: not _is_kept(line, step, is_evaluated=is_evaluated))
    if cut:
        os.truncate(path, path.stat().st_size - sum(map(len, cut)))


def _is_kept(line: bytes, step: int, *, is_evaluated: bool) -> bool:
    head = _HEAD.match(line)
    if head is None or not line.endswith(b"}\n"):  # truncated by a kill
        return False
    return int(head[1]) < step or (int(head[1]) == step and (is_evaluated or b'"test": ' not in line))


def agree(path: Path, world: "World") -> None:
    """Give every node the same history; all ranks call it, after `take_back` by the first of each node.

    A node that joined late lacks lines, and one that was absent has lines of steps that were done again.
    """
    own = None
    if world.is_first_on_node:
        try:
            own = held(path)
        except OSError as error:  # raised, it would keep the others waiting
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
    """Summarize a history."""
    heads = [head for line in islice(backwards(path), _COMPARED) if (head := _HEAD.match(line))]
    if not heads:
        return Held(0, (-1, -1), 0, 0)
    crc = zlib.crc32(b"".join(head[0] for head in heads))
    return Held(int(heads[0][1]), _attempt(heads[0]), len(heads), crc)


def thinned(lines: Sequence[bytes], most: int, *, whole: int = 1) -> list[bytes]:
    """About ``most`` of the lines: every n-th step's, all evaluations, and the last ``whole``."""
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
    """The first step of an attempt after this one; ``size`` as in `backwards`."""
    found = None
    for line in backwards(path, size):
        if (head := _HEAD.match(line)) is not None:
            if _attempt(head) <= attempt:
                break
            found = int(head[1])
    return found


def read(path: Path, size: int) -> list[bytes]:
    """The lines in the first ``size`` bytes."""
    with path.open("rb") as file:
        return file.read(size).splitlines(keepends=True)


def from_step(path: Path, size: int, step: int) -> list[bytes]:
    """The lines of steps from ``step`` on; ``size`` as in `backwards`."""
    lines = _last(
        backwards(path, size), lambda line: not ((head := _HEAD.match(line)) and int(head[1]) < step)
    )
    return [line for line in lines if _HEAD.match(line)]


def _attempt(head: "re.Match[bytes]") -> tuple[int, int]:
    """The attempt of a line; (-1, -1) for a line of an older kit, which has none."""
    return (int(head[2]), int(head[3])) if head[2] else (-1, -1)


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("wb") as file:
        file.writelines(lines)
    beside.replace(path)
