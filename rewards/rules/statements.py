r"""Extraction of the answer that a text asserts.

`undressed` strips Markdown, delimiters and "The answer is". For text without a mark, `statements`
extracts a number or formula, and `asserts` compares words. A negation, an alternative or a question
means that there is no answer.
"""

from __future__ import annotations

import re

from keel.rewards.rules.notation import SIGNED_WORD
from keel.rewards.text import BOXED, marked_answers, normalise

MEANINGS = """
hundred thousand million billion trillion dozen dozens wrong false incorrect invalid never except
mod modulo base pi percent factorial squared cubed times plus minus infinity half pair pairs unknown
maybe perhaps probably approximately about nearly almost
"""
# Words after a number that change its value, or deny it.

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


def undressed(text: str) -> str:
    """Strip Markdown, delimiters, styles and "The answer is" from an answer."""
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


def spelled(text: str) -> str:
    """Return the answer as it reads when typeset."""
    text = _WRAPPED.sub(r" \1 ", text.replace("\\left", "").replace("\\right", ""))
    text = normalise(re.sub(r"[$\\]\s|[~$]", " ", text))
    if "\\" not in text and re.search(r"[^\W\d_]{2}", text):  # \Delta is not \delta, nor R r
        text = text.casefold()
    return text.rstrip("." if any(map(str.isdigit, text)) else ".!").strip()


_BEFORE_MARK = re.compile(
    r"(?:(?:\bnot|n['’]t|\bnever|\banything\s+but|\bthan|\bdoubt\w*(?:\s+\w+){0,4})"
    r"(?:\s+(?:be|equal\s+to|the|an?))*)[\s$*(\\\[]*\Z",
    re.IGNORECASE | re.S,
)
_CORRECTION = re.compile(
    r"\b(?:wait|actually|no|not|but|however|instead|correct\w*|wrong|mistake|error|oops|sorry|should"
    r"|so|thus|hence|therefore|finally|final|answer|total|overall|result)\b|n['’]t\b",
    re.IGNORECASE,
)
_AFTER_MARK = re.compile(
    r"[\s$*)\\\]}]*(?:\?|(?:is|was|are)\s*(?:n['’]t|\s+not|\s+wrong|\s+incorrect|\s+false)\b"
    r"|(?:cannot|can['’]t|could\s+not)\s+be\b|or\s+\$?\\?\w)",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z(\\$*])|\n+")
_ANSWER = re.compile(r"\banswer(?:\s+\w+){0,4}?(?:\s+is\b\s*:?|\s*:)[\s*>]*(?=\S)", re.IGNORECASE)
_CLAUSE = re.compile(r"[.!?]\s|\n|,\s+(?:so|thus|hence|therefore|and)\b")
_CONCLUSION = re.compile(r"[,;:]\s+(?:so|thus|hence|therefore)\b,?")
_DOUBT = re.compile(
    r"\?|\b(?:not|never|neither|nor|cannot|except|wrong|false|incorrect|either|maybe|perhaps|might"
    r"|could|possibly|probably|unlikely|(?<!no\s)doubt\w*|unsure|less|more|greater|fewer|larger"
    r"|smaller|other|rather|under|over|below|above|nearly|almost|least|most|say|says|said|claims?"
    r"|guess|although|though|but|unless|between|from|wait|actually|instead|or)\b"
    r"|n['’]t\b|\banything\b|\ball\s+but\b",
    re.IGNORECASE,
)
_ASIDE = re.compile(
    r",?\s+(?:which|because|since|(?:and\s+)?not\s(?=[^;]*\d)|rather\s+than|instead\s+of)\b"
    r"(?!.*\bbut\b)[^;]*$|\bnot\s+[^\s,]+\s*,?\s+but(?:\s+rather)?\b",
    re.IGNORECASE,
)
_VERB = re.compile(
    r"\b(?:is|are|be|was|were|equals?|equal\s+to|makes?|gives?|gets?|becomes?|has|have|so|thus|hence"
    r"|therefore|obtain|yields?|leaves?|costs?)\b[:,]?|=>|⇒|→|\\(?:implies|Rightarrow)\b|:(?=\s)",
    re.IGNORECASE,
)
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?:(?!(?:sqrt|sin|cos|tan|log|exp|and|mod|inf|infinity)\b)[^\W\d_]{3,}"
    r"|(?i:is|it|so|we|he|be|by|as|at|an|on|of|to|if|my|no|do)\b)"
)
_DISPLAY = re.compile(r"\s*(?:\\\[(?:(?!\\[\[\]]).)*\\\]|\$\$[^$]*\$\$)", re.S)
_FORMULA = re.compile(
    r"\$[^$]+\$|\\\(.+?\\\)|(?:(?<![A-Za-z])[b-zB-HJ-Z](?![A-Za-z])|\\[A-Za-z]+|\\[%$]"
    r"|[\d.,+\-*/^=()\[\]{}<>!%√π°×·÷−|_:²³€£]|(?<=\S)[ \t])+",
    re.S,
)


