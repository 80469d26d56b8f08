"""TensorBoard's curves never end or hold up a training."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from nodekit.training.curves import Curves


def test_points_that_came_before_tensorboard_are_drawn_too(tmp_path: Path) -> None:
    curves = Curves(tmp_path, first_step=1)
    for step in range(1, 4):
        curves.add(step, {"loss": 1 / step})
    curves.close()
    (events,) = tmp_path.glob("events.*")
    assert events.read_bytes().count(b"loss") == 3


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    curves = Curves(tmp_path / "file" / "curves", first_step=1)
    curves.settle()
    curves.add(1, {"loss": 1.0})
    curves.close()
    assert "no TensorBoard curves" in caplog.text


def test_a_disk_that_is_full_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    curves = Curves(tmp_path, first_step=1)
    curves.settle()
    curves._writer = SimpleNamespace(add_scalar=full, close=full)  # type: ignore[assignment]
    curves.add(1, {"loss": 1.0})
    curves.add(2, {"loss": 1.0})
    curves.close()
    assert caplog.text.count("is no longer written: [Errno 28]") == 1
