"""What is wrong with a model's folder or name is said at once, and before anything is loaded."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    BloomConfig,
    MambaConfig,
    MptConfig,
    NemotronConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    RwkvConfig,
)

from keel.configs.schema import ConfigError
from keel.model import hub as source
from keel.model.hub import (
    check_path,
    check_tokenizer_files,
    hub_answers,
    hub_options,
    missing_weights,
)
from keel.model.load import load_model_config, load_tokenizer
from keel.model.trainable import trainable_facts


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    hub_answers.cache_clear()
    yield
    hub_answers.cache_clear()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A hub that takes a request and never answers, and a name that takes long to look up. Returns
    when it was asked."""

    asked: list[float] = []

    def hangs(*_: Any, **__: Any) -> None:
        asked.append(time.monotonic())
        time.sleep(1000)
        raise URLError("nobody waits any more")

    monkeypatch.setattr(source, "HUB_S", 0.05)
    monkeypatch.setattr(source, "urlopen", hangs)
    return asked


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model_config(path)
    return str(caught.value)


def test_a_mistyped_folder_is_named_and_nobody_waits_for_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: list[float]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "Qwen3-0.6B").mkdir(parents=True)
    for path in (
        "/models/nowhere",
        "./models/Qwen3",
        "models/qwen/Qwen3",
        f"{tmp_path}/models/Qwen",
    ):
        assert "does not exist" in refused(path)
    assert "(models has Qwen3-0.6B)" in refused("./models/Qwen3-0.6b")
    assert not silent, "no hub is asked about what cannot be a hub name"
    said = refused("models/Qwen3-0.6b")
    assert "is no folder here (models has Qwen3-0.6B), and the hub" in said
    assert "does not answer" in said
    refused("owner/another")
    assert len(silent) <= 1, "once a process"


@pytest.mark.usefixtures("silent")
def test_what_was_downloaded_before_needs_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "try_to_load_from_cache", lambda path, name: "/cache/config.json")
    check_path("owner/model")
    assert hub_options("owner/model") == {
        "trust_remote_code": False,
        "local_files_only": True,
    }


