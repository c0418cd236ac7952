"""What there is to try for the knobs that a recipe leaves open (`keel.configs.auto`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, TypeVar

from keel.configs.schema import Config, ConfigError, RolloutConfig, TrainerConfig
from keel.configs.sections.trainer import LONG
from keel.model.load import ModelFacts
from keel.rl.packing.prefix_sharing import prefix_group_size
from keel.trainer.placement.families import no_sharing
from keel.trainer.placement.hardware import Hardware, place
from keel.trainer.placement.memory import GIB, kv_token_bytes, packed
from keel.trainer.placement.time_sharing import least_staying_gib

Section = TypeVar("Section", RolloutConfig, TrainerConfig)
Values = Mapping[str, Any]
"""Knob → value."""
MOST_TOKENS, LEAST_TOKENS = 65_536, 4_096
"""Of a micro-batch that is chosen: larger ones are no faster in any measured step, and a GPU waits
for its host in smaller ones."""
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
"""Micro-batches of a rank in an optimizer step."""
SMALL = (2, 3, 4, 5, 6, 7, 8, 10, 12)
"""Trajectories of a micro-batch where few have room: those of `PARTS` are far apart there."""
SAVES = 0.98
"""Of a step's tokens: with as many micro-batches, larger ones are only tried if they save more."""
FEW, MANY = 128, 1024
"""Sequences at once: no fewer than evaluations make use of, where their keys and values are small;
no more than steps are captured for."""
WAVES = (1, 2, 3, 4)
"""In which a step's completions may be sampled, one after the other."""
SMALL_CACHE = 0.1
"""Of a GPU."""


def with_values(config: Config, values: Values) -> Config:
    """Raises ConfigError where that breaks a rule."""
    rollout, trainer = list[Any](), list[Any]()
    for item in values.items():
        (rollout if item[0].startswith("rollout.") else trainer).append(item)
    return replace(
        config,
        rollout=_changed(config.rollout, tuple(rollout)),
        trainer=_changed(config.trainer, tuple(trainer)),
    )


