"""metrics.jsonl: a line for each step and each evaluation, the same on all nodes, also on nodes that join later."""

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nodekit.training.world import World

MOST_SENT = 20_000
"""Lines that a node without the history gets: of a longer history, every n-th step and all evaluations."""

_HEAD = re.compile(rb'\{"step": (\d+), (?:"attempt": "(\d+)\.(\d+)", )?')


@dataclass(frozen=True, order=True, slots=True)
class Held:
    """What a node has of the history; the greatest has the most complete one."""

    attempt: tuple[int, int]
    """That of its last line: a node that was absent since then may have steps that were done again."""
    last_step: int
    num_lines: int
    crc: int
    """Of all lines' steps and attempts only, since times differ between nodes."""


def attempt_of(world: "World") -> str:
    """``GENERATION.ROUND``, as kit's events have it."""
    generation = world.generation or 0
    return f"{generation}.{world.num_restarts - generation}"


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Curve → value, for the points of a line."""
    if "test" in values:
        return {f"test/{name}": value for name, value in values["test"].items()}
    found = {"train/loss": values["loss"]}
    if "samples_per_s" in values:  # these change slowly: not every line has them
        found |= {"train/lr": values["lr"], "train/samples_per_s": values["samples_per_s"]}
    return found


def take_back(path: Path, step: int, *, is_evaluated: bool) -> list[bytes]:
    """Keep and return the lines up to ``step``; the evaluation at it only if that will not be done again."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_kept(line, step, is_evaluated=is_evaluated)]
    if len(kept) < len(lines):
        _replace(path, kept)
    return kept


def _is_kept(line: bytes, step: int, *, is_evaluated: bool) -> bool:
    head = _HEAD.match(line)
    if head is None or not line.endswith(b"}\n"):  # truncated by a kill
        return False
    return int(head[1]) < step or (int(head[1]) == step and (is_evaluated or b'"test": ' not in line))


def agree(path: Path, lines: Sequence[bytes], world: "World") -> None:
    """Give every node the same history; all ranks call it, the first of each node with its ``lines``.

    A node that joined late lacks lines, and one that was absent has lines of steps that were done again.
    """
    import torch.distributed as dist  # only for ranks

    own = held(lines) if world.is_first_on_node else None
    offers = world.gather(own)
    best = max(offer for offer in offers if offer is not None)
    if all(offer in (None, best) for offer in offers):
        return
    source = offers.index(best)
    sent: list[bytes | None] = [None]
    if world.rank == source:
        sent = [zlib.compress(b"".join(thinned(lines, MOST_SENT)), 1)]
    dist.broadcast_object_list(sent, src=source)
    if own not in (None, best):
        assert sent[0] is not None
        _replace(path, [zlib.decompress(sent[0])])


def held(lines: Iterable[bytes]) -> Held:
    """Summarize a history."""
    last, crc, num_lines = None, 0, 0
    for line in lines:
        if (head := _HEAD.match(line)) is not None:
            last, crc, num_lines = head, zlib.crc32(head[0], crc), num_lines + 1
    if last is None:
        return Held((-1, -1), 0, 0, 0)
    return Held(_attempt(last), int(last[1]), num_lines, crc)


def thinned(lines: Sequence[bytes], most: int) -> list[bytes]:
    """About ``most`` of the lines: every n-th step's, all evaluations, and the last."""
    every = -(-len(lines) // most)
    if every <= 1:
        return list(lines)
    last = len(lines) - 1
    return [
        line
        for number, line in enumerate(lines)
        if number % every == 0 or number == last or b'"test": ' in line
    ]


def first_after(lines: Iterable[bytes], attempt: tuple[int, int]) -> int | None:
    """The first step of an attempt after this one."""
    for line in lines:
        if (head := _HEAD.match(line)) is not None and _attempt(head) > attempt:
            return int(head[1])
    return None


def read(path: Path, size: int) -> list[bytes]:
    """The lines in the first ``size`` bytes."""
    with path.open("rb") as file:
        return file.read(size).splitlines(keepends=True)


def from_step(lines: Iterable[bytes], step: int) -> list[bytes]:
    """The lines of steps from ``step`` on."""
    return [line for line in lines if (head := _HEAD.match(line)) is not None and int(head[1]) >= step]


def _attempt(head: "re.Match[bytes]") -> tuple[int, int]:
    """The attempt of a line; (-1, -1) for a line of an older kit, which has none."""
    return (int(head[2]), int(head[3])) if head[2] else (-1, -1)


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("wb") as file:
        file.writelines(lines)
    beside.replace(path)
