"""The commands of the tutorials, as they write them: launchers that add an option, GPUs by number, two terminals."""

import base64
import json
import os
import signal
import socket
import subprocess
import threading
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

import pytest
import torch
import warm_python
from free_ports import free_port
from test_training import finish, started, until, wait_for_line

from nodekit.training import __main__ as module
from nodekit.training import rank
from nodekit.training.folder import held
from nodekit.training.options.arguments import read
from nodekit.training.process import gpus
from nodekit.training.spawn import environment
from nodekit.training.world import World


@pytest.mark.parametrize("given", ["--local-rank=1", "--local_rank=1"])
def test_the_rank_that_a_launcher_adds_is_held_against_its_variable(given: str) -> None:
    assert read([given], {"LOCAL_RANK": "1"}).local_rank == 1
    with pytest.raises(ValueError, match=r"--local-rank 1, but LOCAL_RANK is 0: .*leave it out"):
        read([given], {"LOCAL_RANK": "0"})
    with pytest.raises(ValueError, match="--local-rank 1, but LOCAL_RANK is not set: "):
        read([given], {})


def test_options_are_also_spelt_with_underscores_as_torchruns_are() -> None:
    given = read(["--batch_size", "32", "--snapshot_every=5", "--data", "a_b"], {})
    assert (given.batch_size, given.snapshot_every, given.data) == (32, 5, "a_b")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--local_world_size=2", "--nproc-per-node"),
        ("--local-world-size=2", "--nproc-per-node"),
        ("--bert_dir=x", "--model"),
        ("--train_batch_size=64", "--batch-size"),
        ("--gpu_ids=0,1", "--gpus"),
        ("--total_epochs=3", "--epochs"),
    ],
)
def test_what_the_tutorials_scripts_call_an_option_leads_to_ours(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"unrecognized arguments: .*did you mean {meant}\?"):
        read([given], {})


def test_deepspeeds_own_variables_are_read() -> None:
    environ = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
    }
    world = World.from_env({**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "11222"})
    assert (world.local_world_size, world.node_rank, world.meets_at) == (2, 1, "127.0.0.1:11222")


@pytest.mark.parametrize(
    ("asked", "preset", "visible"),
    [
        ("0,1", None, "0,1"),
        ("3", None, "3"),
        ("1,0", "4,6", "6,4"),
        ("0,2", "GPU-aa, GPU-bb ,GPU-cc", "GPU-aa,GPU-cc"),
        ("0", "MIG-1/0/0", "MIG-1/0/0"),
    ],
)
def test_gpus_are_chosen_among_those_that_are_visible(asked: str, preset: str | None, visible: str) -> None:
    numbers = read(["--gpus", asked], {}).gpus
    assert numbers
    assert gpus.chosen(numbers, {} if preset is None else {gpus.VARIABLE: preset}) == visible


@pytest.mark.parametrize(
    ("preset", "wanted"),
    [
        ("4,6", "shows 2: a number from 0 to 1"),
        ("0,-1,1,2", "shows 1: a number from 0 to 0"),
        ("", "shows 0: unset it"),
    ],
)
def test_a_gpu_that_is_hidden_is_refused(
    preset: str, wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(gpus.VARIABLE, preset)
    monkeypatch.setattr("sys.argv", ["nodekit.training", "--gpus", "0,2"])
    assert module.main() == 2
    said = capsys.readouterr().err
    assert wanted in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("text", ["", "0,", "0,0", "-1", "all", "0 1"])
def test_what_names_no_gpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="different numbers of GPUs were wanted, such as 0,1"):
        read([f"--gpus={text}"], {})


