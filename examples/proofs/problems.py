"""Write proof problems: `python -m keel.examples.proofs.problems FILE`.

Each has a proof for the verifier. Some statements are false, and the right answer refutes them.
With `--evaluations`, the lines are instead evaluations of right and wrong proofs with a known
quality, from which `keel.examples.judges` makes tasks for a meta-verifier.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keel.rewards.judge.specs import INSTRUCTIONS

_COUNT = 120
_MADE_UP = "The last sentence contradicts the first."


class _Problem(NamedTuple):
    statement: str
    proof: str
    right: str
    """A part of the correct proof."""
    wrong: str
    """The text that replaces `right` in a wrong proof."""
    flaw: str


def _problems(draw: random.Random) -> Iterator[_Problem]:
    while True:
        k, prime = draw.randint(1, 30), draw.choice((2, 3, 5, 7, 11, 13))
        odd, base, three = 2 * k + 1, k + 2, 4 * k + 3
        a, b = draw.randint(2, 9), draw.randint(2, 9)
        euler = draw.choice((11, 17, 41))
        yield _Problem(
            f"n² + {odd}n is even for every integer n.",
            f"n² + {odd}n = n(n + {odd}). One of the factors is even, because {odd} is odd. So the "
            "product is even.",
            f"One of the factors is even, because {odd} is odd",
            "Both factors are even",
            "For n = 1 the factor n is odd.",
        )
        yield _Problem(
            f"The sum of {odd} consecutive integers is divisible by {odd}.",
            f"Let m be the middle one. The integers m − j and m + j add up to 2m for j = 1, …, "
            f"{k}, so the sum is {odd}m.",
            "add up to 2m",
            "add up to m",
            "m − j and m + j add up to 2m.",
        )
        yield _Problem(
            f"{base}ⁿ − 1 is divisible by {base - 1} for every n ≥ 1.",
            f"By induction. It holds for n = 1. If {base - 1} divides {base}ⁿ − 1, it divides "
            f"{base}·({base}ⁿ − 1) + {base - 1} = {base}ⁿ⁺¹ − 1.",
            f"{base}·({base}ⁿ − 1) + {base - 1}",
            f"{base}·({base}ⁿ − 1)",
            f"{base}·({base}ⁿ − 1) is {base}ⁿ⁺¹ − {base}, not {base}ⁿ⁺¹ − 1.",
        )
        yield _Problem(
            f"√{prime} is irrational.",
            f"Suppose √{prime} = p/q in lowest terms. Then p² = {prime}q², so the prime {prime} "
            f"divides p. With p = {prime}r, q² = {prime}r², so {prime} divides q, too: a "
            "contradiction.",
            " in lowest terms",
            "",
            f"p and q may both be divisible by {prime}, since no lowest terms are assumed.",
        )
        yield _Problem(
            f"n^{prime} − n is divisible by {prime} for every integer n.",
            f"If {prime} divides n, it divides both terms. Otherwise n^{prime - 1} ≡ 1 modulo "
            f"{prime} by Fermat's little theorem; multiply by n.",
            f"If {prime} divides n, it divides both terms. Otherwise",
            "For every n,",
            f"Fermat's little theorem does not apply if {prime} divides n.",
        )
        yield _Problem(
            f"n² + n + {euler} is prime for every n ≥ 0.",
            f"The statement is false: n = {euler - 1} gives {euler}², which is no prime.",
            f"n = {euler - 1} gives",
            f"n = {euler - 2} gives",
            f"n = {euler - 2} gives {(euler - 1) ** 2 + 1}, not {euler}².",
        )
        yield _Problem(
            f"{a * a}x + {b * b}/x ≥ {2 * a * b} for every x > 0.",
            f"{a * a}x + {b * b}/x − {2 * a * b} = ({a}√x − {b}/√x)² ≥ 0.",
            f"({a}√x − {b}/√x)²",
            f"({a}x − {b})²/x²",
            f"({a}x − {b})²/x² is {a * a} − {2 * a * b}/x + {b * b}/x², not the left side.",
        )
        yield _Problem(
            f"x² + y² = {three} has no solution in integers.",
            "A square is 0 or 1 modulo 4, so a sum of two squares is 0, 1 or 2 modulo 4, and "
            f"{three} is 3 modulo 4.",
            "A square is 0 or 1 modulo 4",
            "A square is 1 modulo 4",
            "The square of an even number is 0 modulo 4.",
        )


def _distinct() -> list[_Problem]:
    problems, by_statement = _problems(random.Random(0)), dict[str, _Problem]()
    while len(by_statement) < _COUNT:
        problem = next(problems)
        by_statement.setdefault(problem.statement, problem)
    return list(by_statement.values())


def lines() -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "system", "content": INSTRUCTIONS},
                {"role": "user", "content": f"Prove or refute: {problem.statement}"},
            ],
            "reward": {"kind": "proof", "reference": problem.proof},
        }
        for problem in _distinct()
    ]


def _make_evaluations() -> list[dict[str, Any]]:
    """Generate three proof evaluations per problem. An evaluation's score is 1 if all the flaws it
    claims are real, 0.5 if half of them are, and 0 if none are."""
    rows: list[dict[str, Any]] = []
    for problem in _distinct():
        wrong = problem.proof.replace(problem.right, problem.wrong)
        for proof, flaws, score in (
            (wrong, [problem.flaw], 1.0),
            (wrong, [problem.flaw, _MADE_UP], 0.5),
            (problem.proof, [problem.flaw], 0.0),
        ):
            claims = "\n".join(f"{number}. {flaw}" for number, flaw in enumerate(flaws, start=1))
            text = f"The proof fails.\n\nFlaws:\n{claims}\n\nScore: 0"
            prompt = f"Prove or refute: {problem.statement}"
            rows.append({"prompt": prompt, "answer": proof, "evaluation": text, "score": score})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m keel.examples.proofs.problems")
    parser.add_argument("file", type=Path, help="the JSONL file to write")
    parser.add_argument("--evaluations", action="store_true", help="write labelled evaluations")
    options = parser.parse_args(arguments)
    rows = _make_evaluations() if options.evaluations else lines()
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    options.file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
