"""`keel new`: write a commented recipe from flags or from the answers to a few questions, and check
it.

Knobs for the hardware layout stay `auto`. This module does not import torch, so the first question
appears immediately.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from keel.configs.dump import escape_references, yaml_line
from keel.configs.load import load_config
from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, SourceConfig
from keel.configs.sections.model import TINY_MODEL
from keel.model.hub import check_path, is_hub_name
from keel.trainer.run.signals import INTERRUPTED

_TEMPLATE = """\
# keel check {file}; keel train {file}; keel knobs NAME
run:
  dir: {dir}  # metrics, checkpoints, trained model
  steps: {steps}
  eval_every: {eval_every}  # steps between evaluations
  device: {device}
  gpus_per_node: {gpus}
  nodes: {nodes}
  gpu_gib: {gpu_gib}  # memory per GPU, for `keel check` elsewhere
model: {model}  # a folder, a name of the hub, or tiny
data:
  max_prompt_tokens: {max_prompt_tokens}
  long_prompts: {long_prompts}  # leave longer ones out, and count them
  sources:
    - name: {name}
      source: {source}
      path: {path}
      subset: {subset}
      columns: {columns}
      answer_after: {mark}
      template: {template}  # asks for the answer in \\boxed{}
      task: {task}
      params: {params}
      environment: {environment}
      size: {size}  # generated from the seed
      holdout: {holdout}  # prompts to evaluate on, never trained on
      rewards: {rewards}  # parts or your functions: docs/rewards.md
      thinking: {thinking}  # true: think before answering, in more tokens
eval: {eval}  # read and scored like the source above
rollout:
  engines: {engines}
  sampling: {sampling}
algorithm: {algorithm}
trainer: {trainer}
"""
"""Template of the recipe. Lines without a value are omitted."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {
        "steps": 200,
        "holdout": 200,
        "tokens": (1024, 4096),  # without and with thinking
        "sampling": {"top_p": 0.95, "top_k": 512},
        "algorithm": {"prompts_per_step": 32, "group_size": 8},
        "trainer": {"lr": 1e-6},
    },
    "cpu": {  # a 135 M model takes its first step within two minutes on two cores
        "steps": 50,
        "holdout": 16,
        "tokens": (128, 256),
        "sampling": {},
        "algorithm": {"prompts_per_step": 4, "group_size": 8},
        "trainer": {"lr": 5e-6, "micro_batch_tokens": 2048},
    },
    "tiny": {
        "steps": 200,
        "holdout": 128,
        "tokens": (48, 48),
        "sampling": {"top_p": 0.95, "top_k": 64},
        "algorithm": {"prompts_per_step": 16, "group_size": 8},
        "trainer": {"lr": 2e-4},
    },
}
_COMMENT_COLUMN = 33
_SMALL_MODEL = "Qwen/Qwen3-0.6B"
_TINY_TASK = "spell_backward"
_ASSUMED_GIB = 80
"""GPU memory in GiB to assume on a machine without a GPU."""
_EPISODE_PROMPT_TOKENS = 3072
"""Assumed number of tokens in an episode before its last turn, including tool descriptions and tool
results."""
_EXTRA_REWARD = 0.2
"""Weight of a reward function used in addition to a correctness check."""
_MAX_ROWS = 2_000
_PROMPTS = (
    *("prompt", "messages", "question", "problem", "query", "instruction", "input", "task"),
    *("conversation", "conversations", "text"),
)
"""Likely names of the prompt column, most likely first."""
_ANSWERS = (
    *("answer", "final_answer", "ground_truth", "reward_model.ground_truth", "expected_answer"),
    *("target", "label", "solution", "gold", "output", "response", "completion", "reply"),
)
"""Likely names of the answer column, most likely first."""
_JUDGES = ("tests", "criteria", "refuse", "reward")
"""Columns other than `answer` that define how to judge a completion."""
_MARKS = ("####", "Answer:", "answer is")
"""Markers before the final answer in worked solutions."""
_MIN_SHARE = 0.9
"""Minimum fraction of answers that must contain a number or a marker."""
_ANSWER_CHARACTERS = 100
"""Average length in characters above which answers are prose, which cannot be compared."""


