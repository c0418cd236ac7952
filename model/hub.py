"""Find models on disk and on the hub, download them, and check their files without loading weights.
Model folders are untrusted: the values in config.json are limited, and code in the folder is never
run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

from keel.configs.schema import TINY_MODEL, ConfigError
from keel.rl.futures import on_thread

_HUB_S = 5.0
"""Seconds to wait for the hub's first answer. transformers would retry for half a minute."""
KNOWN = "Decoders like Llama, Qwen3, Qwen3-MoE, Mixtral and DeepSeek-V3 are (docs/models.md)"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of the single file with all weights, and of the index of weights split over several files.
transformers prefers the single file. vLLM loads the files in the index, or all `*.safetensors`, and
weight updates are compared with these files."""
_LFS = b"version https://git-lfs"
_MAX_ENTRIES = 2**16
_MAX_VALUES: Mapping[str, float] = {
    "model_max_length|sliding_window|max_window_size|param": float("inf"),  # no tensor sizes
    "vocab": 2**26,
    "theta": 2**50,
    "position|context|length|window|chunk|_seq": 2**25,
    "layer|depth|dense_replace": 2**12,
    "size|dim|rank|head|expert|embd|width|inner|group|label|num_|^n_|^d_": 2**20,
    "": float("inf"),
}
"""Upper limits for numbers in config.json, well above those in published models. The first pattern
that matches a number's name determines its limit."""
_MODEL_TYPE = re.compile(r"[\w.+-]{1,80}")
_QUANTISED = (
    "Keel reads bfloat16, float16, float32 and fp8 with a weight_block_size. Use the model without "
    "quantisation, or load it with transformers, call dequantize() and save it with save_pretrained"
)
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*vocab.json", "tekken.json", "*.tiktoken")
_DTYPES = {"F64", "F32", "F16", "BF16", "F8_E4M3", "BOOL", "U8", "I8", "I16", "I32", "I64"}
_NEEDED = (
    "Use a folder written by save_pretrained. Merge an adapter into its base model "
    "(merge_and_unload) first, and convert other formats with transformers"
)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LOADED = [f"*.{kind}" for kind in ("safetensors", "json", "txt", "model", "jinja", "tiktoken")]
"""Files that transformers and vLLM load, excluding code."""
_CODED = "｜DSML｜"


# Paths and the hub.


def from_anywhere(path: str) -> str:
    """Make the path to a folder absolute, because Ray actors run in different working
    directories."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def is_hub_name(path: str) -> bool:
    """Return True if `path` could be a hub model (`owner/model`, or a legacy name with no
    owner)."""
    return bool(_HUB_NAME.fullmatch(path)) and not path.startswith(".")


def local_folder(path: str) -> Path | None:
    """Return the folder of a local or downloaded model."""
    if Path(path).is_dir():
        return Path(path)
    file = try_to_load_from_cache(path, "config.json") if is_hub_name(path) else None
    return Path(file).parent if isinstance(file, str) else None


@cache
def hub_answers() -> bool:
    """Return True if the hub responds within `_HUB_S` seconds. The result is cached for the
    lifetime of the process."""
    if constants.HF_HUB_OFFLINE:
        return False

    def request() -> bool:
        try:
            with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=_HUB_S):
                return True
        except HTTPError:
            return True
        except OSError:
            return False

    try:  # on a thread, because name resolution has no timeout
        return on_thread(request, "hub").result(_HUB_S)
    except TimeoutError:
        return False


def hub_options(path: str) -> dict[str, Any]:
    """Return options for transformers' loaders that forbid custom code, and that restrict loading
    to the local cache if the hub can't be reached."""
    cached = not Path(path).is_dir() and local_folder(path) and not hub_answers()
    return {"trust_remote_code": False, **({"local_files_only": True} if cached else {})}


