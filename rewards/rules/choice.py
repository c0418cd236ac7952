"""Finds out which choice a completion selects in a multiple-choice question."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any, cast

from keel.rewards.rules.statements import plain, squeezed
from keel.rewards.text import WRAPPED, marked_answers, normalise

_MAX_CHARACTERS = 32_768
"""Maximum length of a text in characters. Longer texts count as wrong."""

# "The correct answer is (B)", "**Answer:** B. Paris": up to the end of the sentence, but not to a
# decimal point. "B is the answer because Rome is older" states nothing after "is".
_STATED = re.compile(
    r"\b(?:answer|(?:correct|right|best)\s+(?:option|choice))\b(?:(?!\b(?:because|since)\b)[^.:\n]){0,60}?"
    r"(?:\bis\b\s{0,3}:?|:)[\s*]{0,9}"
    r"((?:\W{0,9}[a-z][.):](?=\s|$))?(?:[^\n.!?]|\.(?=\d))*)",
    re.IGNORECASE,
)
# "The answer is A? No, C." and "The least likely answer is A."
_CORRECTION = re.compile(
    r"\?\W{0,3}(?:no|wait|actually|rather)\b\W{0,3}(?:it(?:\s+is|['’]s))?", re.I
)
_OPPOSITE = re.compile(
    r"\b(?:least|worst|wrong|incorrect|false|unlikely|impossible)\s(?:\w{1,20}\s){0,2}?"
    r"(?:answer|option|choice|one)\b",
    re.IGNORECASE,
)
_REASON = re.compile(r"\b(?:because|since|whereas|while)\b.*", re.IGNORECASE | re.DOTALL)
_LONE = re.compile(r"\W*(?:(?:option|choice)\W+)?([a-z])\W*", re.IGNORECASE)
# A capital that is not part of a word or of "I'm", nor the first word of "A dog" or "I think".
_LETTER = re.compile(r"(?<![\w'’])([A-Z])(?![\w'’])(?!(?<=[AI])\s+(?!or\b|and\b|is\b)[a-z])")
_OUT = (
    r"(?:rul(?:e|es|ed|ing)\s+out|(?:eliminat|exclud)(?:es?|ed|ing)|(?:reject|discard)(?:s|ed|ing)?"
    r"|rather\s+than|instead\s+of|other\s+than)"
)
_BRACED = re.compile(r"\{?([^{}]*)\}")
_NOT = re.compile(
    rf"\b(?:not|never|neither|nor|cannot|except|{_OUT})\b|n['’]t\b"
    r"|\b(?:all|any\w*|every\w*|no\w*)\s+but\b|[≠≤≥]|\\(?:neq?|leq?|geq?|lt|gt)(?![A-Za-z])",
    re.IGNORECASE,
)


def _exclusions(choice: str) -> re.Pattern[str]:
    option = rf"(?:(?:the|option|choice|answer)\s+){{0,2}}[\W]{{0,3}}{choice}[)*\]]{{0,3}}"
    return re.compile(
        rf"\b{_OUT}\s+{option}(?:(?:\s?,\s?(?:and\s|or\s)?|\s(?:and|or)\s){option})*"
        rf"(?=\W*(?:$|\b(?:so|thus|hence|therefore|leaving|leaves|which)\b))"
        rf"|\b(?:not|{_OUT})\s+{option}(?:\s?\([^()]{{0,80}}\))?(?!\w|\W{{0,3}}\s?(?:or|nor|and|(?-i:[A-Z]))\b)"
        rf"|(?:{option}\s?(?:,|or\b|and\b)\s?){{0,2}}{option}\s(?:is|are)\s+"
        r"(?:wrong|incorrect|false|out|excluded|eliminated|impossible|ruled\s+out)\b",
        re.IGNORECASE,
    )


def choice(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    r"""Build a verifier that checks whether a completion selects the choice `spec["answer"]`, which
    is a letter or a text.

    `choices` is a list of texts, which get the letters A, B and so on, or an object that maps
    letters to texts. Without `choices`, only letters are recognized.

    The verifier reads the marked text (`\boxed{}`, `<answer>`). If there is none, it reads the text
    after "answer is" or "answer:", then the last line, then the whole text. A completion that names
    two choices is wrong. Raises ValueError if the choices are malformed or the answer is not among
    them.
    """
    texts = _texts(spec.get("choices"))
    letters = set(texts) if texts else set(string.ascii_uppercase)
    # A text that could be a letter is read as one.
    by_text = {_plain(text): letter for letter, text in texts.items()}
    by_text = {text: by_text[text] for text in by_text if text and text.upper() not in letters}
    answer = str(spec["answer"])
    lone = _LONE.fullmatch(answer)
    right = lone[1].upper() if lone else ""
    right = right if right in letters else by_text.get(_plain(answer), "")
    if not right:
        known = ", ".join(sorted(letters)) if by_text else "A to Z"
        raise ValueError(f"answer {answer!r} is not among the choices {known}")
    # Longest first: "New York" does not name "York".
    longest_first = sorted(by_text, key=len, reverse=True)
    pattern = "|".join(map(_standing_alone, longest_first)) or "(?!)"
    any_text = re.compile(pattern, re.IGNORECASE)
    exclusions = _exclusions(rf"(?:{pattern}|(?<![\w'’])(?-i:[A-Z])(?![\w'’]))")

    def choices_in(fragment: str) -> set[str]:
        fragment = _one_line(WRAPPED.sub(r"\1", fragment))
        bare = _BRACED.fullmatch(fragment)  # {5}, and the end of {"answer": 5}
        fragment = bare[1] if bare is not None else fragment
        if not fragment.rstrip().endswith("!") and (letter := by_text.get(_plain(fragment))):
            return {letter}
        fragment = exclusions.sub("…", fragment)
        lone = _LONE.fullmatch(fragment)
        if lone is not None:
            return {lone[1].upper()} & letters
        named = {by_text.get(_plain(match[0]), "") for match in any_text.finditer(fragment)} - {""}
        rest = any_text.sub("…", fragment)
        if _NOT.search(rest):
            return set()
        return named | ({match[1] for match in _LETTER.finditer(rest)} & letters)

    def conclusion(fragment: str) -> set[str]:
        return choices_in(_REASON.sub("", fragment)) or choices_in(fragment)

    def same(text: str) -> bool:
        if len(text) > _MAX_CHARACTERS:
            return False
        marked = marked_answers(text)
        if not marked:
            text = text[max((m.end() for m in _CORRECTION.finditer(text)), default=0) :]
            sentences = re.split(r"(?<=[.!?\n])", text)
            text = "".join(
                part for part in sentences if not _OPPOSITE.search(part) and part[-1:] != "?"
            )
        stated = marked or [match[1] for match in _STATED.finditer(text)]
        if stated:
            return set[str]().union(*map(conclusion, stated)) == {right}
        lines = text.strip().rstrip("!").splitlines()
        return bool(lines) and (choices_in(lines[-1]) or choices_in(text)) == {right}

    return same


def _texts(choices: Any) -> dict[str, str]:
    """Return the choices as a mapping from letters to texts. Raises ValueError if they are
    malformed."""
    if choices is None:
        return {}
    if isinstance(choices, list):
        items = cast(list[Any], choices)
        letters = string.ascii_uppercase + "?" * len(items)  # an entry too many has no letter
        choices = dict(zip(letters, items, strict=False))
    if not isinstance(choices, dict) or len(cast(dict[str, Any], choices)) < 2:
        raise ValueError(
            "choices must be a list of at least two texts, or an object from letters to texts"
        )
    texts: dict[str, str] = {}
    for letter, value in cast(dict[str, Any], choices).items():
        if len(letter) != 1 or letter not in string.ascii_uppercase:
            raise ValueError(f"choices has the key {letter!r}; use at most 26 letters A to Z")
        text = str(value) if type(value) in (int, float) else value
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"choices: {letter} must be non-empty text, is {text!r}")
        if _plain(text) in map(_plain, texts.values()):
            raise ValueError(f"choices: {letter} has the same text as another, {text!r}")
        texts[letter] = text
    return texts


def _standing_alone(text: str) -> str:
    """Build a pattern that matches a text only if it is not part of a longer word or number. For
    example, the choice 5 is not found in 2.5, -5, 5 %, 5!, <5 or a fraction."""
    if not text[0].isdigit() and not text[-1].isdigit():
        return rf"(?<!\w){re.escape(text)}(?!\w)"
    before = r"(?<![\w+±√^<>{×·-])(?<!\d[.,/:*])(?<![<>*×·+]\s)(?<!\\cdot)(?<!\\cdot\s)(?<!\\times)"
    before += r"(?<!\\times\s)(?<!(?:more|less)\sthan\s)(?<!(?:fewer|other)\sthan\s)"
    after = r"(?!\w|[.,/:]\d|\s?\\?[%^!]|\}|\s?(?:\\cdot|\\times|\\div|[*×·÷+])\s?\d)"
    before = before if text[0].isdigit() else r"(?<!\w)"
    after = after if text[-1].isdigit() else r"(?!\w)"
    return before + re.escape(text) + after


def _plain(text: str) -> str:
    if "\\" in text or "^" in text or "," in text:
        text = squeezed(plain(text))
    return _one_line(text).strip("$").rstrip(".!").strip().casefold()


def _one_line(text: str) -> str:
    return normalise(text).replace("−", "-")
