"""A chat completion request, read: messages and tools as a chat format takes them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from keel.agents.budget import CHARACTERS_A_TOKEN
from keel.agents.endpoint.errors import Refused, wrong
from keel.agents.schemas import arguments_of
from keel.rl import strict_json
from keel.rl.turns import Message, ToolSpec

_READ = (
    *("messages", "model", "n", "tools", "tool_choice", "stream", "stream_options"),
    *("max_tokens", "max_completion_tokens", "response_format", "logit_bias", "logprobs"),
    *("top_logprobs", "modalities"),
)
_OF_NO_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
"""Ignored without a word: nothing that is sampled would differ."""
_NOT_HERE = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "the policy writes text",
    "web_search_options": "the endpoint has no search; give the policy a tool",
}
MOST_TOOLS = 256 << 10
"""Characters of a request's tools as JSON. Checking schemas takes a second for each 30,000."""
MOST_DEEP = 120
"""Levels of a request."""
MOST_VALUES = 1 << 20
"""In a request, by its commas and brackets: what has more, texts and all, fits no window of a
million tokens, and to make values of it would hold up all other trajectories, seconds for each
MiB."""
MOST_WARNINGS = 50
_DISTRIBUTION = (
    "it would change the distribution that is sampled from, and what is recorded is trained on"
)
_STRUCTURED = (
    "structured output is not supported: tokens are sampled without a grammar, since the grammar's "
    "masks are not recorded. Ask for the format in the prompt and read the text"
)
_ROLES = {"developer": "system"}
"""OpenAI's newer name for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for one turn."""

    messages: tuple[Message, ...]
    """Contents are text, arguments are objects, tools' results stand in the order of the calls and
    have the tool's name."""
    tools: tuple[ToolSpec, ...]
    may_call: bool = True
    """False: calls are not handed out (`tool_choice: none`)."""
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    """In a stream: a last chunk with the usage."""
    model: str = ""
    is_retry: bool = False
    """The client says so: it never got the answer to this request."""

    @property
    def characters(self) -> int:
        """Of what a chat template shows: contents, calls, tools, and the thinking since the user's
        last message. Of each message's role and marks, what a token may have."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        since = users[-1] if users else 0
        thoughts = (message.get("reasoning_content", "") for message in self.messages[since:])
        written = [message["tool_calls"] for message in self.messages if "tool_calls" in message]
        offered = [tool.as_json() for tool in self.tools]
        return (
            sum(len(message["content"]) + CHARACTERS_A_TOKEN for message in self.messages)
            + sum(map(len, thoughts))
            + sum(len(json.dumps(one, ensure_ascii=False)) for one in (*written, *offered))
        )

    async def check_tools(self) -> None:
        """Raise Refused for tools that could not be called. Runs on a thread: large schemas take a
        while."""
        if sum(len(json.dumps(tool.as_json())) for tool in self.tools) > MOST_TOOLS:
            raise wrong("tools", f"must have at most {MOST_TOOLS:,} characters as JSON")
        try:
            await asyncio.to_thread(arguments_of, self.tools)
        except ValueError as error:
            raise wrong("tools", str(error)) from error


class Warnings:
    """Says once of each setting that is not obeyed that it is not."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def ignored(self, name: str, why: str) -> None:
        if name not in self._said and len(self._said) < MOST_WARNINGS:
            self._said.add(name)
            logging.getLogger(__name__).warning(
                "a program's request sets %s, which is ignored: %s", name[:64], why
            )


