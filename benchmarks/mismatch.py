"""Mismatch between engine and trainer on the same weights, by precision.

    python -m benchmarks.mismatch --out OUT [--model FOLDER] [--arms bfloat16 float16 …]

A real engine samples, and the trainer's network scores the samples with routes and masks replayed,
so the remaining mismatch is rounding and summation order. The default model has the shape of
Qwen3-0.6B, random weights and logits of standard deviation 8 (`sharpness` of `--size`); `--model`
takes any model folder with a chat template. `gap` is a completion's mean_t(log π_old − log π_θ),
which the off-policy sequence mask compares with δ (`algorithm.mask_delta`), for completions cut at
several lengths.

An acceptance test for any model: KL(π_old ‖ π_θ) over 20 batches with the same weights, by depth in
the completion, with everything replayed and (`unreplayed`) with live routes and no masks:

    python -m benchmarks.mismatch --out OUT --model FOLDER --arms bfloat16 --size '{"batches": 20}'

Writes OUT/mismatch.json. Arms run one after the other, each in a separate process.
"""

import json
import random
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.common import arguments, commit, worker_process
from benchmarks.engines import Batch, Keel
from benchmarks.peers.shape import write_model
from benchmarks.peers.workload import QWEN3_06B, SMALL
from keel.configs.schema import (
    Config,
    DataConfig,
    Dtype,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
)
from keel.rl.types import Group, ScoredGroup
from keel.rollout.spec import EngineSpec, env_vars

TIMEOUT_S = 400
LENGTHS = (16, 64, 256, 1024)
"""Completion lengths in tokens for `gap`."""
FAR = 0.1
QUESTIONS = (
    "Tell a story about {}.",
    "Explain {} to a child.",
    "What are the advantages and disadvantages of {}?",
    "Write a short poem about {}.",
)
TOPICS = (
    *("rain", "mathematics", "trains", "cooking", "history", "tides"),
    *("music", "money", "chess", "sleep", "glass", "maps"),
)


@dataclass(frozen=True)
class Arm:
    engine: Dtype
    trainer: Dtype
    head: str = "float32"
    compiled: bool = False
    invariant: bool = False
    """`model.batch_invariant`"""
    residual: Literal["model", "float32"] = "model"
    """`model.residual_dtype`"""
    quantization: Literal["", "fp8"] = ""
    """`rollout.quantization`"""


ARMS: Mapping[str, Arm] = {
    "bfloat16-head-rounded": Arm("bfloat16", "bfloat16", head="model"),
    "bfloat16": Arm("bfloat16", "bfloat16"),
    "bfloat16-compiled": Arm("bfloat16", "bfloat16", compiled=True),
    "bfloat16-invariant": Arm("bfloat16", "bfloat16", invariant=True),
    "float16": Arm("float16", "float16"),
    "float16-residual": Arm("float16", "float16", residual="float32", compiled=True),
    "float16-compiled": Arm("float16", "float16", compiled=True),
    "float32": Arm("float32", "float32"),
    "fp8": Arm("bfloat16", "bfloat16", quantization="fp8"),
}


@dataclass(frozen=True, kw_only=True)
class Size:
    batches: int = 1
    prompts: int = 16
    group: int = 8
    prompt_tokens: int = 128
    tokens: int = 1024
    sharpness: float = 8.0
    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 512
    seed: int = 0
    gpu_memory_utilization: float = 0.25
    tensor_parallel: int = 1
    """Number of GPUs of the engine. With more than one, each GPU has whole experts."""


def questions(size: Size, *, words: bool) -> list[str]:
    """Make user messages: random words for a random model, plain questions for a trained one."""
    pick = random.Random(size.seed)
    return [
        " ".join(f"w{pick.randrange(100, 500)}" for _ in range(size.prompt_tokens - 12))
        if words
        else pick.choice(QUESTIONS).format(pick.choice(TOPICS))
        for _ in range(size.prompts * size.batches)
    ]


