"""How far a script seems to be that writes no progress file: what public scripts print, and what only looks like it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.agent.telemetry import guess


def found(
    step: int | None = None, total: int | None = None, epoch: int | None = None, loss: float | None = None
) -> dict[str, Any]:
    return {"step": step, "total_steps": total, "epoch": epoch, "loss": loss}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        # tqdm, as the Trainer, Accelerate's examples and Lightning draw it
        (" 37%|███▋      | 37/100 [00:03<00:06,  9.81it/s]", found(37, 100)),
        ("  5%|5         | 1/20 [00:00<00:01, 11.10it/s]", found(1, 20)),
        (
            "Epoch 2:  50%|█████     | 5/10 [00:00<00:00, 9.8it/s, v_num=0, train_loss=0.125]",
            found(5, 10, 2, 0.125),
        ),
        # nanoGPT, minGPT-ddp, the imagenet example, the Trainer's logs
        ("step 250: train loss 2.5, val loss 2.6", found(250, loss=2.5)),
        ("iter 100: loss 3.1405, time 200.15ms, mfu 1.2%", found(100, loss=3.1405)),
        ("[GPU0] Epoch 1 | Iter 200 | Train Loss 4.10254", found(200, epoch=1, loss=4.10254)),
        ("Epoch: [3][ 10/100]\tTime  0.1 ( 0.2)\tLoss 6.9e+00 (7.0e+00)", found(10, 100, 3, 6.9)),
        (
            "{'loss': 0.5123, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 3}",
            found(epoch=3, loss=0.5123),
        ),
        (
            "{'loss': '0.6871', 'grad_norm': '0.3216', 'learning_rate': '2.138e-05', 'epoch': '2.3'}",
            found(epoch=2, loss=0.6871),
        ),
        ("{'loss': 0.5, 'epoch': 0.25}", found(epoch=0, loss=0.5)),
        ("epoch 3 of 10 done, loss=0.2", found(epoch=3, loss=0.2)),
        ("tick 4 global_step=1200 loss: 1e-3", found(1200, loss=0.001)),
        ("\x1b[32mStep 7/50\x1b[0m", found(7, 50)),
        ("step 9 loss nan", found(9)),
    ],
)
def test_plain_lines_are_read(line: str, wanted: dict[str, Any]) -> None:
    assert guess.of_text(f"step 1\n{line}\nsaved out/ckpt.pt\n") == wanted


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Downloading: 45%|████▌     | 12.3M/27.0M [00:01<00:01]",
        "Writing model shards: 100%|██████████| 1/1 [00:00<00:00, 799.52it/s]",
        "Loading weights: 100%|██████████| 200/200 [00:00<00:00, 799.52it/s]",
        "Map (num_proc=4):  50%|█████     | 500/1000 [00:00<00:00, 799.52 examples/s]",
        "Validation DataLoader 0:  50%|█████     | 5/10 [00:00<00:00, 9.8it/s]",
        "[GPU0] Batchsize: 32 | Steps: 16",
        "step time 0.25 s",
        "step 0.5",
        "took 3 steps in 2 epochs",
        "multistep 3 footstep 4 limit 5",
        "it 3rd",
        "loss 3.0",
    ],
)
def test_what_only_looks_like_it_is_left_alone(line: str) -> None:
    assert guess.of_text(line) is None


def test_of_a_bar_that_draws_itself_anew_the_last_state_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    states = "".join(f"\r {n}%|{'█' * (n // 10)}| {n}/100 [00:0{n % 10}<00:09]" for n in range(100))
    log.write_text("x" * 50_000 + "\n" + states * 5)
    assert guess.of_file(str(log)) == found(99, 100)
    assert guess.of_file(str(tmp_path / "none")) is None


def test_a_guess_in_words_says_that_it_is_one() -> None:
    assert guess.words(found(37, 100, 3, 0.21234)) == "~step 37/100, epoch 3, loss 0.2123"
    assert guess.words(found(epoch=3)) == "~epoch 3"
