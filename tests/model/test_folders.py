"""Model folders and hub names are checked before anything is loaded; malicious ones fail quickly.

tests/trainer/placement/test_families.py covers the supported families."""

import json
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GemmaConfig, GPT2Config, Phi3Config, Qwen3MoeConfig

from keel.configs.schema import ConfigError, LoraConfig
from keel.model import hub, load
from keel.model.hub import hub_answers, missing_weights
from keel.model.load import facts_of, load_model_config, load_policy, load_tokenizer
from keel.model.tiny.tokenizer import build_tokenizer
from keel.model.trainable import check_adapters, trainable_facts
from tests.model.families import build


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    hub_answers.cache_clear()
    yield
    hub_answers.cache_clear()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Simulate a hub that never answers, and return the times of requests."""
    requests: list[float] = []

    def hang(*_: Any, **__: Any) -> None:
        requests.append(time.monotonic())
        time.sleep(1000)
        raise URLError("too late")

    monkeypatch.setattr(hub, "_HUB_S", 0.05)
    monkeypatch.setattr(hub, "urlopen", hang)
    return requests


def test_missing_folders_do_not_wait_for_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: list[float]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("/models/nowhere", "./models/Qwen3", "models/qwen/Qwen3", f"{tmp_path}/m/Qwen"):
        with pytest.raises(ConfigError, match="does not exist"):
            load_model_config(path)
    assert not silent
    for path in ("models/Qwen3-0.6b", "owner/another"):
        with pytest.raises(ConfigError, match="does not answer"):
            load_model_config(path)
    assert len(silent) <= 1, "tested once per process"


def test_missing_and_damaged_weights_are_named(tmp_path: Path) -> None:
    def fault() -> str:
        return missing_weights(str(tmp_path))

    assert missing_weights("owner/model") == ""
    assert "no weights" in fault()
    parts = [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    for name in parts:
        save_file({"w": torch.zeros(8)}, tmp_path / name)
    index = tmp_path / hub.INDEX
    index.write_text(json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(parts)}}))
    assert fault() == ""
    whole = (tmp_path / parts[1]).read_bytes()
    pointer = hub._LFS + b"/spec/v1\noid sha256:00\nsize 4000000000\n"
    for content in (whole[:-4], whole[:20], b"", pointer, whole[:8] + b"?" + whole[9:]):
        (tmp_path / parts[1]).write_bytes(content)
        assert fault().startswith(f"{parts[1]}: ")
    for name in parts[1:]:
        (tmp_path / name).unlink()
    assert f"4 of 5 weight files are missing, such as {parts[1]}" in fault()
    for content in ("{}", "[]", "?", '{"weight_map": {"w": 3}}', '{"weight_map": {"w": "../w"}}'):
        index.write_text(content)
        with pytest.raises(ConfigError, match="index"):
            fault()


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize(
    ("prefix", "family", "knobs", "named"),
    [
        ("own.", "qwen3", {}, "36 of 36 tensors"),
        ("", "qwen3", LLAMA, "k_norm.weight"),
        ("", "llama", QWEN3, "6 of 36 tensors .*[qk]_norm"),
        ("", "qwen3", {"intermediate_size": 64}, r"down_proj\.weight .*\[32, 32\]"),
    ],
)
def test_mismatched_weights_are_refused(
    prefix: str, family: str, knobs: dict[str, Any], named: str, tmp_path: Path
) -> None:
    build(family, tie_word_embeddings=False).save_pretrained(tmp_path)
    config, whole = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | knobs))
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(whole).items()}
    save_file(tensors, whole, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"config.json .*{named}"):
        trainable_facts(str(tmp_path), load_model_config(str(tmp_path)))


def test_text_part_of_a_hybrid_model_is_asked_for() -> None:
    config = AutoConfig.for_model("qwen3_5", architectures=["Qwen3_5ForConditionalGeneration"])
    with pytest.raises(ConfigError, match="Save its text part"):
        load._check_causal(config, "Qwen/Qwen3.5-4B")


def test_adapters_fit_the_model() -> None:
    facts = facts_of(GemmaConfig(num_hidden_layers=1))
    check_adapters(LoraConfig(rank=4), facts)
    for wrong in (
        LoraConfig(rank=4, targets=("q_proj", "o_porj")),
        LoraConfig(rank=4, targets=("lm_head",)),
        LoraConfig(rank=4, targets=("experts",)),
        LoraConfig(rank=facts.hidden_size + 1),
    ):
        with pytest.raises(ConfigError, match=r"model\.lora"):
            check_adapters(wrong, facts)
    mixture = facts_of(Qwen3MoeConfig())
    for targets in (("q_proj", "up_proj"), ("experts",)):
        check_adapters(LoraConfig(rank=4, targets=targets), mixture)
    with pytest.raises(
        ConfigError, match=r"no layer q_proj .* It has o_proj, qkv_proj.*Leave targets empty"
    ):
        check_adapters(LoraConfig(rank=4, targets=("q_proj",)), facts_of(Phi3Config()))
    with pytest.raises(ConfigError, match="no linear layers"):
        check_adapters(LoraConfig(rank=4), facts_of(GPT2Config()))


MAX_S = 60.0
"""Well above the limits of a template."""
MAX_BYTES = 2 * 2**30


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("model"), build_tokenizer()
    build("qwen3", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


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


def test_configs_out_of_range_are_refused(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    for knobs, named in (
        ({"hidden_size": 10**9}, "hidden_size"),
        ({"intermediate_size": float("nan")}, "intermediate_size"),
        ({"text_config": {"num_experts": 10**9}}, "num_experts"),
        ({"layer_types": ["full_attention"] * 10**5}, "layer_types"),
        ({"model_type": "\x1b[2Jllama"}, "model_type"),
        ({"hidden_size": "large"}, "hidden_size"),
    ):
        (folder / "config.json").write_text(json.dumps(json.loads(config) | knobs))
        assert named in refused(folder).replace("\\n", "\n")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_endless_templates_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_CPU_S", 0)
    for template in (LOOPS, "{{ 'a' * 10000000000 }}", "{{ 'a' * 5000000 }}"):
        (folder / "chat_template.jinja").write_text(template)
        assert "chat template" in refused(folder)
    recursive = "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}"
    (folder / "chat_template.jinja").write_text(recursive)
    checked(folder)


TENSOR = {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}


def test_damaged_weights_are_refused(folder: Path) -> None:
    for header in (
        [TENSOR],
        {"a": {"dtype": "F32", "data_offsets": [0, 32]}},
        {"a": {**TENSOR, "shape": [2**62, 4]}},
        {"a": {**TENSOR, "data_offsets": [-4, 28]}},
        {"a": TENSOR, "b": {**TENSOR, "data_offsets": [16, 48]}},
    ):
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + bytes(32)
        (folder / "model.safetensors").write_bytes(content)
        assert refused(folder).startswith("model.safetensors: ")


def test_non_finite_weights_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight .*not finite"):
        load_policy(str(folder), torch.float32)


def test_tied_configs_with_separate_heads_are_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    assert "tie_word_embeddings" in refused(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checked(folder)
