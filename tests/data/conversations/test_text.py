"""Documents in windows of tokens: what is learned of them, what is refused, what is held out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import ConfigError, ConversationsConfig, SftConfig
from keel.data.conversations.load import Lessons, load_lessons
from keel.data.conversations.text import Encoded
from keel.data.text.retrieval import answers, retrieval_texts
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
    """The windows of each document, by the letter it is made of: ids, and those that are learned.
    All of one epoch, in the order of the document."""
    report = lessons.report["s"]
    found: dict[str, list[tuple[list[int], list[int]]]] = {}
    every = {lesson.prompt_id: lesson for lesson in lessons.train.take(report.learned)}
    for _, lesson in sorted(every.items()):
        (segment,) = lesson.segments
        ids = segment.token_ids_T
        name = chr(int(np.median(ids[ids > END])))
        found.setdefault(name, []).append((ids.tolist(), ids[segment.trainable_T].tolist()))
    return found


def test_every_token_of_a_document_but_its_beginning_is_learned_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("a" * 12)
    lines = [{"text": "b" * 3}, {"text": "c" * 4, "url": "…"}, {"text": "b" * 3}]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "picture.png").write_bytes(b"\xff")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "old.txt").write_text("not read, and not told")
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
def test_every_kind_of_file_whatever_the_case_of_its_name(tmp_path: Path, compressed: bool) -> None:
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


def test_windows_of_a_document_are_held_out_together(tmp_path: Path) -> None:
    for letter in "abcdef":
        (tmp_path / f"{letter}.txt").write_text(letter * 9)
    lessons = load(tmp_path, holdout=4)
    assert lessons.report["s"].heldout == 4 and lessons.report["s"].learned == 8

    def letters(some: list[SftExample]) -> set[int]:
        return {int(np.median(lesson.segments[0].token_ids_T)) for lesson in some}

    held = letters(list(lessons.heldout["s"]))
    assert len(held) == 2 and not held & letters(lessons.train.take(8))


def test_of_a_document_too_long_to_be_held_out_its_end_is(tmp_path: Path) -> None:
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
    assert again.train.state() == lessons.train.state(), "the same in every start"
    assert not any(END in one.segments[0].token_ids_T for one in lessons.train.take(6))
    (tmp_path / "short.txt").write_text("c")
    held = load(tmp_path, holdout=1).heldout["s"]
    assert [one.segments[0].token_ids_T.tolist() for one in held] == [[BEGIN, ord("c"), END]]
    with pytest.raises(
        ConfigError, match=r"no window is left .*\(9 held out\); lower .*holdout = 9"
    ):
        load(tmp_path, holdout=9)
    with pytest.raises(
        ConfigError, match=r"holdout = 10: there are only 9 usable windows; lower it"
    ):
        load(tmp_path, holdout=10)


def test_a_tokenizer_without_an_end_of_text_is_named() -> None:
    none: Any = None
    with pytest.raises(ValueError, match=r"no eos_token, .* model\.tokenizer"):
        Encoded(lambda text: list(text.encode()), (), (none,))


def test_of_retrieval_texts_what_can_be_known_is_learned() -> None:
    few = {"letters": 5, "digits": 2}
    lessons = load(source="retrieval", length=40, size=3, window=41, params=few)
    texts = list(retrieval_texts(3, length=40, seed=0, **few))
    assert {c for text in texts for c in text if c.isalnum()} <= set("abcde01")
    for lesson in lessons.train.take(3):
        (segment,) = lesson.segments
        text = bytes(segment.token_ids_T[1:].tolist()).decode()
        assert text in texts
        assert (np.flatnonzero(segment.trainable_T) - 1).tolist() == answers(text)
    with pytest.raises(ConfigError, match=r"text 0 has 41 tokens, more than sft\.max_context"):
        load(source="retrieval", length=40, size=3, window=40)
    with pytest.raises(ConfigError, match=r"sft\.sources\[s\]\.length = 9: too short"):
        load(source="retrieval", length=9, size=3)
    with pytest.raises(
        ConfigError, match=r"sft\.sources\[s\]\.params\.letters = 27: must be from 1"
    ):
        load(source="retrieval", length=40, size=3, params={"letters": 27})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b" \n", r"a\.txt: is empty \(sft\.sources\[s\]"),
        ("a.txt", b"abc\xff", r"a\.txt: not UTF-8 \(byte 3\)"),
        ("a.jsonl", b'{"text": "fine"}\n{"messages": []}', r"a\.jsonl:2: has no `text`; its keys:"),
        ("a.jsonl", b'{"text": 5}', r"a\.jsonl:1: `text` must be text, is"),
        ("a.jsonl", b'{"text": ""}', r"a\.jsonl:1: `text` is empty"),
        ("a.jsonl", b"", r"path = '.*': there is no text in it"),
        ("a.csv", b"id,body\n1,x\n", r"a\.csv:2: has no `text`; its keys: id, body"),
        ("a.txt.gz", b"plain", r"path = '.*a\.txt\.gz': cannot be read: Not a gzipped file"),
        ("a.pdf", b"text", r"holds no file with text \(\.txt and \.md, one document each; \.jsonl"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path)


def test_what_is_no_text_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": 5}\n')
    (tmp_path / "b.txt").write_text("")
    report = load(tmp_path, on_bad_line="skip").report["s"]
    assert (report.learned, report.left_out) == (1, {"malformed": 2})
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"no text in it; 1 are left out, the first: .*b\.txt"):
        load(tmp_path, on_bad_line="skip")
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "absent.txt")
    (tmp_path / "corpus").write_text("text")
    with pytest.raises(ConfigError, match=r"corpus': of no known kind; let its name say which"):
        load(tmp_path / "corpus")


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
def test_knobs_of_text(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ConversationsConfig(name="s", **knobs)
