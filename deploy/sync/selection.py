"""Select the files of a folder to send: those that git does not ignore, as modified by ``.kitignore``.

A ``!`` line in a ``.kitignore`` includes what ``.gitignore`` excludes: a file, or a folder with its content. A
pattern without a slash in it (``!*.bin``) does not apply inside folders that ``.gitignore`` excludes as a whole; one
that names the folder (``!data/``, ``!data/corpus/*.bin``) does. As in git, files in a folder that ``.kitignore`` itself
excludes cannot be included again.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from nodekit.inventory.errors import KitError

IGNORE_FILE = ".kitignore"
GIT_IGNORE_FILE = ".gitignore"


@dataclass(frozen=True)
class Selection:
    """The files of a folder to send, and those excluded."""

    paths: tuple[str, ...]
    """Sorted files, links and special files."""
    ignored: Mapping[str, str | None]
    """Path that .gitignore excludes (folders with a slash at the end) → the folder of its git repository, None if the
    rules were read without git. A .kitignore may have included some of these again."""


class Why(NamedTuple):
    """Why a path is not sent."""

    source: str
    """The ignore file with the rule; relative to the root if it is below that."""
    line: str
    """The line for the root's .kitignore with which the path is sent."""


def select(root: Path, problems: list[str]) -> Selection:
    """List the files to send; unreadable folders are added to `problems`."""
    kit = _Rules(root, IGNORE_FILE)
    ignored: dict[str, str | None] = {}
    if _in_work_tree(root):
        listed = _git_files(root, "", problems, ignored)
        if listed:  # otherwise git ignores the whole folder
            paths = {path for path in listed if not kit(path)}
            # What .kitignore excludes as well is excluded on purpose: do not report it as ignored.
            ignored = {
                path: repository
                for path, repository in ignored.items()
                if not (kit.folder(path[:-1]) if path.endswith("/") else kit(path))
            }
            walk = _Walk(root, kit, problems, {})
            for path in ignored if kit.puts_back else ():
                paths.update(walk.at(path, None))
            return Selection(tuple(sorted(paths)), ignored)
        ignored.clear()
    git = _Rules(root, GIT_IGNORE_FILE)
    walk = _Walk(root, kit, problems, ignored)
    return Selection(tuple(sorted(walk.below("", git))), ignored)


def why_left_out(root: Path, path: str) -> Why | None:
    """Return why a file below the root is not sent; None if it is."""
    kit = _Rules(root, IGNORE_FILE)
    if kit(path):
        return Why(IGNORE_FILE, f"!/{_escaped(path)}")
    if kit.says(path) is False:
        return None
    if _in_work_tree(root):
        repositories = [
            f"{folder}/" for folder in above(path) if folder and (root / folder / ".git").exists()
        ]
        repository = next(iter(repositories), "")
        found = reasons(root, {path: repository}).get(path)
        if found is None or _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"):
            return found  # otherwise git ignores the whole root, which `select` then lists without git
    return reasons(root, {path: None}).get(path)


# --- git ------------------------------------------------------------------------------------------------------


def _in_work_tree(root: Path) -> bool:
    here = any((folder / ".git").exists() for folder in (root, *root.parents))
    return here and shutil.which("git") is not None


