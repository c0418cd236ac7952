"""The forms in which people keep conversations, read as one.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"messages": […, {"role": "assistant", "reasoning_content": "…", "content": "…"}]}
    {"messages": […], "tools": [{"type": "function", "function": {…}}], "thinking": true}
    {"prompt": "…", "completion": "…"}             texts, or lists of messages
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}

Assistant's messages may call tools (`tool_calls`, as OpenAI has them; ShareGPT: `function_call`
with the answer as `observation`) and hold their reasoning in `reasoning_content`, `reasoning`,
`thinking` or in a `<think>` block that the content begins with. `"weight": 0` makes one of them
context that is not learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from keel.data.rows.lines import BadLine, kind_of
from keel.rl.turns import Message

FORMS = ("messages", "prompt", "conversations")
"""The keys that a line's form is known by."""
SHAREGPT = {
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
REASONING = ("reasoning_content", "reasoning", "thinking")
KNOWN = frozenset({*FORMS, "completion", "tools", "thinking", "id", "system"})
IN_MESSAGES = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "name", "weight", *REASONING}
)
IN_SHAREGPT = frozenset({"from", "value", "weight"})
WEIGHTS_ELSEWHERE = ("loss", "train", "loss_mask")
"""What other programs call `weight`."""
_THINK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def conversation_of(
    record: Mapping[str, Any], system: str, *, rendered: bool = True
) -> tuple[list[Message], list[int]]:
    """The messages of a line in one form, and the places of those to learn. system: of the source,
    for a conversation without one. rendered: what is learned is written by the template, so there
    has to be a message that says something. False: the tokens to learn are known, and may be the
    end of a turn or a malformed call alone.

    Raises BadLine.
    """
    given = [key for key in FORMS if key in record]
    if len(given) != 1:
        has = " and ".join(f"`{key}`" for key in given) or f"the keys {', '.join(record) or 'none'}"
        others = ", ".join(f"{key}: ''" for key in given[1:])
        cure = f"; where another is something else, say so by the source's columns: {{{others}}}"
        raise BadLine(
            f"has {has}: it needs exactly one of {', '.join(FORMS)}{cure if others else ''}"
        )
    (form,) = given
    if form == "prompt":
        if "completion" not in record:
            has = ", ".join(record)
            raise BadLine(
                f"has a `prompt` and no `completion`; it has {has}; say which of them "
                "it is by the source's columns: {completion: …}"
            )
        asked, said = (_either(record, key) for key in ("prompt", "completion"))
        written = [*({**m, "weight": 0} if _is_said(m) else m for m in asked), *said]
    elif form == "conversations":
        written = [_of_sharegpt(m, at) for m, at in _entries(record, form)]
    else:
        written = [_entry(m, at) for m, at in _entries(record, form)]
    own = record.get("system")
    if own is not None and not isinstance(own, str):
        raise BadLine(f"`system` must be text, is {kind_of(own)}")
    if (told := own or system) and written[0].get("role") != "system":
        written = [{"role": "system", "content": told}, *written]
    messages = [_message(m, f"messages[{place}]") for place, m in enumerate(written)]
    _name_results(messages)
    learned = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and _weight(written[place], f"messages[{place}]")
    ]
    if rendered and not learned:
        raise BadLine("has no message of the assistant's to learn")
    if learned[:1] == [0]:
        raise BadLine("begins with a message of the assistant's: it needs something to answer")
    for place in learned if rendered else ():
        one = messages[place]
        if not (one["content"].strip() or "reasoning_content" in one or "tool_calls" in one):
            raise BadLine(
                f"`messages[{place}]` is the assistant's, and says nothing (`weight: 0` makes it "
                "context that is not learned)"
            )
    return [*messages], learned