def asked_of(body: bytes, warnings: Warnings, *, is_retry: bool = False) -> Asked:
    """Read a request. Raises Refused, with the field that is wrong."""
    try:
        given = load(body)
    except TooMuch as error:
        code = "context_length_exceeded"  # by which programs know that they may shorten it
        raise Refused(400, str(error), param="messages", code=code, limit="window") from error
    except ValueError as error:
        raise Refused(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise Refused(400, "the body must be a JSON object", code="invalid_json")
    fields = {k: v for k, v in cast(dict[str, Any], given).items() if v is not None}
    model = fields.get("model", "")
    if not isinstance(model, str):
        raise wrong("model", "must be a string")
    _refuse(fields)
    _warn(fields, warnings)
    tools = _tools(fields.get("tools", []), warnings)
    options = _object("stream_options", fields.get("stream_options", {}))
    return Asked(
        messages=_messages(fields.get("messages")),
        tools=tools,
        may_call=_may_call(fields.get("tool_choice", "auto")),
        max_tokens=_max_tokens(fields),
        stream=_boolean("stream", fields.get("stream", False)),
        include_usage=_boolean("stream_options.include_usage", options.get("include_usage", False)),
        model=model,
        is_retry=is_retry,
    )


def _refuse(fields: Mapping[str, Any]) -> None:
    for name, cure in _NOT_HERE.items():
        if name in fields:
            raise wrong(name, f"is not supported: {cure}")
    if fields.get("n", 1) != 1:
        raise wrong("n", "must be 1; ask several times")
    if fields.get("logit_bias"):
        raise wrong("logit_bias", f"is not supported: {_DISTRIBUTION}")
    kind = _object("response_format", fields.get("response_format", {})).get("type", "text")
    structured = [name for name in fields if name.startswith(("guided_", "structured_outputs"))]
    for name in ["response_format"] * (kind != "text") + structured:
        raise wrong(name, _STRUCTURED)
    if fields.get("logprobs") or fields.get("top_logprobs"):
        raise wrong("logprobs", "are recorded, and not handed out")
    if fields.get("modalities", ["text"]) != ["text"]:
        raise wrong("modalities", "the policy writes text")


def _warn(fields: Mapping[str, Any], warnings: Warnings) -> None:
    for name in fields:
        if name not in (*_READ, *_OF_NO_EFFECT):
            warnings.ignored(name, "the policy is sampled as the recipe says")


def _may_call(choice: Any) -> bool:
    if choice in ("auto", "none"):
        return choice == "auto"
    raise wrong("tool_choice", f"must be auto or none; a forced call is refused: {_DISTRIBUTION}")


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    """The lower one, if there are two."""
    found: list[int] = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise wrong(name, f"must be a positive integer, is {str(value)[:50]!r}")
        found.append(value)
    return min(found, default=None)


def _tools(given: Any, warnings: Warnings) -> tuple[ToolSpec, ...]:
    tools: list[ToolSpec] = []
    for i, item in enumerate(_list("tools", given)):
        at = f"tools[{i}]"
        tool = _object(at, item)
        if tool.get("type") != "function":
            raise wrong(f"{at}.type", "must be function")
        function = _object(f"{at}.function", tool.get("function"))
        if function.get("strict"):
            warnings.ignored("tools[].function.strict", _DISTRIBUTION)
        parameters: Any = function.get("parameters") or {"type": "object", "properties": {}}
        tools.append(
            ToolSpec(
                name=_text(f"{at}.function.name", function.get("name")),
                description=_text(f"{at}.function.description", function.get("description") or ""),
                parameters=_object(f"{at}.function.parameters", parameters),
            )
        )
    return tuple(tools)


def _messages(given: Any) -> tuple[Message, ...]:
    items = _list("messages", given)
    if not items:
        raise wrong("messages", "must hold at least one message")
    messages: list[dict[str, Any]] = []
    calls: dict[str, str] = {}
    """Ids of the last assistant's calls, in their order, with the names of the tools."""
    answered: list[str] = []

    def check_answered(before: str) -> None:
        if missing := [call_id for call_id in calls if call_id not in answered]:
            raise wrong(before, f"the call {missing[0]!r} has no message of the role tool")
        if answered:  # templates that show no ids show results by their order
            order = list(calls)
            results = messages[len(messages) - len(answered) :]
            results.sort(key=lambda message: order.index(message["tool_call_id"]))
            messages[len(messages) - len(answered) :] = results

    for i, item in enumerate(items):
        at = f"messages[{i}]"
        fields = _object(at, item)
        role = _text(f"{at}.role", fields.get("role"))
        role = _ROLES.get(role, role)
        content = _content(f"{at}.content", fields.get("content"))
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "tool":
            call_id = _text(f"{at}.tool_call_id", fields.get("tool_call_id"))
            if call_id not in calls:
                raise wrong(f"{at}.tool_call_id", f"no call {call_id!r} in the turn before it")
            if call_id in answered:
                raise wrong(f"{at}.tool_call_id", f"the call {call_id!r} is answered twice")
            answered.append(call_id)
            messages.append({**message, "tool_call_id": call_id, "name": calls[call_id]})
            continue
        check_answered(at)
        calls, answered = {}, []
        if role == "assistant":
            reasoning = fields.get("reasoning_content") or fields.get("reasoning")
            if isinstance(reasoning, str):
                message["reasoning_content"] = reasoning
            if fields.get("function_call") is not None:
                raise wrong(f"{at}.function_call", "is not supported: use tool_calls")
            if written := _calls(at, fields.get("tool_calls")):
                message["tool_calls"] = written
                calls = {call["id"]: call["function"]["name"] for call in written}
                if len(calls) < len(written):
                    raise wrong(f"{at}.tool_calls", "two of the calls have the same id")
        elif role not in ("system", "user"):
            raise wrong(f"{at}.role", "must be system, developer, user, assistant or tool")
        messages.append(message)
    check_answered("messages")
    if messages[-1]["role"] == "assistant":
        last = f"messages[{len(messages) - 1}]"
        raise wrong(last, "is the policy's own, which speaks next: a turn cannot be continued")
    return tuple(messages)


def _calls(at: str, given: Any) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for i, item in enumerate(_list(f"{at}.tool_calls", given or [])):
        here = f"{at}.tool_calls[{i}]"
        call = _object(here, item)
        function = _object(f"{here}.function", call.get("function"))
        arguments: Any = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = load(arguments)
            except ValueError as error:
                raise wrong(f"{here}.function.arguments", f"is no JSON: {error}") from error
        function = {
            "name": _text(f"{here}.function.name", function.get("name")),
            "arguments": _object(f"{here}.function.arguments", arguments),
        }
        call_id = _text(f"{here}.id", call.get("id"))
        calls.append({"id": call_id, "type": "function", "function": function})
    return calls


def _content(at: str, given: Any) -> str:
    """Text; of several parts, one a line, as vLLM has it."""
    if given is None or isinstance(given, str):
        return given or ""
    parts: list[str] = []
    for i, item in enumerate(_list(at, given)):
        part = _object(f"{at}[{i}]", item)
        if part.get("type") != "text":
            raise wrong(f"{at}[{i}].type", "must be text: the policy reads nothing else")
        parts.append(_text(f"{at}[{i}].text", part.get("text")))
    return "\n".join(parts)


def _list(at: str, given: Any) -> Sequence[Any]:
    if not isinstance(given, list):
        raise wrong(at, f"must be a list, is {_shown(given)}")
    return cast(list[Any], given)


def _object(at: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise wrong(at, f"must be an object, is {_shown(given)}")
    return cast(dict[str, Any], given)


def _text(at: str, given: Any) -> str:
    if not isinstance(given, str):
        raise wrong(at, f"must be a string, is {_shown(given)}")
    return given


def _boolean(at: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise wrong(at, f"must be true or false, is {_shown(given)}")
    return given


def _shown(given: Any) -> str:
    return "missing" if given is None else repr(given)[:50]


class TooMuch(ValueError):
    """Not even to be read."""


def load(text: bytes | str) -> Any:
    """What a program sent. Raises ValueError."""
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    if sum(map(raw.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise TooMuch(f"more than {MOST_VALUES:,} values do not fit the model's context")
    return sound(strict_json.load(text, most_deep=MOST_DEEP))


def sound(value: Any) -> Any:
    """Without halves of surrogate pairs, which JSON may spell and no tokenizer reads."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if isinstance(value, dict):
        items = cast(dict[str, Any], value)
        return {sound(key): sound(item) for key, item in items.items()}
    return [sound(item) for item in cast(list[Any], value)] if isinstance(value, list) else value
