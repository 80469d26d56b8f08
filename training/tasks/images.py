"""The task images: classify images from a folder per class, or STL10, by a small network or one of torchvision."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from nodekit.training.tasks import TaskError
from nodekit.training.tasks.classifier import Classifier, Sample
from nodekit.training.tasks.rows import HELD_OUT, held_out

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
"""Suffixes of image files, in lower or upper case."""

_EVALUATED = ("val", "valid", "validation", "dev", "test")
"""Folders for the evaluation; the first one that exists is used. ``test`` is for ``final_data`` too."""
_STL10_SIDE = 96
_OF_16_BITS = ("PNG", "PPM")
"""Formats whose 16-bit grey is Pillow's mode I (for PNG in older versions of Pillow); in others, mode I has 32 bits."""

Data = torch.utils.data.Dataset[Sample]
"""Images, float32 ``(3, size, size)`` in -1 to 1, and labels, int64."""


class Images(Classifier):
    """Images of any size, each scaled until its shorter side fits, and cut to the square in its middle."""

    def __init__(
        self, *, data: str | Path | None = None, model: str | None = None, image_size: int = _STL10_SIDE
    ) -> None:
        """List the files.

        Args:
            data: a folder with ``train/CLASS/…`` and ``val/CLASS/…`` or ``test/CLASS/…`` (as for torchvision's
                ImageFolder), or with ``CLASS/…`` only, of which a share is held out; or STL10's ``stl10_binary``, or
                its parent folder.
            model: the name of one of torchvision's models; None: a small network.
            image_size: the side of the square, in pixels.

        Raises:
            TaskError: the folder has no such files, or a library is missing.
        """
        if data is None:
            raise TaskError(
                "the task images needs --data: a folder with train/CLASS/… and val/CLASS/…, or STL10's"
            )
        folder = Path(data)
        if not folder.is_dir():
            raise TaskError(f"no folder {folder} for the data, from {Path.cwd()}")
        self._size = image_size
        self._notes: list[str] = []
        binary = next(
            (each for each in (folder, folder / "stl10_binary") if (each / "train_X.bin").is_file()), None
        )
        if binary is None:
            self._read_folders(folder)
        else:
            self.labels, self._splits = _read_stl10(binary, image_size)
        self._torchvision = None if model is None else _torchvision(model)

    def model(self) -> nn.Module:
        """Return the network, with random weights and an output for each class."""
        if self._torchvision is not None:
            return cast(nn.Module, self._torchvision(num_classes=len(self.labels)))
        layers: list[nn.Module] = []
        # Group norm, so that no layer's result depends on how a batch is split over ranks.
        for before, after in ((3, 32), (32, 64), (64, 128), (128, 256)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, len(self.labels)))

    def train_data(self) -> Data:
        """Return the training images."""
        return self._splits["train"]

    def test_data(self) -> Data:
        """Return the images for the evaluation after each epoch."""
        return self._splits["dev"]

    def final_data(self) -> Data:
        """Return the images in ``test``, for `kit test`; if there is no such folder, those of ``test_data``."""
        return self._splits.get("test", self._splits["dev"])

    def notes(self) -> list[str]:
        """Return a remark if images for the evaluation were taken from the training images."""
        return self._notes

    def _read_folders(self, folder: Path) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise TaskError("the task images reads its files by Pillow: pip install pillow")
        train = folder / "train"
        evaluated = [folder / name for name in _EVALUATED if (folder / name).is_dir()]
        found = _by_class(train if train.is_dir() else folder)
        self.labels = tuple(found)
        files = [(path, number) for number, paths in enumerate(found.values()) for path in paths]
        if train.is_dir() and evaluated:
            self._splits = {"train": self._listed(files), "dev": self._listed(self._split(evaluated[0]))}
            if len(evaluated) > 1 and evaluated[-1].name == "test":
                self._splits["test"] = self._listed(self._split(evaluated[-1]))
            return
        if len(files) < 2:
            raise TaskError(f"{folder} has one image: wanted more, or val beside train")
        held = set(held_out(len(files)))
        self._notes = [
            f"{folder} has no val nor test: {HELD_OUT:.0%} of its images ({len(held):,}) are held out for it"
        ]
        self._splits = {
            "train": self._listed([each for number, each in enumerate(files) if number not in held]),
            "dev": self._listed([each for number, each in enumerate(files) if number in held]),
        }

    def _split(self, folder: Path) -> list[tuple[Path, int]]:
        """Return the files of another split, with the numbers of their classes; all must be classes of train."""
        found = _by_class(folder)
        if unknown := sorted(set(found) - set(self.labels)):
            raise TaskError(
                f"{folder / unknown[0]}: found a class that train has not, wanted {', '.join(self.labels)}"
            )
        return [(path, self.labels.index(label)) for label, paths in found.items() for path in paths]

    def _listed(self, files: Sequence[tuple[Path, int]]) -> Data:
        return _Files(files, self._size)


