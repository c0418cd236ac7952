"""Rewards from the user's own functions."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.rewards import scorer as scorer_module
from keel.rewards.compose import check_weights
from keel.rewards.custom import BadReward, TextTrajectory, function, load_function, prompt_fields
from keel.rewards.pickled_functions import passing
from keel.rewards.scorer import Scorer
from keel.rewards.workers.worker import reply_to
from tests.rewards.groups import PROMPT, group
from tests.waiting import PATIENCE_S

MINE = """
import functools

def polite(prompt, trajectory):
    assert prompt.messages[0]["role"] == "user"
    assert trajectory.finish_reason == "stop" and trajectory.sampled_tokens == 1
    return "please" in trajectory.answer or 0.25 * len(trajectory.thinking)

number = 3

def supplied(function):
    @functools.wraps(function)
    def outer(prompt, trajectory):
        return function(prompt, trajectory, 0.5)
    return outer

@supplied
def third(prompt, trajectory, more):
    return more

class Brief:
    def __call__(self, prompt, trajectory):
        return 0.25

brief = Brief()

@functools.lru_cache
def cached(prompt, trajectory):
    return 1.0

async def stream(prompt, trajectory):
    yield 1.0

def alone(trajectory):
    return 1.0

def texts(prompts, completions, **kwargs):
    return [1.0 for _ in completions]

def verl(data_source, solution_str, ground_truth=None, extra_info=None):
    return float(solution_str == ground_truth)

def trl(completions, **kwargs):
    return [1.0 for _ in completions]

def swapped(trajectory, prompt):
    return 1.0
