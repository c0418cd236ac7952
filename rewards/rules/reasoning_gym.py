"""Wraps the verifiers of reasoning_gym and protects them against hostile and padded answers.

Some verifiers call `eval` on the answer, or sympy's `parse_expr`, which is just as dangerous: it
would run `__import__("os").system(…)`. They are called only for answers that are plain literals or
formulas.

Other verifiers search for the right answer in the text, or read only the start of it. They accept
extra text such as a second answer, a "not" or a list of candidates. In their tasks, an answer gets
full marks only if it contains no other text.
"""

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

from keel.rewards.code.call_driver import from_jsonable
from keel.rewards.rules.statements import NOT_UNITS, strip_formatting
from keel.rewards.text import WRAPPED, answer_in, normalise

_MAX_CHARACTERS = 32_768
_MOST_PARTIAL = 0.9
"""Maximum partial credit. Some verifiers return the fraction of letters in the right place, which
is 1 − 1e-16 or even more than 1 if words follow the right answer."""
_EVALUATED_TASKS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose verifier evaluates the answer as a Python literal."""

_SYMBOLIC_TASKS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24"}
    | {"simple_integration"}
)
"""Tasks whose verifier parses the answer with sympy."""
_NAN_TASKS = frozenset({"complex_arithmetic"})  # accept "nan", as `min(1.0, nan)` is 1.0

_SAME_WORDS_TASKS = frozenset({"knights_knaves", "letter_jumble", "word_sorting"})
"""Tasks with a single right answer whose verifier ignores some words or trailing text."""

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"
_TIME = r"\d+:\d+(?::\d+(?:\.\d+)?)?(?: ?UTC[-+]?[\d:]*)?"
_MOVE = r"Move disk \d+ from Peg \d+ to Peg \d+[.,]?"
_FRACTION = r"\\d?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|\d+\s*/\s*\d+"
_UNIT = r"[a-z°][a-z./°]{0,19}"
_SHAPES = {
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
        "survo": r"(?:(?:-?\d+|[|:\[\]-]+|```\w*)(?:\s+|$))*",
        "time_intervals": rf"-?\d+(?: days?)?|(?:-?\d+ days?, ?)?{_TIME}",
        "tower_of_hanoi": rf"{_MOVE}(?:\s*\n\s*{_MOVE})*",
    }.items()
}
"""Patterns that the entire result of `strip_formatting` must match. Used for tasks whose verifiers
ignore extra text."""
_WORD = re.compile(r"\w+")
_FILLERS = "a an and but hence is so the then therefore thus while"
_OPTIONAL_WORDS = {"knights_knaves": frozenset(_FILLERS.split())}  # may be missing or repeated

_NAMES = (
    "sin cos tan sec csc cot asin acos atan acot sinh cosh tanh asinh acosh atanh coth exp log ln "
    "sqrt Abs sign erf erfc erfi gamma Ei li Si Ci Rational Integer"
)
_FUNCTIONS = frozenset(_NAMES.split())
_CONSTANTS = frozenset({"pi"})
_MAX_EXPONENT = 1000

_LITERAL = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.UnaryOp)
_SYMBOLIC = (ast.Expression, ast.Constant, ast.Name, ast.UnaryOp, ast.BinOp, ast.Call)
_SIGNS = (ast.Load, ast.USub, ast.UAdd)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)


def reasoning_gym(spec: Mapping[str, Any]) -> Callable[[str], float]:
    """Build the verifier for one `entry` of a Reasoning Gym `task`. `params` are the options of the
    task's generator.

    An answer receives full marks if its score is exactly 1 and it contains no extra text.
    Otherwise, it receives at most `_MOST_PARTIAL`.
    """
    task = str(spec.get("task"))
    entry_data = from_jsonable(spec.get("entry"))
    entry = cast(dict[str, Any], entry_data if isinstance(entry_data, dict) else {})
    if not isinstance(entry.get("answer", 0), (str, type(None))):
        raise ValueError(
            "reward spec of kind 'reasoning_gym' needs `task` and an `entry` with an `answer`"
        )
    score_answer = _score_answer(task, json.dumps(spec.get("params", {}), sort_keys=True))
    right = entry["answer"] or ""
    longest = max(_MAX_CHARACTERS, 4 * len(right))

    def verify(text: str) -> float:
        answer = answer_in(text)
        if not answer or len(answer) > longest or not _is_safe_to_verify(task, answer, right):
            return 0.0
        score = float(score_answer(answer, entry))
        if not math.isfinite(score):
            raise ValueError(f"the verifier of {task} returned {score}")
        if score == 1.0 and _has_no_extra_text(task, answer, right):
            return 1.0
        return min(max(score, 0.0), _MOST_PARTIAL)

    return verify


@lru_cache(maxsize=64)
def _score_answer(task: str, params: str) -> Callable[[str, Any], float]:
    """Return a task's `score_answer` function. Cached because some tasks load a dictionary."""
    from reasoning_gym.factory import (  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        DATASETS,  # pyright: ignore[reportUnknownVariableType]
    )

    tasks = cast(Mapping[str, tuple[Any, Any]], DATASETS)
    if task not in tasks:
        raise ValueError(f"reward spec has task {task!r}, which reasoning_gym does not define")
    dataset_type, config_type = tasks[task]
    options = cast(dict[str, Any], from_jsonable(json.loads(params)))
    dataset = dataset_type(config=config_type(**options))
    return cast(Callable[[str, Any], float], dataset.score_answer)


