"""What a fork for kit's training module does while it waits for its start, so that this takes less time.

It shares its memory with the server. Each page that it is the first to write to is copied then, even where only the
counts of references change: 8,000 of them, half of what a start takes. Here it writes to many of them beforehand.
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
    """Read these options, and train a model of a few weights; nothing of it is kept."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        with contextlib.suppress(Exception, SystemExit):
            read(args)
        with contextlib.suppress(Exception):
            _train()


def _train() -> None:
    torch = sys.modules.get("torch")
    # A backward pass counts the GPUs, and from then on the process would have these, whatever its start says.
    if torch is None or any((torch.version.cuda, torch.version.hip, torch.version.xpu)):
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # starts none
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
