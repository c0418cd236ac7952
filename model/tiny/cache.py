"""Cold-started models kept on disk, so that a second run with the same settings starts at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from keel.configs.schema import ConfigError, TinyModelConfig
from keel.model.hub import missing_weights
from keel.model.tiny.build import build_model
from keel.model.tiny.cold_start import (
    Curriculum,
    Progress,
    make_examples,
    system_of,
    train,
)
from keel.model.tiny.conversations import demonstrated
from keel.model.tiny.on_gpu import run_on_gpu
from keel.model.tiny.scripted import digest_of
from keel.model.tiny.tokenizer import build_tokenizer

CODE_VERSION = 2
"""Raise it whenever the tokenizer, the model, the solutions or the training change."""


def ensure_tiny_model(
    config: TinyModelConfig,
    curriculum: Curriculum,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Path:
    """Folder of the cold-started model, trained now unless one of the same content is kept.

    The folder holds what transformers and vLLM load: config, tokenizer, weights under checkpoint
    names. Processes that need the same model at once may all train it; the first to finish wins
    and the others use its copy.

    `device`: where it is taught, `cpu` or a GPU of this machine (`cuda`). The GPU is used by a
    process of its own and is free again afterwards.

    Raises:
        ConfigError: the sources have nothing to teach.
        TimeoutError: the cold start took longer than `config.cold_start.max_seconds`.
        RuntimeError: the process on the GPU died.
    """
    root = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()
    folder = root / f"tiny-{content_key(config, curriculum, device=device)}"
    if folder.is_dir():
        if not missing_weights(str(folder)):
            return folder
        put_away(folder)
    make = partial(make_folder, folder, config, curriculum)
    if device == "cpu" or not config.cold_start.steps:
        make(progress=progress)
    else:
        run_on_gpu(make, device, timeout_s=config.cold_start.max_seconds, progress=progress)
    return folder


def make_folder(
    folder: Path,
    config: TinyModelConfig,
    curriculum: Curriculum,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> None:
    """Build the model, teach it on `device` and write it to `folder`."""
    seed, how = curriculum.seed, config.cold_start
    tokenizer = build_tokenizer(config.phrases)
    # Drawn on the CPU, so that the weights to begin with are the same everywhere.
    model = build_model(config, tokenizer, seed=seed)
    if how.steps:
        count = min(how.questions, how.steps * how.batch_size)
        examples = make_examples(curriculum, tokenizer, count=count, max_context=config.max_context)
        model.to(device)  # pyright: ignore[reportArgumentType] (transformers' stub is too narrow)
        train(model, tokenizer, examples, how, seed=seed, progress=progress)
    # A folder under its final name is always complete: it is written beside it and then renamed.
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    unfinished = place / "model"  # which others may read, as `place` they may not
    try:
        model.save_pretrained(unfinished)
        tokenizer.model_max_length = config.max_context
        tokenizer.save_pretrained(unfinished)
        for path in (*unfinished.iterdir(), unfinished):
            brought_to_disk(path)
        try:
            unfinished.rename(folder)
            brought_to_disk(folder.parent)
        except OSError:
            if not folder.is_dir():  # not another process that was quicker
                raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def put_away(folder: Path) -> None:
    """What a disk has lost part of, and can be made again. Raises ConfigError where it has to stay,
    as in a cache of others."""
    place = folder.with_name(f".{folder.name}-{os.getpid()}-damaged")
    try:
        folder.rename(place)
    except FileNotFoundError:  # another process was quicker
        return
    except OSError as error:
        raise ConfigError(
            f"{folder}: this cached model is damaged and cannot be replaced ({error.strerror}); "
            "delete it, or name another folder in model.tiny.cache_dir"
        ) from error
    shutil.rmtree(place, ignore_errors=True)


def brought_to_disk(path: Path) -> None:
    """A file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def content_key(config: TinyModelConfig, curriculum: Curriculum, *, device: str = "cpu") -> str:
    """Hash of everything that the cold-started weights depend on. A GPU rounds otherwise than a
    CPU."""
    model, sources = asdict(config), curriculum.sources
    del model["cache_dir"], model["cold_start"]["max_seconds"]
    if config.family == "qwen3_moe":  # it came without a name, and without another's knobs
        for name in ("family", "latent_size", "index_heads", "index_top_k"):
            del model[name]
    if not config.phrases:
        del model["phrases"]
    content: dict[str, Any] = {
        "version": CODE_VERSION,
        "model": model,
        "seed": curriculum.seed,
        "sources": [
            [s.source, s.task, dict(s.params), s.weight, s.thinking, system_of(s)] for s in sources
        ],
        "heldout": sorted(set(curriculum.heldout_questions)),
    }
    shown = [
        [s.name, s.environment.target, dict(s.environment.arguments), s.environment.demonstrations]
        for s in sources
        if demonstrated(s)
    ]
    if shown:
        content["demonstrations"] = shown
        if any(scripts := [digest_of(s) for s in sources if demonstrated(s)]):
            content["scripts"] = scripts
        if curriculum.tools_in_thinking:
            content["tools_in_thinking"] = True
    if device != "cpu" and config.cold_start.steps:
        content["device"] = device
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def default_cache_dir() -> Path:
    """`keel` under the user's cache folder (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "keel"
