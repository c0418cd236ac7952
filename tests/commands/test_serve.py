"""`keel serve` and `keel chat`: model choice and vLLM options."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from keel.commands import chat, serve
from keel.commands.serve import server_options
from keel.configs.dump import dump_config
from keel.configs.load import load_config
from keel.configs.schema import ConfigError


def write_run(folder: Path, *overrides: str, model: bool = True, checkpoint: int = 0) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(load_config("quickstart", overrides)))
    if model:
        write_model(folder / "model")
    if checkpoint:
        saved = folder / "checkpoints" / f"step_{checkpoint:06d}"
        saved.mkdir(parents=True)
        (saved / "state.json").write_text("{}")
    return folder


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_export_keeps_name_and_sampling(tmp_path: Path) -> None:
    run = write_run(tmp_path / "school", "rollout.sampling.temperature=0.7")
    options = server_options(run)
    assert (options["model"], options["served_model_name"]) == (str(run / "model"), "school")
    sampling = options["override_generation_config"]
    assert sampling["temperature"] == 0.7 and sampling.keys() == {*serve._SAMPLING}
    assert server_options(run / "model") == options
    plain = server_options(write_model(tmp_path / "plain"))
    assert plain["served_model_name"] == "plain" and "override_generation_config" not in plain


def test_folder_without_model_is_refused(tmp_path: Path) -> None:
    begun = write_run(tmp_path / "begun", model=False)
    for path in (tmp_path, begun):
        with pytest.raises(ConfigError, match="neither"):
            server_options(path)
    with pytest.raises(ConfigError, match=r"run\.steps=40"):
        server_options(write_run(tmp_path / "saved", model=False, checkpoint=40))


def test_heads_without_a_cpu_kernel_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "hybrid")
    for key, value, served in ((128, 128, True), (16, 16, False), (128, 64, False)):
        heads = {"linear_key_head_dim": key, "linear_value_head_dim": value}
        (model / "config.json").write_text(json.dumps(heads))
        with nullcontext() if served else pytest.raises(ConfigError, match=f"heads of size {key}"):
            serve._check_heads(str(model))


def test_command_line_overrides_the_recipe(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "rollout.sampling.temperature=0.7")
    words = ["temperature=0.1", "thinking=false", "max-model-len=512", "enforce_eager=false"]
    options = server_options(run, words)
    assert options["override_generation_config"]["temperature"] == 0.1
    assert set(options["default_chat_template_kwargs"].values()) == {False}
    assert (options["max_model_len"], options["enforce_eager"]) == (512, False)
    assert not {"temperature", "thinking"} & options.keys()


class Completions:
    """Fails on the question "fail" and is interrupted at "stop"."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.parts: tuple[str | None, ...] = ("a ", None, "b")

    def create(self, *, messages: list[Any], **_: Any) -> Iterator[Any]:
        self.requests.append([message["content"] for message in messages])
        if "fail" in self.requests[-1]:
            raise openai.OpenAIError("no connection")
        for part in self.parts:
            if part == "b" and self.requests[-1][-1] == "stop":
                raise KeyboardInterrupt
            delta = SimpleNamespace(content=part)
            yield SimpleNamespace(choices=[SimpleNamespace(delta=delta)])


@pytest.fixture
def completions(monkeypatch: pytest.MonkeyPatch) -> Completions:
    completions = Completions()
    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=completions))

    @contextmanager
    def connected(*_: Any, **__: Any) -> Iterator[chat._ChatSession]:
        yield chat._ChatSession(client, "m")

    monkeypatch.setattr(chat, "_open_chat", connected)
    return completions


def test_conversation_continues_until_reset(
    completions: Completions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["one", "", "stop", "fail", "two", "/reset", "three"]

    def read(_: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    chat.chat(None, url="u", prompt=None, gpu=False)
    kept = ["one", "a b", "stop", "a "]
    requests = [kept[:1], kept[:3], [*kept, "fail"], [*kept, "two"], ["three"]]
    assert completions.requests == requests
    completions.parts = ("\x1b]52;c;eA==\x07a\r", "\x9b2J\tb\n", "क्\u200dष\u3000")
    capsys.readouterr()
    chat.chat(None, url="u", prompt="one", gpu=False)
    # No control characters are printed.
    assert capsys.readouterr().out == "]52;c;eA==a2J\tb\nक्\u200dष\u3000\n"
