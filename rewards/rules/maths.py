r"""Compares an answer with the right one by value, so that `\frac12`, `1/2` and `0.5` are equal.

Both texts go through the same steps. `normalize_notation` normalizes the notation. `_parse` reads
the text as a number, formula, list, set, region or relation, or returns it unchanged if it cannot
read all of it. `_same_answer` then compares the two results. Numbers are stored as exact fractions,
and `keel.rewards.rules.formula` evaluates formulas. Text that could not be parsed equals only the
same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeGuard

from keel.rewards.rules import formula, statements
from keel.rewards.rules.formula import INFINITE, MINUS_INFINITE, Formula, LostTerm, Unreadable
from keel.rewards.rules.statements import normalize_notation, remove_spaces
from keel.rewards.text import BOXED, marked_answer

_MAX_CHARACTERS = 2_048
_MOST_ITEMS = 64
_PLACES = 6  # decimal places that are compared, or as many digits below 1e-5


def maths_verifier(right: str, *, tolerance: float | None = None) -> Callable[[str], bool]:
    r"""Build a verifier that compares an answer with `right` by value. Numbers, formulas, sets and
    intervals may be written in any form. Words are compared as text.

    All of the text that a completion marks with `\boxed{}` must be the answer. Several boxes form a
    list, unless words between them correct an earlier one. In a completion without marks, the last
    statement counts, and it must assert a single answer.

    If `right` is a number, the answer must be a number too: `70 - 67` is not accepted for 3, but
    `i^2` is accepted for -1. Decimals are compared to six places, or to six digits below 1e-5. A
    unit or remark after a number is ignored. If `right` has a percent sign, 50 % equals both 50 and
    1/2. `tolerance` is relative to the right number, or absolute if that number is 0. Raises
    ValueError unless it is between 0 and 1.
    """
    if tolerance is not None and not (type(tolerance) is float and 0 < tolerance < 1):
        raise ValueError(f"tolerance = {tolerance!r} must be a number between 0 and 1")
    right = statements.strip_formatting(right)
    spelling, words = statements.normalize_spelling(right), statements.answer_words(right)
    longest = max(_MAX_CHARACTERS, 4 * len(right))
    gold = _readings(right)

    def judge(answer: str) -> bool:
        number = None if words else _NUMBER.fullmatch(answer)
        if number and isinstance(gold[0], _Number):
            return _same_number(gold[0], _parse_number(number), tolerance)
        answer = statements.strip_formatting(answer)
        if not answer or words or statements.normalize_spelling(answer) == spelling:
            return bool(answer) and statements.normalize_spelling(answer) == spelling
        readings = _readings(answer)
        return any(_same_answer(one, other, tolerance) for one in gold for other in readings)

    def verify(text: str) -> bool:
        text = text.replace("\\fbox{", BOXED)
        marked = marked_answer(text)
        if marked is None and BOXED in text:  # it was never closed
            return False
        boxes = [text] if marked is None else statements.final_boxes(text, marked)
        if not boxes or sum(map(len, boxes)) > longest:
            return False
        if marked is not None:
            inside = text[text.find(BOXED) : text.rfind(BOXED)]
            separator = " or " if re.search(r"\bor\b", inside) else ", "
            return all(map(judge, boxes)) or (len(boxes) > 1 and judge(separator.join(boxes)))
        if words:
            return statements.asserts_words(text, words)
        return any(map(judge, statements.stated_answers(text, exclaims="!" in right)))

    return verify


_CALCULUS = re.compile(r"\\(?:sum|prod|o?i{0,2}int|lim|det)(?![A-Za-z])|\\begin\s*\{vmatrix\}")


def calculus_in(right: str) -> str:
    r"""Return the first sum, integral, limit or determinant in a right answer that keeps it from
    being compared by value, such as `\sum`, or "" if there is none."""
    found = _CALCULUS.search(right)
    reading = _readings(statements.strip_formatting(right))[0] if found else ""
    named = _is_named(reading) and not isinstance(reading.value, str)  # \det A = 5
    return found[0] if found and not named else ""


def _readings(text: str) -> list[_Answer]:
    """Parse an answer. A text such as `100,200` is read both as a number and as a list."""
    text = normalize_notation(text)
    spaced = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", ", ", text)
    return [_parse(one) for one in dict.fromkeys((text, spaced))]


# --- Reading ---


class _Number(NamedTuple):
    """A rational number. `form` is how it was written: integer, decimal, fraction, ratio or
    scientific. `lowest` is set for fractions in lowest terms. `unit` holds any words after the
    number, in the singular."""

    value: Fraction
    form: str = "integer"
    lowest: bool = True
    percent: bool = False
    unit: str = ""

    @property
    def share(self) -> Fraction:
        return self.value / 100 if self.percent else self.value


class _Collection(NamedTuple):
    """Several values in brackets. `opening` is the opening bracket, "," for a list without
    brackets, "∨" for alternatives, or "matrix" for the rows of a matrix."""

    opening: str
    closing: str
    items: tuple[_Answer, ...]


_Cut = tuple[float, bool, Formula]  # position, whether the cut lies just after it, formula


class _Region(NamedTuple):
    """A union of intervals on the real line: from the first cut to the second, from the third to
    the fourth, and so on."""

    cuts: tuple[_Cut, ...]


class _Relation(NamedTuple):
    """An equation or inequality. `signs` are the signs between its `sides`. `name` is the first
    side if that is a name, such as `x` or `f(x)`. `value` is the last side."""

    sides: tuple[str, ...]
    signs: str
    name: str
    value: _Answer


_Answer = _Number | Formula | _Collection | _Region | _Relation | str  # a text if it was not parsed

_FRACTION = (
    r"\\frac\s?\{\s*(?P<minus>-?)(?P<top>\d{1,4000})\s*\}"
    r"\s?\{\s*(?P<under>-?)(?P<bottom>\d{1,4000})\s*\}"
)
_NUMBER = re.compile(
    r"\s*(?P<sign>[+-]?)\s*(?:(?=\.?\d)(?P<whole>\d{1,3}(?:,\d{3})+|\d{1,4000})?"
    r"(?P<decimals>\.\d{0,4000})?"
    r"(?:[eE](?P<exponent>[+-]?\d{1,4}))?(?:\s?\*\s?10\s?\^\s?\{?\s*(?P<ten>[+-]?\d{1,4})\s*\}?)?"
    rf"|(?P<mixed>\d{{1,40}})?\s?{_FRACTION}"
    r"|(?P<left>\d{1,4000})\s?(?P<over>[/:])\s?(?P<right>\d{1,4000}))"
    r"\s*(?P<percent>%?)(?:\s?\^\s?(?:\\circ|\{\s?\\circ\s?\}))?\.?\s*"
)


def _parse_number(match: re.Match[str]) -> _Number | str:
    sign = (-1) ** [match["sign"], match["minus"], match["under"]].count("-")
    if top := match["top"] or match["left"]:
        bottom = int(match["bottom"] or match["right"])
        if not bottom:
            return match[0]
        part, ratio = Fraction(int(top), bottom), match["over"] == ":"
        lowest = part.denominator == bottom and (bottom > 1 or ratio)
        lowest = lowest and (not match["mixed"] or part < 1)
        value = sign * (int(match["mixed"] or 0) + part)
        return _Number(value, "ratio" if ratio else "fraction", lowest, bool(match["percent"]))
    decimals, exponent = (match["decimals"] or "").rstrip("."), int(match["exponent"] or 0)
    form = "decimal" if decimals or exponent < 0 else "integer"
    if match["ten"]:
        exponent, form = exponent + int(match["ten"]), "scientific"
    value = Fraction((match["whole"] or "0").replace(",", "") + decimals) * Fraction(10) ** exponent
    return _Number(sign * value, form, percent=bool(match["percent"]))


_BEGIN = re.compile(
    r"\\begin\s*\{([pbB]?matrix|array|cases|aligned)\}(?:\s*\{[lcr|]*\})?(.*)\\end\s*\{\1\}", re.S
)


def _parse(text: str, depth: int = 0) -> _Answer:
    """Parse an answer that `normalize_notation` has normalized. Returns the text unchanged if it
    can't be parsed."""
    text, depth = text.strip(), depth + 1
    if match := _NUMBER.fullmatch(text):
        return _parse_number(match)
    if not text or depth > 7:
        return text
    if constant := _CONSTANTS.get(text.replace(" ", "").removeprefix("+")):
        return constant
    if match := _BEGIN.fullmatch(text):
        return _parse_matrix(match, depth)
    text = text if "\\begin" in text else text.replace("\\\\", ";")
    if ("±" in text or "∓" in text) and not re.search("[,;¦∧∨⦃⟨]", text):
        signs = (text.translate({0xB1: one, 0x2213: two}) for one, two in ("+-", "-+"))
        return _Collection(",", "", tuple(_value_of_named(_parse(sign, depth)) for sign in signs))
    for marks, reader in _READERS.items() if _MARK.search(text) else ():
        parts, signs = _split(text, marks)
        if signs:
            return reader(text, parts, signs, depth)
    if text[0] in _OPENING and (answer := _parse_brackets(text, depth)):
        return answer
    return _parse_quantity(text, depth)


