"""Find rare named entities in a corpus, from which questions start.

A heuristic finds titles, quoted names, runs of katakana, and words that are always capitalized.
Alternatively the author proposes names. A name is rare if few documents contain it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from keel.agents.environments.search.documents import squeeze
from keel.agents.environments.search.environment import Search
from keel.agents.environments.search.index import SearchIndex
from keel.rl.turns import ToolSpec
from keel.synthesis.author import Author
from keel.synthesis.ledger import Rejected
from keel.synthesis.search.workspace import Workspace, list_schema, object_schema, text_schema

MOST_LOOKED_AT = 50_000
"""Maximum number of documents to search, starting with the first."""
LONGEST = 60
LEAST, LEAST_SIGNS = 4, 2
"""Minimum number of letters in a name, and of characters in a CJK name."""
_QUOTED = re.compile(r"[《「『“]([^《》「」『』“”\n]{2,40})[》」』”]")
_KATAKANA = re.compile(r"[ァ-ヺー][ァ-ヺー・]{2,30}[ァ-ヺー]")
_WORD = re.compile(r"[^\W\d_][\w'’-]*")
_BETWEEN = frozenset(
    {"of", "the", "de", "la", "le", "du", "von", "van", "der", "den", "del", "di", "da", "do", "y"}
)
_ENDS = re.compile(r"[.!?:;\n“\"(。]\s*$|^\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    name: str
    document: str
    """A document that contains the entity."""


def rare_entities(
    index: SearchIndex, *, count: int, most_documents: int, seed: int
) -> list[Entity]:
    """Return up to `count` rare entities, chosen at random by the seed."""
    result = _candidates(index)
    names = sorted(result)
    random.Random(seed).shuffle(names)
    rare = (name for name in names if 1 <= index.frequency(name) <= most_documents)
    return [Entity(name=name, document=result[name]) for name in islice(rare, count)]


def _candidates(index: SearchIndex) -> dict[str, str]:
    """Return names, each with the first document that contains it."""
    result, plain, alone = dict[str, str](), set[str](), set[str]()
    for document in islice(index.documents(), MOST_LOOKED_AT):
        names = [match[1] for match in _QUOTED.finditer(document.text)]
        names += [match[0] for match in _KATAKANA.finditer(document.text)]
        if document.title != document.name:
            names.append(document.title)
        for name in (*names, *_capitalised(document.text, plain, alone)):
            if len(name) <= LONGEST and len(squeeze(name)) >= (
                LEAST_SIGNS if ord(name[0]) > 0x2FFF else LEAST
            ):
                result.setdefault(name, document.name)
    # A word that is capitalized only at the start of sentences is not a name.
    return {
        name: at for name, at in result.items() if name not in alone or name.lower() not in plain
    }


def _capitalised(text: str, plain: set[str], alone: set[str]) -> Iterator[str]:
    """Yield runs of capitalized words. Lower-case words are collected in `plain`, and names of a
    single word in `alone`."""
    run: list[re.Match[str]] = []
    for word in [*_WORD.finditer(text), None]:
        if word is not None and (capital := word[0][0].isupper()) is False:
            plain.add(word[0])
        else:
            capital = word is not None
        beside = bool(run) and word is not None and text[run[-1].end() : word.start()] == " "
        if beside and word is not None and (capital or word[0] in _BETWEEN):
            run.append(word)
            continue
        yield from _name(text, run, alone)
        run = [word] if word is not None and capital else []


def _name(text: str, run: list[re.Match[str]], alone: set[str]) -> Iterator[str]:
    while run and not run[-1][0][0].isupper():
        run.pop()
    if run and _ENDS.search(text[max(0, run[0].start() - 4) : run[0].start()]):
        # Start of a sentence: drop a leading article, or a single word.
        run = run[len(run) == 1 or run[0][0].lower() in _OPENERS :]
    if not run:
        return
    name = re.sub(r"['’]s?$", "", text[run[0].start() : run[-1].end()])
    if len(run) == 1:
        alone.add(name)
    yield name


_OPENERS = frozenset(
    {"the", "a", "an", "in", "on", "at", "its", "his", "her", "when", "after", "from", "for"}
)


_NAMES = ToolSpec(
    name="propose",
    description="Hand in names.",
    parameters=object_schema(names=list_schema(text_schema(100), 1, 20)),
)


async def propose_entity(
    desk: Workspace, author: Author, document: str, most_documents: int
) -> str:
    """Ask the author for names and return the first one that is in the document and rare. Raises
    Rejected, AuthorLost or BudgetSpent."""
    result: list[str] = []

    def hand_in(value: Mapping[str, Any], search: Search) -> None:
        wrong = ""
        for name in (" ".join(one.split()) for one in value["names"]):
            opened = desk.index.document(document)
            if opened is None or not squeeze(name) or squeeze(name) not in squeeze(opened.text):
                wrong = f"{name!r} is not in {document!r}"
            elif (count := desk.index.frequency(name)) > most_documents:
                wrong = f"{name!r} is in {count} documents, so it is not rare"
            else:
                result.append(name)
        if not result:
            raise Rejected("entity", wrong)

    await desk.work(
        author,
        "You find rare named things: people, places, works, events, organisations, species that "
        "few documents name. Hand in up to 20 from one document with the tool `propose`, the "
        "rarest first, as they stand there.",
        "Open the document between the fences, and propose names from it.",
        material={"document": document},
        purpose="entity",
        hand_in=(_NAMES, hand_in),
    )
    return result[0]
