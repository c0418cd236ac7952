"""Finds the answer in a completion. Text inside `<think>` is never part of it.

In rollouts, the thinking of all model families is marked with `<think>`. All functions accept
untrusted text and run in linear time.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keel.rl.turns import THINK

BOXED = "\\boxed{"
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit)\s*\{([^{}]*)\}")
_INVISIBLE = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
_BRACES = re.compile(r"\\boxed\{|\\.|[{}]", flags=re.DOTALL)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", flags=re.DOTALL)
_RAISED = re.compile("([⁺⁻]?[⁰¹²³⁴-⁹]+)|([₊₋]?[₀-₉]+)")


def _last_turn(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    turns = [message for message in messages if message.get("role") == "assistant"]
    return turns[-1] if turns else {}


def final_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the policy's last message without its thinking, or "" if the thinking never ended."""
    message = _last_turn(messages)
    raw = message.get("raw")
    text = str(message.get("content") or "")
    if isinstance(raw, str) and THINK.close in raw:
        # From `raw`, so that text before the thinking cannot be taken for the answer.
        text = raw
    return outside_think(text)


def outside_think(text: str) -> str:
    """Return the text after the last `</think>` and before any `<think>` that follows, stripped of
    surrounding whitespace."""
    return text.rpartition(THINK.close)[2].partition(THINK.open)[0].strip()


def is_blank(text: str) -> bool:
    """Return whether a text contains nothing but whitespace, control characters and other invisible
    characters."""
    return all(unicodedata.category(c)[0] in "ZC" or c in _INVISIBLE for c in text)


def raw_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the policy's last message verbatim, with its thinking in `<think>` tags."""
    message = _last_turn(messages)
    if isinstance(message.get("raw"), str):
        return message["raw"]
    thinking = message.get("reasoning_content")
    prefix = f"{THINK.open}{thinking}{THINK.close}" if thinking is not None else ""
    return f"{prefix}{message.get('content') or ''}"


def thinking_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the thinking from the policy's last message, or ""."""
    message = _last_turn(messages)
    thinking = message.get("reasoning_content")
    if thinking is not None:
        return str(thinking)
    raw = str(message.get("raw") or "")
    return raw.rpartition(THINK.close)[0].removeprefix(THINK.open).strip()


def every_turn(
    of: Callable[[Sequence[Mapping[str, Any]]], str], messages: Sequence[Mapping[str, Any]]
) -> str:
    """Apply `final_text` or `thinking_text` to each policy turn and join the results as
    paragraphs."""
    turns = [message for message in messages if message.get("role") == "assistant"]
    return "\n\n".join(filter(None, (of([message]) for message in turns)))


def keeps_format(raw: str, *, thinking: bool, finished: bool) -> bool:
    """Return whether a completion is well-formed: finished, not blank, and with at most one marked
    answer.

    With thinking, there must be exactly one closed think block before the answer. Without thinking,
    there must be none. `raw` is the sampled text, which may lack the opening `<think>` because many
    chat templates already put it at the end of the prompt.
    """
    final = outside_think(raw)
    if not finished or is_blank(final) or max(final.count(BOXED), final.count("</answer>")) > 1:
        return False
    opened, closed = raw.count(THINK.open), raw.count(THINK.close)
    if not thinking:
        return opened == closed == 0
    starts = raw.lstrip().startswith(THINK.open)
    return closed == 1 and (opened == 0 or (opened == 1 and starts))


def marked_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`, or of the last `<answer>` if there are no boxes.
    Returns None if nothing is marked or the last box is not closed."""
    start = text.rfind(BOXED)
    if start >= 0:
        return _braced_content(text, start + len(BOXED))
    before, close, _ = text.rpartition("</answer>")
    _, opening, inside = before.rpartition("<answer>")
    return inside.strip() if close and opening else None


def marked_answers(text: str) -> list[str]:
    r"""Return the contents of all outermost `\boxed{…}`, or of all `<answer>` if there are no
    boxes."""
    boxes: list[str] = []
    starts: list[int] = []  # of the open braces' contents
    box_depth = -1  # of the outermost open box
    for match in _BRACES.finditer(text):
        if match[0].endswith("{") and match[0] != "\\{":
            starts.append(match.end())
            if match[0] == BOXED and box_depth < 0:
                box_depth = len(starts)
        elif match[0] == "}" and starts:
            start = starts.pop()
            if len(starts) < box_depth:
                boxes.append(text[start : match.start()].strip())
                box_depth = -1
    return boxes or [inside.strip() for inside in _ANSWER.findall(text)]


def _braced_content(text: str, start: int) -> str | None:
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:], flags=re.DOTALL):
        if match[0] in "{}":
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                return text[start : start + match.start()].strip()
    return None


def answer_in(text: str) -> str:
    r"""Return the answer marked with `\boxed{…}` or `<answer>`, or the whole text if nothing is
    marked."""
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def normalise(text: str) -> str:
    """Normalize Unicode and whitespace. 10² becomes 10^2, not 102."""
    return " ".join(unicodedata.normalize("NFKC", rewrite_raised_digits(text)).split())


def rewrite_raised_digits(text: str) -> str:
    """Rewrite superscript and subscript digits: x² becomes x^2, and x₂ becomes x_2."""

    def replacement(match: re.Match[str]) -> str:
        digits = unicodedata.normalize("NFKC", match[0]).replace("−", "-")
        sign = "^" if match[1] else "_"
        return f"{sign}{digits}" if len(digits) == 1 else f"{sign}{{{digits}}}"

    return _RAISED.sub(replacement, text)
