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
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig

from benchmarks.common import Mixture, arguments, run_facts
from benchmarks.peers.shape import random_words, write_model
from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import Group, Prompt
from keel.rollout.chat.render import render_prompt
from keel.rollout.spec import EngineSpec, GroupRequest, env_vars

START_S, RUN_S = 300.0, 240.0
WARM_TOKENS = 24
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Batch sizes for which CUDA graphs are captured. Each one adds to the startup time."""


@dataclass(frozen=True)
class Arm:
    keel: bool = True
    record: bool = True
    """Whether to record sampling masks and routes."""
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Changes to vLLM's engine arguments."""


ARMS = {
    "stock": Arm(keel=False),
    "packed-plain": Arm(record=False),
    "packed": Arm(),
    "packed-head-rounded": Arm(changes={"hf_overrides": {"head_dtype": "model"}}),
}


@dataclass(frozen=True)
class Size(Mixture):
    """Size of the model and of one timed run."""

    expert: int = 640
    words: int = 151_669
    """Number of tokens in the vocabulary."""
    prompts: int = 16
    group: int = 16
    prompt: int = 128
    """Number of tokens per prompt."""
    completion: int = 512
    """Number of tokens in every completion."""
    top_p: float = 0.95
    top_k: int = 512
    logit_spread: float = 9.15
    """Standard deviation of the logits, at which a mask of normal ones keeps 8 ids on average."""
    dtype: str = "bfloat16"

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def context(self) -> int:
        return self.prompt + self.completion + 16

    def sampling(self, completion: int) -> SamplingConfig:
        return SamplingConfig(top_p=self.top_p, top_k=self.top_k, max_tokens=completion)


SMALL = Size(
    hidden=64,
    layers=2,
    experts=8,
    per_token=2,
    expert=32,
    vocabulary=2048,
    words=2000,
    prompts=4,
    group=4,
    prompt=48,
    completion=32,
    top_k=64,
    logit_spread=6.33,
    dtype="float32",
)


def write(folder: Path, size: Size) -> dict[str, float]:
    """Write the model to disk and return its parameter count."""
    config = size.config(norm_topk_prob=True, max_position_embeddings=4096)
    count = write_model(folder, config, size.words, seed=0, sharpness=size.logit_spread)
    return {"parameters": count}


def make_prompts(size: Size, salt: str) -> list[Prompt]:
    """Make prompts of random words, which are not in the prefix cache if the salt is new."""
    draw = random.Random(salt)
    return [
        Prompt(
            prompt_id=f"{salt}-{index}",
            domain="benchmark",
            messages=({"role": "user", "content": random_words(draw, size.words, size.prompt)},),
        )
        for index in range(size.prompts)
    ]


class Stock:
    """Drives `vllm.LLM` the way its users would."""

    def __init__(self, arm: Arm, folder: str, size: Size) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415
        from vllm import LLM  # noqa: PLC0415

        args: dict[str, Any] = {"max_num_seqs": size.sequences, **engine_args(arm, folder, size)}
        args |= {"dtype": size.dtype, "max_model_len": size.context}
        self._llm = LLM(model=folder, **args)
        self._size = size
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def run(self, prompts: list[Prompt], completion: int) -> list[Group]:
        """Sample completions; plain vLLM has no groups."""
        from vllm import SamplingParams  # noqa: PLC0415

        requests = [
            {"prompt_token_ids": render_prompt(self._tokenizer, prompt)[0]}
            for prompt in prompts
            for _ in range(self._size.group)
        ]
        size = self._size
        params = SamplingParams(
            temperature=1.0, top_p=size.top_p, top_k=size.top_k, max_tokens=completion
        )
        outputs = self._llm.generate(requests, params, use_tqdm=False)  # type: ignore[arg-type]
        check_lengths({len(output.outputs[0].token_ids) for output in outputs}, completion)
        return []

    def on_thread(self, call: Callable[[], Any]) -> Any:
        return call()


