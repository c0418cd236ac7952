"""What a recipe leaves to the hardware and the model (`keel.configs.auto`): decided, explained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keel.configs.auto import KNOBS
from keel.configs.diff import flatten_config
from keel.configs.schema import Config, ConfigError
from keel.configs.sections.trainer import LONG
from keel.model.load import ModelFacts
from keel.trainer.placement.families import no_sharing
from keel.trainer.placement.hardware import Hardware
from keel.trainer.placement.layouts import TIE, Layout, Search
from keel.trainer.placement.memory import GIB, engine_sequences, gib
from keel.trainer.placement.options import Values, with_values
from keel.trainer.placement.plan import Plan, plan_on
from keel.trainer.placement.step_time import COMPILE_S, seconds
from keel.trainer.placement.time_sharing import held_bytes

FROM_BEFORE = "as chosen when the run began"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    config: Config
    """Nothing in it is left open."""
    plan: Plan
    values: Values = field(default_factory=dict[str, Any])
    """Of the knobs that were."""
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the same knobs, in few words."""

    def lines(self) -> list[str]:
        """As `keel check` prints them."""
        return [
            f"{knob} = {said(value)}: {self.reasons[knob]}" for knob, value in self.values.items()
        ]


LONE = {
    2: "a single rank has nobody to share with; ZeRO 1 would have gradients twice in an update",
    3: "the optimizer is in host memory, and so its gradients wait there, too",
}
"""Why that stage of ZeRO."""
HARDLY = f"less than {100 * (TIE - 1):.0f} % faster"
"""And so the memory that it takes is left."""


def said(value: Any) -> str:
    """As a recipe has it."""
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def choose(
    config: Config,
    left: frozenset[str],
    facts: ModelFacts,
    hardware: Hardware,
    kept: Values | None = None,
) -> Choice:
    """Decide the knobs that `left` names. kept: what was chosen when the run began, which stays
    while it fits.

    Raises ConfigError where no layout fits: of the one that needs the least, with what would help,
    or of a value in the recipe that goes with no layout.
    """
    left &= concerned(config, hardware)
    if not left or not hardware.gpu or not hardware.gpu_gib:
        return Choice(config=config, plan=plan_on(config, facts, hardware))
    before = {knob: value for knob, value in (kept or {}).items() if knob in left}
    search = _from_before(config, left, facts, hardware, before)
    layout = search.best() if search else None
    if search is None or layout is None:
        before = {}
        search = Search(config, left, facts, hardware)
        layout = search.best()
    if layout is None:
        raise search.refusal()
    knobs = flatten_config(layout.config)
    why = {**Reasons(search, layout).all(), **dict.fromkeys(before, FROM_BEFORE)}
    values = {knob: knobs[knob] for knob in knobs if knob in left}
    return Choice(config=layout.config, plan=layout.plan, values=values, reasons=why)


def _from_before(
    config: Config, left: frozenset[str], facts: ModelFacts, hardware: Hardware, before: Values
) -> Search | None:
    """A search over what is open besides; None where the recipe has become one that forbids it."""
    if not before:
        return None
    try:
        config = with_values(config, before)
    except ConfigError:
        return None
    return Search(config, left - set(before), facts, hardware)


def concerned(config: Config, hardware: Hardware) -> frozenset[str]:
    """Knobs of which anything depends: without rollouts, no engine's; and how many GPUs are used,
    where it is known how many there are."""
    counts = frozenset({"rollout.engines", "trainer.ranks"} if hardware.assumed else ())
    if config.data.sources:
        return KNOBS - counts
    knobs = frozenset(knob for knob in KNOBS if knob.startswith("trainer."))
    return knobs - counts - {"trainer.offload_while_sampling", "trainer.share_prompts"}


