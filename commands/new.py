"""`keel new`: write a commented recipe from flags or from the answers to a few questions, and check
it.

Knobs for the hardware layout stay `auto`. This module does not import torch, so the first question
appears immediately.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from keel.configs.load import load_config
from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, SourceConfig
from keel.configs.sections.model import TINY_MODEL
from keel.model.hub import check_path, hub_answers, is_hub_name

T = TypeVar("T")
_TEMPLATE = """\
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
{source}
eval: {eval}  # read and scored like the source above
rollout:
  engines: {engines}
  sampling: {sampling}
algorithm: {algorithm}  # {completions} completions per step
trainer: {trainer}
"""
"""Template of the recipe. Lines without a value and empty comments are omitted."""
_COMMENT_COLUMN = 33
_SMALL_MODEL = "Qwen/Qwen3-0.6B"
_TINY_TASK = "spell_backward"
_ASSUMED_GIB = 80.0
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
_JUDGED = ("tests", "criteria", "refuse", "reward")
"""Keys other than `answer` that define how to judge a completion."""
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
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {
        "steps": 200,
        "heldout": 200,
        "tokens": (1024, 4096),  # without and with thinking
        "sampling": {"top_p": 0.95, "top_k": 512},
        "prompts_per_step": 32,
        "trainer": {"lr": 1e-6},
    },
    "cpu": {  # a 135 M model takes its first step within two minutes on two cores
        "steps": 50,
        "heldout": 16,
        "tokens": (128, 256),
        "sampling": {},
        "prompts_per_step": 4,
        "trainer": {"lr": 5e-6, "micro_batch_tokens": 2048},
    },
    "tiny": {
        "steps": 200,
        "heldout": 128,
        "tokens": (48, 48),
        "sampling": {"top_p": 0.95, "top_k": 64},
        "prompts_per_step": 16,
        "trainer": {"lr": 2e-4},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    knobs: Mapping[str, Any]
    comments: Mapping[str, str]
    learns: str
    prompt_tokens: int
    about_prompts: str = ""
    drop_long: bool = False


def new(flags: argparse.Namespace, check: Callable[[str], int]) -> int:
    """Write a recipe, run `keel check` on it and return the exit status of the check.

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
        path, text = _recipe(flags, ask, terminal)
    except (EOFError, KeyboardInterrupt):
        print("\nkeel new: stopped; nothing was written", file=sys.stderr)
        return _STOPPED
    _free(str(path))
    path.write_text(text, encoding="utf-8")
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


