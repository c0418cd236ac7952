"""Model folders and hub names are checked before anything is loaded."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file

from keel.configs.schema import ConfigError
from keel.model import hub
from keel.model.hub import hub_answers, missing_weights
from keel.model.load import load_model_config


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    hub_answers.cache_clear()
    yield
    hub_answers.cache_clear()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A hub that never answers; returns the times of requests."""
    requests: list[float] = []

    def hang(*_: Any, **__: Any) -> None:
        requests.append(time.monotonic())
        time.sleep(1000)
        raise URLError("too late")

    monkeypatch.setattr(hub, "HUB_S", 0.05)
    monkeypatch.setattr(hub, "urlopen", hang)
    return requests


def error_of(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model_config(path)
    return str(caught.value)


def test_missing_folders_do_not_wait_for_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: list[float]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("/models/nowhere", "./models/Qwen3", "models/qwen/Qwen3", f"{tmp_path}/m/Qwen"):
        assert "does not exist" in error_of(path)
    assert not silent
    for path in ("models/Qwen3-0.6b", "owner/another"):
        assert "does not answer" in error_of(path)
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
    for content, reason in (
        (whole[:-4], "not a complete safetensors file"),
        (whole[:20], "not a complete safetensors file"),
        (b"", "not a complete safetensors file"),
        (hub.LFS + b"/spec/v1\noid sha256:00\nsize 4000000000\n", "Git LFS"),
        (whole[:8] + b"?" + whole[9:], "not a complete safetensors file"),
    ):
        (tmp_path / parts[1]).write_bytes(content)
        assert fault().startswith(f"{parts[1]}: ") and reason in fault()
    for name in parts[1:]:
        (tmp_path / name).unlink()
    assert f"4 of 5 weight files are missing, such as {parts[1]}" in fault()
    for content in ("{}", "[]", "?", '{"weight_map": {"w": 3}}', '{"weight_map": {"w": "../w"}}'):
        index.write_text(content)
        with pytest.raises(ConfigError, match="index"):
            fault()
