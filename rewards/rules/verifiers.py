"""Builds verifiers from reward specs. A verifier scores how correct a completion is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from keel.rewards.code.spec import code_blocks, read_task
from keel.rewards.code.verifier import CodeSettings, verify_code
from keel.rewards.custom import function
from keel.rewards.rules.choice import choice
from keel.rewards.rules.maths import mathematical
from keel.rewards.rules.reasoning_gym import reasoning_gym
from keel.rewards.sandbox.sandbox import open_sandbox
from keel.rewards.text import (
    BOXED,
    WRAPPED,
    answer_in,
    blank,
    marked_answer,
    normalise,
    outside_think,
)
from keel.rl.turns import THINK

Verifier = Callable[[str], float | Mapping[str, float]]
"""Scores the final text of a completion, without thinking, from 0 to 1.

It may return several reward components instead, one of which is `correct`. On hostile text, it may
raise, hang or crash. `keel.rewards.workers.pool` therefore runs it in a separate process.
"""

_MAX_CHARACTERS = 32_768
"""Maximum length of a text, unless the right answer is about as long."""
_MATCH_TIMEOUT_S = 0.5


def verifier_for(
    spec: Mapping[str, Any], code: CodeSettings | None = None, *, ready: bool = True
) -> Verifier:
    """Build the verifier for a reward spec, or for a reward component of a whole trajectory.
    `ready` is passed to `mathematical`. Raises ValueError if the spec is malformed."""
    kind = spec.get("kind")
    if kind == "function":
        return function(spec)
    if kind == "language":
        # Imported late: it takes a third of a worker's start-up time.
        from keel.rewards.language import share  # noqa: PLC0415

        return share.language(spec)
    if kind == "answer":
        verify = _answer(spec, ready=ready)
    elif kind == "code":
        verify = _code(spec, code or CodeSettings())
    elif kind == "reasoning_gym":
        verify = reasoning_gym(spec)
    else:
        raise ValueError(f"reward spec has kind {kind!r}; use one of {', '.join(KINDS)}")
    return lambda text: verify(outside_think(text))


KINDS = ("reasoning_gym", "answer", "code")
"""The kinds of reward specs that have a verifier. `keel.rewards.judge.specs` lists those that need
a judge.

