"""Parses and validates chat completion requests, and formats responses and errors, in the forms of
OpenAI and Anthropic."""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from keel.agents.episode import Budget
from keel.rl import strict_json
from keel.rl.turns import Message, ToolSpec, openai_message
from keel.rl.types import FinishReason

_MAX_DEPTH = 120


class ApiError(Exception):
    """An error that the endpoint returns to the client in place of a turn."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        limit: FinishReason | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.limit: FinishReason | None = limit

    def body(self, *, anthropic: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"message": self.message, "type": "invalid_request_error"}
        if self.status >= 500:
            fields["type"] = "api_error" if anthropic else "server_error"
        if anthropic:
            return {"type": "error", "error": fields}
        return {"error": {**fields, "param": self.param, "code": self.code}}


def invalid_field(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def budget_error(budget: Budget, limit: FinishReason, context: int = 0) -> ApiError:
    """Create the error for an exhausted budget. Its status code tells clients not to retry."""
    if limit == "window":  # OpenAI's wording, which programs recognize and then shorten the context
        return ApiError(
            400,
            f"This model's maximum context length is {budget.window} tokens. However, your "
            f"messages resulted in {context} tokens; one at least must be left to sample",
            param="messages",
            code="context_length_exceeded",
            limit=limit,
        )
    amount, code = {
        "turns": (f"{budget.turns} turns", "turns_spent"),
        "deadline": (f"{budget.timeout_s:g} s", "time_spent"),
    }.get(limit, (f"{budget.tokens} sampled tokens", "tokens_spent"))
    return ApiError(403, f"the trajectory's budget of {amount} is spent", code=code, limit=limit)


def _as_parts(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    return content


class _Model(BaseModel):
    """Base class for all parts of a request. Lists use `FailFast`, because collecting a million
    errors would take several seconds."""

    model_config = ConfigDict(strict=True)


class _TextPart(_Model):
    type: Literal["text"]
    text: str


class _CalledFunction(_Model):
    name: str
    arguments: Annotated[
        dict[str, Any],
        BeforeValidator(lambda sent: load_json(sent or "{}") if isinstance(sent, str) else sent),
        BeforeValidator(lambda sent: sent or {}),
    ] = {}


class _Call(_Model):
    id: str
    function: _CalledFunction


class _Message(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[_TextPart], FailFast(), BeforeValidator(_as_parts)] = []
    tool_calls: Annotated[list[_Call], FailFast(), BeforeValidator(lambda calls: calls or [])] = []
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    function_call: None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content)  # joined as in vLLM


class _Function(_Model):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(_Model):
    type: Literal["function"]
    function: _Function


class _StreamOptions(_Model):
    include_usage: bool = False


class _TextFormat(_Model):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]


class ChatRequest(_Model):
    """A chat completion request. Nulls are treated as missing. Unknown fields are kept in
    `model_extra`. Fields that would change the sampling have a single allowed value."""

    model_config = ConfigDict(strict=True, extra="allow")

    sent: Annotated[list[_Message], FailFast()] = Field(alias="messages", min_length=1)
    sent_tools: Annotated[list[_Tool], FailFast()] = Field([], alias="tools")
    model: str = ""
    n: Literal[1] = 1
    tool_choice: Literal["auto", "none"] = "auto"
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = {}
    response_format: _TextFormat = _TextFormat(type="text")
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0
    modalities: Annotated[list[Literal["text"]], FailFast()] = ["text"]
    audio: None = None
    web_search_options: None = None
    functions: None = None  # the old form of `tools`
    function_call: None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The normalized messages: content is plain text, call arguments are objects, and tool
        results are in the same order as their calls."""
        return tuple(_convert_messages(self.sent))

    @cached_property
    def tools(self) -> tuple[ToolSpec, ...]:
        empty: dict[str, Any] = {"type": "object", "properties": {}}
        return tuple(
            ToolSpec(
                name=tool.function.name,
                description=tool.function.description or "",
                parameters=tool.function.parameters or empty,
            )
            for tool in self.sent_tools
        )

    @property
    def limit(self) -> int | None:
        limits = (self.max_tokens, self.max_completion_tokens)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def characters(self) -> int:
        """Estimated length of the rendered request in characters. Thinking isn't counted, because
        chat templates drop most of it."""
        messages = [{**message, "reasoning_content": ""} for message in self.messages]
        parts = (*messages, *(tool.as_json() for tool in self.tools))
        return sum(len(json.dumps(part, ensure_ascii=False)) for part in parts)


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a chat completion request. Raises ApiError naming the invalid field."""
    fields = {name: value for name, value in body.items() if value is not None}
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]]
        raise invalid_field("".join(parts).removeprefix("."), first["msg"]) from error
    ignored = sorted(name[:64] for name in request.model_extra or ())
    if grammars := [name for name in ignored if name.startswith(("guided_", "structured_"))]:
        raise invalid_field(grammars[0], "structured output is not supported. Ask for it as text")
    if ignored:
        _warn_ignored(", ".join(ignored[:20]))
    _ = request.messages  # raises now if they are invalid
    return request


@lru_cache(maxsize=50)  # logged once
def _warn_ignored(names: str) -> None:
    logging.getLogger(__name__).warning(
        "a program's request sets %s, which is ignored: the recipe decides how to sample", names
    )


def _convert_messages(messages: Sequence[_Message]) -> list[dict[str, Any]]:
    converted: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    results: dict[str, dict[str, Any]] = {}
    for i, message in enumerate([*messages, None]):
        at = f"messages[{i}]"
        if message is not None and message.role == "tool":
            call_id = message.tool_call_id
            if call_id not in names or call_id in results:
                reason = f"{call_id!r} is no call of the turn before, or is answered twice"
                raise invalid_field(f"{at}.tool_call_id", reason)
            result = {"role": "tool", "content": message.text, "tool_call_id": call_id}
            results[call_id] = {**result, "name": names[call_id]}
            continue
        if missing := [call_id for call_id in names if call_id not in results]:
            raise invalid_field(at, f"the call {missing[0]!r} has no message of the role tool")
        converted += [results[call_id] for call_id in names]
        names, results = {}, {}
        if message is None:
            break
        role, fields = message.role, dict[str, Any](role=message.role, content=message.text)
        if role == "assistant":
            reasoning = message.reasoning_content or message.reasoning
            if isinstance(reasoning, str):
                fields["reasoning_content"] = reasoning
            if calls := message.tool_calls:
                fields["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": call.function.model_dump()}
                    for call in calls
                ]
                names = {call.id: call.function.name for call in calls}
                if len(names) < len(calls):
                    raise invalid_field(f"{at}.tool_calls", "two of the calls have the same id")
        converted.append(fields)
    if converted[-1]["role"] == "assistant":
        last = f"messages[{len(converted) - 1}]"
        raise invalid_field(last, "is the policy's own: a turn cannot be continued")
    return converted


def load_json(text: bytes | str) -> Any:
    """Parse untrusted JSON. Raises ValueError if it is invalid or too deeply nested."""
    return strict_json.replace_surrogates(strict_json.load(text, max_depth=_MAX_DEPTH))


def load_object(body: bytes) -> dict[str, Any]:
    try:
        value = load_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return cast(dict[str, Any], value)


MODEL = "policy"
"""The model name that the endpoint lists. Requests may use any other name as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    reply_id: str
    message: Message
    ended: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def finish_reason(self) -> str:
        if self.ended != "stop":
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"


