"""Which releases of torch are allowed, and that each line of them was tried."""

import re

import torch
from releases import ROOT, VENVS_TABLE, line_of, rows

from nodekit.deploy.environment.requirements import OLDEST_TORCH
from nodekit.training.errors import SAFE_TORCH


def test_each_line_of_releases_that_is_allowed_was_tried() -> None:
    """By `make releases`, whose last table is committed; the installed one is tried here."""
    tried = {line_of(release) for release, said in rows().items() if "failed" not in said}
    lines = tried | {line_of(torch.__version__)}
    (first, end) = re.findall(r'"torch>=(\d+\.\d+),<(\d+\.\d+)"', (ROOT / "pyproject.toml").read_text())[0]
    assert line_of(first) == SAFE_TORCH
    assert sorted(lines) == [(2, minor) for minor in range(OLDEST_TORCH[1], line_of(end)[1])]


def test_what_was_tried_in_a_venv_of_its_own_has_not_failed() -> None:
    found = rows(VENVS_TABLE)
    assert found
    assert not [release for release, said in found.items() if "failed" in said]
