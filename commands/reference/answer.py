"""`keel knobs [NAME]`: a knob, a section or a metric, in words."""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Sequence

from keel.commands.reference.knobs import RECIPES, Knob, Section, flat, normal, sections
from keel.commands.reference.metric import Metric
from keel.commands.reference.metrics import GROUPS, METRICS, described
from keel.commands.reference.otherwise import OTHERWISE
from keel.commands.reference.plain import plain
from keel.commands.reference.search import Found, holds, near, search
from keel.configs.other_frameworks.words import ending, meant, measures
from keel.configs.sections.base import ConfigError
from keel.configs.suggest import COMMON, RENAMED, suggest

COMMANDS = {
    "train": "Recipes of keel train, sft, pretrain, eval, filter and check",
    "distill": "Recipes of keel distill",
    "synthesize": "Recipes of keel synthesize",
}
MORE = (
    "keel knobs SECTION has its knobs, keel knobs KNOB all of one (trainer.lr, or lr alone), and "
    "keel knobs METRIC what a metric of metrics.jsonl means (mismatch/logp_abs, or a part of it)."
)
WHOLE = 3
"""So many knobs or metrics of one name are shown whole, more of them a line each."""
MOST = 15
"""Lines of those that have a word in what is said of them."""
ALIKE = 5
"""Names that one mistyped may have meant."""


def answer(name: str = "") -> str:
    """What is known by that name, or of knobs and metrics that have its words; of several names,
    each. Raises ConfigError that says what may have been meant."""
    if not normal(name):
        return _overview()
    if meant_by := plain(name):
        about = [knob for each in meant_by for knob in flat() if knob.name == each]
        return f"No knob is called {name}. It is about:\n\n{_all_of(about)}"
    several = name.split()
    if len(several) > 1 and _called(joined := "_".join(several).lower()):
        return answer(joined)
    if len(several) > 1 and all(map(_is_known, several)):
        return "\n\n".join(map(answer, several))
    asked = normal(name)
    inside = [section for section in sections() if _within(section.name, asked)]
    if asked in RECIPES:
        inside = [section for section in sections() if section.recipe == asked]
    knobs = _called(asked)
    if inside:
        others = [knob.name for knob in knobs if not _within(knob.name, asked)]
        return "\n\n".join(
            [*map(_section, inside), *([_folded(f"Also: {', '.join(others)}")] if others else [])]
        )
    metrics = _metrics(name)
    if not knobs and not metrics:
        return _sought(name, asked)
    parts = [_all_of([*knobs, *metrics])]
    if "." not in asked and "/" not in name:
        shown = {one.name for one in (*knobs, *metrics)}
        others = {
            one.name: None for one in (*_called(COMMON.get(asked, asked)), *search(asked).names)
        }
        also = ", ".join(name for name in others if name not in shown)
        parts += [_folded(f"Also: {also}")] if also else []
    return "\n\n".join(parts)


def _is_known(name: str) -> bool:
    """Whether something is called so."""
    asked = normal(name)
    section = any(_within(section.name, asked) for section in sections())
    return section or asked in RECIPES or bool(_called(asked) or _metrics(name))


def _sought(name: str, asked: str) -> str:
    """Of a name that nothing has: knobs and metrics with its words. Raises ConfigError where there
    are none, or it is known what was meant."""
    above, _, key = asked.rpartition(".")
    why = _meant(name, asked)
    section = above in {section.name.removesuffix("[]") for section in sections()}
    slip = section and "did you mean" in why
    if "/" in name or slip or (above and not section) or _of_elsewhere(name, asked):
        raise ConfigError(f"{name}: {why}")
    found = search(key or asked, above)
    if not found.names and not found.texts:
        if not above and (alike := near(asked)):
            why = f"no such knob or metric; did you mean {' or '.join(alike[:ALIKE])}?"
        raise ConfigError(f"{name}: {why}")
    return _found(name, found)


def _of_elsewhere(name: str, asked: str) -> bool:
    """Whether it is a word for a knob or a metric: of another framework, or of an earlier
    release."""
    key = asked.rpartition(".")[2]
    theirs = meant(asked) or ending(key) or [one for one in measures() if one.name == name]
    return bool(theirs) or key in COMMON or asked in RENAMED


def _found(name: str, found: Found) -> str:
    parts = [f"No knob, section or metric is called {name}."]
    if found.names:
        parts += ["In their names:", _all_of(found.names)]
    if found.texts:
        more = len(found.texts) - MOST
        rows = [_row(one) for one in found.texts[:MOST]]
        parts += [f"In what is said of {'others' if found.names else 'them'}:", _table(rows)]
        parts += [f"… and of {more} more; docs/knobs.md has all"] if more > 0 else []
    return "\n\n".join([_folded(f"{parts[0]} {parts[1]}"), *parts[2:]])


