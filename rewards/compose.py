"""From the parts of a reward to the reward."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from keel.rewards.custom import load_function, meant
from keel.rewards.failure_budget import is_function
from keel.rl.types import FUNCTIONS

LANGUAGE_PARTS = {
    "language": "both",
    "language_answer": "answer",
    "language_thinking": "thinking",
}
"""Part → of what it is the share in the prompt's language. Looked at where a recipe weighs it."""
JUDGED_PARTS = {
    "rubric": ("rubric", "disagreement"),
    "proof": (
        "proof",
        "self_score",
        "self_meta",
        "verifier_meta",
        "proof_format",
        "disagreement",
    ),
    "refusal": ("rubric", "disagreement"),
    "verification": (
        "verification_score",
        "verification_meta",
        "verification_format",
        "disagreement",
    ),
}
"""Kind of reward spec → the parts that its judge adds to `correct`, which is the whole score."""
REFUSAL = "refusal"
"""Part: whether the answer declines the task, by the judge. Of any prompt; looked at where a recipe
weighs it, be it with 0."""
PARTS = (
    "correct",
    "format",
    REFUSAL,
    *LANGUAGE_PARTS,
    *dict.fromkeys(part for parts in JUDGED_PARTS.values() for part in parts),
)
"""What a recipe may weigh: `data.sources[].rewards`. A dotted name is the user's own function."""
ERROR = "error"
"""A part that is always there: 1 where the verifier crashed or ran out of time, else 0."""
ROUNDING = 1e-12
"""Of the largest term of a sum: what is left of it that is no larger is no reward."""


@dataclass(frozen=True, slots=True)
class Score:
    """What one completion is worth."""

    value: float
    """The parts, weighted and added up."""
    parts: Mapping[str, float]
    """Before weighting, 0 … 1 each."""


def check_weights(
    weights: Mapping[str, Mapping[str, float]], environments: Collection[str] = ()
) -> None:
    """Raise ValueError for a part that does not exist. `weights`: domain → part → weight;
    `environments`: domains whose environments bring parts of names of their own."""
    for domain, parts in weights.items():
        for name in parts:
            if is_function(name):
                try:
                    load_function(name)
                except ValueError as error:
                    raise ValueError(f"rewards of domain {domain!r}: {error}") from error
            elif name not in PARTS and domain not in environments:
                near = difflib.get_close_matches(name, PARTS, n=1)
                hint = f"did you mean {near[0]}?" if near else _known(name)
                raise ValueError(f"rewards of domain {domain!r}: no reward {name!r}; {hint}")


def _known(name: str) -> str:
    """What there is, where `name` is nearly nothing of it."""
    if found := meant(name):
        return f"a function of yours is MODULE.FUNCTION: did you mean {found}?"
    return (
        f"there are {', '.join(PARTS)}; a function of yours is MODULE.FUNCTION, for example "
        "my_rewards.brief for `def brief` in my_rewards.py"
    )


def unknown_parts(weights: Mapping[str, float], given: Collection[str]) -> str:
    """What is wrong with weights beside the parts that an environment's verdict gave; "" nothing,
    as far as that verdict shows."""
    for name in weights:
        if not is_function(name) and name not in PARTS and name not in given:
            near = difflib.get_close_matches(name, given, n=1)
            hint = f"; did you mean {near[0]}?" if near else ". A verdict without it ends the run"
            return (
                f"its verdict has {', '.join(given) or 'no parts'}, and data.sources[].rewards "
                f"weighs {name!r}{hint}"
            )
    return ""


def check_parts(kind: str, weights: Mapping[str, float]) -> None:
    """Raise ValueError if prompts of this kind do not have a part that `weights` weighs."""
    functions = any(is_function(name) and weight > 0 for name, weight in weights.items())
    if kind == FUNCTIONS and not functions:
        raise ValueError(
            "has none of `answer`, `criteria`, `tests`, `refuse` and `reward`, and no function of "
            "your own judges it (data.sources[].rewards: {my_rewards.brief: 1.0})"
        )
    for name in weights:
        having = [of for of, parts in JUDGED_PARTS.items() if name in parts]
        if having and kind not in having:
            raise ValueError(
                f"has no reward {name!r}, because it is of kind {kind!r} and not "
                f"{' or '.join(having)}; give its source a domain and rewards of its own"
            )


def check_found(parts: Mapping[str, float], weights: Mapping[str, float]) -> None:
    """Raise ValueError for a part that `weights` weighs and nothing gave."""
    if missing := [name for name in weights if name not in parts]:
        raise ValueError(
            f"no part {missing[0]!r}, which its domain weighs (data.sources[].rewards): there are "
            f"{', '.join(sorted(parts))}. An environment's verdict names its own; give sources "
            "without one a domain of their own"
        )


def of_functions(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """`correct` of a prompt that functions alone judge: the mean of those that are worth
    something, by their weights."""
    of = {name: weight for name, weight in weights.items() if is_function(name) and weight > 0}
    return sum(weight * parts[name] for name, weight in of.items()) / sum(of.values())


def worst(weights: Mapping[str, float]) -> dict[str, float]:
    """The parts of what is worth the least that `weights` allow."""
    parts = {name: float(weight < 0) for name, weight in weights.items()}
    return {**parts, "correct": 0.0, ERROR: 0.0}


def worth_nothing(parts: Mapping[str, float], weights: Mapping[str, float]) -> Score:
    """Of what was cut off: wrong, and no better than what is wrong and came to its end."""
    wrong = compose({**parts, "correct": 0.0}, weights)
    return replace(wrong, value=min(0.0, wrong.value))


def compose(parts: Mapping[str, float], weights: Mapping[str, float]) -> Score:
    """The weighted sum. Parts without a weight are kept for the metrics and count nothing. What is
    left of terms that cancel is 0, and not their rounding, by which siblings would differ."""
    terms = [weight * parts[name] for name, weight in weights.items()]
    value = sum(terms)
    if abs(value) <= ROUNDING * max(map(abs, terms), default=0.0):
        value = 0.0
    return Score(value=value, parts=parts)
