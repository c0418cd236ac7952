"""Tests how a turn is parsed into thinking, text, tool calls and malformed calls."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.rewards.text import answer_in, final_text, keeps_format, raw_text, thinking_text
from keel.rl.turns import THINK, Malformed, Parsed, ThinkingMarks, ToolCall, ToolSpec
from keel.rollout.chat.parsing import (
    _split_thinking,
    decode_all,
    find_thinking_marks,
    split_message,
)
from keel.rollout.chat.render import call_message, render_prompt
from tests.rl.rollouts import prompt
from tests.rollout.chat.families import CITY, NAMES, WITHOUT_THINKING, chat_of, tokenizer_of

USER = [{"role": "user", "content": "Where to?"}]
CODE = ToolSpec(
    name="python",
    description="Runs code.",
    parameters={"type": "object", "properties": {"code": {"type": "string"}}},
)
DSML = "｜DSML｜"
ENDS = {
    "harmony": "<|call|>",
    "deepseek-v3.2": "<｜end▁of▁sentence｜>",
    "glm": "<|observation|>",
    "llama3": "<|eot_id|>",
}


def parse(
    name: str, text: str, *, thinking: bool = False, inside: bool = False, cut: bool = False
) -> Parsed:
    """Parse a turn with this text. Control tokens in the text are encoded as such. Unless `cut` is
    set, the turn is ended."""
    end = "" if cut else ENDS.get(name, "<|im_end|>")
    ids = tokenizer_of(name).encode(text + end, add_special_tokens=False)
    chat = chat_of(name, tools_in_thinking=inside)
    return chat.parse(ids, [CITY, CODE], thinking=thinking, turn=3)


@pytest.mark.parametrize("name", NAMES)
@given(words=st.text('ab<>|{}"\\é\n/', max_size=8), days=st.one_of(st.none(), st.integers()))
def test_what_a_template_writes_is_read_back(name: str, words: str, days: int | None) -> None:
    chat = chat_of(name)
    arguments: dict[str, Any] = {"name": words} | ({} if days is None else {"days": days})
    last = f"q{len(words)}z"  # unique text
    said: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call_message("a", "city", arguments | {"last": last})],
    }
    properties = {**CITY.parameters["properties"], "last": {"type": "string"}}
    tool = ToolSpec(name="city", description="", parameters={"properties": properties})
    thinking = name not in WITHOUT_THINKING
    if thinking:
        said["reasoning_content"] = "so"
    after = [{"role": "tool", "content": "", "tool_call_id": "a", "name": "city"}]
    sampled = chat.turn_ids(USER, said, after, [tool], thinking=thinking)
    parsed = chat.parse(sampled, [tool], thinking=thinking, turn=0)
    call = ToolCall(call_id="call_0_0", name="city", arguments=arguments | {"last": last})
    expected = Parsed(content="", reasoning="so" if thinking else "", closed=True, calls=(call,))
    assert parsed == expected


@pytest.mark.parametrize(
    ("name", "text", "name_and_arguments"),
    [
        ("hermes", '<tool_call>{"name": "city"}</tool_call>', ("city", {})),
        ("llama3", '{"name": "city", "arguments": {"days": 1}}', ("city", {"days": 1})),
        (
            "llama3",
            '<|python_tag|>{"name": "city", "parameters": {"days": 1}}',
            ("city", {"days": 1}),
        ),
        ("llama3", "<|python_tag|>print(1)", ("python", {"code": "print(1)"})),
        (
            "harmony",
            '<|channel|>commentary to=functions.city <|constrain|>json<|message|>{"days": 1}',
            ("city", {"days": 1}),
        ),
        (
            "glm",
            "<tool_call>city\n<arg_key>name</arg_key>\n<arg_value>12</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
            ("city", {"name": "12", "days": 12}),
        ),
        ("tiny", '@city "a, b", 2', ("city", {"name": "a, b", "days": 2})),
        ("tiny", "@city null, 2", ("city", {"days": 2})),
        ("tiny", "@nothing 1", ("nothing", {})),
    ],
)
def test_calls_in_unusual_forms(
    name: str, text: str, name_and_arguments: tuple[str, dict[str, Any]]
) -> None:
    (call,) = parse(name, text).calls
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == name_and_arguments
    assert call.call_id == "call_3_0"


MALFORMED_CALLS = {
    "qwen3": (
        '<tool_call>{"name": "city", </tool_call>',
        '<tool_call>{"name": "city", "arguments": {}, "parameters": {"days": 1}}</tool_call>',
        '<tool_call>{"name": "city", "arguments": {"a": NaN}}</tool_call>',
        f"<tool_call>{'[' * 100_000}</tool_call>",
    ),
    "deepseek-v3.2": (
        f'<{DSML}invoke name="city">1</{DSML}invoke>',
        f'<{DSML}invoke name="city"><{DSML}parameter name="days" string="false">x'
        f"</{DSML}parameter></{DSML}invoke>",
    ),
    "glm": ("<tool_call>city<arg_key>a</arg_key></tool_call>", "<tool_call></tool_call>"),
    "llama3": (
        '{"name": "city", "days": 1}',
        '{"name": "city", "parameters": 1}',
    ),
    "harmony": ("<|channel|>commentary to=functions.city<|message|>{", "city"),
    "tiny": ("@city [", "@city 1, 2, 3", "@ city", f"@city {'[' * 700}{']' * 700}"),
}


@pytest.mark.parametrize("name", MALFORMED_CALLS)
def test_malformed_calls_are_reported(name: str) -> None:
    for text in MALFORMED_CALLS[name]:
        (call,) = parse(name, text).calls
        assert isinstance(call, Malformed), text[:80]
        assert call.why and call.text and len(call.text) <= 300


GLM = "<tool_call>f{}</tool_call>"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "90210", "90210"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/day"}]}, "12", 12),
        ({"enum": ["1", "2", None]}, "1", "1"),
        ({}, "12", 12),
    ],
)
def test_glm_values_follow_the_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    tool = ToolSpec(name="f", description="", parameters={"properties": {"a": schema}})
    said = GLM.format(f"<arg_key>a</arg_key><arg_value>{text}</arg_value>")
    ids = tokenizer_of("glm").encode(said + ENDS["glm"], add_special_tokens=False)
    (call,) = chat_of("glm").parse(ids, [tool], thinking=False, turn=0).calls
    assert isinstance(call, ToolCall) and call.arguments == {"a": value}


def test_deepseek_text_around_calls_appears_once() -> None:
    begin, end = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
    call = f'<{DSML}invoke name="city"></{DSML}invoke>'
    for text, content, calls in (
        (f"a{end}b", "ab", 0),
        (f"a{call}{end}b", "ab", 1),
        (f"a{begin}{call}{end}b{begin}{call}{end}c", "abc", 2),
        (f"a{begin}{call}", "a", 1),
    ):
        parsed = parse("deepseek-v3.2", text)
        assert (parsed.content, len(parsed.calls)) == (content, calls), text


def test_one_broken_call_spoils_no_other() -> None:
    good = '<tool_call>{"name": "city"}</tool_call>'
    parsed = parse("qwen3", f"First {good} then <tool_call>{{{good} and <tool_call>x</tool_call>.")
    assert [type(call) for call in parsed.calls] == [ToolCall, Malformed, ToolCall, Malformed]
    assert [call.call_id for call in parsed.calls] == [f"call_3_{i}" for i in range(4)]
    assert parsed.content.split() == ["First", "then", "and", "."]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("tiny", "\n@city 1\n"),
        ("qwen3", '<tool_call>{"name": "city"}</tool_call>'),
        ("glm", "<tool_call>city</tool_call>"),
        ("deepseek-v3.2", f'<{DSML}invoke name="city"></{DSML}invoke>'),
    ],
)
def test_calls_in_thinking_are_opt_in(name: str, call: str) -> None:
    text = f"I could {call} and </think>\n\nNo."
    text = text if chat_of(name).prompt_opens_thinking(thinking=True) else f"<think>{text}"
    parsed = parse(name, text, thinking=True)
    assert (parsed.content, parsed.calls) == ("No.", ())
    assert "I could" in parsed.reasoning
    assert len(parse(name, text, thinking=True, inside=True).calls) == 1
    never_closed = parse(name, text.replace("</think>", ""), thinking=True)
    assert (never_closed.content, never_closed.calls) == ("", ())


def test_cut_turns_are_not_closed() -> None:
    parsed = parse("qwen3", '<tool_call>{"name": "city"}</tool_call> <tool_call>{"na', cut=True)
    assert not parsed.closed
    assert [type(call) for call in parsed.calls] == [ToolCall, Malformed]


@given(data=st.data(), name=st.sampled_from(NAMES), inside=st.booleans(), thinking=st.booleans())
def test_nothing_a_policy_samples_is_too_much(
    data: st.DataObject, name: str, inside: bool, thinking: bool
) -> None:
    chat = chat_of(name)
    controls = sorted(chat.encoder.text_of)
    ids = data.draw(
        st.lists(st.one_of(st.integers(5, 275), st.sampled_from(controls)), max_size=20)
    )
    ids = [i for i in ids if i in chat.encoder.text_of or tokenizer_of(name).decode([i])]
    parsed = chat.parse(ids, [CITY, CODE] if inside else [], thinking=thinking, turn=1)
    assert parsed.closed == (bool(ids) and ids[-1] in chat.ends.values())


# Thinking marks.

HERMES = '<tool_call>\n{{"name": "python", "arguments": {{"code": "{}"}}}}\n</tool_call>'
MARKED_CALLS = {
    "qwen3": HERMES,
    "hermes": HERMES,
    "llama3": '{{"name": "python", "parameters": {{"code": "{}"}}}}',
    "glm": "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "deepseek-v3.2": f'<{DSML}function_calls>\n<{DSML}invoke name="python">\n<{DSML}parameter '
    f'name="code" string="true">{{}}</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
}
CODES = ("a('<think>')", "a('</think>')", "sub('<think>.*</think>', s)", "</think><think>")


@pytest.mark.parametrize("name", MARKED_CALLS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("thought", ["", "so <think> so"])
def test_marks_in_a_calls_arguments_are_theirs(name: str, code: str, thought: str) -> None:
    before = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    parsed = parse(name, before + MARKED_CALLS[name].format(code))
    assert parsed.calls == (ToolCall(call_id="call_3_0", name="python", arguments={"code": code}),)
    assert (parsed.content, parsed.reasoning, parsed.in_thinking) == ("", thought, False)
    if name == "qwen3":
        inside = parse(
            name, f"<think>so {MARKED_CALLS[name].format(code)} and</think>Yes.", inside=True
        )
        assert (inside.content, inside.in_thinking, len(inside.calls)) == ("Yes.", False, 1)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<c>", "</c>", "a", " ", "\n"]), max_size=12),
    st.booleans(),
)
def test_marks_decide_without_calls(parts: list[str], opened: bool) -> None:
    text = "".join(parts)
    first = next((part for part in parts if part in ("<think>", "</think>")), "")
    thinks = first == "</think>" or (opened and not text.lstrip().startswith("<think>"))
    thoughts, said = [""] * thinks, [""] * (not thinks)
    for part in parts:
        if part == ("</think>" if thinks else "<think>"):
            thinks = not thinks
            (thoughts if thinks else said).append("")
        else:
            (thoughts if thinks else said)[-1] += part
    if thinks:
        expected = "\n".join([*said, *thoughts]).strip(), "", True
    else:
        expected = "\n".join(map(str.strip, thoughts)), "".join(said), False
    assert _split_thinking(text, opened=opened) == expected


HARMONY = "<|channel|>{}<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
# Name: opening mark, closing mark, end of the turn.
MARKS = {
    "qwen3": ("<think>", "</think>", "<|im_end|>"),
    "seed": ("<seed:think>", "</seed:think>", "<seed:eos>"),
    "harmony": (HARMONY.format("analysis"), FINAL, "<|return|>"),
}
LITERALS = {name: "</think>" for name in MARKS if name != "qwen3"}
"""Maps each family to a mark of other families, which must be treated as ordinary text."""


def completed(name: str, text: str) -> dict[str, Any]:
    tokenizer = tokenizer_of(name)
    marks = find_thinking_marks(tokenizer)
    assert marks is not None
    ids = tokenizer.encode(text, add_special_tokens=False)
    (raw,) = decode_all(tokenizer, [ids], marks)
    return split_message(raw, thinking=render_prompt(tokenizer, prompt(), marks)[1])


def in_a_conversation(name: str, text: str) -> dict[str, Any]:
    ids = tokenizer_of(name).encode(text, add_special_tokens=False)
    parsed = chat_of(name).parse(ids, (), thinking=True, turn=0)
    message = {"role": "assistant", "content": parsed.content}
    return message | ({"reasoning_content": parsed.reasoning} if parsed.reasoning else {})


@pytest.mark.parametrize("made", [completed, in_a_conversation])
@pytest.mark.parametrize("name", MARKS)
def test_boxes_in_thinking_never_count(name: str, made: Any) -> None:
    opens, closes, end = MARKS[name]
    message = made(name, f"{opens}Is it \\boxed{{7}}?{closes}It is 8.{end}")
    assert (final_text((message,)), thinking_text((message,))) == ("It is 8.", "Is it \\boxed{7}?")
    assert keeps_format(raw_text((message,)), thinking=True, finished=True)
    assert not keeps_format(raw_text((message,)), thinking=False, finished=True)


@pytest.mark.parametrize("made", [completed, in_a_conversation])
@pytest.mark.parametrize("name", MARKS)
def test_a_box_in_unfinished_thinking_never_scores(name: str, made: Any) -> None:
    opens, _, end = MARKS[name]
    for text in ("It is \\boxed{7}", f"It is {LITERALS.get(name, '')} \\boxed{{7}}"):
        message = made(name, f"{opens}{text}{end}")
        assert answer_in(final_text((message,))) == ""
        assert not keeps_format(raw_text((message,)), thinking=True, finished=True)


def test_order_of_mark_sources() -> None:
    assert find_thinking_marks(tokenizer_of("seed"), ("<a>", "</a>")) == ThinkingMarks(
        "<a>", "</a>"
    )
    tokenizer = copy.deepcopy(tokenizer_of("seed"))
    tokenizer.chat_template = tokenizer_of("chatml").chat_template
    assert find_thinking_marks(tokenizer) == ThinkingMarks("<seed:think>", "</seed:think>")
    tokenizer.chat_template = tokenizer_of("qwen3").chat_template
    assert find_thinking_marks(tokenizer) == THINK
    assert find_thinking_marks(tokenizer_of("chatml")) is None
