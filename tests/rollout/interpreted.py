"""Runs Model Runner V2 on a CPU with Triton's interpreter, at about 40 tokens per second.

This covers the GPU code except CUDA graphs and asynchronous scheduling.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment variables that must be set before torch is imported."""


def lend_triton() -> None:
    """Let vLLM use Triton on a CPU. Call this before importing vLLM."""
    from triton.backends import backends  # noqa: PLC0415

    none: Any = SimpleNamespace(is_active=lambda: False)
    backends["cpu"] = SimpleNamespace(driver=none, compiler=None)  # type: ignore[assignment]

    import vllm.v1.sample.ops.topk_topp_sampler as truncation  # noqa: PLC0415
    import vllm.v1.worker.cpu.shm  # noqa: F401, PLC0415  (vLLM's stand-ins for CUDA)

    truncation.HAS_TRITON = False  # the interpreter lacks a method it calls
    _sort_by_numpy()


def _sort_by_numpy() -> None:
    """Sort with numpy, because the interpreter takes seconds to sort a thousand numbers."""
    import numpy as np  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime.interpreter import TensorHandle  # noqa: PLC0415

    def sort(x: Any, dim: None = None, descending: bool = False) -> Any:
        data = np.sort(x.handle.data)
        data = data[::-1].copy() if descending else data
        return tl.core.tensor(TensorHandle(data, x.handle.dtype), x.type)

    tl.sort = sort  # type: ignore[assignment]


def install(recorder: str) -> None:
    """Let vLLM use Triton and the engine use `recorder`. Call this before importing vLLM."""
    lend_triton()

    from keel.rollout.recording import base  # noqa: PLC0415
    from keel.rollout.recording import packed as recorder_packed  # noqa: PLC0415
    from keel.rollout.vllm_fast.scheduler import FastScheduler  # noqa: PLC0415

    if recorder == "packed":
        _reuse_steps_without_graphs()
    base.recorder_name = lambda *_, **__: recorder  # type: ignore[assignment]
    packed_args = recorder_packed.PackedRecorder.engine_args

    def synchronous_args(self: Any) -> dict[str, Any]:
        return {**packed_args(self), "scheduler_cls": FastScheduler, "async_scheduling": False}

    recorder_packed.PackedRecorder.engine_args = synchronous_args  # type: ignore[method-assign]


def _reuse_steps_without_graphs() -> None:
    """Reuse steps by calling the model where a GPU would replay a graph."""
    from vllm.config.compilation import CUDAGraphMode  # noqa: PLC0415
    from vllm.forward_context import set_forward_context  # noqa: PLC0415

    from keel.rollout.vllm_fast.step_reuse import StepReuse  # noqa: PLC0415

    def graph(_: Any, rows: int) -> Any:
        return SimpleNamespace(cg_mode=CUDAGraphMode.FULL, num_tokens=rows)

    def run(self: Any, _: Any, state: Any) -> Any:
        runner, batch = self._runner, state.input_batch
        with set_forward_context(
            state.attn_metadata,
            runner.vllm_config,
            num_tokens=batch.num_tokens,
            slot_mapping=state.slot_mappings_by_layer,
        ):
            return runner.model(
                input_ids=batch.input_ids,
                positions=batch.positions,
                inputs_embeds=None,
                intermediate_tensors=None,
            )

    StepReuse._graph, StepReuse._run = graph, run  # type: ignore[method-assign]