@pytest.fixture
def six_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with six GPUs, of which torch sees those in CUDA_VISIBLE_DEVICES."""
    for name in (gpus.VARIABLE, "OMP_NUM_THREADS"):  # which are set, and taken back so
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv(gpus.VARIABLE)

    def count() -> int:
        words = os.environ.get(gpus.VARIABLE, "0,1,2,3,4,5").split(",")
        return sum(not word.isdigit() or int(word) < 6 for word in words)

    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count() > 0)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["nodekit.training", *arguments])
    return module.main()


@pytest.mark.usefixtures("six_gpus")
def test_spawn_starts_a_rank_for_each_chosen_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VARIABLE, "5,3,1")
    seen = []

    def spawned(_: object, arguments: tuple[object, ...], num: int, **more: object) -> None:
        devices = [rank.check(arguments[0], {**environment(each, num, 1)})[0].device for each in range(num)]  # type: ignore[arg-type]
        seen.append((os.environ[gpus.VARIABLE], [str(each) for each in devices]))
        raise KeyboardInterrupt

    monkeypatch.setattr("nodekit.training.spawn.spawn", spawned)
    # A lock without a process behind it.
    monkeypatch.setattr("multiprocessing.get_context", lambda _: threading)
    with pytest.raises(KeyboardInterrupt):
        run_main(monkeypatch, "--launcher", "spawn", "--gpus", "0,2")
    assert seen == [("5,1", ["cuda:0", "cuda:1"])]


@pytest.mark.usefixtures("six_gpus")
def test_dp_splits_a_batch_over_the_chosen_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataParallel takes all that torch sees, if it is given no device_ids."""
    seen = []

    def train(options: object) -> int:
        seen.append((os.environ[gpus.VARIABLE], torch.cuda.device_count()))
        return 0

    monkeypatch.setattr(module, "train", train)
    assert run_main(monkeypatch, "--engine", "dp", "--gpus", "1,4") == 0
    assert seen == [("1,4", 2)]


@pytest.mark.usefixtures("six_gpus")
def test_a_gpu_that_torch_does_not_see_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--gpus", "0,7") == 2
    assert "--gpus 0,7: torch sees 1 of these 2 GPUs" in capsys.readouterr().err


@pytest.mark.usefixtures("six_gpus")
def test_a_gpu_that_no_rank_would_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--gpus", "0,1") == 2
    assert "--gpus 0,1: 1 rank of --engine ddp would use 1 of these 2 GPUs; " in capsys.readouterr().err


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


LAUNCH = ["-m", "torch.distributed.launch"]
SHORT = ["--batch-size", "400"]  # four steps an epoch


@pytest.mark.slow
def test_the_tutorials_command_goes_on_where_it_was(in_folder: Path) -> None:
    launch = [*LAUNCH, "--nnode=1", "--node_rank=0", "--nproc_per_node=2", f"--master_port={free_port()}"]

    def run(*launcher: str, epochs: int, code: int = 0) -> str:
        argv = [*launcher, "-m", "nodekit.training", *SHORT, "--epochs", str(epochs)]
        with started([warm_python.program(), *argv]) as process:
            return finish(process, code)

    said = run(*launch, epochs=1)
    (folder,) = (in_folder / "runs").iterdir()
    place = folder.relative_to(in_folder)
    assert f": ranks 0-1 of 2 on cpu, gloo; output in {place}, where the same command goes on\n" in said
    assert "epoch 1 done at step 4/4: test accuracy" in said
    assert "(best accuracy so far)\n" in said
    assert (
        f"trained to the end: the best weights are in {place}/best, the last in {place}/last. The same"
        in said
    )
    said = run(*launch, epochs=2)
    assert "resumed at step 4 (epoch 1, " in said
    assert "epoch 2 done at step 8/8" in said
    result = (folder / "result.json").read_text()
    assert "--epochs 2 is reached already: only evaluating" in run(epochs=2)
    assert (folder / "result.json").read_text() == result  # with its speed, which nobody has measured now
    assert [*(in_folder / "runs").iterdir()] == [folder]
    with held(place):  # as another live run of this command would
        assert f"{place} is in use by process {os.getpid()} on " in run(epochs=3, code=2)


