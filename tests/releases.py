"""Whether the mends of torch's rendezvous hold for every line of torch releases that pyproject.toml allows.

``make releases`` runs tests/deploy/agent/test_rendezvous.py against each and writes the table of docs/releases.md. It
is no part of the suite, for which releases can be had is the package index's to say. A wheel is a gigabyte, but its
rendezvous is twelve files of plain python that go by the interpreter's own torch: only these are read from the index.

``python tests/releases.py FOLDER ARG…`` runs pytest with what is in FOLDER in place of the installed
``torch.distributed.elastic.rendezvous``.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

RELEASES = ("2.10.0", "2.11.0", "2.12.1", "2.14.0", "2.15.0")
"""One of each line of releases that pyproject.toml allows, besides the installed one."""
ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs/releases.md"
PACKAGE = "torch.distributed.elastic.rendezvous"
READ = "--read"
_TRIES = 3


def fetch(release: str, folder: Path) -> Path:
    """The folder with the rendezvous of a release; kept below `folder` for the next time."""
    kept = folder / release
    if not kept.exists():
        for tries_left in reversed(range(_TRIES)):
            try:
                # In a process of its own: pip is no library, and warns.
                argv = [__file__, READ, _url_of(release), folder / f"{release}.part"]
                subprocess.run([sys.executable, *argv], check=True, timeout=120)
                break
            except subprocess.SubprocessError:
                if not tries_left:
                    raise
                time.sleep(2)
        (folder / f"{release}.part" / PACKAGE.replace(".", "/")).rename(kept)
        shutil.rmtree(folder / f"{release}.part")
    return kept


def _url_of(release: str) -> str:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    done = subprocess.run(
        [*pip, "--report", "-", f"torch=={release}"], capture_output=True, text=True, check=True, timeout=120
    )
    return str(json.loads(done.stdout)["install"][0]["download_info"]["url"])


def _read_wheel(url: str, into: Path) -> None:
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP  # reads only what is asked for
    from pip._internal.network.session import PipSession

    is_file = urlsplit(url).scheme == "file"
    with (
        Path(urlsplit(url).path).open("rb") if is_file else LazyZipOverHTTP(url, PipSession()) as file,
        zipfile.ZipFile(file) as wheel,
    ):
        for name in wheel.namelist():
            if name.startswith(PACKAGE.replace(".", "/") + "/") and name.endswith(".py"):
                wheel.extract(name, into)


def put_in_place(folder: Path) -> None:
    """Have ``torch.distributed.elastic.rendezvous`` come from `folder` in this process."""
    import torch.distributed.elastic

    assert not [name for name in sys.modules if name.startswith(PACKAGE)], "it is imported already"
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = torch.distributed.elastic.rendezvous = module
    spec.loader.exec_module(module)


def try_release(release: str) -> str:
    """What test_rendezvous.py says to a release, in a line; "not to be had: …" if the index has it not."""
    kept = ROOT / ".venv/upstream"
    kept.mkdir(exist_ok=True)
    try:
        folder = fetch(release, kept)
    except subprocess.CalledProcessError as error:
        words = (error.stderr or "").strip().splitlines() or [str(error)]
        return f"not to be had: {words[-1]}"
    with tempfile.TemporaryDirectory() as base:
        argv = [__file__, folder, "-q", "-p", "no:cacheprovider", f"--basetemp={base}/pytest"]
        done = subprocess.run(
            [sys.executable, *argv, ROOT / "tests/deploy/agent/test_rendezvous.py"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
    return re.sub(r" in [\d.]+s.*", "", done.stdout.strip().splitlines()[-1])


def rows() -> dict[str, str]:
    """The committed table: release → what the tests said."""
    return dict(re.findall(r"^\| (\d[\w.]*) +\| (.*?) +\|$", TABLE.read_text(), re.MULTILINE))


def main() -> int:
    """Try all releases, two at a time, and write down what was found; 1 if one failed or could not be had."""
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(RELEASES, pool.map(try_release, RELEASES), strict=True))
    found[torch.__version__.partition("+")[0]] = "the installed one: with every `make test`"
    for release, said in sorted(found.items(), key=lambda each: line_of(each[0])):
        print(f"{release:8}  {said}")
    table = rows() | {release: said for release, said in found.items() if "not to be had" not in said}
    lines = [f"| {each:8} | {table[each]:45} |\n" for each in sorted(table, key=line_of)]
    text, start = TABLE.read_text(), "| -------- |"
    before = text[: text.index("\n", text.index(start)) + 1]
    TABLE.write_text(before + "".join(lines))
    return int(any("failed" in said or "not to be had" in said for said in found.values()))


def line_of(release: str) -> tuple[int, int]:
    """Its line of releases, to sort by: "2.10.1" → (2, 10)."""
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    elif sys.argv[1] == READ:
        _read_wheel(sys.argv[2], Path(sys.argv[3]))
    else:
        put_in_place(Path(sys.argv[1]))
        sys.exit(pytest.main(sys.argv[2:]))
