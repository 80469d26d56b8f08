"""Horovod: what the other engines' tests do not show of it, and the script that builds it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import warm_python
from free_ports import free_port

from nodekit.training.engine_info import EngineError
from nodekit.training.engines import build_horovod
from nodekit.training.engines.load import check_engine
from nodekit.training.options.arguments import parse

TASK = """
import os, signal
import torch
from nodekit.training.engines import horovod
from nodekit.training.tasks.digits import Digits

class Model(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.never = torch.nn.Linear(3, 3)
        self.by_one = torch.nn.Linear(10, 10)

    def forward(self, images):
        scores = self.inner(images)
        return self.by_one(scores) if os.environ.get("RANK") == "1" else scores

class Parts(Digits):
    "Of two linear layers, rank 1 alone needs one, and no rank the other."
    def model(self):
        return Model(super().model())

average, steps = horovod.Engine.average, 0

def average_or_die(engine):
    "Rank 1 is killed when the gradients of the tenth step are averaged, the first time."
    global steps
    steps += 1
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == "1" and steps == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    average(engine)

class Killed(Digits):
    def __init__(self, *args):
        super().__init__(*args)
        horovod.Engine.average = average_or_die
"""


def train(
    folder: Path, *arguments: str, launch: tuple[str, ...] = (), num_ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    (folder / "task.py").write_text(TASK)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *launch]
    module = ["-m", "nodekit.training", "--output", "out", "--epochs", "1", "--micro-batch", "16"]
    return subprocess.run(
        [warm_python.program(), "-m", *launcher, *module, "--lr", "0.0003", "--clip", "0.5", *arguments],
        cwd=folder,
        env={**os.environ, **warm_python.environment()},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of a model of which each rank's loss leaves out another part."""
    folder = tmp_path_factory.mktemp("ddp")
    done = train(folder, "--task", "task.py:Parts", "--find-unused")
    assert done.returncode == 0, done.stderr
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("switches", "apart"), [((), 2e-6), (("--compress", "fp16"), 2e-3)])
def test_ranks_may_leave_out_different_parameters(
    switches: tuple[str, ...], apart: float, by_ddp: dict[int, float], tmp_path: Path
) -> None:
    done = train(tmp_path, "--engine", "horovod", "--task", "task.py:Parts", *switches)
    assert done.returncode == 0, done.stderr
    assert "Horovod" not in done.stderr  # no rank takes another's end for an error
    found = losses(tmp_path)
    assert found == pytest.approx(by_ddp, abs=apart)
    assert (max(abs(loss - by_ddp[step]) for step, loss in found.items()) > 2e-6) == bool(switches)


LEAVES = """
import os, signal, time
from pathlib import Path
from nodekit.training import rank
from nodekit.training.engines import horovod
from nodekit.training.options.arguments import read
from nodekit.training.process.stop import leave

options = read(["--engine", "horovod"])
with rank._world(options) as world:
    horovod._init(options, world)
    pids = world.gather(os.getpid())
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while ") T " not in Path(f"/proc/{pids[1]}/stat").read_text():
        time.sleep(0.01)
leave(7)
"""