def new(flags: argparse.Namespace, check: Callable[[str], int]) -> int:
    """Write a recipe, run `keel check` on it and return the check's exit status.

    Raises ConfigError if the file already exists, or if a required value is missing and there is no
    terminal to ask for it.
    """
    if flags.file:
        _require_free(flags.file)
    gpus_here = _count_gpus()
    try:
        if not flags.yes and sys.stdin.isatty() and sys.stdout.isatty():
            _ask_for_missing(flags, gpus_here)
    except (EOFError, KeyboardInterrupt):
        print("\nkeel new: stopped; nothing was written", file=sys.stderr)
        return INTERRUPTED
    values = _values(flags, gpus_here)
    path = Path(flags.file or f"{values['name']}.yaml")
    _require_free(str(path))
    name = shlex.quote(str(path))
    text = _filled({**values, "file": name})
    path.write_text(text, encoding="utf-8")
    try:
        load_config(path)
    except ConfigError:  # conflicting flags
        path.unlink()
        raise
    print(f"wrote {path}:\n\n{text}", flush=True)
    status = check(str(path))
    if status:
        print(f"\nEdit {path}, then run: keel check {name}", file=sys.stderr)
    else:
        print(f"\nnext: keel train {name}")
    return status


def _ask_for_missing(flags: argparse.Namespace, gpus_here: int) -> None:
    """Ask for the most important flags that are missing, and set them."""

    def ask(question: str, default: object) -> str:
        return input(f"{question} [{default}] ").strip() or str(default)

    if flags.gpus is None:
        reply = ask("GPUs (0: none)", gpus_here)
        flags.gpus = int(reply) if reply.isdecimal() else gpus_here
    if not flags.model:
        usual = _SMALL_MODEL if flags.gpus else TINY_MODEL
        flags.model = ask("Model: a folder, a name of the hub, or tiny", usual)
    if flags.model != TINY_MODEL and not (flags.data or flags.task or flags.environment):
        question = "Prompts: a file, a folder, a dataset of the hub, or a task of reasoning_gym"
        name = ask(question, "chain_sum")
        is_task = re.fullmatch(r"\w+", name) and not data_path(name).exists()
        flags.task, flags.data = (name, None) if is_task else (None, name)
    if flags.think is None and flags.model != TINY_MODEL:
        flags.think = ask("Think before answering (y/n)", "n").lower().startswith("y")