_OPERATOR = re.compile(
    r"\d\W{0,2}\s(?:plus|minus|times|by|over|mod|modulo|(?:multiplied|divided)\s+by)\s*$",
    re.IGNORECASE,
)


def boxes(text: str, marked: str) -> list[str]:
    """Return the content of the last mark and of the boxes before it that no word corrects; none
    if the words around the last one deny it."""
    start = text.rfind(BOXED)
    if start < 0:
        return [marked]
    after = text[text.find(marked, start) + len(marked) :].lstrip()[1:]
    if _BEFORE_MARK.search(text[max(0, start - 80) : start]) or _AFTER_MARK.match(after):
        return []
    corrections = list(_CORRECTION.finditer(text, 0, start))
    rest = text[corrections[-1].end() :] if corrections else text
    return list(dict.fromkeys(marked_answers(rest)))


def _claim(text: str) -> tuple[str, bool]:
    """Return the sentence that states the answer, and whether the text around it is in doubt."""
    text = _BOLD.sub(r"\2", text).strip(" \n")
    if leads := list(_ANSWER.finditer(text)):
        line, _, rest = text[leads[-1].end() :].partition("\n")
        sentence, *more = _SENTENCE.split(line.strip())
        before = _CLAUSE.split(text[: leads[-1].start()])[-1]
        return sentence, any(map(_DOUBT.search, (before, rest, *more)))
    sentences = [part for part in _SENTENCE.split(text) if part.strip()]
    return sentences[-1].lstrip("># ") if sentences else "", False


def statements(text: str, *, exclaims: bool) -> list[str]:
    """Candidates for the answer of an unmarked text; empty if the text is in doubt.

    exclaims: a final "!" may be a factorial.
    """
    if text.count("$") % 2:  # money
        text = text.replace("\\$", "").replace("$", "")
    text = text if exclaims else text.rstrip("! ")
    text = _DISPLAY.sub(lambda match: f" ${' '.join(match[0].strip()[2:-2].split())}$", text)
    text = SIGNED_WORD.sub("-", text)
    if not _PROSE.search(text):
        return [text.strip("`\n #")]
    sentence, doubt = _claim(text)
    aside = _ASIDE.search(sentence)
    if aside and re.search(r"\d", kept := sentence[: aside.start()] + sentence[aside.end() :]):
        sentence = kept  # 26, not 25
    if doubt or not _PROSE.search(sentence):
        return [] if doubt else [sentence]
    conclusion = _CONCLUSION.split(sentence)[-1]
    if _DOUBT.search(conclusion):  # but not for the words of a remark in the formula
        return [] if _DOUBT.search(_WRAPPED.sub("", sentence)) else [sentence]
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


def words_of(right: str) -> str:
    """The words of an answer that consists of words; "" for others."""
    spelling = spelled(right)
    is_words = _WORDS.fullmatch(spelling) and not re.search(r"\\(?!text|math)", right)
    return spelling if is_words and not right.isupper() else ""


def asserts(text: str, words: str) -> bool:
    """Return True if the sentence that states the answer ends with these words, without doubt."""
    sentence, doubt = _claim(text.rstrip("! "))
    sentence = undressed(re.sub(r"\$|\\[()\[\]]", "", sentence))
    spelling = spelled(sentence)
    if doubt or spelling == words:
        return not doubt
    before = spelling.removesuffix(f" {words}")
    if before == spelling or _DOUBT.search(before):
        return False
    previous = _WRAPPED.sub(r" \1 ", sentence).split()[: len(before.split())]
    return len(previous) < 2 or not previous[-1][:1].isupper()  # New York is not York
