"""What can be known about a recipe's rewards before the run starts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from keel.rewards.code.spec import read_task
from keel.rewards.code.verifier import CodeSettings, check_outputs, check_reference
from keel.rewards.compose import check_parts
from keel.rewards.custom import TextTrajectory, prompt_fields, sees_group
from keel.rewards.failure_budget import is_function
from keel.rewards.judge.specs import KINDS as JUDGED_KINDS
from keel.rewards.judge.specs import is_judged, judged_spec
from keel.rewards.rules.verifiers import KINDS as RULE_KINDS
from keel.rewards.rules.verifiers import verifier_for
from keel.rewards.sandbox.sandbox import open_sandbox
from keel.rewards.workers.pool import WorkerPool
from keel.rl.types import ENVIRONMENT, FUNCTIONS, Prompt

REFERENCES = 16
REFERENCES_S = 20.0
"""Of each source so many reference solutions are run, and none is begun after so long."""


def check_spec(spec: Mapping[str, Any]) -> None:
    """Raise ValueError for a reward spec that nothing could verify or judge. Runs nothing."""
    kind = spec.get("kind")
    if kind in (ENVIRONMENT, FUNCTIONS):
        return
    if not isinstance(kind, str) or kind not in (*RULE_KINDS, *JUDGED_KINDS):
        known = ", ".join((*RULE_KINDS, *JUDGED_KINDS))
        raise ValueError(f"reward spec has kind {kind!r}; there are {known}")
    if is_judged(spec):
        judged_spec(spec)
    elif kind == "code":
        read_task(spec)
    else:
        try:
            verifier_for(spec, ready=False)
        except (
            ArithmeticError,
            AttributeError,
            KeyError,
            TypeError,
        ) as error:
            # Options that a task cannot take.
            raise ValueError(f"reward spec of kind {kind!r}: {error}") from error


WHATEVER = ("NameError", "ImportError", "ModuleNotFoundError")
"""Errors that are not the completion's fault."""


FAILED = "failed on a sample completion"
"""How what came of a function begins where it has failed."""


def try_functions(
    prompts: Sequence[Prompt], weights: Mapping[str, float], *, timeout_s: float
) -> dict[str, str]:
    """Call each user's function of `weights` twice, in a worker process, with the first prompt and
    a sample completion (with the right answer where the prompt knows it), or a group of two: the
    first time it may load what it needs, the second has `timeout_s`, the run's deadline.

    Returns what came of it, for people, by function: the sample may be what it never meets. Raises
    ValueError where it fails whatever the completion: a name or a module that there is not.
    """
    names = [name for name in weights if is_function(name)]
    if not names or not prompts:
        return {}
    prompt = prompts[0]
    completion = sample_completion(prompt)
    pool = WorkerPool(1, timeout_s=timeout_s)
    said: dict[str, str] = {}
    try:
        for name in names:
            spec = {"kind": "function", "name": name, "prompt": prompt_fields(prompt)}
            text, of = completion.dumps(), "a sample completion"
            if sees_group(name):
                both = [text, sample_completion(prompt, other=True).dumps()]
                spec, text = {**spec, "group": True}, json.dumps(both)
                of = "a group of two sample completions, in the mean,"
            (verdict,) = pool.submit(spec, [text]).result()
            if not verdict.error:
                (verdict,) = pool.submit(spec, [text]).result()
            at = f" ({verdict.at})" if verdict.at else ""
            if verdict.error.partition(":")[0] in WHATEVER:
                raise ValueError(f"reward {name}: {verdict.error}{at}. Fix the function")
            said[name] = (
                f"{FAILED} of {prompt.prompt_id}: {verdict.error}{at}. Fix it (or raise "
                "rewards.timeout_s, where it is slow): in the run such completions get 0 for it, "
                "and too many stop the run (rewards.max_failure_fraction)"
                if verdict.error
                else f"{verdict.score:g} for {of} of {prompt.prompt_id}"
            )
    finally:
        pool.close()
    return said


def sample_completion(prompt: Prompt, *, other: bool = False) -> TextTrajectory:
    """A completion such as a policy might give. other: another one of the group, and wrong."""
    known = prompt.reward.get("answer")
    if isinstance(entry := prompt.reward.get("entry"), Mapping):
        known = cast(Mapping[str, Any], entry).get("answer")
    text = known if isinstance(known, str) and known else "Here is what I found: it is 42."
    if other:
        text = "I have tried it in two ways, and they do not agree. I do not know."
    thought = "Let me think about it. The question is clear."
    message: dict[str, Any] = {"role": "assistant", "content": text, "raw": text}
    if prompt.thinking:
        raw = f"<think>{thought}</think>{text}"
        message |= {"reasoning_content": thought, "raw": raw}
    return TextTrajectory(
        messages=(message,), finish_reason="stop", sampled_tokens=1 + len(message["raw"]) // 4
    )


def check_prompts(
    prompts: Sequence[Prompt],
    weights: Mapping[str, float],
    *,
    code: CodeSettings,
) -> str:
    """Check one source's prompts against the weights of their domain, and run their programs.

    The first `REFERENCES` reference solutions have to pass their own tests; none is begun after
    `REFERENCES_S` seconds. Returns what was run, for people, or "". Raises ValueError naming the
    prompt, and where this machine cannot hold an untrusted program.
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
    asked = [prompt for prompt in prompts if prompt.reward.get("kind") == "code"]
    for prompt in asked:
        check_outputs(prompt.reward, code, name=f"prompt {prompt.prompt_id}")
    solved = [prompt for prompt in asked if prompt.reward.get("reference") is not None]
    started, ran = time.monotonic(), 0
    for prompt in solved[:REFERENCES]:
        if time.monotonic() - started > REFERENCES_S:
            break
        check_reference(prompt.reward, code, name=f"prompt {prompt.prompt_id}")
        ran += 1
    if not solved:
        return "no reference solutions to try the tests on"
    return f"{ran} of {len(solved)} reference solutions run, all pass"
