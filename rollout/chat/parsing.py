"""Parsing of a turn: first its thinking, then the calls in the family's format.

The text comes from `Encoder.decode`: it has a control text only where the policy sampled the
control token. Nothing here raises for text of a policy; a malformed call is `Broken`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from keel.rl import strict_json
from keel.rl.turns import THINK, ThinkingMarks, ToolSpec
from keel.rollout.chat.thinking import HARMONY, NO_CALLS, Bounds, split_thinking

_KINDS: dict[type, set[str]] = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
}
"""JSON types by Python type."""


@dataclass(frozen=True, slots=True)
class Written:
    """A call without an id."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Broken:
    """A malformed call."""

    text: str
    why: str


Item = Written | Broken
Found = tuple[str, Sequence[Item]]
"""The text around the calls, and the calls in their order."""
FindCalls = Callable[[str, Sequence[ToolSpec]], Found]


@dataclass(frozen=True, slots=True)
class Read:
    """The parts of a turn."""

    content: str
    reasoning: str
    items: Sequence[Item] = ()
    is_open: bool = False
    """The turn ends inside its thinking."""


def read_tagged(
    text: str,
    tools: Sequence[ToolSpec],
    *,
    find_calls: FindCalls,
    bounds: Bounds,
    opened: bool,
    inside: bool,
    marks: ThinkingMarks = THINK,
) -> Read:
    """Read a turn whose thinking stands between `marks`.

    `opened`: the prompt, or an earlier turn, has opened the thinking. `inside`: calls in the
    thinking count, and no others.
    """
    reasoning, content, is_open = split_thinking(
        text, bounds, opened=opened, inside=inside, marks=marks
    )
    items: Sequence[Item] = ()
    if inside:
        reasoning, items = find_calls(reasoning, tools)
    content, after = find_calls(content, tools)
    if inside:
        after = [item if isinstance(item, Broken) else _outside(item, marks) for item in after]
    return Read(content.strip(), reasoning.strip(), [*items, *after], is_open)


def _outside(call: Written, marks: ThinkingMarks) -> Broken:
    why = f"tools are called while thinking, between {marks.open} and {marks.close}, not outside"
    return Broken(f"{call.name} {json.dumps(dict(call.arguments), ensure_ascii=False)}", why)


def json_calls(
    text: str, tools: Sequence[ToolSpec], *, start: str = "<tool_call>", end: str = "</tool_call>"
) -> Found:
    """Find calls of Hermes and Qwen3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    return _blocks(text, start, end, lambda body: _from_json(body, "arguments"))


def deepseek_v31_calls(text: str, tools: Sequence[ToolSpec]) -> Found:
    """Find calls of DeepSeek-V3.1: name, separator and arguments between control tokens."""

    def read(body: str) -> Item:
        name, separator, arguments = body.partition("<｜tool▁sep｜>")
        if not separator:
            return Broken(body, "no <｜tool▁sep｜> between the name and the arguments")
        return _checked(name, arguments)

    content, items = _blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read)
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    if not items and begin in content:
        items = [Broken(content[content.index(begin) :], "it holds no call")]
    return _around(content, begin, end), items


def deepseek_v32_calls(text: str, tools: Sequence[ToolSpec]) -> Found:
    """Find calls of DeepSeek-V3.2: `<｜DSML｜function_calls>` with invocations and parameters."""
    mark = "｜DSML｜"
    parameter = re.compile(
        rf'\s*<{mark}parameter name="([^"]*)" string="(true|false)">(.*?)</{mark}parameter>\s*',
        re.DOTALL,
    )

    def read(body: str) -> Item:
        head, _, rest = body.partition(">")
        name = re.fullmatch(r'\s*name="([^"]*)"\s*', head)
        if not name:
            return Broken(body, 'an invocation begins with name="…">')
        arguments: dict[str, Any] = {}
        place = 0
        while rest[place:].strip():
            match = parameter.match(rest, place)
            if not match:
                return Broken(body, 'a parameter is not of the form name="…" string="true|false"')
            key, is_text, value = match.groups()
            try:
                arguments[key] = value if is_text == "true" else strict_json.load(value)
            except ValueError as error:
                return Broken(body, f"the parameter {key} is not JSON: {error}")
            place = match.end()
        return _named(name[1], arguments, body)

    begin, end = f"<{mark}function_calls>", f"</{mark}function_calls>"
    content, items = _blocks(text, f"<{mark}invoke", f"</{mark}invoke>", read)
    if not items and begin in content:
        items = [Broken(content[content.index(begin) :], "it holds no invocation")]
    return _around(content, begin, end), items


def glm_calls(text: str, tools: Sequence[ToolSpec]) -> Found:
    """Find calls of GLM-4.5: `<tool_call>name`, then `<arg_key>` and `<arg_value>` in pairs. A
    value is text if the tool's schema allows nothing else, and JSON if it can be."""

    def read(body: str) -> Item:
        name, mark, _ = body.partition("<arg_key>")
        arguments: dict[str, Any] = {}
        place = len(name) if mark else len(body)

        def inside(tag: str) -> str | None:
            """Return the content of `<tag>`, which comes next, and move `place` behind it."""
            nonlocal place
            begin = body.find(f"<{tag}>", place)
            end = body.find(f"</{tag}>", begin)
            if min(begin, end) < 0 or body[place:begin].strip():
                return None
            place = end + len(f"</{tag}>")
            return body[begin + len(f"<{tag}>") : end]

        body = body.rstrip()
        while place < len(body):
            key = inside("arg_key")
            value = inside("arg_value") if key is not None else None
            if key is None or value is None:
                return Broken(body, "its <arg_key> and <arg_value> do not come in closed pairs")
            schema = _property(tools, name.strip(), key.strip())
            arguments[key.strip()] = _by_schema(value, schema)
        return _named(name, arguments, body)

    return _blocks(text, "<tool_call>", "</tool_call>", read)


