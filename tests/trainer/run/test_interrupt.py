"""Ctrl-C: once to finish the step, twice to stop."""

from __future__ import annotations

import signal

import pytest

from keel.trainer.run.interrupt import Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_interrupts(number: signal.Signals) -> None:
    said: list[str] = []
    before = signal.getsignal(number)
    with Interrupt(said.append) as interrupt:
        assert not interrupt()
        signal.raise_signal(number)
        assert interrupt()
        assert len(said) == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before
