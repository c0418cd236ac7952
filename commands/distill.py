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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

from keel.commands.recipes.named import check_named
from keel.commands.recipes.variants import check_variant
from keel.configs.auto import KNOBS
from keel.configs.distillation import DistillConfig, SpecialistConfig
from keel.configs.dump import as_override
from keel.configs.load import dump_config, load_config, load_recipe, split_overrides
from keel.configs.schema import Config, ConfigError, ConversationsConfig
from keel.configs.sections.model import TINY_MODEL
from keel.configs.work_folder import WorkFolder
from keel.data.distilled import select
from keel.data.results import aligned
from keel.trainer.run.signals import PREEMPTED, PREEMPTION

STAGES = ("specialist", "distilled", "mixed")
LINKS = "links.jsonl"
"""What has been done, in the chain's folder."""
INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A step of the chain."""

    name: str
    command: tuple[str, ...] = ()
    """Of `keel`, with its arguments; empty: the selection, which is made here."""
    result: Path
    """There once it is done, and not before."""
    depends: str = ""
    """What it depends on that its command does not say."""

    def __str__(self) -> str:
        return " ".join([shlex.join(["keel", *self.command]) if self.command else "", self.depends])


def chain(config: DistillConfig) -> list[Link]:
    """All links, in order."""
    root = Path(config.dir).expanduser()
    # All sources in every link: what any of them holds out is then learned in none, and the
    # tiny model's cold start teaches all specialists the same.
    base = [config.recipe, *_base(config)]
    links: list[Link] = []

    def add(name: str, result: Path, *words: str) -> None:
        links.append(Link(name=name, command=words, result=result))

    def evaluated(stage: str, words: Sequence[str]) -> None:
        out = _evaluation(root, stage)
        knobs = (f"eval.samples={config.eval_samples}", f"eval.dir={_path(out)}")
        add(f"evaluate {stage}", out / "results.json", "eval", *base, *words, *knobs)

    for each in config.specialists:
        folder = root / "specialists" / each.name
        words = [*_own(each), f"run.dir={_path(folder)}"]
        add(f"train {each.name}", folder / "model", "train", *base, *words)
        # From its model folder, so that engines alone are started.
        words = [*_own(each), *_of(folder / "model", root, each.name)]
        out = _sampled(root, each.name)
        knobs = (f"eval.samples={config.samples}", f"eval.size={config.prompts}")
        add(
            f"sample {each.name}",
            out / "results.json",
            *("eval", *base, *words, "eval.prompts=train", *knobs, f"eval.dir={_path(out)}"),
        )
        # Where it is at home: what it holds out is the same without the others.
        evaluated(f"specialist-{each.name}", [*words, f"data.only={json.dumps(each.sources)}"])
    links.append(
        Link(name="select", result=_selected(root), depends=json.dumps(asdict(config.select)))
    )
    distilled = root / "distilled" / "model"
    links.append(
        Link(
            name="distill",
            command=("sft", str(_lessons(root))),
            result=distilled,
            depends=json.dumps([config.sft, *config.sft_overrides]),
        )
    )
    evaluated("distilled", _of(distilled, root, "distilled"))
    paths = (f"model.path={_path(distilled)}", f"run.dir={_path(root / 'mixed')}")
    words = [*config.mixed_overrides, *paths]
    add("mix", root / "mixed" / "model", "train", *base, *words)
    evaluated("mixed", [*config.mixed_overrides, *_of(root / "mixed" / "model", root, "mixed")])
    return links


def distill(config: DistillConfig, run: Callable[[Sequence[str]], int] | None = None) -> int:
    """Runs what has not been done. Returns the exit status: of a link that failed, or as `keel
    train` has it where a signal stopped the chain. run: a command of `keel`.

    Raises ConfigError before anything is run, for what the recipe of a link says wrong, and for
    what one that has yet to run lacks, be it the last.
    """
    lessons, left = _checked(config)
    links, root = chain(config), Path(config.dir).expanduser()
    _check_waiting(links, lessons)
    with WorkFolder(root, "dir", "distillation") as folder, Commands() as commands:
        done = folder.lines(LINKS)
        known = {str(line["name"]): str(line["command"]) for line in done.read()}
        for link in links:
            if known.get(link.name, str(link)) != str(link):
                raise folder.error(
                    f"{link.name} was done with other settings:\n  {known[link.name]}\n  {link}\n"
                    "Choose another dir, or set these back to go on with it"
                )
        folder.write(_lessons(root).name, dump_config(lessons, left))
        for number, link in enumerate(links, start=1):
            if link.name in known:
                continue
            print(f"{number} of {len(links)}, {link.name}: {link}", flush=True)
            began = time.monotonic()
            if not link.command:
                sampled = {each.name: _sampled(root, each.name) for each in config.specialists}
                print("\n".join(select(sampled, config.select, link.result)), flush=True)
            elif not link.result.exists():  # else it was done, and nobody could write that down
                status = (run or commands.run)(link.command)
                if status or not link.result.exists():
                    print(f"{link.name} is not done; the same command resumes it")
                    return status or commands.status or INTERRUPTED
            took = round(time.monotonic() - began, 3)
            done.add({"name": link.name, "command": str(link), "seconds": took})
            if commands.status:
                return commands.status
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
            rows.append([source, *cells])
    return aligned(rows)


def _checked(config: DistillConfig) -> tuple[Config, frozenset[str]]:
    """What `keel sft` is to run, and what of it the hardware decides. Raises ConfigError for any
    link."""
    recipe = load_config(config.recipe, config.overrides)
    sources = {source.name: source for source in recipe.data.sources}
    for each in config.specialists:
        for name in each.sources:
            knob = f"specialists[{each.name}].sources"
            if name not in sources:
                raise ConfigError(
                    f"{knob}: {config.recipe} has no source {name!r}; it has {', '.join(sources)}"
                )
            if not sources[name].holdout:
                raise ConfigError(
                    f"{knob}: {name} has no holdout in {config.recipe}: without one nobody could "
                    "say how well it was taught"
                )
    base = _base(config)
    own = [
        load_config(config.recipe, [*base, *_own(each)]).max_context for each in config.specialists
    ]
    load_config(config.recipe, [*base, *config.mixed_overrides])
    recipe = load_config(config.recipe, base)
    given, left = load_recipe(config.sft, config.sft_overrides)
    small = given.model.path == TINY_MODEL != recipe.model.path
    own_knobs = split_overrides(config.sft_overrides)
    if small and not any(each.startswith("trainer.lr=") for each in own_knobs):
        raise ConfigError(
            f"sft = {config.sft!r}: its trainer.lr = {given.trainer.lr:g} is for the tiny "
            f"model, and the model here is {recipe.model.path}. Say one: sft_overrides: "
            "[trainer.lr=1e-5], or name a recipe of your own in sft"
        )
    root = Path(config.dir).expanduser()
    source = ConversationsConfig(
        name="distilled",
        source="trajectories",
        path=str(_selected(root).absolute()),
        least_reward=config.select.least,
    )
    context = max(given.sft.max_context_tokens, recipe.max_context, *own)
    # The layout is the supervised recipe's, of its engines too: the other has one for RL.
    engines = {
        name: getattr(given.rollout, name)
        for section, _, name in (knob.partition(".") for knob in KNOBS)
        if section == "rollout"
    }
    return (
        replace(
            recipe,
            run=replace(given.run, dir=str(root / "distilled"), seed=recipe.run.seed),
            rollout=replace(recipe.rollout, **engines),
            trainer=given.trainer,
            sft=replace(given.sft, sources=(source,), max_context_tokens=context),
        ),
        left,
    )


def _check_waiting(links: Sequence[Link], lessons: Config) -> None:
    """Raises ConfigError for what a link lacks that is not done, and no other will have made."""
    made = {link.result.absolute() for link in links}
    for link in links:
        if not link.command or link.result.exists():
            continue
        command, recipe, *overrides = link.command
        config = lessons if command == "sft" else load_config(recipe, overrides)
        try:
            if command != "eval":
                check_named(config, command, made)
            for variant in config.eval.each_variant if command == "eval" else ():
                check_variant(config, variant)
        except ConfigError as error:
            raise ConfigError(f"{link.name}: {error}") from error


class Commands:
    """Commands of `keel`, one after the other, each in a process of its own. While open, a signal
    is the running command's to answer: it saves what it has, and ends."""

    def __init__(self) -> None:
        self.status = 0
        """Exit status that a signal asks for; 0: none has come."""
        self.start = [sys.executable, "-m", "keel.commands.cli"]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, *PREEMPTION)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, words: Sequence[str]) -> int:
        """Its exit status. Its own waits have deadlines; this one has none besides."""
        with subprocess.Popen([*self.start, *words]) as self._process:
            status = self._process.wait()
        self._process = None
        return status if status >= 0 else 128 - status

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.status = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        # The terminal sends Ctrl-C to both.
        if self._process is not None and (number != signal.SIGINT or not sys.stdin.isatty()):
            self._process.send_signal(number)


def _base(config: DistillConfig) -> list[str]:
    """Overrides of every link."""
    taught = [name for each in config.specialists for name in each.sources]
    return [*config.overrides, f"data.only={json.dumps(taught)}"]


def _own(each: SpecialistConfig) -> list[str]:
    return [*each.overrides, f"data.train_on={json.dumps(list(each.sources))}"]


def _of(model: Path, root: Path, name: str) -> list[str]:
    """To measure a model in a run folder of its own, in which nothing is trained."""
    return [f"model.path={_path(model)}", f"run.dir={_path(root / 'eval' / 'runs' / name)}"]


def _path(path: Path) -> str:
    return as_override(str(path))


def _lessons(root: Path) -> Path:
    return root / "lessons.yaml"


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
        return "–"
    low, high = of["pass@1_interval"]
    return f"{of['pass@1']:.3f} ({low:.3f}–{high:.3f})"
