"""A slow link of the lab: forwards frames between two interfaces, with a delay, a limited rate and losses.

It does what ``tc netem`` does, which many kernels of small virtual machines lack. A stand-alone script, run as
``python -I -S lab_wire.py NEAR FAR DELAY_S RATE_MBIT LOSS`` (0: no limit) inside the switch's network namespace.
"""

import collections
import contextlib
import os
import random
import select
import socket
import sys
import time

ETH_P_ALL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_RCVBUFFORCE = 33
MAX_FRAME_BYTES = 1 << 17
MAX_FRAMES_AT_ONCE = 64
MAX_QUEUE_S = 0.2
"""Seconds; a frame that would wait longer for the rate is dropped, as if a switch's buffer were full."""


class Line:
    """One direction of the link."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, delay_s: float, rate_mbit: float, loss: float
    ):
        self.source, self.sink = source, sink
        self.delay_s, self.loss = delay_s, loss
        self.s_per_byte = 8 / (rate_mbit * 1e6) if rate_mbit else 0.0
        self.free_at = 0.0
        self.queue: collections.deque[tuple[float, bytes]] = collections.deque()

    def take_in(self) -> None:
        """Queue the frames that have arrived, each with the time when it leaves."""
        with contextlib.suppress(OSError):  # nothing more to read, or the cable is cut (ENETDOWN)
            for _ in range(MAX_FRAMES_AT_ONCE):
                frame = self.source.recv(MAX_FRAME_BYTES, socket.MSG_DONTWAIT)
                now = time.monotonic()
                starts_at = max(now, self.free_at)
                if random.random() < self.loss or starts_at - now > MAX_QUEUE_S:  # noqa: S311
                    continue
                self.free_at = starts_at + len(frame) * self.s_per_byte
                self.queue.append((self.free_at + self.delay_s, frame))

    def let_out(self) -> None:
        """Send the frames that are due."""
        while self.queue and self.queue[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # a frame that cannot be sent is lost, as on a cable
                self.sink.send(self.queue.popleft()[1])


def open_interface(name: str) -> socket.socket:
    """Open a socket for all frames that arrive on an interface, with a header on the checksum that each needs.

    Without that header, a frame of a local process would arrive with a wrong checksum, and a large one not at all.
    """
    interface = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    interface.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    interface.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    interface.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
    interface.bind((name, ETH_P_ALL))
    return interface


def main(near: str, far: str, delay_s: str, rate_mbit: str, loss: str) -> None:
    """Open both ends, detach (see lab_process.start), and carry frames until killed."""
    ends = open_interface(near), open_interface(far)
    if child := os.fork():
        print(child, flush=True)
        return
    if sys.stdin.readline() != "go\n":
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    # On busy cores the scheduler would add to the delay. Not every user may set this.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    settings = float(delay_s), float(rate_mbit), float(loss)
    lines = Line(ends[0], ends[1], *settings), Line(ends[1], ends[0], *settings)
    while True:
        due = [line.queue[0][0] for line in lines if line.queue]
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        select.select(ends, [], [], timeout_s)
        for line in lines:
            line.take_in()
            line.let_out()


if __name__ == "__main__":
    main(*sys.argv[1:])
