"""The task of a self-test: slowed-down digits; each rank reports the free GPU memory at its start."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch

from nodekit.deploy.selftest import MEMORY_MARK
from nodekit.training.tasks.digits import Digits

STEP_S = 0.05


class Measured(Digits):
    """At most one step every `STEP_S` seconds; the same losses each time, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        # CUDA's fastest convolutions and matrix products add in another order each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        self._next_s = 0.0
        if torch.cuda.is_available():
            rank, attempt = (
                int(os.environ.get(name, "0")) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT")
            )
            free, total = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))
            told = {"rank": rank, "attempt": attempt, "free_bytes": free, "total_bytes": total}
            print(MEMORY_MARK + json.dumps(told), flush=True)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Wait until the next step is due, and return the parent's loss."""
        now_s = time.monotonic()
        time.sleep(max(0.0, self._next_s - now_s))
        self._next_s = max(self._next_s, now_s) + STEP_S
        return super().loss(model, batch)
