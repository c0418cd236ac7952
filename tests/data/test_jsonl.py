"""Prompts from JSON lines; malformed lines are named with their place, or skipped and counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConfigError, EnvironmentConfig, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec

GOOD = '{"prompt": "2+2?", "answer": "4"}'
SCHEMA = {"type": "object", "properties": {"n": {"minimum": 1}}}
CRITERIA = [{"name": "n", "text": "t", "weight": 1}]
TESTS = [{"stdin": "1", "stdout": "1.50"}]


def source(path: Path, **knobs: Any) -> SourceConfig:
    return SourceConfig(**{"name": "file", "source": "jsonl", "path": str(path)} | knobs)


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))
    return path


def reward_of(folder: Path, line: str) -> dict[str, Any]:
    (item,) = load_jsonl(source(write(folder, line))).items
    return dict(item.prompt.reward)


def test_lines_become_prompts(tmp_path: Path) -> None:
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


def test_long_integers(tmp_path: Path) -> None:
    digits = "9" * 5000
    assert reward_of(tmp_path, f'{{"prompt": "x", "answer": {digits}}}')["answer"] == digits
    tests = f'{{"prompt": "y", "tests": [{{"call": "f", "args": [], "returns": {digits}}}]}}'
    assert reward_of(tmp_path, tests)["tests"][0]["returns"] == int(digits)


@pytest.mark.parametrize(
    ("line", "reward"),
    [
        (
            {"criteria": CRITERIA, "reference": "r", "note": 1},
            {"kind": "rubric", "criteria": CRITERIA, "reference": "r"},
        ),
        ({"tests": TESTS, "partial": True}, {"kind": "code", "tests": TESTS, "partial": True}),
        ({"reward": {"kind": "proof"}}, {"kind": "proof"}),
        ({"refuse": True}, {"kind": "refusal", "refuse": True}),
        (
            {"answer": "B", "match": "choice", "choices": [0.10, "x"], "note": 1},
            {"kind": "answer", "answer": "B", "match": "choice", "choices": ["0.1", "x"]},
        ),
        (
            {"answer": 3.14, "tolerance": 0.01},
            {"kind": "answer", "answer": "3.14", "match": "math", "tolerance": 0.01},
        ),
    ],
)
def test_reward_of_a_line(tmp_path: Path, line: dict[str, Any], reward: dict[str, Any]) -> None:
    assert reward_of(tmp_path, json.dumps({"prompt": "a", **line})) == reward


def test_invalid_answers(tmp_path: Path) -> None:
    for line in ('"E", "match": "choice", "choices": ["a", "b"]}', '"[0-9", "match": "regex"}'):
        path = write(tmp_path, GOOD, '{"prompt": "x", "answer": ' + line)
        with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: "):
            load_jsonl(source(path), check_spec)


BAD_LINES = {
    b"{": "JSON",
    b"[1]": "object",
    b"\xff\xfe": "UTF-8",
    b"[" * 200_000: "nested",
    b'{"prompt": "x"}': "answer",
    b'{"prompt": "x", "answer": "4", "tests": []}': "tests",
    b'{"answer": "4"}': "prompt",
    b'{"prompt": " ", "answer": "4"}': "prompt",
    b'{"prompt": "x", "answer": ["4"]}': "answer",
    b'{"messages": ["x"], "answer": "4"}': "messages[0]",
    b'{"messages": [{"role": "assistant", "content": "x"}], "answer": "4"}': "assistant",
    b'{"prompt": "\\ud800", "answer": "4"}': "surrogate",
    b'{"prompt": "x", "answer": ' + b"9" * 60_000 + b"}": "JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_lines(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path, GOOD, "", line, GOOD)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:3: .*on_bad_line") as caught:
        load_jsonl(source(path))
    assert BAD_LINES[line] in str(caught.value)
    loaded = load_jsonl(source(path, on_bad_line="skip"))
    assert [item.prompt.prompt_id for item in loaded.items] == ["file/1", "file/4"]
    (reason,) = loaded.skipped
    assert reason.startswith(f"{path}:3: ")


def test_environment_of_a_line(tmp_path: Path) -> None:
    line = {"prompt": "x", "answer": "4", "environment": {"files": ["a.csv"]}}
    path = write(tmp_path, json.dumps(line))
    environment = EnvironmentConfig(target="a:B")
    (item,) = load_jsonl(source(path, environment=environment), check_spec).items
    assert item.prompt.reward["environment"] == {"files": ["a.csv"]}
    (item,) = load_jsonl(source(path), check_spec).items
    assert "environment" not in item.prompt.reward
