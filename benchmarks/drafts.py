"""Tokens per second with and without drafts, for a real model that copies a text or writes a story.

    python -m benchmarks.drafts --model FOLDER --out OUT    # one GPU

The engines of all arms stay up and take turns. *packed* and *native* are recorders without drafts,
and *drafts* is the native recorder with three drafted tokens. All record sampling masks.
"""

import json
import random
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, run_facts
from benchmarks.engines import Batch, Engines, engine_spec
from keel.configs.schema import SamplingConfig

ARMS: dict[str, dict[str, Any]] = {
    "packed": {"recorder": "packed"},
    "native": {"recorder": "native"},
    "drafts": {"recorder": "native", "draft_tokens": 3},
}
KINDS = ("copy", "story")
TEMPERATURES = (1.0, 0.3)
SEQUENCES = (1, 8, 64)
TOKENS, CONTEXT = 400, 2048
NOUNS = "time person year way day thing man world life hand part child eye woman place work week"


def make_batch(kind: str, temperature: float, sequences: int, salt: str) -> Batch:
    """Make a batch with one completion of each prompt."""
    draw = random.Random(f"{kind} {sequences} {temperature} {salt}")
    nouns = NOUNS.split()
    texts: list[str] = []
    for _ in range(sequences):
        text = f"Write a long story about a {draw.choice(nouns)} and a {draw.choice(nouns)}."
        if kind == "copy":
            lines = [f"{line}. {' '.join(draw.choices(nouns, k=9))}" for line in range(20)]
            text = "\n".join(["Copy this text exactly, every line:", *lines])
        texts.append(text)
    sampling = SamplingConfig(temperature=temperature, top_p=0.95, top_k=64, max_tokens=TOKENS)
    return Batch(salt, texts, sampling)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="folder of an instruction-tuned model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    warm = [make_batch(kind, 1.0, number, "warm") for kind, number in product(KINDS, SEQUENCES)]
    sizes = {"sequences": max(SEQUENCES), "context": CONTEXT}
    specs = {
        arm: engine_spec(options.model, warm[0].sampling, **sizes, **ARMS[arm])
        for arm in options.arms
    }
    rows: list[dict[str, Any]] = []
    with Engines.started(specs, warm, options.out) as engines:
        print(", ".join(f"{name} {value}" for name, value in run_facts().items()))
        print(f"| text | temperature | sequences | {' | '.join(specs)} |")
        print(f"|---|---|---|{'---|' * len(specs)}", flush=True)
        for load in product(KINDS, TEMPERATURES, SEQUENCES):
            speeds: dict[str, list[float]] = {arm: [] for arm in specs}
            for index in range(options.rounds):
                for arm, row in engines.take_turns(make_batch(*load, str(index))):
                    speeds[arm].append(row["tokens_per_second"])
            rows.append({"load": load, "tokens_per_second": speeds})
            report = {"facts": run_facts(), "rows": rows}
            (options.out / "drafts.json").write_text(json.dumps(report))
            means = [f"{statistics.mean(each):,.0f}" if each else "–" for each in speeds.values()]
            print(f"| {' | '.join(map(str, [*load, *means]))} |", flush=True)
    sys.exit(int(bool(engines.failed)))


if __name__ == "__main__":
    main()
