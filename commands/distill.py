"""`keel distill`: train specialists, select their completions, distill them into one model, run
mixed RL, and evaluate.

Each stage is a Keel command with its own process and folder, and can be resumed separately. This
module runs the stages in order, records the finished ones and reports the results.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

from keel.commands.preflight import check_quickly
from keel.configs.distillation import DistillConfig, SelectConfig, SpecialistConfig
from keel.configs.dump import as_override, dump_config
from keel.configs.load import load_config, load_recipe
from keel.configs.paths import write_whole
from keel.configs.schema import (
    LAYOUT_KNOBS,
    TINY_MODEL,
    Config,
    ConfigError,
    ConversationsConfig,
    LengthConfig,
)
from keel.configs.work_folder import WorkFolder
from keel.data.eval_store import read_evaluation, to_trajectory_record
from keel.data.results import align_columns
from keel.rl.summary import FAIL
from keel.rl.supervisor import PREEMPTION
from keel.trainer.run.journal import cost_rows, costs_of
from keel.trainer.run.signals import INTERRUPTED, PREEMPTED

_FINISHED_STAGES = "links.jsonl"
"""File that records the finished stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    name: str
    command: tuple[str, ...] = ()
    """Arguments of the `keel` command. Empty for the selection stage, which runs in this
    process."""
    result: Path
    """File or folder that exists once the stage is finished."""
    depends: str = ""
    """Settings other than the command that affect the result."""

    def __str__(self) -> str:
        return " ".join([shlex.join(["keel", *self.command]) if self.command else "", self.depends])


def _stages(config: DistillConfig) -> list[_Stage]:
    root = Path(config.dir).expanduser()
    # Every stage has all sources, so that no stage trains on held-out prompts of another, and the
    # tiny model's cold start is the same for all specialists.
    base = [config.recipe, *_base(config)]
    stages: list[_Stage] = []

    def add(name: str, result: Path, *words: str, depends: str = "") -> None:
        stages.append(_Stage(name=name, command=words, result=result, depends=depends))

    def exported(model: Path, name: str) -> list[str]:  # which needs engines only
        return [f"model.path={_path(model)}", f"run.dir={_path(root / 'eval' / 'runs' / name)}"]

    def evaluated(stage: str, words: Sequence[str]) -> None:
        out = root / "eval" / stage
        knobs = (f"eval.samples={config.eval_samples}", f"eval.dir={_path(out)}")
        add(f"evaluate {stage}", out / "results.json", "eval", *base, *words, *knobs)

    for each in config.specialists:
        folder, out = root / "specialists" / each.name, root / "samples" / each.name
        run_dir = f"run.dir={_path(folder)}"
        add(f"train {each.name}", folder / "model", "train", *base, *_own(each), run_dir)
        words = [*_own(each), *exported(folder / "model", each.name)]
        if config.method == "sft":
            knobs = [f"eval.samples={config.samples}", f"eval.size={config.prompts}"]
            knobs = ["eval.prompts=train", *knobs, f"eval.dir={_path(out)}"]
            add(f"sample {each.name}", out / "results.json", "eval", *base, *words, *knobs)
        # Only its sources; their held-out prompts are the same.
        evaluated(f"specialist-{each.name}", [*words, f"data.only={json.dumps(each.sources)}"])
    distilled, mixed = root / "distilled" / "model", root / "mixed"
    lessons = str(root / "lessons.yaml")
    if config.method == "on_policy":
        depends = json.dumps(config.on_policy_overrides)
        add("distill", distilled, "train", lessons, depends=depends)
    else:
        add("select", root / "distilled.jsonl", depends=json.dumps(asdict(config.select)))
        depends = json.dumps([config.sft, *config.sft_overrides])
        add("distill", distilled, "sft", lessons, depends=depends)
    evaluated("distilled", exported(distilled, "distilled"))
    words = [*config.mixed_overrides, f"model.path={_path(distilled)}", f"run.dir={_path(mixed)}"]
    add("mix", mixed / "model", "train", *base, *words)
    evaluated("mixed", [*config.mixed_overrides, *exported(mixed / "model", "mixed")])
    return stages


