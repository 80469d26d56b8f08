"""Read the ranks' logs of one node on that node: lines with their times, in order, filtered before they are sent.

The host channels (deploy/connect/channel.py) call it, and the control machine uses it for fetched copies. Standard
library only, Python 3.8.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import os
import re
import signal
import time
import zlib
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from nodekit.deploy.host.logs import hostfollow, logbook
from nodekit.deploy.host.node import status

PAGE_BYTES = 256 * 1024  # the most text in one answer
PAGE_S = 1.0  # the longest time for one answer, so that one comes even if nothing matches
CHUNK_BYTES = 256 * 1024
MAX_LINE_BYTES = 64 * 1024
MATCH_S = 20  # a regular expression that takes longer on one page counts as endless
BEAT_S = 1.0
FOLLOW_S = 30.0  # after so long `follow` returns, unless it follows one node
PIECE_BYTES = 1 << 20

Line = Tuple[float, int, str, str]
"""Time by this host's clock, rank, attempt, text."""


_Entry = Tuple[float, int, Optional[bytes]]
"""Time, offset of the line's end, line; None for a line that is skipped."""


class _File(NamedTuple):
    path: str
    name: str
    rank: int
    attempt: Tuple[int, int]
    size: int
    changed: float


def listing(folder: str) -> List[Dict[str, Any]]:
    """Return the logs of a folder, oldest attempt first: file, rank, attempt, bytes, and time of the last change."""
    return [
        {
            "file": each.name,
            "rank": each.rank,
            "attempt": "%d.%d" % each.attempt,
            "size": each.size,
            "changed": each.changed,
        }
        for each in _files(folder)
    ]


def _files(folder: str) -> List[_File]:
    folder = os.path.expanduser(folder)
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                named = logbook.parse_name(entry.name)
                if named is None:
                    continue
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue  # removed to stay within the bound
                found.append(_File(entry.path, entry.name, named[0], named[1], stat.st_size, stat.st_mtime))
    except FileNotFoundError:
        pass  # no rank has started
    return sorted(found, key=lambda each: (each.attempt, each.rank))


class Tail:
    """A reader of whole lines of one file from byte `start` on, which passes over holes."""

    def __init__(self, path: str, start: int) -> None:
        self._path = path
        self._at = start
        self._held = b""
        self._skips = False

    def more(self, limit: int) -> Optional[List[Tuple[int, bytes]]]:
        """Return (offset of the end, line) for the lines of the next chunk before `limit`; None at `limit`."""
        room = min(CHUNK_BYTES, limit - self._at)
        if room <= 0:
            return None
        with open(self._path, "rb") as file:
            begin, data = hostfollow.read_data(file.fileno(), self._at, room)
        data = data[: max(0, limit - begin)]
        found = []
        if begin > self._at:
            if self._held:
                found.append((self._at, self._held))
            found.append((begin, hostfollow.left_out(begin - self._at).encode()))
            self._held, self._skips = b"", True
        self._at = begin + len(data)
        if self._skips and data:  # drop the rest of the line that was cut by the hole
            cut = data.find(b"\n") + 1
            self._skips = cut == 0
            data = data[cut:] if cut else b""
        elif not data:
            return found or None  # the file may have been truncated since its size was read
        pieces = (self._held + data).split(b"\n")
        self._held = pieces.pop()
        end = self._at - len(self._held) - sum(len(piece) + 1 for piece in pieces)
        for piece in pieces:
            end += len(piece) + 1
            found.append((end, piece))
        # Of a progress bar that redraws itself keep only the last state.
        self._held = self._held[self._held.rstrip(b"\r").rfind(b"\r") + 1 :]
        if len(self._held) > MAX_LINE_BYTES:
            found.append((self._at, self._held))
            self._held = b""
        return found

    @property
    def place(self) -> int:
        """The offset of the last line if it has no newline yet: reading can continue from there."""
        return self._at - len(self._held)

    def rest(self) -> List[Tuple[int, bytes]]:
        """Return the last line if it has no newline yet."""
        held, self._held = self._held, b""
        return [(self._at, held)] if held else []


