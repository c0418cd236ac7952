"""What the outcome rules cost, and how often they agree with the libraries behind them.

    python -m benchmarks.rewards.rules [--cases 500] [--entries 60]

Every case is made once, so nothing comes from a cache. About half of the answers are right. build:
reading the prompt's own answer, once a group (median). rate: one over the median time of an answer.
Times are CPU time of one process. agree: with math-verify on the same text, without our short cuts;
true: with how the case was made. Then the same cases in worker processes, under their deadline; and
reasoning_gym's verifiers, called here and through a prompt's spec.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import reasoning_gym
from math_verify import parse, verify

from keel.data.jsonable import to_jsonable
from keel.rewards.rules.reasoning_gym import MOST_PARTIAL
from keel.rewards.rules.verifiers import verifier_for
from keel.rewards.workers.pool import WorkerPool
from keel.rewards.workers.worker import reply_to

Case = tuple[Any, str, bool]
"""The prompt's answer, a given answer, and whether that is right."""
DEADLINE_S = 3.0


def near(rng: random.Random, value: int) -> int:
    return value if rng.random() < 0.5 else value + rng.randint(1, 9)


def integer(rng: random.Random) -> Case:
    right = rng.randint(-99999, 99999)
    given = near(rng, right)
    return str(right), f"Adding both gives $\\boxed{{{given}}}$.", given == right


def sentence(rng: random.Random) -> Case:
    right = rng.randint(-99999, 99999)
    given = near(rng, right)
    return str(right), f"First 3 of them, then 4 more. The answer is {given}.", given == right


def formula(rng: random.Random) -> Case:
    right = rng.randint(-99999, 99999)
    given = near(rng, right)
    return str(right), f"With $x + 1 = {rng.randint(1, 99)}$ we get ${given}$.", given == right


def decimal(rng: random.Random) -> Case:
    right = rng.randint(1, 999999)
    given = near(rng, right)
    return f"{right / 1000}", f"\\boxed{{{given / 1000:.4f}}}", given == right


def fraction(rng: random.Random) -> Case:
    top, below, times = rng.randint(1, 9999), rng.randint(2, 999), rng.randint(2, 9)
    given = near(rng, top)
    right = f"\\frac{{{top}}}{{{below}}}"
    return right, f"\\boxed{{\\dfrac{{{given * times}}}{{{below * times}}}}}", given == top


def percent(rng: random.Random) -> Case:
    right = rng.randint(1, 99999)
    given = near(rng, right)
    return f"{right}\\%", f"\\boxed{{{given}\\%}}", given == right


def unit(rng: random.Random) -> Case:
    right = rng.randint(1, 99999)
    given = near(rng, right)
    return f"{right}\\text{{ cm}}", f"\\boxed{{{given}\\text{{ cm}}}}", given == right


def equation(rng: random.Random) -> Case:
    right = rng.randint(1, 99999)
    given = near(rng, right)
    return str(right), f"\\boxed{{x = {given}}}", given == right


def finite_set(rng: random.Random) -> Case:
    right = rng.sample(range(999), 3)
    given = rng.sample(right, 3)
    given[0] = near(rng, given[0])
    written = [f"\\{{{', '.join(map(str, items))}\\}}" for items in (right, given)]
    return written[0], f"\\boxed{{{written[1]}}}", set(right) == set(given)


def interval(rng: random.Random) -> Case:
    low = rng.randint(-999, 999)
    high = low + rng.randint(1, 99)
    given = near(rng, high)
    return f"[{low}, {high})", f"\\boxed{{\\left[{low},{given}\\right)}}", given == high


def union(rng: random.Random) -> Case:
    a = rng.randint(1, 999)
    given = near(rng, a)
    right = f"(-\\infty, {-a}) \\cup ({a}, \\infty)"
    return right, f"\\boxed{{({given}, \\infty) \\cup (-\\infty, {-given})}}", given == a


