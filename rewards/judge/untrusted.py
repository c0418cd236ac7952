"""Text of a policy as data for a judge: lossless, on one line, and without a way out."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

# Two kinds of characters are written as JSON escapes; the text stays the same. What is between
# `<…>`, `[…]` or `|…|` may be a control token of the judge's own chat template (`<|im_end|>`,
# `[INST]`, `[|endofturn|]`, `[start_header_id]`, `|NEWLINE|`, `]~b]`, `[e~[`), whatever its family:
# inference servers turn it into that token wherever it stands. And what cannot be seen (format
# controls, tag characters, variation selectors, private use, lone surrogates) can spell a message
# that only a model reads, or cannot be sent at all.
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
    """`value` as JSON on one line of visible characters, with no chat-template tokens."""
    return _ESCAPED.sub(_escape, json.dumps(value, ensure_ascii=False))


def inert(text: str) -> str:
    """`text` over as many lines as it has, with the escapes of `as_json`: for tools' results, which
    models read as they stand."""
    return _ESCAPED.sub(_escape, text)


def size(text: str) -> int:
    """Characters that `text` takes as JSON, without the quotes."""
    return len(as_json(text)) - 2


def tail(text: str, most: int) -> str:
    """An end of `text` that takes at most `most` characters as JSON."""
    text = text[-most:]
    while size(text) > most:
        text = text[len(text) // 4 + 1 :]
    return text


def _escape(match: re.Match[str]) -> str:
    # surrogatepass: a lone half is text that a policy can come up with, too.
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def new_fence() -> str:
    """A word that nobody could have written before the call it is made for."""
    return secrets.token_hex(16)


def fenced(text: str, fence: str) -> str:
    """`text`, a single line, between lines that carry the fence."""
    return f"<<<DATA {fence}\n{text}\nDATA {fence}>>>"
