"""One arm of the comparison: verl's trainer with GRPO on one GPU, started as its users start it.

    python -m benchmarks.peers.verl_grpo --workload FILE --out FILE --scratch FOLDER --arm verl

Needs requirements/peers-verl.txt, which do not go together with Keel's: `compare --verl-path`
gives this arm a folder of packages of its own. Times are those that verl's file logger writes after
each step. verl's own version of vLLM samples, not the one of the other arms.

As its documentation advises for one GPU: FSDP2, which need not shard again after the forward pass
there; weights, gradients and optimizer state in float32 and computations in bfloat16; engine and
trainer on one GPU by turns, the engine asleep in between; no padding; micro-batches by tokens; one
update per step. The reference policy is in host memory, as verl always has it.

Not as in the other arms, since verl has no such thing: the unbiased KL estimate (`low_var_kl` is
its nearest), and the mask of off-policy sequences (its rejection of samples compares the trainer's
probabilities with the engine's, which truncated sampling sets apart). verl computes π_old over the
whole vocabulary and with the trainer, as TRL does, and asks the engine for its log-probabilities to
report how far they are off. flash-attn is replaced by the same kernels of torch
(`verl_attention`), and the turn by one that takes the benchmark's tokenizer (`verl_parts`). In the
arms that start with `verl-fast`, and in `verl-liger` and `verl-fit`, the trainer also looks sooner
whether all completions are there than every two seconds.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers import reward
from benchmarks.peers.memory import gpu_size
from benchmarks.peers.workload import ArmFile, StepTimes, Workload, arm_parser, version

ATTENTION = "torch_varlen"  # verl_attention.NAME, which needs torch to be read
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
"""verl's timers → the names that the report has for them. It scores while it samples."""
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
"""Tokens of a micro-batch with gradient checkpointing (verl's default), and of one without at
`QWEN3_06B`'s width and depth: about 30 GiB of activations."""
OF_OTHER_ARMS = ("VLLM_USE_V2_MODEL_RUNNER",)
"""Variables that may be set for the other arms' version of vLLM."""
STOP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the arms of verl differ in."""

    fused: bool = True
    """verl's kernel for head and log-probability in one, which keeps no logits."""
    gradient_checkpointing: bool = True
    liger: bool = False
    """Liger's kernels for norms, rotation and feed-forward."""
    engine_log_probs: bool = True
    """The engine's log-probabilities, which verl asks for unless told otherwise."""
    quick_poll: bool = False
    """`verl_parts.QuickReplayBuffer` instead of verl's."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU for vLLM while it is awake; 0.5 is verl's default. 0: what the completions
    need."""


FAST = Settings(gradient_checkpointing=False, engine_log_probs=False, quick_poll=True)
ARMS = {
    "verl": Settings(),
    "verl-plain": Settings(fused=False),
    "verl-fast": FAST,
    "verl-liger": replace(FAST, liger=True),
    "verl-fit": replace(FAST, liger=True, gpu_memory_utilization=0.0),
    "verl-fast-plain": replace(FAST, fused=False),
}


def micro_batch(workload: Workload, settings: Settings) -> int:
    """Tokens, at the most; those of one sequence at least."""
    if settings.gradient_checkpointing:
        return max(CHECKPOINTED, workload.context)
    widest = 28 * 1024 / (workload.shape.layers * workload.shape.hidden_size)
    return max(int(KEPT * min(1.0, widest)), workload.context)


def overrides(
    workload: Workload, settings: Settings, *, folder: Path, steps: int
) -> dict[str, Any]:
    """Keys of verl's configuration → values. `folder`: with prompts and the turn's description."""
    tokens = micro_batch(workload, settings)
    share = settings.gpu_memory_utilization
    if not share and (size := gpu_size()):
        share = workload.engine_share(size)
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
        "use_fused_kernels": settings.fused,
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
        "gpu_memory_utilization": share,
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
        # Ray counts CPUs only to place processes, and verl asks for more than it keeps busy.
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
    """The keys with the section before each, but behind a + (hydra's sign of a new key)."""
    return {
        f"+{section}.{key[1:]}" if key.startswith("+") else f"{section}.{key}": value
        for key, value in keys.items()
    }


def words(made: Mapping[str, Any]) -> list[str]:
    """As hydra reads them from a command line: JSON is its grammar where strings are quoted."""
    return [f"{key}={json.dumps(value)}" for key, value in made.items()]


def write_inputs(folder: Path, workload: Workload) -> None:
    """Prompts as verl's dataset reads them, and where its agent loop is."""
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
    """The file of verl's logger: a line per step, without the time."""

    path: Path
    sequences: int
    """Completions of a step."""
    began: float = 0.0
    """When the file was made, just before the first step; in seconds since 1970; 0: not yet."""
    _last: float = 0.0

    def fresh(self, known: int, now: float) -> list[StepTimes]:
        """Steps beyond those known. A step's seconds run from the line before to its own."""
        if not self.began:
            if not self.path.exists():
                return []
            self.began = self._last = now
        lines = self.path.read_text().split("\n")[:-1]  # whole ones
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
    """Of verl and all that it starts, through Ray too."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_OTHER_ARMS}
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
    file.versions = {f"{name} (verl)": found for name in names if (found := version(name))}
    file.save()
    log = Watched(folder / "metrics.jsonl", workload.sequences)
    # A short path: Ray's sockets lie below it, and their names may have 107 letters.
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
                    file.first_step_at, file.memory = log.began, memory(file.steps)
                    file.save()
                    print(*(f"step {step.step}: {step}" for step in fresh), sep="\n", flush=True)
                if ended:
                    break
                time.sleep(0.02)
        finally:
            stop(process)
    if len(file.steps) < steps:  # and Ray's logs stay, for whoever asks why
        raise SystemExit(f"verl ended with {process.returncode} after {len(file.steps)} steps")
    shutil.rmtree(temporary, ignore_errors=True)


def memory(steps: Sequence[StepTimes]) -> dict[str, float]:
    """GiB of the trainer's process: verl's figures are of the process so far."""
    names = {"allocated": "torch, most allocated", "reserved": "torch, most reserved"}
    return {
        said: steps[-1].notes.get(f"actor/perf/max_memory_{name}_gb", 0.0)
        for name, said in names.items()
        if steps
    }


def stop(process: subprocess.Popen[bytes]) -> None:
    """Its steps are written down; what it has started ends with the arm."""
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
