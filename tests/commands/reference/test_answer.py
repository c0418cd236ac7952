"""`keel knobs`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from keel.commands.cli import main
from keel.commands.reference.answer import answer
from keel.commands.reference.knobs import flat
from keel.commands.reference.plain import PLAIN, plain
from keel.configs.schema import ConfigError


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            "trainer.lr",
            ["trainer.lr\n  Learning rate", "default    1e-6", "may have another value"],
        ),
        ("lr", ["trainer.lr\n", "model.tiny.cold_start.lr\n", "lr (metric)\n"]),
        ("run.steps", ["may have another value", "docs/learning.md"]),
        ("data.sources[sums].size", ["data.sources[].size\n", "0 to 10000000"]),
        ("data.sources.0.length.target", ["data.sources[].length.target\n"]),
        ("algorithm.mask_delta", ["null: off", "number, or null", "docs/stability.md"]),
        ("trainer", ["trainer\n  Ranks", "  lr: 1e-6 ", "  zero_stage: auto "]),
        ("data", ["data.sources[]\n", "data.sources[].environment\n"]),
        ("model", ["model.tiny\n", "Also: ", "rewards.judge.model"]),
        ("distill", ["  recipe: ", "distill.select\n", "  balance: 4 "]),
        ("select.least", ["of keel distill: select.least", "links that are not done"]),
        ("synthesize.budget", ["  tokens: 0 "]),
        ("usd", ["synthesize.budget.usd\n"]),
        ("mismatch/logp_abs", ["nats per token", "healthy  rounding", "alarms.mismatch"]),
        ("eval/sums/pass@1", ["eval/<set>/pass@1 (metric)", "docs/evaluation.md"]),
        ("mismatch", ["alarms.mismatch\n", "mismatch/ratio_max  "]),
        ("warmup", ["called warmup. In their names:", "trainer.warmup_steps\n", "  trainer.lr: "]),
        ("warm-up", ["trainer.warmup_steps\n", "In what is said of others:\n\n  trainer.lr: "]),
        ("trainer.warm", ["trainer.warmup_steps\n", "  trainer.schedule: constant  Decay"]),
        ("cosine", ["In what is said of them:", "  trainer.schedule: constant "]),
        ("gpu memory", ["rollout.gpu_memory_utilization\n"]),
        ("batch size", ["cold_start.batch_size\n", "Also: algorithm.prompts_per_step"]),
        ("max tokens", ["rollout.sampling.max_tokens: ", "data.sources[].budget.max_tokens: "]),
        ("max length", ["It is about:\n\n  data.max_prompt_tokens: ", "sft.max_context_tokens: "]),
        ("output dir", ["No knob is called output dir. It is about:\n\nrun.dir\n"]),
        ("precision", ["model.dtype\n", "rollout.dtype\n"]),
        ("trainer.lr run.steps", ["trainer.lr\n", "\n\nrun.steps\n"]),
        ("clip", ["clip/fraction (metric)", "Also: algorithm.clip_low, "]),
        ("checkpoint", ["eval.checkpoint\n", "Also: run.checkpoint_every, "]),
        ("batch", ["  rollout.max_num_batched_tokens: ", " more; docs/knobs.md has all"]),
        (".", ["  rollout.sampling "]),
        ("", ["  rollout.sampling ", "  distill.select ", "  synthesize.code ", "reward/mean"]),
    ],
)
def test_a_name_is_answered(asked: str, said: list[str]) -> None:
    text = answer(asked)
    assert [part for part in said if part not in text] == []
    assert max(map(len, text.splitlines())) <= 100


def test_plain_words_lead_to_knobs_and_are_none_themselves() -> None:
    names = {knob.name for knob in flat()}
    for words, knobs in PLAIN.items():
        assert words.replace(" ", "_") not in names and set(knobs) <= names, words
        assert plain(words.replace(" ", "_").upper()) == knobs
    assert plain("trainer.lr") == ()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("trainer.lrr", "did you mean trainer.lr?"),
        ("lrr", "did you mean trainer.lr or model.tiny.cold_start.lr?"),
        ("beta", "did you mean data.sources[].kl_coef?"),
        ("trianer.lr", "did you mean trainer?"),
        ("rollout.gpu_memory", "renamed to rollout.gpu_memory_utilization"),
        ("data.sources[sums].hold", "did you mean data.sources[].holdout?"),
        ("synthesize.author.modle", "did you mean author.model?"),
        ("mismatch/logp", None),
        ("mismach/logp_abs", "did you mean mismatch/logp_abs"),
        ("warmpu", "did you mean trainer.warmup_steps?"),
        ("holdot", "did you mean data.sources[].holdout or sft.sources[].holdout?"),
        ("n", "did you mean algorithm.group_size?"),
        ("learning_rate", "did you mean trainer.lr? (TRL's learning_rate)"),
        ("trainer.foo", "keel knobs trainer lists"),
        ("xyzzy", "a recipe has run, model, data"),
        ("a/b", "no such metric"),
    ],
)
def test_a_name_that_is_none_says_what_was_meant(asked: str, said: str | None) -> None:
    if said is None:  # a part of a metric's name is enough
        assert "mismatch/logp_abs (metric)" in answer(asked)
        return
    with pytest.raises(ConfigError) as caught:
        answer(asked)
    assert str(caught.value).startswith(f"{asked}: no such ") and said in str(caught.value)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["knobs", "trainer.lr"]) == 0
    assert capsys.readouterr().out == answer("trainer.lr") + "\n"
    assert main(["knobs", "gpu", "memory"]) == 0
    assert capsys.readouterr().out == answer("gpu memory") + "\n"
    assert main(["knobs", "trainer.lrr"]) == 2
    said = capsys.readouterr().err
    assert said == "keel knobs: trainer.lrr: no such knob; did you mean trainer.lr?\n"


@pytest.mark.e2e
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "keel.commands.cli", "knobs"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
