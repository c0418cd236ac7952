"""Author replies, and wrong answers derived from right ones."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from keel.configs.schema import ConfigError
from keel.configs.synthesis import GeneralConfig
from keel.synthesis.author import AuthorReply
from keel.synthesis.general.environment_writer import renamed, sections
from keel.synthesis.general.gates import EMPTY, MOST, mutations, plausible
from keel.synthesis.general.search import search_of
from keel.synthesis.ledger import Rejected

REPLY = """\
Here is a harder one.

## question
Which is it? A list.

### solve.py
```python
# tools
def solve(tools):
    return [1]
```

## verify:
~~~
def verify(answer, database):
    return answer == [1]
~~~
"""


def test_sections_of_a_reply() -> None:
    parts = sections(AuthorReply(content=REPLY), ("question", "solve", "verify"), ("tools",))
    assert list(parts) == ["question", "solve", "verify"]
    assert parts["question"] == "Which is it? A list.\n"
    assert renamed(parts["solve"], "solve", 2).startswith("# tools\ndef solve_2(tools):")
    assert parts["verify"].endswith("== [1]\n")
    capitals = REPLY.replace("## verify", "## Verify")
    assert sections(AuthorReply(content=capitals), ("question", "solve", "verify")) == parts
    for text, _ in (
        (AuthorReply(content=REPLY, cut=True), "cut off, by author.max_tokens or the context"),
        (
            AuthorReply(content=REPLY.replace("verify:", "proof")),
            "no section under a heading `## verify`",
        ),
    ):
        with pytest.raises(Rejected):
            sections(text, ("question", "solve", "verify"))
    with pytest.raises(Rejected):
        renamed("def solve(tools):\n    pass\ndef solve(tools):\n    pass", "solve", 0)


def test_mutations_reach_every_part() -> None:
    answer = {"days": [{"hotel": "Inn", "price": 3}, {"hotel": "House", "price": 2.5}], "ok": True}
    items = mutations(answer)
    labels = [name for name, _ in items]
    assert len(labels) == len(set(labels)) and all(other != answer for _, other in items)
    for part in (
        "['days'][0]['hotel'] = ''",
        "['days'][1]['price'] = -3.5",
        "['days'][0] without 'price'",
        "['days'] without entry 1",
        "['days'] with an entry twice",
        "['ok'] = False",
        "the answer without 'ok'",
    ):
        assert part in labels
    assert answer["days"][0] == {"hotel": "Inn", "price": 3}  # none of it was changed
    assert len(mutations({"long": list(range(500))})) == MOST
    assert mutations("x")[-1] == ("the answer = ''", "")
    others = plausible(answer, ["Inn", "Park"], 1)
    assert others == plausible(answer, ["Inn", "Park"], 1) and answer not in others
    assert {one["days"][0]["hotel"] for one in others} == {"Inn", "Park"}
    assert None in EMPTY and {} in EMPTY


def test_documents_and_functions_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "documents"
    (folder / "in").mkdir(parents=True)
    (folder / "in/a.html").write_text("<p>Hotels &amp; <script>inns</script>bars</p>")
    (folder / "b.md").write_text("Trains from Anlo. " + "filler " * 400 + "A bus to Brevik.")
    (folder / "c.txt").write_text("我在北京大学学习。")
    search = search_of(GeneralConfig(documents=str(folder)))
    assert search is not None
    assert "Hotels & " in asyncio.run(search("hotels?"))
    assert "inns" not in asyncio.run(search("hotels"))
    results = asyncio.run(search('"bus" NEAR('))
    assert "A bus to Brevik" in results and "Trains from Anlo" not in results
    for query in ("北京大学", "北京"):
        assert "我在北京大学学习" in asyncio.run(search(query))
    with pytest.raises(ValueError):
        asyncio.run(search("?"))
    custom = search_of(GeneralConfig(search="textwrap:dedent"))
    assert custom is not None and asyncio.run(custom("  x")) == "x"
    failing = search_of(GeneralConfig(search="json:loads"))
    assert failing is not None
    with pytest.raises(ValueError, match="the search failed"):
        asyncio.run(failing("{"))
    monkeypatch.setattr("textwrap.finds", lambda _: [object()], raising=False)
    unsayable = search_of(GeneralConfig(search="textwrap:finds"))
    assert unsayable is not None
    with pytest.raises(ValueError, match="the search failed"):
        asyncio.run(unsayable("x"))


def test_hung_search_does_not_block_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr("textwrap.hangs", lambda _: ends.wait(), raising=False)
    monkeypatch.setattr("keel.synthesis.general.search.DEADLINE_S", 0.1)
    search = search_of(GeneralConfig(search="textwrap:hangs"))
    assert search is not None
    with pytest.raises(ValueError):
        asyncio.run(search("x"))
    ends.set()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"documents": "/nowhere"}, "general.documents = /nowhere: .*there is no such folder"),
        ({"search": "nowhere:x"}, "No module named 'nowhere'"),
    ],
)
def test_invalid_search_function(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        search_of(GeneralConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"categories": ("a b", "A-b")},
        {"categories": ("…",)},
        {"steps": 2, "least_tasks": 3},
        {"documents": "x", "search": "y:z"},
        {"attempts": -1},
        {"verify_s": 0.0},
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        GeneralConfig(**settings)  # type: ignore[arg-type]
