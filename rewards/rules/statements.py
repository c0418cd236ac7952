r"""Finds the answer that a text states, and normalizes the notation of answers.

`final_boxes` returns the marked answers. If nothing in the text is marked, `stated_answers`
extracts a number or formula, and `asserts_words` compares words. A text with a negation, an
alternative or a question has no answer.

`normalize_notation` replaces LaTeX commands with single characters (`\leq` becomes ≤, `\{` becomes
⦃), writes letters, functions and numbers in a uniform way, and removes layout. Its result consists
of formulas (`keel.rewards.rules.formula`) and of the characters at which `keel.rewards.rules.maths`
splits an answer.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from keel.rewards.text import BOXED, marked_answers, normalise, rewrite_raised_digits

# --- Notation ---

_SIGNS = str.maketrans("−–⁄∕÷×·⋅≅。", "--///***≈.") | str.maketrans(
    {"°": "^\\circ ", "π": "\\pi ", "\u200b": "", "ℝ": "\\mathbb{R}"}
)
_CHARACTERS = """
≤ le leq leqslant leqq; ≥ ge geq geqslant geqq; ≠ ne neq; < lt; > gt; ≈ approx simeq; ∪ cup bigcup;
∩ cap; ∖ setminus backslash smallsetminus; ∈ in; ± pm; ∓ mp; ∞ infty infinity inf; % %; ∣ mid;
∅ emptyset varnothing; ⟨ langle; ⟩ rangle; ∧ land wedge; ∨ lor vee; | lvert rvert vert; / div;
→ to rightarrow implies Rightarrow; ⦃ { lbrace; ⦄ } rbrace; \\log lg; \\tan tg; * cdot times ast;
\\frac dfrac tfrac cfrac; \\binom dbinom; i imath; ^\\circ degree; \\ldots dots cdots dotsc
"""
_LAYOUT = "$ ! left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle limits"
_COMMANDS = {
    **{name: names.split()[0] for names in _CHARACTERS.split(";") for name in names.split()[1:]},
    **dict.fromkeys(_LAYOUT.split(), ""),
    **dict.fromkeys(",;: >", " "),
    **dict.fromkeys(("quad", "qquad"), "; "),
}
_GROUPED = re.compile(
    r"(?<![\w.,])\d{1,3}(?:(?:(?:\{,\}|,?\\!\s*|\\[,;: ]|[ ~\u00a0\u2009\u202f])\s?\d{3}"
    r"|(?:,\\!\s*|\{,\})\d{3})+(?!\w|[.,]?\d)"
    r"|(?:,\d{3})+(?=(?:\.\d+)?(?:[ ~]|\\[,;: ])*(?!\\text\s*\{\s*(?:and|or)\b)"
    r"(?:\\(?:text|mathrm)\b|(?<=[ ~])(?!(?:and|or)\b)[A-Za-z])))"
)
_UNUSUAL = re.compile(r"[^\W\d_]{2}|[\\${%*(=>.]|[^\x00-\x7f]")
_MIXED = re.compile(r"(?<![\w.,/^{}])(\d{1,15})[ ~]\s*(\d{1,15})/(\d{1,15})(?![\w/.]*\d)")
_FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan|cot)h?|sec|csc|ln|log|lg|exp|max|min|gcd|lcm|det")
_AFTER_VALUE = re.compile(r"[\d})](?:\s|\\[,;:! ]|~){0,4}\Z")
_JOINED = re.compile(r"(.*[^\s,;])(?:\s*[,;]|[\s,;]+(and|or))")
_SPELLINGS = {"**": "^", "...": "\\ldots ", "=>": "→", ">=": "≥", "<=": "≤", "$": ""}
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def normalize_notation(text: str) -> str:
    """Normalize the notation of an answer: replace LaTeX commands with single characters, drop font
    commands around letters, and write numbers such as "3 million" in digits."""
    text = re.sub("[¼-¾⅐-⅞]", lambda match: f" {unicodedata.normalize('NFKC', match[0])}", text)
    text = unicodedata.normalize("NFKC", rewrite_raised_digits(text)).translate(_SIGNS).strip()
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = text.replace("{:}", ":").replace("~", " ")
    if _UNUSUAL.search(text):
        if re.search(r"\\(?:vec|mathbf|overrightarrow|boldsymbol)(?![A-Za-z])", text):
            text = text.replace("\\times", "\\cross")  # there are two products of vectors
        for pattern, new in _RULES:
            text = pattern.sub(new, text)
        for spelling, sign in _SPELLINGS.items():
            text = text.replace(spelling, sign)
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text).strip(" $;,")


def _replace_command(match: re.Match[str]) -> str:
    sign = _COMMANDS.get(match[1] or match[2], match[0])
    return f"{sign} " if "\\" in sign and sign != match[0] else sign


def _replace_upright(match: re.Match[str]) -> str:
    content = match[1].strip()
    word = content.strip(" ,;.").lower()
    if word in ("and", "or"):
        return ", " if word == "and" else " ¦ "
    after_value = _AFTER_VALUE.search(match.string, 0, match.start())
    if _FUNCTION.fullmatch(content) and not (after_value and content in ("min", "sec")):
        return f" \\{content} "
    letter = len(content) == 1 and content.isalpha() and not after_value
    numbers = re.search(r"\d", content) and "_" not in content
    if content in ("e", "i", "d") or letter or numbers:
        return f" {content} "
    if joined := _JOINED.fullmatch(content):  # 3 red and, before 4 blue
        return rf"\text{{{joined[1]}}}{' ¦ ' if joined[2] == 'or' else ', '}"
    return rf"\text{{{content}}}"


def _add_braces(match: re.Match[str]) -> str:
    top, bottom = (part if part[0] == "{" else f"{{{part}}}" for part in match.group(2, 3))
    return f"\\{match[1]}{top}{bottom}"


def _replace_number_word(match: re.Match[str]) -> str:
    value = Fraction(match[1]) * 10 ** _ZEROS[match[2].lower()]
    return str(value) if value.denominator == 1 else str(float(value))


def _to_fraction(match: re.Match[str]) -> str:
    start, again = match[2], match[3] or match[4]
    value = Fraction(f"{match[1] or 0}.{start or 0}")
    value += Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(start))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_SIGNED_WORD = re.compile(
    r"(?i:\b(?:negative|minus)\s+|\\text\s*\{\s*(?:negative|minus)\s*\}\s*)(?=[\d\\.])"
)
_REPLACEMENTS: dict[str, str | Callable[[re.Match[str]], str]] = {
    # 3rd, 3^{\text{rd}}
    r"(?<=\d)\s*\^?\s*\{?\s*(?:\\(?:text|mathrm|textit|rm)\s*\{\s*)?(?:st|nd|rd|th)\b"
    r"\s*\}{0,2}(?!\w)": "",
    _SIGNED_WORD.pattern: "-",
    r"(?i)(?<![\w.,^/{])(\d{1,15}(?:\.\d{1,15})?)\s*(?:\\[,; ]\s*)?"
    r"(?:\\(?:text|mathrm)\s*\{\s*)?(hundred|thousand|million|billion|trillion)\b\s*\}?": (
        _replace_number_word
    ),
    r"\\(?:text)?color\s*\{\w*\}": "",
    r"^\s*\\text\s*\{[^{}\d]*:\s*\}": "",
    r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)": ":",
    # Money and percentages
    r"(?:\\\$|[$€£¥]|\\text\s*\{\s*(?:USD|EUR|GBP|INR|Rs\.?|US\s?\$|\\?\$)\s*\}"
    r"|\b(?:USD|EUR|Rs\.?)(?=\s?\d))\s*(?=[\d.])|(?<=\d)\s*[€£¥]": "",
    r"(?i)\s*(?:\\[,;: ]\s*)?(?:\\?%|\\(?:text|mathrm)\s*\{\s*(?:\\?%|per\s?cent)\s*\}"
    r"|(?<=[\d\s}])per\s?cent\b)": "%",
    # 0.1\overline{6}
    r"(?<![\w.,])(\d{0,15})\.(\d{0,15})\\(?:overline|bar|dot)\s*(?:\{\s*(\d{1,15})\s*\}|(\d))": (
        _to_fraction
    ),
    r"\{([^{}]*)\\choose\s?([^{}]*)\}": r"\\binom{\1}{\2}",
    r"\\(?:mathrm|text(?:rm|bf|it|normal)?|rm|operatorname\*?|mathit|mathsf|mbox)"
    r"\s*\{([^{}]*)\}": _replace_upright,
    # 2 hours 5 minutes
    r"(\d\s*(?:\\text\{[^{}]*\}|(?:hours?|hrs?|minutes?|min|days?|weeks?|years?|months?|feet"
    r"|ft|pounds?|lbs?|dollars?|h|m|km|kg)\b))(?:\s|\\ ){0,3}(?=\d)": r"\1, ",
    r"√\s*(?:\(([^()]*)\)|(\d+|[^\W\d_]))|(?<![\\a-z])sqrt\s*\(([^()]*)\)": (
        lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}"
    ),
    r"\\([A-Za-z]+)[ \t]*|\\([^A-Za-z])": _replace_command,
    # 20 °C
    r"(\^\s*(?:\\circ|\{\s*\\circ\s*\}))\s*"
    r"(?:[CF](?![A-Za-z])|\\(?:text|mathrm)\s*\{\s*[CF]\s*\})": r"\1",
    r"\\(frac|binom)\s*(\{(?:[^{}]|\{[^{}]*\})*\}|\w)\s*(\{|\w)": _add_braces,
    r"(?<![A-Za-z\\])and(?![A-Za-z])": ",",
    r"(?<![A-Za-z\\])or(?![A-Za-z])": "¦",
    r"(?<![A-Za-z\\])(pi|sin|cos|tan|ln|log|exp|infinity|inf)(?![A-Za-z])": (
        lambda match: _COMMANDS.get(match[1], f"\\{match[1]} ")
    ),
}
_RULES = [(re.compile(pattern), replacement) for pattern, replacement in _REPLACEMENTS.items()]


def remove_spaces(text: str) -> str:
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s|\{(?=\w\})|(?<=\{\w)\}", "", text)
    words = "\\" not in text and re.search(r"[^\W\d_]{2}", text)
    return text.casefold() if words else text


# --- Statements ---

MEANINGS = """
hundred thousand million billion trillion dozen dozens wrong false incorrect invalid never except
mod modulo base pi percent factorial squared cubed times plus minus infinity half pair pairs unknown
maybe perhaps probably approximately about nearly almost
"""
# Words after a number that change its value, or deny it.

_NOT_UNITS = """
about all also am an and another are as at be because been between break but by can case char const
continue could def default define distinct do does done drop echo elif else end enum except exists
false final finally for from get had has have he her his how i if import is it its join key let
let's like limit match max min more most must my new nil no none nor not now null object on one or
order other our out outer over pass print range return right select self set she should so some
static than that the their them then there these they this throw to true try type under union unless
until update use using value values var was we were what when where whereas which while who will
with without would xor yet yield you your
aber als auch auf aus bei bis das dass dem den der des die ein eine einen er es für hat ich ihr ist
kann kein man mit nach nicht noch nur oder ohne sich sie sind um und uns von war was wenn wie wir zu
al au aux avec ce como con dans del des donc du el ella elle en es est está et il je la le les mais
ne ni non nos nous o ou où para par pas pero pour por puis que qui sans se si sin son sont su sur un
una une y ya da das dos ele ela mas não na no nem sem são ao che di ma sono è
albo czy jest lub nie się und aan dat een en geen het maar niet van voor att eller inte och är bir
değil ve veya atau bukan dan tidak yang
"""
NOT_UNITS = frozenset(_NOT_UNITS.split())
"""Words after a number that can't be its unit: function words and keywords."""

