"""Quick checks of the files, models and rewards named in a recipe, run before torch is imported."""

import sys
from collections.abc import Collection
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from keel.configs.diff import check_resumable
from keel.configs.load import load_config
from keel.configs.paths import data_path, unwritable
from keel.configs.schema import DTYPE, TINY_MODEL, Config, ConfigError, SourceConfig
from keel.configs.sections.sft import TEXT
from keel.data.conversations.load import read_conversations
from keel.data.jsonl import load_jsonl
from keel.model.hub import check_path, is_hub_name
from keel.rewards.compose import check_weights
from keel.trainer.run.trackers import check_trackers

_MAX_QUICK_BYTES = 2**22
"""Maximum size in bytes of a file or folder to read in these checks. Reading that much takes a
tenth of a second."""


def check_quickly(config: Config, command: str, later: Collection[Path] = ()) -> None:
    """Check everything in a recipe that can be checked in a fraction of a second. Raises the same
    ConfigError as the full checks.

    Skips hub models, large files and the user's reward functions. `later` holds absolute paths that
    don't exist yet because an earlier command in a pipeline will write them.
    """
    supervised = command in ("sft", "pretrain")
    if supervised and not config.sft.sources:
        raise ConfigError("sft.sources: needs at least one source (docs/sft.md, docs/pretrain.md)")
    others = [source.name for source in config.sft.sources if not source.is_text]
    if command == "pretrain" and others:
        raise ConfigError(
            f"sft.sources: {', '.join(others)}: no text. `keel pretrain` learns from source: "
            f"{' and '.join(TEXT)}, and `keel sft` from conversations, too"
        )
    folder = config.run.folder
    if folder.is_file():
        raise ConfigError(f"run.dir = {folder}: is a file. Choose another folder")
    if (supervised or command == "train") and (why := unwritable(folder)):
        raise ConfigError(f"run.dir = {folder}: cannot be written ({why}). Choose another folder")
    if supervised or command in ("train", "check"):
        check_trackers(config.run.trackers)
    sampled = () if supervised else config.data.sources
    learned = config.sft.sources if supervised or command == "check" else ()
    for source in (*sampled, *learned):
        path = data_path(source.path)
        if source.source in ("jsonl", "file") and _is_small(path):
            load_jsonl(source) if isinstance(source, SourceConfig) else read_conversations(source)
        missing = not path.exists() and path.absolute() not in later
        if source.source == "trajectories" and missing:
            read_conversations(source)
    parts = {
        domain: {part: weight for part, weight in weights.items() if _can_check_part(part)}
        for domain, weights in config.data.rewards_by_domain.items()
    }
    try:
        check_weights({} if supervised else parts, config.data.domains_with_environments)
    except ValueError as error:
        raise ConfigError(f"data.sources: {error}") from error
    model = config.model.path
    if model != TINY_MODEL and not config.endpoint.base_url:
        for path in (model, config.model.tokenizer or model):
            if Path(path).absolute() in later:
                continue
            # `models/qwen4` may be a hub name, but not if there is a folder `models`.
            sibling = "/" in path and Path(path).parent.is_dir()
            if not is_hub_name(path) or sibling or Path(path).is_file():
                try:
                    check_path(path)
                except ConfigError as error:
                    knob = "model.path" if path == model else "model.tokenizer"
                    raise ConfigError(f"{knob} = {error}") from error


def check_resume(config: Config, auto: Collection[str]) -> None:
    """Check that `keel train` can resume the run in `run.dir` with the current knobs. Raises
    ConfigError if a knob that must stay the same has changed. `auto` lists the knobs that were
    chosen for the hardware."""
    folder = config.run.folder
    saved = folder / "config.yaml"
    begun = saved.is_file() and any(folder.glob("checkpoints/step_*"))
    if not begun or config.run.resume == "never" or not config.data.sources:
        return  # nothing to resume, or refused later
    before = load_config(saved)
    if DTYPE in auto:
        config = replace(config, model=replace(config.model, dtype=before.model.dtype))
    check_resumable(before, config, str(folder))


def _can_check_part(part: str) -> bool:
    """Return whether a reward part can be checked without importing any user code."""
    module, dot, _ = part.partition(".")
    if not dot or not module.isidentifier():
        return True
    here = Path(module).is_dir() or Path(f"{module}.py").is_file()
    return not here and module not in sys.modules and find_spec(module) is None


def _is_small(path: Path) -> bool:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file()) <= _MAX_QUICK_BYTES
