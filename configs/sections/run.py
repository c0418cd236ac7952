"""The run itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keel.configs.sections.base import require


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The run folder, how long the run is, and the machine."""

    dir: str = "runs/default"
    """Run folder: resolved config, metrics, checkpoints, trajectories."""
    steps: int = 100
    """Optimisation steps (one batch of rollouts each)."""
    seed: int = 0
    """Of weights that are random, of the data's order and of sampling."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: GPUs if this machine has any or `gpu_gib` or `gpus_per_node` speaks of some. Say `gpu`
    where only the rest of the cluster has."""
    gpu_gib: float = 0.0
    """Memory of one GPU, in GiB; 0: what the GPUs of this machine have. `keel check` plans for it
    on any machine; a run keeps to it, too, on a GPU that has more."""
    gpus_per_node: int = 0
    """GPUs of each node that the run may use; 0: all that are found. `keel check` plans for them,
    whatever is found here."""
    nodes: int = 1
    """Nodes that the run may use, of `gpus_per_node` GPUs each."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the last checkpoint in `dir`. never: refuse a `dir` that has one."""
    eval_every: int = 0
    """Steps between evaluations on the held-out sets; 0: only before the first and after the last
    step; -1: none at all, as where `keel eval` comes afterwards."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: by time alone. One is always written at the end, and when
    stopped by Ctrl-C."""
    checkpoint_minutes: float = 30.0
    """A checkpoint after the step that ends so long after the last one; 0: by steps alone."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay in the run folder; older ones are removed."""
    save_trajectories: int = 4
    """Trajectories written at each step, as readable text and as lines of JSON; 0: none, and
    `keel report` has none to show."""
    save_all_trajectories: bool = False
    """Write every trajectory of a step as a line of JSON, to be learned from by `keel sft`."""
    save_tokens: int = 32_768
    """Tokens, contexts included, of the trajectories that are written at each step with the numbers
    of every token, for `keel report`: those in the text and, as far as it goes, the others of their
    groups. About 10 bytes a token. 0: none."""
    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """What else is told of the run, beside TensorBoard: Weights & Biases, MLflow, trackio. Each is
    a package of its own, which the extra of its name brings, and has its address and key from the
    environment. docs/trackers.md"""
    startup_timeout_s: float = 600.0
    """Longest wait for the engines and the trainer to start, in seconds."""
    hang_timeout_s: float = 180.0
    """An engine, rank or Ray process that stands still for so many seconds (stopped, or not given a
    processor; not one that is busy) is ended as if it had died; 0: never. Time for which the whole
    job or machine is stopped does not count. docs/reliability.md"""
    max_restarts: int = 3
    """Times within three hours that a run which has lost a trainer rank or a node starts again from
    its newest checkpoint, by itself; 0: it ends. docs/reliability.md"""
    elastic_wait_s: float = 600.0
    """Seconds for which such a start, and the first of a command, waits for room for all ranks and
    engines; then it continues with as many as fit, if `trainer.min_ranks` allows."""
    max_skipped_steps: int = 3
    """Optimizer steps in a row without a finite gradient after which the run ends (in float16 at
    least 16: each halves the loss's scale). docs/alarms.md"""
    grace_s: float = 20.0
    """After SIGTERM, SIGHUP or SIGUSR1: seconds in which an optimizer step under way may end, and a
    checkpoint is written (docs/checkpoints.md). Slurm and Kubernetes kill after 30."""

    def __post_init__(self) -> None:
        require(bool(self.dir), "run.dir", self.dir, "must name a folder")
        require(self.steps >= 1, "run.steps", self.steps, "must be at least 1")
        require(self.seed >= 0, "run.seed", self.seed, "must not be negative")
        require(self.seed < 2**32, "run.seed", self.seed, "must be below 2**32, NumPy's limit")
        require(self.gpu_gib >= 0, "run.gpu_gib", self.gpu_gib, "must not be negative (GiB)")
        require(
            self.gpus_per_node >= 0, "run.gpus_per_node", self.gpus_per_node, "must not be negative"
        )
        require(self.nodes >= 1, "run.nodes", self.nodes, "must be at least 1")
        require(
            self.nodes == 1 or self.gpus_per_node > 0,
            "run.nodes",
            self.nodes,
            "needs run.gpus_per_node: how many GPUs each of them has",
        )
        for name in ("gpu_gib", "gpus_per_node"):
            require(
                self.device != "cpu" or not getattr(self, name),
                f"run.{name}",
                getattr(self, name),
                "speaks of GPUs, and run.device is cpu. Set it to 0, or run.device to gpu",
            )
        require(self.eval_every >= -1, "run.eval_every", self.eval_every, "must be at least -1")
        require(
            self.checkpoint_every >= 0,
            "run.checkpoint_every",
            self.checkpoint_every,
            "must not be negative",
        )
        require(
            self.checkpoint_minutes >= 0,
            "run.checkpoint_minutes",
            self.checkpoint_minutes,
            "must not be negative (minutes)",
        )
        require(
            self.keep_checkpoints >= 1,
            "run.keep_checkpoints",
            self.keep_checkpoints,
            "must be at least 1",
        )
        require(
            self.save_trajectories >= 0,
            "run.save_trajectories",
            self.save_trajectories,
            "must not be negative",
        )
        require(
            len(set(self.trackers)) == len(self.trackers),
            "run.trackers",
            list(self.trackers),
            "must name each once",
        )
        require(self.save_tokens >= 0, "run.save_tokens", self.save_tokens, "must not be negative")
        require(
            self.startup_timeout_s > 0,
            "run.startup_timeout_s",
            self.startup_timeout_s,
            "must be positive (seconds)",
        )
        require(
            self.max_skipped_steps >= 1,
            "run.max_skipped_steps",
            self.max_skipped_steps,
            "must be at least 1",
        )
        require(
            self.max_restarts >= 0, "run.max_restarts", self.max_restarts, "must not be negative"
        )
        require(
            self.elastic_wait_s >= 0,
            "run.elastic_wait_s",
            self.elastic_wait_s,
            "must not be negative (seconds)",
        )
        require(
            self.hang_timeout_s >= 0,
            "run.hang_timeout_s",
            self.hang_timeout_s,
            "must not be negative (seconds; 0: frozen processes are left alone)",
        )
        require(self.grace_s > 0, "run.grace_s", self.grace_s, "must be positive (seconds)")

    @property
    def speaks_of_gpus(self) -> bool:
        """Whether the recipe says what GPUs there will be."""
        return self.gpu_gib > 0 or self.gpus_per_node > 0