@pytest.mark.slow
def test_each_of_two_terminals_says_whom_it_waits_for_and_where_its_weights_are(in_folder: Path) -> None:
    port = free_port()

    def command(node_rank: int) -> list[str]:
        argv = ["--nproc_per_node", "1", "--nnodes", "2", "--node_rank", str(node_rank)]
        argv += ["--master_addr=127.0.0.1", f"--master_port={port}", "--use_env"]
        return [warm_python.program(), *LAUNCH, *argv, "-m", "nodekit.training", *SHORT, "--epochs", "1"]

    with started(command(0)) as first, started(command(1)) as second:  # which wait for each other
        seconds, said = finish(second), finish(first)
    (folder,) = (in_folder / "runs").iterdir()
    own = f"runs/{folder.name}/node1"
    assert (
        f": rank 0 of 2 on cpu, gloo; waiting at 127.0.0.1:{port} for rank 1 on other nodes; output in"
        in said
    )
    assert (
        f": rank 1 of 2 on cpu, gloo; waiting for rank 0 at 127.0.0.1:{port}; output in {own}, where "
        in seconds
    )
    for text in (said, seconds):
        assert ": all 2 ranks are there\n" in text
    assert f"the best weights are in {own}/best, the last in {own}/last. " in seconds
    assert "epoch 1 done" not in seconds  # rank 0 alone


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["accelerate", "trainer"])
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_engines_train_where_ranks_are_started_by_hand_without_an_address(
    engine: str, scheme: str, tmp_path: Path
) -> None:
    where = f"127.0.0.1:{free_port()}" if scheme == "tcp" else tmp_path / "meet"
    argv = [*SHORT, "--epochs", "1", "--engine", engine, "--init-method", f"{scheme}://{where}"]

    def rank_of(number: int) -> AbstractContextManager[subprocess.Popen[str]]:
        variables = {"RANK": number, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
        command = [warm_python.program(), "-m", "nodekit.training", *argv, "--output", str(tmp_path / "out")]
        return started(command, **variables)

    with rank_of(0) as first, rank_of(1) as second:
        finish(second)
        assert "epoch 1 done at step 4/4" in finish(first)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "rank"), [("env", 0), ("env", 1), ("tcp", 0), ("tcp", 1), ("file", 0)])
def test_ctrl_c_ends_a_rank_that_waits_for_others_at_once(scheme: str, rank: int, tmp_path: Path) -> None:
    port = free_port()
    where = str(tmp_path / "meet") if scheme == "file" else f"127.0.0.1:{port}"
    argv = ["-m", "nodekit.training", "--output", str(tmp_path / "out")]
    argv += ["--init-method", "env://" if scheme == "env" else f"{scheme}://{where}"]
    variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    if scheme == "env":
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def is_waiting() -> bool:
        if scheme == "file":
            return (tmp_path / "meet.beat").exists()
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    with ExitStack() as stack:
        if rank == 1:  # rank 0's host, where nobody answers
            server = stack.enter_context(socket.create_server(("127.0.0.1", port)))
            server.settimeout(60)
        process = stack.enter_context(started([warm_python.program(), *argv], **variables))
        wait_for_line(process, "waiting")
        if rank == 1:
            stack.enter_context(server.accept()[0])
        else:
            until(is_waiting, "rank 0's wait")
        process.send_signal(signal.SIGINT)
        said = finish(process, 130)
    assert said == f"nodekit: interrupted while rank {rank} of 2 waited for the others at {where}\n"


@pytest.mark.slow
def test_deepspeeds_launcher_starts_the_ranks_of_one_node(in_folder: Path) -> None:
    """As `deepspeed --num_gpus 2 --module nodekit.training` does, which starts this program."""
    where = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    argv = [
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={where}",
        f"--master_port={free_port()}",
        "--module",
    ]
    command = [warm_python.program(), *argv, "nodekit.training", *SHORT, "--epochs", "1"]
    with started(command, DS_ACCELERATOR="cpu") as process:
        said = finish(process)
    assert "'--local_rank=1'" in said
    assert ": ranks 0-1 of 2 on cpu, gloo; " in said
    (folder,) = (in_folder / "runs").iterdir()
    assert not (folder / "node1").exists()
