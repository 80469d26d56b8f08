"""TensorBoard's event files: find the steps they hold, and remove steps that will be done again."""

import mmap
import os
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

_ATTEMPT = re.compile(r"\.attempt(\d+)\.(\d+)$")  # GENERATION.ROUND
_HEADER, _FOOTER = 12, 4  # bytes of a record before and after its data: length and checksum, and a checksum
# An event begins with field 1, its time, and field 2, its step if that is not 0.
_DOUBLE, _VARINT = 0x09, 0x10
_LATER_S = 2.0
_PREFIX = ("events", "out", "tfevents")


def of(folder: Path) -> list[Path]:
    """Return the event files of a folder, in the order in which TensorBoard reads them."""
    return sorted(folder.glob("events.out.tfevents.*"))


def last_attempt(folder: Path) -> tuple[int, int]:
    """Return the attempt in the newest file's name; (-1, -1) if there is none."""
    found = [_ATTEMPT.search(path.name) for path in of(folder)[-1:]]
    return (int(found[0][1]), int(found[0][2])) if found and found[0] else (-1, -1)


def last_step(folder: Path) -> int | None:
    """Return the step of the last record with a step; None if no record has one."""
    for path in reversed(of(folder)):
        steps = [step for _, step in records(path) if step]
        if steps:
            return steps[-1]
    return None


def take_back(folder: Path, step: int) -> None:
    """Cut off records of ``step`` or later, and a record that a kill has truncated.

    TensorBoard has an event (``purge_step``) for that, but one of its two readers ignores it. Each file's steps come
    after those of the files before it, so only the last files are read.
    """
    for path in reversed(of(folder)):
        end = earlier = 0
        for end_of_record, found in records(path):
            if found >= max(step, 1):
                break
            end, earlier = end_of_record, earlier or found
        if end < path.stat().st_size:
            os.truncate(path, end)
        if earlier:
            return


def records(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the end (as an offset) and the step of each complete record of a file; step 0 if a record has none."""
    if not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 0
        while start + _HEADER <= len(data):
            (length,) = struct.unpack_from("<Q", data, start)
            begin, end = start + _HEADER, start + _HEADER + length + _FOOTER
            if end > len(data):
                return
            yield end, _step(data[begin : min(begin + 20, end)])
            start = end


def _step(event: bytes) -> int:
    if event[:1] != bytes([_DOUBLE]) or event[9:10] != bytes([_VARINT]):
        return 0
    step = 0
    for place, byte in enumerate(event[10:]):
        step |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return step
    return 0


def see_to_a_later_name(folder: Path) -> None:
    """Make sure that a new file sorts last: TensorBoard reads files by name, which has the second of creation.

    Wait for the next second if need be. If the clock was set back, rename the existing files to earlier names instead.
    """
    deadline = time.monotonic() + _LATER_S
    files = of(folder)
    while (is_late := files and _second(files[-1]) >= int(time.time())) and time.monotonic() < deadline:
        time.sleep(0.05)
    for second, path in enumerate(files if is_late else (), int(time.time()) - len(files)):
        if _second(path) > second:
            path.rename(path.with_name(".".join([*_PREFIX, f"{second:010d}", *path.name.split(".")[4:]])))


def _second(path: Path) -> int:
    found = path.name.split(".")[3]
    return int(found) if found.isdecimal() else 0
