"""Sources of conversations, and the held-out split."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.load import Lessons
from keel.data.conversations.types import Example
from tests.data.conversations.sources import chat, load, said, source, write


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
            origin="", messages=tuple(chat("q3?", "")["messages"]), trained=(1,), thinking=False
        ).question
    }
    found = load(source(one), reserved={question})
    assert "a3" not in said(found.train.sources["s"])
    assert found.report["s"].left_out == {"held out by data.sources": 1}


@pytest.mark.parametrize(
    ("sizes", "holdout", "held"),
    [([9, 1], 1, 1), ([9, 3, 3], 3, 3), ([4, 5, 6], 3, 4), ([3, 5], 4, 5), ([3, 5], 3, 3)],
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
