"""``python -m nodekit.training.apply FOLDER``: test trained weights, or label texts with them, in one process."""

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from nodekit.training.tasks import Task

_NAME = "python -m nodekit.training.apply"
_BATCH = 256
_PACKAGES = {"torch": "torch", "sklearn": "scikit-learn"}
"""Module → its package's name for pip."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the result, and return the exit status: 2 if the folder, the data or the texts are invalid."""
    parser = argparse.ArgumentParser(
        prog=_NAME, description="Test trained weights, or have them label texts."
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="that a run has written: its output/best or output/last"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--test", action="store_true", help="on the task's test split")
    what.add_argument(
        "--predict", metavar="TEXT", nargs="*", help="label these texts; without any, a JSON list on stdin"
    )
    parser.add_argument(
        "--data", metavar="DIR", help="the task's data, if they are not where the run had them"
    )
    parser.add_argument(
        "--json", action="store_true", help="of --test, the numbers; --predict gives JSON always"
    )
    given = parser.parse_args(arguments)
    try:
        if not all(text.strip() for text in given.predict or ()):
            raise ValueError("--predict: found an empty text, wanted some words")
        texts = given.predict or ([] if given.test else _texts(_stdin()))
        with contextlib.redirect_stdout(sys.stderr):  # what a task prints is not part of the result
            task, module, facts = load(given.folder, given.data)
            found = test(task, module) if given.test else predict(task, module, texts)
    except (ValueError, FileNotFoundError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (package := _PACKAGES.get(error.name or "")) is None:
            raise
        print(f"{_NAME}: {sys.executable} has no {error.name}: pip install {package}", file=sys.stderr)
        return 2
    result = {"task": facts["task"], "step": facts.get("step"), "epoch": facts.get("epoch"), **found}
    print(_printable(_as_text(result)) if given.test and not given.json else as_json(result))
    return 0


def as_json(result: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Return JSON for stdout; non-ASCII letters are escaped only if stdout's encoding lacks one of them."""
    from nodekit.training.reporting.metrics import finite

    result = finite(result)
    text = json.dumps(result, ensure_ascii=False, indent=indent)
    try:
        text.encode(_encoding())
    except UnicodeEncodeError:
        return json.dumps(result, indent=indent)
    return text


def load(folder: Path, data: str | None = None) -> "tuple[Task, torch.nn.Module, dict[str, Any]]":
    """Return a folder's task, its model with the folder's weights, on a GPU if there is one, and the folder's facts.

    Args:
        folder: of weights, as a run writes it.
        data: the task's data, in place of the run's.

    Raises:
        ValueError: no run has written the folder, or the task has changed.
    """
    from nodekit.training.process import rng
    from nodekit.training.process.devices import kind_here
    from nodekit.training.tasks import GIVEN, load_task
    from nodekit.training.weights.export import load_weights, read_facts, read_weights

    facts = read_facts(folder)
    # A task that has exported its configuration is made from it: vocabulary, sizes, the order of the labels.
    given: dict[str, Any] = {name: facts.get(name) for name in GIVEN}
    if data is not None:
        given["data"] = data
    if (folder / "config.json").is_file():
        given["model"] = folder
    rng.seed_all(facts.get("seed", 0), rank=0)  # as on the ranks: the task may split its data at random
    task = load_task(facts["task"], **given)
    labels = list(map(str, getattr(task, "labels", ())))
    trained_on = list(map(str, facts.get("labels", labels)))
    if labels != trained_on:
        raise ValueError(
            f"{folder} was trained on the labels {', '.join(trained_on)}, and the task has "
            f"{', '.join(labels) or 'none'} now: wanted data with the same ones (--data)"
        )
    module = task.model()
    load_weights(module, read_weights(folder), folder, ignore_mismatched_sizes=False)
    return task, module.to(kind_here()).eval(), facts


def test(task: "Task", module: "torch.nn.Module") -> dict[str, Any]:
    """Measure the weights on ``final_data()``.

    Returns:
        ``num``, and with a task that has ``predict`` and ``targets``: ``accuracy``; ``classes``, each with its
        ``label``, ``precision``, ``recall``, ``f1`` and ``support``; ``macro`` and ``weighted`` means of these;
        ``confusion``, with a row for each right class and a column for each predicted one. With another task: the
        ``means`` of its measures, and the methods that it ``lacks``.

    Raises:
        ValueError: there is no test data, or the task's results do not fit together.
    """
    import torch
    from torch.utils.data import DataLoader

    data = getattr(task, "final_data", task.test_data)()
    if not len(data):
        raise ValueError("the test data has no samples: wanted one or more")
    loader = DataLoader(data, batch_size=_BATCH, collate_fn=getattr(task, "collate", None))
    lacks = [name for name in ("predict", "targets") if not callable(getattr(task, name, None))]
    sums: dict[str, float] = {}
    predicted: list[int] = []
    right: list[int] = []
    num_classes = 0
    with torch.no_grad():
        for batch in loader:
            moved = _moved(batch, module)
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
            predicted += scores.argmax(1).tolist()
            right += targets.tolist()
    if lacks:
        means = {name: value / len(data) for name, value in sums.items()}
        return {"num": len(data), "means": means, "lacks": lacks}
    return _report(right, predicted, _labels(task, num_classes))


def predict(task: "Task", module: "torch.nn.Module", texts: Sequence[str]) -> dict[str, Any]:
    """Label texts.

    Returns:
        ``labels``, and ``texts``: for each text ``text``, its ``label``, the label's ``probability``, and the
        ``probabilities`` of all labels.

    Raises:
        ValueError: the task's samples are not texts.
    """
    import torch

    lacks = [name for name in ("encode", "predict") if not callable(getattr(task, name, None))]
    if lacks:
        raise ValueError(
            f"this task takes no texts: it lacks {' and '.join(f'{name}()' for name in lacks)} "
            "(see nodekit.training.Task; the task text has them)"
        )
    rows: list[list[float]] = []
    with torch.no_grad():
        for start in range(0, len(texts), _BATCH):
            batch = _moved(task.encode(texts[start : start + _BATCH]), module)  # type: ignore[attr-defined]
            rows += task.predict(module, batch).cpu().double().softmax(1).tolist()  # type: ignore[attr-defined]
    labels = _labels(task, len(rows[0]))
    found = []
    for text, row in zip(texts, rows, strict=True):
        best = max(row)
        label = labels[row.index(best)]
        found.append({"text": text, "label": label, "probability": best, "probabilities": row})
    return {"labels": labels, "texts": found}


def _moved(batch: Any, module: "torch.nn.Module") -> Any:
    """Return the batch on the module's device."""
    import torch

    from nodekit.training.data.evaluate import to_device

    return to_device(batch, next((each.device for each in module.parameters()), torch.device("cpu")))


def _printable(text: str) -> str:
    """Return the text with escapes for letters that stdout's encoding lacks."""
    return text.encode(_encoding(), "backslashreplace").decode(_encoding())


def _encoding() -> str:
    return sys.stdout.encoding or "utf-8"  # a StringIO has none


def _stdin() -> str:
    """Return all of stdin, decoded as UTF-8, as JSON is, or by the terminal's encoding."""
    raw = sys.stdin.buffer.read()
    for encoding in ("utf-8-sig", sys.stdin.encoding):
        with contextlib.suppress(UnicodeDecodeError):
            return raw.decode(encoding)
    raise ValueError(f"stdin is neither UTF-8 nor {sys.stdin.encoding}: wanted a JSON list of texts")


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


def _report(right: Sequence[int], predicted: Sequence[int], labels: Sequence[str]) -> dict[str, Any]:
    """Return scikit-learn's report; 0 where it would divide by 0, for a class that does not occur."""
    from sklearn.metrics import accuracy_score, classification_report, confusion_matrix

    classes = range(len(labels))
    if odd := {each for each in right if each not in classes}:
        raise ValueError(f"the task's targets have the class {min(odd)}: wanted 0 to {len(labels) - 1}")
    found = classification_report(right, predicted, labels=classes, output_dict=True, zero_division=0)

    def named(name: str) -> dict[str, float]:
        return {
            each.removesuffix("-score"): found[name][each] for each in ("precision", "recall", "f1-score")
        }

    return {
        "num": len(right),
        "accuracy": accuracy_score(right, predicted),
        "classes": [
            {"label": label, **named(str(number)), "support": int(found[str(number)]["support"])}
            for number, label in enumerate(labels)
        ],
        "macro": named("macro avg"),
        "weighted": named("weighted avg"),
        "confusion": confusion_matrix(right, predicted, labels=classes).tolist(),
    }


def _as_text(result: dict[str, Any]) -> str:
    """Return the numbers in columns, separated by tabs; `kit test` aligns them."""
    if "lacks" in result:
        return "\n".join(f"{name}\t{value:.4f}" for name, value in result["means"].items())
    lines = ["\tprecision\trecall\tf1\tsupport"]
    summed = [{"label": name, **result[name], "support": result["num"]} for name in ("macro", "weighted")]
    for each in [*result["classes"], *summed]:
        lines.append(
            f"{each['label']}\t{each['precision']:.4f}\t{each['recall']:.4f}\t{each['f1']:.4f}\t{each['support']}"
        )
    lines.append(f"accuracy\t{result['accuracy']:.4f}")
    lines.append("\t".join(["true \\ predicted", *(each["label"] for each in result["classes"])]))
    for each, row in zip(result["classes"], result["confusion"], strict=True):
        lines.append("\t".join([each["label"], *map(str, row)]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
