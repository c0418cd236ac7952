"""The layouts that a recipe leaves open (`keel.configs.auto`), and of those that fit by the memory
model the fastest by the time model.

Layouts within `TIE` of the fastest are as good, and of those the one of the lowest ZeRO stage and
in the least memory is taken. A layout that fits by less than the memory model may be off by is
chosen only where no other fits, and an optimizer in host memory only where nothing else does.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from keel.configs.schema import Config, ConfigError
from keel.model.load import ModelFacts
from keel.trainer.placement.hardware import Hardware, Placement, place
from keel.trainer.placement.memory import (
    ENGINE_BEYOND_GIB,
    ENGINE_SPARE,
    ENGINE_SPARE_GIB,
    GIB,
    RANK_SPARE,
    DoesNotFit,
    Memory,
    engine_memory,
    engine_sequences,
    trainer_memory,
)
from keel.trainer.placement.options import Options, Values, with_values
from keel.trainer.placement.plan import Plan, check_machines, make_plan, plan_on
from keel.trainer.placement.step_time import COMPILE_S, lesson_seconds
from keel.trainer.placement.suggestions import cures, nothing
from keel.trainer.placement.time_sharing import least_bytes, needed_bytes, offloads, staying_gib

TIE = 1.02
CURES_TRIED = 400
"""Changes to a recipe that fits nowhere, each with all that it leaves open to be tried."""
MOST_GIB = 1025
"""Of a GPU that is looked for in its place."""
KV_SPARE = 1.25
"""What an engine's cache may be larger than its completions (rollout/engine/kv_cache.py)."""
MOST_SHARE, MOST_SHARE_AT_ALL = 0.92, 0.95
"""vLLM wants its share free when it starts, and a GPU has never all of its memory free."""
HOST_POWER = 3
"""Of the norm by which a rank's host and GPU add up, from steps in micro-batches of 4,608, 9,216
and 18,432 tokens (docs/scaling.md): 3.73, 2.34 and 1.59 s."""
STAGE_COSTS = (1.0, 1.0, 1.04, 1.15)
"""Of ZeRO's stages, beside their traffic: 2 takes 2 to 6 % longer than 1 as measured; 3, which
gathers each layer anew, has been timed in whole steps only: 3 to 12 % longer than modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A recipe with every knob decided, and what the models say of it."""

    config: Config
    plan: Plan
    shared: bool
    cost: float
    """Seconds of a step, with its part of what compiling takes once."""

    @property
    def rank(self) -> tuple[int, float, float]:
        """Among layouts that are as fast, the best first."""
        return self.config.trainer.zero_stage, self.gib, self.cost

    @property
    def gib(self) -> float:
        """Of the GPU that has the most to hold."""
        engine, rank = self.plan.engine.total / GIB, self.plan.peak / GIB
        if not self.config.data.sources:
            return rank
        if not self.shared:
            return max(engine, rank)
        if self.config.rollout.time_share:
            stays = staying_gib(self.config, self.plan.trainer, self.plan.waits)
            return max(engine + stays, rank)
        return engine + rank


@dataclass(frozen=True, kw_only=True)
class Strict:
    """How a layout has to fit."""

    spare: float = 1.0
    """Times what a rank needs by the model."""
    most_share: float = MOST_SHARE_AT_ALL
    offload: bool = False
    """An optimizer may be in host memory."""
    fewer: bool = True
    """With fewer sequences at once than a quarter of a step has."""


SEATS = ("trainer.ranks", "rollout.engines", "rollout.colocated", "rollout.time_share")
"""Of the knobs that may be open, those by which GPUs are handed out."""
WAYS = (
    Strict(spare=RANK_SPARE, most_share=MOST_SHARE, fewer=False),
    Strict(),
    Strict(offload=True),
)


