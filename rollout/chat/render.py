"""Renders messages with a tokenizer's Jinja template or with DeepSeek-V3.2's own code."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from keel.model.hub import written_by_code
from keel.rl.turns import USER_ROLES, Message
from keel.rollout.chat.encoding import Encoder, map_strings

_DEVELOPER = re.compile("[\"']developer[\"']")
"""Matches a comparison of a message's role with developer in a chat template."""


def retained(messages: Sequence[Message]) -> list[Message]:
    """Return `messages` without the thinking that precedes the last user message. Thinking is kept
    as long as only tool results follow it, and dropped once a new user message arrives. Tool calls
    and results are always kept (DeepSeek-V3.2, 2025, section 3.2.1)."""
    users = [i for i, message in enumerate(messages) if message["role"] in USER_ROLES]
    last = users[-1] if users else -1
    return [
        {key: value for key, value in message.items() if key != "reasoning_content"}
        if message["role"] == "assistant" and i < last
        else message
        for i, message in enumerate(messages)
    ]


def call_message(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a call to an entry of an assistant message's `tool_calls`."""
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def name_of(tokenizer: Any) -> str:
    """Return the name of the code that renders a tokenizer's conversations, for messages to the
    user."""
    coded = written_by_code(tokenizer)
    return "DeepSeek-V3.2's encoding" if coded else "the tokenizer's chat template"


class Renderer:
    """A model's chat template, and how it expects tools and call arguments to be passed."""

    def __init__(self, tokenizer: Any, encoder: Encoder) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._code = written_by_code(tokenizer)
        self.name = name_of(tokenizer)
        if not self._code and not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template. Set model.tokenizer to an instruction-tuned "
                "model of the same family"
            )
        template = str(tokenizer.chat_template or "")
        self._omits_tools = "<｜tool▁calls▁begin｜>" in template and "tools" not in template
        self._arguments_as_text = False
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [call_message("call_0", "b", {"c": "d"})]},
            {"role": "tool", "content": "e", "tool_call_id": "call_0", "name": "b"},
        ]
        try:
            self.render(messages, (), thinking=False)
        except ValueError:
            self._arguments_as_text = True

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        thinking: bool,
        speak: bool = True,
    ) -> str:
        """Render a conversation as text with marks. If `speak` is set, the text ends with the start
        of the policy's turn. Raises ValueError if the template rejects the messages."""
        shielded = [self._shield_message(message) for message in messages]
        offered: Any = map_strings(tools, self._encoder.shield)
        if offered and self._omits_tools:
            shielded, offered = _with_tools(shielded, offered), ()
        try:
            return render(self._tokenizer, shielded, offered, thinking=thinking, speak=speak)
        except (TemplateError, TypeError, ValueError) as error:
            if self._code:
                raise
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"{self.name} refuses messages of the roles {roles}: {error}. Use a model whose "
                "template takes them, or set model.chat_template"
            ) from error

    def _shield_message(self, message: Message) -> dict[str, Any]:
        shielded: dict[str, Any] = {"role": message["role"], "content": ""}
        for key, value in message.items():
            if key in ("content", "reasoning_content") and isinstance(value, str):
                shielded[key] = self._encoder.shield_whole(value)
            elif key == "tool_calls":
                if value:
                    shielded[key] = [self._shield_call(call) for call in value]
            elif key != "role" and value is not None:
                shielded[key] = map_strings(value, self._encoder.shield)
        return shielded

    def _shield_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        call = map_strings(call, self._encoder.shield)
        function = dict(call.get("function") or call)
        arguments = function.get("arguments") or {}
        if self._arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not self._arguments_as_text and isinstance(arguments, str):
            arguments = json.loads(arguments)
        return {**call, "function": {**function, "arguments": arguments}}


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    speak: bool = True,
) -> str:
    """Render a conversation with the chat template or with DeepSeek-V3.2's code. If `speak` is set,
    the text ends with the start of the policy's turn. Developer messages become system messages if
    the template does not know the role developer. Errors from the template are raised unchanged."""
    if written_by_code(tokenizer):
        return _deepseek_v32(messages, tools, thinking=thinking)
    if not _DEVELOPER.search(str(tokenizer.chat_template)):
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    return tokenizer.apply_chat_template(
        messages,
        tools=list(tools) or None,
        add_generation_prompt=speak,
        enable_thinking=thinking,  # Qwen3 and most others
        thinking=thinking,  # DeepSeek, Granite
        reasoning=thinking,  # Command A
        tokenize=False,
    )


def check_shown(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise ValueError if the rendered `text` lacks a developer message, or a system message that
    is not the first message."""
    for number, message in enumerate(messages):
        late = number > 0 and message["role"] == "system"
        checked = late or message["role"] == "developer"
        if checked and str(message["content"]).strip() not in text:
            raise ValueError(
                f"the model's chat template does not show message {number}, of the role "
                f"{message['role']}, at this place; put it first"
            )


def _with_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Add the tool descriptions and the call format to the system message, for DeepSeek-V3.1."""
    listed = [
        f"### {function['name']}\nDescription: {function.get('description', '')}\n\n"
        f"Parameters: {json.dumps(function.get('parameters', {}), ensure_ascii=False)}\n"
        for function in (tool["function"] for tool in tools)
    ]
    form = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{arguments as JSON}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    section = "\n".join(["## Tools", *listed, f"Call a tool in exactly this form:\n{form}"])
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": section}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{section}"}, *messages[1:]]


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
    # `retained` has already dropped old thinking; the code would also drop developer messages.
    mode = "thinking" if thinking else "chat"
    try:
        return _deepseek_code().encode_messages(renamed, thinking_mode=mode, drop_thinking=False)
    except ValueError as error:
        raise ValueError(f"DeepSeek-V3.2's encoding refuses these messages: {error}") from error


@cache
def _deepseek_code() -> Any:
    """Load vLLM's copy of DeepSeek's code. Importing vLLM itself would take seconds."""
    vllm = importlib.util.find_spec("vllm")
    place = Path((vllm and vllm.origin) or "").parent / "tokenizers" / "deepseek_v32_encoding.py"
    spec = importlib.util.spec_from_file_location("deepseek_v32_encoding", place)
    if not place.is_file() or spec is None or spec.loader is None:
        raise ValueError(
            "DeepSeek-V3.2's format needs vllm/tokenizers/deepseek_v32_encoding.py. Install the "
            "extra `cpu` or `gpu`"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
