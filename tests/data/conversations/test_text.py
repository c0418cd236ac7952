"""Documents and generated texts in windows of tokens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import ConfigError, ConversationsConfig, SftConfig
from keel.data.conversations.load import Lessons, load_lessons
from keel.data.conversations.retrieval import answers, retrieval_texts
from keel.data.conversations.text import Encoded
from keel.rl.sft import SftExample

BEGIN, END = 1, 2


def load(path: Path | str = "", *, window: int = 6, **knobs: Any) -> Lessons:
    given: dict[str, Any] = {"name": "s", "source": "text", "path": str(path), **knobs}
    return load_lessons(
        SftConfig(sources=(ConversationsConfig(**given),), max_context_tokens=window),
        seed=0,
        render=lambda example: pytest.fail(f"{example.origin} is no conversation"),
        solve=lambda *_: None,
        tokenizer="mine",
        encoded=Encoded(lambda text: list(text.encode()), (BEGIN,), (END,)),
    )


def learned(lessons: Lessons) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Letter of a document → its windows in order: (ids, ids to learn), for one epoch."""
    report = lessons.report["s"]
    found: dict[str, list[tuple[list[int], list[int]]]] = {}
    every = {lesson.prompt_id: lesson for lesson in lessons.train.take(report.learned)}
    for _, lesson in sorted(every.items()):
        (segment,) = lesson.segments
        ids = segment.token_ids_T
        name = chr(int(np.median(ids[ids > END])))
        found.setdefault(name, []).append((ids.tolist(), ids[segment.trainable_T].tolist()))
    return found


def test_every_token_is_learned_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("a" * 12)
    lines = [{"text": "b" * 3}, {"text": "c" * 4, "url": "…"}, {"text": "b" * 3}]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "picture.png").write_bytes(b"\xff")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "old.txt").write_text("hidden")
    lessons = load(tmp_path)
    a, b, c = (ord(letter) for letter in "abc")
    windows = learned(lessons)
    assert windows["b"] == [([BEGIN, b, b, b, END], [b, b, b, END])]
    assert windows["c"] == [([BEGIN, c, c, c, c, END], [c, c, c, c, END])]
    first, second, third = windows["a"]
    assert first == ([BEGIN, a, a, a, a, a], [a] * 5)
    assert second == ([a] * 6, [a] * 5) and third == ([a, a, a, END], [a, a, END])
    report = lessons.report["s"]
    assert (report.documents, report.learned, report.learned_tokens) == (3, 5, 13 + 4 + 5)
    assert report.left_out == {"files of other kinds (picture.png)": 1, "repeated": 1}


@pytest.mark.parametrize("compressed", [False, True])
def test_kinds_of_file(tmp_path: Path, compressed: bool) -> None:
    files = {
        "BOOK.TXT": "\ufeffaaa",
        "b.md": "bbb",
        "CORPUS.JSONL": '{"text": "ccc"}\n',
        "list.json": '[{"text": "ddd"},\n {"text": "eee"}]',
        "docs.csv": "id,text\n1,fff\n",
    }
    for name, content in files.items():
        raw = content.encode()
        path = tmp_path / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(raw) if compressed else raw)
    arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(arrow.Table.from_pylist([{"text": "ggg"}]), tmp_path / "t.parquet")
    lessons = load(tmp_path)
    assert set(learned(lessons)) == set("abcdefg") and not lessons.report["s"].left_out


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    for letter in "abcdef":
        (tmp_path / f"{letter}.txt").write_text(letter * 9)
    lessons = load(tmp_path, holdout=4)
    assert lessons.report["s"].heldout == 4 and lessons.report["s"].learned == 8

    def letters(some: list[SftExample]) -> set[int]:
        return {int(np.median(lesson.segments[0].token_ids_T)) for lesson in some}

    held = letters(list(lessons.heldout["s"]))
    assert len(held) == 2 and not held & letters(lessons.train.take(8))


def test_end_of_a_long_document_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a" * 5 + "b" * 30)
    lessons = load(tmp_path, holdout=2)
    report = lessons.report["s"]
    assert (report.heldout, report.learned) == (2, 6)
    last, end = (one.segments[0].token_ids_T.tolist() for one in lessons.heldout["s"])
    b = ord("b")
    assert (last, end) == ([b] * 6, [b, END])
    again = load(tmp_path, holdout=2)
    assert [one.prompt_id for one in again.heldout["s"]] == [
        one.prompt_id for one in lessons.heldout["s"]
    ]
    assert again.train.state() == lessons.train.state()
    assert not any(END in one.segments[0].token_ids_T for one in lessons.train.take(6))
    (tmp_path / "short.txt").write_text("c")
    held = load(tmp_path, holdout=1).heldout["s"]
    assert [one.segments[0].token_ids_T.tolist() for one in held] == [[BEGIN, ord("c"), END]]
    for holdout in (9, 10):
        with pytest.raises(ConfigError, match=f"holdout = {holdout}"):
            load(tmp_path, holdout=holdout)


