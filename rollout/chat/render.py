"""Renders messages with a tokenizer's Jinja template or with DeepSeek-V3.2's own code, and encodes
the text so that only the template can produce control tokens.

A rendered conversation mixes the template's text with text from users, tools and the policy. If a
tool result contains the text `<|im_end|>`, an ordinary `encode` turns it into the control token. To
prevent this, all text from outside the template is marked before rendering. The text between the
template's control tokens is then encoded with a copy of the tokenizer that has no added tokens.
Text that does not look like a control token is encoded as usual.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from keel.model.hub import written_by_code
from keel.rl.turns import THINK, USER_ROLES, Message, ThinkingMarks
from keel.rl.types import Prompt

_INSIDE, _EDGE = "\U0010fffc", "\U0010fffd"
"""Private-use characters that mark text from outside the template. `_INSIDE` breaks up text that
looks like a control token. `_EDGE` surrounds text, so that it cannot form a control token together
with template text."""


def unmark(text: str) -> str:
    return text.replace(_INSIDE, "").replace(_EDGE, "")


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Apply a function to every string in a JSON-like value, including dictionary keys."""
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
                "conversations need a tokenizer.json. Set model.tokenizer to a tokenizer with one"
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
        """Maps the text of each added token to its id, except for white space and single
        characters."""
        self.text_of: dict[int, str] = {index: text for text, index in self.controls.items()}
        special = [re.escape(text) for text, (_, token) in added.items() if token.special]
        self._special = re.compile("|".join(special) or r"(?!)")
        self._swallows_left = {text for text, (_, token) in added.items() if token.lstrip}
        self._swallows_right = {text for text, (_, token) in added.items() if token.rstrip}
        self._plain = _remove_added_tokens(written, self.controls)
        longest_first = sorted(self.controls, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._heads = {text[:size] for text in self.controls for size in range(1, len(text))}
        self._tails = {text[-size:] for text in self.controls for size in range(1, len(text))}
        self._longest = max(map(len, self.controls), default=0)

    def shield(self, text: str) -> str:
        """Break up text that looks like a control token, so that it is encoded as ordinary text.
        Lone surrogates are replaced with U+FFFD."""
        if not text.isascii():
            text = unmark(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        while (broken := self._pattern.sub(lambda m: m[0][0] + _INSIDE + m[0][1:], text)) != text:
            text = broken  # the text after the break may be another control text
        return text

    def shield_whole(self, text: str) -> str:
        """Shield text, and keep it from forming a control token together with the surrounding
        template text. Leading and trailing whitespace stays outside the marks, so that templates
        can still strip it."""
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
        """Encode rendered text. Marked text never becomes a control token."""
        expected = [self.controls[m[0]] for m in self._pattern.finditer(text)]
        if _INSIDE not in text:
            ids = self._whole.encode(unmark(text), add_special_tokens=False).ids
            if [index for index in ids if index in self.text_of] == expected:
                return ids
        return self.encode_in_pieces(text)

    def encode_in_pieces(self, text: str) -> list[int]:
        """Encode rendered text, tokenizing everything between two control tokens in a single
        call."""
        ids: list[int] = []
        end, strip = 0, False
        for match in self._pattern.finditer(text):
            piece = text[end : match.start()]
            ids += self._encode_plain(piece, left=strip, right=match[0] in self._swallows_left)
            ids.append(self.controls[match[0]])
            end, strip = match.end(), match[0] in self._swallows_right
        return ids + self._encode_plain(text[end:], left=strip, right=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids, inserting a mark into text that only looks like a control token."""
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

    def remove_special(self, text: str) -> str:
        """Remove special tokens from text, such as the ones that Command A puts around answers."""
        return self._special.sub("", text)

    def _encode_plain(self, text: str, *, left: bool, right: bool) -> list[int]:
        text = unmark(text)
        text = text.lstrip() if left else text
        text = text.rstrip() if right else text
        return self._plain.encode(text, add_special_tokens=False).ids if text else []


def _remove_added_tokens(written: str, controls: dict[str, int]) -> Tokenizer:
    """Build a copy of a tokenizer without its control tokens. `written` is the text of its
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


_DEVELOPER = re.compile("[\"']developer[\"']")  # in a template that knows this role


def drop_old_thinking(messages: Sequence[Message]) -> list[Message]:
    """Drop the thinking from all turns before the last user message.

    Thinking that is followed only by tool results is kept, as are all tool calls and results
    (DeepSeek-V3.2, 2025, section 3.2.1).
    """
    users = [i for i, message in enumerate(messages) if message["role"] in USER_ROLES]
    last = users[-1] if users else -1
    return [
        {key: value for key, value in message.items() if key != "reasoning_content"}
        if message["role"] == "assistant" and i < last
        else message
        for i, message in enumerate(messages)
    ]


def call_message(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def name_of(tokenizer: Any) -> str:
    """Return a description of how a tokenizer's conversations are rendered, for use in error
    messages."""
    coded = written_by_code(tokenizer)
    return "DeepSeek-V3.2's encoding" if coded else "the tokenizer's chat template"


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    add_generation_prompt: bool = True,
) -> str:
    """Render a conversation with the chat template or with DeepSeek-V3.2's code. With
    `add_generation_prompt`, the text ends with the start of the policy's turn.

    Developer messages become system messages if the template doesn't support them. Template errors
    are passed through unchanged.
    """
    if written_by_code(tokenizer):
        return _deepseek_v32(messages, tools, thinking=thinking)
    if not _DEVELOPER.search(str(tokenizer.chat_template)):
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    return tokenizer.apply_chat_template(
        messages,
        tools=list(tools) or None,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=thinking,  # Qwen3 and most others
        thinking=thinking,  # DeepSeek, Granite
        reasoning=thinking,  # Command A
        tokenize=False,
    )


def render_prompt(
    tokenizer: Any, prompt: Prompt, marks: ThinkingMarks = THINK
) -> tuple[list[int], bool]:
    """Convert a prompt to token ids with the chat template. A raw prompt is tokenized as is,
    preceded by the tokenizer's start token. Also returns True if the prompt ends inside a think
    block, which the policy has to close.

    `marks` are the strings that open and close the model's thinking. Raises ValueError if there are
    no token ids.
    """
    if prompt.raw:
        (message,) = prompt.messages
        text = str(message["content"])
        token_ids = tokenizer.encode(text, add_special_tokens=True)
        if token_ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers end every text
            token_ids = token_ids[:-1]
    else:
        messages = [dict(message) for message in prompt.messages]
        tools = [dict(tool) for tool in prompt.tools]
        text = render(tokenizer, messages, tools, thinking=prompt.thinking)
        check_shown(messages, text)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not token_ids:
        source = "tokenizer" if prompt.raw else "chat template"
        raise ValueError(f"prompt {prompt.prompt_id}: the {source} renders it to nothing")
    return token_ids, text.rstrip().endswith(marks.open)


def check_shown(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise ValueError if the rendered `text` is missing a developer message, or a system message
    that comes after the first message."""
    for number, message in enumerate(messages):
        late = number > 0 and message["role"] == "system"
        checked = late or message["role"] == "developer"
        if checked and str(message["content"]).strip() not in text:
            raise ValueError(
                f"the chat template does not show message {number}, of the role "
                f"{message['role']}, at this place; put it first"
            )


def _deepseek_v32(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, thinking: bool
) -> str:
    renamed = [
        {("reasoning" if key == "reasoning_content" else key): v for key, v in message.items()}
        for message in messages
    ]
    if tools and renamed[0]["role"] == "system":
        renamed[0]["tools"] = list(tools)
    elif tools:
        renamed.insert(0, {"role": "system", "tools": list(tools)})
    # `drop_old_thinking` has dropped old thinking; the code would also drop developer messages.
    mode = "thinking" if thinking else "chat"
    try:
        return _load_deepseek_code().encode_messages(
            renamed, thinking_mode=mode, drop_thinking=False
        )
    except ValueError as error:
        raise ValueError(f"DeepSeek-V3.2's encoding refuses these messages: {error}") from error


@cache
def _load_deepseek_code() -> Any:
    """Load vLLM's copy of DeepSeek's encoding code without importing vLLM, which takes several
    seconds."""
    vllm = importlib.util.find_spec("vllm")
    place = Path((vllm and vllm.origin) or "").parent / "tokenizers" / "deepseek_v32_encoding.py"
    spec = importlib.util.spec_from_file_location("deepseek_v32_encoding", place)
    if not place.is_file() or spec is None or spec.loader is None:
        raise ValueError("DeepSeek-V3.2's format needs vLLM; install the extra `cpu` or `gpu`")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