_OPENING, _CLOSING = "([{⦃⟨", ")]}⦄⟩"


def _split(text: str, marks: str) -> tuple[list[str], str]:
    """Split a text at the characters in `marks`, except inside brackets. Returns the parts and the
    characters between them."""
    parts, signs, depth, start = list[str](), "", 0, 0
    for match in re.finditer(rf"[(\[{{⦃⟨)\]}}⦄⟩{marks}]", text):
        if match[0] in _OPENING:
            depth += 1
        elif match[0] in _CLOSING:
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            signs += match[0]
            start = match.end()
    return [*parts, text[start:].strip()], signs


def _parse_matrix(match: re.Match[str], depth: int) -> _Answer:
    if match[1] in ("cases", "aligned"):
        return _parse(match[2].replace("\\\\", ";").replace("&", " "), depth)
    rows = [row.split("&") for row in match[2].strip().removesuffix("\\\\").split("\\\\")]
    lines = [_Collection("row", "", tuple(_parse(cell, depth) for cell in row)) for row in rows]
    return _Collection("matrix", "", tuple(lines))


def _parse_list(text: str, parts: list[str], marks: str, depth: int) -> _Answer:
    parts = [part for part in parts if part]
    if not 1 < len(parts) <= _MOST_ITEMS:
        return _parse(parts[0], depth) if len(parts) == 1 else text
    items = _parse_items(parts, depth)
    regions = [
        region for item in items if (region := _to_region(_value_of_named(item), point=True))
    ]
    if len(regions) == len(items) and any(isinstance(item, _Region) for item in items):
        rule = any if re.search("[∨¦]", marks) else all
        if region := _combine_regions(rule, regions):
            return region
    if re.search("[∧∨]", marks) and not any(isinstance(item, _Relation) for item in items):
        return text  # of logic, not of answers
    if any(isinstance(item, str) and not item.startswith("\\text") for item in items):
        return text
    names = [item.name if isinstance(item, _Relation) else "" for item in items]
    if names[0] and (not any(names[1:]) or len(set(names)) == 1):  # x = 1, 2 and x = 1, x = 2
        items = [item.value if isinstance(item, _Relation) else item for item in items]
    return _Collection("∨" if set(marks) <= {*"∨¦"} else ",", "", tuple(items))


