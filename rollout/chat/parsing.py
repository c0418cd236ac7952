"""Parses the thinking and tool calls of a turn, for each supported chat format.

The text comes from `Encoder.decode`, so it contains the text of a control token only where the
policy sampled that token. Parsing never raises an error, whatever the policy writes. A malformed
call becomes `BadCall`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from keel.model.tiny.tokenizer import CHAT_TEMPLATE
from keel.rl import strict_json
from keel.rl.turns import THINK, ThinkingMarks, ToolSpec
from keel.rollout.chat.render import Encoder

_THINK_BLOCK = re.compile(f"{THINK.open}(.*?){THINK.close}", re.DOTALL)

HARMONY = ThinkingMarks("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
"""Thinking marks of gpt-oss, whose turns consist of several messages (`read_harmony`)."""
HARMONY_CONTROLS = "<|start|> <|channel|> <|constrain|> <|message|> <|end|> <|call|> <|return|>"
_FAMILIES = (
    HARMONY,
    ThinkingMarks("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ThinkingMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A, Command R7B
    ThinkingMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    THINK,  # last, because templates with other marks mention these too
)


def find_thinking_marks(tokenizer: Any, named: Sequence[str] = ()) -> ThinkingMarks | None:
    """Return the strings that open and close thinking, or None if they are unknown. They come from
    `named` (`model.thinking_marks`), the chat template or the added tokens."""
    if named:
        return ThinkingMarks(*named)
    template, added = str(tokenizer.chat_template or ""), tokenizer.get_added_vocab()
    if "<|channel|>" in added and "<|message|>" in added:
        return HARMONY
    for marks in _FAMILIES:
        if marks.close in template:
            return marks
    return next((m for m in _FAMILIES if m.open in added and m.close in added), None)


_KINDS: dict[type, set[str]] = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
}


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """A malformed tool call, with an explanation of the error."""

    text: str
    why: str


_Call = ParsedCall | BadCall
_Calls = tuple[str, Sequence[_Call]]
_FindCalls = Callable[[str, Sequence[ToolSpec]], _Calls]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    content: str
    reasoning: str
    calls: Sequence[_Call] = ()
    in_thinking: bool = False  # True if the turn ends before its thinking is closed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """How a model family writes turns and tool calls."""

    name: str
    find_calls: _FindCalls = lambda text, tools: (text, [])
    call_start: str = ""  # pattern that matches the start of a call. Empty if there are no calls.
    call_end: str = ""  # text that ends a call. Empty if a call extends to the end of the turn.
    only_calls: re.Pattern[str] | None = None  # start of a turn, or answer, of calls only
    ends: tuple[str, ...] = ()  # control tokens that end a turn, besides the eos_token
    equal_ends: bool = False  # True if a template may write another end than the policy sampled
    message: str = ""  # text that starts the body of each message, if a turn has several messages
    message_end: str = ""  # text that ends such a message and, in the history, perhaps the turn

    def read(
        self,
        text: str,
        tools: Sequence[ToolSpec],
        *,
        opened: bool,
        tools_in_thinking: bool,
        marks: ThinkingMarks,
    ) -> ParsedTurn:
        """Parse a turn whose thinking is enclosed in `marks` (see `_split_thinking`). With
        `tools_in_thinking`, only tool calls made while thinking are valid."""
        if self.name == "harmony":
            return read_harmony(text, tools_in_thinking=tools_in_thinking)
        reasoning, content, in_thinking = _split_thinking(
            text, opened=opened, tools_in_thinking=tools_in_thinking, marks=marks, form=self
        )
        items: list[_Call] = []
        if tools_in_thinking:
            reasoning, calls = self.find_calls(reasoning, tools)
            items += calls
        content, calls = self.find_calls(content, tools)
        for call in calls:
            if tools_in_thinking and isinstance(call, ParsedCall):
                text = f"{call.name} {json.dumps(dict(call.arguments), ensure_ascii=False)}"
                between = f"between {marks.open} and {marks.close}"
                call = BadCall(text, f"tools are called while thinking, {between}, not outside")
            items.append(call)
        return ParsedTurn(content.strip(), reasoning.strip(), items, in_thinking)


def _split_thinking(
    text: str,
    *,
    opened: bool,
    tools_in_thinking: bool = False,
    marks: ThinkingMarks = THINK,
    form: _Format | None = None,
) -> tuple[str, str, bool]:
    """Split a turn into reasoning and content. Also returns whether the turn ends inside a thinking
    block.

    A turn that never closes its thinking has no content. If the first mark closes thinking, the
    text before it is reasoning. Set `opened` if the prompt already opened the thinking, and
    `tools_in_thinking` if the thinking may contain tool calls. Thinking marks in a call are
    ordinary text.
    """
    opening, closing = re.escape(marks.open), re.escape(marks.close)
    call, end = (form and form.call_start) or r"(?!)", re.escape(form.call_end if form else "")
    only_calls = form and form.only_calls
    # A call that ends before the next one starts, or else only the start of a call.
    closed = rf"{call}(?:(?:(?!{call}|{end}).)*+{end})?" if end else call
    to_end = rf"{call}(?:.*?{end}|.*)" if end else f"{call}.*"

    def first(pattern: str, position: int) -> re.Match[str] | None:
        matches = re.compile(pattern, re.MULTILINE | re.DOTALL).finditer(text, position)
        return next((m for m in matches if m[0] in (marks.open, marks.close)), None)

    def has_only_calls(position: int) -> bool:
        return bool(only_calls and only_calls.match(text, position))

    thinks = opened and not text.lstrip().startswith(marks.open)
    if not thinks and not has_only_calls(0):
        mark = first(f"{opening}|{closing}|{closed if end else to_end}", 0)
        thinks = mark is not None and mark[0] == marks.close
    position, thoughts, answer = 0, list[str](), list[str]()
    while True:
        if thinks:
            mark = first(f"{closing}|{closed}" if tools_in_thinking else closing, position)
        elif has_only_calls(position) and not any(map(str.strip, answer[-1:])):
            mark = None
        else:
            mark = first(f"{opening}|{to_end}", position)
        part = text[position : mark.start() if mark else None]
        (thoughts if thinks else answer).append(part)
        if mark is None:
            break
        position, thinks = mark.end(), not thinks
    if thinks:
        return "\n".join([*answer, *thoughts]).strip(), "", True
    return "\n".join(part.strip() for part in thoughts), "".join(answer), False


def detect_format(tokenizer: Any, encoder: Encoder) -> _Format:
    """Detect the chat format from the tokenizer's template and control tokens."""
    template, controls = str(tokenizer.chat_template or ""), encoder.controls
    signs = {
        "tiny": template == CHAT_TEMPLATE,
        "harmony": "<|channel|>" in controls and "<|message|>" in controls,
        "deepseek-v3.2": "｜DSML｜" in controls and (not template or "｜DSML｜" in template),
        "glm": "<arg_key>" in template,
        # Qwen3-Coder writes another format between the same marks.
        "hermes": "<tool_call>" in template and "<function=" not in template,
        "llama3": "<|python_tag|>" in controls and "<tool_call>" not in template,
        "plain": True,
    }
    return _FORMATS[next(name for name, sign in signs.items() if sign)]