# A search tries tens of thousands of pairs of a few hundred sections.
@lru_cache(maxsize=4096)
def _changed(section: Section, values: tuple[tuple[str, Any], ...]) -> Section:
    own = {knob.partition(".")[2]: value for knob, value in values}
    return replace(section, **own) if own else section


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of a recipe on a machine."""

    config: Config
    left: frozenset[str]
    """Open knobs."""
    facts: ModelFacts
    hardware: Hardware

    @property
    def gpus(self) -> int:
        """That engines and ranks may have."""
        return sum(node.gpus for node in self.hardware.idle) - self.config.rewards.judge.gpus

    def open(self, values: Values) -> dict[str, Any]:
        """Those of knobs that are."""
        return {knob: value for knob, value in values.items() if knob in self.left}

    @cached_property
    def placements(self) -> list[Values]:
        """Ranks and engines: beside each other, and on GPUs of their own."""
        config = self.config
        if not config.data.sources:
            return [self.open({"trainer.ranks": n}) for n in self.rank_counts]
        beside = "rollout.colocated" in self.left or config.rollout.colocated or self.gpus == 1
        apart = "rollout.colocated" in self.left or not config.rollout.colocated
        found: dict[tuple[tuple[str, Any], ...], None] = {}
        for ranks in self.rank_counts:
            if beside and config.rollout.tensor_parallel == 1:
                # A single GPU is shared in any case; where a judge has others, only if said.
                said = self.gpus > 1 or config.rewards.judge.gpus > 0
                found[self._seats(ranks, ranks, colocated=said)] = None
            if apart and self.gpus > 1:
                rest = max(1, (self.gpus - ranks) // config.rollout.tensor_parallel)
                found[self._seats(ranks, rest, colocated=False)] = None
        return [dict(seats) for seats in found]

    def _seats(self, ranks: int, engines: int, *, colocated: bool) -> tuple[tuple[str, Any], ...]:
        values = {
            "trainer.ranks": ranks,
            "rollout.engines": engines,
            "rollout.colocated": colocated,
        }
        return tuple(self.open(values).items())

    @property
    def rank_counts(self) -> list[int]:
        """All GPUs, all but those of an engine, and parts of them (up to 16 GPUs any), the most
        first."""
        config, gpus = self.config, self.gpus
        trainer = config.trainer
        if "trainer.ranks" not in self.left:
            return [trainer.ranks]
        unit = math.lcm(trainer.expert_parallel, trainer.sequence_parallel)
        most = self.most_ranks
        parts = (gpus * part // 16 for part in range(1, 17))
        wanted = {*parts, gpus - config.rollout.tensor_parallel, min(most, gpus)}
        wide = config.rollout.tensor_parallel
        if config.data.sources and "rollout.engines" not in self.left:
            wanted.add(gpus - config.rollout.engines * wide)
        elif wide > 1:
            wanted |= {gpus - engines * wide for engines in range(1, gpus // wide)}
        counts = {min(n, most) // unit * unit for n in wanted}
        return sorted((n for n in counts if n > 0), reverse=True) or [unit]

    @property
    def most_ranks(self) -> int:
        """More have nothing to do."""
        return self.step_sequences * self.config.trainer.sequence_parallel

    def sampling(self, seats: Values, *, fewer: bool) -> list[Values]:
        """Sequences of an engine at once, the most first: all of a step, or as many in each of two
        waves and more. fewer: also so few that they take next to no room."""
        knob, config = "rollout.max_num_seqs", self.config
        if knob not in self.left or not config.data.sources:
            return [{}]
        engines = seats.get("rollout.engines", config.rollout.engines)
        at_once = config.algorithm.prompts_per_step * config.algorithm.group_size
        if config.with_agents:
            at_once = max(at_once, config.agents.max_concurrent_episodes)
        waves = [min(MANY, 8 * math.ceil(at_once / engines / count / 8)) for count in WAVES]
        wanted = waves[0]
        one = kv_token_bytes(config, self.facts) * config.max_context
        if FEW * one <= SMALL_CACHE * self.hardware.gpu_gib * GIB:
            wanted = max(wanted, FEW)
        less = (64, 32, 16, 8, 4, 2, 1) if fewer else ()
        counts = {wanted, *waves, *(n for n in less if n <= wanted)}
        return [{knob: n} for n in sorted(counts, reverse=True)]

    @cached_property
    def turns(self) -> list[Values]:
        """Of an engine and a rank on one GPU: side by side, time-sharing, and that with the
        trainer's state in host memory."""
        knobs: tuple[str, str] = ("rollout.time_share", "trainer.offload_while_sampling")
        if not self.config.data.sources:
            return [{}]
        own = (self.config.rollout.time_share, self.config.trainer.offload_while_sampling)
        found: list[Values] = []
        for way in ((False, own[1]), (True, False), (True, True)):
            values: dict[str, bool] = dict(zip(knobs, way, strict=True))
            said = zip(knobs, way, own, strict=True)
            if all(knob in self.left or value == kept for knob, value, kept in said):
                found.append(self.open(values))
        return found

    def learning(self, ranks: int) -> Iterator[list[Values]]:
        """How the trainer works, in lists of which only the micro-batches differ, the largest
        first."""
        sizes = self.micro_batches(ranks)
        for stage in self.stages(ranks):
            gathers = stage.get("trainer.zero_stage", self.config.trainer.zero_stage) == 3
            for compiled in self._either("trainer.compile", allowed=self.compiles and not gathers):
                for recomputed in self._recomputed(gathers=gathers):
                    way = {**stage, **compiled, **self.sharing, **recomputed}
                    yield [{**way, **size} for size in sizes]

    def least(self, seats: Values) -> Iterator[Values]:
        """Of the ways to learn, those that need the least memory."""
        ranks = seats.get("trainer.ranks", self.config.trainer.ranks)
        knobs = {
            "trainer.compile": False,
            "trainer.activation_checkpointing": True,
            "trainer.keep_attention": False,
        }
        for stage in self.stages(ranks):
            yield {**stage, **self.open(knobs), **self.sharing, **self.micro_batches(ranks)[-1]}

    @property
    def sharing(self) -> Values:
        """Of a group's prompt: wherever that goes, since packing shares only what saves time."""
        return self.open(
            {"trainer.share_prompts": not no_sharing(self.config, head_size=self.facts.head_size)}
        )

    def _recomputed(self, *, gathers: bool) -> list[Values]:
        """Nothing, all of a layer but attention, where that takes long, and all of it."""
        knob, keep = "trainer.activation_checkpointing", "trainer.keep_attention"
        found: list[Values] = []
        for again in self._either(knob):
            on = again.get(knob, self.config.trainer.activation_checkpointing)
            worth = on and not gathers and self.config.max_context >= LONG
            worth = worth and not self.own_attention
            found += [{**again, **kept} for kept in self._either(keep, allowed=worth)]
        return found

    @property
    def own_attention(self) -> bool:
        """Sparse attention and the engine's have operators of their own, and float32 plain ones:
        what these give is not kept."""
        model = self.config.model
        other = model.batch_invariant or model.dtype == "float32"
        return other or self.facts.index_top_k > 0

    def _either(self, knob: str, *, allowed: bool = True) -> list[Values]:
        if knob not in self.left:
            return [{}]
        return [{knob: False}, {knob: True}] if allowed else [{knob: False}]

    @property
    def compiles(self) -> bool:
        """Whether compiled layers of such a model are known to be faster."""
        model = self.config.model
        dense = not self.facts.moe_layers
        timed = model.dtype == "bfloat16" or (model.dtype == "float16" and dense)
        timed = timed and self.facts.fused_norms
        return timed and self.config.trainer.sequence_parallel == 1 and not model.batch_invariant

    def stages(self, ranks: int) -> list[Values]:
        """ZeRO's, and where the optimizer is: in host memory, too, where it is open."""
        zero, offload = "trainer.zero_stage", "trainer.offload_optimizer"
        trainer = self.config.trainer
        away = (False, True) if offload in self.left else (trainer.offload_optimizer,)
        stages = (1, 2, 3) if self.config.model.dtype != "float32" else (0, 1, 2, 3)
        if self.config.model.batch_invariant:
            stages = stages[:-1]
        if zero not in self.left:
            stages = (trainer.zero_stage,)
        elif ranks == 1:
            pairs = [(a, s) for a in away for s in self._lone_stages(offload=a)]
            return [self.open({zero: s, offload: a}) for a, s in pairs]
        values = [{zero: max(s, int(a)), offload: a} for a, s in product(away, stages)]
        return [dict(pairs) for pairs in {tuple(self.open(each).items()): None for each in values}]

    def _lone_stages(self, *, offload: bool) -> list[int]:
        """ZeRO's for a single rank, which has nobody to share with. Where DeepSpeed's optimizer for
        bfloat16 is not to be had, stage 1 has gradients twice in an update (`copied_bytes`), and
        stage 2 larger buckets (`bucket_elements`); with an offloaded optimizer, stage 3 has
        gradients in host memory."""
        model = self.config.model
        if not offload:
            return {"float32": [0], "bfloat16": [1], "float16": [1, 2]}[model.dtype]
        least = 1 if model.dtype == "float32" else 2
        return [least] if model.batch_invariant else [least, 3]

    def micro_batches(self, ranks: int) -> list[Values]:
        """A rank's share of a step in one, in two, in three … micro-batches of trajectories at
        their limit, or of as many that share a prompt. Each takes less memory and more time than
        the one before."""
        knob, config = "trainer.micro_batch_tokens", self.config
        if knob not in self.left:
            return [{}]
        spread = config.trainer.sequence_parallel
        dealt = max(1, ranks // spread)
        sizes: set[int] = set()
        for tokens, together in self._units.items():
            share = math.ceil(self.step_sequences / together / dealt)
            most = max(1, MOST_TOKENS * spread // tokens)
            least = max(1, min(share, most, LEAST_TOKENS // tokens))
            counts = {max(least, min(most, math.ceil(share / parts))) for parts in PARTS}
            if together == 1:
                counts |= {n for n in SMALL if least <= n <= min(share, most)}
            sizes |= {n * tokens for n in counts | {1}}
        sharing, found = with_values(config, self.sharing), list[int]()
        fewest, least_tokens = math.inf, math.inf
        for size in sorted(sizes):
            count, tokens = packed(sharing, dealt, size) if config.data.sources else (-size, 0)
            if count < fewest or tokens < SAVES * least_tokens:
                found.append(size)
                fewest, least_tokens = count, min(tokens, least_tokens)
        return [{knob: size} for size in reversed(found)]

    @cached_property
    def _units(self) -> dict[int, int]:
        """Tokens → trajectories that fill them: one, and a group that shares its prompt, or half
        of it …"""
        longest, count = self.config.max_context, self.config.algorithm.group_size
        shares = with_values(self.config, self.sharing).trainer.share_prompts
        units = {longest: 1}
        while self.config.data.sources and shares and count > 1:
            size = prefix_group_size(count, self.config.data.max_prompt_tokens, longest)
            if size <= MOST_TOKENS * self.config.trainer.sequence_parallel:
                units[size] = count
            count //= 2
        return units

    @property
    def step_sequences(self) -> int:
        """Of an optimizer step, on all ranks."""
        config = self.config
        if config.data.sources:
            whole = config.algorithm.prompts_per_step * config.algorithm.group_size
            return math.ceil(whole / config.algorithm.updates_per_batch)
        return config.sft.step_contexts

    def _legal(self, seats: Values) -> bool:
        try:
            place(with_values(self.config, seats), self.hardware.idle)
        except ConfigError:
            return False
        return True

    def frugal(self) -> Iterator[Values]:
        """What needs the least memory; the least of the recipe's rules first."""
        config = self.config
        seats = next(filter(self._legal, self.placements), {})
        ranks = seats.get("trainer.ranks", config.trainer.ranks)
        shared = self.gpus == 1 or seats.get("rollout.colocated", config.rollout.colocated)
        stays = (least_staying_gib(config) + self.hardware.taken_gib) / self.hardware.gpu_gib
        most = max(0.01, min(0.9, math.floor(100 * (1 - stays)) / 100))
        stages = (3, 2, 1) if ranks > 1 else self._lone_stages(offload=True)[::-1]
        for sleeps, stage in product((True, False), stages):
            values = {
                **seats,
                "rollout.time_share": sleeps,
                "rollout.gpu_memory_utilization": 0.5 if shared and not sleeps else most,
                "rollout.max_num_seqs": 1,
                "trainer.activation_checkpointing": True,
                "trainer.keep_attention": False,
                "trainer.micro_batch_tokens": config.max_context,
                "trainer.offload_optimizer": True,
                "trainer.offload_while_sampling": True,
                "trainer.zero_stage": stage,
            }
            yield self.open(values)
        yield {}
