"""Converts requests, responses and streams between Anthropic's Messages API and chat
completions."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from keel.agents.endpoint.requests import ApiError, Reply, invalid_field

_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_REWRITTEN = ("system", "messages", "tools", "tool_choice", "output_format")


def as_chat_request(fields: Mapping[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if system := fields.get("system"):
        messages.append({"role": "system", "content": _text("system", system)})
    for i, message in enumerate(_objects("messages", fields.get("messages"))):
        messages += _messages(f"messages[{i}]", message)
    # `read_request` reads, refuses or ignores the remaining fields.
    chat = {name: value for name, value in fields.items() if name not in _REWRITTEN}
    chat["messages"] = messages
    tools: list[dict[str, Any]] = []
    for i, tool in enumerate(_objects("tools", fields.get("tools") or [])):
        if tool.get("type") not in (None, "custom"):
            raise invalid_field(f"tools[{i}].type", "must be custom, with name and input_schema")
        function = {name: tool.get(name) for name in ("name", "description", "strict")}
        function["parameters"] = tool.get("input_schema")
        tools.append({"type": "function", "function": function})
    chat["tools"] = tools
    if (form := fields.get("output_format")) is not None:
        chat["response_format"] = form
    if choice := fields.get("tool_choice"):
        (choice,) = _objects("tool_choice", [choice])
        chat["tool_choice"] = choice.get("type")  # `any` and `tool` are refused
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    return chat


def answer(reply: Reply, model: str) -> dict[str, Any]:
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
        "stop_reason": _STOPS[reply.finish_reason],
        "stop_sequence": None,
        "usage": {
            "input_tokens": reply.prompt_tokens - reply.cached_tokens,
            "cache_read_input_tokens": reply.cached_tokens,
            "output_tokens": reply.completion_tokens,
        },
    }


def events(reply: Reply, model: str) -> Iterator[bytes]:
    whole = answer(reply, model)
    yield _event("message_start", message={**whole, "content": [], "stop_reason": None})
    for index, block in enumerate(whole["content"]):
        kind, start = block["type"], dict(block)
        if kind == "tool_use":
            start["input"] = {}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            start[kind] = ""
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        yield _event("content_block_start", index=index, content_block=start)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage=whole["usage"])
    yield _event("message_stop")


def error(refused: ApiError) -> dict[str, Any]:
    kind: str = refused.body()["error"]["type"]
    kind = "api_error" if kind == "server_error" else kind
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


def _messages(at: str, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise invalid_field(f"{at}.role", "must be user or assistant")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(_objects(f"{at}.content", content)):
        here, kind = f"{at}.content[{i}]", block.get("type")
        if kind == "text":
            texts.append({"type": "text", "text": block.get("text")})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking")))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = _text(f"{here}.content", block.get("content") or "")
            result = f"Error: {result}" if block.get("is_error") else result
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        else:
            raise invalid_field(f"{here}.type", "must be text, thinking, tool_use or tool_result")
    if role == "assistant":
        thought = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        yield {"role": role, "content": texts, "tool_calls": calls, **thought}
    elif texts:
        yield {"role": role, "content": texts}


def _text(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = _objects(at, content)
    if any(block.get("type") != "text" for block in blocks):
        raise invalid_field(at, "must be text, the only content the policy reads")
    return "\n".join(str(block.get("text")) for block in blocks)


def _objects(at: str, items: Any) -> list[dict[str, Any]]:
    if not isinstance(items, list) or not all(
        isinstance(item, dict) for item in cast(list[Any], items)
    ):
        raise invalid_field(at, "must be a list of objects")
    return cast(list[dict[str, Any]], items)


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
