"""Environment in which the policy revises its own proof.

A proof with its self-evaluation is returned until the evaluation finds no flaw or the revisions are
used up (DeepSeek-V3.2, appendix D; DeepSeekMath-V2, section 2.3). The last proof is graded by the
prompt's spec of kind `proof`, and every revision is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keel.rewards.judge.proof import read_proof

REVISE = """Your solution has score {score:g} by your own evaluation, so it is not finished. Mend \
what the evaluation found, check what it may have missed, and write the whole response again, in \
the same form."""
REFORM = """Your response {problem}. Write the whole response again in the form that was asked \
for."""


class Refine:
    """Has no tools. Arguments: most, the number of revisions."""

    def __init__(self, most: int = 4) -> None:
        if most < 1:
            raise ValueError(f"most = {most}: a proof that is never revised needs no environment")
        self.most, self.used, self.claimed = most, 0, 0.0

    def reply(self, text: str) -> str | None:
        """Return the next request, or None if the proof is final."""
        proof = read_proof(text.strip())
        self.claimed = 0.0 if isinstance(proof, str) else proof.score
        if self.claimed == 1 or self.used == self.most:
            return None
        self.used += 1
        if isinstance(proof, str):
            return REFORM.format(problem=proof)
        return REVISE.format(score=proof.score)

    def verdict(
        self, messages: Sequence[Mapping[str, Any]], finish_reason: str
    ) -> dict[str, float]:
        """Parts: `claimed`, the last self-evaluation; `revised`, the share of revisions used."""
        return {"claimed": self.claimed, "revised": self.used / self.most}