def _json_calls(text: str, tools: Sequence[ToolSpec]) -> _Calls:
    def read(body: str) -> _Call:
        try:
            return _parse_call_object(strict_json.load(body), "arguments", body)
        except ValueError as error:
            return BadCall(body, f"it is not JSON: {error}")

    return _parse_blocks(text, "<tool_call>", "</tool_call>", read)


def _deepseek_calls(text: str, tools: Sequence[ToolSpec]) -> _Calls:
    mark = "｜DSML｜"
    parameter = re.compile(
        rf'\s*<{mark}parameter name="([^"]*)" string="(true|false)">(.*?)</{mark}parameter>\s*',
        re.DOTALL,
    )

    def read(body: str) -> _Call:
        head, _, rest = body.partition(">")
        name = re.fullmatch(r'\s*name="([^"]*)"\s*', head)
        if not name:
            return BadCall(body, 'an invocation begins with name="…">')
        arguments: dict[str, Any] = {}
        position = 0
        while rest[position:].strip():
            match = parameter.match(rest, position)
            if not match:
                return BadCall(body, 'a parameter is not of the form name="…" string="true|false"')
            key, is_text, value = match.groups()
            try:
                arguments[key] = value if is_text == "true" else strict_json.load(value)
            except ValueError as error:
                return BadCall(body, f"the parameter {key} is not JSON: {error}")
            position = match.end()
        return _make_call(name[1], arguments, body)

    content, found = _parse_blocks(text, f"<{mark}invoke", f"</{mark}invoke>", read)
    begin, end = f"<{mark}function_calls>", f"</{mark}function_calls>"
    if not found and begin in content:
        found = [BadCall(content[content.index(begin) :], "it holds no call")]
    before, *blocks = content.split(begin)
    around = before + "".join(block.partition(end)[2] for block in blocks)
    return around.replace(end, ""), found