def tools_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As chat templates have them. Raises BadLine."""
    given = record.get("tools") or []
    if isinstance(given, str):
        given = _json(given, "tools")
    if not isinstance(given, list):
        raise BadLine(f"`tools` must be a list, is {kind_of(given)}")
    tools: list[dict[str, Any]] = []
    for place, tool in enumerate(cast(list[Any], given)):
        function = tool.get("function", tool) if isinstance(tool, dict) else tool
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadLine(f"`tools[{place}]` must be an object with the `name` of a function")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        function = {"description": "", **function, "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def thinking_of(record: Mapping[str, Any], messages: Sequence[Message], mode: str) -> bool:
    """Whether the template is asked for thinking; `mode`: of the source. Raises BadLine."""
    given = record.get("thinking")
    if given is not None and not isinstance(given, bool):
        raise BadLine(f"`thinking` must be true or false, is {kind_of(given)}")
    if mode != "as-written":
        return mode == "with"
    return any("reasoning_content" in one for one in messages) if given is None else given


def unread_of(record: Mapping[str, Any], known: frozenset[str] = KNOWN) -> frozenset[str]:
    """Keys of a line and of its messages that mean nothing here."""
    keys = {
        f"{form}[].{key}"
        for form in (*FORMS, "completion")
        for message in (record[form] if isinstance(record.get(form), list) else ())
        if isinstance(message, dict)
        for key, value in message.items()
        if key not in (IN_MESSAGES if "role" in message else IN_SHAREGPT) and value is not None
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
    """One message, as it is written. Raises BadLine for what would have to be heeded."""
    entry = _object(message, at)
    if wrong := next((key for key in WEIGHTS_ELSEWHERE if entry.get(key) is not None), ""):
        raise BadLine(
            f"`{at}.{wrong}` means nothing here: `weight` says whether a message is learned, 1 or 0"
        )
    return entry


def _either(record: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The messages of `prompt` or `completion`."""
    if isinstance(record[key], str):
        role = "user" if key == "prompt" else "assistant"
        return [{"role": role, "content": record[key]}]
    return [_entry(message, at) for message, at in _entries(record, key)]


def _is_said(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def _of_sharegpt(given: Any, at: str) -> dict[str, Any]:
    message = _entry(given, at)
    if "role" in message:
        return message
    role, value = SHAREGPT.get(str(message.get("from"))), message.get("value")
    if role is None:
        raise BadLine(
            f"`{at}.from` is {message.get('from')!r}, must be one of {', '.join(SHAREGPT)}"
        )
    if not isinstance(value, str):
        raise BadLine(f"`{at}.value` must be text, is {kind_of(value)}")
    weight = {"weight": message["weight"]} if "weight" in message else {}
    if role == "function_call":
        calls = _json(value, f"{at}.value")
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": "assistant", "content": "", "tool_calls": calls, **weight}
    return {"role": role, "content": value, **weight}


def _message(given: Mapping[str, Any], at: str) -> dict[str, Any]:
    """A message in the form of `keel.rl.turns.Message`."""
    role = given.get("role")
    if role not in ROLES:
        raise BadLine(f"`{at}.role` is {role!r}, must be one of {', '.join(ROLES)}")
    content = text_of(given.get("content"), f"{at}.content")
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        message |= {k: str(given[k]) for k in ("tool_call_id", "name") if given.get(k)}
    if role != "assistant":
        return message
    reasoning = next((given[key] for key in REASONING if given.get(key)), None)
    if reasoning is None and (found := _THINK.match(content)):
        reasoning, message["content"] = found[1], content[found.end() :].strip()
    if reasoning is not None and not isinstance(reasoning, str):
        raise BadLine(f"the reasoning of `{at}` must be text, is {kind_of(reasoning)}")
    if reasoning and reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    if calls := given.get("tool_calls"):
        message["tool_calls"] = calls_of(calls, f"{at}.tool_calls")
    return message


def text_of(value: Any, at: str) -> str:
    """Return a message's content: text, a list of parts of text, or null. Raises BadLine."""
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
    """Return a message's calls of tools, with their arguments as objects. Raises BadLine."""
    if not isinstance(calls, list):
        raise BadLine(f"`{at}` must be a list, is {kind_of(calls)}")
    return [_call(call, f"{at}[{place}]") for place, call in enumerate(cast(list[Any], calls))]


def _call(given: Any, at: str) -> dict[str, Any]:
    call = _object(given, at)
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
    """Ids for calls without one, and for each result the id and the name of the call it answers:
    of those without an answer yet the first, or the first of its name where it has one; before
    those that a user has spoken after without an answer, the ones made since. Raises BadLine."""
    waiting: dict[str, str] = {}
    left: set[str] = set()
    """Of those waiting: from before the user's last words."""
    for place, message in enumerate(messages):
        if message["role"] == "user":
            left = set(waiting)
        for number, call in enumerate(message.get("tool_calls", ())):
            call["id"] = call["id"] or f"call_{place}_{number}"
            waiting[call["id"]] = call["function"]["name"]
            left.discard(call["id"])
        if message["role"] == "tool":
            name = message.get("name")
            of_name = (
                one
                for one in sorted(waiting, key=left.__contains__)
                if name in (None, waiting[one])
            )
            call_id = message.setdefault("tool_call_id", next(of_name, ""))
            if call_id not in waiting:
                said = f" (tool_call_id {call_id!r})" if call_id else f" (name {name!r})"
                raise BadLine(
                    f"`messages[{place}]` is the result of no call before it"
                    + (said if call_id or name else "")
                )
            called = waiting.pop(call_id)
            message.setdefault("name", called)


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
