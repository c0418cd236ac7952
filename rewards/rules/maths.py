r"""Comparison of an answer with the known one by value: `\frac12`, `1/2` and `0.5` are equal.

Both texts go the same way: `plain` writes them in one notation, `parse` reads the whole of it as a
number, formula, list, set, region or relation, or else keeps it as text, and `_same` compares two
readings. Plain numbers are exact fractions, `keel.rewards.rules.formula` evaluates formulas, and a
text equals only itself. math-verify's parser works out sums, integrals and determinants of the
known answer, once, and never of a completion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, TypeGuard, cast

from keel.rewards.language.function_words import FUNCTION_WORDS, KEYWORDS
from keel.rewards.rules import formula, statements
from keel.rewards.rules.formula import INFINITE, MINUS_INFINITE, Formula, LostTerm, Unreadable
from keel.rewards.rules.notation import plain, squeezed
from keel.rewards.text import BOXED, marked_answer

MAX_CHARACTERS = 2_048
"""A longer answer is wrong, unless the right one is about that long."""
_MOST_ITEMS = 64
_PLACES = 6
"""Decimals are compared after rounding to so many places; below 1e-5, to so many digits."""


_ASSIGNED = re.compile(r"\A\s*[a-df-hj-zA-Z]\s*=")


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
    right = statements.undressed(right)
    spelling, words = statements.spelled(right), statements.words_of(right)
    longest = max(MAX_CHARACTERS, 4 * len(right))
    gold = cache(lambda: [_worked_out(plain(right)), *_ungrouped(plain(right))])
    if ready and not words:
        gold()

    def judge(answer: str) -> bool:
        number = None if words else _NUMBER.fullmatch(_ASSIGNED.sub("", answer))
        if number and isinstance(expected := gold()[0], Number):
            return _same_number(expected, _number(number), tolerance)
        answer = statements.undressed(answer)
        if not answer or statements.spelled(answer) == spelling:
            return bool(answer)
        if words:
            return False
        answer = plain(answer)
        readings = [parse(answer), *_ungrouped(answer)]
        return any(_same(one, other, tolerance) for one in gold() for other in readings)

    def verify(text: str) -> bool:
        text = text.replace("\\fbox{", BOXED)
        marked = marked_answer(text)
        if marked is None and BOXED in text:  # it was never closed
            return False
        if len(text if marked is None else marked) > longest:
            return False
        if marked is not None:
            boxes = statements.boxes(text, marked)
            return bool(boxes) and (all(map(judge, boxes)) or judge(", ".join(boxes)))
        if words:
            return statements.asserts(text, words)
        return any(
            judge(statement) for statement in statements.statements(text, exclaims="!" in right)
        )

    return verify


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1


# --- Reading ---


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number and its spelling.

    form: integer, decimal, fraction, ratio or scientific. lowest: of a fraction, whether it is in
    lowest terms. unit: the words after it, in the singular.
    """

    value: Fraction
    form: str = "integer"
    lowest: bool = True
    percent: bool = False
    unit: str = ""

    @property
    def share(self) -> Fraction:
        """The value, a hundredth of it for a percentage."""
        return self.value / 100 if self.percent else self.value


@dataclass(frozen=True, slots=True)
class Several:
    """Values in brackets; "," opens a list without any, "∨" alternatives, "matrix" rows."""

    opening: str
    closing: str
    items: tuple[Answer, ...]


Interval = tuple[Formula, bool, Formula, bool]
"""The low end, whether it is included, and the same of the high end. An end may be infinite."""


@dataclass(frozen=True, slots=True)
class Region:
    """A union of intervals of real numbers."""

    parts: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """Sides and the signs between them.

    name: the first side if it is a name, as in `x = 3` and `f(x) = x^2`. value: the last side.
    """

    sides: tuple[str, ...]
    signs: str
    name: str
    value: Answer


@dataclass(frozen=True, slots=True)
class Text:
    """An answer outside this grammar, compared as text."""

    text: str


Answer = Number | Formula | Several | Region | Relation | Text