LLAMA3_JSON = re.compile(r'\s*\{\s*"(type"\s*:\s*"function"\s*,\s*")?name"\s*:')


def llama3_calls(text: str, tools: Sequence[ToolSpec]) -> Found:
    """Find calls of Llama 3: a whole turn of JSON with `name` and `parameters`, several separated
    by `;`, or code after `<|python_tag|>` for a tool that takes `code`."""
    content, tag, code = text.partition("<|python_tag|>")
    body = (code if tag else text).strip()
    looks = LLAMA3_JSON.match(body)
    if not tag and not looks:
        return text, []
    if not looks:
        takes_code = [
            tool.name for tool in tools if "code" in tool.parameters.get("properties", {})
        ]
        if len(takes_code) == 1 and body:
            return content, [Written(takes_code[0], {"code": body})]
        return content, [Broken(body, "it is code, and not exactly one tool takes `code`")]
    items: list[Item] = []
    decoder = json.JSONDecoder()
    while body:
        try:
            _, end = decoder.raw_decode(body)
            value = strict_json.load(body[:end])
        except (ValueError, RecursionError) as error:
            items.append(Broken(body, f"it is not JSON: {error}"))
            break
        items.append(_from_value(value, "parameters", body[:end]))
        body = body[end:].strip().removeprefix(";").strip()
    return content if tag else "", items


def tiny_calls(text: str, tools: Sequence[ToolSpec]) -> Found:
    """Find calls of the tiny model: a line `@name 1, "two"`, arguments as JSON in the order of
    the tool's schema. Without tools such a line is text."""
    if not tools:
        return text, []
    lines: list[str] = []
    items: list[Item] = []
    for line in text.split("\n"):
        if line.startswith("@"):
            items.append(_tiny_call(line, tools))
        else:
            lines.append(line)
    return "\n".join(lines), items


def no_calls(text: str, tools: Sequence[ToolSpec]) -> Found:
    """Find no calls: the format has none."""
    return text, []


def read_harmony(
    text: str,
    tools: Sequence[ToolSpec],
    *,
    opened: bool,
    inside: bool,
    marks: ThinkingMarks = HARMONY,
) -> Read:
    """Read a turn of gpt-oss: messages with a channel and, for a call, a recipient. Calls from the
    `analysis` channel count only with `inside`."""
    reasoning: list[str] = []
    content: list[str] = []
    items: list[Item] = []
    for part in re.split(r"<\|(?:end|return|call)\|>", text):
        head, mark, body = part.partition("<|message|>")
        if not mark:
            if head.strip():
                items.append(Broken(part, "a message without <|message|>"))
            continue
        channel = re.search(r"<\|channel\|>\s*(\w+)", head)
        to = re.search(r"to=(\S+?)(?=[\s<]|$)", head)
        if to and (inside or not channel or channel[1] != "analysis"):
            items.append(_checked(to[1].removeprefix("functions."), body))
        elif channel and channel[1] == "analysis":
            reasoning.append(body)
        else:
            content.append(body)
    return Read("\n".join(content).strip(), "\n".join(reasoning).strip(), items)


def tagged(find_calls: FindCalls, bounds: Bounds = NO_CALLS) -> Callable[..., Read]:
    """Return `read_tagged` for one family."""
    return partial(read_tagged, find_calls=find_calls, bounds=bounds)


