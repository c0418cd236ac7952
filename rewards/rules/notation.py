r"""One notation for the many ways to write an answer.

`plain` writes signs for commands (`\\leq` is ≤, `\\{` is ⦃), upright letters and functions as the
usual ones, numbers in digits, and no layout. The result consists of formulas
(`keel.rewards.rules.formula`) between the signs that `keel.rewards.rules.maths` splits at.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from keel.rewards.text import raised

_SIGNS = str.maketrans(
    {
        **{"−": "-", "–": "-", "⁄": "/", "∕": "/", "÷": "/", "×": "*", "·": "*", "⋅": "*"},
        **{"°": "^\\circ ", "π": "\\pi ", "\u200b": "", "≅": "≈", "。": "."},
    }
)
_CHARACTERS = {
    **{
        "≤": "le leq leqslant leqq",
        "≥": "ge geq geqslant geqq",
        "≠": "ne neq",
        "<": "lt",
        ">": "gt",
    },
    **{"≈": "approx simeq", "∪": "cup bigcup", "∩": "cap", "∖": "setminus backslash smallsetminus"},
    **{"∈": "in", "±": "pm", "∓": "mp", "∞": "infty infinity", "∅": "emptyset varnothing"},
    **{"∣": "mid", "⟨": "langle", "⟩": "rangle", "∧": "land wedge", "∨": "lor vee", "%": "%"},
    **{
        "→": "to rightarrow implies Rightarrow",
        "|": "lvert rvert vert",
        "/": "div",
        "; ": "quad qquad",
    },
}
_COMMANDS = {name: sign for sign, names in _CHARACTERS.items() for name in names.split()}
_COMMANDS |= {"{": "⦃", "lbrace": "⦃", "}": "⦄", "rbrace": "⦄", "lg": "\\log", "tg": "\\tan"}
_COMMANDS |= {"dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac", "dbinom": "\\binom"}
_COMMANDS |= {"cdot": "*", "times": "*", "ast": "*", "imath": "i", "degree": "^\\circ "}
_COMMANDS |= {"dots": "\\ldots", "cdots": "\\ldots", "dotsc": "\\ldots"}
_LAYOUT = "$ ! left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle limits"
_COMMANDS |= dict.fromkeys(_LAYOUT.split(), "") | dict.fromkeys(",;: >", " ")
_COMMAND = re.compile(r"\\([A-Za-z]+)[ \t]*|\\([^A-Za-z])")
_UPRIGHT = re.compile(
    r"\\(?:mathrm|text(?:rm|bf|it|normal)?|rm|operatorname\*?|mathit|mathsf|mbox)\s*\{([^{}]*)\}"
)
_FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan|cot)h?|sec|csc|ln|log|lg|exp|max|min|gcd|lcm|det")
_GROUPED = re.compile(
    r"(?<![\w.,])\d{1,3}(?:(?:\{,\}|,?\\!\s*|\\[,;: ]|[ ~\u00a0\u2009\u202f])\s?\d{3}"
    r"|(?:,\\!\s*|\{,\})\d{3})+(?!\w|[.,]?\d)"
    r"|(?<![\w.,])\d{1,3}(?:,\d{3})+(?=(?:\.\d+)?(?:[ ~]|\\[,;: ])*(?!\\text\s*\{\s*(?:and|or)\b)"
    r"(?:\\(?:text|mathrm)\b|(?<=[ ~])(?!(?:and|or)\b)[A-Za-z]))"
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
SIGNED_WORD = re.compile(
    r"(?:\b(?:negative|minus)\s+|\\text\s*\{\s*(?:negative|minus)\s*\}\s*)(?=[\d\\.])",
    re.IGNORECASE,
)
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
_RATIO = re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)")
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


_LETTERS = re.compile(r"[^\W\d_]{2}")
_UNUSUAL = re.compile(r"[^\W\d_]{2}|[${%*(=>.]")
_SPELLINGS = {"**": "^", "ℝ": "\\mathbb{R}", "...": "\\ldots ", "=>": "→", ">=": "≥", "<=": "≤"}


def plain(text: str) -> str:
    """Write an answer in one notation: signs for commands, upright letters as the usual ones, and
    numbers in digits."""
    vulgar = _VULGAR.sub(lambda match: f" {unicodedata.normalize('NFKC', match[0])}", text)
    text = unicodedata.normalize("NFKC", raised(vulgar)).translate(_SIGNS).strip()
    if _VECTORS.search(text):  # two products
        text = text.replace("\\times", "\\cross")
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    if _LETTERS.search(text):
        text = _MANY.sub(_counted, SIGNED_WORD.sub("-", _ORDINAL.sub("", text)))
        text = _RATIO.sub(":", _LABEL.sub("", _COLOR.sub("", text)))
    if "\\" in text or not text.isascii() or _UNUSUAL.search(text):
        text = _PERCENT.sub("%", _MONEY.sub("", text))
        text = _REPEATING.sub(_repeating, text.replace("{:}", ":").replace("~", " "))
        if _LETTERS.search(text):
            text = _UPRIGHT.sub(_upright, _CHOOSE.sub(r"\\binom{\1}{\2}", text))
            text = _COMPOUND.sub(r"\1, ", text)
        text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text)
        text = _DEGREES.sub(r"\1", _COMMAND.sub(_sign, text)).replace("$", "")
        text = _SHORT_FRACTION.sub(_braced, _SHORT_FRACTION.sub(_braced, text))
        if _LETTERS.search(text):
            text = _CONJUNCTION.sub(lambda match: "," if match[1] == "and" else "¦", text)
            text = _BARE_NAME.sub(lambda match: _COMMANDS.get(match[1], f"\\{match[1]} "), text)
        for spelling, sign in _SPELLINGS.items():
            text = text.replace(spelling, sign)
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
        return ", " if word == "and" else " ¦ "
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
        return rf"\text{{{joined[1]}}}{' ¦ ' if joined[2] == 'or' else ', '}"
    return rf"\text{{{content}}}"


_JOINED = re.compile(r"(.*[^\s,;])(?:\s*[,;]|[\s,;]+(and|or))")
_NUMERALS = "two three four five six seven eight nine ten eleven twelve"
_BASES = {word: str(base) for base, word in enumerate(_NUMERALS.split(), 2)}


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


def squeezed(text: str) -> str:
    """A text in plain notation without white space and needless braces, for comparing texts."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s|\{(?=\w\})|(?<=\{\w)\}", "", text)
    words = "\\" not in text and re.search(r"[^\W\d_]{2}", text)
    return text.casefold() if words else text