def measure(arm: Arm, folder: Path, size: Size, *, words: bool) -> dict[str, Any]:
    """Measure an arm in a process with the engine's environment variables."""
    config = rollout_config(arm, size)
    engine = Keel(
        EngineSpec(
            model_path=str(folder),
            tokenizer=str(folder),
            config=config,
            dtype=arm.engine,
            max_model_len=size.prompt_tokens + size.tokens + 64,
            seed=size.seed,
            keep_routing=True,
            keep_sampling_mask=True,
            keep_selection=True,
            batch_invariant=arm.invariant,
            residual_dtype=arm.residual,
        )
    )
    batch = Batch("mismatch", questions(size, words=words), config.sampling, size.group)
    _, groups = engine.run(batch)
    segments = [s for group in groups for t in group.trajectories for s in t.segments]
    engine.close()
    # vLLM replaces transformers' class of deepseek_v32 in its own process.
    with ProcessPoolExecutor(1, get_context("spawn")) as trainer:
        args = arm, folder, size, groups
        results = figures(*trainer.submit(scores, *args).result(TIMEOUT_S))
        if any(segment.selected_shape is not None for segment in segments):
            own = trainer.submit(scores, *args, replay="no selection").result(TIMEOUT_S)
            results["own_selection"] = figures(*own)
        if size.batches > 1:
            own = trainer.submit(scores, *args, replay="nothing").result(TIMEOUT_S)
            results["unreplayed"] = figures(*own)
    return results