def _start_git(folder: Path, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.Popen(
        ["git", "-C", str(folder), *arguments],
        stdout=subprocess.PIPE,
        env={**env, "LC_ALL": "C"},
        **{"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **streams},
    )


def _git(folder: Path, *arguments: str, text: str = "") -> list[str]:
    """Return git's NUL-separated output; empty if it fails."""
    process = _start_git(folder, *arguments, stdin=subprocess.PIPE)
    return os.fsdecode(process.communicate(os.fsencode(text))[0]).split("\0")[:-1]


def _git_files(root: Path, below: str, problems: list[str], ignored: dict[str, str | None]) -> list[str]:
    listing = ("ls-files", "-z", "--others", "--exclude-standard")
    # Run both in parallel, as each takes long on a large tree.
    left_out = _start_git(root / below, *listing, "--ignored", "--directory")
    process = _start_git(root / below, *listing, "--cached", stderr=subprocess.PIPE)
    names, said = process.communicate()
    ignored.update(dict.fromkeys((below + each for each in _names(left_out.communicate()[0])), below))
    complaint = os.fsdecode(said).strip()
    if process.returncode != 0:
        raise KitError(f"git cannot list the code in {root / below}: {complaint}")
    problems += [line for line in complaint.splitlines() if "could not open directory" in line]
    paths = []
    for name in _names(names):
        path = below + name
        if name.endswith("/") or _is_folder(f"{root}/{path}"):
            # A submodule, or another nested repository: git lists only its folder.
            inner = path.rstrip("/")
            if (root / inner / ".git").exists():
                paths += _git_files(root, inner + "/", problems, ignored)
            continue
        paths.append(path)
    return paths


def _names(output: bytes) -> list[str]:
    return [name for name in os.fsdecode(output).split("\0") if name]


def _is_folder(full: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(full).st_mode)
    except OSError:
        return False


# --- without git ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Walk:
    """Walks folders for files to send; adds others to `problems` and `ignored`."""

    root: Path
    kit: _Rules
    problems: list[str]
    ignored: dict[str, str | None]

    def below(self, folder: str, git: _Rules | None) -> Iterator[str]:
        """Yield the files to send below a folder; `git` is None if .gitignore excludes it as a whole."""
        try:
            entries = list(os.scandir(f"{self.root}/{folder}"))
        except OSError as error:
            self.problems.append(f"{folder}: {error.strerror}")
            return
        for entry in entries:
            if entry.name != ".git":
                slash = "/" if entry.is_dir(follow_symlinks=False) else ""
                yield from self.at(f"{folder}{entry.name}{slash}", git)

    def at(self, name: str, git: _Rules | None) -> Iterator[str]:
        """Yield a file to send, or those below a folder, whose name ends with a slash."""
        said = self.kit.says(name)
        if said:
            return
        is_out = said is None and (git is None or git.says(name) is True)
        if is_out and git is not None:
            self.ignored[name] = None
        if not name.endswith("/"):
            if not is_out:
                yield name
        elif not is_out or self.kit.reaches(name[:-1]):
            yield from self.below(name, None if is_out else git)


class _Rules:
    """The rules of the ignore files of one name, in a path's folder and above it, the nearest first."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._name = name
        self._specs: dict[str, Any] = {}
        self._lines: dict[str, list[str]] = {}
        self._folders: dict[str, bool] = {"": False}

    def __call__(self, path: str) -> bool:
        """Whether a file is excluded, by itself or with one of its folders."""
        return self.folder(path.rpartition("/")[0]) or self.says(path) is True

    def folder(self, path: str) -> bool:
        """Whether a folder is excluded; its content cannot be included again."""
        if path not in self._folders:
            parent = path.rpartition("/")[0]
            self._folders[path] = self.folder(parent) or self.says(f"{path}/") is True
        return self._folders[path]

    @property
    def puts_back(self) -> bool:
        """Whether any file read so far has a line that starts with ``!``."""
        return any(line.startswith("!") for lines in self._lines.values() for line in lines)

    def says(self, path: str) -> bool | None:
        """Return True if excluded, False if a ``!`` line includes it, else None; a folder ends with a slash."""
        for folder in above(path):
            spec = self._spec(folder)
            if spec is not None:
                said: bool | None = spec.check_file(path[len(folder) + 1 :] if folder else path).include
                if said is not None:
                    return said
        return None

    def why(self, path: str) -> tuple[str, str] | None:
        """Return the folder of the ignore file that excludes this path or one of its folders, and the line."""
        for each in (*reversed([f"{folder}/" for folder in above(path) if folder]), path):
            for folder in above(each):
                spec = self._spec(folder)
                found = spec and spec.check_file(each[len(folder) + 1 :] if folder else each)
                if found and found.include is not None:
                    if found.include:
                        return folder, self._lines[folder][found.index]
                    break
        return None

    def reaches(self, path: str) -> bool:
        """Whether a ``!`` line includes something below this folder, by a path through it."""
        for folder in above(path):
            self._spec(folder)
            parts = (path[len(folder) + 1 :] if folder else path).split("/")
            for line in self._lines[folder]:
                names = line[1:].strip().strip("/").split("/")
                if line.startswith("!") and names[0] != "**" and _leads_into(names, parts):
                    return True
        return False

    def _spec(self, folder: str) -> Any:
        if folder not in self._specs:
            self._specs[folder], self._lines[folder] = None, []
            file = f"{self._root}/{folder}/{self._name}"
            if os.path.isfile(file):  # noqa: PTH113  (once per folder of a big tree)
                import pathspec  # most trees have no such file

                try:
                    text = Path(file).read_text(encoding="utf-8-sig", errors="surrogateescape")
                except OSError as error:  # it may exclude secrets, so do not go on without it
                    text = f"{file} cannot be read: {error.strerror}"
                    raise KitError(text, cure="mend that: it says what is not to be sent") from error
                lines = [line for line in text.splitlines() if line]
                try:
                    self._specs[folder] = pathspec.GitIgnoreSpec.from_lines(lines)
                except (ValueError, re.error):  # a line is not a pattern ("!" alone): skip it, as git does
                    lines = [line for line in lines if _is_pattern(line)]
                    self._specs[folder] = pathspec.GitIgnoreSpec.from_lines(lines)
                self._lines[folder] = lines
        return self._specs[folder]


def _is_pattern(line: str) -> bool:
    import pathspec

    try:
        pathspec.GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):
        return False
    return bool(line.strip("!/ "))


def above(path: str) -> Iterator[str]:
    """Yield the parent folders of a path, the innermost first; the root is ""."""
    folder = path.rstrip("/")
    while folder:
        folder = folder.rpartition("/")[0]
        yield folder


def _leads_into(names: list[str], parts: list[str]) -> bool:
    for name, part in zip(names, parts, strict=False):
        if name == "**":
            return True
        if not fnmatchcase(part, name):
            return False
    return len(names) > len(parts)


# --- why ------------------------------------------------------------------------------------------------------


def reasons(root: Path, ignored: Mapping[str, str | None]) -> dict[str, Why]:
    """Return why each of these paths is excluded; without those that no rule excludes.

    Args:
        root: the root of the selection.
        ignored: as `Selection.ignored`.
    """
    found: dict[str, Why] = {}
    rules = _Rules(root, GIT_IGNORE_FILE)
    for path in (each for each, repository in ignored.items() if repository is None):
        if (why := rules.why(path)) is not None:
            folder, pattern = why
            found[path] = Why(_joined(folder, GIT_IGNORE_FILE), _put_back(folder, pattern))
    for repository in sorted({each for each in ignored.values() if each is not None}):
        paths = [each for each, of in ignored.items() if of == repository]
        found.update(_git_reasons(root, repository, paths))
    return found


def _git_reasons(root: Path, repository: str, paths: list[str]) -> Iterator[tuple[str, Why]]:
    inside = root / repository
    names = "".join(f"{path[len(repository) :]}\0" for path in paths)
    answer = _git(inside, "check-ignore", "-v", "-z", "--stdin", text=names)
    # git prints sources relative to the top of the work tree, which may be above the folder to send.
    shown = _start_git(inside, "rev-parse", "--show-prefix").communicate()[0]
    prefix = os.fsdecode(shown).rstrip("\n")
    for source, _, pattern, name in zip(*[iter(answer)] * 4, strict=True):
        if pattern.startswith("!"):
            continue
        path = repository + name
        file = source.removeprefix(prefix)
        if file.rpartition("/")[2] == GIT_IGNORE_FILE and source.startswith(prefix):
            folder = (repository + file).rpartition("/")[0]
            yield path, Why(repository + file, _put_back(folder, pattern))
        elif "/" in pattern.strip("/"):  # a path relative to an ignore file outside of the root
            yield path, Why(source, f"!/{_escaped(path)}")
        else:
            yield path, Why(source, _put_back(repository.rstrip("/"), pattern.lstrip("/")))


def _put_back(folder: str, pattern: str) -> str:
    """Return the line for the root's .kitignore that reverts a pattern of a folder's .gitignore."""
    if not folder:
        return f"!{pattern}"
    if pattern.strip("/") in ("*", "**"):
        return f"!/{_escaped(folder)}/"
    own = "" if "/" in pattern.rstrip("/") else "**/"
    return f"!/{_escaped(folder)}/{own}{pattern.lstrip('/')}"


def _escaped(path: str) -> str:
    return re.sub(r"([*?\[\\])", r"\\\1", path)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
