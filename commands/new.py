"""`keel new`: write a commented recipe from flags or from the answers to a few questions, and check
it.

Knobs for the hardware layout stay `auto`. Nothing here loads torch, so the first question appears
at once.
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
from dataclasses import dataclass, field
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
  gpu_gib: {gpu_gib}  # memory per GPU, for `keel check` elsewhere
model: {model}  # {about_model}
data:
  max_prompt_tokens: {max_prompt_tokens}  # {about_prompts}
  long_prompts: {long_prompts}  # leave longer ones out, and count them
  sources:
{sources}
rollout:
  engines: {engines}
  sampling: {sampling}
algorithm: {algorithm}  # {completions} completions per step
trainer: {trainer}
"""
"""Template of the recipe. Lines without a value and empty comments are omitted."""
SOURCE_KNOBS = (
    "name source task params path subset columns answer_after template environment size holdout "
    "rewards thinking"
)
COMMENT_COLUMN = 33
SMALL_MODEL = "Qwen/Qwen3-0.6B"
TINY_TASK, TINY_TASK_PARAMS = "spell_backward", {"min_word_len": 4, "max_word_len": 7}
ASSUMED_GIB = 80.0
"""GPU memory in GiB to assume if this machine has no GPU."""
EPISODE_PROMPT_TOKENS = 3072
"""Assumed number of tokens in an episode before its last turn, including tool descriptions and
results."""
EXTRA_REWARD = 0.2
"""Weight for a reward function that is used next to a correctness check."""
STOPPED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    steps: int
    heldout: int
    tokens: int
    thinking_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prompts_per_step: int
    trainer: Mapping[str, Any]


