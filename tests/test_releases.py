"""Which releases of torch are allowed, and that each line of them was tried."""

import re

import torch
from releases import ROOT, line_of, rows


def test_each_line_of_releases_that_is_allowed_was_tried() -> None:
    """By `make releases`, whose last table is committed; the installed one is tried here."""
    tried = {line_of(release) for release, said in rows().items() if "failed" not in said}
    lines = tried | {line_of(torch.__version__)}
    (first, end) = re.findall(r'"torch>=(\d+\.\d+),<(\d+\.\d+)"', (ROOT / "pyproject.toml").read_text())[0]
    assert sorted(lines) == [(2, minor) for minor in range(line_of(first)[1], line_of(end)[1])]