class Reasons:
    """Why a layout was chosen, knob by knob: what the others would have been."""

    def __init__(self, search: Search, best: Layout) -> None:
        self._search, self._best = search, best
        self._config, self._plan = best.config, best.plan
        flat = flatten_config(best.config)
        self._values = {knob: flat[knob] for knob in search.left}

    def all(self) -> dict[str, str]:
        """Of every knob that was open."""
        made = {knob: getattr(self, f"_{knob.partition('.')[2]}") for knob in self._search.left}
        tight = "; it fits by less than the model may be off by" * self._search.tight
        return {
            knob: reason() + (tight if knob == "trainer.micro_batch_tokens" else "")
            for knob, reason in made.items()
        }

    def _other(self, **changes: Any) -> Layout | None:
        """The layout with other values of the trainer's knobs, where it fits."""
        return self._with({f"trainer.{k}": v for k, v in changes.items()})

    def _with(self, changes: Values) -> Layout | None:
        mine = {k: v for k, v in self._values.items() if k != "rollout.gpu_memory_utilization"}
        return self._search.layout({**mine, **changes})

    def _against(self, other: Layout | None) -> str:
        if other is None:
            return "does not fit"
        slower = other.cost / self._best.cost - 1
        if slower > 0.005:
            return f"{100 * slower:.0f} % slower"
        return HARDLY if slower < -0.005 else "no faster"

    @property
    def _beside(self) -> str:
        turns = self._config.rollout.time_share
        return " beside the engine" if self._best.shared and not turns else ""

    @property
    def _sizes(self) -> list[int]:
        """Of micro-batches that were tried."""
        tried = self._search.options.micro_batches(self._config.trainer.ranks)
        return [n for values in tried for n in values.values()]

    # One method a knob, by its name

    def _ranks(self) -> str:
        ranks, options = self._config.trainer.ranks, self._search.options
        gpus = options.gpus
        if gpus == 1:
            return "one GPU"
        if ranks == gpus:
            return f"all {gpus} GPUs"
        if ranks == options.most_ranks:
            return f"of {gpus} GPUs: a step has no sequences for more"
        if self._best.shared:
            return f"each on one of {gpus} GPUs"
        who = "engines and trainer take" if self._config.data.sources else "a step takes"
        return f"of {gpus} GPUs, by the time that {who}"

    def _engines(self) -> str:
        return "one beside each rank" if self._best.shared else "on the GPUs without a rank"

    def _colocated(self) -> str:
        if self._search.options.gpus == 1:
            return "a single GPU is shared in any case"
        if self._config.rollout.tensor_parallel > 1:
            return "an engine of several GPUs shares none"
        others = [each for each in self._search.found if each.shared != self._best.shared]
        against = self._against(min(others, key=lambda each: each.cost, default=None))
        own = "with GPUs of their own for engines and trainer"
        return f"{own if self._best.shared else 'with shared GPUs'}: {against}"

    def _gpu_memory_utilization(self) -> str:
        parts, size = self._plan.engine.parts, self._search.hardware.gpu_gib
        takes = gib(self._config.rollout.gpu_memory_utilization * size * GIB)
        wanted, cached = engine_sequences(self._config), self._plan.cached or 0
        held = f"all {wanted}" if cached >= wanted else f"{cached} of {wanted}"
        return (
            f"{takes}: weights {gib(parts['weights'])}, and keys and values of {held} sequences "
            "at full length"
        )

    def _max_num_seqs(self) -> str:
        a, rollout = self._config.algorithm, self._config.rollout
        wanted = engine_sequences(self._config)
        share = math.ceil(a.prompts_per_step * a.group_size / rollout.engines)
        if share > wanted:
            return (
                f"an engine has {share} to sample in a step, in {math.ceil(share / wanted)} waves: "
                f"all at once have no room, or are {HARDLY}"
            )
        if wanted >= rollout.max_num_seqs:
            return "as many as an engine has to sample in a step"
        return f"all {wanted} that an engine has to sample in a step, and room for evaluations"

    def _time_share(self) -> str:
        if not self._best.shared:
            return "engines and trainer have GPUs of their own"
        time = self._plan.time
        if self._config.rollout.time_share:
            beside = self._with({"rollout.time_share": False})
            if beside and (beside.plan.cached or 0) >= (self._plan.cached or 0):
                return f"side by side: {self._against(beside)}"
            takes = seconds(time.turns if time else 0.0)
            return f"side by side there is room for less or nothing; time-sharing costs {takes}"
        return "engine and trainer fit side by side"

    def _offload_while_sampling(self) -> str:
        if not self._config.rollout.time_share:
            return "of no effect without rollout.time_share"
        held = gib(held_bytes(self._plan.trainer))
        waits = self._plan.waits
        if waits.training and not waits.sampling:
            return f"activations have no room beside {gib(waits.training)} of the optimizer's state"
        if self._config.trainer.offload_while_sampling:
            if stays := self._other(offload_while_sampling=False):
                return f"with {held} of the trainer's on the GPU: {self._against(stays)}"
            return f"with {held} of the trainer's on the GPU the engine has too little"
        return f"{held} of the trainer's fit beside an engine that is awake"

    def _zero_stage(self) -> str:
        trainer = self._config.trainer
        if trainer.ranks == 1:
            return LONE.get(trainer.zero_stage, "a single rank has nobody to share with")
        less = (self._other(zero_stage=stage) for stage in range(trainer.zero_stage))
        if trainer.zero_stage > 1 and not any(less):
            return "the least that fits"
        return "the fastest of those that fit"

    def _micro_batch_tokens(self) -> str:
        tokens = self._config.trainer.micro_batch_tokens
        larger = [n for n in self._sizes if n > tokens]
        if not larger:
            return "a share of a step at once, or the most that is worth it"
        other = self._other(micro_batch_tokens=min(larger))
        if other is None:
            return f"the largest that fits{self._beside} ({gib(self._plan.peak)})"
        return f"larger ones are {self._against(other)}"

    def _activation_checkpointing(self) -> str:
        trainer = self._config.trainer
        kept = gib(self._plan.trainer.parts["activations"])
        if not trainer.activation_checkpointing:
            again = self._other(activation_checkpointing=True)
            return f"{kept} of activations fit{self._beside}; with it: {self._against(again)}"
        whole = self._other(activation_checkpointing=False)
        if whole or "trainer.micro_batch_tokens" not in self._values:
            return f"without it: {self._against(whole)}"
        parts = [
            layout
            for n in self._sizes
            if n < trainer.micro_batch_tokens
            and (layout := self._other(activation_checkpointing=False, micro_batch_tokens=n))
        ]
        fastest = min(parts, key=lambda layout: layout.cost, default=None)
        smaller = ", in smaller micro-batches" * bool(parts)
        return f"without it{smaller}: {self._against(fastest)}"

    def _keep_attention(self) -> str:
        trainer = self._config.trainer
        if not trainer.activation_checkpointing:
            return "of no effect without trainer.activation_checkpointing"
        if not trainer.keep_attention and self._config.max_context < LONG:
            return f"it takes little of contexts below {LONG:,} tokens"
        if not trainer.keep_attention and trainer.zero_stage == 3:
            return "not with ZeRO 3"
        if self._config.model.batch_invariant:
            return "not with model.batch_invariant"
        if not trainer.keep_attention and self._search.options.own_attention:
            return "not of sparse attention, nor in float32"
        other = self._against(self._other(keep_attention=not trainer.keep_attention))
        return f"{'without' if trainer.keep_attention else 'with'} it: {other}"

    def _compile(self) -> str:
        search, trainer = self._search, self._config.trainer
        if trainer.zero_stage == 3:
            return "not with ZeRO 3"
        if self._config.model.batch_invariant:
            return "not with model.batch_invariant"
        if trainer.sequence_parallel > 1:
            return "nobody has timed it with trainer.sequence_parallel"
        if not search.options.compiles:
            return "nobody has timed compiled layers of such a model"
        other = self._against(self._other(compile=not trainer.compile))
        start = f"in {self._config.run.steps} steps, {COMPILE_S:.0f} s at their start counted"
        return f"{'without' if trainer.compile else 'with'} it: {other} {start}"

    def _share_prompts(self) -> str:
        if self._config.trainer.share_prompts:
            return "a prompt is computed once for the completions beside it"
        return no_sharing(self._config, head_size=self._search.facts.head_size)

    def _offload_optimizer(self) -> str:
        if self._config.trainer.offload_optimizer:
            return "nothing else fits"
        return "the optimizer's state fits on the GPU"
