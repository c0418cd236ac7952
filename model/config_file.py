"""Checks of a model's config.json as plain JSON, before transformers makes anything of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.configs.schema import ConfigError

MOST_BYTES = 2**22
"""Largest config.json that is read; published ones have a few KiB."""
MOST_ENTRIES = 2**16
"""Longest list or mapping in it."""
MOST: Mapping[str, float] = {
    "model_max_length|sliding_window|max_window_size|param": float("inf"),  # these size no tensor
    "vocab": 2**26,
    "theta": 2**50,
    "position|context|length|window|chunk|_seq": 2**25,
    "layer|depth|dense_replace": 2**12,
    "size|dim|rank|head|expert|embd|width|inner|group|label|num_|^n_|^d_": 2**20,
}
"""Part of a number's name → its largest value, by the first part that matches. Published models
stay well below them."""
_MODEL_TYPE = re.compile(r"[\w.+-]{1,80}")
QUANTISED = (
    "Keel trains weights in bfloat16, float16 or float32. Name the same model without "
    "quantisation, or load it with transformers, call dequantize() where its format can, and name "
    "the folder that save_pretrained writes"
)


def check_config(path: str, content: Mapping[str, Any]) -> None:
    """Check the type and the sizes in a model's config.json.

    Raises:
        ConfigError: a size is beyond any model's, so that building the model would not end or take
            all memory; or there is no proper model_type.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or not _MODEL_TYPE.fullmatch(kind):
        raise ConfigError(
            f"{path!r}: config.json has no proper model_type ({kind!a:.80}); get the file "
            "again, or name a model in the format of transformers"
        )
    waiting: list[tuple[str, Any]] = list(content.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict | list):
            if len(value) > MOST_ENTRIES:
                raise ConfigError(
                    f"{path!r}: {name!a:.80} in config.json has {len(value):,} entries; no "
                    f"model has more than {MOST_ENTRIES:,}"
                )
            names = value.items() if isinstance(value, dict) else ((name, each) for each in value)
            waiting.extend(names)
        elif isinstance(value, int | float) and not abs(value) <= (most := _most(name)):
            raise ConfigError(
                f"{path!r}: {name!a:.80} in config.json is {value:,}; no model has more than "
                f"{most:,.0f}. Correct the file, or get it again"
            )


def check_quantised(path: str, content: Mapping[str, Any]) -> None:
    """Raises ConfigError for a model whose weights are quantised, by its config.json."""
    inner = content.get("text_config")
    for each in (content, inner if isinstance(inner, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if how := each.get(name):
                method = how.get("quant_method") if isinstance(how, dict) else None
                raise ConfigError(
                    f"{path!r}: the weights are quantised ({method or name!a:.80} in "
                    f"config.json) and cannot be trained. {QUANTISED}"
                )


def one_line(error: BaseException, most: int = 400) -> str:
    """An error's text on one line, at most `most` characters, without escapes for a terminal: it
    may quote what stands in a model's files."""
    text = " ".join(str(error).split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)[:most]


def ignored_code(folder: Path | None, known: Any) -> list[str]:
    """List the code that a model folder's files name and that is not run, a line for each file.
    `known`: the module whose classes can be named (transformers)."""
    lines: list[str] = []
    if folder is None:
        return lines
    for file in ("config.json", "tokenizer_config.json"):
        try:
            content = json.loads((folder / file).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(content, dict):
            continue
        named = content.get("auto_map")
        kind = content.get("tokenizer_class")
        if named:
            what = f"code of its own (auto_map: {named!a:.120})"
        elif isinstance(kind, str) and not hasattr(known, kind):
            what = f"a tokenizer_class that transformers does not have ({kind!a:.80})"
        else:
            continue
        lines.append(
            f"{file} of the model names {what}, and Keel runs no code that comes with a model: "
            "transformers' own classes are used in its place; compare a few of its token ids and "
            "answers with the publisher's"
        )
    return lines


def _most(name: str) -> float:
    for part, most in MOST.items():
        if re.search(part, name):
            return most
    return float("inf")
