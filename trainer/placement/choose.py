"""Chooses values for the knobs that a recipe leaves open (`keel.configs.auto`), explains them and
caches them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.configs.auto import KNOBS
from keel.configs.diff import flatten_config
from keel.configs.schema import Config, ConfigError
from keel.configs.sections.trainer import LONG
from keel.model.load import ModelFacts
from keel.trainer.placement.families import no_sharing
from keel.trainer.placement.hardware import Hardware
from keel.trainer.placement.layouts import TIE, Layout, LayoutSearch, Values, with_values
from keel.trainer.placement.memory import GIB, engine_sequences, gib, held_bytes
from keel.trainer.placement.plan import Plan, plan_on
from keel.trainer.placement.step_time import COMPILE_S, seconds
from keel.trainer.run import checkpoint

CACHE_FILE = "chosen.json"
CACHED = "as chosen when the run began"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A config in which no knob is open any more."""

    config: Config
    plan: Plan
    values: Values = field(default_factory=dict[str, Any])
    """The values that were chosen for the open knobs."""
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """Maps each knob to the reason for its value."""

    def lines(self) -> list[str]:
        """Format the choice for `keel check`."""
        return [
            f"{knob} = {yaml_value(value)}: {self.reasons[knob]}"
            for knob, value in self.values.items()
        ]


def yaml_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def choose(
    config: Config,
    open_knobs: frozenset[str],
    facts: ModelFacts,
    hardware: Hardware,
    previous: Values | None = None,
) -> Choice:
    """Choose values for the open knobs.

    `previous` has the values that were chosen when the run began, which are kept as long as they
    fit. Raises ConfigError with helpful changes if no layout fits.
    """
    open_knobs &= relevant_knobs(config, hardware)
    if not open_knobs or not hardware.gpu or not hardware.gpu_gib:
        return Choice(config=config, plan=plan_on(config, facts, hardware))
    kept = {knob: value for knob, value in (previous or {}).items() if knob in open_knobs}
    search = layout = None
    if kept:
        try:
            search = LayoutSearch(
                with_values(config, kept), open_knobs - set(kept), facts, hardware
            )
            layout = search.best()
        except ConfigError:  # the recipe has changed and forbids them
            search = None
    if search is None or layout is None:
        kept, search = {}, LayoutSearch(config, open_knobs, facts, hardware)
        layout = search.best()
    if layout is None:
        raise search.refusal()
    knobs = flatten_config(layout.config)
    return Choice(
        config=layout.config,
        plan=layout.plan,
        values={knob: knobs[knob] for knob in knobs if knob in open_knobs},
        reasons={**_Reasons(search, layout).all(), **dict.fromkeys(kept, CACHED)},
    )


def relevant_knobs(config: Config, hardware: Hardware) -> frozenset[str]:
    """Return the knobs to choose. Without rollouts these are only trainer knobs, and the numbers of
    actors are included only on known hardware."""
    counts = frozenset({"rollout.engines", "trainer.ranks"} if hardware.assumed else ())
    if config.data.sources:
        return KNOBS - counts
    knobs = frozenset(knob for knob in KNOBS if knob.startswith("trainer."))
    return knobs - counts - {"trainer.offload_while_sampling", "trainer.share_prompts"}


