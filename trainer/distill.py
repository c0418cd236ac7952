"""`keel distill`: specialists, what they teach, supervised distillation, mixed RL, evaluation.

Each link is a command of Keel's in a process of its own, in a folder of its own, and resumes by
itself; this file knows their order, what has been done, and what it came to.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from keel.configs.distillation import DistillConfig, SpecialistConfig
from keel.configs.load import flatten_config, load_config
from keel.configs.schema import Config, ConfigError
from keel.configs.work_folder import Lines, WorkFolder
from keel.data.distilled import select
from keel.data.results import aligned

STAGES = ("specialist", "distilled", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A step of the chain."""

    name: str
    command: tuple[str, ...]
    """Of `keel`, with its arguments; empty: the selection, which is made here."""

    def __str__(self) -> str:
        return shlex.join(["keel", *self.command]) if self.command else "select"


def chain(config: DistillConfig, recipe: Config) -> list[Link]:
    """All links, in order. recipe: of `config.recipe`."""
    root = Path(config.dir).expanduser()
    base = [config.recipe, *config.overrides]
    heldout = {source.name for source in recipe.data.sources if source.holdout}
    links: list[Link] = []

    def add(name: str, command: str, *words: str) -> None:
        links.append(Link(name=name, command=(command, *words)))

    def evaluated(stage: str, folder: Path, words: Sequence[str]) -> None:
        add(
            f"evaluate {stage}",
            "eval",
            *(*base, *words, f"run.dir={folder}"),
            *(f"eval.samples={config.eval_samples}", f"eval.dir={_evaluation(root, stage)}"),
        )

    for each in config.specialists:
        folder, words = root / "specialists" / each.name, _only(each)
        add(f"train {each.name}", "train", *base, *words, f"run.dir={folder}")
        add(
            f"sample {each.name}",
            "eval",
            *(*base, *words, f"run.dir={folder}", "eval.prompts=train"),
            *(f"eval.samples={config.samples}", f"eval.size={config.prompts}"),
            f"eval.dir={_sampled(root, each.name)}",
        )
        if heldout & set(each.sources):
            evaluated(f"specialist-{each.name}", folder, words)
    links.append(Link(name="select", command=()))
    sft, mixed = root / "distilled", root / "mixed"
    source = {"name": "distilled", "source": "trajectories", "path": str(_selected(root))}
    add(
        "distill",
        "sft",
        *(config.sft, f"sft.max_context_tokens={recipe.max_context}"),
        *(*config.sft_overrides, *_model(recipe)),
        *(f"run.dir={sft}", f"sft.sources={json.dumps([source])}"),
    )
    taught = sorted(source for each in config.specialists for source in each.sources)
    both = [f"data.only={json.dumps(taught)}", f"model.path={sft / 'model'}"]
    if heldout:
        evaluated("distilled", root / "eval" / "runs" / "distilled", both)
    add("mix", "train", *base, *config.mixed_overrides, *both, f"run.dir={mixed}")
    if heldout:
        evaluated("mixed", mixed, [*config.mixed_overrides, *both])
    return links


def distill(config: DistillConfig, run: Callable[[Sequence[str]], int] | None = None) -> int:
    """Runs what has not been done. Returns the exit status, of a link where one failed. run: a
    command of `keel`.

    Raises ConfigError before anything is run, for what the recipe of a link says wrong.
    """
    recipe = _checked(config)
    links = chain(config, recipe)
    root = Path(config.dir).expanduser()
    with WorkFolder(root, "dir", "distillation") as folder:
        settings = {link.name: str(link) for link in links} | {"select": asdict(config.select)}
        if changed := folder.changed(settings):
            listed = "\n  ".join(changed)
            raise folder.refused(
                f"holds a distillation of other settings:\n  {listed}\nChoose another dir, or set "
                "these back to go on with it"
            )
        folder.claim(settings)
        done = folder.lines("links.jsonl")
        known = {str(line["name"]) for line in done.read()}
        for number, link in enumerate(links, start=1):
            if link.name in known:
                continue
            print(f"{number} of {len(links)}, {link.name}: {link}", flush=True)
            status = _do(link, config, root, done, run or _keel)
            if status:
                print(f"{link.name} ended with status {status}; the same command goes on with it")
                return status
        lines = report(config, root)
        folder.write("report.md", "\n".join(lines) + "\n")
        print("\n".join(lines))
        print(f"model           {root / 'mixed' / 'model'}\nreport          {root / 'report.md'}")
    return 0