def _parse_items(parts: Sequence[str], depth: int) -> list[_Answer]:
    """Parse the items of a list. An item with ± counts as two values, so 0, ±4 has three items."""
    items: list[_Answer] = []
    for part in parts:
        item = _parse(part, depth)
        signed = isinstance(item, _Collection) and item.opening == "," and re.search("[±∓]", part)
        items += item.items if signed and isinstance(item, _Collection) else [item]
    return items


def _is_named(answer: _Answer) -> TypeGuard[_Relation]:
    return isinstance(answer, _Relation) and bool(answer.name)


def _value_of_named(answer: _Answer) -> _Answer:
    return answer.value if _is_named(answer) else answer


def _parse_union(text: str, parts: list[str], marks: str, depth: int) -> _Answer:
    regions = [region for part in parts if (region := _to_region(_parse(part, depth), point=True))]
    if len(regions) < len(parts) or len(set(marks)) > 1:
        return text
    if marks[0] == "∖":
        return _combine_regions(lambda inside: inside[0] and not any(inside[1:]), regions) or text
    return _combine_regions(any, regions) or _Collection("∪", "", tuple(regions))


def _parse_conclusion(text: str, parts: list[str], marks: str, depth: int) -> _Answer:
    if marks[0] == "∈":
        concludes = len(parts) == 2 and _NAME.fullmatch(parts[0])
    else:
        concludes = re.search("[=<>≤≥]", parts[0]) or _constant(parts[0]) is not None
    return _parse(parts[-1], depth) if concludes else text