def _glm_calls(text: str, tools: Sequence[ToolSpec]) -> _Calls:
    def read(body: str) -> _Call:
        name, mark, _ = body.partition("<arg_key>")
        arguments: dict[str, Any] = {}
        position = len(name) if mark else len(body)

        def next_tag(tag: str) -> str | None:
            nonlocal position
            begin = body.find(f"<{tag}>", position)
            end = body.find(f"</{tag}>", begin)
            if min(begin, end) < 0 or body[position:begin].strip():
                return None
            position = end + len(f"</{tag}>")
            return body[begin + len(f"<{tag}>") : end]

        body = body.rstrip()
        while position < len(body):
            key = next_tag("arg_key")
            value = next_tag("arg_value") if key is not None else None
            if key is None or value is None:
                return BadCall(body, "its <arg_key> and <arg_value> do not come in closed pairs")
            schemas = [t.parameters.get("properties", {}) for t in tools if t.name == name.strip()]
            schema = schemas[0].get(key.strip()) if schemas else None
            arguments[key.strip()] = _parse_argument(value, schema)
        return _make_call(name, arguments, body)

    return _parse_blocks(text, "<tool_call>", "</tool_call>", read)


_LLAMA3_JSON = re.compile(r'\s*\{\s*"(type"\s*:\s*"function"\s*,\s*")?name"\s*:')


def _llama3_calls(text: str, tools: Sequence[ToolSpec]) -> _Calls:
    """Parse JSON objects with `name` and `parameters`, separated by `;`. If exactly one tool has an
    argument named `code`, the turn may contain code after `<|python_tag|>` instead."""
    content, tag, code = text.partition("<|python_tag|>")
    body = (code if tag else text).strip()
    is_json = _LLAMA3_JSON.match(body)
    if not tag and not is_json:
        return text, []
    if not is_json:
        code_tools = [t.name for t in tools if "code" in t.parameters.get("properties", {})]
        if len(code_tools) == 1 and body:
            return content, [ParsedCall(code_tools[0], {"code": body})]
        return content, [BadCall(body, "it is code, and not exactly one tool takes `code`")]
    items: list[_Call] = []
    decoder = json.JSONDecoder()
    while body:
        try:
            _, end = decoder.raw_decode(body)
            value = strict_json.load(body[:end])
        except (ValueError, RecursionError) as error:
            items.append(BadCall(body, f"it is not JSON: {error}"))
            break
        items.append(_parse_call_object(value, "parameters", body[:end]))
        body = body[end:].strip().removeprefix(";").strip()
    return content if tag else "", items


def _tiny_calls(text: str, tools: Sequence[ToolSpec]) -> _Calls:
    """Parse lines such as `@name 1, "two"`, with JSON arguments in the order of the schema."""
    if not tools:
        return text, []
    lines = text.split("\n")
    content = "\n".join(line for line in lines if not line.startswith("@"))
    return content, [_tiny_call(line, tools) for line in lines if line.startswith("@")]