def report(config: DistillConfig, root: Path) -> list[str]:
    """pass@1 of each source with its interval, of its specialist, the distilled and the mixed
    model."""
    rows = [["", *STAGES]]
    found = {stage: _results(root, stage) for stage in ("distilled", "mixed")}
    for each in config.specialists:
        own = _results(root, f"specialist-{each.name}")
        for source in each.sources:
            cells = [_cell(of.get(source)) for of in (own, found["distilled"], found["mixed"])]
            if any(cells):
                rows.append([source, *(cell or "–" for cell in cells)])
    return aligned(rows) if len(rows) > 1 else ["no source has a holdout, so nothing was measured"]


def _checked(config: DistillConfig) -> Config:
    """The recipe of the mixed stage. Raises ConfigError."""
    recipe = load_config(config.recipe, config.overrides)
    names = [source.name for source in recipe.data.sources]
    for each in config.specialists:
        for source in each.sources:
            if source not in names:
                raise ConfigError(
                    f"specialists[{each.name}].sources: {config.recipe} has no source {source!r}; "
                    f"it has {', '.join(names)}"
                )
        load_config(config.recipe, [*config.overrides, *_only(each)])
    load_config(config.recipe, [*config.overrides, *config.mixed_overrides])
    return recipe


def _do(
    link: Link,
    config: DistillConfig,
    root: Path,
    done: Lines,
    run: Callable[[Sequence[str]], int],
) -> int:
    began = time.time()
    if link.command:
        if status := run(link.command):
            return status
    else:
        sampled = {each.name: _sampled(root, each.name) for each in config.specialists}
        print("\n".join(select(sampled, config.select, _selected(root))), flush=True)
    took = round(time.time() - began, 3)
    done.add({"name": link.name, "command": str(link), "seconds": took, "ended": time.time()})
    return 0


def _keel(words: Sequence[str]) -> int:
    """The exit status of a command, run in a process of its own."""
    command = [sys.executable, "-m", "keel.trainer.cli", *words]
    with subprocess.Popen(command) as process, _passed_on(process):
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A signal is the command's to answer: it saves what it has, and ends. Ctrl-C reaches it from
    the terminal, which sends it to both."""

    def pass_on(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT or not sys.stdin.isatty():
            process.send_signal(number)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _only(each: SpecialistConfig) -> list[str]:
    return [*each.overrides, f"data.only={json.dumps(list(each.sources))}"]


def _model(recipe: Config) -> list[str]:
    """The distilled model starts where the specialists did."""
    knobs = flatten_config(recipe).items()
    return [f"{knob}={json.dumps(value)}" for knob, value in knobs if knob.startswith("model.")]


def _sampled(root: Path, specialist: str) -> Path:
    return root / "samples" / specialist


def _evaluation(root: Path, stage: str) -> Path:
    return root / "eval" / stage


def _selected(root: Path) -> Path:
    return root / "distilled.jsonl"


def _results(root: Path, stage: str) -> Mapping[str, Any]:
    path = _evaluation(root, stage) / "results.json"
    if not path.exists():
        return {}
    results: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return next(iter(results.values()))


def _cell(of: Mapping[str, Any] | None) -> str:
    if of is None:
        return ""
    low, high = of["pass@1_interval"]
    return f"{of['pass@1']:.3f} ({low:.3f}–{high:.3f})"
