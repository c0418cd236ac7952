"""`keel new`: fill a commented recipe from flags, or from a few questions, and check it.

The hardware's knobs (engines, ranks, memory shares, ZeRO) stay open. Nothing here loads torch, so
that questions come at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import try_to_load_from_cache

from keel.configs.load import load_config
from keel.configs.paths import data_path
from keel.configs.schema import ConfigError
from keel.configs.sections.model import TINY_MODEL, TinyModelConfig
from keel.model.hub import check_path, hub_answers, is_hub_name

T = TypeVar("T")
TEMPLATE = """\
# {title}
#   keel check {file}; keel train {file}; keel knobs NAME
run:
  dir: {dir}  # metrics, checkpoints, trained model
  steps: {steps}
  eval_every: {eval_every}  # steps between evaluations
  device: {device}
  gpus_per_node: {gpus_per_node}
  nodes: {nodes}
  gpu_gib: {gpu_gib}  # memory of each, for `keel check` elsewhere
model: {model}  # {about_model}
data:
  max_prompt_tokens: {max_prompt_tokens}  # {about_prompts}
  long_prompts: {long_prompts}  # leave longer ones out, and count them
  sources:
{sources}
rollout:
  engines: {engines}
  sampling: {sampling}
algorithm: {algorithm}  # {completions} completions a step
trainer: {trainer}
"""
"""The recipe. A line whose value is None is left out, and so is an empty comment."""
COMMENTS_AT = 33
SMALL = "Qwen/Qwen3-0.6B"
TASK, TASK_PARAMS = "spell_backward", {"min_word_len": 4, "max_word_len": 7}
"""Default task of the tiny model."""
GIB = 80.0
"""Assumed memory of a GPU that is not here."""
ON_GPU = {
    "steps": 200,
    "heldout": 200,
    "tokens": {True: 4096, False: 1024},
    "sampling": {"top_p": 0.95, "top_k": 512},
    "algorithm": {"prompts_per_step": 32, "group_size": 8},
    "trainer": {"lr": 1e-6},
}
ON_CPU = {
    "steps": 50,
    "heldout": 16,
    "tokens": {True: 256, False: 128},
    "sampling": {},
    "algorithm": {"prompts_per_step": 4, "group_size": 8},
    "trainer": {"lr": 5e-6, "micro_batch_tokens": 2048},
}
"""Defaults with which the first step of a 135 M parameter model ends within two minutes on two
cores, after a first evaluation. `tokens`: of a completion with thinking, and without."""
OF_TINY = {
    "steps": 200,
    "heldout": 128,
    "tokens": {True: 48, False: 48},
    "sampling": {"top_p": 0.95, "top_k": 64},
    "algorithm": {"prompts_per_step": 16, "group_size": 8},
    "trainer": {"lr": 2e-4},
}
OPENING = 3072
"""Tokens of an episode before its last turn, tools included."""
BESIDE = 0.2
"""Weight of a reward function beside a verdict."""
SMI_S = 10.0
STOPPED = 130


def new(arguments: argparse.Namespace, check: Callable[[str], int]) -> int:
    """Write the recipe and check it. check: `keel check` of a file, whose exit status is returned.

    Raises ConfigError if the file exists, or something needed is neither given nor can be asked.
    """
    ask = Questions(terminal=not arguments.yes and sys.stdin.isatty() and sys.stdout.isatty())
    if arguments.file:
        free(arguments.file)
    try:
        path, text = filled(arguments, ask)
    except (EOFError, KeyboardInterrupt):
        print("\nkeel new: stopped; nothing was written", file=sys.stderr)
        return STOPPED
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    try:
        load_config(path)
    except ConfigError:  # flags that do not go together
        path.unlink()
        raise
    print(f"wrote {path}:\n\n{text}", flush=True)
    status = check(str(path))
    if status:
        again = f"keel check {shlex.quote(str(path))}"
        print(f"\n{path} stays as it is. Change it, and: {again}", file=sys.stderr)
    else:
        print(f"\nnext: keel train {shlex.quote(str(path))}")
    return status


class Questions:
    """Asks on a terminal, again after a reply that cannot be used; elsewhere takes the default."""

    def __init__(self, *, terminal: bool) -> None:
        self.terminal = terminal

    def __call__(self, question: str, default: str, read: Callable[[str], T]) -> T:
        """read: makes a value of the reply. Raises ValueError for one that cannot be used, which
        is printed before the question is asked again."""
        while self.terminal:
            try:
                return read(input(f"{question} [{default}] ").strip() or default)
            except ValueError as error:
                print(f"  {error}")
        return read(default)


def filled(given: argparse.Namespace, ask: Questions) -> tuple[Path, str]:
    """Return the file to write and the recipe, with what is not given asked for."""
    here, gib = gpus_here()
    gpus = given.gpus
    if gpus is None:
        gpus = ask("GPUs (0: none)", f"{here}", at_least(0))
    if gpus < 0 or given.nodes < 1:
        raise ConfigError(f"--gpus {gpus} --nodes {given.nodes}: must be at least 0 and 1")
    size = given.gpu_gib
    if gpus and not size and not gib:
        size = ask("Memory of a GPU, in GiB", f"{GIB:g}", positive)
    model = given.model and checked_model(given.model)
    if not model:
        words = "Model: a folder, a name of the hub, or tiny"
        model = ask(words, SMALL if gpus else TINY_MODEL, checked_model)
    tiny = model == TINY_MODEL
    defaults = OF_TINY if tiny else ON_GPU if gpus else ON_CPU
    source = asked_source(given, ask, defaults, tiny=tiny)
    think = given.think
    if think is None:
        think = not tiny and ask("Think before answering (y/n)", "n", yes_no)
    prompts, tokens = lengths(given, ask, model, source.pop("max_prompt_tokens"), defaults, think)
    steps = given.steps
    if steps is None:
        steps = ask("Steps", f"{defaults['steps']}", at_least(1))
    about = "true: think before answering, in more tokens"
    thinking = {"thinking": None if tiny else think, "about_thinking": about}
    sources = [{**source, **thinking}]
    if given.eval:
        sources[0]["holdout"] = 0
        sources.append(evaluation(given.eval, sources[0], defaults, cpu=not gpus))
    path = Path(given.file or ask("File to write", f"{source['name']}.yaml", free))
    all_gpus = gpus * given.nodes
    machine = f"{all_gpus} GPU{'s' * (all_gpus > 1)}" if all_gpus else "this machine's CPU"
    called = "the tiny model" if tiny else model.rstrip("/").rpartition("/")[2]
    title = f"{called[:1].upper()}{called[1:]} learns {source['learns']}, on {machine}."
    batch = defaults["algorithm"]
    values = {
        "title": " ".join(title.split()),  # a path may have anything in it
        "file": " ".join(shlex.quote(str(path)).split()),
        "dir": scalar(f"runs/{source['name']}"),
        "steps": steps,
        "eval_every": max(1, steps // 10),
        "device": None if gpus else "cpu",
        "gpus_per_node": gpus or None,
        "nodes": given.nodes if given.nodes > 1 and gpus else None,
        "gpu_gib": f"{size:g}" if size and gpus else None,
        "model": flow({"path": model, **({"dtype": "float32"} if tiny else {})}),
        "about_model": "built on the spot" if tiny else "a folder, or a name of the hub",
        "max_prompt_tokens": prompts,
        "about_prompts": source["about_prompts"],
        "long_prompts": "drop" if source["drop_long"] else None,
        "sources": "\n".join(map(source_lines, sources)),
        "engines": 2 if tiny else None,
        "sampling": flow({**defaults["sampling"], "max_tokens": tokens}),
        "algorithm": flow(batch),
        "completions": batch["prompts_per_step"] * batch["group_size"],
        "trainer": flow(defaults["trainer"]),
    }
    return path, text_of(TEMPLATE, values)


def text_of(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template, leave out lines without a value, and align comments."""
    lines: list[str] = []
    for line in template.splitlines():
        knob, _, comment = line.partition("  # ")
        if any(values[name] is None for name in re.findall(r"{(\w+)}", knob)):
            continue
        knob, comment = knob.format_map(values), comment.format_map(values)
        lines.append(f"{knob:<{COMMENTS_AT}} # {comment}" if comment else knob)
    return "\n".join(lines) + "\n"


