"""Extracts the visible text from untrusted HTML.

Python's own parser takes quadratic time for deliberately broken input (minutes for 100 kB of `<a
`). This one avoids that by never repeating a search that found nothing.
"""

from __future__ import annotations

import html
import re

_NAME = re.compile(r"/?[a-zA-Z][a-zA-Z0-9:-]{0,40}")
_RAW = ("script", "style", "template", "noscript", "svg", "textarea", "iframe", "object")
"""Elements whose content is not displayed as text."""
_NAMES = """
address article aside blockquote br caption dd div dl dt figcaption footer form h1 h2 h3 h4 h5 h6
header hr li main nav ol p pre section table td th title tr ul
"""
_BLOCKS = frozenset(_NAMES.split())
_ALONE = """
area base br col embed hr img input link meta source track wbr
"""
_VOID = frozenset(_ALONE.split())
_HIDDEN = re.compile(
    r"\shidden(?=[\s=/>]|$)|aria-hidden\s*=\s*[\"']?true|"
    r"(?:display|visibility|font-size|opacity)\s*:\s*(?:none|hidden|0(?![.\d]*[1-9]))",
    re.IGNORECASE,
)
MOST_TAG = 4096
"""Maximum length of a tag. Anything longer counts as text."""


def text_of_html(source: str) -> tuple[str, str]:
    """Return the title and the text, without comments, scripts and hidden elements.

    It never fails.
    """
    seen, title, at = list[str](), list[str](), 0
    lower = source.lower() if len(source.lower()) == len(source) else source
    missing: set[str] = set()
    hidden: list[str] = []  # open elements, starting with the outermost hidden one
    in_title = False

    def after(mark: str, start: int) -> int:
        position = -1 if mark in missing else lower.find(mark, start)
        if position < 0:
            missing.add(mark)
            return len(source)
        return position + len(mark)

    while at < len(source):
        start = source.find("<", at)
        if start < 0:
            start = len(source)
        if start > at and not hidden:
            (title if in_title else seen).append(html.unescape(source[at:start]))
        if start == len(source):
            break
        if source.startswith("<!--", start):
            at = after("-->", start + 4)
            continue
        if source.startswith(("<!", "<?"), start):
            at = after(">", start)
            continue
        name = _NAME.match(source, start + 1)
        end = _end_of_tag(source, start) if name else -1
        if name is None or end < 0:
            if not hidden:
                seen.append("<")
            at = start + 1
            continue
        tag, at = name[0].lower(), end
        if tag in _RAW:
            close = after(f"</{tag}", at)
            at = after(">", close) if close < len(source) else close
        elif tag == "title" and not seen_text(title):
            in_title = True
        elif tag == "/title":
            in_title = False
        elif hidden:
            _track(hidden, tag, source[end - 2] == "/")
        elif tag[0] != "/" and tag not in _VOID and _HIDDEN.search(source, start, end):
            hidden.append(tag)
        elif tag.lstrip("/") in _BLOCKS:
            seen.append("\n")
    return " ".join("".join(title).split()), "".join(seen)


def seen_text(parts: list[str]) -> bool:
    return any(part.strip() for part in parts)


def _end_of_tag(source: str, start: int) -> int:
    """Return the position after the tag's closing `>`, or -1. A quoted `>` does not count."""
    quote = ""
    for at in range(start + 1, min(len(source), start + MOST_TAG)):
        sign = source[at]
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'" and source[at - 1] in "= \t\n":
            quote = sign
        elif sign == ">":
            return at + 1
        elif sign == "<":
            return -1
    return -1


def _track(hidden: list[str], tag: str, closes_itself: bool) -> None:
    """Update the open elements inside a hidden one. End tags without a start tag are ignored."""
    if tag[0] != "/":
        if tag not in _VOID and not closes_itself and len(hidden) < 512:
            hidden.append(tag)
    elif tag[1:] in hidden[-64:]:
        while hidden.pop() != tag[1:]:
            pass
