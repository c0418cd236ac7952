"""Adds requests to vLLM with little CPU time.

`LLMEngine.add_request` validates each request, deep-copies its parameters and hashes every block of
its prompt. This takes most of the CPU time of a conversation turn. `TemplatedRequests` uses it only
for the first request with the same sampling parameters, and copies that one for later requests. It
also reuses the block hashes of a conversation's last turn where the token ids are unchanged.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import LLMEngine, SamplingParams

from keel.rollout.recording.base import core_of

_OWN_PARAMS = ("seed", "max_tokens", "routed_experts_prompt_start")
"""Sampling parameters that may differ between requests with the same template."""
_MAX_HASHED_TOKENS = 2**24  # with stored block hashes. Each takes about 9 bytes.


class TemplatedRequests:
    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._core = core_of(engine)
        self._templates: dict[str, Any] = {}  # vLLM's `EngineCoreRequest`s by parameters
        self._open: dict[str, tuple[str, NDArray[np.int32], Any]] = {}
        """The conversation, prompt and vLLM `Request` of each unfinished request."""
        self._hashes = _PrefixHashes(self._core.scheduler.hash_block_size)
        self._known: list[bytes] = []  # stored hashes for the prompt that is being added
        if (hasher := self._core.request_block_hasher) is not None:
            self._core.request_block_hasher = partial(self._hash_new_blocks, hasher)

    def add(
        self,
        name: str,
        context: Sequence[int] | NDArray[np.int32],
        params: Mapping[str, Any],
        *,
        conversation: str,
    ) -> None:
        """Add a request for one completion with the unique `name` and vLLM's sampling `params`.
        Raises ValueError if the request is invalid."""
        ids = np.asarray(context, np.int32)
        prompt = context.tolist() if isinstance(context, np.ndarray) else list(context)
        own = {key: params[key] for key in _OWN_PARAMS if key in params}
        key = repr({**params, **dict.fromkeys(own)})
        if (template := self._templates.get(key)) is None:
            template = self._templates[key] = self._engine.input_processor.process_inputs(
                name,
                {"prompt_token_ids": prompt},
                SamplingParams(**params),
                self._engine.get_supported_tasks(),
            )
        else:
            # vLLM's only check of the ids themselves.
            self._engine.renderer.validate_token_ids((int(ids.min()), int(ids.max())))
        core_request = copy(template)
        core_request.request_id = core_request.external_req_id = name
        core_request.prompt_token_ids = prompt
        core_request.arrival_time = time.time()
        core_request.sampling_params = copy(template.sampling_params)
        for param, value in own.items():
            setattr(core_request.sampling_params, param, value)
        self._known = self._hashes.matching_hashes(conversation, ids)
        try:
            prepared, wave = self._core.preprocess_add_request(core_request)
        finally:  # they must not reach another request
            self._known = []
        self._engine.output_processor.add_request(core_request, None)
        self._core.add_request(prepared, wave)
        if conversation:
            self._open[name] = conversation, ids, prepared

    def store_hashes(self, name: str) -> None:
        """Store the block hashes of a finished or aborted request for the conversation's next
        turn."""
        if (entry := self._open.pop(name, None)) is not None:
            conversation, prompt, request = entry
            sampled = np.array(list(request.output_token_ids), np.int32)
            self._hashes.keep(conversation, np.concatenate([prompt, sampled]), request.block_hashes)

    def _hash_new_blocks(self, hasher: Callable[[Any], list[bytes]], request: Any) -> list[bytes]:
        """Hash only the blocks of a request that don't have a hash yet. Replaces vLLM's block
        hasher."""
        if self._known:
            request.block_hashes += self._known
        return hasher(request)


class _PrefixHashes:
    """Stores the block hashes of the most recent conversations."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._entries: OrderedDict[str, tuple[NDArray[np.int32], list[bytes]]] = OrderedDict()
        self._tokens = 0

    def matching_hashes(self, conversation: str, ids: NDArray[np.int32]) -> list[bytes]:
        """Return the hashes of a conversation's leading blocks whose token ids match the stored
        ones."""
        if (entry := self._entries.get(conversation)) is None:
            return []
        before, hashes = entry
        same = before[: len(ids)] == ids[: len(before)]
        agree = len(same) if same.all() else int(np.argmin(same))
        return hashes[: agree // self._block]

    def keep(self, conversation: str, ids: NDArray[np.int32], hashes: list[bytes]) -> None:
        if (before := self._entries.pop(conversation, None)) is not None:
            self._tokens -= len(before[0])
        self._entries[conversation] = ids, hashes
        self._tokens += len(ids)
        while self._tokens > _MAX_HASHED_TOKENS and len(self._entries) > 1:
            self._tokens -= len(self._entries.popitem(last=False)[1][0])
