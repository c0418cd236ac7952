"""Every fenced block of README.md runs, or matches real output."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from keel.commands.cli import main, parser
from keel.configs.load import load_config, load_distillation
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.prepare import prepare
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.session import closing_summary
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
FEW = [f"data.sources.{i}.{knob}" for i in (0, 1) for knob in ("size=32", "holdout=8")]


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


@pytest.mark.e2e
def test_make_commands_are_makefile_targets() -> None:
    """Running `make test` here would recurse, so make prints the commands only."""
    for words in commands(block("make")):
        assert words[0] == "make" and len(words) == 2
        done = subprocess.run(
            ["make", "--dry-run", words[1]], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        program = {"quickstart": "keel train quickstart", "test": "pytest"}[words[1]]
        assert program in done.stdout


def test_closing_lines_match_the_summary(tmp_path: Path) -> None:
    """Render the summary of a run with the scores shown in the block."""
    shown = block("held-out").splitlines()
    pattern = r"held-out (\S+): ([\d.]+) at step (\d+), ([\d.]+) at step (\d+) \(([+-][\d.]+)\)"
    found = [re.fullmatch(pattern, line) for line in shown[:-1]]
    scores = [match.groups() for match in found if match]
    assert len(scores) == len(shown) - 1 > 1
    config = prepare("quickstart", [f"run.dir={tmp_path}", *FEW]).config
    assert {name.split("/")[0] for name, *_ in scores} == {s.name for s in config.data.sources}
    steps: list[dict[str, float]] = [
        {"step": int(scores[0][at]), **{f"eval/{row[0]}": float(row[at - 1]) for row in scores}}
        for at in (2, 4)
    ]
    assert steps[-1]["step"] == config.run.steps
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    summary = closing_summary(RunFolder(config), config, config.run.steps, ["train", "quickstart"])
    differences = [float(number) for number in re.findall(r"\(([+-][\d.]+)\)", summary)]
    assert differences == pytest.approx([float(row[-1]) for row in scores], abs=0.0011)
    assert re.sub(r"\([^)]*\)", "", "\n".join(shown[:-1])) in re.sub(r"\([^)]*\)", "", summary)
    assert re.search(r"^trained model   \S+/model$", summary, flags=re.MULTILINE)
    assert re.fullmatch(r"trained model   runs/quickstart\S*/model", shown[-1])


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
    # Searching for what would help takes a second or two.
    monkeypatch.setattr("keel.trainer.placement.layouts.SUGGESTIONS_TRIED", 1)
    with at(NOTHING):
        assert main(["check", "my.yaml", model, *QUICK, "run.gpu_gib=70"]) == 0
        assert main(["check", "my.yaml", model, *QUICK, "run.gpu_gib=16"]) == 2
    assert "needs" in (error := capsys.readouterr().err) and "run.gpu_gib" in error


def test_other_commands_parse() -> None:
    parsed = [parser().parse_args(words) for _, *words in commands(block("keel new"))]
    recipes = [arguments.recipe for arguments in parsed if arguments.command == "distill"]
    assert len(parsed) > 5 and load_distillation(recipes[0]).dir == "runs/distill"


def test_job_is_a_valid_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/e2e/test_job.py submits such a job to a cluster."""
    *_, start, submit = commands(block("export RAY_AUTH_MODE"))
    assert start == ["ray", "start", "--head"]
    assert submit[:5] == ["ray", "job", "submit", "--", "keel"]
    arguments = [word.replace("$PWD", str(tmp_path)) for word in submit[6:]]
    assert submit[5] == "train"
    assert main(["check", *arguments, *FEW, "run.device=cpu"]) == 0, capsys.readouterr().err