def _all_of(found: Sequence[Knob | Metric]) -> str:
    """Each whole, or in a line where there are many of its kind."""
    knobs = [one for one in found if isinstance(one, Knob)]
    metrics = [one for one in found if isinstance(one, Metric)]
    parts = [*map(_knob, knobs)] if len(knobs) <= WHOLE else [_table([*map(_line, knobs)])]
    parts += (
        [*map(_metric, metrics)] if len(metrics) <= WHOLE else [_table([*map(_measure, metrics)])]
    )
    return "\n\n".join(part for part in parts if part)


def _row(one: Knob | Metric) -> tuple[str, str]:
    return _line(one) if isinstance(one, Knob) else _measure(one)


def _within(name: str, section: str) -> bool:
    return name.removesuffix("[]") == section.removesuffix("[]") or name.startswith(
        (f"{section}.", f"{section}[].")
    )


def _called(asked: str) -> list[Knob]:
    """The knob of that path, else all whose path ends so."""
    same = [knob for knob in flat() if knob.name == asked]
    return same or [knob for knob in flat() if f".{knob.name}".endswith(f".{asked}")]


def _metrics(name: str) -> list[Metric]:
    """The metric of that name, as a run writes it or as it stands here; else all that hold it."""
    if "/" in name and (one := described(name)):
        return [one]
    title = name.strip("/").lower()
    return [metric for metric in METRICS if holds(metric.name.lower(), title)]


def _meant(name: str, asked: str) -> str:
    """As of an unknown key of a recipe; or a metric of a similar name, or of another framework."""
    theirs = [word for word in measures() if word.name == name]
    if theirs and not any(word.here for word in meant(asked)):
        return f"no such metric; {theirs[0].said()}"
    if "/" in name:
        near = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=3, cutoff=0.5)
        return f"no such metric; did you mean {' or '.join(near)}?" if near else "no such metric"
    above, _, key = asked.rpartition(".")
    for section in sections():
        if above and above in (section.name, section.name.removesuffix("[]")):
            prefix = f"{section.path}.".lstrip(".")
            return f"no such knob; {suggest(key, section.cls, prefix, RECIPES[section.recipe])}"
    first = asked.partition(".")[0]
    said = [suggest(first, root, "", root) for root in RECIPES.values()]
    likely = [each for each in said if each.startswith("did you mean")]
    return f"no such knob or metric; {[*likely, *said][0]}"


def _overview() -> str:
    parts: list[str] = []
    for recipe, title in COMMANDS.items():
        rows = [(each.name, first(each.text)) for each in sections() if each.recipe == recipe]
        parts.append(f"{title}\n{_table(rows)}")
    groups = [(title, ", ".join(each.name for each in group)) for title, group in GROUPS.items()]
    parts.append(f"Metrics\n{_table(groups)}")
    return "\n\n".join([*parts, _folded(MORE)])


def first(text: str) -> str:
    """Its first sentence."""
    return re.split(r"(?<=[a-z)`]\.)(?<!Eq\.) (?=[A-Zβ`0-9])", text)[0]


def _section(section: Section) -> str:
    rows = [_line(knob, knob.path.rpartition(".")[2]) for knob in section.knobs]
    return f"{section.name}\n{_folded(section.text, 2)}\n{_table(rows)}"


def _line(knob: Knob, name: str = "") -> tuple[str, str]:
    """As a recipe has it, with its default."""
    return f"{name or knob.name}: {knob.default}", first(knob.text)


def _measure(metric: Metric) -> tuple[str, str]:
    return metric.name, metric.text


def _knob(knob: Knob) -> str:
    rows = [
        ("type", knob.kind),
        ("allowed", knob.allowed),
        ("default", knob.default or "none: it has to be given"),
        ("on resume", RESUMES[knob.resume]),
        ("in a recipe", "" if knob.recipe == "train" else f"of keel {knob.recipe}: {knob.path}"),
        ("more", f"docs/{knob.page}.md" if knob.page else ""),
    ]
    return f"{knob.name}\n{_folded(knob.text, 2)}\n{_table([row for row in rows if row[1]])}"


RESUMES = {
    "yes": "may have another value",
    "no": "must stay as it was; another value needs another folder",
    "for links to come": "may have another value for links that are not done",
}


def _metric(metric: Metric) -> str:
    mention = [knob.name for knob in flat() if f"`{metric.name}`" in knob.text]
    rows = [
        ("unit", metric.unit),
        ("healthy", metric.healthy),
        ("if not", OTHERWISE.get(metric.name, "")),
        ("knobs", ", ".join(mention)),
        ("more", f"docs/{metric.page}.md" if metric.page else ""),
    ]
    return f"{metric.name} (metric)\n{_folded(metric.text, 2)}\n" + _table(
        [row for row in rows if row[1]]
    )


def _width() -> int:
    return min(100, shutil.get_terminal_size().columns)


def _folded(text: str, indent: int = 0) -> str:
    return textwrap.fill(
        text,
        _width(),
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """Names, and beside them what is said."""
    wide = max((len(name) for name, _ in rows), default=0) + 2
    return "\n".join(
        textwrap.fill(
            text,
            max(_width(), wide + 30),
            initial_indent=f"  {name:<{wide}}",
            subsequent_indent=" " * (wide + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in rows
    )
