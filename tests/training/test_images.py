"""The task images: a folder for each class, STL10's files, what is wrong with one, and training on them."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nodekit.training import Task
from nodekit.training.tasks import TaskError, load_task
from nodekit.training.tasks.images import Images, _Files

COLOURS = {"猫 cat's": (250, 10, 10), "dog $HOME": (10, 10, 250)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "it's $HOME; data"
    path.mkdir()
    return path


def draw(folder: Path, num: int, *, size: tuple[int, int] = (40, 30), suffix: str = ".png") -> None:
    """As many images of each class, of one colour."""
    image = pytest.importorskip("PIL.Image")
    for label, colour in COLOURS.items():
        (folder / label).mkdir(parents=True)
        for number in range(num):
            image.new("RGB", size, colour).save(folder / label / f"{number}{suffix}")


def test_a_folder_for_each_class(folder: Path) -> None:
    draw(folder / "train", 5)
    draw(folder / "val", 2, suffix=".JPG")
    draw(folder / "test", 1, size=(10, 50))
    (folder / "train" / "猫 cat's" / "notes.txt").touch()
    (folder / "train" / "猫 cat's" / "._0.png").touch()
    (folder / "train" / ".cache").mkdir()
    task = load_task("images", data=str(folder), image_size=16)
    assert isinstance(task, Images)
    assert isinstance(task, Task)
    assert task.labels == ("dog $HOME", "猫 cat's")
    assert task.notes() == []
    train, dev, test = task.train_data(), task.test_data(), task.final_data()
    assert (len(train), len(dev), len(test)) == (10, 4, 2)
    pixels, label = train[9]
    assert (pixels.shape, pixels.dtype, label) == ((3, 16, 16), torch.float32, torch.tensor(1))
    assert pixels[:, 3, 3].tolist() == pytest.approx([250 / 127.5 - 1, *[10 / 127.5 - 1] * 2])
    assert task.predict(task.model(), (pixels[None], label[None])).shape == (1, 2)


@pytest.mark.parametrize(
    ("mode", "suffix"), [("I;16", ".png"), ("I;16", ".tif"), ("I;16B", ".tiff"), ("I", ".pgm")]
)
def test_grey_of_16_bits_is_scaled_to_8(folder: Path, mode: str, suffix: str) -> None:
    """Pillow's own conversion cuts each value above 255: what is left is white."""
    image = pytest.importorskip("PIL.Image")
    draw(folder, 2)
    values = np.array([[0, 257 * 17], [257 * 254, 65535]])
    pixels = values.astype({"I": "<i4", "I;16": "<u2", "I;16B": ">u2"}[mode]).tobytes()
    path = folder / "dog $HOME" / f"0{suffix}"
    image.frombytes(mode, (2, 2), pixels).save(path)
    wanted = torch.tensor([[0, 17], [254, 255]]).expand(3, 2, 2) / 127.5 - 1
    assert _Files([(path, 0)], 2)[0][0].equal(wanted)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_whose_range_is_unknown_is_refused(folder: Path, mode: str) -> None:
    image = pytest.importorskip("PIL.Image")
    path = folder / "0.tif"
    image.new(mode, (2, 2), 300).save(path)
    with pytest.raises(
        TaskError, match=rf"0.tif has pixels of Pillow's mode {mode}, .*: convert it to 8 or 16 bits"
    ):
        _Files([(path, 0)], 2)[0]


def test_folders_of_classes_alone_are_divided(folder: Path) -> None:
    draw(folder, 25)
    task = Images(data=folder)
    assert (len(task.train_data()), len(task.test_data()), len(task.final_data())) == (46, 4, 4)
    (note,) = task.notes()
    assert note.endswith("has no val nor test: 8% of its images (4) are held out for it")
    assert task.train_data()[0][0].shape == (3, 96, 96)


def test_stl10_as_torchvision_downloads_it(folder: Path) -> None:
    binary = folder / "stl10_binary"
    binary.mkdir()
    for split, numbers in (("train", [1, 2, 10]), ("test", [10, 3])):
        pixels = np.zeros((len(numbers), 3, 96, 96), np.uint8)
        pixels[:, 2, 5, 7] = 255  # column 5, row 7
        pixels.tofile(binary / f"{split}_X.bin")
        np.array(numbers, np.uint8).tofile(binary / f"{split}_y.bin")
    (binary / "class_names.txt").write_text("airplane\nbird\n")
    for data in (folder, binary):
        task = Images(data=data)
        assert task.labels == ("airplane", "bird", *map(str, range(3, 11)))
        train, test = task.train_data(), task.final_data()
        assert [int(train[number][1]) for number in range(3)] == [0, 1, 9]
        assert [int(test[number][1]) for number in range(2)] == [9, 2]
        assert train[0][0].argmax() == (2 * 96 + 7) * 96 + 5
    small = Images(data=folder, image_size=32).train_data()[0][0]
    assert small.shape == (3, 32, 32)
    with (binary / "test_X.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(
        TaskError, match=r"test_X.bin has 55297 bytes and .*test_y.bin 2 labels: wanted 27648"
    ):
        Images(data=folder)
    (binary / "test_y.bin").unlink()
    with pytest.raises(TaskError, match=r"has no test_y.bin: wanted STL10's train_X.bin"):
        Images(data=folder)