class _Reasons:
    """Explains a layout by comparing it with others. Each method explains the knob that it is named
    after."""

    def __init__(self, search: LayoutSearch, best: Layout) -> None:
        self._search, self._best = search, best
        self._config, self._plan = best.config, best.plan
        self._trainer = best.config.trainer
        knobs = flatten_config(best.config)
        self._values = {knob: knobs[knob] for knob in search.open_knobs}

    def all(self) -> dict[str, str]:
        reasons = {k: getattr(self, f"_{k.partition('.')[2]}")() for k in self._search.open_knobs}
        if self._search.tight and "trainer.micro_batch_tokens" in reasons:
            reasons["trainer.micro_batch_tokens"] += "; it fits by less than the model's error"
        return reasons

    def _other(self, **changes: Any) -> Layout | None:
        """Return the layout with different values for trainer knobs, or None if it does not fit."""
        return self._with({f"trainer.{knob}": value for knob, value in changes.items()})

    def _with(self, changes: Values) -> Layout | None:
        values = {k: v for k, v in self._values.items() if k != "rollout.gpu_memory_utilization"}
        return self._search.layout({**values, **changes})

    def _against(self, other: Layout | None) -> str:
        if other is None:
            return "does not fit"
        slower = other.cost / self._best.cost - 1
        if slower > 0.005:
            return f"{100 * slower:.0f} % slower"
        return f"less than {100 * (TIE - 1):.0f} % faster" if slower < -0.005 else "no faster"

    def _switched(self, knob: str) -> str:
        """Compare the layout with the one in which a boolean trainer knob has the other value."""
        on = getattr(self._trainer, knob)
        return f"{'without' if on else 'with'} it: {self._against(self._other(**{knob: not on}))}"

    @property
    def _sizes(self) -> list[int]:
        tried = self._search.options.micro_batches(self._trainer.ranks)
        return [n for values in tried for n in values.values()]

    @property
    def _beside(self) -> str:
        beside = self._best.shared and not self._config.rollout.time_share
        return " alongside the engine" if beside else ""

    def _ranks(self) -> str:
        ranks, options = self._trainer.ranks, self._search.options
        if options.gpus == 1:
            return "one GPU"
        if ranks == options.gpus:
            return f"all {ranks} GPUs"
        if ranks == options.max_ranks:
            return f"of {options.gpus} GPUs: a step has no sequences for more"
        if self._best.shared:
            return f"each on one of {options.gpus} GPUs"
        what = "engines and trainer take" if self._config.data.sources else "a step takes"
        return f"of {options.gpus} GPUs, by the time that {what}"

    def _engines(self) -> str:
        return "one per rank" if self._best.shared else "on the GPUs without a rank"

    def _colocated(self) -> str:
        if self._search.options.gpus == 1:
            return "a single GPU is shared in any case"
        if self._config.rollout.tensor_parallel > 1:
            return "an engine of several GPUs shares none"
        others = [each for each in self._search.candidates if each.shared != self._best.shared]
        against = self._against(min(others, key=lambda each: each.cost, default=None))
        separate = "with separate GPUs for engines and trainer"
        return f"{separate if self._best.shared else 'with shared GPUs'}: {against}"

    def _gpu_memory_utilization(self) -> str:
        parts, size = self._plan.engine.parts, self._search.hardware.gpu_gib
        takes = gib(self._config.rollout.gpu_memory_utilization * size * GIB)
        sequences, cached = engine_sequences(self._config), self._plan.cached or 0
        held = f"all {sequences}" if cached >= sequences else f"{cached} of {sequences}"
        return (
            f"{takes}: weights {gib(parts['weights'])}, and the KV cache of {held} sequences at "
            "full length"
        )

    def _max_num_seqs(self) -> str:
        a, rollout = self._config.algorithm, self._config.rollout
        at_once = engine_sequences(self._config)
        share = math.ceil(a.prompts_per_step * a.group_size / rollout.engines)
        if share > at_once:
            return (
                f"an engine has {share} to sample in a step, in {math.ceil(share / at_once)} "
                f"waves: all at once do not fit, or are less than {100 * (TIE - 1):.0f} % faster"
            )
        room = ", and room for evaluations" if at_once < rollout.max_num_seqs else ""
        return f"all {at_once} that an engine has to sample in a step{room}"

    def _time_share(self) -> str:
        if not self._best.shared:
            return "engines and trainer have separate GPUs"
        if not self._config.rollout.time_share:
            return "engine and trainer fit side by side"
        beside = self._with({"rollout.time_share": False})
        if beside and (beside.plan.cached or 0) >= (self._plan.cached or 0):
            return f"side by side: {self._against(beside)}"
        turns = self._plan.time.turns if self._plan.time else 0.0
        return f"too little room side by side; time-sharing costs {seconds(turns)}"

    def _offload_while_sampling(self) -> str:
        if not self._config.rollout.time_share:
            return "no effect without rollout.time_share"
        held, offload = gib(held_bytes(self._plan.trainer)), self._plan.offload
        if offload.training and not offload.sampling:
            return f"activations need the room of {gib(offload.training)} of optimizer state"
        if self._trainer.offload_while_sampling:
            stays = self._other(offload_while_sampling=False)
            against = self._against(stays) if stays else "too little for the engine"
            return f"with {held} of the trainer's on the GPU: {against}"
        return f"{held} of the trainer's fit beside an engine that is awake"

    def _zero_stage(self) -> str:
        stage = self._trainer.zero_stage
        if self._trainer.ranks == 1:
            lone = "a single rank shards nothing"
            return {
                2: f"{lone}; ZeRO 1 would have gradients twice in an update",
                3: "the optimizer is in host memory, and so are its gradients",
            }.get(stage, lone)
        if stage > 1 and not any(self._other(zero_stage=less) for less in range(stage)):
            return "the least that fits"
        return "the fastest that fits"

    def _micro_batch_tokens(self) -> str:
        larger = [n for n in self._sizes if n > self._trainer.micro_batch_tokens]
        if not larger:
            return "a share of a step at once, or the most that is worth it"
        other = self._other(micro_batch_tokens=min(larger))
        if other is None:
            return f"the largest that fits{self._beside} ({gib(self._plan.peak)})"
        return f"larger ones are {self._against(other)}"

    def _activation_checkpointing(self) -> str:
        if not self._trainer.activation_checkpointing:
            kept = gib(self._plan.trainer.parts["activations"])
            switched = self._switched("activation_checkpointing")
            return f"{kept} of activations fit{self._beside}; {switched}"
        whole = self._other(activation_checkpointing=False)
        if whole or "trainer.micro_batch_tokens" not in self._values:
            return f"without it: {self._against(whole)}"
        sizes = [n for n in self._sizes if n < self._trainer.micro_batch_tokens]
        parts = [self._other(activation_checkpointing=False, micro_batch_tokens=n) for n in sizes]
        fastest = min(filter(None, parts), key=lambda layout: layout.cost, default=None)
        smaller = ", in smaller micro-batches" if fastest else ""
        return f"without it{smaller}: {self._against(fastest)}"

    def _keep_attention(self) -> str:
        trainer, model = self._trainer, self._config.model
        if not trainer.activation_checkpointing:
            return "no effect without trainer.activation_checkpointing"
        if model.batch_invariant:
            return "not with model.batch_invariant"
        if not trainer.keep_attention:
            if self._config.max_context < LONG:
                return f"little to gain from contexts below {LONG:,} tokens"
            if trainer.zero_stage == 3:
                return "not with ZeRO 3"
            if self._search.options.own_attention:
                return "not with sparse attention, nor in float32"
        return self._switched("keep_attention")

    def _compile(self) -> str:
        if self._trainer.zero_stage == 3:
            return "not with ZeRO 3"
        if self._config.model.batch_invariant:
            return "not with model.batch_invariant"
        if self._trainer.sequence_parallel > 1:
            return "not measured with trainer.sequence_parallel"
        if not self._search.options.compiles:
            return "not measured for such a model"
        steps = self._config.run.steps
        return f"{self._switched('compile')} in {steps} steps, with {COMPILE_S:.0f} s to compile"

    def _share_prompts(self) -> str:
        if self._trainer.share_prompts:
            return "a prompt is computed once for its completions"
        return no_sharing(self._config, head_size=self._search.facts.head_size)

    def _offload_optimizer(self) -> str:
        if self._trainer.offload_optimizer:
            return "nothing else fits"
        return "the optimizer's state fits on the GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedChoice:
    """The values that were chosen when the run began, if they still apply."""

    values: Values = field(default_factory=dict[str, Any])
    changed: str = ""
    """Describes how the hardware has changed, if it has."""