_NAME = re.compile(
    r"(?![ei]$|\\pi\s*$)(?:\\text\{[^{}]*\}|[A-Za-z]|[A-Z]{2,6}|\|[A-Z]{2}\|"
    r"|\\(?:angle|triangle)?\s?[A-Za-z]+"
    r"|\\(?:overline|overrightarrow|vec|hat|bar|mathbf|mathcal|dot)\s*\{\w+\}"
    r"|\\frac\s*\{\s*d\w*\s*\}\s*\{\s*d\w\s*\})"
    r"(?:_\w|_\{[^{}]*\})?'{0,3}(?:\^\{-1\})?(?:\([^()=]*\))?"
)
_FLIPPED = str.maketrans("<>≤≥", "><≥≤")


def _parse_relation(text: str, parts: list[str], signs: str, depth: int) -> _Answer:
    if signs[0] in "=≈" and not parts[0]:
        return _parse(text[1:], depth)
    if not all(parts):
        return text
    sides: tuple[str, ...] = tuple(parts)
    value = _parse(parts[-1], depth)
    if not set(signs) <= {*"=≈"}:
        return _parse_inequality(sides, signs) or _Relation(sides, signs, "", value)
    constants = [c for side in sides if (c := _constant(side)) is not None]
    if any(abs(one - constants[-1]) > abs(constants[-1]) / 100 for one in constants):
        return text  # 7 = 3.14
    names = re.fullmatch(r"\(([\w\s,]+)\)", sides[0])
    if names and isinstance(value, _Collection) and names[1].count(",") == len(value.items) - 1:
        pairs = zip(names[1].split(","), value.items, strict=True)
        named = (_Relation(sides, signs, name.strip(), item) for name, item in pairs)
        return _Collection(",", "", tuple(named))
    is_name = _NAME.fullmatch(sides[0]) or isinstance(value, _Region | _Collection)
    is_name = is_name or len(sides) > 2 or "≈" in signs
    return _Relation(sides, signs, parts[0] if is_name else "", value)


def _constant(text: str) -> Any:
    answer = _as_formula(_parse(text, 5))
    return answer.constant() if answer else None


_DISTANCE = re.compile(r"\|\s*(\d*)\s*[A-Za-z]\s*([+-][^|]*)?\|")


def _parse_inequality(sides: tuple[str, ...], signs: str) -> _Region | None:
    r"""Parse an inequality in one variable, such as `1 < x < 2`, `x \ne 3` or `|2x - 1| < 3`."""
    if signs[0] in ">≥":
        sides, signs = sides[::-1], signs.translate(_FLIPPED)[::-1]
    if signs not in ("≠", "<", "≤", "<<", "<≤", "≤<", "≤≤"):
        return None
    values = [_as_formula(_parse(side, 5)) for side in sides]
    place = next((n for n, side in enumerate(sides) if _NAME.fullmatch(side)), -1)
    if len(sides) == 3:
        low, _, high = values
        if place != 1 or low is None or high is None:
            return None
        return _interval(low, high, "(["[signs[0] == "≤"] + ")]"[signs[1] == "≤"])
    closed = signs == "≤"
    inside, outside = (_DISTANCE.fullmatch(side) for side in (sides[0], sides[-1]))
    match = inside or outside
    if match is None and place >= 0 and (end := values[1 - place]):
        if signs == "≠":
            return _complement(_interval(end, end, "[]"))
        ends = (end, INFINITE) if place else (MINUS_INFINITE, end)
        return _interval(*ends, "[]" if closed else "()")
    if match is None or (inside and outside) or signs == "≠":
        return None
    radius, shift, factor = sides[inside is not None], match[2] or "", match[1] or "1"
    distances = [rf"\frac{{{sign}({radius})-(0{shift})}}{{{factor}}}" for sign in "-+"]
    low, high = (_as_formula(_parse(end, 5)) for end in distances)
    if not low or not high or low.imaginary or not _end_position(low) < _end_position(high):
        return None
    region = _interval(low, high, "[]" if closed == bool(inside) else "()")
    return region if inside else _complement(region)


