"""Records which tokens sparse attention selects in DeepSeek-V3.2's layers, on GPUs. vLLM imports
this module in each worker as its extension class, before it builds the model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v32 import attention

from keel.weights.loader import WeightsExtension

_BLOCK = 512


class _SelectionTable:
    """Stores the selections of one layer on the GPU, as bitmaps indexed by KV cache slot.

    A token keeps its slot as long as another token attends to it. Selections can therefore be
    looked up through a request's blocks, even after chunked prefills or with shared prefixes. The
    tables have fixed addresses, because CUDA graphs write to them.
    """

    def __init__(self, cache: Tensor, context: int) -> None:
        """Allocate the table for the slots of a key cache [blocks, block size, …] and contexts of
        up to `context` tokens."""
        self.cache = cache.data_ptr()
        slots, words = cache.shape[0] * cache.shape[1], -(-context // 32)
        try:
            self.bitmaps = torch.zeros(slots, words, dtype=torch.int32, device=cache.device)
        except torch.cuda.OutOfMemoryError as error:
            raise RuntimeError(
                f"algorithm.keep_selection: the selections of one layer take {slots * words >> 28} "
                f"GiB ({slots:,} cached tokens, contexts of {context:,}), and the GPU has no room. "
                "Lower rollout.gpu_memory_utilization or rollout.max_num_seqs, or set "
                "keep_selection: false"
            ) from error

    def store(self, chosen: Tensor, slots: Tensor) -> None:
        """Store the selections of a step: the positions `chosen` [n, k] int32, padded with −1, for
        the tokens in `slots` [n]. Tokens with slot −1 are padding."""
        (count, words), top_k = self.bitmaps.shape, chosen.shape[1]
        sizes: dict[str, Any] = {"BLOCK": _BLOCK}
        _store[(len(chosen),)](
            chosen, slots, self.bitmaps, chosen.stride(0), top_k, count, words, **sizes
        )


@triton.jit
def _store(chosen, slots, bitmaps, stride, top_k, count, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (slot < count):
        own = bitmaps + slot * words
        at = tl.arange(0, BLOCK)
        for start in range(0, words, BLOCK):
            tl.store(own + start + at, 0, mask=start + at < words)
        tl.debug_barrier()
        for start in range(0, top_k, BLOCK):
            place = tl.load(chosen + row * stride + start + at, mask=start + at < top_k, other=-1)
            known = (place >= 0) & (place < words * 32)
            bit = (tl.full([BLOCK], 1, tl.int32) << (place % 32)).to(tl.int32)
            tl.atomic_or(own + place // 32, bit, mask=known, sem="relaxed")


_tables: dict[str, _SelectionTable] = {}
"""Maps the key cache of each layer with an indexer to its table, in layer order."""
_attention: Any = attention
_select = _attention.sparse_attn_indexer


def _select_and_record(
    query: Tensor, layer: str, cache: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Call vLLM's indexer and store its selection. `args[8]` is the engine's maximum context
    length."""
    chosen = _select(query, layer, cache, *args, **options)
    slots = get_forward_context().slot_mapping
    if isinstance(slots, dict) and layer in slots and cache.numel():
        table = _tables.get(layer)
        if table is None or table.cache != cache.data_ptr():
            table = _tables[layer] = _SelectionTable(cache, args[8])
        table.store(chosen[: min(len(query), len(slots[layer]))], slots[layer])
    return chosen


_attention.sparse_attn_indexer = _select_and_record


class SelectionExtension(WeightsExtension):
    """Methods that vLLM adds to its workers. All ranks have the same selections."""

    def keel_selections(self, blocks: Sequence[int], first: int, tokens: int) -> NDArray[np.uint8]:
        """Return bitmaps [tokens − first, L, b] of the positions that each token selected, for the
        request with these cache blocks. They have `tokens` bits, rounded up to 32-bit words. A
        bitmap is zero if its token attends to its whole context. Ranks other than 0 return an empty
        array."""
        if self.rank:
            return np.empty(0, np.uint8)
        (group,) = self.model_runner.kv_cache_config.kv_cache_groups
        size = group.kv_cache_spec.block_size
        positions = np.arange(first, tokens)
        slots = np.asarray(blocks, np.int64)[positions // size] * size + positions % size
        index, words = torch.from_numpy(slots).to(self.device), -(-tokens // 32)
        rows = np.empty((len(slots), len(_tables), words), np.int32)
        for layer, table in enumerate(_tables.values()):
            rows[:, layer] = table.bitmaps[:, :words][index].cpu().numpy()
        top_k: int = self.model_runner.model_config.hf_text_config.index_topk
        rows[positions < top_k] = 0
        return rows.view(np.uint8)