def surd(rng: random.Random) -> Case:
    factor, root = rng.randint(2, 99), rng.choice([2, 3, 5, 7, 11, 13])
    given = near(rng, factor)
    return f"{factor}\\sqrt{{{root}}}", f"\\boxed{{\\sqrt{{{given**2 * root}}}}}", given == factor


def polynomial(rng: random.Random) -> Case:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    given = near(rng, b)
    return f"x^2 + {a + b}x + {a * b}", f"\\boxed{{(x + {a})(x + {given})}}", given == b


MATHS: dict[str, Callable[[random.Random], Case]] = {
    "integer, boxed": integer,
    "integer in a sentence": sentence,
    "integer in a formula": formula,
    "decimal": decimal,
    "fraction": fraction,
    "percentage": percent,
    "with a unit": unit,
    "x = …": equation,
    "set": finite_set,
    "interval": interval,
    "union of intervals": union,
    "square root": surd,
    "polynomial": polynomial,
}


def exact(rng: random.Random) -> Case:
    right = rng.randint(1, 99999)
    given = near(rng, right)
    return f"word {right}", f"<answer>word  {given}</answer>", given == right


def choice(rng: random.Random) -> Case:
    right, given = rng.choice("ABCD"), rng.choice("ABCD")
    said = f"It has {rng.randint(1, 9999)} parts, so the answer is ({given})."
    return right, said, given == right


def pattern(rng: random.Random) -> Case:
    given = rng.choice(["2024-{:02d}", "2024/{:02d}"]).format(rng.randint(1, 12))
    return r"\d{4}-(0[1-9]|1[0-2])", f"<answer>{given}</answer>", "-" in given


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"minimum": 0}}},
    "required": ["name"],
}


def schema(rng: random.Random) -> Case:
    ages = [rng.randint(-1, 99) for _ in range(3)]
    given = json.dumps({"name": str(rng.random()), "ages": ages})
    return SCHEMA, f"```json\n{given}\n```", min(ages) >= 0


OTHERS = {"exact": exact, "choice": choice, "regex": pattern, "schema": schema}


def spec_of(match: str, right: Any) -> dict[str, Any]:
    more = {"choices": ["one", "two", "three", "four"]} if match == "choice" else {}
    return {"kind": "answer", "answer": right, "match": match, **more}


def library(right: str, text: str) -> bool:
    """math-verify alone."""
    gold, given = (parse(said, parsing_timeout=0) for said in (f"\\boxed{{{right}}}", text))
    return verify(gold, given, timeout_seconds=0)


def timed(cases: list[Case], match: str) -> tuple[list[float], list[float], list[float]]:
    """CPU seconds to build each verifier and for each completion, and the scores."""
    builds: list[float] = []
    taken: list[float] = []
    scores: list[float] = []
    for right, text, _ in cases:
        began = time.process_time()
        verifier = verifier_for(spec_of(match, right))
        built = time.process_time()
        scores.append(reply_to(verifier, text)["score"])
        taken.append(time.process_time() - built)
        builds.append(built - began)
    return builds, taken, scores


