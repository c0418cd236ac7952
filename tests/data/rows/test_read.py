"""Every kind of file, and the place of what is wrong in it."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
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


def source(path: Path, **knobs: Any) -> SourceConfig:
    return SourceConfig(**{"name": "s", "source": "file", "path": str(path), **knobs})


def rewards(path: Path, **knobs: Any) -> list[dict[str, Any]]:
    loaded = load_jsonl(source(path, **knobs), check_spec)
    assert list(loaded.unread) == ["hint"]
    return [dict(item.prompt.reward) for item in loaded.items]


def refused(path: Path, **knobs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_jsonl(source(path, **knobs), check_spec)
    return str(caught.value)


def lines() -> str:
    return "".join(json.dumps(row) + "\n" for row in ROWS)


TEXTS = {
    "rows.jsonl": lines(),
    "rows.json": "\ufeff" + json.dumps(ROWS, indent=1),
    "line.json": json.dumps(ROWS),
    "lines.json": lines(),
    "rows.csv": '\ufeffprompt,answer,tolerance,hint\n1+1?,2,,"two\nlines"\r\n0.1?,0.1,0.01,\n',
    "semicolons.csv": 'prompt;answer;tolerance;hint\n1+1?;2;;"two\nlines"\n0.1?;0.1;0.01;\n',
    "blank.csv": '\ufeff\n  \nprompt;answer;tolerance;hint\n1+1?;2;;"two\nlines"\n0.1?;0.1;0.01;\n',
    "tabs.csv": 'prompt\tanswer\ttolerance\thint\n1+1?\t2\t\t"two\nlines"\n0.1?\t0.1\t0.01\t\n',
    "rows.tsv": 'prompt\tanswer\ttolerance\thint\n1+1?\t2\t\t"two\nlines"\n\n0.1?\t0.1\t0.01\t\n',
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_the_same_rows_from_every_kind_of_text(name: str, compressed: bool, tmp_path: Path) -> None:
    path, content = tmp_path / name, TEXTS[name].encode()
    if compressed:
        path, content = path.with_name(f"{name}.gz"), gzip.compress(content)
    path.write_bytes(content)
    assert rewards(path) == WANTED
    if name.endswith("lines.json"):
        assert rewards(path, source="jsonl") == WANTED


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    arrow = pytest.importorskip("pyarrow", reason="no pyarrow")
    table = arrow.Table.from_pylist(rows)
    if path.suffix == ".PARQUET":
        sys.modules["pyarrow.parquet"].write_table(table, path)
        return
    new = arrow.ipc.new_stream if path.stem == "stream" else arrow.ipc.new_file
    with new(str(path), table.schema) as written:
        written.write_table(table, max_chunksize=1)


@pytest.mark.parametrize("name", ["ROWS.PARQUET", "stream.arrow", "file.arrow"])
def test_tables_hold_times_nulls_and_lists(name: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow.parquet", reason="no pyarrow")
    assert arrow is not None
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
    parquet(path, rows)
    given = source(path, rewards={"correct": 1.0, "mine.brief": 0.1})
    first, second = (item.prompt for item in load_jsonl(given, check_spec).items)
    assert first.messages == second.messages == tuple(chat)
    columns = {"day": "2026-01-02", "nan": None}
    assert first.reward == {"kind": "answer", "answer": "72", "match": "math", "columns": columns}
    assert second.reward == {"kind": "code", "tests": tests, "columns": columns}
    parquet(path, [{"prompt": "a", "answer": "1"}, {"prompt": "", "answer": "1"}])
    assert f"{path}, row 2: no `prompt`" in refused(path)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_without_pyarrow_its_files_are_refused_with_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / name).write_bytes(b"PAR1")
    said = refused(tmp_path / name)
    assert said.startswith(f"data.sources[s].path = '{tmp_path}/{name}': ")
    assert "pip install 'pyarrow" in said


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_table_that_is_none_is_named(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="no pyarrow")
    (tmp_path / name).write_bytes(b"this is no table at all")
    assert "cannot be read" in refused(tmp_path / name)


BAD: dict[str, tuple[str | bytes, str]] = {
    "comma.json": ('[\n{"prompt": "a", "answer": "b"}\n{}]', "comma.json:3: not JSON: a comma"),
    "cut.json": ('[{"prompt": "a", "answer": "b"},\n{"prompt"', "cut.json:2: not JSON"),
    "inner.json": (
        '[{"prompt": "a", "answer": "b"},\n\n3]',
        "inner.json:3 (row 2): must be an",
    ),
    "short.csv": ('prompt,answer\n"a\nb",2\nc\n', "short.csv:4: has 1 cells, and the header 2"),
    "twice.csv": ("prompt,prompt\n", "twice.csv:1: several columns are called 'prompt'"),
    "quote.csv": ('prompt,answer\n"a"b,2\n', "quote.csv:2: not CSV: ',' expected after '\"'; a"),
    "quotes.csv": (
        'prompt,answer\na,1\n"a\nb"c,2\n',
        "quotes.csv:3: not CSV: ',' expected after '\"' in line 4",
    ),
    "open.csv": ('prompt,answer\na,1\n"b,2\nc,3\n', "open.csv:3: not CSV: a quote opens in this"),
    "header.csv": ('"prompt"x,answer\na,1\n', "header.csv:1: not CSV: "),
    "latin.csv": (b"prompt,answer\n\xff\xfe,2\n", "is not UTF-8 (byte 0xff); save it as UTF-8"),
    "number.csv": ("prompt,answer,tolerance\na,2,wide\n", "number.csv:2: `tolerance` must be JSON"),
    "plain.jsonl.gz": ('{"prompt": "a", "answer": "b"}', "Not a gzipped file"),
    "cut.jsonl.gz": (gzip.compress(b"{}" * 99)[:-9], "ended before the end-of-stream marker"),
    "rows.txt": ("{}", "its name has to end in .jsonl"),
    "none.csv": ("prompt,answer\n", "it is empty"),
}


def test_a_split_without_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("prompt,answer\n1+1?,2\n")
    (tmp_path / "test.csv").write_text("prompt,answer\n")
    assert "its split 'test' is empty" in refused(tmp_path, split="test")


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named_with_its_place(name: str, tmp_path: Path) -> None:
    content, words = BAD[name]
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert words in refused(tmp_path / name)


def test_a_row_that_is_no_csv_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(' prompt,answer \n1+1?,2\n"a"b,2\n2+2?,4\n')
    loaded = load_jsonl(source(path, on_bad_line="skip"), check_spec)
    assert [item.prompt.reward["answer"] for item in loaded.items] == ["2", "4"]
    (reason,) = loaded.skipped
    assert reason.startswith(f"{path}:3: not CSV: ")
    path.write_text('prompt,answer\n1+1?,2\n"a,2\n2+2?,4\n')
    assert "a.csv:3: " in refused(path, on_bad_line="skip"), "all that follows would be lost"


LISTS = {
    "list.json": (json.dumps(ROWS), "is a list of JSON, and here each line is an object of"),
    "list.jsonl": (json.dumps(ROWS), "; let its name end in .json, and set source: file"),
    "pretty.jsonl": (json.dumps(ROWS, indent=1), "; let its name end in .json, and set source:"),
    "broken.jsonl": ('[{"prompt": "a"},\n{"prompt": "b"}]', "; let its name end in .json, and set"),
    "lists.jsonl": ('[{"prompt": "a"}]\n' * 2, "lists.jsonl:1: must be an object, is a list"),
    "cut.jsonl": ('[{"prompt": "a"', "cut.jsonl:1: not JSON"),
    "dated.jsonl": ('[2024-01-01] exported\n{"prompt": "a"}\n', "dated.jsonl:1: not JSON"),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_no_lines(name: str, tmp_path: Path) -> None:
    content, words = LISTS[name]
    (tmp_path / name).write_text(content)
    said = refused(tmp_path / name, source="jsonl")
    assert words in said and ("source: file" in said) == ("is a list of JSON" in said)


def test_a_wrong_kind_of_source_is_said(tmp_path: Path) -> None:
    makes: list[tuple[Callable[[], Any], str]] = [
        (lambda: source(Path("a.csv"), source="jsonl"), "reads JSON lines"),
        (lambda: source(Path("/data/sums"), source="hub"), "must be owner/name"),
        (lambda: source(Path("a"), source="jsonl", split="test"), "belongs to source: file, hub"),
    ]
    for make, words in makes:
        with pytest.raises(ConfigError, match=words):
            make()
    (tmp_path / "sums.csv").write_text("")
    assert "did you mean" in refused(tmp_path / "sum.csv")