def check_path(path: str) -> None:
    """Check that a path is a model folder or could be a model on the hub. Raises ConfigError if it
    is neither, or if the model isn't downloaded yet and the hub can't be reached."""
    if Path(path).is_dir():
        return
    if Path(path).exists():
        raise ConfigError(f"{path!r} is a file. Use the folder that contains config.json")
    if not is_hub_name(path):
        raise ConfigError(
            f"{path!r} does not exist, and it is not a hub name (owner/model). Write a folder's "
            "whole path, without `~`. A run exports its model to `model` when it ends"
        )
    if not local_folder(path) and not hub_answers():
        raise ConfigError(
            f"{path!r} is not a folder, and the hub ({constants.ENDPOINT}) does not answer. "
            "Correct the path, or download the model elsewhere and use its folder"
        )


def download(path: str) -> None:
    """Download a hub model to this machine's cache, resuming any partial download. Does nothing for
    other models, or if the hub can't be reached. Raises ConfigError if the download fails and there
    is no copy in the cache."""
    if path == TINY_MODEL or Path(path).exists() or not is_hub_name(path) or not hub_answers():
        return
    try:
        snapshot_download(path, allow_patterns=_LOADED, ignore_patterns="*/*")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"model {path!r}: the download failed ({format_error(error)}). Rerun the command to "
            "resume it"
        ) from error


# config.json and the tokenizer.


def check_config(path: str, content: Mapping[str, Any]) -> None:
    """Check config.json before loading. Raises ConfigError if the model_type is invalid, or if a
    size is so large that loading would hang or run out of memory."""
    kind = content.get("model_type")
    if not isinstance(kind, str) or not _MODEL_TYPE.fullmatch(kind):
        raise ConfigError(
            f"{path!r}: config.json has an invalid model_type ({kind!a:.80}). Download it again, "
            "or use a model in transformers' format"
        )
    pending: list[tuple[str, Any]] = [("config.json", content)]
    while pending:
        name, value = pending.pop()
        limit = next(limit for part, limit in _MAX_VALUES.items() if re.search(part, name))
        size = value if isinstance(value, int | float) else 0
        if isinstance(value, Mapping | list):
            size, limit = len(value), _MAX_ENTRIES
            named = value.items() if isinstance(value, Mapping) else ((name, x) for x in value)
            pending.extend(named)
        if not abs(size) <= limit:
            raise ConfigError(
                f"{path!r}: {name!a:.80} in config.json is too large ({size:,}, the limit is "
                f"{limit:,.0f}). Correct the file, or download it again"
            )


