"""An engine of the benchmarks, whose model is in no folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.common.synthetic import SyntheticEngine
from keel.model.load import load_model_config
from keel.rl.metrics import values
from keel.rl.packing import pack
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.ranks import make_config

pytestmark = pytest.mark.e2e


def test_policy_and_reference_are_the_same_model_that_was_drawn(tmp_path: Path) -> None:
    write_model(tmp_path)  # for its config, and what the batch is made of
    config = make_config(1, 0, kl_coef=0.1)
    made = SyntheticEngine(load_model_config(str(tmp_path)), replace(config))
    reference = made._reference
    assert reference is not None
    for mine, theirs in zip(
        made._network.parameters(), reference.network.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
    groups = Rollouts(0, tmp_path).groups(2, 3, kl_coef=0.1)
    (batch,) = pack(groups, ranks=1, micro_batch_tokens=config.trainer.micro_batch_tokens)
    assert values(made.step([batch]))["train/tokens"] > 0
