"""What of a folder is sent, what .kitignore puts back, and how what is left out is told."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.story import leftout
from nodekit.deploy.story.leftout import find
from nodekit.deploy.sync.listing import list_code
from nodekit.deploy.sync.selection import why_left_out
from nodekit.inventory.errors import KitError

WITH_GIT = pytest.mark.parametrize("with_git", [True, False], ids=["git", "no git"])
# As in many public repositories: data is prepared beside a script, and git is not for it.
IGNORED = "__pycache__/\n*.bin\n*.pkl\n/out/\n.venv/\n"
FILES = {
    "train.py": 10,
    "config/small.py": 10,
    "data/chars/prepare.py": 10,
    "data/chars/train.bin": 3000,
    "data/chars/meta.pkl": 70,
    "out/last.pt": 500,
    ".venv/lib/big.bin": 9_000,
    "__pycache__/train.pyc": 100,
}
ALWAYS = ["config/small.py", "data/chars/prepare.py", "train.py"]


def git(folder: Path, *argv: str) -> None:
    config = ["-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run(["git", *config, "-C", str(folder), *argv], check=True, capture_output=True)


def project(folder: Path, with_git: bool, ignored: str = IGNORED, **sizes: int) -> Path:
    """A folder with a script, its data, and what git leaves out of it."""
    folder.mkdir(exist_ok=True)
    if with_git:
        git(folder, "init", "-q")
    for name, size in {**FILES, **sizes}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            file.truncate(size)
    (folder / ".gitignore").write_text(ignored)
    if with_git:
        git(folder, "add", ".")
        git(folder, "commit", "-qm", "x")
    return folder


def sent(folder: Path) -> list[str]:
    return [entry.path for entry in list_code(folder).entries if not entry.path.startswith(".")]


@WITH_GIT
@pytest.mark.parametrize(
    ("ignored", "kitignore", "put_back"),
    [
        (IGNORED, "", []),
        (IGNORED, "!*.bin\n", ["data/chars/train.bin"]),
        (IGNORED, "!*.bin\n!*.pkl\n", ["data/chars/meta.pkl", "data/chars/train.bin"]),
        (IGNORED, "!/data/\n", ["data/chars/meta.pkl", "data/chars/train.bin"]),
        (IGNORED, "!/data/**/*.pkl\n", ["data/chars/meta.pkl"]),
        (IGNORED, "!*.bin\ntrain.bin\n", []),
        (IGNORED, "!out/\n", ["out/last.pt"]),
        (IGNORED, "!/out/*.pt\n", ["out/last.pt"]),
        (IGNORED, "!out/last.*\n", ["out/last.pt"]),
        (IGNORED, "!*.pt\n", []),  # without a slash it does not look into a folder that is ignored
        (IGNORED, "!**/last.pt\n", []),
        (IGNORED, "!../secret\n!/\n!\n", []),
        ("/data/\n/out/\n.venv/\n__pycache__\n", "!data/chars/*.bin\n", ["data/chars/train.bin"]),
        ("/data/\n/out/\n.venv/\n__pycache__\n", "!data/**/*.pkl\n", ["data/chars/meta.pkl"]),
        ("data\nout\n.venv\n__pycache__\n", "!data/\n*.pkl\n", ["data/chars/prepare.py", "data/chars/train.bin"]),
    ],
)  # fmt: skip
def test_kitignore_puts_back_what_gitignore_leaves_out(
    tmp_path: Path, with_git: bool, ignored: str, kitignore: str, put_back: list[str]
) -> None:
    (tmp_path / "secret").write_text("not ours to send")
    folder = project(tmp_path / "code", with_git, ignored)
    (folder / ".kitignore").write_text(kitignore)
    always = ALWAYS if "data" not in ignored else [each for each in ALWAYS if not each.startswith("data")]
    assert sent(folder) == sorted({*always, *put_back})


@pytest.mark.parametrize("name", [".gitignore", ".kitignore"])
def test_an_ignore_file_that_cannot_be_read_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = project(tmp_path, with_git=False)
    (folder / name).write_text("secret\n")
    real = Path.read_text

    def read_text(path: Path, *args: Any, **options: Any) -> str:  # root may read any file
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(KitError, match=rf"/\{name} cannot be read: Permission denied; mend that"):
        list_code(folder)


@WITH_GIT
def test_a_kitignore_of_a_folder_puts_back_what_is_in_it(tmp_path: Path, with_git: bool) -> None:
    folder = project(tmp_path, with_git, **{"a.bin": 1})
    (folder / "data/.kitignore").write_text("!*.bin\n")
    assert sent(folder) == sorted([*ALWAYS, "data/.kitignore", "data/chars/train.bin"])


def test_what_an_inner_repository_ignores_is_put_back_too(tmp_path: Path) -> None:
    inner = project(tmp_path / "sub", True)
    outer = project(tmp_path, True)
    (outer / ".kitignore").write_text("!/sub/data/chars/*.bin\n")
    assert "sub/data/chars/train.bin" in sent(outer)
    assert "sub/data/chars/meta.pkl" not in sent(outer)
    assert why_left_out(outer, "sub/data/chars/meta.pkl") == ("sub/.gitignore", "!/sub/**/*.pkl")
    assert inner.is_dir()


# --- what is said ---------------------------------------------------------------------------------------------

TRAIN = ["python", "-u", "train.py"]


@WITH_GIT
def test_data_beside_the_script_that_is_not_sent_is_told_with_the_lines_that_send_it(
    tmp_path: Path, with_git: bool
) -> None:
    folder = project(tmp_path, with_git)
    (said,) = find(list_code(folder), [*TRAIN, "config/small.py"]).said()
    assert said == (
        "left out: 3 files, 3.6 kB, ignored by .gitignore: `!*.bin`, `!/out/`, `!*.pkl` in .kitignore send them"
    )
    (folder / ".kitignore").write_text("!*.bin\n!/out/\n!*.pkl\n")
    assert find(list_code(folder), TRAIN).said() == []
    assert sent(folder) == sorted([*ALWAYS, "data/chars/meta.pkl", "data/chars/train.bin", "out/last.pt"])
    (folder / ".kitignore").write_text("*.bin\n/out\n*.pkl\n")  # so the user knows
    assert find(list_code(folder), TRAIN).said() == []


@WITH_GIT
@pytest.mark.parametrize(
    ("argv", "sizes", "says"),  # of 3 files
    [
        (["tool/run.py"], {}, ""),
        (["tool/run.py"], {"data/chars/train.bin": 120_000_000}, "3 files, 120 MB, ignored by .gitignore: `!*"),
        (["tool/run.py", "--data=data/chars"], {}, "3 files, 3.6 kB, ignored by .gitignore: `!*.bin`, `!*.pkl`, `!"),
        (["tool/run.py", "data/chars/meta.pkl"], {}, "3 files, 3.6 kB, ignored by .gitignore: `!*.pkl`, "),
        (["tool/run.py", "--from", "out/last.pt"], {}, "3 files, 3.6 kB, ignored by .gitignore: `!/out/`, "),
        (["tool/run.py", ".venv/lib"], {}, "4 files, 12.6 kB, ignored by .gitignore: `!.venv/`, "),
        (["tool/run.py", "/data/chars", "../data", "1e-3", "\0"], {}, ""),
        (["-m", "config.small"], {}, ""),
        (["-m", "data.chars.prepare"], {}, "3 files, "),
    ],
)  # fmt: skip
def test_what_is_left_out_is_told_where_it_is_large_or_the_command_looks_there(
    tmp_path: Path, with_git: bool, argv: list[str], sizes: dict[str, int], says: str
) -> None:
    folder = project(tmp_path, with_git, **{"tool/run.py": 1}, **sizes)
    said = find(list_code(folder), ["python", "-u", *argv]).said()
    assert [each.startswith(f"left out: {says}") for each in said] == ([True] if says else [])


def test_counting_what_is_left_out_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project(tmp_path, True, **{f"out/{number}": 10 for number in range(30)})
    monkeypatch.setattr(leftout, "MAX_ENTRIES", 20)
    (said,) = find(list_code(folder), TRAIN).said()
    assert said.startswith("left out: at least 2")
    (folder / ".gitignore").write_text("[0-9]*\n")
    (said,) = find(list_code(folder), TRAIN).said()
    assert said.startswith("left out: at least 20 files")


def test_virtual_environments_and_other_by_products_are_not_told(tmp_path: Path) -> None:
    made = {"own/pyvenv.cfg": 1, "own/lib/x.py": 20_000_000, "a.pyc": 1, ".env": 1, "web/node_modules/x": 1}
    folder = project(tmp_path, True, "own/\n.env\nnode_modules\n*.pyc\n.venv\n__pycache__\n", **made)
    assert find(list_code(folder), TRAIN).said() == []


@WITH_GIT
def test_whose_line_it_is_that_ignores_a_file_is_found_wherever_it_stands(
    tmp_path: Path, with_git: bool
) -> None:
    project(tmp_path, with_git, "", **{"data/big/x": 1, "data/all/x": 1, "data/all/y": 1})
    folder = tmp_path / "data"
    if with_git:
        git(tmp_path, "rm", "-rq", "--cached", ".")
    (folder / "big/.gitignore").write_text("*\n")
    assert find(list_code(tmp_path), TRAIN).num_files == 1
    (folder / ".gitignore").write_text("chars/*.bin\nall/\n*.pkl\n")
    assert why_left_out(tmp_path, "train.py") is None
    assert why_left_out(tmp_path, "data/chars/prepare.py") is None
    for path, line in {
        "data/big/x": "!/data/big/",
        "data/all/y": "!/data/**/all/",
        "data/chars/meta.pkl": "!/data/**/*.pkl",
    }.items():
        why = why_left_out(tmp_path, path)
        assert why is not None
        assert why.line == line
        (tmp_path / ".kitignore").write_text(f"{line}\n")
        assert path in sent(tmp_path)
        assert why_left_out(tmp_path, path) is None
    (tmp_path / ".kitignore").write_text("*.py\n")
    assert why_left_out(tmp_path, "train.py") == (".kitignore", "!/train.py")


def test_a_folder_of_a_larger_repository_and_gits_own_excludes(tmp_path: Path) -> None:
    project(tmp_path, True, "*.log\n/code/data/\n")
    folder = project(tmp_path / "code", False, "", **{"a.log": 1, "b.tmp": 1})
    (folder / ".gitignore").unlink()
    (tmp_path / ".git/info/exclude").write_text("*.tmp\n")
    found = {
        path: why_left_out(folder, path) for path in ("a.log", "data/chars/train.bin", "b.tmp", "train.py")
    }
    assert [each and each.line for each in found.values()] == [
        "!*.log",
        "!/data/chars/train.bin",
        "!*.tmp",
        None,
    ]
    assert find(list_code(folder), TRAIN).lines[0] == "!/data/"


NOT_FOUND = "Traceback (most recent call last):\n  File 'x.py', line 1, in f\n    data/chars/meta.pkl\n"
LEFT_OUT = {"data/chars/train.bin": [".gitignore", "!*.bin"], "corpus/": [".gitignore", "!corpus/"]}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NOT_FOUND + "OSError: [Errno 2] No such file or directory: 'data/chars/train.bin'", "data/chars/train.bin"),
        (NOT_FOUND + "E: Unable to find '/w/run/code/data/chars/../chars/train.bin'", "data/chars/train.bin"),
        (NOT_FOUND + "OSError: corpus/a b.txt not found.", "corpus/a"),
        (NOT_FOUND + 'OSError: "./corpus/a b.txt" does not exist', "corpus/a b.txt"),
        (NOT_FOUND + "RuntimeError: Couldn't find any class folder in corpus.", ""),
        (NOT_FOUND + "FileNotFoundError: [Errno 2] No such file or directory: 'data/chars'", "data/chars"),
        ("cat: data/chars/train.bin: No such file or directory", "data/chars/train.bin"),
        (NOT_FOUND + "FileNotFoundError: [Errno 2] No such file or directory: 'data/chars/other.bin'", ""),
        (NOT_FOUND + "FileNotFoundError: [Errno 2] No such file or directory: '/data/chars/train.bin'", ""),
        (NOT_FOUND + "ValueError: data/chars/train.bin is not what was expected", ""),
    ],
)  # fmt: skip
def test_a_missing_file_that_is_ignored_here_is_named_as_such(error: str, says: str) -> None:
    cause = leftout.missed(error, LEFT_OUT, "/w/run/code")
    assert (cause.what.partition(" was not sent")[0] if cause else "") == says
    assert cause is None or cause.cure.startswith(("!*.bin in .kitignore", "!corpus/ in .kitignore"))


def test_a_tracked_folder_that_became_a_link_or_a_file_is_sent_as_what_it_is(tmp_path: Path) -> None:
    folder = project(tmp_path / "code", with_git=True)
    (folder / "config").rename(folder / "conf")
    (folder / "config").symlink_to("conf")
    assert sent(folder) == ["conf/small.py", "config", "data/chars/prepare.py", "train.py"]
    (folder / "config").unlink()
    (folder / "config").write_text("a file now")
    assert sent(folder) == ["conf/small.py", "config", "data/chars/prepare.py", "train.py"]


def test_an_ignore_file_is_read_as_git_reads_it_whatever_is_in_it(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", with_git=False, ignored="")
    (folder / ".kitignore").write_bytes(b"\xef\xbb\xbfdata/\n[z-a]\nout\\\n!\n.venv/\n")
    assert sent(folder) == ["__pycache__/train.pyc", "config/small.py", "out/last.pt", "train.py"]
