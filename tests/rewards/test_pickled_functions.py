"""Functions that Python code handed over: what they keep between calls."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from keel.rewards import scorer as scorers
from keel.rewards.custom import function, load_function, prompt_fields
from keel.rewards.pickled_functions import passing
from keel.rewards.scorer import Scorer
from tests.rewards.groups import PROMPT, group
from tests.rewards.test_custom import said


def in_two_calls(reward: Any) -> list[Any]:
    with passing([reward]):
        spec = {"name": f"python.{reward.__name__}", "prompt": prompt_fields(PROMPT)}
        return [verify(said("3")) for verify in (function(spec), function(spec)) for _ in range(2)]


def test_what_an_async_function_keeps_lives_on_one_loop() -> None:
    kept: list[Any] = []

    class Client:
        """As HTTP clients do: its connections are of the loop that it first ran on."""

        def __init__(self) -> None:
            self.loop = asyncio.get_running_loop()

        async def get(self) -> float:
            answer = self.loop.create_future()
            self.loop.call_soon(answer.set_result, 0.5)
            return await answer

    async def asked(prompt: Any, trajectory: Any) -> float:
        if not kept:
            kept.append(Client())
        return await kept[0].get()

    assert in_two_calls(asked) == [0.5] * 4


def test_an_async_function_that_fails_or_leaves_takes_no_other_call_with_it() -> None:
    calls: list[str] = []

    async def leaves(prompt: Any, trajectory: Any) -> float:
        calls.append("")
        if len(calls) == 1:
            raise SystemExit(3)
        return 1.0

    with passing([leaves]):
        verify = function({"name": "python.leaves", "prompt": prompt_fields(PROMPT)})
        with pytest.raises(RuntimeError, match=r"called exit\(3\)"):
            verify(said("3"))
        assert verify(said("3")) == 1.0


def test_a_function_is_read_once_and_keeps_what_it_made() -> None:
    """For each prompt there is another verifier."""
    loads: list[int] = []

    def loaded(prompt: Any, trajectory: Any) -> float:
        if not loads:
            loads.append(1)
            return 0.0
        return 1.0

    assert in_two_calls(loaded) == [0.0, 1.0, 1.0, 1.0]
    with passing([loaded]):
        again = load_function("python.loaded")
        assert again is load_function("python.loaded") is not loaded
        assert again(None, None) == 0.0, "of another run"


def test_a_scorer_asks_once_whether_a_function_sees_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    sees_group = scorers.sees_group
    monkeypatch.setattr(scorers, "sees_group", lambda name: asked.append(name) or sees_group(name))

    def alike(prompt: Any, trajectories: Any) -> list[float]:
        return [1 / len(trajectories)] * len(trajectories)

    with passing([alike]), Scorer({"maths": {"python.alike": 1.0}}, workers=0) as scorer:
        other = replace(PROMPT, prompt_id="file/2")
        scored = scorer.score([group("3", "4"), group("3", prompt=other)])
    assert [one.rewards_G.tolist() for one in scored] == [[0.5, 0.5], [1.0]]
    assert asked == ["python.alike"]
