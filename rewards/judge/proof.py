"""Proofs that judge themselves: the composed reward of DeepSeekMath-V2 (2025).

The policy writes a proof Y and its own evaluation Z of it, which ends in a score s'. A verifier
scores the proof (s), and a meta-check says whether the flaws that an evaluation claims are real:

    R = R_format · (α · R_Y + (1 − α) · R_Z),    R_Z = (1 − |s' − R_Y|) · R_meta(Z)

DeepSeekMath-V2 (2025), section 2.2, where α = 0.76 and β = 1 − α = 0.24. So a policy that owns up
to a flaw earns more than one that claims to be right, and less than one that repairs it.

There R_Y = s, of a verifier that was trained against a meta-verifier. Here the verifier may be any
model, so where it finds something wrong its criticism is meta-checked in turn, as in the paper's
automatic labelling (section 2.3), and costs the proof only as much as is confirmed:
R_Y = 1 − m · (1 − s) with m the meta-check of the verifier.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.rewards.judge.prompts import SCORES, MetaCheck, Verification
from keel.rewards.judge.results import CriterionVerdict, Judged
from keel.rewards.judge.rubric import check_keys, optional_text
from keel.rewards.text import BOXED, marked_answer

ALPHA = 0.76
INSTRUCTIONS = r"""Write your final response in two sections with exactly these titles:

## Solution
The complete solution: clear, rigorous, and with every step shown.

## Self Evaluation
Your own evaluation of that solution. Go through its key steps, point out every error and gap that \
you know of, and end with its score: \boxed{1} if it is complete and correct, \boxed{0.5} if it \
has minor errors or leaves out details, \boxed{0} if it has a fatal error or a severe gap. An \
honest low score is worth more than a false high one."""
"""What a policy has to be told; the `system` of a data source of proofs."""

_SOLUTION = re.compile(r"^##[ \t]*Solution[ \t]*$", re.MULTILINE)
_EVALUATION = re.compile(r"^##[ \t]*Self Evaluation[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Proof:
    """The parts of an answer to a proof problem."""

    solution: str
    evaluation: str
    score: float
    """s': what the answer says it is worth. 0, 0.5 or 1."""


@dataclass(frozen=True, slots=True)
class Checked:
    """One sample of the judgement."""

    verification: Verification
    verifier_check: MetaCheck | None
    """Of the verifier's criticism; None where it had none."""
    self_check: MetaCheck
    """Of the answer's own evaluation."""

    @property
    def proof(self) -> float:
        """R_Y."""
        confirmed = self.verifier_check.score if self.verifier_check else 1.0
        return 1 - confirmed * (1 - self.verification.score)


@dataclass(frozen=True, slots=True)
class ProofSpec:
    """How a proof is judged."""

    reference: str = ""
    """A solution, or notes for marking; "": none."""
    alpha: float = ALPHA
    """Share of the proof itself; the rest goes to the honesty of the self-evaluation."""

    def judged(self, proof: Proof, samples: Sequence[Checked]) -> Judged:
        """The composed reward; each part is a mean over the samples."""
        proofs = [sample.proof for sample in samples]
        right = sum(proofs) / len(proofs)
        honest = 1 - abs(proof.score - right)
        meta = sum(sample.self_check.score for sample in samples) / len(samples)
        value = self.alpha * right + (1 - self.alpha) * honest * meta
        checks = [s.verifier_check for s in samples if s.verifier_check]
        parts = {
            "proof": right,
            "self_score": honest,
            "self_meta": meta,
            "verifier_meta": sum(c.score for c in checks) / len(checks) if checks else 1.0,
            "proof_format": 1.0,
            "disagreement": max(proofs) - min(proofs),
        }
        first = samples[0]
        verdicts = (
            CriterionVerdict("proof", right, first.verification.evaluation),
            CriterionVerdict("self_score", honest, f"claims {proof.score:g}"),
            CriterionVerdict("self_meta", meta, first.self_check.analysis),
            *(
                CriterionVerdict("verifier_meta", parts["verifier_meta"], c.analysis)
                for c in checks[:1]
            ),
        )
        return Judged(value, parts, verdicts)

    def missed(self, why: str) -> Judged:
        """R_format = 0, and nobody asked."""
        names = ("proof", "self_score", "self_meta", "verifier_meta", "proof_format")
        parts = {**dict.fromkeys(names, 0.0), "disagreement": 0.0}
        return Judged(0.0, parts, (CriterionVerdict("proof_format", 0.0, why),))


def proof_from(spec: Mapping[str, Any]) -> ProofSpec:
    """The spec `{"kind": "proof", "reference": "…", "alpha": 0.76}`; both are optional.

    Raises ValueError naming the key.
    """
    check_keys(spec, ("kind", "reference", "alpha", "environment", "columns"), "proof")
    alpha = spec.get("alpha", ALPHA)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise ValueError(f"proof: alpha {alpha!r} must be a number in [0, 1]")
    return ProofSpec(optional_text(spec, "reference", "proof"), float(alpha))


def read_proof(answer: str) -> Proof | str:
    """The two sections and the score of an answer, or what is wrong with its form (R_format).

    Each title appears once, the solution comes first, nothing comes before it, and the evaluation
    ends in a boxed score.
    """
    solutions = list(_SOLUTION.finditer(answer))
    evaluations = list(_EVALUATION.finditer(answer))
    if len(solutions) != 1 or len(evaluations) != 1:
        return "needs one section `## Solution` and one `## Self Evaluation`"
    (start,), (middle,) = solutions, evaluations
    if answer[: start.start()].strip() or middle.start() < start.end():
        return "has to start with `## Solution`, then `## Self Evaluation`"
    solution = answer[start.end() : middle.start()].strip()
    evaluation = answer[middle.end() :].strip()
    if not solution or not evaluation:
        return "has an empty section"
    score = marked_answer(evaluation) if BOXED in evaluation else None
    if score is None or score not in SCORES:
        return "has no boxed score of 0, 0.5 or 1 in its self-evaluation"
    return Proof(solution, evaluation, SCORES[score])
