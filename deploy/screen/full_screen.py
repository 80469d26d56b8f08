"""The live screen of a run in a terminal, and the keys that it takes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.output import terminal
from nodekit.deploy.records.events import Event
from nodekit.deploy.screen.view import View
from nodekit.deploy.supervise.observer import Left, StopAsked
from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from nodekit.deploy.screen.screen import Model
    from nodekit.deploy.screen.view_model import ViewModel

REDRAW_S = 0.5
NOTICE_S = 6.0  # seconds that the answer to a key is shown, instead of the list of keys
NUMBER_S = 1.0  # two digits pressed within this time make one number
LAST_EVENTS = 8  # printed to the terminal when the screen is closed
LOG_LINES = 500  # drawn of the log that is followed, at most


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What the keys of a live screen do: texts for the list of keys, and functions to call."""

    leaves: str
    """What happens to the job when the user leaves the screen."""
    interrupts: str
    """What Ctrl-C does."""
    stays: Callable[[], str] = str
    """Why the user cannot leave the screen; "" if leaving is possible."""
    drain: Callable[[str, bool, Collection[str]], str] | None = None
    """(node, whether to undo a drain, unreachable nodes) → the answer to show."""
    drained: Callable[[], Collection[str]] = tuple
    """The nodes that are drained."""


