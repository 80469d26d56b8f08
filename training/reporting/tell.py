"""Write events of a rank for kit (docs/events.md)."""

import json
import logging
import os
import time
from typing import Any

from nodekit.training.world import World

log = logging.getLogger("nodekit.training")


def tell(world: World, kind: str, *, step: int, **fields: Any) -> None:
    """Write an event for kit; do nothing without kit."""
    if world.events_file is None:
        return
    line = json.dumps({"kind": kind, "step": step, "time": time.time(), **fields}).encode() + b"\n"
    try:
        handle = os.open(world.events_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)
    except OSError as error:  # only logged: events are for people, and nothing depends on them
        log.warning("%s is not written: %s", world.events_file, error)
