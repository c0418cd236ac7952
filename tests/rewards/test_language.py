"""The share of an answer in its prompt's language, in twenty languages.

Code and formulas do not count, but running text disguised as them does.
"""

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from keel.rewards.custom import TextTrajectory
from keel.rewards.language import _language_share, _remove_non_prose, language_verifier

FOLDER = Path(__file__).with_name("language")
SAMPLES: dict[str, list[str]] = json.loads((FOLDER / "samples.json").read_text())
"""Maps each language to three sentences of an answer and a prompt."""
ASIDE = "\n```python\nfor item in range(10):\n    print(item)\n```\n$$\\sum_{i} x_i$$\n\n"


def own(name: str) -> float:
    """Return the smallest share of an answer in the prompt's language, with code and a formula."""
    *answer, prompt = SAMPLES[name]
    return min(_language_share(prompt, text) for text in (ASIDE.join(answer), *answer))


def others(name: str) -> float:
    """Return the mean share of answers in the other languages."""
    prompt = SAMPLES[name][-1]
    shares = [
        _language_share(prompt, " ".join(SAMPLES[other][:-1])) for other in SAMPLES if other != name
    ]
    return sum(shares) / len(shares)


def mixed(name: str) -> float:
    """Return the share of an answer with one sentence in the language and one in another."""
    first, *_, prompt = SAMPLES[name]
    other = SAMPLES["German" if name == "English" else "English"][0]
    return _language_share(prompt, f"{first} {other}")


PROMPT = "How many apples does she have left in the basket?"


@pytest.mark.parametrize("name", SAMPLES)
def test_answers_in_the_language_in_another_and_mixed(name: str) -> None:
    assert own(name) >= 0.95
    assert others(name) <= 0.15
    assert 0.3 <= mixed(name) <= 0.7


def test_too_little_text_costs_nothing() -> None:
    code = "```\nfor apple in basket:\n    total += apple.count\nreturn total\n```"
    terms = "设 x 为苹果数, 见 https://example.com/some/page 和 GPU, x_1。"
    assert _language_share("2 + 2 = ?", SAMPLES["German"][0]) == 1.0  # the prompt has no words
    for text in ("", "42", "$x = 7$, \\(y\\)"):
        assert _language_share(PROMPT, text) == 1.0
    assert _language_share("Gib mir nur die Zahl der Äpfel im Korb.", code) == 1.0
    assert _language_share(SAMPLES["Chinese"][-1], terms) == 1.0


def test_code_and_formulas_are_set_aside() -> None:
    assert _remove_non_prose("a `code` b $x+y$ word").split() == ["word"]
    assert _remove_non_prose("one ~~~\nall of\n\nthis").split() == ["one"]
    prices = _remove_non_prose("cost $5, and\n\nanother $ sign").split()
    assert prices == ["cost", ",", "and", "another", "sign"]
    assert _remove_non_prose("\\[ a + b \\] then \\boxed{seven}").split() == ["then", "{seven}"]
    assert _remove_non_prose("`open and\n\nclosed`").split() == ["open", "and", "closed"]


def test_a_foreign_word_costs_its_share() -> None:
    share = _language_share(PROMPT, "She has seven яблок left in the basket now.")
    assert 0.8 < share < 0.95


def test_answer_and_thinking_apart() -> None:
    raw = "<think>Zuerst addieren wir die beiden Zahlen, dann teilen wir.</think>So it is seven."
    message = {"role": "assistant", "content": "", "raw": raw}
    text = TextTrajectory(messages=[message], finish_reason="stop", sampled_tokens=1).dumps()
    of = {
        name: language_verifier({"prompt": PROMPT, "of": name})(text)
        for name in ("answer", "thinking")
    }
    assert of == {"answer": 1.0, "thinking": 0.0}
    assert language_verifier({"prompt": PROMPT, "of": "both"})(text) == 0.5


