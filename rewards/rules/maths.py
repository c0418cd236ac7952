r"""Whether an answer has the value of a known one: `\frac12`, `1/2` and `0.5` are one value.

Both texts go the same way: `plain` writes them in one notation, `parse` reads the whole of it as a
number, formula, list, tuple, set, region or relation, or else leaves it a text, and `_same` compares
two readings. Plain numbers are exact fractions, `keel.rewards.rules.formula` evaluates formulas, and
a text equals nothing but itself. math-verify's parser works out sums, integrals and determinants of
the known answer, once; never of a completion.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, cast

from keel.rewards.language.function_words import FUNCTION_WORDS, KEYWORDS
from keel.rewards.rules import formula
from keel.rewards.rules.formula import Formula, Point, Unreadable
from keel.rewards.text import BOXED, marked_answer, normalise, raised

MAX_CHARACTERS = 2_048
"""A longer answer is wrong, unless the right one is about that long."""
_MOST_ITEMS = 64
_PLACES = 6
"""Decimals are compared after rounding to so many places; below 1e-5, to so many digits."""


def mathematical(
    right: str, *, tolerance: float | None = None, ready: bool = True
) -> Callable[[str], bool]:
    r"""A test for the value of `right`: numbers, formulas, sets and intervals are compared up to
    their form, words as text.

    An answer marked with `\boxed{}` has to be all of the mark. Of other texts, the last statement
    counts, and it must assert one answer. Where `right` is a number the answer must be a number:
    `70 - 67` is not 3. Decimals are compared to six places (below 1e-5 to six digits), a unit or a
    remark after a number is set aside, and 50 % is both 50 and 1/2 where `right` has the sign.

    tolerance: between numbers, relative to the right one, and absolute where that is 0. ready:
    read `right` now, so that no completion's deadline pays for it.
    Raises ValueError for a tolerance that is not between 0 and 1.
    """
    if tolerance is not None and not _is_share(tolerance):
        raise ValueError(f"tolerance = {tolerance!r} must be a number between 0 and 1")
    right = _undressed(right)
    gold = cache(lambda: _worked_out(plain(right)))
    spelled, words = _spelled(right), _words(right)
    longest = max(MAX_CHARACTERS, 4 * len(right))
    if ready and not words:
        gold()

    @cache
    def grouped() -> Answer | None:
        return _ungrouped(plain(right))

    def judge(answer: str) -> bool:
        if (number := _NUMBER.fullmatch(answer)) and not words:
            if isinstance(expected := gold(), Number):
                return _same_number(expected, _number(number), tolerance)
        answer = _undressed(answer)
        if not answer:
            return False
        if _spelled(answer) == spelled:
            return True
        if words:
            return False
        answer = plain(answer)
        if _same(gold(), parse(answer), tolerance):
            return True
        other = _ungrouped(answer)  # 100,200 may be one number, or two
        return (other is not None and _same(gold(), other)) or (
            grouped() is not None and _same(cast(Answer, grouped()), other or parse(answer))
        )

    def verify(text: str) -> bool:
        marked = marked_answer(text)
        if marked is None and BOXED in text:  # it was never closed
            return False
        if len(text if marked is None else marked) > longest:
            return False
        if marked is not None:
            return not _mark_denied(text, marked) and judge(marked)
        if words:
            return _asserts(text, words)
        return any(judge(statement) for statement in _statements(text, exclaims="!" in right))

    return verify


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1


# --- The dress of an answer: Markdown, delimiters, "The answer is" ---

_BOLD = re.compile(r"(?<![\w)}\]*])(\*{1,3})(?![\s*])([^*\n]+?)(?<!\s)\1(?![\w({\[*])|`+")
_LEAD = re.compile(
    r"\s*(?:\\text\w*\s*\{\s*)?(?:(?:so|thus|hence|therefore|then),?\s+)?(?:the\s+|my\s+)?"
    r"(?:final\s+|correct\s+|right\s+)?answer(?:\s+is\b\s*:?|\s*:)\s*\}?\s*",
    re.IGNORECASE,
)
_STYLED = re.compile(
    r"\\(?:boxed|text|textbf|mathbf|boldsymbol|bm|pmb|underline|mathrm|displaystyle)\s*"
    r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
)
_DELIMITED = re.compile(
    r"\$\$?([^$]*)\$\$?|\\\(((?:(?!\\[()]).)*)\\\)|\\\[((?:(?!\\[\[\]]).)*)\\\]", re.S
)


_WRAPPED = re.compile(r"\\(?:text\w*|math(?:rm|bf|it|sf)|mbox)\s*\{([^{}]*)\}")


def _undressed(text: str) -> str:
    """The answer without what people put around one."""
    text = _BOLD.sub(r"\2", text).strip()
    text = text[match.end() :] if (match := _LEAD.match(text)) else text
    for _ in range(6):
        before, text = text, text.strip()
        if text[-1:] in ".,;" and text[-2:] not in ("\\,", "\\;"):
            text = text[:-1]
        if match := _DELIMITED.fullmatch(text) or _STYLED.fullmatch(text):
            text = match[match.lastindex or 0]
        if text == before:
            break
    return text


def _spelled(text: str) -> str:
    """The answer as it reads when typeset."""
    text = _WRAPPED.sub(r" \1 ", text.replace("\\left", "").replace("\\right", ""))
    text = normalise(re.sub(r"[$\\]\s|[~$]", " ", text)).casefold()
    return text.rstrip("." if any(map(str.isdigit, text)) else ".!").strip()


# --- One notation ---

_SIGNS = str.maketrans(
    {"−": "-", "⁄": "/", "∕": "/", "×": "*", "·": "*", "⋅": "*", "÷": "/", "°": "^\\circ ", "π": "\\pi ",
     "–": "-", "\u200b": "", "≅": "≈", "。": "."}
)  # fmt: skip
_CHARACTERS = {
    "≤": "le leq leqslant leqq", "≥": "ge geq geqslant geqq", "≠": "ne neq", "<": "lt", ">": "gt",
    "≈": "approx simeq", "∪": "cup bigcup", "∩": "cap", "∖": "setminus backslash smallsetminus",
    "∈": "in", "±": "pm", "∓": "mp", "∞": "infty infinity", "∅": "emptyset varnothing",
    "∣": "mid", "⟨": "langle", "⟩": "rangle", "∧": "land wedge", "∨": "lor vee", "|": "lvert rvert vert",
    "→": "to rightarrow implies Rightarrow", "%": "%", "/": "div", "{": "lbrace", "}": "rbrace",
    "; ": "quad qquad",
}  # fmt: skip
_COMMANDS = {name: sign for sign, names in _CHARACTERS.items() for name in names.split()}
_COMMANDS |= {name: "⦃" for name in ("{", "lbrace")} | {name: "⦄" for name in ("}", "rbrace")}
_COMMANDS |= {"dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac", "dbinom": "\\binom"}
_COMMANDS |= {"cdot": "*", "times": "*", "ast": "*", "imath": "i", "degree": "^\\circ "}
_COMMANDS |= {"displaystyle": "", "textstyle": "", "limits": "", "lg": "\\log", "tg": "\\tan"}
_COMMANDS |= dict.fromkeys("left right big Big bigg Bigg bigl bigr Bigl Bigr".split(), "")
_COMMANDS |= {
    "dots": "\\ldots",
    "cdots": "\\ldots",
    "dotsc": "\\ldots",
    "$": "",
    ",": " ",
    ";": " ",
    ":": " ",
    "!": "",
    " ": " ",
    ">": " ",
}
_COMMAND = re.compile(r"\\([A-Za-z]+)[ \t]*|\\([^A-Za-z])")
_UPRIGHT = re.compile(
    r"\\(?:mathrm|text(?:rm|bf|it|normal)?|rm|operatorname\*?|mathit|mathsf|mbox)\s*\{([^{}]*)\}"
)
_FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan|cot)h?|sec|csc|ln|log|lg|exp|max|min|gcd|lcm|det")
_GROUPED = re.compile(
    r"(?<![\w.,])\d{1,3}(?:(?:\{,\}|,?\\!\s*|\\[,;: ]|[ ~\u00a0\u2009\u202f])\s?\d{3}"
    r"|(?:,\\!\s*|\{,\})\d{3})+(?!\w|[.,]?\d)"
)
_ORDINAL = re.compile(
    r"(?<=\d)\s*\^?\s*\{?\s*(?:\\(?:text|mathrm|textit|rm)\s*\{\s*)?(?:st|nd|rd|th)\b\s*\}{0,2}(?!\w)"
)
_MONEY = re.compile(
    r"(?:\\\$|[$€£¥]|\\text\s*\{\s*(?:USD|EUR|GBP|INR|Rs\.?|US\s?\$|\\?\$)\s*\}|\b(?:USD|EUR|Rs\.?)(?=\s?\d))"
    r"\s*(?=[\d.])|(?<=\d)\s*[€£¥]"
)
_PERCENT = re.compile(
    r"\s*(?:\\[,;: ]\s*)?(?:\\?%|\\(?:text|mathrm)\s*\{\s*(?:\\?%|percent|per\s+cent)\s*\}"
    r"|(?<=[\d\s}])per\s?cent\b)",
    re.IGNORECASE,
)
_SIGNED = re.compile(r"\b(?:negative|minus)\s+(?=[\d\\.])", re.IGNORECASE)
_MANY = re.compile(
    r"(?<![\w.,^/{])(\d{1,15}(?:\.\d{1,15})?)\s*(?:\\[,; ]\s*)?(?:\\(?:text|mathrm)\s*\{\s*)?"
    r"(hundred|thousand|million|billion|trillion)\b\s*\}?",
    re.IGNORECASE,
)
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MIXED = re.compile(r"(?<![\w.,/^{}])(\d{1,15})[ ~]\s*(\d{1,15})/(\d{1,15})(?![\w/.]*\d)")
_REPEATING = re.compile(
    r"(?<![\w.,])(\d{0,15})\.(\d{0,15})"
    r"(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d{1,15})\s*\}|(\d))|\((\d{1,15})\)$)"
)
_SHORT_FRACTION = re.compile(r"\\(frac|binom)\s*(\{[^{}]*\}|\w)\s*(\{|\w)")
_RATIO = re.compile(r"(?<=\d)\s+(?:\\text\{\s*to\s*\}|to)\s+(?=\d)")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[^\W\d_]))|(?<![\\a-z])sqrt\s*\(([^()]*)\)")
_CONJUNCTION = re.compile(r"(?<![A-Za-z\\])(and|or)(?![A-Za-z])")
_BARE_NAME = re.compile(r"(?<![A-Za-z\\])(pi|sin|cos|tan|ln|log|exp|infinity|inf)(?![A-Za-z])")
_COLOR = re.compile(r"\\(?:text)?color\s*\{\w*\}")
_LABEL = re.compile(r"^\s*\\text\s*\{[^{}\d]*:\s*\}")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose\s?([^{}]*)\}")
_COMPOUND = re.compile(
    r"(\d\s*(?:\\text\{[^{}]*\}|(?:hours?|hrs?|minutes?|min|days?|weeks?|years?|months?|feet|ft|pounds?|lbs?"
    r"|dollars?|h|m|km|kg)\b))(?:\s|\\ ){0,3}(?=\d)"
)
_DEGREES = re.compile(
    r"(\^\s*(?:\\circ|\{\s*\\circ\s*\}))\s*(?:[CF](?![A-Za-z])|\\(?:text|mathrm)\s*\{\s*[CF]\s*\})"
)
_VECTORS = re.compile(r"\\(?:vec|mathbf|overrightarrow|boldsymbol)(?![A-Za-z])")


def plain(text: str) -> str:
    """Write an answer in one notation: signs for commands, upright letters as the usual ones, and
    numbers in digits."""
    vulgar = _VULGAR.sub(lambda match: f" {unicodedata.normalize('NFKC', match[0])}", text)
    text = unicodedata.normalize("NFKC", raised(vulgar)).translate(_SIGNS).strip()
    if _VECTORS.search(text):  # two products
        text = text.replace("\\times", "\\cross")
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    if "\\" in text or "{" in text or not text.isascii() or re.search(r"[^\W\d_]{2}|[$%*(=]", text):
        text = _PERCENT.sub("%", _MONEY.sub("", _SIGNED.sub("-", _ORDINAL.sub("", text))))
        text = _RATIO.sub(":", _MANY.sub(_counted, text))
        text = _REPEATING.sub(_repeating, text.replace("{:}", ":").replace("~", " "))
        text = _LABEL.sub("", _COLOR.sub("", _CHOOSE.sub(r"\\binom{\1}{\2}", text)))
        text = _COMPOUND.sub(r"\1, ", _UPRIGHT.sub(_upright, text))
        text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text)
        text = _DEGREES.sub(r"\1", _COMMAND.sub(_sign, text)).replace("$", "")
        text = _SHORT_FRACTION.sub(_braced, _SHORT_FRACTION.sub(_braced, text))
        text = _CONJUNCTION.sub(lambda match: "∧" if match[1] == "and" else "∨", text)
        text = _BARE_NAME.sub(lambda match: _COMMANDS.get(match[1], f"\\{match[1]} "), text)
        text = text.replace("**", "^").replace("ℝ", "\\mathbb{R}")
        text = (
            text.replace("...", "\\ldots ").replace("=>", "→").replace(">=", "≥").replace("<=", "≤")
        )
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text).strip(" $;,")


_AFTER_VALUE = re.compile(r"[\d})](?:\s|\\[,;:! ]|~){0,4}\Z")


def _sign(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if name not in _COMMANDS:
        return match[0]
    sign = _COMMANDS[name]
    return f"{sign} " if sign[:1] == "\\" and match[1] else sign


def _upright(match: re.Match[str]) -> str:
    content = match[1].strip()
    word = content.strip(" ,;.").lower()
    if word in ("and", "or"):
        return " ∧ " if word == "and" else " ∨ "
    after_value = _AFTER_VALUE.search(match.string, 0, match.start())
    if _FUNCTION.fullmatch(content) and not (after_value and content in ("min", "sec")):
        return f" \\{content} "
    if content in ("e", "i", "d"):
        return f" {content} "
    if len(content) == 1 and content.isalpha() and not after_value:
        return f" {content} "
    before = match.string[max(0, match.start() - 2) : match.start()]
    if any(character.isdigit() for character in content) and "_" not in content:
        return f" {content} "
    if before == "_{":
        return _BASES.get(word, rf"\text{{{content}}}")
    if joined := _JOINED.fullmatch(content):  # 3 red and, before 4 blue
        return (
            rf"\text{{{joined[1]}}}{' ∧ ' if joined[2] == 'and' else ' ∨ ' if joined[2] else ', '}"
        )
    return rf"\text{{{content}}}"


_JOINED = re.compile(r"(.*[^\s,;])(?:\s*[,;]|[\s,;]+(and|or))")
_BASES = {
    word: str(base)
    for base, word in enumerate(
        "two three four five six seven eight nine ten eleven twelve".split(), 2
    )
}


def _braced(match: re.Match[str]) -> str:
    top = match[2] if match[2][0] == "{" else f"{{{match[2]}}}"
    bottom = match[3] if match[3] == "{" else f"{{{match[3]}}}"
    return f"\\{match[1]}{top}{bottom}"


def _counted(match: re.Match[str]) -> str:
    value = Fraction(match[1]) * 10 ** _ZEROS[match[2].lower()]
    return str(value) if value.denominator == 1 else str(float(value))


def _repeating(match: re.Match[str]) -> str:
    once, again = match[2], match[3] or match[4] or match[5]
    value = Fraction(f"{match[1] or 0}.{once or 0}")
    value += Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


# --- What an answer says ---


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number as it was written."""

    value: Fraction
    form: str = "integer"
    """integer, decimal, fraction, ratio or scientific."""
    percent: bool = False
    lowest: bool = True
    """Whether a fraction is in lowest terms."""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Infinity:
    sign: int


