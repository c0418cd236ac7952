"""docs/models.md agrees with the output of `keel check` for a small model of each family."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from keel.configs.schema import ConfigError, TrainerConfig
from keel.model.hub import check_config
from keel.model.load import check_causal
from keel.model.routing.routers import is_moe
from keel.model.trainable import check_trainable
from keel.trainer.placement.families import (
    EXPERT_PARALLEL,
    NOT_IN_FLOAT16,
    check_parallel,
)

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
LAYERS = 4
SPREAD = TrainerConfig(ranks=2, sequence_parallel=2)


def rows(heading: str) -> list[list[str]]:
    table = PAGE.read_text("utf-8").partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines[2:]]


def config_of(model_type: str) -> PreTrainedConfig:
    config = CONFIG_MAPPING[model_type]()
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "Other")]
    text = config.get_text_config()
    text.num_hidden_layers = LAYERS
    if model_type == "lfm2":  # the default has attention layers only
        text.layer_types = ["conv", "full_attention"] * 2
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(text, name, None):
            with suppress(AttributeError):  # a computed property of some
                setattr(text, name, kinds[:LAYERS])
    return config


@pytest.mark.parametrize("row", rows("Trained"), ids=lambda row: row[1])
def test_trained_families(row: list[str]) -> None:
    _, model_type, kind, routing, sequence, expert, notes = row
    config = config_of(model_type)
    check_config(model_type, json.loads(json.dumps(config.to_dict(), default=str)))
    check_causal(config, model_type)
    check_trainable(model_type, config)
    moe, (architecture,) = is_moe(config), config.architectures or ()
    assert (kind, routing) == (("MoE", "yes") if moe else ("dense", "–"))
    assert expert == ("–" if not moe else "yes" if architecture in EXPERT_PARALLEL else "no")
    assert ("engines not in float16" in notes) == (model_type in NOT_IN_FLOAT16)
    try:
        check_parallel(SPREAD, architecture=architecture, experts=8, heads=2)
    except ConfigError:
        assert sequence == "no"
    else:
        assert sequence == "yes"


@pytest.mark.parametrize("row", rows("Refused"), ids=lambda row: row[1])
def test_refused_families(row: list[str]) -> None:
    config = config_of(row[1])
    assert is_moe(config) == (row[2] == "MoE")
    with pytest.raises(ConfigError):
        check_causal(config, row[1])
        check_trainable(row[1], config)