def _blocks(text: str, start: str, end: str, read: Callable[[str], Item]) -> Found:
    """Read every block between `start` and `end`; an unclosed one extends to the next or to the
    turn's end."""
    before, *blocks = text.split(start)
    around = [before]
    items: list[Item] = []
    for block in blocks:
        body, closed, after = block.partition(end)
        item = read(body) if closed else Broken(body, f"no {end} ends it")
        if isinstance(item, Broken):
            item = Broken(start + body + closed, item.why)
        items.append(item)
        around.append(after)
    return "".join(around), items


def _around(text: str, begin: str, end: str) -> str:
    """Remove all text between the two marks, and unpaired marks."""
    before, *blocks = text.split(begin)
    return (before + "".join(block.partition(end)[2] for block in blocks)).replace(end, "")


def _from_json(body: str, key: str) -> Item:
    try:
        value = strict_json.load(body)
    except ValueError as error:
        return Broken(body, f"it is not JSON: {error}")
    return _from_value(value, key, body)


def _from_value(value: Any, key: str, body: str) -> Item:
    """Read a call from a JSON object. `arguments` and `parameters` are synonyms; `key` is the one
    that the format has. Without either, nothing else may stand beside the name."""
    form = f'a call is a JSON object with "name" and "{key}"'
    if not isinstance(value, dict):
        return Broken(body, form)
    call = cast(dict[str, Any], value)
    keys = [each for each in ("arguments", "parameters") if each in call]
    others = set(call) - {"name", "type", "id", *keys}
    if len(keys) > 1:
        return Broken(body, f'it has both "arguments" and "parameters"; {form}')
    if others and not keys:
        return Broken(body, f'its arguments must be an object in "{key}"; {form}')
    return _named(call.get("name"), call[keys[0]] if keys else {}, body)


def _checked(name: str, arguments: str) -> Item:
    try:
        value = strict_json.load(arguments) if arguments.strip() else {}
        return _named(name, value, name + arguments)
    except ValueError as error:
        return Broken(name + arguments, f"its arguments are not JSON: {error}")


def _named(name: Any, arguments: Any, body: str) -> Item:
    if not isinstance(name, str) or not name.strip():
        return Broken(body, "it names no tool")
    if not isinstance(arguments, dict):
        return Broken(body, "its arguments are not a JSON object")
    return Written(name.strip(), arguments)


def _property(tools: Sequence[ToolSpec], name: str, key: str) -> Mapping[str, Any]:
    schemas = [tool.parameters.get("properties", {}) for tool in tools if tool.name == name]
    schema = schemas[0].get(key, {}) if schemas else {}
    return schema if isinstance(schema, Mapping) else {}


def _by_schema(value: str, schema: Mapping[str, Any]) -> Any:
    """Read a value as JSON, unless the schema admits a string and no type that it could have."""
    kinds = _kinds(schema)
    try:
        read = strict_json.load(value)
    except ValueError:
        return value
    others = kinds - {"string"}
    return value if "string" in kinds and not _KINDS[type(read)] & others else read


def _kinds(schema: Any) -> set[str]:
    """Return the JSON types that a schema names; empty: any."""
    if not isinstance(schema, Mapping):
        return set()
    keys = cast(Mapping[str, Any], schema)
    if "enum" in keys:
        return {kind for value in keys["enum"] for kind in _KINDS[type(value)]}
    if kind := keys.get("type"):
        return {kind} if isinstance(kind, str) else set(kind)
    branches = [_kinds(branch) for key in ("anyOf", "oneOf") for branch in keys.get(key, ())]
    return {kind for kinds in branches for kind in kinds} if all(branches) else set()


def _tiny_call(line: str, tools: Sequence[ToolSpec]) -> Item:
    name, _, rest = line[1:].partition(" ")
    if not re.fullmatch(r"\w+", name):
        return Broken(line, "a call is a line `@name argument, argument`")
    try:
        values = strict_json.load(f"[{rest}]")
    except ValueError as error:
        return Broken(line, f"its arguments are not JSON separated by commas: {error}")
    keys: Iterator[str] = iter(())
    for tool in tools:
        if tool.name == name:
            keys = iter(tool.parameters.get("properties", {}))
    arguments = dict(zip(keys, values, strict=False))
    if any(tool.name == name for tool in tools) and len(arguments) < len(values):
        return Broken(line, f"{len(values)} arguments, and {name} takes {len(arguments)}")
    return Written(name, {key: value for key, value in arguments.items() if value is not None})