@dataclass(frozen=True, slots=True)
class Several:
    """Values in brackets; opening is "," for a list without any, and "matrix" for rows."""

    opening: str
    closing: str
    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A union of intervals of real numbers: low end, whether closed, high end, whether closed."""

    parts: tuple[tuple[End, bool, End, bool], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """Sides and the signs between them."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """The value of a name, such as 3 of `x = 3`."""

    name: str
    value: Answer
    relation: Relation


@dataclass(frozen=True, slots=True)
class Text:
    """An answer that is not read."""

    text: str


End = Formula | Infinity
Answer = Number | Infinity | Formula | Several | Region | Relation | Named | Text

_INTEGER = r"\d{1,3}(?:,\d{3})+|\d{1,4000}"
_NUMBER = re.compile(
    rf"\s*(?P<sign>[+-]?)\s*(?:(?=\.?\d)(?P<whole>{_INTEGER})?(?P<decimals>\.\d{{0,400}})?(?P<exponent>[eE][+-]?\d{{1,4}})?"
    r"(?:\s?\*\s?10\s?\^\s?(?:(?P<ten>\d)|\{\s*(?P<tens>[+-]?\d{1,4})\s*\}))?"
    r"|(?P<mixed>\d{1,40})?\s?\\frac\s?\{\s*(?P<minus>-?)\s*(?P<top>\d{1,4000})\s*\}\s?\{\s*(?P<bottom>\d{1,4000})\s*\}"
    r"|(?P<left>\d{1,4000})\s?/\s?(?P<right>\d{1,4000})"
    r"|(?P<first>\d{1,40})\s?:\s?(?P<second>\d{1,40}))\s*(?P<percent>%?)(?P<degrees>\s?\^\s?(?:\\circ|\{\s?\\circ\s?\}))?\.?\s*"
)


def _number(match: re.Match[str]) -> Number | Text:
    sign = -1 if (match["sign"] == "-") != (match["minus"] == "-") else 1
    percent = bool(match["percent"])
    top, bottom = match["top"] or match["left"], match["bottom"] or match["right"]
    if top:
        if not int(bottom):
            return Text(match[0])
        part = Fraction(int(top), int(bottom))
        lowest = part.denominator == int(bottom) > 1 and (not match["mixed"] or part < 1)
        return Number(sign * (int(match["mixed"] or 0) + part), "fraction", percent, lowest)
    if match["first"]:
        if not int(match["second"]) or sign < 0:
            return Text(match[0])
        value = Fraction(int(match["first"]), int(match["second"]))
        return Number(value, "ratio", percent, value.denominator == int(match["second"]))
    whole, decimals = (match["whole"] or "").replace(",", ""), match["decimals"] or ""
    if not whole and len(decimals) < 2:
        return Text(match[0])
    exponent = int((match["exponent"] or "e0")[1:])
    form = "decimal" if decimals.strip(".") or exponent < 0 else "integer"
    if ten := match["ten"] or match["tens"]:
        exponent, form = exponent + int(ten), "scientific"
    value = (
        Fraction(f"{whole or 0}{decimals if len(decimals) > 1 else ''}") * Fraction(10) ** exponent
    )
    return Number(sign * value, form, percent)


def _ungrouped(text: str) -> Answer | None:
    """An answer in which commas between digits may separate numbers, read like that."""
    if not re.search(r"\d,\d{3}(?!\d)", text):
        return None
    return parse(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", ", ", text))


def parse(text: str, depth: int = 0) -> Answer:
    """Read all of an answer in plain notation. What is not read is a Text."""
    text = text.strip()
    if (match := _NUMBER.fullmatch(text)) and match[0].strip(" .+-%"):
        return _number(match)
    if not text or depth > 6 or "\\ldots" in text:
        return Text(text)
    if text.lstrip("+-") == "∞":
        return Infinity(-1 if text[0] == "-" else 1)
    for reader in (_matrix, _listed, _union, _member, _either, _related, _bracketed):
        answer = reader(text, depth)
        if answer is not None:
            return answer
    return _measured(text, depth)


_OPENING, _CLOSING = "([{⦃⟨", ")]}⦄⟩"


def _split(text: str, marks: str) -> tuple[list[str], list[str]]:
    """The parts of `text` between marks outside brackets, and these marks."""
    parts, found, depth, start = list[str](), list[str](), 0, 0
    for match in re.finditer(rf"[(\[{{⦃⟨]|[)\]}}⦄⟩]|[{marks}]", text):
        if match[0] in _OPENING:
            depth += 1
        elif match[0] in _CLOSING:
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            found.append(match[0])
            start = match.end()
    return [*parts, text[start:].strip()], found


_BEGIN = re.compile(
    r"\\begin\s*\{([pbBv]?matrix|array|cases|aligned)\}(?:\s*\{[lcr|]*\})?(.*)\\end\s*\{\1\}", re.S
)


def _matrix(text: str, depth: int) -> Answer | None:
    match = _BEGIN.fullmatch(text)
    if match is None:
        return None
    if match[1] in ("cases", "aligned"):
        return parse(match[2].replace("\\\\", ";").replace("&", " "), depth + 1)
    if match[1] == "vmatrix" or "\\begin" in match[2]:
        return Text(text)
    rows = [row.split("&") for row in match[2].strip().removesuffix("\\\\").split("\\\\")]
    lines = [Several("row", "", tuple(parse(cell, depth + 1) for cell in row)) for row in rows]
    return Several("matrix", "", tuple(lines))


def _listed(text: str, depth: int) -> Answer | None:
    parts, marks = _split(text.replace("\\\\", ";"), ",;∧∨")
    if not marks:
        return None
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return parse(parts[0], depth + 1) if parts else Text(text)
    if len(parts) > _MOST_ITEMS:
        return Text(text)
    items = tuple(parse(part, depth + 1) for part in parts)
    regions = [item for item in items if isinstance(item, Region)]
    if regions and set(marks) == {"∨"}:  # x > 2 or x = 0
        regions = [
            region
            for item in items
            if (
                region := _region(
                    Several("⦃", "⦄", (item.value,)) if isinstance(item, Named) else item
                )
            )
        ]
    if regions and len(regions) == len(items):
        if "∨" in marks:
            return Region(tuple(part for region in regions for part in region.parts))
        return _intersection(regions)
    if any(isinstance(item, Text) and not item.text.startswith("\\text") for item in items):
        return Text(text)
    first = items[0]
    if isinstance(first, Named) and not any(isinstance(item, Named) for item in items[1:]):
        items = (first.value, *items[1:])  # x = 1, 2
    names = [item.name for item in items if isinstance(item, Named)]
    if len(set(names)) == 1 and len(names) == len(items):
        items = tuple(item.value for item in items if isinstance(item, Named))
    return Several("∨" if set(marks) == {"∨"} else ",", "", items)


def _union(text: str, depth: int) -> Answer | None:
    parts, marks = _split(text, "∪∖")
    if not marks:
        return None
    regions = [_region(parse(part, depth + 1)) for part in parts]
    if set(marks) == {"∪"} and all(regions):
        return Region(tuple(part for region in regions if region for part in region.parts))
    removed = parse(parts[-1], depth + 1)
    if marks == ["∖"] and regions[0] and isinstance(removed, Several) and removed.opening == "⦃":
        ends = [_as_formula(item) for item in removed.items]
        if all(ends):
            return _intersection([regions[0], *(_other_than(end) for end in ends if end)])
    return Text(text)


def _member(text: str, depth: int) -> Answer | None:
    parts, marks = _split(text, "∈")
    if len(marks) != 1:
        return None
    return parse(parts[1], depth + 1) if _NAME.fullmatch(parts[0]) else Text(text)


def _either(text: str, depth: int) -> Answer | None:
    if not _split(text, "±∓")[1]:
        return None
    signs = (text.translate({177: one, 8723: two}) for one, two in ("+-", "-+"))
    values = tuple(parse(sign, depth + 1) for sign in signs)
    name = next((value.name for value in values if isinstance(value, Named)), "")
    if name:
        values = tuple(value.value for value in values if isinstance(value, Named))
    return Several(",", "", values)


_NAME = re.compile(
    r"(?![ei]$|\\pi\s*$)(?:\\text\{[^{}]*\}|[A-Za-z]|[A-Z]{2,6}|\|[A-Z]{2}\||\\(?:angle|triangle)?\s?[A-Za-z]+"
    r"|\\(?:overline|overrightarrow|vec|hat|bar|mathbf|mathcal|dot)\s*\{\w+\})"
    r"(?:_\w|_\{[^{}]*\})?'{0,3}(?:\([^()=]*\))?"
)


def _related(text: str, depth: int) -> Answer | None:
    sides, signs = _split(text, "=<>≤≥≠≈→")
    if not signs:
        return None
    if signs[0] == "≈" and not sides[0]:
        return parse("≈".join(sides[1:]), depth + 1)
    if not all(sides):
        return Text(text)
    relation = Relation(tuple(sides), tuple(signs))
    if "→" in signs:
        arrow = len(signs) - signs[::-1].index("→")
        return parse(sides[-1], depth + 1) if arrow == len(signs) else Text(text)
    if set(signs) <= {"=", "≈"}:
        value = parse(sides[-1], depth + 1)
        constants = [
            formula.inexact(constant) for side in sides if (constant := _constant(side)) is not None
        ]
        if any(abs(one - constants[-1]) > abs(constants[-1]) / 100 for one in constants):
            return Text(text)
        if len(constants) == len(sides) and set(signs) == {"="}:
            return value
        if (
            len(sides) > 2
            or _NAME.fullmatch(sides[0])
            or "≈" in signs
            or isinstance(value, (Region, Several))
        ):
            named = _TUPLE.fullmatch(sides[0])
            if (
                named
                and isinstance(value, Several)
                and len(named[1].split(",")) == len(value.items)
            ):
                return Several(
                    ",",
                    "",
                    tuple(
                        Named(name.strip(), item, relation)
                        for name, item in zip(named[1].split(","), value.items, strict=True)
                    ),
                )
            return Named(sides[0], value, relation)
        return relation
    return _inequality(relation) or relation


_TUPLE = re.compile(r"\(([\w\s,]+)\)")


def _constant(text: str) -> Any:
    answer = parse(text, 5)
    if isinstance(answer, Number):
        return answer.value / (100 if answer.percent else 1)
    try:
        return answer.constant() if isinstance(answer, Formula) else None
    except Unreadable:
        return None


def _inequality(relation: Relation) -> Region | None:
    """The numbers that one name may have."""
    sides, signs = relation.sides, relation.signs
    if signs[0] in ">≥":
        flipped = str.maketrans("<>≤≥", "><≥≤")
        sides, signs = sides[::-1], tuple("".join(signs).translate(flipped))[::-1]
    place = next((n for n, side in enumerate(sides) if _NAME.fullmatch(side)), -1)
    if place < 0 or not set(signs) <= (
        {"≠"} if len(sides) == 2 and signs[0] == "≠" else {"<", "≤"}
    ):
        return None
    ends = [_end(side) for n, side in enumerate(sides) if n != place]
    if len(sides) > 3 or any(end is None for end in ends) or (len(sides) == 3 and place != 1):
        return None
    low, high = cast(End, ends[0]), cast(End, ends[-1])
    if signs[0] == "≠":
        return _other_than(low) if isinstance(low, Formula) else None
    if len(sides) == 3:
        return Region(((low, signs[0] == "≤", high, signs[1] == "≤"),))
    if place:
        return Region(((low, signs[0] == "≤", Infinity(1), False),))
    return Region(((Infinity(-1), False, high, signs[0] == "≤"),))


def _end(text: str) -> End | None:
    answer = parse(text, 5)
    return answer if isinstance(answer, Infinity) else _as_formula(answer)


def _other_than(end: Formula) -> Region:
    return Region(((Infinity(-1), False, end, False), (end, False, Infinity(1), False)))


def _bracketed(text: str, depth: int) -> Answer | None:
    if text[0] not in _OPENING or text[-1] not in _CLOSING:
        return None
    level = 0
    for place, character in enumerate(text):
        level += (character in _OPENING) - (character in _CLOSING)
        if level == 0 and place < len(text) - 1:
            return None
    inside = text[1:-1]
    if text[0] == "⦃":
        if match := re.fullmatch(
            r"\s*[A-Za-z]\s*(?:∈\s*\\mathbb\s*\{R\}\s*)?[∣|:](.*)", inside, re.S
        ):
            answer = parse(match[1], depth + 1)
            return answer if isinstance(answer, Region) else Text(text)
    parts, marks = _split(inside, ",;")
    if text[0] == "{" and not marks:
        return parse(inside, depth + 1)
    if text[0] in "([" and not marks:
        return parse(inside, depth + 1) if text[0] == "(" and text[-1] == ")" else None
    parts = [] if not inside.strip() else parts
    if len(parts) > _MOST_ITEMS:
        return Text(text)
    items: list[Answer] = []
    for part in parts:
        item = parse(part, depth + 1)
        signed = isinstance(item, Several) and item.opening == "," and ("±" in part or "∓" in part)
        items += item.items if signed and isinstance(item, Several) else [item]
    if any(isinstance(item, Text) for item in items):
        return Text(text)
    return Several({"{": "⦃"}.get(text[0], text[0]), text[-1], tuple(items))


_WORD = r"[A-Za-z][A-Za-z.'-]*"
_TRAILING = re.compile(
    r"(?P<value>.*[\w)}\]%|!])\s*(?:\\text\{(?P<text>[^{}]*)\}|(?<=[\d)}%])\s*(?P<bare>"
    rf"{_WORD}(?:\s{_WORD}){{0,3}}(?:/{_WORD})?))(?P<power>\s*\^\s*\{{?-?\d\}}?)?",
    re.S,
)
_SHORT_UNITS = frozenset(
    "m s g h l j n w v k c f cm mm km kg mg ml ft in yd mi lb oz hr min sec mph rpm kmh rad deg th am pm"
    " m/s km/h ft/s m^2 hz pa kpa nm".split()
)
_MEANINGS = frozenset(
    "hundred thousand million billion trillion dozen dozens wrong false incorrect invalid never except"
    " mod modulo base pi percent factorial squared cubed times plus minus infinity half pair pairs unknown"
    " maybe perhaps probably approximately about nearly almost".split()
)
_NOT_UNITS = (FUNCTION_WORDS | KEYWORDS | _MEANINGS) - frozenset(
    "byte long of per in short double till de e a".split()
)
_UNITS = {
    name: names.split()[0]
    for names in (
        "cm centimeter centimetre", "mm millimeter millimetre", "m meter metre", "km kilometer kilometre",
        "ft foot feet", "in inch inche", "mi mile", "yd yard", "g gram", "kg kilogram", "s sec second",
        "min minute", "h hr hour", "day", "week", "month", "year", "am a.m", "pm p.m", "dollar", "cent",
    )
    for name in names.split()
}  # fmt: skip
_KNOWN_UNITS = frozenset(_UNITS.values())
_DENIED = re.compile(
    r"n['’]t\b(?!\s+matter)|\b(?:wrong|false|incorrect|invalid|except|never)\b"
    r"|\bnot\b(?!\s+(?!it|that|this|the|right|correct|true|a|an|sure|certain|possible|valid|so|be)[a-z]{3,})",
    re.IGNORECASE,
)


_SHORT = re.compile(
    r"(?P<number>[+-]?[\d.,]+)(?P<unit>(?:\s+|(?=[ckm]?m\b|kg\b|ft\b))(?:[A-Za-z]{1,3})(?:\^\{?[23]\}?)?(?:\s?/\s?[A-Za-z]{1,3}(?:\^\{?[23]\}?)?)?)"
)


def _measured(text: str, depth: int) -> Answer:
    """A formula, or a value with a unit or a remark after it."""
    if (match := _SHORT.fullmatch(text)) and (number := _NUMBER.fullmatch(match["number"])):
        names = re.findall(r"[A-Za-z]+", match["unit"])
        if all(name.lower() in _SHORT_UNITS for name in names):
            read = _number(number)
            return replace(read, unit=_unit(match["unit"])) if isinstance(read, Number) else read
    if text.replace(" ", "") == "\\mathbb{R}":
        return Region(((Infinity(-1), False, Infinity(1), False),))
    try:
        return formula.read(text)
    except Unreadable:
        pass
    if text == "∅":
        return Several("⦃", "⦄", ())
    if match := re.fullmatch(
        r"(.+?)\s*\(?\s*\\pmod\s*\{?\s*(\d{1,15})\s*\}?\s*\)?|(.+?)\\bmod", text
    ):
        residue = parse(match[1] or "", depth + 1)
        if isinstance(residue, Number) and match[2] and 0 <= residue.value < int(match[2]):
            return replace(residue, unit=f"mod {match[2]}")
        return Text(text)
    match = _TRAILING.fullmatch(text)
    if match is None:
        return Text(text)
    words = (match["text"] if match["text"] is not None else match["bare"]).strip()
    remark = words[:1] == "(" or match["text"] == ""
    value = parse(match["value"], depth + 1)
    if remark:
        return Text(text) if _DENIED.search(words) else value
    single = words.lower().replace(" ", "")
    known = all(word.lower() not in _NOT_UNITS for word in re.findall(r"[A-Za-z]+", words))
    long = match["text"] is not None or len(words) > 2
    if not words or not (single in _SHORT_UNITS or (known and long)):
        return Text(text)
    if isinstance(value, Number):
        return value if value.unit else replace(value, unit=_unit(words) + (match["power"] or ""))
    return value if isinstance(value, Formula) and match["text"] is not None else Text(text)


def _unit(words: str) -> str:
    words = words.lower().strip(" .").removesuffix("s")
    return _UNITS.get(words, words)


# --- Comparison ---


def _same(gold: Answer, given: Answer, tolerance: float | None = None) -> bool:
    """Whether two answers say the same."""
    if isinstance(given, Several) and given.opening == "∨" and not isinstance(gold, Several):
        return all(_same(gold, item) for item in given.items)  # 1/2 or 0.5
    if isinstance(given, Named) and not isinstance(gold, Named | Relation):
        if "≈" in given.relation.signs and not isinstance(gold, Number):
            before = given.relation.sides[given.relation.signs.index("≈")]
            if _same(gold, parse(before, 1), tolerance):
                return True
        return not _several_named(gold) and _same(gold, given.value, tolerance)
    match gold:
        case Number() | Formula():
            return _same_scalar(gold, given, tolerance)
        case Named():
            if isinstance(given, Named) and given.name == gold.name:
                return _same(gold.value, given.value, tolerance)
            if isinstance(given, Named | Relation):
                return _same_relation(gold.relation, _relation_of(given))
            return _same(gold.value, given, tolerance)
        case Relation():
            return isinstance(given, Named | Relation) and _same_relation(gold, _relation_of(given))
        case Several():
            return _same_several(gold, given)
        case Region():
            return _same_region(gold, _region(given))
        case Infinity():
            return gold == given
        case Text():
            return isinstance(given, Text) and squeezed(gold.text) == squeezed(given.text)


def squeezed(text: str) -> str:
    """A text in plain notation without white space and needless braces."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\s|\{(?=\w\})|(?<=\{\w)\}", "", text).casefold()


