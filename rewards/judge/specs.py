"""Parses the reward specs that need a judge model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keel.rewards.judge.proof import ProofSpec, VerificationSpec
from keel.rewards.judge.rubric import Refusal, Rubric

JudgedSpec = Rubric | ProofSpec | VerificationSpec
KINDS: dict[str, Callable[[Mapping[str, Any]], JudgedSpec]] = {
    "rubric": Rubric.parse,
    "proof": ProofSpec.parse,
    "refusal": Refusal.rubric,
    "verification": VerificationSpec.parse,
}


def is_judged(spec: Mapping[str, Any]) -> bool:
    """Return whether a prompt's reward spec needs a judge."""
    return spec.get("kind") in KINDS


def judged_spec(spec: Mapping[str, Any]) -> JudgedSpec:
    """Parse a reward spec for the judge. Raises ValueError if it is malformed."""
    kind = spec.get("kind")
    if kind not in KINDS:
        raise ValueError(f"reward spec has kind {kind!r}; a judge reads {', '.join(KINDS)}")
    return KINDS[kind](spec)
