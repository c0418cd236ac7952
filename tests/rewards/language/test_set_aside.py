"""Code and formulas do not count for the language, but running text disguised as them does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from keel.rewards.language.share import language_share, words_of
from tests.rewards.language.samples import SAMPLES

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
CODE = [
    """```python
import numpy as np
from collections import defaultdict

def count_primes(limit: int) -> int:
    if limit is not None and limit in values or not done:
        return sum(is_prime(n) for n in range(2, limit))
    for key, value in sorted(items.items(), key=lambda pair: pair[1]):
        raise ValueError("bad input")
    print("Hello, world")
    return True if value else False
```""",
    """```sql
SELECT name, age, COUNT(*) FROM users u LEFT JOIN orders o ON u.id = o.user_id
WHERE age > 18 AND name IS NOT NULL GROUP BY name, age ORDER BY age DESC LIMIT 10;
```""",
    """```c
#include <stdio.h>
int main(void) { unsigned long long int total = 0; for (int i = 0; i < n; i++) total += a[i]; }
static const char *name = "value";
```""",
    "~~~\npublic static final String NAME; private static int counter;\n~~~",
    '```bash\npip install numpy pandas\ngit commit -m "fix" && docker run --rm image\n```',
    "$\\sum_{i=1}^{n} x_i^2 = \\frac{n(n+1)(2n+1)}{6}$, \\(a^2 + b^2 = c^2\\)",
    "\\[ \\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix} \\vec{v} = \\lambda \\vec{v} \\]",
    "$$f(x) = \\begin{cases} x^2 & \\text{if } x > 0 \\\\ 0 & \\text{otherwise} \\end{cases}$$",
    "$v = \\frac{\\text{distance}}{\\text{time}}$, $\\sin \\alpha \\cos \\beta$, $\\mu \\nu \\xi$",
    "`max_value`, `for item in items`, `list.append(x)`, `git status`, `SELECT * FROM t`",
    "```bash\npip install --upgrade numpy pandas torch transformers datasets accelerate\n"
    "git clone repo && cd repo && make install test lint format types clean all\n```",
    "```dockerfile\nFROM python\nRUN apt-get install build essential cmake ninja curl wget\n```",
    "$\\begin{pmatrix} a \\end{pmatrix} \\xrightarrow{f} \\varprojlim \\coprod \\bigoplus "
    "\\bigcup \\bigcap \\bigvee \\wedge \\vee$",
    "$\\le \\ge \\ne \\mu \\nu \\to \\chi \\det$, \\le \\ge \\ne \\mu \\nu \\to \\chi \\det",
    "\\begin{aligned} \\dfrac a b \\lessapprox \\coloneqq \\mathscr F \\end{aligned}",
    "`apple, banana, cherry, durian, elder, fig, grape`, `José, Zoë, Chloé, André`",
    "TRUE FALSE TRUE FALSE, ATG GCC TAA GGC, NASA ESA JAXA, SELECT DISTINCT NAME FROM USERS",
    "https://example.com/how-to-add-two-numbers-in-the-basket <b> </b> x_1 y_2 GPU",
]

PAIRS = [
    (name, other)
    for index, name in enumerate(SAMPLES)
    for other in [*SAMPLES, *SAMPLES][index : index + 20 : 4]
    + [*SAMPLES, *SAMPLES][index + 1 : index + 2]
    if {name, other} != {"Arabic", "Persian"}  # indistinguishable when short
]
"""Languages of a prompt and an answer: the same, the next, and every fourth."""
plain = cache(language_share)
"""Share of an answer without marks, for comparison."""


@pytest.mark.parametrize("code", CODE)
def test_honest_code_costs_nothing(code: str) -> None:
    for first, second, _, prompt in SAMPLES.values():
        assert language_share(prompt, f"{first}\n{code}\n{second}") == 1.0
        assert language_share(prompt, code) == 1.0


@pytest.mark.parametrize("mark", MARKS)
def test_marks_around_text_gain_nothing(mark: str) -> None:
    for name, other in PAIRS:
        *answer, _ = SAMPLES[other]
        prompt = SAMPLES[name][-1]
        dressed = "\n\n".join(map(MARKS[mark].format, answer))
        if mark == "a fence that is never closed":  # the next one would close it
            dressed = MARKS[mark].format("\n\n".join(answer))
        share = plain(prompt, "\n\n".join(answer))
        assert language_share(prompt, dressed) <= share + 0.1, f"{other} for {name}"
    for *answer, prompt in SAMPLES.values():
        assert language_share(prompt, "\n\n".join(map(MARKS[mark].format, answer))) >= 0.95


@pytest.mark.parametrize("mark", BY_WORD)
def test_marks_around_each_word_gain_nothing(mark: str) -> None:
    gained: list[float] = []
    for name, other in PAIRS:
        if name != other:
            *answer, _ = SAMPLES[other]
            prompt = SAMPLES[name][-1]
            dressed = " ".join(map(BY_WORD[mark], " ".join(answer).split()))
            share = plain(prompt, " ".join(answer))
            gained.append(language_share(prompt, dressed) - share)
    assert sum(gained) / len(gained) < 0.1


def test_running_text_in_code_is_kept() -> None:
    assert words_of("$Das ist die Antwort$").split() == [".", "Das", "ist", "die", "Antwort."]
    apart = words_of("$Das$ $ist$ $die$ $Antwort$").split()
    assert apart == [".", "Das", "ist", "die", "Antwort."]
    assert words_of("`return value`, `the sum`").split() == [","]
    assert words_of("$苹果的数量是七$").split() == [".", "苹果的数量是七."]
    assert words_of("$面积$ and $Δx$").split() == ["and"]
    assert "ANTWORT" in words_of("DAS IST DIE ANTWORT")
    assert words_of("CPU and GPU").split() == ["and"]
    assert words_of("\\alpha \\beta \\gamma \\delta").split() == []
    assert words_of("\\Das \\ist \\die \\Antwort").split() == ["Das", "ist", "die", "Antwort"]
    assert words_of("$\\text{Das ist die Antwort}$").split() == [
        ".",
        "Das",
        "ist",
        "die",
        "Antwort.",
    ]
    assert "answer" in words_of("`so it is clear that the answer is seven`")
    assert words_of("`build essential cmake ninja curl wget the`").split() == []
    few = "alder birch cedar elm fir gum hazel iris juniper kauri the larch its maple nutmeg"
    assert words_of(f"`{few}`").split() == []  # too few function words


def test_english_comments_cost_little() -> None:
    first, second, _, prompt = SAMPLES["Chinese"]
    code = """```python
def square(x):
    \"\"\"Return the square of the number.\"\"\"
    return x * x  # we use the fact that it is a number
```"""
    assert 0.75 < language_share(prompt, f"{first}\n{code}\n{second}") < 1.0
    assert language_share(prompt, code) == 0.0
    short = f"如下。\n{code}\n完成了。"
    assert 0.5 < language_share(prompt, short) < 0.6
    english = " ".join(SAMPLES["English"][:2])
    for mark in ("backticks", "text in a formula"):
        assert language_share(prompt, f"{first} {MARKS[mark].format(english)}") < 0.5
    assert language_share(prompt, f"{first}\n{MARKS['fence'].format(english * 4)}") < 0.5