def _same_scalar(gold: Number | Formula, given: Answer, tolerance: float | None) -> bool:
    if isinstance(given, Relation) and set(given.signs) == {"="} and not isinstance(gold, Relation):
        given = parse(given.sides[-1], 1)  # x + y = 3
    if isinstance(gold, Number):
        if isinstance(given, Number):
            return _same_number(gold, given, tolerance)
        if tolerance is None or not isinstance(given, Formula) or not _PI.fullmatch(given.text):
            return False
        return _near(gold.value, _value(given), tolerance)
    if isinstance(given, Number):
        value = _value(gold)
        if gold.names or value is None:
            given = cast(Formula, _as_formula(given))
            return formula.equal(gold, given)
        exact = given.value / (100 if given.percent else 1)
        if tolerance is not None and _near(value, exact, tolerance):
            return True
        return formula.close(value, exact) or (given.form == "decimal" and _rounded(value, exact))
    if not isinstance(given, Formula):
        return False
    polar = {"trigonometry"} if gold.imaginary and given.imaginary else set[str]()
    if not given.work <= gold.work | polar:
        return False
    if tolerance is not None and _near(_value(gold), _value(given), tolerance):
        return True
    alike = (
        gold.text.isalpha()
        and len(gold.text) == 1
        and gold.text.casefold() == given.text.casefold()
    )
    return alike or formula.equal(gold, given)


