"""The rule that rewards an answer: what the gates look at is what it takes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence

from keel.rewards.rules.verifiers import verifier_for

_NUMBER = re.compile(r"[-+−]?(?:0|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d*)(?:\.\d*[1-9])?\s*%?")
"""One that is compared by its value. `3.10`, `007` and `192.168.0.1` are names."""
_SIGNS = ("'’‘ʼ`´", "-‐‑‒–—−", '"“”„')
"""Each as right as the others of its kind."""
_ONE_OF = {sign: f"[{re.escape(signs)}]" for signs in _SIGNS for sign in signs}
_FIRST = {ord(sign): signs[0] for signs in _SIGNS for sign in signs}


def alike(text: str) -> str:
    """Equal for spellings between which the rule makes no difference: it compares sign by sign, so
    `ß` and `ss` are two."""
    said = unicodedata.normalize("NFC", " ".join(text.split())).translate(_FIRST)
    return "".join(low if len(low := sign.lower()) == 1 else sign for sign in said)


def rule_of(right: Sequence[str]) -> dict[str, str]:
    """How a line of JSONL has it: numbers by their value; text in any of these spellings, up to
    case, white space, the kinds of apostrophes, quotes and dashes, and how accents are encoded."""
    by_value = {"answer": right[0], "match": "math"}
    if all(map(_NUMBER.fullmatch, right)) and all(map(taken_by(by_value), right)):
        return by_value
    spelled = dict.fromkeys(map(_pattern, right))
    return {"answer": f"(?i:{'|'.join(spelled)})[.。]?", "match": "regex"}


def taken_by(rule: dict[str, str]) -> Callable[[str], bool]:
    """Whether an answer is worth 1."""
    verify = verifier_for({"kind": "answer", **rule})
    return lambda answer: verify(answer) == 1


def _pattern(text: str) -> str:
    text = unicodedata.normalize("NFC", " ".join(text.split()))
    if _NUMBER.fullmatch(text):  # beside words: 1874 and 1,874
        whole, dot, rest = text.replace(",", "").partition(".")
        text = re.sub(r"(?<=\d)(?=(?:\d{3})+(?!\d))", ",", whole) + dot + rest
        return "".join(map(_sign, text)).replace(",", ",?")
    return "".join(map(_sign, text))


def _sign(sign: str) -> str:
    if sign == " ":
        return r"\s+"
    taken_apart = unicodedata.normalize("NFD", sign)
    if taken_apart != sign:
        return f"(?:{re.escape(sign)}|{re.escape(taken_apart)})"
    return _ONE_OF.get(sign, re.escape(sign))