_BOLD = re.compile(r"(?<![\w)}\]*])(\*{1,3})(?![\s*])([^*\n]+?)(?<!\s)\1(?![\w({\[*])|`+")
_LEAD = re.compile(
    r"(?i)\s*(?:\\text\w*\s*\{\s*)?(?:(?:so|thus|hence|therefore|then),?\s+)?(?:the\s+|my\s+)?"
    r"(?:final\s+|correct\s+|right\s+)?answer(?:\s+is\b\s*:?|\s*:)\s*\}?\s*"
)
_STYLED = re.compile(
    r"\\(?:boxed|text|textbf|mathbf|boldsymbol|bm|pmb|underline|mathrm|displaystyle)\s*"
    r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
)
_DELIMITED = re.compile(
    r"\$\$?([^$]*)\$\$?|\\\(((?:(?!\\[()]).)*)\\\)|\\\[((?:(?!\\[\[\]]).)*)\\\]", re.S
)
_WRAPPED = re.compile(r"\\(?:text\w*|math(?:rm|bf|it|sf)|mbox)\s*\{([^{}]*)\}")


def strip_formatting(text: str) -> str:
    """Strip Markdown, math delimiters, styles and phrases like "The answer is" from an answer."""
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


def normalize_spelling(text: str) -> str:
    """Normalize an answer's spelling, so that answers that look the same when typeset become
    equal."""
    text = _WRAPPED.sub(r" \1 ", text.replace("\\left", "").replace("\\right", ""))
    text = normalise(re.sub(r"[$\\]\s|[~$]", " ", text))
    if "\\" not in text and re.search(r"[^\W\d_]{2}", text):  # \Delta is not \delta, nor R r
        text = text.casefold()
    return text.rstrip("." if any(map(str.isdigit, text)) else ".!").strip()


