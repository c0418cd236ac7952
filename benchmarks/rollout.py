"""Measures tokens per second of Keel's engine, with and without recording, and of plain vLLM.

    python -m benchmarks.rollout --out OUT              # 1.4 B parameters
    python -m benchmarks.rollout --out OUT --small      # smoke test on a CPU

The benchmark uses one GPU. Each arm runs an engine in a separate process. All engines stay up and
take turns in each round. Reported ratios are medians of the ratios within a round.

    stock                `vllm.LLM.generate` with its defaults
    packed-plain         Keel's engine with log-probabilities only
    packed               with routes and sampling masks
    packed-head-rounded  with bfloat16 logits
"""

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import MIXTURE, SMALL_MIXTURE, arguments, run_facts
from benchmarks.engines import STOCK, Batch, Engines, engine_spec
from benchmarks.peers.shape import random_words, write_model
from benchmarks.peers.workload import Workload
from keel.configs.schema import SamplingConfig

WARM_TOKENS = 24
PLAIN = "packed-plain"
ARMS: Mapping[str, Mapping[str, Any]] = {
    STOCK: {},
    PLAIN: {"record": False},
    "packed": {},
    "packed-head-rounded": {"head_dtype": "model"},
}
"""Arm → arguments of `engine_spec`."""
WORKLOAD = Workload(
    shape=replace(MIXTURE, intermediate_size=640),
    prompts_per_step=16,
    group_size=16,
    prompt_tokens=128,
    completion_tokens=512,
    top_p=0.95,
    top_k=512,
    sharpness=9.15,  # a mask of normally distributed logits keeps 8 ids on average
)
SMALL = replace(
    WORKLOAD,
    shape=SMALL_MIXTURE,
    prompts_per_step=4,
    group_size=4,
    prompt_tokens=48,
    completion_tokens=32,
    top_k=64,
    sharpness=6.33,
)


def make_batch(workload: Workload, name: str, completion_tokens: int) -> Batch:
    """Make a batch with random prompts, which are not in the prefix cache if the name is new."""
    draw, words = random.Random(name), workload.shape.tokens
    texts = [
        random_words(draw, words, workload.prompt_tokens) for _ in range(workload.prompts_per_step)
    ]
    sampling = SamplingConfig(
        top_p=workload.top_p, top_k=workload.top_k, max_tokens=completion_tokens
    )
    return Batch(name, texts, sampling, workload.group_size)


def summary(rows: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the medians over all rounds, and the medians of the ratios within each round."""
    result: dict[str, dict[str, float]] = {}
    for name, mine in rows.items():
        result[name] = {key: statistics.median(row[key] for row in mine) for key in mine[0]}
        for other, key in ((STOCK, "to_stock"), (PLAIN, "to_plain")):
            speeds = {row["round"]: row["tokens_per_second"] for row in rows.get(other, ())}
            pairs = [
                row["tokens_per_second"] / speeds[row["round"]]
                for row in mine
                if row["round"] in speeds
            ]
            result[name][key] = statistics.median(pairs) if pairs else float("nan")
    return result


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="use a tiny model, for a CPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS)[:3])
    options = parser.parse_args()
    workload = SMALL if options.small else WORKLOAD
    tokens = workload.completion_tokens
    options.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    report: dict[str, Any] = {**run_facts(), "workload": asdict(workload), "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        shape, sharpness = workload.shape, workload.sharpness
        report["parameters"] = write_model(Path(folder), shape, seed=0, sharpness=sharpness)
        torch.cuda.empty_cache()
        warm = make_batch(workload, "warm", min(tokens, WARM_TOKENS))
        sizes = {"sequences": workload.sequences, "context": workload.context}
        arms = [arm for arm in ARMS if arm in options.arms]
        specs = {arm: engine_spec(folder, warm.sampling, **sizes, **ARMS[arm]) for arm in arms}
        with Engines.started(specs, [warm], options.out) as engines:
            for index in range(options.rounds):
                batch = make_batch(workload, f"round{index}", tokens)
                for arm, row in engines.take_turns(batch, backwards=bool(index % 2)):
                    if row["tokens"] < workload.sequences * tokens:
                        engines.fail(arm, f"completions ended after {row['tokens']} tokens in all")
                        continue
                    rows.setdefault(arm, []).append({"round": index, **row})
                report |= {"failed": engines.failed, "summary": summary(rows)}
                (options.out / "rollout.json").write_text(json.dumps(report, indent=1))
    print(", ".join(f"{name} {value}" for name, value in run_facts().items()))
    print("\narm                    tok/s  thread ms  ÷ stock  ÷ plain  kept")
    for name, row in summary(rows).items():
        print(
            f"{name:22s}{row['tokens_per_second']:7,.0f}"
            f"{row['thread_ms_per_token_row']:11.2f}{row['to_stock']:9.2f}"
            f"{row['to_plain']:9.3f}{row.get('mean_kept', float('nan')):6.1f}"
        )
    sys.exit(int(bool(engines.failed)))


if __name__ == "__main__":
    main()
