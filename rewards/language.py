"""Measures what fraction of a completion is in the language of the prompt.

Code, formulas, links, tags, identifiers and single Latin letters are ignored, except for words in
code and formulas that are in a script other than Latin. The remaining text is
split into sentences. Each sentence contributes its letters in the prompt's script, or none if a
language detector (py3langid) is sure that it is in another language. Short sentences are judged by
their script only. If the prompt or the completion has too few words, the result is 1.

All functions accept untrusted text and run in linear time.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import regex  # knows Unicode's scripts, unlike `re`

from keel.rewards.custom import TextTrajectory

_SCRIPT_NAMES = """
latin greek cyrillic armenian hebrew arabic ethiopic devanagari bengali gurmukhi gujarati oriya
tamil telugu kannada malayalam sinhala thai lao tibetan myanmar khmer georgian han hangul
"""
_SCRIPTS = {name: rf"\p{{Script={name}}}" for name in _SCRIPT_NAMES.split()}
_SCRIPTS["kana"] = r"[\p{Script=Hiragana}\p{Script=Katakana}]"
_SCRIPT_LETTERS = {
    name: regex.compile(rf"(?=[\p{{L}}\p{{M}}]){signs}") for name, signs in _SCRIPTS.items()
}
_WEIGHT = {"han": 3.0, "kana": 2.0, "hangul": 2.0}  # alphabetic letters per character
_USED_WITH = {"kana": {"han"}, "hangul": {"han"}}  # the scripts used together with a script

_SENTENCES = regex.compile(r"[\p{Sentence_Terminal}…\n]+")

_MIN_PROMPT_LETTERS, _MIN_SENTENCE_LETTERS = 8.0, 20.0
_MAX_DETECTED = 400
_MIN_LIKELIHOOD = 0.1  # minimum total probability of the prompt's language and its relatives
_KIN = (
    {"no", "nb", "nn", "da"},
    {"hr", "bs", "sr", "sl"},
    {"id", "ms", "jv"},
    {"cs", "sk"},
    {"hi", "mr", "ne"},
    {"es", "gl", "ca"},
    {"pt", "gl"},
    {"ru", "bg"},
)
"""Groups of related languages that a short sentence cannot tell apart."""
_RARE = frozenset({"an", "br", "eo", "ht", "la", "lb", "oc", "qu", "rw", "se", "vo", "wa"})
"""Languages that are never reported, because short sentences in other languages are mistaken for
them."""


def language_verifier(spec: Mapping[str, Any]) -> Callable[[str], float]:
    """Build a verifier that measures how much of a trajectory's text, across all turns, is in the
    language of `spec["prompt"]`.

    `spec["of"]` is "answer", "thinking", or "both" for the mean of the two.
    """
    prompt, of = str(spec["prompt"]), str(spec["of"])
    _detector()  # loaded before the deadline of the first completion starts

    def verify(text: str) -> float:
        trajectory = TextTrajectory.loads(text)
        texts = {"answer": trajectory.all_said, "thinking": trajectory.all_thinking}
        parts = [part for name, part in texts.items() if of in (name, "both") and part]
        shares = [_language_share(prompt, part) for part in parts]
        return sum(shares) / len(shares) if shares else 1.0

    return verify


def _language_share(prompt: str, text: str) -> float:
    """Return the fraction of letters in `text` that are in the language of `prompt`."""
    allowed, language = _prompt_language(prompt)
    if not allowed:
        return 1.0
    kin = {language}.union(*(group for group in _KIN if language in group))
    fitting = total = 0.0
    for sentence in _SENTENCES.split(_prose(text)):
        counts = _letters_by_script(sentence)
        size = sum(counts.values())
        total += size
        letters = sum(counts.get(name, 0.0) for name in allowed)
        if letters and size >= _MIN_SENTENCE_LETTERS:
            best, likely = detect_language(sentence)
            foreign = sum(likely.get(name, 0.0) for name in kin) < _MIN_LIKELIHOOD
            letters *= best in kin or not foreign
        fitting += letters
    return fitting / total if total else 1.0


@lru_cache(maxsize=16)  # siblings share their prompt
def _prompt_language(prompt: str) -> tuple[frozenset[str], str]:
    """Return the scripts and the language that an answer to the prompt should use, or empty values
    if the prompt is too short to tell."""
    words = _prose(prompt)
    scripts = _letters_by_script(words)
    total = sum(scripts.values())
    if total < _MIN_PROMPT_LETTERS:
        return frozenset(), ""
    main = max(scripts, key=lambda name: scripts[name])
    # Text with some kana is Japanese even if most of it is Han.
    for script, others in _USED_WITH.items():
        both = scripts.get(script, 0.0) + sum(scripts.get(name, 0.0) for name in others)
        if scripts.get(script, 0.0) >= 0.1 * total and both >= 0.5 * total:
            main = script
            break
    return frozenset({main, *_USED_WITH.get(main, ())}), detect_language(words)[0]


def _letters_by_script(text: str) -> dict[str, float]:
    counts: dict[str, float] = {}
    for character, count in Counter(text).items():
        if name := _script(character):
            counts[name] = counts.get(name, 0.0) + count * _WEIGHT.get(name, 1.0)
    return counts


@lru_cache(maxsize=1 << 14)
def _script(character: str) -> str:
    return next((name for name, letter in _SCRIPT_LETTERS.items() if letter.match(character)), "")


def detect_language(text: str) -> tuple[str, Mapping[str, float]]:
    """Return a text's most likely language, along with the probability of every language."""
    probabilities = dict(_detector()(text[:_MAX_DETECTED]))
    return max(probabilities, key=lambda name: probabilities[name]), probabilities


