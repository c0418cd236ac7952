"""The tiny model's tokenizer and chat template, and the solutions that its teacher gives."""

import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.model.tiny.solutions import TAUGHT, solution
from keel.model.tiny.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
QUESTION = [{"role": "user", "content": "1 + 1 ="}]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def render(messages: list[dict], **options: object) -> str:
    return TOKENIZER.apply_chat_template(messages, tokenize=False, **options)


@settings(deadline=None)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


def test_rendering_without_tools() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": "2", "reasoning_content": "\n1 + 1\n"},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "3"},
        *QUESTION,
        {"role": "assistant", "content": "2", "reasoning_content": "\n1 + 1\n"},
        {"role": "assistant", "content": None},
    ]
    thought = "<|im_start|>assistant\n<think>\n1 + 1\n</think>\n\n2<|im_end|>\n"
    question = "<|im_start|>user\n1 + 1 =<|im_end|>\n"
    expected = (
        f"<|im_start|>system\nBe brief.<|im_end|>\n{question}"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>tool\nok<|im_end|>\n"
        f"<|im_start|>assistant\n3<|im_end|>\n{question}{thought}<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    thinks = render(turns, add_generation_prompt=True)
    assert thinks == render(turns, add_generation_prompt=True, enable_thinking=True) == expected
    closed = render(turns, add_generation_prompt=True, enable_thinking=False)
    assert closed == expected + "<think>\n\n</think>\n\n"


PARAMS = {
    "basic_arithmetic": {"operators": ["+", "-"], "allow_parentheses": False},
    "chain_sum": {"allow_negation": True},
    "gcd": {"max_numbers": 4},
    "spell_backward": {},
    "spiral_matrix": {"max_n": 6},
}


def answer_of(turn: str) -> str:
    return turn.split("</think>\n\n", 1)[1]


def steps_of(turn: str) -> str:
    return turn.removeprefix("<think>\n").split("\n</think>", 1)[0]


@pytest.mark.parametrize("task", TAUGHT)
def test_worked_solutions_are_right_and_hasty_ones_mostly_wrong(task: str) -> None:
    dataset = reasoning_gym.create_dataset(task, seed=7, size=300, **PARAMS[task])
    right = {True: 0, False: 0}
    for entry in dataset:
        for worked in right:
            turn = solution(task, entry, worked=worked)
            assert bool(steps_of(turn)) == worked
            right[worked] += dataset.score_answer(answer_of(turn), entry) == 1.0
    assert right[True] == 300 and right[False] < 0.25 * 300
