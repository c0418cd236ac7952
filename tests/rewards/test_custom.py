"""Rewards from the user's own file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.rewards.compose import check_weights
from keel.rewards.custom import BadReward, TextTrajectory, function, load_function, prompt_fields
from keel.rewards.pickled_functions import passing
from keel.rewards.scorer import Scorer
from tests.rewards.groups import group
from tests.waiting import PATIENCE_S

MINE = """
import functools

def polite(prompt, trajectory):
    assert prompt.messages[0]["role"] == "user"
    assert trajectory.finish_reason == "stop" and trajectory.sampled_tokens == 1
    return "please" in trajectory.answer or 0.25 * len(trajectory.thinking)

def odd(prompt, trajectory):
    return 7

def rounded(prompt, trajectory):
    return {"a": 0.1 * 3 / 0.3, "b": 0.3 - 0.1 * 3, "c": 1.0000001, "d": 1.00001}[trajectory.answer]

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

    def st(prompt, trajectory):
        return 1.0

brief = Brief()

def twos(prompt, trajectories):
    return {"text": "11", "keys": {0: 1.0, 1: 0.5}, "each": ["1", 1.0]}[trajectories[0].answer]

@functools.lru_cache
def cached(prompt, trajectory):
    return 1.0
"""

PROMPT = prompt_fields(group("</think>3").prompt)


def test_a_prompt_has_columns_whether_its_line_has_any_or_not() -> None:
    assert PROMPT["reward"]["columns"] == {}
    prompt = group("3").prompt
    with_one = replace(prompt, reward={**prompt.reward, "columns": {"level": 2}})
    assert prompt_fields(with_one)["reward"]["columns"] == {"level": 2}


def said(answer: str) -> str:
    message = {"role": "assistant", "content": answer}
    return TextTrajectory(messages=[message], finish_reason="stop", sampled_tokens=1).dumps()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    (tmp_path / "my_keel_rewards.py").write_text(MINE)
    (tmp_path / "broken_rewards.py").write_text("import nothing_of_this_name")
    (tmp_path / "leaving_rewards.py").write_text("import sys; sys.exit(0)")
    yield tmp_path
    __import__("sys").modules.pop("my_keel_rewards", None)


@pytest.mark.e2e
@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_by_dotted_name_is_a_part(workers: int) -> None:
    weights = {"maths": {"correct": 1.0, "my_keel_rewards.polite": 0.5}}
    with Scorer(weights, workers=workers, timeout_s=PATIENCE_S) as scorer:
        (scored,) = scorer.score([group("<think>ab</think>3", "<think></think>3 please")])
    assert [parts["my_keel_rewards.polite"] for parts in scored.parts_G] == [0.5, 1.0]
    assert scored.rewards_G.tolist() == [1.25, 0.5]


def test_a_function_that_returns_nonsense_is_an_error_and_worth_nothing() -> None:
    with Scorer({"maths": {"my_keel_rewards.odd": 0.5}}, workers=0) as scorer:
        (scored,) = scorer.score([group("</think>3")])
    assert scored.rewards_G.tolist() == [0.0]
    assert scored.parts_G[0]["error"] == 1.0
    assert scored.parts_G[0]["correct"] == 1.0


def test_what_rounding_leaves_is_a_reward() -> None:
    with Scorer({"maths": {"my_keel_rewards.rounded": 0.5}}, workers=0) as scorer:
        (scored,) = scorer.score([group("</think>a", "</think>b", "</think>c", "</think>d")])
    assert [part["my_keel_rewards.rounded"] for part in scored.parts_G] == [1.0, 0.0, 1.0, 0.0]
    assert [part.get("error", 0.0) for part in scored.parts_G] == [0.0, 0.0, 0.0, 1.0]
    verify = function({"name": "my_keel_rewards.rounded", "prompt": PROMPT})
    with pytest.raises(BadReward, match=r"returned 1\.00001, above 1"):
        verify(said("d"))


def test_decorators_and_instances_are_called_as_they_are() -> None:
    for name, wanted in (("third", 0.5), ("brief", 0.25)):
        verify = function({"name": f"my_keel_rewards.{name}", "prompt": PROMPT})
        assert verify(said("d")) == wanted


@pytest.mark.parametrize("score", ["0.5", b"0.5", bytearray(b"1"), np.str_("0.5")])
def test_text_is_no_number(score: Any) -> None:
    with (
        passing([reward := returning(score)]),
        pytest.raises(BadReward, match=rf"returned a {type(score).__name__} .*a number from 0 to"),
    ):
        function({"name": f"python.{reward.__name__}", "prompt": PROMPT})(said("3"))


@pytest.mark.parametrize(
    "score", [True, 1, 1.0, np.float32(1), np.True_, np.array(1.0), torch.tensor(1.0), Fraction(1)]
)
def test_all_kinds_of_numbers_are_numbers(score: Any) -> None:
    with passing([reward := returning(score)]):
        assert function({"name": f"python.{reward.__name__}", "prompt": PROMPT})(said("3")) == 1.0


def returning(score: Any) -> Any:
    def always(prompt: Any, trajectory: Any) -> Any:
        return score

    return always


@pytest.mark.parametrize(
    ("answer", "words"), [("text", "a str; a"), ("keys", "a dict; a"), ("each", r"a str \('1'\)")]
)
def test_a_group_gets_a_list_of_numbers(answer: str, words: str) -> None:
    verify = function({"name": "my_keel_rewards.twos", "prompt": PROMPT, "group": True})
    with pytest.raises(BadReward, match=f"returned {words}"):
        verify(json.dumps([said(answer)] * 2))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("my_keel_rewards", "MODULE.FUNCTION: did you mean my_keel_rewards.polite"),
        ("my_keel_rewards:odd", "MODULE.FUNCTION: did you mean my_keel_rewards.odd"),
        ("nowhere", "there are correct.*a function of yours is MODULE.FUNCTION, for example"),
    ],
)
def test_a_function_without_its_dot(part: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"no reward '{part}'; .*{message}"):
        check_weights({"maths": {part: 1.0}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_keel_reward.polite", "no module 'my_keel_reward' .*did you mean my_keel_rewards.poli"),
        ("my_keel_rewards.polit", "no function 'polit'; did you mean my_keel_rewards.polite"),
        ("./my_keel_rewards.py:polite", r"a dot and .*did you mean my_keel_rewards\.polite\?"),
        ("my_keel_rewards:polite.x", "a dot and a function's.* of this folder$"),
        ("my_keel_rewards.Brief", r"is a class; .*`brief = Brief\(\)` .*my_keel_rewards\.brief in"),
        ("my_keel_rewards.Brief.st", r"`st = Brief\.st` there, and here my_keel_rewards\.st"),
        ("my_keel_rewards.Brif", r"no function 'Brif'; did you mean my_keel_rewards\.brief\?"),
        ("my_keel_rewards.py", r"no function 'py'; did you mean my_keel_rewards\.polite\?"),
        ("my_keel_rewards.cachd", "no function 'cachd'$"),
        ("my_keel_reward.nothing", r"and where Python does\)$"),
        ("my_keel_rewards.cached", "a prompt cannot be hashed; cache a function of trajectory.ans"),
        (".polite", "a dot and a function's"),
        ("..", "a dot and a function's"),
        ("../../etc/passwd.x", "a dot and a function's"),
        ("leaving_rewards.x", "leaving_rewards cannot be imported: SystemExit: 0"),
        ("my_keel_rewards.number", "no function 'number'"),
        ("broken_rewards.x", "broken_rewards cannot be imported: No module named 'nothing_of"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"domain 'maths': reward '{name}'.*: .*{message}"):
        check_weights({"maths": {name: 1.0}})


def test_a_file_that_another_module_hides_is_named(folder: Path) -> None:
    (folder / "json.py").write_text("def brief(prompt, trajectory): return 1.0")
    with pytest.raises(
        ValueError, match=r"json has no .*'brief'; it is /.*, which hides .*json\.py"
    ):
        load_function("json.brief")


def test_library_modules_cannot_be_shadowed(folder: Path) -> None:
    (folder / "math.py").write_text("def atan2(y, x): raise SystemExit")
    assert load_function("math.atan2") is math.atan2


def test_a_trajectory_travels_as_text() -> None:
    said = ({"role": "assistant", "content": "", "raw": "<think>a\ud800</think> b"},)
    there = TextTrajectory(messages=said, finish_reason="length", sampled_tokens=3)
    back = TextTrajectory.loads(there.dumps())
    assert (back.answer, back.thinking, back.finish_reason) == ("b", "a\ud800", "length")
    assert (back.raw, back.sampled_tokens) == ("<think>a\ud800</think> b", 3)
