"""Rewards that cannot work are refused before the run."""

from typing import Any

import pytest

from keel.configs.sections.rewards import CodeConfig
from keel.rewards import checks
from keel.rewards.checks import check_prompts, check_spec
from keel.rl.types import Prompt
from tests.waiting import PATIENCE_S

TRUSTED = CodeConfig(
    isolation="none-i-trust-the-answers", completion_s=PATIENCE_S, time_s=PATIENCE_S
)
RIGHT, WRONG = "print(input())", "print(1)"
CORRECT = {"correct": 1.0}


def prompt(number: int, **reward: Any) -> Prompt:
    messages = ({"role": "user", "content": "?"},)
    return Prompt(prompt_id=f"file/{number}", domain="d", messages=messages, reward=reward)


def program(number: int, reference: str | None = None, **more: Any) -> Prompt:
    fields = more if reference is None else {**more, "reference": reference}
    return prompt(number, **{"kind": "code", "tests": [{"stdin": "2", "stdout": "2"}], **fields})


@pytest.mark.parametrize(
    "spec",
    [
        *({}, {"kind": "function", "name": "os.system"}, {"kind": ["answer"]}, {"kind": "answer"}),
        *({"kind": "answer", "answer": "3", "match": bad} for bad in (["math"], "fuzzy")),
        *({"kind": "answer", "answer": bad} for bad in (r"\sum_{k=1}^n k", r"\int_0^1 x\,dx")),
        {"kind": "answer", "answer": r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"},
        {"kind": "answer", "match": "schema", "answer": {"$schema": 5}},
        {"kind": "reasoning_gym", "task": "chain_sum"},
        {"kind": "reasoning_gym", "task": "no", "entry": {"answer": "1"}},
        {"kind": "reasoning_gym", "task": "gcd", "entry": {"answer": "1"}, "params": {"x": 1}},
        *({"kind": "code", "tests": []}, {"kind": "rubric", "criteria": []}),
    ],
)
def test_bad_specs(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        check_spec(spec)
    for right in ("3", r"\det(A) = 5", r"\text{the sum}"):
        check_spec({"kind": "answer", "answer": right})
    check_spec({"kind": "answer", "answer": r"\sum_k k", "match": "exact"})


@pytest.mark.e2e
def test_references_must_pass_their_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [program(1, RIGHT), program(2), program(3, RIGHT)]
    assert check_prompts(good, CORRECT, code=TRUSTED).startswith("2 of 2 ")
    with pytest.raises(ValueError, match=r"prompt file/4: .*tests\[0\]"):
        check_prompts([*good, program(4, WRONG)], CORRECT, code=TRUSTED)
    monkeypatch.setattr(checks, "_REFERENCES", 1)
    limited = check_prompts([*good, program(4, WRONG)], CORRECT, code=TRUSTED)
    assert limited.startswith("1 of 3 ")
    assert check_prompts([prompt(1, kind="answer", answer="3")], CORRECT, code=TRUSTED) == ""


@pytest.mark.e2e
@pytest.mark.parametrize("options", [{}, {"tolerance": 1e-6}], ids=str)
def test_expected_output_must_fit_the_sandbox(options: dict[str, float]) -> None:
    long = program(4, tests=[{"stdin": "", "stdout": "9 " * 2**21}], **options)
    with pytest.raises(ValueError, match=r"prompt file/4: tests\[0\].*output_kib"):
        check_prompts([program(1), long], CORRECT, code=TRUSTED)


@pytest.mark.parametrize("part", ["rubric", "disagreement"])
def test_weights_must_fit_the_prompts(part: str) -> None:
    with pytest.raises(ValueError, match=f"prompt file/1 .*'{part}'"):
        check_prompts([prompt(1, kind="answer", answer="3")], {part: 1.0}, code=TRUSTED)
