"""The share of an answer in its prompt's language, in twenty languages."""

from __future__ import annotations

import time

import pytest

from keel.rewards.custom import TextTrajectory
from keel.rewards.language.share import (
    _letters_by_script,
    language,
    language_share,
    words_of,
)
from keel.rewards.scorer import Scorer
from tests.rewards.groups import group
from tests.rewards.language.samples import SAMPLES, mixed, others, own

PROMPT = "How many apples does she have left in the basket?"


@pytest.mark.parametrize("name", SAMPLES)
def test_answers_in_the_language_in_another_and_mixed(name: str) -> None:
    assert own(name) >= 0.95
    assert others(name) <= 0.15
    assert 0.3 <= mixed(name) <= 0.7


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (
            "2 + 2 = ?",
            "Das ist natürlich die Zahl vier, wie jeder weiß.",
        ),  # the prompt has no words
        (PROMPT, ""),
        (PROMPT, "42"),
        (PROMPT, "$x = 7$, \\(y\\)"),
        (
            "Gib mir nur die Zahl der Äpfel im Korb.",
            "```\nfor apple in basket:\n    total += apple.count\nreturn total\n```",
        ),
        (
            "她的篮子里还剩下多少个苹果？",
            "设 x 为苹果数, 见 https://example.com/some/page 和 GPU, x_1。",
        ),
    ],
)
def test_too_little_text_costs_nothing(prompt: str, text: str) -> None:
    assert language_share(prompt, text) == 1.0


def test_code_and_formulas_are_set_aside() -> None:
    assert words_of("a `code` b $x+y$ word").split() == ["word"]
    assert words_of("one ~~~\nall of\n\nthis").split() == ["one"]
    assert words_of("cost $5, and\n\nanother $ sign").split() == [
        "cost",
        ",",
        "and",
        "another",
        "sign",
    ]
    assert words_of("\\[ a + b \\] then \\boxed{seven}").split() == ["then", "{seven}"]
    assert words_of("`open and\n\nclosed`").split() == ["open", "and", "closed"]


def test_scripts_are_weighed_by_words() -> None:
    assert _letters_by_script("ab вг 中 か 한") == {
        "latin": 2, "cyrillic": 2, "han": 3, "kana": 2, "hangul": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "own"),
    [
        ("ተማሪው ስንት ፖም አለው? እባክህ አስረዳ።", "ተማሪው ሰባት ፖም አለው፤ ምክንያቱም ሦስት እና አራት ሰባት ናቸው።"),
        ("តើសិស្សមានផ្លែប៉ោមប៉ុន្មាន? សូមពន្យល់។", "សិស្សមានផ្លែប៉ោមប្រាំពីរ ព្រោះបីបូកបួនស្មើប្រាំពីរ។"),
        ("ນັກຮຽນມີໝາກໂປມຈັກໜ່ວຍ? ກະລຸນາອະທິບາຍ.", "ນັກຮຽນມີໝາກໂປມເຈັດໜ່ວຍ ເພາະສາມບວກສີ່ເທົ່າກັບເຈັດ."),
    ],
    ids=["Amharic", "Khmer", "Lao"],
)
def test_rare_scripts_count(prompt: str, own: str) -> None:
    assert language_share(prompt, own) == 1.0
    assert language_share(prompt, "The student has seven apples, as three and four make it.") == 0.0


def test_a_foreign_word_costs_its_share() -> None:
    share = language_share(PROMPT, "She has seven яблок left in the basket now.")
    assert 0.8 < share < 0.95


def test_answer_and_thinking_apart() -> None:
    raw = "<think>Zuerst addieren wir die beiden Zahlen, dann teilen wir.</think>So it is seven."
    message = {"role": "assistant", "content": "", "raw": raw}
    text = TextTrajectory(messages=[message], finish_reason="stop", sampled_tokens=1).dumps()
    of = {name: language({"prompt": PROMPT, "of": name})(text) for name in ("answer", "thinking")}
    assert of == {"answer": 1.0, "thinking": 0.0}
    assert language({"prompt": PROMPT, "of": "both"})(text) == 0.5


def test_hostile_texts_take_linear_time() -> None:
    texts = ["\\[" * 12_500, "`$" * 12_500, "a" * 25_000, "<" * 25_000, "_a" * 12_500]
    inside = ["a ", "a", " ", "a_", "the ", "GPU ", "\\x ", "'a", ", "]
    texts += [f"```{text * (25_000 // len(text))}```" for text in inside]
    texts += [text * (25_000 // len(text)) for text in inside]
    for text in [*texts, "`a` " * 6_000]:
        began = time.thread_time()  # independent of machine load
        language_share(PROMPT, text)
        assert time.thread_time() - began < 3


def test_language_is_a_part_of_the_reward() -> None:
    weights = {"maths": {"correct": 1.0, "language": 0.5}}
    with Scorer(weights, workers=0) as scorer:
        asked = "</think>Die Antwort ist eine ganze Zahl, und zwar drei."
        (scored,) = scorer.score([group(asked)])
    assert scored.parts_G[0]["language"] == 1.0  # the prompt, 1+2?, has no language