_PI = re.compile(r"-?(?:\d+(?:\.\d+)?)?\s?\\pi")


def _value(answer: Answer) -> Any:
    """Of a constant; None for anything else."""
    if isinstance(answer, Number):
        return answer.value
    try:
        return answer.constant() if isinstance(answer, Formula) else None
    except Unreadable:
        return None


def _same_number(gold: Number, given: Number | Text, tolerance: float | None) -> bool:
    units = {gold.unit, given.unit} if isinstance(given, Number) else {""}
    if isinstance(given, Text) or (len(units) == 2 and units <= _KNOWN_UNITS):
        return False
    if gold.unit[:3] == "mod" != given.unit[:3]:
        return False
    if given.form == "fraction" and gold.form in ("integer", "decimal", "scientific"):
        if not given.lowest:
            return False
    if given.form == "ratio" and gold.form not in ("fraction", "ratio"):
        return False
    if given.form == "ratio" and not given.lowest and gold != given:
        return False
    if given.form == gold.form == "ratio" and gold.lowest != given.lowest:
        return False
    if (
        given.form == "scientific"
        and gold.form not in ("scientific", "decimal")
        and not gold.percent
    ):
        return gold.form == "scientific"
    values = [given.value / (100 if given.percent else 1)]
    right = gold.value / (100 if gold.percent else 1)
    if gold.percent and not given.percent:
        values.append(given.value / 100)
    decimal = "decimal" in (gold.form, given.form)
    if tolerance is not None and any(_near(right, value, tolerance) for value in values):
        return True
    if right in values:
        return True
    whole = any(one.form == "integer" and not one.percent for one in (gold, given))
    return decimal and not whole and any(_rounded(right, value) for value in values)


