"""Choose values for the knobs that a recipe leaves unset, by searching for the fastest layout that
fits the hardware. The values are saved, so that a resumed run keeps them.

Among layouts within a factor `_TIE` of the fastest, the search prefers the lowest ZeRO stage, and
then the lowest peak memory of a rank. Layouts that keep the optimizer in host memory, whose engines
sample less than a quarter of a step's sequences at once, or that leave less spare memory than the
error of the memory model, must be much faster than others (`_Strictness.gain`).
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from keel.configs.diff import flatten_config
from keel.configs.load import load_config
from keel.configs.paths import write_whole
from keel.configs.schema import (
    DTYPE,
    LAYOUT_KNOBS,
    Config,
    ConfigError,
    RolloutConfig,
    TrainerConfig,
)
from keel.configs.sections.trainer import LONG
from keel.model.load import ModelFacts
from keel.rl.prefix_sharing import prefix_group_size
from keel.trainer.placement import memory
from keel.trainer.placement.families import no_sharing_reason
from keel.trainer.placement.hardware import Hardware, Placement, place
from keel.trainer.placement.memory import GIB, Memory, engine_sequences
from keel.trainer.placement.plan import Plan, plan_on, plan_placed
from keel.trainer.placement.step_time import COMPILE_S, StepTime, sft_seconds, step_time
from keel.trainer.run import checkpoint

Values = Mapping[str, Any]  # knob values, keyed by knob name
_Section = TypeVar("_Section", RolloutConfig, TrainerConfig)
_TIE = 1.01
_KV_SPARE = 1.25  # maximum size of a KV cache, relative to its need
_SHARE, _MAX_SHARE = 0.92, 0.95
"""Largest fraction of a GPU that an engine can get, with and without a safety margin. vLLM needs
all of this memory to be free at startup, and some memory is always in use."""
_HOST_POWER = 3
"""Exponent of the norm that combines a rank's host time and GPU time, fitted to micro-batches of
4,608 to 18,432 tokens."""
_STAGE_COSTS = (1.0, 1.0, 1.04, 1.15)
"""Slowdown factor of each ZeRO stage, without communication. The measured slowdown is 2 to 6 % for
stage 2, and 3 to 12 % for stage 3."""
_MAX_TOKENS, _MIN_TOKENS = 65_536, 4_096  # larger micro-batches gain nothing, smaller ones lose
_SAVES = 0.98
"""If two micro-batch sizes give the same number of micro-batches, the larger one is tried only if
it computes less than this fraction of the tokens of the smaller one."""
_EVAL_SEQUENCES, _SMALL_CACHE = 128, 0.1
"""Number of concurrent sequences for evaluations, used only if their KV cache takes at most this
fraction of a GPU."""
_MAX_SEQUENCES = 1024  # the largest number for which vLLM captures CUDA graphs
_WAVES = (1, 2, 3, 4)  # in which the completions for a step may be sampled
_SEATS: tuple[str, ...] = (
    "trainer.ranks",
    "rollout.engines",
    "rollout.colocated",
    "rollout.time_share",
)
"""The knobs that affect the placement."""


def with_values(config: Config, values: Values) -> Config:
    """Return a copy of the config with these `rollout` and `trainer` knobs set. Raises ConfigError
    if the values are invalid."""
    rollout = tuple(item for item in values.items() if item[0].startswith("rollout."))
    trainer = tuple(item for item in values.items() if item[0].startswith("trainer."))
    return replace(
        config,
        rollout=_replace_knobs(config.rollout, rollout),
        trainer=_replace_knobs(config.trainer, trainer),
    )


@lru_cache(maxsize=4096)  # a search combines a few hundred sections in tens of thousands of ways
def _replace_knobs(section: _Section, values: tuple[tuple[str, Any], ...]) -> _Section:
    local = {knob.partition(".")[2]: value for knob, value in values}
    return replace(section, **local) if local else section


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A recipe with a value for every knob, along with estimates of its memory, time and cost."""

    config: Config
    plan: Plan
    shared: bool
    cost: float  # seconds per step, including the compile time spread over all steps
    reason: str = ""  # how many layouts were compared


