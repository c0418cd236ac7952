"""How often the judge's server is started again. Starts none."""

from __future__ import annotations

from typing import Any

import pytest

from keel.configs.schema import JudgeConfig
from keel.rollout.judge import server
from keel.rollout.judge.server import MAX_RESTARTS, RECENT_S, JudgeServer


def test_deaths_that_are_hours_apart_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now, actor = [0.0], object()

    def launch(self: Any) -> None:
        self._actor = actor

    monkeypatch.setattr(server.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(server.ray_timeouts, "kill", lambda _: None)
    monkeypatch.setattr(JudgeServer, "_launch", launch)
    monkeypatch.setattr(JudgeServer, "_wait", lambda _: "http://somewhere")
    monkeypatch.setattr(JudgeServer, "_ended", lambda _: "it died")
    judge = JudgeServer(JudgeConfig(model="m", serve=True), gpu=False)
    for _ in range(3 * MAX_RESTARTS):
        assert judge.url() == "http://somewhere"
        now[0] += RECENT_S / MAX_RESTARTS + 1
    assert judge.restarts == 3 * MAX_RESTARTS - 1
    with pytest.raises(RuntimeError, match=rf"died {MAX_RESTARTS + 1} times within 3 hours; .* it"):
        for _ in range(MAX_RESTARTS + 1):
            judge.url()
