"""Reads the common formats of conversations into one.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"messages": […, {"role": "assistant", "reasoning_content": "…", "content": "…"}]}
    {"messages": […], "tools": [{"type": "function", "function": {…}}], "thinking": true}
    {"prompt": "…", "completion": "…"}             texts, or lists of messages
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}

Assistant messages may call tools (OpenAI's `tool_calls`; ShareGPT's `function_call`, answered by an
`observation`) and hold reasoning in `reasoning_content`, `reasoning`, `thinking` or a `<think>`
block at the start of the content. `"weight": 0` excludes a message from learning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from keel.data.rows.read import BadLine, kind_of
from keel.rl.turns import Message

FORMS = ("messages", "prompt", "conversations")
"""The keys by which each conversation format is recognized."""
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "system": "system",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")
KNOWN = frozenset({*FORMS, "completion", "tools", "thinking", "id", "system"})
_MESSAGE_KEYS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "name", "weight", *_REASONING}
)
_SHAREGPT_KEYS = frozenset({"from", "value", "weight"})
_FOREIGN_WEIGHTS = ("loss", "train", "loss_mask")
"""What other programs call the key `weight`."""
_THINK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def conversation_of(
    record: Mapping[str, Any], system: str, *, rendered: bool = True
) -> tuple[list[Message], list[int]]:
    """Read the conversation on a line, and find which of its messages to learn.

    `system` is the source's system message, which is added to conversations that have none. If
    `rendered` is True, the template produces the tokens, so every message to learn needs content.
    Otherwise the tokens are known and may be just the end of a turn or a malformed call. Raises
    BadLine.
    """
    forms = [key for key in FORMS if key in record]
    if len(forms) != 1:
        has = " and ".join(f"`{key}`" for key in forms) or f"the keys {', '.join(record) or 'none'}"
        others = ", ".join(f"{key}: ''" for key in forms[1:])
        cure = f"; exclude the others by the source's columns: {{{others}}}" if others else ""
        raise BadLine(f"has {has}, but needs exactly one of {', '.join(FORMS)}{cure}")
    (form,) = forms
    if form == "prompt":
        if "completion" not in record:
            raise BadLine(
                f"has a `prompt` and no `completion`, only {', '.join(record)}; name its column by "
                "the source's columns: {completion: …}"
            )
        prompt, completion = (_either(record, key) for key in ("prompt", "completion"))
        context = ({**m, "weight": 0} if m.get("role") == "assistant" else m for m in prompt)
        entries = [*context, *completion]
    elif form == "conversations":
        entries = [_of_sharegpt(m, at) for m, at in _entries(record, form)]
    else:
        entries = [_entry(m, at) for m, at in _entries(record, form)]
    line_system = record.get("system")
    if line_system is not None and not isinstance(line_system, str):
        raise BadLine(f"`system` must be text, is {kind_of(line_system)}")
    if (content := line_system or system) and entries[0].get("role") != "system":
        entries = [{"role": "system", "content": content}, *entries]
    messages = [_message(m, f"messages[{place}]") for place, m in enumerate(entries)]
    _name_results(messages)
    learned = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and _weight(entries[place], f"messages[{place}]")
    ]
    if rendered and not learned:
        raise BadLine("has no assistant message to learn")
    if learned[:1] == [0]:
        raise BadLine("begins with an assistant message; it needs something to answer")
    for place in learned if rendered else ():
        message = messages[place]
        parts = ("reasoning_content" in message, "tool_calls" in message)
        if not (message["content"].strip() or any(parts)):
            raise BadLine(f"`messages[{place}]` is empty; set its `weight: 0` to not learn it")
    return [*messages], learned


def tools_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools on a line in the form that chat templates expect. Raises BadLine."""
    value = record.get("tools") or []
    if isinstance(value, str):
        value = _json(value, "tools")
    if not isinstance(value, list):
        raise BadLine(f"`tools` must be a list, is {kind_of(value)}")
    tools: list[dict[str, Any]] = []
    for place, tool in enumerate(cast(list[Any], value)):
        function = tool.get("function", tool) if isinstance(tool, dict) else tool
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadLine(f"`tools[{place}]` must be an object with the `name` of a function")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        function = {"description": "", **function, "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def thinking_of(record: Mapping[str, Any], messages: Sequence[Message], mode: str) -> bool:
    """Return whether to render a line in thinking mode; `mode` is the source's setting.

    Raises BadLine.
    """
    value = record.get("thinking")
    if value is not None and not isinstance(value, bool):
        raise BadLine(f"`thinking` must be true or false, is {kind_of(value)}")
    if mode != "as-written":
        return mode == "with"
    return any("reasoning_content" in one for one in messages) if value is None else value


def unread_of(record: Mapping[str, Any], known: frozenset[str] = KNOWN) -> frozenset[str]:
    """Return the keys in a line and its messages that are not used."""
    keys = {
        f"{form}[].{key}"
        for form in (*FORMS, "completion")
        for message in (record[form] if isinstance(record.get(form), list) else ())
        if isinstance(message, dict)
        for key, value in message.items()
        if key not in (_MESSAGE_KEYS if "role" in message else _SHAREGPT_KEYS) and value is not None
    }
    return frozenset({*(key for key in record if key not in known), *keys})


def _entries(record: Mapping[str, Any], key: str) -> list[tuple[Any, str]]:
    value = record[key]
    if not isinstance(value, list) or not value:
        raise BadLine(f"`{key}` must be a list of at least one message, is {kind_of(value)}")
    return [(message, f"{key}[{place}]") for place, message in enumerate(value)]


def _object(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadLine(f"`{at}` must be an object, is {kind_of(message)}")
    return cast(dict[str, Any], message)


def _entry(message: Any, at: str) -> dict[str, Any]:
    """Check a message as it was written. Raises BadLine if it has another program's weight key."""
    entry = _object(message, at)
    if wrong := next((key for key in _FOREIGN_WEIGHTS if entry.get(key) is not None), ""):
        raise BadLine(f"`{at}.{wrong}` is unknown; use `weight`, 1 to learn a message or 0")
    return entry


def _either(record: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the messages in `prompt` or `completion`, which may also be plain text."""
    if isinstance(record[key], str):
        role = "user" if key == "prompt" else "assistant"
        return [{"role": role, "content": record[key]}]
    return [_entry(message, at) for message, at in _entries(record, key)]


def _of_sharegpt(entry: Any, at: str) -> dict[str, Any]:
    message = _entry(entry, at)
    if "role" in message:
        return message
    role, value = _SHAREGPT.get(str(message.get("from"))), message.get("value")
    if role is None:
        raise BadLine(
            f"`{at}.from` is {message.get('from')!r}, must be one of {', '.join(_SHAREGPT)}"
        )
    if not isinstance(value, str):
        raise BadLine(f"`{at}.value` must be text, is {kind_of(value)}")
    weight = {"weight": message["weight"]} if "weight" in message else {}
    if role == "function_call":
        calls = _json(value, f"{at}.value")
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": "assistant", "content": "", "tool_calls": calls, **weight}
    return {"role": role, "content": value, **weight}


def _message(entry: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Convert to a `keel.rl.turns.Message`."""
    role = entry.get("role")
    if role not in ROLES:
        raise BadLine(f"`{at}.role` is {role!r}, must be one of {', '.join(ROLES)}")
    content = text_of(entry.get("content"), f"{at}.content")
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        message |= {k: str(entry[k]) for k in ("tool_call_id", "name") if entry.get(k)}
    if role != "assistant":
        return message
    reasoning = next((entry[key] for key in _REASONING if entry.get(key)), None)
    if reasoning is None and (match := _THINK.match(content)):
        reasoning, message["content"] = match[1], content[match.end() :].strip()
    if reasoning is not None and not isinstance(reasoning, str):
        raise BadLine(f"the reasoning of `{at}` must be text, is {kind_of(reasoning)}")
    if reasoning and reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    if calls := entry.get("tool_calls"):
        message["tool_calls"] = calls_of(calls, f"{at}.tool_calls")
    return message


def text_of(value: Any, at: str) -> str:
    """Return a message's content, given as text, a list of text parts, or null. Raises BadLine."""
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
        raise BadLine(f"`{at}` must be text, is {kind_of(value)}")
    return value


def calls_of(calls: Any, at: str) -> list[dict[str, Any]]:
    """Return a message's tool calls, with their arguments parsed to objects. Raises BadLine."""
    if not isinstance(calls, list):
        raise BadLine(f"`{at}` must be a list, is {kind_of(calls)}")
    return [_call(call, f"{at}[{place}]") for place, call in enumerate(cast(list[Any], calls))]


def _call(entry: Any, at: str) -> dict[str, Any]:
    call = _object(entry, at)
    function = _object(call.get("function", call), f"{at}.function")
    name, arguments = function.get("name"), function.get("arguments") or {}
    if not isinstance(name, str) or not name:
        raise BadLine(f"`{at}.function.name` must be text, is {kind_of(name)}")
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{at}.function.arguments")
    if not isinstance(arguments, dict):
        raise BadLine(f"`{at}.function.arguments` must be an object, is {kind_of(arguments)}")
    function = {"name": name, "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}


def _name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Give every tool call an ID, and every result the ID and name of its call.

    A result without an ID answers the first open call, or the first one with the same name. Calls
    made since the last user message come before older ones. Raises BadLine.
    """
    open_calls: dict[str, str] = {}
    older: set[str] = set()  # open calls from before the last user message
    for place, message in enumerate(messages):
        if message["role"] == "user":
            older = set(open_calls)
        for number, call in enumerate(message.get("tool_calls", ())):
            call["id"] = call["id"] or f"call_{place}_{number}"
            open_calls[call["id"]] = call["function"]["name"]
            older.discard(call["id"])
        if message["role"] == "tool":
            name = message.get("name")
            candidates = (
                call_id
                for call_id in sorted(open_calls, key=older.__contains__)
                if name in (None, open_calls[call_id])
            )
            call_id = message.setdefault("tool_call_id", next(candidates, ""))
            if call_id not in open_calls:
                label = f" (tool_call_id {call_id!r})" if call_id else f" (name {name!r})"
                raise BadLine(
                    f"`messages[{place}]` is the result of no earlier call"
                    f"{label if call_id or name else ''}"
                )
            message.setdefault("name", open_calls.pop(call_id))


def _weight(message: Mapping[str, Any], at: str) -> bool:
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise BadLine(f"`{at}.weight` is {weight!r}, must be 0 or 1")
    return weight != 0


def _json(text: str, at: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadLine(f"`{at}` is not JSON: {error}") from error
