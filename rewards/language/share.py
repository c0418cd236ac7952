"""Does the policy speak its prompt's language? The share of its words that do, 0 … 1.

Code, formulas, links and single Latin letters (which are variables, mostly) are set aside, but for
running text in them (`keel.rewards.language.prose`). What is left is cut into sentences. A
sentence counts by its letters in the prompt's script, and not at all if a language detector
(py3langid) is sure that it is in another language than the prompt. It is seldom sure of a sentence
of three words; those are judged by their script alone.

Where the prompt or the completion has too few words to say, the share is 1: nothing was mixed.
Everything here takes untrusted text and runs in time linear in its length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import regex  # its scripts are Unicode's, which `re` does not know

from keel.rewards.custom import TextTrajectory
from keel.rewards.language.prose import said_and_in_code, words_of

_NAMES = """
latin greek cyrillic armenian hebrew arabic ethiopic devanagari bengali gurmukhi gujarati oriya
tamil telugu kannada malayalam sinhala thai lao tibetan myanmar khmer georgian han hangul
"""
_SCRIPTS = {name: rf"\p{{Script={name}}}" for name in _NAMES.split()}
_SCRIPTS["kana"] = r"[\p{Script=Hiragana}\p{Script=Katakana}]"
_LETTERS = {
    name: regex.compile(rf"(?=[\p{{L}}\p{{M}}]){signs}") for name, signs in _SCRIPTS.items()
}
_WEIGHT = {"han": 3.0, "kana": 2.0, "hangul": 2.0}
"""Letters of an alphabet that one sign stands for, roughly: texts are compared by their words."""
_USED_WITH = {"kana": {"han"}, "hangul": {"han"}}
"""Scripts that belong to the writing of another."""

_SENTENCES = regex.compile(r"[\p{Sentence_Terminal}…\n]+")

PROMPT_LETTERS, SENTENCE_LETTERS = 8.0, 20.0
"""Fewer letters say nothing about the language of a prompt; … of a sentence."""
IN_CODE = 0.25
"""What a letter of a code block's comments and strings weighs: many write these in English,
whatever they speak. A completion that is nothing but a code block is judged by them alone."""
MAX_DETECTED = 400
"""Letters of a sentence that the detector gets to see."""
SURE = 0.1
"""A sentence is foreign if its prompt's language and kin are less likely than this."""
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
"""Languages that a short sentence may well be either of."""
_RARE = frozenset({"an", "br", "eo", "ht", "la", "lb", "oc", "qu", "rw", "se", "vo", "wa"})
"""Languages that the detector is not asked about: they are found in short sentences of others."""


def language(spec: Mapping[str, Any]) -> Callable[[str], float]:
    """Judges `TextTrajectory.dumps()`, all turns of it. Spec: `prompt`, its text, and `of`:
    "answer", "thinking", or "both" for the mean of the two where both are there."""
    asked, of = str(spec["prompt"]), str(spec["of"])
    _detector()  # loaded before the clock of the first completion starts

    def verify(text: str) -> float:
        said = TextTrajectory.loads(text)
        texts = {"answer": said.all_said, "thinking": said.all_thinking}
        wanted = [part for name, part in texts.items() if of in (name, "both") and part]
        shares = [language_share(asked, part) for part in wanted]
        return sum(shares) / len(shares) if shares else 1.0

    return verify


def language_share(prompt: str, text: str) -> float:
    """Share of `text` that is in the language of `prompt`, by letters."""
    allowed, spoken = _asked(prompt)
    if not allowed:
        return 1.0
    own = everything = 0.0
    for part, weight in zip(said_and_in_code(text), (1.0, IN_CODE), strict=True):
        for sentence in _SENTENCES.split(part):
            counts = letters_by_script(sentence)
            size = sum(counts.values())
            everything += weight * size
            fitting = sum(counts.get(name, 0.0) for name in allowed)
            if fitting and not _is_foreign(sentence, size, spoken):
                own += weight * fitting
    return own / everything if everything else 1.0


@lru_cache(maxsize=16)  # siblings share their prompt
def _asked(prompt: str) -> tuple[frozenset[str], str]:
    """The scripts and the language to answer in; no scripts if the prompt is too short to say."""
    words = words_of(prompt)
    scripts = letters_by_script(words)
    if sum(scripts.values()) < PROMPT_LETTERS:
        return frozenset(), ""
    script = _writing(scripts)
    return frozenset({script, *_USED_WITH.get(script, ())}), detected(words)[0]


def letters_by_script(text: str) -> dict[str, float]:
    """Script → its letters in `text`, weighted."""
    counts: dict[str, float] = {}
    for sign, found in Counter(text).items():
        if name := _script(sign):
            counts[name] = counts.get(name, 0.0) + found * _WEIGHT.get(name, 1.0)
    return counts


@lru_cache(maxsize=1 << 14)
def _script(sign: str) -> str:
    """Of a letter or a mark; "" for others, and for those that several scripts share."""
    return next((name for name, letter in _LETTERS.items() if letter.match(sign)), "")


def detected(text: str) -> tuple[str, Mapping[str, float]]:
    """The likeliest language of `text`, and how likely each is."""
    likely = dict(_detector()(text[:MAX_DETECTED]))
    return max(likely, key=lambda name: likely[name]), likely


def _writing(scripts: Mapping[str, float]) -> str:
    """The script of a text; a text with kana is Japanese, however much of it is Han."""
    for script, others in _USED_WITH.items():
        total = sum(scripts.values())
        both = scripts.get(script, 0.0) + sum(scripts.get(name, 0.0) for name in others)
        if scripts.get(script, 0.0) >= 0.1 * total and both >= 0.5 * total:
            return script
    return max(scripts, key=lambda name: scripts[name])


def _is_foreign(sentence: str, size: float, spoken: str) -> bool:
    if size < SENTENCE_LETTERS:
        return False
    best, likely = detected(sentence)
    kin = {spoken}.union(*(group for group in _KIN if spoken in group))
    return best not in kin and sum(likely.get(name, 0.0) for name in kin) < SURE


@lru_cache(maxsize=1)
def _detector() -> Callable[[str], list[tuple[str, float]]]:
    # It brings numpy and half a second along: only the workers of runs that use it pay.
    from py3langid.langid import (  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        MODEL_FILE,
        LanguageIdentifier,
    )

    identifier = cast(Any, LanguageIdentifier).from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages([name for name in identifier.labels if name not in _RARE])
    return cast(Callable[[str], list[tuple[str, float]]], identifier.rank)
