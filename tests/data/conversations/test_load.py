"""Sources of conversations, and the held-out split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.load import Lessons
from keel.data.conversations.types import Example
from tests.data.conversations.sources import chat, load, said, source, write
from tests.data.rows.hub import MAIN, NAME, serving


def test_duplicates_and_questions(tmp_path: Path) -> None:
    lines = [chat(f"q{i // 2}?", f"answer {i}") for i in range(20)]
    path = write(tmp_path / "a.jsonl", *lines, lines[0], "", chat("q0?", "other", score=1))
    found = load(source(path, holdout=5))
    report = found.report["s"]
    assert report.left_out == {"repeated": 1} and report.unread == {"score"}
    assert report.heldout in (6, 7) and report.learned + report.heldout == 21
    held, learned = said(found.heldout["s"]), said(found.train.sources["s"])
    questions = [
        {int(one.split()[1]) // 2 if one != "other" else 0 for one in part}
        for part in (held, learned)
    ]
    assert not questions[0] & questions[1]
    again = load(source(path, holdout=5))
    assert said(again.heldout["s"]) == held
    assert again.train.state() == found.train.state()


def test_held_out_questions_of_all_sources(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", *(chat(f"q{i}?", f"a{i}") for i in range(6)))
    two = write(tmp_path / "b.jsonl", *(chat(f" q{i}? ", f"b{i}") for i in range(6)))
    found = load(source(one, holdout=2), source(two, name="t"))
    held = {answer[1:] for answer in said(found.heldout["s"])}
    assert said(found.train.sources["t"]) == {f"b{i}" for i in range(6) if str(i) not in held}
    assert found.report["t"].left_out == {"held out by another source": 2}
    (question,) = {
        Example(
            origin="",
            messages=tuple(chat("q3?", "")["messages"]),
            trained=(1,),
            thinking=False,
        ).question
    }
    found = load(source(one), reserved={question})
    assert "a3" not in said(found.train.sources["s"])
    assert found.report["s"].left_out == {"held out by data.sources": 1}


def test_repeat(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", *(chat(f"q{i}?", f"a{i}") for i in range(4)))
    two = write(tmp_path / "b.jsonl", *(chat(f"p{i}?", f"b{i}") for i in range(8)))
    three = write(tmp_path / "c.jsonl", chat("r?", "c"))
    held = source(three, name="only held out", repeat=0, holdout=1)
    found = load(source(one, repeat=2), source(two, name="t"), held)
    assert list(found.train.sources) == ["s", "t"] and list(found.heldout) == ["only held out"]
    found.train.take(16)
    assert found.train.drawn == {"s": 8, "t": 8}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "JSON"),
        ('{"messages": []}', "`messages`"),
        (json.dumps(chat("?", "untellable")), r"sft\.sources\[s\]"),
        (json.dumps(chat("?", "unthinkable", thinking=True)), "thinking: without"),
        (json.dumps(chat("?", "<think>unthinkable</think>a")), "thinking: without"),
        (json.dumps(chat("?", "always")), "thinking: with,"),
    ],
)
def test_malformed_conversations(tmp_path: Path, line: str, named: str) -> None:
    path = write(tmp_path / "a.jsonl", chat("?", "a"), line)
    with pytest.raises(ConfigError, match=rf"a\.jsonl:2: .*{named}.*on_bad_line: skip"):
        load(source(path))
    found = load(source(path, on_bad_line="skip"))
    (reason,) = found.report["s"].skipped
    assert reason.startswith(f"{path}:2: ") and found.report["s"].left_out == {"malformed": 1}


def test_several_malformed_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", chat("?", "a"), "{", "[")
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: (.|\n)*jsonl:3: "):
        load(source(path))


def test_long_conversations(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", chat("?", "a"), chat("?", "b" * 50))
    with pytest.raises(ConfigError, match=r"a\.jsonl:2 .*sft\.max_context_tokens = 40"):
        load(source(path), max_context_tokens=40)
    found = load(source(path), max_context_tokens=40, long_conversations="drop")
    assert found.report["s"].left_out == {"too long": 1}


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"path": "absent.jsonl"}, r"sft\.sources\[s\]\.path"),
        ({"holdout": 2}, "holdout = 2"),
        ({"holdout": 3}, "holdout = 3"),
        ({"source": "trajectories"}, r"a\.jsonl:1"),
        (
            {"source": "solutions", "path": "", "task": "chain_sum", "size": 2},
            r"sft\.sources\[s\]\.task",
        ),
        ({"source": "solutions", "path": "", "task": "no_such", "size": 2}, "no_such"),
    ],
)
def test_empty_sources(tmp_path: Path, knobs: dict[str, Any], named: str) -> None:
    path = write(tmp_path / "a.jsonl", chat("?", "a"), chat("!", "b"))
    with pytest.raises(ConfigError, match=named):
        load(source(knobs.pop("path", path), **knobs))


@pytest.mark.parametrize(
    ("sizes", "holdout", "held"),
    [
        ([9, 1], 1, 1),
        ([9, 3, 3], 3, 3),
        ([4, 5, 6], 3, 4),
        ([3, 5], 4, 5),
        ([3, 5], 3, 3),
    ],
)
def test_holdout_takes_whole_questions(
    tmp_path: Path, sizes: list[int], holdout: int, held: int
) -> None:
    lines = [chat(f"q{q}?", f"{q} {i}") for q, size in enumerate(sizes) for i in range(size)]
    found = load(source(write(tmp_path / "a.jsonl", *lines), holdout=holdout))
    report = found.report["s"]
    assert (report.heldout, report.learned) == (held, sum(sizes) - held)
    questions = [
        {one.split()[0] for one in said(part)}
        for part in (found.heldout["s"], found.train.sources["s"])
    ]
    assert not questions[0] & questions[1]


def test_errors_of_empty_sources(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "{", "[")
    for knobs in ({}, {"holdout": 1}):
        with pytest.raises(ConfigError, match=r"a\.jsonl:1: "):
            load(source(path, on_bad_line="skip", **knobs))
    path = write(tmp_path / "b.jsonl", *(chat("?", f"{i}") for i in range(5)))
    with pytest.raises(ConfigError, match="holdout = 1"):
        load(source(path, holdout=1))


def test_worked_solutions(tmp_path: Path) -> None:
    made = ConversationsConfig(name="s", source="solutions", task="spell_backward", size=20)
    found = load(made)
    report = found.report["s"]
    assert 0 < report.learned < 20 and report.left_out["not taught"] + report.learned <= 20
    assert not any("a" in answer for answer in said(found.train.sources["s"]))

    def with_params(**params: Any) -> set[str]:
        made = {"task": "spell_backward", "size": 20, "params": params, "path": ""}
        return said(load(source(source="solutions", **made)).train.sources["s"])

    assert with_params() == said(found.train.sources["s"])
    assert with_params(seed=3) == with_params(seed=3) != with_params()
    with pytest.raises(ConfigError, match=r"sft\.sources\[s\]\.params\.size"):
        with_params(size=3)
    with pytest.raises(ConfigError, match=r"params\.sead"):
        with_params(sead=3)


COLUMNS = {"prompt": "instruction", "completion": "out.text"}


def loaded(path: str, kind: Any = "file", **knobs: Any) -> Lessons:
    return load(ConversationsConfig(name="told", source=kind, path=path, **knobs))


def texts(lessons: Lessons) -> list[str]:
    streamed = lessons.train.sources["told"]
    return sorted("".join(map(chr, one.segments[0].token_ids_T)) for one in streamed)


def test_tables_and_columns(tmp_path: Path) -> None:
    """Parquet has null columns, and messages as objects or as JSON."""
    rows = [chat("1+1?", "2"), chat("2+2?", "4")]
    rows[0]["messages"][0]["name"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "objects.parquet")
    as_json = [{"messages": json.dumps(row["messages"]), "id": None} for row in rows]
    pq.write_table(pa.Table.from_pylist(as_json), tmp_path / "json.parquet")
    (tmp_path / "pairs.csv").write_text("prompt,completion\n1+1?,2\n2+2?,4\n")
    named = [
        {"instruction": "1+1?", "out": {"text": "2"}},
        {"instruction": "2+2?", "out": {"text": "4"}},
    ]
    write(tmp_path / "named.jsonl", *named)
    for name in ("objects.parquet", "json.parquet", "pairs.csv"):
        assert texts(loaded(str(tmp_path / name))) == ["1+1?2", "2+2?4"], name
    dialogues = [{"dialogue": row["messages"]} for row in as_json]
    pq.write_table(pa.Table.from_pylist(dialogues), tmp_path / "other.parquet")
    other = loaded(str(tmp_path / "other.parquet"), columns={"messages": "dialogue"})
    assert texts(other) == ["1+1?2", "2+2?4"]
    for kind in ("file", "jsonl"):
        found = loaded(str(tmp_path / "named.jsonl"), kind, columns=COLUMNS)
        assert texts(found) == ["1+1?2", "2+2?4"]
        assert found.report["told"].unread == {"out"}


def test_csv(tmp_path: Path) -> None:
    """Column names with spaces, and spellings of true and false."""
    sheet = "prompt , completion, thinking\n1+1?,2,TRUE\n2+2?,4,false\n3+3?,6,\n"
    (tmp_path / "a.csv").write_text(sheet)
    assert texts(loaded(str(tmp_path / "a.csv"))) == ["1+1?2", "2+2?4", "3+3?6"]
    (tmp_path / "a.csv").write_text(sheet + "4+4?,8,maybe\n")
    with pytest.raises(ConfigError, match=r"a\.csv:5: `thinking`"):
        loaded(str(tmp_path / "a.csv"))


def test_disabled_prompt_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", chat("1+1?", "2", prompt="1+1?", prompt_id="x"))
    with pytest.raises(ConfigError, match=r"columns: \{prompt: ''\}"):
        loaded(path, "jsonl")
    found = loaded(path, "jsonl", columns={"prompt": ""})
    assert texts(found) == ["1+1?2"] and found.report["told"].unread == {"prompt_id"}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"promt": "instruction"}, r"columns\.promt"),
        (
            {"prompt": "instruction", "completion": "output"},
            r"sft\.sources\[told\]\.columns\.completion = 'output'",
        ),
        (
            {},
            r"columns: \{prompt: instruction, completion: COLUMN\}",
        ),
        (
            {"prompt": "instruction"},
            r"sft\.sources\[told\]\.columns: \{completion: COLUMN\}",
        ),
    ],
)
def test_missing_columns(columns: dict[str, str], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "named.jsonl", {"instruction": "1+1?", "out": "2"})
    with pytest.raises(ConfigError, match=said):
        loaded(path, columns=columns)
    with pytest.raises(ConfigError, match=r"sft\.sources\[told\]\.path"):
        loaded(str(tmp_path / "names.jsonl"))


def test_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'{"prompt": "1+1?", "completion": "2"}\n'
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving(monkeypatch, {MAIN: {"train.jsonl": content}}):
        assert texts(loaded(NAME, "hub")) == ["1+1?2"]
        with pytest.raises(ConfigError, match=r"sft\.sources\[told\]\.path"):
            loaded(NAME, "hub", split="test")