def read_harmony(text: str, *, tools_in_thinking: bool) -> ParsedTurn:
    """Parse a gpt-oss turn, which consists of messages with a channel and, for tool calls, a
    recipient. Calls in the `analysis` channel are valid only if `tools_in_thinking` is set."""
    reasoning: list[str] = []
    content: list[str] = []
    items: list[_Call] = []
    for part in re.split(r"<\|(?:end|return|call)\|>", text):
        head, mark, body = part.partition("<|message|>")
        if not mark:
            if head.strip():
                items.append(BadCall(part, "a message without <|message|>"))
            continue
        channel = re.search(r"<\|channel\|>\s*(\w+)", head)
        recipient = re.search(r"to=(\S+?)(?=[\s<]|$)", head)
        if recipient and (tools_in_thinking or not channel or channel[1] != "analysis"):
            items.append(_parse_call(recipient[1].removeprefix("functions."), body))
        elif channel and channel[1] == "analysis":
            reasoning.append(body)
        else:
            content.append(body)
    return ParsedTurn("\n".join(content).strip(), "\n".join(reasoning).strip(), items)


def decode_all(
    tokenizer: Any, completions: Sequence[Sequence[int]], marks: ThinkingMarks = THINK
) -> list[str]:
    """Decode completions without special tokens, and replace the model's thinking marks with
    `THINK`."""
    completions = [list(ids) for ids in completions]
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i: str(token) for i, token in added.items() if token.special}
    shown = HARMONY_CONTROLS if marks == HARMONY else f"{marks.open} {marks.close}"
    hidden = {i for i, text in special.items() if text not in shown}
    skip = len(hidden) == len(special)  # all special tokens are hidden
    if hidden and not skip:
        completions = [[index for index in ids if index not in hidden] for ids in completions]
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        # On all cores; transformers decodes one at a time.
        texts = fast.decode_batch(completions, skip_special_tokens=skip)
    else:
        texts = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in completions]
    return [_translate_marks(text, marks) for text in texts]


def _translate_marks(text: str, marks: ThinkingMarks) -> str:
    """Replace a model's thinking marks with `THINK`, the marks that rewards look for.

    If a model with other marks writes `THINK` as plain text, a space is inserted so that it isn't
    mistaken for a mark.
    """
    if marks == THINK:
        return text
    for usual in (THINK.open, THINK.close):
        text = text.replace(usual, f"{usual[0]} {usual[1:]}")
    if marks != HARMONY:
        return text.replace(marks.open, THINK.open).replace(marks.close, THINK.close)
    turn = read_harmony(text, tools_in_thinking=False)
    stray = [call.text for call in turn.calls if isinstance(call, BadCall)]
    thoughts = "\n".join([*filter(None, [turn.reasoning]), *stray])
    if not thoughts:
        return turn.content
    return f"{THINK.open}{thoughts}" + f"{THINK.close}{turn.content}" * bool(turn.content)


def split_message(raw: str, *, thinking: bool) -> dict[str, str]:
    """Convert a completion to a message with `content`, `raw` and, if there is thinking,
    `reasoning_content`.

    Set `thinking` if the prompt already opened the think block. If the block is never closed, all
    text counts as reasoning, so an answer inside it does not count.
    """
    opens = raw.lstrip().startswith(THINK.open)
    text = THINK.open + raw if thinking and not opens else raw
    # No block begins after the last closing mark; searching there would take quadratic time.
    before, end, behind = text.rpartition(THINK.close)
    content = _THINK_BLOCK.sub("", before + end) + behind
    if THINK.open in content:
        content, reasoning = "", text.replace(THINK.open, "").replace(THINK.close, "")
    else:
        reasoning = "\n".join(_THINK_BLOCK.findall(before + end))
    message = {"role": "assistant", "content": content.strip()}
    if reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    return {**message, "raw": raw}


def _parse_blocks(text: str, start: str, end: str, read: Callable[[str], _Call]) -> _Calls:
    """Parse each block between `start` and `end` with `read`. An unclosed block is malformed and
    extends to the start of the next one."""
    before, *blocks = text.split(start)
    around = [before]
    items: list[_Call] = []
    for block in blocks:
        body, closed, after = block.partition(end)
        item = read(body) if closed else BadCall(body, f"no {end} ends it")
        if isinstance(item, BadCall):
            item = BadCall(start + body + closed, item.why)
        items.append(item)
        around.append(after)
    return "".join(around), items


