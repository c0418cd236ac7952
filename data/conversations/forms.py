"""Read conversations in common formats and convert them to a single one.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"messages": […, {"role": "assistant", "reasoning_content": "…", "content": "…"}]}
    {"messages": […], "tools": [{"type": "function", "function": {…}}], "thinking": true}
    {"prompt": "…", "completion": "…"}             texts, or lists of messages
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}

Assistant messages may call tools, either in OpenAI's format (`tool_calls`) or in ShareGPT's
(`function_call`, answered by an `observation`). Their reasoning may be in `reasoning_content`,
`reasoning`, `thinking` or a `<think>` block at the start of the content. A message with
`"weight": 0` is not trained on.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from keel.configs.schema import ConversationsConfig
from keel.data.items import digest, question_digest
from keel.data.rows import BadLine, json_type, parse_json
from keel.rl.records import recorded_segments
from keel.rl.turns import USER_ROLES, Message
from keel.rl.types import Segment

_FORMS = ("messages", "prompt", "conversations")  # keys that identify each conversation format
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard"), "assistant"),
    **dict.fromkeys(("observation", "tool"), "tool"),
    **{name: name for name in ("system", "function_call")},
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")
KNOWN = frozenset({*_FORMS, "completion", "tools", "thinking", "id", "system"})
"""Keys of a line."""
_FOREIGN_WEIGHTS = ("loss", "train", "loss_mask")  # names for the key `weight` in other tools
_THINK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def _parse_conversation(
    record: Mapping[str, Any], system: str, *, rendered: bool = True
) -> tuple[list[Message], list[int]]:
    """Parse the conversation on a line and pick the messages to train on. Returns the messages and
    the indices of those to train on.

    `system` is added to conversations that have no system message. If `rendered` is true, the chat
    template will produce the tokens, so every message to train on needs content. If not, a message
    can be a bare end-of-turn token or a malformed call. Raises BadLine if the conversation can't be
    read.
    """
    forms = [key for key in _FORMS if key in record]
    if len(forms) != 1 or (forms == ["prompt"] and "completion" not in record):
        raise BadLine(
            f"has {', '.join(record) or 'no keys'}, but needs `messages`, `conversations`, or "
            "`prompt` and `completion`, and only one of these. Name or exclude columns by the "
            "source's columns: {prompt: …, completion: …, messages: ''}"
        )
    (form,) = forms
    if form == "prompt":
        prompt, completion = (_either(record[key], key) for key in ("prompt", "completion"))
        context = ({**m, "weight": 0} if m.get("role") == "assistant" else m for m in prompt)
        entries = [*context, *completion]
    else:
        placed = _parse_messages(record[form], form)
        entries = [_of_sharegpt(m, at) if form == "conversations" else m for m, at in placed]
    line_system = record.get("system")
    if line_system is not None and not isinstance(line_system, str):
        raise BadLine(f"`system` must be text, is {json_type(line_system)}")
    if (content := line_system or system) and entries[0].get("role") != "system":
        entries = [{"role": "system", "content": content}, *entries]
    messages = [_message(m, f"messages[{place}]") for place, m in enumerate(entries)]
    _name_results(messages)
    learned = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and entries[place].get("weight") != 0
    ]
    if rendered and not learned:
        raise BadLine("has no assistant message to learn")
    if learned[:1] == [0]:
        raise BadLine("begins with an assistant message; it needs something to answer")
    for place in learned if rendered else ():
        message = messages[place]
        if not message["content"].strip() and not {"reasoning_content", "tool_calls"} & {*message}:
            raise BadLine(f"`messages[{place}]` is empty; set its `weight: 0` to not learn it")
    return [*messages], learned


def parse_chat(messages: Any) -> list[dict[str, Any]]:
    """Parse the messages of an RL prompt, which must end where the policy's turn begins. Raises
    BadLine if they cannot be read."""
    chat: list[dict[str, Any]] = []
    for message, at in _parse_messages(messages, "messages"):
        if message.get("role") not in _ROLES:
            raise BadLine(
                f"`{at}.role` is {message.get('role')!r}, must be one of {', '.join(_ROLES)}"
            )
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise BadLine(f"`{at}.content` must be text, is {json_type(content)}")
        message = {**message, "content": _content_text(content, f"{at}.content")}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = _parse_tool_calls(calls, f"{at}.tool_calls")
        chat.append(message)
    if chat[-1]["role"] not in ("tool", *USER_ROLES):
        raise BadLine(f"the last message is the {chat[-1]['role']}'s, so nothing is to be answered")
    return chat


def _parse_tools(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a line's tools in the format that chat templates expect."""
    value = record.get("tools") or []
    if isinstance(value, str):
        value = parse_json("tools", value)
    if not isinstance(value, list):
        raise BadLine(f"`tools` must be a list, is {json_type(value)}")
    tools: list[dict[str, Any]] = []
    for place, tool in enumerate(cast(list[Any], value)):
        function = tool.get("function", tool) if isinstance(tool, dict) else tool
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadLine(f"`tools[{place}]` must be an object with the `name` of a function")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        function = {"description": "", **function, "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def _is_thinking(record: Mapping[str, Any], messages: Sequence[Message], mode: str) -> bool:
    """Return whether to render a line in thinking mode. `mode` is the source's setting."""
    value = record.get("thinking")
    if value is not None and not isinstance(value, bool):
        raise BadLine(f"`thinking` must be true or false, is {json_type(value)}")
    if mode != "as-written":
        return mode == "with"
    return any("reasoning_content" in one for one in messages) if value is None else value


def _parse_messages(value: Any, key: str) -> list[tuple[dict[str, Any], str]]:
    """Return the messages in a list, each with a location to use in error messages."""
    if not isinstance(value, list) or not value:
        raise BadLine(f"`{key}` must be a list of at least one message, is {json_type(value)}")
    entries = [(m, f"{key}[{place}]") for place, m in enumerate(cast(list[Any], value))]
    return [(_object(message, at), at) for message, at in entries]


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadLine(f"`{at}` must be an object, is {json_type(value)}")
    return cast(dict[str, Any], value)


def _either(value: Any, key: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user" if key == "prompt" else "assistant", "content": value}]
    return [message for message, _ in _parse_messages(value, key)]


def _of_sharegpt(message: dict[str, Any], at: str) -> dict[str, Any]:
    if "role" in message:
        return message
    role, value = _SHAREGPT.get(str(message.get("from"))), message.get("value")
    if role is None or not isinstance(value, str):
        raise BadLine(f"`{at}` must have `value`, a text, and `from`: {', '.join(_SHAREGPT)}")
    entry = {key: value for key, value in message.items() if key not in ("from", "value")}
    if role == "function_call":
        calls = parse_json(f"{at}.value", value)
        calls = calls if isinstance(calls, list) else [calls]
        return {**entry, "role": "assistant", "content": "", "tool_calls": calls}
    return {**entry, "role": role, "content": value}


def _message(entry: Mapping[str, Any], at: str) -> dict[str, Any]:
    role = entry.get("role")
    if role not in _ROLES:
        raise BadLine(f"`{at}.role` is {role!r}, must be one of {', '.join(_ROLES)}")
    if wrong := next((key for key in _FOREIGN_WEIGHTS if entry.get(key) is not None), ""):
        raise BadLine(f"`{at}.{wrong}` is unknown; use `weight`, 1 to learn a message or 0")
    if entry.get("weight") not in (None, 0, 1):
        raise BadLine(f"`{at}.weight` is {entry['weight']!r}, must be 0 or 1")
    content = _content_text(entry.get("content"), f"{at}.content")
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        message |= {k: str(entry[k]) for k in ("tool_call_id", "name") if entry.get(k)}
    if role != "assistant":
        return message
    reasoning = next((entry[key] for key in _REASONING if entry.get(key)), None)
    if reasoning is None and (match := _THINK.match(content)):
        reasoning, message["content"] = match[1], content[match.end() :].strip()
    if reasoning is not None and not isinstance(reasoning, str):
        raise BadLine(f"the reasoning of `{at}` must be text, is {json_type(reasoning)}")
    if reasoning and reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    if calls := entry.get("tool_calls"):
        message["tool_calls"] = _parse_tool_calls(calls, f"{at}.tool_calls")
    return message


def _content_text(value: Any, at: str) -> str:
    """Return a message's content as text. The content can be text, a list of text parts, or
    null."""
    if value is None:
        return ""
    if isinstance(value, list):
        parts = [
            part.get("text")
            if isinstance(part, dict) and part.get("type", "text") == "text"
            else None
            for part in cast(list[Any], value)
        ]
        if all(isinstance(part, str) for part in parts):
            return "".join(cast(list[str], parts))
    if not isinstance(value, str):
        raise BadLine(f"`{at}` must be text, is {json_type(value)}")
    return value


def _parse_tool_calls(calls: Any, at: str) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = []
    for call, place in _parse_messages(calls, at):
        function = _object(call.get("function", call), f"{place}.function")
        name, arguments = function.get("name"), function.get("arguments") or {}
        if not isinstance(name, str) or not name:
            raise BadLine(f"`{place}.function.name` must be text, is {json_type(name)}")
        if isinstance(arguments, str):
            arguments = parse_json(f"{place}.function.arguments", arguments)
        function = {"name": name, "arguments": _object(arguments, f"{place}.function.arguments")}
        parsed.append({"id": str(call.get("id") or ""), "type": "function", "function": function})
    return parsed


def _name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Give every tool call an ID, and every tool result the ID and name of its call.

    A result without an ID belongs to the first unanswered call. If the result has a name, it must
    match the call's name. Raises BadLine if a result matches no call.
    """
    open_calls: dict[str, str] = {}
    for place, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            call["id"] = call["id"] or f"call_{place}_{number}"
            open_calls[call["id"]] = call["function"]["name"]
        if message["role"] == "tool":
            name = message.get("name")
            candidates = (key for key, called in open_calls.items() if name in (None, called))
            call_id = message.setdefault("tool_call_id", next(candidates, ""))
            if call_id not in open_calls:
                raise BadLine(f"`messages[{place}]` is the result of no earlier call")
            message.setdefault("name", open_calls.pop(call_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A training example: a single conversation, or a single window of a text."""

    origin: str  # location of the conversation for messages: `file:line`, or the task and index
    messages: tuple[Message, ...] = ()
    trained: tuple[int, ...] = ()  # indices of the messages to train on
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = False
    segments: tuple[Segment, ...] = ()
    """Known tokens, either sampled by a policy with the same tokenizer or from the window of a
    text."""
    document: str = ""  # digest of the whole document, which serves as the example's question
    window: int = 0  # index of the window in its document
    prompt_id: str = ""  # `prompt_id` of the prompt that a sampled conversation answers

    @property
    def question(self) -> str:
        """A digest of the first question, like `keel.data.items.Item.question`. Conversations that
        share a question are either all used for training or all held out."""
        if self.document:
            return self.document
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        first = (*self.trained, *answers, len(self.messages))[0]
        return question_digest(self.messages[:first])

    @property
    def content(self) -> str:
        if self.document:
            return f"{self.document}/{self.window}"
        whole = [list(self.messages), self.tools, self.trained, self.thinking]
        return digest(json.dumps(whole, sort_keys=True, default=str))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSource:
    examples: tuple[Example, ...]
    skipped: tuple[str, ...] = ()  # reason for skipping each malformed line
    unselected: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of dropped trajectories for each reason."""


def parse_example(record: Mapping[str, Any], at: str, source: ConversationsConfig) -> Example:
    """Parse the conversation on a line. `at` is its location. Raises BadLine if it cannot be
    read."""
    segments, is_sampled = (), source.source == "trajectories"
    if is_sampled and record.get("segments"):
        try:
            segments = recorded_segments(record, at)
        except ValueError as error:
            raise BadLine(str(error)) from error
    messages, learned = _parse_conversation(record, source.system, rendered=not segments)
    return Example(
        origin=at,
        messages=tuple(messages),
        trained=tuple(learned),
        tools=tuple(_parse_tools(record)),
        thinking=_is_thinking(record, messages, source.thinking),
        segments=segments,
        prompt_id=str(record.get("id") or "") if is_sampled else "",
    )


Render = Callable[[Example], Sequence[Segment]]
"""Render a conversation as contexts and mark the tokens to train on. Raises ValueError if the
model's chat template cannot express the conversation."""
