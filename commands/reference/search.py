"""Knobs and metrics by a word of theirs: what there is to say of a name that none of them has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

from keel.commands.reference.knobs import Knob, flat
from keel.commands.reference.metric import Metric
from keel.commands.reference.metrics import METRICS

WORD = re.compile(r"[^\W_]+")
SHORTEST = 3
"""Letters of a word that the beginning of another is compared with; a shorter one has to be whole:
`n` begins many."""
NEAR = 0.75
"""How alike a part of a name is that was meant: `difflib`'s ratio."""


@dataclass(frozen=True, slots=True)
class Found:
    """Knobs and metrics that hold every word asked for: in the name, or else in what is said."""

    names: Sequence[Knob | Metric]
    texts: Sequence[Knob | Metric]


def search(asked: str, within: str = "") -> Found:
    """asked: words, or a part of a name. within: the section, if knobs of one alone count."""
    known = _known(within)
    names = [one for one in known if _holds(one.name.removeprefix(within), asked)]
    return Found(names, [one for one in known if one not in names and _holds(_said(one), asked)])


def near(asked: str) -> list[str]:
    """Names of knobs, else of metrics, that end in what is written most like the word asked for, or
    have it as a part; none where that is a section's."""
    ends = {one.name: re.split(r"[./]", one.name)[-1] for one in _known()}
    parts = {part for end in ends.values() for part in _parts(end)}
    tops = {one.name.partition(".")[0] for one in flat()}
    close = difflib.get_close_matches(asked, sorted({*ends.values(), *parts} | tops), 1, NEAR)
    if not close or close[0] in tops:
        return []
    ending = [name for name, end in ends.items() if end == close[0]]
    named = ending or [name for name, end in ends.items() if close[0] in _parts(end)]
    knobs = [knob.name for knob in flat() if knob.name in named]
    return sorted(knobs or named, key=lambda name: name.count("."))


def holds(metric: str, asked: str) -> bool:
    """Whether a metric's name has that in it."""
    return asked in metric if len(asked) >= SHORTEST else asked in _parts(metric)


def _known(within: str = "") -> list[Knob | Metric]:
    if within:
        return [knob for knob in flat() if knob.name.startswith((f"{within}.", f"{within}[]."))]
    return [*flat(), *METRICS]


def _holds(text: str, asked: str) -> bool:
    """Whether each of the words, or all of them as one, begins a word of the text."""
    words, parts = WORD.findall(asked.lower()), _parts(text)
    return bool(words) and (
        all(_begins(word, parts) for word in words) or _begins("".join(words), parts)
    )


def _begins(word: str, parts: Set[str]) -> bool:
    return word in parts or (len(word) >= SHORTEST and any(part.startswith(word) for part in parts))


def _parts(text: str) -> set[str]:
    """Its words, those with a hyphen as one, too: `warm-up` is `warmup`."""
    text = text.lower()
    return {*WORD.findall(text), *WORD.findall(re.sub(r"(?<=\w)-(?=\w)", "", text))}


def _said(one: Knob | Metric) -> str:
    """What is shown of it."""
    if isinstance(one, Metric):
        return f"{one.name} {one.text} {one.unit}"
    return f"{one.name} {one.text} {one.allowed} {one.default}"
