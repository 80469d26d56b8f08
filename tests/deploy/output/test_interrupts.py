"""What Ctrl-C and SIGTERM do while what they end must not be cut short."""

from __future__ import annotations

import os
import signal

import pytest

from nodekit.deploy.output.interrupts import Interrupts


def send(number: int) -> bool:
    """Whether it interrupts."""
    try:
        os.kill(os.getpid(), number)
        signal.getsignal(number)  # a handler runs between two instructions
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupts_and_those_after_it_are_only_noted(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert [send(number), send(number)] == [True, True], "each one, before it is said otherwise"
        interrupts.once()
        assert (send(number), interrupts.again) == (True, False)
        assert (send(number), interrupts.again) == (False, True)
        interrupts.each()
        assert send(number)
    assert signal.getsignal(number) == before


def test_one_that_comes_too_early_interrupts_later() -> None:
    with Interrupts() as interrupts:
        interrupts.hold()
        assert not send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            interrupts.once()
        assert not send(signal.SIGINT), "none after it"
        assert interrupts.again


def test_a_closed_terminal_interrupts_and_is_no_second_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []
    monkeypatch.setattr("nodekit.deploy.output.interrupts.leave_terminal", lambda: left.append(True))
    with Interrupts() as interrupts:
        interrupts.hold()
        assert (send(signal.SIGHUP), interrupts.again) == (False, False)
        interrupts.once()
        assert [send(signal.SIGHUP), send(signal.SIGHUP)] == [True, False]
        assert not interrupts.again
    assert len(left) == 3


def test_signals_that_are_ignored_or_somebody_elses_are_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            assert not send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    interrupts = Interrupts()
    interrupts.hold()
    assert send(signal.SIGINT)
    interrupts.once()
