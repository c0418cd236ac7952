"""Checks a model's config.json as plain JSON before transformers reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.configs.schema import ConfigError

MAX_BYTES = 2**22
"""Maximum size of config.json in bytes. Published files have a few KiB."""
_MAX_ENTRIES = 2**16
"""Maximum number of entries in a list or mapping in config.json."""
_MAX_VALUES: Mapping[str, float] = {
    "model_max_length|sliding_window|max_window_size|param": float("inf"),  # no tensor sizes
    "vocab": 2**26,
    "theta": 2**50,
    "position|context|length|window|chunk|_seq": 2**25,
    "layer|depth|dense_replace": 2**12,
    "size|dim|rank|head|expert|embd|width|inner|group|label|num_|^n_|^d_": 2**20,
}
"""Upper limits for numbers in config.json, well above those in published models. The first pattern
that matches a number's name determines its limit."""
_MODEL_TYPE = re.compile(r"[\w.+-]{1,80}")
QUANTISED = (
    "Keel trains bfloat16, float16 or float32. Use the model without quantisation, or load it with "
    "transformers, call dequantize() and save it with save_pretrained"
)


def check_config(path: str, content: Mapping[str, Any]) -> None:
    """Check the model_type and the sizes in a model's config.json. Raises ConfigError if model_type
    is invalid, or if a size is so large that loading would exhaust time or memory."""
    kind = content.get("model_type")
    if not isinstance(kind, str) or not _MODEL_TYPE.fullmatch(kind):
        raise ConfigError(
            f"{path!r}: config.json has an invalid model_type ({kind!a:.80}). Download it again, "
            "or use a model in transformers' format"
        )
    pending: list[tuple[str, Any]] = list(content.items())
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict | list):
            if len(value) > _MAX_ENTRIES:
                raise ConfigError(
                    f"{path!r}: {name!a:.80} in config.json has {len(value):,} entries, more than "
                    f"{_MAX_ENTRIES:,}"
                )
            names = value.items() if isinstance(value, dict) else ((name, each) for each in value)
            pending.extend(names)
        elif isinstance(value, int | float) and not abs(value) <= (limit := _limit(name)):
            raise ConfigError(
                f"{path!r}: {name!a:.80} in config.json is {value:,}, more than {limit:,.0f}. "
                "Correct the file, or download it again"
            )


def check_quantised(path: str, content: Mapping[str, Any]) -> None:
    """Raise ConfigError if config.json describes quantised weights."""
    inner = content.get("text_config")
    for each in (content, inner if isinstance(inner, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if how := each.get(name):
                method = how.get("quant_method") if isinstance(how, dict) else None
                raise ConfigError(
                    f"{path!r}: the weights are quantised ({method or name!a:.80} in "
                    f"config.json) and cannot be trained. {QUANTISED}"
                )


def one_line(error: BaseException, limit: int = 400) -> str:
    """Return an error's text as one line. Control characters are escaped, since the text may come
    from a file."""
    text = " ".join(str(error).split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)[:limit]


def ignored_code(folder: Path | None, known: Any) -> list[str]:
    """Return one warning for each file that refers to custom code in the model folder. Keel does
    not run such code. `known` is the module that contains the available classes (transformers)."""
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
        auto_map = content.get("auto_map")
        kind = content.get("tokenizer_class")
        if auto_map:
            what = f"custom code (auto_map: {auto_map!a:.120})"
        elif isinstance(kind, str) and not hasattr(known, kind):
            what = f"a tokenizer_class that is not in transformers ({kind!a:.80})"
        else:
            continue
        lines.append(
            f"{file} of the model refers to {what}, which Keel does not run. transformers' classes "
            "are used instead; compare some token ids and answers with the publisher's"
        )
    return lines


def _limit(name: str) -> float:
    for part, limit in _MAX_VALUES.items():
        if re.search(part, name):
            return limit
    return float("inf")