KNOBS = (
    *("name", "source", "task", "params", "path", "subset", "columns", "answer_after", "template"),
    *("environment", "size", "holdout", "rewards", "thinking"),
)
"""Knobs of a source, in the order in which they are written."""


def source_lines(source: Mapping[str, Any]) -> str:
    """The lines of one of `data.sources`."""
    values = {knob: flow(source[knob]) for knob in KNOBS if source.get(knob) not in (None, "", {})}
    notes = {knob: source.get(f"about_{knob}", "") for knob in KNOBS}
    template = "\n".join(f"      {knob}: {{{knob}}}  # {notes[knob]}" for knob in values)
    escaped = re.sub(r"\\boxed{}", r"\\boxed{{}}", template)
    return "    - " + text_of(escaped, values).rstrip("\n")[6:]


def lengths(
    given: argparse.Namespace,
    ask: Questions,
    model: str,
    prompts: int,
    defaults: Mapping[str, Any],
    think: bool,
) -> tuple[int, int]:
    """Return the limits of prompts and completions, in tokens, which share the model's context."""
    context, tokens = context_of(model), given.max_tokens
    if model == TINY_MODEL:  # completions are short, and so is the context
        prompts = max(1, min(prompts, context - (tokens or defaults["tokens"][think])))
    elif context:  # the prompts' length is a guess, and half of a short context is enough
        prompts = max(1, min(prompts, max(context // 2, context - tokens if tokens else 0)))
    room = context - prompts if context else 0

    def fits(reply: str | int) -> int:
        count = at_least(1)(str(reply))
        if context and count > room:
            raise ConfigError(
                f"--max-tokens {count}: {model} has a context of {context:,} tokens, and prompts "
                f"take up to {prompts:,} of it; at most {max(1, room):,}"
            )
        return count

    if tokens is not None:
        return prompts, fits(tokens)
    likely = min(defaults["tokens"][think], max(1, room or prompts + defaults["tokens"][think]))
    return prompts, ask("Longest completion, in tokens", f"{likely}", fits)


def asked_source(
    given: argparse.Namespace, ask: Questions, defaults: Mapping[str, Any], *, tiny: bool
) -> dict[str, Any]:
    """Knobs of the source, its length of prompts, and what the recipe says about them."""
    data, task, environment = given.data, given.task, given.environment
    only = "the tiny model has been taught a few tasks of reasoning_gym and nothing else. Name "
    if tiny and environment:
        raise ConfigError(f"--environment {environment}: {only}a model (--model)")
    if data and task:
        raise ConfigError(f"--data {data} and --task {task}: keep one")
    if tiny and data:
        raise ConfigError(f"--data {data}: {only}a model (--model), or a task (--task)")

    def of_any(name: str) -> dict[str, Any]:
        """A task's name, or what has rows."""
        is_task = tiny or (re.fullmatch(r"\w+", name) and not data_path(name).exists())
        return of_task(name, given, defaults) if is_task else of_rows(name, given, ask, defaults)

    if data:
        return of_rows(data, given, ask, defaults)
    if task:
        return of_task(task, given, defaults)
    if environment:
        return of_episodes(environment, given.reward)
    if not ask.terminal and not tiny:
        raise ConfigError(
            "--data is missing: a file, a folder or a dataset of the hub (or --task, a task of "
            "reasoning_gym, or --environment, which makes its own tasks)"
        )
    rows = "" if tiny else "a file, a folder, a dataset of the hub, or "
    return ask(f"Prompts: {rows}a task of reasoning_gym", TASK if tiny else "chain_sum", of_any)


def of_task(task: str, given: argparse.Namespace, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A source of prompts made by reasoning_gym."""
    return {
        "name": task,
        "source": "reasoning_gym",
        "task": task,
        "params": TASK_PARAMS if task == TASK else {},
        "environment": {"target": given.environment} if given.environment else {},
        "size": 4000,
        "about_size": "made from a seed",
        "holdout": min(128, defaults["heldout"]),
        "about_holdout": "never trained on",
        "rewards": reward_weights(given.reward, judged=True) if given.reward else {},
        "about_rewards": "the task's own verifier, and a function of yours: docs/rewards.md",
        "learns": f"{task} of reasoning_gym",
        "max_prompt_tokens": 64 if task == TASK else 512,
        "about_prompts": "",
        "drop_long": False,
    }


def of_episodes(environment: str, reward: str) -> dict[str, Any]:
    """A source whose environment makes its tasks itself."""
    words = re.findall(r"[^\W\d]\w*", environment.removesuffix(".py"))
    return {
        "name": words[-1].lower() if words else "episodes",
        "source": "environment",
        "environment": {"target": environment},
        "size": 2000,
        "about_size": "tasks, made from their numbers",
        "holdout": 64,
        "about_holdout": "never trained on",
        "rewards": reward_weights(reward, judged=True),
        "about_rewards": "the verdict"
        + ", and a function of yours: docs/rewards.md" * bool(reward),
        "learns": f"in {environment}",
        "max_prompt_tokens": OPENING,
        "about_prompts": "with max_tokens, room for all turns",
        "drop_long": False,
    }


def of_rows(
    data: str, given: argparse.Namespace, ask: Questions, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """A source of rows, by what its first rows look like. Raises ConfigError."""
    from keel.data.rows.proposal import JUDGED, propose  # noqa: PLC0415  the hub's client

    columns = {"subset": given.subset, "prompt": given.prompt, "answer": given.answer}
    rows = propose(data, hub_answers=hub_answers, **columns)
    reward, environment = given.reward, given.environment
    if rows.environment and not environment:
        if not ask.terminal:
            raise ConfigError(
                f"--data {data}: has a column `environment`; name what reads it: --environment "
                "module:Class (docs/environments.md)"
            )
        environment = ask("Environment that reads the column `environment`", "module:Class", str)
    if rows.judged == "nothing" and not reward and not environment:
        if not ask.terminal:
            raise ConfigError(
                f"--data {data}: no column looks like an answer; it has {', '.join(rows.names)}. "
                "Name one (--answer COLUMN), or a function of yours (--reward module.function)"
            )
        question = "No column looks like an answer. Reward function"
        reward = ask(question, "my_rewards.reward", str)
    judged = {
        "maths": "answers are compared as mathematics",
        "text": "answers are words here: compared as text",
        "nothing": "",
        **{key: f"judged by the column `{key}`" for key in JUDGED},
    }[rows.judged]
    if reward:
        judged = f"{judged}; a function of yours: docs/rewards.md".removeprefix("; ")
    boxed = rows.judged == "maths" and not rows.boxed and not environment
    count = f"{rows.rows:,} rows" if rows.whole else f"more than {rows.rows:,} rows"
    return {
        "name": name_of(data),
        "source": rows.kind,
        "path": data,
        "subset": given.subset,
        "columns": dict(rows.columns),
        "answer_after": rows.answer_after,
        "template": "boxed" if boxed else "",
        "about_template": "asks for the answer in \\boxed{}",
        "environment": {"target": environment} if environment else {},
        "holdout": min(defaults["heldout"], -(-rows.rows // 10)) if rows.rows > 1 else 0,
        "about_holdout": f"of {count}; never trained on",
        "rewards": reward_weights(reward, judged=rows.judged != "nothing" or bool(environment)),
        "about_rewards": judged,
        "learns": f"from {data}",
        "max_prompt_tokens": max(256, -(-(rows.longest // 2 + 64) // 128) * 128),
        "about_prompts": f"the longest seen has {rows.longest:,} bytes",
        "drop_long": not rows.whole,
    }


def evaluation(
    data: str, source: Mapping[str, Any], defaults: Mapping[str, Any], *, cpu: bool
) -> dict[str, Any]:
    """A source of a file that is held out as a whole and scored like `source`."""
    from keel.data.rows.proposal import propose  # noqa: PLC0415  as above

    rows, name = propose(data, hub_answers=hub_answers), name_of(data)
    few = cpu and rows.rows > defaults["heldout"]
    return {
        **source,
        "name": f"{name}-eval" if name == source["name"] else name,
        "source": rows.kind,
        "task": None,
        "params": {},
        "path": data,
        "subset": "",
        "columns": dict(rows.columns),
        "answer_after": rows.answer_after,
        "size": defaults["heldout"] if few else None,
        "about_size": f"the first of {rows.rows:,} rows: an evaluation takes long on a CPU",
        "holdout": "all",
        "about_holdout": "an evaluation set",
    }


def name_of(data: str) -> str:
    """A source's name, by its file or dataset."""
    return (
        re.sub(r"[^\w-]+", "-", Path(data.rstrip("/")).name.partition(".")[0]).strip("-") or "data"
    )


def reward_weights(reward: str, *, judged: bool) -> dict[str, float]:
    """judged: whether something else says what is right, which the function then stands beside."""
    if reward in ("", "correct"):
        return {"correct": 1.0}
    return {"correct": 1.0, reward: BESIDE} if judged else {reward: 1.0}


def context_of(model: str) -> int:
    """Context of a model in tokens, by its config.json here or in the hub's cache; 0: not known."""
    if model == TINY_MODEL:
        return TinyModelConfig().max_context
    path: object = Path(model, "config.json")
    if not Path(model).is_dir():
        path = try_to_load_from_cache(model, "config.json") if is_hub_name(model) else None
    try:
        config = json.loads(Path(path).read_text("utf-8")) if isinstance(path, str | Path) else {}
        text = config.get("text_config", config)
        return int(text.get("max_position_embeddings") or 0)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0


def gpus_here() -> tuple[int, float]:
    """Number of GPUs that nvidia-smi lists, and the memory of the smallest in GiB."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0, 0.0
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_S)
        sizes = [float(line) / 1024 for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0, 0.0
    return len(sizes), min(sizes, default=0.0)


# How replies are read


def at_least(low: int) -> Callable[[str], int]:
    def read(reply: str) -> int:
        if not reply.isdecimal() or int(reply) < low:
            raise ValueError(f"{reply!r}: must be a whole number, {low} or more")
        return int(reply)

    return read


def positive(reply: str) -> float:
    try:
        number = float(reply)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{reply!r}: must be a number above 0")
    return number


def yes_no(reply: str) -> bool:
    if reply.lower() not in ("y", "yes", "n", "no"):
        raise ValueError(f"{reply!r}: answer y or n")
    return reply.lower().startswith("y")


def checked_model(name: str) -> str:
    if name != TINY_MODEL and not is_hub_name(name):
        check_path(name)
    return name


def free(path: str) -> str:
    """Raises ConfigError for a file that exists already, or a folder that does not."""
    if Path(path).exists():
        raise ConfigError(f"{path}: exists already; name another file, or remove it")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"{path}: no such folder as {Path(path).parent}")
    return path


# How values are written

_PLAIN = re.compile(r"[A-Za-z_~./][\w~./:-]*(?<!:)")
_TAKEN = ("null", "true", "false", "yes", "no", "on", "off", "inf", "nan")


def flow(value: object) -> str:
    """A value on one line, as YAML and OmegaConf read it back."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{scalar(str(k))}: {flow(v)}' for k, v in value.items())}}}"
    if isinstance(value, float) and 0 < value < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return scalar(value) if isinstance(value, str) else json.dumps(value)


def scalar(text: str) -> str:
    """Text, quoted where YAML would read something else."""
    if _PLAIN.fullmatch(text) and text.lower() not in _TAKEN and text != "~":
        return text
    return json.dumps(text.replace("${", "\\${"), ensure_ascii=False)
