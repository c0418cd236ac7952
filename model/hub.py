"""Resolves model folders and hub names, and finds missing or damaged files without loading any
weights."""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import constants, try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from keel.configs.schema import ConfigError
from keel.model.config_file import QUANTISED

HUB_S = 5.0
"""How many seconds to wait for the hub's first answer. transformers itself would retry for half a
minute."""
KNOWN = "Decoders like Llama, Qwen3, Qwen3-MoE, Mixtral and DeepSeek-V3 are (docs/models.md)"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of the file that holds all weights, and of the index if they are split over several files.
transformers prefers the single file. vLLM loads the files in the index, or all `*.safetensors`, and
weight updates are compared with those."""
MAX_HEADER = 25 * 2**20
"""Maximum size of a safetensors header in bytes. 100,000 tensors need about 10 MiB."""
LFS = b"version https://git-lfs"
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*vocab.json", "tekken.json", "*.tiktoken")
"""Names of files that may contain a tokenizer's vocabulary."""
_DTYPES = {"F64", "F32", "F16", "BF16", "BOOL", "U8", "I8", "I16", "I32", "I64"}
"""Supported data types of weights and buffers in safetensors files."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CODED = "｜DSML｜"
"""A token that identifies DeepSeek-V3.2's tokenizer."""


_OTHER_WEIGHTS = {
    "adapter_*": "an adapter. Merge it into its base model (peft's merge_and_unload) and save that",
    "consolidated*": "weights in the publisher's format. Download the ones for transformers",
    "pytorch_model*.bin": "weights that are not safetensors. Load and save them with transformers",
    "*.gguf": "weights for llama.cpp. Use the original model in safetensors",
}
"""File patterns for weights in other formats, each with advice for the user."""


def written_by_code(tokenizer: Any) -> bool:
    """Return whether code formats the chats instead of a template, as for DeepSeek-V3.2. That code
    is in `keel.rollout.chat.render`."""
    return not tokenizer.chat_template and _CODED in tokenizer.get_added_vocab()