class _Files(torch.utils.data.Dataset[Sample]):
    """Image files; each is read when its sample is requested."""

    def __init__(self, files: Sequence[tuple[Path, int]], size: int) -> None:
        self._files, self._size = files, size

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image, ImageOps  # an extra

        path, label = self._files[index]
        try:
            with Image.open(path) as file:
                image = ImageOps.fit(_rgb(file, path), (self._size, self._size))
        except TaskError:
            raise
        except Exception as error:  # invalid bytes raise errors of many classes, a SyntaxError among them
            # An error with an errno comes from the disk, the permissions or a lack of descriptors.
            is_damaged = getattr(error, "errno", None) is None
            cure = "remove it or fetch it again" if is_damaged else "wanted a file that this user can read"
            raise ValueError(f"{path} cannot be read ({error}): {cure}") from error
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.float() / 127.5 - 1, torch.tensor(label)


def _rgb(file: Any, path: Path) -> Any:
    """Return an open image of Pillow in 8 bits per colour; ``convert`` alone would turn most 16-bit grey white."""
    from PIL import Image  # an extra

    if file.mode.startswith("I;16") or (file.mode == "I" and file.format in _OF_16_BITS):
        return Image.fromarray((np.asarray(file) / 257).round().astype(np.uint8)).convert("RGB")
    if file.mode in ("I", "F"):
        raise TaskError(
            f"{path} has pixels of Pillow's mode {file.mode}, whose range is not known: convert it to 8 or 16 bits"
        )
    return file.convert("RGB")


class _Stl10(torch.utils.data.Dataset[Sample]):
    """STL10's images, uint8 ``(num, 3, column, row)``, read from their file when a sample is requested."""

    def __init__(self, pixels: "np.ndarray[Any, Any]", labels: torch.Tensor, size: int) -> None:
        self._pixels, self._labels, self._size = pixels, labels, size

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        pixels = torch.from_numpy(np.array(self._pixels[index])).transpose(1, 2).float() / 127.5 - 1
        if self._size != _STL10_SIDE:
            size = (self._size, self._size)
            pixels = functional.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
        return pixels, self._labels[index]


def _read_stl10(folder: Path, size: int) -> tuple[tuple[str, ...], dict[str, Data]]:
    """Return the names of STL10's classes, and its splits."""
    splits: dict[str, Data] = {}
    num_classes = 0
    for split, stem in (("train", "train"), ("dev", "test")):
        images, numbers = folder / f"{stem}_X.bin", folder / f"{stem}_y.bin"
        for path in (images, numbers):
            if not path.is_file():
                raise TaskError(
                    f"{folder} has no {path.name}: wanted STL10's train_X.bin, train_y.bin, test_X.bin, test_y.bin"
                )
        labels = torch.from_numpy(np.fromfile(numbers, np.uint8).astype(np.int64)) - 1
        shape = (len(labels), 3, _STL10_SIDE, _STL10_SIDE)
        if not len(labels) or images.stat().st_size != np.prod(shape):
            raise TaskError(
                f"{images} has {images.stat().st_size} bytes and {numbers} {len(labels)} labels: wanted "
                f"{3 * _STL10_SIDE**2} bytes for each label; fetch them again"
            )
        if int(labels.min()) < 0:
            raise TaskError(f"{numbers} has the label 0: wanted 1 and more")
        num_classes = max(num_classes, int(labels.max()) + 1)
        splits[split] = _Stl10(np.memmap(images, np.uint8, "r", shape=shape), labels, size)
    names = folder / "class_names.txt"
    labels_of = names.read_text(encoding="utf-8").split() if names.is_file() else []
    labels_of += [str(number + 1) for number in range(len(labels_of), num_classes)]
    return tuple(labels_of), splits


def _by_class(folder: Path) -> dict[str, list[Path]]:
    """Return class → its image files, both sorted by name."""
    found = {
        each.name: sorted(path for path in each.rglob("[!.]*") if path.suffix.lower() in SUFFIXES)
        for each in sorted(folder.iterdir())
        if each.is_dir() and not each.name.startswith(".")
    }
    if not found:
        raise TaskError(f"{folder} has no folders: wanted one for each class, with its images")
    if empty := [label for label, paths in found.items() if not paths]:
        raise TaskError(f"{folder / empty[0]} has no images: wanted files that end in {', '.join(SUFFIXES)}")
    return found


def _torchvision(name: str) -> Any:
    """Return torchvision's function that makes the model of this name."""
    if importlib.util.find_spec("torchvision") is None:
        raise TaskError(f"--model {name}: the task images takes it from torchvision: pip install torchvision")
    try:
        models = importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # RuntimeError: it is built for CUDA, and torch for the CPU
        raise TaskError(
            f"--model {name}: torchvision cannot be imported beside torch {torch.__version__} ({error}): install the "
            "build of both from one index, as https://download.pytorch.org/whl/cpu"
        ) from error
    names = models.list_models(module=models)
    if name not in names:
        raise TaskError(f"--model {name}: torchvision has no such model; it has {', '.join(names)}")
    return models.get_model_builder(name)
