"""Generate the pages about knobs and metrics from the schema and `commands/metrics.toml`.

python -m docs.reference_pages   # writes docs/knobs.md and docs/metrics.md
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from keel.commands.reference import _RECIPES, _metric_groups, _page_of, sections

_KNOBS = """# Knobs

A recipe lists the differences from these defaults. Override a knob with `path.to.knob=value` on the
command line; an entry of a list is named by its name or index: `data.sources[sums].size=64`.
Several knobs of a section can be set together: `'run={steps: 20, seed: 1}'`. Lists and mappings
with free keys, such as `rewards`, are replaced as a whole. The column **resume** tells whether a
run folder can be continued with another value ([checkpoints](checkpoints.md)).
"""
_METRICS = """# Metrics

Each line of `metrics.jsonl` in the run folder holds `step`, `time` (seconds since the epoch) and
the applicable metrics of this page. `<set>`, `<domain>` and `<part>` stand for names of a recipe.
**Healthy** is empty if the value depends on the task, and **otherwise** lists what to check first
([troubleshooting](troubleshooting.md), [alarms](alarms.md)).
"""


def pages() -> Mapping[str, str]:
    """Generate the reference pages in docs/, keyed by file name."""
    knobs, recipe = [_KNOBS], "train"
    for section in sections():
        if section.recipe != recipe:
            recipe = section.recipe
            knobs.append(f"# {_RECIPES[recipe][1]}\n")
        rows: list[tuple[str, ...]] = []
        for knob in section.knobs:
            values = ", ".join(filter(None, (knob.kind, knob.allowed)))
            default = f"`{knob.default}`" if knob.default else "required"
            name = f"`{knob.name.rpartition('.')[2]}`"
            rows.append((name, default, values, knob.resume, _linked(knob.text)))
        page = _page_of(section.name, "")
        more = f" More: [{page}]({page}.md)." if page else ""
        title = f"`{section.path}`" if section.path else "Top level"
        table = _table(("knob", "default", "values", "resume", ""), rows)
        knobs.append(f"## {title}\n\n{_linked(section.text)}{more}\n\n{table}")
    metrics = [_METRICS]
    for title, group in _metric_groups().items():
        rows = []
        for metric in group:
            more = f" ([{metric.page}]({metric.page}.md))" if metric.page else ""
            row = (f"`{metric.name}`", metric.unit, metric.text + more)
            rows.append((*row, metric.healthy, metric.otherwise))
        table = _table(("metric", "unit", "", "healthy", "otherwise"), rows)
        metrics.append(f"## {title}\n\n{table}")
    return {"knobs.md": "\n".join(knobs), "metrics.md": "\n".join(metrics)}


def _linked(text: str) -> str:
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


if __name__ == "__main__":
    for page_name, page_text in pages().items():
        Path(__file__).with_name(page_name).write_text(page_text, encoding="utf-8")
