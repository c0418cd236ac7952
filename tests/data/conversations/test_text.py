"""Documents and generated texts in windows of tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import ConversationsConfig, SftConfig
from keel.data.conversations.load import SftData, load_sft_data
from keel.data.conversations.text import Encoded, _answer_positions, _retrieval_texts

BEGIN, END = 1, 2


def load(path: Path | str = "", *, window: int = 6, **knobs: Any) -> SftData:
    given: dict[str, Any] = {"name": "s", "source": "text", "path": str(path), **knobs}
    return load_sft_data(
        SftConfig(sources=(ConversationsConfig(**given),), max_context_tokens=window),
        seed=0,
        render=lambda example: pytest.fail(f"{example.origin} is no conversation"),
        solve=lambda *_: None,
        tokenizer="mine",
        encoded=Encoded(lambda text: list(text.encode()), (BEGIN,), (END,)),
    )


def learned(examples: SftData) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Letter of a document → its windows in order: (ids, ids to learn), for one epoch."""
    report = examples.report["s"]
    found: dict[str, list[tuple[list[int], list[int]]]] = {}
    every = {example.prompt_id: example for example in examples.train.take(report.learned)}
    for _, example in sorted(every.items()):
        (segment,) = example.segments
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
    examples = load(tmp_path)
    a, b, c = (ord(letter) for letter in "abc")
    windows = learned(examples)
    assert windows["b"] == [([BEGIN, b, b, b, END], [b, b, b, END])]
    assert windows["c"] == [([BEGIN, c, c, c, c, END], [c, c, c, c, END])]
    first, second, third = windows["a"]
    assert first == ([BEGIN, a, a, a, a, a], [a] * 5)
    assert second == ([a] * 6, [a] * 5) and third == ([a, a, a, END], [a, a, END])
    report = examples.report["s"]
    assert (report.documents, report.learned) == (3, 5)
    assert sum(example.learned_tokens for example in report.trained) == 13 + 4 + 5
    assert report.left_out == {"files of other kinds (picture.png)": 1, "repeated": 1}


def test_end_of_a_long_document_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a" * 5 + "b" * 30)
    examples = load(tmp_path, holdout=2)
    report = examples.report["s"]
    assert (report.heldout, report.learned) == (2, 6)
    last, end = (one.segments[0].token_ids_T.tolist() for one in examples.heldout["s"])
    b = ord("b")
    assert (last, end) == ([b] * 6, [b, END])
    again = load(tmp_path, holdout=2)
    first, second = ([x.prompt_id for x in each.heldout["s"]] for each in (again, examples))
    assert first == second
    assert again.train.position() == examples.train.position()
    assert not any(END in one.segments[0].token_ids_T for one in examples.train.take(6))


def test_retrieval_texts() -> None:
    few = {"letters": 5, "digits": 2}
    examples = load(source="retrieval", length=40, size=3, window=41, params=few)
    texts = list(_retrieval_texts(3, length=40, seed=0, **few))
    assert {c for text in texts for c in text if c.isalnum()} <= set("abcde01")
    for example in examples.train.take(3):
        (segment,) = example.segments
        text = bytes(segment.token_ids_T[1:].tolist()).decode()
        assert text in texts
        assert (np.flatnonzero(segment.trainable_T) - 1).tolist() == _answer_positions(text)


def test_each_asked_digit_is_given_once_before() -> None:
    texts = list(_retrieval_texts(3, length=200, seed=4))
    assert len(set(texts) | set(_retrieval_texts(3, length=200, seed=5))) == 6
    for text in texts:
        positions, given = _answer_positions(text), text[: text.index("?")]
        assert len(text) == 200 and len(positions) == 16
        for at in positions:
            assert text[at - 2] == "?" and given.count(text[at - 1]) == 1
            assert given[given.index(text[at - 1]) + 1] == text[at]
