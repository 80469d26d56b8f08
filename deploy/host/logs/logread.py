"""The ranks' logs of one node, read on that node: lines with their times, in their order, picked before they travel.

Offered to the channels (deploy/connect/channel.py), and used here for copies that were fetched. Standard library only,
Python 3.8.
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

PAGE_BYTES = 256 * 1024  # of text in one answer
PAGE_S = 1.0  # or as much as is found in this time, so that an answer comes also where nothing matches
CHUNK_BYTES = 256 * 1024
MAX_LINE_BYTES = 64 * 1024
MATCH_S = 20  # a regular expression that takes longer on one page never comes to an end
BEAT_S = 1.0
FOLLOW_S = 30.0
PIECE_BYTES = 1 << 20

Line = Tuple[float, int, str, str]
"""Time by this host's clock, rank, attempt, text."""


_Entry = Tuple[float, int, Optional[bytes]]
"""Time, where it ends, line; None for one that is passed over."""


class _File(NamedTuple):
    path: str
    name: str
    rank: int
    attempt: Tuple[int, int]
    size: int
    changed: float


def listing(folder: str) -> List[Dict[str, Any]]:
    """The logs of a folder, oldest attempt first: file, rank, attempt, its length and when it was last written."""
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
                    continue  # removed for want of room
                found.append(_File(entry.path, entry.name, named[0], named[1], stat.st_size, stat.st_mtime))
    except FileNotFoundError:
        pass  # no rank has begun
    return sorted(found, key=lambda each: (each.attempt, each.rank))


class Tail:
    """Lines of one file from byte `start` on, whole ones, also across what is left out."""

    def __init__(self, path: str, start: int) -> None:
        self._path = path
        self._at = start
        self._held = b""
        self._skips = False

    def more(self, limit: int) -> Optional[List[Tuple[int, bytes]]]:
        """(where it ends, line) of the next part of the file, which ends at `limit`; None at its end."""
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
        if self._skips and data:  # what is left of the line that the hole begins in
            cut = data.find(b"\n") + 1
            self._skips = cut == 0
            data = data[cut:] if cut else b""
        elif not data:
            return found or None  # also of one that was emptied since it was looked at
        pieces = (self._held + data).split(b"\n")
        self._held = pieces.pop()
        end = self._at - len(self._held) - sum(len(piece) + 1 for piece in pieces)
        for piece in pieces:
            end += len(piece) + 1
            found.append((end, piece))
        # Of a progress bar that draws itself anew only the last state counts.
        self._held = self._held[self._held.rstrip(b"\r").rfind(b"\r") + 1 :]
        if len(self._held) > MAX_LINE_BYTES:
            found.append((self._at, self._held))
            self._held = b""
        return found

    @property
    def place(self) -> int:
        """Where the line begins that has no end yet: what was read before need not be read again."""
        return self._at - len(self._held)

    def rest(self) -> List[Tuple[int, bytes]]:
        """The last line, where it has no end yet."""
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
    """The next lines of a folder's logs, in the order of their times.

    Args:
        folder: the node's logs.
        offsets: file → how far it has been read, as the page before said.
        sizes: file → where to end, as the page before said; None: where they end now, and new ones too.
        ranks: these only.
        attempts: these only.
        since: none before, by this host's clock.
        until: none after.
        grep: only lines in which this regular expression is found.
        final: a last line without its newline is shown too.
        limited: end this process where the expression takes for ever: nobody else could.

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
            new[each.name] = 0  # somebody has emptied it, and its rank has begun anew
    ends = {each.name: each.size for each in files} if sizes is None else dict(sizes)
    wanted = re.compile(grep) if grep is not None else None
    # Of each file, when the line that comes next was written, which file that is, and the line.
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
    """End this process by SIGALRM if it is at it for longer; 0: no limit."""
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
    """Take lines from the queue until a page is full; `offsets` are brought up to them."""
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
    """The lines of a log."""
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
            yield nothing  # removed for want of room
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
    """Where the line begins that byte `offset` is in."""
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
    """Send the new lines of some nodes as they come, and something every second.

    `offsets` and `wanted` are those of `page`, by node. With `node_dir` it ends when the agent there is gone; else
    after a while, for there may be other nodes.
    """
    end = time.monotonic() + FOLLOW_S
    at = {name: dict(offsets.get(name, {})) for name in folders}
    sent = 0.0
    while True:
        # Asked before the logs are read: what was written last is not missed.
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
    """Every file of a folder of logs, with its length and when it was last written."""
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
    """The next data of a file: where it begins, holes passed over, and the data, packed for the way."""
    path = os.path.join(os.path.expanduser(folder), os.path.basename(file))
    try:
        with open(path, "rb") as opened:
            begin, data = hostfollow.read_data(opened.fileno(), start, PIECE_BYTES)
    except FileNotFoundError:
        return {"begin": start, "data": ""}  # removed for want of room
    return {"begin": begin, "data": base64.b64encode(zlib.compress(data, 1)).decode() if data else ""}
