"""Checks, before a run starts, that a model's chat template allows conversations to be extended."""

import re
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from keel.model.hub import hub_options
from keel.model.load import load_model_config
from keel.rl.turns import Malformed, Message, ToolCall, ToolSpec
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.render import call_message

_OTHER_TOKENIZER = "Set model.tokenizer to a byte-level BPE tokenizer"
_WRITES_TOOLS = (
    "Use a model whose template lists tools and writes calls, or set model.chat_template to one"
)
_TOOLS = tuple(
    ToolSpec(
        name=name,
        description=f"Looks a {name} up.",
        parameters={"type": "object", "properties": {"name": {"type": "string"}}},
    )
    for name in ("city", "hotel")
)


def check_prefix_law(
    chat: TemplateChat, *, tools: Sequence[ToolSpec] = _TOOLS, modes: Sequence[bool] = (True, False)
) -> None:
    """Check that extending a conversation turn by turn gives the same ids as rendering it all at
    once, that ordinary text never becomes a control token, and that tools are shown. Raises
    ValueError naming the template, the case and a fix.

    `modes` selects thinking, no thinking, or both. One difference is allowed: an empty think block
    that a template puts before a turn but omits from the history may remain, because the policy
    sampled the turn after it.
    """
    for thinking in modes:
        for calls in ((), (1,), (1, 1), (2, 1), (3, 1, 2)) if tools else ((),):
            _check_conversation(chat, tools, calls, thinking=thinking)
        _check_controls(chat, tools, thinking=thinking)


def check_calls_in_thinking(chat: TemplateChat, *, tools: Sequence[ToolSpec] = _TOOLS) -> None:
    """Check that the policy can call tools only while thinking, and that it resumes thinking after
    the tool result. Raises ValueError naming the template and a fix.

    `chat` must have `tools_in_thinking` set and pass `check_prefix_law`.
    """
    messages: list[Message] = [{"role": "user", "content": "Which?"}]
    reply = _make_reply(0, 1, tools, thinking=True)
    after, close = _tool_results(reply), chat.marks.close
    ids = chat.opening(messages, tools, thinking=True)
    outside = chat.turn_ids(messages, reply, after, tools, thinking=True)
    text = chat.decode(outside)
    inside = chat.encoder.encode(text.replace(close, ""))
    call = chat.parse(inside, tools, thinking=True, turn=0)
    expected = reply["tool_calls"][0]["function"]
    calls = [(c.name, dict(c.arguments)) for c in call.calls if isinstance(c, ToolCall)]
    first, second = ([*ids, *turn] for turn in (inside, outside))
    extended, usual = (chat.extend(turn, after, thinking=True) for turn in (first, second))
    rest = chat.encoder.encode(f"Thought1z{close}Said1z")
    end = chat.parse(rest, tools, thinking=True, turn=1, inside=True)
    late = chat.parse(outside, tools, thinking=True, turn=0).calls
    if not (
        close in text
        and calls == [(expected["name"], expected["arguments"])]
        and call.inside
        and usual is not None
        and extended == [*first, *usual[len(second) :]]
        and (end.reasoning, end.content, end.inside) == ("Thought1z", "Said1z", False)
        and [type(each) for each in late] == [Malformed]
    ):
        fix = "Turn agents.tools_in_thinking off, or use a model whose template marks thinking"
        raise _failure(chat, True, "tool calls inside its thinking do not work", fix)


