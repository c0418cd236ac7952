"""Every way a line can be wrong is named with its place, or skipped and counted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConfigError, EnvironmentConfig, SourceConfig
from keel.data.items import COUNTED, REFUSED
from keel.data.jsonl import MATCHES, load_jsonl
from keel.rewards.checks import check_spec
from keel.rewards.rules import verifiers

GOOD = '{"prompt": "2+2?", "answer": "4"}'


def source(path: Path, **knobs: Any) -> SourceConfig:
    return SourceConfig(**{"name": "file", "source": "jsonl", "path": str(path)} | knobs)


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))
    return path


def test_a_line_becomes_a_prompt(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat.append({"role": "user", "content": "c"})
    path = write(
        tmp_path,
        "\ufeff" + GOOD + "\r",
        "",
        json.dumps({"messages": chat, "answer": 0.5, "id": 7, "match": "exact", "extra": [1]}),
        '{"prompt": "x", "answer": 0.10}',
    )
    knobs = source(path, kl_coef=0.1, domain="maths", thinking=False, system="Be brief.")
    first, second, third = (item.prompt for item in load_jsonl(knobs).items)
    assert first.prompt_id == "file/1"
    assert first.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
    )
    assert (first.domain, first.kl_coef, first.thinking) == ("maths", 0.1, False)
    assert first.reward == {"kind": "answer", "answer": "4", "match": "math"}
    assert second.prompt_id == "file/7"
    assert second.messages[1:] == tuple(chat)
    assert second.reward == {"kind": "answer", "answer": "0.5", "match": "exact"}
    assert (third.prompt_id, third.reward["answer"]) == ("file/4", "0.10")


def test_messages_in_openais_form_are_read(tmp_path: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 2}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "4"},
    ]
    path = write(tmp_path, json.dumps({"messages": messages, "answer": "4"}))
    (item,) = load_jsonl(source(path)).items
    assert [(one["role"], one["content"]) for one in item.prompt.messages] == [
        ("developer", "Be brief."),
        ("user", "2+2?"),
        ("assistant", ""),
        ("tool", "4"),
    ]
    (read,) = item.prompt.messages[2]["tool_calls"]
    assert read == {**call, "function": {"name": "add", "arguments": {"x": 2}}}


def test_integers_of_many_digits_are_read(tmp_path: Path) -> None:
    digits = "9" * 5000
    path = write(
        tmp_path,
        f'{{"prompt": "x", "answer": {digits}}}',
        f'{{"prompt": "y", "tests": [{{"call": "f", "args": [], "returns": {digits}}}]}}',
    )
    answer, tests = (item.prompt.reward for item in load_jsonl(source(path)).items)
    assert answer["answer"] == digits
    assert tests["tests"][0]["returns"] == int(digits)


def test_a_line_says_how_it_is_judged(tmp_path: Path) -> None:
    criteria = [{"name": "n", "text": "t", "weight": 1}]
    tests = [{"stdin": "1", "stdout": "1.50"}]
    path = write(
        tmp_path,
        json.dumps({"prompt": "a", "criteria": criteria, "reference": "r", "note": 1}),
        json.dumps({"prompt": "b", "tests": tests, "reference": "r", "partial": True, "note": 1}),
        json.dumps({"prompt": "c", "reward": {"kind": "proof"}}),
        json.dumps({"prompt": "d", "refuse": True}),
    )
    rewards = [item.prompt.reward for item in load_jsonl(source(path)).items]
    assert rewards == [
        {"kind": "rubric", "criteria": criteria, "reference": "r"},
        {"kind": "code", "tests": tests, "reference": "r", "partial": True},
        {"kind": "proof"},
        {"kind": "refusal", "refuse": True},
    ]


def test_a_line_says_how_its_answer_is_compared(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"minimum": 1}}}
    path = write(
        tmp_path,
        '{"prompt": "a", "answer": "B", "match": "choice", "choices": [0.10, "x"], "note": 1}',
        json.dumps({"prompt": "b", "answer": schema, "match": "schema", "choices": 1}),
        '{"prompt": "c", "answer": "[0-9]+", "match": "regex", "tolerance": 0.1}',
        '{"prompt": "d", "answer": 3.140, "tolerance": 0.01}',
    )
    rewards = [dict(item.prompt.reward) for item in load_jsonl(source(path)).items]
    assert all(reward.pop("kind") == "answer" for reward in rewards)
    assert rewards == [
        {"answer": "B", "match": "choice", "choices": ["0.10", "x"]},
        {"answer": schema, "match": "schema"},
        {"answer": "[0-9]+", "match": "regex"},
        {"answer": "3.140", "match": "math", "tolerance": 0.01},
    ]


WRONG_ANSWERS = {
    '{"prompt": "x", "answer": "E", "match": "choice", "choices": ["a", "b"]}': "not among the ch",
    '{"prompt": "x", "answer": "A", "match": "choice", "choices": 3}': "choices must be a list",
    '{"prompt": "x", "answer": "[0-9", "match": "regex"}': "'[0-9' is no regular expression",
    '{"prompt": "x", "answer": {"type": 1}, "match": "schema"}': "no valid JSON schema",
    '{"prompt": "x", "answer": {"$ref": "#/a"}, "match": "schema"}': "has no '#/a' in itself",
    '{"prompt": "x", "answer": "1", "tolerance": -1}': "tolerance = -1 must be a number between",
}


@pytest.mark.parametrize("line", WRONG_ANSWERS, ids=range(len(WRONG_ANSWERS)))
def test_an_answer_that_cannot_be_compared_is_named_with_its_line(
    tmp_path: Path, line: str
) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(ConfigError) as caught:
        load_jsonl(source(path), check_spec)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert WRONG_ANSWERS[line] in str(caught.value)


def test_a_reward_that_cannot_be_judged_is_named_with_its_line(tmp_path: Path) -> None:
    def check(spec: Mapping[str, Any]) -> None:
        if spec["kind"] != "answer":
            raise ValueError("no good")

    path = write(tmp_path, GOOD, '{"prompt": "x", "reward": {"kind": "magic"}}')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: no good"):
        load_jsonl(source(path), check)
    assert len(load_jsonl(source(path, on_bad_line="skip"), check).items) == 1


BAD_LINES = {
    b"{": "not JSON: Expecting property name",
    b"[1]": "must be an object, is a list",
    b"3": "must be an object, is a number",
    b"\xff\xfe": "not UTF-8 (byte 0)",
    b"[" * 200_000: "nested too deeply",
    b'{"prompt": "x"}': "no `answer`",
    b'{"prompt": "x", "answer": "4", "tests": []}': "has `answer` and `tests`; keep one",
    b'{"prompt": "x", "reward": "4"}': "`reward` must be an object, is text",
    b'{"prompt": "x", "anwser": "4"}': "no `answer`; is `anwser` meant for it?",
    b'{"answer": "4"}': "no `prompt`",
    b'{"prompt": " ", "answer": "4"}': "`prompt` is empty",
    b'{"prompt": "x", "answer": null}': "no `answer`: it is null",
    b'{"prompt": "x", "answer": true}': "is true or false",
    b'{"prompt": "x", "answer": ["4"]}': "is a list",
    b'{"prompt": "x", "answer": "4", "match": "fuzzy"}': "must be one of math, exact",
    b'{"prompt": "x", "answer": "4", "match": ["math"]}': "must be one of math, exact",
    b'{"prompt": "x", "answer": "{}", "match": "schema"}': "an object, is text",
    b'{"prompt": "x", "answer": "4", "id": ["a"]}': "`id` must be text or a number",
    b'{"prompt": "x", "messages": [], "answer": "4"}': "both `prompt` and `messages`",
    b'{"messages": [], "answer": "4"}': "at least one message",
    b'{"messages": ["x"], "answer": "4"}': "`messages[0]` must be an object, is text",
    b'{"messages": [{"role": "usr", "content": "x"}], "answer": "4"}': "role` is 'usr', must be",
    b'{"messages": [{"role": "user"}], "answer": "4"}': "`messages[0].content` must be text",
    b'{"messages": [{"role": "assistant", "content": "x"}], "answer": "4"}': "nothing to answer",
    b'{"prompt": "\\ud800", "answer": "4"}': "half of a surrogate pair",
    b'{"prompt": "x", "answer": ' + b"9" * 60_000 + b"}": "not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path, GOOD, "", line, GOOD)
    with pytest.raises(ConfigError, match="on_bad_line: skip") as caught:
        load_jsonl(source(path))
    assert f"{path}:3: " in str(caught.value)
    assert BAD_LINES[line] in str(caught.value)

    loaded = load_jsonl(source(path, on_bad_line="skip"))
    assert [item.prompt.prompt_id for item in loaded.items] == ["file/1", "file/4"]
    assert len(loaded.skipped) == 1
    assert loaded.skipped[0].startswith(f"{path}:3: ")


def test_an_error_shows_the_first_malformed_lines_and_how_many_more(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, *["{"] * 7, GOOD)
    with pytest.raises(ConfigError) as caught:
        load_jsonl(source(path))
    head, *lines = str(caught.value).splitlines()
    assert head == (
        "data.sources[file]: 7 malformed lines; repair them, or set on_bad_line: skip to leave "
        "such lines out:"
    )
    assert [line.partition(": ")[0] for line in lines[:5]] == [f"  {path}:{n}" for n in range(2, 7)]
    assert lines[5:] == ["  and 2 more"]


def test_of_a_file_of_malformed_lines_not_all_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, *["{"] * (COUNTED + 9))
    said = rf"{COUNTED:,} malformed lines and perhaps more; (.|\n)*and {COUNTED - REFUSED:,} more$"
    with pytest.raises(ConfigError, match=said):
        load_jsonl(source(path))
    with pytest.raises(ConfigError, match=f"all {COUNTED + 9} lines are malformed"):
        load_jsonl(source(path, on_bad_line="skip"))


def test_every_rule_can_be_chosen() -> None:
    assert list(MATCHES) == list(verifiers.MATCHES)


def test_ids_are_unique(tmp_path: Path) -> None:
    path = write(tmp_path, '{"id": "2", "prompt": "a", "answer": "b"}', GOOD)
    with pytest.raises(ConfigError, match=r":2: id 'file/2' is already taken by line 1"):
        load_jsonl(source(path))


def test_one_system_message_is_enough(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path, json.dumps({"messages": chat, "answer": "4"}))
    assert len(load_jsonl(source(path)).items) == 1
    with pytest.raises(ConfigError, match=r"and so has data.sources\[file\].system"):
        load_jsonl(source(path, system="Be brief."))


def test_size_limits_the_lines(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "", GOOD, "{")
    assert len(load_jsonl(source(path, size=2)).items) == 2


def test_what_comes_with_keel_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = Path("configs/mixed/code.jsonl")
    assert len(load_jsonl(source(ours)).items) == 12
    with pytest.raises(ConfigError, match=r"'configs/mixed/cod.jsonl': no such file"):
        load_jsonl(source(Path("configs/mixed/cod.jsonl")))
    with pytest.raises(ConfigError, match="no such file"):
        load_jsonl(source(Path("rewards/rules/maths.py")))
    ours.parent.mkdir(parents=True)
    ours.write_text(GOOD)  # one's own comes first
    assert len(load_jsonl(source(ours)).items) == 1


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "", "  ")
    with pytest.raises(ConfigError, match="it is empty"):
        load_jsonl(source(path))
    with pytest.raises(ConfigError, match=r"all 1 lines are malformed; .*:1: not JSON"):
        load_jsonl(source(write(tmp_path, "{"), on_bad_line="skip"))
    with pytest.raises(ConfigError, match=r"no such file .*did you mean .*prompts.jsonl"):
        load_jsonl(source(tmp_path / "prompt.jsonl"))
    with pytest.raises(ConfigError, match="is a folder"):
        load_jsonl(source(tmp_path))


@pytest.mark.parametrize(
    "judged",
    [
        {"answer": "4"},
        {"criteria": [{"name": "n", "text": "t", "weight": 1}]},
        {"tests": [{"stdin": "1", "stdout": "1"}]},
        {"reward": {"kind": "proof"}},
        {},
    ],
)
def test_what_a_line_says_to_its_environment(tmp_path: Path, judged: dict[str, Any]) -> None:
    line = {"prompt": "x", **judged, "environment": {"files": ["a.csv"]}}
    path = write(tmp_path, json.dumps(line))
    given = EnvironmentConfig(target="a:B")
    (item,) = load_jsonl(source(path, environment=given), check_spec).items
    assert item.prompt.reward["environment"] == {"files": ["a.csv"]}
    if judged:
        (item,) = load_jsonl(source(path), check_spec).items
        assert "environment" not in item.prompt.reward
    path.write_text(json.dumps({**line, "environment": "a.csv"}))
    with pytest.raises(ConfigError, match="`environment` must be an object, is text"):
        load_jsonl(source(path, environment=given))
