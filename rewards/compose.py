"""Combines the parts of a reward into a single number."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from keel.rewards.custom import is_function, load_function
from keel.rl.types import FUNCTIONS

LANGUAGE_PARTS = {"language": "both", "language_answer": "answer", "language_thinking": "thinking"}
"""Maps each language part to the text that it measures. A part is computed only if it has
a weight."""
_RUBRIC = ("rubric", "disagreement")
_PROOF = ("proof", "self_score", "self_meta", "verifier_meta", "proof_format", "disagreement")
_VERIFICATION = ("verification_score", "verification_meta", "verification_format", "disagreement")
JUDGED_PARTS = {
    "rubric": _RUBRIC,
    "proof": _PROOF,
    "refusal": _RUBRIC,
    "verification": _VERIFICATION,
}
"""Maps each kind of judged spec to its reward parts. All kinds also have the part
`correct`, which is the total score."""
REFUSAL = "refusal"
"""Name of the part that is 1 if the judge finds that the completion declines the task."""
PARTS = (
    "correct",
    "format",
    REFUSAL,
    *LANGUAGE_PARTS,
    *dict.fromkeys(part for parts in JUDGED_PARTS.values() for part in parts),
)
"""Built-in reward parts that a recipe can list in `data.sources[].rewards`. A recipe can also
list functions there; their names contain a dot."""
_ROUNDING = 1e-12  # a reward below this fraction of its largest term is treated as a rounding error


@dataclass(frozen=True, slots=True)
class Score:
    """The reward for one completion."""

    value: float
    """The weighted sum of the reward parts."""
    parts: Mapping[str, float]
    """The reward parts before weighting, each from 0 to 1."""


def check_weights(
    weights: Mapping[str, Mapping[str, float]], environments: Collection[str] = ()
) -> None:
    """Check that each domain's reward parts exist and that all reward functions can be loaded.
    Raises ValueError if not.

    `environments` lists the domains whose environments define their own parts.
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
                hint = f"did you mean {near[0]}?" if near else f"use {', '.join(PARTS)}."
                raise ValueError(
                    f"rewards of domain {domain!r}: no reward {name!r}; {hint} Functions are named "
                    "MODULE.FUNCTION"
                )


def unknown_parts(weights: Mapping[str, float], known: Collection[str]) -> str:
    """Return an error message if a part in `weights` is unknown, or "" if all are known.
    `known` lists the parts that an environment returns."""
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
    """Raise ValueError if a reward part isn't available for prompts of this `kind`."""
    if kind == FUNCTIONS and not any(is_function(n) and w > 0 for n, w in weights.items()):
        raise ValueError("has nothing to judge it by, and data.sources[].rewards has no function")
    for name in weights:
        kinds = [kind for kind, parts in JUDGED_PARTS.items() if name in parts]
        if kinds and kind not in kinds:
            raise ValueError(
                f"of kind {kind!r} has no reward {name!r}; give its source a separate domain"
            )


def compose(
    parts: Mapping[str, float], weights: Mapping[str, float], *, cut_off: bool = False
) -> Score:
    """Compute a reward as the weighted sum of its parts.

    A sum that differs from 0 only by rounding error is set to exactly 0, so that the error can't
    turn into an advantage. A `cut_off` completion counts as wrong and receives a reward of at most
    0.
    """
    parts = {**parts, "correct": 0.0} if cut_off else parts
    terms = [weight * parts[name] for name, weight in weights.items()]
    value = sum(terms)
    if abs(value) <= _ROUNDING * max(map(abs, terms), default=0.0):
        value = 0.0
    return Score(value=min(0.0, value) if cut_off else value, parts=parts)
