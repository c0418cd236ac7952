"""verl's arms of the comparison: its GRPO trainer on one GPU, started from the command line.

    python -m benchmarks.peers.verl_grpo --workload FILE --out FILE --scratch FOLDER --arm verl

Needs requirements/peers-verl.txt, which conflicts with Keel's requirements: `compare --verl-path`
gives this arm a separate package folder with verl's version of vLLM. Times come from verl's file
logger.

The settings follow verl's documentation for one GPU: FSDP2 without resharding after the forward
pass; float32 weights, gradients and optimizer state with bfloat16 computation; engine and trainer
take turns on the GPU; no padding; micro-batches by tokens; the fused head and loss; one update per
step. The reference policy is always in host memory.

Differences from the other arms: `low_var_kl` replaces the unbiased KL, and there is no mask of
off-policy sequences. π_old comes from the trainer over the whole vocabulary, as in TRL.
`verl_attention` replaces flash-attn with torch's build of the same kernels, and `verl_parts`
replaces the agent loop to support the benchmark's tokenizer.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers import reward
from benchmarks.peers.workload import ArmFile, StepTimes, Workload, arm_parser, versions

ATTENTION = "torch_varlen"  # verl_attention.NAME, without importing torch
TURN = "benchmark_turn"
SOURCE = "peers"
PHASES = {
    "gen": "rollout",
    "old_log_prob": "old and reference passes",
    "ref": "old and reference passes",
    "adv": "advantages",
    "update_actor": "training",
    "update_weights": "weights",
}
"""verl's timers → phases of the report; rewards are part of the rollout."""
NOTES = (
    "critic/score/mean",
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/ppo_kl",
    "actor/grad_norm",
    "actor/entropy",
    "actor/lr",
    "response_length/mean",
    "response_length/min",
    "training/rollout_probs_diff_mean",
    "perf/mfu/actor",
    "actor/perf/max_memory_allocated_gb",
    "actor/perf/max_memory_reserved_gb",
    "timing_s/step",
)
CHECKPOINTED, KEPT = 16_384, 9_216
"""Tokens per micro-batch with gradient checkpointing (verl's default) and without (about 30 GiB of
activations for `QWEN3_06B`)."""
UNSET = ("VLLM_USE_V2_MODEL_RUNNER",)
"""Environment variables for the other arms' version of vLLM only."""
STOP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Differences between the arms of verl."""

    gradient_checkpointing: bool = True
    liger: bool = False
    """Liger's kernels for norms, rotary embedding and feed-forward."""
    engine_log_probs: bool = True
    """Return the engine's log-probabilities, verl's default, to report the mismatch."""
    quick_poll: bool = False
    """Use `verl_parts.QuickReplayBuffer` instead of verl's, which polls every two seconds."""


FAST = Settings(gradient_checkpointing=False, engine_log_probs=False, quick_poll=True)
ARMS = {
    "verl": Settings(),
    "verl-fast": FAST,
    "verl-liger": replace(FAST, liger=True),
}


def micro_batch(workload: Workload, settings: Settings) -> int:
    """Maximum tokens of a micro-batch, which holds at least one sequence."""
    if settings.gradient_checkpointing:
        return max(CHECKPOINTED, workload.context)
    widest = 28 * 1024 / (workload.shape.layers * workload.shape.hidden_size)
    return max(int(KEPT * min(1.0, widest)), workload.context)