class FullScreen(View):
    """A view that redraws the whole screen (deploy/screen/screen.py) again and again, and handles the user's keys."""

    tick_s = 0.1

    def __init__(self, watched: ViewModel, doing: Doing) -> None:
        """Draw nothing yet: drawing begins with the `with` block.

        Args:
            watched: what to show.
            doing: what the keys do.
        """
        super().__init__(watched.nodes)
        from nodekit.deploy.output.keys import Keys

        self._watched = watched
        self._doing = doing
        self._keys = Keys(sys.stdin.fileno()) if _is_ours(sys.stdin) else None
        self._drawn_at = 0.0
        self._chosen = 0
        self._typed = (0.0, "")
        self._shows_log = self._shows_help = False
        self._asks: tuple[str, Callable[[], None]] | None = None
        self._notice: tuple[float, str] = (0.0, "")
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FullScreen:
        with contextlib.ExitStack() as stack:
            stack.callback(signal.signal, signal.SIGTSTP, signal.signal(signal.SIGTSTP, self._suspend))
            stack.enter_context(contextlib.redirect_stderr(_Words(self._note)))
            stack.callback(self._close)
            self._open()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal, and print the last events to it."""
        was_open = self._live is not None
        self._stack.close()
        if was_open:
            from nodekit.deploy.screen.screen import closing

            console = self._console()
            console.print(
                closing(self._watched.model(time.time()), LAST_EVENTS, console.width), soft_wrap=True
            )

    def _console(self) -> Any:

        return terminal.console(highlight=False)

    def _open(self) -> None:
        from rich.live import Live

        if self._keys is not None:
            self._keys.start()
        try:
            self._live = Live(
                console=self._console(),
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        except BaseException:
            self._close()
            raise
        self._draw()

    def _close(self) -> None:
        live, self._live = self._live, None
        try:
            if live is not None:
                live.stop()
        finally:
            if self._keys is not None:
                self._keys.stop()

    def _suspend(self, *_: object) -> None:
        """Handle Ctrl-Z: return the terminal to the shell until `fg`."""
        self._close()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        self._open()

    # --- what comes in ---

    def say(self, text: str, *, is_event: bool = False) -> None:
        """Show a text of one or more lines; `is_event`: not while the screen is open, as `event` shows it."""
        if self._live is None:
            print(text, flush=True)
        elif not is_event:
            self._watched.say(text, time.time())
            self._draw()

    def _note(self, text: str) -> None:
        self._notice = (time.monotonic(), text)

    def log(self, node: str, rank: str, lines: list[str]) -> None:
        """Show lines of a rank's output."""
        if self._live is None:
            super().log(node, rank, lines)
        self._watched.log(node, rank, lines)

    def status(self, lines: Mapping[str, str]) -> None:
        """Show each node's status line."""
        if self._live is None:
            super().status(lines)  # the live view has failed
        self._watched.lines(lines)

    def see(self, statuses: Mapping[str, NodeStatus]) -> None:
        """Show each reachable node's status."""
        with self._no_harm():
            self._watched.see(statuses)
            if time.monotonic() - self._drawn_at >= REDRAW_S:
                self._draw()

    def event(self, event: Event) -> None:
        """Show one event as a sentence."""
        with self._no_harm():
            self._watched.event(event)

    @contextlib.contextmanager
    def _no_harm(self) -> Iterator[None]:
        """After an error in drawing, close the screen and go on as lines: a defect of the view must not end the job."""
        try:
            yield
        except Exception as error:
            self._stack.close()
            print(f"the live view failed, lines follow: {type(error).__name__}: {error}", flush=True)

    # --- drawing ---

    def _draw(self) -> None:
        if self._live is None:
            return
        from nodekit.deploy.screen import screen

        # Ask the terminal at each redraw: an exported $COLUMNS still has the width at the start.
        size = os.get_terminal_size(sys.stdout.fileno())
        self._live.console.size = size
        self._live.update(screen.render(self._model(), size.columns, size.lines), refresh=True)
        self._drawn_at = time.monotonic()

    def _model(self) -> Model:
        chosen, log = self._node, None
        if self._shows_log and chosen is not None:
            log = self._watched.log_of(chosen)[-LOG_LINES:]
        asked_at, notice = self._notice
        asks = notice if time.monotonic() - asked_at < NOTICE_S else ""
        if self._asks is not None:
            asks = f"{self._asks[0]}  y: yes, any other key: no"
        return dataclasses.replace(
            self._watched.model(time.time()),
            chosen=chosen if self._keys else None,
            log=log,
            asks=asks,
            keys=self._short_keys(),
            help=self._help() if self._shows_help else None,
        )

    @property
    def _node(self) -> str | None:
        nodes = self._watched.nodes
        return nodes[min(self._chosen, len(nodes) - 1)] if nodes else None

    def _short_keys(self) -> list[tuple[str, str]]:
        if self._keys is None:
            return [("Ctrl-C", self._doing.interrupts)]
        if self._shows_log:
            return [("esc", "back"), ("↑↓", "another node"), ("q", "leave it running"), ("?", "help")]
        drain = [("d", "drain")] if self._doing.drain else []
        return [
            ("q", "leave it running"),
            ("s", "stop"),
            ("l", "log"),
            ("?", "help"),
            *drain,
            ("↑↓", "choose"),
        ]

    def _help(self) -> list[tuple[str, str]]:
        drain = [
            (
                "d",
                "drain the marked node: its ranks save, and it leaves the job until you press d again",
            )
        ]
        return [
            ("↑ ↓, or a number", "mark a node"),
            ("l or Enter", "follow the output of the marked node's ranks; Esc: back"),
            *(drain if self._doing.drain else []),
            ("s", "stop the job on all nodes, after a snapshot; asks first"),
            ("q", self._doing.leaves),
            ("Ctrl-C", self._doing.interrupts),
            ("Ctrl-Z", "back to the shell for a while; fg comes here again"),
            ("any key", "closes this list"),
        ]

    # --- keys ---

    def keys(self) -> None:
        """Handle the keys that the user has pressed."""
        pressed = self._keys.pressed() if self._keys is not None and self._live is not None else []
        for key in pressed:
            self._press(key)
        if pressed:
            self._draw()

    def _press(self, key: str) -> None:
        if self._asks is not None:
            (_, then), self._asks = self._asks, None
            if key in ("y", "Y"):
                then()
        elif self._shows_help:
            self._shows_help = False
        elif key in ("?", "h"):
            self._shows_help = True
        elif key in ("up", "k"):
            self._chosen = max(min(self._chosen, len(self._watched.nodes) - 1) - 1, 0)
        elif key in ("down", "j"):
            self._chosen = min(self._chosen + 1, len(self._watched.nodes) - 1)
        elif key in ("home", "end"):
            self._chosen = 0 if key == "home" else len(self._watched.nodes) - 1
        elif key.isdecimal():
            at, text = self._typed
            text = (text if time.monotonic() - at < NUMBER_S else "") + key
            self._typed = (time.monotonic(), text)
            self._chosen = min(max(int(text), 1), len(self._watched.nodes)) - 1
        elif key in ("l", "enter"):
            self._shows_log = not self._shows_log
        elif key == "esc":
            self._shows_log = False
        elif key == "q":
            if why := self._doing.stays():
                self._note(why)
            else:
                raise Left
        elif key == "s":
            self._asks = ("Stop the job on all nodes, after a snapshot?", _stop)
        elif key == "d":
            self._ask_to_drain()

    def _ask_to_drain(self) -> None:
        node, drain = self._node, self._doing.drain
        if node is None or drain is None:
            return
        try:
            undo = node in self._doing.drained()
        except KitError as error:
            self._note(str(error))
            return
        question = (
            f"Take {node} back into the job?" if undo else f"Drain {node}: it saves and leaves the job?"
        )
        rows = self._watched.model(time.time()).nodes
        absent = [row.name for row in rows if row.state == "unreachable"]

        def then() -> None:
            try:
                self._note(drain(node, undo, absent))
            except KitError as error:
                self._note(str(error))

        self._asks = (question, then)


def _stop() -> None:
    raise StopAsked("the user")


class _Words:
    """A stand-in for stderr while the screen is open: what libraries and host channels write is shown as a notice."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def write(self, text: str) -> int:
        for line in filter(str.strip, text.splitlines()):
            self._say(line.strip())
        return len(text)

    def flush(self) -> None:
        """Do nothing: `write` buffers nothing."""


def _is_ours(stream: Any) -> bool:
    """Whether a stream is a terminal with this process in its foreground."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(stream.isatty()) and os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    return False


def fits_screen(*, plain: bool = False) -> bool:
    """Whether stdout is a terminal that can show the live screen; `plain`: the user wants lines instead."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return (
        not plain and _is_ours(sys.stdout) and os.environ.get("TERM", "dumb") != "dumb" and encoding == "utf8"
    )