def _parse_call_object(value: Any, key: str, body: str) -> _Call:
    """Parse a tool call from a JSON object. `key` is the format's own name for the arguments, but
    both `arguments` and `parameters` are accepted. The arguments may be omitted."""
    form = f'a call is a JSON object with "name" and "{key}"'
    if not isinstance(value, dict):
        return BadCall(body, form)
    call = cast(dict[str, Any], value)
    keys = [each for each in ("arguments", "parameters") if each in call]
    others = set(call) - {"name", "type", "id", *keys}
    if len(keys) > 1:
        return BadCall(body, f'it has both "arguments" and "parameters"; {form}')
    if others and not keys:
        return BadCall(body, f'its arguments must be an object in "{key}"; {form}')
    return _make_call(call.get("name"), call[keys[0]] if keys else {}, body)


def _parse_call(name: str, arguments: str) -> _Call:
    try:
        value = strict_json.load(arguments) if arguments.strip() else {}
        return _make_call(name, value, name + arguments)
    except ValueError as error:
        return BadCall(name + arguments, f"its arguments are not JSON: {error}")


def _make_call(name: Any, arguments: Any, body: str) -> _Call:
    if not isinstance(name, str) or not name.strip():
        return BadCall(body, "it names no tool")
    if not isinstance(arguments, dict):
        return BadCall(body, "its arguments are not a JSON object")
    return ParsedCall(name.strip(), arguments)


def _parse_argument(value: str, schema: Any) -> Any:
    """Parse an argument as JSON. If its schema allows strings but not the type of the parsed value,
    the argument is kept as text."""
    kinds = _allowed_types(schema)
    try:
        parsed = strict_json.load(value)
    except ValueError:
        return value
    others = kinds - {"string"}
    return value if "string" in kinds and not _KINDS[type(parsed)] & others else parsed


def _allowed_types(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows, or an empty set if it allows any type."""
    if not isinstance(schema, Mapping):
        return set()
    keys = cast(Mapping[str, Any], schema)
    if "enum" in keys:
        return {kind for value in keys["enum"] for kind in _KINDS[type(value)]}
    if kind := keys.get("type"):
        return {kind} if isinstance(kind, str) else set(kind)
    branches = [
        _allowed_types(branch) for key in ("anyOf", "oneOf") for branch in keys.get(key, ())
    ]
    return {kind for kinds in branches for kind in kinds} if all(branches) else set()


def _tiny_call(line: str, tools: Sequence[ToolSpec]) -> _Call:
    name, _, rest = line[1:].partition(" ")
    if not re.fullmatch(r"\w+", name):
        return BadCall(line, "a call is a line `@name argument, argument`")
    try:
        values = strict_json.load(f"[{rest}]")
    except ValueError as error:
        return BadCall(line, f"its arguments are not JSON separated by commas: {error}")
    schemas = [tool.parameters.get("properties", {}) for tool in tools if tool.name == name]
    arguments = dict(zip(schemas[-1] if schemas else (), values, strict=False))
    if schemas and len(arguments) < len(values):
        return BadCall(line, f"{len(values)} arguments, and {name} takes {len(arguments)}")
    return ParsedCall(name, {key: value for key, value in arguments.items() if value is not None})


_FORMATS = {
    known.name: known
    for known in (
        _Format(name="tiny", find_calls=_tiny_calls, call_start="^@", call_end="\n"),
        _Format(
            name="harmony",
            ends=("<|call|>", "<|return|>"),
            message="<|message|>",
            message_end="<|end|>",
        ),
        _Format(
            name="deepseek-v3.2",
            find_calls=_deepseek_calls,
            call_start="<｜DSML｜invoke",
            call_end="</｜DSML｜invoke>",
        ),
        # The policy ends its turn with the mark that begins the next message.
        _Format(
            name="glm",
            find_calls=_glm_calls,
            call_start="<tool_call>",
            call_end="</tool_call>",
            ends=("<|user|>", "<|observation|>"),
        ),
        _Format(
            name="llama3",
            find_calls=_llama3_calls,
            call_start=r"<\|python_tag\|>",
            only_calls=_LLAMA3_JSON,
            ends=("<|eot_id|>", "<|eom_id|>"),
            equal_ends=True,
        ),
        _Format(
            name="hermes",
            find_calls=_json_calls,
            call_start="<tool_call>",
            call_end="</tool_call>",
        ),
        _Format(name="plain"),  # writes calls in an unknown format
    )
}
