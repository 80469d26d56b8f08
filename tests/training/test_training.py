"""The training module as it is run: under torchrun, killed, resumed, stopped, on more and fewer ranks."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from free_ports import free_port

from nodekit.training import Snapshots
from nodekit.training.options.arguments import parse

pytestmark = pytest.mark.slow

FAULTY = '''
import os, random, signal, threading, time
import numpy as np
import torch
from torch import nn
from nodekit.training.tasks.digits import Digits, Pixels

PLAIN = "PLAIN" in os.environ

if "SLOW_DISK" in os.environ:
    from nodekit.training.snapshots.files import commit
    def slowly(*arguments, place=commit.place, **more):
        time.sleep(float(os.environ["SLOW_DISK"]))
        place(*arguments, **more)
    commit.place = slowly

class Noisy(Pixels):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        if not PLAIN:
            image = image + 0.1 * random.random() + 0.1 * float(np.random.standard_normal())
        return image, label, index

class Faulty(Digits):
    """200 digits, with all that must come back on a resume, and a fault to order."""
    calls = 0

    def train_data(self):
        data = super().train_data()
        return Noisy(data.images[:200], data.labels[:200])

    def model(self):
        noise = [] if PLAIN else [nn.BatchNorm1d(32), nn.Dropout(0.3)]
        start = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32)]
        return nn.Sequential(*start, *noise, nn.ReLU(), nn.Linear(32, 10))

    def loss(self, model, batch):
        self.calls += 1
        is_chosen = os.environ.get("KILL_RANK", os.environ.get("RANK")) == os.environ.get("RANK")
        is_first_time = "KILL_RANK" not in os.environ or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if self.calls == int(os.environ.get("KILL_AT", 0)) and is_first_time:
            for thread in threading.enumerate():  # the tests count on the snapshot of the step before
                if thread.name == "nodekit-snapshot":
                    thread.join()
            time.sleep(0.2)  # who is left saves its step only if the last save took less time than has passed since
            if is_chosen:
                os.kill(os.getpid(), signal.SIGKILL)
        with open(f"{os.environ['SEEN']}.{os.environ.get('RANK', 0)}", "a") as file:
            file.writelines(f"{index}\\n" for index in batch[2].tolist())
        return super().loss(model, batch[:2]) * float(os.environ.get("LOSS_SCALE", 1))

    def optimizer(self, model, lr):
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
'''


def environ(**extra: object) -> dict[str, str]:
    return {**os.environ, **warm_python.environment(), **{name: str(value) for name, value in extra.items()}}


@contextlib.contextmanager
def torchrun(
    num_ranks: int, *arguments: object, restarts: int = 0, **extra: object
) -> Iterator[subprocess.Popen[str]]:
    """The module under real torchrun; nothing of it outlives the block."""
    launcher = [
        warm_python.program(), "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks),
        "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--max-restarts", str(restarts),
        "-m", "nodekit.training",
    ]  # fmt: skip
    with started([*launcher, *map(str, arguments)], **extra) as process:
        yield process


@contextlib.contextmanager
def started(argv: list[str], **extra: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        argv,
        env=environ(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def ranks(
    world_size: int,
    program: list[str],
    *arguments: object,
    one_node: bool = False,
    python: str = "",
    **extra: Any,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks started by hand, on one node or each on its own; an extra that is a list has a value per rank.

    `python` is `warm_python`'s, unless the pids have to be those of the ranks.
    """
    port = free_port()
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    [python or warm_python.program(), *program, *map(str, arguments)],
                    **{
                        "RANK": rank,
                        "WORLD_SIZE": world_size,
                        "LOCAL_RANK": rank if one_node else 0,
                        "LOCAL_WORLD_SIZE": world_size if one_node else 1,
                        "NODE_RANK": 0 if one_node else rank,
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                        **{
                            name: value[rank] if isinstance(value, list) else value
                            for name, value in extra.items()
                        },
                    },
                )
            )
            for rank in range(world_size)
        ]