class _Strictness(NamedTuple):
    gain: float = 1.0
    """How many times as fast a layout must be as the best stricter one, to be chosen instead."""
    spare: float = 1.0  # safety factor for a rank's memory
    max_share: float = _MAX_SHARE
    offload: bool = False  # if True, the optimizer may be kept in host memory
    fewer: bool = True
    """If True, an engine may sample less than a quarter of a step's sequences at once."""


_STRICTNESSES = (
    _Strictness(spare=memory.RANK_SPARE, max_share=_SHARE, fewer=False),
    _Strictness(gain=1.2, spare=memory.RANK_SPARE, max_share=_SHARE, offload=True),
    _Strictness(gain=1.5, offload=True),
)


def _preference(layout: Layout) -> tuple[Any, ...]:
    trainer = layout.config.trainer
    return trainer.offload_optimizer, trainer.zero_stage, layout.plan.peak


class LayoutSearch:
    def __init__(
        self, config: Config, open_knobs: frozenset[str], facts: ModelFacts, hardware: Hardware
    ) -> None:
        self.config, self.open_knobs, self.hardware = config, open_knobs, hardware
        self.strictness = _STRICTNESSES[0]
        self.gpus = sum(node.gpus for node in hardware.nodes) - config.rewards.judge.gpus
        """Total number of GPUs for engines and ranks."""
        self._facts, self._samples = facts, bool(config.data.sources)
        self._shares_prompts = not no_sharing_reason(config, facts)
        self._placements: dict[tuple[Any, ...], Placement | None] = {}
        self._rank_bytes: dict[tuple[tuple[str, Any], ...], float] = {}
        algorithm = config.algorithm
        self._sequences = algorithm.prompts_per_step * algorithm.group_size
        """Number of completions per step."""
        self._trained = math.ceil(self._sequences / algorithm.updates_per_batch)
        """Number of sequences in an optimizer step, over all ranks."""
        if not self._samples:
            self._trained = config.sft.step_contexts

    def _options(self, *values: Values) -> list[Values]:
        """Return the values of open knobs in each of `values`, without duplicates."""
        opened = (
            tuple((knob, value) for knob, value in each.items() if knob in self.open_knobs)
            for each in values
        )
        return [dict(items) for items in dict.fromkeys(opened)]

    def _either(self, knob: str, *, allowed: bool = True) -> list[Values]:
        return self._options({knob: False}, {knob: allowed})

    @cached_property
    def placements(self) -> list[Values]:
        config, gpus = self.config, self.gpus
        width, is_open = config.rollout.tensor_parallel, "rollout.colocated" in self.open_knobs
        seats: list[tuple[Any, ...]] = []
        for ranks in self._rank_counts():
            if not self._samples:
                seats.append((ranks,))
                continue
            if (is_open or config.rollout.colocated or gpus == 1) and width == 1:
                # A single GPU is shared in any case, unless a judge has others.
                seats.append((ranks, ranks, gpus > 1 or config.rewards.judge.gpus > 0))
            if (is_open or not config.rollout.colocated) and gpus > 1:
                seats.append((ranks, max(1, (gpus - ranks) // width), False))
        return self._options(*(dict(zip(_SEATS, each, strict=False)) for each in seats))

    def _rank_counts(self) -> list[int]:
        """Return the rank counts to try, largest first: up to 17 that are spread evenly, and those
        that the engines leave free."""
        config, gpus = self.config, self.gpus
        trainer, width = config.trainer, config.rollout.tensor_parallel
        if "trainer.ranks" not in self.open_knobs:
            return [trainer.ranks]
        unit = math.lcm(trainer.expert_parallel, trainer.sequence_parallel)
        unit = math.lcm(unit, trainer.hpz_partition_size)
        most = self._trained * trainer.sequence_parallel  # with more, some would be idle
        counts = {*range(gpus, 0, -max(1, gpus // 16)), gpus - width, min(most, gpus)}
        if self._samples and "rollout.engines" not in self.open_knobs:
            counts.add(gpus - config.rollout.engines * width)
        counts = {min(n, most) // unit * unit for n in counts}
        return sorted((n for n in counts if n > 0), reverse=True) or [unit]

    def sequence_counts(self, seats: Values, *, fewer: bool) -> list[Values]:
        """Return the numbers of sequences per engine to try, largest first. With these numbers, the
        engines sample a step in one wave, in two waves, and so on. With `fewer`, also include
        numbers small enough to need almost no memory."""
        knob, config = "rollout.max_num_seqs", self.config
        if knob not in self.open_knobs or not self._samples:
            return [{}]
        engines, at_once = seats.get("rollout.engines", config.rollout.engines), self._sequences
        if config.with_agents:
            at_once = max(at_once, config.max_episodes())
        waves = [min(_MAX_SEQUENCES, 8 * math.ceil(at_once / engines / n / 8)) for n in _WAVES]
        most = waves[0]
        one = memory.kv_token_bytes(config, self._facts)
        one = (one + memory.selection_bytes(config, self._facts)) * config.max_context
        if _EVAL_SEQUENCES * one <= _SMALL_CACHE * self.hardware.gpu_gib * GIB:
            most = max(most, _EVAL_SEQUENCES)
        less = (64, 32, 16, 8, 4, 2, 1) if fewer else ()
        counts = {most, *waves, *(n for n in less if n <= most)}
        return [{knob: n} for n in sorted(counts, reverse=True)]

    @cached_property
    def sharing_modes(self) -> list[Values]:
        """The ways an engine and a rank can share a GPU: side by side, or by taking turns."""
        if not self._samples:
            return [{}]
        knobs = ("rollout.time_share", "trainer.offload_while_sampling")
        fixed = (self.config.rollout.time_share, self.config.trainer.offload_while_sampling)
        closed = {k: v for k, v in zip(knobs, fixed, strict=True) if k not in self.open_knobs}
        ways = [(False, fixed[1])]
        if self.config.algorithm.max_lag == 0 and self.config.algorithm.publish_every == 1:
            ways += [(True, False), (True, True)]
        values: list[dict[str, Any]] = [dict(zip(knobs, way, strict=True)) for way in ways]
        return self._options(*(way for way in values if closed.items() <= way.items()))

    def trainer_values(self, ranks: int) -> Iterator[list[Values]]:
        """Yield lists of trainer knob values to try. The entries in a list differ only in
        micro-batch size, from largest to smallest."""
        trainer, model = self.config.trainer, self.config.model
        sizes, recompute = self._micro_batches(ranks), "trainer.activation_checkpointing"
        # Sparse, batch-invariant and float32 attention use operators whose output cannot be kept.
        keeps = self.config.max_context >= LONG and not (
            model.batch_invariant or model.dtype == "float32" or self._facts.index_top_k > 0
        )
        for stage in self._stages(ranks):
            gathers = stage.get("trainer.zero_stage", trainer.zero_stage) == 3
            for compiled, recomputed in product(
                self._either("trainer.compile", allowed=self._compiles and not gathers),
                self._either(recompute),
            ):
                worth = keeps and not gathers
                worth = worth and recomputed.get(recompute, trainer.activation_checkpointing)
                for kept in self._either("trainer.keep_attention", allowed=worth):
                    way = {**stage, **compiled, **self._sharing, **recomputed, **kept}
                    yield [{**way, **size} for size in sizes]

    @property
    def _sharing(self) -> Values:
        """Return the values to try for prompt sharing. Sharing is turned on whenever possible,
        because packing shares a prompt only if that saves time."""
        return self._options({"trainer.share_prompts": self._shares_prompts})[0]

    @property
    def _compiles(self) -> bool:
        """True if compiled layers are known to be faster for this kind of model."""
        model, facts = self.config.model, self._facts
        measured = model.dtype == "bfloat16" or (model.dtype == "float16" and not facts.moe_layers)
        measured = measured and facts.fused_norms
        return measured and self.config.trainer.sequence_parallel == 1 and not model.batch_invariant

    def _stages(self, ranks: int) -> list[Values]:
        """Return the ZeRO stages to try in order, those that keep the optimizer on the GPU first.

        A single rank has nothing to shard. Without DeepSpeed's bfloat16 optimizer, stage 1 holds
        the gradients twice during an update, and stage 2 uses larger buckets. With an offloaded
        optimizer, stage 3 keeps gradients in host memory.
        """
        zero, offload = "trainer.zero_stage", "trainer.offload_optimizer"
        trainer, model = self.config.trainer, self.config.model
        full = model.dtype == "float32"
        pairs: list[tuple[bool, int]] = []
        for away in (False, True) if offload in self.open_knobs else (trainer.offload_optimizer,):
            if zero not in self.open_knobs:
                stages = (trainer.zero_stage,)
            elif ranks > 1:
                stages = (0, 1, 2, 3) if full else (1, 2, 3)
            elif away:
                stages = (1 if full else 2, 3)
            else:
                stages = {"float32": (0,), "bfloat16": (1,), "float16": (1, 2)}[model.dtype]
            pairs += [(away, max(stage, int(away))) for stage in stages]
        sharded = not (model.batch_invariant or model.lora.enabled) or zero not in self.open_knobs
        return self._options(
            *({zero: stage, offload: away} for away, stage in pairs if stage < 3 or sharded)
        )

    def _micro_batches(self, ranks: int) -> list[Values]:
        """Return the micro-batch sizes to try, largest first. Each takes less memory but more time
        than the one before."""
        knob, spread = "trainer.micro_batch_tokens", self.config.trainer.sequence_parallel
        if knob not in self.open_knobs:
            return [{}]
        groups = max(1, ranks // spread)
        sharing = with_values(self.config, self._sharing)
        # A unit is one trajectory at its length limit, or a group that shares a prompt.
        units, count = {sharing.max_context: 1}, sharing.algorithm.group_size
        while self._samples and sharing.trainer.share_prompts and count > 1:
            size = prefix_group_size(count, sharing.data.max_prompt_tokens, sharing.max_context)
            if size <= _MAX_TOKENS * spread:
                units[size] = count
            count //= 2
        sizes: set[int] = set()
        for tokens, together in units.items():
            share = math.ceil(self._trained / together / groups)
            most = max(1, _MAX_TOKENS * spread // tokens)
            most = max(1, min(share, most))
            least = max(1, min(most, _MIN_TOKENS // tokens))
            sizes |= {n * tokens for n in (1, *range(least, most + 1))}
        worth, fewest, least_tokens = list[int](), math.inf, math.inf
        for size in sorted(sizes):
            count, tokens = (
                memory.count_micro_batches(sharing, groups, size) if self._samples else (-size, 0)
            )
            if count < fewest or tokens < _SAVES * least_tokens:
                worth.append(size)
                fewest, least_tokens = count, min(tokens, least_tokens)
        return [{knob: size} for size in reversed(worth)]

    def best(self) -> Layout | None:
        best = None
        for strictness in _STRICTNESSES:
            limit = best.cost / strictness.gain if best else math.inf
            best = self.fastest(strictness, limit) or best
        return best

    def fastest(self, strictness: _Strictness, limit: float = math.inf) -> Layout | None:
        """Return the best layout of this strictness that costs less than `limit`."""
        self.strictness = strictness
        layouts = [each for each in self.iterate_fitting(limit) if each.cost < limit]
        if not layouts:
            return None
        fastest = min(layout.cost for layout in layouts)
        tied = [layout for layout in layouts if layout.cost <= _TIE * fastest]
        reason = f"chosen from {len(layouts)} layouts that fit, by estimated time and memory"
        if strictness.spare == 1.0:
            reason += ", with less spare memory than the estimate's error"
        return replace(min(tied, key=_preference), reason=reason)

    def iterate_fitting(self, limit: float = math.inf) -> Iterator[Layout]:
        """Yield the layouts that fit in memory, skipping any that can't be the best or that cost
        more than `limit`."""
        for seats in self.placements:
            for sizes in self.trainer_values(seats.get("trainer.ranks", self.config.trainer.ranks)):
                if sizes[0].get("trainer.offload_optimizer") and not self.strictness.offload:
                    continue
                fits = partial(self._rank_fits, seats)
                if not fits(sizes[-1]):  # most ways of a model that is too large end here
                    continue
                # Smaller micro-batches train more slowly, but may leave an engine on the
                # same GPU the memory to sample faster.
                largest = bisect_left(sizes, True, hi=len(sizes) - 1, key=fits)
                for learning in sizes[largest:]:
                    if self._least_cost({**seats, **learning}) > limit:
                        break
                    layouts = [*self._with_engine({**seats, **learning})]
                    yield from layouts
                    limit = min([limit, *(_TIE * layout.cost for layout in layouts)])
                    done = [each.cost for each in layouts if not self._squeezed(each)]
                    if done and min(done) > limit:
                        break

    def _least_cost(self, values: Values) -> float:
        """Return the cost with engines that hold all sequences at once, or 0 if it is unknown."""
        values = {**values, **self.sharing_modes[0], **self.sequence_counts(values, fewer=False)[0]}
        placement, time = self._try_placement(values), None
        if placement is None:
            return 0.0
        try:
            config = with_values(self.config, values)
        except ConfigError:
            return 0.0
        if self._samples:
            spec = self.hardware.spec
            time = step_time(config, self._facts, shared=placement.shared, spec=spec)
        return self._cost(config, time, shared=placement.shared)

    def _with_engine(self, values: Values) -> Iterator[Layout]:
        for turns in self.sharing_modes:
            if self._try_placement({**values, **turns}) is None:
                continue
            for sampling in self.sequence_counts(values, fewer=self.strictness.fewer):
                if layout := self.layout({**values, **turns, **sampling}):
                    yield layout
                    if self._samples_all_at_once(layout):
                        if not layout.config.rollout.time_share:
                            return
                        break

    def _samples_all_at_once(self, layout: Layout) -> bool:
        config = layout.config
        most = self.sequence_counts({"rollout.engines": config.rollout.engines}, fewer=False)[0]
        sequences = engine_sequences(with_values(config, most))
        return engine_sequences(config) == sequences <= (layout.plan.cached or 0)

    def _squeezed(self, layout: Layout) -> bool:
        turns = layout.config.rollout.time_share
        return layout.shared and (turns or not self._samples_all_at_once(layout))

    def _rank_fits(self, seats: Values, learning: Values) -> bool:
        values = (*seats.items(), *learning.items())
        if values not in self._rank_bytes:  # the same for every strictness
            self._rank_bytes[values] = self._least_rank_bytes(dict(values))
        needs = self._rank_bytes[values]
        return needs * self.strictness.spare <= self.hardware.gpu_gib * GIB

    def _least_rank_bytes(self, values: Values) -> float:
        """Return how many bytes a rank needs at least, or infinity if the values are invalid."""
        try:
            config = with_values(self.config, values)
        except ConfigError:
            return math.inf
        rank = memory.trainer_memory(config, self._facts, gpu=True)
        return memory.least_bytes(config, rank) if self._may_offload else rank.total

    @cached_property
    def _may_offload(self) -> bool:
        ways = [with_values(self.config, turns) for turns in self.sharing_modes]
        return self._samples and any(memory.offloads(way, shared=True) for way in ways)

    def _try_placement(self, values: Values) -> Placement | None:
        seats = tuple(values.get(knob) for knob in _SEATS)
        if seats not in self._placements:
            try:
                config = with_values(self.config, values)
            except ConfigError:
                return None  # because of any value, so it is not cached
            try:
                self._placements[seats] = place(config, self.hardware.idle)
            except ConfigError:
                self._placements[seats] = None
        return self._placements[seats]

    def layout(self, values: Values) -> Layout | None:
        """Return the layout with these knob values, or None if it doesn't fit."""
        placement = self._try_placement(values)
        if placement is None:
            return None
        shared = placement.shared
        try:
            config = with_values(self.config, values)
            rank = memory.trainer_memory(config, self._facts, gpu=True)
            needed = memory.needed_bytes(config, rank, shared=shared)
            if self.strictness.spare * needed > self.hardware.gpu_gib * GIB:
                return None
            if self._samples:
                share = self._choose_engine_fraction(config, rank, shared=shared)
                if share is None:
                    return None
                config = with_values(config, share)
            plan = plan_placed(config, self._facts, self.hardware, placement)
        except ConfigError:
            return None
        cost = self._cost(config, plan.time, shared=shared)
        return Layout(config=config, plan=plan, shared=shared, cost=cost)

    def _cost(self, config: Config, time: StepTime | None, *, shared: bool) -> float:
        once = COMPILE_S / config.run.steps * config.trainer.compile
        stage = config.trainer.zero_stage if config.trainer.ranks > 1 else 0
        if time is None:
            return once + sft_seconds(config, self._facts, self.hardware.spec) * _STAGE_COSTS[stage]
        # A host that takes nearly as long as its GPU delays it, on a slow machine for longer.
        compute = (time.compute**_HOST_POWER + time.launch**_HOST_POWER) ** (1 / _HOST_POWER)
        training = (compute + time.traffic) * _STAGE_COSTS[stage]
        rest = once + time.weights + time.turns
        if config.algorithm.max_lag and not shared:  # sampling and training overlap
            return rest + max(time.rollout, training)
        return rest + time.rollout + training

    def _choose_engine_fraction(
        self, config: Config, rank: Memory, *, shared: bool
    ) -> Values | None:
        """Choose the fraction of a GPU to give to an engine. Returns None if the engine doesn't
        fit."""
        knob, size = "rollout.gpu_memory_utilization", self.hardware.gpu_gib
        most = self.strictness.max_share * size
        if shared:
            time_shares = config.rollout.time_share
            held = memory.staying_gib(config, rank) if time_shares else rank.total / GIB
            held *= self.strictness.spare
            most = min(most, size - held - memory.ENGINE_BEYOND_GIB)
        if knob not in self.open_knobs:
            fits = not shared or config.rollout.time_share
            return {} if fits or config.rollout.gpu_memory_utilization * size <= most else None
        engine = memory.engine_memory(config, self._facts, gpu=True)
        cache = memory.cache_bytes(engine)
        required = memory.ENGINE_SPARE * (engine.total - cache) + _KV_SPARE * cache
        required = math.ceil(100 * (required / GIB + memory.ENGINE_SPARE_GIB) / size)
        hundredths = min(required, math.floor(100 * most / size + 1e-9))
        return {knob: hundredths / 100} if hundredths >= 1 else None

    def explain_misfit(self) -> ConfigError:
        """Explain why no layout fits, and say how many nodes would be enough."""
        error, nodes = self._smallest_misfit(), self.hardware.nodes
        if not isinstance(error, memory.DoesNotFit):
            return error
        largest, now = max(nodes, key=lambda node: node.gpus), len(nodes)

        def fits(count: int) -> bool:
            more = tuple(replace(largest, name=f"node {i}", id=f"{i}") for i in range(count))
            hardware = replace(self.hardware, nodes=more)
            search = LayoutSearch(self.config, self.open_knobs, self._facts, hardware)
            search.strictness = _STRICTNESSES[-1]
            return next(search.iterate_fitting(), None) is not None

        counts = sorted({*range(now + 1, now + 9), 2 * now, 4 * now})
        if not fits(counts[-1]):  # nor would it fit on fewer
            return error
        enough = next(filter(fits, counts))
        return ConfigError(f"{error}. It would fit on {enough} nodes like {largest.name}")

    def _smallest_misfit(self) -> ConfigError:
        """Return the error for the layout that uses the least memory."""
        ways = (
            {**seats, **sizes[-1], **turns, **self.sequence_counts(seats, fewer=True)[-1]}
            for seats in self.placements
            for sizes in self.trainer_values(seats.get("trainer.ranks", self.config.trainer.ranks))
            for turns in self.sharing_modes
        )
        knob, config, least, shared = "rollout.gpu_memory_utilization", self.config, None, False
        for way in ways:
            if (placement := self._try_placement(way)) is None:
                continue
            with suppress(ConfigError):  # some values exclude each other
                candidate = with_values(self.config, way)
                rank = memory.trainer_memory(candidate, self._facts, gpu=True)
                if least is None or rank.total <= least.total:  # the smallest layouts come last
                    config, least, shared = candidate, rank, placement.shared
        if least is not None and knob in self.open_knobs:
            share = 0.5
            if config.rollout.time_share or not shared:
                stays = memory.staying_gib(config, least) / self.hardware.gpu_gib
                share = max(0.01, min(0.9, math.floor(100 * (1 - stays)) / 100))
            config = with_values(config, {knob: share})
        try:
            plan_on(config, self._facts, self.hardware)
        except ConfigError as error:
            return error
        return memory.DoesNotFit(f"no layout of this recipe fits its GPUs: {self.hardware}")


_CACHE_FILE = "chosen.json"
_CACHED = "as chosen when the run began"
_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""CPU flags that indicate hardware support for bfloat16 matrix multiplication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A config with a value for every knob, along with the values chosen for unset knobs."""

    config: Config
    plan: Plan
    values: Values = field(default_factory=dict[str, Any])  # the chosen values, keyed by knob
    reason: str = ""

    def lines(self) -> list[str]:
        values = [f"{knob} = {yaml_value(value)}" for knob, value in self.values.items()]
        return [self.reason, *values] if values else []


def yaml_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def choose(
    config: Config,
    open_knobs: frozenset[str],
    facts: ModelFacts,
    hardware: Hardware,
    previous: Values | None = None,
) -> Choice:
    """Choose values for the unset knobs. `previous` holds the values chosen when the run began,
    which are kept as long as some layout with them fits. Raises ConfigError if no layout fits."""
    open_knobs &= _relevant_knobs(config)
    if not open_knobs or not hardware.gpu or not hardware.gpu_gib:
        return Choice(config=config, plan=plan_on(config, facts, hardware))
    layout, reason = None, _CACHED
    kept = {knob: value for knob, value in (previous or {}).items() if knob in open_knobs}
    if kept:
        with suppress(ConfigError):  # the recipe has changed and forbids them
            rest = open_knobs - set(kept)
            layout = LayoutSearch(with_values(config, kept), rest, facts, hardware).best()
    if layout is None:
        search = LayoutSearch(config, open_knobs, facts, hardware)
        layout = search.best()
        if layout is None:
            raise search.explain_misfit()
        reason = layout.reason
    knobs = flatten_config(layout.config)
    return Choice(
        config=layout.config,
        plan=layout.plan,
        values={knob: knobs[knob] for knob in knobs if knob in open_knobs},
        reason=reason,
    )


def _relevant_knobs(config: Config) -> frozenset[str]:
    if config.data.sources:
        return LAYOUT_KNOBS
    knobs = frozenset(knob for knob in LAYOUT_KNOBS if knob.startswith("trainer."))
    return knobs - {"trainer.offload_while_sampling", "trainer.share_prompts"}


def load_choice(config: Config, signature: Mapping[str, Any]) -> tuple[Values, str]:
    """Load the values saved by the run that is about to be resumed, unless the hardware has
    changed. Returns the values, along with a description of any change."""
    folder = config.run.folder
    saved = _read_cache(folder)
    resumes = config.run.resume != "never" and checkpoint.latest(folder / "checkpoints")
    if saved is None or not resumes:
        return {}, ""
    before = saved["hardware"]
    changes = [f"{k} {before.get(k)} → {v}" for k, v in signature.items() if before.get(k) != v]
    if not changes:
        return saved["values"], ""
    return {}, f"the hardware has changed ({', '.join(changes)}): the layout is chosen again"


def save_choice(folder: Path, values: Values, signature: Mapping[str, Any]) -> None:
    if values:
        content = {"values": dict(values), "hardware": dict(signature)}
        write_whole(folder / _CACHE_FILE, json.dumps(content, indent=1) + "\n")


def update_choice(folder: Path, values: Values) -> None:
    """Overwrite the saved values of knobs that were lowered during the run."""
    if saved := _read_cache(folder):
        before = saved["values"]
        save_choice(folder, {k: values.get(k, v) for k, v in before.items()}, saved["hardware"])


def _read_cache(folder: Path) -> dict[str, dict[str, Any]] | None:
    try:
        saved = json.loads((folder / _CACHE_FILE).read_text())
        return {"values": dict(saved["values"]), "hardware": dict(saved["hardware"])}
    except (OSError, ValueError, KeyError, TypeError):  # missing or invalid
        return None


@cache
def _has_bfloat16() -> bool:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return not _BFLOAT16.isdisjoint(flags)


def with_dtype(config: Config, remaining: frozenset[str], *, gpu: bool) -> Config:
    """Return the config with `model.dtype: auto` resolved. A resumed run keeps its dtype. A new run
    uses bfloat16 (the schema's default), or float32 on a CPU that has no bfloat16 instructions."""
    if DTYPE not in remaining:
        return config
    folder = config.run.folder
    saved = folder / "config.yaml"
    if saved.is_file() and checkpoint.latest(folder / "checkpoints"):
        dtype = load_config(saved).model.dtype
    else:
        dtype = config.model.dtype if gpu or _has_bfloat16() else "float32"
    return replace(config, model=replace(config.model, dtype=dtype))
