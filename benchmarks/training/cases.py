"""What benchmarks/training/__main__.py measures: models, and the steps to take with each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache

from transformers import PreTrainedConfig

from benchmarks.common.batch_shape import Row, made_config
from benchmarks.common.models import QWEN3_06B, QWEN3_17B, QWEN3_30B_A3B, REPLAY
from keel.configs.schema import TrainerConfig
from keel.model.load import ModelFacts, facts_of
from keel.trainer.planning.gpus import Machine
from keel.trainer.planning.memory import trainer_memory
from keel.trainer.planning.step_time import Rates, compute_seconds, traffic_seconds

SLICE_LAYERS = 6
SHAPES: Mapping[str, PreTrainedConfig] = {
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-1.7b": QWEN3_17B,
    "moe-1.6b": REPLAY,
    "30b-a3b-slice": QWEN3_30B_A3B,
}
"""Qwen3-0.6B and 1.7B; the mixture of experts of benchmarks/training/replay.py; and the first
`SLICE_LAYERS` layers of Qwen3-30B-A3B, with its 128 experts of which a token meets 8, and its
vocabulary."""
COMPILED = ("qwen3-1.7b", "30b-a3b-slice")
"""Compiled as well, in the time that is left."""
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
SPREAD = ("qwen3-1.7b", "moe-1.6b")
"""A dense model and a mixture of experts for several GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of step."""

    shape: str
    length: int
    """Tokens of each trajectory, an eighth of them the prompt."""
    micro_batch_tokens: int
    step_tokens: int
    """All ranks together."""
    ranks: int = 1
    zero_stage: int = 1
    expert_parallel: int = 1
    sequence_parallel: int = 1
    recompute: bool = False
    keep_attention: bool = False
    flash4: bool = False
    """With FlashAttention-4's kernels."""
    compiled: bool = False
    reference: bool = False
    """With a frozen reference policy, as a positive `kl_coef` asks for."""
    offloaded: bool = False
    """With the optimizer in host memory."""

    @property
    def engine(self) -> Case:
        """Cases where this is the same share an engine: activation checkpointing and the sizes of
        micro-batches can be changed in place."""
        return replace(self, length=0, micro_batch_tokens=0, recompute=False, keep_attention=False)

    @property
    def groups(self) -> int:
        """Ranks with micro-batches of their own; the others share one with their group."""
        return self.ranks // self.sequence_parallel

    @property
    def micro_batches(self) -> int:
        """Of a rank."""
        return self.step_tokens // self.micro_batch_tokens // self.groups

    def row(self, vocabulary: int) -> Row:
        prompt = self.length // 8
        return Row(
            segments=self.micro_batch_tokens // self.length,
            prompt=prompt,
            completion=self.length - prompt,
            vocabulary=vocabulary,
        )

    def trainer(self) -> TrainerConfig:
        return TrainerConfig(
            ranks=self.ranks,
            zero_stage=self.zero_stage,  # type: ignore[arg-type]
            expert_parallel=self.expert_parallel,
            sequence_parallel=self.sequence_parallel,
            micro_batch_tokens=self.micro_batch_tokens,
            activation_checkpointing=self.recompute,
            keep_attention=self.keep_attention,
            attention_kernels="flash4" if self.flash4 else "torch",
            compile=self.compiled,
            offload_optimizer=self.offloaded,
            lr=1e-9,
            deadline_s=90,
        )

    def __str__(self) -> str:
        parts = [self.shape, f"{self.length}x{self.micro_batch_tokens // self.length}"]
        if self.ranks > 1 or self.zero_stage != 1 or self.offloaded:
            parts.append(f"{self.ranks} rank{'s' * (self.ranks > 1)}, ZeRO {self.zero_stage}")
        if self.expert_parallel > 1:
            parts.append(f"experts over {self.expert_parallel}")
        if self.sequence_parallel > 1:
            parts.append(f"tokens over {self.sequence_parallel}")
        parts += ["recompute"] * self.recompute + ["reference"] * self.reference
        parts += ["optimizer in host memory"] * self.offloaded
        parts += ["compiled"] * self.compiled + ["flash4"] * self.flash4
        parts += ["attention kept"] * self.keep_attention
        return ", ".join(parts)


def model_of(shape: str, *, small: bool) -> PreTrainedConfig:
    """The shape's configuration; `small`: as few numbers as show that the code runs."""
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


