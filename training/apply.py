"""``python -m nodekit.training.apply FOLDER``: test trained weights, or have them label texts; one process."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from nodekit.training.tasks import Task

_NAME = "python -m nodekit.training.apply"
_BATCH = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the result; gives the exit status, 2 for what is not right in the folder, the data or the texts."""
    parser = argparse.ArgumentParser(
        prog=_NAME, description="Test trained weights, or have them label texts."
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="that a run has written: its output/best or output/last"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--test", action="store_true", help="on the task's test split")
    what.add_argument("--predict", action="store_true", help="texts, a JSON list of them on stdin")
    parser.add_argument(
        "--json", action="store_true", help="of --test, the numbers; --predict gives JSON always"
    )
    given = parser.parse_args(arguments)
    try:
        texts = _texts(sys.stdin.read()) if given.predict else []
        with contextlib.redirect_stdout(sys.stderr):  # what a task prints is no part of the result
            task, module, facts = load(given.folder)
            found = test(task, module) if given.test else predict(task, module, texts)
    except (ValueError, FileNotFoundError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 2
    told = {"task": facts["task"], "step": facts.get("step"), "epoch": facts.get("epoch"), **found}
    print(json.dumps(told) if given.json or given.predict else _as_text(told))
    return 0


def load(folder: Path) -> "tuple[Task, torch.nn.Module, dict[str, Any]]":
    """The task of a folder, its model with the folder's weights on the device there is, and the folder's facts.

    Raises:
        ValueError: the folder is none, or the task is not as it was.
    """
    import torch

    from nodekit.training.tasks import load_task
    from nodekit.training.weights.export import load_weights, read_facts, read_weights

    facts = read_facts(folder)
    # What the task has exported is all it needs of a model: vocabulary, sizes, the order of the labels.
    model = folder if (folder / "config.json").is_file() else facts.get("model")
    task = load_task(facts["task"], data=facts.get("data"), model=model)
    module = task.model()
    load_weights(module, read_weights(folder), ignore_mismatched_sizes=False)
    return task, module.to("cuda" if torch.cuda.is_available() else "cpu").eval(), facts


def test(task: "Task", module: "torch.nn.Module") -> dict[str, Any]:
    """How good the weights are on ``final_data()``.

    Returns:
        ``num``, and with a task that has ``predict`` and ``targets``: ``accuracy``; ``classes``, each with its
        ``label``, ``precision``, ``recall``, ``f1`` and ``support``; ``macro`` and ``weighted`` means of these;
        ``confusion``, rows of what is right by columns of what was said. With another: ``means`` of what it measures,
        and what it ``lacks``.

    Raises:
        ValueError: there is no test data, or what the task gives does not fit together.
    """
    import torch
    from torch.utils.data import DataLoader

    from nodekit.training.evaluate import to_device

    data = getattr(task, "final_data", task.test_data)()
    if not len(data):
        raise ValueError("the test data has no samples: wanted one or more")
    loader = DataLoader(data, batch_size=_BATCH, collate_fn=getattr(task, "collate", None))
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    lacks = [name for name in ("predict", "targets") if not callable(getattr(task, name, None))]
    sums: dict[str, float] = {}
    said: list[torch.Tensor] = []
    right: list[torch.Tensor] = []
    num_classes = 0
    with torch.no_grad():
        for batch in loader:
            moved = to_device(batch, device)
            if lacks:
                for name, value in task.measure(module, moved).items():  # type: ignore[attr-defined]
                    sums[name] = sums.get(name, 0.0) + float(value)
                continue
            scores, targets = task.predict(module, moved), task.targets(moved)  # type: ignore[attr-defined]
            if scores.ndim != 2 or targets.shape != scores.shape[:1]:
                raise ValueError(
                    f"the task's predict gives {tuple(scores.shape)} and its targets {tuple(targets.shape)}: "
                    "wanted (num, num_classes) and (num,)"
                )
            num_classes = scores.shape[1]
            said.append(scores.argmax(1).cpu())
            right.append(targets.cpu())
    if lacks:
        return {
            "num": len(data),
            "means": {name: value / len(data) for name, value in sums.items()},
            "lacks": lacks,
        }
    return _report(torch.cat(right).tolist(), torch.cat(said).tolist(), _labels(task, num_classes))


def predict(task: "Task", module: "torch.nn.Module", texts: Sequence[str]) -> dict[str, Any]:
    """The ``labels``, and in ``texts`` for each text its ``label``, that one's ``probability``, and ``probabilities``.

    Raises:
        ValueError: the task has no texts.
    """
    import torch

    from nodekit.training.evaluate import to_device

    lacks = [name for name in ("encode", "predict") if not callable(getattr(task, name, None))]
    if lacks:
        raise ValueError(
            f"this task takes no texts: it lacks {' and '.join(f'{name}()' for name in lacks)} "
            "(see nodekit.training.Task; the task text has them)"
        )
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    rows: list[list[float]] = []
    with torch.no_grad():
        for start in range(0, len(texts), _BATCH):
            batch = to_device(task.encode(texts[start : start + _BATCH]), device)  # type: ignore[attr-defined]
            scores = task.predict(module, batch)  # type: ignore[attr-defined]
            rows += scores.double().softmax(1).tolist()
    labels = _labels(task, len(rows[0]))
    return {
        "labels": labels,
        "texts": [
            {
                "text": text,
                "label": labels[row.index(max(row))],
                "probability": max(row),
                "probabilities": row,
            }
            for text, row in zip(texts, rows, strict=True)
        ],
    }


def _texts(content: str) -> list[str]:
    try:
        texts = json.loads(content)
    except ValueError as error:
        raise ValueError(f"stdin is no JSON ({error}): wanted a list of texts") from error
    if not (
        isinstance(texts, list) and texts and all(isinstance(text, str) and text.strip() for text in texts)
    ):
        raise ValueError("stdin has no JSON list of texts, one or more, none empty")
    return texts


def _labels(task: "Task", num_classes: int) -> list[str]:
    labels = [str(label) for label in getattr(task, "labels", range(num_classes))]
    if len(labels) != num_classes:
        raise ValueError(
            f"the task has {len(labels)} labels and its predict {num_classes} classes: wanted as many"
        )
    return labels


def _report(right: Sequence[int], said: Sequence[int], labels: Sequence[str]) -> dict[str, Any]:
    """scikit-learn's numbers; a class that was never said, or is never right, has 0 where it would divide by 0."""
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    classes = range(len(labels))
    if odd := {each for each in right if each not in classes}:
        raise ValueError(f"the task's targets have the class {min(odd)}: wanted 0 to {len(labels) - 1}")

    def numbers(average: str | None) -> Any:
        return precision_recall_fscore_support(right, said, labels=classes, average=average, zero_division=0)

    def named(values: Sequence[Any]) -> dict[str, float]:
        return dict(zip(("precision", "recall", "f1"), map(float, values), strict=False))

    return {
        "num": len(right),
        "accuracy": sum(a == b for a, b in zip(right, said, strict=True)) / len(right),
        "classes": [
            {"label": label, **named(values), "support": int(values[3])}
            for label, values in zip(labels, zip(*numbers(None), strict=True), strict=True)
        ],
        "macro": named(numbers("macro")),
        "weighted": named(numbers("weighted")),
        "confusion": confusion_matrix(right, said, labels=classes).tolist(),
    }


def _as_text(told: dict[str, Any]) -> str:
    """The numbers, in columns with tabs between; `kit test` has them aligned."""
    if "lacks" in told:
        return "\n".join(f"{name}\t{value:.4f}" for name, value in told["means"].items())
    lines = ["\tprecision\trecall\tf1\tsupport"]
    summed = [{"label": name, **told[name], "support": told["num"]} for name in ("macro", "weighted")]
    for each in [*told["classes"], *summed]:
        lines.append(
            f"{each['label']}\t{each['precision']:.4f}\t{each['recall']:.4f}\t{each['f1']:.4f}\t{each['support']}"
        )
    lines.append(f"accuracy\t{told['accuracy']:.4f}")
    lines.append("\t".join(["right \\ said", *(each["label"] for each in told["classes"])]))
    for each, row in zip(told["classes"], told["confusion"], strict=True):
        lines.append("\t".join([each["label"], *map(str, row)]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
