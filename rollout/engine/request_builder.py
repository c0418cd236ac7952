"""A shorter way to add requests to vLLM, for turns of conversations.

`LLMEngine.add_request` checks a request, copies its parameters deeply and hashes each block of its
prompt, which is most of what a turn costs the host. Almost all of it is the same for all turns: the
parameters but for three numbers, and the hashes of what the conversation's last turn has seen. Here
the first request of a kind goes vLLM's way and the others are made like it; hashes are kept by
conversation and taken over for as many ids as are still the same.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keel.rollout.engine.jobs import Ids

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams

MOST_TOKENS = 2**24
"""Whose hashes are kept, of all conversations together: some 9 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    name: str
    """Unique in the engine."""
    ids: Ids
    conversation: str
    """Whose last turn's ids it goes on from; empty: none's."""
    kind: Hashable
    """Equal for requests whose parameters differ by `varying` alone."""
    varying: dict[str, int]
    params: Callable[[], SamplingParams]


class BeginLikeTheLast:
    """Adds requests to one engine, copying what the first request of each kind went through."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._core: Any = engine.engine_core.engine_core  # pyright: ignore[reportAttributeAccessIssue]
        self._kinds: dict[Hashable, Any] = {}
        """vLLM's `EngineCoreRequest` of the first of each kind."""
        self._open: dict[str, tuple[str, NDArray[np.int32], Any]] = {}
        """Conversation, prompt and vLLM's `Request` of those that have not ended."""
        self._hashes = PrefixHashes(self._core.scheduler.hash_block_size)
        self._known: list[bytes] = []
        """Hashes of the first blocks of the request that is being made."""
        if (hasher := self._core.request_block_hasher) is not None:
            self._core.request_block_hasher = partial(self._hash, hasher)

    def begin(self, asked: Asked) -> str:
        """Add a request and return vLLM's own id for it. Raises ValueError for a bad request."""
        ids = np.asarray(asked.ids, np.int32)
        listed = _listed(asked.ids)
        if (first := self._kinds.get(asked.kind)) is None:
            first = self._engine.input_processor.process_inputs(
                asked.name,
                {"prompt_token_ids": listed},
                asked.params(),
                self._engine.get_supported_tasks(),
            )
            self._kinds[asked.kind] = first
        else:
            # All that vLLM looks at in a prompt of ids, beside its length.
            self._engine.renderer.validate_token_ids((int(ids.min()), int(ids.max())))
        request = copy(first)
        request.request_id = request.external_req_id = asked.name
        request.prompt_token_ids = listed
        request.arrival_time = time.time()
        request.sampling_params = params = copy(first.sampling_params)
        for name, value in asked.varying.items():
            setattr(params, name, value)
        self._known = self._hashes.of(asked.conversation, ids)
        try:
            made, wave = self._core.preprocess_add_request(request)
        finally:  # whatever became of this request, they are no other's
            self._known = []
        self._engine.output_processor.add_request(request, None)
        self._core.add_request(made, wave)
        if asked.conversation:
            self._open[asked.name] = asked.conversation, ids, made
        return asked.name

    def ended(self, internal: str) -> None:
        """Note that a request has finished or was aborted."""
        if (of := self._open.pop(internal, None)) is not None:
            conversation, prompt, made = of
            sampled = np.array(list(made.output_token_ids), np.int32)
            self._hashes.keep(conversation, np.concatenate([prompt, sampled]), made.block_hashes)

    def _hash(self, hasher: Callable[[Any], list[bytes]], request: Any) -> list[bytes]:
        """In the place of vLLM's: hashes of the blocks of a request that have none yet."""
        if self._known:
            request.block_hashes += self._known
        return hasher(request)


class PrefixHashes:
    """Hashes of the full blocks of each conversation's ids, those of the latest conversations."""

    def __init__(self, block: int) -> None:
        """`block`: tokens."""
        self._block = block
        self._of: OrderedDict[str, tuple[NDArray[np.int32], list[bytes]]] = OrderedDict()
        self._tokens = 0

    def of(self, conversation: str, ids: NDArray[np.int32]) -> list[bytes]:
        """Of as many of its first blocks as have the ids that they had."""
        if (known := self._of.get(conversation)) is None:
            return []
        before, hashes = known
        same = before[: len(ids)] == ids[: len(before)]
        agree = len(same) if same.all() else int(np.argmin(same))
        return hashes[: agree // self._block]

    def keep(self, conversation: str, ids: NDArray[np.int32], hashes: list[bytes]) -> None:
        """Those of the ids of a conversation as they are now."""
        if (before := self._of.pop(conversation, None)) is not None:
            self._tokens -= len(before[0])
        self._of[conversation] = ids, hashes
        self._tokens += len(ids)
        while self._tokens > MOST_TOKENS and len(self._of) > 1:
            self._tokens -= len(self._of.popitem(last=False)[1][0])


def _listed(ids: Ids) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
