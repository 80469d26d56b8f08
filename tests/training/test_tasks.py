"""Tasks: finding one by its name, refusing what is none, and the digits."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nodekit.training import Task
from nodekit.training.errors import TrainingError
from nodekit.training.options.arguments import parse
from nodekit.training.rank import check
from nodekit.training.tasks import TaskError, load_task, optimizer_of, task_of
from nodekit.training.tasks.digits import Digits

OWN = """
from own_sibling import NUMBER
class Half:
    def model(self): ...
    def loss(self, model, batch): ...
class Own(Half):
    number = NUMBER
    def train_data(self): ...
    def test_data(self): ...
    def measure(self, model, batch): ...
class Needy(Own):
    def __init__(self, path): ...
own = Own()
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task of the user's, which is the working folder."""
    folder = tmp_path / "it's $HOME; here"
    folder.mkdir()
    (folder / "own_task.py").write_text(OWN)
    (folder / "own_sibling.py").write_text("NUMBER = 7\n")
    (folder / "own_broken.py").write_text("import own_missing_dependency\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own_task", "own_sibling", "own_broken", "own_named"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


@pytest.mark.parametrize(
    "name", ["own_task:Own", "own_task.py:Own", "{folder}/own_task.py:Own", "own_task:own"]
)
def test_a_users_own_task_is_found(code: Path, name: str) -> None:
    task = load_task(name.replace("{folder}", str(code)))
    assert isinstance(task, Task)
    assert task.number == 7  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "digit",
            "no task 'digit': it is one of digits, mnist, images, text, or yours as package.module:Task",
        ),
        ("own_task.py", "no task 'own_task.py'"),
        (":Own", "no task ':Own'"),
        ("nowhere.py:Own", "no file nowhere.py"),
        ("own_nowhere:Own", "no module 'own_nowhere'"),
        ("own_nowhere.deep:Own", "no module 'own_nowhere'"),
        ("own_task:Other", "own_task has no Other; its classes are: Half, Own, Needy"),
        (
            "own_task:Half",
            r"lacks train_data\(\), test_data\(\), predict\(\) and targets\(\), or measure\(\) \(see",
        ),
        ("own_task:Needy", "without arguments: missing a required argument: 'path'"),
    ],
)
def test_what_is_no_task_is_refused_with_what_was_wanted(code: Path, name: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_task(name)


def test_an_optimizer_that_computes_the_loss_itself_is_refused() -> None:
    task = Digits()
    task.optimizer = lambda module, lr: torch.optim.LBFGS(module.parameters(), lr=lr)  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match=r"LBFGS, which computes the loss again .* wanted one"):
        optimizer_of(task, task.model(), 0.1)


def test_what_a_task_does_not_take_is_named_alone() -> None:
    with pytest.raises(TaskError, match=r"^the task mnist takes no --model, --image-size$"):
        load_task("mnist", data="somewhere", model="resnet18", image_size=64)


def test_sizes_that_may_differ_are_the_loops_where_the_class_loads_no_weights(code: Path) -> None:
    (code / "own_named.py").write_text(
        "from own_task import Own\n"
        "class Named(Own):\n"
        "    def __init__(self, *, model=None): self.name = model\n"
        "class Loading(Named):\n"
        "    def __init__(self, *, ignore_mismatched_sizes=False, **given):\n"
        "        super().__init__(**given)\n"
        "        self.ignores = ignore_mismatched_sizes\n"
    )
    given = ["--model", "resnet18", "--ignore-mismatched-sizes", "--task"]

    def made(name: str, *start: str) -> Any:
        return task_of(parse([*start, *given, f"own_named:{name}"], {}))

    for start in ("--init-from", "--resume-from"):
        assert made("Named", start, "weights.pt").name == "resnet18"
        assert made("Loading", start, "weights.pt").ignores
    assert made("Loading").ignores
    with pytest.raises(TaskError, match=r"^the task own_named:Named takes no --ignore-mismatched-sizes$"):
        made("Named")


def test_a_task_may_split_its_data_at_random_by_the_seed(code: Path) -> None:
    (code / "own_split.py").write_text(
        "import random\nimport numpy as np\nimport torch\n"
        "from own_task import Own\n"
        "class Split(Own):\n"
        "    def __init__(self): self.order = [random.random(), np.random.rand(), float(torch.rand(()))]\n"
    )

    def order(seed: int) -> list[float]:
        _, task = check(parse(["--task", "own_split.py:Split", "--seed", str(seed)], {}), {})
        return task.order  # type: ignore[attr-defined, no-any-return]

    assert order(1) == order(1)
    assert all(one != other for one, other in zip(order(1), order(2), strict=True))


def test_a_module_that_is_missing_below_the_users_own_is_not_mistaken_for_it(code: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="own_missing_dependency"):
        load_task("own_broken:Own")


def test_digits_are_the_real_ones_split_once_for_all() -> None:
    task, again = Digits(), Digits()
    train, test = task.train_data(), task.test_data()
    assert (len(train), len(test)) == (1437, 360)
    assert torch.equal(train.images, again.train_data().images)
    images = torch.cat([train.images, test.images])
    assert len(images) == 1797
    assert images.shape[1:] == (1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    labels = torch.cat([train.labels, test.labels])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as published


def test_digits_are_read_without_importing_sklearn() -> None:
    code = (
        "import sys; from nodekit.training.tasks import load_task; load_task('digits').train_data()\n"
        "heavy = {'sklearn', 'scipy', 'yaml', 'pydantic', 'paramiko', 'tensorboard'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
