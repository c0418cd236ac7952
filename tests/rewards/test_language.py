"""The share of an answer in its prompt's language, in twenty languages.

Code and formulas do not count.
"""

import json
import time
from itertools import product
from pathlib import Path

import pytest

from keel.rewards.custom import TextTrajectory
from keel.rewards.language import _language_share, _prose, language_verifier

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
    assert _prose("a `code` b $x+y$ word").split() == ["word"]
    assert _prose("one ~~~\nall of\n\nthis\n~~~ two").split() == ["one", "two"]
    assert _prose("cost $5, and\n\nanother $").split() == ["cost", "$", ",", "and", "another", "$"]
    assert _prose("\\[ a + b \\] then \\boxed{seven}").split() == ["then", "{seven}"]
    assert _prose("`open and\n\nclosed`").split() == ["`open", "and", "closed`"]


def test_running_text_is_not_set_aside() -> None:
    assert _prose("he paid $5 for one, $6 for two").split()[-3:] == ["$", "for", "two"]
    assert _prose("$苹果的数量是七$ and $\\alpha + Δx$").split() == [".", "苹果的数量是七.", "and"]
    german, chinese = (" ".join(SAMPLES[name][:-1]) for name in ("German", "Chinese"))
    texts = (f"$\\text{{{chinese}}}$", f"```python\nx = 1  # {chinese}\n```", f"```\n{german}")
    for text in texts:
        assert _language_share(PROMPT, text) < 0.1
    prices = "It was $5 for the first of them, because he paid too late, and $6 for the second."
    assert _language_share(SAMPLES["German"][-1], prices) < 0.1


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
    texts = [
        "\\[" * 12_500,
        "`$" * 12_500,
        "a" * 25_000,
        "<" * 25_000,
        "_a" * 12_500,
        "$5 " * 8_000,
    ]
    inside = ["a ", "a", " ", "a_", "the ", "GPU ", "\\x ", "'a", ", "]
    texts += [f"```{text * (25_000 // len(text))}```" for text in inside]
    texts += [text * (25_000 // len(text)) for text in inside]
    for text in [*texts, "`a` " * 6_000]:
        began = time.thread_time()  # independent of machine load
        _language_share(PROMPT, text)
        assert time.thread_time() - began < 3


CODE: list[str] = json.loads((FOLDER / "code.json").read_text())
"""Code and formulas."""


def test_code_costs_nothing() -> None:
    for code, (first, second, _, prompt) in product(CODE, SAMPLES.values()):
        assert _language_share(prompt, f"{first}\n{code}\n{second}") == 1.0
        assert _language_share(prompt, code) == 1.0
