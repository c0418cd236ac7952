"""Models without a chat template, with another one, or with missing files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen3Config

from keel.configs.load import dump_config, load_config
from keel.configs.schema import ConfigError
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rollout.engine.conversion import render_prompt
from keel.rollout.spec import EngineSpec
from keel.trainer.engine.export import write_tokenizer
from keel.trainer.prepare import prepare
from tests.model.stand_in import stand_in

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
ROWS = '{"problem": "1 + 1 =", "answer": "2", "level": 1}\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe for a base model."""
    shape = {"vocab_size": 288, "hidden_size": 64, "num_hidden_layers": 2}
    Qwen3Config(architectures=["Qwen3ForCausalLM"], **shape).save_pretrained(tmp_path)
    stand_in(tmp_path)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "sums.jsonl").write_text(ROWS)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    source = {"name": "sums", "source": "file", "path": str(tmp_path / "sums.jsonl")}
    source |= {"columns": {"prompt": "problem"}}  # type: ignore[dict-item]
    whole: dict[str, Any] = {
        "model": {"path": str(tmp_path)},
        "data": {"sources": [source]},
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "rollout": {"sampling": {"stop": ["\n\n"]}},
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(whole))
    return path


def test_chat_template_reaches_engines_and_export(recipe: Path, tmp_path: Path) -> None:
    task = prepare(str(recipe), [f"model.chat_template={tmp_path}/chat.jinja"])
    assert task.notes["chats"].startswith("written by model.chat_template")
    config, (prompt,) = task.config, task.dataset.train.sources["sums"]
    ids = render_prompt(task.tokenizer, prompt).token_ids
    assert task.tokenizer.decode(ids) == "<user>1 + 1 =\n<assistant>"
    assert EngineSpec.of(config, "model").chat_template == TEMPLATE
    write_tokenizer(tmp_path / "out", str(tmp_path), config.model.chat_template)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE
    write_tokenizer(tmp_path / "as it is", str(tmp_path))
    assert AutoTokenizer.from_pretrained(tmp_path / "as it is").chat_template is None
    (tmp_path / "chat.jinja").unlink()  # the run saved its text
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(config))
    assert load_config(written) == config


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\\n{% for m in %}", r"model\.chat_template, line 2"),
        (
            "{% if messages[0].content != 'Hello.' %}{{ raise_exception('too odd') }}{% endif %}"
            "{{ messages[0].content }}",
            r"prompt sums/1.*too odd.*model\.chat_template",
        ),
    ],
)
def test_invalid_templates_are_refused(template: str, words: str, recipe: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(str(recipe), [f"model.chat_template={json.dumps(template)}".replace("\\\\", "\\")])