def load_choice(config: Config, signature: Mapping[str, Any]) -> SavedChoice:
    """Load the choice that was made for the run that this one resumes. `signature` is the
    `Hardware.signature` of the current hardware."""
    folder = Path(config.run.dir).expanduser()
    latest = checkpoint.latest(folder / "checkpoints")
    saved = _read_cache(folder)
    if saved is None or latest is None or config.run.resume == "never":
        return SavedChoice()
    values, before = saved["values"], saved["hardware"]
    differences = [
        f"{name} {before.get(name)} → {value}"
        for name, value in signature.items()
        if before.get(name) != value
    ]
    if not differences:
        return SavedChoice(values=values)
    text = f"the hardware has changed ({', '.join(differences)}): the layout is chosen again"
    return SavedChoice(changed=text)


def save_choice(folder: Path, values: Values, signature: Mapping[str, Any]) -> None:
    """Save the choice, if there is one, so that a resumed run can load it."""
    if values:
        _write_cache(folder, {"values": dict(values), "hardware": dict(signature)})


def update_choice(folder: Path, values: Values) -> None:
    """Replace saved values with the ones that have been lowered since then."""
    if saved := _read_cache(folder):
        saved["values"].update({k: v for k, v in values.items() if k in saved["values"]})
        _write_cache(folder, saved)


def _read_cache(folder: Path) -> dict[str, dict[str, Any]] | None:
    try:
        saved = json.loads((folder / CACHE_FILE).read_text())
        return {"values": dict(saved["values"]), "hardware": dict(saved["hardware"])}
    except (OSError, ValueError, KeyError, TypeError):  # missing or invalid
        return None


def _write_cache(folder: Path, content: Mapping[str, Any]) -> None:
    fresh = folder / f"{CACHE_FILE}.tmp"
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(folder / CACHE_FILE)
