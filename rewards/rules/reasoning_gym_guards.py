"""Answers that must not reach a verifier, because it would execute them or be fooled by them.

Some reasoning_gym verifiers call `eval` on the answer, and others call sympy's `parse_expr`, which
does the same: `__import__("os").system(…)` would run. A policy under reinforcement learning is the
last thing to hand an interpreter to, so such an answer is checked here and counts as wrong.

Others look for the right answer somewhere in the text, or at its beginning alone, and pass it with
anything around it: a second answer, a "not", a list of candidates. There, `is_all_answer` says
whether the text is the answer and nothing else.
"""

from __future__ import annotations

import ast
import re
from collections import Counter

from keel.rewards.language.function_words import FUNCTION_WORDS, KEYWORDS
from keel.rewards.text import WRAPPED, normalise

EVALUATED_TASKS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose verifier evaluates the answer as a Python literal."""

SYMBOLIC_TASKS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
"""Tasks whose verifier parses the answer with sympy."""

NAN_TASKS = frozenset({"complex_arithmetic"})
"""Tasks whose verifier takes "nan" for a perfect answer: `min(1.0, nan)` is 1.0."""

SAME_WORDS_TASKS = frozenset({"knights_knaves", "letter_jumble", "word_sorting"})
"""Tasks with one right answer, whose verifier overlooks words or ends at the last one wanted."""

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"
_TIME = r"\d+:\d+(?::\d+(?:\.\d+)?)?(?: ?UTC[-+]?[\d:]*)?"
_MOVE = r"Move disk \d+ from Peg \d+ to Peg \d+[.,]?"
_FRACTION = r"\\d?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|\d+\s*/\s*\d+"
_UNIT = r"[a-z°][a-z./°]{0,19}"
# What is said before an answer, with white space after it: verifiers read words apart.
_LEAD = (
    r"(?:(?:so|thus|therefore|hence|then)[,:]?"
    r"|\*{0,2}(?:(?:the|my|final|correct|right)\s){0,3}answer(?:\sis)?\s?:?\*{0,2}:?|\#{1,6})\s"
)
SHAPES = {
    task: re.compile(shape, re.IGNORECASE)
    for task, shape in {
        "advanced_geometry": r"[^,]*(?:,[^,]*)?",
        "fraction_simplification": _FRACTION,
        "gsm_symbolic": (
            rf"(?:[a-z]{{1,20}} ?= ?)?\\?[$€£¥]? ?\d+(?:\.\d+)?"
            rf"(?: ?\\?[%$€£¥]| {{1,3}}{_UNIT}(?: {_UNIT}){{0,2}})?"
        ),
        "kakurasu": r"[01\s,\[\]|]*",
        "polynomial_equations": rf"{_NUMBER}(?:\s*,\s*{_NUMBER})*(?:\s*,)?",
        "quantum_lock": r"[\[(\"']*[a-c](?:[a-c]|[-\s→⇒=>,;|\[\]()\"']|\\to\b)*",
        "sokoban": r"[-udlr\s→>,;|\[\]()\"']*",
        "survo": rf"(?:{_LEAD}){{0,2}}(?:(?:-?\d+|[|:\[\]-]+|```\w*)(?:\s+|$))*",
        "time_intervals": rf"-?\d+(?: days?)?|(?:-?\d+ days?, ?)?{_TIME}",
        "tower_of_hanoi": rf"{_MOVE}(?:\s*\n\s*{_MOVE})*",
    }.items()
}
"""What the whole answer has to look like where a verifier overlooks what it cannot read, without
what stands around an answer (`bare`)."""
READ_APART = frozenset({"polynomial_equations", "survo"})
"""Their verifiers overlook each part that is no number: `*7` in `*7 8 9*`. Nothing is taken off."""

_WORD = re.compile(r"\w+")
_FILLERS = "a an and but hence is so the then therefore thus while"
FILLERS = {"knights_knaves": frozenset(_FILLERS.split())}
"""Words that an answer may do without, or have once more."""

_BEFORE = re.compile(_LEAD, re.IGNORECASE)
_AROUND = re.compile(
    r"```\w*\n(.*?)\n?```|`([^`]*)`|\*{1,3}([^*]*)\*{1,3}|\"([^\"]*)\"|'([^']*)'|“([^“”]*)”"
    r"|\$\$?([^$]*)\$\$?|\\\((.*?)\\\)|\\\[(.*?)\\\]",
    re.DOTALL,
)
MOST_AROUND = 8
"""Marks and words that may stand around an answer, one inside the other."""

_NAMES = (
    "sin cos tan sec csc cot asin acos atan acot sinh cosh tanh asinh acosh atanh coth exp log ln "
    "sqrt Abs sign erf erfc erfi gamma Ei li Si Ci Rational Integer"
)
_NO_UNITS = (FUNCTION_WORDS | KEYWORDS) - {"byte", "long", "of", "per"}
"""No units: `20 or so`."""
FUNCTIONS = frozenset(_NAMES.split())
CONSTANTS = frozenset({"pi"})
MAX_EXPONENT = 1000

_LITERAL = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.UnaryOp)
_SYMBOLIC = (ast.Expression, ast.Constant, ast.Name, ast.UnaryOp, ast.BinOp, ast.Call)
_SIGNS = (ast.Load, ast.USub, ast.UAdd)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)


def may_be_verified(task: str, answer: str, right: str = "") -> bool:
    """Whether `task`'s verifier can be trusted with `answer`. It can with `right`, the known one.

    That is not to say with what stands in it: of an integral that sympy left as it was, the answer
    is in terms of `Integral`, and anyone could write the question like that.
    """
    if right and normalise(answer) == normalise(right):
        return True
    if task in EVALUATED_TASKS:
        tree = _parse(answer)
        # Not an expression at all: `eval` refuses it too, and the verifier compares it as text.
        return tree is None or all(_is_literal(node) for node in ast.walk(tree))
    if task in SYMBOLIC_TASKS:
        tree = _parse(answer)
        # sympy rewrites its input first (`3!`), so what Python cannot parse may still run there.
        return tree is not None and all(_is_symbolic(node) for node in ast.walk(tree))
    return task not in NAN_TASKS or "nan" not in answer.casefold()


def is_all_answer(task: str, answer: str, right: str) -> bool:
    """Whether `answer`, which `task`'s verifier passes, is an answer and nothing else.

    right: the known answer. For most tasks the verifier has seen to it.
    """
    text = answer.strip() if task in READ_APART else bare(answer)
    if task in SAME_WORDS_TASKS:
        given, wanted = _WORD.findall(text.casefold()), _WORD.findall(right.casefold())
        if len(given) > 2 * len(wanted):
            return False
        fillers = FILLERS.get(task, frozenset())
        return _without(fillers, given) == _without(fillers, wanted)
    if task == "gsm_symbolic" and not _NO_UNITS.isdisjoint(_WORD.findall(text.casefold())):
        return False
    return task not in SHAPES or SHAPES[task].fullmatch(text) is not None


def bare(answer: str) -> str:
    r"""`answer` without what people put around one: `**$20$**`, `\text{…}`, "The answer is …."."""
    text = WRAPPED.sub(r" \1 ", answer)
    for _ in range(MOST_AROUND):
        before, text = text, text.strip().rstrip(".,").rstrip()
        text = text[match.end() :] if (match := _BEFORE.match(text)) else text
        if match := _AROUND.fullmatch(text):
            text = match[match.lastindex or 0]
        if text == before:
            break
    return text


def _without(fillers: frozenset[str], words: list[str]) -> Counter[str]:
    return Counter(word for word in words if word not in fillers)


def _parse(answer: str) -> ast.Expression | None:
    try:
        return ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_literal(node: ast.AST) -> bool:
    # A bare name only looks something up; a call, an attribute or a comprehension does more, and
    # `[0] * 10**10` fills the memory.
    return isinstance(node, (*_LITERAL, *_SIGNS))


def _is_symbolic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    if isinstance(node, ast.Name):
        return len(node.id) == 1 or node.id in FUNCTIONS | CONSTANTS
    if isinstance(node, ast.Call):
        called = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        return called and not node.keywords
    return isinstance(node, (*_SYMBOLIC, *_SIGNS, *_OPERATORS)) and not _is_tower(node)


def _is_tower(node: ast.AST) -> bool:
    """`9**9**9` and its like: sympy would work them out before anyone could look at them."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)):
        return False
    exponents = [n.value for n in ast.walk(node.right) if isinstance(n, ast.Constant)]
    huge = any(isinstance(n, (int, float)) and abs(n) > MAX_EXPONENT for n in exponents)
    return huge or _is_numeric_power(node.right) or _is_numeric_power(node.left)


def _is_numeric_power(node: ast.AST) -> bool:
    """Whether a power is in there, and no variable."""
    inside = list(ast.walk(node))
    return any(isinstance(n, ast.Pow) for n in inside) and not any(
        isinstance(n, ast.Name) for n in inside
    )
