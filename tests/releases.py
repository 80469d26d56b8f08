"""Whether kit works with every line of torch releases, old ones too; writes the tables of docs/releases.md.

It is no part of the suite, for which releases can be had is the package index's to say.

``make releases`` runs tests/deploy/agent/test_rendezvous.py against the rendezvous of each. A wheel is a gigabyte, but
its rendezvous is twelve files of plain python that go by the interpreter's own torch: only these are read.

``make releases-venvs``, or ``python tests/releases.py --venvs [RELEASE…]``, installs each into a venv of its own (3 to
6 GB, removed afterwards; everything else comes from .venv), and runs the tests of the agent, the rendezvous and the
recovery of a user's own script there, and of ranks that keep their step with releases that the training module takes.

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
import venv
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from borrowing_venv import borrow

from nodekit.training.errors import is_safe

RELEASES = (
    "2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.14.0", "2.15.0",
)  # fmt: skip
"""One of each line of releases that kit runs a user's script with, besides the installed one."""
IN_VENVS = ("2.4.1", "2.6.0", "2.8.0", "2.10.0", "2.12.1", "2.14.1", "2.15.0")
VENV_TESTS = (
    "tests/deploy/agent/test_rendezvous.py",
    "tests/deploy/agent/test_agent.py",
    "tests/deploy/agent/test_workers.py",
    "tests/deploy/drill/test_drill.py::test_a_script_with_ddp_goes_on_from_its_own_checkpoint",
)
TRAINING_TESTS = ("tests/deploy/agent/test_reform.py", "tests/deploy/agent/test_own_loop.py")
"""With releases that the training module takes: of ranks that keep their step, by private names of torch's, too."""
_DESCRIPTORS = (
    "tests/deploy/agent/test_agent.py::test_an_agent_outlives_that_strangers_have_all_its_descriptors"
)
_FRESH = "tests/deploy/agent/test_workers.py::test_a_fork_is_to_a_script_what_a_fresh_interpreter_is"
_HOROVOD = (
    "tests/deploy/agent/test_reform.py::test_horovod_does_not_wait_for_a_silent_node",
    "tests/deploy/agent/test_reform.py::test_a_node_is_lost_and_another_comes_in[horovod]",
)  # .venv has it, built for the installed torch
DIFFERENT = {
    (2, 4): (_DESCRIPTORS, _FRESH),
    (2, 6): (_DESCRIPTORS, _FRESH),
    (2, 8): (_FRESH,),
    (2, 10): _HOROVOD,
}
"""What is known to be different with a line of releases; docs/releases.md says how."""
VENVS = "--venvs"
MENDS_TABLE, VENVS_TABLE = "the tests of the rendezvous", "agent, ranks, rendezvous and recovery"
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


def try_in_venv(release: str) -> str:
    """What these tests say in a venv with a release, in a line; "not to be had: …" if it cannot be installed."""
    with tempfile.TemporaryDirectory(prefix="torch-") as base:
        venv.create(base, with_pip=False)
        python = f"{base}/bin/python"
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-cache-dir"]
        done = subprocess.run(
            [*pip, f"torch=={release}", "numpy", "setuptools"],
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )
        if done.returncode:
            return f"not to be had: {done.stderr.strip().splitlines()[-1]}"
        borrow(Path(base))
        left_out = [f"--deselect={test}" for test in DIFFERENT.get(line_of(release), ())]
        argv = [
            python,
            "-m",
            "pytest",
            "-q",
            *left_out,
            "-p",
            "no:cacheprovider",
            f"--basetemp={base}/pytest",
            *VENV_TESTS,
            *(TRAINING_TESTS if is_safe(release) else ()),
        ]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
    return re.sub(r" in [\d.]+s.*", "", done.stdout.strip().splitlines()[-1])


def rows(table: str = MENDS_TABLE) -> dict[str, str]:
    """A committed table, by the heading of its second column: release → what the tests said."""
    _, _, text = TABLE.read_text().partition(f"| {table} ")
    return dict(re.findall(r"^\| (\d[\w.]*) +\| (.*?) +\|$", text.partition("\n\n")[0], re.MULTILINE))


def write(table: str, found: Mapping[str, str]) -> None:
    """Write what was found into a table; rows of other releases stay."""
    merged = rows(table) | {release: said for release, said in found.items() if "not to be had" not in said}
    lines = [f"| {each:8} | {merged[each]:45} |" for each in sorted(merged, key=line_of)]
    before, heading, rest = TABLE.read_text().partition(f"| {table} ")
    head, _, after = rest.partition("\n\n")
    first_lines = head.splitlines()[:2]  # the rest of the heading, and the rule below it
    TABLE.write_text(
        before + heading + "\n".join([*first_lines, *lines]) + ("\n\n" + after if after else "\n")
    )


def main(releases: Sequence[str], *, in_venvs: bool) -> int:
    """Try the releases, and write down what was found; 1 if one failed or could not be had."""
    if in_venvs:
        found = {}
        for release in releases or IN_VENVS:  # one at a time: each is gigabytes
            found[release] = try_in_venv(release)
            print(f"{release:8}  {found[release]}", flush=True)
            write(VENVS_TABLE, found)
    else:
        with ThreadPoolExecutor(2) as pool:
            found = dict(zip(RELEASES, pool.map(try_release, RELEASES), strict=True))
        found[torch.__version__.partition("+")[0]] = "the installed one: with every `make test`"
        for release, said in sorted(found.items(), key=lambda each: line_of(each[0])):
            print(f"{release:8}  {said}")
        write(MENDS_TABLE, found)
    return int(any("failed" in said or "not to be had" in said for said in found.values()))


def line_of(release: str) -> tuple[int, int]:
    """Its line of releases, to sort by: "2.10.1" → (2, 10)."""
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


if __name__ == "__main__":
    if len(sys.argv) == 1 or sys.argv[1] == VENVS:
        sys.exit(main(sys.argv[2:], in_venvs=len(sys.argv) > 1))
    elif sys.argv[1] == READ:
        _read_wheel(sys.argv[2], Path(sys.argv[3]))
    else:
        put_in_place(Path(sys.argv[1]))
        sys.exit(pytest.main(sys.argv[2:]))