def _rounded(right: Any, given: Any) -> bool:
    """Whether two numbers are equal as six places show them, or six digits of tiny ones."""
    if not (isinstance(right, Fraction) or getattr(right, "imag", 0) == 0):
        return False
    right, given = formula.inexact(right), formula.inexact(given)
    difference, larger = abs(right - given), max(abs(right), abs(given))
    if larger * 10**5 < 1:
        return bool(difference * 10**_PLACES <= larger)
    return bool(difference * 2 * 10**_PLACES <= 1)


def _near(right: Any, given: Any, tolerance: float) -> bool:
    if right is None or given is None:
        return False
    right, given = formula.inexact(right), formula.inexact(given)
    return bool(abs(right - given) <= tolerance * (abs(right) or 1))


def _several_named(answer: Answer) -> bool:
    return isinstance(answer, Several) and any(isinstance(item, Named) for item in answer.items)


def _same_several(gold: Several, given: Answer) -> bool:
    if isinstance(given, Relation):
        return False
    if not isinstance(given, Several):
        region = _region(gold)
        if isinstance(given, Region) and region is not None:
            return _same_region(region, given)
        return len(gold.items) == 1 and gold.opening == "⦃" and _same(gold.items[0], given)
    if _several_named(gold) or _several_named(given):
        return _same_names(gold, given)
    one, two = gold.opening, given.opening
    lists = (",", "∨")
    if one in lists or two in lists or one == two == "⦃":
        if one in "[⟨" or two in "[⟨" or "matrix" in (one, two):
            return False
        if one == "(":
            return _in_order(gold.items, given.items)
        collapse = "⦃" in (one, two)
        return _in_any_order(gold.items, given.items, collapse=collapse)
    vectors = {one + gold.closing, two + given.closing} <= {"()", "⟨⟩"}
    if not vectors and (one, gold.closing) != (two, given.closing):
        return _same_region(_region(gold), _region(given))
    return _in_order(gold.items, given.items)


