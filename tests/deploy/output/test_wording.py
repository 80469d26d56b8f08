"""How numbers, names, times and sizes are written for people."""

from __future__ import annotations

import pytest

from nodekit.deploy.output.wording import count, duration, names, size_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (5.94, "5.9 s"),
        (9.97, "10 s"),
        (59.7, "1 min"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_one_is_singular() -> None:
    assert (count(1, "step"), count(0, "step"), count(1200, "step")) == ("1 step", "0 steps", "1,200 steps")


def test_of_many_nodes_the_first_are_named() -> None:
    assert names(["a", "b"]) == "a, b"
    assert names("abcdefgh") == "a, b, c, d, e, f and 2 more"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (78, "78 bytes"),
        (5600, "5.6 kB"),
        (999_900, "1.0 MB"),
        (3.4e6, "3.4 MB"),
        (412e6, "412 MB"),
        (1.2e9, "1.2 GB"),
        (2e12, "2.0 TB"),
    ],
)
def test_sizes_have_a_unit_that_fits(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text