_INTEGER = r"\d{1,3}(?:,\d{3})+|\d{1,4000}"
_FRACTION = (
    r"\\frac\s?\{\s*(?P<minus>-?)(?P<top>\d{1,4000})\s*\}\s?\{\s*(?P<bottom>\d{1,4000})\s*\}"
)
_NUMBER = re.compile(
    rf"\s*(?P<sign>[+-]?)\s*(?:(?=\.?\d)(?P<whole>{_INTEGER})?(?P<decimals>\.\d{{0,4000}})?"
    r"(?:[eE](?P<exponent>[+-]?\d{1,4}))?(?:\s?\*\s?10\s?\^\s?\{?\s*(?P<ten>[+-]?\d{1,4})\s*\}?)?"
    rf"|(?P<mixed>\d{{1,40}})?\s?{_FRACTION}"
    r"|(?P<left>\d{1,4000})\s?(?P<over>[/:])\s?(?P<right>\d{1,4000}))"
    r"\s*(?P<percent>%?)(?:\s?\^\s?(?:\\circ|\{\s?\\circ\s?\}))?\.?\s*"
)


def _number(match: re.Match[str]) -> Number | Text:
    sign = -1 if (match["sign"] == "-") != (match["minus"] == "-") else 1
    if top := match["top"] or match["left"]:
        bottom = int(match["bottom"] or match["right"])
        if not bottom:
            return Text(match[0])
        part = Fraction(int(top), bottom)
        lowest = part.denominator == bottom and (bottom > 1 or match["over"] == ":")
        lowest = lowest and (not match["mixed"] or part < 1)
        form = "ratio" if match["over"] == ":" else "fraction"
        value = sign * (int(match["mixed"] or 0) + part)
        return Number(value, form, lowest, bool(match["percent"]))
    decimals, exponent = (match["decimals"] or "").rstrip("."), int(match["exponent"] or 0)
    form = "decimal" if decimals or exponent < 0 else "integer"
    if match["ten"]:
        exponent, form = exponent + int(match["ten"]), "scientific"
    value = Fraction((match["whole"] or "0").replace(",", "") + decimals) * Fraction(10) ** exponent
    return Number(sign * value, form, percent=bool(match["percent"]))


def _ungrouped(text: str) -> list[Answer]:
    """The list in `100,200`, which may also be one number."""
    spaced = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", ", ", text)
    return [] if spaced == text else [parse(spaced)]


def parse(text: str, depth: int = 0) -> Answer:
    """Read all of an answer in plain notation, or return it as Text."""
    text = text.strip()
    if match := _NUMBER.fullmatch(text):
        return _number(match)
    if not text or depth > 6 or "\\ldots" in text:
        return Text(text)
    for reader in (
        _matrix,
        _listed,
        _united,
        _member,
        _either,
        _related,
        _bracketed,
        _constant_sign,
    ):
        answer = reader(text, depth + 1)
        if answer is not None:
            return answer
    return _measured(text, depth + 1)


_OPENING, _CLOSING = "([{⦃⟨", ")]}⦄⟩"


def _split(text: str, marks: str) -> tuple[list[str], str]:
    """Split at marks outside brackets. Returns the parts and the marks between them."""
    parts, found, depth, start = list[str](), "", 0, 0
    for match in re.finditer(rf"[(\[{{⦃⟨]|[)\]}}⦄⟩]|[{marks}]", text):
        if match[0] in _OPENING:
            depth += 1
        elif match[0] in _CLOSING:
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            found += match[0]
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
        return parse(match[2].replace("\\\\", ";").replace("&", " "), depth)
    if match[1] == "vmatrix" or "\\begin" in match[2]:
        return Text(text)
    rows = [row.split("&") for row in match[2].strip().removesuffix("\\\\").split("\\\\")]
    lines = [Several("row", "", tuple(parse(cell, depth) for cell in row)) for row in rows]
    return Several("matrix", "", tuple(lines))


