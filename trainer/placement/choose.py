"""Choose values for the knobs that a recipe leaves unset (`keel.configs.auto`). Each choice comes
with a reason and is saved, so that a resumed run keeps it."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from keel.configs.auto import DTYPE, KNOBS
from keel.configs.diff import flatten_config
from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError
from keel.model.load import ModelFacts
from keel.trainer.placement.hardware import Hardware
from keel.trainer.placement.layouts import TIE, Layout, LayoutSearch, Values, with_values
from keel.trainer.placement.memory import GIB, engine_sequences, gib
from keel.trainer.placement.plan import Plan, plan_on
from keel.trainer.run import checkpoint

CACHE_FILE = "chosen.json"
_CACHED = "as chosen when the run began"
_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""CPU flags that indicate hardware support for bfloat16 matrix multiplication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A config with a value for every knob, and the values that were chosen for unset knobs."""

    config: Config
    plan: Plan
    values: Values = field(default_factory=dict[str, Any])  # the chosen values, keyed by knob
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """The reason for each chosen value, keyed by knob."""

    def lines(self) -> list[str]:
        return [f"{k} = {yaml_value(v)}: {self.reasons[k]}" for k, v in self.values.items()]


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
    which are kept as long as a layout with them fits. Raises ConfigError if no layout fits."""
    open_knobs &= _relevant_knobs(config)
    if not open_knobs or not hardware.gpu or not hardware.gpu_gib:
        return Choice(config=config, plan=plan_on(config, facts, hardware))
    search, layout = LayoutSearch(config, open_knobs, facts, hardware), None
    kept = {knob: value for knob, value in (previous or {}).items() if knob in open_knobs}
    if kept:
        with suppress(ConfigError):  # the recipe has changed and forbids them
            rest = open_knobs - set(kept)
            again = LayoutSearch(with_values(config, kept), rest, facts, hardware)
            if layout := again.best():
                search = again
    if layout is None:
        kept, layout = {}, search.best()
    if layout is None:
        raise search.explain_misfit()
    knobs = flatten_config(layout.config)
    return Choice(
        config=layout.config,
        plan=layout.plan,
        values={knob: knobs[knob] for knob in knobs if knob in open_knobs},
        reasons={**_reasons(search, layout), **dict.fromkeys(kept, _CACHED)},
    )


def _relevant_knobs(config: Config) -> frozenset[str]:
    if config.data.sources:
        return KNOBS
    knobs = frozenset(knob for knob in KNOBS if knob.startswith("trainer."))
    return knobs - {"trainer.offload_while_sampling", "trainer.share_prompts"}


def _reasons(search: LayoutSearch, best: Layout) -> dict[str, str]:
    config, engine = best.config, best.plan.engine.parts
    share = config.rollout.gpu_memory_utilization * search.hardware.gpu_gib
    at_once = engine_sequences(config)
    step = config.algorithm.prompts_per_step * config.algorithm.group_size
    placed = [each for each in search.candidates if each.shared != best.shared]
    apart = min(placed, key=lambda each: each.cost, default=None)
    table = {
        "trainer.ranks": f"of {search.gpus} GPU(s)",
        "rollout.engines": "one per rank" if best.shared else "on the GPUs without a rank",
        "rollout.colocated": f"{yaml_value(not best.shared)} {_compare_costs(best, apart)}",
        "rollout.gpu_memory_utilization": f"{gib(share * GIB)}: weights "
        f"{gib(engine['weights'])}, and the KV cache of "
        f"{min(at_once, best.plan.cached or 0)} of {at_once} sequences at full length",
        "rollout.max_num_seqs": f"a step has {step} sequences for {config.rollout.engines} "
        f"engine(s), which sample {at_once} at once",
        "trainer.share_prompts": search.no_sharing_reason
        or "a prompt is computed once for its completions",
    }
    if not search.compiles:
        table["trainer.compile"] = "not measured for such a model"
    knobs = flatten_config(config)
    values = {knob: knobs[knob] for knob in search.open_knobs}
    values.pop("rollout.gpu_memory_utilization", None)
    for knob in search.open_knobs - table.keys():
        value = knobs[knob]
        if isinstance(value, bool):
            other = not value
        elif knob == "trainer.zero_stage":
            other = value - 1 if value else 1
        else:
            tried = [each[knob] for each in search.micro_batches(config.trainer.ranks)]
            other = min((size for size in tried if size > value), default=None)
        table[knob] = "a larger one is not useful"
        if other is not None:
            compared = _compare_costs(best, search.layout({**values, knob: other}))
            table[knob] = f"{yaml_value(other)} {compared}"
    if search.strictness.spare == 1.0 and "trainer.micro_batch_tokens" in table:
        table["trainer.micro_batch_tokens"] += "; it fits by less than the model's error"
    return {knob: table[knob] for knob in search.open_knobs}


def _compare_costs(best: Layout, other: Layout | None) -> str:
    if other is None:
        return "does not fit, or not with the other knobs"
    slower = 100 * (other.cost / best.cost - 1)
    if slower > 0.5:
        return f"is {slower:.0f} % slower"
    return f"is less than {100 * (TIE - 1):.0f} % faster" if slower < -0.5 else "is no faster"


def load_choice(config: Config, signature: Mapping[str, Any]) -> tuple[Values, str]:
    """Load the values saved by the run that is about to be resumed, unless the hardware has
    changed. Returns the values and a description of the change."""
    folder = Path(config.run.dir).expanduser()
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
        fresh = folder / f"{CACHE_FILE}.tmp"
        content = {"values": dict(values), "hardware": dict(signature)}
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        fresh.replace(folder / CACHE_FILE)


def update_choice(folder: Path, values: Values) -> None:
    """Overwrite the saved values of knobs that were lowered during the run."""
    if saved := _read_cache(folder):
        before = saved["values"]
        save_choice(folder, {k: values.get(k, v) for k, v in before.items()}, saved["hardware"])


def _read_cache(folder: Path) -> dict[str, dict[str, Any]] | None:
    try:
        saved = json.loads((folder / CACHE_FILE).read_text())
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
    uses bfloat16, the schema's default, or float32 on a CPU without bfloat16 instructions."""
    if DTYPE not in remaining:
        return config
    folder = Path(config.run.dir).expanduser()
    saved = folder / "config.yaml"
    if saved.is_file() and checkpoint.latest(folder / "checkpoints"):
        dtype = load_config(saved).model.dtype
    else:
        dtype = config.model.dtype if gpu or _has_bfloat16() else "float32"
    return replace(config, model=replace(config.model, dtype=dtype))
