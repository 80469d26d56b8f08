"""While a round runs: watch the user's folder and bring what is complete to the nodes that keep copies.

A file is complete once it was renamed into place (its inode changed after its last byte was written), or has not
changed for a second. Looking twice a second tells that well enough; what changes under the copy is copied again. The
files of a folder go together, or a restart would find half a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from nodekit.deploy import replica_wire
from nodekit.deploy.replica_files import Look, UserFiles, look, open_file
from nodekit.deploy.replica_merge import Source, Version
from nodekit.deploy.replica_voice import Voice, reason
from nodekit.deploy.replica_wire import Wire, checked

POLL_S = 0.5
STABLE_S = 1.0
WAIT_FOR_REST_S = 30.0
"""How long the files of a folder wait for one among them that is still written."""
_REFRESH_S = 10.0  # so often a target is asked whether it still holds all, though nothing changed
_CALL_S = 0.3  # a host that is there answers sooner
_RETRY_S = (2.0, 30.0)  # first and longest pause after a target failed


class _NotYet(Exception):
    """The target still fetches what the members agreed on: what it lacks now is on its way to it already."""


@dataclass(slots=True)
class Target:
    """What is known of a node that keeps copies for this one."""

    endpoint: str
    files: Mapping[str, Version]
    """What it said it keeps for us."""
    asked: float = 0.0
    retry: float = 0.0
    pause_s: float = 0.0


class Pusher:
    """A thread that copies to `targets`, one file at a time."""

    def __init__(
        self, name: str, files: UserFiles, targets: Mapping[str, str], token: str, number: int, voice: Voice
    ) -> None:
        self.targets = {node: Target(endpoint, {}) for node, endpoint in targets.items()}
        self.number = number
        """Of the last listing given to a target."""
        self._name, self._files, self._token, self._voice = name, files, token, voice
        self._since: dict[str, tuple[object, float]] = {}
        self._is_stopping = self._is_calling = False
        self._wake, self._settled = threading.Event(), threading.Event()
        self._settle_until = 0.0
        self._wire: Wire | None = None
        self._thread = threading.Thread(target=self._run, name="replicas-push", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, also in the middle of a file.

        One that is calling a host that is gone is not waited for: it finds out by itself that it is to end.
        """
        self._is_stopping = True
        patience = time.monotonic() + _CALL_S
        while self._thread.is_alive() and not (self._is_calling and time.monotonic() > patience):
            self._wake.set()
            if wire := self._wire:
                wire.abort()
            self._thread.join(0.05)

    def settle(self, deadline_s: float) -> bool:
        """Take all there is for complete, and wait until it is copied; False if that was not done in time."""
        self._settled.clear()
        self._settle_until = time.monotonic() + deadline_s
        self._wake.set()
        return self._settled.wait(deadline_s)

    def _run(self) -> None:
        yield_to_workers()
        pause_s = 0.0
        while not self._is_stopping:
            self._wake.wait(pause_s)
            self._wake.clear()
            started = time.monotonic()
            is_settling = started < self._settle_until
            if is_settling:
                for target in self.targets.values():
                    target.retry = 0.0
            looked_s = self._take_in(everything=is_settling)
            are_done = [self._push(node, target) for node, target in self.targets.items()]
            if is_settling and all(are_done):
                self._settle_until = 0.0
                self._settled.set()
            # A folder of very many files may not cost a core.
            pause_s = 0.1 if is_settling else max(POLL_S, 20 * looked_s)

    def _take_in(self, *, everything: bool) -> float:
        """Record the files that are complete now; returns the seconds that the look at the folder took."""
        started = time.monotonic()
        found = look(self._files.folder)
        looked_s = time.monotonic() - started
        with self._voice.complaining("state"):
            for name, why in found.refused.items():
                self._voice.tell_once(("refused", name), "replica-refused", file=name, reason=why)
            names = None if everything else self._complete(found)
            if self._files.update(found, names, lambda: self._is_stopping):
                self._files.save()
        return looked_s

    def _complete(self, found: Look) -> list[str]:
        """The new, changed and deleted files that are so for good: nobody is at work on them."""
        now = time.monotonic()
        new = {name: seen for name, seen in found.files.items() if self._files.marks.get(name) != seen.mark}
        changes: dict[str, object] = {name: seen.mark for name, seen in new.items()}
        changes.update(dict.fromkeys(self._files.marks.keys() - found.files.keys(), "deleted"))
        changes.update(dict.fromkeys(found.unfinished, "unfinished"))
        since = {}
        for name, change in changes.items():
            before, first = self._since.get(name, (None, now))
            since[name] = change, first if before == change else now
        self._since = since
        age_s = {name: now - first for name, (_, first) in since.items()}
        is_done = {name: seen.is_renamed or age_s[name] >= STABLE_S for name, seen in new.items()}
        # One that is only added to, a log, holds nobody up, nor does one that was forgotten.
        written = {name for name, done in is_done.items() if not done and name not in self._files.versions}
        written |= {name for name in found.unfinished if age_s[name] < WAIT_FOR_REST_S}
        folders = {_group(name) for name in written if "/" in name}
        complete = []
        for name, seen in new.items():
            # A link to a file that is not copied yet would lead nowhere.
            has_to_wait = _group(name) in folders or (seen.link and written)
            if is_done[name] and (not has_to_wait or age_s[name] >= WAIT_FOR_REST_S):
                complete.append(name)
        for name, (change, _) in since.items():
            # The old one goes once the new one is there, also where a script deletes first and writes then.
            is_settled = age_s[name] >= (WAIT_FOR_REST_S if written else STABLE_S)
            if change == "deleted" and is_settled:
                complete.append(name)
        return complete

    def _push(self, node: str, target: Target) -> bool:
        """Bring a target up to date; False if it is not."""
        marks = self._files.marks
        files = {name: each for name, each in self._files.versions.items() if name in marks or each.is_gone}
        now = time.monotonic()
        if self._is_stopping or now < target.retry:
            return False
        if files == target.files and (not files or now - target.asked < _REFRESH_S):
            return True
        try:
            self._is_calling = True
            try:
                self._wire = replica_wire.connect(target.endpoint, self._token)
            finally:
                self._is_calling = False
            try:
                if self._is_stopping:
                    return False
                is_done = self._bring(self._wire, node, target, files)
            finally:
                self._wire.close()
                self._wire = None
        except _NotYet:
            target.retry = now + POLL_S
            return False
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not self._is_stopping:
                why = reason(error)
                self._voice.tell_once(("push", node, why), "replica-failed", peer=node, reason=why)
            target.pause_s = min(max(2 * target.pause_s, _RETRY_S[0]), _RETRY_S[1])
            target.retry = time.monotonic() + target.pause_s
            return False
        target.pause_s, target.asked = 0.0, time.monotonic()
        self._voice.works("push", node)
        return is_done

    def _bring(self, wire: Wire, node: str, target: Target, files: Mapping[str, Version]) -> bool:
        """Newest first, folder by folder; what was deleted here goes there once all that is new has arrived."""
        lacking = self._offer(wire, files)
        if lacking:
            # Until then, the target's listing is the one it had, and what needs no sending.
            listing = dict(target.files)
            groups: dict[str, dict[str, Version]] = {}
            for name, version in files.items():
                if version.sha256 in lacking:
                    groups.setdefault(_group(name), {})[name] = version
                elif version.sha256:
                    listing[name] = version
            for group in sorted(groups.values(), key=_newest, reverse=True):
                started = time.monotonic()
                for sha256 in {version.sha256 for version in group.values()}:
                    self._send(wire, sha256)
                if not self._offer(wire, {**listing, **group}):
                    target.files = listing = {**listing, **group}
                    self._voice.tell(
                        "replica-kept",
                        peer=node,
                        files=sorted(group)[:5],
                        num_files=len(group),
                        size_bytes=sum(version.size_bytes for version in group.values()),
                        seconds=round(time.monotonic() - started, 3),
                    )
            lacking = self._offer(wire, files)
        if not lacking:
            target.files = files
        return not lacking

    def _offer(self, wire: Wire, files: Mapping[str, Version]) -> set[str]:
        """Hand over a listing; returns the content that is lacking there, without which it is not taken."""
        self.number += 1
        source = Source(self._name, self._files.attempt, self._files.base, self.number, files)
        answer = checked(wire.ask({"op": "keep", "source": source.to_dict()}))
        if answer.get("is_gathering"):
            raise _NotYet
        return set(answer["lacking"])

    def _send(self, wire: Wire, sha256: str) -> None:
        """Send one file; if it is no longer what it was, it is not taken, and the next look finds what it is now."""
        if path := self._files.path_of(sha256):
            with contextlib.suppress(FileNotFoundError), open_file(path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                request = {"op": "put", "sha256": sha256, "size_bytes": size_bytes}
                checked(wire.ask({**request, "attempt": self._files.attempt}))
                wire.send_bytes(file, size_bytes)
                checked(wire.receive())


def _newest(group: Mapping[str, Version]) -> int:
    return max(version.mtime_ns for version in group.values())


def _group(name: str) -> str:
    """What belongs together: a folder of the top level with all below it, or a single file."""
    return name.split("/", 1)[0]


def yield_to_workers() -> None:
    """This thread alone runs after whatever else wants the CPU (on Linux a thread has its own nice value)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
