"""Dump torch's flight recorder, which records the collectives of all groups of a process, when kit asks for it.

torch itself dumps only for the first NCCL group of a process, not for later ones (``HeartbeatMonitor::runLoop`` in
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp), and never for gloo.
"""

import json
import os
import threading
import time
from pathlib import Path

import torch

_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""Backend → the name of torch's function that returns the dump, for gloo since torch 2.9, for NCCL since 2.5."""
_END = b"end"
_CLOCK_WAS_SET_NS = 1_000_000_000
_answering: list[Path] = []
"""The FIFO that the thread of `answer` reads; empty if there is none."""


def answer(pipe: Path, file: Path, backend: str) -> None:
    """Start a thread that writes the dump to ``file``, as JSON, for each message in the FIFO ``pipe``, until `end`.

    The dump leaves out collectives recorded before this call: by those of its old group, a rank that has not entered a
    collective of its new group would seem to be ahead. Do nothing if this torch cannot dump. A thread is needed since
    the main one may be in a collective that never returns.
    """
    dump = getattr(torch._C._distributed_c10d, _DUMPS[backend], None)
    if dump is None:
        return
    try:
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        # For writing too, so that reads block while there is no other writer.
        handle = os.open(pipe, os.O_RDWR)
    except OSError:  # kit then diagnoses a hang by the stacks only
        return
    began = time.time_ns(), time.monotonic_ns()

    def run() -> None:
        with os.fdopen(handle, "rb", buffering=0) as source:
            while (os.read(source.fileno(), 128)) != _END:
                beside = file.with_name(f".{file.name}")
                try:
                    beside.write_bytes(_since(began, dump()))
                    beside.replace(file)
                except (OSError, ValueError, KeyError):
                    continue

    _answering[:] = [pipe]
    threading.Thread(target=run, name="nodekit-recorder", daemon=True).start()


def _since(began: tuple[int, int], dump: bytes) -> bytes:
    """Return the dump without entries from before ``began``; the whole dump if the host's clock was set since."""
    by_clock, by_monotonic = time.time_ns() - began[0], time.monotonic_ns() - began[1]
    if abs(by_clock - by_monotonic) > _CLOCK_WAS_SET_NS:
        return dump
    found = json.loads(dump)
    found["entries"] = [each for each in found.get("entries", ()) if each["time_created_ns"] >= began[0]]
    return json.dumps(found).encode()


def end() -> None:
    """End the thread of `answer`, if there is one."""
    while _answering:
        pipe = _answering.pop()
        try:
            handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            pipe.unlink(missing_ok=True)
            os.write(handle, _END)
        finally:
            os.close(handle)