def scores(
    arm: Arm, folder: Path, size: Size, groups: Sequence[Group], replay: str = "everything"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log π_θ, log π_old and the sequence index of each sampled token."""
    from benchmarks.synthetic import SOURCE  # noqa: PLC0415
    from keel.model.load import load_policy  # noqa: PLC0415
    from keel.rl.packing import plan_packing  # noqa: PLC0415
    from keel.trainer.engine.policy import Inputs, PolicyNetwork  # noqa: PLC0415
    from keel.trainer.engine.zero import compile_layers  # noqa: PLC0415

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = Config(
        data=DataConfig(sources=(SOURCE,)),
        model=ModelConfig(
            path=str(folder),
            dtype=arm.trainer,
            batch_invariant=arm.invariant,
            residual_dtype=arm.residual,
        ),
        rollout=RolloutConfig(sampling=SamplingConfig(temperature=size.temperature)),
    )
    network = PolicyNetwork(load_policy(str(folder), arm.trainer), config)
    network = network.to(device).train()
    network.replays_selections = replay == "everything"  # the selections of sparse attention
    if arm.compiled:
        compile_layers(network.model)
    row = max(8192, size.prompt_tokens + size.tokens + 64)
    (plan,) = plan_packing([unscored(g) for g in groups], replicas=1, micro_batch_tokens=row)
    batch = plan.pack()

    parts: list[tuple[Any, ...]] = []
    first = 0
    for micro_batch in batch.micro_batches:
        if replay == "nothing":
            micro_batch = replace(micro_batch, routes_NLK=None, sampling_mask=None)
        inputs = Inputs.of(micro_batch, device)
        live = inputs.routes_NLK is None
        with torch.no_grad(), nullcontext() if live else network.keep_routing(inputs):
            logp, *_ = network(inputs=inputs)
        parts.append(
            (
                logp.double().cpu().numpy(),
                inputs.logp_old_R.double().cpu().numpy(),
                inputs.sequence_R.cpu().numpy() + first,
            )
        )
        first += len(inputs.sequence_tokens_S)
    ours, theirs, sequence = (np.concatenate(column) for column in zip(*parts, strict=True))

    return ours, theirs, sequence


def unscored(group: Group) -> ScoredGroup:
    count = len(group.trajectories)
    zeros = np.zeros(count, np.float32)
    return ScoredGroup(
        group=group, rewards_G=zeros, parts_G=({"correct": 0.0},) * count, advantages_G=zeros - 1
    )


def figures(ours: np.ndarray, theirs: np.ndarray, sequence: np.ndarray) -> dict[str, Any]:
    gap, ratio = theirs - ours, np.exp(ours - theirs)
    results: dict[str, Any] = {
        "tokens": len(gap),
        "completions": int(sequence.max()) + 1,
        "logp_abs": float(np.abs(gap).mean()),
        "ratio_mean": float(ratio.mean()),
        "ratio_outside": float(((ratio < 1 - FAR) | (ratio > 1 + FAR)).mean()),
        "ratio_max": float(ratio.max()),
        "kl": float((ratio - 1 - np.log(ratio)).mean()),
        "entropy_bound": float(-theirs.mean()),
        "gap": {},
        "kl_by_depth": {},
    }
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    depth = np.arange(len(gap)) - np.repeat(starts, np.diff(starts, append=len(gap)))
    for above, length in pairwise((0, *LENGTHS)):
        inside = (ratio - 1 + gap)[(depth >= above) & (depth < length)]
        results["kl_by_depth"][length] = float(inside.mean()) if len(inside) else None
    for length in LENGTHS:
        means = [
            mean
            for index in range(results["completions"])
            for of in [gap[sequence == index]]
            for mean in of[: len(of) // length * length].reshape(-1, length).mean(1)
        ]
        if means:
            results["gap"][length] = float(np.max(means))
    return results


def rollout_config(arm: Arm, size: Size) -> RolloutConfig:
    head: Any = arm.head
    return RolloutConfig(
        sampling=SamplingConfig(
            temperature=size.temperature,
            top_p=size.top_p,
            top_k=size.top_k,
            max_tokens=size.tokens,
        ),
        head_dtype=head,
        quantization=arm.quantization,
        gpu_memory_utilization=size.gpu_memory_utilization,
        tensor_parallel=size.tensor_parallel,
        expert_parallel=size.tensor_parallel > 1,
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--size", type=json.loads, default={}, help="fields of Size, as JSON")
    parser.add_argument("--words", action="store_true", help="prompts of random words")
    options = parser.parse_args()
    size = replace(Size(), **options.size)
    folder: Path = options.model or options.out / "model"
    options.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    if options.model is None:
        options.words = True
        made, expected = options.out / "made.json", json.dumps([size.seed, size.sharpness, gpu])
        if made.exists() and made.read_text() != expected:
            parser.error(f"--out {options.out} has another model; choose another folder")
        if not made.exists():
            shape = (QWEN3_06B if gpu else SMALL).shape
            write_model(folder, shape, seed=size.seed, sharpness=size.sharpness)
            made.write_text(expected)
    rows: dict[str, Any] = {}
    for name in options.arms:
        arm, log = ARMS[name], options.out / f"{name}.log"
        config = rollout_config(arm, size)
        variables = env_vars(config, gpu=gpu, batch_invariant=arm.invariant)
        with worker_process(variables, log) as process:
            future = process.submit(measure, arm, folder, size, words=options.words)
            try:
                rows[name] = future.result(TIMEOUT_S)
            except Exception as error:
                traceback.print_exception(error)
                print(f"{name}: {error!r}\n{log.read_text()[-1500:]}", flush=True)
                continue
        print(name, json.dumps({k: v for k, v in rows[name].items() if k != "gap"}), flush=True)
        report = {"commit": commit(), "size": asdict(size), "arms": rows}
        (options.out / "mismatch.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"| arm | KL | {' | '.join(f'to token {length}' for length in LENGTHS)} |")
    for name, row in rows.items():
        for label, part in ((name, row), (f"{name}, unreplayed", row.get("unreplayed", {}))):
            cells = [part.get("kl"), *part.get("kl_by_depth", {}).values()]
            if part:
                print(f"| {label} | {' | '.join(f'{c:.2g}' if c else '–' for c in cells)} |")
    sys.exit(int(len(rows) < len(options.arms)))


if __name__ == "__main__":
    main()
