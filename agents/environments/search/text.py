"""Prepares text in any language for an index, by cleaning it and splitting it into terms and
pieces.

The text is untrusted. All functions take time linear in its length.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Tibetan, Burmese, Khmer
    "\u3005\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uac00-\ud7af\U00020000-\U0003ffff"
)
"""Scripts without spaces between words. Hangul is included because its words have endings."""
_MARKS = "\u0483-\u0487\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
_TERMS = re.compile(rf"[{_UNSPACED}]+|(?:(?![{_UNSPACED}])[^\W_]|[{_MARKS}])+")
_RUN = re.compile(rf"[{_UNSPACED}]+")
_ACCENTS = re.compile("[\u0300-\u036f]")
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn"}
_KEPT = {"\n", "\t", "\u200c", "\u200d"}
"""Joiners that are kept because they matter in Persian and in Indic scripts."""


def cleaned(text: str) -> str:
    """Remove extra white space and invisible characters, which could be meant to trick a model."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    unseen = {c for c in set(text) if c not in _KEPT and unicodedata.category(c) in _UNSEEN}
    text = text.translate(dict.fromkeys(map(ord, unseen)))
    lines: list[str] = []
    for line in text.split("\n"):
        line = " ".join(line.split())
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip()


def folded(text: str) -> str:
    """Normalize case, width and accents."""
    return unicodedata.normalize(
        "NFC", _ACCENTS.sub("", unicodedata.normalize("NFKD", text.casefold()))
    )


def runs(text: str) -> list[str]:
    """Return the folded words in `text`.

    In scripts without spaces, a run of characters is one word.
    """
    return _TERMS.findall(folded(text))


def terms(text: str) -> list[str]:
    """Return the search terms in a text.

    They are words or, in scripts without spaces, pairs of adjacent characters. An isolated
    character is a term of its own.
    """
    result: list[str] = []
    for run in runs(text):
        if len(run) > 1 and _RUN.fullmatch(run):
            result += [run[i : i + 2] for i in range(len(run) - 1)]
        else:
            result.append(run)
    return result


def signs(text: str) -> list[str]:
    """Return each character that belongs to a script without spaces."""
    return [sign for run in runs(text) if _RUN.fullmatch(run) for sign in run]


def squeeze(text: str) -> str:
    """Return only the letters and digits of a text, for comparing quotes."""
    return "".join(runs(text))


def spans(text: str, most: int) -> list[tuple[int, int]]:
    """Split `text` into pieces [start, end) of at most `most` characters.

    A piece ends after a line, a sentence or a word, if one of these ends in its second half.
    """
    boundaries: list[tuple[int, int]] = []
    start = 0
    while len(text) - start > most:
        low, high = start + most // 2, start + most
        ends = (text.rfind(sign, low, high) + len(sign) for sign in ("\n", "。", ". ", " "))
        end = next((end for end in ends if end > low), high)
        boundaries.append((start, end))
        start = end
    return [*boundaries, (start, len(text))]


def excerpt(text: str, wanted: Iterable[str], most: int) -> str:
    """Return the piece of `text` with the most different terms from `wanted`, on one line."""
    wanted = set(wanted)
    starts = range(0, len(text), most // 3) or [0]
    pieces = [(start, min(len(text), start + most)) for start in starts]
    best = max(pieces, key=lambda piece: len(wanted & set(terms(text[slice(*piece)]))))
    start, end = best
    before, after = "… " if start else "", " …" if end < len(text) else ""
    return before + " ".join(text[start:end].split()) + after
