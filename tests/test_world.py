"""Who a rank is, from the environment, and the group it forms with the others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nodekit.training import Stop, World

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip


def test_torchruns_environment_is_read() -> None:
    world = World.from_env(TORCHRUN)
    assert (world.rank, world.local_rank, world.world_size, world.local_world_size) == (5, 1, 8, 4)
    assert (world.node_rank, world.run_id, world.generation) == (1, None, None)
    assert not world.is_main
    assert not world.is_first_on_node


def test_kits_environment_is_read() -> None:
    kits = {
        "NODEKIT_RUN_ID": "lab-7", "NODEKIT_GENERATION": "3", "NODEKIT_SNAPSHOT_DIR": "/a b/s",
        "NODEKIT_OUTPUT_DIR": "/a b/o", "NODEKIT_PROGRESS_FILE": "/a b/p",
    }  # fmt: skip
    world = World.from_env({**TORCHRUN, **kits})
    assert (world.run_id, world.generation) == ("lab-7", 3)
    assert (world.snapshot_dir, world.output_dir, world.progress_file) == (
        Path("/a b/s"),
        Path("/a b/o"),
        Path("/a b/p"),
    )


def test_without_a_launcher_it_is_a_world_of_one_with_a_group() -> None:
    with World.from_env({}) as world:
        assert (world.rank, world.world_size, world.backend) == (0, 1, "gloo")
        assert world.sum(torch.tensor([2.0, 3.0])) == [2.0, 3.0]
        assert world.gather({"a": 1}) == [{"a": 1}]
    assert not dist.is_initialized()


def test_the_group_is_left_when_the_body_raises() -> None:
    with pytest.raises(RuntimeError, match="mine"), World.from_env({}):
        raise RuntimeError("mine")
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WORLD_SIZE": None, "MASTER_PORT": None}, "RANK is set but not WORLD_SIZE, MASTER_PORT"),
        ({"RANK": "-1"}, "RANK is '-1': a whole number from 0"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"NODEKIT_GENERATION": "new"}, "NODEKIT_GENERATION is 'new'"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(changed: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **changed}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        World.from_env(environ)


def test_the_package_is_light_until_a_name_is_used() -> None:
    code = "import sys, nodekit.training.options; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_signal_sets_the_flag_and_leaving_calls_the_deadline_off() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop(grace_s=0.2) as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not stop.requested and time.monotonic() < deadline:
            time.sleep(0.001)
        assert stop.requested
        assert stop.exit_code == 143
    time.sleep(0.4)  # the grace is over, and this process still here
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_rank_that_never_comes_to_an_edge_ends_after_the_grace(number: int, code: int) -> None:
    """The main thread never comes back from C, as in a collective with nobody there."""
    stuck = (
        "import ctypes; from nodekit.training.stop import Stop\n"
        "with Stop(grace_s=0.3):\n"
        "    print('in', flush=True)\n"
        "    lock = ctypes.CDLL(None)\n"
        "    while True: lock.poll(None, 0, -1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", stuck], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as rank:
        assert rank.stdout
        assert rank.stderr
        assert rank.stdout.readline() == b"in\n"
        rank.send_signal(number)
        try:
            assert rank.wait(timeout=20) == code
            assert b"0.3 s of grace" in rank.stderr.read()
        finally:
            rank.kill()
