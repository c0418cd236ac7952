"""`keel serve`: serve a trained model with vLLM. This module imports no heavy library."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import yaml

from keel.configs.load import load_config
from keel.configs.schema import ConfigError, RolloutConfig
from keel.rollout.judge.process import VllmServer
from keel.trainer.run import checkpoint
from keel.trainer.run.progress import waiting

_HOST = "127.0.0.1"
_START_S = 1800.0
"""Timeout in seconds for vLLM to load the model and respond."""
_POLL_S = 0.5
_CPU_HEAD_SIZES = (64, 128)
"""Head sizes of linear attention that vLLM's CPU kernel supports, equal for keys and values."""
_SAMPLING = ("temperature", "top_p", "top_k")
_THINKING_KEYS = ("enable_thinking", "thinking")
"""Chat template variables that turn thinking on or off."""
_FIXED = ("model", "host", "port", "served_model_name")
"""vLLM options that the user cannot set, because the model folder or Keel's own arguments determine
them."""


def server_options(folder: Path, words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the vLLM options for the model in a run folder or model folder. A run's model uses the
    sampling parameters from its recipe, and `words` holds the user's `key=value` overrides. Raises
    ConfigError if there is no exported model or an argument is invalid."""
    exported = (folder / "config.json").exists()
    run, path = (folder.resolve().parent, folder) if exported else (folder, folder / "model")
    name, sampling, thinking = folder.resolve().name, dict[str, Any](), set[bool]()
    if (run / "config.yaml").exists():
        if not (path / "config.json").exists():
            newest = checkpoint.latest(folder / "checkpoints")
            if newest is None:
                raise ConfigError(f"{folder}: this run has neither a model nor a checkpoint yet")
            step = checkpoint.step_of(newest)
            raise ConfigError(
                f"{folder}: holds checkpoints, and no exported model. Run the command that trained "
                f"it again with run.steps={step}: it exports step {step} to {folder / 'model'} and "
                "ends"
            )
        config, name = load_config(run / "config.yaml"), run.resolve().name
        sampling = {name: getattr(config.rollout.sampling, name) for name in _SAMPLING}
        thinking = {source.thinking for source in config.data.sources}
    elif not exported:
        raise ConfigError(
            f"{folder}: is neither a run folder (config.yaml) nor a model folder (config.json)"
        )
    chosen = _parse_options(words)
    sampling |= {name: chosen.pop(name) for name in _SAMPLING if name in chosen}
    if "thinking" in chosen:
        thinking = {chosen.pop("thinking")}
    options: dict[str, Any] = {
        "model": str(path),
        "served_model_name": name,
        "max_model_len": "auto",  # the longest context that fits the KV cache
    }
    if sampling:  # otherwise generation_config.json applies
        options["override_generation_config"] = sampling
    if len(thinking) == 1:  # otherwise the chat template decides
        options["default_chat_template_kwargs"] = dict.fromkeys(_THINKING_KEYS, thinking.pop())
    return {**options, **chosen}


def _check_heads(model: str) -> None:
    """Raise ConfigError if vLLM's server would crash on a CPU at the first request."""
    content = json.loads((Path(model) / "config.json").read_text())
    text = content.get("text_config", content)
    sizes = [text.get(f"linear_{part}_head_dim") for part in ("key", "value")]
    if any(sizes) and (sizes[0] != sizes[1] or sizes[0] not in _CPU_HEAD_SIZES):
        raise ConfigError(
            f"{model}: linear attention has key heads of size {sizes[0]} and value heads of size "
            f"{sizes[1]}, but on CPUs vLLM's server needs 64 or 128 for both. Serve the model on a "
            "GPU, or measure it with keel eval"
        )


def _parse_options(words: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.replace("-", "_")
        if not equals or not name.isidentifier():
            raise ConfigError(
                f"{word}: is not key=value; keys are {', '.join(_SAMPLING)}, thinking, and vLLM's "
                "options by their names (max_model_len=4096)"
            )
        if name in _FIXED:
            raise ConfigError(f"{word}: is set by the folder, --host and --port; leave it out")
        try:
            options[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{word}: is not YAML ({error})") from error
    return options


@contextmanager
def run_server(
    options: dict[str, Any], *, gpu: bool, host: str = _HOST, port: int = 0, key: str = ""
) -> Iterator[VllmServer]:
    """Run a vLLM server until the context exits. Port 0 selects a free port. Raises ConfigError if
    the address is not available, or RuntimeError with the end of the log if the server does not
    start."""
    if not gpu:
        _check_heads(options["model"])
    handle, name = tempfile.mkstemp(prefix="keel-serve-", suffix=".log")
    os.close(handle)
    log = Path(name)
    try:
        server = VllmServer(
            options,
            gpu=gpu,
            threads=len(os.sched_getaffinity(0)),
            kv_cache_gib=RolloutConfig().kv_cache_gib,
            host=host,
            port=port,
            key=key,
            log=log,
        )
    except (OSError, OverflowError) as error:
        log.unlink()
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--host {host} --port {port}: {why}; choose another") from error
    try:
        # `keel chat --prompt` leaves nothing but the answer on stdout.
        with redirect_stdout(sys.stderr), waiting(f"starting vLLM with {options['model']}"):
            server.wait(_START_S)
        yield server
    finally:
        if not server.ended():  # else the log may say more than the error
            log.unlink()
        server.stop()


def serve(folder: Path, words: Sequence[str], *, host: str, port: int, gpu: bool) -> None:
    """Serve a model until Ctrl-C. Raises ConfigError if the settings are invalid, or RuntimeError
    if the server fails."""
    options = server_options(folder, words)
    path, name = options["model"], options["served_model_name"]
    try:
        with run_server(options, gpu=gpu, host=host, port=port) as server:
            print(
                f"{path} is served as {name!r} at {server.url} (OpenAI API)\n"
                f"To talk to it: keel chat --url {server.url}. Ctrl-C stops it",
                flush=True,
            )
            while not (why := server.ended()):
                time.sleep(_POLL_S)
            raise RuntimeError(f"{path}: {why}")
    except KeyboardInterrupt:
        print()
