"""Make the start of a waiting fork quicker: do beforehand, on a tiny model, what kit's training module does.

A fork shares its memory with the server, and the kernel copies each page when the fork first writes to it, even if only
reference counts change: 8,000 pages, half the time of a start. The rehearsal has many of them copied beforehand.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import sys
from collections.abc import Sequence

from nodekit.training.options.arguments import read

_NUM_SAMPLES, _NUM_CLASSES, _SIDE = 4, 10, 8


def rehearse(args: Sequence[str]) -> None:
    """Parse the options `args`, and train a model of a few weights; keep nothing, and ignore all errors."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        with contextlib.suppress(Exception, SystemExit):
            read(args)
        with contextlib.suppress(Exception):
            _train()


def _train() -> None:
    torch = sys.modules.get("torch")
    # A backward pass counts the GPUs, and torch would stay with this count, whatever the start's environment says.
    if torch is None or any((torch.version.cuda, torch.version.hip, torch.version.xpu)):
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that no thread is started
    try:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * (_SIDE - 2) ** 2, _NUM_CLASSES)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        images = torch.rand(_NUM_SAMPLES, 1, _SIDE, _SIDE)
        labels = torch.randint(_NUM_CLASSES, (_NUM_SAMPLES,))
        for _ in range(2):
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = pickle.dumps({name: each.numpy() for name, each in model.state_dict().items()})
        hashlib.sha256(state).hexdigest()
    finally:
        torch.set_num_threads(num_threads)
