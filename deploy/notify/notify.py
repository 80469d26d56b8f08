"""`notify:` of an inventory: tells a command or a webhook when a run starts, fails, recovers and ends.

The run never waits for it: what is to be told goes into a short queue, and a thread of its own delivers it, with a
deadline for each attempt. Values of secrets are read from the environment, and are in nothing that is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nodekit.deploy.host.files import make_private
from nodekit.deploy.notify.deliver import ATTEMPT_S, NotDelivered, ways, within
from nodekit.deploy.notify.message import Message, Story, with_goodput
from nodekit.deploy.output.redact import Redactor
from nodekit.deploy.records import events, locks, runs
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import Run
from nodekit.deploy.records.secret_files import NOTIFY, notify_names, notify_secrets, secrets_file
from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from nodekit.inventory.schema import Inventory, Notify

PAUSES_S = (1.0, 4.0)  # before the second attempt, and the third
CLOSE_S = 5.0  # at its end the run waits so long for what has not been delivered
MAX_WAITING = 16
_TOLD_BYTES = 120


def secrets_here(run: Run, notify: Notify) -> dict[str, str]:
    """The values of its secrets where a run is supervised, as far as they are there.

    Under Slurm that is a node, where they lie in the run's folder (not with the job's own: ranks get those), or in
    the environment that an exported job was submitted with.
    """
    if run.is_placed:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            run_dir = Path(next(iter(run.nodes.values()))["code_dir"]).parent
            if (file := secrets_file(run_dir, NOTIFY)) is not None:
                return dict(json.loads(file.read_text(encoding="utf-8")))
    return {name: os.environ[name] for name in notify_names(notify) if name in os.environ}


class Notifier:
    """An observer of a run: tells what its inventory wants told.

    Of several supervisors that watch one run, the first one tells, and another takes over when that is gone.
    """

    def __init__(
        self, run: Run, notify: Notify, secrets: Mapping[str, str], *, pauses_s: tuple[float, ...] = PAUSES_S
    ) -> None:
        self._run = run
        self._on = frozenset(notify.on)
        self._ways = ways(notify, secrets, Path(run.inventory_path).parent)
        self._pauses_s = pauses_s
        self._story = Story(run.run_id)
        self._redactor = Redactor(run.inventory, known=[run.token, *secrets.values()])
        self._begin, self._generation = _last_start(run)
        self._generations: dict[str, int] = {}
        self._steps: tuple[int, int | None] | None = None
        self._said: set[str] = set()
        self._lock = _Turn(run.folder / "notify.lock", self._begin)
        self._queue: queue.Queue[Message | None] = queue.Queue(MAX_WAITING)
        self._closing = threading.Event()
        self._is_done = threading.Event()
        self._thread: threading.Thread | None = None

    def see(self, statuses: Mapping[str, Mapping[str, Any]]) -> None:
        """What the nodes say of their progress is fresher than any event."""
        from nodekit.deploy.agent.hang.hang import Progress

        texts = [str(each.get("progress") or "") for each in statuses.values()]
        steps = [(step, text) for text in texts if (step := Progress.parse(text, 0.0).step) is not None]
        if steps:
            step, text = max(steps)
            total = text.split("/", 1)[1].split(" ")[0] if "/" in text else ""
            self._steps = step, int(total) if total.isdigit() else None

    def event(self, event: Event) -> None:
        """Take note of an event, and put what is to be told of it in the queue; its time decides nothing."""
        if self._is_late(event):
            return
        if self._steps is not None:
            self._story.reached(*self._steps)
        message = self._story.tell(
            self._redactor.tree(event)
        )  # a rank's last words may have a secret in them
        if message is None or message.kind not in self._on:
            return
        if message.kind == "failure" and self._run.stopped_by:
            return  # nodes that leave, one after the other
        # A supervisor reads all of a run's events, those of before it was stopped and went on, too.
        if (event.end is not None and event.end <= self._begin) or not self._lock.claim(event):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
            self._thread.start()
        self._put(message)

    def _is_late(self, event: Event) -> bool:
        """Whether it is of before the run went on, and of a node that could only be asked for it after that."""
        if event.node is None or (event.end is not None and event.end <= self._begin):
            return False
        if attempt := event.get("attempt"):
            self._generations[event.node] = int(str(attempt).partition(".")[0])
        elif event.kind == "agent-started":
            self._generations.pop(event.node, None)
        return self._generations.get(event.node, self._generation) < self._generation

    def close(self) -> None:
        """Tell the end, if the run has one that was not told, and wait a moment for what is under way."""
        if self._run.state in runs.ENDED:
            fields = {"state": self._run.state, "verdict": self._run.verdict}
            with contextlib.suppress(Exception):
                self.event(Event(self._run.ended or time.time(), None, "run-ended", fields))
        self._closing.set()
        if self._thread is not None:
            self._put(None)
            self._is_done.wait(CLOSE_S)
        self._lock.release()

    @property
    def num_waiting(self) -> int:
        """How many messages are still to be delivered."""
        return self._queue.qsize()

    def _put(self, message: Message | None) -> None:
        while True:
            try:
                self._queue.put_nowait(message)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()  # the oldest: what comes later says how it is now

    def _work(self) -> None:
        while (message := self._queue.get()) is not None:
            if message.kind == "end":
                message = with_goodput(message, self._run)
            for name, deliver in self._ways.items():
                try:
                    self._deliver(name, deliver, message)
                except Exception as error:
                    self._tell_once(name, f"{type(error).__name__}")
        self._is_done.set()

    def _deliver(self, name: str, deliver: Callable[[Message], object], message: Message) -> None:
        # Where it failed before, one attempt will do: what waits behind it is not to wait for ever.
        for pause_s in (*(self._pauses_s if name not in self._said else ()), None):
            try:
                return within(deliver, message, ATTEMPT_S + 1.0)
            except NotDelivered as error:
                if error.is_final or pause_s is None:
                    return self._tell_once(name, str(error))
                self._closing.wait(pause_s)
        return None

    def _tell_once(self, name: str, why: str) -> None:
        if name not in self._said:
            self._said.add(name)
            with contextlib.suppress(OSError):
                self._run.event("notify-failed", way=name, why=why)


def tell_of_end(run: Run) -> None:
    """Tell how a run has ended that came to no supervisor."""
    from nodekit.inventory.load import restore

    asked = restore(run.inventory).notify
    if asked is not None:
        make_private(run.folder)
        Notifier(run, asked, secrets_here(run, asked)).close()


def _last_start(run: Run) -> tuple[int, int]:
    """Where in its file of events a run was started, or went on, the last time; and as which generation."""
    found, end = (0, 0), 0
    with contextlib.suppress(OSError), (run.folder / events.FILE).open("rb") as file:
        for line in file:
            if b'"run-started"' in line and (event := events.parse(line)) and event.kind == "run-started":
                found = end, int(event.get("generation", 0))
            end += len(line)
    return found


class _Turn:
    """Whose turn it is to tell, and what was told last: in a file, locked by the one who tells."""

    def __init__(self, path: Path, begin: int) -> None:
        self._path = path
        self._begin = begin
        self._file: IO[str] | None = None
        self._last: dict[str, Any] = {}

    def claim(self, event: Event) -> bool:
        """Whether this event is ours to tell; it is written down that it was."""
        if self._file is None:
            with contextlib.suppress(OSError):  # a full disk
                self._file = locks.locked(self._path)
            if self._file is None:
                return False
            with contextlib.suppress(ValueError):
                self._last = dict(json.load(self._file))
        told = self._last.get("end", 0)
        is_old = event.end is not None and event.end <= told
        # Each supervisor writes one, and a run that goes on after it has ended ends once more.
        is_again = (
            event.kind == self._last.get("kind") == "run-ended" and self._last.get("begin") == self._begin
        )
        if is_old or is_again:
            return False
        self._last = {"end": event.end or told, "kind": event.kind, "begin": self._begin}
        with contextlib.suppress(OSError):  # of the same length: that asks no room of a full disk
            os.pwrite(self._file.fileno(), json.dumps(self._last).encode().ljust(_TOLD_BYTES), 0)
        return True

    def release(self) -> None:
        """Let another tell."""
        if self._file is not None:
            self._file.close()
            self._file = None


def targets(inventory: Inventory) -> dict[str, str]:
    """Who is told, by the way it takes: a command's words, a webhook's address.

    Raises:
        KitError: nobody is.
    """
    if inventory.notify is None:
        raise KitError(
            f"{inventory.path}: found no notify:", wanted="one, as notify: {command: [notify-send, kit]}"
        )
    found = {"command": shlex.join(inventory.notify.command or ()), "webhook": _target(inventory.notify)}
    return {name: found[name] for name in ways(inventory.notify, notify_secrets(inventory), None)}


def send_test(inventory: Inventory, text: str) -> dict[str, NotDelivered | None]:
    """Tell everybody now; for each way, why that failed."""
    assert inventory.notify is not None
    message = Message(kind="test", run=f"{inventory.name}-test", time=time.time(), text=text)
    problems: dict[str, NotDelivered | None] = {}
    for name, deliver in ways(inventory.notify, notify_secrets(inventory), inventory.path.parent).items():
        try:
            within(deliver, message, ATTEMPT_S + 1.0)
            problems[name] = None
        except NotDelivered as error:
            problems[name] = error
    return problems


def _target(notify: Notify) -> str:
    hook = notify.webhook
    return "" if hook is None else hook.url or f"the URL in {hook.url_from}"
