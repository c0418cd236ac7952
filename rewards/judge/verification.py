"""Rewards for whoever checks proofs, so that verifiers can be trained too: DeepSeekMath-V2 (2025),
section 2.1.

The policy evaluates a proof that the prompt shows, and ends in a score s'. Its prompt knows the
score s of the proof, and a meta-check says whether the flaws that it claims are real:

    R = R_format · (1 − |s' − s|) · R_meta
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.rewards.judge.prompts import SCORES, MetaCheck
from keel.rewards.judge.results import CriterionVerdict, Judged
from keel.rewards.judge.rubric import check_keys
from keel.rewards.text import BOXED, marked_answer

PARTS = ("verification_score", "verification_meta", "verification_format", "disagreement")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the policy says of the proof."""

    text: str
    score: float
    """s': 0, 0.5 or 1."""


@dataclass(frozen=True, slots=True)
class VerificationSpec:
    """How an evaluation is judged."""

    problem: str
    proof: str
    score: float
    """s, 0 … 1: what the proof is worth."""

    def judged(self, evaluation: Evaluation, samples: Sequence[MetaCheck]) -> Judged:
        """R; the meta-check is a mean over the samples."""
        checks = [sample.score for sample in samples]
        near, meta = 1 - abs(evaluation.score - self.score), sum(checks) / len(checks)
        spread = max(checks) - min(checks)
        verdicts = (
            CriterionVerdict("verification_score", near, f"says {evaluation.score:g}"),
            CriterionVerdict("verification_meta", meta, samples[0].analysis),
        )
        return Judged(
            near * meta, dict(zip(PARTS, (near, meta, 1.0, spread), strict=True)), verdicts
        )

    def missed(self, why: str) -> Judged:
        """R_format = 0, and nobody asked."""
        verdict = CriterionVerdict("verification_format", 0.0, why)
        return Judged(0.0, dict.fromkeys(PARTS, 0.0), (verdict,))


def verification_from(spec: Mapping[str, Any]) -> VerificationSpec:
    """The spec `{"kind": "verification", "problem": "…", "proof": "…", "score": 0.5}`.

    Raises ValueError naming the key.
    """
    check_keys(
        spec, ("kind", "problem", "proof", "score", "environment", "columns"), "verification"
    )
    texts: dict[str, str] = {}
    for key in ("problem", "proof"):
        text = spec.get(key)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"verification: needs a `{key}`, a text")
        texts[key] = text
    score = spec.get("score")
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not 0 <= score <= 1:
        raise ValueError(f"verification: score {score!r} must be a number in [0, 1]"[:200])
    return VerificationSpec(texts["problem"], texts["proof"], float(score))


def read_evaluation(answer: str) -> Evaluation | str:
    """An evaluation and its score, or what is wrong with its form (R_format)."""
    score = marked_answer(answer) if BOXED in answer else None
    if score is None or score not in SCORES:
        return "has no boxed score of 0, 0.5 or 1"
    return Evaluation(answer, SCORES[score])