def test_it_learns_what_the_images_show(folder: Path) -> None:
    draw(folder / "train", 8)
    draw(folder / "val", 4)
    torch.manual_seed(0)
    task = Images(data=folder, image_size=32)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    train, test = (
        torch.utils.data.default_collate([data[i] for i in range(len(data))])  # type: ignore[arg-type]
        for data in (task.train_data(), task.test_data())
    )
    for _ in range(10):
        task.loss(model, train).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert (task.predict(model, test).argmax(1) == test[1]).all()


def test_an_image_that_cannot_be_read_is_named_and_only_a_damaged_one_is_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "0.png"
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    image.fromarray(noise).save(path)
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") - 2] //= 2  # so that the next chunk begins within this one
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"0\.png cannot be read \(broken PNG .*\): remove it or fetch it again"
    ):
        _Files([(path, 0)], 8)[0]

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(image, "open", fail)
    with pytest.raises(
        ValueError, match=r"0\.png cannot be read \(.*Too many open files.*\): wanted a file that"
    ):
        _Files([(path, 0)], 8)[0]


def test_what_is_not_as_it_should_be_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match=r"the task images needs --data: a folder with train/CLASS/…"):
        Images()
    with pytest.raises(TaskError, match="no folder nowhere for the data, from /"):
        Images(data="nowhere")
    with pytest.raises(TaskError, match="has no folders: wanted one for each class"):
        Images(data=folder)
    draw(folder / "train", 1)
    draw(folder / "val", 1)
    (folder / "val" / "bird").mkdir()
    with pytest.raises(TaskError, match=r"bird has no images: wanted files that end in .jpg"):
        Images(data=folder)
    (folder / "val" / "bird" / "0.png").write_bytes(b"no image")
    with pytest.raises(
        TaskError, match=r"bird: found a class that train has not, wanted dog \$HOME, 猫 cat's"
    ):
        Images(data=folder)
    (folder / "val" / "bird").rename(folder / "train" / "bird")
    with pytest.raises(ValueError, match=r"0.png cannot be read \(.*\): remove it or fetch it again"):
        Images(data=folder).train_data()[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(TaskError, match=r"reads its files by Pillow: pip install pillow"):
        Images(data=folder)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "PIL" or None)
    with pytest.raises(TaskError, match=r"--model resnet18: .* from torchvision: pip install torchvision"):
        Images(data=folder, model="resnet18")


def test_a_torchvision_that_is_not_for_this_torch_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(folder / "data", 2)
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"  # as it is from PyPI, on the CPU's torch
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    with pytest.raises(
        TaskError, match=r"cannot be imported beside torch .*nms does not exist\): install the build"
    ):
        Images(data=folder / "data", model="resnet18")


# No build for the CPU alone can be had from PyPI. With the signatures of torchvision 0.28, and nothing else.
TORCHVISION_MODELS = """
import sys
from torch import nn

def list_models(module=None, include=None, exclude=None):
    assert module is sys.modules[__name__], module
    return ["alexnet", "resnet18"]

def get_model_builder(name):
    return {"resnet18": resnet18}[name]

def resnet18(*, weights=None, progress=True, num_classes=1000):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))
"""


def test_a_model_of_torchvision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(folder / "data", 2)
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").touch()
    (folder / "torchvision" / "models.py").write_text(TORCHVISION_MODELS)
    monkeypatch.syspath_prepend(folder)
    for name in ("torchvision", "torchvision.models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    task = Images(data=folder / "data", model="resnet18", image_size=64)
    model = task.model()
    assert task.predict(model, (task.train_data()[0][0][None].repeat(2, 1, 1, 1), torch.zeros(2))).shape == (
        2,
        2,
    )
    with pytest.raises(TaskError, match="torchvision has no such model; it has alexnet, "):
        Images(data=folder / "data", model="resnet17")
    for name in ("torchvision", "torchvision.models"):
        sys.modules.pop(name, None)
