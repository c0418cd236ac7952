"""Rows from every kind of file, and the positions of malformed rows."""

import gzip
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConfigError, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1?", "answer": "2", "hint": "two\nlines, and a comma"},
    {"prompt": "0.1?", "answer": 0.1, "tolerance": 0.01, "hint": None},
]
WANTED = [
    {"kind": "answer", "answer": "2", "match": "math"},
    {"kind": "answer", "answer": "0.1", "match": "math", "tolerance": 0.01},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def source(path: Path, **knobs: Any) -> SourceConfig:
    return SourceConfig(**{"name": "s", "source": "file", "path": str(path), **knobs})


def rewards(path: Path, **knobs: Any) -> list[dict[str, Any]]:
    loaded = load_jsonl(source(path, **knobs), check_spec)
    assert list(loaded.unread) == ["hint"]
    return [dict(item.prompt.reward) for item in loaded.items]


def error_of(path: Path, **knobs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_jsonl(source(path, **knobs), check_spec)
    return str(caught.value)


TEXTS = {
    "rows.jsonl": LINES,
    "rows.json": "\ufeff" + json.dumps(ROWS, indent=1),
    "line.json": json.dumps(ROWS),
    "lines.json": LINES,
    "rows.csv": '\ufeffprompt,answer,tolerance,hint\n1+1?,2,,"two\nlines"\r\n0.1?,0.1,0.01,\n',
    "semicolons.csv": 'prompt;answer;tolerance;hint\n1+1?;2;;"two\nlines"\n0.1?;0.1;0.01;\n',
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
    if name.endswith("lines.json"):
        assert rewards(path, source="jsonl") == WANTED


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
    tests: list[dict[str, Any]] = [
        {"stdin": "1", "stdout": "2"},
        {"call": "f", "args": [1], "returns": 2},
    ]
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
    assert f"{path}, row 2: " in error_of(path)


BAD: dict[str, tuple[str | bytes, str]] = {
    "comma.json": ('[\n{"prompt": "a", "answer": "b"}\n{}]', "comma.json:3: "),
    "inner.json": ('[{"prompt": "a", "answer": "b"},\n\n3]', "inner.json, row 2: "),
    "short.csv": ('prompt,answer\n"a\nb",2\nc\n', "short.csv:4: "),
    "twice.csv": ("prompt,prompt\n", "twice.csv:1: "),
    "quotes.csv": ('prompt,answer\na,1\n"a\nb"c,2\n', "quotes.csv:3: "),
    "open.csv": ('prompt,answer\na,1\n"b,2\nc,3\n', "open.csv:3: "),
    "latin.csv": (b"prompt,answer\n\xff\xfe,2\n", "byte 0xff"),
    "cut.jsonl.gz": (gzip.compress(b"{}" * 99)[:-9], "data.sources[s].path"),
    "rows.txt": ("{}", ".jsonl"),
    "none.csv": ("prompt,answer\n", "empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_position_of_a_malformed_row(name: str, tmp_path: Path) -> None:
    content, place = BAD[name]
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert place in error_of(tmp_path / name)


def test_skipping_malformed_csv_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(" prompt,answer \n1+1?,2\nb\n2+2?,4\n")
    loaded = load_jsonl(source(path, on_bad_line="skip"), check_spec)
    assert [item.prompt.reward["answer"] for item in loaded.items] == ["2", "4"]
    (reason,) = loaded.skipped
    assert reason.startswith(f"{path}:3: ")