def _recipe(flags: argparse.Namespace, ask: Callable[..., Any], terminal: bool) -> tuple[Path, str]:
    gpus_found, gib_found = _detect_gpus()
    gpus = ask("GPUs (0: none)", gpus_found, _at_least(0)) if flags.gpus is None else flags.gpus
    if gpus < 0 or flags.nodes < 1:
        raise ConfigError(f"--gpus {gpus} --nodes {flags.nodes}: must be at least 0 and 1")
    gib = flags.gpu_gib or (0.0 if gib_found else _ASSUMED_GIB)
    question = "Model: a folder, a name of the hub, or tiny"
    usual = _SMALL_MODEL if gpus else TINY_MODEL
    model = _checked_model(flags.model) if flags.model else ask(question, usual, _checked_model)
    tiny = model == TINY_MODEL
    defaults = _DEFAULTS["tiny" if tiny else "gpu" if gpus else "cpu"]
    source = _source(flags, ask, defaults["heldout"], tiny=tiny, terminal=terminal)
    think = flags.think
    if think is None:
        think = not tiny and ask("Think before answering (y/n)", "n", str).lower().startswith("y")
    tokens = flags.max_tokens
    if tokens is None:
        tokens = ask("Longest completion, in tokens", defaults["tokens"][think], _at_least(1))
    prompts = min(source.prompt_tokens, 512 - tokens) if tiny else source.prompt_tokens
    steps = ask("Steps", defaults["steps"], _at_least(1)) if flags.steps is None else flags.steps
    knobs = {**source.knobs, "thinking": None if tiny else think}
    comments = {**source.comments, "thinking": "true: think before answering, in more tokens"}
    if flags.eval:
        knobs["holdout"] = 0
    name = source.knobs["name"]
    path = Path(flags.file or ask("File to write", f"{name}.yaml", _free))
    total = gpus * flags.nodes
    machine = f"{total} GPU{'s' * (total > 1)}" if total else "this machine's CPU"
    label = "The tiny model" if tiny else model.rstrip("/").rpartition("/")[2]
    batch = {"prompts_per_step": defaults["prompts_per_step"], "group_size": 8}
    values = {
        # A path may contain line breaks.
        "title": " ".join(f"{label} learns {source.learns}, on {machine}.".split()),
        "file": " ".join(shlex.quote(str(path)).split()),
        "dir": _yaml_scalar(f"runs/{name}"),
        "steps": steps,
        "eval_every": max(1, steps // 10),
        "device": None if gpus else "cpu",
        "gpus_per_node": gpus or None,
        "nodes": flags.nodes if flags.nodes > 1 and gpus else None,
        "gpu_gib": f"{gib:g}" if gib and gpus else None,
        "model": _flow({"path": model, **({"dtype": "float32"} if tiny else {})}),
        "about_model": "built on the spot" if tiny else "a folder, or a name of the hub",
        "max_prompt_tokens": max(1, prompts),
        "about_prompts": source.about_prompts,
        "long_prompts": "drop" if source.drop_long else None,
        "source": _entry(knobs, comments),
        "eval": _flow({"file": flags.eval}) if flags.eval else None,
        "engines": 2 if tiny else None,
        "sampling": _flow({**defaults["sampling"], "max_tokens": tokens}),
        "algorithm": _flow(batch),
        "completions": batch["prompts_per_step"] * batch["group_size"],
        "trainer": _flow(defaults["trainer"]),
    }
    lines: list[str] = []
    for line in _TEMPLATE.splitlines():
        knob, _, comment = line.partition("  # ")
        if not any(values[name] is None for name in re.findall(r"{(\w+)}", knob)):
            lines.append(_commented(knob.format_map(values), comment.format_map(values)))
    return path, "\n".join(lines) + "\n"


def _source(
    flags: argparse.Namespace, ask: Callable[..., Any], heldout: int, *, tiny: bool, terminal: bool
) -> _Source:
    if tiny and (flags.data or flags.environment):
        flag = f"--data {flags.data}" if flags.data else f"--environment {flags.environment}"
        raise ConfigError(f"{flag}: the tiny model knows some --task only. Name a --model")
    if flags.data and flags.task:
        raise ConfigError(f"--data {flags.data} and --task {flags.task}: keep one")

    name = flags.data or flags.task
    if not name and not flags.environment:
        if not terminal and not tiny:
            raise ConfigError("--data is missing. Name prompts, or use --task or --environment")
        kinds = "" if tiny else "a file, a folder, a dataset of the hub, or "
        question = f"Prompts: {kinds}a task of reasoning_gym"
        name = ask(question, _TINY_TASK if tiny else "chain_sum", str)
        flags.data = not tiny and (not re.fullmatch(r"\w+", name) or data_path(name).exists())
    if flags.data:
        return _suggest_source(name, flags, ask if terminal else None, heldout)
    return _generated(flags, name, heldout)


def _generated(flags: argparse.Namespace, task: str, heldout: int) -> _Source:
    environment = flags.environment
    words = re.findall(r"[^\W\d]\w*", environment.removesuffix(".py"))
    short = task == _TINY_TASK
    judge = "the task's verifier" if task else "the verdict"
    return _Source(
        knobs={
            "name": task or (words[-1].lower() if words else "episodes"),
            "source": "reasoning_gym" if task else "environment",
            "task": task,
            "params": {"min_word_len": 4, "max_word_len": 7} if short else {},
            "environment": {"target": environment} if environment else {},
            "size": 4000 if task else 2000,
            "holdout": min(128, heldout) if task else 64,
            "rewards": _weights(flags.reward, judged=True) if flags.reward or not task else {},
        },
        comments={
            "size": "generated from the seed",
            "holdout": "never trained on",
            "rewards": judge + ", and your function: docs/rewards.md" * bool(flags.reward),
        },
        learns=f"{task} of reasoning_gym" if task else f"in {environment}",
        prompt_tokens=64 if short else 512 if task else _EPISODE_PROMPT_TOKENS,
        about_prompts="" if task else "with max_tokens, room for all turns",
    )


def _suggest_source(
    data: str, flags: argparse.Namespace, ask: Callable[..., Any] | None, heldout: int
) -> _Source:
    """Suggest a data source from the first rows of a file, a folder or a hub dataset."""
    from keel.data.rows.places import read_source_rows  # noqa: PLC0415  takes half a second
    from keel.data.rows.read import BadLine, data_extension  # noqa: PLC0415

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
    for flag, name in (("--prompt", flags.prompt), ("--answer", flags.answer)):
        if name and name not in names:
            raise ConfigError(f"{flag} {name}: {knob} has only the columns {', '.join(names)}")
    prompt = flags.prompt or next((name for name in _PROMPTS if name in names), "")
    if not prompt:
        raise ConfigError(
            f"{knob}: no column looks like a prompt; it has {', '.join(names)}. Name one: --prompt "
            "COLUMN"
        )
    judged, column, mark = _detect_judging(records, names, flags.answer)
    reward, environment = flags.reward, flags.environment
    if "environment" in names and not environment:
        raise ConfigError(
            f"{data}: has a column `environment`. Name its reader with --environment, such as "
            "my_env:Shop"
        )
    if not judged and not reward and not environment:
        if ask is None:
            raise ConfigError(
                f"{data}: no column looks like an answer; it has {', '.join(names)}. Name one "
                "with --answer, or a function with --reward (docs/rewards.md)"
            )
        question = "No column looks like an answer. Reward function"
        reward = ask(question, "my_rewards.reward", str)
    columns = {} if prompt in ("prompt", "messages") else {"prompt": prompt}
    if column and column != "answer":
        columns["answer"] = column
    # A row has one prompt and one thing to be judged by: exclude other columns with such names.
    others = {"answer", *_JUDGED} if column else set(_JUDGED) - {judged}
    others |= {"messages"} - {prompt}
    if prompt == "messages" or "prompt" in columns:
        others |= {"prompt"}
    columns |= {key: "" for key in sorted(others - {*columns}) if key in names and key != column}
    texts = [_text(record.get(prompt)) for record in records]
    asks_boxed = _mostly(["boxed" in text for text in texts])
    longest = max(len(text.encode()) for text in texts)
    number, whole = min(len(first), _MAX_ROWS), len(first) <= _MAX_ROWS
    count = f"{number:,} rows" if whole else f"more than {number:,} rows"
    about = f"judged by the column `{judged}`" if judged in _JUDGED else ""
    if judged in ("mathematics", "text"):
        about = f"answers are compared as {judged}"
    stem = Path(data.rstrip("/")).name.partition(".")[0]
    boxed = judged == "mathematics" and not asks_boxed and not environment
    return _Source(
        knobs={
            "name": re.sub(r"[^\w-]+", "-", stem).strip("-") or "data",
            "source": kind,
            "path": data,
            "subset": flags.subset,
            "columns": columns,
            "answer_after": mark,
            "template": "boxed" if boxed else "",
            "environment": {"target": environment} if environment else {},
            "holdout": min(heldout, -(-number // 10)) if number > 1 else 0,
            "rewards": _weights(reward, judged=bool(judged or environment)),
        },
        comments={
            "template": "asks for the answer in \\boxed{}",
            "holdout": f"of {count}; never trained on",
            "rewards": "; ".join(
                filter(None, [about, "your function: docs/rewards.md" if reward else ""])
            ),
        },
        learns=f"from {data}",
        prompt_tokens=max(256, -(-(longest // 2 + 64) // 128) * 128),
        about_prompts=f"the longest one found has {longest:,} bytes",
        drop_long=not whole,
    )


def _detect_judging(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], answer: str
) -> tuple[str, str, str]:
    """Return how to judge completions ("mathematics", "text", a key in `_JUDGED`, or "" if
    unknown), the answer column, and the marker before the answer."""
    if not answer and "answer" not in names:
        for key in _JUDGED:
            if key in names:
                return key, "", ""
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


def _mostly(flags: Sequence[bool]) -> bool:
    return bool(flags) and sum(flags) >= _MIN_SHARE * len(flags)


def _flatten(record: Mapping[str, Any]) -> dict[str, Any]:
    """Add the values of nested objects under dotted names such as `reward_model.ground_truth`."""
    inner = {
        f"{name}.{key}": each
        for name, value in record.items()
        if isinstance(value, Mapping)
        for key, each in value.items()
    }
    return {**record, **inner}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(str(each.get("content") or "") for each in value if isinstance(each, dict))
    return str(value or "")


def _entry(knobs: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    lines = [
        _commented(f"      {name}: {_flow(value)}", comments.get(name, ""))
        for name, value in knobs.items()
        if value not in (None, "", {})
    ]
    return "    - " + "\n".join(lines)[6:]


def _commented(line: str, comment: str) -> str:
    return f"{line:<{_COMMENT_COLUMN}} # {comment}" if comment else line


def _weights(reward: str, *, judged: bool) -> dict[str, float]:
    if reward in ("", "correct"):
        return {"correct": 1.0}
    return {"correct": 1.0, reward: _EXTRA_REWARD} if judged else {reward: 1.0}


def _detect_gpus() -> tuple[int, float]:
    """Return the number of GPUs and the smallest GPU memory in GiB, as reported by nvidia-smi."""
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
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_yaml_scalar(str(k))}: {_flow(v)}' for k, v in value.items())}}}"
    if isinstance(value, float) and 0 < value < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return _yaml_scalar(value) if isinstance(value, str) else json.dumps(value)


def _yaml_scalar(text: str) -> str:
    """Format text as a YAML scalar, with quotes if YAML would otherwise parse a different value."""
    reserved = ("null", "true", "false", "yes", "no", "on", "off", "inf", "nan", "~")
    if re.fullmatch(r"[A-Za-z_~./][\w~./:-]*(?<!:)", text) and text.lower() not in reserved:
        return text
    return json.dumps(text.replace("${", "\\${"), ensure_ascii=False)
