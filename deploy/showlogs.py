"""`kit logs`: the ranks' output, from the files on the nodes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from nodekit.deploy.link import Link
from nodekit.deploy.runs import Run
from nodekit.inventory.errors import HostError

CALL_TIMEOUT_S = 30.0


def show(run: Run, links: Mapping[str, Link], *, rank: int | None, follow: bool) -> None:
    """Print all that was written, node by node; with `follow` go on, all nodes at once, until the run ends."""
    if not follow:
        for name, link in links.items():
            _print_all(name, link, run.nodes[name]["node_dir"], rank)
        return
    lock = threading.Lock()

    def one(name: str, link: Link) -> None:
        def take(part: Any) -> None:
            with lock:
                _print(name, part["logs"], rank)

        try:
            link.stream("follow", take, node_dir=run.nodes[name]["node_dir"])
        except HostError as error:
            with lock:
                print(f"kit: {error}", flush=True)

    threads = [threading.Thread(target=one, args=item, daemon=True) for item in links.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # a bare join would not let Ctrl-C through


def _print_all(name: str, link: Link, node_dir: str, rank: int | None) -> None:
    offsets: dict[str, int] = {}
    while True:
        offsets, found = link.call(
            "logs", timeout_s=CALL_TIMEOUT_S, node_dir=node_dir, offsets=offsets, final=True
        )
        if not found:
            return
        _print(name, found, rank)


def _print(node: str, found: list[tuple[str, str]], rank: int | None) -> None:
    for file, text in found:
        number = file.removeprefix("rank").partition("-")[0]
        if rank is not None and number != str(rank):
            continue
        for line in text.split("\n")[:-1]:
            print(f"{node}:{number} | {line.rpartition(chr(13))[2]}", flush=True)
