"""The search environment's tools, and its verdict on citations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from keel.agents.env_runtime.tool_objects import Object, methods_of
from keel.agents.environments.search.documents import Document, Hit
from keel.agents.environments.search.environment import Search
from keel.agents.environments.search.index import SearchIndex, ensure_index
from tests.agents.environments.search.corpus import write_corpus

TASK = {"messages": [{"role": "user", "content": "Who?"}], "reward": {"kind": "answer"}}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchIndex]:
    folder = tmp_path_factory.mktemp("corpus")
    index = SearchIndex(ensure_index(write_corpus(folder / "files"), folder / "index"))
    yield index
    index.close()


@pytest.fixture
def search(index: SearchIndex) -> Search:
    search = Search(ready=index, page_characters=100)
    search.opening(TASK)
    return search


def verdict(search: Search, said: str) -> dict[str, float]:
    return search.verdict([*TASK["messages"], {"role": "assistant", "content": said}])[0]  # type: ignore[misc]


def test_instructions_go_to_the_system_message(index: SearchIndex, search: Search) -> None:
    opening = Object(search, methods_of(search)).opening(TASK, 1)
    assert [tool["name"] for tool in opening["tools"]] == ["search", "open", "find"]
    system, question = opening["messages"]
    assert system["content"].startswith("Cite ") and "<answer>" in system["content"]
    assert question == TASK["messages"][0]
    task = {"messages": [{"role": "system", "content": "Be brief."}, question], "reward": {}}
    messages = Search(ready=index).opening(task)
    assert messages[0]["content"].startswith("Be brief.\n\nCite ") and messages[1:] == [question]
    assert "<answer>" not in messages[0]["content"]
    assert Search(ready=index, cite=False).opening(task) == task["messages"]


def test_search_open_find(search: Search) -> None:
    with pytest.raises(ValueError, match="open"):
        search.find("x")
    lines = search.search("Halvorsen Bridge").splitlines()
    assert lines[0] == "1. Halvorsen Bridge (bridge.md)" and lines[1].startswith("   ")
    first = search.open("1")
    assert first.startswith("Halvorsen Bridge (bridge.md), page 1 of 3\n\n# Halvorsen Bridge")
    assert "It was opened in 1911" in search.open("bridge.md", page=2)
    assert search.find("the   ENGINEER").startswith("page 2: … ")
    assert search.find("zebra") == "bridge.md does not have 'zebra'."
    for call in (
        lambda: search.open("../../etc/passwd"),
        lambda: search.open("bridge.md", page=9),
        lambda: search.search("x" * 999),
    ):
        with pytest.raises(ValueError, match=r"no|at most"):
            call()


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ('Dancu [[bridge.md: "designed by the engineer Mirela Dancu"]].', 1.0),
        ("Dancu [[bridge.md: “Designed by the\nengineer — MIRELA Dancu”]].", 1.0),
        ("[[notes/beijing.txt: 「图书馆由建筑师林晓梅设计」]]", 1.0),
        ("Dancu. [[bridge.md]]", 0.0),
        ('[[bridge.md: "a"]]', 0.0),
        ('[[bridge.md: "designed by the engineer John Smith"]]', 0.0),
        ('[[society.html: "The Corvane Society was founded in"]]', 0.0),  # not opened
        ('[[bridge.md: "opened in 1911 after nine years"]] [[bridge.md: "nobody said this"]]', 0.5),
        ('[[bridge.md: "opened in 1911 after nine years"]]</think> Dancu.', 0.0),
        ("[[" * 5000 + "]]" * 5000, 0.0),
    ],
)
def test_citations_are_checked_against_the_corpus(search: Search, said: str, share: float) -> None:
    search.open("bridge.md")
    search.open("notes/beijing.txt")
    assert verdict(search, said)["citations"] == share


def test_evidence_counts_opened_source_documents(search: Search) -> None:
    names = ["bridge.md", "people.jsonl#dancu"]
    search.opening({**TASK, "reward": {"environment": {"evidence": names}}})
    search.open("bridge.md")
    assert verdict(search, "x")["evidence"] == 0.5
    search.open("people.jsonl#dancu")
    parts, facts = search.verdict([])
    assert parts == {"citations": 0.0, "evidence": 1.0} and facts["opened"] == names


class Web:
    """A search API behind an adapter, which may omit missing fields."""

    def __init__(self, page: str) -> None:
        self.page = page

    def search(self, query: str, most: int) -> list[Hit]:
        none: Any = None
        return [
            Hit(name="https://example.org/a", title="A\u200b", snippet="x\x1b" + "y " * 900),
            Hit(name="https://example.org/b", title=none, snippet=none),
        ]

    def document(self, name: str) -> Document | None:
        return Document(name=name, title="A", text=self.page) if name.startswith("http") else None


def test_a_custom_library_can_be_searched() -> None:
    search = Search(library=f"{__name__}:Web", options={"page": "The\u2066 page says little."})
    first, snippet, second = search.search("a").splitlines()
    assert first == "1. A (https://example.org/a)" and second == "2. https://example.org/b"
    assert snippet.startswith("   xy y") and len(snippet) < 500
    assert "The page says" in search.open("1")
    assert verdict(search, '[[https://example.org/a: "the page says little"]]')["citations"] == 1.0
