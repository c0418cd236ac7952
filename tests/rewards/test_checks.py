"""Rewards that could not work are named before the run."""

from __future__ import annotations

from typing import Any

import pytest

from keel.rewards import checks
from keel.rewards.checks import check_prompts, check_spec
from keel.rewards.code.verifier import CodeSettings
from keel.rewards.sandbox.watch import Limits
from keel.rl.types import Prompt
from tests.waiting import PATIENCE_S

TRUSTED = CodeSettings(
    isolation="none-i-trust-the-answers", completion_s=PATIENCE_S, limits=Limits(time_s=PATIENCE_S)
)
RIGHT, WRONG = "print(input())", "print(1)"


def prompt(number: int, **reward: Any) -> Prompt:
    messages = ({"role": "user", "content": "?"},)
    return Prompt(prompt_id=f"file/{number}", domain="d", messages=messages, reward=reward)


def program(number: int, reference: str | None = None) -> Prompt:
    more = {} if reference is None else {"reference": reference}
    return prompt(number, kind="code", tests=[{"stdin": "2", "stdout": "2"}], **more)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "kind None; there are reasoning_gym, answer, code, rubric, proof"),
        ({"kind": "function", "name": "os.system"}, "kind 'function'"),
        ({"kind": ["answer"]}, r"kind \['answer'\]"),
        ({"kind": "answer"}, "needs an `answer`"),
        ({"kind": "answer", "answer": "3", "match": ["math"]}, r"match \['math'\]"),
        ({"kind": "answer", "match": "schema"}, "must be a JSON schema"),
        ({"kind": "answer", "match": "schema", "answer": {"$schema": 5}}, r"its \$schema is 5"),
        ({"kind": "reasoning_gym", "task": "chain_sum"}, "an `entry` that has an `answer`"),
        ({"kind": "reasoning_gym", "task": "no", "entry": {"answer": "1"}}, "task 'no'"),
        (
            {"kind": "reasoning_gym", "task": "gcd", "entry": {"answer": "1"}, "params": {"x": 1}},
            "unexpected keyword argument 'x'",
        ),
        ({"kind": "code", "language": ["c"], "tests": []}, r"language \['c'\]"),
        ({"kind": "answer", "answer": "3", "match": "fuzzy"}, "match 'fuzzy'"),
        ({"kind": "code", "tests": []}, "at least one test"),
        ({"kind": "rubric", "criteria": []}, "without criteria"),
        ({"kind": "proof", "alpha": 2}, "alpha 2"),
    ],
)
def test_bad_specs(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_spec(spec)


def test_good_specs() -> None:
    check_spec({"kind": "answer", "answer": "3"})
    check_spec(program(1).reward)
    check_spec({"kind": "proof"})


@pytest.mark.e2e
def test_references_have_to_pass_their_own_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"correct": 1.0}
    good = [program(1, RIGHT), program(2), program(3, RIGHT)]
    told = check_prompts(good, weights, code=TRUSTED)
    assert told == "2 of 2 reference solutions run, all pass"
    with pytest.raises(ValueError, match=r"prompt file/4: its reference solution fails tests\[0\]"):
        check_prompts([*good, program(4, WRONG)], weights, code=TRUSTED)
    monkeypatch.setattr(checks, "REFERENCES", 1)
    late = check_prompts([*good, program(4, WRONG)], weights, code=TRUSTED)
    assert late == "1 of 3 reference solutions run, all pass"
    none = check_prompts([program(2)], weights, code=TRUSTED)
    assert none == "no reference solutions to try the tests on"
    assert check_prompts([prompt(1, kind="answer", answer="3")], weights, code=TRUSTED) == ""


@pytest.mark.e2e
def test_outputs_have_to_fit_the_sandbox() -> None:
    long = prompt(4, kind="code", tests=[{"stdin": "", "stdout": "9" * 2**21}])
    with pytest.raises(ValueError, match=r"prompt file/4: tests\[0\] wants 2048 KiB .*output_kib"):
        check_prompts([program(1), long], {"correct": 1.0}, code=TRUSTED)


@pytest.mark.e2e
@pytest.mark.parametrize("how", [{}, {"tolerance": 1e-6}], ids=str)
def test_white_space_and_digits_that_no_program_has_to_make_are_no_output(
    how: dict[str, float],
) -> None:
    line = "1" + " " * 3_000 if not how else "1." + "0" * 3_000
    tests = [{"stdin": "", "stdout": f"{line}\n" * 600}]
    wide = prompt(5, kind="code", tests=tests, reference="print('1\\n' * 600)", **how)
    told = check_prompts([wide], {"correct": 1.0}, code=TRUSTED)
    assert told == "1 of 1 reference solutions run, all pass"


def test_weights_have_to_fit_the_prompts() -> None:
    sums = [prompt(1, kind="answer", answer="3")]
    with pytest.raises(ValueError, match=r"prompt file/1 has no reward 'rubric'.*'answer'"):
        check_prompts(sums, {"rubric": 1.0}, code=TRUSTED)
    with pytest.raises(ValueError, match="not rubric or proof"):
        check_prompts(sums, {"disagreement": -0.1}, code=TRUSTED)