def page(
    folder: str,
    offsets: Optional[Mapping[str, int]] = None,
    sizes: Optional[Mapping[str, int]] = None,
    ranks: Optional[List[int]] = None,
    attempts: Optional[List[str]] = None,
    since: Optional[float] = None,
    until: Optional[float] = None,
    grep: Optional[str] = None,
    final: bool = True,
    limited: bool = False,
) -> Dict[str, Any]:
    """Return the next lines of a folder's logs, in the order of their times.

    Args:
        folder: the node's logs.
        offsets: file → how far it has been read, from the page before.
        sizes: file → where to end, from the page before; None: at the present ends, with new files.
        ranks: only these ranks.
        attempts: only these attempts.
        since: only lines written since this time, by this host's clock.
        until: only lines written until this time.
        grep: only lines in which this regular expression is found.
        final: return a last line without a newline too.
        limited: end this process if `grep` takes longer than `MATCH_S`: a match cannot be interrupted otherwise.

    Returns:
        ``lines``; ``offsets`` and ``sizes`` for the next page; ``more``: whether there is one.
    """
    new = dict(offsets or {})
    files = [
        each
        for each in _files(folder)
        if (ranks is None or each.rank in ranks) and (attempts is None or "%d.%d" % each.attempt in attempts)
    ]
    for each in files:
        if each.size < new.get(each.name, 0):
            new[each.name] = 0  # the file was truncated, and its rank writes from the beginning
    ends = {each.name: each.size for each in files} if sizes is None else dict(sizes)
    wanted = re.compile(grep) if grep is not None else None
    # For each file: the time of its next line, its index in `files`, that line, and the lines after it.
    queue: List[Tuple[float, int, Optional[_Entry], Iterator[_Entry]]] = []
    for order, each in enumerate(files):
        if new.get(each.name, 0) < ends.get(each.name, 0):
            begun = logbook.first_time(each.path)
            lines = _entries(each, new.get(each.name, 0), ends[each.name], since, until, final)
            queue.append((each.changed if begun is None else begun, order, None, lines))
    heapq.heapify(queue)
    with _limit(MATCH_S if limited and wanted is not None else 0):
        found = _take(queue, files, new, wanted)
    return {"lines": found, "offsets": new, "sizes": ends, "more": bool(queue)}


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """End this process by SIGALRM if the context takes longer; 0: no limit."""
    if seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _take(
    queue: List[Tuple[float, int, Optional[_Entry], Iterator[_Entry]]],
    files: List[_File],
    offsets: Dict[str, int],
    wanted: Optional["re.Pattern[str]"],
) -> List[Line]:
    """Take lines from the queue until a page is full, and advance `offsets` accordingly."""
    found: List[Line] = []
    num_bytes, deadline = 0, time.monotonic() + PAGE_S
    while queue and num_bytes < PAGE_BYTES and time.monotonic() < deadline:
        _, order, entry, lines = heapq.heappop(queue)
        each = files[order]
        if entry is not None:
            when, offsets[each.name], data = entry
            text = (data or b"").rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
            if data is not None and (wanted is None or wanted.search(text)):
                found.append((when, each.rank, "%d.%d" % each.attempt, text))
                num_bytes += len(data) + 40
        following = next(lines, None)
        if following is not None:
            heapq.heappush(queue, (following[0], order, following, lines))
    return found


def _entries(
    file: _File, start: int, limit: int, since: Optional[float], until: Optional[float], final: bool
) -> Iterator[_Entry]:
    """Yield the lines of a log in the given range of bytes and times."""
    marks = logbook.read_marks(file.path, start)
    nothing: _Entry = (file.changed, limit, None)
    if since is not None and start == 0:
        if file.changed < since:
            yield nothing
            return
        start = _line_start(file.path, marks.before(since))
    tail = Tail(file.path, start)
    while True:
        try:
            found = tail.more(limit)
        except FileNotFoundError:
            yield nothing  # removed to stay within the bound
            return
        for end, data in tail.rest() if found is None and final else found or ():
            when = marks.time_of(end, file.changed)
            if until is not None and when > until:
                yield nothing
                return
            yield when, end, data if since is None or when >= since else None
        if found is None:
            yield file.changed, tail.place, None
            return


def _line_start(path: str, offset: int) -> int:
    """Return the offset of the beginning of the line that contains byte `offset`."""
    begin = max(0, offset - MAX_LINE_BYTES)
    with open(path, "rb") as file:
        file.seek(begin)
        before = file.read(offset - begin)
    return begin + before.rfind(b"\n") + 1 if b"\n" in before else offset


def follow(
    folders: Mapping[str, str],
    part: Callable[[Any], None],
    offsets: Mapping[str, Mapping[str, int]],
    wanted: Mapping[str, Mapping[str, Any]],
    poll_s: float,
    node_dir: Optional[str] = None,
) -> None:
    """Send the new lines of some nodes as they appear, and a message at least every second.

    `offsets` and `wanted` are node → arguments of `page`. With `node_dir`, return when its agent has ended; without,
    after `FOLLOW_S`, since there may be further nodes by then.
    """
    end = time.monotonic() + FOLLOW_S
    at = {name: dict(offsets.get(name, {})) for name in folders}
    sent = 0.0
    while True:
        # Check this before reading the logs, so that the last lines are not missed.
        gone = node_dir is not None and status.agent_alive(node_dir) is None
        is_new = False
        for name, folder in folders.items():
            found = page(folder, at[name], final=gone, limited=True, **wanted[name])
            at[name] = found["offsets"]
            if found["lines"] or time.monotonic() - sent > BEAT_S:
                part({"node": name, "lines": found["lines"], "offsets": at[name]})
            is_new = is_new or bool(found["lines"]) or found["more"]
        if is_new or time.monotonic() - sent > BEAT_S:
            sent = time.monotonic()
        if not is_new and (gone or (node_dir is None and time.monotonic() > end)):
            return
        if not is_new:
            time.sleep(poll_s)


# --- copies -------------------------------------------------------------------------------------------------


def files(folder: str) -> Dict[str, Tuple[int, float]]:
    """Return every file of a folder of logs → its size in bytes, and when it was last written."""
    try:
        with os.scandir(os.path.expanduser(folder)) as entries:
            return {
                entry.name: (entry.stat().st_size, entry.stat().st_mtime)
                for entry in entries
                if entry.is_file(follow_symlinks=False) and entry.name.endswith((".log", ".times"))
            }
    except FileNotFoundError:
        return {}


def piece(folder: str, file: str, start: int) -> Dict[str, Any]:
    """Return the next data of a file from `start` on: its offset, after any hole, and the data, zlib in base64."""
    path = os.path.join(os.path.expanduser(folder), os.path.basename(file))
    try:
        with open(path, "rb") as opened:
            begin, data = hostfollow.read_data(opened.fileno(), start, PIECE_BYTES)
    except FileNotFoundError:
        return {"begin": start, "data": ""}  # removed to stay within the bound
    return {"begin": begin, "data": base64.b64encode(zlib.compress(data, 1)).decode() if data else ""}
