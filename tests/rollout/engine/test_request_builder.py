"""Tests that requests copied from a template equal the requests that vLLM would create."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keel.rollout.engine.request_builder import TemplatedRequests

BLOCK = 4


def ids(*parts: range) -> Any:
    return np.concatenate([np.arange(p.start, p.stop, dtype=np.int32) for p in parts])


class Engine:
    """The parts of vLLM that handle a request before it is scheduled."""

    def __init__(self) -> None:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.utils.hashing import sha256  # noqa: PLC0415
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: PLC0415
        from vllm.v1.engine import EngineCoreRequest  # noqa: PLC0415
        from vllm.v1.engine.core import EngineCore  # noqa: PLC0415

        init_none_hash(sha256)
        self.make, self.params, self.prepare = EngineCoreRequest, SamplingParams, EngineCore
        self.plain: Callable[[Any], list[bytes]] = get_request_block_hasher(BLOCK, sha256)
        self.request_block_hasher: Any = self.counted
        self.hashed = 0
        self.added: list[Any] = []
        self.processed = 0
        self.looked_at: list[tuple[int, ...]] = []
        self.mm_receiver_cache, self.scheduler = None, SimpleNamespace(hash_block_size=BLOCK)
        self.engine_core = SimpleNamespace(engine_core=self)
        self.input_processor = self
        self.output_processor = SimpleNamespace(add_request=lambda request, prompt: None)
        self.renderer = SimpleNamespace(validate_token_ids=self.looked_at.append)

    def counted(self, request: Any) -> list[bytes]:
        hashes = self.plain(request)
        self.hashed += len(hashes)
        return hashes

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def process_inputs(self, name: str, prompt: Any, params: Any, tasks: Any) -> Any:
        self.processed += 1
        return self.make(
            name, prompt["prompt_token_ids"], None, params, None, 0.0, None, None, None
        )

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        return self.prepare.preprocess_add_request(self, request)  # type: ignore[arg-type]

    def add_request(self, request: Any, wave: int) -> None:
        self.added.append(request)


@pytest.mark.e2e
def test_turns_equal_vllms_own_requests() -> None:
    engine = Engine()
    requests: Any = TemplatedRequests(engine)  # type: ignore[arg-type]
    context = ids(range(100))
    for turn in range(3):
        varying: dict[str, Any] = {
            "seed": 7 + turn,
            "max_tokens": 20 + turn,
            "routed_experts_prompt_start": turn,
        }
        params = lambda varying=varying: engine.params(top_k=5, **varying)  # noqa: E731
        before, name = engine.hashed, f"{turn}.0"
        requests.add(
            *(name, context), conversation="talk", kind="kind", varying=varying, params=params
        )
        made = engine.added[-1]
        assert made.request_id == name
        assert made.prompt_token_ids == context.tolist()
        assert made.sampling_params == params()
        assert made.max_tokens == 20 + turn
        assert engine.hashed - before == (4 if turn else 25), "only new blocks"
        made.append_output_token_ids(list(range(200, 211)))
        requests.ended(name)
        context = np.concatenate([context, ids(range(200, 211), range(300, 313))])
        fresh = SimpleNamespace(
            block_hashes=[],
            num_tokens=made.num_tokens,
            all_token_ids=made.all_token_ids,
            mm_features=[],
            lora_request=None,
            cache_salt=None,
            prompt_embeds=None,
        )
        assert made.block_hashes == engine.plain(fresh)
    assert engine.processed == 1
    assert engine.looked_at == [(0, 312), (0, 312)]