def _interval(low: Formula, high: Formula, brackets: str) -> _Region:
    first, last = _end_position(low), _end_position(high)
    after_first = brackets[0] == "(" and first != float("-inf")
    after_last = brackets[1] == "]" and last != float("inf")
    return _Region(((first, after_first, low), (last, after_last, high)))


def _end_position(end: Formula) -> float:
    try:
        value = end.evaluate(0)
        return float("nan" if value is None else value.real)
    except (LostTerm, OverflowError):
        return float("nan")


def _complement(region: _Region) -> _Region:
    low, high = _interval(MINUS_INFINITE, INFINITE, "()").cuts
    return _Region((low, *region.cuts, high))


def _combine_regions(
    rule: Callable[[list[bool]], bool], regions: Sequence[_Region]
) -> _Region | None:
    """Combine several regions of the number line into one. A number is in the result if `rule`
    returns True for the regions that contain it. Returns None if an endpoint is symbolic or there
    are too many endpoints."""
    cuts = sorted((cut for region in regions for cut in region.cuts), key=lambda cut: cut[:2])
    if len(cuts) > 2 * _MOST_ITEMS or any(cut[2].names for cut in cuts):
        return None
    changes: list[_Cut] = []
    for cut in cuts:
        inside = [sum(one[:2] <= cut[:2] for one in region.cuts) % 2 == 1 for region in regions]
        if rule(inside) != (len(changes) % 2 == 1):
            changes.append(cut)
    return _Region(tuple(changes))


_READERS: dict[str, Callable[[str, list[str], str, int], _Answer]] = {
    ",;¦∧∨": _parse_list,
    "∪∖": _parse_union,
    "∈": _parse_conclusion,
    "→": _parse_conclusion,
    "=<>≤≥≠≈": _parse_relation,
}
_MARK = re.compile(f"[{''.join(_READERS)}]")
_CONSTANTS: dict[str, _Answer] = {
    "∞": INFINITE,
    "-∞": MINUS_INFINITE,
    "∅": _Collection("⦃", "⦄", ()),
    "\\mathbb{R}": _interval(MINUS_INFINITE, INFINITE, "()"),
}
_SUCH_THAT = re.compile(r"(?s)\s*[A-Za-z]\s*(?:∈\s*\\mathbb\s*\{R\}\s*)?[∣|:](.*)")


def _parse_brackets(text: str, depth: int) -> _Answer | None:
    level = 0
    for place, character in enumerate(text, 1):
        level += (character in _OPENING) - (character in _CLOSING)
        if (level == 0) != (place == len(text)):
            return None
    inside = text[1:-1].strip()
    if text[0] == "⦃" and (match := _SUCH_THAT.fullmatch(inside)):
        answer = _parse(match[1], depth)
        return answer if isinstance(answer, _Region) else text
    parts, marks = _split(inside, ",;")
    if not marks and text[0] in "([{":
        return _parse(inside, depth) if text[0] + text[-1] in ("()", "{}") else None
    items = _parse_items(parts if inside else [], depth)
    if len(parts) > _MOST_ITEMS or any(isinstance(item, str) for item in items):
        return text
    return _Collection(text[0].replace("{", "⦃"), text[-1], tuple(items))