def _values(flags: argparse.Namespace, gpus_here: int) -> dict[str, Any]:
    """Return the values to fill into the recipe template."""
    gpus = gpus_here if flags.gpus is None else flags.gpus
    if gpus < 0 or flags.nodes < 1:
        raise ConfigError(f"--gpus {gpus} --nodes {flags.nodes}: must be at least 0 and 1")
    model = flags.model or (_SMALL_MODEL if gpus else TINY_MODEL)
    tiny = model == TINY_MODEL
    if not tiny and not is_hub_name(model):
        check_path(model)
    if tiny and (flags.data or flags.environment):
        flag = f"--data {flags.data}" if flags.data else f"--environment {flags.environment}"
        raise ConfigError(f"{flag}: the tiny model knows some --task only. Name a --model")
    if flags.data and flags.task:
        raise ConfigError(f"--data {flags.data} and --task {flags.task}: keep one")
    task = flags.task or (_TINY_TASK if tiny else "")
    if not (flags.data or task or flags.environment):
        raise ConfigError("--data is missing. Name prompts, or use --task or --environment")
    defaults = _DEFAULTS["tiny" if tiny else "gpu" if gpus else "cpu"]
    source = _data_source(flags) if flags.data else _generated_source(task, flags)
    most, think = min(defaults["holdout"], source["holdout"]), bool(flags.think) and not tiny
    tokens = flags.max_tokens or defaults["tokens"][think]
    steps = flags.steps or defaults["steps"]
    room = 512 - tokens if tiny else source["max_prompt_tokens"]
    return {
        **source,
        "dir": f"runs/{source['name']}",
        "steps": steps,
        "eval_every": max(1, steps // 10),
        "device": None if gpus else "cpu",
        "gpus": gpus or None,
        "nodes": flags.nodes if flags.nodes > 1 else None,
        "gpu_gib": (flags.gpu_gib or (None if gpus_here else _ASSUMED_GIB)) if gpus else None,
        "model": {"path": model, **({"dtype": "float32"} if tiny else {})},
        "max_prompt_tokens": max(1, min(source["max_prompt_tokens"], room)),
        "environment": {"target": flags.environment} if flags.environment else {},
        "holdout": 0 if flags.eval else most,
        "thinking": None if tiny else think,
        "eval": {"file": flags.eval} if flags.eval else None,
        "engines": 2 if tiny else None,
        "sampling": {**defaults["sampling"], "max_tokens": tokens},
        "algorithm": defaults["algorithm"],
        "trainer": defaults["trainer"],
    }


def _generated_source(task: str, flags: argparse.Namespace) -> dict[str, Any]:
    words = re.findall(r"[^\W\d]\w*", flags.environment.removesuffix(".py"))
    short = task == _TINY_TASK
    return {
        "name": task or (words[-1].lower() if words else "episodes"),
        "source": "reasoning_gym" if task else "environment",
        "task": task,
        "params": {"min_word_len": 4, "max_word_len": 7} if short else {},
        "size": 4000 if task else 2000,
        "holdout": 128 if task else 64,
        "rewards": _weights(flags.reward, judged=True),
        "max_prompt_tokens": 64 if short else 512 if task else _EPISODE_PROMPT_TOKENS,
    }


def _data_source(flags: argparse.Namespace) -> dict[str, Any]:
    """Describe a file, a folder or a hub dataset based on its first rows."""
    # Imported late: it takes half a second.
    from keel.data.rows import BadLine, data_extension, read_source_rows  # noqa: PLC0415

    file, kind, knob = data_path(flags.data), "jsonl", f"--data {flags.data}"
    known = file.is_dir() or data_extension(file)
    if known and not file.name.endswith((".jsonl", ".ndjson")):
        kind = "file"
    elif not known and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", flags.data) and not file.exists():
        kind = "hub"
    source = SourceConfig(name="data", source=kind, path=flags.data, subset=flags.subset)
    first = list(islice(read_source_rows(source, knob), _MAX_ROWS))
    records = [_flatten(row.record) for row in first if not isinstance(row.record, BadLine)]
    if not records:
        raise ConfigError(f"{knob}: no row of it can be read")
    names = list(dict.fromkeys(name for record in records for name in record))
    columns = f"the columns {', '.join(names)}"
    for flag, name in (("--prompt", flags.prompt), ("--answer", flags.answer)):
        if name and name not in names:
            raise ConfigError(f"{flag} {name}: {knob} has only {columns}")
    prompt = flags.prompt or next((name for name in _PROMPTS if name in names), "")
    if not prompt:
        raise ConfigError(f"{knob} has {columns}. Name that of the prompts: --prompt COLUMN")
    if "environment" in names and not flags.environment:
        raise ConfigError(
            f"{knob} has a column `environment`. Name its reader with --environment, such as "
            "my_env:Shop"
        )
    judge = next((name for name in _JUDGES if name in names), "")
    if flags.answer or "answer" in names:
        judge = ""
    answer = "" if judge else flags.answer or next((n for n in _ANSWERS if n in names), "")
    answers = [str(r[answer]).strip() for r in records if r.get(answer) is not None]
    mark = next((mark for mark in _MARKS if _mostly([mark in a for a in answers])), "")
    finals = [each.rpartition(mark)[2] if mark else each for each in answers]
    if not flags.answer and sum(map(len, finals)) > _ANSWER_CHARACTERS * len(finals):
        answer = mark = ""
    if not (judge or answer or flags.reward or flags.environment):
        raise ConfigError(
            f"{knob}: no column looks like an answer; it has {columns}. Name one with --answer, or "
            "a function with --reward (docs/rewards.md)"
        )
    texts = [str(record.get(prompt, "")) for record in records]
    longest = max(len(text.encode()) for text in texts)
    boxed = bool(answer) and not flags.environment and not _mostly(["boxed" in t for t in texts])
    boxed = boxed and _mostly([any(c.isdecimal() for c in final) for final in finals])
    stem = Path(flags.data.rstrip("/")).name.partition(".")[0]
    return {
        "name": re.sub(r"[^\w-]+", "-", stem).strip("-") or "data",
        "source": kind,
        "path": flags.data,
        "subset": flags.subset,
        "columns": _columns(names, prompt, answer, judge),
        "mark": mark,
        "template": "boxed" if boxed else None,
        "holdout": -(-len(first) // 10) if len(first) > 1 else 0,
        "rewards": _weights(flags.reward, judged=bool(judge or answer or flags.environment)),
        "max_prompt_tokens": max(256, -(-(longest // 2 + 64) // 128) * 128),
        "long_prompts": "drop" if len(first) == _MAX_ROWS else None,
    }


def _columns(names: Sequence[str], prompt: str, answer: str, judge: str) -> dict[str, str]:
    """Map the columns to Keel's names, and exclude any other columns that would be read as a second
    prompt or judge."""
    columns = {} if prompt in ("prompt", "messages") else {"prompt": prompt}
    if answer not in ("", "answer"):
        columns["answer"] = answer
    others = {"messages", *_JUDGES, *(["answer"] if answer else [])}
    if prompt == "messages":
        others.add("prompt")
    unused = others - {prompt, judge, answer, *columns}
    return columns | {name: "" for name in sorted(unused) if name in names}


def _mostly(flags: Sequence[bool]) -> bool:
    return bool(flags) and sum(flags) >= _MIN_SHARE * len(flags)


def _flatten(record: Mapping[str, Any]) -> dict[str, Any]:
    """Add the values of nested objects to the record under dotted names such as
    `reward_model.ground_truth`."""
    inner = {
        f"{name}.{key}": each
        for name, value in record.items()
        if isinstance(value, Mapping)
        for key, each in value.items()
    }
    return {**record, **inner}


def _weights(reward: str, *, judged: bool) -> dict[str, float]:
    if reward in ("", "correct"):
        return {"correct": 1.0}
    return {"correct": 1.0, reward: _EXTRA_REWARD} if judged else {reward: 1.0}


def _count_gpus() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    try:
        return len(subprocess.check_output([tool, "--list-gpus"], timeout=10.0).splitlines())
    except (OSError, subprocess.SubprocessError):
        return 0


def _require_free(path: str) -> None:
    if Path(path).exists():
        raise ConfigError(f"{path}: exists already. Name another file, or remove it")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"{path}: no such folder as {Path(path).parent}")


def _filled(values: Mapping[str, Any]) -> str:
    """Fill in the recipe template with values in YAML."""
    head, *knobs = _TEMPLATE.splitlines()
    lines = [head.replace("{file}", values["file"])]
    for line in knobs:
        knob, _, comment = line.partition("  # ")
        if placeholder := re.search(r"{(\w+)}", knob):
            value = values.get(placeholder[1])
            if value in (None, "", {}):
                continue
            knob = knob.replace(placeholder[0], yaml_line(escape_references(value)))
        lines.append(f"{knob:<{_COMMENT_COLUMN}} # {comment}" if comment else knob)
    return "\n".join(lines) + "\n"
