"""The task mnist: MNIST, or data in its format (Fashion-MNIST, …), from four IDX files; without these, the digits."""

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import nn

from nodekit.training.tasks import TaskError
from nodekit.training.tasks.classifier import Sample
from nodekit.training.tasks.digits import Digits, Pixels

SIDE = 28
NUM_CLASSES = 10
_IMAGES, _LABELS = 0x0803, 0x0801
"""An IDX file's magic number, its first four bytes: two zeros, 8 for unsigned bytes, and the number of dimensions."""


class Mnist(Digits):
    """70,000 digits of 28 × 28 pixels from a folder; without a folder, ``Digits``, whose data needs no download."""

    def __init__(self, *, data: str | Path | None = None) -> None:
        """Read the files.

        Args:
            data: a folder with ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte``
                and ``t10k-labels-idx1-ubyte``, each plain or as .gz, or with these in ``MNIST/raw``, as torchvision's
                ``root`` has them. None: the digits.

        Raises:
            TaskError: a file is missing or invalid.
        """
        self._has_files = data is not None
        if data is None:
            super().__init__()
        else:
            self._train, self._test = _read_pair(Path(data), "train"), _read_pair(Path(data), "t10k")

    def notes(self) -> list[str]:
        """Return a remark if there is no folder, and so no MNIST."""
        if self._has_files:
            return []
        return [
            "--task mnist without --data trains scikit-learn's 1,797 digits of 8 × 8 pixels, not MNIST: give --data "
            "with the folder of its four IDX files"
        ]

    def model(self) -> nn.Module:
        """Return a network of two convolutions; without a folder, the model of the digits."""
        if not self._has_files:
            return super().model()
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (SIDE // 4) ** 2, 128),
            nn.ReLU(),
            nn.Linear(128, NUM_CLASSES),
        )


class _Bytes(Pixels):
    """Images kept as bytes, uint8 ``(num, 1, 28, 28)``, which take a quarter of the memory of float32."""

    def __getitem__(self, index: int) -> Sample:
        return self.images[index].float() / 255, self.labels[index]


def _read_pair(folder: Path, split: str) -> Pixels:
    """Return the images and labels of the split ``train`` or ``t10k``."""
    images_path = _find(folder, f"{split}-images-idx3-ubyte")
    labels_path = _find(folder, f"{split}-labels-idx1-ubyte")
    images, labels = _read_idx(images_path, _IMAGES), _read_idx(labels_path, _LABELS)
    if tuple(images.shape[1:]) != (SIDE, SIDE):
        found = " × ".join(str(size) for size in images.shape[1:])
        raise TaskError(f"{images_path} has images of {found} pixels: wanted {SIDE} × {SIDE}")
    if len(images) != len(labels):
        raise TaskError(
            f"{images_path} has {len(images)} images and {labels_path} {len(labels)} labels: wanted as many"
        )
    if not len(labels):
        raise TaskError(f"{labels_path} has no labels: wanted one or more")
    if int(labels.max()) >= NUM_CLASSES:
        raise TaskError(f"{labels_path} has the label {int(labels.max())}: wanted 0 to {NUM_CLASSES - 1}")
    return _Bytes(images.unsqueeze(1), labels.long())


def _find(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise TaskError(f"no folder {folder} for the data, from {Path.cwd()}")
    for each in (folder, folder / "MNIST" / "raw"):
        for path in (each / name, each / f"{name}.gz"):
            if path.is_file():
                return path
    raise TaskError(f"{folder} has no {name}, nor {name}.gz: wanted MNIST's four IDX files")


def _read_idx(path: Path, magic: int) -> torch.Tensor:
    """Return an IDX file's content, uint8 in its shape.

    The file has a magic number and the sizes, as big-endian 32-bit numbers, and then the bytes.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise TaskError(f"{path} is damaged or no gzip file ({error}): fetch it again") from error
    num_sizes = magic & 0xFF
    start = 4 + 4 * num_sizes
    if len(raw) < start:
        raise TaskError(f"{path} has {len(raw)} bytes: wanted a header of {start}; fetch it again")
    found, *sizes = (int.from_bytes(raw[at : at + 4], "big") for at in range(0, start, 4))
    if found != magic:
        hint = "; it is gzipped: name it .gz" if raw[:2] == b"\x1f\x8b" else ""
        raise TaskError(f"{path} begins with the magic number {found:#010x}: wanted {magic:#010x}{hint}")
    if len(raw) != start + math.prod(sizes):
        said = " × ".join(str(size) for size in sizes)
        raise TaskError(
            f"{path} has {len(raw) - start} bytes after its header, which says {said}: wanted "
            f"{math.prod(sizes)}; fetch it again"
        )
    # Copy, since torch wants a writable buffer, and include the header, since torch.frombuffer refuses an empty buffer.
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)[start:].view(sizes)