_BEFORE_MARK = re.compile(
    r"(?is)(?:(?:\bnot|n['’]t|\bnever|\banything\s+but|\bthan|\bdoubt\w*(?:\s+\w+){0,4})"
    r"(?:\s+(?:be|equal\s+to|the|an?))*)[\s$*(\\\[]*\Z"
)
_CORRECTION = re.compile(
    r"(?i)\b(?:wait|actually|no|not|but|however|instead|correct\w*|wrong|mistake|error|oops|sorry|should"
    r"|so|thus|hence|therefore|finally|final|answer|total|overall|result)\b|n['’]t\b"
)
_AFTER_MARK = re.compile(
    r"(?i)[\s$*)\\\]}]*(?:\?|(?:is|was|are)\s*(?:n['’]t|\s+not|\s+wrong|\s+incorrect|\s+false)\b"
    r"|(?:cannot|can['’]t|could\s+not)\s+be\b|or\s+\$?\\?\w)"
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z(\\$*])|\n+")
_ANSWER = re.compile(r"(?i)\banswer(?:\s+\w+){0,4}?(?:\s+is\b\s*:?|\s*:)[\s*>]*(?=\S)")
_CLAUSE = re.compile(r"[.!?]\s|\n|,\s+(?:so|thus|hence|therefore|and)\b")
_CONCLUSION = re.compile(r"[,;:]\s+(?:so|thus|hence|therefore)\b,?")
_DOUBT = re.compile(
    r"(?i)\?|\b(?:not|never|neither|nor|cannot|except|wrong|false|incorrect|either|maybe|perhaps|might"
    r"|could|possibly|probably|unlikely|(?<!no\s)doubt\w*|unsure|less|more|greater|fewer|larger"
    r"|smaller|other|rather|under|over|below|above|nearly|almost|least|most|say|says|said|claims?"
    r"|guess|although|though|but|unless|between|from|wait|actually|instead|or)\b"
    r"|n['’]t\b|\banything\b|\ball\s+but\b"
)
_VERB = re.compile(
    r"(?i)\b(?:is|are|be|was|were|equals?|equal\s+to|makes?|gives?|gets?|becomes?|has|have|so|thus|hence"
    r"|therefore|obtain|yields?|leaves?|costs?)\b[:,]?|=>|⇒|→|\\(?:implies|Rightarrow)\b|:(?=\s)"
)
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?:(?!(?:sqrt|sin|cos|tan|log|exp|and|mod|inf|infinity)\b)[^\W\d_]{3,}"
    r"|(?i:is|it|so|we|he|be|by|as|at|an|on|of|to|if|my|no|do)\b)"
)
_DISPLAY = re.compile(r"(?s)\s*(?:\\\[(?:(?!\\[\[\]]).)*\\\]|\$\$[^$]*\$\$)")
_FORMULA = re.compile(
    r"(?s)\$[^$]+\$|\\\(.+?\\\)|(?:(?<![A-Za-z])[b-zB-HJ-Z](?![A-Za-z])|\\[A-Za-z]+|\\[%$]"
    r"|[\d.,+\-*/^=()\[\]{}<>!%√π°×·÷−|_:²³€£]|(?<=\S)[ \t])+"
)