MODULE = ["-m", "nodekit.training"]


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    return output


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout
    seen = ""
    for line in process.stdout:  # ends with the process, and the test's own timeout is behind that
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"no {text!r} in: {seen}")


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    untimed = ("step", "epoch", "loss", "lr", "test")
    return [{name: value for name, value in line.items() if name in untimed} for line in lines]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def result(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return values


def test_digits_reach_their_accuracy_on_two_ranks(tmp_path: Path) -> None:
    output, progress = tmp_path / "it's an $output; folder", tmp_path / "progress"
    started_s = time.monotonic()
    with torchrun(2, "--output", output, NODEKIT_PROGRESS_FILE=progress) as process:
        said = finish(process)
    reached = result(output)
    assert reached["accuracy"] >= 0.97
    assert 0 < reached["train_seconds"] < time.monotonic() - started_s
    assert reached["steps"] == len(losses(output))
    assert "test accuracy 0.9" in said
    assert "\r" not in said
    assert progress.read_text().startswith(f"{reached['steps']}/{reached['steps']} epoch ")
    assert list((output / "tensorboard").glob("events.*"))
    assert len([line for line in metrics(output) if "test" in line]) == reached["epochs"]


def test_workers_of_the_data_loader_do_not_keep_the_process(tmp_path: Path) -> None:
    argv = ["--epochs", "1", "--num-workers", "2", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "nodekit.training", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "epoch 1 done" in done.stdout


def test_nothing_of_the_loop_is_freed_at_the_end(tmp_path: Path) -> None:
    """To free DDP there joins gloo's threads while holding the GIL, and now and then hangs for ever (torch 2.13)."""
    (tmp_path / "freed.py").write_text(
        "import weakref\n"
        "from nodekit.training.tasks.digits import Digits\n"
        "class Task(Digits):\n"
        "    def model(self):\n"
        "        model = super().model()\n"
        "        weakref.finalize(model, print, 'freed', flush=True).atexit = False\n"
        "        return model\n"
    )
    # As in a fork of kit's, torch is imported already: an import on the way leaves a traceback that keeps all alive.
    program = "import runpy, nodekit.training.loop; runpy.run_module('nodekit.training', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program, "--task", "freed.py:Task", "--epochs", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "epoch 1 done" in done.stdout
    assert "freed" not in done.stdout.splitlines()


@pytest.fixture
def task(tmp_path: Path) -> str:
    """The name of the faulty task, in a folder with an awkward name."""
    file = tmp_path / "their 'own' code" / "faulty.py"
    file.parent.mkdir()
    file.write_text(FAULTY)
    return f"{file}:Faulty"


def test_a_killed_job_resumes_mid_epoch_to_the_identical_curve_and_weights(tmp_path: Path, task: str) -> None:
    arguments = ["--task", task, "--batch-size", 16, "--micro-batch", 5, "--epochs", 3, "--snapshot-every", 6]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    # Three ranks: with two, the order of a sum could not show.
    with torchrun(3, *arguments, "--output", whole, SEEN=tmp_path / "seen") as process:
        finish(process)
    assert len(losses(whole)) == 39
    kill_at = 25 + 2 * 7 + 1  # two micro-batches a step, one in the short last step of epoch 1
    with torchrun(3, *arguments, "--output", broken, SEEN=tmp_path / "seen", KILL_AT=kill_at) as process:
        assert "SIGKILL" in finish(process, 1)
    assert len(losses(broken)) == 20, "the fault was to come in step 21, the 8th of epoch 2"
    with torchrun(3, *arguments, "--output", broken, SEEN=tmp_path / "seen") as process:
        assert "resumed at step 18 (epoch 2, 80 of 200 samples done) from" in finish(process)
    assert metrics(broken) == metrics(whole)
    assert result(broken)["weights_sha256"] == result(whole)["weights_sha256"]


def test_scaler_and_clipping_resume_identically_in_a_world_of_one(tmp_path: Path, task: str) -> None:
    arguments = [
        "--task", task, "--batch-size", 50, "--epochs", 4, "--snapshot-every", 1,
        "--amp", "fp16", "--clip", 0.5, "--lr", 0.1, "--lr-scale", "linear",
        "--schedule", "constant", "--warmup-steps", 3,
    ]  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for output, kill_at, code in ((whole, 0, 0), (broken, 7, -signal.SIGKILL), (broken, 0, 0)):
        argv = [warm_python.program(), *MODULE, *map(str, arguments), "--output", str(output)]
        # The loss is so large that the scaler must learn its scale in the first steps.
        with started(argv, SEEN=tmp_path / "seen", KILL_AT=kill_at, LOSS_SCALE=1000) as process:
            finish(process, code)
    assert result(broken)["resumed_at_step"] == 6
    assert metrics(broken) == metrics(whole)
    assert result(broken)["weights_sha256"] == result(whole)["weights_sha256"]
    assert [line["lr"] for line in metrics(whole) if "lr" in line][:4] == [
        pytest.approx(0.1 * 50 / 256 * part) for part in (1 / 3, 2 / 3, 1, 1)
    ]


def test_each_sample_is_used_once_and_the_curve_stays_when_ranks_come_and_go(
    tmp_path: Path, task: str
) -> None:
    arguments = ["--task", task, "--batch-size", 16, "--epochs", 1, "--snapshot-every", 1]
    whole, changing = tmp_path / "whole", tmp_path / "changing"
    for output, world_size, kill_at in ((whole, 3, 0), (changing, 3, 5), (changing, 2, 5), (changing, 3, 0)):
        with ranks(
            world_size, MODULE, *arguments, "--output", output, one_node=True,
            SEEN=tmp_path / f"seen {output.name}", KILL_AT=kill_at, PLAIN=1,
        ) as processes:  # fmt: skip
            for process in processes:
                finish(process, -signal.SIGKILL if kill_at else 0)
    seen = [int(index) for file in tmp_path.glob("seen changing.*") for index in file.read_text().split()]
    assert sorted(seen) == list(range(200))
    assert result(changing)["resumed_at_step"] == 8
    assert losses(changing) == pytest.approx(losses(whole), rel=1e-5)
    assert result(changing)["accuracy"] == pytest.approx(result(whole)["accuracy"], abs=1 / 360)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_to_one_rank_stops_all_at_the_same_edge_with_a_snapshot(
    tmp_path: Path, task: str, number: signal.Signals
) -> None:
    arguments = ["--epochs", 5000, "--output", tmp_path, "--task", task]
    extra = {"SEEN": tmp_path / "seen", "SLOW_DISK": 0.5}
    with ranks(2, MODULE, *arguments, one_node=True, **extra) as processes:
        wait_for_line(processes[0], "first step")
        processes[1].send_signal(number)
        said = finish(processes[0], 143)
        finish(processes[1], 143)
    num_steps = len(losses(tmp_path))
    assert f"stopped at step {num_steps}/" in said
    with ranks(2, MODULE, *arguments, one_node=True, **extra) as processes:
        wait_for_line(processes[0], f"resumed at step {num_steps} ")


def test_a_stop_does_not_wait_for_a_silent_peer(tmp_path: Path) -> None:
    arguments = ["--epochs", 500, "--grace", 1, "--output", tmp_path]
    with ranks(2, MODULE, *arguments, one_node=True, python=sys.executable) as processes:
        wait_for_line(processes[0], "first step")
        processes[1].send_signal(signal.SIGSTOP)
        processes[0].send_signal(signal.SIGTERM)
        before = time.monotonic()
        assert "1 s of grace" in finish(processes[0], 143)
        assert time.monotonic() - before < 60, "a collective would wait for 600 s"


def test_a_rank_whose_peer_died_fails_and_says_why(tmp_path: Path) -> None:
    errors = tmp_path / "error.json"
    with ranks(
        2, MODULE, "--epochs", 500, "--output", tmp_path, one_node=True, TORCHELASTIC_ERROR_FILE=errors
    ) as processes:
        wait_for_line(processes[0], "first step")
        processes[1].kill()
        assert "this rank failed" in finish(processes[0], 1)
    assert "Traceback" in errors.read_text()


def test_a_rank_whose_peer_died_brings_the_snapshot_under_way_to_the_disk(tmp_path: Path, task: str) -> None:
    snapshots = tmp_path / "snapshots"
    arguments = ["--task", task, "--epochs", 500, "--snapshot-every", 4, "--output", tmp_path]
    extra = {"SEEN": tmp_path / "seen", "SLOW_DISK": 2, "NODEKIT_SNAPSHOT_DIR": snapshots}
    with ranks(2, MODULE, *arguments, one_node=True, **extra) as processes:
        until(lambda: list(snapshots.glob(".tmp-*")), "the first save")
        processes[1].kill()
        finish(processes[0], 1)
    found = Snapshots(snapshots).load()
    assert found
    assert found.manifest.step == 4


def test_each_node_goes_on_with_the_most_complete_history_and_one_that_cannot_be_read_ends_nothing(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "metrics.jsonl", tmp_path / "node1" / "metrics.jsonl"

    def train(epochs: int) -> list[str]:
        arguments = ["--epochs", epochs, "--batch-size", 400, "--output", tmp_path]
        with ranks(2, MODULE, *arguments) as processes:
            return [finish(process) for process in processes]

    train(1)
    lines = first.read_text().splitlines(keepends=True)
    attempt = json.loads(lines[0])["attempt"]
    # One that began later, and was cut off.
    first.write_text("".join(lines[:2]).replace(attempt, f"{attempt}1"))
    train(2)
    for node in (first.parent, second.parent):
        assert [line["step"] for line in metrics(node) if "loss" in line] == list(range(1, 9))
    attempts = [json.loads(line)["attempt"] for line in first.read_text().splitlines()]
    assert attempts == sorted(attempts)
    assert len(set(attempts)) == 2
    second.unlink()
    second.mkdir()
    assert f"{second} is not compared with the other nodes'" in train(3)[1]
    assert [line["step"] for line in metrics(tmp_path) if "loss" in line] == list(range(1, 13))


def test_a_machine_that_has_another_number_goes_on_from_the_snapshot_that_it_has(tmp_path: Path) -> None:
    """As where torchrun is elastic: node 0 is lost, and node 1 is node 0 then, and later node 1 again."""
    mine = tmp_path / "mine"

    def train(epochs: int, *outputs: Path) -> str:
        arguments = ["--epochs", str(epochs), "--batch-size", "400"]
        where = {"WORLD_SIZE": len(outputs), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(
                    started(
                        [warm_python.program(), *MODULE, *arguments, "--output", str(output)],
                        RANK=number, NODE_RANK=number, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, **where,
                    )
                )
                for number, output in enumerate(outputs)
            ]  # fmt: skip
            return finish(processes[outputs.index(mine)])

    train(1, tmp_path / "lost", mine)
    assert [path.name for path in mine.iterdir()] == ["node1"]
    said = train(2, mine)
    assert f"the newest snapshot is in {mine / 'node1' / 'snapshots'}: {mine} goes on from there" in said
    assert "resumed at step 4 " in said
    assert [line["step"] for line in metrics(mine) if "loss" in line] == list(range(1, 9))
    assert (mine / "best").is_dir()
    said = train(3, tmp_path / "new", mine)
    assert f"the newest snapshot is in {mine / 'snapshots'}: {mine / 'node1'} goes on from there" in said
    assert result(tmp_path / "new")["resumed_at_step"] == 8
    assert [line["step"] for line in metrics(mine / "node1") if "loss" in line] == list(range(1, 13))


def test_fabric_trains_on_nodes_with_unequal_numbers_of_ranks(tmp_path: Path) -> None:
    """Two ranks on one node and one on another: Fabric itself counts nodes times the ranks of its own."""
    extra = {
        "LOCAL_RANK": [0, 1, 0], "LOCAL_WORLD_SIZE": [2, 2, 1], "NODE_RANK": [0, 0, 1], "GROUP_RANK": [0, 0, 1],
        "TORCHELASTIC_RUN_ID": "lab",
    }  # fmt: skip
    found = {}
    for engine in ("ddp", "fabric"):
        arguments = ["--engine", engine, "--epochs", 1, "--output", tmp_path / engine]
        with ranks(3, MODULE, *arguments, **extra) as processes:
            for process in processes:
                finish(process)
        found[engine] = losses(tmp_path / engine)
    assert found["fabric"] == pytest.approx(found["ddp"], abs=1e-5)


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 120  # on a slow machine a start alone may take 30 s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within 120 s"
        time.sleep(0.02)
    return value


def test_a_fence_ends_an_old_generation_and_its_snapshots_stay(tmp_path: Path) -> None:
    folders = [tmp_path / "node 0", tmp_path / "node 1"]
    extra = {"NODEKIT_SNAPSHOT_DIR": folders, "NODEKIT_GENERATION": 1}
    arguments = ["--epochs", 500, "--output", tmp_path / "output"]
    with ranks(2, MODULE, *arguments, **extra) as processes:
        # By default the first snapshot comes some seconds in, on both nodes.
        until(lambda: all(Snapshots(folder).manifests() for folder in folders), "a first snapshot")
        assert (folders[0] / "fence").read_text() == "1\n"
        before = [Snapshots(folder).load() for folder in folders]
        (folders[1] / "fence").write_text("2\n")
        said = [finish(process, 144) for process in processes]
    assert "generation 1 is over: the snapshot folder of another node is fenced for generation 2" in said[0]
    assert f"generation 1 is over: {folders[1]} is fenced for generation 2" in said[1]
    for folder, found in zip(folders, before, strict=True):
        assert found
        assert Snapshots(folder).load()
        # A newer one of the old generation may have come before the fence was seen.
        assert found.manifest in Snapshots(folder).manifests()
    with ranks(2, MODULE, *arguments, **extra) as processes:  # nor does it start again
        said = [finish(process, 144) for process in processes]
    assert "fenced for generation 2" in said[0]


def test_a_node_whose_disk_fails_trains_on_and_rank_0_says_so(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_text("not mounted")
    progress = tmp_path / "progress"
    with ranks(
        2, MODULE, "--epochs", 500, "--snapshot-every", 3, "--output", tmp_path / "output", python=sys.executable,
        NODEKIT_SNAPSHOT_DIR=[tmp_path / "good", disk / "snapshots"],
        NODEKIT_PROGRESS_FILE=[progress, tmp_path / "other"],
    ) as processes:  # fmt: skip
        said = wait_for_line(processes[0], "*** NO SNAPSHOT FOR")
        assert "on node 1 (" in said.splitlines()[-1]
        disk.unlink()
        wait_for_line(processes[0], "saved on all nodes again")
        limits = resource.prlimit(processes[0].pid, resource.RLIMIT_FSIZE)
        resource.prlimit(processes[0].pid, resource.RLIMIT_FSIZE, (4000, limits[1]))  # a full disk
        assert "on node 0 (" in wait_for_line(processes[0], "*** NO SNAPSHOT FOR").splitlines()[-1]
        resource.prlimit(processes[0].pid, resource.RLIMIT_FSIZE, limits)
        wait_for_line(processes[0], "saved on all nodes again")
        before = progress.read_text()
        assert before.endswith("\n")
        until(lambda: progress.read_text() != before, "progress")
        processes[0].send_signal(signal.SIGTERM)
        assert "stopped at step" in finish(processes[0], 143)
        said = finish(processes[1], 143)
    assert "no snapshot of step 3 in" in said
    manifests = [Snapshots(folder).manifests()[0] for folder in (tmp_path / "good", disk / "snapshots")]
    assert manifests[0].age == manifests[1].age


EXCHANGE = """
import json, sys
from pathlib import Path
from nodekit.training import Snapshots, World, newest_of_all; from nodekit.training.snapshots import exchange
exchange._CHUNK_BYTES = 1000
with World.from_env() as world:
    for scenario in sorted(Path(sys.argv[1]).iterdir()):
        snapshots = Snapshots(scenario / f"node{world.rank}" / "snapshots")
        if scenario.name == "its holder loses it" and world.rank == 0:
            def look(but=(), look=snapshots.look, **more):
                found = look(but, **more)
                if found.loaded:
                    (snapshots.folder / found.loaded.manifest.payload).unlink()
                return found
            snapshots.look = look
        found = newest_of_all(snapshots, world)
        ages = found and [list(found.manifest.age), found.state["age"]]
        print(json.dumps([scenario.name, ages, snapshots.generation]), flush=True)
"""


def test_all_ranks_go_on_from_the_newest_whole_snapshot_that_any_node_holds(tmp_path: Path) -> None:
    scenarios: dict[str, tuple[list[list[tuple[int, int]]], tuple[int, int] | None]] = {
        "nobody has any": ([[], [], []], None),
        "all have it": ([[(0, 5)], [(0, 5)], [(0, 5)]], (0, 5)),
        "one has it": ([[], [], [(0, 5)]], (0, 5)),
        "a stale one returns": ([[(0, 120)], [(1, 110)], [(1, 100)]], (1, 110)),
        "the newest is damaged": ([[(0, 5), (0, 6)], [(0, 4)], []], (0, 5)),
        "its holder loses it": ([[(0, 6)], [(0, 4)], []], (0, 4)),
        "nowhere to write": ([[], [(0, 5)], []], (0, 5)),
    }
    for name, (held, _) in scenarios.items():
        for rank, ages in enumerate(held):
            folder = tmp_path / "nodes" / name / f"node{rank}" / "snapshots"
            folder.parent.mkdir(parents=True)
            for generation, step in ages:
                state = {"age": [generation, step], "weights": torch.zeros(2000)}
                assert Snapshots(folder, generation=generation).save(state, step=step)
    damaged = tmp_path / "nodes" / "the newest is damaged" / "node0" / "snapshots"
    with (damaged / Snapshots(damaged).manifests()[0].payload).open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    (tmp_path / "nodes" / "nowhere to write" / "node0" / "snapshots").write_text("a file")
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    with ranks(3, [str(tmp_path / "exchange.py")], tmp_path / "nodes") as processes:
        said = [finish(process) for process in processes]
    for output in said:
        found = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
        assert {name: tuple(age[0]) if age else None for name, age, _ in found} == {
            n: w for n, (_, w) in scenarios.items()
        }
        assert all(
            age is None or (age[0] == age[1] and age[0][0] == generation) for _, age, generation in found
        )
    assert "is another than its manifest's" in said[0]
    assert "no snapshot of step 5, sent by another node" in said[0]
    for rank in range(3):  # those who lacked it have a copy now
        kept = Snapshots(tmp_path / "nodes" / "one has it" / f"node{rank}" / "snapshots").load()
        assert kept
        assert kept.manifest.age == (0, 5)


def test_a_node_with_a_new_disk_goes_on_with_the_others_snapshot(tmp_path: Path, task: str) -> None:
    folders = [tmp_path / "node 0", tmp_path / "node 1"]
    arguments = ["--task", task, "--batch-size", 50, "--epochs", 3, "--snapshot-every", 2]
    extra = {
        "NODEKIT_SNAPSHOT_DIR": [folder / "snapshots" for folder in folders],
        "NODEKIT_OUTPUT_DIR": folders,
        "SEEN": tmp_path / "seen",
    }
    with ranks(2, MODULE, *arguments, **extra, KILL_AT=6, NODEKIT_GENERATION=0) as processes:
        for process in processes:
            finish(process, -signal.SIGKILL)
    shutil.rmtree(folders[0])
    with ranks(2, MODULE, *arguments, **extra, NODEKIT_GENERATION=1) as processes:
        said = [finish(process) for process in processes]
    assert "resumed at step 4 (epoch 1, 200 of 200 samples done) from what rank 1 sent" in said[0]
    for folder in folders:
        found = Snapshots(folder / "snapshots").load()
        assert found
        assert found.manifest.age == (1, 12)
    assert [line["step"] for line in metrics(folders[1]) if "loss" in line] == list(range(1, 13))
    assert result(folders[0])["weights_sha256"] == result(folders[1])["weights_sha256"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epoch", "3"], "did you mean --epochs"),
        (["--colour"], "the options are: --help, --task, --data, --model, --max-length"),
        (["--amp", "fp8"], "invalid choice: 'fp8' (choose from"),
        (["--schedule", "step"], "invalid choice"),
        (["--epochs", "0"], "'0' is not a whole number from 1"),
        (["--batch-size", "1.5"], "'1.5' is not a whole number from 1"),
        (["--lr", "nan"], "'nan' is not a number above 0"),
        (["--clip", "-1"], "'-1' is not a number above 0"),
        (["--keep", "1"], "'1' is not a whole number from 2"),
        (["--snapshot-every", "3", "--snapshot-seconds", "3"], "not allowed with"),
        (["--snapshot-seconds", "often"], "'often' is not a number above 0, nor auto"),
    ],
)
def test_bad_options_are_refused_with_the_good_ones(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_kit_gives_defaults_that_the_command_line_outranks(capsys: pytest.CaptureFixture[str]) -> None:
    kits = {"NODEKIT_SNAPSHOT_EVERY": "7.5", "NODEKIT_COLLECTIVE_TIMEOUT_S": "60"}
    assert (parse([], {}).snapshot_seconds, parse([], {}).timeout) == (None, 600)
    assert (parse([], kits).snapshot_seconds, parse([], kits).timeout) == (7.5, 60)
    assert parse([], {"NODEKIT_SNAPSHOT_EVERY": "auto"}).snapshot_seconds is None
    given = parse(["--snapshot-seconds", "auto", "--timeout", "5"], kits)
    assert (given.snapshot_seconds, given.timeout) == (None, 5)
    assert parse(["--snapshot-every", "3"], kits).snapshot_every == 3
    with pytest.raises(SystemExit):
        parse([], {"NODEKIT_SNAPSHOT_EVERY": "5m"})
    assert "NODEKIT_SNAPSHOT_EVERY: '5m' is not a number above 0, nor auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--task", "digit"], "it is one of digits"), (["--sync-bn"], "--sync-bn needs CUDA")],
)
def test_what_only_torch_can_tell_is_refused_before_any_rank_waits_for_another(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    nobody = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    argv = [warm_python.program(), *MODULE, *arguments, "--output", str(tmp_path)]
    with started(argv, **nobody) as process:
        assert message in finish(process, 2)


def test_a_snapshot_of_another_model_is_refused_by_name(tmp_path: Path, task: str) -> None:
    arguments = ["--epochs", "1", "--batch-size", "400", "--output", str(tmp_path)]
    for name, code in (("digits", 0), (task, 1)):
        argv = [warm_python.program(), *MODULE, "--task", name, *arguments]
        with started(argv, SEEN=tmp_path / "seen") as process:
            said = finish(process, code)
    assert "is not of this task or model" in said
    assert ".pt" in said


def test_a_snapshot_of_another_optimizer_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from nodekit.training.tasks.digits import Digits\n"
        "class Task(Digits):\n"
        "    def optimizer(self, model, lr):\n"
        "        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)\n"
    )
    own = f"{tmp_path / 'own.py'}:Task"
    for name, epochs, code in (("digits", 1, 0), (own, 2, 1)):
        arguments = ["--task", name, "--epochs", str(epochs), "--batch-size", "400"]
        argv = [warm_python.program(), *MODULE, *arguments, "--output", str(tmp_path / "out")]
        with started(argv) as process:
            said = finish(process, code)
    assert (
        "the saved optimizer has no dampening, momentum, so it is not the task's SGD. To train anew, " in said
    )
    assert "Traceback" not in said


def test_learning_rate_warms_up_and_falls_to_nothing() -> None:
    options = parse(["--warmup-steps", "4"])
    factors = [options.lr_factor(step, 24) for step in range(24)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert 0 < factors[-1] < 0.01
    linear = parse(["--schedule", "linear", "--warmup-steps", "4"])
    assert [linear.lr_factor(step, 14) for step in (3, 4, 9, 13)] == pytest.approx([1.0, 1.0, 0.5, 0.1])
    assert parse(["--lr", "0.1", "--lr-scale", "linear", "--batch-size", "512"]).peak_lr == pytest.approx(0.2)
