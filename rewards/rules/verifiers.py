"""Builds verifiers from reward specs. A verifier scores how correct a completion is."""

import json
import re
import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from keel.configs.sections.rewards import CodeConfig
from keel.rewards.code.verifier import code_blocks, code_verifier
from keel.rewards.custom import function_verifier
from keel.rewards.rules.maths import maths_verifier
from keel.rewards.rules.reasoning_gym import reasoning_gym
from keel.rewards.rules.statements import normalize_notation, remove_spaces
from keel.rewards.text import (
    WRAPPED,
    answer_in,
    marked_answer,
    marked_answers,
    normalise,
    outside_think,
)
from keel.rl.strict_json import compile_schema

_MAX_CHARACTERS = 32_768

# "The correct answer is (B)", "**Answer:** B. Paris": up to the end of the sentence, but not to a
# decimal point. "B is the answer because Rome is older" states nothing after "is".
_STATED = re.compile(
    r"\b(?:answer|(?:correct|right|best)\s+(?:option|choice))\b(?:(?!\b(?:because|since)\b)[^.:\n]){0,60}?"
    r"(?:\bis\b\s{0,3}:?|:)[\s*]{0,9}"
    r"((?:\W{0,9}[a-z][.):](?=\s|$))?(?:[^\n.!?]|\.(?=\d))*)",
    re.IGNORECASE,
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
# "B: False", where the texts of the choices are unknown
_LETTER_OF_FALSE = re.compile(
    r"\W{0,9}(?:(?:option|choice)\W{1,9})?([a-z])\W{0,9}[.:)]\W{0,9}false\W{0,9}", re.IGNORECASE
)
_BRACED = re.compile(r"\{?([^{}]*)\}")
_NOT = re.compile(
    r"\b(?:not|never|neither|nor|cannot|except|wrong|incorrect|false|impossible|(?:rul(?:e|es|ed|ing)"
    r"\s+out|(?:eliminat|exclud)(?:es?|ed|ing)|(?:reject|discard)(?:s|ed|ing)?)"
    r"|(?:rather|other)\s+than|instead\s+of|(?:all|any\w*|every\w*|no\w*)\s+but)\b|n['’]t\b|[≠≤≥]"
    r"|\\(?:neq?|leq?|geq?|lt|gt)(?![A-Za-z])",
    re.IGNORECASE,
)


def _choice_verifier(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    r"""Build a verifier that checks whether a completion selects the choice `spec["answer"]`, given
    by its letter or its text.

    `choices` is a list of texts with the letters A, B and so on, or an object that maps letters to
    texts. Without `choices`, only letters are recognized. The verifier reads the marked text
    (`\boxed{}`, `<answer>`). Without marks, it reads the text after "answer is" or "answer:",
    then the last line, then the whole text. A completion that names two choices is wrong. Raises
    ValueError if the choices are malformed or the answer is not among them.
    """
    texts = _parse_choices(spec.get("choices"))
    letters = set(texts) if texts else set(string.ascii_uppercase)
    # A text that could be a letter is read as one.
    by_text = {_normalize_choice(text): letter for letter, text in texts.items()}
    by_text = {text: by_text[text] for text in by_text if text and text.upper() not in letters}
    answer = str(spec["answer"])
    lone = _LONE.fullmatch(answer)
    right = lone[1].upper() if lone else ""
    right = right if right in letters else by_text.get(_normalize_choice(answer), "")
    if not right:
        known = ", ".join(sorted(letters)) if texts else "A to Z"
        raise ValueError(f"answer {answer!r} is not among the choices {known}")
    # Longest first: "New York" does not name "York".
    longest_first = sorted(by_text, key=len, reverse=True)
    any_text = re.compile(
        "|".join(map(_whole_word_pattern, longest_first)) or "(?!)", re.IGNORECASE
    )

    def choices_in(fragment: str) -> set[str]:
        fragment = _one_line(WRAPPED.sub(r"\1", fragment))
        bare = _BRACED.fullmatch(fragment)  # {5}, and the end of {"answer": 5}
        fragment = bare[1] if bare is not None else fragment
        letter = by_text.get(_normalize_choice(fragment))
        if letter and not fragment.rstrip().endswith("!"):
            return {letter}
        lone = _LONE.fullmatch(fragment)
        if lone := lone or (None if texts else _LETTER_OF_FALSE.fullmatch(fragment)):
            return {lone[1].upper()} & letters
        rest = any_text.sub("…", fragment)
        if _NOT.search(rest):
            return set()
        named = {by_text.get(_normalize_choice(m[0]), "") for m in any_text.finditer(fragment)}
        return (named | {match[1] for match in _LETTER.finditer(rest)}) & letters

    def conclusion(fragment: str) -> set[str]:
        return choices_in(_REASON.sub("", fragment)) or choices_in(fragment)

    def same(text: str) -> bool:
        if len(text) > _MAX_CHARACTERS:
            return False
        stated = marked_answers(text)
        if not stated:
            sentences = re.split(r"(?<=[.!?\n])", text)
            kept = [part for part in sentences if not _OPPOSITE.search(part) and part[-1:] != "?"]
            text = "".join(kept)
            stated = [match[1] for match in _STATED.finditer(text)]
        if stated:
            return set[str]().union(*map(conclusion, stated)) == {right}
        lines = text.strip().rstrip("!").splitlines()
        return bool(lines) and (choices_in(lines[-1]) or choices_in(text)) == {right}

    return same


def _parse_choices(choices: Any) -> dict[str, str]:
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
        text = str(value) if type(value) in (int, float) else value
        if letter not in [*string.ascii_uppercase] or not isinstance(text, str) or not text.strip():
            raise ValueError(f"choices[{letter}] = {value!r}: use at most 26 texts, named A to Z")
        if _normalize_choice(text) in map(_normalize_choice, texts.values()):
            raise ValueError(f"choices: {letter} has the same text as another, {text!r}")
        texts[letter] = text
    return texts


def _whole_word_pattern(text: str) -> str:
    """Build a pattern that matches a text only when it isn't part of a longer word or number. The
    choice 5 is not found in 2.5, -5, 5 %, 5!, <5 or a fraction."""
    if not text[0].isdigit() and not text[-1].isdigit():
        return rf"(?<!\w){re.escape(text)}(?!\w)"
    before = r"(?<![\w+±√^<>{×·-])(?<!\d[.,/:*])(?<![<>*×·+]\s)(?<!\\cdot)(?<!\\cdot\s)(?<!\\times)"
    before += r"(?<!\\times\s)(?<!(?:more|less)\sthan\s)(?<!(?:fewer|other)\sthan\s)"
    after = r"(?!\w|[.,/:]\d|\s?\\?[%^!]|\}|\s?(?:\\cdot|\\times|\\div|[*×·÷+])\s?\d)"
    before = before if text[0].isdigit() else r"(?<!\w)"
    after = after if text[-1].isdigit() else r"(?!\w)"
    return before + re.escape(text) + after


def _normalize_choice(text: str) -> str:
    if "\\" in text or "^" in text or "," in text:
        text = remove_spaces(normalize_notation(text))
    return _one_line(text).strip("$").rstrip(".!").strip().casefold()


def _one_line(text: str) -> str:
    return normalise(text).replace("−", "-")


Verifier = Callable[[str], float | Mapping[str, float]]
"""Returns a score from 0 to 1 for the final text of a completion, without thinking, or several
parts including `correct`.

On hostile text it may raise, hang or crash, so `keel.rewards.pool` runs it in a separate
process.
"""

_MATCH_TIMEOUT_S = 0.5


def verifier_for(spec: Mapping[str, Any], code: CodeConfig | None = None) -> Verifier:
    """Build the verifier for a reward spec, or for a reward part that scores a whole
    trajectory. Raises ValueError if the spec is malformed."""
    kind = spec.get("kind")
    if kind == "function":
        return function_verifier(spec)
    if kind == "language":
        # Imported late: it takes a third of a worker's start-up time.
        from keel.rewards.language import language_verifier  # noqa: PLC0415

        return language_verifier(spec)
    if kind == "answer":
        verify = _answer_verifier(spec)
    elif kind == "code":
        run = code_verifier(spec, code or CodeConfig())
        return lambda text: {"correct": (verdict := run(text)).score, **verdict.parts}
    elif kind == "reasoning_gym":
        verify = reasoning_gym(spec)
    else:
        raise ValueError(f"reward spec has kind {kind!r}; use one of {', '.join(RULE_KINDS)}")
    return lambda text: verify(outside_think(text))


RULE_KINDS = ("reasoning_gym", "answer", "code")
"""Kinds of reward specs that have a verifier. `function` and `language` are not listed, because
data must not be able to name code. They score the output of `TextTrajectory.dumps`."""


def _answer_verifier(spec: Mapping[str, Any]) -> Verifier:
    match, right = spec.get("match", "math"), spec.get("answer")
    if not isinstance(match, str) or match not in _MATCHES:
        raise ValueError(f"reward spec has match {match!r}; use one of {', '.join(_MATCHES)}")
    if match != "schema" and not isinstance(right, str):
        raise ValueError("reward spec of kind 'answer' needs an `answer`, a text")
    same = _MATCHES[match](spec)
    return lambda text: float(same(text))


def _exact_verifier(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    expected = normalise(spec["answer"])
    longest = max(_MAX_CHARACTERS, 4 * len(spec["answer"]))

    def same(text: str) -> bool:
        if len(text) > longest:
            return False
        answer = answer_in(text)
        wrapped = WRAPPED.fullmatch(answer)
        return expected in (normalise(answer), normalise(wrapped[1]) if wrapped else None)

    return same


def _regex_verifier(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    """Build a verifier that matches a regular expression against the whole answer. Timeouts count
    as wrong."""
    # Imported late to keep workers light.
    import regex as timed_regex  # noqa: PLC0415

    try:
        re.compile(str(spec["answer"]))  # `regex` accepts more patterns
        compiled = timed_regex.compile(str(spec["answer"]))
    except (re.error, timed_regex.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"answer {spec['answer']!r} is not a regular expression: {error}"
        ) from error

    def same(text: str) -> bool:
        if len(text) > _MAX_CHARACTERS:
            return False
        try:
            return compiled.fullmatch(answer_in(text), timeout=_MATCH_TIMEOUT_S) is not None
        except TimeoutError:
            return False

    return same


def _schema_verifier(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    r"""Build a verifier that checks an answer against the JSON schema in `spec["answer"]`.

    If the whole answer is JSON, all of it is checked. Otherwise, the marked text (`\boxed{}`,
    `<answer>`) or the last fenced code block that is JSON is checked. Formats are checked too,
    except for IRIs. Nothing is downloaded. Raises ValueError if the schema is invalid.
    """
    expected = spec.get("answer")
    if not isinstance(expected, dict):
        raise ValueError("answer must be a JSON schema, an object")
    try:
        validator = compile_schema(cast(dict[str, Any], expected), formats=True)
    except ValueError as error:
        raise ValueError(f"answer {error}") from error

    def same(text: str) -> bool:
        if len(text) > _MAX_CHARACTERS:
            return False
        for part in _json_candidates(text.strip().lstrip("\ufeff").strip()):
            try:
                value = json.loads(
                    part,
                    parse_constant=_reject_duplicate_keys,
                    object_pairs_hook=_reject_duplicate_keys,
                )
            except (ValueError, RecursionError):
                continue
            return bool(validator.is_valid(value))
        return False

    return same


def _json_candidates(text: str) -> Iterator[str]:
    yield text
    blocks = code_blocks(text)
    outside = text
    for block in blocks:
        outside = outside.replace(block.strip(), "")
    if marked_answer(outside) is None:  # a mark inside a block's strings does not count
        yield from reversed(blocks)
        return
    if text.startswith("<answer>") and text.endswith("</answer>"):
        yield text.removeprefix("<answer>").removesuffix("</answer>")
    marked = marked_answer(text) or ""
    yield marked
    yield from reversed(code_blocks(marked))


def _reject_duplicate_keys(pairs: list[tuple[str, Any]] | str) -> dict[str, Any]:
    if isinstance(pairs, str) or len(dict(pairs)) < len(pairs):
        raise ValueError("a key appears twice or there is a NaN, which parsers read differently")
    return dict(pairs)


_MATCHES: dict[str, Callable[[Mapping[str, Any]], Callable[[str], bool]]] = {
    "math": lambda spec: maths_verifier(spec["answer"], tolerance=spec.get("tolerance")),
    "exact": _exact_verifier,
    "choice": _choice_verifier,
    "schema": _schema_verifier,
    "regex": _regex_verifier,
}