def _listed(text: str, depth: int) -> Answer | None:
    parts, marks = _split(text.replace("\\\\", ";"), ",;¦∧∨")
    parts = [part for part in parts if part]
    if not marks:
        return None
    if not 1 < len(parts) <= _MOST_ITEMS:
        return parse(parts[0], depth) if len(parts) == 1 else Text(text)
    items = _items(parts, depth)
    regions = [_region(item.value if _names(item) else item, point=True) for item in items]
    if all(regions) and any(isinstance(item, Region) for item in items):
        found = [region for region in regions if region]
        return _intersection(found) if {*"∨¦"}.isdisjoint(marks) else _joined(found)
    if not {*"∧∨"}.isdisjoint(marks) and not any(isinstance(item, Relation) for item in items):
        return Text(text)  # of logic, not of answers
    if any(isinstance(item, Text) and not item.text.startswith("\\text") for item in items):
        return Text(text)
    names = [item.name if isinstance(item, Relation) else "" for item in items]
    if names[0] and (not any(names[1:]) or len(set(names)) == 1):  # x = 1, 2 and x = 1, x = 2
        items = [item.value if isinstance(item, Relation) else item for item in items]
    return Several("∨" if set(marks) <= {*"∨¦"} else ",", "", tuple(items))


def _items(parts: Sequence[str], depth: int) -> list[Answer]:
    """Read the parts of a list; 0, ±4 has three items."""
    items: list[Answer] = []
    for part in parts:
        item = parse(part, depth)
        signs = isinstance(item, Several) and item.opening == "," and re.search("[±∓]", part)
        items += item.items if signs and isinstance(item, Several) else [item]
    return items


def _names(answer: Answer) -> TypeGuard[Relation]:
    return isinstance(answer, Relation) and bool(answer.name)


def _united(text: str, depth: int) -> Answer | None:
    parts, marks = _split(text, "∪∖")
    if not marks:
        return None
    regions = [region for part in parts if (region := _region(parse(part, depth), point=True))]
    if len(regions) < len(parts):
        return Text(text)
    if set(marks) == {"∪"}:
        return _joined(regions)
    points = [part for region in regions[1:] for part in region.parts]
    if marks != "∖" or any(low is not high for low, _, high, _ in points):
        return Text(text)
    return _intersection([regions[0], *(_other_than(low) for low, _, _, _ in points)])


def _member(text: str, depth: int) -> Answer | None:
    parts, marks = _split(text, "∈")
    if len(marks) != 1:
        return None
    return parse(parts[1], depth) if _NAME.fullmatch(parts[0]) else Text(text)


def _either(text: str, depth: int) -> Answer | None:
    if not re.search("[±∓]", text) or re.search("[,;⦃⟨]", text):
        return None
    signs = (text.translate({0xB1: one, 0x2213: two}) for one, two in ("+-", "-+"))
    values = [parse(sign, depth) for sign in signs]
    return Several(",", "", tuple(value.value if _names(value) else value for value in values))


_NAME = re.compile(
    r"(?![ei]$|\\pi\s*$)(?:\\text\{[^{}]*\}|[A-Za-z]|[A-Z]{2,6}|\|[A-Z]{2}\|"
    r"|\\(?:angle|triangle)?\s?[A-Za-z]+"
    r"|\\(?:overline|overrightarrow|vec|hat|bar|mathbf|mathcal|dot)\s*\{\w+\}"
    r"|\\frac\s*\{\s*d\w*\s*\}\s*\{\s*d\w\s*\})"
    r"(?:_\w|_\{[^{}]*\})?'{0,3}(?:\^\{-1\})?(?:\([^()=]*\))?"
)
_FLIPPED = str.maketrans("<>≤≥", "><≥≤")


