"""`run`: the run folder, the number of steps and the machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from keel.configs.sections.base import Section, knob, require, require_unique


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Section, path="run"):
    """Settings for a run: its folder, number of steps, checkpoints and hardware."""

    dir: str = knob("runs/default", resumable=True)
    """Run folder, which holds the resolved config, metrics, checkpoints and trajectories."""
    steps: int = knob(100, ge=1, resumable=True)
    """Number of training steps. Each trains on one batch of rollouts."""
    seed: int = knob(0, ge=0, lt=2**32)
    """Random seed for weight initialization, data order and sampling."""
    device: Literal["auto", "cpu", "gpu"] = knob("auto", resumable=True)
    """Device type. auto: GPUs if this machine has any, or if `gpu_gib` or `gpus_per_node` is set.
    Use `gpu` where only other nodes of the cluster have GPUs."""
    gpu_gib: float = knob(0.0, ge=0, resumable=True)
    """Memory per GPU in GiB. 0: detect it. `keel check` plans for this size on any machine, and a
    run stays within it on larger GPUs."""
    gpus_per_node: int = knob(0, ge=0, resumable=True)
    """Number of GPUs to use per node. 0: all that are detected. `keel check` plans for this number
    whatever the machine has."""
    nodes: int = knob(1, ge=1, resumable=True)
    """Number of nodes to use, with `gpus_per_node` GPUs each."""
    cpu_nodes: int = knob(0, ge=0, resumable=True)
    """Maximum number of nodes that run reward workers, sandboxes and environments. 0: all with free
    CPU cores. 1: only the one where `keel train` runs. docs/clusters.md"""
    cpu_node_names: tuple[str, ...] = knob((), resumable=True)
    """Host names of the other nodes that `cpu_nodes` may use. Empty: any."""
    resume: Literal["auto", "never"] = knob("auto", resumable=True)
    """auto: resume from the last checkpoint in `dir`. never: refuse a `dir` that has one."""
    eval_every: int = knob(0, ge=-1, resumable=True)
    """Number of steps between evaluations on the held-out sets. 0: only before the first step and
    after the last. -1: never."""
    checkpoint_every: int = knob(0, ge=0, resumable=True)
    """Number of steps between checkpoints. 0: by time only (`checkpoint_minutes`). A checkpoint is
    always written at the end and on Ctrl-C."""
    checkpoint_minutes: float = knob(30.0, ge=0, resumable=True)
    """Minutes between checkpoints. 0: by steps only (`checkpoint_every`)."""
    keep_checkpoints: int = knob(2, ge=1, resumable=True)
    """Number of most recent checkpoints to keep. Older ones are deleted."""
    save_trajectories: int = knob(4, ge=0, resumable=True)
    """Number of trajectories to save per step as JSON lines. 0: none, and `keel report` shows
    none."""
    save_all_trajectories: bool = knob(False, resumable=True)
    """Save every trajectory of a step as a JSON line, for `keel sft`."""
    save_tokens: int = knob(32_768, ge=0, resumable=True)
    """Token budget per step for trajectories that are saved with per-token numbers for `keel
    report`: first the `save_trajectories` ones, then the rest of their groups. About 10 bytes per
    token. 0: none."""
    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = knob((), resumable=True)
    """Experiment trackers to log to in addition to TensorBoard. Each needs the optional dependency
    of the same name and reads its address and key from the environment. docs/trackers.md"""
    startup_timeout_s: float = knob(600.0, gt=0, resumable=True)
    """Timeout in seconds for engines and trainer to start."""
    hang_timeout_s: float = knob(180.0, ge=0, resumable=True)
    """Kill an engine, rank or Ray process that is stopped (SIGSTOP) for this many seconds, as if it
    had crashed. 0: never. A suspended machine does not count. docs/reliability.md"""
    max_restarts: int = knob(3, ge=0, resumable=True)
    """Maximum number of automatic restarts from the newest checkpoint within three hours, after the
    loss of a trainer rank or a node. 0: stop instead. docs/reliability.md"""
    elastic_wait_s: float = knob(600.0, ge=0, resumable=True)
    """Seconds to wait at a start or restart for the resources that all ranks and engines need.
    After that the run continues with fewer if `trainer.min_ranks` allows it."""
    max_skipped_steps: int = knob(3, ge=1, resumable=True)
    """Stop after this many consecutive optimizer steps without a finite gradient (in float16 at
    least 16, because each one halves the loss scale). docs/alarms.md"""
    grace_s: float = knob(20.0, gt=0, resumable=True)
    """Seconds after SIGTERM, SIGHUP or SIGUSR1 to finish the current optimizer step and save a
    checkpoint. Slurm and Kubernetes kill after 30. docs/checkpoints.md"""

    def check(self) -> None:
        self.require(bool(self.dir), "dir", "must name a folder")
        self.require(self.nodes == 1 or self.gpus_per_node > 0, "nodes", "needs run.gpus_per_node")
        rule = "conflicts with run.device: cpu. Set it to 0, or set run.device: gpu"
        for name in ("gpu_gib", "gpus_per_node"):
            self.require(self.device != "cpu" or not getattr(self, name), name, rule)
        require_unique("run.trackers", self.trackers)

    @property
    def folder(self) -> Path:
        return Path(self.dir).expanduser()

    @property
    def describes_gpus(self) -> bool:
        return self.gpu_gib > 0 or self.gpus_per_node > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmsConfig(Section, path="alarms"):
    """Thresholds for metrics. If a metric crosses its threshold, the run prints a warning and
    continues. Only `stop_below` stops the run. 0 turns an alarm off. See docs/alarms.md."""

    missing: float = knob(0.001, ge=0)
    """Warn if `rollout/dropped_completions` exceeds this share of the batch."""
    truncated: float = knob(0.5, ge=0)
    """Warn if `rollout/truncated_fraction` exceeds this."""
    uniform: float = knob(0.0, ge=0)
    """Warn if `rollout/uniform_group_fraction` exceeds this. Off by default, because it rises on
    any task that is learned."""
    reward_errors: float = knob(0.05, ge=0)
    """Warn if `reward/error` exceeds this."""
    mismatch: float = knob(0.3, ge=0)
    """Warn if `mismatch/logp_abs` exceeds this, in nats per token. 0.1 to 0.2 is normal in bfloat16
    for models with sharp distributions."""
    routing_fallback: float = knob(0.01, ge=0)
    """Warn if `routing/fallback_fraction` exceeds this."""
    masked: float = knob(0.5, ge=0)
    """Warn if `mask/sequence_fraction` exceeds this."""
    kl: float = knob(1.0, ge=0)
    """Warn if `kl/ref` exceeds this, in nats per token."""
    entropy: float = knob(0.0, ge=0)
    """Warn if `entropy/kept` falls below this, in nats per token. Off by default, because it falls
    on any task that is learned."""
    kept_mass: float = knob(0.0, ge=0)
    """Warn if `sampling/kept_mass` falls below this. Off by default, because the healthy value
    depends on `rollout.sampling.top_p`."""
    skipped: float = knob(0.5, ge=0)
    """Warn if `train/skipped_steps` (optimizer steps without a finite gradient) exceeds this."""
    every: int = knob(20, ge=1)
    """Number of steps before an alarm that persists or returns is reported again."""
    stop_below: Mapping[str, float] = field(default_factory=dict[str, float])
    """Minimum `eval/<source>/pass@1` for each source. If the value falls below it, the run saves a
    checkpoint and stops. Use it for abilities that must not be lost, such as refusing harmful
    requests. docs/alarms.md"""

    def check(self) -> None:
        for name, least in self.stop_below.items():
            require(0 < least <= 1, f"alarms.stop_below.{name}", least, "must be in (0, 1]")
