"""docs/knobs.md, docs/metrics.md and docs/coming-from.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from keel.commands.reference.knobs import Knob, Section, sections
from keel.commands.reference.metric import Metric
from keel.commands.reference.metrics import GROUPS
from keel.commands.reference.otherwise import OTHERWISE
from keel.commands.reference.pages import page_of
from keel.configs.other_frameworks.words import Word, frameworks, measures, words

WRITTEN = (
    "This page is written by `python -m keel.commands.reference docs` from {source}; "
    "`keel knobs` says the same in a terminal."
)
KNOBS = """# Knobs

{written}

A recipe holds what differs from these defaults; `keel check RECIPE` says what is wrong with it, the
rules between knobs included. A knob is overridden by `path.to.knob=value` on the command line; an
entry of a list has its name or its number there: `data.sources[sums].size=64`. Several knobs of a
section may be given together, and its others stay: `'run={{steps: 20, seed: 1}}'`, or
`{{"run": {{"steps": 20, "seed": 1}}}}` for the `knobs` of `keel.train`. A list is replaced as a
whole, and so is a value whose keys are yours, such as `rewards`. Under **resume**, *yes* means that
a run folder may be continued with another value
([checkpoints](checkpoints.md#changing-the-layout)); *no*, that the run would be optimising
something else, and has to get another folder.
"""
TITLES = {
    "train": "",
    "distill": """# Recipes of `keel distill`

The same folder is gone on with; a knob may have another value as long as the links of the chain
that depend on it have not been done.
""",
    "synthesize": """# Recipes of `keel synthesize`

The same folder is gone on with; under **resume**, *no* marks what the tasks in it depend on.
""",
}
METRICS = """# Metrics

{written}

A step is one line of `metrics.jsonl` in the run folder (an evaluation that a signal cut off is
made when the run goes on, and is a second line of its step): `step`, `time` (seconds since the
epoch) and these, as far as they apply; a number that is not finite is left out. TensorBoard and
`keel report` have them by the same names. `<set>`, `<domain>` and `<part>` stand for names of a
recipe. **Healthy** is what a run looks like when all is well; where it says nothing, that depends
on the task. **Otherwise** is what to look at and to change first;
[troubleshooting](troubleshooting.md) begins with what one sees. The thresholds at which a run says
so itself are in [alarms](alarms.md).
"""
COMING_FROM = """# Coming from another framework

What your knobs are called here; what has no counterpart says so. A recipe that uses another
framework's word for a knob is told ours, and `keel knobs NAME` explains each knob on the right. The
other side was read in their sources of August 2026 (TRL: July); names change, so check yours.

Three differences matter more than names:

- **A step is one batch.** `algorithm.prompts_per_step` × `algorithm.group_size` completions are
  sampled, scored and trained on. Batch size per device and gradient accumulation follow from
  `trainer.micro_batch_tokens`, and change no gradient.
- **Engine and trainer must agree.** Where others correct the mismatch by importance sampling, Keel
  records experts and sampling masks and replays them ([Keep Routing](concepts/keep-routing.md),
  [Keep Sampling Mask](concepts/keep-sampling-mask.md)).
- **β belongs to a source**, not to the run: `data.sources[].kl_coef`.

The tables are written by `python -m keel.commands.reference docs` from
`configs/other_frameworks/words.toml`; that of [metrics](#metrics) is the last.
"""
MEASURES = """## Metrics

[Metrics](metrics.md) has all of ours, with what is healthy. `keel knobs NAME` answers to
theirs, too.
"""


def pages() -> Mapping[str, str]:
    """File in docs/ → its text."""
    return {
        "knobs.md": _knobs_page(),
        "metrics.md": _metrics_page(),
        "coming-from.md": _coming_from_page(),
    }


def _coming_from_page() -> str:
    parts = [COMING_FROM]
    for framework, config in frameworks().items():
        table = _elsewhere(framework, words())
        parts.append(f"## {framework} ({config})\n\n{table}")
    parts.append(MEASURES)
    for framework in dict.fromkeys(word.framework for word in measures()):
        parts.append(_elsewhere(framework, measures()))
    return "\n".join(parts)


def _elsewhere(framework: str, theirs: Iterable[Word]) -> str:
    rows = [
        (f"`{word.name}`", ", ".join(f"`{one}`" for one in word.here) or "–", word.note)
        for word in theirs
        if word.framework == framework
    ]
    return _table((framework, "Keel", ""), rows)


def _knobs_page() -> str:
    parts = [KNOBS.format(written=WRITTEN.format(source="the dataclasses in `configs/`"))]
    recipe = "train"
    for section in sections():
        if section.recipe != recipe:
            recipe = section.recipe
            parts.append(TITLES[recipe])
        parts.append(_section(section))
    return "\n".join(parts)


def _section(section: Section) -> str:
    page = page_of(section.name, "")
    more = f" More: [{page}]({page}.md)." if page else ""
    title = f"`{section.path}`" if section.path else "At the top"
    rows = [_row(knob, page) for knob in section.knobs]
    table = _table(("knob", "default", "values", "resume", ""), rows)
    return f"## {title}\n\n{section.text}{more}\n\n{table}"


def _row(knob: Knob, page: str) -> tuple[str, ...]:
    values = knob.allowed if knob.choices else ", ".join(filter(None, (knob.kind, knob.allowed)))
    known = knob.page in ("", page) or f"docs/{knob.page}.md" in knob.text
    more = "" if known else f" ([{knob.page}]({knob.page}.md))"
    name = knob.path.rpartition(".")[2]
    default = f"`{knob.default}`" if knob.default else "to be given"
    return f"`{name}`", default, values, knob.resume, _linked(knob.text) + more


def _metrics_page() -> str:
    parts = [METRICS.format(written=WRITTEN.format(source="`commands/reference/`"))]
    for title, metrics in GROUPS.items():
        table = _table(("metric", "unit", "", "healthy", "otherwise"), map(_metric, metrics))
        parts.append(f"## {title}\n\n{table}")
    return "\n".join(parts)


def _metric(metric: Metric) -> tuple[str, ...]:
    more = f" ([{metric.page}]({metric.page}.md))" if metric.page else ""
    otherwise = OTHERWISE.get(metric.name, "")
    return f"`{metric.name}`", metric.unit, metric.text + more, metric.healthy, otherwise


def _linked(text: str) -> str:
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )
