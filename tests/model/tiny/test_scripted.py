"""Conversations that a function of the user's scripts: the documentation's, and what goes wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from keel.configs.schema import (
    ColdStartConfig,
    Config,
    ConfigError,
    DataConfig,
    EnvironmentConfig,
    SourceConfig,
    TinyModelConfig,
)
from keel.model.tiny.cache import content_key
from keel.model.tiny.cold_start import Curriculum, Example, make_examples
from keel.model.tiny.scripted import demonstrate, demonstrator, digest_of
from keel.model.tiny.tokenizer import build_tokenizer
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


def test_keels_own_scripts_import_nothing_from_the_folder(folder: Path) -> None:
    own = "keel.agents.environments.demonstrations:guess_demonstrations"
    (source,) = of(folder, own).data.sources
    assert demonstrator(source) and not digest_of(source)
    assert str(folder) not in sys.path


def test_other_scripts_make_another_model(folder: Path) -> None:
    def key(demonstrations: str) -> str:
        sources = of(folder, demonstrations).data.sources
        return content_key(TinyModelConfig(), Curriculum(seed=0, sources=sources))

    first = key("demos:shopping")
    with (folder / "demos.py").open("a") as file:
        file.write("# shorter\n")
    assert key("demos:shopping") != first
    assert key("none:made") == key("none:made")  # is refused when it is to be called

    at_first = key("demos:shopping")
    with (folder / "shop.py").open("a") as file:
        file.write("# other prices\n")
    assert key("demos:shopping") != at_first


SAID = """
from types import SimpleNamespace
from keel.rl.turns import ToolSpec

asks = {"role": "user", "content": "Buy."}
says = {"role": "assistant", "content": "Done."}
schema = {"type": "object", "properties": {}}
tools = (ToolSpec(name="ask", description="", parameters=schema),)


def calls(name, arguments):
    function = {"name": name, "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def shown(*worked, tools=tools):
    return SimpleNamespace(tools=tools, worked=worked, hasty=(asks, says))


def made(count, *, seed, arguments):
    good = shown(asks, says)
"""


def script(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    (folder / "odd.py").write_text(f"{SAID}    {body}\n")
    return of(folder, "odd:made")


def examples_of(config: Config, max_context: int | None = None) -> list[Example]:
    curriculum = Curriculum(
        seed=0, sources=config.data.sources, demonstrate=partial(demonstrate, config)
    )
    return make_examples(curriculum, build_tokenizer(), count=3, max_context=max_context)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return [good, shown('Buy.', says)]", "AttributeError: 'str'"),
        ("return [good, shown({'content': 'Buy.'}, says)]", "KeyError: 'role'"),
        ("return [good, shown(asks)]", "ValueError: .* nothing to learn"),
        ("return [good, shown(asks, says, tools=None)]", "TypeError: 'NoneType'"),
        ("return [good, shown(asks, says, tools=[{}])]", "AttributeError: 'dict'"),
        ("return [good, shown(asks, calls('ask', '{}'))]", "UndefinedError: "),
        ("return [good, shown(asks, calls('sell', {}))]", "it calls 'sell', .* tools are ask"),
        ("return [good, shown(asks, {**says, 'content': '\\ud800'})]", "TypeError: "),
        (
            "return [good, shown(asks, {**says, 'content': 'x' * 999})]",
            "tokens, .*context = 9",
        ),
    ],
)
def test_a_conversation_that_cannot_be_shown_is_named(
    body: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = script(folder, body, monkeypatch)
    with pytest.raises(ConfigError, match=rf"'odd:made': `worked` of conversation 1: .*{why}"):
        examples_of(config, max_context=99)


@pytest.mark.parametrize("name", ["demos", "json"])
def test_a_file_that_another_module_hides_is_named(
    name: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One of another source, or of a library."""
    demonstrate(of(folder), "shop", 3)
    other = tmp_path_factory.mktemp("other")
    (other / f"{name}.py").write_text("made = lambda *_, **__: []")
    config = of(other, f"{name}:made")
    said = rf"ImportError: {name} is /.*{name}.*rename the"
    with pytest.raises(ConfigError, match=said):
        demonstrate(config, "shop", 3)
    with pytest.raises(ConfigError, match=said):
        digest_of(config.data.sources[0])


def test_it_cannot_change_the_arguments_of_episodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = script(folder, "arguments.clear(); return [good]", monkeypatch)
    assert len(examples_of(config)) == 1
    assert config.data.sources[0].environment.arguments == {"stalls": 4}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import time; time.sleep(30)", "TimeoutError: .*max_seconds = 0.5; a script must end"),
        ("raise TimeoutError('mine')", "TimeoutError: mine"),
        ("yield from iter(lambda: good, None)", "ValueError: it made more than 300, and 3 were"),
    ],
)
def test_one_that_does_not_end(
    body: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = script(folder, body, monkeypatch)
    brief = ColdStartConfig(max_seconds=0.5)
    config = replace(config, model=replace(config.model, tiny=TinyModelConfig(cold_start=brief)))
    with pytest.raises(ConfigError, match=rf"'odd:made': {why}"):
        demonstrate(config, "shop", 3)
