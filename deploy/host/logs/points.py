"""Read the loss curve from a node's ``metrics.jsonl``, and thin it before it is sent."""

from __future__ import annotations

import json
import math
import os
from typing import Any

WHOLE_BYTES = 32 << 20  # a larger file is only sampled
_LOOK_BYTES = 16384


def losses(path: str, most: int = 600) -> list[list[float]] | None:
    """Return ``[step, time, mean loss]`` for consecutive parts of the training; None without the file.

    Args:
        path: of the file; ``~`` allowed.
        most: the most points to return.
    """
    path = os.path.expanduser(path)
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            if size <= WHOLE_BYTES:
                return _thin([_point(line) for line in file], most)
            found: list[list[float]] = []
            for number in range(most):
                file.seek(size * number // most)
                if number:
                    file.readline()  # the rest of a line
                block = file.read(_LOOK_BYTES)
                lines = block[: block.rfind(b"\n") + 1].splitlines()
                found += _thin([_point(line) for line in lines], 1)
            return found
    except OSError:
        return None


def _point(line: bytes) -> list[float] | None:
    try:
        values: dict[str, Any] = json.loads(line)
        point = [float(values["step"]), float(values["time"]), float(values["loss"])]
    except (ValueError, KeyError, TypeError):  # an evaluation, or a line that a crash has torn
        return None
    return point if all(map(math.isfinite, point)) else None


def _thin(points: list[list[float] | None], most: int) -> list[list[float]]:
    """Return at most `most` points: the last step and time, and the mean loss, of parts of about the same length."""
    known = [point for point in points if point is not None]
    count = min(most, len(known))
    thinned = []
    for number in range(count):
        part = known[len(known) * number // count : len(known) * (number + 1) // count]
        thinned.append([part[-1][0], part[-1][1], sum(point[2] for point in part) / len(part)])
    return thinned
