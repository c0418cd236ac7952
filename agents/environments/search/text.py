"""Text of any language as an index has it: what can be seen of it, its terms, its pieces.

Everything here takes untrusted text and runs in time linear in its length.
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
"""Scripts without spaces between words, and Hangul, whose words have endings."""
_MARKS = "\u0483-\u0487\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
_TERMS = re.compile(rf"[{_UNSPACED}]+|(?:(?![{_UNSPACED}])[^\W_]|[{_MARKS}])+")
_RUN = re.compile(rf"[{_UNSPACED}]+")
_ACCENTS = re.compile("[\u0300-\u036f]")
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn"}
_KEPT = {"\n", "\t", "\u200c", "\u200d"}
"""Joiners make a difference in Persian and in Indic scripts."""


def cleaned(text: str) -> str:
    """Without what cannot be seen, which may be written for a model alone; lines without white
    space at their ends, and at most one blank one between two."""
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
    """Equal up to case, width and accents."""
    return unicodedata.normalize(
        "NFC", _ACCENTS.sub("", unicodedata.normalize("NFKD", text.casefold()))
    )


def runs(text: str) -> list[str]:
    """The words of `text`, folded; of scripts without spaces, what stands between two signs."""
    return _TERMS.findall(folded(text))


def terms(text: str) -> list[str]:
    """What is looked up: words, and of scripts without spaces each two signs that stand together
    (one, where it stands alone)."""
    found: list[str] = []
    for run in runs(text):
        if len(run) > 1 and _RUN.fullmatch(run):
            found += [run[i : i + 2] for i in range(len(run) - 1)]
        else:
            found.append(run)
    return found


def signs(text: str) -> list[str]:
    """Of scripts without spaces, each sign."""
    return [sign for run in runs(text) if _RUN.fullmatch(run) for sign in run]


def squeeze(text: str) -> str:
    """Letters and digits alone: quotes are compared by them."""
    return "".join(runs(text))


def spans(text: str, most: int) -> list[tuple[int, int]]:
    """[start, end) of pieces of at most `most` characters, cut at the end of a line, a sentence or
    a word where there is one in the second half."""
    found: list[tuple[int, int]] = []
    start = 0
    while len(text) - start > most:
        low, high = start + most // 2, start + most
        ends = (text.rfind(sign, low, high) + len(sign) for sign in ("\n", "。", ". ", " "))
        end = next((end for end in ends if end > low), high)
        found.append((start, end))
        start = end
    return [*found, (start, len(text))]


def excerpt(text: str, wanted: Iterable[str], most: int) -> str:
    """The piece of `text` that has the most different terms of `wanted`, on one line."""
    wanted = set(wanted)
    starts = range(0, len(text), most // 3) or [0]
    pieces = [(start, min(len(text), start + most)) for start in starts]
    best = max(pieces, key=lambda piece: len(wanted & set(terms(text[slice(*piece)]))))
    start, end = best
    before, after = "… " if start else "", " …" if end < len(text) else ""
    return before + " ".join(text[start:end].split()) + after
