"""The protocol of a task (data, model and loss), and loading a task by its name."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nodekit.training.errors import TrainingError

if TYPE_CHECKING:  # `kit up` checks rows of text (rows.py) on machines without torch
    import torch

    from nodekit.training.options.options import Options

BUILT_IN = {
    "digits": "nodekit.training.tasks.digits:Digits",
    "mnist": "nodekit.training.tasks.mnist:Mnist",
    "images": "nodekit.training.tasks.images:Images",
    "text": "nodekit.training.tasks.text:Text",
}
"""Name for ``--task`` → the task's class, as ``module:Class``."""
IMPORTS = {
    "text": ("transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert"),
}
"""Name → modules that the task imports when it and its model are made, which takes seconds."""
GIVEN = ("data", "model", "max_length", "image_size")
"""Options that, if given, are passed to the task's class as keywords."""


@runtime_checkable
class Task(Protocol):
    """Model, data and loss, for ``--task``: any class with these methods whose constructor needs no arguments.

    To evaluate the model, a classification task has two more methods:

    - ``predict(model, batch) -> scores``: before softmax, float ``(num, num_classes)``.
    - ``targets(batch) -> classes``: the right classes, int64 ``(num,)``. Accuracy, loss and macro F1 are computed from
      all ranks' predictions, each sample counted once.

    Any other task has one more method:

    - ``measure(model, batch) -> dict[str, Tensor | float]``: *sums* over the batch's samples by name. They are added up
      over all batches and ranks and divided by the number of test samples, so each sample counts once.

    The following are optional. For training:

    - ``optimizer(model, lr) -> torch.optim.Optimizer``; default: AdamW, ``fused=True`` on GPUs. The model may be on the
      CPU, before an engine moves it to the device.
    - ``collate(samples) -> batch``; default: torch's.
    - ``notes() -> list[str]``: remarks on the data for the user; rank 0 prints them, and ``result.json`` has them.

    For `kit test` and `kit predict`, with trained weights:

    - ``labels``: the names of the classes, a sequence of strings; default: their numbers.
    - ``final_data()``: the samples to test on at the end; default: ``test_data()``.
    - ``encode(texts) -> batch``: texts as ``predict`` takes them, where a sample is a text.
    - ``export(folder)``: writes files that belong to the weights. If one is ``config.json``, the task is created again
      with that folder as its ``model``.

    A rank of a node that joins a run calls ``model``, ``train_data`` and ``loss`` once before its attempt is known.

    Every rank creates its own task, with python's, numpy's and torch's generators seeded by ``--seed``, the same on all
    ranks, so that a random split of the data is the same too. Random values in ``__getitem__`` are the same after a
    resume only with ``--num-workers 0``.
    """

    def model(self) -> "torch.nn.Module":
        """Return the model, on the CPU; its weights may be random, since all ranks get rank 0's."""

    def train_data(self) -> Any:
        """Return the training samples: ``len(data)`` and ``data[i]``, the same on every rank."""

    def test_data(self) -> Any:
        """Return the samples to evaluate on after each epoch."""

    def loss(self, model: "torch.nn.Module", batch: Any) -> "torch.Tensor":
        """Return the mean loss over the batch's samples, a scalar; call ``model`` once."""


METHODS = ("model", "train_data", "test_data", "loss")
JUDGES = (("predict", "targets"), ("measure",))
"""Groups of methods for the evaluation; a task must have all methods of one group."""
MEASURES = ("accuracy", "loss", "f1")
"""The measures of a task without ``measure``."""


class TaskError(TrainingError):
    """The task cannot be found or used; the message says what was wanted."""


