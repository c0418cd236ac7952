"""Documents in windows of tokens: what is learned of them, what is refused, what is held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import ConfigError, ConversationsConfig, SftConfig
from keel.data.conversations.load import Lessons, load_lessons
from keel.data.conversations.text import Encoded
from keel.data.text.retrieval import answers, retrieval_texts
from keel.rl.supervised.lessons import Lesson

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
    (tmp_path / "notes.md").write_text("not read")
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
    assert report.left_out == {"repeated": 1}, "a text counts once"


def test_windows_of_a_document_are_held_out_together(tmp_path: Path) -> None:
    for letter in "abcdef":
        (tmp_path / f"{letter}.txt").write_text(letter * 9)
    lessons = load(tmp_path, holdout=3)
    assert lessons.report["s"].heldout == 4 and lessons.report["s"].learned == 8

    def letters(some: list[Lesson]) -> set[int]:
        return {int(np.median(lesson.segments[0].token_ids_T)) for lesson in some}

    held = letters(list(lessons.heldout["s"]))
    assert len(held) == 2 and not held & letters(lessons.train.take(8))


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
        ("a.md", b"text", r"holds no \.txt, \.jsonl, \.json, \.ndjson file"),
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


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"source": "text"}, r"path = '': text needs it"),
        ({"source": "retrieval", "size": 3}, "length = 0: retrieval needs it"),
        ({"source": "retrieval", "length": 30}, "size = 0: must be at least 1"),
        ({"source": "text", "path": "a.txt", "length": 3}, "length = 3: is for source: retrieval"),
        (
            {"source": "retrieval", "length": 30, "size": 3, "params": {"words": 3}},
            r"params = \['words'\]: retrieval has letters and digits alone",
        ),
        ({"source": "text", "path": "a.txt", "system": "x"}, "system = 'x': is for conversations"),
    ],
)
def test_knobs_of_text(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ConversationsConfig(name="s", **knobs)