def distill(config: DistillConfig, run: Callable[[Sequence[str]], int] | None = None) -> int:
    """Run the unfinished stages and return an exit status. Commands are executed by `run` if given,
    or else each in its own process.

    Stops at the first stage that fails or is interrupted by a signal. Raises ConfigError before
    running anything if the recipe for an unfinished stage is invalid.
    """
    lessons, auto = _checked(config)
    stages, root = _stages(config), Path(config.dir).expanduser()
    _check_waiting(stages, lessons)
    with WorkFolder(root, "dir", "distillation") as folder, _Commands() as commands:
        finished = folder.records(_FINISHED_STAGES, lambda line: (line["name"], line["command"]))
        known: dict[str, str] = dict(finished)
        for stage in stages:
            if known.get(stage.name, str(stage)) != str(stage):
                raise folder.error(
                    f"{stage.name} was run with other settings:\n  {known[stage.name]}\n  {stage}\n"
                    "Choose another dir, or restore these to resume it"
                )
        folder.write("lessons.yaml", dump_config(lessons, auto))
        for number, stage in enumerate(stages, start=1):
            if stage.name in known:
                continue
            print(f"{number} of {len(stages)}, {stage.name}: {stage}", flush=True)
            began = time.monotonic()
            if not stage.command:
                sampled = {each.name: root / "samples" / each.name for each in config.specialists}
                print("\n".join(_select(sampled, config.select, stage.result)), flush=True)
            elif not stage.result.exists():  # else it finished before it was recorded
                status = (run or commands.run)(stage.command)
                if status or not stage.result.exists():
                    print(f"{stage.name} did not finish; rerun the same command to resume it")
                    return status or commands.status or INTERRUPTED
            took = round(time.monotonic() - began, 3)
            record = {"name": stage.name, "command": str(stage), "seconds": took}
            folder.append(_FINISHED_STAGES, record)
            if commands.status:
                return commands.status
        lines = _report(config, root)
        folder.write("report.md", "\n".join(lines) + "\n")
        print("\n".join(lines))
        print(f"model           {root / 'mixed' / 'model'}\nreport          {root / 'report.md'}")
    return 0


def _report(config: DistillConfig, root: Path) -> list[str]:
    def cell(stage: str, source: str) -> str:
        path = root / "eval" / stage / "results.json"
        if not path.exists():
            return "–"
        sets = next(iter(json.loads(path.read_text(encoding="utf-8"))["results"].values()))
        low, high = sets[source]["pass@1_interval"]
        return f"{sets[source]['pass@1']:.3f} ({low:.3f}–{high:.3f})"

    rows = [["", "specialist", "distilled", "mixed"]]
    for each in config.specialists:
        stages = (f"specialist-{each.name}", "distilled", "mixed")
        rows += [[source, *(cell(stage, source) for stage in stages)] for source in each.sources]
    stages = [*(f"specialists/{each.name}" for each in config.specialists), "distilled", "mixed"]
    return [
        *align_columns(rows),
        "",
        *align_columns(cost_rows({at: costs_of(root / at) for at in stages})),
    ]


def _checked(config: DistillConfig) -> tuple[Config, frozenset[str]]:
    recipe = load_config(config.recipe, config.overrides)
    holdouts = {source.name: source.holdout for source in recipe.data.sources}
    for each in config.specialists:
        for name in each.sources:
            problem = "" if holdouts.get(name) else f"{name} has no holdout, which evaluation needs"
            if name not in holdouts:
                problem = f"no source {name!r}; it has {', '.join(holdouts)}"
            if problem:
                raise ConfigError(f"specialists[{each.name}].sources: {config.recipe}: {problem}")
    base = _base(config)
    contexts = [
        load_config(config.recipe, [*base, *_own(each)]).max_context for each in config.specialists
    ]
    load_config(config.recipe, [*base, *config.mixed_overrides])
    if config.method == "on_policy":
        return _on_policy(config, base)
    recipe = load_config(config.recipe, base)
    sft, auto = load_recipe(config.sft, config.sft_overrides)
    is_tiny = sft.model.path == TINY_MODEL != recipe.model.path
    rates = ("trainer.lr=", "trainer={")
    if is_tiny and not any(each.startswith(rates) for each in config.sft_overrides):
        raise ConfigError(
            f"sft = {config.sft!r}: its trainer.lr = {sft.trainer.lr:g} is for the tiny "
            f"model, not for {recipe.model.path}. Set sft_overrides: [trainer.lr=1e-5], or name "
            "another recipe in sft"
        )
    root = Path(config.dir).expanduser()
    source = ConversationsConfig(
        name="distilled",
        source="trajectories",
        path=str((root / "distilled.jsonl").absolute()),
        least_reward=config.select.least,
    )
    context = max(sft.sft.max_context_tokens, recipe.max_context, *contexts)
    # The layout of the supervised recipe, including its engines.
    knobs = [knob.removeprefix("rollout.") for knob in LAYOUT_KNOBS if knob.startswith("rollout.")]
    engines = {name: getattr(sft.rollout, name) for name in knobs}
    lessons = replace(
        recipe,
        run=replace(sft.run, dir=str(root / "distilled"), seed=recipe.run.seed),
        rollout=replace(recipe.rollout, **engines),
        trainer=sft.trainer,
        sft=replace(sft.sft, sources=(source,), max_context_tokens=context),
    )
    return lessons, auto


def _on_policy(config: DistillConfig, base: Sequence[str]) -> tuple[Config, frozenset[str]]:
    recipe, auto = load_recipe(config.recipe, [*base, *config.on_policy_overrides])
    root = Path(config.dir).expanduser()
    teachers = {
        name: str(root / "specialists" / each.name / "model")
        for each in config.specialists
        for name in each.sources
    }
    sources = tuple(
        replace(
            source,
            teacher=teachers[source.name],
            kl_coef=1.0,
            rewards=dict.fromkeys(source.rewards, 0.0),
            length=LengthConfig(),
        )
        for source in recipe.data.sources
        if source.name in teachers
    )
    run = replace(recipe.run, dir=str(root / "distilled"))
    algorithm = replace(recipe.algorithm, filter_groups="none")  # equal rewards teach, too
    data = replace(recipe.data, sources=sources)
    return replace(recipe, run=run, algorithm=algorithm, data=data), auto


