"""What comes of engines that do not come up."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from keel.rollout.spec import EngineError
from keel.trainer import system
from keel.trainer.run.restarts import Lost, Restarts


def test_an_engine_that_does_not_come_up_is_a_loss_which_ends_a_run_that_has_never_begun() -> None:
    class Well:
        def well(self) -> bool:
            return False

    engines: Future[tuple[str, ...]] = Future()
    engines.set_exception(EngineError("rollout engine 0 did not start: its node has died"))
    watch: Any = Well()
    with pytest.raises(Lost, match="engine 0 did not start: its node has died") as raised:
        system._up(engines, watch)
    restarts = Restarts(most=3)
    with pytest.raises(Lost):
        restarts.another(raised.value)
    restarts.begun = True
    restarts.another(raised.value)
