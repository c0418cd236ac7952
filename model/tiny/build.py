"""Build the tiny model, and cache models after their supervised warm-up (cold start)."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from transformers.utils.logging import disable_progress_bar

from keel.configs.schema import ConfigError, TinyModelConfig
from keel.model.hub import missing_weights
from keel.model.tiny.cold_start import (
    Curriculum,
    Progress,
    make_examples,
    script_digest,
    system_of,
    train,
)
from keel.model.tiny.tokenizer import build_tokenizer, vocab_rows
from keel.rl.supervisor import EXIT_S, KILL_S

_CODE_VERSION = 3
"""Increase this whenever the tokenizer, the model, the solutions or the training changes."""
_START_S = 180.0
"""Seconds for imports, questions, CUDA and disk access, in addition to the training time limit."""


def model_config(config: TinyModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Build the model's config. Every layer is an MoE layer, and the head is not tied."""
    shared: dict[str, Any] = {
        "vocab_size": vocab_rows(tokenizer),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_size,
        "moe_intermediate_size": config.expert_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": True,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": False,
        "initializer_range": config.initializer_range,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
    }
    if config.family == "deepseek_v32":  # latent and sparse attention, one shared expert
        return AutoConfig.for_model(
            "deepseek_v32",
            architectures=["DeepseekV32ForCausalLM"],
            mlp_layer_types=["sparse"] * config.layers,
            num_key_value_heads=config.heads,
            q_lora_rank=config.latent_size,
            kv_lora_rank=config.latent_size,
            qk_nope_head_dim=config.head_dim,
            qk_rope_head_dim=config.head_dim // 2,
            v_head_dim=config.head_dim,
            n_routed_experts=config.experts,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            index_n_heads=config.index_heads,
            index_head_dim=config.head_dim,
            index_topk=config.index_top_k,
            **shared,
        )
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,  # pyright: ignore[reportCallIssue] (an attribute all the same)
        num_experts=config.experts,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        **shared,
    )


def build_model(
    config: TinyModelConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> PreTrainedModel:
    """Build a float32 model whose random weights depend only on `config` and `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(model_config(config, tokenizer))


def ensure_tiny_model(
    config: TinyModelConfig,
    curriculum: Curriculum,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Path:
    """Return the folder of the trained tiny model, which transformers and vLLM can load. The model
    is trained first if it isn't cached yet. On a GPU, training runs in a separate process, so that
    the memory is freed when it exits. If several processes train the same model, they all use
    whichever finishes first. Raises ConfigError if no source provides training conversations,
    TimeoutError if the cold start took longer than `config.cold_start.max_seconds`, and
    RuntimeError if the GPU process died."""
    root = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()
    folder = root / f"tiny-{_content_key(config, curriculum, device=device)}"
    if folder.is_dir() and not missing_weights(str(folder)):
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # damaged
    make = partial(_make_folder, folder, config, curriculum)
    if device == "cpu" or not config.cold_start.steps:
        make(progress=progress)
    else:
        _train_in_process(make, device, timeout_s=config.cold_start.max_seconds, progress=progress)
    return folder


def _make_folder(
    folder: Path,
    config: TinyModelConfig,
    curriculum: Curriculum,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> None:
    seed, settings = curriculum.seed, config.cold_start
    tokenizer = build_tokenizer(config.phrases)
    # Initialised on the CPU, so that the initial weights do not depend on the device.
    model = build_model(config, tokenizer, seed=seed)
    if settings.steps:
        count = min(settings.questions, settings.steps * settings.batch_size)
        examples = make_examples(curriculum, tokenizer, count=count, max_context=config.max_context)
        model.to(device)  # pyright: ignore[reportArgumentType] (transformers' stub is too narrow)
        train(model, tokenizer, examples, settings, seed=seed, progress=progress)
    # Written next to the folder and renamed, so that a folder under its final name is complete.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        unfinished = Path(place, "model")  # with default permissions, unlike `place`
        model.save_pretrained(unfinished)
        tokenizer.model_max_length = config.max_context
        tokenizer.save_pretrained(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise


def _content_key(config: TinyModelConfig, curriculum: Curriculum, *, device: str = "cpu") -> str:
    """Hash everything that determines the weights."""
    if not config.cold_start.steps:
        curriculum, device = Curriculum(seed=curriculum.seed), "cpu"
    model, sources = asdict(config), curriculum.sources
    del model["cache_dir"], model["cold_start"]["max_seconds"]
    if config.family == "qwen3_moe":
        for name in ("latent_size", "index_heads", "index_top_k"):
            del model[name]
    content: dict[str, Any] = {
        "version": _CODE_VERSION,
        "model": model,
        "seed": curriculum.seed,
        "sources": [
            [s.source, s.task, dict(s.params), s.weight, s.thinking, system_of(s)] for s in sources
        ],
        "heldout": sorted(curriculum.heldout_questions),
        "demonstrations": [
            [s.name, e.target, dict(e.arguments), e.demonstrations, script_digest(s)]
            for s in sources
            if (e := s.environment).demonstrations
        ],
        "tools_in_thinking": sorted(curriculum.tools_in_thinking) or False,
        "device": device,
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def default_cache_dir() -> Path:
    """Return the `keel` folder in the user's cache directory (XDG)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "keel"


def _train_in_process(
    make: Callable[..., None], device: str, *, timeout_s: float, progress: Progress | None = None
) -> None:
    """Run `make(device=…, progress=…)` in a new process, with TF32 and, where available,
    deterministic kernels, so that GPUs of the same kind produce the same weights."""
    # Spawned: this process may have threads, and CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, make, device), daemon=True)
    process.start()
    theirs.close()
    limit = timeout_s + _START_S
    end = time.monotonic() + limit
    try:
        while ours.poll(max(0.0, end - time.monotonic())):
            message = ours.recv()
            if isinstance(message, Exception):
                raise message
            if message is None:
                process.join(EXIT_S)  # its exit frees the GPU
                return
            if progress is not None:
                progress(*message)
        raise TimeoutError(f"model.tiny.cold_start: not finished on {device} after {limit:.0f} s")
    except EOFError:
        process.join(EXIT_S)
        raise RuntimeError(
            f"model.tiny.cold_start: the process on {device} died with exit code "
            f"{process.exitcode}. See its output above"
        ) from None
    finally:
        process.kill()
        process.join(KILL_S)


def _child(parent: Connection, make: Callable[..., None], device: str) -> None:
    disable_progress_bar()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", message=".*deterministic")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            make(device=device, progress=lambda *numbers: parent.send(numbers))
    except (TimeoutError, ConfigError) as error:
        parent.send(error)
    except Exception as error:  # may not be picklable
        parent.send(RuntimeError(f"model.tiny.cold_start: {type(error).__name__}: {error}"))
    else:
        parent.send(None)
