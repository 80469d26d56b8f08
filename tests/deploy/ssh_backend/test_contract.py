"""What a script may rely on is the same here, over SSH and by Slurm, with a shared folder or without."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_agents
from agents import no_process_left
from kit_runs import Kit
from lab_hosts import make_whole
from slurm_runs import Site

from nodekit.deploy.lab.lab_cluster import Lab

pytestmark = pytest.mark.slow

# It needs neither torch nor kit: it saves, fails once, and is to find what it saved when it is started again.
SCRIPT = """
import json, os, pathlib, stat, sys, time

folder = pathlib.Path(os.environ["NODEKIT_SNAPSHOT_DIR"])
mode = stat.S_IMODE(folder.stat().st_mode)
saved = folder / "step1.txt"
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] != "0":
        time.sleep(60)
    beside = folder / ".step1.txt"
    beside.write_text("1")
    beside.replace(saved)
    sys.exit("it fails once")
(folder / f".rank{os.environ['RANK']}").write_text("each rank may write there")
pathlib.Path(os.environ["NODEKIT_PROGRESS_FILE"]).write_text("1/1")
with open(os.environ["NODEKIT_EVENTS_FILE"], "a") as events:
    events.write(json.dumps({"kind": "note", "text": "here"}) + "\\n")
env = {name: value for name, value in os.environ.items() if name in GIVEN}
output = pathlib.Path(os.environ["NODEKIT_OUTPUT_DIR"])
(output / f"rank{os.environ['RANK']}.txt").write_text("x")
first = os.environ["PATH"].split(":")[0] == os.path.dirname(sys.executable)
print("contract", json.dumps([mode, saved.read_text(), sys.argv[1:], first, env]), flush=True)
"""
GIVEN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"),
    *("GLOO_SOCKET_IFNAME", "TORCHELASTIC_RUN_ID", "NODEKIT_RUN_ID", "NODEKIT_GENERATION"),
    *("NODEKIT_SNAPSHOT_DIR", "NODEKIT_OUTPUT_DIR", "NODEKIT_PROGRESS_FILE"),
)
# As torchrun does, kit runs a script of any name by the inventory's python, whatever its first line and its mode say.
ARGS = ["job", "a b", "$HOME", "it's"]


@pytest.fixture
def local(tmp_path: Path, own_home: Path) -> Iterator[Kit]:
    kit = Kit(tmp_path / "my 'project' $HOME", None)
    yield kit
    kit.close()
    kit.run("down", "--force")
    no_process_left(f"HOME={own_home}")


def up_local(local: Kit, shared: Path | None) -> str:
    text = (
        f"name: two\nconnection: local\npython: {warm_agents.program() if shared else sys.executable}\n"
        f"workdir: {str(local.folder.parent / 'work dir')!r}\nhosts: {{a: , b: }}\n"
    )
    if shared:
        text += f"snapshots: {{shared: {str(shared)!r}}}\n"
    (local.folder / "two.yaml").write_text(text)
    done = local.run("up", "two.yaml", "--", *ARGS)
    return done.stdout + done.stderr


def up_ssh(kit: Kit, shared: Path | None) -> str:
    kit.inventory(**({"snapshots": {"shared": str(shared)}} if shared else {}))
    done = kit.run("up", "lab.yaml", "--", *ARGS)
    return done.stdout + done.stderr


def up_slurm(site: Site, shared: Path | None) -> str:
    changes: dict[str, Any] = {"snapshots": {"shared": str(shared)}} if shared else {"python": sys.executable}
    path = site.inventory("contract", ARGS, {"nodes": 2}, **changes)
    done = site.kit("up", str(path), timeout_s=200)
    return done.stdout + done.stderr


@pytest.fixture
def one_disk(slurm_lab: Lab, tmp_path: Path) -> Iterator[Kit]:
    """Kit over SSH, on hosts that share a folder."""
    kit = Kit(tmp_path / "my 'project' $HOME", slurm_lab)
    yield kit
    kit.close()
    make_whole(slurm_lab)


LAB = pytest.mark.lab


@pytest.mark.parametrize(
    ("where", "is_shared", "size"),
    [
        pytest.param("local", False, 2, id="here"),
        pytest.param("local", True, 2, id="here, one folder"),
        pytest.param("kit", False, 3, id="over SSH", marks=LAB),
        pytest.param("one_disk", True, 3, id="over SSH, one folder", marks=LAB),
        pytest.param("site", False, 2, id="by Slurm", marks=LAB),
        pytest.param("site", True, 2, id="by Slurm, a folder of the user's", marks=LAB),
    ],
)
def test_a_script_is_given_the_same_by_every_backend(
    where: str, is_shared: bool, size: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    given = request.getfixturevalue(where)
    shared = (given.lab.slurm.shared if given.lab else tmp_path) / "snap shots's" if is_shared else None
    if shared:
        shared.mkdir(exist_ok=True)
    (given.folder / "job").write_text(
        f"#!/usr/bin/python3 -S\nGIVEN = {(*GIVEN, 'NODEKIT_SNAPSHOT_SHARED')}\n{SCRIPT}"
    )
    said = {"local": up_local, "site": up_slurm}.get(where, up_ssh)(given, shared)
    found = [json.loads(each) for each in re.findall(r"contract (\[.*\])$", said, re.MULTILINE)]
    ranks = {each[-1]["RANK"]: each for each in found}
    assert ranks.keys() == {str(rank) for rank in range(size)}, said
    for mode, saved, args, finds_its_own_first, env in ranks.values():
        assert (mode, saved, args, finds_its_own_first) == (0o700, "1", ARGS[1:], True)
        assert not [name for name in GIVEN if not env.get(name)]
        assert env["WORLD_SIZE"] == str(size)
        assert env["NODEKIT_SNAPSHOT_DIR"].startswith(str(shared or "/"))
    folders = {env["NODEKIT_SNAPSHOT_DIR"] for *_, env in ranks.values()}
    is_one = is_shared or where == "site"
    assert len(folders) == (1 if is_one else size)
    assert all((env.get("NODEKIT_SNAPSHOT_SHARED") == "1") == is_one for *_, env in ranks.values())


def test_a_shared_folder_that_is_not_there_is_not_made(local: Kit, tmp_path: Path) -> None:
    (local.folder / "job").write_text(SCRIPT)
    shared = tmp_path / "mount point" / "snapshots"
    said = up_local(local, shared)
    wanted = (
        rf"the snapshot folder cannot be made on {os.uname().nodename}: No such file or directory; "
        rf"{shared} \(snapshots.shared\) is not there: .*; mount it, or make it \(mkdir -p\), on every host"
    )
    assert re.search(wanted, said), said
    assert not shared.parent.exists()
    nodes = json.loads(local.run("status", "--json").stdout)["status"]
    assert {status["state"] for status in nodes.values()} == {"not started"}
    why = json.loads(local.run("why", "--json").stdout)["why"]
    assert (why["text"], why["cause"]["name"]) == ("it did not start", "did-not-start")
    assert why["cause"]["cure"] == "mount it, or make it (mkdir -p), on every host"
    assert "the snapshot folder cannot be made on" in why["cause"]["what"]
