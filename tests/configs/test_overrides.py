"""Overrides: of a section, they set the knobs that they name; the dotted name of a reward function
is one key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_origin

import pytest

from keel.commands.arguments import overrides_of
from keel.configs.diff import flatten_config
from keel.configs.load import load_config, load_synthesis, spelled_apart
from keel.configs.schema import Config, ConfigError
from keel.configs.suggest import knob_types, section_type

RECIPE = """
data:
  sources:
    - name: sums
      source: reasoning_gym
      task: chain_sum
      size: 8
      rewards: {correct: 1.0, mine.b: 0.1}
"""


@pytest.mark.parametrize("source", [".0", "[sums]", ".sums"])
@pytest.mark.parametrize("name", ["mine.b", "mine.partial", "mine.near.partial"])
@pytest.mark.parametrize("form", ["{}.rewards.{}", "{}.rewards[{}]"])
def test_a_reward_functions_weight_is_set(
    tmp_path: Path, source: str, name: str, form: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    knob = f"data.sources{form.format(source, name)}"
    rewards = load_config(path, [f"{knob}=0.7"]).data.sources[0].rewards
    assert rewards == {"correct": 1.0, "mine.b": 0.1} | {name: 0.7}
    with pytest.raises(ConfigError) as refused:
        load_config(path, [f"{knob}=x"])
    assert f"override '{knob}=x': data.sources[sums].rewards.{name} = 'x'" in str(refused.value)


@pytest.mark.parametrize("section", [field.name for field in fields(Config)])
def test_no_section_is_lost_to_an_override_of_some_of_its_knobs(section: str) -> None:
    """Neither is any inside it."""
    whole = load_config("quickstart")
    assert load_config("quickstart", [f"{section}={{}}"]) == whole
    kind = section_type(knob_types(Config)[section])
    assert kind is not None
    hints = knob_types(kind)
    inner = [name for name, hint in hints.items() if section_type(hint) and not get_origin(hint)]
    empty = ", ".join(f"{name}: {{}}" for name in inner)
    assert load_config("quickstart", [f"{section}={{{empty}}}"]) == whole


@pytest.mark.parametrize(
    ("section", "knobs"),
    [
        ("run={steps: 3, seed: 1}", ["run.steps=3", "run.seed=1"]),
        ("rollout={sampling: {top_p: 0.5}}", ["rollout.sampling.top_p=0.5"]),
        ("rollout.sampling={top_p: 0.5}", ["rollout.sampling.top_p=0.5"]),
        ("data.sources[spelling]={weight: 9}", ["data.sources[spelling].weight=9"]),
        ("data.sources.0.length={linear: 0.5}", ["data.sources.0.length.linear=0.5"]),
        ("data.sources.1={rewards: {correct: 2}}", ['data.sources.1.rewards={"correct": 2}']),
        ("data={only: [spelling]}", ['data.only=["spelling"]']),
        ("run={dir: 'runs/${run.seed}'}", ['run.dir="runs/${run.seed}"']),
        (
            "data.sources[spelling]={name: words, weight: 9}",
            ["data.sources[spelling].weight=9", 'data.sources[spelling].name="words"'],
        ),
    ],
)
def test_a_section_is_its_knobs(section: str, knobs: list[str]) -> None:
    before, after = (flatten_config(load_config("quickstart", own)) for own in ([], [section]))
    assert after == flatten_config(load_config("quickstart", knobs)) != before
    assert spelled_apart([section]) == knobs


@pytest.mark.parametrize(
    "override",
    [
        *("run.steps=3", "data.sources[spelling].rewards={correct: 1}", "run=3", "run=null"),
        *("run={}", "data.sources[nosuch]={}"),
        # What dotted keys and JSON would not say again.
        *('run={"": 3}', "run={'steps ': 3}", 'run={"steps=5": 3}', 'run={"a[b]": 3}'),
        *("data.sources[spelling]={params: {1: 2}}", "trainer={lr: .inf}"),
        "run={dir: !!binary aGVsbG8=}",
    ],
)
def test_what_is_no_section_of_knobs_stays_as_it_was_written(override: str) -> None:
    assert spelled_apart([override]) == [override]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.sources[spellin]={}", "has no entry 'spellin'; did you mean data.sources[spelling]"),
        ("rollout={sampling.top_p: 0.5}", "no such knob; write sampling: {top_p: …}"),
        (r"run={dir: 'a\\${b'}", "no viable alternative at input"),
        ("run={dir: !!set {a}}", "'set' is not a supported primitive type"),
    ],
)
def test_what_cannot_be_meant_is_named(override: str, said: str) -> None:
    for spelled in (list[str], overrides_of):
        with pytest.raises(ConfigError, match=r"^override ") as refused:
            load_config("quickstart", spelled([override]))
        assert said in str(refused.value)


def test_what_a_user_names_the_keys_of_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    (source,) = load_config(path, ["data.sources[sums]={rewards: {mine.b: 1.0}}"]).data.sources
    assert (source.rewards, source.size) == ({"mine.b": 1.0}, 8)


def test_a_wrong_knob_of_a_section_is_named_with_the_override(tmp_path: Path) -> None:
    for override, said in (
        ("run={stepz: 3}", "run.stepz: no such knob; did you mean run.steps?"),
        ("run={steps: many}", "run.steps = 'many': must be a whole number"),
        ("run=3", "run = 3: must be a section"),
        ("run={a.b: 3}", "run.a.b: no such knob"),
    ):
        for form in (override, *spelled_apart([override])):
            with pytest.raises(ConfigError) as refused:
                load_config("quickstart", [form])
            assert f"override {form!r}: {said}" in str(refused.value)


def test_a_section_that_may_be_absent_is_one(tmp_path: Path) -> None:
    """`reference` of `keel synthesize`."""
    path, url = tmp_path / "recipe.yaml", "base_url: 'http://localhost:1/v1'"
    path.write_text(f"family: general\ndir: out\nauthor: {{{url}, model: one}}\n")
    for override in ("reference={}", "reference=null"):
        assert load_synthesis(path, [override]).reference is None
    own = [f"reference={{{url}, model: two}}", "reference={temperature: 0.5}"]
    reference = load_synthesis(path, own).reference
    assert reference is not None and (reference.model, reference.temperature) == ("two", 0.5)
