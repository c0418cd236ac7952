"""Prompts from JSON lines and every other kind of file, and the places of malformed rows."""

import gzip
import json
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConfigError, EnvironmentConfig, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec

GOOD = '{"prompt": "2+2?", "answer": "4"}'
CRITERIA = [{"name": "n", "text": "t", "weight": 1}]
TESTS = [{"stdin": "1", "stdout": "1.50"}]


def source(path: Path, **knobs: Any) -> SourceConfig:
    return SourceConfig(**{"name": "s", "source": "file", "path": str(path), **knobs})


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
    assert first.prompt_id == "s/1"
    assert first.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
    )
    assert (first.domain, first.kl_coef, first.thinking) == ("maths", 0.1, False)
    assert first.reward == {"kind": "answer", "answer": "4", "match": "math"}
    assert second.prompt_id == "s/7"
    assert second.messages[1:] == tuple(chat)
    assert second.reward == {"kind": "answer", "answer": "0.5", "match": "exact"}
    assert (third.prompt_id, third.reward["answer"]) == ("s/4", "0.10")


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


BAD_LINES = {
    b"[1]": "object",
    b"\xff\xfe": "UTF-8",
    b'{"prompt": "x"}': "answer",
    b'{"answer": "4"}': "prompt",
    b'{"prompt": "x", "answer": ["4"]}': "answer",
    b'{"messages": [{"role": "assistant", "content": "x"}], "answer": "4"}': "assistant",
    b'{"prompt": "\\ud800", "answer": "4"}': "surrogate",
    b'{"prompt": "x", "answer": ' + b"9" * 60_000 + b"}": "JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_lines(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path, GOOD, "", line, GOOD)
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl:3: .*{BAD_LINES[line]}"):
        load_jsonl(source(path))
    loaded = load_jsonl(source(path, on_bad_line="skip"))
    assert [item.prompt.prompt_id for item in loaded.items] == ["s/1", "s/4"]
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


ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1?", "answer": "2", "hint": "two\nlines, and a comma"},
    {"prompt": "0.1?", "answer": 0.1, "tolerance": 0.01, "hint": None},
]
WANTED = [
    {"kind": "answer", "answer": "2", "match": "math"},
    {"kind": "answer", "answer": "0.1", "match": "math", "tolerance": 0.01},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def rewards(path: Path, **knobs: Any) -> list[dict[str, Any]]:
    loaded = load_jsonl(source(path, **knobs), check_spec)
    return [dict(item.prompt.reward) for item in loaded.items]


TEXTS = {
    "rows.jsonl": LINES,
    "rows.json": "\ufeff" + json.dumps(ROWS, indent=1),
    "lines.json": LINES,
    "rows.csv": '\ufeffprompt,answer,tolerance,hint\n1+1?,2,,"two\nlines"\r\n0.1?,0.1,0.01,\n',
    "tabs.csv": 'prompt\tanswer\ttolerance\thint\n1+1?\t2\t\t"two\nlines"\n0.1?\t0.1\t0.01\t\n',
    "rows.tsv": 'prompt\tanswer\ttolerance\thint\n1+1?\t2\t\t"two\nlines"\n\n0.1?\t0.1\t0.01\t\n',
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_text_files(name: str, compressed: bool, tmp_path: Path) -> None:
    path, content = tmp_path / name, TEXTS[name].encode()
    if compressed:
        path, content = path.with_name(f"{name}.gz"), gzip.compress(content)
    path.write_bytes(content)
    assert rewards(path) == WANTED


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    arrow = pytest.importorskip("pyarrow", reason="no pyarrow")
    table = arrow.Table.from_pylist(rows)
    if path.suffix == ".PARQUET":
        sys.modules["pyarrow.parquet"].write_table(table, path)
        return
    new = arrow.ipc.new_stream if path.stem == "stream" else arrow.ipc.new_file
    with new(str(path), table.schema) as written:
        written.write_table(table, max_chunksize=1)


@pytest.mark.parametrize("name", ["ROWS.PARQUET", "stream.arrow", "file.arrow"])
def test_tables(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet", reason="no pyarrow")
    path = tmp_path / name
    chat = [{"role": "user", "content": "1+1?"}]
    tests = [{"stdin": "1", "stdout": "2"}, {"call": "f", "args": [1], "returns": 2}]
    own: dict[str, Any] = {"picture": b"\x00", "day": date(2026, 1, 2), "nan": float("nan")}
    rows: list[dict[str, Any]] = [
        {"prompt": chat, "answer": 72, "tests": None, **own},
        {"prompt": chat, "tests": tests, **own},
    ]
    write_table(path, rows)
    knobs = source(path, rewards={"correct": 1.0, "mine.brief": 0.1})
    first, second = (item.prompt for item in load_jsonl(knobs, check_spec).items)
    assert first.messages == second.messages == tuple(chat)
    columns = {"day": "2026-01-02", "nan": None}
    assert first.reward == {"kind": "answer", "answer": "72", "match": "math", "columns": columns}
    assert second.reward == {"kind": "code", "tests": tests, "columns": columns}
    write_table(path, [{"prompt": "a", "answer": "1"}, {"prompt": "", "answer": "1"}])
    with pytest.raises(ConfigError, match=f"{path}, row 2: "):
        load_jsonl(source(path))


BAD: dict[str, tuple[str | bytes, str]] = {
    "comma.json": ('[\n{"prompt": "a", "answer": "b"}\n{}]', "comma.json:3: "),
    "inner.json": ('[{"prompt": "a", "answer": "b"},\n\n3]', "inner.json, row 2: "),
    "short.csv": ('prompt,answer\n"a\nb",2\nc\n', "short.csv:4: "),
    "open.csv": ('prompt,answer\na,1\n"b,2\nc,3\n', "open.csv:3: "),
    "latin.csv": (b"prompt,answer\n\xff\xfe,2\n", "byte 0xff"),
    "cut.jsonl.gz": (gzip.compress(b"{}" * 99)[:-9], "data.sources[s].path"),
}


def test_position_of_a_malformed_row(tmp_path: Path) -> None:
    for name, (content, place) in BAD.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ConfigError, match=re.escape(place)):
            load_jsonl(source(tmp_path / name))