def overrides(
    workload: Workload, settings: Settings, *, folder: Path, steps: int
) -> dict[str, Any]:
    """Return verl's configuration overrides; `folder` has the files of `write_inputs`."""
    tokens = micro_batch(workload, settings)
    prompts = str(folder / "prompts.jsonl")
    data = {
        "train_files": prompts,
        "val_files": prompts,
        "train_batch_size": workload.prompts_per_step,
        "max_prompt_length": workload.prompt_tokens,
        "max_response_length": workload.completion_tokens,
        "shuffle": False,
        "dataloader_num_workers": 0,
        "truncation": "error",
    }
    model = {
        "path": workload.model,
        "external_lib": "benchmarks.peers.verl_attention",
        "+override_config.attn_implementation": ATTENTION,
        "use_remove_padding": True,
        "enable_gradient_checkpointing": settings.gradient_checkpointing,
        "use_fused_kernels": True,
        "fused_kernel_options.impl_backend": "triton",
        "use_liger": settings.liger,
    }
    actor = {
        "strategy": "fsdp2",
        "fsdp_config.reshard_after_forward": False,
        "ppo_mini_batch_size": workload.prompts_per_step,
        "ppo_epochs": 1,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": tokens,
        "clip_ratio": workload.clip,
        "clip_ratio_low": workload.clip,
        "clip_ratio_high": workload.clip,
        "loss_agg_mode": "seq-mean-token-mean",
        "entropy_coeff": 0,
        "use_kl_loss": True,
        "kl_loss_type": "low_var_kl",
        "kl_loss_coef": workload.kl_coef,
        "grad_clip": workload.grad_clip,
        "optim.lr": workload.lr,
        "optim.lr_scheduler_type": "constant",
        "optim.betas": [workload.beta1, workload.beta2],
        "optim.weight_decay": 0.0,
        "optim.clip_grad": workload.grad_clip,
    }
    ref = {
        "strategy": "fsdp2",
        "fsdp_config.model_dtype": "bfloat16",
        "log_prob_use_dynamic_bsz": True,
        "log_prob_max_token_len_per_gpu": max(tokens, CHECKPOINTED),
    }
    rollout = {
        "name": "vllm",
        "n": workload.group_size,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "top_k": workload.top_k,
        "tensor_model_parallel_size": 1,
        "gpu_memory_utilization": 0.5,
        "max_model_len": workload.context,
        "max_num_seqs": max(256, workload.sequences),
        "free_cache_engine": True,
        "calculate_log_probs": settings.engine_log_probs,
        "log_prob_use_dynamic_bsz": True,
        "log_prob_max_token_len_per_gpu": max(tokens, CHECKPOINTED),
        "agent.num_workers": 4,
        "agent.default_agent_loop": TURN,
        "agent.agent_loop_config_path": str(folder / "turn.yaml"),
    }
    trainer = {
        "logger": ["console", "file"],
        "project_name": SOURCE,
        "experiment_name": SOURCE,
        "n_gpus_per_node": 1,
        "nnodes": 1,
        "total_epochs": 1000,
        "total_training_steps": steps,
        "save_freq": -1,
        "test_freq": -1,
        "val_before_train": False,
        "resume_mode": "disable",
        "default_local_dir": str(folder / "checkpoints"),
    }
    rest = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "algorithm.use_kl_in_reward": False,
        "reward.num_workers": 2,
        "reward.custom_reward_function.path": str(Path(reward.__file__).resolve()),
        "reward.custom_reward_function.name": reward.variety_of_solution.__name__,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
        # verl reserves more CPUs than it uses, so Ray might not schedule its processes.
        "ray_kwargs.ray_init.num_cpus": max(32, os.cpu_count() or 1),
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init._node_ip_address": "127.0.0.1",
    }
    if settings.quick_poll:
        trainer["v1.sampler.custom_sampler.path"] = str(Path(__file__).with_name("verl_parts.py"))
        trainer["v1.sampler.custom_sampler.name"] = "QuickReplayBuffer"
    return {
        **under("data", data),
        **under("actor_rollout_ref.model", model),
        **under("actor_rollout_ref.actor", actor),
        **under("actor_rollout_ref.ref", ref),
        **under("actor_rollout_ref.rollout", rollout),
        **under("trainer", trainer),
        **rest,
    }


