"""An inventory that is copied into another folder means the same there."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodekit.inventory.copied import copied
from nodekit.inventory.errors import InventoryError
from nodekit.inventory.load import load_inventory

PLAIN = "nodes: 2:4\nhosts:\n  n[1-4]: {known_hosts: kh}\n  n5:\n"
ENVIRONMENT = "environment: {requirements: r.txt, find_links: [wheels, ~/w, 'https://h/w']}\nhosts: {n1: }\n"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN + "identity_file: keys/id\nknown_hosts: ~/known\njob: {env: {N: '010', Y: 'on'}}\n",
        PLAIN + "notify: {command: [mail]}\n",
        PLAIN + 'job: {env: {A: "\\x7f \\x85 \\x9b \\u2028\\u2029 \\ufeff \\uffff \\U0001f600"}}\n',
        ENVIRONMENT,
        ENVIRONMENT.replace("requirements: r.txt", "pyproject: p/pyproject.toml, extras: [gpu]"),
    ],
)
def test_the_copied_inventory_means_the_same_in_another_folder(tmp_path: Path, text: str) -> None:
    (tmp_path / "there").mkdir()
    path = tmp_path / "there/mine.yaml"
    path.write_text(text)
    copy = tmp_path / "inventory.yaml"
    copy.write_text(copied(path, name="mine-drill"))
    one, other = load_inventory(path), load_inventory(copy)
    assert other.name == "mine-drill"
    same = {"name": one.name, "path": one.path, "notify": one.notify}
    assert other.notify is None
    assert other.model_copy(update=same) == one


def test_changes_set_a_key_of_a_section_or_take_it_away(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("job: {command: [train.py], max_restarts: 1}\nhosts: {n1: }\n")
    copy = tmp_path / "copy.yaml"
    copy.write_text(copied(path, name="c", changes={"job.command": None, "timings.hang": 20.0}))
    found = load_inventory(copy)
    assert (found.job.command, found.job.max_restarts, found.timings.hang) == (None, 1, 20.0)


@pytest.mark.parametrize("text", ["", "- a", "a: [", None])
def test_a_file_that_is_no_inventory_any_more_is_told(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InventoryError, match=r"mine.yaml: cannot be read a second time, wanted a file"):
        copied(path, name="c")
