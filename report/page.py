"""One HTML file that opens without a network, and lets nothing that a policy wrote run.

What a run has written stands in the page as JSON and base64 in elements that no browser executes,
with every `<` escaped; `report.js` shows it by `textContent` alone; and a Content-Security-Policy
names the digests of our own scripts, so that no other would run even if it got into the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path

from keel.configs.schema import ConfigError
from keel.report.curves import thin
from keel.report.folders import read_folder
from keel.report.progress import Progress
from keel.report.shape import Chunks, Extent, RunData, as_json

SCRIPTS = ("show.js", "curves.js", "runs.js", "tokens.js", "read.js", "main.js")
"""In `report/page`, in the order in which they run."""
MOST_BYTES = 64 * 2**20
"""Of compressed trajectories in one page."""
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
    """live: chunks and news are fetched from where the page came from."""
    parts = files("keel.report") / "page"
    scripts = [library(), *((parts / name).read_text(encoding="utf-8") for name in SCRIPTS)]
    if not live:
        runs = thinned(runs)
        for run, _ in runs:
            thin(run)
    chunks = [
        f'<script type="text/plain" data-run="{number}" data-chunk="{html.escape(name)}">'
        f"{base64.b64encode(data).decode()}</script>"
        for number, (_, some) in enumerate(runs)
        for name, data in some.items()
        if not live
    ]
    data = embedded(state(runs, live=live))
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


def state(
    runs: Sequence[tuple[RunData, Chunks]], *, live: bool, known: Sequence[Extent] = ()
) -> str:
    """JSON: what the page shows, but for the trajectories themselves. known: what it has of each
    of the runs, which does not come again."""
    plain = [run.plain(has) for (run, _), has in zip_longest(runs, known[: len(runs)])]
    return as_json({"live": live, "written": time.time(), "runs": plain})


def embedded(text: str) -> str:
    """JSON that cannot end the element it stands in."""
    return text.replace("<", "\\u003c")


def policy(scripts: Sequence[str], *, live: bool) -> str:
    """The page's own scripts run and nothing else, and it speaks to nobody (but, `live`, to the
    process that it came from). plotly.js writes styles of its own."""
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    ours = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {ours}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {SELF if live else NOBODY}; base-uri 'none'; form-action 'none'"
    )


def thinned(runs: Sequence[tuple[RunData, Chunks]]) -> list[tuple[RunData, Chunks]]:
    """Without some of their trajectories, evenly, where a page would be too large for a browser."""
    total = sum(chunks.size(name) for _, chunks in runs for name in chunks)
    every = -(-total // MOST_BYTES)
    if every <= 1:
        return list(runs)
    for run, chunks in runs:
        names = list(chunks)
        kept = {name for at, name in enumerate(reversed(names)) if at % every == 0}
        if len(kept) == len(names):
            continue
        for name in names:
            if name not in kept:
                del chunks[name]
        groups = [group for group in run.groups if group.chunk in kept]
        some = f"{len(kept)} of {len(names)} steps"
        if run.kind == "evaluation":
            some = f"{len(groups)} of {len(run.groups)} prompts"
        run.groups = groups
        run.notes.append(
            f"trajectories of {some} are in this page, which would be "
            f"too large with all of them; `keel watch {run.path}` shows every one"
        )
    return list(runs)


def report(folders: Sequence[str], out: str | None) -> str:
    """`keel report`: write the page, and say where. Raises ConfigError."""
    tell = Progress()
    runs = [read_folder(Path(folder), tell=tell) for folder in folders]
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
    said = "\n".join([*notes, f"{path} ({size:.1f} MiB): open it in a browser"])
    return said.encode(errors="replace").decode()


def name_apart(runs: Sequence[RunData]) -> None:
    """Runs of the same name by their paths."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = run.path