@pytest.mark.slow
def test_a_rank_ends_though_horovods_threads_wait_for_one_that_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    ranks = {**os.environ, **warm_python.environment(), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    ranks |= {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    leaving, stopped = (
        subprocess.Popen(
            [warm_python.program(), "leaves.py"],
            cwd=tmp_path,
            env={**ranks, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    )
    try:
        assert leaving.wait(100) == 7
        assert stopped.poll() is None
    finally:
        for each in (leaving, stopped):
            each.kill()
            each.wait()


@pytest.mark.slow
def test_a_rank_that_is_killed_while_gradients_are_averaged_costs_no_step(tmp_path: Path) -> None:
    """The one that is left does not wait, and its weights are still those of the step before."""
    wanted = (
        "--engine",
        "horovod",
        "--task",
        "task.py:Killed",
        "--snapshot-every",
        "1000",
        "--timeout",
        "60",
    )
    done = train(tmp_path, *wanted, launch=("--max-restarts", "1"))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    # What rank 0 was told by Horovod is printed unless torchrun has told it to stop before.
    assert "resumed at step 9 " in said
    assert len(losses(tmp_path)) == 23


@pytest.mark.slow
def test_a_horovod_that_was_not_built_for_this_torch_is_named_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import horovod

    shutil.copytree(
        Path(horovod.__file__).parent, tmp_path / "lib/horovod", ignore=shutil.ignore_patterns("*.so")
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'lib'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    done = train(tmp_path, "--engine", "horovod", num_ranks=1)
    assert done.returncode == 1
    assert "the Horovod here was not built for this python and torch" in done.stderr
    assert "python -m nodekit.training.engines.build_horovod" in done.stderr


def test_without_horovod_the_script_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        EngineError, match=r"needs horovod: python -m nodekit\.training\.engines\.build_horovod "
    ):
        check_engine(parse(["--engine", "horovod"], {}), "cpu")


def test_missing_programs_are_named(tmp_path: Path) -> None:
    (tmp_path / "make").write_text("#!/bin/sh\n")
    (tmp_path / "make").chmod(0o755)
    with pytest.raises(build_horovod.BuildError, match=r"missing: g\+\+ cmake( python3-dev)?; install them"):
        build_horovod.check(str(tmp_path))


def release(folder: Path) -> Path:
    """As much of the sdist as the script changes."""
    source = folder / f"horovod-{build_horovod.VERSION}"
    for name, (old, _) in build_horovod._PATCHES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"before\n{old}\nafter\n")
    return source


@pytest.mark.parametrize("name", list(build_horovod._PATCHES))
def test_a_release_that_is_not_as_expected_is_left_as_it_is(name: str, tmp_path: Path) -> None:
    source = release(tmp_path)
    before = {each: (source / each).read_text() for each in build_horovod._PATCHES}
    for text in ("set(CMAKE_CXX_STANDARD 17)\n", before[name] * 2):
        (source / name).write_text(text)
        with pytest.raises(build_horovod.BuildError, match=rf"^{name} of Horovod .* another release"):
            build_horovod.patch(source)
        for each in build_horovod._PATCHES:
            assert (source / each).read_text() == (text if each == name else before[each])


def test_a_newer_standard_is_asked_for(tmp_path: Path) -> None:
    source = release(tmp_path)
    build_horovod.patch(source, optimise=False)
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        text = (source / name).read_text()
        assert "set(CMAKE_CXX_STANDARD 20)" in text
        assert "STANDARD 14" not in text
    assert "-O0" in (source / "CMakeLists.txt").read_text()


@pytest.mark.slow
def test_an_sdist_with_another_checksum_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = release(tmp_path)
    (source / "setup.py").write_text(f"open({str(tmp_path / 'it-was-run')!r}, 'w')\n")
    with tarfile.open(tmp_path / f"{source.name}.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert build_horovod.main(["--wheel", str(tmp_path / "wheel")]) == 1
    said = capsys.readouterr().err
    assert "failed with exit status 1" in said
    assert "DO NOT MATCH THE HASHES" in said
    assert not (tmp_path / "it-was-run").exists()
    assert not (tmp_path / "wheel").exists()


@pytest.mark.slow
def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    source = release(tmp_path)
    (source / "setup.py").write_text(
        "print('CMake Error at CMakeLists.txt:1 (message):', '  no such header', *range(50), sep='\\n')\n"
        "raise SystemExit('error: it has failed')\n"
    )
    said = r"(?s)build .* failed .*CMake Error at .*  no such header\n.*error: it has failed"
    with pytest.raises(build_horovod.BuildError, match=said):
        build_horovod.build(source, tmp_path / "wheel")
