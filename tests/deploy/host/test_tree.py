"""The host's side of sync, called directly: what `deploy/connect/channel.py` sends to a host."""

from __future__ import annotations

import ast
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.host.code import tree, treefiles
from nodekit.deploy.sync.listing import list_code

NAMES = [
    "a b.py",
    "it's.py",
    'say "x".py',
    "$HOME.py",
    "; rm.py",
    "new\nline.py",
    "ä.py",
    "-rf",
    "deep/er/x.py",
]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    for name in NAMES:
        write(folder / name, name.encode() * 3)
    write(folder / os.fsdecode(b"latin-\xe4"), b"x")
    write(folder / "empty", b"")
    write(folder / "run.sh", b"#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("deep/er")
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "work dir"
    folder.mkdir()
    yield folder
    tree.finish_caching(str(folder / "cache"))
    tree._held.clear()
    tree._keeping.clear()


def write(file: Path, data: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def put(code: Path, work: Path, run: str = "run1") -> dict[str, Any]:
    """A whole sync of `code`, without a network."""
    taken = list_code(code)
    where = {"cache": str(work / "cache"), "dest": str(work / run), "digest": taken.digest}
    answer = tree.place(**where)
    if answer["state"] == "unknown":
        answer = tree.place(**where, rows=[list(entry) for entry in taken.entries])
    sent = []
    if answer["state"] == "send":
        sent = [list(taken.entries[number]) for number in answer["paths"]]
        tree.fetch(answer["cache"], str(code), sent)
        answer = tree.place(**where)
    assert answer["state"] == "placed"
    assert answer["digest"] == taken.digest
    return {**answer, "sent": [row[0] for row in sent]}


def content(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for top, _, files in os.walk(folder):
        for name in files:
            path = Path(top, name)
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = str(path.readlink())
            else:
                found[key] = (path.read_bytes(), bool(path.stat().st_mode & 0o100))
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = str(path.readlink())
    return found


def test_it_is_standard_library_and_old_syntax() -> None:
    source = Path(treefiles.__file__).read_text(encoding="utf-8")
    module = ast.parse(source, feature_version=(3, 8))
    for node in ast.walk(module):
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert all(name.split(".")[0] in sys.stdlib_module_names for name in names)


def test_every_file_is_hashed_once(tmp_path: Path) -> None:
    for number in range(500):  # several batches for several threads
        write(tmp_path / str(number), str(number).encode())
    stats, problems = treefiles.hash_files(str(tmp_path), [str(number) for number in range(500)])
    assert problems == {}
    assert sorted(stats, key=int) == [str(number) for number in range(500)]


def test_placed_tree_is_the_code(code: Path, work: Path) -> None:
    put(code, work)
    assert content(work / "run1") == content(code)
    assert (work / "run1/run.sh").stat().st_mode & 0o777 == 0o755
    assert (work / "run1/empty").stat().st_mode & 0o777 == 0o644
    assert (work / "run1").stat().st_mode & 0o777 == 0o700


def test_second_run_sends_nothing_and_shares_nothing(code: Path, work: Path) -> None:
    put(code, work)
    tree.finish_caching(str(work / "cache"))
    assert put(code, work, "run2")["sent"] == []
    tree.finish_caching(str(work / "cache"))
    (work / "run2/empty").write_bytes(b"in place")
    assert content(work / "run1") == content(code)
    assert content(work / "cache") == content(code)
    assert (work / "run1/-rf").stat().st_ino != (work / "run2/-rf").stat().st_ino


def test_only_what_changed_is_sent(code: Path, work: Path) -> None:
    put(code, work)
    tree.finish_caching(str(work / "cache"))
    write(code / "-rf", b"new")
    (code / "run.sh").chmod(0o644)
    (code / "link").unlink()
    (code / "link").symlink_to("run.sh")
    (code / "empty").unlink()
    assert put(code, work, "run2")["sent"] == ["-rf"]
    assert content(work / "run2") == content(code)


def test_file_and_folder_change_places(code: Path, work: Path) -> None:
    put(code, work)
    tree.finish_caching(str(work / "cache"))
    for path in (code / "deep/er/x.py", code / "empty", code / "link"):
        path.unlink()
    (code / "deep/er").rmdir()
    write(code / "deep/er", b"now a file")
    write(code / "empty/x", b"now a folder")
    write(code / "link/y", b"and this")
    put(code, work, "run2")
    put(code, work, "run1")  # in place, too
    assert content(work / "run2") == content(work / "run1") == content(code)


@pytest.mark.parametrize("last_run_is_there", [False, True])
def test_content_that_changed_under_an_unchanged_list_is_mended(
    code: Path, work: Path, last_run_is_there: bool
) -> None:
    put(code, work)
    tree.finish_caching(str(work / "cache"))
    if not last_run_is_there:  # else the good copy comes from it
        shutil.rmtree(work / "run1")
    file = work / "cache/-rf"
    before = file.stat()
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(before.st_mtime_ns, before.st_mtime_ns))
    write(work / "cache/stray", b"not ours")
    assert put(code, work, "run2")["sent"] == ([] if last_run_is_there else ["-rf"])
    assert content(work / "run2") == content(code)


def test_file_the_job_changed_before_it_was_copied_back_is_sent_again(
    code: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tree, "_keep", lambda cache, *_: tree._unlock(cache))  # the channel ended at once
        put(code, work)
    tree.finish_caching(str(work / "cache"))
    write(work / "run1/-rf", b"rewritten by the job")
    assert put(code, work, "run2")["sent"] == ["-rf"]
    assert content(work / "run2") == content(code)


def test_damaged_list_is_refused(code: Path, work: Path) -> None:
    taken = list_code(code)
    rows = [list(entry) for entry in taken.entries]
    rows[0][4] = "0" * 64
    with pytest.raises(ValueError, match="damaged"):
        tree.place(str(work / "cache"), str(work / "run"), taken.digest, rows=rows)
    assert str(work / "cache") not in tree._held


# --- a run that is resumed ----------------------------------------------------------------------------------


def test_resumed_run_gets_the_new_tree_and_keeps_its_outputs(code: Path, work: Path) -> None:
    assert tree.digest_at(str(work / "run1")) == ""
    put(code, work)
    assert tree.digest_at(str(work / "run1")) == list_code(code).digest
    write(work / "run1/out/model.pt", b"weights")
    write(work / "run1/deep/er/log.txt", b"log")
    write(code / "-rf", b"new")
    write(code / "added.py", b"added")
    (code / "deep/er/x.py").unlink()
    (code / "link").unlink()
    answer = put(code, work)
    assert tree.digest_at(str(work / "run1")) == list_code(code).digest, "by what was put there"
    expected = {**content(code), "out/model.pt": (b"weights", False), "deep/er/log.txt": (b"log", False)}
    assert content(work / "run1") == expected
    assert (answer["kept"], answer["written"]) == ([], 2)
    assert put(code, work)["written"] == 0
    assert content(work / "run1") == expected


def test_what_the_job_made_in_the_way_is_kept_beside(code: Path, work: Path) -> None:
    put(code, work)
    write(work / "run1/results.csv", b"the job's")
    write(work / "run1/-rf", b"edited by the job")
    write(work / "run1/plots/1.png", b"png")
    write(code / "results.csv", b"the user's")
    write(code / "-rf", b"new")
    write(code / "plots", b"a file now")
    kept = put(code, work)["kept"]
    names = {name.split(".kept-")[0]: name for name in kept}
    assert set(names) == {"results.csv", "-rf", "plots"}
    assert (work / "run1" / names["results.csv"]).read_bytes() == b"the job's"
    assert (work / "run1" / names["-rf"]).read_bytes() == b"edited by the job"
    assert (work / "run1" / names["plots"] / "1.png").read_bytes() == b"png"
    assert (work / "run1/results.csv").read_bytes() == b"the user's"
    assert (work / "run1/plots").read_bytes() == b"a file now"


def test_file_only_the_job_changed_stays_as_the_job_left_it(code: Path, work: Path) -> None:
    put(code, work)
    write(work / "run1/empty", b"appended to")
    write(code / "-rf", b"new")
    put(code, work)
    assert (work / "run1/empty").read_bytes() == b"appended to"
    (code / "empty").unlink()
    put(code, work)
    assert (work / "run1/empty").read_bytes() == b"appended to"


def test_file_the_job_deleted_comes_back(code: Path, work: Path) -> None:
    put(code, work)
    (work / "run1/-rf").unlink()
    put(code, work)
    assert content(work / "run1") == content(code)


def test_update_that_was_interrupted_is_finished(
    code: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(code, work)
    tree.finish_caching(str(work / "cache"))
    for name in NAMES:
        write(code / name, b"new")
    real, left = os.rename, [3]

    def rename(old: str, new: str) -> None:
        if ".partial-" in old:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EIO, "cut off", old)
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(OSError, match="cut off"):
            put(code, work)
    assert not list(work.glob("*.partial-*"))
    assert put(code, work)["kept"] == []
    assert content(work / "run1") == content(code)


# --- failures -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("needs root to mount a tmpfs")
    yield folder
    tree._held.clear()
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_leaves_nothing_half_placed(code: Path, small_disk: Path) -> None:
    write(code / "big", os.urandom(700_000))
    put(code, small_disk)  # copying it back into the cache does not fit any more, and that is no error
    tree.finish_caching(str(small_disk / "cache"))
    assert content(small_disk / "run1") == content(code)
    write(code / "big", os.urandom(800_000))
    with pytest.raises(OSError, match="No space") as caught:
        put(code, small_disk)
    assert caught.value.errno == errno.ENOSPC
    assert (small_disk / "run1/big").stat().st_size == 700_000
    assert not list(small_disk.glob("*.partial-*"))


def test_garbage_of_a_killed_sync_is_removed(code: Path, work: Path) -> None:
    put(code, work)
    tree.finish_caching(str(work / "cache"))
    partial = work / "run9.partial-1-2"
    write(partial / "x", b"x")
    write(work / "cache.incoming/0", b"x")
    (work / "cache.partial").write_text(str(partial))
    put(code, work, "run2")
    assert not partial.exists()
    assert not (work / "cache.incoming").exists()
    assert not (work / "cache.partial").exists()


def test_cache_on_another_file_system(code: Path, work: Path, small_disk: Path) -> None:
    taken = list_code(code)
    cache, dest = str(small_disk / "cache"), str(work / "run1")
    tree.place(cache, dest, taken.digest)
    rows = [list(entry) for entry in taken.entries]
    answer = tree.place(cache, dest, taken.digest, rows=rows)
    tree.fetch(cache, str(code), [rows[number] for number in answer["paths"]])
    assert tree.place(cache, dest, taken.digest)["state"] == "placed"
    assert content(work / "run1") == content(code) == content(small_disk / "cache")
    assert cache not in tree._held


def test_second_sync_waits_for_the_first_and_says_who_holds_the_lock(work: Path) -> None:
    other = (work / "cache.lock").open("w")
    other.write("ann on laptop, process 7, since 2026-01-01")
    other.flush()
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(TimeoutError, match="ann on laptop, process 7"):
        tree.lock(str(work / "cache"), "me", 0.1)
    timer = threading.Timer(0.1, other.close)
    timer.start()
    assert tree.lock(str(work / "cache"), "me", 10)
    timer.join()
    assert not tree.lock(str(work / "cache"), "me", 0)
    tree.release(str(work / "cache"))
    assert tree.lock(str(work / "cache"), "me", 0)
    tree.release(str(work / "cache"))


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x"])
def test_paths_out_of_the_tree_are_refused(work: Path, path: str) -> None:
    with pytest.raises(ValueError, match="not a path below"):
        tree.unpack(str(work / "cache"), "0", row=[path, "f", False, 0, ""])


# --- kit's package ------------------------------------------------------------------------------------------


def test_package_is_placed_once_and_mended(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        **dict.fromkeys(
            ("nodekit/deploy/agent/a.py", "nodekit/deploy/host/a.py", "nodekit/training/a.py"), "X = 'ä\\n'\n"
        ),
        "nodekit/a/__init__.py": "",
        "nodekit/a/b.yaml": "x: 1\r\n",
    }
    from hashlib import sha256

    digest = tree.package_digest({path: sha256(text.encode()).hexdigest() for path, text in files.items()})
    folder = work / "kit" / digest
    assert not tree.keep_package(str(folder), digest=digest)
    assert tree.keep_package(str(folder), files=files, digest=digest)
    assert tree.keep_package(str(folder), digest=digest)
    assert (folder / "nodekit/a/b.yaml").read_bytes() == b"x: 1\r\n"
    compiled = {path.parent.parent.relative_to(folder).as_posix() for path in folder.rglob("*.pyc")}
    assert compiled == {"nodekit/deploy/agent", "nodekit/deploy/host", "nodekit/training"}, (
        "what nodes import"
    )
    (folder / "nodekit/a/b.yaml").write_text("broken")
    assert not tree.keep_package(str(folder), digest=digest)
    assert tree.keep_package(str(folder), files=files, digest=digest)
    assert [path.name for path in (work / "kit").iterdir()] == [digest]


def test_nobody_else_may_write_where_kits_package_lies(work: Path) -> None:
    before = os.umask(0)
    try:
        digest = tree.package_digest({"a.py": hashlib.sha256(b"").hexdigest()})
        assert tree.keep_package(str(work / "nodekit/kit/1"), {"a.py": ""}, digest=digest)
    finally:
        os.umask(before)
    for folder in ("nodekit", "nodekit/kit", "nodekit/kit/1"):
        assert (work / folder).stat().st_mode & 0o777 == 0o700
