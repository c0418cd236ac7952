"""From a prompt's reward spec to the rule that says how correct a completion is: its verifier."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from keel.rewards.code.spec import read_task
from keel.rewards.code.verifier import CodeSettings, verify_code
from keel.rewards.custom import function
from keel.rewards.rules.choice import choice
from keel.rewards.rules.json_schema import schema
from keel.rewards.rules.maths import mathematical
from keel.rewards.rules.reasoning_gym import reasoning_gym
from keel.rewards.sandbox.sandbox import open_sandbox
from keel.rewards.text import (
    BOXED,
    WRAPPED,
    answer_in,
    blank,
    normalise,
    outside_think,
)
from keel.rl.turns import THINK

Verifier = Callable[[str], float | Mapping[str, float]]
"""From a final text (thinking removed) to how correct it is, 0 … 1, or to parts of the reward with
`correct` among them. May raise, hang or crash on
what a policy comes up with: `keel.rewards.workers.pool` is there to survive that."""

MAX_CHARACTERS = 32_768
"""A longer text is wrong, unless the right answer is that long."""
MATCH_TIMEOUT_S = 0.5
"""Time for one match of a regular expression."""


def verifier_for(
    spec: Mapping[str, Any], code: CodeSettings | None = None, *, ready: bool = True
) -> Verifier:
    """The verifier for a prompt's reward spec (`Prompt.reward`), or for a part that looks at the
    whole trajectory (`TRAJECTORY_KINDS`). code: how programs are run. ready: to be used, and not
    made only to see whether it can be (`mathematical`).

    Raises ValueError for a spec that no rule reads.
    """
    kind = str(spec.get("kind"))
    if kind in TRAJECTORY_KINDS:
        return TRAJECTORY_KINDS[kind](spec)
    if kind not in KINDS:
        raise ValueError(f"reward spec has kind {spec.get('kind')!r}; there are {', '.join(KINDS)}")
    if kind == "answer":
        verify = answer(spec, ready=ready)
    else:
        verify = KINDS[kind](spec, code or CodeSettings())
    return lambda text: verify(outside_think(text))


def answer(spec: Mapping[str, Any], *, ready: bool = True) -> Verifier:
    """Comparison with a known answer. Spec: `answer`, `match` (one of MATCHES), and what else that
    one reads.

    Raises ValueError for an `answer` that `match` cannot compare with.
    """
    match, right = spec.get("match", "math"), spec.get("answer")
    if not isinstance(match, str) or match not in MATCHES:
        raise ValueError(f"reward spec has match {match!r}; there are {', '.join(MATCHES)}")
    if match != "schema" and not isinstance(right, str):
        raise ValueError("reward spec of kind 'answer' needs an `answer`, a text")
    same = mathematics(spec, ready=ready) if match == "math" else MATCHES[match](spec)
    return lambda text: float(same(text))


def code(spec: Mapping[str, Any], settings: CodeSettings) -> Verifier:
    """A program against hidden tests; `rewards.code` shows the spec.

    Raises ValueError for a bad spec, and where this machine cannot hold an untrusted program.
    """
    read_task(spec)
    open_sandbox(settings.isolation)

    def verify(text: str) -> Mapping[str, float]:
        verdict = verify_code(spec, text, settings)
        return {**verdict.parts, "correct": verdict.score}

    return verify


def exact(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    r"""The same text, up to Unicode form and white space; all of it, or what it marks as answer,
    also as `\text{…}`."""
    wanted = normalise(spec["answer"])
    longest = max(MAX_CHARACTERS, 4 * len(spec["answer"]))

    def same(text: str) -> bool:
        if len(text) > longest:
            return False
        said = answer_in(text)
        wrapped = WRAPPED.fullmatch(said)
        return wanted in (normalise(said), normalise(wrapped[1]) if wrapped else None)

    return same


def regex(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    """A test for whether the whole answer matches the regular expression `answer`.

    A match that takes longer than `MATCH_TIMEOUT_S` is wrong. Raises ValueError for a pattern that
    does not compile in Python's `re`.
    """
    # Loaded for this rule alone: workers stay light.
    import regex as timed_regex  # noqa: PLC0415

    try:
        re.compile(str(spec["answer"]))  # the other library accepts more, so that data would differ
        compiled = timed_regex.compile(str(spec["answer"]))
    except (re.error, timed_regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"answer {spec['answer']!r} is no regular expression: {error}") from error

    def same(text: str) -> bool:
        if len(text) > MAX_CHARACTERS:
            return False
        try:
            return compiled.fullmatch(answer_in(text), timeout=MATCH_TIMEOUT_S) is not None
        except TimeoutError:
            return False

    return same


def mathematics(spec: Mapping[str, Any], *, ready: bool = True) -> Callable[[str], bool]:
    return mathematical(spec["answer"], tolerance=spec.get("tolerance"), ready=ready)


MATCHES: dict[str, Callable[[Mapping[str, Any]], Callable[[str], bool]]] = {
    "math": mathematics,
    "exact": exact,
    "choice": choice,
    "schema": schema,
    "regex": regex,
}
KINDS: dict[str, Callable[[Mapping[str, Any], CodeSettings], Verifier]] = {
    "reasoning_gym": lambda spec, _: reasoning_gym(spec),
    "answer": lambda spec, _: answer(spec),
    "code": code,
}
"""What a prompt's reward spec may be; those that a model judges are in
`keel.rewards.judge.specs`."""


def language(spec: Mapping[str, Any]) -> Verifier:
    """`keel.rewards.language.share.language`."""
    # A third of what a worker's start takes, and most runs do without.
    from keel.rewards.language import share  # noqa: PLC0415

    return share.language(spec)


TRAJECTORY_KINDS: dict[str, Callable[[Mapping[str, Any]], Verifier]] = {
    "function": function,
    "language": language,
}
"""Parts that look at `TextTrajectory.dumps()`. Never in a prompt: data must not name code."""


def keeps_format(raw: str, *, thinking: bool, finished: bool) -> bool:
    """Return whether a completion has one closed think block before the answer with thinking on,
    none with it off, and an answer that is not blank, ends by itself, and is marked at most once.

    raw: the sampled text. Its `<think>` may be missing: many chat templates end with it.
    """
    final = outside_think(raw)
    if not finished or blank(final) or max(final.count(BOXED), final.count("</answer>")) > 1:
        return False
    opened, closed = raw.count(THINK.open), raw.count(THINK.close)
    if not thinking:
        return opened == closed == 0
    starts = raw.lstrip().startswith(THINK.open)
    return closed == 1 and (opened == 0 or (opened == 1 and starts))
