"""What a step's sampling costs: by vLLM's sampler, recording masks, and by the packed one.

    python -m benchmarks.rollout.sampling --out FOLDER
    TRITON_INTERPRET=1 python -m benchmarks.rollout.sampling --out FOLDER --small  # on a CPU

The samplers alternate on the same bfloat16 logits; a figure is the median over rounds. *packed* is
the packed sampler, which truncates by itself; *tail* is the packed one behind vLLM's processors and
truncation, as in steps where something else changes logits. *ratio* is of times without *packed* to
those with it. *gpu* is the time between CUDA events around work that was queued while the GPU was
held up, so without the host; *host* is the time to queue it, and *copy* the time to queue what goes
to the host. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.revision import commit

VOCABULARY, ROWS, KEPT = 151_936, (128, 256), (8, 300)
TOP_K, TOP_P = 512, 0.98
HELD_UP = 20_000_000
"""Cycles, about 10 ms: time enough to queue a step."""


def likely_few(rows: int, vocabulary: int, few: int, device: torch.device) -> Tensor:
    """Logits of which about `few` of a row matter."""
    logits, order = torch.randn((2, rows, vocabulary), device=device)
    likely = order.topk(few, dim=1).indices
    return logits.scatter_(1, likely, logits.gather(1, likely) / 4 + 20).bfloat16()


def copy(output: Any) -> None:
    """Queue what vLLM copies to the host in every step."""
    for tensor in (output.sampled_token_ids, output.num_sampled):
        tensor.to("cpu", non_blocking=True)
    output.logprobs_tensors.to_cpu_nonblocking()
    output.sampling_mask_tensors.to_cpu_nonblocking()


def timed(run: Callable[[], Any], gpu: bool) -> dict[str, float]:
    """Milliseconds."""
    if gpu:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(HELD_UP)
        start.record()
    began = time.perf_counter()
    output = run()
    figures = {"host": 1e3 * (time.perf_counter() - began)}
    if gpu:
        stop.record()
    began = time.perf_counter()
    copy(output)
    figures["copy"] = 1e3 * (time.perf_counter() - began)
    if gpu:
        stop.synchronize()
        figures["gpu"] = start.elapsed_time(stop)
    return figures


@torch.inference_mode()
def measure(rows: int, vocabulary: int, few: int, rounds: int, device: torch.device) -> Any:
    # Once the interpreter is in its place.
    from vllm import SamplingParams  # noqa: PLC0415

    from benchmarks.rollout.sampling_parts import make_batch, make_runner  # noqa: PLC0415
    from keel.rollout.fastpath import sampler as kept_sampler  # noqa: PLC0415

    parameters = [
        SamplingParams(top_k=TOP_K, top_p=TOP_P, seed=seed, logprobs=0) for seed in range(rows)
    ]
    stock, behind, packed = (
        make_runner(parameters, vocabulary, device, record=True) for _ in range(3)
    )
    assert kept_sampler.install(behind) and kept_sampler.install(packed)
    behind.sampler.only_truncates = lambda _: False
    theirs, tail, ours = stock.sampler, behind.sampler, packed.sampler
    batch = make_batch(np.arange(rows), [9] * rows, device)
    logits = likely_few(rows, vocabulary, few, device)
    runs: dict[str, Callable[[], Any]] = {
        "vllm": lambda: theirs(logits, batch),
        "tail": lambda: tail(logits, batch),
        "packed": lambda: ours(logits, batch),
    }
    expected, found = runs["vllm"](), runs["packed"]()
    same = (expected.sampled_token_ids == found.sampled_token_ids).float().mean().item()
    times: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, device.type == "cuda"))
    median = {
        name: {part: statistics.median(one[part] for one in every) for part in every[0]}
        for name, every in times.items()
    }
    return {
        "rows": rows,
        "vocabulary": vocabulary,
        "mean_kept": found.sampling_mask_tensors.counts.float().mean().item(),
        "same_tokens": same,
        "ms": median,
        "ratio": {
            name: {part: median[name][part] / one for part, one in median["packed"].items()}
            for name in ("vllm", "tail")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--small", action="store_true", help="4 rows of 4,000, interpreted")
    args = parser.parse_args()
    if args.small:
        if os.environ.get("TRITON_INTERPRET") != "1":
            parser.error("--small wants TRITON_INTERPRET=1")
        from tests.rollout.interpreted import lend_triton  # noqa: PLC0415

        lend_triton()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if args.small else "cuda")
    torch.manual_seed(0)
    name = "cpu" if args.small else torch.cuda.get_device_name()
    result: dict[str, Any] = {"commit": commit(), "device": name, "cases": []}
    vocabulary, rounds = (4000, 2) if args.small else (VOCABULARY, args.rounds)
    for rows, few in product((4,) if args.small else ROWS, KEPT):
        try:
            case = measure(rows, vocabulary, few, rounds, device)
        except Exception as error:  # one case must not take the others with it
            case = {"rows": rows, "few": few, "error": repr(error)}
        result["cases"].append(case)
        print(json.dumps(case), flush=True)
        (args.out / "sampling.json").write_text(json.dumps(result, indent=1))
    if any("error" in case for case in result["cases"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