def from_anywhere(path: str) -> str:
    """Make a folder's path absolute, because Ray actors run in different working directories."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def is_hub_name(path: str) -> bool:
    """Return whether `path` could be a hub model (`owner/model`, or an old name without owner)."""
    return bool(_HUB_NAME.fullmatch(path)) and not path.startswith(".")


def check_path(path: str) -> None:
    """Check that a path is a model folder or possibly a model on the hub. If a hub model is not
    downloaded yet, only check that the hub answers. Raises ConfigError if a check fails."""
    folder = Path(path).expanduser()
    if Path(path).is_dir():
        return
    if folder.is_dir():
        raise ConfigError(f"{path!r}: engines do not expand `~`. Write {str(folder)!r}")
    if folder.exists():
        raise ConfigError(f"{path!r} is a file. Use the folder that contains config.json")
    export = ". A run exports its model there when it ends" if folder.name == "model" else ""
    if not is_hub_name(path):
        raise ConfigError(
            f"{path!r} does not exist, and it is not a hub name (owner/model){export}"
        )
    if not _downloaded(path) and not hub_answers():
        raise ConfigError(
            f"{path!r} is not a folder, and the hub ({constants.ENDPOINT}) does not answer. "
            "Correct the path, or download the model elsewhere and use its folder"
        )


def check_folder(path: str) -> None:
    """Check that an existing folder contains a model in transformers' format. Raises ConfigError if
    it does not."""
    folder = Path(path)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    _check_not_a_run(path)
    raise ConfigError(
        f"{path!r} has no config.json, so it is not a model folder of transformers. "
        f"{_other_weights(folder)}"
    )


def hub_options(path: str) -> dict[str, Any]:
    """Return options for transformers' loaders. With these options, the loaders never run code that
    comes with a model (by default, they ask on the terminal). They also fall back to the local
    cache if the hub does not answer."""
    local = not Path(path).is_dir() and _downloaded(path) and not hub_answers()
    return {"trust_remote_code": False, **({"local_files_only": True} if local else {})}


@cache
def hub_answers() -> bool:
    """Return whether the hub answers within `HUB_S` seconds. The hub is contacted only once per
    process."""
    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []

    def request() -> None:
        try:
            with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_S):
                answers.append(True)
        except URLError as error:  # an HTTP error is an answer, too
            answers.append(isinstance(error, HTTPError) or isinstance(error.reason, ssl.SSLError))
        except OSError:
            answers.append(False)

    # A thread is needed because name resolution has no timeout.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(HUB_S)
    return answers == [True]


def check_tokenizer_files(path: str) -> None:
    """Check that a folder contains a vocabulary file. Without one, transformers would make up a
    vocabulary. Raises ConfigError if it is missing."""
    folder = Path(path)
    if not folder.is_dir():
        return
    if not any(True for name in _VOCABULARIES for _ in folder.glob(name)):
        _check_not_a_run(path)
        raise ConfigError(
            f"{path!r} has no tokenizer ({', '.join(_VOCABULARIES)}). Copy its files there, or set "
            "model.tokenizer"
        )


def _check_not_a_run(path: str) -> None:
    folder = Path(path)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if (run / "config.yaml").is_file():
        kind = "a run folder" if run == folder else "a checkpoint, not a model"
        raise ConfigError(
            f"{path!r} is {kind}. The trained model is in {str(run / 'model')!r} after run.steps"
        )


def missing_weights(path: str) -> str:
    """Return a description of missing, damaged or misplaced weights in a folder, or "" if all are
    fine."""
    folder = Path(path)
    if not folder.is_dir():
        return ""
    whole, indexed = (folder / WHOLE).is_file(), _indexed(folder)
    names = {WHOLE, *indexed} if whole else indexed
    if not names:
        return f"it has no weights ({WHOLE}, or parts with {INDEX}). {_other_weights(folder)}"
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        message = f"{_join(missing)} of the {len(indexed)} files in {INDEX} are missing"
        if whole:  # transformers would load this file and ignore the index
            message += f". If {WHOLE} is the whole model, delete the index"
        return message
    others = {file.name for file in folder.glob("*.safetensors")} - names
    if loaded := [] if indexed else sorted(n for n in others if not n.startswith("consolidated")):
        return f"{_join(loaded)} next to {WHOLE}: vLLM loads all without an index. Move it away"
    broken = [(name, fault) for name in sorted(names) if (fault := _fault(folder / name))]
    return f"{_join([name for name, _ in broken])}: {broken[0][1]}" if broken else ""


def _indexed(folder: Path) -> set[str]:
    index = folder / INDEX
    if not index.is_file():
        return set()
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        if wrong := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{wrong[0]!r} is not a file name")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index of weights: {error!r}") from error
    return names


def _other_weights(folder: Path) -> str:
    for pattern, advice in _OTHER_WEIGHTS.items():
        if file := next(folder.glob(pattern), None):
            return f"{file.name} is {advice}"
    return "Use a folder written by save_pretrained"


def shapes_of(path: str) -> dict[str, tuple[int, ...]]:
    """Return a mapping from tensor names to shapes for a folder whose weights are complete."""
    folder = Path(path)
    names = {WHOLE} if (folder / WHOLE).is_file() else _indexed(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        with safe_open(folder / name, framework="np") as file:
            shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return shapes


def tensors_called(path: str, name: str, rows: int | None = None) -> Iterator[Any]:
    """Yield the tensors with the given name from a folder's files. If `rows` is set, yield only
    their first `rows` rows."""
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            if name in set(content.keys()):
                yield content.get_slice(name)[:rows]


def _fault(file: Path) -> str:
    with file.open("rb") as content:
        if content.read(len(LFS)) == LFS:
            return "a Git LFS pointer. Run `git lfs pull`"
        content.seek(0)
        length = int.from_bytes(content.read(8), "little")
    if MAX_HEADER < length <= file.stat().st_size:
        return f"has a header of {length:,} bytes, larger than any model's. Download it again"
    try:
        with safe_open(file, framework="np") as tensors:
            dtypes = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        return f"not a complete safetensors file ({reason}). Download it again"
    if unsupported := sorted(dtypes - _DTYPES):
        return f"has tensors of type {', '.join(unsupported)}. {QUANTISED}"
    return ""


def local_folder(path: str) -> Path | None:
    """Return the folder that contains a local or downloaded model."""
    return Path(path) if Path(path).is_dir() else _downloaded(path)


def _downloaded(path: str) -> Path | None:
    file = try_to_load_from_cache(path, "config.json") if is_hub_name(path) else None
    return Path(file).parent if isinstance(file, str) else None


def _join(names: Iterable[str], limit: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