def _related(text: str, depth: int) -> Answer | None:
    steps, arrows = _split(text, "→")
    if arrows:
        concludes = re.search("[=<>≤≥]", steps[0]) or _constant(steps[0]) is not None
        return parse(steps[-1], depth) if concludes else Text(text)
    sides, signs = _split(text, "=<>≤≥≠≈")
    if not signs:
        return None
    if signs[0] in "=≈" and not sides[0]:
        return parse(text.strip()[1:], depth)
    if not all(sides):
        return Text(text)
    value = parse(sides[-1], depth)
    name = sides[0] if _NAME.fullmatch(sides[0]) or len(sides) > 2 or "≈" in signs else ""
    if not set(signs) <= {"=", "≈"}:
        relation = Relation(tuple(sides), signs, "", value)
        return _inequality(relation) or relation
    constants = [c for side in sides if (c := _constant(side)) is not None]
    if any(abs(one - constants[-1]) > abs(constants[-1]) / 100 for one in constants):
        return Text(text)  # 7 = 3.14
    if len(constants) == len(sides) and "≈" not in signs:
        return value
    names = re.fullmatch(r"\(([\w\s,]+)\)", sides[0])
    if names and isinstance(value, Several) and names[1].count(",") == len(value.items) - 1:
        pairs = zip(names[1].split(","), value.items, strict=True)
        relations = [Relation(tuple(sides), signs, one.strip(), item) for one, item in pairs]
        return Several(",", "", tuple(relations))
    name = sides[0] if isinstance(value, Region | Several) else name
    return Relation(tuple(sides), signs, name, value)


def _constant(text: str) -> Any:
    answer = parse(text, 5)
    return formula.number(answer.share) if isinstance(answer, Number) else _value(answer)


def _inequality(relation: Relation) -> Region | None:
    """The region of one name, as in `1 < x < 2` and `x \\ne 3`."""
    sides, signs = relation.sides, relation.signs
    if signs[0] in ">≥":
        sides, signs = sides[::-1], signs.translate(_FLIPPED)[::-1]
    if len(sides) == 2 and "|" in "".join(sides) and (region := _distance(*sides, signs)):
        return region
    place = next((n for n, side in enumerate(sides) if _NAME.fullmatch(side)), -1)
    ends = [_as_formula(parse(side, 5)) for n, side in enumerate(sides) if n != place]
    if place < 0 or not all(ends) or (len(sides) > 2 and (place, len(sides)) != (1, 3)):
        return None
    low, high = cast(Formula, ends[0]), cast(Formula, ends[-1])
    if signs == "≠":
        return _other_than(low)
    if not set(signs) <= {"<", "≤"}:
        return None
    if len(sides) == 3:
        return Region(((low, signs[0] == "≤", high, signs[1] == "≤"),))
    return Region(
        ((low, signs == "≤", INFINITE, False),)
        if place
        else ((MINUS_INFINITE, False, high, signs == "≤"),)
    )


_DISTANCE = re.compile(r"\|\s*(\d*)\s*[A-Za-z]\s*([+-][^|]*)?\|")


def _distance(small: str, large: str, sign: str) -> Region | None:
    """The region of `|2x - 3| < 5` or `5 < |2x - 3|`."""
    inside, outside = _DISTANCE.fullmatch(small), _DISTANCE.fullmatch(large)
    match, radius = inside or outside, large if inside else small
    if match is None or (inside and outside) or sign not in "<≤":
        return None
    ends = [
        _as_formula(parse(rf"\frac{{{side}({radius})-(0{match[2] or ''})}}{{{match[1] or 1}}}", 5))
        for side in "-+"
    ]
    low, high = ends
    if low is None or high is None or low.imaginary or not _place(low) < _place(high):
        return None
    closed = sign == "≤"
    if inside:
        return Region(((low, closed, high, closed),))
    return Region(((MINUS_INFINITE, False, low, closed), (high, closed, INFINITE, False)))


def _other_than(end: Formula) -> Region:
    return Region(((MINUS_INFINITE, False, end, False), (end, False, INFINITE, False)))


_SUCH_THAT = re.compile(r"\s*[A-Za-z]\s*(?:∈\s*\\mathbb\s*\{R\}\s*)?[∣|:](.*)", re.S)


def _bracketed(text: str, depth: int) -> Answer | None:
    if text[0] not in _OPENING or text[-1] not in _CLOSING:
        return None
    level = 0
    for place, character in enumerate(text):
        level += (character in _OPENING) - (character in _CLOSING)
        if level == 0 and place < len(text) - 1:
            return None
    inside = text[1:-1].strip()
    if text[0] == "⦃" and (match := _SUCH_THAT.fullmatch(inside)):
        answer = parse(match[1], depth)
        return answer if isinstance(answer, Region) else Text(text)
    parts, marks = _split(inside, ",;")
    if not marks and text[0] in "([{":
        return parse(inside, depth) if text[0] + text[-1] in ("()", "{}") else None
    if len(parts) > _MOST_ITEMS:
        return Text(text)
    items = _items(parts if inside else [], depth)
    if any(isinstance(item, Text) for item in items):
        return Text(text)
    return Several(text[0].replace("{", "⦃"), text[-1], tuple(items))


