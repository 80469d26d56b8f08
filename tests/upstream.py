"""torch's rendezvous as other releases have it, to run tests/test_rendezvous.py against each.

A wheel is a gigabyte, but its rendezvous is twelve files of plain python that go by the interpreter's own torch: only
these are read from the package index. ``python tests/upstream.py FOLDER ARG…`` runs pytest with what is in FOLDER in
place of the installed ``torch.distributed.elastic.rendezvous``.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

RELEASES = ("2.10.0", "2.11.0", "2.12.1", "2.14.0", "2.15.0")
"""One of each line of releases that pyproject.toml allows, besides the installed one."""
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


if __name__ == "__main__":
    if sys.argv[1] == READ:
        _read_wheel(sys.argv[2], Path(sys.argv[3]))
    else:
        put_in_place(Path(sys.argv[1]))
        sys.exit(pytest.main(sys.argv[2:]))
