"""Sets aside what says nothing about a text's language: code, formulas, links, tags, identifiers.

Marks alone do not make it so: `$Das ist die Antwort$` is a sentence. Inside code and formulas, and
wherever set-aside words follow one another, what reads like running text is kept as text:

- in another script than the Latin one, from a few words on: no keyword or variable is written so;
- in the Latin script three words or more with nothing but spaces and commas between them, of which
  two, and a share, are words that hold sentences together ("the", "und", "que"), or have letters
  that ASCII lacks and are no list.

A list of nouns (`pip install numpy pandas torch`, `apple, banana, cherry`) is set aside: rather
miss some words than fine honest code.

Everything here takes untrusted text and runs in time linear in its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import regex

from keel.rewards.language.function_words import COMMANDS, FUNCTION_WORDS

_TOKENS = re.compile(r"```|~~~|`|\$\$|\$|\\\[|\\\]|\\\(|\\\)|\n[ \t]*\n")
_FENCES = ("```", "~~~")
_CLOSES = {"```": "```", "~~~": "~~~", "`": "`", "$$": "$$", "$": "$", "\\[": "\\]", "\\(": "\\)"}
_NOT_WORDS = re.compile(
    r"https?://\S{1,300}|\\(?:begin|end)\{[A-Za-z]{1,20}\*?\}|\\[A-Za-z]+|</?[A-Za-z_]{1,20}>|(?<![^\W\d_])[A-Za-z](?![^\W\d_])"
    r"|\b[A-Z]{2,20}\b|\b\w{0,40}[\d_]\w{0,40}\b"
)
_WORD = r"[\p{L}\p{M}]+"
_RUN = regex.compile(rf"{_WORD}(?:['’]{_WORD})*(?:[ \t,]*[ \t]{_WORD}(?:['’]{_WORD})*)*")
_LETTERS = regex.compile(_WORD)
_LATIN = regex.compile(r"\p{Script=Latin}")
_GREEK = regex.compile(r"\p{Script=Greek}{1,2}")

ASIDE_RUN = 3
"""So many set-aside words in a row are text in disguise."""
FEWEST_WORDS, FEWEST_FUNCTION_WORDS = 3, 2
FUNCTION_WORDS_SHARE = 0.15
"""The share of a run that holds a sentence together, at least."""
FEWEST_LETTERS = 6
"""Of another script than the Latin one."""


def words_of(text: str) -> str:
    """`text` without code, formulas, links, tags, identifiers and single Latin letters."""
    return "".join(said_and_in_code(text))


def said_and_in_code(text: str) -> tuple[str, str]:
    """As `words_of`: outside of code blocks, and what reads like running text inside of them.

    What is opened and not closed in its paragraph (a code block: in the text) is no formula.
    """
    kept: list[str] = []
    coded: list[str] = []
    aside: list[str] = []  # one after the other, with no word between them
    blocks: list[str] = []  # the same of code blocks

    def flush() -> None:
        kept.extend(_running(" ".join(aside)))
        coded.extend(_running(" ".join(blocks)))
        aside.clear()
        blocks.clear()

    def keep(part: str) -> None:
        if _LETTERS.search(part):
            flush()
        kept.append(_without(part))

    opened: str | None = None
    start = 0  # of what has not been decided about
    for match in _TOKENS.finditer(text):
        token = match[0]
        if opened is not None and token == _CLOSES[opened]:
            kept.append(" ")
            (blocks if opened in _FENCES else aside).append(text[start : match.start()])
            start, opened = match.end(), None
        elif opened in _FENCES:
            continue
        elif token in _CLOSES and (opened is None or token in _FENCES):
            keep(text[start : match.start()])
            start, opened = match.end(), token
        elif token.startswith("\n"):
            keep(text[start : match.end()])
            start, opened = match.end(), None
    if opened in _FENCES:
        blocks.append(text[start:])
    else:
        keep(text[start:])
    flush()
    return "".join(kept), "".join(coded)


def _without(text: str) -> str:
    """`text` without what is no word, unless that is text in disguise: `DAS IST DIE ANTWORT`."""
    kept: list[str] = []
    row: list[str] = []
    end = 0

    def finish() -> None:
        said = " ".join(row)
        kept.append(f" {said} " if len(row) >= ASIDE_RUN and _reads(said) else " ")
        row.clear()

    for match in _NOT_WORDS.finditer(text):
        between = text[end : match.start()]
        if between.strip():
            if end:
                finish()
            kept.append(between)
        end = match.end()
        word = " ".join(_LETTERS.findall(match[0]))
        known = match[0].startswith("\\") and match[0][1:] in COMMANDS
        if len(word) > 1 and not known and not match[0].startswith("http"):
            row.append(word)
    if end:
        finish()
    return "".join([*kept, text[end:]])


def _running(text: str) -> Iterator[str]:
    """What of code or formulas reads like running text, a sentence each."""
    for run in _RUN.finditer(re.sub(r"\\[A-Za-z]+|\w{0,40}[\d_]\w{0,40}", " | ", text)):
        if _reads(run[0]):
            yield f". {run[0]}. "


def _reads(run: str) -> bool:
    words = [word for word in _LETTERS.findall(run) if len(word) > 1 or not word.isascii()]
    others = [word for word in words if not _LATIN.match(word) and not _GREEK.fullmatch(word)]
    if sum(map(len, others)) >= FEWEST_LETTERS:
        return True
    if len(words) < FEWEST_WORDS:
        return False
    is_list = 3 * run.count(",") >= len(words)
    holding = sum(
        word.casefold() in FUNCTION_WORDS or not (is_list or word.isascii()) for word in words
    )
    return holding >= max(FEWEST_FUNCTION_WORDS, FUNCTION_WORDS_SHARE * len(words))
