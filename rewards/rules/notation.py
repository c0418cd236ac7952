r"""Ways of writing mathematics that the readers of `keel.rewards.rules.maths` would take for
something else.

math-verify has no option for these: to it `2e3` is 2·e·3, `2 1/2` a product, `1 000` zero and
`10²` the number 102.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from math import prod

from keel.rewards.text import WRAPPED, normalise

_SIGNS = str.maketrans({"−": "-", "⁄": "/", "∞": r"\infty ", "°": r"^\circ ", "∅": r"\emptyset "})
_EMPTY = re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}")
_MANY = re.compile(
    r"(?<![\w.,^/{])(\d{1,15}(?:\.\d{1,15})?)\s*(?:\\[,; ]\s*)?"
    r"(?:(\\(?:text|mathrm)\s*\{)\s*)?(hundred|thousand|million|billion|trillion)\b\s*",
    re.IGNORECASE,
)
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LENGTH = r"[cmk]?m|met(?:er|re)s?|feet|ft|inch(?:es)?|in|miles?|yards?"
_UNIT = (
    rf"(?:(?:square|cubic|sq\.?)\s+)?(?:{_LENGTH}|dollars?|cents?|euros?|degrees?|hours?|hrs?|minutes?|mins?"
    r"|seconds?|secs?|days?|weeks?|months?|years?|mph|k?g|kgs?|lbs?|pounds?|grams?|units?)"
    r"(?:\s?\^\s?\{?[23]\}?)?"
)
_BARE_UNIT = re.compile(
    rf"(?<=\d)\s{_UNIT}(?:\s?(?:/|\bper\b)\s?(?:{_UNIT}|[smh]|hr|sec|min)(?:\^\{{?[23]\}}?)?)?$",
    re.IGNORECASE,
)
_DEGREES = re.compile(r"(\^\s*\{?\s*\\circ\s*\}?)\s*(?:[CF]|\\(?:text|mathrm)\s*\{\s*[CF]\s*\})$")
_MONEY = re.compile(r"(?:\\\$|[€£¥])\s?(?=\d)|(?<=\d)\s?[€£¥]")
_ABOUT = re.compile(r"^(?:([A-Za-z])\s*)?(?:≈|\\approx(?![A-Za-z])|~(?=\s*\d))\s*")
_WEIGHT = re.compile(r"\\(?:boldsymbol|bm|pmb|underline)\s*(?=\{)|\\displaystyle(?![A-Za-z])")
_BOLD = re.compile(r"(?<![\w)}\]*])\*\*(?![\s*])([^*\n]+?)(?<!\s)\*\*(?![\w({\[*])")
_QUOTED = re.compile(r"(?<=\n)[ \t]*>[ \t]+")
_LEAD = re.compile(
    r"\A.*\banswer(?:\s+is\b\s*:?|\s*:(?:\s*\*\*)?|\s*\*\*\s*:)\s*(?=\S[^\n]*$)", re.S | re.I
)
_TEXT_LEAD = re.compile(
    r"^\\text\w*\s*\{\s*(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is)?\s*:?\s*\}",
    re.IGNORECASE,
)
_IN_BRACKETS = re.compile(r"\(([^(),;]+)\)([.!]?)")
_DOUBLE = re.compile(r"(?<![\w.)}\]!])(\d{1,3})!!(?!!)")
_LEADING_DASH = re.compile(r"(^|[(\[{,=]\s*)–(?=[\d.\\])")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[^\W\d_]))")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_THOUSANDS = re.compile(
    r"(?<![\w.,])\d{1,3}(?:(?:\\[,! ]|[ ~_\u00a0\u2009\u202f])\d{3})+(?![\w]|[.,]?\d)"
)
_SPACED_PERCENT = re.compile(r"\\[,;:! ]\s*(?=\\?%)")
_ALL_TEXT = re.compile(r"\\(?:text|mathrm)\s*\{\s*(-?\d[^{}\\]*)\}")
"""12 hours, all of it set as text."""
_MIXED = re.compile(r"(?<![\w.,/^{}])(\d{1,15})[ ~]\s*(\d{1,15})/(\d{1,15})(?![\w/.]*\d)")
_SCIENTIFIC = re.compile(r"(?<![\w.,])(\d{1,40}(?:\.\d{1,40})?|\.\d{1,40})[eE]([+-]?\d{1,3})(?!\w)")
_TIMES_TEN = re.compile(
    r"(?<![\w.,^/{])(\d{1,40}(?:\.\d{1,40})?)\s*(?:\\times|\\cdot|×|·|\*)\s*"
    r"10\s*\^\s*(?:([+-]?\d{1,3})|\{\s*([+-]?\d{1,3})\s*\})(?![\w^!.])"
)
_REPEATING = re.compile(
    r"(?<![\w.,])(\d{1,15})\.(\d{0,15})(?:\\overline\s*\{\s*(\d{1,15})\s*\}|\((\d{1,15})\)$)"
)
_POWER = re.compile(r"(?<=[\w)\]}])\*\*(?=[\w({+-])")
_PI = re.compile(r"(?<![A-Za-z\\])(?:pi(?![A-Za-z])|π)")
_PROSE_PI = re.compile(r"(?<![\w.,$\\])(\d+(?:\.\d+)?)?\s{0,3}(?:π|\\pi(?![a-z]))(?![$\w^/\\(])")
_LAST_MARK = re.compile(r"(?<=[\w})\]%$])(?:[.,;]|\s*\\\\)$")
_DENIED = re.compile(
    r"(?:\\neq?(?![A-Za-z])|≠|\b(?:can)?not\b|n['’]t\b|\bnever\b)(?:\s+(?:be|equal\s+to|the|an?)\b){0,2}"
    r"[\s$*]{0,9}([^\s,;]{1,80})$",
    re.IGNORECASE,
)
# "does not matter" denies no value, and "is not right" does.
_REMARK = re.compile(
    r"(?!(?:it|so|that|true|right|correct|valid|possible|allowed|answer|solution)\b)[^\W\d_]{2,}[^\w\\]*",
    re.IGNORECASE,
)


def undressed(text: str, *, marked: bool) -> str:
    """An answer without Markdown, and without the "The answer is" before it."""
    text = _BOLD.sub(r"\1", text.replace("`", "")).strip()
    if not marked:
        text = _QUOTED.sub("", text)
    return _LEAD.sub("", _TEXT_LEAD.sub("", text)).strip()


def plain_notation(text: str, *, alone: bool) -> str:
    """`text` in a notation that leaves no doubt. alone: a formula by itself, not in a sentence."""
    text = _SPACED_PERCENT.sub("", text.translate(_SIGNS))
    text = _MONEY.sub("", _LEADING_DASH.sub(r"\1-", text))
    text = _VULGAR.sub(lambda found: f" {_ascii(found[0])}", text).strip()
    text = _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    text = _MIXED.sub(_improper, text)
    text = _TIMES_TEN.sub(_decimal, _SCIENTIFIC.sub(_decimal, text))
    text = _MANY.sub(_counted, _EMPTY.sub(r"\\emptyset ", text))
    if alone and (whole := _ALL_TEXT.fullmatch(text)) is not None:
        text = whole[1]
    if not alone:
        return text if "$" in text or "\\(" in text else _PROSE_PI.sub(_formula, text)
    text = _ABOUT.sub(lambda found: f"{found[1]} = " if found[1] else "", _WEIGHT.sub("", text))
    text = _DOUBLE.sub(lambda found: str(prod(range(int(found[1]), 0, -2))), text.replace("~", " "))
    bracketed = _IN_BRACKETS.fullmatch(text)
    text = bracketed[1] if bracketed is not None else text
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text)
    text = _PI.sub(r"\\pi ", text) if not text.isalpha() or text in ("pi", "π") else text
    text = _POWER.sub("^", text)
    text = _LAST_MARK.sub("", _REPEATING.sub(_fraction, text)).strip()
    return _DEGREES.sub(r"\1", _BARE_UNIT.sub("", text)).strip()


def denies(text: str, *, words: bool = False) -> bool:
    """Whether the last thing that `text` names is what the answer is not.

    words: that may be a word.
    """
    found = _DENIED.search(text.strip().rstrip(".!$* "))
    return found is not None and (words or _REMARK.fullmatch(found[1]) is None)


def said(text: str) -> str:
    """The words of an answer, without dress: bold type, capitals, a full stop."""
    bare = WRAPPED.sub(r"\1", text).replace("*", "").strip().strip("$")
    return normalise(bare).casefold().rstrip(".!").strip()


def _ascii(sign: str) -> str:
    return unicodedata.normalize("NFKC", sign).replace("⁄", "/")


def _improper(found: re.Match[str]) -> str:
    whole, top, below = int(found[1]), int(found[2]), int(found[3])
    return f"{whole * below + top}/{below}" if 0 < top < below else found[0]


def _decimal(found: re.Match[str]) -> str:
    number, exponent = found[1], int(next(filter(None, found.groups()[1:])))
    whole, _, decimals = number.partition(".")
    point = len(whole) + exponent
    digits = whole + decimals
    if point <= 0:
        digits, point = "0" * (1 - point) + digits, 1
    digits = digits.ljust(point, "0")
    left, right = digits[:point].lstrip("0") or "0", digits[point:]
    return f"{left}.{right}" if right.strip("0") else left


def _counted(found: re.Match[str]) -> str:
    """5 million as 5000000. What follows stays in the braces that the word stood in."""
    value = Fraction(found[1]) * 10 ** _ZEROS[found[3].lower()]
    number = str(value) if value.denominator == 1 else str(float(value))
    return f"{number}{found[2] or ' '}"


def _fraction(found: re.Match[str]) -> str:
    once, again = found[2], found[3] or found[4]
    ninths = Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once))
    value = Fraction(f"{found[1]}.{once or 0}") + ninths
    return f"{value.numerator}/{value.denominator}"


def _formula(found: re.Match[str]) -> str:
    return rf" ${found[1] or ''}\pi$"
