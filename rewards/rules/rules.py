"""Rule rewards: is the answer correct, and does it keep to the format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

from keel.rewards.code.code import CodeSettings, judge_code
from keel.rewards.code.spec import read_task
from keel.rewards.custom import function
from keel.rewards.language.language import language
from keel.rewards.rules.choice import choice
from keel.rewards.rules.from_json import from_jsonable
from keel.rewards.rules.maths import mathematical
from keel.rewards.rules.structure import pattern, schema
from keel.rewards.rules.suspicious import is_all_answer, may_be_judged
from keel.rewards.sandbox.sandbox import open_sandbox
from keel.rewards.text import BOXED, THINK_CLOSE, THINK_OPEN, answer_in, normalise, outside_think

Judge = Callable[[str], float]
"""From a final text (thinking removed) to how correct it is, 0 … 1. May raise, hang or crash on
what a policy comes up with: `keel.rewards.workers.pool` is there to survive that."""

MAX_CHARACTERS = 32_768
"""Longer answers are wrong, unless the right one is that long."""
MOST_PARTIAL = 0.9
"""What a procedural verifier's partial credit is worth at most.

Some give 1 − 1e-16, or more than 1, to the right answer with words after it: the share of its
letters that are in place. A policy gains nothing by leaving such words out unless that is worth
something, so all that is not wholly right is a tenth below what is, and no pass.
"""


def judge_for(spec: Mapping[str, Any], code: CodeSettings | None = None) -> Judge:
    """The judge of a prompt's reward spec (`Prompt.reward`), or of a part that looks at the whole
    trajectory (`TRAJECTORY_KINDS`). code: how programs are run.

    Raises ValueError for a spec that no rule reads.
    """
    kind = str(spec.get("kind"))
    if kind in TRAJECTORY_KINDS:
        return TRAJECTORY_KINDS[kind](spec)
    if kind not in KINDS:
        raise ValueError(f"reward spec has kind {spec.get('kind')!r}; there are {', '.join(KINDS)}")
    judge = KINDS[kind](spec, code or CodeSettings())
    return lambda text: judge(outside_think(text))


def reasoning_gym(spec: Mapping[str, Any], _: CodeSettings) -> Judge:
    """The task's own verifier, partial credit included: at most `MOST_PARTIAL`.

    Full marks are for what it gives exactly 1 (as every task of reasoning_gym 0.1.25 does for its
    own answers), and that has nothing else around it
    (`keel.rewards.rules.suspicious.is_all_answer`). Spec: `task`, `params` (the generator's
    options; verifiers read some of them), `entry`.
    """
    task = str(spec.get("task"))
    read = from_jsonable(spec.get("entry"))
    entry = cast(dict[str, Any], read if isinstance(read, dict) else {})
    if not isinstance(entry.get("answer", 0), (str, type(None))):
        raise ValueError(
            "reward spec of kind 'reasoning_gym' needs `task`, and an `entry` that has an `answer`"
        )
    verify = _verifier(task, json.dumps(spec.get("params", {}), sort_keys=True))
    right = entry["answer"] or ""
    longest = max(MAX_CHARACTERS, 4 * len(right))

    def judge(text: str) -> float:
        answer = answer_in(text)
        if not answer or len(answer) > longest or not may_be_judged(task, answer, right):
            return 0.0
        score = float(verify(answer, entry))
        if not math.isfinite(score):
            raise ValueError(f"the verifier of {task} returned {score}")
        if score == 1.0 and is_all_answer(task, answer, right):
            return 1.0
        return min(max(score, 0.0), MOST_PARTIAL)

    return judge


def answer(spec: Mapping[str, Any], _: CodeSettings) -> Judge:
    """Comparison with a known answer. Spec: `answer`, `match` (one of MATCHES), and what else that
    one reads.

    Raises ValueError for an `answer` that `match` cannot compare with.
    """
    match, right = spec.get("match", "math"), spec.get("answer")
    if not isinstance(match, str) or match not in MATCHES:
        raise ValueError(f"reward spec has match {match!r}; there are {', '.join(MATCHES)}")
    if match != "schema" and not isinstance(right, str):
        raise ValueError("reward spec of kind 'answer' needs an `answer`, a text")
    same = MATCHES[match](spec)
    return lambda text: float(same(text))


def code(spec: Mapping[str, Any], settings: CodeSettings) -> Judge:
    """A program against hidden tests; `rewards.code` shows the spec.

    Raises ValueError for a bad spec, and where this machine cannot hold an untrusted program.
    """
    read_task(spec)
    open_sandbox(settings.isolation)
    return lambda text: judge_code(spec, text, settings).score


def exact(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    """The same text, up to Unicode form and white space; all of it, or what it marks as answer."""
    wanted = normalise(spec["answer"])
    longest = max(MAX_CHARACTERS, 4 * len(spec["answer"]))
    return lambda text: len(text) <= longest and normalise(answer_in(text)) == wanted


MATCHES: dict[str, Callable[[Mapping[str, Any]], Callable[[str], bool]]] = {
    "math": lambda spec: mathematical(spec["answer"], tolerance=spec.get("tolerance")),
    "exact": exact,
    "choice": choice,
    "schema": schema,
    "regex": pattern,
}
KINDS: dict[str, Callable[[Mapping[str, Any], CodeSettings], Judge]] = {
    "reasoning_gym": reasoning_gym,
    "answer": answer,
    "code": code,
}
"""What a prompt's reward spec may be; those that a model judges are in
`keel.rewards.judge.specs`."""
TRAJECTORY_KINDS: dict[str, Callable[[Mapping[str, Any]], Judge]] = {
    "function": function,
    "language": language,
}
"""Parts that look at `SpokenTrajectory.dumps()`. Never in a prompt: data must not name code."""


def keeps_format(raw: str, *, thinking: bool, finished: bool) -> bool:
    """One closed think block before the answer when thinking is on, none when it is off, and an
    answer that is not blank, ends by itself, and marks no second answer.

    raw: the sampled text. Its `<think>` may be missing: many chat templates end with it.
    """
    said = outside_think(raw)
    if not finished or not said or max(said.count(BOXED), said.count("</answer>")) > 1:
        return False
    opened, closed = raw.count(THINK_OPEN), raw.count(THINK_CLOSE)
    if not thinking:
        return opened == closed == 0
    starts = raw.lstrip().startswith(THINK_OPEN)
    return closed == 1 and (opened == 0 or (opened == 1 and starts))


@lru_cache(maxsize=64)
def _verifier(task: str, params: str) -> Callable[[str, Any], float]:
    """`score_answer` of the task, built as the generator was. Workers judge many entries of few
    tasks, and some tasks load a dictionary when they are built."""
    from reasoning_gym.factory import (  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        DATASETS,  # pyright: ignore[reportUnknownVariableType]
    )

    tasks = cast(Mapping[str, tuple[Any, Any]], DATASETS)
    if task not in tasks:
        raise ValueError(f"reward spec has task {task!r}, which reasoning_gym does not have")
    dataset_type, config_type = tasks[task]
    dataset = dataset_type(config=config_type(**from_jsonable(json.loads(params))))
    return cast(Callable[[str, Any], float], dataset.score_answer)
