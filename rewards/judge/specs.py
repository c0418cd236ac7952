"""Which reward specs are judged by a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keel.rewards.judge.proof import ProofSpec, proof_from
from keel.rewards.judge.rubric import Rubric, refusal_from, rubric_from
from keel.rewards.judge.verification import VerificationSpec, verification_from

Spec = Rubric | ProofSpec | VerificationSpec
KINDS: dict[str, Callable[[Mapping[str, Any]], Spec]] = {
    "rubric": rubric_from,
    "proof": proof_from,
    "refusal": refusal_from,
    "verification": verification_from,
}


def is_judged(spec: Mapping[str, Any]) -> bool:
    """Whether `Prompt.reward` asks for a judge."""
    return spec.get("kind") in KINDS


def judged_spec(spec: Mapping[str, Any]) -> Spec:
    """What `spec` says, checked. Raises ValueError for bad specs: call it before a run."""
    kind = spec.get("kind")
    if kind not in KINDS:
        raise ValueError(f"reward spec has kind {kind!r}; a judge reads {', '.join(KINDS)}")
    return KINDS[kind](spec)
