"""The shape of synthetic micro-batches, and the run that they belong to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keel.configs.schema import (
    Config,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
)

KL_COEF = 0.02
SOURCE = SourceConfig(name="made", source="reasoning_gym", task="chain_sum", size=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A micro-batch: `segments` trajectories of one length, laid end to end."""

    segments: int
    prompt: int
    completion: int
    """Tokens; the sampled ones come last."""
    vocabulary: int

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    @property
    def tokens(self) -> int:
        return self.segments * self.length


def made_config(row: Row, trainer: TrainerConfig, *, reference: bool = False) -> Config:
    """A run on such trajectories, with truncated sampling; `reference`: and a policy to stay near
    to."""
    source = replace(SOURCE, kl_coef=KL_COEF) if reference else SOURCE
    return Config(
        model=ModelConfig(path="made", dtype="bfloat16"),
        data=DataConfig(sources=(source,), max_prompt_tokens=row.prompt),
        rollout=RolloutConfig(sampling=SamplingConfig(top_k=512, max_tokens=row.completion)),
        trainer=trainer,
    )