_OPERATOR = re.compile(
    r"(?i)\d\W{0,2}\s(?:plus|minus|times|by|over|mod|modulo|(?:multiplied|divided)\s+by)\s*$"
)


def final_boxes(text: str, marked: str) -> list[str]:
    """Return the last marked answer along with any earlier ones that the text doesn't correct, or
    [] if the text around the last one negates it."""
    start = text.rfind(BOXED)
    if start < 0:
        return [marked]
    after = text[text.find(marked, start) + len(marked) :].lstrip()[1:]
    if _BEFORE_MARK.search(text[max(0, start - 80) : start]) or _AFTER_MARK.match(after):
        return []
    if text.count(BOXED) == 1:
        return [marked]
    corrections = list(_CORRECTION.finditer(text, 0, start))
    rest = text[corrections[-1].end() :] if corrections else text
    return list(dict.fromkeys(marked_answers(rest)))


def _find_claim(text: str) -> tuple[str, bool]:
    text = _BOLD.sub(r"\2", text).strip(" \n")
    if leads := list(_ANSWER.finditer(text)):
        line, _, rest = text[leads[-1].end() :].partition("\n")
        sentence, *more = _SENTENCE.split(line.strip())
        before = _CLAUSE.split(text[: leads[-1].start()])[-1]
        return sentence, any(map(_DOUBT.search, (before, rest, *more)))
    sentences = [part for part in _SENTENCE.split(text) if part.strip()]
    return sentences[-1].lstrip("># ") if sentences else "", False