def _is_safe_to_verify(task: str, answer: str, right: str) -> bool:
    """Return whether an answer can safely be passed to a task's verifier. The complete right answer
    is always safe.

    Parts of the right answer may be unsafe. For example, if sympy couldn't solve an integral, the
    right answer contains `Integral`, and a policy could repeat the question in that form.
    """
    if right and normalise(answer) == normalise(right):
        return True
    if task in _EVALUATED_TASKS:
        tree = _parse(answer)
        # `eval` fails on other text as well, and the verifier then compares strings.
        # A bare name is a mere lookup. Calls, attributes and comprehensions do more, and operators
        # can fill the memory: `[0] * 10**10`.
        nodes = ast.walk(tree) if tree else ()
        return all(isinstance(node, (*_LITERAL, *_SIGNS)) for node in nodes)
    if task in _SYMBOLIC_TASKS:
        tree = _parse(answer)
        # sympy rewrites its input first (`3!`), so it may run text that Python cannot parse.
        return tree is not None and all(map(_is_symbolic, ast.walk(tree)))
    return task not in _NAN_TASKS or "nan" not in answer.casefold()


def _has_no_extra_text(task: str, answer: str, right: str) -> bool:
    text = strip_formatting(WRAPPED.sub(r" \1 ", answer)).strip("#`\"'“” ")
    words = _WORD.findall(text.casefold())
    if task in _SAME_WORDS_TASKS:
        expected = _WORD.findall(right.casefold())
        if len(words) > 2 * len(expected):
            return False
        optional = _OPTIONAL_WORDS.get(task, frozenset())
        counts = (Counter(w for w in side if w not in optional) for side in (words, expected))
        return next(counts) == next(counts)
    if task == "gsm_symbolic" and not NOT_UNITS.isdisjoint(words):
        return False
    return task not in _SHAPES or _SHAPES[task].fullmatch(text) is not None


def _parse(answer: str) -> ast.Expression | None:
    try:
        return ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_symbolic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    if isinstance(node, ast.Name):
        return len(node.id) == 1 or node.id in _FUNCTIONS | _CONSTANTS
    if isinstance(node, ast.Call):
        called = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        return called and not node.keywords
    if not isinstance(node, (*_SYMBOLIC, *_SIGNS, *_OPERATORS)):
        return False
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)):
        return True
    # sympy evaluates a power such as `9**9**9` when parsing.
    exponents = [n.value for n in ast.walk(node.right) if isinstance(n, ast.Constant)]
    huge = any(isinstance(n, (int, float)) and abs(n) > _MAX_EXPONENT for n in exponents)
    return not (huge or _is_numeric_power(node.right) or _is_numeric_power(node.left))


def _is_numeric_power(node: ast.AST) -> bool:
    inside = [type(one) for one in ast.walk(node)]
    return ast.Pow in inside and ast.Name not in inside
