"""Combines the parts of a reward into one number."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from keel.rewards.custom import is_function, load_function
from keel.rl.types import FUNCTIONS

LANGUAGE_PARTS = {
    "language": "both",
    "language_answer": "answer",
    "language_thinking": "thinking",
}
"""Maps each language part to the text that it measures. A language part is computed only if the
recipe gives it a weight."""
_RUBRIC = ("rubric", "disagreement")
_PROOF = ("proof", "self_score", "self_meta", "verifier_meta", "proof_format", "disagreement")
_VERIFICATION = ("verification_score", "verification_meta", "verification_format", "disagreement")
JUDGED_PARTS = {
    "rubric": _RUBRIC,
    "proof": _PROOF,
    "refusal": _RUBRIC,
    "verification": _VERIFICATION,
}
"""Maps each kind of spec for the judge to its reward parts. All kinds also have the part `correct`,
which is the total score."""
REFUSAL = "refusal"
"""The part that is 1 if the judge finds that the completion declines the task. It is computed if
the recipe gives it any weight, even 0."""
PARTS = (
    "correct",
    "format",
    REFUSAL,
    *LANGUAGE_PARTS,
    *dict.fromkeys(part for parts in JUDGED_PARTS.values() for part in parts),
)
"""Built-in reward parts that a recipe can weight in `data.sources[].rewards`. Other names there are
dotted names of functions."""
ERROR = "error"
"""The part that is 1 if a verifier crashed or timed out, and 0 otherwise. It always exists and
never has a weight."""
_ROUNDING = 1e-12
"""A sum below this fraction of its largest term counts as a rounding error."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward for one completion."""

    value: float
    """The weighted sum of the parts."""
    parts: Mapping[str, float]
    """The parts before weighting, each from 0 to 1."""


def check_weights(
    weights: Mapping[str, Mapping[str, float]], environments: Collection[str] = ()
) -> None:
    """Check that every reward part with a weight exists, and that user functions can be loaded.

    `weights` maps each domain to its parts and their weights. `environments` contains the domains
    whose environments define their own parts. Raises ValueError if a part is unknown or a function
    cannot be loaded.
    """
    for domain, parts in weights.items():
        for name in parts:
            if is_function(name):
                try:
                    load_function(name)
                except ValueError as error:
                    raise ValueError(f"rewards of domain {domain!r}: {error}") from error
            elif name not in PARTS and domain not in environments:
                near = difflib.get_close_matches(name, PARTS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"use {', '.join(PARTS)}"
                raise ValueError(
                    f"rewards of domain {domain!r}: no reward {name!r}; {hint} Functions are named "
                    "MODULE.FUNCTION"
                )


def unknown_parts(weights: Mapping[str, float], known: Collection[str]) -> str:
    """Look for a part that has a weight but that the environment did not return. `known` contains
    the parts that it did return. Returns an error message, or "" if no part is missing."""
    for name in weights:
        if not is_function(name) and name not in PARTS and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "a verdict without it stops the run"
            return (
                f"its verdict has {', '.join(known) or 'no parts'}, but data.sources[].rewards "
                f"weights {name!r}; {hint}"
            )
    return ""


def check_parts(kind: str, weights: Mapping[str, float]) -> None:
    """Check that prompts with a reward spec of this `kind` can have all parts in `weights`. Raises
    ValueError if they cannot."""
    if kind == FUNCTIONS and not _function_weights(weights):
        raise ValueError(
            "has none of `answer`, `criteria`, `tests`, `refuse` and `reward`, and no function in "
            "data.sources[].rewards judges it"
        )
    for name in weights:
        kinds = [kind for kind, parts in JUDGED_PARTS.items() if name in parts]
        if kinds and kind not in kinds:
            raise ValueError(
                f"has no reward {name!r}: it is of kind {kind!r}, not {' or '.join(kinds)}. Give "
                "its source a separate domain"
            )


def _function_weights(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weight for name, weight in weights.items() if is_function(name) and weight > 0}


def mean_of_functions(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the weighted mean of the functions with a positive weight. This is the score of
    prompts that only functions grade."""
    positive = _function_weights(weights)
    return sum(weight * parts[name] for name, weight in positive.items()) / sum(positive.values())


def compose_cut_off(parts: Mapping[str, float], weights: Mapping[str, float]) -> Score:
    """Compute the reward of a truncated completion. It counts as wrong, and its reward is at most
    0."""
    score = compose({**parts, "correct": 0.0}, weights)
    return replace(score, value=min(0.0, score.value))


def compose(parts: Mapping[str, float], weights: Mapping[str, float]) -> Score:
    """Compute the reward as the weighted sum of the parts.

    Parts without a weight are kept for the metrics. If the terms cancel up to rounding, the reward
    is exactly 0, so that a rounding error cannot become an advantage.
    """
    terms = [weight * parts[name] for name, weight in weights.items()]
    value = sum(terms)
    if abs(value) <= _ROUNDING * max(map(abs, terms), default=0.0):
        value = 0.0
    return Score(value=value, parts=parts)