_WORD = r"[A-Za-z][A-Za-z.'-]*"
_TRAILING = re.compile(
    r"(?s)(?P<value>.*[\w)}\]%|!])\s*(?:\\text\{(?P<text>[^{}]*)\}|(?<=[\d)}%])\s*(?P<bare>"
    rf"{_WORD}(?:\s{_WORD}){{0,3}}(?:/{_WORD})?))(?P<power>\s*\^\s*\{{?-?\d\}}?)?"
)
_LETTERS = r"[A-Za-z]{1,3}(?:\^\{?[23]\}?)?"
_SHORT = re.compile(
    r"(?P<number>[+-]?[\d.,]+)(?:\s+|(?=[ckm]?m\b|kg\b|ft\b))"
    rf"(?P<unit>{_LETTERS}(?:\s?/\s?{_LETTERS})?)"
)
_SHORT_UNITS = """
m s g h l j n w v k c f cm mm km kg mg ml ft in yd mi lb oz hr min sec mph rpm kmh rad deg am pm hz
pa kpa nm
"""
_NOT_UNITS = statements.NOT_UNITS | {*statements.MEANINGS.split()}
_UNIT_NAMES = """
mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre;
in inch inche; ft foot feet; yd yard; mi mile; g gram; kg kilogram; s sec second; min minute;
h hr hour; day; week; month; year; dollar; cent; am a.m; pm p.m
"""
_UNITS = {name: names.split()[0] for names in _UNIT_NAMES.split(";") for name in names.split()}
_DENIED = re.compile(
    r"(?i)n['’]t\b(?!\s+matter)|\b(?:wrong|false|incorrect|invalid|except|never)\b|\bnot\b(?!\s+"
    r"(?!it|that|this|the|right|correct|true|a|an|sure|certain|possible|valid|so|be)[a-z]{3,})"
)


def _parse_quantity(text: str, depth: int) -> _Answer:
    if (match := _SHORT.fullmatch(text)) and (number := _NUMBER.fullmatch(match["number"])):
        value = _parse_number(number)
        if isinstance(value, _Number) and {*_SHORT_UNITS.split()}.issuperset(
            re.findall(r"[a-z]+", match["unit"].lower())
        ):
            return value._replace(unit=_normalize_unit(match["unit"]))
    try:
        return formula.parse_formula(text)
    except Unreadable:
        pass
    match = _TRAILING.fullmatch(text)
    if match is None:
        return text
    words = (match["bare"] if match["text"] is None else match["text"]).strip()
    value = _parse(match["value"], depth)
    if words[:1] in ("(", ""):
        return text if _DENIED.search(words) else value
    is_unit = _NOT_UNITS.isdisjoint(re.findall(r"[a-z]+", words.lower()))
    is_unit = is_unit and (match["text"] is not None or len(words) > 2)
    if not is_unit and words.lower() not in _SHORT_UNITS.split():
        return text
    if isinstance(value, _Number):
        return (
            value
            if value.unit
            else value._replace(unit=_normalize_unit(words) + (match["power"] or ""))
        )
    return value if isinstance(value, Formula) and match["text"] is not None else text


def _normalize_unit(words: str) -> str:
    words = words.lower().strip(" .").removesuffix("s") or words
    return _UNITS.get(words, words)


# --- Comparison ---


def _same_answer(gold: _Answer, given: _Answer, tolerance: float | None = None) -> bool:
    if (
        isinstance(given, _Collection)
        and given.opening == "∨"
        and not isinstance(gold, _Collection)
    ):
        return all(_same_answer(gold, item) for item in given.items)  # 1/2 or 0.5
    if isinstance(gold, _Relation):
        if isinstance(given, _Relation) and not (gold.name and gold.name == given.name):
            return _same_relation(gold, given)
        given = given.value if isinstance(given, _Relation) else given
        return bool(gold.name) and _same_answer(gold.value, given, tolerance)
    if isinstance(given, _Relation) and set(given.signs) <= {*"=≈"}:
        if isinstance(gold, _Collection) and any(map(_is_named, gold.items)):
            return False
        before = given.signs.find("≈")
        if (
            before >= 0
            and isinstance(gold, Formula)
            and _same_answer(gold, _parse(given.sides[before], 1))
        ):
            return True
        return _same_answer(gold, given.value, tolerance)
    match gold:
        case _Number():
            return _same_number(gold, given, tolerance)
        case Formula():
            return _same_formula(gold, given, tolerance)
        case _Collection():
            return _same_several(gold, given)
        case _Region():
            return _same_region(gold, _to_region(given))
        case str():
            return isinstance(given, str) and remove_spaces(gold) == remove_spaces(given)