def test_tokenizer_without_eos() -> None:
    none: Any = None
    with pytest.raises(ValueError, match=r"model\.tokenizer"):
        Encoded(lambda text: list(text.encode()), (), (none,))


def test_retrieval_texts() -> None:
    few = {"letters": 5, "digits": 2}
    lessons = load(source="retrieval", length=40, size=3, window=41, params=few)
    texts = list(retrieval_texts(3, length=40, seed=0, **few))
    assert {c for text in texts for c in text if c.isalnum()} <= set("abcde01")
    for lesson in lessons.train.take(3):
        (segment,) = lesson.segments
        text = bytes(segment.token_ids_T[1:].tolist()).decode()
        assert text in texts
        assert (np.flatnonzero(segment.trainable_T) - 1).tolist() == answers(text)
    errors: list[tuple[dict[str, Any], str]] = [
        ({"window": 40}, r"sft\.max_context_tokens = 40"),
        ({"length": 9}, r"sft\.sources\[s\]\.length = 9"),
        ({"params": {"letters": 27}}, r"sft\.sources\[s\]\.params\.letters = 27"),
    ]
    for knobs, named in errors:
        with pytest.raises(ConfigError, match=named):
            load(source="retrieval", **{"length": 40, "size": 3, "window": 41, **knobs})


def test_each_asked_digit_is_given_once_before() -> None:
    texts = list(retrieval_texts(3, length=200, seed=4))
    assert texts == list(retrieval_texts(3, length=200, seed=4))
    assert len(set(texts) | set(retrieval_texts(3, length=200, seed=5))) == 6
    for text in texts:
        positions = answers(text)
        assert len(text) == 200 and len(positions) == 16
        given = text[: text.index("?")]
        for at in positions:
            assert text[at - 2] == "?" and given.count(text[at - 1]) == 1
            assert given[given.index(text[at - 1]) + 1] == text[at]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.txt", b" \n", r"a\.txt: .*sft\.sources\[s\]"),
        ("a.txt", b"abc\xff", r"a\.txt: .*byte 3"),
        ("a.jsonl", b'{"text": "fine"}\n{"messages": []}', r"a\.jsonl:2: .*`text`"),
        ("a.jsonl", b'{"text": 5}', r"a\.jsonl:1: `text`"),
        ("a.jsonl", b'{"text": ""}', r"a\.jsonl:1: `text`"),
        ("a.jsonl", b"", r"sft\.sources\[s\]\.path"),
        ("a.csv", b"id,body\n1,x\n", r"a\.csv:2: .*`text`.* id, body"),
        ("a.txt.gz", b"plain", r"path = '.*a\.txt\.gz'"),
        ("a.pdf", b"text", r"sft\.sources\[s\]\.path"),
    ],
)
def test_malformed_documents(tmp_path: Path, name: str, content: bytes, named: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=named):
        load(tmp_path)


def test_skipped_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": 5}\n')
    (tmp_path / "b.txt").write_text("")
    report = load(tmp_path, on_bad_line="skip").report["s"]
    assert (report.learned, report.left_out) == (1, {"malformed": 2})
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"b\.txt"):
        load(tmp_path, on_bad_line="skip")
    (tmp_path / "corpus").write_text("text")
    for path in ("absent.txt", "corpus"):
        with pytest.raises(ConfigError, match=path):
            load(tmp_path / path)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"source": "text"}, r"path = ''"),
        ({"source": "retrieval", "size": 3}, "length = 0"),
        ({"source": "retrieval", "length": 30}, "size = 0: must be at least 1"),
        ({"source": "text", "path": "a.txt", "length": 3}, "length = 3"),
        (
            {"source": "retrieval", "length": 30, "size": 3, "params": {"words": 3}},
            r"params = ",
        ),
        ({"source": "text", "path": "a.txt", "system": "x"}, "system = 'x'"),
    ],
)
def test_invalid_knobs(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ConversationsConfig(name="s", **knobs)
