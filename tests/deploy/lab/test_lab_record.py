import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nodekit.deploy.lab import lab_cluster, lab_record
from nodekit.deploy.lab.lab_process import ProcessRecord
from nodekit.inventory.errors import KitError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def made(folder: Path) -> Path:
    """A lab's folder as an `up` that was killed at once has left it."""
    lab_record.begin(folder, {"hosts": ["node1"], "slurm": False})
    (folder / "hosts/node1/upper").mkdir(parents=True)
    return folder


def test_what_up_had_begun_is_removed(tmp_path: Path) -> None:
    folder = made(tmp_path / 'my "lab" $HOME;')
    (folder / ".kitignore").touch()
    assert lab_cluster.down(folder) == []
    assert not folder.exists()
    assert lab_cluster.down(folder) is None


def test_a_process_record_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """An `up` may be killed while it writes; an earlier kit then left the file empty."""
    file, old = tmp_path / "init.json", tmp_path / "old"
    file.touch()
    assert ProcessRecord.read(file) is None
    os.link(file, old)
    own = ProcessRecord.of(os.getpid())
    own.write(file)
    assert ProcessRecord.read(file) == own
    assert old.read_text() == "", "another file has taken its place"


def forge(folder: Path) -> None:
    (folder / "lab.json").write_text(
        json.dumps({"made": {"folder": str(folder), "hosts": ["..", "../.."], "slurm": True}})
    )
    os.chown(folder, 65534, 65534)
    os.chown(folder / "lab.json", 65534, 65534)


def link_record(folder: Path) -> None:
    shutil.move(folder / "lab.json", folder.parent / "theirs.json")
    (folder / "lab.json").symlink_to(folder.parent / "theirs.json")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: (folder / "lab.json").write_text(""), "its lab.json is no record of one"),
        (
            lambda folder: (folder / "lab.json").write_text('{"epochs": 3}'),
            "its lab.json is no record of one",
        ),
        (lambda folder: (folder / "lab.json").write_text("[1]"), "its lab.json is no record of one"),
        (forge, "it can be written by others than root"),
        (lambda folder: os.chown(folder, 65534, 0), "it can be written by others than root"),
        (lambda folder: folder.chmod(0o770), "it can be written by others than root"),
        (lambda folder: (folder / "lab.json").chmod(0o666), "it can be written by others than root"),
        (link_record, "it can be written by others than root"),
    ],
)
def test_a_folder_is_left_alone_whose_record_up_did_not_write(
    tmp_path: Path, change: Callable[[Path], object], problem: str
) -> None:
    folder = made(tmp_path / "theirs")
    (folder / "slurm").mkdir()
    change(folder)
    for use in (lab_cluster.down, lab_cluster.Lab.load, lambda folder: lab_cluster.Lab.up(1, folder=folder)):
        with pytest.raises(KitError, match=rf"theirs holds no lab that kit lab up made \(.*({problem})"):
            use(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["hosts", "lab.json", "slurm"]


def test_a_folder_of_somebody_else_is_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    with pytest.raises(KitError, match="belongs to user 65534, not to root"):
        lab_cluster.Lab.up(1, folder=folder)
    assert not list(folder.iterdir())


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder, data = made(tmp_path / "lab"), tmp_path / "data"
    shutil.move(folder / "hosts", data)
    (data / "node1/init.json").write_text("{}")
    (folder / "hosts").symlink_to(data)
    (folder / "lab.yaml").symlink_to(data / "node1/init.json")
    assert lab_cluster.down(folder) == ["hosts"]
    assert (data / "node1/init.json").exists()


def test_what_is_left_is_told(tmp_path: Path) -> None:
    folder = made(tmp_path / "lab")
    (folder / "notes.txt").touch()
    (folder / "hosts/mine").mkdir()
    argv = [sys.executable, "-m", "nodekit.deploy.commands.cli", "lab", "down", "--folder", str(folder)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert said == (
        f"removed the lab in {folder}\nleft there, for kit lab up did not make it: hosts/mine, notes.txt\n"
    )
