"""Finds rare named entities in a corpus. Each question starts from one of them.

A heuristic finds titles, quoted names, runs of katakana, and words that are always capitalized. A
name is rare if few documents contain it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import islice

from keel.agents.environments.search.documents import squeeze
from keel.agents.environments.search.index import SearchIndex

_MAX_DOCUMENTS = 50_000
"""Maximum number of documents to search, counted from the first."""
_MAX_NAME = 60
_MIN_LETTERS, _MIN_SIGNS = 4, 2
"""Minimum number of letters in a name, and minimum number of characters in a CJK name."""
_QUOTED = re.compile(r"[《「『“]([^《》「」『』“”\n]{2,40})[》」』”]")
_KATAKANA = re.compile(r"[ァ-ヺー][ァ-ヺー・]{2,30}[ァ-ヺー]")
_WORD = re.compile(r"[^\W\d_][\w'’-]*")
_BETWEEN = frozenset(
    {"of", "the", "de", "la", "le", "du", "von", "van", "der", "den", "del", "di", "da", "do", "y"}
)
_OPENERS = frozenset(
    {"the", "a", "an", "in", "on", "at", "its", "his", "her", "when", "after", "from", "for"}
)
_ENDS = re.compile(r"[.!?:;\n“\"(。]\s*$|^\s*$")


def rare_entities(index: SearchIndex, *, count: int, most_documents: int, seed: int) -> list[str]:
    """Return up to `count` rare entities, sampled with the given seed."""
    names = sorted(_candidates(index))
    random.Random(seed).shuffle(names)
    rare = (name for name in names if 1 <= index.frequency(name) <= most_documents)
    return list(islice(rare, count))


def _candidates(index: SearchIndex) -> set[str]:
    result, plain, alone = set[str](), set[str](), set[str]()
    for document in islice(index.documents(), _MAX_DOCUMENTS):
        names = [match[1] for match in _QUOTED.finditer(document.text)]
        names += [match[0] for match in _KATAKANA.finditer(document.text)]
        if document.title != document.name:
            names.append(document.title)
        for name in (*names, *_capitalised(document.text, plain, alone)):
            least = _MIN_SIGNS if ord(name[0]) > 0x2FFF else _MIN_LETTERS
            if len(name) <= _MAX_NAME and len(squeeze(name)) >= least:
                result.add(name)
    # A word that is capitalized only at the start of sentences is not a name.
    return {name for name in result if name not in alone or name.lower() not in plain}


def _capitalised(text: str, plain: set[str], alone: set[str]) -> Iterator[str]:
    """Yield runs of capitalized words. Lower-case words are added to `plain`, and single-word names
    to `alone`."""
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