@lru_cache(maxsize=1)
def _detector() -> Callable[[str], list[tuple[str, float]]]:
    # Imported late: it loads numpy and takes half a second, which most runs do not need.
    from py3langid.langid import (  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        MODEL_FILE,
        LanguageIdentifier,
    )

    identifier = cast(Any, LanguageIdentifier).from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages([name for name in identifier.labels if name not in _RARE])
    return cast(Callable[[str], list[tuple[str, float]]], identifier.rank)


_PARAGRAPH = r"(?:[^{0}\n]|\n(?![ \t]*\n))"  # up to the end of a paragraph, without character {0}
_NOT_PROSE = re.compile(
    # Code blocks, code spans and formulas, but not what lies between $5 and $6
    r"(?P<span>```.*?```|~~~.*?~~~|`" + _PARAGRAPH.format("`") + "*`"
    r"|\$\$" + _PARAGRAPH.format("$") + r"*\$\$"
    r"|\$(?!\s)" + _PARAGRAPH.format("$") + r"*(?<!\s)\$(?!\d)"
    r"|\\\[(?:(?!\\\[|\n[ \t]*\n).)*?\\\]|\\\((?:(?!\\\(|\n[ \t]*\n).)*?\\\))"
    # Links, commands, tags, single letters, abbreviations and identifiers
    r"|https?://\S{1,300}|\\(?:begin|end)\{[A-Za-z]{1,20}\*?\}|\\[A-Za-z]+|</?[A-Za-z_]{1,20}>"
    r"|(?<![^\W\d_])[A-Za-z](?![^\W\d_])|\b[A-Z]{2,20}\b|\b\w{0,40}[\d_]\w{0,40}\b",
    re.DOTALL,
)


# Keywords and variables aren't written in these letters. Greek ones are, if there are few.
_OTHER_SCRIPTS = regex.compile(
    r"(?:(?=\p{L})[^\p{Script=Latin}\p{Script=Greek}]\p{M}*)+|\p{Script=Greek}{3,}"
)


def _prose(text: str) -> str:
    """Remove code, formulas, links, tags and identifiers from a text. Words in code and formulas
    are kept if they are in a script other than Latin."""

    def replacement(match: re.Match[str]) -> str:
        words = _OTHER_SCRIPTS.findall(match["span"] or "")
        return f". {' '.join(words)}. " if words else " "

    return _NOT_PROSE.sub(replacement, text)
