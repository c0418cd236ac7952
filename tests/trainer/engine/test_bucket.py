"""DeepSpeed's buckets of gradients: as small as the model, and smaller on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from keel.rl.packing import pack
from keel.trainer.engine import engine as module
from keel.trainer.engine import zero
from keel.trainer.engine.deepspeed_internals import buckets
from keel.trainer.engine.engine import TrainerEngine
from tests.buckets import unpack_bucket
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.ranks import TIGHT, make_config

pytestmark = pytest.mark.e2e


def trained(folder: Path, stage: int, *, offload: bool) -> tuple[dict[str, Tensor], int]:
    """Weights after two steps, and the most elements that buckets have had."""
    config = make_config(1, stage, dtype="bfloat16", tokens=TIGHT, offload_optimizer=offload)
    engine, most = TrainerEngine(str(folder), config), 0

    def look(_: Tensor) -> None:
        nonlocal most
        held = buckets(engine._engine.optimizer)
        most = max(most, sum(one.untyped_storage().nbytes() // 4 for one in held))

    for parameter in engine._network.parameters():
        parameter.register_hook(look)
    for step in range(2):
        groups = Rollouts(step, folder).groups(2, 3)
        (batch,) = pack(groups, ranks=1, micro_batch_tokens=TIGHT)
        engine.step([batch])
    sent = [unpack_bucket(bucket) for bucket in engine.publish(50_000)]
    return {name: one.clone() for bucket in sent for name, one in bucket}, most


@pytest.mark.parametrize(("stage", "offload"), [(1, True), (2, False), (3, False)])
def test_a_bucket_is_as_small_as_the_model_and_may_be_smaller_than_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, offload: bool
) -> None:
    monkeypatch.setattr(module, "compute_dtype", lambda *_: torch.bfloat16)
    write_model(tmp_path)
    whole, most = trained(tmp_path, stage, offload=offload)
    elements = sum(tensor.numel() for tensor in whole.values())
    assert 0 < most <= 2 * elements
    monkeypatch.setattr(zero, "bucket_elements", lambda _: 1000)
    assert max(tensor.numel() for tensor in whole.values()) > 1000
    small, less = trained(tmp_path, stage, offload=offload)
    assert 0 < less <= 2000
    assert small.keys() == whole.keys()
    assert all(torch.equal(small[name], tensor) for name, tensor in whole.items())