_ON_GPU = _Defaults(
    steps=200,
    heldout=200,
    tokens=1024,
    thinking_tokens=4096,
    sampling={"top_p": 0.95, "top_k": 512},
    prompts_per_step=32,
    trainer={"lr": 1e-6},
)
_ON_CPU = _Defaults(  # a 135 M model takes its first step within two minutes on two cores
    steps=50,
    heldout=16,
    tokens=128,
    thinking_tokens=256,
    prompts_per_step=4,
    trainer={"lr": 5e-6, "micro_batch_tokens": 2048},
)
_OF_TINY = _Defaults(
    steps=200,
    heldout=128,
    tokens=48,
    thinking_tokens=48,
    sampling={"top_p": 0.95, "top_k": 64},
    prompts_per_step=16,
    trainer={"lr": 2e-4},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """One entry in `data.sources`: its knobs, their comments, and its YAML text."""

    knobs: Mapping[str, Any]
    comments: Mapping[str, str]
    learns: str
    prompt_tokens: int
    about_prompts: str = ""
    drop_long: bool = False


def new(arguments: argparse.Namespace, check: Callable[[str], int]) -> int:
    """Write a recipe, run `keel check` on it, and return the exit status of the check. Raises
    ConfigError if the file exists already, or if a required value is missing and there is no
    terminal to ask on."""
    ask = Questions(terminal=not arguments.yes and sys.stdin.isatty() and sys.stdout.isatty())
    if arguments.file:
        _free(arguments.file)
    try:
        path, text = _filled(arguments, ask)
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
    except ConfigError:  # conflicting flags
        path.unlink()
        raise
    print(f"wrote {path}:\n\n{text}", flush=True)
    status, name = check(str(path)), shlex.quote(str(path))
    if status:
        print(f"\nEdit {path}, then run: keel check {name}", file=sys.stderr)
    else:
        print(f"\nnext: keel train {name}")
    return status


class Questions:
    """Asks questions on a terminal until each reply is valid. Without a terminal it uses the
    defaults."""

    def __init__(self, *, terminal: bool) -> None:
        self.terminal = terminal

    def __call__(self, question: str, default: object, read: Callable[[str], T]) -> T:
        """Ask one question and return the converted reply. `read` converts a reply, or raises
        ValueError with the reason to ask again."""
        while self.terminal:
            try:
                return read(input(f"{question} [{default}] ").strip() or str(default))
            except ValueError as error:
                print(f"  {error}")
        return read(str(default))


def _filled(flags: argparse.Namespace, ask: Questions) -> tuple[Path, str]:
    """Fill in the template and return the recipe with the file to write it to."""
    gpus_found, gib_found = gpus_here()
    gpus = ask("GPUs (0: none)", gpus_found, _at_least(0)) if flags.gpus is None else flags.gpus
    if gpus < 0 or flags.nodes < 1:
        raise ConfigError(f"--gpus {gpus} --nodes {flags.nodes}: must be at least 0 and 1")
    gib = flags.gpu_gib
    if gpus and not gib and not gib_found:
        gib = ask("Memory of a GPU, in GiB", f"{ASSUMED_GIB:g}", _positive)
    model = flags.model and _checked_model(flags.model)
    if not model:
        question = "Model: a folder, a name of the hub, or tiny"
        model = ask(question, SMALL_MODEL if gpus else TINY_MODEL, _checked_model)
    tiny = model == TINY_MODEL
    defaults = _OF_TINY if tiny else _ON_GPU if gpus else _ON_CPU
    source = _source(flags, ask, defaults, tiny=tiny)
    think = flags.think
    if think is None:
        think = not tiny and ask("Think before answering (y/n)", "n", _yes_no)
    prompts, tokens = _lengths(flags, ask, model, source.prompt_tokens, defaults, think)
    steps = ask("Steps", defaults.steps, _at_least(1)) if flags.steps is None else flags.steps
    knobs = {**source.knobs, "thinking": None if tiny else think}
    comments = {**source.comments, "thinking": "true: think before answering, in more tokens"}
    sources = [(knobs, comments)]
    if flags.eval:
        knobs["holdout"] = 0
        sources.append(_evaluation(flags.eval, knobs, comments, defaults, cpu=not gpus))
    name = source.knobs["name"]
    path = Path(flags.file or ask("File to write", f"{name}.yaml", _free))
    total = gpus * flags.nodes
    machine = f"{total} GPU{'s' * (total > 1)}" if total else "this machine's CPU"
    label = "The tiny model" if tiny else model.rstrip("/").rpartition("/")[2]
    batch = {"prompts_per_step": defaults.prompts_per_step, "group_size": 8}
    values = {
        # A path may contain line breaks.
        "title": " ".join(f"{label} learns {source.learns}, on {machine}.".split()),
        "file": " ".join(shlex.quote(str(path)).split()),
        "dir": scalar(f"runs/{name}"),
        "steps": steps,
        "eval_every": max(1, steps // 10),
        "device": None if gpus else "cpu",
        "gpus_per_node": gpus or None,
        "nodes": flags.nodes if flags.nodes > 1 and gpus else None,
        "gpu_gib": f"{gib:g}" if gib and gpus else None,
        "model": _flow({"path": model, **({"dtype": "float32"} if tiny else {})}),
        "about_model": "built on the spot" if tiny else "a folder, or a name of the hub",
        "max_prompt_tokens": prompts,
        "about_prompts": source.about_prompts,
        "long_prompts": "drop" if source.drop_long else None,
        "sources": "\n".join(_source_lines(*each) for each in sources),
        "engines": 2 if tiny else None,
        "sampling": _flow({**defaults.sampling, "max_tokens": tokens}),
        "algorithm": _flow(batch),
        "completions": batch["prompts_per_step"] * batch["group_size"],
        "trainer": _flow(defaults.trainer),
    }
    lines: list[str] = []
    for line in TEMPLATE.splitlines():
        knob, _, comment = line.partition("  # ")
        if not any(values[name] is None for name in re.findall(r"{(\w+)}", knob)):
            lines.append(_commented(knob.format_map(values), comment.format_map(values)))
    return path, "\n".join(lines) + "\n"


def _commented(line: str, comment: str) -> str:
    return f"{line:<{COMMENT_COLUMN}} # {comment}" if comment else line


def _source_lines(knobs: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    lines = [
        _commented(f"      {name}: {_flow(knobs[name])}", comments.get(name, ""))
        for name in SOURCE_KNOBS.split()
        if knobs.get(name) not in (None, "", {})
    ]
    return "    - " + "\n".join(lines)[6:]


def _lengths(
    flags: argparse.Namespace,
    ask: Questions,
    model: str,
    prompts: int,
    defaults: _Defaults,
    think: bool,
) -> tuple[int, int]:
    context, tokens = context_of(model), flags.max_tokens
    usual = defaults.thinking_tokens if think else defaults.tokens
    if model == TINY_MODEL:
        prompts = max(1, min(prompts, context - (tokens or usual)))
    elif context:  # the prompts' length is a guess; half of a short context is enough
        prompts = max(1, min(prompts, max(context // 2, context - tokens if tokens else 0)))
    room = context - prompts if context else 0

    def fits(reply: str) -> int:
        count = _at_least(1)(reply)
        if context and count > room:
            raise ConfigError(
                f"--max-tokens {count}: {model} has a context of {context:,} tokens, and prompts "
                f"take up to {prompts:,}. Use at most {max(1, room):,}"
            )
        return count

    if tokens is not None:
        return prompts, fits(str(tokens))
    likely = min(usual, max(1, room or prompts + usual))
    return prompts, ask("Longest completion, in tokens", likely, fits)


def _source(
    flags: argparse.Namespace, ask: Questions, defaults: _Defaults, *, tiny: bool
) -> _Source:
    only = "the tiny model knows a few tasks of reasoning_gym only. Name a --model"
    if tiny and flags.environment:
        raise ConfigError(f"--environment {flags.environment}: {only}")
    if flags.data and flags.task:
        raise ConfigError(f"--data {flags.data} and --task {flags.task}: keep one")
    if tiny and flags.data:
        raise ConfigError(f"--data {flags.data}: {only}, or a --task")

    def read(name: str) -> _Source:
        is_task = tiny or (re.fullmatch(r"\w+", name) and not data_path(name).exists())
        return _task(name, flags, defaults) if is_task else _rows(name, flags, ask, defaults)

    if flags.data:
        return _rows(flags.data, flags, ask, defaults)
    if flags.task:
        return _task(flags.task, flags, defaults)
    if flags.environment:
        return _episodes(flags.environment, flags.reward)
    if not ask.terminal and not tiny:
        raise ConfigError("--data is missing. Name prompts, or use --task or --environment")
    rows = "" if tiny else "a file, a folder, a dataset of the hub, or "
    question = f"Prompts: {rows}a task of reasoning_gym"
    return ask(question, TINY_TASK if tiny else "chain_sum", read)


def _task(task: str, flags: argparse.Namespace, defaults: _Defaults) -> _Source:
    return _Source(
        knobs={
            "name": task,
            "source": "reasoning_gym",
            "task": task,
            "params": TINY_TASK_PARAMS if task == TINY_TASK else {},
            "environment": {"target": flags.environment} if flags.environment else {},
            "size": 4000,
            "holdout": min(128, defaults.heldout),
            "rewards": _weights(flags.reward, judged=True) if flags.reward else {},
        },
        comments={
            "size": "generated from the seed",
            "holdout": "never trained on",
            "rewards": "the task's verifier, and your function: docs/rewards.md",
        },
        learns=f"{task} of reasoning_gym",
        prompt_tokens=64 if task == TINY_TASK else 512,
    )


def _episodes(environment: str, reward: str) -> _Source:
    """Describe a source whose environment creates its own tasks."""
    words = re.findall(r"[^\W\d]\w*", environment.removesuffix(".py"))
    return _Source(
        knobs={
            "name": words[-1].lower() if words else "episodes",
            "source": "environment",
            "environment": {"target": environment},
            "size": 2000,
            "holdout": 64,
            "rewards": _weights(reward, judged=True),
        },
        comments={
            "size": "tasks, created from their numbers",
            "holdout": "never trained on",
            "rewards": "the verdict" + ", and your function: docs/rewards.md" * bool(reward),
        },
        learns=f"in {environment}",
        prompt_tokens=EPISODE_PROMPT_TOKENS,
        about_prompts="with max_tokens, room for all turns",
    )


def _rows(data: str, flags: argparse.Namespace, ask: Questions, defaults: _Defaults) -> _Source:
    """Describe a source of rows, judging from its first rows. Raises ConfigError if they cannot be
    used."""
    from keel.data.rows.proposal import JUDGED, propose  # noqa: PLC0415  takes half a second

    rows = propose(
        data,
        subset=flags.subset,
        prompt=flags.prompt,
        answer=flags.answer,
        hub_answers=hub_answers,
    )
    reward, environment = flags.reward, flags.environment
    if rows.environment and not environment:
        if not ask.terminal:
            raise ConfigError(
                f"{data}: has a column `environment`. Name its reader with --environment, such as "
                "my_env:Shop"
            )
        environment = ask("Rows are tasks of an environment. Its class", "my_env:Shop", str)
    elif rows.judged == "nothing" and not reward and not environment:
        if not ask.terminal:
            raise ConfigError(
                f"{data}: no column looks like an answer; it has {', '.join(rows.names)}. Name one "
                "with --answer, or a function with --reward (docs/rewards.md)"
            )
        question = "No column looks like an answer. Reward function"
        reward = ask(question, "my_rewards.reward", str)
    judged = {
        "maths": "answers are compared as mathematics",
        "text": "answers are compared as text",
        "nothing": "",
        **{key: f"judged by the column `{key}`" for key in JUDGED},
    }[rows.judged]
    parts = [judged, "your function: docs/rewards.md" if reward else ""]
    boxed = rows.judged == "maths" and not rows.boxed and not environment
    count = f"{rows.rows:,} rows" if rows.whole else f"more than {rows.rows:,} rows"
    return _Source(
        knobs={
            "name": _name_of(data),
            "source": rows.kind,
            "path": data,
            "subset": flags.subset,
            "columns": dict(rows.columns),
            "answer_after": rows.answer_after,
            "template": "boxed" if boxed else "",
            "environment": {"target": environment} if environment else {},
            "holdout": min(defaults.heldout, -(-rows.rows // 10)) if rows.rows > 1 else 0,
            "rewards": _weights(reward, judged=rows.judged != "nothing" or bool(environment)),
        },
        comments={
            "template": "asks for the answer in \\boxed{}",
            "holdout": f"of {count}; never trained on",
            "rewards": "; ".join(filter(None, parts)),
        },
        learns=f"from {data}",
        prompt_tokens=max(256, -(-(rows.longest // 2 + 64) // 128) * 128),
        about_prompts=f"the longest one found has {rows.longest:,} bytes",
        drop_long=not rows.whole,
    )


def _evaluation(
    data: str,
    knobs: Mapping[str, Any],
    comments: Mapping[str, str],
    defaults: _Defaults,
    *,
    cpu: bool,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Describe an evaluation source that holds out a whole file and is scored like the training
    source."""
    from keel.data.rows.proposal import propose  # noqa: PLC0415  as above

    rows, name = propose(data, hub_answers=hub_answers), _name_of(data)
    changes = {
        "name": f"{name}-eval" if name == knobs["name"] else name,
        "source": rows.kind,
        "task": None,
        "params": {},
        "path": data,
        "subset": "",
        "columns": dict(rows.columns),
        "answer_after": rows.answer_after,
        "size": defaults.heldout if cpu and rows.rows > defaults.heldout else None,
        "holdout": "all",
    }
    size = f"the first of {rows.rows:,} rows, because evaluation is slow on a CPU"
    return {**knobs, **changes}, {**comments, "size": size, "holdout": "an evaluation set"}


def _name_of(data: str) -> str:
    stem = Path(data.rstrip("/")).name.partition(".")[0]
    return re.sub(r"[^\w-]+", "-", stem).strip("-") or "data"


def _weights(reward: str, *, judged: bool) -> dict[str, float]:
    """Return the reward weights. If `judged` is true, something else decides correctness and the
    function only adds to it."""
    if reward in ("", "correct"):
        return {"correct": 1.0}
    return {"correct": 1.0, reward: EXTRA_REWARD} if judged else {reward: 1.0}


def context_of(model: str) -> int:
    """Return the model's context length in tokens, read from its local or cached config.json. 0 if
    it is unknown."""
    if model == TINY_MODEL:
        return TinyModelConfig().max_context
    path: object = Path(model, "config.json")
    if not Path(model).is_dir():
        path = try_to_load_from_cache(model, "config.json") if is_hub_name(model) else None
    try:
        config = json.loads(Path(path).read_text("utf-8")) if isinstance(path, str | Path) else {}
        return int(config.get("text_config", config).get("max_position_embeddings") or 0)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0


def gpus_here() -> tuple[int, float]:
    """Return the number of GPUs that nvidia-smi lists, and the memory of the smallest in GiB."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0, 0.0
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10.0)
        sizes = [float(line) / 1024 for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0, 0.0
    return len(sizes), min(sizes, default=0.0)


def _at_least(low: int) -> Callable[[str], int]:
    def read(reply: str) -> int:
        if not reply.isdecimal() or int(reply) < low:
            raise ValueError(f"{reply!r}: must be an integer of at least {low}")
        return int(reply)

    return read


def _positive(reply: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?", reply) or not float(reply):
        raise ValueError(f"{reply!r}: must be a number above 0")
    return float(reply)


def _yes_no(reply: str) -> bool:
    if reply.lower() not in ("y", "yes", "n", "no"):
        raise ValueError(f"{reply!r}: answer y or n")
    return reply.lower().startswith("y")


def _checked_model(name: str) -> str:
    if name != TINY_MODEL and not is_hub_name(name):
        check_path(name)
    return name


def _free(path: str) -> str:
    if Path(path).exists():
        raise ConfigError(f"{path}: exists already. Name another file, or remove it")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"{path}: no such folder as {Path(path).parent}")
    return path


def _flow(value: object) -> str:
    """Write a value as one line of YAML that OmegaConf reads back unchanged."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{scalar(str(k))}: {_flow(v)}' for k, v in value.items())}}}"
    if isinstance(value, float) and 0 < value < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return scalar(value) if isinstance(value, str) else json.dumps(value)


def scalar(text: str) -> str:
    """Write a text as YAML, in quotes if YAML would otherwise read it as a different value."""
    reserved = ("null", "true", "false", "yes", "no", "on", "off", "inf", "nan", "~")
    if re.fullmatch(r"[A-Za-z_~./][\w~./:-]*(?<!:)", text) and text.lower() not in reserved:
        return text
    return json.dumps(text.replace("${", "\\${"), ensure_ascii=False)
