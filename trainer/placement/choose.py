"""Choose values for the knobs that a recipe leaves unset (`keel.configs.auto`). The values are
saved, so that a resumed run keeps them."""

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
from keel.configs.paths import write_whole
from keel.configs.schema import Config, ConfigError
from keel.model.load import ModelFacts
from keel.trainer.placement.hardware import Hardware
from keel.trainer.placement.layouts import LayoutSearch, Values, with_values
from keel.trainer.placement.plan import Plan, plan_on
from keel.trainer.run import checkpoint

CACHE_FILE = "chosen.json"
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
        reason = f"the estimate's fastest of {len(search.candidates)} layouts that fit"
        if search.strictness.spare == 1.0:
            reason += ", with less spare memory than the estimate's error"
    knobs = flatten_config(layout.config)
    return Choice(
        config=layout.config,
        plan=layout.plan,
        values={knob: knobs[knob] for knob in knobs if knob in open_knobs},
        reason=reason,
    )


def _relevant_knobs(config: Config) -> frozenset[str]:
    if config.data.sources:
        return KNOBS
    knobs = frozenset(knob for knob in KNOBS if knob.startswith("trainer."))
    return knobs - {"trainer.offload_while_sampling", "trainer.share_prompts"}


def load_choice(config: Config, signature: Mapping[str, Any]) -> tuple[Values, str]:
    """Load the values saved by the run that is about to be resumed, unless the hardware has
    changed. Returns the values, along with a description of any change."""
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
        content = {"values": dict(values), "hardware": dict(signature)}
        write_whole(folder / CACHE_FILE, json.dumps(content, indent=1) + "\n")


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
    uses bfloat16 (the schema's default), or float32 on a CPU that has no bfloat16 instructions."""
    if DTYPE not in remaining:
        return config
    folder = Path(config.run.dir).expanduser()
    saved = folder / "config.yaml"
    if saved.is_file() and checkpoint.latest(folder / "checkpoints"):
        dtype = load_config(saved).model.dtype
    else:
        dtype = config.model.dtype if gpu or _has_bfloat16() else "float32"
    return replace(config, model=replace(config.model, dtype=dtype))