class Keel:
    """Drives an `EngineThread` with a `VllmEngine`, as a rollout worker does."""

    def __init__(self, arm: Arm, folder: str, size: Size) -> None:
        from keel.rollout.engine import vllm_engine  # noqa: PLC0415
        from keel.rollout.engine.worker import EngineThread  # noqa: PLC0415

        built = vllm_engine.engine_args

        def bounded(*args: Any) -> Any:
            return replace(built(*args), **engine_args(arm, folder, size))

        vllm_engine.engine_args = bounded
        self._arm, self._size = arm, size
        config = RolloutConfig(
            sampling=size.sampling(size.completion),
            max_num_seqs=size.sequences,
            recorder="packed" if torch.cuda.is_available() else "auto",
            timeout_s=RUN_S,
        )
        spec = EngineSpec(
            model_path=folder,
            tokenizer=folder,
            config=config,
            dtype=size.dtype,  # type: ignore[arg-type]
            max_model_len=size.context,
            seed=0,
            keep_routing=arm.record,
            keep_sampling_mask=arm.record,
        )
        self._engine = EngineThread(lambda: vllm_engine.VllmEngine(spec), config)

    def run(self, prompts: list[Prompt], completion: int) -> list[Group]:
        sampling, record = self._size.sampling(completion), self._arm.record
        requests = [GroupRequest(prompt, self._size.group) for prompt in prompts]
        futures = [self._engine.sample(r, sampling=sampling, record=record) for r in requests]
        groups: Any = [future.result(timeout=RUN_S).result() for future in futures]
        check_lengths({t.sampled_tokens for g in groups for t in g.trajectories}, completion)
        return groups

    def on_thread(self, call: Callable[[], Any]) -> Any:
        """Run `call` on the thread that steps the engine, and return its result."""
        return self._engine._enqueue(lambda _: call()).result(timeout=RUN_S)


def check_lengths(lengths: set[int], expected: int) -> None:
    if lengths != {expected}:
        raise RuntimeError(f"completions have {lengths} tokens instead of {expected}")


def engine_args(arm: Arm, folder: str, size: Size) -> dict[str, Any]:
    """Return the engine arguments for an arm.

    The KV cache is large enough to avoid preemption and small enough for all arms to share the GPU.
    """
    if not torch.cuda.is_available():
        fixed = {"enforce_eager": True, "block_size": 32, "disable_log_stats": True}
        return {"kv_cache_memory_bytes": 2**28, **fixed, **arm.changes}
    model = AutoConfig.from_pretrained(folder)
    token = model.num_hidden_layers * 2 * model.num_key_value_heads * model.head_dim * 2
    return {
        "kv_cache_memory_bytes": int(1.2 * token * size.sequences * size.context) + 2**28,
        "gpu_memory_utilization": 0.04,  # unused, but vLLM checks that it is free
        "cudagraph_capture_sizes": [n for n in GRAPHS if n <= 2 * size.sequences],
        **arm.changes,
    }


_driver: Stock | Keel
"""Engine of an arm's process."""


def start(name: str, folder: str, size: Size, log: Path) -> float:
    """Start an arm's engine in this process and return the seconds it took."""
    global _driver
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    began = time.perf_counter()
    _driver = (Keel if ARMS[name].keel else Stock)(ARMS[name], folder, size)
    # The first batch compiles kernels and allocates memory.
    _driver.run(make_prompts(size, "warm"), min(size.completion, WARM_TOKENS))
    return time.perf_counter() - began


def timed_run(size: Size, salt: str) -> dict[str, Any]:
    """Run one batch and measure its time, from the first request to the last group."""
    prompts = make_prompts(size, salt)
    cpu = _driver.on_thread(time.thread_time)
    began = time.perf_counter()
    groups = _driver.run(prompts, size.completion)
    seconds = time.perf_counter() - began
    cpu = _driver.on_thread(time.thread_time) - cpu
    return {
        "tokens_per_second": size.sequences * size.completion / seconds,
        "thread_ms_per_token_row": 1e3 * cpu / size.completion,
        **({"mean_kept": mean_kept(groups)} if groups else {}),
    }