def _check_waiting(stages: Sequence[_Stage], lessons: Config) -> None:
    made = {stage.result.absolute() for stage in stages}
    for stage in stages:
        if not stage.command or stage.result.exists():
            continue
        command, recipe, *overrides = stage.command
        config = lessons if stage.name == "distill" else load_config(recipe, overrides)
        try:
            if command != "eval":
                check_quickly(config, command, made)
            for variant in config.eval.each_variant if command == "eval" else ():
                config.check_variant(variant)
        except ConfigError as error:
            raise ConfigError(f"{stage.name}: {error}") from error


def _base(config: DistillConfig) -> list[str]:
    taught = [name for each in config.specialists for name in each.sources]
    return [*config.overrides, f"data.only={json.dumps(taught)}"]


def _own(each: SpecialistConfig) -> list[str]:
    return [*each.overrides, f"data.train_on={json.dumps(list(each.sources))}"]


def _path(path: Path) -> str:
    return as_override(str(path))


class _Commands:
    def __init__(self) -> None:
        self.status = 0
        """Exit status after a signal, or 0 if none has arrived."""
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
        with subprocess.Popen([*self.start, *words]) as self._process:
            status = self._process.wait()
        self._process = None
        return status if status >= 0 else 128 - status

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.status = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        # The terminal sends Ctrl-C to both.
        if self._process is not None and (number != signal.SIGINT or not sys.stdin.isatty()):
            self._process.send_signal(number)


_Kind = tuple[str, bool]
"""The kind of a completion: its domain, and whether the model thinks."""
_REASONS = ("not scored", "truncated", "wrong", "other parts", "duplicate", "same prompt")
"""Reasons for rejecting a completion, in the order in which they are checked."""
_BALANCE = "balance"


def _select(sampled: Mapping[str, Path], config: SelectConfig, out: Path) -> list[str]:
    """Write the selected completions to `out`, one per line, and return a report for the user.
    `sampled` maps each specialist to its `keel eval` folder for the training prompts.

    Raises ConfigError if a folder can't be read, if a reward part named in the config never occurs,
    or if no completions are selected.
    """
    least, most = config.least_parts, config.most_parts
    parts: set[str] = set()
    seen: set[str] = set()
    of_prompt = Counter[str]()
    counts: defaultdict[_Kind, Counter[str]] = defaultdict(Counter)
    selected: list[tuple[int, _Kind, Mapping[str, Any]]] = []
    for specialist, folder in sampled.items():
        for request in read_evaluation(folder):
            for sample in request.samples:
                line = {**to_trajectory_record(sample), "source": request.source}
                of, kind = line["parts"], (request.domain, bool(line["thinking"]))
                content = json.dumps([line["thinking"], line["messages"]], sort_keys=True)
                parts.update(of)
                reasons = (
                    sample["error"],
                    sample["finish_reason"] != "stop",
                    sample["correct"] < config.least - FAIL,
                    any(of.get(n, least[n]) < least[n] for n in least)
                    or any(of.get(n, most[n]) > most[n] for n in most),
                    content in seen,
                    0 < config.most_per_prompt <= of_prompt[request.id],
                )
                why = next(
                    (why for why, applies in zip(_REASONS, reasons, strict=True) if applies), ""
                )
                counts[kind][why] += 1
                if why in ("", "same prompt"):
                    seen.add(content)
                if not why:
                    selected.append(
                        (of_prompt[request.id], kind, {**line, "specialist": specialist})
                    )
                    of_prompt[request.id] += 1
    for name in {**least, **most}:
        if name not in parts:
            known = ", ".join(sorted(parts - {"correct"})) or "none"
            raise ConfigError(
                f"select: no completion has a part {name!r} (least_parts, most_parts); they have "
                f"{known}"
            )
    sizes = Counter(kind for _, kind, _ in selected)
    if config.balance and sizes:
        # Each prompt's first completions are preferred.
        limit, taken = int(config.balance * min(sizes.values())), Counter[_Kind]()
        candidates, selected = sorted(selected, key=lambda one: one[0]), []
        for place, kind, line in candidates:
            kept = taken[kind] < limit
            taken[kind] += kept
            if kept:
                selected.append((place, kind, line))
            else:
                counts[kind][_BALANCE] += 1
                counts[kind][""] -= 1
    rows = [["", "sampled", *_REASONS, _BALANCE, "selected"]]
    for (domain, thinking), of in counts.items():
        numbers = [of.total(), *(of[why] for why in (*_REASONS, _BALANCE, ""))]
        name = f"{domain}, {'thinking' if thinking else 'not thinking'}"
        rows.append([name, *(f"{number:,}" for number in numbers)])
    table = "\n".join(align_columns(rows))
    if not selected:
        raise ConfigError(f"no completion of the specialists was selected:\n{table}")
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for _, _, line in selected]
    write_whole(out, "".join(lines))
    return [table, f"selected        {out}"]
