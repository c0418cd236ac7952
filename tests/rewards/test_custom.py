"""Rewards from the user's own functions."""

import asyncio
import json
import math
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.rewards.compose import check_weights
from keel.rewards.custom import (
    BadReward,
    TextTrajectory,
    function_verifier,
    load_function,
    pickle_functions,
    prompt_fields,
)
from tests.rewards import functions
from tests.rewards.groups import PROMPT, group, new_scorer, score
from tests.waiting import PATIENCE_S

MINE = functions.NAME
FIELDS = prompt_fields(group("</think>3").prompt)


def text(answer: str) -> str:
    message = {"role": "assistant", "content": answer}
    return TextTrajectory(messages=[message], finish_reason="stop", sampled_tokens=1).dumps()


def returning(value: Any) -> Any:
    def always(prompt: Any, trajectory: Any) -> Any:
        return value

    return always


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    (tmp_path / "broken_rewards.py").write_text("import nothing_of_this_name")
    (tmp_path / "exiting_rewards.py").write_text("import sys; sys.exit(0)")


@pytest.mark.e2e
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dotted_name_is_a_part(workers: int) -> None:
    weights = {"maths": {"correct": 1.0, f"{MINE}.polite": 0.5}}
    with new_scorer(weights, workers=workers, timeout_s=PATIENCE_S) as scorer:
        (scored,) = score(scorer, [group("<think>ab</think>3", "<think></think>3 please")])
    assert [parts[f"{MINE}.polite"] for parts in scored.parts_G] == [0.5, 1.0]
    assert scored.rewards_G.tolist() == [1.25, 0.5]


def test_any_number_is_accepted() -> None:
    numbers = (True, 1, np.float32(1), np.True_, np.array(1.0), torch.tensor(1.0), Fraction(1))
    for value in (*numbers, 1.0000001):
        with pickle_functions([returning(value)]):
            verify = function_verifier({"name": "python.always", "prompt": FIELDS})
            assert verify(text("3")) == 1.0, value


def test_other_values_are_errors_worth_nothing() -> None:
    weights = {"maths": {"correct": 1.0, "python.always": 0.5}}
    texts = ("0.5", b"0.5", bytearray(b"1"), np.str_("0.5"))
    for value in (None, math.nan, -0.5, 7, 1.00001, *texts, [1.0, 0.0]):
        with pickle_functions([returning(value)]):
            with pytest.raises(BadReward):
                function_verifier({"name": "python.always", "prompt": FIELDS})(text("3"))
            with new_scorer(weights, say=lambda _: None) as scorer:
                (scored,) = score(scorer, [group("</think>3")])
        assert scored.rewards_G.tolist() == [1.0]
        parts = {"correct": 1.0, "format": 1.0, "error": 1.0, "python.always": 0.0}
        assert scored.parts_G[0] == parts


@pytest.mark.parametrize("values", ["11", {0: 1.0, 1: 0.5}, {1.0, 0.5}, 1.0, [1.0], ["1", 1.0]])
def test_a_group_function_must_return_a_list(values: Any) -> None:
    with pickle_functions([reward := returning(values)]):
        spec = {"name": f"python.{reward.__name__}", "prompt": FIELDS, "group": True}
        with pytest.raises(BadReward):
            function_verifier(spec)(json.dumps([text("3")] * 2))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *(("no_keel_rewards.polite", ""), (f"{MINE}.polit", "")),
        *((f"{MINE}:polite.x", ""), (f"{MINE}.Brief", "prompt, trajectory")),
        (f"{MINE}.functools", ""),
        *((".polite", ""), ("..", ""), ("../../etc/passwd.x", ""), ("exiting_rewards.x", "")),
        ("broken_rewards.x", "nothing_of_this_name"),
        *((f"{MINE}.{name}", "prompt, trajectory") for name in ("alone", "trl", "verl")),
        (f"{MINE}.swapped", "prompt, trajectory"),
    ],
)
def test_unusable_names_are_refused(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"'maths'.*'{name}'.*{hint}"):
        check_weights({"maths": {name: 1.0}})


def test_a_trajectory_survives_serialisation() -> None:
    messages = ({"role": "assistant", "content": "", "raw": "<think>a\ud800</think> b"},)
    trajectory = TextTrajectory(messages=messages, finish_reason="length", sampled_tokens=3)
    copy = TextTrajectory.loads(trajectory.dumps())
    assert (copy.answer, copy.thinking, copy.finish_reason) == ("b", "a\ud800", "length")
    assert (copy.raw, copy.sampled_tokens) == ("<think>a\ud800</think> b", 3)


def test_a_prompt_always_has_columns() -> None:
    assert FIELDS["reward"]["columns"] == {}
    prompt = replace(PROMPT, reward={**PROMPT.reward, "columns": {"level": 2}})
    assert prompt_fields(prompt)["reward"]["columns"] == {"level": 2}


def in_two_verifiers(reward: Any) -> list[Any]:
    with pickle_functions([reward]):
        spec = {"name": f"python.{reward.__name__}", "prompt": FIELDS}
        return [
            verify(text("3"))
            for verify in (function_verifier(spec), function_verifier(spec))
            for _ in range(2)
        ]


def test_async_functions_share_one_loop() -> None:
    loops: set[Any] = set()

    async def ask(prompt: Any, trajectory: Any) -> float:
        await asyncio.sleep(0)
        loops.add(asyncio.get_running_loop())
        return 1 / len(loops)

    assert in_two_verifiers(ask) == [1.0] * 4


def test_passed_function_keeps_its_globals() -> None:
    loads: list[int] = []

    def loaded(prompt: Any, trajectory: Any) -> float:
        if not loads:
            loads.append(1)
            return 0.0
        return 1.0

    assert in_two_verifiers(loaded) == [0.0, 1.0, 1.0, 1.0]
    with pickle_functions([loaded]):
        again = load_function("python.loaded")
        assert again is load_function("python.loaded") is not loaded
        assert again(None, None) == 0.0, "another run"


def test_a_group_function_may_return_an_iterator() -> None:
    def lazy(prompt: Any, trajectories: Any) -> Any:
        return (float(one.answer) for one in trajectories)

    with pickle_functions([lazy]):
        verify = function_verifier({"name": "python.lazy", "prompt": FIELDS, "group": True})
        assert verify(json.dumps([text("1"), text("0")])) == {"correct": 0.5, "0": 1.0, "1": 0.0}


def test_a_group_function_sees_whole_groups() -> None:
    def alike(prompt: Any, trajectories: Any) -> list[float]:
        return [1 / len(trajectories)] * len(trajectories)

    functions = replace(PROMPT, prompt_id="file/2", reward={"kind": "functions"})
    with pickle_functions([alike]), new_scorer({"maths": {"python.alike": 1.0}}) as scorer:
        scored = score(scorer, [group("3", "4"), group("3", prompt=functions)])
    assert [one.rewards_G.tolist() for one in scored] == [[0.5, 0.5], [1.0]]
    assert scored[1].parts_G[0]["correct"] == 1.0
