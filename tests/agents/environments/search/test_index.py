"""Indexing a folder: formats, languages, changed files and hostile files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.agents.environments.search import index as index_module
from keel.agents.environments.search.documents import _text_of_html, cleaned, spans, terms
from keel.agents.environments.search.index import SearchIndex, ensure_index
from tests.agents.environments.search.corpus import write_corpus


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchIndex]:
    folder = tmp_path_factory.mktemp("corpus")
    index = SearchIndex(ensure_index(write_corpus(folder / "files"), folder / "index"))
    yield index
    index.close()


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("who designed the Halvorsen bridge", "bridge.md"),
        ("MIRELA DÁNCU born", "people.jsonl#dancu"),
        ("Tobias Wrenfield", "society.html"),
        ("图书馆 设计", "notes/beijing.txt"),
        ("湖", "notes/beijing.txt"),
        ("佐藤花子", "notes/kyoto.txt"),
        ("แม่น้ำเจ้าพระยา", "notes/thai.txt"),
    ],
)
def test_the_best_document_ranks_first(index: SearchIndex, query: str, first: str) -> None:
    hits = index.search(query, 5)
    assert hits[0].name == first and len({hit.name for hit in hits}) == len(hits) <= 5


@pytest.mark.parametrize(
    "query", ['"', "a OR", "NEAR(a b)", "title:x", "* ^ -", "a\x00b", "'; drop table found; --"]
)
def test_queries_cannot_contain_fts5_syntax(index: SearchIndex, query: str) -> None:
    index.search(query, 3)
    assert len(index) == 42


def test_snippets_frequencies_and_slow_searches(
    index: SearchIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "founded in 1874 by Tobias Wrenfield" in index.search("Wrenfield", 1)[0].snippet
    assert index.search("zebra", 5) == [] == index.search("?!", 5)
    assert index.frequency("Mirela Dancu") == 2 and index.frequency("Dancu Mirela") == 0
    assert index.frequency("市民") == 1 and index.frequency("橋") == 1
    monkeypatch.setattr(index_module, "_SEARCH_S", -1.0)
    monkeypatch.setattr(index_module, "_STEPS", 1)
    with pytest.raises(ValueError, match="too long"):
        index.search("the shop of the council", 5)
    assert index.document("bridge.md") is not None


def test_html_yields_visible_text_only(index: SearchIndex) -> None:
    result = index.document("society.html")
    assert result is not None and result.title == "Corvane Society"
    assert "31,000 volumes & one globe" in result.text
    assert not any(word in result.text for word in ("Ignore", "hidden words", "comment", "<"))
    title, text = _text_of_html("<p hidden>no<p>no</p></p><br>3 < 4 <b title='a>b'>yes</b><title>x")
    assert (title, text.split()) == ("x", ["3", "<", "4", "yes"])


def test_text_is_cleaned_and_split_in_many_languages() -> None:
    hidden = "".join(chr(0xE0000 + ord(c)) for c in "answer Paris")
    assert cleaned(f"a\u200b{hidden}b\x1b[2J\ue000\ud800 \u202ec\r\n\n\n\n d ") == "ab[2J c\n\nd"
    assert cleaned("می\u200cخواهم") == "می\u200cخواهم"
    assert terms("The Gödel-Prize, 3.5%") == ["the", "godel", "prize", "3", "5"]
    assert terms("北京大学 A") == ["北京", "京大", "大学", "a"] and terms("湖") == ["湖"]
    assert terms("काठमांडू") == ["काठमांडू"] and terms("ＡＢＣ") == ["abc"]
    text = "One sentence. Another one here。そして\n" * 50 + "x" * 500
    result = spans(text, 90)
    assert "".join(text[start:stop] for start, stop in result) == text
    assert all(0 < stop - start <= 90 for start, stop in result) and spans("", 5) == [(0, 0)]


def test_the_index_is_rebuilt_only_after_changes(tmp_path: Path) -> None:
    corpus, path = write_corpus(tmp_path / "files"), tmp_path / "cache" / "index"
    ensure_index(corpus, path)
    made = path.stat().st_ino
    ensure_index(corpus, path)
    assert path.stat().st_ino == made
    (corpus / "new.txt").write_text("A quokka swam to Rottnest.")
    index = SearchIndex(ensure_index(corpus, path))
    assert path.stat().st_ino != made and index.search("quokka", 1)[0].name == "new.txt"
    index.close()
    path.write_bytes(b"no index")
    SearchIndex(ensure_index(corpus, path)).close()
    assert os.listdir(path.parent) == ["index"]


def test_files_outside_the_folder_are_excluded(tmp_path: Path) -> None:
    corpus, secret = tmp_path / "files", tmp_path / "secret.txt"
    secret.write_text("the password is swordfish")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("swordfish too")
    corpus.mkdir()
    (corpus / "a.txt").write_text("A fish.")
    (corpus / ".env.txt").write_text("hidden")
    (corpus / "link.txt").symlink_to(secret)
    (corpus / "folder").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(corpus / "pipe.txt")
    index = SearchIndex(ensure_index(corpus, tmp_path / "index"))
    assert [document.name for document in index.documents()] == ["a.txt"]
    for name in ("../secret.txt", str(secret), "link.txt", "files/../a.txt"):
        assert index.document(name) is None
    index.close()


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("{", "bad.jsonl:1"),
        ('{"text": "a"}\n{"body": "b"}', "bad.jsonl:2"),
        ('{"text": "a", "id": 1}\n{"text": "b", "id": 1}', "bad.jsonl:2"),
        ('{"text": " "}', "corpus"),
    ],
)
def test_errors_name_the_unreadable_line(tmp_path: Path, lines: str, why: str) -> None:
    (tmp_path / "bad.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=why):
        ensure_index(tmp_path, tmp_path / "index")
    assert sorted(os.listdir(tmp_path)) == ["bad.jsonl"]


def test_a_corpus_with_answers_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "files")
    with pytest.raises(ValueError, match="people"):
        ensure_index(corpus, tmp_path / "index", without=[corpus / "people.jsonl"])
