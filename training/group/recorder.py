"""Answers kit when it asks for torch's flight recorder: on NCCL torch does so itself, elsewhere it only records."""

import os
import threading
from pathlib import Path

import torch

_END = b"end"


def answer(pipe: Path, file: Path) -> None:
    """Write the recorder's dump to ``file``, as JSON, whenever something comes in through ``pipe``, until `end`.

    Does nothing where this torch cannot dump. In a thread: the main one may be in a collective that never returns.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # since torch 2.9
    if dump is None:
        return
    try:
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        handle = os.open(pipe, os.O_RDWR)  # for writing too, so that reading waits while nobody writes
    except OSError:  # a hang is then told from the stacks alone
        return

    def run() -> None:
        with os.fdopen(handle, "rb", buffering=0) as source:
            while (os.read(source.fileno(), 128)) != _END:
                beside = file.with_name(f".{file.name}")
                try:
                    beside.write_bytes(dump())
                    beside.replace(file)
                except OSError:
                    continue

    threading.Thread(target=run, name="nodekit-recorder", daemon=True).start()


def end(pipe: Path) -> None:
    """Have the thread that reads ``pipe`` end."""
    try:
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        pipe.unlink(missing_ok=True)
        os.write(handle, _END)
    finally:
        os.close(handle)
