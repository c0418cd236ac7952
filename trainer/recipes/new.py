"""`keel new`: a recipe from a few flags, or from a few questions, checked at once.

How the machine is used (engines, ranks, memory shares, micro-batches, ZeRO) is left open. Nothing
here loads torch: questions come at once, and the check that follows takes its seconds.
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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from keel.configs.load import load_config
from keel.configs.paths import data_path
from keel.configs.schema import ConfigError
from keel.configs.sections.model import EMBEDDED, EmbeddedConfig
from keel.model.source import check_path, hub_answers, is_hub_name
from keel.trainer.recipes.draft import Draft, Source, text_of

SMALL = "Qwen/Qwen3-0.6B"
"""Where nobody says which model."""
TASK, TASK_KNOBS = "spell_backward", {"params": {"min_word_len": 4, "max_word_len": 7}}
"""What the embedded model is taught, where nobody says more."""
GIB = 80.0
"""Memory of GPUs that nobody has seen."""
TOKENS = {True: 4096, False: 1024}
"""Of a completion with thinking, and without."""
HELD_OUT = 200
"""Most rows to hold out; of few a tenth."""
OPENING = 3072
"""Tokens of an episode before its last turn; the tools are among them."""
BESIDE = 0.2
"""Weight of a reward function where something else says what is right."""
ASKED_S = 10.0
STOPPED = 130

Ask = Callable[[str, str], str]
"""Of a question and the default, the answer."""


def new(arguments: argparse.Namespace, check: Callable[[str], int]) -> int:
    """Write the recipe, and check it. check: `keel check` of a file; its exit status is this one's.

    Raises ConfigError: the file is there already, or what is needed is not given and nobody can be
    asked.
    """
    asked = _asker(arguments)
    if arguments.file:
        _check_free(Path(arguments.file))
    try:
        draft = _drafted(arguments, asked)
    except (EOFError, KeyboardInterrupt):
        print("\nkeel new: stopped; nothing was written", file=sys.stderr)
        return STOPPED
    path = Path(draft.path)
    _check_free(path)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text_of(draft))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    try:
        load_config(path)
    except ConfigError:  # of flags that do not go together
        path.unlink()
        raise
    print(f"wrote {path}:\n\n{text_of(draft)}", flush=True)
    status = check(str(path))
    if status:
        again = f"keel check {shlex.quote(str(path))}"
        print(f"\n{path} stays as it is. Change it, and: {again}", file=sys.stderr)
    else:
        print(f"\nnext: keel train {shlex.quote(str(path))}")
    return status


def _asker(arguments: argparse.Namespace) -> Ask | None:
    """None: nobody is there, or wants to be asked."""
    if arguments.yes or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    return lambda question, default: input(f"{question} [{default}] ").strip() or default


def _drafted(given: argparse.Namespace, ask: Ask | None) -> Draft:
    here, gib = gpus_here()
    gpus = given.gpus if given.gpus is not None else int(_number("GPUs (0: none)", here, ask))
    if gpus < 0 or given.nodes < 1:
        raise ConfigError(f"--gpus {gpus} --nodes {given.nodes}: must be at least 0 and 1")
    size = given.gpu_gib or 0.0
    if gpus and not size and not gib:
        size = _number("Memory of a GPU, in GiB", GIB, ask)
    model = given.model or (ask or _default)(
        "Model: a folder, a name of the hub, or embedded", SMALL if gpus else EMBEDDED
    )
    if model != EMBEDDED and not is_hub_name(model):
        check_path(model)
    source, think = _source(given, ask, embedded=model == EMBEDDED)
    context, tokens = context_of(model), given.max_tokens
    if model == EMBEDDED:  # its completions are short, and so is its context
        tokens = tokens or 48
        asked = max(1, min(source.max_prompt_tokens, context - tokens))
        source = replace(source, max_prompt_tokens=asked)
    elif context:  # what prompts may take is a guess, and half of a short context is enough
        most = max(context // 2, context - tokens if tokens else 0)
        asked = max(1, min(source.max_prompt_tokens, most))
        source = replace(source, max_prompt_tokens=asked)
    room = context - source.max_prompt_tokens if context else TOKENS[True]
    if tokens is None:
        tokens = min(TOKENS[think], max(1, room))
    if context and tokens > room:
        raise ConfigError(
            f"--max-tokens {tokens}: {model} has a context of {context:,} tokens, and prompts take "
            f"up to {source.max_prompt_tokens:,} of it; at most {max(1, room):,}"
        )
    file = given.file or (ask or _default)("File to write", f"{source.name}.yaml")
    return Draft(
        path=file,
        model=model,
        source=source,
        gpus=gpus,
        nodes=given.nodes,
        gpu_gib=size,
        steps=given.steps,
        max_tokens=tokens,
        think=think,
    )


def _source(given: argparse.Namespace, ask: Ask | None, *, embedded: bool) -> tuple[Source, bool]:
    """And whether the policy is to think."""
    data, task, environment = given.data, given.task, given.environment
    if embedded and environment:
        raise ConfigError(
            f"--environment {environment}: the embedded model has been taught a few tasks of "
            "reasoning_gym and nothing else. Name a model (--model)"
        )
    if not data and not task and not environment:
        if ask is None and not embedded:
            raise ConfigError(
                "--data is missing: a file, a folder or a dataset of the hub (or --task, a task of "
                "reasoning_gym, or --environment, which makes its own tasks)"
            )
        words = "Prompts: a file, a folder, a dataset of the hub, or a task of reasoning_gym"
        data = (ask or _default)(words, TASK if embedded else "chain_sum")
        if re.fullmatch(r"\w+", data) and not data_path(data).exists():
            data, task = None, data
    if data and task:
        raise ConfigError(f"--data {data} and --task {task}: keep one")
    if embedded and data:
        raise ConfigError(
            f"--data {data}: the embedded model has been taught a few tasks of reasoning_gym and "
            "nothing else. Name a model (--model), or a task (--task)"
        )
    think = bool(given.think)
    if given.think is None and ask and not embedded:
        think = ask("Think before answering (y/n)", "n").lower().startswith("y")
    if data:
        return _of_rows(data, given, ask), think
    return (_of_task(task, given) if task else _of_episodes(environment, given.reward)), think


def _of_task(task: str, given: argparse.Namespace) -> Source:
    params = TASK_KNOBS if task == TASK else {}
    environment = {"environment": {"target": given.environment}} if given.environment else {}
    rewards = {"rewards": _rewards(given.reward, judged=True)} if given.reward else {}
    made = {"size": 4000, "holdout": 128}
    return Source(
        name=task,
        said=f"{task} of reasoning_gym",
        knobs={"source": "reasoning_gym", "task": task, **params, **environment, **made, **rewards},
        comments={
            "holdout": "never trained on",
            "size": "made from a seed",
            "rewards": "the task's own verifier, and a function of yours: docs/rewards.md",
        },
        max_prompt_tokens=64 if task == TASK else 512,
    )


def _of_episodes(environment: str, reward: str) -> Source:
    """An environment that makes its tasks itself."""
    words = re.findall(r"[^\W\d]\w*", environment.removesuffix(".py"))
    return Source(
        name=words[-1].lower() if words else "episodes",
        said=f"in {environment}",
        knobs={
            "source": "environment",
            "environment": {"target": environment},
            "size": 2000,
            "holdout": 64,
            "rewards": _rewards(reward, judged=True),
        },
        comments={
            "holdout": "never trained on",
            "size": "tasks, made from their numbers",
            "rewards": "the verdict" + ", and a function of yours: docs/rewards.md" * bool(reward),
        },
        max_prompt_tokens=OPENING,
        about_prompts="with max_tokens, room for all turns",
    )


def _rewards(reward: str, *, judged: bool) -> dict[str, float]:
    """judged: whether something but the function says what is right, which it is then beside."""
    if reward in ("", "correct"):
        return {"correct": 1.0}
    return {"correct": 1.0, reward: BESIDE} if judged else {reward: 1.0}


def _of_rows(data: str, given: argparse.Namespace, ask: Ask | None) -> Source:
    """Files say much about themselves; the rest is asked."""
    from keel.data.rows.proposal import JUDGED, propose  # noqa: PLC0415  the hub's client

    found = propose(
        data,
        subset=given.subset,
        prompt=given.prompt,
        answer=given.answer,
        hub_answers=hub_answers,
    )
    reward, environment = given.reward, given.environment
    if found.environment and not environment:
        if ask is None:
            raise ConfigError(
                f"--data {data}: has a column `environment`; name what reads it: --environment "
                "module:Class (docs/environments.md)"
            )
        environment = ask("Environment that reads the column `environment`", "module:Class")
    if found.judged == "nothing" and not reward and not environment:
        if ask is None:
            raise ConfigError(
                f"--data {data}: no column looks like an answer; it has {', '.join(found.names)}. "
                "Name one (--answer COLUMN), or a function of yours (--reward module.function)"
            )
        reward = ask("No column looks like an answer. Reward function", "my_rewards.reward")
    name = re.sub(r"[^\w-]+", "-", Path(data.rstrip("/")).name.partition(".")[0]).strip("-")
    said = {
        "maths": "answers are compared as mathematics",
        "text": "answers are words here: compared as text",
        "nothing": "",
        **{key: f"judged by the column `{key}`" for key in JUDGED},
    }[found.judged]
    held = min(HELD_OUT, -(-found.rows // 10)) if found.rows > 1 else 0
    if reward:
        said = f"{said}; a function of yours: docs/rewards.md".removeprefix("; ")
    boxed = found.judged == "maths" and not found.boxed and not environment
    judged = found.judged != "nothing" or bool(environment)
    knobs: dict[str, Any] = {
        "source": found.kind,
        "path": data,
        "subset": given.subset,
        "columns": dict(found.columns),
        "answer_after": found.answer_after,
        "template": "boxed" if boxed else "",
        "environment": {"target": environment} if environment else {},
        "holdout": held,
        "rewards": _rewards(reward, judged=judged),
    }
    rows = f"{found.rows:,} rows" if found.whole else f"more than {found.rows:,} rows"
    return Source(
        name=name or "data",
        said=f"from {data}",
        knobs={knob: value for knob, value in knobs.items() if value or knob == "holdout"},
        comments={
            "holdout": f"of {rows}; never trained on",
            "rewards": said,
            "template": "asks for the answer in \\boxed{}",
        },
        max_prompt_tokens=max(256, -(-(found.longest // 2 + 64) // 128) * 128),
        about_prompts=f"the longest seen has {found.longest:,} bytes",
        drop_long=not found.whole,
    )


def context_of(model: str) -> int:
    """Tokens, by the config.json of a folder or of what was downloaded; 0 where nobody knows."""
    if model == EMBEDDED:
        return EmbeddedConfig().max_context
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
    """GPUs of this machine by NVIDIA's own tool, and the memory of the smallest, in GiB."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0, 0.0
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ASKED_S)
        sizes = [float(line) / 1024 for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0, 0.0
    return len(sizes), min(sizes, default=0.0)


def _number(question: str, default: float, ask: Ask | None) -> float:
    said = (ask or _default)(question, f"{default:g}")
    try:
        return float(said)
    except ValueError as error:
        raise ConfigError(f"{question}: {said!r} is no number") from error


def _default(_: str, default: str) -> str:
    return default


def _check_free(path: Path) -> None:
    """Raises ConfigError: nothing is overwritten."""
    if path.exists():
        raise ConfigError(f"{path}: exists already; name another file, or remove it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: no such folder as {path.parent}")
