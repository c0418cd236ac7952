"""What is said of vLLM holds of the one that is installed; what has changed is named, and done
without. The tests load vLLM, not this module."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from functools import cached_property, wraps
from types import FunctionType
from typing import Any

import pytest

from keel.configs.schema import RolloutConfig
from keel.rollout import vllm_checks
from keel.rollout.vllm_contract import NEEDS, Part, changes
from tests import vllm_changes

pytestmark = pytest.mark.e2e
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


@pytest.fixture(autouse=True)
def read_again() -> Iterator[None]:
    yield
    vllm_checks.assigned.cache_clear()


@pytest.fixture
def doctored(monkeypatch: pytest.MonkeyPatch) -> Any:
    def change(where: str, how: str) -> None:
        owner, name = vllm_changes.parent(where)
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, original)  # so that it is put back
        vllm_changes.make([(where, how)])

    return change


@pytest.mark.parametrize("part", NEEDS)
def test_the_installed_vllm_has_what_is_needed(part: Part) -> None:
    assert changes(part) == []


@pytest.mark.parametrize(
    ("part", "where", "how", "named"),
    [
        ("packed", f"{SCHEDULER}._free_request", "renamed", f"{SCHEDULER} has no _free_request"),
        ("packed", f"{SCHEDULER}._preempt_request", "renamed", "_preempt_request is gone"),
        ("packed", f"{SCHEDULER}.schedule", "another signature", r"takes \(args, something_new, k"),
        ("v1", f"{SCHEDULER}.schedule", "another signature", "does not use _preempt_request"),
        (
            "packed",
            "vllm.v1.worker.gpu.sample.sampler:Sampler.get_logprobs_dims",
            "another signature",
            r"Sampler.get_logprobs_dims takes",
        ),
        ("packed", "vllm.v1.request:Request.num_tokens", "renamed", "Request has no num_tokens"),
        (
            "copies",
            "vllm.model_executor.layers.attention:is_deferred_attention_layer",
            "renamed",
            "is_deferred_attention_layer is gone",
        ),
        (
            "kv_cache",
            "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
            "another signature",
            "does not use get_kv_cache_configs",
        ),
        (
            "warm_up",
            "vllm.sampling_params:SamplingParams.for_sampler_warmup",
            "another signature",
            "for_sampler_warmup takes",
        ),
        (
            "invariant",
            "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply",
            "another signature",
            "does not use linear_batch_invariant",
        ),
        (
            "steady",
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests",
            "another signature",
            "update_requests does something else",
        ),
        (
            "bursts",
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
            "another signature",
            "sample_tokens does something else",
        ),
    ],
)
def test_what_has_changed_is_named(
    doctored: Any, part: Part, where: str, how: str, named: str
) -> None:
    changes(part)  # has imported it
    doctored(where, how)
    with pytest.raises(AssertionError, match=named):
        assert changes(part) == [], "; ".join(changes(part))


def test_a_module_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.async_scheduler", None)
    assert "vllm.v1.core.sched.async_scheduler cannot be imported" in "; ".join(changes("packed"))


def test_an_attribute_of_instances_that_is_renamed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    was = Scheduler.__init__
    code = was.__code__
    names = ("held" if name == "kv_holding_waiting" else name for name in code.co_names)
    renamed = FunctionType(code.replace(co_names=tuple(names)), was.__globals__)
    monkeypatch.setattr(Scheduler, "__init__", renamed)
    vllm_checks.assigned.cache_clear()
    assert changes("packed") == [f"{SCHEDULER} has no kv_holding_waiting"]


def test_what_a_class_gives_to_itself_is_found_in_methods_of_any_kind() -> None:
    def decorated(function: Any) -> Any:
        @wraps(function)
        def around(*args: Any) -> Any:
            return function(*args)

        return around

    class Example:
        def plain(self, other: Any) -> None:
            self.one = self.two = 1
            (self.three, other.not_this), self.four = (1, 2), 3
            other.nor_this = self.nor_that

            def inside() -> None:
                self.five = 1

            inside()

        @decorated
        def wrapped(self) -> None:
            with open("file") as self.six:
                pass

        @property
        def computed(self) -> int:
            self.seven: int = 1
            return 1

        @cached_property
        def kept(self) -> int:
            for self.eight in range(3):
                pass
            return 1

        @staticmethod
        def of_none(other: Any) -> None:
            other.nor_here = 1

    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    assert vllm_checks.assigned(Example) == set(numbers)


def test_without_the_fast_path_auto_is_native_and_says_so_once(
    doctored: Any, logged: list[logging.LogRecord]
) -> None:
    from keel.rollout.engine.fallbacks import choose_recorder  # noqa: PLC0415

    assert choose_recorder(RolloutConfig(), gpu=True) == "packed"
    assert not logged
    doctored(f"{SCHEDULER}._free_request", "renamed")
    assert choose_recorder(RolloutConfig(), gpu=True) == "native"
    (line,) = logged
    assert line.levelno == logging.WARNING
    for part in ("vLLM 0.32", "has no _free_request", "vLLM's own scheduler", "rollout.recorder"):
        assert part in line.getMessage()
    assert choose_recorder(RolloutConfig(recorder="native"), gpu=True) == "native"
    assert choose_recorder(RolloutConfig(), gpu=False) == "v1"
    assert len(logged) == 1, "a recorder that is not used is of no interest"


def test_a_recorder_that_the_recipe_names_is_not_replaced(doctored: Any) -> None:
    from keel.rollout.engine.fallbacks import choose_recorder  # noqa: PLC0415

    doctored(f"{SCHEDULER}._free_request", "renamed")
    with pytest.raises(ValueError, match=r"rollout.recorder = 'packed': .*_free_request.* auto"):
        choose_recorder(RolloutConfig(recorder="packed"), gpu=True)


def test_what_nothing_stands_in_for_ends_in_one_error(doctored: Any) -> None:
    from keel.rollout.engine.fallbacks import require  # noqa: PLC0415

    require("engine", "v1")
    doctored("vllm.forward_context:get_forward_context", "renamed")
    with pytest.raises(RuntimeError, match=r"get_forward_context is gone.* install vLLM 0\.32"):
        require("engine", "v1")


def test_an_engine_starts_without_what_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import ModelRegistry, SamplingParams  # noqa: PLC0415
    from vllm.model_executor.models import registry  # noqa: PLC0415

    from keel.rollout.engine.fallbacks import quick_start  # noqa: PLC0415

    def elsewhere(_: object) -> None:
        raise AssertionError("a process for looking at a class")

    name, before = "Qwen3MoeForCausalLM", SamplingParams.for_sampler_warmup
    monkeypatch.setitem(ModelRegistry.models, name, ModelRegistry.models[name])
    monkeypatch.setattr(registry, "_run_in_subprocess", elsewhere)
    with quick_start([name, "NobodysModel"], gpu=True):
        assert ModelRegistry.models[name].inspect_model_cls().is_text_generation_model
        assert not SamplingParams.for_sampler_warmup().logprobs
    assert SamplingParams.for_sampler_warmup is before
    assert SamplingParams.for_sampler_warmup().logprobs
    with quick_start([name], gpu=False):
        assert SamplingParams.for_sampler_warmup is before


def test_the_kernel_of_routers_is_made_ready_only_where_there_are_routers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch  # noqa: PLC0415
    from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe.router import gate_linear  # noqa: PLC0415
    from vllm.model_executor.warmup import kernel_warmup as module  # noqa: PLC0415

    from keel.rollout.engine.fallbacks import quick_start  # noqa: PLC0415

    class Router(torch.nn.Linear):
        pass

    def load_cutlass() -> bool:
        loads.append(model)
        return False

    monkeypatch.setattr(gate_linear, "GateLinear", Router)
    monkeypatch.setattr(ll_bf16, "is_available", load_cutlass)
    before = module._warmup_ll_bf16_router_gemm
    loads: list[torch.nn.Module] = []
    dense = torch.nn.Sequential(torch.nn.Linear(8, 4, dtype=torch.bfloat16))
    mixture = torch.nn.Sequential(Router(8, 4, dtype=torch.bfloat16))
    with quick_start([], gpu=True):
        for model in (dense, mixture):
            module._warmup_ll_bf16_router_gemm(model)
    assert loads == [mixture]
    assert module._warmup_ll_bf16_router_gemm is before


def test_a_start_that_has_changed_is_vllms_own(
    doctored: Any, logged: list[logging.LogRecord]
) -> None:
    from vllm import SamplingParams  # noqa: PLC0415

    from keel.rollout.engine.fallbacks import quick_start  # noqa: PLC0415

    doctored("vllm.v1.worker.gpu.warmup:_warmup_kernels", "another signature")
    with quick_start(["Qwen3ForCausalLM"], gpu=True):
        assert SamplingParams.for_sampler_warmup().logprobs
    assert "does not use for_sampler_warmup" in logged[0].getMessage()


def test_steps_that_vllm_prepares_otherwise_are_all_prepared(
    doctored: Any, logged: list[logging.LogRecord]
) -> None:
    from keel.rollout.engine.fallbacks import takes_over_rows  # noqa: PLC0415

    assert takes_over_rows()
    assert not logged
    doctored("vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs", "another signature")
    assert not takes_over_rows()
    (record,) = logged
    assert "Every decoding step is prepared anew" in record.getMessage()
    assert not changes("packed")


def test_steps_that_vllm_ends_otherwise_are_taken_one_by_one(
    doctored: Any, logged: list[logging.LogRecord]
) -> None:
    from keel.rollout.engine.fallbacks import takes_bursts, takes_over_rows  # noqa: PLC0415

    assert takes_bursts()
    assert not logged
    doctored("vllm.v1.outputs:SamplingMaskLists.slice_request", "another signature")
    assert not takes_bursts() and takes_over_rows()
    (record,) = logged
    assert "Every decoding step waits for the host" in record.getMessage()


def test_copies_that_are_switched_off_are_not_looked_at(
    doctored: Any, logged: list[logging.LogRecord]
) -> None:
    from keel.rollout.engine.fallbacks import SWITCHED_OFF, no_copies  # noqa: PLC0415

    assert no_copies(RolloutConfig()) == ""
    doctored("vllm.model_executor.layers.attention:is_deferred_attention_layer", "renamed")
    assert no_copies(RolloutConfig(copy_weights=False)) == SWITCHED_OFF
    assert not logged
    assert "is_deferred_attention_layer" in no_copies(RolloutConfig())
    assert "rollout.copy_weights" in logged[0].getMessage()
