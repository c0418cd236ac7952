"""Finding the answer in a completion."""

from keel.rewards.text import (
    answer_in,
    final_text,
    normalise,
    outside_think,
    raw_text,
    thinking_text,
)


def test_nothing_inside_think_counts() -> None:
    texts = ("<think>41</think> 42 ", "41</think>42", "42", "<think>a<think>b</think>42")
    for text in texts:
        assert outside_think(text) == "42"
    for text in ("<think>42", "<think>a</think><think>42", "42<think>43</think>"):
        assert outside_think(text) == ""
    assert outside_think("<think>a</think>b</think>c") == "c"


def test_the_policys_last_message_counts() -> None:
    message = {"role": "assistant", "content": "ab", "raw": "a<think>x</think>b"}
    assert final_text((message,)) == "b"
    assert final_text(({"role": "assistant", "content": "", "raw": "42 is what I th"},)) == ""
    assert final_text(({"role": "assistant", "content": "7"}, {"role": "tool"})) == "7"
    assert final_text(({"role": "assistant", "content": None},)) == final_text(()) == ""


def test_raw_text_and_thinking() -> None:
    message = {"role": "assistant", "content": "b", "reasoning_content": "a"}
    assert (raw_text((message,)), thinking_text((message,))) == ("<think>a</think>b", "a")
    raw = {"role": "assistant", "content": "b", "raw": "<think>a </think> b"}
    assert (raw_text((raw,)), thinking_text((raw,))) == ("<think>a </think> b", "a")
    plain = {"role": "assistant", "content": "b"}
    assert (raw_text((plain,)), thinking_text((plain,))) == ("b", "")
    assert (raw_text(()), thinking_text([{"role": "user", "content": "b"}])) == ("", "")


ANSWERS = {
    "It is \\boxed{41}, no, \\boxed{ 42 }.": "42",
    "\\boxed{\\frac{1}{2}}": "\\frac{1}{2}",
    "\\boxed{\\{1, 2\\}}": "\\{1, 2\\}",
    "\\boxed{42": "\\boxed{42",
    "so <answer>41</answer> <answer> 42 </answer> done": "42",
    "</answer>42<answer>": "</answer>42<answer>",
    " plain ": "plain",
    "\\boxed{}": "",
}


def test_a_marked_answer_is_preferred() -> None:
    assert {text: answer_in(text) for text in ANSWERS} == ANSWERS


def test_normalised_text() -> None:
    assert normalise(" a\n\tb\u00a0c ") == "a b c"
    assert normalise("ｘ²") == "x^2"
