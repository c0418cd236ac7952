"""Records from the outputs of vLLM's Model Runner V2 on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from keel.configs.schema import SamplingConfig
from keel.rl.recordings import SamplingMasks
from keel.rollout.recording.base import (
    Recorder,
    RecordingOptions,
    core_of,
    default_top_k,
)
from keel.rollout.spec import RecordingError

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput


class NativeRecorder(Recorder):
    """Records the `routed_experts`, `sampling_mask` and `logprobs` that vLLM returns, after
    checking and reshaping them.

    vLLM doesn't return sparse attention selections, so `SelectionExtension` records them.
    """

    def __init__(self, **recorded: bool) -> None:
        super().__init__(**recorded)
        if self._records_selection:
            self.worker_extension = "keel.rollout.recording.selection.SelectionExtension"

    def engine_args(self) -> dict[str, Any]:
        return {
            "enable_return_routed_experts": self._records_routes,
            "return_sampling_mask": self._records_masks,
        }

    def attach(self, engine: LLMEngine) -> None:
        layers = engine.collective_rpc("keel_moe_layers")[0]
        self._moe_layers = np.asarray(layers, np.int64)
        self._engine = engine
        self._blocks: dict[str, list[int]] = {}
        """Cache blocks of requests that finished in the last step and have a selection."""
        if self._records_selection:
            self._top_k = engine.vllm_config.model_config.hf_text_config.index_topk
            scheduler = core_of(engine).scheduler
            self._save_before_preemption(scheduler, self._selected)
            free = scheduler._free_request

            def patched(request: Any, *args: Any, **kwargs: Any) -> Any:
                name = request.request_id
                if (options := self._options.get(name)) is not None and options.selection:
                    self._blocks[name] = scheduler.kv_cache_manager.get_block_ids(name)[0]
                return free(request, *args, **kwargs)

            scheduler._free_request = patched

    def _selected(self, blocks: Sequence[int], first: int, tokens: int) -> NDArray[np.uint8]:
        return self._engine.collective_rpc("keel_selections", args=(blocks, first, tokens))[0]

    def sampling_args(self, sampling: SamplingConfig, options: RecordingOptions) -> dict[str, Any]:
        bound = default_top_k(sampling, options) if self._records_masks else {}
        start = {"routed_experts_prompt_start": options.routes_from} if options.routes else {}
        return {"logprobs": 0, "flat_logprobs": True, **bound, **start}

    def _logprobs(self, request_id: str, output: CompletionOutput) -> NDArray[np.float32]:
        flat = cast("FlatLogprobs | None", output.logprobs)  # requested in `sampling_args`
        if flat is None:
            raise RecordingError(f"request {request_id}: the engine returned no logprobs")
        first = np.asarray(flat.start_indices, np.int64)  # the sampled token comes first
        if not np.array_equal(np.asarray(flat.token_ids)[first], np.asarray(output.token_ids)):
            raise RecordingError(
                f"request {request_id}: the logprobs do not belong to the completion's tokens"
            )
        return np.asarray(flat.logprobs, np.float32)[first]

    def _sampling_masks(self, request_id: str, output: CompletionOutput) -> SamplingMasks:
        # A missing mask never means that sampling was not truncated.
        if output.sampling_mask is None:
            raise RecordingError(f"request {request_id}: the engine returned no sampling mask")
        return SamplingMasks.from_lists(output.sampling_mask.token_ids)

    def _routes(
        self, request_id: str, output: CompletionOutput, first: int, last: int
    ) -> NDArray[np.int16]:
        if output.routed_experts is None:
            raise RecordingError(f"request {request_id}: the engine returned no routes")
        # The engine also returns zeros for every dense layer.
        return output.routed_experts[:, self._moe_layers].astype(np.int16)

    def _selections(self, request_id: str, first: int, last: int) -> NDArray[np.uint8]:
        blocks = self._blocks.get(request_id, ())

        def read_after(count: int) -> NDArray[np.uint8]:
            return self._selected(blocks, first + count, last)

        selected = self._rows(request_id, last - first, read_after)
        words = selected[..., : 4 * -(-last // 32)].view(np.uint32)
        _check_selected(request_id, words, first, self._top_k)
        return selected[..., : -(-last // 8)]

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._blocks.pop(request_id, None)


def _check_selected(request_id: str, selected: NDArray[Any], first: int, top_k: int) -> None:
    """Raise RecordingError unless every token after the first `top_k` of the context has a
    selection of `top_k` positions in every layer. The first row of `selected` belongs to the token
    at position `first`."""
    counts = np.bitwise_count(selected[max(0, top_k - first) :]).sum(-1, dtype=np.int64)
    if (counts != top_k).any():
        raise RecordingError(
            f"request {request_id}: some of its tokens have no complete selection of sparse "
            "attention, so the trainer cannot replay the completion"
        )