def under(section: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Prefix the keys with a section, after hydra's + for new keys."""
    return {
        f"+{section}.{key[1:]}" if key.startswith("+") else f"{section}.{key}": value
        for key, value in keys.items()
    }


def words(made: Mapping[str, Any]) -> list[str]:
    """Format overrides for hydra's command line, whose grammar accepts JSON values."""
    return [f"{key}={json.dumps(value)}" for key, value in made.items()]


def write_inputs(folder: Path, workload: Workload) -> None:
    """Write the prompts in verl's dataset format and its agent loop configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "prompts.jsonl").open("w") as file:
        for index, text in enumerate(Path(workload.prompts).read_text().splitlines()):
            row = {
                "data_source": SOURCE,
                "prompt": json.loads(text)["messages"],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
            file.write(json.dumps(row) + "\n")
    turn = [{"name": TURN, "_target_": "benchmarks.peers.verl_parts.Turn"}]
    (folder / "turn.yaml").write_text(json.dumps(turn) + "\n")  # JSON is YAML


@dataclass
class Watched:
    """Reader of verl's log, which has one line per step and no time stamps."""

    path: Path
    sequences: int
    """Completions per step."""
    began: float = 0.0
    """Unix time when the file appeared, just before the first step; 0: not yet."""
    _last: float = 0.0

    def fresh(self, known: int, now: float) -> list[StepTimes]:
        """Return the steps after the first `known`; durations count from the previous line."""
        if not self.began:
            if not self.path.exists():
                return []
            self.began = self._last = now
        lines = self.path.read_text().split("\n")[:-1]  # complete lines
        steps: list[StepTimes] = []
        for line in lines[known:]:
            steps.append(self._step(json.loads(line), now))
            self._last = now
        return steps

    def _step(self, line: Mapping[str, Any], now: float) -> StepTimes:
        metrics: Mapping[str, Any] = line["data"]
        phases: dict[str, float] = {}
        for timer, name in PHASES.items():
            if f"timing_s/{timer}" in metrics:
                phases[name] = phases.get(name, 0.0) + float(metrics[f"timing_s/{timer}"])
        return StepTimes(
            step=line["step"],
            seconds=now - self._last,
            tokens=round(metrics["response_length/mean"] * self.sequences),
            phases=phases,
            notes={
                name: float(metrics[name])
                for name in NOTES
                if math.isfinite(metrics.get(name, math.nan))
            },
        )


def environment(log: Path, scratch: Path) -> dict[str, str]:
    """Environment variables of verl and its Ray processes."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {
        **kept,
        "VERL_FILE_LOGGER_PATH": str(log),
        "RAY_TMPDIR": str(scratch),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "HYDRA_FULL_ERROR": "1",
    }


def run(workload: Workload, arm: str, file: ArmFile, *, steps: int, scratch: Path) -> None:
    settings, folder = ARMS[arm], scratch / f"{arm}-{int(time.time())}"
    write_inputs(folder, workload)
    made = overrides(workload, settings, folder=folder, steps=steps)
    names = ("verl", "torch", "vllm", "transformers", "ray", "tensordict", "liger-kernel")
    file.settings = {**asdict(settings), "overrides": made}
    file.versions = versions(*names, suffix=" (verl)")
    file.save()
    log = Watched(folder / "metrics.jsonl", workload.sequences)
    # Short, because the paths of Ray's sockets in it are limited to 107 characters.
    temporary = Path("/tmp") / f"verl-{os.getpid()}"
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *words({"hydra.run.dir": str(folder), "hydra.output_subdir": None, **made}),
    ]
    with subprocess.Popen(
        command, env=environment(log.path, temporary), start_new_session=True
    ) as process:
        try:
            while len(file.steps) < steps:
                ended = process.poll() is not None
                if fresh := log.fresh(len(file.steps), time.time()):
                    file.steps += fresh
                    file.first_step_at = log.began
                    file.save()
                    print(*(f"step {step.step}: {step}" for step in fresh), sep="\n", flush=True)
                if ended:
                    break
                time.sleep(0.02)
        finally:
            stop(process)
    if len(file.steps) < steps:  # keep Ray's logs for debugging
        raise SystemExit(f"verl ended with {process.returncode} after {len(file.steps)} steps")
    shutil.rmtree(temporary, ignore_errors=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process group, and kill it after a timeout."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, sign)
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            continue


def main() -> None:
    parser = arm_parser(__doc__, ARMS, default="verl")
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    run(
        Workload.load(options.workload),
        options.arm,
        ArmFile(path=options.out),
        steps=options.steps + options.warmup,
        scratch=options.scratch,
    )


if __name__ == "__main__":
    main()
