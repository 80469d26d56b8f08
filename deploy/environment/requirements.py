"""Reads the files that `environment:` names into one flat requirements text; fetches nothing."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Environment

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 4)
"""The minimum for a user's own script; kit's training module needs `training.errors.SAFE_TORCH`."""
_OPTION = re.compile(r"(--?[a-z][a-z-]*?)(?:[ =]\s*|(?<=^-[a-z])(?=\S))(.*)|(--?[a-z][a-z-]*)$")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_INDEX_OPTIONS = {
    "-i",
    "--index-url",
    "--extra-index-url",
    "-f",
    "--find-links",
    "--no-index",
    "--trusted-host",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a venv is to contain."""

    file: str
    """The name of the user's file."""
    digest: str
    """Hash of the content and the options, without passwords."""
    requirements: str = field(default="", repr=False)
    """The requirements as one text; "" for a uv.lock, which uv has to read."""
    constraints: str = field(default="", repr=False)
    lock: Mapping[str, str] = field(default_factory=dict)
    """The files that uv reads, by name."""
    export: tuple[str, ...] = ()
    """uv's arguments to convert them to requirements."""


def read(environment: Environment) -> Asked:
    """Read the file that an environment names, and the files that it includes.

    Raises:
        KitError: with file and line: a file is missing, or a requirement exists only on this machine.
    """
    options = environment.model_dump(mode="json", exclude={"requirements", "pyproject", "lock", "offline"})

    def asked(file: Path, content: Any, **fields: Any) -> Asked:
        text = json.dumps([content, options], sort_keys=True)
        return Asked(file=file.name, digest=sha256(text.encode()).hexdigest(), **fields)

    if environment.lock is not None:
        path = Path(environment.lock)
        if path.name != "uv.lock":
            raise KitError(f"environment.lock: found {path.name}", wanted="a uv.lock")
        files = {name: _text(path.with_name(name)) for name in ("uv.lock", "pyproject.toml")}
        return asked(path, files, lock=files, export=uv_export(environment.extras))
    if environment.pyproject is not None:
        path = Path(environment.pyproject)
        lines = dependencies(path, _text(path), environment.extras)
        return asked(path, lines, requirements="".join(f"{_expanded(line)}\n" for line in lines))
    assert environment.requirements is not None
    path = Path(environment.requirements)
    found: dict[str, list[str]] = {"-r": [], "-c": []}
    for kind, line in flatten(path):
        found[kind].append(line)
    texts = {kind: "".join(f"{_expanded(line)}\n" for line in lines) for kind, lines in found.items()}
    return asked(path, found, requirements=texts["-r"], constraints=texts["-c"])


def _text(path: Path) -> str:
    try:
        # As pip does: within the joined text, a byte order mark would become part of a name.
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise KitError(f"environment: {path}: {getattr(error, 'strerror', None) or error}") from error


# --- requirements files -------------------------------------------------------------------------------------