def _constant_sign(text: str, _: int) -> Answer | None:
    if text.lstrip("+-") == "∞":
        return MINUS_INFINITE if text[0] == "-" else INFINITE
    if text == "∅":
        return Several("⦃", "⦄", ())
    if text.replace(" ", "") == "\\mathbb{R}":
        return Region(((MINUS_INFINITE, False, INFINITE, False),))
    return None


_WORD = r"[A-Za-z][A-Za-z.'-]*"
_TRAILING = re.compile(
    r"(?P<value>.*[\w)}\]%|!])\s*(?:\\text\{(?P<text>[^{}]*)\}|(?<=[\d)}%])\s*(?P<bare>"
    rf"{_WORD}(?:\s{_WORD}){{0,3}}(?:/{_WORD})?))(?P<power>\s*\^\s*\{{?-?\d\}}?)?",
    re.S,
)
_LETTERS = r"[A-Za-z]{1,3}(?:\^\{?[23]\}?)?"
_SHORT = re.compile(
    rf"(?P<number>[+-]?[\d.,]+)(?:\s+|(?=[ckm]?m\b|kg\b|ft\b))(?P<unit>{_LETTERS}(?:\s?/\s?{_LETTERS})?)"
)
_MODULO = re.compile(r"([^\\]+)\(?\s*\\(pmod|bmod)\s*\{?\s*(\d{1,15})\s*\}?\s*\)?")
_SHORT_UNITS = """
m s g h l j n w v k c f cm mm km kg mg ml ft in yd mi lb oz hr min sec mph rpm kmh rad deg am pm hz
pa kpa nm
"""
_LIKE_FUNCTION_WORDS = "byte long of per in short double till de e a"
_NOT_UNITS = FUNCTION_WORDS | KEYWORDS | {*statements.MEANINGS.split()}
_NOT_UNITS -= {*_LIKE_FUNCTION_WORDS.split()}
_UNIT_NAMES = """
mm millimeter millimetre
cm centimeter centimetre
m meter metre
km kilometer kilometre
in inch inche
ft foot feet
yd yard
mi mile
g gram
kg kilogram
s sec second
min minute
h hr hour
day
week
month
year
dollar
cent
am a.m
pm p.m
"""
_UNITS = {
    name: line.split()[0] for line in _UNIT_NAMES.strip().splitlines() for name in line.split()
}
_DENIED = re.compile(
    r"n['’]t\b(?!\s+matter)|\b(?:wrong|false|incorrect|invalid|except|never)\b|\bnot\b(?!\s+"
    r"(?!it|that|this|the|right|correct|true|a|an|sure|certain|possible|valid|so|be)[a-z]{3,})",
    re.IGNORECASE,
)


def _measured(text: str, depth: int) -> Answer:
    """A formula, or a value with a unit or a remark after it."""
    if (match := _SHORT.fullmatch(text)) and (number := _NUMBER.fullmatch(match["number"])):
        value = _number(number)
        units = re.findall(r"[a-z]+", match["unit"].lower())
        if isinstance(value, Number) and {*_SHORT_UNITS.split()}.issuperset(units):
            return replace(value, unit=_unit(match["unit"]))
    try:
        return formula.read(text)
    except Unreadable:
        pass
    if match := _MODULO.fullmatch(text):
        value = parse(match[1], depth)
        if isinstance(value, Number) and match[2] == "pmod" and 0 <= value.value < int(match[3]):
            return replace(value, unit=f"mod {match[3]}")
    match = _TRAILING.fullmatch(text)
    if match is None:
        return Text(text)
    words = (match["bare"] if match["text"] is None else match["text"]).strip()
    value = parse(match["value"], depth)
    if words[:1] in ("(", ""):
        return Text(text) if _DENIED.search(words) else value
    known = _NOT_UNITS.isdisjoint(re.findall(r"[a-z]+", words.lower()))
    long = match["text"] is not None or len(words) > 2
    if words.lower() not in _SHORT_UNITS.split() and not (known and long):
        return Text(text)
    if isinstance(value, Number):
        return value if value.unit else replace(value, unit=_unit(words) + (match["power"] or ""))
    return value if isinstance(value, Formula) and match["text"] is not None else Text(text)


