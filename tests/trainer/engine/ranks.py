"""A rank of the scenarios, and its configuration."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    Dtype,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
)
from keel.rl.metrics import Metric, merge
from keel.rl.packing import TrainBatch
from keel.rl.types import ScoredGroup
from keel.weights.channel import unpack_flat
from tests.rl.packed import pack
from tests.trainer.engine.batches import MOST_KEPT, Rollouts

if TYPE_CHECKING:
    from keel.trainer.engine.engine import TrainerEngine

STEPS = 3
SAVED_AFTER = 2
ROOMY, TIGHT = 4096, 32
"""Tokens of micro-batches that hold everything, or one or two trajectories."""

MASK_DELTA = 0.025
"""Drops an answer of the last step that spans two sequence-parallel slices, and of whose halves
only one is far from the policy."""


def make_config(
    ranks: int,
    stage: int,
    *,
    dtype: Dtype = "float32",
    tokens: int = ROOMY,
    kl_coef: float = 0.0,
    ref_routing: Literal["live", "replay"] = "live",
    mask_delta: float = MASK_DELTA,
    kept_mass_coef: float = 0.0,
    sleep: bool = False,
    residual_dtype: Literal["model", "float32"] = "model",
    **trainer: Any,
) -> Config:
    source = SourceConfig(
        name="s", source="reasoning_gym", task="chain_sum", size=8, kl_coef=kl_coef
    )
    options: dict[str, Any] = {
        "ranks": ranks,
        "zero_stage": stage,
        "micro_batch_tokens": tokens,
        "lr": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "grad_clip": 0.05,
        "eps": 1e-5,
        "threads": 1,
        "timeout_s": 60,
        **trainer,
    }
    return Config(
        run=RunConfig(steps=10, seed=3),
        model=ModelConfig(path="local", dtype=dtype, residual_dtype=residual_dtype),
        data=DataConfig(sources=(source,)),
        algorithm=AlgorithmConfig(
            mask_delta=mask_delta, ref_routing=ref_routing, kept_mass_coef=kept_mass_coef
        ),
        rollout=RolloutConfig(
            time_share=sleep, sampling=SamplingConfig(top_p=0.9, top_k=4 * MOST_KEPT)
        ),
        trainer=TrainerConfig(**options),
    )


class Ranks:
    """This process among the ranks."""

    def __init__(self, rank: int, world_size: int, store: dist.Store, folder: Path) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.serial = count()
        self._store = store

    def engine(self, config: Config, model: str = "untied", **read: Any) -> TrainerEngine:
        from keel.trainer.engine import zero  # noqa: PLC0415  (loads transformers)
        from keel.trainer.engine.engine import TrainerEngine  # noqa: PLC0415  (loads DeepSpeed)

        if not torch.cuda.is_available():
            # The same graphs and gradients without compiling C++ for minutes.
            zero.BACKEND = "aot_eager"
        assert "mlflow" not in sys.modules, "DeepSpeed would import it"
        return TrainerEngine(
            str(self.folder / model),
            config,
            rank=self.rank,
            store=self._store,
            **read,
        )

    def batch(self, groups: Sequence[ScoredGroup], config: Config) -> TrainBatch:
        trainer = config.trainer
        packed = pack(
            groups,
            replicas=trainer.data_parallel,
            micro_batch_tokens=trainer.micro_batch_tokens,
            share_prompts=trainer.share_prompts,
        )
        return packed[self.rank // trainer.sequence_parallel]

    def train(self, engine: TrainerEngine, config: Config, steps: range) -> list[Any]:
        """Train and return metrics over all ranks; with time sharing, publish after each step."""
        results = []
        for step in steps:
            groups = Rollouts(step).groups(2, 3)
            results.append(self.merged(engine.step([self.batch(groups, config)])))
            if config.rollout.time_share:
                self.published(engine)
                offload: Any = engine._offload
                kinds = (offload._weights, offload._state, offload._rest, offload._frozen)
                waits = sum(kind.offloaded_bytes for kind in kinds) > 1_000_000 / self.world_size
                assert waits == config.trainer.offload_while_sampling, config.trainer
        return results

    def all(self, mine: object) -> list[Any]:
        """Return a value of each rank."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine)
        return everyone

    def merged(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        return merge(self.all(metrics))

    def published(self, engine: TrainerEngine) -> dict[str, Tensor]:
        with patch("keel.trainer.engine.engine.MIB", 200):  # many buckets
            buckets = list(engine.buckets(requested=self.rank == 0))
        assert self.rank == 0 or not buckets
        named = (pair for entries, flat in buckets for pair in unpack_flat(entries, flat))
        return {name: tensor.cpu().clone() for name, tensor in named}
