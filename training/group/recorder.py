"""Answers kit when it asks for torch's flight recorder, which records the collectives of all groups of a process.

torch itself answers for the first group on NCCL of a process, and for no later one (``HeartbeatMonitor::runLoop`` in
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp), and on gloo for none.
"""

import json
import os
import threading
import time
from pathlib import Path

import torch

_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""Backend → torch's function that returns the dump; since torch 2.9 and 2.5."""
_END = b"end"
_CLOCK_WAS_SET_NS = 1_000_000_000
_answering: list[Path] = []
"""The pipe that a thread of ours reads."""


def answer(pipe: Path, file: Path, backend: str) -> None:
    """Write the dump to ``file``, as JSON, whenever something comes in through ``pipe``, until `end`.

    It has none of what was recorded before now: a rank that has not entered a collective of its new group yet is not to
    look ahead by those of its old one. Does nothing where this torch cannot dump. In a thread: the main one may be in a
    collective that never returns.
    """
    dump = getattr(torch._C._distributed_c10d, _DUMPS[backend], None)
    if dump is None:
        return
    try:
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        handle = os.open(pipe, os.O_RDWR)  # for writing too, so that reading waits while nobody writes
    except OSError:  # a hang is then told from the stacks alone
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
    """The dump without what is older, by the host's clock; all of it, if that was set meanwhile."""
    by_clock, by_monotonic = time.time_ns() - began[0], time.monotonic_ns() - began[1]
    if abs(by_clock - by_monotonic) > _CLOCK_WAS_SET_NS:
        return dump
    found = json.loads(dump)
    found["entries"] = [each for each in found.get("entries", ()) if each["time_created_ns"] >= began[0]]
    return json.dumps(found).encode()


def end() -> None:
    """Have the thread that answers end, if there is one."""
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
