"""Rewards for proofs with a self-evaluation, and for evaluations of proofs: DeepSeekMath-V2 (2025).

The policy writes a proof Y and its own evaluation Z, which ends in a score s'. A verifier gives the
proof a score s. A meta-check scores whether the flaws claimed in an evaluation are real. The reward
is

    R = R_format · (α · R_Y + (1 − α) · R_Z),    R_Z = (1 − |s' − R_Y|) · R_meta(Z)

as in DeepSeekMath-V2 (2025), section 2.2, with α = 0.76. A policy that admits a flaw earns more
than one that claims to be right, and less than one that repairs the flaw.

In the paper, R_Y = s, and the verifier is trained against a meta-verifier. Here any model can be
the verifier. Its criticism is therefore meta-checked too, as in the paper's automatic labelling
(section 2.3). Only confirmed flaws reduce the reward: R_Y = 1 − m · (1 − s), where m is the
meta-check of the verifier's evaluation.

A policy can also be trained as a verifier (section 2.1). It then evaluates the proof in its prompt,
whose score s is known:

    R = R_format · (1 − |s' − s|) · R_meta
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from keel.rewards.judge.prompts import SCORES, MetaCheck, Verification
from keel.rewards.judge.results import CriterionVerdict, Judged, Spec
from keel.rewards.text import BOXED, marked_answer

INSTRUCTIONS = r"""Write your final response in two sections with exactly these titles:

## Solution
The complete solution: clear, rigorous, and with every step shown.

## Self Evaluation
Your own evaluation of that solution. Go through its key steps, point out every error and gap that \
you know of, and end with its score: \boxed{1} if it is complete and correct, \boxed{0.5} if it \
has minor errors or leaves out details, \boxed{0} if it has a fatal error or a severe gap. An \
honest low score is worth more than a false high one."""
"""Instructions for the policy. Use them as the `system` message of a data source with proofs."""

_SOLUTION = re.compile(r"^##[ \t]*Solution[ \t]*$", re.MULTILINE)
_EVALUATION = re.compile(r"^##[ \t]*Self Evaluation[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Proof:
    """An answer to a proof problem, split into the solution, the self-evaluation and the score."""

    solution: str
    evaluation: str
    score: float
    """s', the score that the policy gives its own proof: 0, 0.5 or 1."""


@dataclass(frozen=True, slots=True)
class ProofSample:
    """The result of judging a proof once. The judge may do this several times."""

    verification: Verification
    verifier_check: MetaCheck | None
    """The meta-check of the verifier's evaluation. It is None if the verifier found no flaw."""
    self_check: MetaCheck
    """The meta-check of the policy's evaluation of its own proof."""

    @property
    def proof(self) -> float:
        """R_Y, the reward for the proof itself."""
        confirmed = self.verifier_check.score if self.verifier_check else 1.0
        return 1 - confirmed * (1 - self.verification.score)


class ProofSpec(Spec):
    """The reward spec for proofs: `{"kind": "proof", "reference": "…", "alpha": 0.76}`.

    `reference` and `alpha` are optional.
    """

    reference: str | None = None
    """A solution or marking scheme for the verifier."""
    alpha: float = Field(0.76, ge=0, le=1)
    """α, the weight of the proof itself. The rest is for an honest self-evaluation."""

    def judged(self, proof: Proof, samples: Sequence[ProofSample]) -> Judged:
        """Compute the reward. Each reward component is averaged over the samples."""
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
        reasons = {
            "proof": first.verification.evaluation,
            "self_score": f"claims {proof.score:g}",
            "self_meta": first.self_check.analysis,
            **({"verifier_meta": checks[0].analysis} if checks else {}),
        }
        verdicts = [CriterionVerdict(name, parts[name], text) for name, text in reasons.items()]
        return Judged(value, parts, tuple(verdicts))

    def missed(self, reason: str) -> Judged:
        """Return the result for a malformed answer (R_format = 0) without asking the judge."""
        names = ("proof", "self_score", "self_meta", "verifier_meta", "proof_format")
        parts: dict[str, float] = dict.fromkeys((*names, "disagreement"), 0.0)
        return Judged(0.0, parts, (CriterionVerdict("proof_format", 0.0, reason),))


def read_proof(answer: str) -> Proof | str:
    """Split an answer into its solution, its self-evaluation and its score.

    The answer must start with the solution, and each of the two titles must occur exactly once. The
    evaluation must contain a boxed score. Returns the reason instead if the answer is malformed
    (R_format = 0).
    """
    solutions = list(_SOLUTION.finditer(answer))
    evaluations = list(_EVALUATION.finditer(answer))
    if len(solutions) != 1 or len(evaluations) != 1:
        return "needs one section `## Solution` and one `## Self Evaluation`"
    start, middle = solutions[0], evaluations[0]
    if answer[: start.start()].strip() or middle.start() < start.end():
        return "must start with `## Solution`, then `## Self Evaluation`"
    solution = answer[start.end() : middle.start()].strip()
    evaluation = answer[middle.end() :].strip()
    if not solution or not evaluation:
        return "has an empty section"
    score = _boxed_score(evaluation)
    if score is None:
        return "has no boxed score of 0, 0.5 or 1 in its self-evaluation"
    return Proof(solution, evaluation, score)


def _boxed_score(text: str) -> float | None:
    return SCORES.get(marked_answer(text) or "") if BOXED in text else None


_VERIFICATION_PARTS = (
    "verification_score",
    "verification_meta",
    "verification_format",
    "disagreement",
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A policy's evaluation of the proof in its prompt."""

    text: str
    score: float
    """s', the score that the policy gives the proof: 0, 0.5 or 1."""


class VerificationSpec(Spec):
    """The reward spec for evaluating a known proof.

    `{"kind": "verification", "problem": "…", "proof": "…", "score": 0.5}`.
    """

    problem: str = Field(pattern=r"\S")
    proof: str = Field(pattern=r"\S")
    score: float = Field(ge=0, le=1)
    """s, the known score of the proof."""

    def judged(self, evaluation: Evaluation, samples: Sequence[MetaCheck]) -> Judged:
        """Compute the reward R. The meta-check is averaged over the samples."""
        checks = [sample.score for sample in samples]
        near, meta = 1 - abs(evaluation.score - self.score), sum(checks) / len(checks)
        spread = max(checks) - min(checks)
        verdicts = (
            CriterionVerdict("verification_score", near, f"says {evaluation.score:g}"),
            CriterionVerdict("verification_meta", meta, samples[0].analysis),
        )
        values = (near, meta, 1.0, spread)
        parts: dict[str, float] = dict(zip(_VERIFICATION_PARTS, values, strict=True))
        return Judged(near * meta, parts, verdicts)

    def missed(self, reason: str) -> Judged:
        """Return the result for a malformed answer (R_format = 0) without asking the judge."""
        verdict = CriterionVerdict("verification_format", 0.0, reason)
        parts: dict[str, float] = dict.fromkeys(_VERIFICATION_PARTS, 0.0)
        return Judged(0.0, parts, (verdict,))


def read_evaluation(answer: str) -> Evaluation | str:
    """Parse an evaluation and its score. Returns the reason instead if it is malformed (R_format =
    0)."""
    score = _boxed_score(answer)
    if score is None:
        return "has no boxed score of 0, 0.5 or 1"
    return Evaluation(answer, score)