def stated_answers(text: str, *, exclaims: bool) -> list[str]:
    """Return the possible answers in a text that marks none, or [] if the text expresses doubt. Set
    `exclaims` if a final "!" may be a factorial."""
    text = text if exclaims else text.rstrip("! ")
    text = _DISPLAY.sub(lambda match: f" ${' '.join(match[0].strip()[2:-2].split())}$", text)
    text = _SIGNED_WORD.sub("-", text)
    if not _PROSE.search(text):
        return [text.strip("`\n #")]
    sentence, doubt = _find_claim(text)
    conclusion = _CONCLUSION.split(sentence)[-1]
    if doubt or not _PROSE.search(sentence) or _DOUBT.search(conclusion):
        return [] if doubt or _PROSE.search(sentence) else [sentence]
    verbs = list(_VERB.finditer(conclusion))
    tail = conclusion[verbs[-1].end() :].strip() if verbs else ""
    formulas = [match for match in _FORMULA.finditer(conclusion) if re.search(r"\d", match[0])]
    if formulas and (not tail or _PROSE.search(tail)):
        before, after = conclusion[: formulas[-1].start()], conclusion[formulas[-1].end() :]
        word = after.lower().split(maxsplit=1)[0].strip(".,") if after.strip() else ""
        if word not in MEANINGS.split() and not _OPERATOR.search(before):  # not 5 million, 3 plus 5
            return [tail, formulas[-1][0].strip(" ,:=")]
    return [tail]


_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'’-]+[^\W\d_]+)*")


def answer_words(right: str) -> str:
    """Return an answer's normalized words if it consists only of words, or "" otherwise."""
    spelling = normalize_spelling(right)
    is_words = _WORDS.fullmatch(spelling) and not re.search(r"\\(?!text|math)", right)
    return spelling if is_words and not right.isupper() else ""


def asserts_words(text: str, words: str) -> bool:
    """Return whether the sentence that states the answer ends with `words` and expresses no
    doubt."""
    sentence, doubt = _find_claim(text.rstrip("! "))
    sentence = strip_formatting(re.sub(r"\$|\\[()\[\]]", "", sentence))
    spelling = normalize_spelling(sentence)
    if doubt or spelling == words:
        return not doubt
    before = spelling.removesuffix(f" {words}")
    if before == spelling or _DOUBT.search(before):
        return False
    previous = _WRAPPED.sub(r" \1 ", sentence).split()[: len(before.split())]
    return len(previous) < 2 or not previous[-1][:1].isupper()  # New York is not York
