"""Adds requests for conversation turns to vLLM faster than `LLMEngine.add_request`. For each
request, vLLM validates it, deep-copies its parameters and hashes every block of its prompt. This
takes most of the CPU time of a turn. This module adds only the first request of each kind with
vLLM's own method, and copies it for later requests. It also reuses the block hashes of a
conversation's last turn where the token ids are unchanged."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams

_MAX_HASHED_TOKENS = 2**24
"""Maximum number of tokens whose block hashes are stored, over all conversations. Each token takes
about 9 bytes."""


class TemplatedRequests:
    """Adds requests to an engine by copying the first request of each kind."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._core: Any = engine.engine_core.engine_core  # pyright: ignore[reportAttributeAccessIssue]
        self._templates: dict[Hashable, Any] = {}
        """Maps each kind of request to vLLM's `EngineCoreRequest` for the first one."""
        self._open: dict[str, tuple[str, NDArray[np.int32], Any]] = {}
        """Conversation, prompt and vLLM's `Request` of each unfinished request."""
        self._hashes = _PrefixHashes(self._core.scheduler.hash_block_size)
        self._known: list[bytes] = []
        """Stored block hashes for the first blocks of the prompt that is being added."""
        if (hasher := self._core.request_block_hasher) is not None:
            self._core.request_block_hasher = partial(self._hash, hasher)

    def add(
        self,
        name: str,
        context: Sequence[int] | NDArray[np.int32],
        *,
        conversation: str,
        kind: Hashable,
        varying: Mapping[str, int],
        params: Callable[[], SamplingParams],
    ) -> None:
        """Add a request for one completion, with `name` as vLLM's id for it. `name` must be unique,
        and `conversation` may be empty. Two requests have the same `kind` if their `params` differ
        only in `varying`. Raises ValueError if the request is invalid."""
        ids = np.asarray(context, np.int32)
        prompt = context.tolist() if isinstance(context, np.ndarray) else list(context)
        if (template := self._templates.get(kind)) is None:
            template = self._engine.input_processor.process_inputs(
                name, {"prompt_token_ids": prompt}, params(), self._engine.get_supported_tasks()
            )
            self._templates[kind] = template
        else:
            # vLLM's only check of the ids themselves.
            self._engine.renderer.validate_token_ids((int(ids.min()), int(ids.max())))
        core_request = copy(template)
        core_request.request_id = core_request.external_req_id = name
        core_request.prompt_token_ids = prompt
        core_request.arrival_time = time.time()
        core_request.sampling_params = copy(template.sampling_params)
        for key, value in varying.items():
            setattr(core_request.sampling_params, key, value)
        self._known = self._hashes.prefix(conversation, ids)
        try:
            prepared, wave = self._core.preprocess_add_request(core_request)
        finally:  # they must not reach another request
            self._known = []
        self._engine.output_processor.add_request(core_request, None)
        self._core.add_request(prepared, wave)
        if conversation:
            self._open[name] = conversation, ids, prepared

    def ended(self, name: str) -> None:
        """Store a request's block hashes once it has finished or been aborted, so that the
        conversation's next turn can reuse them."""
        if (entry := self._open.pop(name, None)) is not None:
            conversation, prompt, request = entry
            sampled = np.array(list(request.output_token_ids), np.int32)
            self._hashes.keep(conversation, np.concatenate([prompt, sampled]), request.block_hashes)

    def _hash(self, hasher: Callable[[Any], list[bytes]], request: Any) -> list[bytes]:
        """Return hashes for the blocks that have none yet. This method replaces vLLM's block
        hasher."""
        if self._known:
            request.block_hashes += self._known
        return hasher(request)


class _PrefixHashes:
    """Stores the block hashes of the most recent conversations."""

    def __init__(self, block: int) -> None:
        """Create an empty store for blocks of `block` tokens."""
        self._block = block
        self._entries: OrderedDict[str, tuple[NDArray[np.int32], list[bytes]]] = OrderedDict()
        self._tokens = 0

    def prefix(self, conversation: str, ids: NDArray[np.int32]) -> list[bytes]:
        """Return the hashes of the leading blocks of a conversation, as far as its token ids are
        unchanged."""
        if (entry := self._entries.get(conversation)) is None:
            return []
        before, hashes = entry
        same = before[: len(ids)] == ids[: len(before)]
        agree = len(same) if same.all() else int(np.argmin(same))
        return hashes[: agree // self._block]

    def keep(self, conversation: str, ids: NDArray[np.int32], hashes: list[bytes]) -> None:
        """Store the hashes of a conversation, and drop the oldest conversations if too many are
        stored."""
        if (before := self._entries.pop(conversation, None)) is not None:
            self._tokens -= len(before[0])
        self._entries[conversation] = ids, hashes
        self._tokens += len(ids)
        while self._tokens > _MAX_HASHED_TOKENS and len(self._entries) > 1:
            self._tokens -= len(self._entries.popitem(last=False)[1][0])
