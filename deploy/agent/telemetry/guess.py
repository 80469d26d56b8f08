"""Guess a rank's step, epoch and loss from the last lines that it printed.

The guess is shown to the user, and does not count as progress. Only whether it advances matters, to tell a failure
during training from one at the start.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from nodekit.deploy.host.schema import Guess

TAIL_BYTES = 8192
LONG_TAIL_BYTES = 65536  # more, since a traceback of gloo or NCCL may follow the lines of the training
_COLOUR = re.compile(r"\x1b\[[0-9;:]*[A-Za-z]")
_NUMBER = r"(\d{1,12})(?![\d.]*\.\d|\w)"
_OF = rf"{_NUMBER}(?:\s*(?:/|of)\s*(\d{{1,12}})(?!\w))?"
# ` 37%|███▋      | 37/100 [00:03<00:06, …`; not the bar of a download, which counts in bytes, as 1.2M/27.0M.
_BAR = re.compile(r"\d{1,3}%\|[^|]*\|\s*(\d{1,12})/(\d{1,12})\s*\[")
# Bars of what is no training, as the Trainer's at each save: `Writing model shards: 100%|███| 1/1 [`.
_NO_STEPS = re.compile(
    r"\b(?:Loading|Writing|Saving|Fetching|Downloading|Generating|Map|Filter|Tokeniz|Evaluat|Validat|Sanity|Predict)"
)
_STEP = re.compile(rf"(?:\b|_)(?:step|iter|iteration|it)\b['\"]?[\s:=#\[(]*{_OF}", re.IGNORECASE)
_EPOCH = re.compile(rf"\bepoch\b['\"]?[\s:=#\[(]*{_OF}", re.IGNORECASE)
# "Epoch: [3][ 10/100]".
_OF_EPOCH = re.compile(r"\bepoch:?\s*\[\d+\]\s*\[\s*(\d{1,12})/(\d{1,12})\]", re.IGNORECASE)
# A fraction, and in quotes since transformers 5, as is the loss.
_TRAINERS_EPOCH = re.compile(r"'epoch': '?(\d{1,12})(?:\.\d+)?'?[,}]")
_LOSS = re.compile(
    r"(?:\b|_)loss['\"]?[\s=:]+'?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?![\w.])", re.IGNORECASE
)


def of_file(path: str) -> Guess | None:
    """Return the guess from the end of a log; None if there is none."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return of_text(file.read(TAIL_BYTES).decode("utf-8", "replace"))
    except OSError:
        return None


def advances(path: str) -> bool:
    """Whether the last lines of a log show two different steps or epochs, so that the rank has trained."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LONG_TAIL_BYTES))
            text = file.read(LONG_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return False
    found: set[tuple[int | None, int | None]] = set()
    for line in text.replace("\r", "\n").split("\n"):
        if (told := of_text(line)) is not None:
            found.add((told["epoch"], told["step"]))
            if len(found) > 1:
                return True
    return False


def of_text(text: str) -> Guess | None:
    """Return ``step``, ``total_steps``, ``epoch`` and ``loss`` of the last line with a step or an epoch; else None."""
    for line in reversed(_COLOUR.sub("", text).replace("\r", "\n").split("\n")):
        bar = _BAR.search(line)
        if bar and _NO_STEPS.search(line, 0, bar.start()):
            continue
        step = bar or _OF_EPOCH.search(line) or _STEP.search(line)
        epoch = _EPOCH.search(line) or _TRAINERS_EPOCH.search(line)
        if step is None and epoch is None:
            continue
        loss = _LOSS.search(line)
        value = float(loss[1]) if loss else math.nan
        return {
            "step": int(step[1]) if step else None,
            "total_steps": int(step[2]) if step and step[2] else None,
            "epoch": int(epoch[1]) if epoch else None,
            "loss": value if math.isfinite(value) else None,
        }
    return None


def brief(guess: Guess | None) -> str:
    """Format a guess for a table's cell: ``~37/100`` or ``~epoch 3``; a dash for None."""
    if guess is None:
        return "–"
    if guess["step"] is not None:
        return f"~{guess['step']}" + (f"/{guess['total_steps']}" if guess["total_steps"] else "")
    return "–" if guess["epoch"] is None else f"~epoch {guess['epoch']}"


def words(guess: Guess) -> str:
    """Format a guess for the user: ``~step 37/100, epoch 3, loss 0.2``."""
    parts = []
    if guess.get("step") is not None:
        total = guess.get("total_steps")
        parts.append(f"step {guess['step']}" + (f"/{total}" if total else ""))
    if guess.get("epoch") is not None:
        parts.append(f"epoch {guess['epoch']}")
    if guess.get("loss") is not None:
        parts.append(f"loss {guess['loss']:.4g}")
    return "~" + ", ".join(parts)
