"""Conversations that a function of the user's scripts: the documentation's, and what goes wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from keel.configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    EmbeddedConfig,
    EnvironmentConfig,
    SourceConfig,
)
from keel.model.embedded.cache import content_key
from keel.model.embedded.scripted import demonstrate
from tests.agents.test_environments_guide import BLOCK, GUIDE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the files of the page on environments."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in BLOCK.findall(GUIDE.read_text()):
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return tmp_path


def of(folder: Path, demonstrations: str = "demos:shopping") -> Config:
    environment = EnvironmentConfig(
        target="shop:Shop",
        demonstrations=demonstrations,
        folder=str(folder),
        arguments={"stalls": 4},
    )
    source = SourceConfig(name="shop", source="environment", size=9, environment=environment)
    return Config(data=DataConfig(sources=(source,)))


def test_those_of_the_documentation(folder: Path) -> None:
    shown = demonstrate(of(folder), "shop", 3)
    assert len(shown) == 3
    for one in shown:
        assert sorted(tool.name for tool in one.tools) == ["ask", "buy"]
        said = [message for message in one.worked if message["role"] == "assistant"]
        assert [call["tool_calls"][0]["function"]["name"] for call in said] == [*4 * ["ask"], "buy"]
        prices = [int(each["content"]) for each in one.worked if each["role"] == "tool"]
        best = said[-1]["tool_calls"][0]["function"]["arguments"]["stall"]
        assert best == f"stall {prices.index(min(prices))}"
        assert len(one.hasty) == 2


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("none:made", "", "ModuleNotFoundError: No module named 'none'"),
        ("odd:made", "", "AttributeError: .* no attribute 'made'"),
        ("odd:made", "def made(count, *, seed, arguments): return 1 / 0", "ZeroDivisionError"),
        (
            "odd:made",
            "def made(count, *, seed, arguments): return [{}]",
            "TypeError: {} has no tools and no worked",
        ),
        ("odd:made", "raise SystemExit('not here')", "SystemExit: not here"),
    ],
)
def test_what_goes_wrong_is_named(
    name: str, text: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    (folder / "odd.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"data\.sources\[shop\]\.env.*'{name}': {why}"):
        demonstrate(of(folder, name), "shop", 3)


def test_other_scripts_make_another_model(folder: Path) -> None:
    def key(demonstrations: str) -> str:
        return content_key(EmbeddedConfig(), 0, of(folder, demonstrations).data.sources, ())

    first = key("demos:shopping")
    with (folder / "demos.py").open("a") as file:
        file.write("# shorter\n")
    assert key("demos:shopping") != first
    assert key("none:made") == key("none:made")  # is refused when it is to be called
