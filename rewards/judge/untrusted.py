"""Encodes the policy's text so that a judge cannot mistake it for instructions. The encoding is
lossless. The result is a single line without control tokens."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

# Two kinds of characters become JSON escapes. Text in `<…>`, `[…]` or `|…|` may be a control token
# of the judge's chat template (`<|im_end|>`, `[INST]`, `[|endofturn|]`, `[start_header_id]`,
# `|NEWLINE|`, `]~b]`, `[e~[`), which inference servers parse anywhere in a message. Invisible
# characters (format controls, tag characters, variation selectors, private use, lone surrogates)
# can spell a message that only a model reads, or cannot be sent at all.
_ESCAPED = re.compile(
    r"<(?![ 0-9=])"
    r"|\[(?=/?[A-Za-z_]\w{2,}\]|\|)"
    r"|\|(?=[A-Z_]{3,}\|)"
    r"|[\[\]](?=[^\[\]\s]{0,2}~)"
    "|[\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\ud800-\udfff\ue000-\uf8ff"
    "\U00013430-\U00013438\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff\U000f0000-\U0010ffff]"
)


def as_json(value: Any) -> str:
    """Encode a value as one line of JSON that contains only visible characters and no chat-template
    tokens."""
    return _ESCAPED.sub(_escape, json.dumps(value, ensure_ascii=False))


def inert(text: str) -> str:
    """Escape text in the same way as `as_json`, but keep its line breaks. This is useful for the
    result of a tool, for example."""
    return _ESCAPED.sub(_escape, text)


def size(text: str) -> int:
    """Return the length of a text when it is encoded as JSON, without the quotes."""
    return len(as_json(text)) - 2


def tail(text: str, max_size: int) -> str:
    """Return the end of a text, with at most `max_size` characters when it is encoded as JSON."""
    text = text[-max_size:]
    while size(text) > max_size:
        text = text[len(text) // 4 + 1 :]
    return text


def _escape(match: re.Match[str]) -> str:
    # surrogatepass: a policy can sample a lone surrogate.
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def new_fence() -> str:
    """Return a random word that the policy cannot know."""
    return secrets.token_hex(16)


def fenced(text: str, fence: str) -> str:
    """Enclose a single line of text in two lines that contain the fence."""
    return f"<<<DATA {fence}\n{text}\nDATA {fence}>>>"