"""
FIELDS = prompt_fields(group("</think>3").prompt)


def text(answer: str) -> str:
    message = {"role": "assistant", "content": answer}
    return TextTrajectory(messages=[message], finish_reason="stop", sampled_tokens=1).dumps()


def returning(value: Any) -> Any:
    def always(prompt: Any, trajectory: Any) -> Any:
        return value

    return always


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    (tmp_path / "my_keel_rewards.py").write_text(MINE)
    (tmp_path / "broken_rewards.py").write_text("import nothing_of_this_name")
    (tmp_path / "exiting_rewards.py").write_text("import sys; sys.exit(0)")
    yield tmp_path
    sys.modules.pop("my_keel_rewards", None)


@pytest.mark.e2e
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dotted_name_is_a_part(workers: int) -> None:
    weights = {"maths": {"correct": 1.0, "my_keel_rewards.polite": 0.5}}
    with Scorer(weights, workers=workers, timeout_s=PATIENCE_S) as scorer:
        (scored,) = scorer.score([group("<think>ab</think>3", "<think></think>3 please")])
    assert [parts["my_keel_rewards.polite"] for parts in scored.parts_G] == [0.5, 1.0]
    assert scored.rewards_G.tolist() == [1.25, 0.5]


@pytest.mark.parametrize(("name", "score"), [("third", 0.5), ("brief", 0.25)])
def test_decorated_functions_and_instances_work(name: str, score: float) -> None:
    assert function({"name": f"my_keel_rewards.{name}", "prompt": FIELDS})(text("d")) == score


@pytest.mark.parametrize(
    "value",
    [
        True,
        1,
        1.0,
        np.float32(1),
        np.True_,
        np.array(1.0),
        torch.tensor(1.0),
        Fraction(1),
        1.0000001,
    ],
)
def test_any_number_is_accepted(value: Any) -> None:
    with passing([reward := returning(value)]):
        assert function({"name": f"python.{reward.__name__}", "prompt": FIELDS})(text("3")) == 1.0


@pytest.mark.parametrize(
    "value",
    [None, math.nan, -0.5, 7, 1.00001, "0.5", b"0.5", bytearray(b"1"), np.str_("0.5"), [1.0, 0.0]],
)
def test_other_values_are_errors_worth_nothing(value: Any) -> None:
    with passing([reward := returning(value)]):
        name = f"python.{reward.__name__}"
        with pytest.raises(BadReward):
            function({"name": name, "prompt": FIELDS})(text("3"))
        with Scorer(
            {"maths": {"correct": 1.0, name: 0.5}}, workers=0, say=lambda _: None
        ) as scorer:
            (scored,) = scorer.score([group("</think>3")])
    assert scored.rewards_G.tolist() == [1.0]
    assert scored.parts_G[0] == {"correct": 1.0, "format": 1.0, "error": 1.0, name: 0.0}


@pytest.mark.parametrize("values", ["11", {0: 1.0, 1: 0.5}, {1.0, 0.5}, 1.0, [1.0], ["1", 1.0]])
def test_a_group_function_must_return_a_list(values: Any) -> None:
    with passing([reward := returning(values)]):
        spec = {"name": f"python.{reward.__name__}", "prompt": FIELDS, "group": True}
        with pytest.raises(BadReward):
            function(spec)(json.dumps([text("3")] * 2))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("my_keel_reward.polite", "my_keel_rewards"),
        ("my_keel_rewards.polit", "polite"),
        ("my_keel_rewards:polite.x", ""),
        ("my_keel_rewards.Brief", "class"),
        ("my_keel_rewards.cached", "cached"),
        ("my_keel_rewards.number", ""),
        ("my_keel_rewards.stream", "generator"),
        (".polite", ""),
        ("..", ""),
        ("../../etc/passwd.x", ""),
        ("exiting_rewards.x", "SystemExit"),
        ("broken_rewards.x", "nothing_of_this_name"),
        *((f"my_keel_rewards.{name}", r"prompt, trajectory") for name in ("alone", "texts")),
        *(
            (f"my_keel_rewards.{name}", r"prompt, trajectory")
            for name in ("verl", "trl", "swapped")
        ),
    ],
)
def test_unusable_names_are_refused(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"'maths'.*'{name}'.*{hint}"):
        check_weights({"maths": {name: 1.0}})


def test_a_module_that_fails_names_its_line(folder: Path) -> None:
    (folder / "failing.py").write_text("import math\nlimit = math.sqrt(-1)\n")
    with pytest.raises(ValueError, match=r"failing\.py:2 in <module>"):
        load_function("failing.x")


def test_library_modules_cannot_be_shadowed(folder: Path) -> None:
    (folder / "math.py").write_text("def atan2(y, x): raise SystemExit")
    assert load_function("math.atan2") is math.atan2


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


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (lambda p, t: p.reward["gold"], ["answer", "columns.level"]),
        (lambda p, t: p.answer, ["reward", "messages"]),
        (lambda p, t: t.text, ["answer", "all_thinking"]),
    ],
)
def test_missing_names_list_the_existing_ones(body: Any, names: list[str]) -> None:
    def mine(prompt: Any, trajectory: Any) -> Any:
        return body(prompt, trajectory)

    prompt = replace(PROMPT, reward={"kind": "answer", "answer": "3", "columns": {"level": 2}})
    with passing([mine]):
        verify = function({"name": "python.mine", "prompt": prompt_fields(prompt)})
        error = reply_to(verify, text("3"))["error"]
    assert all(name in error for name in names)


# --- Functions passed from Python ---


def in_two_verifiers(reward: Any) -> list[Any]:
    with passing([reward]):
        spec = {"name": f"python.{reward.__name__}", "prompt": FIELDS}
        return [verify(text("3")) for verify in (function(spec), function(spec)) for _ in range(2)]


def test_async_functions_share_one_loop() -> None:
    clients: list[Any] = []

    class Client:
        """Like an HTTP client: bound to the loop that it was created on."""

        def __init__(self) -> None:
            self.loop = asyncio.get_running_loop()

        async def get(self) -> float:
            answer = self.loop.create_future()
            self.loop.call_soon(answer.set_result, 0.5)
            return await answer

    async def ask(prompt: Any, trajectory: Any) -> float:
        if not clients:
            clients.append(Client())
        return await clients[0].get()

    assert in_two_verifiers(ask) == [0.5] * 4


def test_an_async_function_that_exits_spares_other_calls() -> None:
    calls: list[str] = []

    async def exits(prompt: Any, trajectory: Any) -> float:
        calls.append("")
        if len(calls) == 1:
            raise SystemExit(3)
        return 1.0

    with passing([exits]):
        verify = function({"name": "python.exits", "prompt": FIELDS})
        with pytest.raises(RuntimeError, match="exit"):
            verify(text("3"))
        assert verify(text("3")) == 1.0


def test_a_passed_function_keeps_its_globals_within_a_run() -> None:
    loads: list[int] = []

    def loaded(prompt: Any, trajectory: Any) -> float:
        if not loads:
            loads.append(1)
            return 0.0
        return 1.0

    assert in_two_verifiers(loaded) == [0.0, 1.0, 1.0, 1.0]
    with passing([loaded]):
        again = load_function("python.loaded")
        assert again is load_function("python.loaded") is not loaded
        assert again(None, None) == 0.0, "another run"


def test_a_group_function_sees_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    sees_group = scorer_module.sees_group
    monkeypatch.setattr(
        scorer_module, "sees_group", lambda name: names.append(name) or sees_group(name)
    )

    def alike(prompt: Any, trajectories: Any) -> list[float]:
        return [1 / len(trajectories)] * len(trajectories)

    functions = replace(PROMPT, prompt_id="file/2", reward={"kind": "functions"})
    with passing([alike]), Scorer({"maths": {"python.alike": 1.0}}, workers=0) as scorer:
        scored = scorer.score([group("3", "4"), group("3", prompt=functions)])
    assert [one.rewards_G.tolist() for one in scored] == [[0.5, 0.5], [1.0]]
    assert scored[1].parts_G[0]["correct"] == 1.0
    assert names == ["python.alike"], "the signature is read once"
