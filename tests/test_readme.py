"""Every fenced block of README.md runs, or matches real output."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from keel.commands.cli import main
from keel.configs.load import load_config
from keel.model.tiny.tokenizer import build_tokenizer
from tests.model.stand_in import stand_in
from tests.trainer.machines import NOTHING, Accepted, Machine, at

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = [
    (language, text.rstrip("\n"))
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
]


QUICK = ["data.sources[logic].size=40", "data.sources[logic].holdout=16"]
"""Use fewer puzzles; making twenty thousand is slow."""


def block(start: str) -> str:
    """The only block that starts with this text."""
    (text,) = [text for _, text in BLOCKS if text.lstrip().startswith(start)]
    return text


def commands(text: str) -> Iterator[list[str]]:
    """Lines of a block, split like a shell does, without comments."""
    for line in text.splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def test_named_paths_exist() -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", TEXT)
    files = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", TEXT)
    assert len(links) > 20 and len(files) > 4
    assert [path for path in (*links, *files) if not (ROOT / path).exists()] == []


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with README's `my.yaml`, its data, and a model of its shape with empty weights."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my.yaml").write_text(block("# my.yaml"))
    (line,) = re.findall(r"A line of `school.jsonl` is `([^`]*)`", TEXT)
    lines = [
        json.dumps({**json.loads(line), "prompt": f"What is 42 + {i} - {i}?"}) for i in range(300)
    ]
    (folder / "school.jsonl").write_text("\n".join(lines))
    model = folder / "Qwen3-30B-A3B"
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        max_position_embeddings=40_960,
    ).save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    stand_in(model)
    return folder


def test_my_yaml_is_accepted_for_its_hardware(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the block's commands in order: `check` without a GPU, `train` and `eval` on the hardware
    of my.yaml, up to the engines."""
    monkeypatch.chdir(mine)
    config = load_config("my.yaml")
    assert Path(config.model.path).name == "Qwen3-30B-A3B"
    model = f"model.path={mine / 'Qwen3-30B-A3B'}"
    node = Machine(gpus=config.run.gpus_per_node, nodes=config.run.nodes, gib=config.run.gpu_gib)
    seen: list[str] = []
    for _, command, *arguments in commands(block("keel check my.yaml")):
        seen.append(command)
        if command == "check":
            with at(NOTHING):
                assert main([command, *arguments, model, *QUICK]) == 0, capsys.readouterr().err
        else:
            with at(node), pytest.raises(Accepted):
                main([command, *arguments, model, *QUICK])
    assert seen == ["check", "train", "eval"]
    output = capsys.readouterr().out
    assert "1 node(s) of 8 GPU(s), 139.0 GiB each" in output
    assert "8 trainer rank(s)" in output, output
    assert "school (school.jsonl): 100 to train on, 200 held out" in output
