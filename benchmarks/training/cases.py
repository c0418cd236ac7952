"""Models and steps that the training benchmark measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from benchmarks.common import MIXTURE, QWEN3_06B, QWEN3_17B, QWEN3_30B_A3B
from benchmarks.synthetic import Row, made_config
from keel.configs.schema import Config, TrainerConfig
from keel.model.load import ModelFacts
from keel.trainer.placement.hardware import GpuSpec
from keel.trainer.placement.memory import trainer_memory
from keel.trainer.placement.step_time import Rates, compute_seconds, traffic_seconds

SLICE_LAYERS = 6
SHAPES: Mapping[str, PreTrainedConfig] = {
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-1.7b": QWEN3_17B,
    "moe-1.6b": MIXTURE.config(),
    "30b-a3b-slice": QWEN3_30B_A3B,
}
"""30b-a3b-slice has the first `SLICE_LAYERS` layers of Qwen3-30B-A3B with all 128 experts."""
COMPILED = ("qwen3-1.7b", "30b-a3b-slice")
"""Shapes that are also measured with compiled layers."""
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
LONG = ("qwen3-1.7b",)
MIXTURES = ("moe-1.6b",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step configuration."""

    shape: str
    length: int
    """Tokens of each trajectory; one eighth is the prompt."""
    micro_batch_tokens: int
    step_tokens: int
    """Total over all ranks."""
    ranks: int = 1
    sequence_parallel: int = 1
    recompute: bool = False
    flash4: bool = False
    """Use FlashAttention-4, and store attention's outputs for the backward pass."""
    compiled: bool = False
    routes: bool = True
    """Replay recorded routes."""
    masks: bool = True
    """Score over recorded sampling masks instead of the whole vocabulary."""
    mean_set: int = 8
    """Mean size of the sampling masks."""

    @property
    def engine(self) -> Case:
        """Key of the engine; cases with the same key share one."""
        return replace(
            self,
            length=0,
            micro_batch_tokens=0,
            recompute=False,
            routes=True,
            masks=True,
            mean_set=0,
        )

    @property
    def groups(self) -> int:
        """Number of rank groups, each sharing its micro-batches."""
        return self.ranks // self.sequence_parallel

    @property
    def micro_batches(self) -> int:
        """Micro-batches per rank."""
        return self.step_tokens // self.micro_batch_tokens // self.groups

    def row(self, vocabulary: int) -> Row:
        prompt = self.length // 8
        return Row(
            segments=self.micro_batch_tokens // self.length,
            prompt=prompt,
            completion=self.length - prompt,
            vocabulary=vocabulary,
        )

    def config(self, vocabulary: int) -> Config:
        return made_config(self.row(vocabulary), self.trainer())

    def trainer(self) -> TrainerConfig:
        return TrainerConfig(
            ranks=self.ranks,
            zero_stage=1,
            expert_parallel=1,
            sequence_parallel=self.sequence_parallel,
            micro_batch_tokens=self.micro_batch_tokens,
            activation_checkpointing=self.recompute,
            keep_attention=self.flash4,
            attention_kernels="flash4" if self.flash4 else "torch",
            compile=self.compiled,
            lr=1e-9,
            timeout_s=90,
        )

    def __str__(self) -> str:
        parts = [self.shape, f"{self.length}x{self.micro_batch_tokens // self.length}"]
        if self.ranks > 1:
            parts.append(f"{self.ranks} ranks, tokens over {self.sequence_parallel}")
        parts += ["recompute"] * self.recompute + ["compiled"] * self.compiled
        parts += ["flash4"] * self.flash4
        parts += ["live routing"] * (not self.routes) + ["whole vocabulary"] * (not self.masks)
        return ", ".join(parts + [f"masks of {self.mean_set}"] * (self.mean_set != 8))


def model_of(shape: str, *, small: bool) -> PreTrainedConfig:
    """Return the configuration of a shape, or a tiny one of the same architecture."""
    config = deepcopy(SHAPES[shape])
    changes = SMALL if small else {}
    if shape == "30b-a3b-slice":
        changes = {"num_hidden_layers": SLICE_LAYERS, **changes}
    for name, value in changes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[: config.num_hidden_layers]
    return config


def _base(shape: str, unit: int) -> Case:
    return Case(shape=shape, length=unit, micro_batch_tokens=16 * unit, step_tokens=64 * unit)


def one_gpu(shapes: Sequence[str], unit: int) -> Iterator[Case]:
    """Yield all shapes uncompiled, then the compiled ones, because compilation takes a minute."""
    for shape in shapes:
        case = _base(shape, unit)
        yield case
        yield replace(case, micro_batch_tokens=32 * unit)
        yield replace(case, length=4 * unit, micro_batch_tokens=32 * unit)
        yield replace(case, recompute=True)
    for shape in shapes:
        if shape in COMPILED:
            case = replace(_base(shape, unit), compiled=True)
            yield case
            if hasattr(SHAPES[shape], "num_experts"):
                yield replace(case, micro_batch_tokens=32 * unit)


def replays(shapes: Sequence[str], unit: int) -> Iterator[Case]:
    """Yield steps with both replays, with masks only and with neither, for three mask sizes."""
    for shape in shapes:
        for mean in (8, 64, 512):
            case = replace(_base(shape, unit), mean_set=mean)
            yield case
            yield replace(case, routes=False)
            yield replace(case, routes=False, masks=False)


def long(shapes: Sequence[str], ranks: int, unit: int) -> Iterator[Case]:
    """Yield steps on trajectories of 32k and 64k tokens per rank, split over all ranks."""
    for shape in shapes:
        for length in (32 * unit * ranks, 64 * unit * ranks):
            yield Case(
                shape=shape,
                length=length,
                micro_batch_tokens=length,
                step_tokens=2 * length,
                ranks=ranks,
                sequence_parallel=ranks,
                recompute=True,
                flash4=unit >= 1024,
            )


def estimates(
    case: Case, facts: ModelFacts, *, gpu: bool, rates: Rates | None = None
) -> tuple[float, float]:
    """Return the estimates of `keel check`: seconds of the step and bytes of memory per GPU."""
    config = case.config(facts.vocab_size)
    rates = rates or Rates()
    compute = compute_seconds(config, facts, case.step_tokens, case.micro_batches, GpuSpec(), rates)
    launch = rates.launch_seconds(config, facts, case.micro_batches)
    traffic = traffic_seconds(config, facts, case.micro_batches, GpuSpec())
    return max(compute, launch) + traffic, trainer_memory(config, facts, gpu=gpu).total
