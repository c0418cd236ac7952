"""Search for proofs with a model that generates, verifies and refines a pool of candidates.

    python -m keel.examples.proofs.search problems.jsonl --out proofs.jsonl \
        --base-url http://localhost:8000/v1 --model NAME

The search is described in DeepSeekMath-V2 (2025), section 2.3, and was used to evaluate
DeepSeek-V3.2 on proofs. The model writes a pool of proofs, and each proof is verified by several
separate requests. In each round, the best proofs are rewritten, using the evaluations that found
the most flaws in them. The new proofs are then added to the pool. The search for a problem ends
when all verifications of a proof give it a score of 1, or after the last round. Lines of the output
are never written twice, so the same command resumes an interrupted search.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from keel.configs.schema import ConfigError
from keel.configs.synthesis import AuthorConfig, CostConfig
from keel.examples.proofs.__main__ import verification_messages
from keel.rewards.judge.specs import INSTRUCTIONS, Evaluation, read_proof, read_proof_evaluation
from keel.rewards.text import outside_think
from keel.rl.turns import Message
from keel.synthesis.author import (
    Author,
    AuthorLost,
    EndpointAuthor,
    SynthesisBudget,
    gather_or_cancel,
)

_REFINE = """{problem}

Here is a solution and what reviewers found. Fix every flaw that is real, and write a complete new \
solution in the requested form.

{solution}

## Reviews

{reviews}"""


def _limit(default: int, text: str) -> int:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class _SearchLimits:
    pool: int = _limit(16, "proofs in the first round")
    best: int = _limit(4, "proofs refined per round")
    children: int = _limit(2, "new proofs from each of them")
    verifications: int = _limit(8, "verifications per proof")
    reviews: int = _limit(2, "reviews shown when a proof is refined")
    rounds: int = _limit(8, "rounds of refinement")


@dataclass(frozen=True, slots=True)
class _Candidate:
    solution: str
    evaluations: tuple[Evaluation, ...]

    @property
    def score(self) -> float:
        return sum(one.score for one in self.evaluations) / len(self.evaluations)


async def search(author: Author, problem: str, limits: _SearchLimits) -> dict[str, Any]:
    """Search for a proof of `problem`. Returns the best proof and its score, whether every
    verification gave it 1, and the number of rounds and proofs. Raises AuthorLost if the model
    doesn't respond."""
    pool: list[_Candidate] = []
    requests = [problem] * limits.pool
    rounds = 0
    while True:
        proofs = await gather_or_cancel(*(_proof(author, text) for text in requests))
        new = await gather_or_cancel(
            *(_verified(author, problem, proof, limits) for proof in proofs if proof)
        )
        pool = [*(candidate for candidate in new if candidate.evaluations), *pool]
        # Of equal ones, the newest comes first.
        pool.sort(key=lambda one: (-one.score, -len(one.evaluations)))
        # A verification that was cut off or cannot be read accepts nothing.
        solved = any(
            one.score == 1 and len(one.evaluations) == limits.verifications for one in pool
        )
        if solved or rounds == limits.rounds:
            break
        rounds += 1
        requests = list[str]()
        for candidate in pool[: limits.best]:
            worst = sorted(candidate.evaluations, key=lambda one: one.score)[: limits.reviews]
            reviews = "\n\n---\n\n".join(one.text for one in worst)
            text = _REFINE.format(problem=problem, solution=candidate.solution, reviews=reviews)
            requests += [text] * limits.children
        requests = requests or [problem] * limits.pool
    return {
        "proof": pool[0].solution if pool else None,
        "score": pool[0].score if pool else None,
        "solved": solved,
        "rounds": rounds,
        "proofs": len(pool),
    }


async def _proof(author: Author, request: str) -> str | None:
    messages: list[Message] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": request},
    ]
    reply = await author.ask(messages, purpose="proof")
    proof = read_proof(outside_think(reply.content).strip())
    return None if reply.cut or isinstance(proof, str) else proof.solution


async def _verified(
    author: Author, problem: str, solution: str, limits: _SearchLimits
) -> _Candidate:
    messages = verification_messages(problem, solution)
    replies = await gather_or_cancel(
        *(author.ask(messages, purpose="verification") for _ in range(limits.verifications))
    )
    read = [read_proof_evaluation(outside_think(r.content)) for r in replies if not r.cut]
    return _Candidate(solution, tuple(one for one in read if isinstance(one, Evaluation)))


def _read_problems(path: Path) -> dict[str, str]:
    """Read problems from JSONL lines with a `prompt` or `messages` and an optional `id`. Raises
    ValueError naming the first invalid line."""
    problems: dict[str, str] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                row: Mapping[str, Any] = json.loads(line)
                name = str(row.get("id", number))
                if name in problems:
                    raise ValueError(f"the id {name} appears twice")
                last = row["messages"][-1]["content"] if "messages" in row else row["prompt"]
                problems[name] = str(last)
            except (ValueError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}:{number}: is no problem: {error!r}") from error
    return problems


async def _search_all(
    author: Author, problems: Mapping[str, str], limits: _SearchLimits, out: Path, at_once: int
) -> int:
    slots = asyncio.Semaphore(at_once)
    solved = 0

    async def one(name: str, problem: str) -> None:
        nonlocal solved
        async with slots:
            try:
                result = await search(author, problem, limits)
            except AuthorLost as error:  # the others continue, and the next start tries it again
                print(f"{name}: {error}", file=sys.stderr)
                return
        solved += result["solved"]
        line = json.dumps({"id": name, "prompt": problem, **result}, ensure_ascii=False)
        with out.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    await gather_or_cancel(*(one(name, problem) for name, problem in problems.items()))
    return solved


def _finished(out: Path) -> set[str]:
    data = out.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        out.write_bytes(whole)
    return {json.loads(line)["id"] for line in whole.splitlines()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keel.examples.proofs.search")
    parser.add_argument("problems", type=Path, help="JSONL file with a `prompt` per line")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file for the best proofs")
    parser.add_argument("--base-url", required=True, help="an OpenAI-compatible endpoint")
    parser.add_argument("--model", required=True, help="the model's name at the endpoint")
    parser.add_argument("--max-tokens", type=int, default=32_768, help="per reply (32768)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds per reply (3600)")
    parser.add_argument("--at-once", type=int, default=4, help="problems searched together (4)")
    for limit in fields(_SearchLimits):
        text = f"{limit.metadata['help']} ({limit.default})"
        parser.add_argument(f"--{limit.name}", type=int, default=limit.default, help=text)
    options = parser.parse_args(arguments)
    try:
        limits = _SearchLimits(*(getattr(options, limit.name) for limit in fields(_SearchLimits)))
        problems = _read_problems(options.problems)
        done = _finished(options.out) if options.out.exists() else set[str]()
        config = AuthorConfig(
            base_url=options.base_url,
            model=options.model,
            max_tokens=options.max_tokens,
            max_concurrent=64,
            timeout_s=options.timeout,
        )
        author = EndpointAuthor(config, SynthesisBudget(CostConfig(), [], lambda _: None))
        rest = {name: text for name, text in problems.items() if name not in done}
        solved = asyncio.run(_search_all(author, rest, limits, options.out, options.at_once))
    except (OSError, ValueError, ConfigError, AuthorLost) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{solved} of {len(rest)} problems have a proof that every verification accepts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