def _same_item(one: Answer, other: Answer) -> bool:
    """In a list units tell values apart: 3 red and 4 blue, 4 red and 3 blue."""
    if isinstance(one, Number) and isinstance(other, Number) and one.unit and other.unit:
        return one.unit == other.unit and _same(one, other)
    return _same(one, other)


def _in_order(gold: Sequence[Answer], given: Sequence[Answer]) -> bool:
    return len(gold) == len(given) and all(
        _same_item(one, other) for one, other in zip(gold, given, strict=True)
    )


def _in_any_order(gold: Sequence[Answer], given: Sequence[Answer], *, collapse: bool) -> bool:
    """collapse: repeated values count once."""
    if not collapse:
        remaining = list(given)
        for one in gold:
            place = next((n for n, two in enumerate(remaining) if _same_item(one, two)), None)
            if place is None:
                return False
            del remaining[place]
        return not remaining
    return all(any(_same_item(one, two) for two in given) for one in gold) and all(
        any(_same_item(one, two) for one in gold) for two in given
    )


def _same_names(gold: Several, given: Several) -> bool:
    """Values of several names: by name, or in order where one side has none."""
    named = [
        {item.name: item.value for item in one.items if isinstance(item, Named)}
        for one in (gold, given)
    ]
    if all(len(names) == len(one.items) for names, one in zip(named, (gold, given), strict=True)):
        return named[0].keys() == named[1].keys() and all(
            _same(value, named[1][name]) for name, value in named[0].items()
        )
    bare = [
        [item.value if isinstance(item, Named) else item for item in one.items]
        for one in (gold, given)
    ]
    if all(named) or not any(
        len(names) == len(one.items) for names, one in zip(named, (gold, given), strict=True)
    ):
        return len(gold.items) == len(given.items) and _in_order(gold.items, given.items)
    if "⦃" in (gold.opening, given.opening):
        return False
    return _in_order(*bare)


