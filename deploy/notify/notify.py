"""Notifications (`notify:` in an inventory): tell a command or a webhook that a run starts, fails, recovers or ends.

The run never waits for a delivery: messages go into a short queue, and a separate thread delivers them, with a time
limit per attempt. Values of secrets are read from the environment, and are never written.
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

PAUSES_S = (1.0, 4.0)  # before the second and the third attempt
CLOSE_S = 5.0  # at the end of the run, how long to wait for deliveries
MAX_WAITING = 16
_TOLD_BYTES = 120


def secrets_here(run: Run, notify: Notify) -> dict[str, str]:
    """Return the secrets' values that are available where the run is supervised.

    Under Slurm the supervisor runs on a node: there they are in the run's folder, apart from the job's own, which ranks
    get, or in the environment that an exported job was submitted with.
    """
    if run.is_placed:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            run_dir = Path(next(iter(run.nodes.values()))["code_dir"]).parent
            if (file := secrets_file(run_dir, NOTIFY)) is not None:
                return dict(json.loads(file.read_text(encoding="utf-8")))
    return {name: os.environ[name] for name in notify_names(notify) if name in os.environ}


class Notifier:
    """Observes a run, and sends the notifications that its inventory asks for.

    Of several supervisors of one run only one sends; another takes over when that one has ended.
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
        """Take the nodes' progress, which is fresher than any event."""
        from nodekit.deploy.agent.hang.hang import Progress

        texts = [str(each.get("progress") or "") for each in statuses.values()]
        steps = [(step, text) for text in texts if (step := Progress.parse(text, 0.0).step) is not None]
        if steps:
            step, text = max(steps)
            total = text.split("/", 1)[1].split(" ")[0] if "/" in text else ""
            self._steps = step, int(total) if total.isdigit() else None

    def event(self, event: Event) -> None:
        """Take an event, and queue the message about it, if any; does not depend on the event's time."""
        if self._is_late(event):
            return
        if self._steps is not None:
            self._story.reached(*self._steps)
        message = self._story.tell(self._redactor.tree(event))  # a rank's last words may contain a secret
        if message is None or message.kind not in self._on:
            return
        if message.kind == "failure" and self._run.stopped_by:
            return  # the nodes end one after the other, as they should
        # A supervisor reads all events of a run, also those from before the run was stopped and resumed.
        if (event.end is not None and event.end <= self._begin) or not self._lock.claim(event):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
            self._thread.start()
        self._put(message)

    def _is_late(self, event: Event) -> bool:
        """Whether a node's event is from before the run was resumed, but could only be read after that."""
        if event.node is None or (event.end is not None and event.end <= self._begin):
            return False
        if attempt := event.get("attempt"):
            self._generations[event.node] = int(str(attempt).partition(".")[0])
        elif event.kind == "agent-started":
            self._generations.pop(event.node, None)
        return self._generations.get(event.node, self._generation) < self._generation

    def close(self) -> None:
        """Report the end of the run, unless that was done, and wait up to `CLOSE_S` for deliveries."""
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
        """The number of messages not delivered yet."""
        return self._queue.qsize()

    def _put(self, message: Message | None) -> None:
        while True:
            try:
                self._queue.put_nowait(message)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()  # drop the oldest message: newer ones have the current state

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
        # If this way has failed before, make one attempt only: later messages must not wait long.
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
    """Send the notification of the end, for a run that ended without a supervisor."""
    from nodekit.inventory.load import restore

    asked = restore(run.inventory).notify
    if asked is not None:
        make_private(run.folder)
        Notifier(run, asked, secrets_here(run, asked)).close()


def _last_start(run: Run) -> tuple[int, int]:
    """Return the offset of the last start or resume in the run's event file, and its generation."""
    found, end = (0, 0), 0
    with contextlib.suppress(OSError), (run.folder / events.FILE).open("rb") as file:
        for line in file:
            if b'"run-started"' in line and (event := events.parse(line)) and event.kind == "run-started":
                found = end, int(event.get("generation", 0))
            end += len(line)
    return found


class _Turn:
    """Decides which supervisor sends, and which event it has sent last: in a file that the sender keeps locked."""

    def __init__(self, path: Path, begin: int) -> None:
        self._path = path
        self._begin = begin
        self._file: IO[str] | None = None
        self._last: dict[str, Any] = {}

    def claim(self, event: Event) -> bool:
        """Whether to send a message about this event; if so, record it as sent."""
        if self._file is None:
            with contextlib.suppress(OSError):  # a full disk
                self._file = locks.locked(self._path)
            if self._file is None:
                return False
            with contextlib.suppress(ValueError):
                self._last = dict(json.load(self._file))
        told = self._last.get("end", 0)
        is_old = event.end is not None and event.end <= told
        # Each supervisor writes this event; a run that is resumed after its end can end a second time.
        is_again = (
            event.kind == self._last.get("kind") == "run-ended" and self._last.get("begin") == self._begin
        )
        if is_old or is_again:
            return False
        self._last = {"end": event.end or told, "kind": event.kind, "begin": self._begin}
        with contextlib.suppress(OSError):  # always the same length, so that it needs no space on a full disk
            os.pwrite(self._file.fileno(), json.dumps(self._last).encode().ljust(_TOLD_BYTES), 0)
        return True

    def release(self) -> None:
        """Release the lock, so that another supervisor can send."""
        if self._file is not None:
            self._file.close()
            self._file = None


def targets(inventory: Inventory) -> dict[str, str]:
    """Return what is notified: ``command`` → its words, ``webhook`` → its address.

    Raises:
        KitError: the inventory has no `notify:`.
    """
    if inventory.notify is None:
        raise KitError(
            f"{inventory.path}: found no notify:", wanted="one, as notify: {command: [notify-send, kit]}"
        )
    found = {"command": shlex.join(inventory.notify.command or ()), "webhook": _target(inventory.notify)}
    return {name: found[name] for name in ways(inventory.notify, notify_secrets(inventory), None)}


def send_test(inventory: Inventory, text: str) -> dict[str, NotDelivered | None]:
    """Send a message to every target now; return target → the error, None if it was delivered."""
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
