"""Make verifier tasks from graded proofs: `python -m keel.examples.proofs EVALUATION … --out FILE`.

`keel eval` on prompts of kind `proof` writes the proofs with their scores. A score is the mean over
`rewards.judge.samples` verifications. Criticism lowers it only as far as a meta-check confirms the
criticism (DeepSeekMath-V2, 2025, section 2.3). Each line of FILE shows a problem and a proof, and
rewards the evaluation with a spec of kind `verification`.
"""

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from keel.configs.work_folder import read_records
from keel.examples import write_lines
from keel.rewards.judge.specs import read_proof
from keel.rewards.text import final_text

_INSTRUCTIONS = """You check the solution of a problem in mathematics. Go through its key steps \
and every step that you doubt: state the claim of the step, whether it holds, and why; name each \
error or gap with its passage. End with the score of the solution: \\boxed{1} if it is complete \
and correct, \\boxed{0.5} if it is correct as a whole, with minor errors or omitted details, \
\\boxed{0} if it has a fatal error or a severe gap."""
_BANDS = (0.25, 0.75, 2.0)
"""Upper limits of the score bands for wrong, partly right and right proofs."""


def _graded(request: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """Return the problem, the proof and the score of each completion of an evaluated prompt."""
    questions = (str(m["content"]) for m in request["prompt"] if m.get("role") == "user")
    problem = "\n\n".join(questions)
    graded: list[tuple[str, str, float]] = []
    for sample in request["samples"]:
        proof, score = read_proof(final_text(sample["messages"])), sample["parts"].get("proof")
        if isinstance(score, float) and not isinstance(proof, str) and not sample["error"]:
            # Unpaired surrogates cannot be part of a prompt.
            graded.append((problem, proof.solution.encode(errors="replace").decode(), score))
    return graded


def _task_lines(proofs: Iterable[tuple[str, str, float]], each: int) -> Iterator[dict[str, Any]]:
    """Yield a JSONL line for each distinct proof, with up to `each` proofs per problem and score
    band. This limit keeps a verifier from learning to give most proofs the same score."""
    seen: set[str] = set()
    taken: Counter[tuple[str, float]] = Counter()
    for problem, solution, score in proofs:
        key = hashlib.sha256(f"{problem}\0{solution}".encode()).hexdigest()[:16]
        band = next(most for most in _BANDS if score < most)
        if key in seen or taken[problem, band] == each:
            continue
        seen.add(key)
        taken[problem, band] += 1
        yield {
            "id": key,
            "messages": [
                {"role": "system", "content": _INSTRUCTIONS},
                {"role": "user", "content": f"{problem}\n\n## Solution\n{solution}"},
            ],
            "reward": {
                "kind": "verification",
                "problem": problem,
                "proof": solution,
                "score": score,
            },
        }
    if not seen:
        raise ValueError("no proof with a score; evaluate prompts of kind `proof`")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keel.examples.proofs", description=__doc__)
    parser.add_argument("evaluations", type=Path, nargs="+", help="folders that keel eval wrote")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--each", type=int, default=4, help="proofs of a problem and score (4)")
    options = parser.parse_args(arguments)
    paths = (folder / "samples.jsonl" for folder in options.evaluations)
    lines = (line for path in paths for line in read_records(path, _graded, "an evaluation"))
    tasks = _task_lines(chain.from_iterable(lines), options.each)
    return write_lines(options.out, tasks, "proofs to verify")


if __name__ == "__main__":
    sys.exit(main())