def test_hostile_texts_take_linear_time() -> None:
    texts = ["\\[" * 12_500, "`$" * 12_500, "a" * 25_000, "<" * 25_000, "_a" * 12_500]
    inside = ["a ", "a", " ", "a_", "the ", "GPU ", "\\x ", "'a", ", "]
    texts += [f"```{text * (25_000 // len(text))}```" for text in inside]
    texts += [text * (25_000 // len(text)) for text in inside]
    for text in [*texts, "`a` " * 6_000]:
        began = time.thread_time()  # independent of machine load
        _language_share(PROMPT, text)
        assert time.thread_time() - began < 3


MARKS = {
    "dollars": "${}$",
    "display": "$$\n{}\n$$",
    "round": "\\({}\\)",
    "square": "\\[{}\\]",
    "text in a formula": "$x = \\text{{{}}}$",
    "backticks": "`{}`",
    "fence": "```\n{}\n```",
    "comment": "```python\nx = 1  # {}\n```",
    "string": '```python\nprint("{}")\n```',
    "tildes": "~~~\n{}\n~~~",
    "a fence that is never closed": "```\n{}",
}
BY_WORD: dict[str, Callable[[str], str]] = {
    "dollars": "${}$".format,
    "backticks": "`{}`".format,
    "tags": "<{}>".format,
    "commands": "\\{}".format,
    "digits": "{}1".format,
    "capitals": str.upper,
}
CODE: list[str] = json.loads((FOLDER / "code.json").read_text())
"""Honest code and formulas."""
PAIRS = [
    (name, [*SAMPLES, *SAMPLES][index + step])
    for index, name in enumerate(SAMPLES)
    for step in (0, 2, 5, 12)
]
"""Languages of a prompt and an answer."""
plain = cache(_language_share)
"""Share of an answer without marks, for comparison."""


@pytest.mark.parametrize("code", CODE)
def test_honest_code_costs_nothing(code: str) -> None:
    for first, second, _, prompt in SAMPLES.values():
        assert _language_share(prompt, f"{first}\n{code}\n{second}") == 1.0
        assert _language_share(prompt, code) == 1.0


@pytest.mark.parametrize("mark", MARKS)
def test_marks_around_text_gain_nothing(mark: str) -> None:
    for name, other in PAIRS:
        *answer, _ = SAMPLES[other]
        prompt = SAMPLES[name][-1]
        dressed = "\n\n".join(map(MARKS[mark].format, answer))
        if mark == "a fence that is never closed":  # the next one would close it
            dressed = MARKS[mark].format("\n\n".join(answer))
        share = plain(prompt, "\n\n".join(answer))
        assert _language_share(prompt, dressed) <= share + 0.1, f"{other} for {name}"
    for *answer, prompt in SAMPLES.values():
        assert _language_share(prompt, "\n\n".join(map(MARKS[mark].format, answer))) >= 0.95


@pytest.mark.parametrize("mark", BY_WORD)
def test_marks_around_each_word_gain_nothing(mark: str) -> None:
    gained: list[float] = []
    for name, other in PAIRS:
        if name != other:
            *answer, _ = SAMPLES[other]
            prompt = SAMPLES[name][-1]
            dressed = " ".join(map(BY_WORD[mark], " ".join(answer).split()))
            share = plain(prompt, " ".join(answer))
            gained.append(_language_share(prompt, dressed) - share)
    assert sum(gained) / len(gained) < 0.1


def test_running_text_in_code_is_kept() -> None:
    wrapped = "$\\text{Das ist die Antwort}$"
    for text in (wrapped, "$Das ist die Antwort$", "$Das$ $ist$ $die$ $Antwort$"):
        assert _remove_non_prose(text).split() == [".", "Das", "ist", "die", "Antwort."]
    assert _remove_non_prose("`return value`, `the sum`").split() == [","]
    assert _remove_non_prose("$苹果的数量是七$").split() == [".", "苹果的数量是七."]
    assert _remove_non_prose("$面积$ and $Δx$").split() == ["and"]
    assert "ANTWORT" in _remove_non_prose("DAS IST DIE ANTWORT")
    assert _remove_non_prose("CPU and GPU").split() == ["and"]
    assert _remove_non_prose("\\alpha \\beta \\gamma \\delta").split() == []
    assert _remove_non_prose("\\Das \\ist \\die \\Antwort").split() == [
        "Das",
        "ist",
        "die",
        "Antwort",
    ]
    assert "answer" in _remove_non_prose("`so it is clear that the answer is seven`")
    assert _remove_non_prose("`build essential cmake ninja curl wget the`").split() == []
    few = "alder birch cedar elm fir gum hazel iris juniper kauri the larch its maple nutmeg"
    assert _remove_non_prose(f"`{few}`").split() == []  # too few function words