def _relation_of(answer: Named | Relation) -> Relation:
    return answer.relation if isinstance(answer, Named) else answer


def _same_relation(gold: Relation, given: Relation) -> bool:
    """Equations are equal up to a factor; chains of inequalities are equal side by side."""
    sides = [_side_formulas(relation) for relation in (gold, given)]
    if not sides[0] or not sides[1]:
        return [*map(squeezed, gold.sides)] == [
            *map(squeezed, given.sides)
        ] and gold.signs == given.signs
    signs = [gold.signs, given.signs]
    if set(gold.signs) == set(given.signs) == {"="} and len(gold.signs) == len(given.signs) == 1:
        try:
            left, right = (formula.read(f"({r.sides[0]})-({r.sides[1]})") for r in (gold, given))
        except Unreadable:
            return False
        if formula.equal(left, right, ratio=True):
            return True
    flipped = str.maketrans("<>≤≥", "><≥≤")
    ways = [(sides[1], signs[1])]
    ways.append((sides[1][::-1], tuple("".join(signs[1]).translate(flipped))[::-1]))
    for other, marks in ways:
        if (
            marks == signs[0]
            and len(other) == len(sides[0])
            and all(map(formula.equal, sides[0], other))
        ):
            return True
    if len(signs[0]) == len(signs[1]) == 1 and signs[0][0] in "<>≤≥≠":
        left = f"({gold.sides[0]})-({gold.sides[1]})"
        for other, marks, template in zip(
            (given.sides, given.sides[::-1]), (signs[1], ways[1][1]), ("", ""), strict=True
        ):
            if marks == signs[0] and formula.equal(
                formula.read(left), formula.read(f"({other[0]})-({other[1]}){template}")
            ):
                return True
    return False


def _side_formulas(relation: Relation) -> list[Formula]:
    formulas = [_as_formula(parse(side, 1)) for side in relation.sides]
    return [one for one in formulas if one] if all(formulas) else []


def _as_formula(answer: Answer) -> Formula | None:
    if isinstance(answer, Number):
        value = answer.value / (100 if answer.percent else 1)
        return Formula(lambda _: value, "")
    return answer if isinstance(answer, Formula) else None


def _region(answer: Answer) -> Region | None:
    """An interval in brackets as a region. A point is a set of one, as in `(1,2) ∪ {3}`."""
    if isinstance(answer, Region):
        return answer
    if not isinstance(answer, Several) or _several_named(answer):
        return None
    ends = [item if isinstance(item, Infinity) else _as_formula(item) for item in answer.items]
    if answer.opening == "⦃" and all(isinstance(end, Formula) for end in ends):
        return Region(tuple((end, True, end, True) for end in ends if end))
    if answer.opening not in "([" or answer.closing not in ")]" or len(ends) != 2 or not all(ends):
        return None
    low, high = cast(list[End], ends)
    if isinstance(low, Formula) and isinstance(high, Formula):
        if not low.names and not high.names and not _place(low) < _place(high):
            return None
    closed = (
        answer.opening == "[" and isinstance(low, Formula),
        answer.closing == "]" and isinstance(high, Formula),
    )
    return Region(((low, closed[0], high, closed[1]),))


def _place(end: End) -> float:
    if isinstance(end, Infinity):
        return end.sign * float("inf")
    try:
        value = end.at(Point(0))
        return float(value) if isinstance(value, Fraction) else float(value.real)
    except (Unreadable, OverflowError):
        return float("nan")


def _intersection(regions: Sequence[Region]) -> Region:
    parts = regions[0].parts
    for region in regions[1:]:
        both: list[tuple[End, bool, End, bool]] = []
        for one in parts[:_MOST_ITEMS]:
            for two in region.parts[:_MOST_ITEMS]:
                low, _, low_closed = max(
                    (_place(p[0]), not p[1], n) for n, p in enumerate((one, two))
                )
                high, _, high_closed = min(
                    (_place(p[2]), p[3], n) for n, p in enumerate((one, two))
                )
                if low < high:
                    first, last = (one, two)[low_closed], (one, two)[high_closed]
                    both.append((first[0], first[1], last[2], last[3]))
        parts = tuple(both)
    return Region(parts)


def _same_region(gold: Region | None, given: Region | None) -> bool:
    if gold is None or given is None or len(gold.parts) != len(given.parts):
        return False
    ordered = [
        sorted(one.parts, key=lambda part: (_place(part[0]), _place(part[2])))
        for one in (gold, given)
    ]
    return all(
        (one[1], one[3]) == (two[1], two[3])
        and _same_end(one[0], two[0])
        and _same_end(one[2], two[2])
        for one, two in zip(*ordered, strict=True)
    )


def _same_end(one: End, two: End) -> bool:
    if isinstance(one, Infinity) or isinstance(two, Infinity):
        return one == two
    return two.work <= one.work and formula.equal(one, two)


_CALCULUS = re.compile(r"\\(?:sum|prod|int|lim|iint|det)(?![a-z])|\\begin\s*\{vmatrix\}")


def _worked_out(text: str) -> Answer:
    """The known answer; sums, integrals, limits and determinants in it are worked out by sympy."""
    if not _CALCULUS.search(text):
        return parse(text)
    from latex2sympy2_extended import latex2sympy  # noqa: PLC0415  # pyright: ignore
    from sympy import latex  # noqa: PLC0415  # pyright: ignore

    index = re.search(r"_\s*\{\s*i\s*=", text)  # an index, and not the imaginary unit
    try:
        value = cast(Any, latex2sympy(text, is_real=None)).doit()
        answer = parse(plain(cast(str, latex(value))))
    except Exception:  # whatever the library cannot read is compared as text
        return Text(text)
    imaginary = index and isinstance(answer, Formula) and answer.imaginary
    return Text(text) if imaginary else answer


# --- What is asserted ---

_BEFORE_MARK = re.compile(
    r"(?:(?:\bnot|n['’]t|\bnever|\banything\s+but|\bthan|\bdoubt\w*(?:\s+\w+){0,4})(?:\s+(?:be|equal\s+to|the|an?))*"
    r"|(\\boxed\b.*)\bor)[\s$*(\\\[]*\Z",
    re.IGNORECASE | re.S,
)
_AFTER_MARK = re.compile(
    r"[\s$*)\\\]}]*(?:\?|(?:is|was|are)\s*(?:n['’]t|\s+not|\s+wrong|\s+incorrect|\s+false)\b"
    r"|(?:cannot|can['’]t|could\s+not)\s+be\b|or\s+\$?\\?\w)",
    re.IGNORECASE,
)


