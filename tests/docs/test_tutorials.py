"""The pages for readers of tutorials: each command of theirs has one beside it, and that one trains."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import warm_agents
import warm_python
import yaml
from free_ports import free_port
from kit_runs import Kit
from places import ROOT

from nodekit.inventory.load import load_inventory
from nodekit.training.options.options import Options

PAGE = (ROOT / "docs/one-machine.md").read_text()
TWO = (ROOT / "docs/two-machines.md").read_text()
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
THEIRS = (
    "python single-gpu-cls.py",
    "python multi-gpu-dataparrel-cls.py",
    "python -m torch.distributed.launch --nproc_per_node=2 multi-gpu-distributed-cls.py --local_world_size=2",
    "torchrun --standalone --nproc_per_node=2 multi-gpu-distributed-cls.py",
    "python multi-gpu-distributed-mp-cls.py --local_world_size=2",
    "python multi-gpu-distributed-mp-amp-cls.py --local_world_size=2",
    "horovodrun -np 2 -H localhost:2 python multi-gpu-horovod-cls.py",
    "deepspeed --master_port 11222 multi-gpu-deepspeed-cls.py",
    "accelerate launch multi-gpu-accelerate-cls.py",
    "python multi-gpu-transformers-cls.py",
)
"""As the tutorials type them."""
SPAWN = ["--launcher", "spawn", "--nproc-per-node", "2"]
IN_ENGINE_TESTS = ("horovod", "deepspeed", "accelerate", "trainer")
"""Engines that are trained in test_engines.py by the same command, and take long to import."""


def commands(block: str) -> list[str]:
    return [line.partition(" # ")[0].strip() for line in block.splitlines() if line and line[0] != "#"]


def train(command: str, folder: Path, *more: str) -> str:
    """Run a command as it stands on the page, but for an epoch and by a python that has imported torch."""
    functions = (
        f'python() {{ {shlex.quote(warm_python.program())} "$@"; }}',
        'torchrun() { python -m torch.distributed.run "$@"; }',
        'accelerate() { shift; python -m accelerate.commands.launch "$@"; }',
    )
    bash = "\n".join([*functions, f"{command} {shlex.join(more)}"])
    done = subprocess.run(
        ["bash", "-c", bash],
        cwd=folder,
        env={**os.environ, **warm_python.environment()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def test_each_command_of_the_tutorials_has_one_beside_it() -> None:
    block = next(each for each in BLOCK.findall(PAGE) if "single-gpu" in each)
    assert tuple(re.findall(r"^# (.*)", block, re.MULTILINE)) == THEIRS
    ours = commands(block)
    assert len(ours) == len(THEIRS)
    torchrun = "torchrun --standalone --nproc_per_node=2 -m nodekit.training"
    for engine in IN_ENGINE_TESTS:
        assert f"{torchrun} --engine {engine}" in ours


def test_what_the_page_calls_an_option_is_one() -> None:
    rows = re.findall(r"^\|.*\|(.*)\|$", PAGE, re.MULTILINE)
    named = {each for row in rows for each in re.findall(r"`(--[a-z-]+)", row)}
    assert len(named) > 15
    ours = {f"--{option.name.replace('_', '-')}" for option in fields(Options)}
    assert not named - ours - {"--logdir"}


@pytest.mark.slow
def test_the_commands_of_the_page_for_one_machine_train(tmp_path: Path) -> None:
    _, block, _, launchers, gpus, again, _ = BLOCK.findall(PAGE)
    ways = [each for each in commands(block) if not each.endswith(IN_ENGINE_TESTS)]
    single, dp, launch, torchrun, spawn, spawn_with_amp = ways
    # test_spawn.py runs this: its ranks import torch anew.
    assert shlex.split(spawn)[3:-2] == shlex.split(spawn_with_amp)[3:-2] == SPAWN
    accelerate, _deepspeed = commands(launchers)  # DeepSpeed's is in test_launchers.py
    for command in (
        single,
        dp,
        launch,
        accelerate,
    ):  # one after the other: none goes on where another has ended
        assert "epoch 1 done at step 23/23" in train(command, tmp_path, "--epochs", "1")
    assert len({each.partition(" --output ")[2] for each in (launch, torchrun, spawn)}) == 3
    first, resumed, tested, _predicted = commands(again)
    assert first == resumed == torchrun.replace("runs/torchrun", "runs/first")
    assert commands(gpus)[0] == f"CUDA_VISIBLE_DEVICES=0,1 {torchrun.partition(' --output')[0]}"
    assert "epoch 1 done at step 23/23" in train(first, tmp_path, "--epochs", "1")
    assert "resumed at step 23 " in train(resumed, tmp_path, "--epochs", "2")
    assert "precision" in train(tested, tmp_path)


@pytest.mark.slow
def test_a_script_of_ones_own_runs_with_the_inventory_of_the_page(tmp_path: Path, own_home: Path) -> None:
    (inventory,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    kit = Kit(tmp_path / "project", None)
    (kit.folder / "here.yaml").write_text(
        yaml.safe_dump({**yaml.safe_load(inventory), "python": warm_agents.program()})
    )
    assert [host.name for host in load_inventory(kit.folder / "here.yaml").hosts] == ["here"]
    (kit.folder / "train.py").write_text("import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:])\n")
    (command,) = commands(BLOCK.findall(PAGE)[-1])
    done = kit.run(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "here:0 | rank 0 --lr 0.1" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_commands_of_the_page_for_two_machines_train(number: int, tmp_path: Path) -> None:
    """Both on this machine: one process each, at a free port of 127.0.0.1."""
    port = str(free_port())
    block = [each for each in BLOCK.findall(TWO) if "-m nodekit.training" in each][number]
    here = re.sub(
        r"29500|23456",
        port,
        block.replace("10.0.0.11", "127.0.0.1").replace("--nproc_per_node=2", "--nproc_per_node=1"),
    )
    first, second = commands(here)
    both = f"{second} --epochs 1 & {first} --epochs 1 && wait $!"
    assert "epoch 1 done at step 23/23" in train(both, tmp_path)
    assert (tmp_path / "runs/two/result.json").exists()
    assert (tmp_path / "runs/two/node1/result.json").exists()