def completion(reply: Reply, model: str) -> dict[str, Any]:
    message = openai_message({**reply.message, "refusal": None})
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    choice = {"index": 0, "logprobs": None, "finish_reason": reply.finish_reason}
    return {
        "id": reply.reply_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model or MODEL,
        "choices": [{**choice, "message": message}],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        },
    }


def stream_events(reply: Reply, model: str, *, include_usage: bool) -> Iterator[bytes]:
    chunk: dict[str, Any] = {**completion(reply, model), "object": "chat.completion.chunk"}
    choice: dict[str, Any] = chunk["choices"][0]
    usage = chunk.pop("usage")
    if include_usage:
        chunk["usage"] = None

    def event(**fields: Any) -> bytes:
        return b"data: " + json.dumps({**chunk, **fields}).encode() + b"\n\n"

    delta: dict[str, Any] = choice.pop("message")
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    yield event(choices=[{**choice, "delta": delta, "finish_reason": None}])
    yield event(choices=[{**choice, "delta": {}}])
    if include_usage:
        yield event(choices=[], usage=usage)
    yield b"data: [DONE]\n\n"


# Anthropic's Messages API, converted from and to chat completions.

_ANTHROPIC_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ANTHROPIC_FIELDS = ("system", "messages", "tools", "tool_choice", "output_format")