def _check_conversation(
    chat: TemplateChat, tools: Sequence[ToolSpec], calls: Sequence[int], *, thinking: bool
) -> None:
    """Check a conversation in which turn i makes `calls[i]` tool calls, followed by an answer and
    another question. Each turn is extended both as a finished turn and as a truncated one."""
    messages: list[Message] = [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "Which?"},
    ]
    try:
        ids = chat.opening(messages, tools, thinking=thinking)
    except ValueError:  # Gemma's template refuses system messages
        del messages[0]
        ids = chat.opening(messages, tools, thinking=thinking)
    for turn, count in enumerate((*calls, 0)):
        reply = _make_reply(turn, count, tools, thinking=thinking)
        after = _tool_results(reply) or [{"role": "user", "content": "And then?"}]
        try:
            sampled = chat.turn_ids(messages, reply, after, tools, thinking=thinking)
        except ValueError as error:
            if count < 2:
                raise _failure(chat, thinking, str(error)) from error
            return  # a template with one call per turn
        made = reply.get("tool_calls")
        last = made[-1]["function"]["arguments"]["name"] if made else reply["content"]
        if last not in chat.decode(sampled):
            problem = "it does not show the assistant's text or tool calls"
            raise _failure(chat, thinking, problem, _WRITES_TOOLS if count else "")
        whole = chat.opening([*messages, reply, *after], tools, thinking=thinking)
        for name, turn_end in (("ended", sampled), ("cut", sampled[:-1])):
            extended = chat.extend([*ids, *turn_end], after, thinking=thinking)
            if extended is not None and not _same_ids(chat, extended, whole):
                ours, once = chat.decode(extended), chat.decode(whole)
                at = next(
                    (i for i, (a, b) in enumerate(zip(ours, once, strict=False)) if a != b), 0
                )
                shown = slice(max(at - 20, 0), at + 60)
                raise _failure(
                    chat,
                    thinking,
                    f"{len(after)} {after[0]['role']} messages after a turn that was {name} are "
                    f"{ours[shown]!r}, but {once[shown]!r} when rendered whole",
                )
            if count and extended is None:
                raise _failure(chat, thinking, "it cannot continue after a tool's result")
        ids = chat.extend([*ids, *sampled], after, thinking=thinking) or whole
        messages += [reply, *after]


def _check_controls(chat: TemplateChat, tools: Sequence[ToolSpec], *, thinking: bool) -> None:
    counts: list[int] = []
    for content in ("Which?", "x".join(chat.encoder.controls)):
        ids = chat.opening([{"role": "user", "content": content}], tools, thinking=thinking)
        counts.append(sum(index in chat.encoder.text_of for index in ids))
    if counts[0] != counts[1]:
        problem = "control tokens in a message's text reach the policy"
        raise _failure(chat, thinking, problem, _OTHER_TOKENIZER)
    text = chat.text([{"role": "user", "content": "Which?"}], tools, thinking=thinking)
    if chat.encoder.encode(text) != chat.encoder.encode_in_pieces(text):
        problem = "its tokenizer joins text across control tokens"
        raise _failure(chat, thinking, problem, _OTHER_TOKENIZER)
    missing = [tool.name for tool in tools if tool.name not in text]
    if missing:
        problem = f"it does not show the policy the tool {missing[0]}"
        raise _failure(chat, thinking, problem, _WRITES_TOOLS)


def _make_reply(
    turn: int, count: int, tools: Sequence[ToolSpec], *, thinking: bool
) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": "" if count else f"Said{turn}z"}
    if thinking:
        reply["reasoning_content"] = f"Thought{turn}z"
    if count:
        names = [tools[i % len(tools)].name for i in range(count)]
        reply["tool_calls"] = [
            call_message(f"call_{turn}_{i}", name, {"name": f"Asked{turn}x{i}z"})
            for i, name in enumerate(names)
        ]
    return reply


def _tool_results(reply: Message) -> list[Message]:
    return [
        {
            "role": "tool",
            "content": f"Result {call['id']}",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
        }
        for call in reply.get("tool_calls", ())
    ]


def _same_ids(chat: TemplateChat, ids: Sequence[int], others: Sequence[int]) -> bool:
    if list(ids) == list(others):
        return True
    opened, closed = map(re.escape, (chat.marks.open, chat.marks.close))
    empty_thinking = re.compile(rf"\A\s*(?:{opened}\s*)?{closed}\s*")
    turns = [
        [empty_thinking.sub("", turn).lstrip() for turn in chat.decode(each).split(chat.header)]
        for each in (ids, others)
    ]
    return turns[0] == turns[1]


def _failure(chat: TemplateChat, thinking: bool, problem: str, fix: str = "") -> ValueError:
    mode, other = ("with", "without") if thinking else ("without", "with")
    usual = (
        f"Train {other} thinking (`thinking` of the data source), or set model.chat_template to a "
        "template that keeps its history unchanged"
    )
    return ValueError(
        f"{chat.label} cannot extend a conversation {mode} thinking: {problem}. {fix or usual}"
    )


def ends_of(path: str) -> tuple[int, ...]:
    """Return a model's `eos_token_id`s, the tokens that make the engine end any completion.

    Like vLLM, this reads generation_config.json, or config.json if that is missing. Raises
    ConfigError if neither exists.
    """
    try:
        config = GenerationConfig.from_pretrained(path, **hub_options(path))
    except OSError:
        config = GenerationConfig.from_model_config(load_model_config(path))
    ends = config.eos_token_id
    return (ends,) if isinstance(ends, int) else tuple(ends or ())
