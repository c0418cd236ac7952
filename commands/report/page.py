"""`keel report`: one HTML file that opens without a network and runs nothing that a policy wrote.

The run's files stand in the page as JSON and base64 in elements that no browser executes, with
every `<` escaped; the scripts show it by `textContent` alone; and a Content-Security-Policy
names the digests of our own scripts, so that no other would run even if it got into the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from keel.commands.report.folders import read_folder
from keel.commands.report.shape import Chunks, RunData, as_json
from keel.configs.schema import ConfigError

SCRIPTS = ("show.js", "curves.js", "runs.js", "tokens.js", "read.js", "main.js")
"""In `commands/report/page`, in the order in which they run."""
MOST_BYTES = 64 * 2**20
"""Compressed trajectories in one page."""
PARTS = 500
"""Parts of a curve that keep their extremes: about as many as it has pixels."""
STACKED = ("time/rollout", "time/reward", "time/train", "time/sync")
"""Drawn one above the other, so where one of them has a value the others need theirs."""
SELF, NOBODY = "'self'", "'none'"
CURE = "pip install plotly"


@cache
def library() -> str:
    """plotly.js (MIT), as the package `plotly` brings it. Raises ConfigError without it."""
    try:
        # Without it, say how to get it.
        from plotly.offline import get_plotlyjs  # pyright: ignore  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"the page's curves are drawn by plotly.js: {CURE}") from error
    return str(get_plotlyjs())


def page(runs: Sequence[tuple[RunData, Chunks]], *, live: bool = False) -> str:
    """The whole page. live: trajectories and news are fetched from where the page came from."""
    parts = files("keel.commands.report") / "page"
    scripts = [library(), *((parts / name).read_text(encoding="utf-8") for name in SCRIPTS)]
    if not live:
        runs = fewer_trajectories(runs)
    chunks = [
        f'<script type="text/plain" data-run="{number}" data-chunk="{html.escape(name)}">'
        f"{base64.b64encode(chunk.data()).decode()}</script>"
        for number, (_, some) in enumerate(runs)
        for name, chunk in some.items()
        if not live
    ]
    data = state(runs, live=live).replace("<", "\\u003c")  # cannot end its element
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts, live=live)}">',
            '<meta name="referrer" content="no-referrer">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(', '.join(run.name for run, _ in runs))} · Keel</title>",
            f"<style>{(parts / 'report.css').read_text(encoding='utf-8')}</style></head><body>",
            (parts / "body.html").read_text(encoding="utf-8"),
            f'<script type="application/json" id="data">{data}</script>',
            *chunks,
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def state(runs: Sequence[tuple[RunData, Chunks]], *, live: bool) -> str:
    """JSON of everything on the page but the trajectories."""
    plain = [fewer_points(run).plain() for run, _ in runs]
    return as_json({"live": live, "written": time.time(), "runs": plain})


def policy(scripts: Sequence[str], *, live: bool) -> str:
    """The Content-Security-Policy: only the page's own scripts run, and only a live page connects,
    to where it came from. plotly.js writes inline styles."""
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    ours = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {ours}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {SELF if live else NOBODY}; base-uri 'none'; form-action 'none'"
    )


def fewer_points(run: RunData) -> RunData:
    """Leave the lowest and highest value of each of `PARTS` parts of each curve, at their steps."""
    kept = {name: extremes(values) for name, values in run.metrics.items()}
    stacked = set[int]().union(*(kept.get(name, ()) for name in STACKED))
    kept |= {name: stacked for name in STACKED if name in kept}
    metrics = {
        name: [value if at in kept[name] else None for at, value in enumerate(values)]
        for name, values in run.metrics.items()
    }
    if metrics == run.metrics:
        return run
    text = f"curves of {len(run.steps):,} steps show the extremes of each of {PARTS} parts"
    return replace(run, metrics=metrics, notes=[*run.notes, text])


def extremes(values: Sequence[float | None]) -> set[int]:
    """Places of the extremes of each part, and of the first and the last value."""
    known = {at: value for at, value in enumerate(values) if value is not None}
    places = [*known]
    if len(places) <= 2 * PARTS:
        return {*places}
    kept = {places[0], places[-1]}
    for part in range(PARTS):
        some = places[part * len(places) // PARTS : (part + 1) * len(places) // PARTS]
        kept |= {min(some, key=known.__getitem__), max(some, key=known.__getitem__)}
    return kept


def fewer_trajectories(
    runs: Sequence[tuple[RunData, Chunks]],
) -> Sequence[tuple[RunData, Chunks]]:
    """Leave every n-th chunk where all of them would be more than `MOST_BYTES`."""
    total = sum(chunk.size for _, chunks in runs for chunk in chunks.values())
    every = -(-total // MOST_BYTES)
    for run, chunks in runs if every > 1 else ():
        names, before = list(chunks), len(run.groups)
        for at, name in enumerate(reversed(names)):  # the last stays
            if at % every:
                del chunks[name]
        run.groups = [group for group in run.groups if group.chunk in chunks]
        some = f"{len(chunks)} of {len(names)} steps"
        if run.kind == "evaluation":
            some = f"{len(run.groups)} of {before} prompts"
        if len(chunks) < len(names):
            run.notes.append(
                f"trajectories of {some} are in this page, which would be "
                f"too large with all of them; `keel watch {run.path}` shows every one"
            )
    return runs


def report(folders: Sequence[str], out: str | None) -> str:
    """`keel report`: write the page, and return what to print. Raises ConfigError."""
    runs = [read_folder(Path(folder)) for folder in folders]
    name_apart([run for run, _ in runs])
    path = Path(out) if out else (Path(folders[0]) if len(runs) == 1 else Path()) / "report.html"
    if path.is_dir():
        raise ConfigError(f"--out {path}: is a folder; name a file")
    try:
        text = page(runs)
    except OSError as error:  # the run has been resumed meanwhile, say
        raise ConfigError(f"{error}: trajectories have gone meanwhile; run it again") from error
    fresh = path.with_name(f".{path.name}.tmp")
    try:
        fresh.write_text(text, encoding="utf-8", errors="replace")  # a name may be of other bytes
        fresh.replace(path)
    except OSError as error:
        why = f"{path.parent} is no folder" if not path.parent.is_dir() else error.strerror
        raise ConfigError(f"{path}: cannot be written ({why}); --out names another") from error
    notes = [f"{run.name}: {note}" for run, _ in runs for note in run.notes]
    size = path.stat().st_size / 2**20
    text = "\n".join([*notes, f"{path} ({size:.1f} MiB): open it in a browser"])
    return text.encode(errors="replace").decode()


def name_apart(runs: Sequence[RunData]) -> None:
    """Name runs of the same name by their paths."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = run.path
