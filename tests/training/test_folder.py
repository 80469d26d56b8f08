"""The folder of a run without kit: one for the same training, another for any other, and one run in it at a time."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import TESTS

from nodekit.training import World, rank
from nodekit.training.attempts import reform
from nodekit.training.folder import default_folder, held
from nodekit.training.options.arguments import parse, read

HOLDS = """
import sys
from pathlib import Path
from nodekit.training.folder import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def folder(*arguments: str) -> Path:
    return default_folder(read(arguments, {}), 1)


def of_ranks(world_size: int, *arguments: str) -> Path:
    return default_folder(read(arguments, {"WORLD_SIZE": str(world_size)}, folder=Path()), world_size)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--epochs", "50"],
        ["--launcher", "spawn", "--nproc-per-node", "2"],
        ["--gpus", "0,1", "--backend", "gloo", "--init-method", "tcp://127.0.0.1:12345"],
        ["--micro-batch", "8", "--num-workers", "2"],
        ["--eval-every", "10", "--best", "loss", "--snapshot-every", "5", "--keep", "3"],
        ["--lr", "0.003", "--task", "digits"],  # as they are anyhow
    ],
)
def test_what_may_change_from_one_start_to_the_next_leaves_the_folder(arguments: list[str]) -> None:
    assert folder(*arguments) == folder()


def test_every_other_training_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    others = [
        [],
        ["--task", "mnist"],
        ["--task", "mnist", "--data", "a"],
        ["--task", "mnist", "--data", "b"],
        ["--task", "a/own.py:Task"],
        ["--task", "b/own.py:Task"],
        ["--model", "org/name"],
        ["--init-from", "a"],
        ["--engine", "fsdp"],
        ["--engine", "deepspeed"],
        ["--engine", "deepspeed", "--zero", "3"],
        ["--seed", "1"],
        ["--batch-size", "32"],
        ["--lr", "0.1"],
        ["--amp", "bf16"],
        ["--local-sgd", "4"],
        ["--diloco", "4"],
        ["--clip", "1"],
    ]
    found = [folder(*each) for each in others]
    assert len(set(found)) == len(others)
    assert {each.parent for each in found} == {Path("runs")}
    assert found[0].name.startswith("digits-ddp-")
    assert found[4].name.startswith("own-Task-ddp-")


def test_with_a_batch_for_each_rank_the_folder_does_not_depend_on_how_many_ranks_there_are(
    tmp_path: Path,
) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 8}')
    argv = ["--engine", "deepspeed", "--deepspeed-config", str(config)]
    assert of_ranks(2, *argv) == of_ranks(1, *argv)
    assert of_ranks(2, *argv, "--batch-size", "64") != of_ranks(2, *argv)
    config.write_text('{"train_micro_batch_size_per_gpu": 16}')
    assert of_ranks(2, *argv) != of_ranks(2, *argv, "--batch-size", "16")


def test_a_path_is_one_folder_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for option, name in (("--data", "a b"), ("--init-from", "w"), ("--task", "own.py:Task")):
        assert (
            folder(option, name) == folder(option, f"{tmp_path}/{name}") == folder(option, f"./x/../{name}")
        )


@pytest.mark.parametrize("system", ["", str(TESTS / "windows")], ids=["posix", "windows"])
def test_a_folder_is_held_until_the_process_ends_however_it_ends(system: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HOLDS, str(tmp_path / "$x; 'y'")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([system, os.environ.get("PYTHONPATH", "")])}

    def one_more() -> str:
        done = subprocess.run(
            argv, env=env, input="", capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        assert re.search(rf"InUse: .* is in use by process {other.pid} on .*--output", one_more())
        other.kill()
        other.wait()
    assert one_more() == "held\n"


def test_a_folder_that_cannot_be_locked_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with held(tmp_path / "file" / "out"):
        pass
    assert "do not start the same training twice at once" in caplog.text


def test_each_attempt_writes_to_the_folder_of_the_node_that_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that stays has another node's number where a node before it is lost."""
    written: list[Path] = []

    def run_loops(
        _loops: object, _options: object, _world: World, _task: object, folder: Path, _: object
    ) -> Any:
        written.append(folder)
        return {}

    def run(world: World, _stop: object, _make: object, attempt: Callable[[World], int], _: object) -> int:
        return max(attempt(replace(world, node_rank=number)) for number in (1, 0))

    monkeypatch.setattr(rank, "log_to_stderr", lambda: None)
    monkeypatch.setattr(rank, "_run_loops", run_loops)
    monkeypatch.setattr(reform, "run", run)
    monkeypatch.setenv("NODEKIT_GENERATION", "0")  # as by kit, without which no process stays
    assert rank.train(parse(["--output", str(tmp_path)], {})) == 0
    assert written == [tmp_path / "node1", tmp_path]
