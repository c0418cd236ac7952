"""`keel eval` and `keel compare` with scripted engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.commands.cli import main
from keel.trainer.prepare import prepare
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from tests.commands.conftest import Fake

FEW = (
    "data.sources[spelling].size=12",
    "data.sources[spiral].size=12",
    "data.sources[spelling].holdout=4",
    "data.sources[spiral].holdout=4",
    "eval.samples=4",
    "algorithm.group_size=3",
)


def of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())["results"]


def test_results_of_each_set_and_domain(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW, "eval.submissions=1")
    assert main(["eval", *words]) == 0
    out = capsys.readouterr().out
    report = of(tmp_path / "eval" / "base")["recipe"]
    heldout = prepare("quickstart", words[1:]).dataset.heldout
    passes = [
        min(int(p.prompt_id.rpartition("/")[2]) % 4, 3) for p in heldout["spelling"]
    ]  # by hand: groups of three and of one, the last completion late
    spelling = report["spelling"]
    assert spelling["pass@1"] == pytest.approx(sum(passes) / 16)
    assert spelling["pass@4"] == pytest.approx(np.mean([n > 0 for n in passes]))
    assert spelling["unscored"] == 4 and spelling["completions"] == 16
    assert (spelling["tokens_mean"], spelling["tokens_most"]) == (4, 5)
    assert spelling["cut"] == pytest.approx(1 / 3)
    low, high = spelling["pass@1_interval"]
    assert low < spelling["pass@1"] < high
    # The first is cut off, and the second is then the one that is handed in.
    numbers = [int(p.prompt_id.rpartition("/")[2]) % 4 for p in heldout["spelling"]]
    assert spelling["contest"] == pytest.approx(np.mean([n > 1 for n in numbers]))
    assert report["all"]["prompts"] == 8 and set(report) >= {"spelling", "spiral", "all"}
    warned = f"run.dir = {tmp_path} has no checkpoint"
    for word in ("pass@2", "maj@4", "contest", "95 %", "8 completions missing", warned):
        assert word in out
    assert "\nsampling with model.path = tiny\n" in out
    line = json.loads((tmp_path / "eval/base/samples.jsonl").read_text().splitlines()[0])
    assert line["samples"][1]["thinking"] == 2
    assert line["samples"][1]["answer"] == "no 1" and line["missing"] == ["late: too slow"]


def test_stopped_evaluation_resumes(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    fake.stop_after = 7  # in the middle of a prompt
    assert main(["eval", *words]) == 130
    table = tmp_path / "eval/base/samples.jsonl"
    with table.open("ab") as file:
        file.write('{"variant": "é'.encode()[:-1])  # in the middle of a character
    done = table.read_bytes().count(b"\n")
    fake.stop_after, before = 10**9, len(fake.asked)
    assert main(["eval", *words]) == 0
    assert len(fake.asked) - before == 2 * (8 - done)
    assert len(table.read_text().splitlines()) == 8
    ended = table.read_bytes()
    assert main(["eval", *words, "eval.temperature=0.5"]) == 0
    assert main(["eval", *words]) == 0
    assert {p.name for p in (tmp_path / "eval").iterdir()} == {"base", "base.2", "base.3"}
    assert table.read_bytes() == ended
    capsys.readouterr()
    assert main(["eval", *words, f"eval.dir={tmp_path / 'eval/base'}"]) == 2
    assert "holds an evaluation that has ended" in capsys.readouterr().err


def test_checkpoints_by_name(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    trained = prepare("quickstart", words[1:]).config
    with RunFolder(trained) as folder:
        for step in (2, 4):
            digest, of = config_digest(trained), "another" if step == 4 else ""
            state = State(step=step, version=step, cursor={}, config=digest, tokenizer=of)
            folder.save(state, lambda path: {})
    assert main(["eval", *words]) == 0
    message = "warning: model.path = 'tiny' has another tokenizer or chat template than when step_"
    assert message in capsys.readouterr().out
    assert main(["eval", *words, "eval.checkpoint='2'"]) == 0
    assert main(["eval", *words, "eval.checkpoint=base", "data.only=[spiral]"]) == 0
    assert fake.loaded == ["step_000004", "step_000002"]
    assert {p.name for p in (tmp_path / "eval").iterdir()} == {"step_000004", "step_000002", "base"}
    assert main(["eval", *words, "eval.checkpoint='3'"]) == 2
    assert "has checkpoints of steps: 2, 4" in capsys.readouterr().err


def test_two_evaluations_compared(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["eval", *words, f"eval.dir={one}"]) == 0
    fake.skill = 1
    assert main(["eval", *words, f"eval.dir={two}", f"eval.against={one}"]) == 0
    out = capsys.readouterr().out
    assert f"− {one}:" in out
    assert main(["compare", str(one), str(two)]) == 0
    head, *table = capsys.readouterr().out.splitlines()
    assert head == f"{two} − {one}:" and "\n".join(table) in out
    name, pairs, difference = table[-1].split()[:3]
    rates = [of(folder)["recipe"]["all"]["pass@1"] for folder in (one, two)]
    assert (name, pairs) == ("all", "8") and rates[1] > rates[0]
    assert float(difference) == pytest.approx(rates[1] - rates[0], abs=1e-3)
    assert main(["compare", str(one), str(tmp_path)]) == 2
    assert "cannot be read as an evaluation" in capsys.readouterr().err
    ways = "eval.variants=[{name: plain, thinking: without}]"
    assert main(["eval", *words, ways, f"eval.against={one}"]) == 2
    assert "it has other variants (recipe)" in capsys.readouterr().err, "and nothing was sampled"
    other = (*words, "run.seed=3", f"eval.dir={tmp_path / 'three'}", f"eval.against={one}")
    assert main(["eval", *other]) == 2
    assert "it has another prompt called" in capsys.readouterr().err


def test_training_prompts_can_be_evaluated(fake: Fake, tmp_path: Path) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    assert main(["eval", *words, "eval.prompts=train", "eval.size=3"]) == 0
    dataset = prepare("quickstart", words[1:]).dataset
    asked = {prompt.prompt_id for prompt, _ in fake.asked}
    assert asked == {p.prompt_id for some in dataset.train.sources.values() for p in some[:3]}
    assert not asked & {p.prompt_id for some in dataset.heldout.values() for p in some}
