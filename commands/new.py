"""`keel new`: write a commented recipe from flags or from the answers to a few questions, and check
it.

Knobs for the hardware layout stay `auto`. This module does not import torch, so the first question
appears immediately.
"""

import argparse
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from keel.configs.dump import escape_references, yaml_line
from keel.configs.load import load_config
from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, SourceConfig
from keel.configs.sections.model import TINY_MODEL
from keel.model.hub import check_path, hub_answers, is_hub_name

T = TypeVar("T")
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
  max_prompt_tokens: {max_prompt_tokens}  # {about_prompts}
  long_prompts: {long_prompts}  # leave longer ones out, and count them
  sources:
    - name: {name}
      source: {source}
      path: {path}
      subset: {subset}
      columns: {columns}
      answer_after: {mark}
      template: {template}  # asks for the answer in \\boxed{{}}
      task: {task}
      params: {params}
      environment: {environment}
      size: {size}  # generated from the seed
      holdout: {holdout}  # {about_holdout}
      rewards: {rewards}  # {about_rewards}
      thinking: {thinking}  # true: think before answering, in more tokens
eval: {eval}  # read and scored like the source above
rollout:
  engines: {engines}
  sampling: {sampling}
algorithm: {algorithm}  # {completions} completions per step
trainer: {trainer}
"""
"""Template of the recipe. Lines without a value and empty comments are omitted."""
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
_STOPPED = 130
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
"""Minimum fraction of answers that must be mathematical or contain a marker."""
_PROSE_CHARACTERS = 100
"""Average length in characters above which answers count as prose, which cannot be compared as
text."""
_NUMBER = re.compile(
    r"[-+−$€£(\[{]*\s*(\\[a-zA-Z]+|\d|\.\d|[a-zA-Z](?![a-zA-Z])).{0,60}", flags=re.DOTALL
)
_WORD = re.compile(r"(?<!\\)\b(?!sqrt|frac|pi|sin|cos|tan|log|ln|exp|cm|km|kg)[^\W\d_]{3,}")


def new(flags: argparse.Namespace, check: Callable[[str], int]) -> int:
    """Write a recipe, run `keel check` on it and return the check's exit status.

    Raises ConfigError if the file already exists, or if a required value is missing and there is no
    terminal to ask for it.
    """
    if flags.file:
        _free(flags.file)
    terminal = not flags.yes and sys.stdin.isatty() and sys.stdout.isatty()

    def ask(question: str, default: object, read: Callable[[str], T]) -> T:
        while terminal:
            try:
                return read(input(f"{question} [{default}] ").strip() or str(default))
            except ValueError as error:
                print(f"  {error}")
        return read(str(default))

    try:
        values = _values(flags, ask, terminal)
        path = Path(flags.file or ask("File to write", f"{values['name']}.yaml", _free))
    except (EOFError, KeyboardInterrupt):
        print("\nkeel new: stopped; nothing was written", file=sys.stderr)
        return _STOPPED
    _free(str(path))
    name = shlex.quote(str(path))
    text = _filled(values | {"file": name})
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


def _values(flags: argparse.Namespace, ask: Callable[..., Any], terminal: bool) -> dict[str, Any]:
    """Return the values to fill into the recipe template."""
    here = _count_gpus()
    gpus = ask("GPUs (0: none)", here, _at_least(0)) if flags.gpus is None else flags.gpus
    if gpus < 0 or flags.nodes < 1:
        raise ConfigError(f"--gpus {gpus} --nodes {flags.nodes}: must be at least 0 and 1")
    usual = _SMALL_MODEL if gpus else TINY_MODEL
    question = "Model: a folder, a name of the hub, or tiny"
    model = _checked_model(flags.model) if flags.model else ask(question, usual, _checked_model)
    tiny = model == TINY_MODEL
    defaults = _DEFAULTS["tiny" if tiny else "gpu" if gpus else "cpu"]
    data, task = _choose_source(flags, ask, tiny=tiny, terminal=terminal)
    if data:
        source = _data_source(data, flags, ask if terminal else None, defaults["holdout"])
    else:
        source = _generated_source(task, flags, defaults["holdout"])
    think = flags.think
    if think is None:
        think = not tiny and ask("Think before answering (y/n)", "n", str).lower().startswith("y")
    tokens = flags.max_tokens
    if tokens is None:
        tokens = ask("Longest completion, in tokens", defaults["tokens"][think], _at_least(1))
    steps = ask("Steps", defaults["steps"], _at_least(1)) if flags.steps is None else flags.steps
    prompt_tokens = min(source["prompt_tokens"], 512 - tokens) if tiny else source["prompt_tokens"]
    values = {
        "dir": f"runs/{source['name']}",
        "steps": steps,
        "eval_every": max(1, steps // 10),
        "model": {"path": model, **({"dtype": "float32"} if tiny else {})},
        "max_prompt_tokens": max(1, prompt_tokens),
        "eval": {"file": flags.eval} if flags.eval else None,
        "engines": 2 if tiny else None,
        "sampling": {**defaults["sampling"], "max_tokens": tokens},
        "algorithm": defaults["algorithm"],
        "completions": math.prod(defaults["algorithm"].values()),
        "trainer": defaults["trainer"],
    }
    if gpus:
        values |= {"gpus": gpus, "nodes": flags.nodes if flags.nodes > 1 else None}
        values["gpu_gib"] = flags.gpu_gib or (None if here else _ASSUMED_GIB)
    else:
        values["device"] = "cpu"
    values |= source
    if not tiny:
        values["thinking"] = think
    if flags.eval:
        values["holdout"] = 0
    return values


def _choose_source(
    flags: argparse.Namespace, ask: Callable[..., Any], *, tiny: bool, terminal: bool
) -> tuple[str, str]:
    """Return the data (a path or the name of a hub dataset) and the reasoning_gym task. At most one
    of the two is set. If neither is, the environment generates the tasks."""
    if tiny and (flags.data or flags.environment):
        flag = f"--data {flags.data}" if flags.data else f"--environment {flags.environment}"
        raise ConfigError(f"{flag}: the tiny model knows some --task only. Name a --model")
    if flags.data and flags.task:
        raise ConfigError(f"--data {flags.data} and --task {flags.task}: keep one")
    if flags.data or flags.task or flags.environment:
        return flags.data or "", flags.task or ""
    if tiny:
        return "", ask("Prompts: a task of reasoning_gym", _TINY_TASK, str)
    if not terminal:
        raise ConfigError("--data is missing. Name prompts, or use --task or --environment")
    question = "Prompts: a file, a folder, a dataset of the hub, or a task of reasoning_gym"
    name = ask(question, "chain_sum", str)
    is_task = re.fullmatch(r"\w+", name) and not data_path(name).exists()
    return ("", name) if is_task else (name, "")


def _generated_source(task: str, flags: argparse.Namespace, holdout: int) -> dict[str, Any]:
    words = re.findall(r"[^\W\d]\w*", flags.environment.removesuffix(".py"))
    short = task == _TINY_TASK
    return {
        "name": task or (words[-1].lower() if words else "episodes"),
        "source": "reasoning_gym" if task else "environment",
        "task": task,
        "params": {"min_word_len": 4, "max_word_len": 7} if short else {},
        "environment": {"target": flags.environment} if flags.environment else {},
        "size": 4000 if task else 2000,
        "holdout": min(128, holdout) if task else 64,
        "about_holdout": "never trained on",
        "rewards": _weights(flags.reward, judged=True) if flags.reward or not task else {},
        "about_rewards": "the task's verifier" if task else "the verdict",
        "prompt_tokens": 64 if short else 512 if task else _EPISODE_PROMPT_TOKENS,
        "about_prompts": "" if task else "with max_tokens, room for all turns",
    }


def _data_source(
    data: str, flags: argparse.Namespace, ask: Callable[..., Any] | None, holdout: int
) -> dict[str, Any]:
    """Describe a file, a folder or a hub dataset based on its first rows."""
    # Imported late: it takes half a second.
    from keel.data.rows import BadLine, data_extension, read_source_rows  # noqa: PLC0415

    file, kind, knob = data_path(data), "jsonl", f"--data {data}"
    known = file.is_dir() or data_extension(file)
    if known and not file.name.endswith((".jsonl", ".ndjson")):
        kind = "file"
    elif not known and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", data) and not file.exists():
        kind = "hub"
    source = SourceConfig(name="data", source=kind, path=data, subset=flags.subset)
    first = list(islice(read_source_rows(source, hub_answers, knob), _MAX_ROWS + 1))
    records = [_flatten(r.record) for r in first[:_MAX_ROWS] if not isinstance(r.record, BadLine)]
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
    judge, answer, mark = _detect_judge(records, names, flags.answer)
    reward = flags.reward
    if not judge and not reward and not flags.environment:
        if ask is None:
            raise ConfigError(
                f"{knob}: no column looks like an answer; it has {columns}. Name one with "
                "--answer, or a function with --reward (docs/rewards.md)"
            )
        question = "No column looks like an answer. Reward function"
        reward = ask(question, "my_rewards.reward", str)
    texts = [str(record.get(prompt, "")) for record in records]
    longest = max(len(text.encode()) for text in texts)
    asks_boxed = _mostly(["boxed" in text for text in texts])
    number, whole = min(len(first), _MAX_ROWS), len(first) <= _MAX_ROWS
    about = "your function: docs/rewards.md" if reward else ""
    if judge:
        about = f"compared as {judge}" if answer else f"judged by the column `{judge}`"
    stem = Path(data.rstrip("/")).name.partition(".")[0]
    return {
        "name": re.sub(r"[^\w-]+", "-", stem).strip("-") or "data",
        "source": kind,
        "path": data,
        "subset": flags.subset,
        "columns": _columns(names, prompt, answer, judge),
        "mark": mark,
        "template": "boxed"
        if judge == "mathematics" and not asks_boxed and not flags.environment
        else None,
        "environment": {"target": flags.environment} if flags.environment else {},
        "holdout": min(holdout, -(-number // 10)) if number > 1 else 0,
        "about_holdout": f"of {'' if whole else 'more than '}{number:,} rows; never trained on",
        "rewards": _weights(reward, judged=bool(judge or flags.environment)),
        "about_rewards": about,
        "prompt_tokens": max(256, -(-(longest // 2 + 64) // 128) * 128),
        "about_prompts": f"the longest one found has {longest:,} bytes",
        "long_prompts": None if whole else "drop",
    }


def _detect_judge(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], answer: str
) -> tuple[str, str, str]:
    """Return how to judge completions ("mathematics", "text", a column in `_JUDGES`, or "" if
    unknown), along with the answer column and the marker that precedes the answer."""
    if not answer and "answer" not in names:
        for name in _JUDGES:
            if name in names:
                return name, "", ""
    column = answer or next((name for name in _ANSWERS if name in names), "")
    answers = [str(r[column]).strip() for r in records if r.get(column) is not None]
    if not answers:
        return "", answer, ""
    mark = next((mark for mark in _MARKS if _mostly([mark in a for a in answers])), "")
    finals = [each.rpartition(mark)[2] if mark else each for each in answers]
    if _mostly([bool(_NUMBER.fullmatch(a.strip())) and not _WORD.search(a) for a in finals]):
        return "mathematics", column, mark
    if sum(map(len, finals)) > _PROSE_CHARACTERS * len(finals):
        return "", answer, mark
    return "text", column, mark


def _columns(names: Sequence[str], prompt: str, answer: str, judge: str) -> dict[str, str]:
    """Map the columns to Keel's names, and exclude any other columns that would be read as a second
    prompt or judge."""
    columns = {} if prompt in ("prompt", "messages") else {"prompt": prompt}
    if answer and answer != "answer":
        columns["answer"] = answer
    single = {"messages", *_JUDGES} - {prompt, judge}
    if answer:
        single.add("answer")
    if prompt == "messages":
        single.add("prompt")
    return columns | {name: "" for name in sorted(single - {answer, *columns}) if name in names}


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


def _at_least(low: int) -> Callable[[str], int]:
    def read(reply: str) -> int:
        if not reply.isdecimal() or int(reply) < low:
            raise ValueError(f"{reply!r}: must be an integer of at least {low}")
        return int(reply)

    return read


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


def _filled(values: Mapping[str, Any]) -> str:
    """Fill in the recipe template. Values are written as YAML, and text in comments is kept on one
    line."""
    texts = {key: " ".join(str(value).split()) for key, value in values.items()}
    lines: list[str] = []
    for line in _TEMPLATE.splitlines():
        knob, _, comment = line.partition("  # ")
        value = re.search(r"{(\w+)}", knob)
        if value and not knob.startswith("#"):
            if values.get(value[1]) in (None, "", {}):
                continue
            knob = knob.replace(value[0], yaml_line(escape_references(values[value[1]])))
        else:
            knob = knob.format_map(texts)
        comment = comment.format_map(texts)
        lines.append(f"{knob:<{_COMMENT_COLUMN}} # {comment}" if comment else knob)
    return "\n".join(lines) + "\n"
