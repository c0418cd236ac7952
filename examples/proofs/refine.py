"""An environment in which the policy revises its own proof. The policy writes a proof and an
evaluation of it, and revises both until its evaluation finds no flaw or no revisions are left
(DeepSeek-V3.2, appendix D; DeepSeekMath-V2, section 2.3). The last proof is graded by the prompt's
spec of kind `proof`, and the policy is trained on all revisions."""

from collections.abc import Mapping, Sequence
from typing import Any

from keel.rewards.judge.specs import read_proof

_REVISE = """Your solution has score {score:g} by your own evaluation, so it is not finished. Fix \
the flaws that the evaluation names, look for further ones, and write the whole response again, in \
the same form."""
_REFORM = """Your response {problem}. Write the whole response again in the requested form."""


class Refine:
    """An environment without tools in which a proof is revised up to `most` times."""

    def __init__(self, most: int = 4) -> None:
        if most < 1:
            raise ValueError(f"most = {most}: a proof that is never revised needs no environment")
        self.most, self.used, self.claimed = most, 0, 0.0

    def reply(self, text: str) -> str | None:
        proof = read_proof(text.strip())
        self.claimed = 0.0 if isinstance(proof, str) else proof.score
        if self.claimed == 1 or self.used == self.most:
            return None
        self.used += 1
        if isinstance(proof, str):
            return _REFORM.format(problem=proof)
        return _REVISE.format(score=proof.score)

    def verdict(
        self, messages: Sequence[Mapping[str, Any]], finish_reason: str
    ) -> dict[str, float]:
        """Return two reward parts: `claimed`, the score from the last self-evaluation, and
        `revised`, the fraction of allowed revisions that were used."""
        return {"claimed": self.claimed, "revised": self.used / self.most}