def test_a_hub_that_answers_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Answer:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def answers(request: Any, timeout: float) -> Answer:
        asked.append(request.full_url)
        return Answer()

    monkeypatch.setattr(source.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(source, "urlopen", answers)
    for name in ("owner/model", "owner/other"):
        check_path(name)
        assert hub_options(name) == {"trust_remote_code": False}
    assert asked == [source.constants.ENDPOINT]


def test_a_home_folder_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert f"write it out, '{tmp_path}/m'" in refused("~/m")


def test_a_folder_without_a_tokenizer_is_called_that(tmp_path: Path) -> None:
    BloomConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no tokenizer \(tokenizer\.json, "):
        load_tokenizer(str(tmp_path))


def test_a_run_and_a_checkpoint_are_called_that(tmp_path: Path) -> None:
    step = tmp_path / "checkpoints/step_000004"
    step.mkdir(parents=True)
    (tmp_path / "config.yaml").touch()
    for folder, what in (
        (tmp_path, "the folder of a run"),
        (step, "a checkpoint, which is no mod"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_tokenizer_files(str(folder))
        said = str(caught.value)
        assert f"{str(folder)!r} is {what}" in said and f"is {str(tmp_path / 'model')!r}" in said


def test_weights_that_are_not_there_or_not_whole(tmp_path: Path) -> None:
    def said() -> str:
        return missing_weights(str(tmp_path))

    assert missing_weights("owner/model") == ""
    assert "holds no weights" in said()
    parts = [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    for name in parts:
        save_file({"w": torch.zeros(8)}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(parts)}}))
    assert said() == ""
    whole = (tmp_path / parts[1]).read_bytes()
    for content, fault in (
        (whole[:-4], "not a whole safetensors file"),
        (whole[:20], "not a whole safetensors file"),
        (b"", "not a whole safetensors file"),
        (source.LFS + b"/spec/v1\noid sha256:00\nsize 4000000000\n", "pointer of Git LFS"),
        (whole[:8] + b"?" + whole[9:], "not a whole safetensors file"),
    ):
        (tmp_path / parts[1]).write_bytes(content)
        assert said().startswith(f"{parts[1]}: ") and fault in said()
    for name in parts[1:]:
        (tmp_path / name).unlink()
    assert f"{parts[3]} and 1 more of the 5 files that {index.name} names are missing" in said()
    for content in ("{}", "[]", "?", '{"weight_map": {"w": 3}}', '{"weight_map": {"w": "../w"}}'):
        index.write_text(content)
        with pytest.raises(ConfigError, match="not an index of weights"):
            said()


OTHERS = {
    "model-00001-of-00002.safetensors": "without model.safetensors.index.json, which says",
    "model.fp16.safetensors": "transformers looks for model.safetensors; if this is the whole",
    "adapter_model.safetensors": "an adapter and no model; merge it into its base model",
    "consolidated.safetensors": "in its maker's own format",
    "pytorch_model.bin": "the engine reads safetensors alone",
    "pytorch_model-00001-of-00002.bin": "the engine reads safetensors alone",
}


@pytest.mark.parametrize("name", OTHERS)
def test_weights_that_transformers_or_the_engine_would_not_find(name: str, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(8)}, tmp_path / name)
    said = missing_weights(str(tmp_path))
    assert said.startswith("it holds no weights (model.safetensors, or its parts and ")
    assert f". There is {name}: {OTHERS[name]}" in said
    save_file({"w": torch.zeros(8)}, tmp_path / source.WHOLE)
    beside = missing_weights(str(tmp_path))
    if name.startswith(("model", "adapter")):  # vLLM would load an adapter's tensors as the model's
        assert beside.startswith(f"{name} beside {source.WHOLE}: without an index vLLM reads both")
    else:
        assert beside == ""
    index = json.dumps({"weight_map": {"w": source.WHOLE}})
    (tmp_path / source.INDEX).write_text(index)
    assert missing_weights(str(tmp_path)) == ""


def test_an_index_of_other_files_beside_a_whole_model(tmp_path: Path) -> None:
    """transformers loads the model and never looks; vLLM refuses to start."""
    save_file({"w": torch.zeros(8)}, tmp_path / source.WHOLE)
    index, part = tmp_path / source.INDEX, "model-00001-of-00001.safetensors"
    index.write_text(json.dumps({"weight_map": {"w": part}}))
    said = missing_weights(str(tmp_path))
    assert f"{part} of the 1 files that {source.INDEX} names are missing" in said
    assert "vLLM goes by the index; delete it if model.safetensors is the whole model" in said
    save_file({"w": torch.zeros(8)}, tmp_path / part)
    assert missing_weights(str(tmp_path)) == ""


def test_a_half_copied_cache_of_links_is_called_that(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", source.WHOLE):
        (tmp_path / name).symlink_to(f"../../blobs/{name}")
    assert missing_weights(str(tmp_path)).startswith(f"{source.WHOLE}: a link to a file that is no")
    assert "config.json: a link to a file that is not there" in refused(str(tmp_path))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: a link to a file that is not there"):
        load_tokenizer(str(tmp_path))


def test_a_family_that_nobody_knows_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "foo_bar"}')
    said = refused(str(tmp_path))
    assert f"{str(tmp_path)!r}: models of type foo_bar are not known here: " in said
    assert "Decoders like Llama" in said and "\n" not in said and "pip" not in said
    (tmp_path / "config.json").write_text(
        '{"model_type": "foo_bar", "auto_map": {"AutoConfig": "a.B"}}'
    )
    assert "is code of its own, and Keel runs none" in refused(str(tmp_path))


FAMILIES: dict[str, tuple[PreTrainedConfig, str]] = {
    "mamba": (
        MambaConfig(num_hidden_layers=2),
        "carry state from one packed segment into the next",
    ),
    "qwen3_next": (Qwen3NextConfig(num_hidden_layers=4), "carry state from one packed segment"),
    "mpt": (MptConfig(n_layers=2), "does not go through transformers' attention interface"),
    "bloom": (BloomConfig(n_layer=2), "does not go through transformers' attention interface"),
    "rwkv": (RwkvConfig(num_hidden_layers=2), "attention interface"),
    "nemotron": (NemotronConfig(num_hidden_layers=2), "are not known here"),
}


@pytest.mark.e2e
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_cannot_be_trained_is_named_with_the_reason(family: str) -> None:
    config, reason = FAMILIES[family]
    with pytest.raises(ConfigError, match=reason) as raised:
        trainable_facts("some/model", config)
    assert f"of type {family}" in str(raised.value)
    assert "model.path = 'some/model'" in str(raised.value)