def _unit(words: str) -> str:
    words = words.lower().strip(" .").removesuffix("s") or words
    return _UNITS.get(words, words)


# --- Comparison ---


def _same(gold: Answer, given: Answer, tolerance: float | None = None) -> bool:
    """Compare two answers."""
    if isinstance(given, Several) and given.opening == "∨" and not isinstance(gold, Several):
        return all(_same(gold, item) for item in given.items)  # 1/2 or 0.5
    if (
        isinstance(given, Relation)
        and not isinstance(gold, Relation)
        and set(given.signs) <= {"=", "≈"}
    ):
        if isinstance(gold, Several) and any(map(_names, gold.items)):
            return False
        before = given.signs.find("≈")
        if before >= 0 and isinstance(gold, Formula) and _same(gold, parse(given.sides[before], 1)):
            return True
        return _same(gold, given.value, tolerance)
    match gold:
        case Number():
            return _same_number(gold, given, tolerance)
        case Formula():
            return _same_formula(gold, given, tolerance)
        case Relation():
            if isinstance(given, Relation):
                named = gold.name and gold.name == given.name
                return (
                    _same(gold.value, given.value, tolerance)
                    if named
                    else _same_relation(gold, given)
                )
            return bool(gold.name) and _same(gold.value, given, tolerance)
        case Several():
            return _same_several(gold, given)
        case Region():
            return _same_region(gold, _region(given))
        case Text():
            return isinstance(given, Text) and squeezed(gold.text) == squeezed(given.text)


_PI = re.compile(r"-?(?:\d+(?:\.\d+)?)?\s?\\pi")


def _same_number(gold: Number, given: Answer, tolerance: float | None) -> bool:
    """Compare with a number, which must be written as one, in powers of ten only if `gold` is."""
    if isinstance(given, Formula) and given.imaginary and not given.work:  # i^2
        value = given.constant()
        return value is not None and formula.close(formula.number(gold.share), value)
    if not isinstance(given, Number):
        multiple = tolerance and isinstance(given, Formula) and _PI.fullmatch(given.text)
        return bool(multiple) and _near(formula.number(gold.value), _value(given), tolerance)
    units = {gold.unit, given.unit}
    if (len(units) > 1 and units <= {*_UNITS.values()}) or (
        gold.unit[:3] == "mod" and gold.unit != given.unit
    ):
        return False
    if given.form not in ("integer", "decimal", gold.form):
        ratio, fraction = given.form == "ratio", given.form == "fraction"
        allowed = ("fraction",) if ratio else ("ratio", "percent") if fraction else ("decimal",)
        if gold.form not in allowed and not (fraction and given.lowest):
            return False
    if given.form == "ratio" and given.lowest != gold.lowest:
        return False
    values = (
        [given.share, given.value / 100] if gold.percent and not given.percent else [given.share]
    )
    if gold.share in values:
        return True
    exact = any(one.form == "integer" and not one.percent for one in (gold, given))
    rounds = "decimal" in (gold.form, given.form) and not exact
    right = formula.number(gold.share)
    return any(
        _near(right, formula.number(value), tolerance)
        or (rounds and _rounded(right, formula.number(value)))
        for value in values
    )


def _same_formula(gold: Formula, given: Answer, tolerance: float | None) -> bool:
    value, decimal = gold.constant(), isinstance(given, Number) and given.form == "decimal"
    answer = _as_formula(given)
    if answer is None:
        return False
    polar = {"trigonometry"} if gold.imaginary and answer.imaginary else set[str]()
    if not answer.work <= gold.work | polar:
        return False
    if len(gold.text) == 1 and gold.text.casefold() == answer.text.casefold():
        return True
    other = answer.constant()
    if (
        value is not None
        and other is not None
        and (_near(value, other, tolerance) or (decimal and _rounded(value, other)))
    ):
        return True
    return formula.equal(gold, answer)