def mean_kept(groups: Sequence[Group]) -> float:
    """Return the mean number of ids in the recorded sampling masks, or 0 without masks."""
    segments = [s for group in groups for t in group.trajectories for s in t.segments]
    sampled = sum(int(segment.trainable_T.sum()) for segment in segments)
    sizes = [s.mask_sizes_T for s in segments if s.mask_sizes_T is not None]
    return sum(int(each.sum()) for each in sizes) / sampled


def measure(
    names: Sequence[str], folder: str, size: Size, out: Path, rounds: int, save: Any
) -> None:
    """Start all arms and let them take turns; `save` gets the arm and its result, or its error."""
    processes: dict[str, ProcessPoolExecutor] = {}
    starting: dict[str, Any] = {}
    before = dict(os.environ)
    for name in names:
        keel = ARMS[name].keel
        os.environ |= env_vars(RolloutConfig(threads=2), gpu=torch.cuda.is_available())
        os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not keel))}
        if not keel:  # plain vLLM keeps its sampler
            del os.environ["VLLM_USE_FLASHINFER_SAMPLER"]
        processes[name] = ProcessPoolExecutor(1, get_context("spawn"))
        starting[name] = processes[name].submit(start, name, folder, size, out / f"log_{name}.txt")
        os.environ.clear()
        os.environ |= before

    def answer(name: str, future: Any, timeout_s: float) -> Any:
        try:
            return future.result(timeout=timeout_s)
        except Exception as error:  # the other arms continue
            save(name, f"{type(error).__name__}: {error}")
            del processes[name]

    for name, future in starting.items():
        if (seconds := answer(name, future, START_S)) is not None:
            print(f"  {name}: ready after {seconds:.0f} s", flush=True)
    for index in range(rounds):
        for name in sorted(processes, key=list(ARMS).index, reverse=bool(index % 2)):
            future = processes[name].submit(timed_run, size, f"round{index}")
            if (row := answer(name, future, RUN_S)) is not None:
                save(name, {"round": index, **row})


def summary(rows: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the medians over all rounds, and the medians of the ratios within each round."""
    result: dict[str, dict[str, float]] = {}
    for name, mine in rows.items():
        result[name] = {key: statistics.median(row[key] for row in mine) for key in mine[0]}
        for other, key in (("stock", "to_stock"), ("packed-plain", "to_plain")):
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
    size = SMALL if options.small else Size()
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {**run_facts(), "size": asdict(size), "rows": {}, "failed": {}}

    def save(name: str, result: dict[str, Any] | str) -> None:
        if isinstance(result, str):
            print(f"  {name}: {result}", flush=True)
            report["failed"][name] = result
        else:
            report["rows"].setdefault(name, []).append(result)
        report["summary"] = summary(report["rows"])
        (options.out / "rollout.json").write_text(json.dumps(report, indent=1))

    try:
        with tempfile.TemporaryDirectory() as folder:
            report["model"] = write(Path(folder), size)
            torch.cuda.empty_cache()
            measure(options.arms, folder, size, options.out, options.rounds, save)
    finally:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
    print(", ".join(f"{name} {value}" for name, value in run_facts().items()))
    print("\narm                    tok/s  thread ms  ÷ stock  ÷ plain  kept")
    for name, row in report["summary"].items():
        print(
            f"{name:22s}{row['tokens_per_second']:7,.0f}"
            f"{row['thread_ms_per_token_row']:11.2f}{row['to_stock']:9.2f}"
            f"{row['to_plain']:9.3f}{row.get('mean_kept', float('nan')):6.1f}"
        )
    sys.stdout.flush()
    os._exit(int(bool(report["failed"])))


if __name__ == "__main__":
    main()
