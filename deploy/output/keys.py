"""Reads single key presses from a terminal, and always restores its settings."""

from __future__ import annotations

import contextlib
import os
import select
import termios
import tty
from typing import Any

_ESCAPES = {
    b"[A": "up", b"[B": "down", b"[C": "right", b"[D": "left", b"OA": "up", b"OB": "down", b"OC": "right",
    b"OD": "left", b"[H": "home", b"[F": "end", b"OH": "home", b"OF": "end", b"[1~": "home", b"[4~": "end",
    b"[5~": "pageup", b"[6~": "pagedown",
}  # fmt: skip
_PLAIN = {"\r": "enter", "\n": "enter", "\x1b": "esc", "\t": "tab", "\x7f": "backspace", "\x08": "backspace"}
_REST_S = 0.05  # the rest of an escape sequence comes within this time, over a slow connection too


class Keys:
    """Reads a terminal's keys without blocking; Ctrl-C and Ctrl-Z still send signals."""

    def __init__(self, fd: int) -> None:
        """Prepare to read the terminal `fd`; change nothing before `start`."""
        self._fd = fd
        self._before: list[Any] | None = None

    def start(self) -> None:
        """Turn off line buffering and echo."""
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSANOW)

    def stop(self) -> None:
        """Restore the terminal's settings; safe to repeat."""
        if self._before is not None:
            before, self._before = self._before, None
            with contextlib.suppress(termios.error):  # the terminal is closed
                termios.tcsetattr(self._fd, termios.TCSANOW, before)

    def pressed(self) -> list[str]:
        """Return the keys pressed since the last call: characters, or names such as ``up``, ``enter``, ``esc``."""
        if self._before is None or not self._is_ready(0.0):
            return []
        data = os.read(self._fd, 1024)
        while data.endswith((b"\x1b", b"\x1b[", b"\x1bO")) and self._is_ready(_REST_S):
            data += os.read(self._fd, 1024)
        return decode(data)

    def _is_ready(self, wait_s: float) -> bool:
        return bool(select.select([self._fd], [], [], wait_s)[0])


def decode(data: bytes) -> list[str]:
    """Split a terminal's input into keys; unknown escape sequences are dropped."""
    found = []
    while data:
        if data[:1] == b"\x1b" and data[1:2] in (b"[", b"O"):
            end = 2
            while end < len(data) and not 0x40 <= data[end] <= 0x7E:
                end += 1
            if name := _ESCAPES.get(data[1 : end + 1]):
                found.append(name)
            data = data[end + 1 :]
            continue
        size = 1 if data[0] < 0xC0 else 2 if data[0] < 0xE0 else 3 if data[0] < 0xF0 else 4
        text = data[:size].decode("utf-8", "ignore")
        if text:
            found.append(_PLAIN.get(text, text))
        data = data[size:]
    return found