def _value(answer: Answer) -> Any:
    """The value of a constant formula; None for anything else."""
    return answer.constant() if isinstance(answer, Formula) else None


def _rounded(right: Any, given: Any) -> bool:
    """Compare two numbers to six decimal places, tiny ones to six digits."""
    difference, larger = abs(right - given), max(abs(right), abs(given))
    if larger * 10**5 < 1:
        return bool(difference * 10**_PLACES <= larger)
    return bool(difference * 2 * 10**_PLACES <= 1)


def _near(right: Any, given: Any, tolerance: float | None) -> bool:
    if tolerance is None or given is None:
        return False
    return bool(abs(right - given) <= tolerance * (abs(right) or 1))


def _same_several(gold: Several, given: Answer) -> bool:
    if isinstance(given, Region):
        return _same_region(_region(gold), given)
    if not isinstance(given, Several):
        return len(gold.items) == 1 and gold.opening == "⦃" and _same(gold.items[0], given)
    if any(map(_names, (*gold.items, *given.items))):
        return _same_names(gold, given)
    one, two = gold.opening, given.opening
    if one in ",∨" or two in ",∨" or one == two == "⦃":
        if not {one, two} <= {*",∨⦃("}:
            return False
        if one == "(":
            return _in_order(gold.items, given.items)
        return _in_any_order(gold.items, given.items, once="⦃" in (one, two))
    vectors = {one + gold.closing, two + given.closing} <= {"()", "⟨⟩"}
    if not vectors and (one, gold.closing) != (two, given.closing):
        return _same_region(_region(gold), _region(given))
    return _in_order(gold.items, given.items)


def _same_item(one: Answer, other: Answer) -> bool:
    """Compare two values of lists, whose units must agree: 3 red and 4 blue."""
    if isinstance(one, Number) and isinstance(other, Number) and one.unit and other.unit:
        return one.unit == other.unit and _same(one, other)
    return _same(one, other)


def _in_order(gold: Sequence[Answer], given: Sequence[Answer]) -> bool:
    return len(gold) == len(given) and all(map(_same_item, gold, given))


def _in_any_order(gold: Sequence[Answer], given: Sequence[Answer], *, once: bool) -> bool:
    """Compare two lists in any order. once: repeated values count once, as in a set."""
    remaining = list(given)
    for one in gold:
        place = next((n for n, two in enumerate(remaining) if _same_item(one, two)), None)
        if place is None:
            if not (once and any(_same_item(one, two) for two in given)):
                return False
        else:
            del remaining[place]
    return all(once and any(_same_item(one, two) for one in gold) for two in remaining)


def _same_names(gold: Several, given: Several) -> bool:
    """Compare the values of several names, in order if one side has no names."""
    named = [{item.name: item.value for item in one.items if _names(item)} for one in (gold, given)]
    complete = [len(one) == len(side.items) for one, side in zip(named, (gold, given), strict=True)]
    if all(complete):
        return named[0].keys() == named[1].keys() and all(
            _same(value, named[1][name]) for name, value in named[0].items()
        )
    if all(named) or not any(complete):
        return _in_order(gold.items, given.items)
    bare = [[item.value if _names(item) else item for item in one.items] for one in (gold, given)]
    return "⦃" not in (gold.opening, given.opening) and _in_order(*bare)


def _same_relation(gold: Relation, given: Relation) -> bool:
    """Compare equations up to a factor, and chains of inequalities side by side."""
    sides = [[_as_formula(parse(side, 1)) for side in one.sides] for one in (gold, given)]
    if not all(map(all, sides)):
        alike = [*map(squeezed, gold.sides)] == [*map(squeezed, given.sides)]
        return alike and gold.signs == given.signs
    ways = [(given.sides, given.signs), (given.sides[::-1], given.signs.translate(_FLIPPED)[::-1])]
    for others, signs in ways:
        if signs == gold.signs and len(others) == len(gold.sides):
            pairs = zip(gold.sides, others, strict=True)
            if all(_same_difference(one, "0", other, "0") for one, other in pairs):
                return True
            factor = signs in "=≠"
            if len(signs) == 1 and _same_difference(*gold.sides, *others, ratio=factor):
                return True
    return False


