"""The verifiers that come with reasoning_gym's tasks, and what their partial credit is worth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

from keel.rewards.code.call_driver import from_jsonable
from keel.rewards.rules.reasoning_gym_guards import is_all_answer, may_be_verified
from keel.rewards.text import answer_in

MAX_CHARACTERS = 32_768
"""A longer answer is wrong, unless the right one is that long."""
MOST_PARTIAL = 0.9
"""What a procedural verifier's partial credit is worth at most.

Some give 1 − 1e-16, or more than 1, to the right answer with words after it: the share of its
letters that are in place. A policy gains nothing by leaving such words out unless that is worth
something, so all that is not wholly right is a tenth below what is, and no pass.
"""


def reasoning_gym(spec: Mapping[str, Any]) -> Callable[[str], float]:
    """The task's own verifier, partial credit included: at most `MOST_PARTIAL`.

    Full marks are for what it gives exactly 1 (as every task of reasoning_gym 0.1.25 does for its
    own answers), and that has nothing else around it (`is_all_answer`). Spec: `task`, `params` (the
    generator's options; verifiers read some of them), `entry`.
    """
    task = str(spec.get("task"))
    read = from_jsonable(spec.get("entry"))
    entry = cast(dict[str, Any], read if isinstance(read, dict) else {})
    if not isinstance(entry.get("answer", 0), (str, type(None))):
        raise ValueError(
            "reward spec of kind 'reasoning_gym' needs `task`, and an `entry` that has an `answer`"
        )
    score_answer = _score_answer(task, json.dumps(spec.get("params", {}), sort_keys=True))
    right = entry["answer"] or ""
    longest = max(MAX_CHARACTERS, 4 * len(right))

    def verify(text: str) -> float:
        answer = answer_in(text)
        if not answer or len(answer) > longest or not may_be_verified(task, answer, right):
            return 0.0
        score = float(score_answer(answer, entry))
        if not math.isfinite(score):
            raise ValueError(f"the verifier of {task} returned {score}")
        if score == 1.0 and is_all_answer(task, answer, right):
            return 1.0
        return min(max(score, 0.0), MOST_PARTIAL)

    return verify


@lru_cache(maxsize=64)
def _score_answer(task: str, params: str) -> Callable[[str, Any], float]:
    """`score_answer` of the task, built as the generator was. Workers judge many entries of few
    tasks, and some tasks load a dictionary when they are built."""
    from reasoning_gym.factory import (  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        DATASETS,  # pyright: ignore[reportUnknownVariableType]
    )

    tasks = cast(Mapping[str, tuple[Any, Any]], DATASETS)
    if task not in tasks:
        raise ValueError(f"reward spec has task {task!r}, which reasoning_gym does not have")
    dataset_type, config_type = tasks[task]
    options = cast(dict[str, Any], from_jsonable(json.loads(params)))
    dataset = dataset_type(config=config_type(**options))
    return cast(Callable[[str, Any], float], dataset.score_answer)