def load_task(name: str, *, if_taken: Collection[str] = (), **given: object) -> Task:
    """Load the task of a built-in name, ``package.module:Task`` or ``path/to/file.py:Task``.

    ``Task`` is a class (or a function) that can be called without arguments, or an object that is a task.

    Args:
        name: of the task.
        if_taken: names in ``given`` that are left out if the class does not accept them.
        given: ``data``, ``model`` and others, as keywords for the class; values None and False are left out.

    Raises:
        TaskError: there is no task of that name, it lacks a method, or its class does not accept a keyword.
    """
    where, _, attribute = BUILT_IN.get(name, name).rpartition(":")
    if not (where and attribute):
        raise TaskError(
            f"there is no task {name!r}: it is one of {', '.join(BUILT_IN)}, or yours as package.module:Task "
            "or path/to/file.py:Task"
        )
    module = _module_of_file(Path(where)) if where.endswith(".py") else _module_of_name(where)
    if not hasattr(module, attribute):
        own = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
        raise TaskError(f"{where} has no {attribute}; its classes are: {', '.join(own) or 'none'}")
    task: object = getattr(module, attribute)
    keywords = {key: value for key, value in given.items() if value is not None and value is not False}
    if inspect.isclass(task) or inspect.isfunction(task):
        takes = inspect.signature(task)
        try:
            takes.bind()
        except TypeError as error:
            raise TaskError(f"{name} must be callable without arguments: {error}") from error
        unknown = [key for key in keywords if not _binds(takes, key)]
        if refused := [key for key in unknown if key not in if_taken]:
            raise TaskError(f"the task {name} takes no {_options(refused)}")
        task = task(**{key: value for key, value in keywords.items() if key not in unknown})
    elif keywords:
        raise TaskError(f"the task {name} takes no {_options(keywords)}: it is an object, not a class")

    def lacks(method: str) -> bool:
        return not callable(getattr(task, method, None))

    lacking = list(filter(lacks, METHODS))
    if all(any(map(lacks, judges)) for judges in JUDGES):
        lacking.append("predict() and targets(), or measure")
    if lacking:
        raise TaskError(
            f"{name} lacks {', '.join(f'{method}()' for method in lacking)} (see nodekit.training.Task)"
        )
    return task  # type: ignore[return-value]  # just checked


def task_of(options: "Options") -> Task:
    """Return the task that the command line names.

    Raises:
        TaskError: see ``load_task``.
    """
    # Without --model, the option is about the weights of --init-from or --resume-from, which the loop loads.
    ignore = options.ignore_mismatched_sizes and options.model is not None
    given = {name: getattr(options, name) for name in GIVEN}
    if_taken = ("ignore_mismatched_sizes",) if options.init_from or options.resume_from else ()
    return load_task(options.task, if_taken=if_taken, **given, ignore_mismatched_sizes=ignore)


def optimizer_of(
    task: Task, module: "torch.nn.Module", lr: float, *, fused: bool = False
) -> "torch.optim.Optimizer":
    """Return the task's own optimizer, or AdamW, fused if ``fused``.

    Raises:
        TrainingError: the optimizer would compute the loss several times in a step.
    """
    import torch

    make = getattr(task, "optimizer", None)
    optimizer: torch.optim.Optimizer = (
        make(module, lr) if make else torch.optim.AdamW(module.parameters(), lr=lr, fused=fused or None)
    )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TrainingError(
            "the task's optimizer is LBFGS, which computes the loss again and again in each step: wanted one that "
            "takes gradients, such as AdamW"
        )
    return optimizer


def _binds(takes: inspect.Signature, keyword: str) -> bool:
    try:
        takes.bind(**{keyword: None})
    except TypeError:
        return False
    return True


def _options(keywords: Iterable[str]) -> str:
    return ", ".join(f"--{key.replace('_', '-')}" for key in keywords)


def _module_of_name(name: str) -> ModuleType:
    """Import a module by name, also from the working folder, as ``python -m`` does."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the task's module exists, but a module that it imports does not
        raise TaskError(f"no module {error.name!r} for the task {name}, from {Path.cwd()}") from error


def _module_of_file(path: Path) -> ModuleType:
    """Import a file, which can import from its own folder, as with ``python path/to/file.py``."""
    if not path.is_file():
        raise TaskError(f"no file {path} for the task, from {Path.cwd()}")
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # a data loader's workers look up the task's classes here
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module