def fp8_block(path: str, content: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block size of FP8 weights in DeepSeek-V3's format, or None if config.json doesn't
    describe quantized weights. Raises ConfigError for any other kind of quantization."""
    for part in (content, content.get("text_config") or {}):
        for name in ("quantization_config", "compression_config"):
            if how := part.get(name):
                match how:
                    case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]}:
                        if rows > 0 and columns > 0:
                            return rows, columns
                    case _:
                        pass
                raise ConfigError(
                    f"{path!r}: the weights are quantised ({name}: {how!a:.80} in config.json) and "
                    f"cannot be trained. {_QUANTISED}"
                )
    return None


def has_power_of_two_scales(content: Mapping[str, Any]) -> bool:
    """Return True if config.json describes FP8 weights whose scales are powers of two, as in
    DeepSeek-V3.2."""
    return (content.get("quantization_config") or {}).get("scale_fmt") == "ue8m0"


def ignored_code(folder: Path | None, known: Any) -> list[str]:
    """Return a warning for each file in the model folder that refers to custom code, which Keel
    doesn't run. `known` is the module that provides the available classes (transformers)."""
    lines: list[str] = []
    for name in ("config.json", "tokenizer_config.json") if folder else ():
        try:
            content = json.loads(Path(folder or "", name).read_text("utf-8"))
            code, kind = content.get("auto_map"), content.get("tokenizer_class")
        except (OSError, ValueError, RecursionError, AttributeError):
            continue
        if not code and isinstance(kind, str) and not hasattr(known, kind):
            code = kind
        if code:
            lines.append(
                f"{name} of the model refers to code outside transformers ({code!a:.120}), which "
                "Keel does not run. transformers' classes are used instead; compare some token ids "
                "and answers with the publisher's"
            )
    return lines


def format_error(error: BaseException, limit: int = 400) -> str:
    """Format an error as a single line. Control characters are escaped, because the message may
    quote an untrusted file."""
    text = " ".join(str(error).split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)[:limit]


def written_by_code(tokenizer: Any) -> bool:
    """Return True if the model formats chats with code rather than a template, as DeepSeek-V3.2
    does."""
    return not tokenizer.chat_template and _CODED in tokenizer.get_added_vocab()


# The files in a model folder.


def check_folder(path: str) -> None:
    """Raise ConfigError if a folder exists but doesn't contain a model in transformers' format."""
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        _check_not_a_run(folder)
        raise ConfigError(
            f"{path!r} has no config.json, so it is not a model folder of transformers. {_NEEDED}"
        )


def check_tokenizer_files(path: str) -> None:
    """Raise ConfigError if a folder has no vocabulary, because transformers would silently make one
    up."""
    folder = Path(path)
    if folder.is_dir() and not any(next(folder.glob(name), None) for name in _VOCABULARIES):
        _check_not_a_run(folder)
        raise ConfigError(
            f"{path!r} has no tokenizer ({', '.join(_VOCABULARIES)}). Copy its files there, or set "
            "model.tokenizer"
        )


def _check_not_a_run(folder: Path) -> None:
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if (run / "config.yaml").is_file():
        raise ConfigError(
            f"{str(folder)!r} belongs to a run and is not a model. The trained model is in "
            f"{str(run / 'model')!r} after run.steps"
        )


def missing_weights(path: str) -> str:
    """Return a description of missing or damaged weights in a folder, or "" if they are
    complete."""
    folder = Path(path)
    if not folder.is_dir():
        return ""
    names = _weight_files(folder)
    if not names:
        return f"it has no weights ({WHOLE}, or parts with {INDEX}). {_NEEDED}"
    if missing := [name for name in names if not (folder / name).is_file()]:
        return f"{len(missing)} of {len(names)} weight files are missing, such as {missing[0]}"
    others = {file.name for file in folder.glob("*.safetensors")} - {*names}
    loaded = sorted(name for name in others if not name.startswith("consolidated"))
    if loaded and not (folder / INDEX).is_file():
        return f"{loaded[0]} next to {WHOLE}: vLLM loads all without an index. Move it away"
    return next(
        (f"{name}: {fault}" for name in names if (fault := _find_damage(folder / name))), ""
    )


def _weight_files(folder: Path) -> list[str]:
    names, index = {WHOLE} if (folder / WHOLE).is_file() else set[str](), folder / INDEX
    if index.is_file():
        try:
            names |= set(json.loads(index.read_text())["weight_map"].values())
            if wrong := [name for name in names if Path(name).name != name]:
                raise ValueError(f"{wrong[0]!r} is not a file name")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigError(f"{index} is not an index of weights: {error!r}") from error
    return sorted(names)


def _find_damage(file: Path) -> str:
    with file.open("rb") as content:
        if content.read(len(_LFS)) == _LFS:
            return "a Git LFS pointer. Run `git lfs pull`"
    try:
        with safe_open(file, framework="np") as tensors:
            dtypes = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        return f"not a complete safetensors file ({format_error(error)}). Download it again"
    unsupported = ", ".join(sorted(dtypes - _DTYPES))
    return unsupported and f"has tensors of type {unsupported}. {_QUANTISED}"


def stored_tensors(path: str, framework: str) -> dict[str, Any]:
    """Return a folder's tensors by name, as lazy slices whose values are read only when indexed.
    The weights must be complete. If `framework` is "np", files can be larger than memory."""
    folder = Path(path)
    tensors: dict[str, Any] = {}
    for name in [WHOLE] if (folder / WHOLE).is_file() else _weight_files(folder):
        with safe_open(folder / name, framework=framework) as file:
            tensors |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
    return tensors


def tensors_named(path: str, name: str, rows: int | None = None) -> Iterator[Any]:
    """Yield each tensor with this name in a folder's weight files, or just its first `rows`
    rows."""
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            if name in set(content.keys()):
                yield content.get_slice(name)[:rows]
