"""Synthetic text in which something has to be found again."""

from __future__ import annotations

import pytest

from keel.data.text.retrieval import answers, retrieval_texts


def test_what_is_asked_for_stands_once_before() -> None:
    texts = list(retrieval_texts(3, length=200, seed=4))
    assert texts == list(retrieval_texts(3, length=200, seed=4))
    assert len(set(texts) | set(retrieval_texts(3, length=200, seed=5))) == 6
    for text in texts:
        found = answers(text)
        assert len(text) == 200
        assert len(found) == 16
        for at in found:
            assert text[at - 2] == "?"
            said = text[: text.index("?")]
            assert said.count(text[at - 1]) == 1
            assert said[said.index(text[at - 1]) + 1] == text[at]


def test_a_text_too_short_to_ask_in_is_refused() -> None:
    with pytest.raises(ValueError, match="length = 15: too short"):
        next(retrieval_texts(1, length=15, seed=0))