@cache
def facts_at(shape: str, *, stock: bool = False) -> ModelFacts:
    """Of the shape at its full size; `stock`: with norms and experts of transformers."""
    facts = facts_of(model_of(shape, small=False))
    return with_stock_layers(facts) if stock else facts


def with_stock_layers(facts: ModelFacts) -> ModelFacts:
    """The same model with norms and experts of transformers, not of Keel."""
    return replace(facts, fused_norms=False, fused_experts=False)


def one_gpu(shapes: Sequence[str], *, small: bool) -> Iterator[Case]:
    """First every model as it is, then the compiled ones, since compiling takes a minute."""
    unit = 64 if small else 1024
    for shape in shapes:
        case = Case(shape=shape, length=unit, micro_batch_tokens=16 * unit, step_tokens=64 * unit)
        yield case
        yield replace(case, micro_batch_tokens=32 * unit)
        yield replace(case, length=4 * unit, micro_batch_tokens=32 * unit)
        yield replace(case, recompute=True)
    for shape in shapes:
        if shape in COMPILED:
            case = Case(
                shape=shape,
                length=unit,
                micro_batch_tokens=16 * unit,
                step_tokens=64 * unit,
                compiled=True,
            )
            yield case
            if hasattr(SHAPES[shape], "num_experts"):
                yield replace(case, micro_batch_tokens=32 * unit)


def peers(*, small: bool) -> Iterator[Case]:
    """The steps of benchmarks/peers, with micro-batches of several sizes."""
    length = 72 if small else 1152
    case = Case(
        shape="qwen3-0.6b",
        length=length,
        micro_batch_tokens=4 * length,
        step_tokens=128 * length,
        reference=True,
        compiled=True,
    )
    yield case
    yield replace(case, micro_batch_tokens=8 * length)
    yield replace(case, micro_batch_tokens=16 * length)
    yield replace(case, micro_batch_tokens=8 * length, compiled=False)


def long(shape: str, ranks: int, *, small: bool) -> Iterator[Case]:
    """Trajectories of 32k tokens a rank and then 64k, one a micro-batch, spread over all ranks.
    With FlashAttention-4's kernels (not on a CPU) and PyTorch's, attention's results kept or not.
    """
    unit = 64 if small else 1024
    kinds = ((True, True), (True, False), (False, True), (False, False))
    for flash4, kept in kinds[2 * small :]:
        for length in (32 * unit * ranks, 64 * unit * ranks):
            yield Case(
                shape=shape,
                length=length,
                micro_batch_tokens=length,
                step_tokens=2 * length,
                ranks=ranks,
                sequence_parallel=ranks,
                recompute=True,
                keep_attention=kept,
                flash4=flash4,
            )


def offloaded(shape: str, stage: int, *, small: bool) -> Iterator[Case]:
    """A lone rank whose optimizer is in host memory, activations kept and computed again."""
    unit = 64 if small else 1024
    case = Case(
        shape=shape,
        length=unit,
        micro_batch_tokens=16 * unit,
        step_tokens=64 * unit,
        zero_stage=stage,
        offloaded=True,
    )
    yield replace(case, recompute=True)
    yield case


def on_ranks(shapes: Sequence[str], ranks: int, *, small: bool) -> Iterator[Case]:
    """The same tokens on so many ranks: a dense model under ZeRO 1 and 2, a mixture of experts with
    all experts on every rank, and with the experts spread over all ranks."""
    unit = 64 if small else 1024
    for shape in shapes:
        case = Case(
            shape=shape,
            length=unit,
            micro_batch_tokens=16 * unit,
            step_tokens=128 * unit,
            ranks=ranks,
        )
        yield case
        if not hasattr(SHAPES[shape], "num_experts"):
            yield replace(case, zero_stage=2)
        elif ranks > 1:
            yield replace(case, zero_stage=2, expert_parallel=ranks)


def estimates(
    case: Case, facts: ModelFacts, *, gpu: bool, rates: Rates | None = None
) -> tuple[float, float]:
    """What `keel check` would say: seconds of the step, and bytes of a rank's GPU."""
    row = case.row(facts.vocab_size)
    config = made_config(row, case.trainer(), reference=case.reference)
    used = rates or Rates()
    compute = compute_seconds(config, facts, case.step_tokens, case.micro_batches, Machine(), used)
    launch = used.launch_seconds(config, facts, case.micro_batches)
    seconds = max(compute, launch)
    seconds += traffic_seconds(config, facts, case.micro_batches, Machine())
    return seconds, trainer_memory(config, facts, gpu=gpu).total
