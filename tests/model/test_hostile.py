"""Malicious model folders are refused quickly with one line."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from keel.configs.schema import ConfigError
from keel.model import template_probe
from keel.model.hub import MAX_HEADER, missing_weights
from keel.model.load import load_model_config, load_policy, load_tokenizer
from keel.model.tiny.tokenizer import build_tokenizer
from keel.model.trainable import trainable_facts
from tests.model.families import build

MAX_S = 60.0
"""Well above the limits of a template."""
MAX_BYTES = 2 * 2**30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid tiny model."""
    tokenizer = build_tokenizer()
    build("qwen3", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def checked(folder: Path) -> None:
    """Check a model folder like `keel check`, within limits of time and memory."""
    start, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        config = load_model_config(str(folder))
        load_tokenizer(str(folder))
        trainable_facts(str(folder), config)
        if fault := missing_weights(str(folder)):
            raise ConfigError(fault)
    finally:
        assert time.monotonic() - start < MAX_S
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) * 1024 < MAX_BYTES


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        checked(folder)
    assert str(error.value).isprintable(), "one line without escape codes"
    return str(error.value)


def change(folder: Path, knobs: dict[str, Any], name: str = "config.json") -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | knobs))


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"hidden_size": 10**9}, "hidden_size"),
        ({"intermediate_size": float("nan")}, "intermediate_size"),
        ({"text_config": {"num_experts": 10**9}}, "num_experts"),
        ({"layer_types": ["full_attention"] * 10**5}, "layer_types"),
        ({"model_type": "\x1b[2Jllama"}, "model_type"),
        ({"model_type": "unheard-of"}, "unheard-of"),
        ({"hidden_size": "large"}, "hidden_size"),
    ],
)
def test_configs_out_of_range_are_refused(folder: Path, knobs: dict[str, Any], named: str) -> None:
    change(folder, knobs)
    assert named in refused(folder).replace("\\n", "\n")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOPS, "more than"),
        ("{{ 'a' * 10000000000 }}", "more than"),
        ("{{ 'a' * 5000000 }}", "characters"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", ""),
    ],
    ids=range(4),
)
def test_endless_templates_are_refused(
    folder: Path, template: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_probe, "CPU_S", 0)
    (folder / "chat_template.jinja").write_text(template)
    if reason:
        message = refused(folder)
        assert "chat template" in message and reason in message
    else:
        checked(folder)


TENSOR = {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}


def write_header(file: Path, header: Any, data: int = 32) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


@pytest.mark.parametrize(
    "header",
    [
        [TENSOR],
        {"a": {"dtype": "F32", "data_offsets": [0, 32]}},
        {"a": {**TENSOR, "shape": [10**9]}},
        {"a": {**TENSOR, "shape": [2**62, 4]}},
        {"a": {**TENSOR, "data_offsets": [-4, 28]}},
        {"a": TENSOR, "b": {**TENSOR, "data_offsets": [16, 48]}},
        {"a": TENSOR, "b": TENSOR},
        {"__metadata__": {"x": "y" * (MAX_HEADER + 1)}, "a": TENSOR},
    ],
    ids=range(8),
)
def test_damaged_weights_are_refused(folder: Path, header: Any) -> None:
    write_header(folder / "model.safetensors", header)
    assert refused(folder).startswith("model.safetensors: ")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_non_finite_weights_are_named(folder: Path, number: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = number
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight .*not finite"):
        load_policy(str(folder), torch.float32)


def test_tied_configs_with_separate_heads_are_refused(folder: Path) -> None:
    change(folder, {"tie_word_embeddings": True})
    assert "tie_word_embeddings" in refused(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checked(folder)
