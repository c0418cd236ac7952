"""Rare named entities, by heuristic and by an author."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.agents.environments.search.index import SearchIndex, ensure_index
from keel.synthesis.search.entities import rare_entities
from tests.agents.environments.search.corpus import write_corpus


@pytest.fixture
def index(tmp_path: Path) -> Iterator[SearchIndex]:
    corpus = write_corpus(tmp_path / "corpus")
    (corpus / "more.txt").write_text(
        "Yesterday Quellmarsh slept in Vandermeer's hut. Rivers rise. The rivers of Quellmarsh are "
        "said to rise. "
        "小説『雪国の夜』を書いたのはアレクサンドルだった。他に「本」もある。"
    )
    index = SearchIndex(ensure_index(corpus, tmp_path / "index"))
    yield index
    index.close()


def names(index: SearchIndex, **knobs: int) -> set[str]:
    settings = {"count": 999, "most_documents": 3, "seed": 1, **knobs}
    return set(rare_entities(index, **settings))


def test_rare_names_and_no_common_words(index: SearchIndex) -> None:
    entities = names(index)
    rare = {
        "Halvorsen Bridge",
        "Mirela Dancu",
        "Tobias Wrenfield",
        "Quellmarsh",
        "雪国の夜",
        "Vandermeer",
    }
    assert rare | {"アレクサンドル", "Corvane Society", "Zelenograd Bay"} <= entities
    assert not entities & {"The", "Rivers", "On", "Every", "本", "Its"}
    assert "Mirela Dancu" not in names(index, most_documents=1)


def test_seed_determines_entities(index: SearchIndex) -> None:
    def drawn(seed: int, count: int = 4) -> list[str]:
        return rare_entities(index, count=count, most_documents=2, seed=seed)

    assert drawn(1) == drawn(1) != drawn(2) and drawn(1, 6)[:4] == drawn(1)
