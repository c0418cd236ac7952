"""Overrides of rewards: the dotted name of a reward function is one key."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.configs.load import load_config
from keel.configs.schema import ConfigError

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