def flatten(path: Path, kind: str = "-r", seen: tuple[Path, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the lines of a requirements file and of the files it includes: ``("-r", line)``, or ``("-c", line)``.

    Raises:
        KitError: a line refers to something that the nodes do not have.
    """
    path = path.resolve()
    if path in seen:
        return
    for number, line in logical_lines(_text(path)):
        where = f"{path}:{number}"
        option, value = _option(line)
        if option in ("-r", "--requirement", "-c", "--constraint"):
            if "://" in value:
                raise KitError(f"{where}: found the URL of another file", wanted="a file here")
            inner = "-c" if "-c" in (kind, option[:2]) or option == "--constraint" else "-r"
            yield from flatten(path.parent / value, inner, (*seen, path))
        elif option in ("-e", "--editable") and "://" in value and not _is_path(value):
            raise KitError(f"{where}: found {line}", wanted=f"it without {option}: {value}")
        elif option in ("-e", "--editable") or _is_path(line):
            raise KitError(
                f"{where}: found {line}, which is on this machine and not on the nodes",
                cure="leave it out, and send it with the code (job.code), or make a wheel of it in a folder "
                "that environment.find_links names",
            )
        elif option in ("-f", "--find-links") and "://" not in value:
            raise KitError(f"{where}: found a folder of wheels", wanted="it as environment.find_links")
        else:
            yield kind, line


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Return the numbered lines that are not empty, with continuation lines joined."""
    begin, held = 1, ""
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        begin = begin if held else number
        if raw.endswith("\\") and not raw.lstrip().startswith("#"):
            held += raw[:-1]
            continue
        line, held = re.sub(r"(^|\s)#.*$", "", held + raw).strip(), ""
        if line:
            yield begin, line


def _option(line: str) -> tuple[str, str]:
    found = _OPTION.match(line)
    return (found[1] or found[3], (found[2] or "").strip()) if found else ("", "")


def _is_path(line: str) -> bool:
    """Whether a requirement is a file or folder of this machine."""
    # By pip's rules also `libs/mine` and `mine-1.0-py3-none-any.whl`, but not `git+https://…`.
    return (
        re.match(r"[./~]|file:|[\w.-]+(/|[^\s:]*\.(whl|tar\.gz|zip)(\s|\[|$))|[^@]*@\s*file:", line)
        is not None
    )


def _only_here(file: Path | str, line: str) -> KitError:
    return KitError(
        f"environment: {file}: found {line}, which is on this machine and not on the nodes",
        cure="leave it out, and send it with the code (job.code)",
    )


def without_indexes(requirements: str) -> str:
    """Return requirements without their index options, for installation from a folder."""
    lines = [line for line in requirements.splitlines() if _option(line)[0] not in _INDEX_OPTIONS]
    return "".join(f"{line}\n" for line in lines)


# --- pyproject.toml and uv.lock -----------------------------------------------------------------------------


def dependencies(path: Path, text: str, extras: Sequence[str]) -> list[str]:
    """Return the dependencies in a pyproject.toml, with those of the extras; the project itself is the job's code.

    Raises:
        KitError: the file lists no dependencies, or cannot be parsed.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # Python 3.10, which has it only inside pip
        from pip._vendor import tomli as tomllib
    try:
        project = tomllib.loads(text).get("project")
    except tomllib.TOMLDecodeError as error:
        raise KitError(f"environment: {path}: {error}") from error
    if not isinstance(project, dict):
        raise KitError(f"environment: {path}: found no [project]", wanted="its dependencies")
    optional = project.get("optional-dependencies", {})
    if not isinstance(optional, dict):
        raise KitError(f"environment: {path}: found no [project.optional-dependencies]", wanted="a table")
    if dynamic := {"dependencies", "optional-dependencies"} & {*_texts(path, "dynamic", project)}:
        raise KitError(
            f"environment: {path}: found {' and '.join(sorted(dynamic))} to be dynamic",
            wanted="them written there",
            cure="or give a requirements file",
        )
    groups = {_plain(name): _texts(path, name, optional) for name in optional}
    lines = _texts(path, "dependencies", project)
    todo, done = [_plain(extra) for extra in extras], set[str]()
    while todo:
        extra = todo.pop(0)
        if extra in done:
            continue
        done.add(extra)
        if extra not in groups:
            listed = ", ".join(sorted(groups)) or "none"
            raise KitError(f"environment.extras: found {extra}", wanted=f"one of those in {path}: {listed}")
        for line in groups[extra]:
            own = re.match(r"([\w.-]+)\s*\[([^\]]*)\]", line)
            if own and _plain(own[1]) == _plain(str(project.get("name", ""))):
                todo += [_plain(each) for each in own[2].split(",")]
            else:
                lines.append(line)
    for line in lines:
        if _is_path(line):
            raise _only_here(path, line)
        if line.startswith("-"):
            raise KitError(
                f"environment: {path}: found the option {_option(line)[0]}", wanted="a requirement"
            )
    return lines


def _texts(path: Path, key: str, table: Mapping[str, Any]) -> list[str]:
    """Return a list of strings from a table; KitError for a single string, each letter of which would be a package."""
    found = table.get(key, [])
    if isinstance(found, list) and all(isinstance(each, str) for each in found):
        return [*found]
    raise KitError(
        f"environment: {path}: found {key} = {json.dumps(found, default=str)[:60]}",
        f'a list of texts, as {key} = ["torch"]',
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def uv_export(extras: Sequence[str]) -> tuple[str, ...]:
    """Return uv's arguments to convert a uv.lock to requirements."""
    argv = ["export", "--frozen", "--no-dev", "--no-emit-project", "--no-header", "--no-annotate"]
    return (*argv, "--color=never", "--format=requirements-txt", *(f"--extra={extra}" for extra in extras))


def checked(text: str, file: str) -> str:
    """Check the requirements that uv made of a lock file.

    Raises:
        KitError: a requirement exists only on this machine.
    """
    for _, line in logical_lines(text):
        if _is_path(line) or _option(line)[0] in ("-e", "--editable"):
            raise _only_here(file, line)
    return text


# --- passwords ----------------------------------------------------------------------------------------------


def _expanded(text: str, *, what: str = "") -> str:
    """Replace `${NAME}` from this environment, as pip does; with `what`, an unset variable raises KitError."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in os.environ and what:
            raise KitError(
                f"{what} names ${{{found[1]}}}, not set in this environment",
                cure=f"export {found[1]}=… and run again",
            )
        return os.environ.get(found[1], found[0])

    return _VARIABLE.sub(value, text)


@dataclass(frozen=True)
class Indexes:
    """Package indexes with their passwords; passed on only in the environment of a process."""

    env: Mapping[str, str] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    """Values to remove from pip's output."""
    index_url: str = field(repr=False)
    """The URL to test for reachability; "" for pip's own."""
    folders: tuple[str, ...]
    """Those of `find_links` that are folders on this machine."""


def indexes(environment: Environment) -> Indexes:
    """Return the package indexes.

    Raises:
        KitError: a variable is not set here, or a folder does not exist.
    """
    index = _expanded(environment.index_url or "", what="environment.index_url")
    more = [_expanded(each, what="environment.extra_index_url") for each in environment.extra_index_url]
    folders = tuple(each for each in environment.find_links if "://" not in each)
    pages = [each for each in environment.find_links if "://" in each]
    links = [_expanded(each, what="environment.find_links") for each in pages]
    for folder in folders:
        if not Path(folder).is_dir():
            raise KitError(f"environment.find_links: {folder} is no folder on this machine")
    env = {
        "PIP_INDEX_URL": index,
        "UV_INDEX_URL": index,
        "PIP_EXTRA_INDEX_URL": " ".join(more),
        "UV_EXTRA_INDEX_URL": " ".join(more),
        "PIP_FIND_LINKS": " ".join(links),
        "UV_FIND_LINKS": " ".join(links),
        "PIP_NO_INDEX": "1" if environment.no_index else "",
    }
    asked_for = " ".join([environment.index_url or "", *environment.extra_index_url, *pages])
    # User names are not removed from logs, but a token may be a part of the path.
    tokens = [os.environ[name] for name in _VARIABLE.findall(re.sub(r"://[^/\s]*@", "://", asked_for))]
    named = [each for each in (index, *more, *links) if "@" in each]
    passwords = [re.sub(r"^.*?://(.*)@.*$", r"\1", each).rpartition(":")[2] for each in named]
    asked = (next(iter(links), "") or index) if environment.no_index else index
    return Indexes(
        env={name: value for name, value in env.items() if value},
        secrets=tuple(each for each in (*passwords, *tokens) if len(each) > 3),
        index_url=asked,
        folders=folders,
    )
