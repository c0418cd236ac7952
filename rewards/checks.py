"""Checks the rewards of a recipe before a run starts."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from keel.configs.sections.rewards import CodeConfig
from keel.rewards.code.verifier import check_task, read_task
from keel.rewards.compose import check_parts
from keel.rewards.custom import TextTrajectory, is_function, prompt_fields, scores_group
from keel.rewards.judge.specs import JUDGED_KINDS, judged_spec
from keel.rewards.pool import WorkerPool
from keel.rewards.rules.maths import calculus_in
from keel.rewards.rules.verifiers import RULE_KINDS, verifier_for
from keel.rewards.sandbox.sandbox import open_sandbox
from keel.rl.types import ENVIRONMENT, FUNCTIONS, Prompt

_REFERENCES = 16
_REFERENCES_S = 20.0
FAILED = "failed on a sample completion"  # the message about a failed function starts with this
_CODE_ERRORS = ("NameError", "ImportError", "ModuleNotFoundError")  # bugs in the function


def check_spec(spec: Mapping[str, Any]) -> None:
    """Validate a reward spec without running anything. Raises ValueError if the spec is invalid."""
    kind = spec.get("kind")
    if kind in (ENVIRONMENT, FUNCTIONS):
        return
    if not isinstance(kind, str) or kind not in (*RULE_KINDS, *JUDGED_KINDS):
        known = ", ".join((*RULE_KINDS, *JUDGED_KINDS))
        raise ValueError(f"reward spec has kind {kind!r}; use one of {known}")
    if kind in JUDGED_KINDS:
        judged_spec(spec)
    elif kind == "code":
        read_task(spec)
    else:
        try:
            verifier_for(spec)
        except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
            # From options that a reasoning_gym task does not support.
            raise ValueError(f"reward spec of kind {kind!r}: {error}") from error
        by_value = kind == "answer" and spec.get("match", "math") == "math"
        if by_value and (found := calculus_in(str(spec["answer"]))):
            raise ValueError(
                f"answer {spec['answer']!r} would be compared as text, because {found} is not "
                "evaluated; write its value, or set match: exact"
            )


def try_functions(
    prompts: Sequence[Prompt], weights: Mapping[str, float], *, timeout_s: float
) -> dict[str, str]:
    """Test the user's reward functions in a worker process, on made-up completions of the first
    prompt.

    Each function is called twice. The first call may load models, but the second must finish within
    `timeout_s`. Returns one message per function. Functions may not support made-up completions, so
    most failures are only reported in these messages. Raises ValueError for errors that every
    completion would cause, such as a NameError.
    """
    names = [name for name in weights if is_function(name)]
    if not names or not prompts:
        return {}
    prompt = prompts[0]
    answer = prompt.reward.get("answer")
    if isinstance(entry := prompt.reward.get("entry"), Mapping):
        answer = cast(Mapping[str, Any], entry).get("answer")
    right = answer if isinstance(answer, str) and answer else "The result is 42."
    texts = [
        TextTrajectory(
            messages=({"role": "assistant", "content": text, "raw": text},),
            finish_reason="stop",
            sampled_tokens=1 + len(text) // 4,
        ).dumps()
        for text in (right, "I have tried it in two ways, and they do not agree. I do not know.")
    ]
    pool = WorkerPool(1, timeout_s=timeout_s)
    messages: dict[str, str] = {}
    try:
        for name in names:
            spec = {"kind": "function", "name": name, "prompt": prompt_fields(prompt)}
            text, sample = texts[0], "a sample completion"
            if scores_group(name):
                spec, text = {**spec, "group": True}, json.dumps(texts)
                sample = "a group of two sample completions (mean)"
            (result,) = pool.submit(spec, [text]).result()
            if not result.error:
                (result,) = pool.submit(spec, [text]).result()
            error = f"{result.error} ({result.at})" if result.at else result.error
            if error.partition(":")[0] in _CODE_ERRORS:
                raise ValueError(f"reward {name}: {error}. Fix the function")
            messages[name] = f"{result.score:g} for {sample} of {prompt.prompt_id}"
            if error:
                messages[name] = (
                    f"{FAILED} of {prompt.prompt_id}: {error}. Such completions score 0. Fix it, "
                    "or raise rewards.timeout_s if it is slow"
                )
    finally:
        pool.close()
    return messages


def check_prompts(
    prompts: Sequence[Prompt], weights: Mapping[str, float], *, code: CodeConfig
) -> str:
    """Check that a data source's prompts are compatible with its reward weights, and run the
    reference solutions of its programming tasks.

    Returns a summary of the runs, or "" if there were none. Raises ValueError if a prompt is
    invalid (the error names the first one) or if this machine can't isolate programs.
    """
    kinds = {str(prompt.reward.get("kind")): prompt for prompt in reversed(prompts)}
    for kind, first in kinds.items():
        try:
            check_parts(kind, weights)
        except ValueError as error:
            raise ValueError(f"prompt {first.prompt_id} {error}") from error
    if "code" not in kinds:
        return ""
    open_sandbox(code.isolation)
    programs = [prompt for prompt in prompts if prompt.reward.get("kind") == "code"]
    for prompt in programs:
        check_task(prompt.reward, code, name=f"prompt {prompt.prompt_id}")
    solved = [prompt for prompt in programs if prompt.reward.get("reference") is not None]
    started, runs = time.monotonic(), 0
    for prompt in solved[:_REFERENCES]:
        if time.monotonic() - started > _REFERENCES_S:
            break
        check_task(prompt.reward, code, name=f"prompt {prompt.prompt_id}", run_reference=True)
        runs += 1
    if not solved:
        return "no reference solutions to try the tests on"
    return f"{runs} of {len(solved)} reference solutions run, all pass"
