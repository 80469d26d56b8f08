"""Every command of the README, run as it stands there, in its order."""

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import warm_agents
import yaml
from agents import until
from kit_runs import Kit
from places import ROOT

from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.inventory.load import load_inventory

# All commands of a section, by the real python: the usual 300 s are few for that on a busy machine.
pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

README = (ROOT / "README.md").read_text()
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
"""The heading of a section → its commands."""
TRAIN = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
print("up", os.environ["RANK"], flush=True)
total = torch.ones(1)
while os.environ.get("ENDLESS") == "1":
    dist.all_reduce(total)
    time.sleep(0.1)
dist.all_reduce(total)
dist.barrier()
os._exit(0)
"""


def commands(block: str) -> list[str]:
    return [line.partition(" # ")[0].strip() for line in block.splitlines()]


def sh(command: str, folder: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """A line as a user types it, with this kit first in the PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, **env},
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=800,
        check=False,
    )


def test_make_up_trains_from_a_fresh_clone(tmp_path: Path) -> None:
    assert commands(BLOCKS["Quick start"]) == ["make up", "make test"]  # the second is what runs this
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    for name in (
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
        "Makefile",
        ".ci",
        "deploy",
        "inventory",
        "training",
        "slurm",
    ):
        # What is not committed yet is tested too.
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, clone / name)
    done = sh("make up", clone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "uv has failed" not in done.stdout, "pip's settings are uv's, too"
    accuracy = re.search(r"trained to the end in \d+ s, accuracy (\d+\.\d+)%", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy.group(1)) >= 97


@pytest.fixture
def readme_lab(kit: Kit, lab: Lab) -> Kit:
    """The lab under the names that the README uses."""
    values = yaml.safe_load(lab.inventory.read_text())
    hosts = dict(zip(("gpu1", "gpu2", "gpu3"), values["hosts"].values(), strict=True))
    values.update(name="lab", hosts=hosts, job={"command": ["train.py"]}, python=warm_agents.program(lab))
    (kit.folder / "lab.yaml").write_text(yaml.safe_dump(values))
    (kit.folder / "train.py").write_text(TRAIN)
    return kit


def test_the_commands_for_a_cluster_run_in_their_order(readme_lab: Kit) -> None:
    folder = readme_lab.folder
    for command in commands(BLOCKS["Train on your machines"]):
        if command == "kit up lab.yaml --new -d -- train.py":
            (folder / "train.py").write_text(TRAIN.replace('os.environ.get("ENDLESS")', '"1"'))
        if command == "kit up lab.yaml -- train.py":  # it attaches, until somebody says `kit down`
            readme_lab.start(*command.split()[1:])
            readme_lab.wait_for("attached to ")
            continue
        if command.startswith("kit logs -f"):  # until the run ends
            with subprocess.Popen(
                readme_lab.argv(*command.split()[1:]), cwd=folder, stdout=subprocess.PIPE, text=True
            ) as following:
                assert following.stdout is not None
                try:
                    assert any(line == "gpu1:0 | up 0\n" for line in following.stdout)
                finally:
                    following.kill()
            continue
        done = sh(command, folder)
        assert done.returncode == 0, command + "\n" + done.stdout + done.stderr
    until(lambda: all(process.poll() is not None for process in readme_lab.started))
    assert not readme_lab.leftovers()


def test_the_commands_to_know_before_run_in_their_order(readme_lab: Kit, own_home: Path) -> None:
    values = yaml.safe_load((readme_lab.folder / "lab.yaml").read_text())
    (own_home / ".ssh").mkdir(mode=0o700)
    shutil.copy(values["known_hosts"], own_home / ".ssh/known_hosts")
    (own_home / ".ssh/config").write_text(
        "".join(f"Host {name}\n  HostName {each['address']}\n" for name, each in values["hosts"].items())
        + f'Host *\n  User root\n  IdentityFile "{values["identity_file"]}"\n'
    )
    for command in commands(BLOCKS["Check before a run"]):
        done = sh(command, readme_lab.folder)
        assert done.returncode == 0, command + "\n" + done.stdout + done.stderr
    assert load_inventory(readme_lab.folder / "found.yaml").hosts[0].name == "gpu1"
    assert not readme_lab.leftovers()


def test_the_commands_for_slurm_run_in_their_order(tmp_path: Path, labs: Path) -> None:
    lab = Lab.up(2, folder=labs / "cluster", slurm=True)
    folder = tmp_path / "project"
    folder.mkdir()
    slurm = {"nodes": "1:2", "time": 5, "shared_dir": str(lab.slurm.shared / "kit")}
    inventory = {"slurm": slurm, "job": {"command": ["train.py"]}}
    (folder / "slurm.yaml").write_text(yaml.safe_dump(inventory))
    for command in commands(BLOCKS["Train on Slurm"]):
        endless = " -d " in command
        (folder / "train.py").write_text(
            TRAIN.replace('os.environ.get("ENDLESS")', '"1"') if endless else TRAIN
        )
        done = sh(command, folder, SLURM_CONF=str(lab.slurm.conf))
        assert done.returncode == 0, command + "\n" + done.stdout + done.stderr
        if command == "kit up slurm.yaml":
            assert re.search(r"^node1:0 \| up 0$", done.stdout, re.MULTILINE), done.stdout
            warm = {"python": warm_agents.program(lab)}  # by the real one it is shown now
            (folder / "slurm.yaml").write_text(yaml.safe_dump({**inventory, **warm}))
    assert "is stopped" in done.stdout
    assert lab.slurm.run(["squeue", "--noheader"]) == ""


def look_at_the_run(folder: Path) -> None:
    """The commands to see a run, after one has ended."""
    watch, why, report, board = commands(BLOCKS["Monitor a run"])
    for command in (watch, why, report):
        done = sh(command, folder)
        assert done.returncode == 0, command + "\n" + done.stdout + done.stderr
        assert "trained to the end" in done.stdout or command == report, done.stdout
    assert "trained to the end" in (folder / "report.html").read_text()
    with subprocess.Popen(
        [sys.executable, "-m", "nodekit.deploy.commands.cli", *board.split()[1:]],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as showing:
        assert showing.stdout is not None
        address = next(
            filter(None, (re.search(r"http://127\.0\.0\.1:\d+/", line) for line in showing.stdout))
        )
        with urllib.request.urlopen(address[0], timeout=60) as page:
            assert b"TensorBoard" in page.read()
        showing.send_signal(signal.SIGINT)
        assert showing.wait(60) == 0


def test_the_commands_for_a_lab_run_in_their_order(tmp_path: Path, own_home: Path) -> None:
    lab_folder = own_home / "mylab"
    try:
        # Those of "Without a script …" are in test_apply.
        for command in commands(BLOCKS["Try it without machines"]):
            done = sh(command, tmp_path)
            assert done.returncode == 0, command + "\n" + done.stdout + done.stderr
            if command.startswith("kit lab up "):
                lab_yaml = lab_folder / "lab.yaml"
                inventory = yaml.safe_load(lab_yaml.read_text())
                warm = {"python": warm_agents.program(Lab.load(lab_folder))}
                for name in ("node2", "node3"):  # the first host's python is the one that is written there
                    inventory["hosts"][name].update(warm)
                # A few of the job's epochs will do to look at a run; `kit drill` has a short job of its own.
                few = {"command": ["-m", "nodekit.training", "--epochs", "4"]}
                lab_yaml.write_text(yaml.safe_dump({**inventory, "job": few}))
            if command.startswith("kit up "):  # a run with curves, to look at
                look_at_the_run(tmp_path)
                inventory["hosts"]["node1"].update(warm)  # by the real one it is shown now
                lab_yaml.write_text(yaml.safe_dump(inventory))
    finally:
        if lab_folder.exists():
            sh(f"kit lab down --folder {lab_folder}", tmp_path)
    assert not lab_folder.exists()


def test_the_inventories_it_shows_are_some(tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    found = []
    for number, block in enumerate(blocks):
        (tmp_path / f"{number}.yaml").write_text(block)
        found.append(load_inventory(tmp_path / f"{number}.yaml"))
    lab, cluster = found
    assert [host.name for host in lab.hosts] == ["gpu1", "gpu2", "gpu3", "gpu4"]
    assert cluster.slurm is not None
    assert (cluster.nodes.min, cluster.nodes.max) == (2, 4)