_PI = re.compile(r"-?(?:\d+(?:\.\d+)?)?\s?\\pi")
_EQUIVALENT_FORMS = {"ratio": "fraction", "fraction": "ratio", "scientific": "decimal"}


def _same_number(gold: _Number, given: _Answer, tolerance: float | None) -> bool:
    """Return whether an answer equals `gold` and is written as a number. Scientific notation is
    accepted only if `gold` is a decimal or uses scientific notation itself."""
    if isinstance(given, Formula):
        right = formula.number(gold.share)
        value = given.constant()
        if given.imaginary and not given.work:  # i^2
            return value is not None and formula.values_close(right, value)
        return bool(_PI.fullmatch(given.text)) and _within_tolerance(right, value, tolerance)
    if not isinstance(given, _Number):
        return False
    units = {gold.unit, given.unit}
    if len(units) > 1 and units <= {*_UNITS.values()}:
        return False
    if given.form in _EQUIVALENT_FORMS and given.form != gold.form:
        lowest = given.form == "fraction" and given.lowest
        if _EQUIVALENT_FORMS[given.form] != gold.form and not lowest:
            return False
    values = [given.share]
    if gold.percent and not given.percent:
        values.append(given.value / 100)
    exact = any(one.form == "integer" and not one.percent for one in (gold, given))
    rounds = "decimal" in (gold.form, given.form) and not exact
    if gold.share in values:
        return True
    right = formula.number(gold.share)
    return any(
        _within_tolerance(right, value, tolerance) or (rounds and _equal_when_rounded(right, value))
        for value in map(formula.number, values)
    )


def _same_formula(gold: Formula, given: _Answer, tolerance: float | None = None) -> bool:
    answer = _as_formula(given)
    if answer is None:
        return False
    if not answer.work <= gold.work:
        return False
    if len(gold.text) == 1 and gold.text.casefold() == answer.text.casefold():
        return True
    value, other = gold.constant(), answer.constant()
    decimal = isinstance(given, _Number) and given.form == "decimal"
    constants = value is not None and other is not None
    if constants and (
        _within_tolerance(value, other, tolerance)
        or (decimal and _equal_when_rounded(value, other))
    ):
        return True
    return formula.equal(gold, answer)


def _equal_when_rounded(right: Any, given: Any) -> bool:
    """Return whether two numbers agree to six decimal places, or to six significant digits if they
    are tiny."""
    larger = max(abs(right), abs(given))
    return bool(abs(right - given) * 10**_PLACES <= (larger if larger * 10**5 < 1 else 0.5))


def _within_tolerance(right: Any, given: Any, tolerance: float | None) -> bool:
    if tolerance is None or given is None:
        return False
    return bool(abs(right - given) <= tolerance * (abs(right) or 1))


def _same_several(gold: _Collection, given: _Answer) -> bool:
    if isinstance(given, _Region):
        return _same_region(_to_region(gold), given)
    if not isinstance(given, _Collection):
        return len(gold.items) == 1 and gold.opening == "⦃" and _same_answer(gold.items[0], given)
    if any(map(_is_named, (*gold.items, *given.items))):
        return _same_names(gold, given)
    one, two = gold.opening, given.opening
    if one in ",∨" or two in ",∨" or one == two == "⦃":
        if not {one, two} <= {*",∨⦃("}:
            return False
        if one == "(":
            return two == "," and _in_order(gold.items, given.items)
        return _in_any_order(gold.items, given.items, once="⦃" in (one, two))
    vectors = {one + gold.closing, two + given.closing} <= {"()", "⟨⟩"}
    if not vectors and (one, gold.closing) != (two, given.closing):
        return _same_region(_to_region(gold), _to_region(given))
    return _in_order(gold.items, given.items)