def _same_difference(one: str, two: str, three: str, four: str, *, ratio: bool = False) -> bool:
    try:
        left, right = formula.read(f"({one})-({two})"), formula.read(f"({three})-({four})")
    except Unreadable:
        return False
    return formula.equal(left, right, ratio=ratio)


def _as_formula(answer: Answer) -> Formula | None:
    if isinstance(answer, Number):
        value = formula.number(answer.share)
        return Formula(lambda _: value)
    return answer if isinstance(answer, Formula) else None


def _region(answer: Answer, *, point: bool = False) -> Region | None:
    """An interval in brackets as a region; with point, also a number or a set of numbers."""
    if isinstance(answer, Region):
        return answer
    if point and (end := _as_formula(answer)):
        return Region(((end, True, end, True),))
    if not isinstance(answer, Several):
        return None
    ends = [end for item in answer.items if (end := _as_formula(item))]
    if len(ends) < len(answer.items):
        return None
    if answer.opening == "⦃":
        return Region(tuple((end, True, end, True) for end in ends))
    if answer.opening not in "([" or answer.closing not in ")]" or len(ends) != 2:
        return None
    low, high = ends
    if not low.names and not high.names and not _place(low) < _place(high):
        return None
    finite = [abs(_place(end)) != float("inf") for end in ends]
    return Region(
        ((low, answer.opening == "[" and finite[0], high, answer.closing == "]" and finite[1]),)
    )


def _place(end: Formula) -> float:
    try:
        value = end.at(0)
        return float("nan" if value is None else value.real)
    except (LostTerm, OverflowError):
        return float("nan")


def _joined(regions: Sequence[Region]) -> Region:
    return Region(tuple(part for region in regions for part in region.parts))


def _intersection(regions: Sequence[Region]) -> Region:
    parts = regions[0].parts
    for region in regions[1:]:
        pairs = [(one, two) for one in parts for two in region.parts][: _MOST_ITEMS**2]
        ends = [
            (
                max(pair, key=lambda part: (_place(part[0]), not part[1])),
                min(pair, key=lambda part: (_place(part[2]), part[3])),
            )
            for pair in pairs
        ]
        parts = tuple(
            (low[0], low[1], high[2], high[3])
            for low, high in ends
            if _place(low[0]) < _place(high[2])
        )
    return Region(parts)


def _same_region(gold: Region | None, given: Region | None) -> bool:
    if gold is None or given is None or len(gold.parts) != len(given.parts):
        return False
    ordered = (
        sorted(one.parts, key=lambda part: (_place(part[0]), _place(part[2])))
        for one in (gold, given)
    )
    return all(
        (one[1], one[3]) == (two[1], two[3])
        and _same_formula(one[0], two[0], None)
        and _same_formula(one[2], two[2], None)
        for one, two in zip(*ordered, strict=True)
    )


_CALCULUS = re.compile(r"\\(?:sum|prod|int|lim|iint|det)(?![a-z])|\\begin\s*\{vmatrix\}")


def _worked_out(text: str) -> Answer:
    """Read the known answer, with its sums, integrals, limits and determinants evaluated."""
    if not _CALCULUS.search(text):
        return parse(text)
    from latex2sympy2_extended import latex2sympy  # noqa: PLC0415  # pyright: ignore
    from sympy import latex  # noqa: PLC0415  # pyright: ignore

    try:
        value = cast(Any, latex2sympy(text, is_real=None)).doit()
        answer = parse(plain(cast(str, latex(value))))
    except Exception:  # whatever the library cannot read is compared as text
        return Text(text)
    index = re.search(r"_\s*\{\s*i\s*=", text)  # an index, and not the imaginary unit
    return Text(text) if index and isinstance(answer, Formula) and answer.imaginary else answer
