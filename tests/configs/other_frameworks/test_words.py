"""A recipe with another framework's word is told ours, or that there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from keel.commands.reference.answer import answer
from keel.commands.reference.knobs import flat, sections
from keel.commands.reference.metrics import METRICS
from keel.configs.load import load_config
from keel.configs.other_frameworks.words import Word, frameworks, measures, words
from keel.configs.schema import ConfigError


def refused(*overrides: str, recipe: str | Path = "quickstart") -> Sequence[str]:
    with pytest.raises(ConfigError) as error:
        load_config(recipe, overrides)
    return str(error.value).splitlines()


def of(framework: str) -> list[Word]:
    return [word for word in words() if word.framework == framework]


def holds_others(word: Word) -> bool:
    return any(other.name.startswith(f"{word.name}.") for other in words())


def test_ours_are_knobs_and_what_has_none_says_why() -> None:
    known = {knob.name for knob in flat()} | {section.name for section in sections()}
    known |= {name.removesuffix("[]") for name in known}
    for word in words():
        assert set(word.here) <= known, word
        assert word.here or word.note, word


def test_metrics_are_ours_and_keel_knobs_answers_with_them() -> None:
    assert {word.framework for word in measures()} == {"TRL", "verl"}
    names = {metric.name for metric in METRICS}
    for word in measures():
        assert set(word.here) <= names, word
        assert word.here or word.note, word
    for name, said in (
        ("actor/ppo_kl", "did you mean mismatch/kl? (verl's actor/ppo_kl; by K3, and bef"),
        ("frac_reward_zero_std", "did you mean rollout/uniform_group_fraction? (TRL's frac_re"),
        ("reward_std", "TRL's reward_std has no counterpart: rollout/uniform_group_fraction: in"),
    ):
        with pytest.raises(ConfigError) as error:
            answer(name)
        assert f"{name}: no such metric; {said}" in str(error.value)


@pytest.mark.parametrize("framework", frameworks())
def test_every_word_is_answered_with_ours(framework: str) -> None:
    asked = [word for word in of(framework) if word.name != "model" and not holds_others(word)]
    assert len(asked) > 35
    lines = refused(*(f"{word.name}=1" for word in asked))
    for word in asked:
        (said,) = [line for line in lines if f": {word.name}: no such knob; " in line]
        if word.here:
            assert f"did you mean {' and '.join(word.here)}?" in said
        else:
            assert f"{framework}'s {word.name} has no counterpart: " in said


def test_words_that_are_sections_too() -> None:
    assert [word.name for word in words() if holds_others(word)] == [
        *("model", "orchestrator.train.source")
    ]
    assert "did you mean data.sources?" in refused("orchestrator.train.source=[{env: x}]")[0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.save_steps=5", "did you mean run.checkpoint_every? (TRL's save_steps)"),
        ("train_dataset=x", "did you mean data.sources? (TRL's train_dataset; or keel.train(p"),
        ("algorithm.num_iterations=2", "TRL's num_iterations has no counterpart: one pass over"),
        ("loss_agg_mode=x", "verl's actor_rollout_ref.actor.loss_agg_mode has no counterpart"),
        ("n_samples_per_prompt=8", "algorithm.group_size? (OpenRLHF's rollout.n_samples_per_pro"),
        ("reward_funcs=x", "docs/rewards.md"),
    ],
)
def test_the_answer_names_the_framework_and_what_differs(override: str, said: str) -> None:
    assert said in refused(override)[0]


def test_a_section_of_theirs_is_answered_word_by_word_with_its_lines(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: quickstart\n"
        "actor_rollout_ref:\n"
        "  rollout:\n"
        "    n: 8\n"
        "  actor:\n"
        "    optim: {lr: 1e-6}\n"
        "    fancy: 1\n"
    )
    lines = refused(recipe=tmp_path / "mine.yaml")
    assert len(lines) == 3
    assert "mine.yaml:4: actor_rollout_ref.rollout.n: no such knob; did you mean algor" in lines[0]
    assert "mine.yaml:6: actor_rollout_ref.actor.optim.lr: no such knob; did you mean t" in lines[1]
    assert "mine.yaml:7: actor_rollout_ref.actor.fancy: no such knob; docs/coming-from" in lines[2]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sft.batch_size=8", "did you mean sft.conversations_per_step, or sft.tokens_per_step?"),
        ("sft.completion_only_loss=true", "what the assistant says is learned, and nothing else"),
        ("run.epochs=3", "did you mean run.steps (in steps)? sft.epochs is for `keel sft` and"),
        ("epochs=3", "did you mean run.steps (in steps)? sft.epochs is for `keel sft` and"),
        ("trainer.num_train_epochs=3", "did you mean run.steps? (TRL's num_train_epochs; in steps"),
        ("rollout.max_model_len=100", "follows from data.max_prompt_tokens + rollout.sampling.max"),
        ("rollout.max_seq_length=9", "follows from data.max_prompt_tokens + rollout.sampling.max_"),
        ("sft.num_train_epochs=3", "did you mean sft.epochs?"),
        ("rewards.judge.max_model_len=9", "did you mean rewards.judge.server.max_model_len?"),
    ],
)
def test_nobody_is_sent_to_a_knob_that_does_nothing_there(override: str, said: str) -> None:
    (line,) = refused(override)
    assert f"no such knob; {said}" in line