class Search:
    """Over the layouts of a recipe on a machine."""

    def __init__(
        self, config: Config, left: frozenset[str], facts: ModelFacts, hardware: Hardware
    ) -> None:
        self.config, self.left, self.facts, self.hardware = config, left, facts, hardware
        self.options = Options(config=config, left=left, facts=facts, hardware=hardware)
        self.way = WAYS[0]
        self.found: list[Layout] = []
        """All that `best` has chosen from."""
        self._ranks: dict[tuple[Any, ...], Memory] = {}
        self._placements: dict[tuple[Any, ...], Placement | None] = {}
        self._configs: dict[frozenset[tuple[str, Any]], Config] = {}

    def best(self) -> Layout | None:
        """None where nothing fits."""
        for self.way in WAYS:
            self.found = [*self.fitting()]
            if self.found:
                fastest = min(layout.cost for layout in self.found)
                as_good = [layout for layout in self.found if layout.cost <= TIE * fastest]
                return min(as_good, key=lambda layout: layout.rank)
        return None

    @property
    def tight(self) -> bool:
        """Whether what was found fits by less than the model may be off by."""
        return self.way.spare == 1.0

    def fitting(self) -> Iterator[Layout]:
        """All that fit and may be the best."""
        fastest = math.inf
        for seats in self.options.placements:
            ranks = seats.get("trainer.ranks", self.config.trainer.ranks)
            for sizes in self.options.learning(ranks):
                if sizes[0].get("trainer.offload_optimizer") and not self.way.offload:
                    continue
                # Each takes less memory and learns more slowly than the one before; an engine
                # beside it may sample faster in what that leaves.
                largest = bisect_left(sizes, True, key=partial(self._rank_fits, seats))
                for learning in sizes[largest:]:
                    here = [*self._seated({**seats, **learning})]
                    yield from here
                    fastest = min([fastest, *(layout.cost for layout in here)])
                    done = [layout.cost for layout in here if not self._squeezed(layout)]
                    if done and min(done) > TIE * fastest:
                        break

    def _whole(self, layout: Layout) -> bool:
        """Whether an engine samples all that it has to at once, and its cache holds it."""
        config = layout.config
        most = self.options.sampling({"rollout.engines": config.rollout.engines}, fewer=False)[0]
        wanted = engine_sequences(with_values(config, most))
        return engine_sequences(config) == wanted <= (layout.plan.cached or 0)

    def _squeezed(self, layout: Layout) -> bool:
        """Whether the engine may have more, or need take no turns, beside a rank that needs
        less."""
        turns = layout.config.rollout.time_share and "rollout.time_share" in self.left
        return layout.shared and (turns or not self._whole(layout))

    def _seated(self, values: Values) -> Iterator[Layout]:
        """In which ways an engine goes with such a trainer: with as many sequences at once as fit,
        fewer unless these are all and the cache holds them at full length, and no turns taken where
        nothing would be gained."""
        for turns in self.options.turns:
            if self._placed({**values, **turns}) is None:
                continue
            for sampling in self.options.sampling(values, fewer=self.way.fewer):
                if layout := self.layout({**values, **turns, **sampling}):
                    yield layout
                    if self._whole(layout):
                        if not layout.config.rollout.time_share:
                            return
                        break

    def _rank_fits(self, seats: Values, learning: Values) -> bool:
        """On a GPU without an engine, or by turns with one where that may be."""
        values = {**seats, **learning}
        try:
            rank, config = self._rank(values), self._config_of(values)
        except ConfigError:
            return False
        needs = least_bytes(config, rank) if self._offloads else rank.total
        return needs * self.way.spare <= self.free_gib * GIB

    def _config_of(self, values: Values) -> Config:
        """Made once for all questions about it. Raises ConfigError."""
        key = frozenset(values.items())
        if key not in self._configs:
            self._configs[key] = with_values(self.config, values)
        return self._configs[key]

    @cached_property
    def _offloads(self) -> bool:
        """Whether there is a way in which a rank offloads what it holds."""
        return bool(self.config.data.sources) and any(map(self._offloading, self.options.turns))

    def _offloading(self, turns: Values) -> bool:
        try:
            return offloads(self._config_of(turns), shared=True)
        except ConfigError:
            return False

    def _rank(self, values: Values) -> Memory:
        """Worked out once for all engines that it is tried with."""
        own = tuple(item for item in values.items() if item[0].startswith("trainer."))
        if own not in self._ranks:
            config = self._config_of(values)
            self._ranks[own] = trainer_memory(config, self.facts, gpu=True)
        return self._ranks[own]

    def _placed(self, values: Values) -> Placement | None:
        """None where there are too few GPUs, or none that a sleeping engine would share."""
        seats = tuple(values.get(knob) for knob in SEATS)
        if seats not in self._placements:
            try:
                config = self._config_of(values)
            except ConfigError:
                return None  # of whatever value
            try:
                self._placements[seats] = place(config, self.hardware.idle)
            except ConfigError:
                self._placements[seats] = None
        return self._placements[seats]

    def layout(self, values: Values) -> Layout | None:
        """With these values of all that is open but an engine's share; None where it does not
        fit."""
        try:
            placement = self._placed(values)
            if placement is None:
                return None
            shared, rank = placement.shared, self._rank(values)
            config = self._config_of(values)
            if self.way.spare * needed_bytes(config, rank, shared=shared) > self.free_gib * GIB:
                return None
            if self.config.data.sources:
                share = self.share(config, rank, shared=shared)
                if share is None:
                    return None
                config = with_values(config, share)
            plan = make_plan(
                config,
                self.facts,
                gpu=True,
                gpu_gib=self.hardware.gpu_gib,
                shared=shared,
                taken_gib=self.hardware.taken_gib,
                machine=self.hardware.machine,
            )
            check_machines(config, self.facts, plan.waits, placement)
        except ConfigError:
            return None
        cost = self.cost(config, plan, shared=shared)
        return Layout(config=config, plan=plan, shared=shared, cost=cost)

    def cost(self, config: Config, plan: Plan, *, shared: bool) -> float:
        """Seconds of a step, and its part of what compiling takes once."""
        once = COMPILE_S / config.run.steps * config.trainer.compile
        time, stage = plan.time, config.trainer.zero_stage if config.trainer.ranks > 1 else 0
        if time is None:
            lesson = lesson_seconds(config, self.facts, self.hardware.machine)
            return once + lesson * STAGE_COSTS[stage]
        # A host that takes nearly as long as its GPU is waited for, on a slow machine for longer.
        compute = (time.compute**HOST_POWER + time.launch**HOST_POWER) ** (1 / HOST_POWER)
        training = (compute + time.traffic) * STAGE_COSTS[stage]
        rest = once + time.weights + time.turns
        if config.algorithm.max_lag and not shared:  # one samples while the other learns
            return rest + max(time.rollout, training)
        return rest + time.rollout + training

    @property
    def free_gib(self) -> float:
        return self.hardware.gpu_gib - self.hardware.taken_gib

    def share(self, config: Config, rank: Memory, *, shared: bool) -> Values | None:
        """The engine's: what it needs, or what is left for it. None: there is no room for what the
        recipe says, or for any."""
        knob, size = "rollout.gpu_memory_utilization", self.hardware.gpu_gib
        needs, free = self.way.spare * rank.total / GIB, self.free_gib
        most = min(free, self.way.most_share * size)
        if shared:
            sleeps = config.rollout.time_share
            rest = staying_gib(config, rank) * self.way.spare if sleeps else needs
            most = min(most, free - rest - ENGINE_BEYOND_GIB)
        if knob not in self.left:
            fits = not shared or config.rollout.time_share
            return {} if fits or config.rollout.gpu_memory_utilization * size <= most else None
        engine = engine_memory(config, self.facts, gpu=True)
        cache = engine.parts["KV cache"]
        wanted = ENGINE_SPARE * (engine.total - cache) + KV_SPARE * cache
        wanted = math.ceil(100 * (wanted / GIB + ENGINE_SPARE_GIB) / size)
        hundredths = min(wanted, math.floor(100 * most / size + 1e-9))
        return {knob: hundredths / 100} if hundredths >= 1 else None

    # Where nothing fits

    def refusal(self) -> ConfigError:
        """What to say: of a layout that needs the least, with changes to what the recipe says after
        which one fits."""
        for values in self.options.frugal():
            try:
                config = with_values(self.config, values)
                place(config, self.hardware.idle)
            except ConfigError as error:
                if not values:
                    return error
                continue
            try:
                plan_on(config, self.facts, self.hardware, self.cured)
            except ConfigError as error:
                return error
        return ConfigError(f"no layout of this recipe fits its GPUs: {self.hardware}")

    def cured(self, config: Config, facts: ModelFacts, _: object) -> str:
        """As `cures`, of a recipe whose open knobs are decided anew each time."""

        def planned(changed: Config) -> None:
            if not Search(changed, self.left, facts, self.hardware).fits():
                raise DoesNotFit("no layout")

        found = cures(self.config, facts, planned, decided=self.left, tried=CURES_TRIED)
        if found == nothing() and (size := self.size_that_fits()):
            return f"{found}; with {size} GiB each it fits as it is"
        return found

    def size_that_fits(self) -> int:
        """GiB of each GPU, at least; 0 where more memory is no help."""

        def fits(gib: int) -> bool:
            larger = replace(self.hardware, gpu_gib=float(gib))
            return Search(self.config, self.left, self.facts, larger).fits()

        sizes = range(1 + int(self.hardware.gpu_gib), MOST_GIB)
        least = bisect_left(sizes, True, key=fits)
        return sizes[least] if least < len(sizes) else 0

    def fits(self) -> bool:
        """Whether anything does: of each placement and way to learn the smallest."""
        self.way = WAYS[-1]
        return any(
            layout is not None
            for seats in self.options.placements
            for learning in self.options.least(seats)
            if self._rank_fits(seats, learning)
            for turns in self.options.turns
            for layout in [
                self.layout(
                    {**seats, **learning, **turns, **self.options.sampling(seats, fewer=True)[-1]}
                )
            ]
        )
