"""The task mnist: IDX files as published, plain and gzipped, what is wrong with one, and training on them."""

import gzip
import struct
from pathlib import Path

import pytest
import torch

from nodekit.training import Task
from nodekit.training.tasks import TaskError, load_task
from nodekit.training.tasks.digits import Digits
from nodekit.training.tasks.mnist import Mnist

IMAGES, LABELS = "{}-images-idx3-ubyte", "{}-labels-idx1-ubyte"


def idx(magic: int, sizes: list[int], content: bytes) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + content


def write(folder: Path, split: str, labels: list[int], *, side: int = 28) -> None:
    """Images whose brightest row is told by the label."""
    images = torch.zeros(len(labels), side, side, dtype=torch.uint8)
    for i, label in enumerate(labels):
        images[i, 2 * label + 3] = 255 - i % 2
    sizes = [len(labels), side, side]
    (folder / IMAGES.format(split)).write_bytes(idx(0x803, sizes, images.numpy().tobytes()))
    (folder / LABELS.format(split)).write_bytes(idx(0x801, sizes[:1], bytes(labels)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty training and twenty test samples."""
    path = tmp_path / "it's $HOME; data"
    path.mkdir()
    write(path, "train", [i % 10 for i in range(40)])
    write(path, "t10k", [i % 10 for i in range(20)])
    return path


def test_without_a_folder_it_is_the_digits() -> None:
    task, digits = load_task("mnist"), Digits()
    assert isinstance(task, Mnist)
    assert isinstance(task, Task)
    assert torch.equal(task.train_data().images, digits.train_data().images)
    assert len(task.test_data()) == 360
    assert task.model()(task.test_data()[0][0][None]).shape == (1, 10)
    (note,) = task.notes()
    assert "trains scikit-learn's 1,797 digits of 8 × 8 pixels, not MNIST: give --data" in note


@pytest.mark.parametrize("zipped", [False, True])
def test_files_give_images_and_labels_in_their_order(folder: Path, zipped: bool) -> None:
    if zipped:
        for path in list(folder.iterdir()):
            (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
            path.unlink()
    if zipped:  # where torchvision's MNIST(root) has downloaded them to
        (folder / "MNIST").mkdir()
        (folder / "MNIST" / "raw").mkdir()
        for path in folder.glob("*.gz"):
            path.rename(folder / "MNIST" / "raw" / path.name)
    task = Mnist(data=folder)
    assert task.notes() == []
    train, test = task.train_data(), task.test_data()
    assert (len(train), len(test)) == (40, 20)
    assert train.labels.tolist() == [i % 10 for i in range(40)]
    image, label = train[13]
    assert (image.dtype, image.shape, label.dtype) == (torch.float32, (1, 28, 28), torch.int64)
    assert image[0, 9].tolist() == [pytest.approx(254 / 255)] * 28  # label 3, an odd place
    assert image.sum() == image[0, 9].sum()


def test_it_learns_what_the_files_show(folder: Path) -> None:
    torch.manual_seed(0)
    task = Mnist(data=str(folder))
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    train, test = (
        torch.utils.data.default_collate([data[i] for i in range(len(data))])
        for data in (task.train_data(), task.test_data())
    )
    assert (task.predict(model, test).argmax(1) == test[1]).sum() < 10
    for _ in range(15):
        task.loss(model, train).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert (task.predict(model, test).argmax(1) == test[1]).sum() == 20


TRAIN_IMAGES, TRAIN_LABELS = IMAGES.format("train"), LABELS.format("train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TRAIN_IMAGES, None, "has no train-images-idx3-ubyte, nor train-images-idx3-ubyte.gz: wanted MNIST's four"),
        (TRAIN_IMAGES, b"", "has 0 bytes: wanted a header of 16; fetch it again"),
        (TRAIN_IMAGES, idx(0x801, [40, 28, 28], bytes(40 * 784)), "magic number 0x00000801: wanted 0x00000803"),
        (TRAIN_IMAGES, gzip.compress(bytes(99), mtime=0), "0x00000803; it is gzipped: name it .gz"),
        (TRAIN_IMAGES, idx(0x803, [40, 28, 28], bytes(31359)), "has 31359 bytes after its header, which says 40 × 28"),
        (TRAIN_IMAGES, idx(0x803, [40, 28, 28], bytes(31361)), "has 31361 bytes .* 40 × 28 × 28: wanted 31360; fetch"),
        (TRAIN_IMAGES, idx(0x803, [40, 14, 14], bytes(40 * 196)), "has images of 14 × 14 pixels: wanted 28 × 28"),
        (TRAIN_IMAGES, idx(0x803, [39, 28, 28], bytes(39 * 784)), "has 39 images and .* 40 labels: wanted as many"),
        (TRAIN_LABELS, idx(0x803, [40], bytes(40)), "magic number 0x00000803: wanted 0x00000801"),
        (TRAIN_LABELS, idx(0x801, [40], b"\x0a" * 40), "has the label 10: wanted 0 to 9"),
        (TRAIN_LABELS, b"\0\0\x08", "has 3 bytes: wanted a header of 8"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_as_it_should_be_is_refused(
    folder: Path, name: str, content: bytes | None, message: str
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(TaskError, match=message) as refused:
        Mnist(data=folder)
    assert name in str(refused.value)


@pytest.mark.parametrize("content", [gzip.compress(bytes(28), mtime=0)[:-9], b"no gzip", b""])
def test_a_damaged_gzip_file_is_refused(folder: Path, content: bytes) -> None:
    path = folder / LABELS.format("t10k")
    path.unlink()
    (folder / f"{path.name}.gz").write_bytes(content)
    with pytest.raises(TaskError, match=r"t10k-labels-idx1-ubyte\.gz (is damaged|has 0 bytes)"):
        Mnist(data=folder)


def test_no_samples_and_no_folder_are_refused(folder: Path) -> None:
    write(folder, "t10k", [])
    with pytest.raises(TaskError, match="t10k-labels-idx1-ubyte has no labels: wanted one or more"):
        Mnist(data=folder)
    with pytest.raises(TaskError, match="no folder nowhere for the data, from /"):
        Mnist(data="nowhere")
