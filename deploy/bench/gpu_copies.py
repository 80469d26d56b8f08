"""Measures copies between all pairs of a host's GPUs; a stand-alone program that a host's python reads from stdin.

Its argument is JSON: ``size_bytes`` of a copy. It prints one line of JSON: ``pairs`` (source, target, in torch's
numbering, bytes per second, whether the source can access the target's memory), and ``topo``, the output of `nvidia-smi
topo -m`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

_WARM_UP = 2
_ENOUGH_S = 0.1
_MOST_TIMES = 20
_TOPO_S = 20.0


def main(settings: dict[str, Any]) -> None:
    """Measure one pair at a time, so that no pair shares a link with another."""
    import torch

    number = torch.cuda.device_count()
    size_bytes = min(
        settings["size_bytes"], *(torch.cuda.mem_get_info(each)[0] // 4 for each in range(number))
    )

    def copied_s(source: torch.Tensor, target: torch.Tensor, times: int) -> float:
        begin = time.monotonic()
        for _ in range(times):
            target.copy_(source, non_blocking=True)
        for each in (source, target):
            torch.cuda.synchronize(each.device)
        return (time.monotonic() - begin) / times

    pairs = []
    for one in range(number):
        for other in range(number):
            if one == other:
                continue
            source = torch.zeros(size_bytes, dtype=torch.uint8, device=f"cuda:{one}")
            target = torch.zeros(size_bytes, dtype=torch.uint8, device=f"cuda:{other}")
            copied_s(source, target, _WARM_UP)  # sets up peer access, which takes some milliseconds
            times = max(3, min(_MOST_TIMES, int(_ENOUGH_S / max(copied_s(source, target, 1), 1e-6))))
            rate = size_bytes / copied_s(source, target, times)
            pairs.append((one, other, rate, torch.cuda.can_device_access_peer(one, other)))
            del source, target
    print(json.dumps({"pairs": pairs, "topo": _topology()}), flush=True)


def _topology() -> str:
    argv = ["nvidia-smi", "topo", "-m"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=_TOPO_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):  # report the pairs without it
        return ""


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
