"""Missing internals of PyTorch, transformers and Ray are reported at start-up."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import ray
import torch
import transformers
from torch import nn
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from keel.model import torch_internals, transformers_internals
from keel.trainer.engine.zero import check_libraries
from keel.trainer.placement import ray_internals

pytestmark = pytest.mark.e2e  # DeepSpeed asks the compiler


def test_torch_without_internals_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_internals.check_torch()
    monkeypatch.delattr(distributed_c10d, "_set_pg_timeout")
    with pytest.raises(
        RuntimeError, match=rf"PyTorch {re.escape(torch.__version__)} has no .*_set"
    ):
        check_libraries()


def test_missing_operators_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = type("aten", (), {})
    used = {
        lacking if owner is torch.ops.aten else owner: names
        for owner, names in torch_internals._USED.items()
    }
    monkeypatch.setattr(torch_internals, "_USED", used)
    with pytest.raises(RuntimeError, match="_flash_attention_backward"):
        torch_internals.check_torch()


def test_transformers_without_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Module()
    model.experts = nn.Module()
    model.experts.gate_up_proj = nn.Parameter(torch.zeros(2))
    message = transformers_internals.check_transformers(model)
    assert transformers.__version__ in message and "_apply_gate" in message
    model.experts._apply_gate = print
    assert transformers_internals.check_transformers(model) == ""
    monkeypatch.delattr(PreTrainedModel, "_keep_in_fp32_modules_strict")
    with pytest.raises(RuntimeError, match="_keep_in_fp32_modules_strict"):
        transformers_internals.check_transformers(model)


def test_ray_without_internals(
    monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    monkeypatch.setattr(ray_internals, "_STATE", "ray._private.moved")
    nodes = [{"NodeID": "a", "Resources": {"GPU": 8.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert [ray_internals.free_by_node() for _ in range(2)] == [{"a": {"GPU": 8.0}}] * 2
    (line,) = (record.getMessage() for record in logged)
    assert ray.__version__ in line
