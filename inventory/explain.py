"""Translate pydantic's errors into messages with the line, the key, what was found and what was wanted."""

import difflib
import json
import shlex
from pathlib import Path as FilePath
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nodekit.inventory.schema import HostBlock, InventoryFile, Job, Webhook
from nodekit.inventory.source import Document, Path, Problem, quoted

MAX_TOLD = 20
"""The most mistakes that are listed: one that is repeated for each of a thousand hosts is plain after a few."""


def validate(document: Document) -> tuple[InventoryFile | None, list[Problem], set[Path]]:
    """Return the file's model, all mistakes, and the paths of the keys that were removed as mistaken.

    The file is validated again without the mistaken keys, so that the checks across keys can still run, and the user
    sees all mistakes at once. The model is None if nothing valid is left.
    """
    problems: list[Problem] = []
    left_out = {problem.path for problem in document.problems if not problem.at_key}
    data = document.data
    for attempt in range(5):
        try:
            return InventoryFile.model_validate(data), problems, left_out
        except ValidationError as error:
            details = error.errors(include_url=False)
        paths = [_existing(data, _key_path(detail)) for detail in details]
        if attempt == 0:  # later mistakes are only caused by the removed keys
            problems = [
                _problem(detail, path, document)
                for detail, path in zip(details, paths, strict=True)
                if path not in left_out
            ]
        for path in paths:
            data, gone = _without(data, path)
            left_out.add(gone)
    return None, problems, left_out


def tell(file: FilePath, document: Document, problems: list[Problem]) -> str:
    """Return a line per mistake, in the file's order; a mistake in an anchor is reported once."""
    lines = {}
    for problem in problems:
        steps = f"{where(problem.path)}: " if problem.path else ""
        if any(problem.path[: len(path)] == path for path in document.overridden):
            lines[(0, 0), problem.path, problem.text] = f"command line: {steps}{problem.text}"
            continue
        place = problem.place or document.place(problem.path, at_key=problem.at_key)
        lines.setdefault(
            (place, problem.path[-1:], problem.text), f"{file}:{place.line}: {steps}{problem.text}"
        )
    told = [lines[key] for key in sorted(lines, key=lambda key: key[0])]
    if len(told) > MAX_TOLD:
        told[MAX_TOLD - 1 :] = [f"{file}: and {len(told) - MAX_TOLD + 1} more mistakes"]
    return "\n".join(told)


def where(path: Path) -> str:
    """Format a path for users: ``hosts.gpu1.gpus[2]``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += ("." if text else "") + (
                step if step.isprintable() and step.strip() == step != "" else quoted(step)
            )
    return text


def found(value: object, raw: str | None = None) -> str:
    """Return a value as written in the file, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        shown = json.dumps(value, ensure_ascii=False, default=str)
        return shown if len(shown) <= 60 else f"a list of {len(value)}"
    return raw if raw is not None and len(raw) <= 60 else str(value)[:60]


def _key_path(detail: ErrorDetails) -> Path:
    return detail["loc"][:-1] if detail["loc"][-1:] == ("[key]",) else detail["loc"]


def _existing(data: object, path: Path) -> Path:
    """Return the part of a path that exists in the data: pydantic adds steps for the members of a union."""
    for depth, step in enumerate(path):
        in_list = isinstance(data, list) and isinstance(step, int) and step < len(data)
        if in_list or (isinstance(data, dict) and step in data):
            data = data[step]  # type: ignore[index]
        else:
            return path[:depth]
    return path


def _without(data: object, path: Path) -> tuple[object, Path]:
    """Return the data without the last key on a path, lists being removed as a whole, and that key's path."""
    if not path or not isinstance(data, dict) or path[0] not in data:
        return data, ()
    key = path[0]
    if len(path) > 1 and isinstance(data[key], dict):
        inner, gone = _without(data[key], path[1:])
        if gone:
            return {**data, key: inner}, (key, *gone)
    return {name: value for name, value in data.items() if name != key}, (key,)


def _problem(detail: ErrorDetails, path: Path, document: Document) -> Problem:
    value = document.data
    for step in path:
        value = value[step]  # type: ignore[index]  # `_existing` has checked this path
    kind, context = detail["type"], detail.get("ctx", {})
    at_key = detail["loc"][-1:] == ("[key]",) or kind == "extra_forbidden"
    if kind == "missing":
        missing = str(detail["loc"][-1])
        description = (_model(path).model_fields[missing].description or "").rstrip(".")
        text = f"found no {missing}, wanted {description[:1].lower()}{description[1:]}"
        return Problem((*path, missing), text, place=document.place(path, at_key=True))
    if kind == "extra_forbidden":
        text = f"found an unknown key, wanted {_valid_keys(path)}"
    elif at_key:
        text = f"found {quoted(str(path[-1]))}, wanted {detail['msg']}"
    else:
        shown = context.get("hide") or found(value, document.raw.get(path))
        text = f"found {shown}, wanted {_wanted(detail, path, value, document.raw.get(path))}"
    return Problem(path, text, at_key)


def _wanted(detail: ErrorDetails, path: Path, value: object, raw: str | None) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "wanted":
        bare = context["quote"] and not isinstance(value, str | list | dict)
        return detail["msg"] + (f": write {json.dumps(raw or '', ensure_ascii=False)}" if bare else "")
    if path == ("hosts",):
        return "a line for each host, as gpu1: {gpus: 8}, or gpu1: alone"
    if kind == "tuple_type" and isinstance(value, str) and value:
        return f"a list: write {json.dumps(_as_arguments(path, value), ensure_ascii=False)}"
    if kind in ("tuple_type", "list_type"):
        return "a list"
    if kind in ("too_short", "string_too_short"):
        return "at least one item"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return "a mapping: key: value lines"
    return detail["msg"][:1].lower() + detail["msg"][1:]


def _as_arguments(path: Path, line: str) -> list[str]:
    if path[-1] != "command":
        return [line]
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in a field's type, also within an optional or a dict (`dict[Hostlist, HostBlock | None]`)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for each in get_args(annotation) if (model := _model_in(each))), None)


_SECTIONS: dict[object, type[BaseModel]] = {
    name: model
    for name, field in InventoryFile.model_fields.items()
    if (model := _model_in(field.annotation)) is not None
}
_MEANT: tuple[tuple[str, type[BaseModel]], ...] = (
    ("job", Job),
    ("", InventoryFile),
    *((str(name), model) for name, model in _SECTIONS.items() if model not in (Job, HostBlock)),
)
"""The sections in which a misplaced key is looked for, the likeliest first."""


def _model(path: Path) -> type[BaseModel]:
    """Return the model of the mapping at a path."""
    if path[:2] == ("notify", "webhook"):
        return Webhook
    return _SECTIONS[path[0]] if path else InventoryFile


def _valid_keys(path: Path) -> str:
    *parent, key = path
    valid = sorted(_model(tuple(parent)).model_fields)
    elsewhere = [
        f"{section}.{key}" if section else f"{key} at the top of the file"
        for section, model in _MEANT
        if key in model.model_fields
    ]
    longer = [name for name in valid if name == f"{key}s" or name.startswith(f"{key}_")]
    longer.sort(key=len)
    near = longer or elsewhere or difflib.get_close_matches(str(key).lower(), valid, n=1)
    listed = ", ".join(valid)
    return f"{near[0]} (valid here: {listed})" if near else f"one of {listed}"