def from_anthropic(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an Anthropic request to a chat completion request, which `read_request` then checks.
    Raises ApiError if the request isn't in Anthropic's format."""
    chat = {name: value for name, value in fields.items() if name not in _ANTHROPIC_FIELDS}
    chat["response_format"] = fields.get("output_format")  # null counts as missing
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    try:
        if system := fields.get("system"):
            messages.append({"role": "system", "content": _anthropic_text("system", system)})
        for i, message in enumerate(fields["messages"]):
            messages += _from_anthropic_message(f"messages[{i}]", message)
        for i, tool in enumerate(fields.get("tools") or []):
            if tool.get("type") not in (None, "custom"):
                raise invalid_field(f"tools[{i}].type", "must be custom, with input_schema")
            function = {name: tool.get(name) for name in ("name", "description", "strict")}
            function["parameters"] = tool.get("input_schema")
            tools.append({"type": "function", "function": function})
        if choice := fields.get("tool_choice"):
            chat["tool_choice"] = choice["type"]  # `any` and `tool` are refused
            if choice.get("disable_parallel_tool_use"):
                chat["parallel_tool_calls"] = False
    except (AttributeError, LookupError, TypeError) as error:
        raise ApiError(400, f"not a request of the Messages API: {error!r}") from error
    return {**chat, "messages": messages, "tools": tools}


def anthropic_answer(reply: Reply, model: str) -> dict[str, Any]:
    message, content = reply.message, list[dict[str, Any]]()
    if thought := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        content.append({**block, "input": function["arguments"]})
    return {
        "id": reply.reply_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": _ANTHROPIC_STOPS[reply.finish_reason],
        "stop_sequence": None,
        "usage": {
            "input_tokens": reply.prompt_tokens - reply.cached_tokens,
            "cache_read_input_tokens": reply.cached_tokens,
            "output_tokens": reply.completion_tokens,
        },
    }


def anthropic_events(reply: Reply, model: str) -> Iterator[bytes]:
    whole = anthropic_answer(reply, model)
    yield _anthropic_event("message_start", message={**whole, "content": [], "stop_reason": None})
    for index, block in enumerate(whole["content"]):
        kind, start = block["type"], dict(block)
        if kind == "tool_use":
            start["input"] = {}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            start[kind] = ""
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        yield _anthropic_event("content_block_start", index=index, content_block=start)
        yield _anthropic_event("content_block_delta", index=index, delta=delta)
        yield _anthropic_event("content_block_stop", index=index)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _anthropic_event("message_delta", delta=ended, usage=whole["usage"])
    yield _anthropic_event("message_stop")


def _from_anthropic_message(at: str, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        here, kind = f"{at}.content[{i}]", block.get("type")
        if kind == "text":
            texts.append({"type": "text", "text": block.get("text")})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking")))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = _anthropic_text(f"{here}.content", block.get("content") or "")
            result = f"Error: {result}" if block.get("is_error") else result
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        else:
            raise invalid_field(f"{here}.type", "must be text, thinking, tool_use or tool_result")
    if role == "assistant":
        thought = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        yield {"role": role, "content": texts, "tool_calls": calls, **thought}
    elif texts:
        yield {"role": role, "content": texts}


def _anthropic_text(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if any(block["type"] != "text" for block in content):
        raise invalid_field(at, "must be text, the only content the policy reads")
    return "\n".join(str(block["text"]) for block in content)


def _anthropic_event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
