"""Encodes and decodes conversations so that only the template can produce control tokens.

A rendered conversation mixes the template's text with text from users, tools and the policy. If a
tool result contains the text `<|im_end|>`, an ordinary `encode` turns it into the control token. To
prevent this, the module marks all text that is not the template's before rendering. The text
between the template's control tokens is then encoded with a copy of the tokenizer that has no added
tokens. Text that does not look like a control token is encoded as usual.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

_INSIDE, _EDGE = "\U0010fffc", "\U0010fffd"
"""Private-use characters that mark text from outside the template. `_INSIDE` breaks up text that
looks like a control token. `_EDGE` is placed around text, so that it cannot combine with adjacent
template text to form a control token. Both are removed from text that happens to contain them."""


def unmark(text: str) -> str:
    """Remove the marks from a text."""
    return text.replace(_INSIDE, "").replace(_EDGE, "")


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Change every string in a JSON-like value, including dictionary keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(k, change): map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


class Encoder:
    """A tokenizer that distinguishes control tokens from text that only looks like them."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(
                f"the tokenizer {type(tokenizer).__name__} has no tokenizer.json, which "
                "conversations need. Set model.tokenizer to a tokenizer that has one"
            )
        written = backend.to_str()
        self._whole = Tokenizer.from_str(written)
        self._whole.no_truncation()
        self._whole.no_padding()
        added = {
            token.content: (index, token)
            for index, token in tokenizer.added_tokens_decoder.items()
            if len(token.content.strip()) > 1
        }
        self.controls: dict[str, int] = {text: index for text, (index, _) in added.items()}
        """Maps the text of each added token to its id. Whitespace and single characters are left
        out."""
        self.text_of: dict[int, str] = {index: text for text, index in self.controls.items()}
        special = [re.escape(text) for text, (_, token) in added.items() if token.special]
        self._special = re.compile("|".join(special) or r"(?!)")
        self._swallows_left = {text for text, (_, token) in added.items() if token.lstrip}
        self._swallows_right = {text for text, (_, token) in added.items() if token.rstrip}
        self._plain = _without_added_tokens(written, self.controls)
        longest_first = sorted(self.controls, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._heads = {text[:size] for text in self.controls for size in range(1, len(text))}
        self._tails = {text[-size:] for text in self.controls for size in range(1, len(text))}
        self._longest = max(map(len, self.controls), default=0)

    def shield(self, text: str) -> str:
        """Break up everything in `text` that looks like a control token. Lone surrogates are
        replaced with U+FFFD."""
        if not text.isascii():
            text = unmark(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        while (broken := self._pattern.sub(lambda m: m[0][0] + _INSIDE + m[0][1:], text)) != text:
            text = broken  # the text after the break may be another control text
        return text

    def shield_whole(self, text: str) -> str:
        """Escape text so that it cannot combine with adjacent template text to form a control
        token. Leading and trailing whitespace stays outside the marks, so that templates can still
        strip it."""
        core = text.strip()
        sizes = range(1, min(len(core), self._longest) + 1)
        open_ended = any(
            core[-size:] in self._heads or core[:size] in self._tails for size in sizes
        ) or any(core in control for control in self.controls)
        shielded = self.shield(core)
        edge = _EDGE if core and open_ended else ""
        start = len(text) - len(text.lstrip())
        return text[:start] + edge + shielded + edge + text[start + len(core) :]

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text. Text that contains marks never becomes a control token."""
        expected = [self.controls[m[0]] for m in self._pattern.finditer(text)]
        if _INSIDE not in text:
            ids = self._whole.encode(unmark(text), add_special_tokens=False).ids
            if [index for index in ids if index in self.text_of] == expected:
                return ids
        return self.encode_in_pieces(text)

    def encode_in_pieces(self, text: str) -> list[int]:
        """Encode a rendered text piece by piece, with one call for the text between two control
        tokens."""
        ids: list[int] = []
        end, strip = 0, False
        for match in self._pattern.finditer(text):
            piece = text[end : match.start()]
            ids += self._encode_plain(piece, left=strip, right=match[0] in self._swallows_left)
            ids.append(self.controls[match[0]])
            end, strip = match.end(), match[0] in self._swallows_right
        return ids + self._encode_plain(text[end:], left=strip, right=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text. Text that only looks like a control token is broken up with a
        mark."""
        parts: list[str] = []
        run: list[int] = []
        for index in [*ids, None]:
            if index is not None and index not in self.text_of:
                run.append(index)
                continue
            if run:
                text = self._whole.decode(run, skip_special_tokens=False)
                parts.append(self.shield(text))
                run = []
            if index is not None:
                parts.append(self.text_of[index])
        return "".join(parts)

    def without_special(self, text: str) -> str:
        """Remove the special tokens in a text, such as those that Command A puts around answers."""
        return self._special.sub("", text)

    def _encode_plain(self, text: str, *, left: bool, right: bool) -> list[int]:
        text = unmark(text)
        text = text.lstrip() if left else text
        text = text.rstrip() if right else text
        return self._plain.encode(text, add_special_tokens=False).ids if text else []


def _without_added_tokens(written: str, controls: dict[str, int]) -> Tokenizer:
    """Return a copy of the tokenizer without its control tokens. `written` is the content of its
    tokenizer.json."""
    spec = json.loads(written)
    spec |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    model = spec["model"]
    unknown = model.get("unk_token")

    def renamed(text: str, index: int) -> str:
        # Ids must have no gap, so control tokens get names that no text spells.
        control = text in controls and text != unknown
        return f"{_INSIDE}{_EDGE}{index}{_INSIDE}{_EDGE}" if control else text

    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {renamed(text, index): index for text, index in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [
            [renamed(text, index), score] for index, (text, score) in enumerate(vocab)
        ]
    if model.get("merges"):
        pairs = [p.split(" ", 1) if isinstance(p, str) else p for p in model["merges"]]
        model["merges"] = [
            pair for pair in pairs if not {*pair, "".join(pair)} & set(controls) - {unknown}
        ]
    return Tokenizer.from_str(json.dumps(spec))