def _same_item(one: _Answer, other: _Answer) -> bool:
    """Compare two list items, including their units if both have one, as in `3 red`."""
    if isinstance(one, _Number) and isinstance(other, _Number) and one.unit and other.unit:
        return one.unit == other.unit and _same_answer(one, other)
    return _same_answer(one, other)


def _in_order(gold: Sequence[_Answer], given: Sequence[_Answer]) -> bool:
    return len(gold) == len(given) and all(map(_same_item, gold, given))


def _in_any_order(gold: Sequence[_Answer], given: Sequence[_Answer], *, once: bool) -> bool:
    """Compare two lists in any order. Duplicates are ignored if `once` is set."""
    remaining = list(given)
    for one in gold:
        place = next((n for n, two in enumerate(remaining) if _same_item(one, two)), None)
        if place is not None:
            del remaining[place]
        elif not (once and any(_same_item(one, two) for two in given)):
            return False
    return all(once and any(_same_item(one, two) for one in gold) for two in remaining)


def _same_names(gold: _Collection, given: _Collection) -> bool:
    """Return whether two lists assign the same values to the same variables. Values without names
    must be in the same order."""
    sides = gold.items, given.items
    named = [{item.name: item.value for item in side if _is_named(item)} for side in sides]
    if [*map(len, named)] == [*map(len, sides)]:
        values, others = named
        return values.keys() == others.keys() and all(
            _same_answer(values[n], others[n]) for n in values
        )
    bare = sides if all(named) else ([*map(_value_of_named, side)] for side in sides)
    return "⦃" not in gold.opening + given.opening and _in_order(*bare)


def _same_relation(gold: _Relation, given: _Relation) -> bool:
    sides = [_as_formula(_parse(side, 1)) for side in (*gold.sides, *given.sides)]
    if not all(sides):
        alike = [*map(remove_spaces, gold.sides)] == [*map(remove_spaces, given.sides)]
        return alike and gold.signs == given.signs
    ways = [(given.sides, given.signs), (given.sides[::-1], given.signs.translate(_FLIPPED)[::-1])]
    for others, signs in ways:
        if signs == gold.signs:
            one, other = (f"({sides[0]})-({sides[1]})" for sides in (gold.sides, others))
            if all(map(_equal, gold.sides, others)) or (
                len(signs) == 1 and _equal(one, other, ratio=signs in "=≠")
            ):
                return True
    return False


def _equal(one: str, other: str, *, ratio: bool = False) -> bool:
    try:
        return formula.equal(formula.parse_formula(one), formula.parse_formula(other), ratio=ratio)
    except Unreadable:
        return False


def _as_formula(answer: _Answer) -> Formula | None:
    if isinstance(answer, _Number):
        value = formula.number(answer.share)
        return Formula(lambda _: value)
    return answer if isinstance(answer, Formula) else None


def _to_region(answer: _Answer, *, point: bool = False) -> _Region | None:
    """Convert an interval to a region. If `point` is set, a number or a set of numbers is accepted
    too. Returns None for anything else."""
    if isinstance(answer, _Region):
        return answer
    if point and (end := _as_formula(answer)):
        return _interval(end, end, "[]")
    if not isinstance(answer, _Collection):
        return None
    ends = [end for item in answer.items if (end := _as_formula(item))]
    if len(ends) < len(answer.items):
        return None
    if answer.opening == "⦃":
        return _combine_regions(any, [_interval(end, end, "[]") for end in ends])
    if answer.opening not in "([" or answer.closing not in ")]" or len(ends) != 2:
        return None
    low, high = ends
    region = _interval(low, high, answer.opening + answer.closing)
    return region if low.names or high.names or _end_position(low) < _end_position(high) else None


def _same_region(gold: _Region | None, given: _Region | None) -> bool:
    if gold is None or given is None or len(gold.cuts) != len(given.cuts):
        return False
    pairs = zip(gold.cuts, given.cuts, strict=True)
    return all(one[1] == two[1] and _same_formula(one[2], two[2]) for one, two in pairs)