def rules(count: int) -> None:
    rng = random.Random(0)
    every: list[float] = []
    pooled: list[tuple[dict[str, Any], str, float]] = []
    print(f"{'':22} build ms  median ms  largest ms   rate/s   agree       true")
    for name, make in (*MATHS.items(), *OTHERS.items()):
        match = name if name in OTHERS else "math"
        cases = [make(rng) for _ in range(count)]
        verifier_for(spec_of(match, cases[0][0]))(cases[0][1])  # imports
        builds, taken, scores = timed(cases, match)
        agreed = "-"
        if match == "math":
            every += taken
            same = [
                library(case[0], case[1]) == bool(s) for case, s in zip(cases, scores, strict=True)
            ]
            agreed = f"{sum(same)}/{count}"
        true = sum(case[2] == bool(s) for case, s in zip(cases, scores, strict=True))
        median = statistics.median(taken)
        print(
            f"{name:22} {statistics.median(builds) * 1e3:8.3f} {median * 1e3:10.3f} "
            f"{max(taken) * 1e3:11.1f} {1 / median:8.0f}   {agreed:10}  {true}/{count}",
            flush=True,
        )
        pooled += [(spec_of(match, c[0]), c[1], s) for c, s in zip(cases, scores, strict=True)]
    median = statistics.median(every)
    print(f"all of mathematics: median {median * 1e3:.3f} ms, {1 / median:.0f} answers/s a core")
    pool = WorkerPool(2, deadline_s=DEADLINE_S)
    began = time.perf_counter()
    futures = [pool.submit(spec, [text]) for spec, text, _ in pooled]
    verdicts = [future.result()[0] for future in futures]
    took = time.perf_counter() - began
    pool.close()
    errors = [(v.error, text) for v, (_, text, _) in zip(verdicts, pooled, strict=True) if v.error]
    same = sum(v.score == s for v, (_, _, s) in zip(verdicts, pooled, strict=True))
    print(
        f"in 2 worker processes: {len(pooled)} prompts of one answer, {len(pooled) / took:.0f}/s; "
        f"{len(errors)} over {DEADLINE_S:g} s or crashed, {same} as above"
    )
    for error, text in errors:
        print(f"  {text}: {error}")


TASKS = (
    "basic_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "count_primes",
    "countdown",
    "decimal_chain_sum",
    "fraction_simplification",
    "gcd",
    "gsm_symbolic",
    "lcm",
    "leg_counting",
    "polynomial_equations",
    "prime_factorization",
    "simple_equations",
    "simple_geometry",
    "simple_integration",
    "spell_backward",
    "spiral_matrix",
    "time_intervals",
    "word_sorting",
)
BY_VALUE = ("basic_arithmetic", "chain_sum", "count_primes", "gcd", "lcm", "simple_equations")
"""Tasks whose answer is a number, and whose verifier wants just that."""


def verifiers(entries: int) -> None:
    compared = same = valued = same_value = 0
    for task in TASKS:
        dataset = reasoning_gym.create_dataset(task, size=entries, seed=0)
        items = [dataset[index] for index in range(entries)]
        for index, entry in enumerate(items):
            right = str(entry["answer"])
            others = [str(items[(index + step) % entries]["answer"]) for step in (1, 2)]
            kept = {key: to_jsonable(entry[key], key) for key in ("question", "answer", "metadata")}
            spec = {"kind": "reasoning_gym", "task": task, "params": {}, "entry": kept}
            verifier = verifier_for(json.loads(json.dumps(spec)))
            by_value = verifier_for(spec_of("math", right)) if task in BY_VALUE else None
            for given in (right, *others, f"{right} ", "0"):
                # What `answer_in` strips, their verifiers do not all strip.
                theirs = max(0.0, float(dataset.score_answer(given.strip(), entry)))
                theirs = theirs if theirs == 1.0 else min(theirs, MOST_PARTIAL)
                ours = verifier(given)
                compared, same = compared + 1, same + (ours == theirs)
                if ours != theirs:
                    print(f"  {task}: {given!r} against {right!r}: {ours} here, {theirs} there")
                if by_value is not None:
                    valued, same_value = valued + 1, same_value + (by_value(given) == (theirs == 1))
    print(f"reasoning_gym: {same} of {compared} verdicts as its own verifiers', {len(TASKS)} tasks")
    print(f"match: math    {same_value} of {valued} as its verifiers', {len(BY_VALUE)} tasks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="of each kind")
    parser.add_argument("--entries", type=int, default=60, help="of each task")
    options = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"python {sys.version.split()[0]}"
    )
    rules(options.cases)
    verifiers(options.entries)


if __name__ == "__main__":
    main()
