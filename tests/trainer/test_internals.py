"""What the trainer leans on in other libraries, missing there: said at start-up. What a changed
DeepSpeed does to a run is in `tests/trainer/engine/test_changed_deepspeed.py`."""

from __future__ import annotations

import logging
import re
import sys
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import ray
import torch
import transformers
from deepspeed.module_inject import auto_ep_layer
from deepspeed.utils import groups
from torch import nn
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from keel.model import torch_internals, transformers_internals
from keel.trainer.engine import deepspeed_internals
from keel.trainer.engine.offload import check_room
from keel.trainer.engine.zero import check_libraries
from keel.trainer.placement import ray_internals

pytestmark = pytest.mark.e2e  # DeepSpeed asks the compiler
GIB = 2**30


def test_as_installed_nothing_is_missing() -> None:
    assert deepspeed.__version__ == deepspeed_internals.KNOWN
    assert check_libraries(expert_parallel=2) == ""


@pytest.mark.parametrize(
    ("owner", "name"), [(groups, "_get_expert_parallel_group"), (auto_ep_layer, "AutoEPMoELayer")]
)
def test_expert_parallelism_ends_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(RuntimeError, match=rf"DeepSpeed .* was: module has no {name}\. .*parallel"):
        check_libraries(expert_parallel=2)
    assert check_libraries(expert_parallel=1) == ""


def test_a_module_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.moe.utils", None)
    with pytest.raises(RuntimeError, match=r"there is no deepspeed\.moe\.utils"):
        check_libraries(expert_parallel=2)
    parameters = [nn.Parameter(torch.zeros(2))]  # of a dense model, as ever
    assert deepspeed_internals.split_experts(parameters) == (parameters, [])


def test_layers_that_are_made_otherwise() -> None:
    experts = SimpleNamespace(w1=SimpleNamespace(group_name="g"), w2=0)
    layer = SimpleNamespace(model_family="qwen3_moe", ep_group=None, router=0, experts=experts)
    with pytest.raises(RuntimeError, match="SimpleNamespace has no w3"):
        deepspeed_internals.check_experts([layer])
    experts.w3 = 0
    deepspeed_internals.check_experts([layer])
    layer.model_family = "mixtral"
    del experts.w1.group_name
    with pytest.raises(RuntimeError, match="SimpleNamespace has no group_name"):
        deepspeed_internals.check_experts([layer])


def test_an_operation_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", {"shm": True}, raising=False)
    assert "knows no deepspeed_shm_comm" in check_libraries(expert_parallel=1)


def held(parameter: nn.Parameter, **others: Any) -> str:
    """What is said of an optimizer of ZeRO-3 with these attributes."""
    module = nn.Module()
    module.weight = parameter
    known = {
        "optimizer": SimpleNamespace(state={}),
        "param_groups": [{"params": []}],
        "empty_partition_cache": print,
        "ipg_buckets": {},
        "grad_partitions_flat_buffer": torch.zeros(1),
        "fp32_partitioned_groups_flat": [],
    }
    there = {name: thing for name, thing in (known | others).items() if thing is not None}
    optimizer = SimpleNamespace(**there)
    return deepspeed_internals.check_held(module, optimizer, stage=3, sums=False)


def test_shards_and_master_weights_must_be_found() -> None:
    parameter: Any = nn.Parameter(torch.zeros(2))
    assert "Parameter has no ds_tensor" in held(parameter)
    parameter.ds_tensor = torch.zeros(1)
    assert held(parameter) == ""
    others = ("grad_partitions_flat_buffer", "fp32_partitioned_groups_flat")
    for name in ("optimizer", "ipg_buckets", *others):
        said = held(parameter, **{name: None})
        assert f"has no {name}" in said, said


def test_a_gpu_that_cannot_hold_a_step_at_once() -> None:
    room = {"stays": 12.0 * GIB, "gpu": 80.0 * GIB, "engine_share": 0.85}
    with pytest.raises(ValueError, match=r"^So it is\. A step needs 80\.1 GiB at once then, and"):
        check_room("So it is", needs=80.1 * GIB, **room)


def test_a_gpu_that_cannot_hold_both() -> None:
    check_room("So it is", stays=12.0 * GIB, gpu=80.0 * GIB, engine_share=0.85)
    said = "So it is. 12.1 GiB of a GPU's 80.0 GiB stay with it then, and rollout."
    said += "gpu_memory_utilization = 0.85"
    with pytest.raises(ValueError, match=rf"^{re.escape(said)}: set it to at most 0\.8[45]"):
        check_room("So it is", stays=12.1 * GIB, gpu=80.0 * GIB, engine_share=0.85)


def test_a_torch_without_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_internals.check_torch()
    monkeypatch.delattr(distributed_c10d, "_set_pg_timeout")
    with pytest.raises(
        RuntimeError, match=rf"PyTorch {re.escape(torch.__version__)} has no .*_set"
    ):
        check_libraries(expert_parallel=1)


def test_operators_are_looked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = type("aten", (), {})
    used = {
        lacking if owner is torch.ops.aten else owner: names
        for owner, names in torch_internals._USED.items()
    }
    monkeypatch.setattr(torch_internals, "_USED", used)
    with pytest.raises(RuntimeError, match=r"no aten\._flash_attention_backward, "):
        torch_internals.check_torch()


def test_a_transformers_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Module()
    model.experts = nn.Module()
    model.experts.gate_up_proj = nn.Parameter(torch.zeros(2))
    said = transformers_internals.check_transformers(model)
    assert said.startswith(f"transformers {transformers.__version__} is not as 5.17 to 5.19 were")
    model.experts._apply_gate = print
    assert transformers_internals.check_transformers(model) == ""
    monkeypatch.delattr(PreTrainedModel, "_keep_in_fp32_modules_strict")
    with pytest.raises(RuntimeError, match=r"has no PreTrainedModel\._keep_in_fp32_modules_strict"):
        transformers_internals.check_transformers(model)


def test_a_ray_that_says_it_nowhere(
    monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    monkeypatch.setattr(ray_internals, "STATE", "ray._private.moved")
    nodes = [{"NodeID": "a", "Resources": {"GPU": 8.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert [ray_internals.free_by_node() for _ in range(2)] == [{"a": {"GPU": 8.0}}] * 2
    (line,) = (record.getMessage() for record in logged)
    assert "GPUs that others use count as free here" in line