def _mark_denied(text: str, marked: str) -> bool:
    """Whether the words around the last mark say that it is not the answer."""
    start = text.rfind(BOXED)
    if start < 0:
        return False
    after = text[text.find(marked, start) + len(marked) :].lstrip()[1:]
    before = text[max(0, start - 80) : start]
    return bool(_BEFORE_MARK.search(before) or _AFTER_MARK.match(after))


_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z(\\$*])|\n+")
_ANSWER = re.compile(r"\banswer(?:\s+\w+){0,4}?(?:\s+is\b\s*:?|\s*:)[\s*>]*(?=\S)", re.IGNORECASE)
_DOUBT = re.compile(
    r"\?|\b(?:not|never|neither|nor|cannot|except|wrong|false|incorrect|either|maybe|perhaps|might|could"
    r"|possibly|probably|unlikely|(?<!no\s)doubt\w*|unsure|less|more|greater|fewer|larger|smaller|other|rather|under|over|below"
    r"|above|nearly|almost|least|most|say|says|said|claims?|guess|although|though|but|unless|between|least"
    r"|from|wait|actually|instead|or)\b|n['’]t\b|\banything\b|\ball\s+but\b",
    re.IGNORECASE,
)
_VERB = re.compile(
    r"\b(?:is|are|be|was|were|equals?|equal\s+to|makes?|gives?|gets?|becomes?|has|have|so|thus|hence|therefore"
    r"|obtain|yields?|leaves?|costs?)\b[:,]?|=>|⇒|→|\\(?:implies|Rightarrow)\b|:(?=\s)",
    re.IGNORECASE,
)
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?:(?!(?:sqrt|sin|cos|tan|log|exp|and|mod|inf|infinity)\b)[^\W\d_]{3,}"
    r"|(?i:is|it|so|we|he|be|by|as|at|an|on|of|to|if|my|no|do)\b)"
)
_FORMULA = re.compile(
    r"\$\$?[^$]+\$\$?|\\\(.+?\\\)|\\\[.+?\\\]"
    r"|(?:(?<![A-Za-z])[b-zB-HJ-Z](?![A-Za-z])|\\[A-Za-z]+|\\?%|\\\$|[\d.,+\-*/^=()\[\]{}<>!√π°×·÷−|_:²³€£]"
    r"|(?<=\S)[ \t])+",
    re.S,
)


_DISPLAY = re.compile(r"\s*(?:\\\[(?:(?!\\[\[\]]).)*\\\]|\$\$[^$]*\$\$)", re.S)
_ASIDE = re.compile(
    r",?\s+(?:which|because|since|(?:and\s+)?not\s(?=[^;]*\d)|rather\s+than|instead\s+of)\b(?!.*\bbut\b)[^;]*$"
    r"|\bnot\s+[^\s,]+\s*,?\s+but(?:\s+rather)?\b",
    re.IGNORECASE,
)


def _statements(text: str, *, exclaims: bool) -> list[str]:
    """Readings of what an unmarked text asserts; none if it leaves a doubt."""
    text = (
        _SIGNED.sub("-", _BOLD.sub(r"\2", text))
        .strip()
        .removeprefix("```")
        .removesuffix("```")
        .strip()
    )
    if text.count("$") % 2:  # money
        text = text.replace("\\$", "").replace("$", "")
    text = text if exclaims else text.rstrip("! ")
    text = _DISPLAY.sub(lambda match: f" ${' '.join(match[0].strip()[2:-2].split())}$", text)
    rest = ""
    if leads := list(_ANSWER.finditer(text)):
        claim, _, rest = text[leads[-1].end() :].partition("\n")
        before = re.split(
            r"[.!?]\s|\n|,\s+(?:so|thus|hence|therefore|and)\b", text[: leads[-1].start()]
        )[-1]
        sentence, *more = _SENTENCE.split(claim.strip())
        rest = " ".join([*more, rest])
        if _DOUBT.search(rest) or _DOUBT.search(before):
            return []
        sentence = _set_aside(sentence)
        if not _PROSE.search(sentence):
            return [sentence]
    elif not _PROSE.search(text):
        return [text]
    else:
        sentences = [part for part in _SENTENCE.split(text) if part.strip()]
        sentence = _set_aside(sentences[-1].lstrip("># "))
    if not _PROSE.search(sentence):
        return [sentence]
    conclusion = re.split(r"[,;:]\s+(?:so|thus|hence|therefore)\b,?", sentence)[-1]
    if _DOUBT.search(conclusion):
        return [sentence] if leads and not _DOUBT.search(_WRAPPED.sub("", sentence)) else []
    verbs = list(_VERB.finditer(conclusion))
    tail = conclusion[verbs[-1].end() :].strip() if verbs else ""
    if tail and not _PROSE.search(tail):
        return [tail]
    formulas = [match[0] for match in _FORMULA.finditer(conclusion) if re.search(r"\d", match[0])]
    last = formulas[-1].strip(" ,:=") if formulas else ""
    return [part for part in (tail, last) if part]


def _set_aside(sentence: str) -> str:
    """A sentence without what its value is not: `26, not 25`, `not 30 but 31`."""
    match = _ASIDE.search(sentence)
    if match is None or not re.search(r"\d", sentence[: match.start()] + sentence[match.end() :]):
        return sentence
    return sentence[: match.start()] + sentence[match.end() :]


# --- Answers in words ---

_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'’-]+[^\W\d_]+)*")


def _words(right: str) -> str:
    """The words of an answer that has nothing else in it; "" for others."""
    spelled = _spelled(right)
    is_words = _WORDS.fullmatch(spelled) and not re.search(r"\\(?!text|math)", right)
    return spelled if is_words and not right.isupper() else ""


def _asserts(text: str, words: str) -> bool:
    """Whether the last sentence of a text ends with these words, and says so without a doubt."""
    text = _BOLD.sub(r"\2", text).strip()
    if leads := list(_ANSWER.finditer(text)):
        text = text[leads[-1].end() :]
    sentences = [part for part in re.split(r"(?<=[.!?])\s+|\n+", text) if part.strip()]
    if not sentences or (leads and _DOUBT.search(" ".join(sentences[1:]))):
        return False
    sentence = _undressed(sentences[0 if leads else -1].lstrip("> ").rstrip("!"))
    sentence = re.sub(r"\$|\\[()\[\]]", "", sentence)
    spelled = _spelled(sentence)
    if spelled == words:
        return True
    before = spelled.removesuffix(f" {words}")
    if before == spelled or _DOUBT.search(before):
        return False
    previous = _WRAPPED.sub(r" \1 ", sentence).split()[: len(before.split())]
    return len(previous) < 2 or not previous[-1][:1].isupper()