The kinds `function` and `language` are not listed. They score the output of
`TextTrajectory.dumps()`. Prompts cannot use them, because data must not be able to name code.
"""


def _answer(spec: Mapping[str, Any], *, ready: bool = True) -> Verifier:
    match, right = spec.get("match", "math"), spec.get("answer")
    if not isinstance(match, str) or match not in _MATCHES:
        raise ValueError(f"reward spec has match {match!r}; use one of {', '.join(_MATCHES)}")
    if match != "schema" and not isinstance(right, str):
        raise ValueError("reward spec of kind 'answer' needs an `answer`, a text")
    if match == "math":
        same = mathematical(str(right), tolerance=spec.get("tolerance"), ready=ready)
    else:
        same = _MATCHES[match](spec)
    return lambda text: float(same(text))


def _code(spec: Mapping[str, Any], settings: CodeSettings) -> Verifier:
    read_task(spec)
    open_sandbox(settings.isolation)

    def verify(text: str) -> Mapping[str, float]:
        verdict = verify_code(spec, text, settings)
        return {**verdict.parts, "correct": verdict.score}

    return verify


def _exact(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    expected = normalise(spec["answer"])
    longest = max(_MAX_CHARACTERS, 4 * len(spec["answer"]))

    def same(text: str) -> bool:
        if len(text) > longest:
            return False
        answer = answer_in(text)
        wrapped = WRAPPED.fullmatch(answer)
        return expected in (normalise(answer), normalise(wrapped[1]) if wrapped else None)

    return same


def _regex(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    """Build a verifier that matches a regular expression against the whole answer. A timeout counts
    as wrong."""
    # Imported late to keep workers light.
    import regex as timed_regex  # noqa: PLC0415

    try:
        re.compile(str(spec["answer"]))  # `regex` accepts more patterns
        compiled = timed_regex.compile(str(spec["answer"]))
    except (re.error, timed_regex.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"answer {spec['answer']!r} is not a regular expression: {error}"
        ) from error

    def same(text: str) -> bool:
        if len(text) > _MAX_CHARACTERS:
            return False
        try:
            return compiled.fullmatch(answer_in(text), timeout=_MATCH_TIMEOUT_S) is not None
        except TimeoutError:
            return False

    return same


_ONE_LINE = re.compile(r"^[ \t]*```(?:json)?[ \t]*([^`\s][^`\n]*)```[ \t]*$", re.MULTILINE)


def _schema(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    r"""Build a verifier that checks an answer against the JSON schema in `spec["answer"]`.

    If the whole answer is JSON, all of it is checked. Otherwise, the marked text (`\boxed{}`,
    `<answer>`, `<json>`) or the last fenced code block that is JSON is checked. Formats are checked
    too, except for IRIs. Nothing is downloaded. Raises ValueError if the schema is invalid.
    """
    # Imported late: this takes a fifth of a second.
    from jsonschema import Draft202012Validator, SchemaError  # noqa: PLC0415
    from jsonschema.validators import validator_for  # noqa: PLC0415
    from referencing import Registry, Resource  # noqa: PLC0415
    from referencing.exceptions import Unresolvable  # noqa: PLC0415
    from referencing.jsonschema import DRAFT202012  # noqa: PLC0415

    expected = spec.get("answer")
    if not isinstance(expected, dict):
        raise ValueError("answer must be a JSON schema, an object")
    expected = cast(dict[str, Any], expected)
    if not isinstance(expected.get("$schema", ""), str):
        raise ValueError(f"answer: $schema = {expected['$schema']!r} must be text")
    kind: Any = validator_for(expected, default=Draft202012Validator)
    try:
        kind.check_schema(expected)
    except SchemaError as error:
        raise ValueError(
            f"answer is not a valid JSON schema: {error.message[:200]} (at {error.json_path})"
        ) from error
    resource = Resource[Any].from_contents(expected, default_specification=DRAFT202012)
    registry = Registry[Any]().with_resource("", resource).crawl()
    for reference in _references(expected):
        try:
            registry.resolver().lookup(reference)
        except Unresolvable as error:
            raise ValueError(
                f"answer: the schema does not contain {reference!r}, and nothing is fetched"
            ) from error
    validator = kind(expected, registry=registry, format_checker=kind.FORMAT_CHECKER)

    def same(text: str) -> bool:
        if len(text) > _MAX_CHARACTERS:
            return False
        for part in _parts(text.strip().lstrip("\ufeff").strip()):
            try:
                value = json.loads(part, parse_constant=_once, object_pairs_hook=_once)
            except (ValueError, RecursionError):
                continue
            return bool(validator.is_valid(value))
        return False

    return same


def _parts(text: str) -> Iterator[str]:
    yield text
    blocks = _fenced(text)
    outside = text
    for block in blocks:
        outside = outside.replace(block.strip(), "")
    if marked_answer(outside) is None:  # a mark inside a block's strings does not count
        _, opening, inside = text.rpartition("</json>")[0].rpartition("<json>")
        yield from [inside] if opening else reversed(blocks)
        return
    if text.startswith("<answer>") and text.endswith("</answer>"):
        yield text.removeprefix("<answer>").removesuffix("</answer>")
    marked = marked_answer(text) or ""
    yield marked
    yield from reversed(_fenced(marked))


def _fenced(text: str) -> list[str]:
    return code_blocks(text) or [match[1] for match in _ONE_LINE.finditer(text)]


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        items = cast(dict[str, Any], value)
        if isinstance(items.get("$ref"), str):
            yield items["$ref"]
        value = list(items.values())
    if isinstance(value, list):
        for item in cast(list[Any], value):
            yield from _references(item)


def _once(pairs: list[tuple[str, Any]] | str) -> dict[str, Any]:
    if isinstance(pairs, str) or len(dict(pairs)) < len(pairs):
        raise ValueError("a key appears twice or there is a NaN, which parsers read differently")
    return dict(pairs)


_MATCHES: dict[str, Callable[[Mapping[str, Any]], Callable[[str], bool]]] = {
    "math": lambda spec: mathematical(spec["answer"]),
    "exact": _exact,
    "choice": choice,
    "schema": _schema,
    "regex": _regex,
}


def keeps_format(raw: str, *, thinking: bool, finished: bool) -> bool:
    """Return whether a completion is well-formed. It must be finished, not blank, and mark at most
    one answer. With thinking, there must be exactly one closed think block before the answer.
    Without thinking, there must be none.

    `raw` is the sampled text. It may lack the opening `<think>`, because many chat templates put it
    at the end of the prompt.
    """
    final = outside_think(raw)
    if not finished or blank(final) or max(final.count(BOXED), final.count("</answer>")) > 1:
        return False
    opened, closed = raw.count(THINK.open), raw.count(THINK.close)
    if not thinking:
        return opened == closed == 0
    starts = raw.lstrip().startswith(THINK.open)
    return closed == 1 and (opened == 0 or (opened == 1 and starts))
