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
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers import reward
from benchmarks.peers.workload import ArmFile, StepTimes, Workload, arm_options, versions

TURN = "benchmark_turn"
SOURCE = "peers"
PHASES = {"gen": "rollout", "update_actor": "training", "update_weights": "weights"}
"""verl's timers → phases of the report; rewards are part of the rollout."""
NOTES = (
    "critic/score/mean",
    "actor/kl_loss",
    "actor/grad_norm",
    "response_length/mean",
    "training/rollout_probs_diff_mean",
)
CHECKPOINTED, KEPT = 16_384, 9_216
"""Tokens per micro-batch with gradient checkpointing (verl's default) and without (about 30 GiB of
activations for `QWEN3_06B`)."""


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
    scored = max(tokens, CHECKPOINTED)
    prompts = str(folder / "prompts.jsonl")
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    made = {
        "data.train_files": prompts,
        "data.val_files": prompts,
        "data.train_batch_size": workload.prompts_per_step,
        "data.max_prompt_length": workload.prompt_tokens,
        "data.max_response_length": workload.completion_tokens,
        "actor_rollout_ref.model.path": workload.model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": settings.gradient_checkpointing,
        "actor_rollout_ref.model.use_liger": settings.liger,
        f"{actor}.ppo_mini_batch_size": workload.prompts_per_step,
        f"{actor}.ppo_max_token_len_per_gpu": tokens,
        **dict.fromkeys(
            (f"{actor}.clip_ratio{end}" for end in ("", "_low", "_high")), workload.clip
        ),
        f"{actor}.kl_loss_coef": workload.kl_coef,
        f"{actor}.grad_clip": workload.grad_clip,
        f"{actor}.optim.lr": workload.lr,
        f"{actor}.optim.betas": [workload.beta1, workload.beta2],
        f"{actor}.optim.clip_grad": workload.grad_clip,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": scored,
        f"{rollout}.n": workload.group_size,
        f"{rollout}.temperature": workload.temperature,
        f"{rollout}.top_p": workload.top_p,
        f"{rollout}.top_k": workload.top_k,
        f"{rollout}.max_model_len": workload.context,
        f"{rollout}.max_num_seqs": max(256, workload.sequences),
        f"{rollout}.calculate_log_probs": settings.engine_log_probs,
        f"{rollout}.log_prob_max_token_len_per_gpu": scored,
        f"{rollout}.agent.agent_loop_config_path": str(folder / "turn.yaml"),
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "reward.custom_reward_function.path": str(Path(reward.__file__).resolve()),
        "reward.custom_reward_function.name": reward.variety_of_solution.__name__,
        # verl reserves more CPUs than it uses, so Ray might not schedule its processes.
        "ray_kwargs.ray_init.num_cpus": max(32, os.cpu_count() or 1),
    }
    if settings.quick_poll:
        sampler = "trainer.v1.sampler.custom_sampler"
        made[f"{sampler}.path"] = str(Path(__file__).with_name("verl_parts.py"))
        made[f"{sampler}.name"] = "QuickReplayBuffer"
    return made | yaml.safe_load(Path(__file__).with_name("verl.yaml").read_text())


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
        return StepTimes(
            step=line["step"],
            seconds=now - self._last,
            tokens=round(metrics["response_length/mean"] * self.sequences),
            phases={name: metrics.get(f"timing_s/{timer}", 0.0) for timer, name in PHASES.items()},
            notes={
                name: float(metrics[name])
                for name in NOTES
                if math.isfinite(metrics.get(name, math.nan))
            },
        )


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
    made |= {"hydra.run.dir": str(folder), "hydra.output_subdir": None}
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += [f"{key}={json.dumps(value)}" for key, value in made.items()]  # hydra reads JSON
    variables = {
        **os.environ,
        "VERL_FILE_LOGGER_PATH": str(log.path),
        "RAY_TMPDIR": str(temporary),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    variables.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # for the other arms' version of vLLM
    with subprocess.Popen(command, env=variables, start_new_session=True) as process:
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
            with suppress(ProcessLookupError):  # processes of other groups bear the arm's mark
                os.killpg(process.pid, signal.SIGKILL)
    if len(file.steps) < steps:  # keep Ray's logs for debugging
        raise SystemExit(f"verl ended with {process.returncode} after {len(file.steps)} steps")
    shutil.rmtree(temporary, ignore_errors=True)


def main() -> None:
    options = arm_options(__doc__, ARMS)
    steps, scratch = options.steps, options.scratch
    run(options.workload, options.arm, options.out, steps=steps, scratch=scratch)


if __name__ == "__main__":
    main()
