"""Keel's engine with nothing behind it: all of the host's work for a request, and no model.

Tokens, log-probabilities, sampling masks and routes are made up ahead and come in the forms in
which Model Runner V2 returns them, so the packed recorder runs, with its scheduler. Import it in a
process of its own, after `environment` has been put in place there.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import vllm as vllm_config
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplingMaskLists

from keel.configs.schema import EmbeddedConfig, RolloutConfig, SamplingConfig
from keel.model.embedded.build import build_model
from keel.model.embedded.tokenizer import build_tokenizer
from keel.rollout.engine import vllm_engine
from keel.rollout.spec import EngineSpec

LAYERS, EXPERTS_PER_TOKEN = 16, 4
KEPT = 8
"""Ids of each sampling mask."""
BLOCK = 16
"""Tokens of a KV block, as on a GPU."""
FIRST_TOKEN, LAST_TOKEN = 30, 90
"""Of those that are sampled: none of them ends a turn."""


class NoModel(Executor):
    """Answers at once. `seconds`: its own time so far, which is not the engine's."""

    def _init_executor(self) -> None:
        self.seconds = 0.0
        self._tokens: dict[str, int] = {}
        """Tokens known of each request."""
        self._order: dict[str, int] = {}
        self._draw = np.random.default_rng(0)
        self._routes = self._draw.integers(
            1, 32, (1 << 15, LAYERS, EXPERTS_PER_TOKEN), dtype=np.int16
        )

    def collective_rpc(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        answer: Any = None
        if method == "get_kv_cache_spec":
            spec = FullAttentionSpec(
                block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.bfloat16
            )
            answer = {"model.layers.0.self_attn.attn": spec}
        elif method == "get_supported_kv_cache_layouts":
            answer = ["NHD"]
        elif method == "get_supported_tasks":
            answer = ("generate",)
        elif method == "determine_available_memory":
            answer = 1 << 30
        elif method == "keel_finished_routes":
            (requests,) = args
            answer = [self._routes[: len(blocks) * BLOCK - first] for blocks, first in requests]
        elif method == "keel_routes":
            _, first, tokens = args
            answer = self._routes[: tokens - first]
        elif method == "keel_fingerprint":  # of a checkpoint that is loaded again
            answer = {"weights": "0"}
        elif method == "compile_or_warm_up_model":
            return []
        return [answer]

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def check_health(self) -> None:
        pass

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        began = time.thread_time()
        self._next = self._run(scheduler_output)
        done: Future[Any] = Future()
        done.set_result(None if self._next.req_ids else self._next)
        self.seconds += time.thread_time() - began
        return done if non_block else done.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        done: Future[Any] = Future()
        done.set_result(self._next)
        return done if non_block else done.result()

    def _run(self, step: Any) -> ModelRunnerOutput:
        for name in step.finished_req_ids:
            self._tokens.pop(name, None)
        computed: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            self._tokens[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        names = list(step.num_scheduled_tokens)
        rows = len(names)
        if not rows:
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})
        drawn: list[bool] = []
        for name, tokens in step.num_scheduled_tokens.items():
            drawn.append(computed[name] + tokens == self._tokens[name])
            self._tokens[name] += drawn[-1]
        sampled = self._draw.integers(FIRST_TOKEN, LAST_TOKEN, (rows, 1))
        logp = np.full((rows, 1), -0.5, np.float32)
        ids = sampled + np.arange(KEPT)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[
                row if kept else [] for row, kept in zip(sampled.tolist(), drawn, strict=True)
            ],
            logprobs=LogprobsLists(np.full((rows, 1), -1), logp, np.zeros(rows, np.int64)),
            sampling_masks=SamplingMaskLists(
                ids.ravel().astype(np.int32), np.arange(rows + 1) * KEPT
            ),
        )


def engine_without_model(folder: Path, *, seats: int, context: int) -> Any:
    """A `VllmEngine` of `seats` sequences at once, with a window of `context` tokens."""
    tokenizer = build_tokenizer()
    build_model(EmbeddedConfig(max_context=context), tokenizer, seed=0).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
    tokenizer.save_pretrained(folder)
    checks: Any = vllm_config
    checks.HAS_TRITON = True  # which Model Runner V2 needs, and nothing here
    vllm_engine.recorder_name = lambda *_, **__: "packed"  # pyright: ignore[reportAttributeAccessIssue]
    arguments = vllm_engine.engine_args

    def without_model(*given: Any) -> Any:
        args = arguments(*given)
        args.distributed_executor_backend = NoModel
        args.block_size = BLOCK
        args.num_gpu_blocks_override = seats * (context // BLOCK + 8)
        return args

    vllm_engine.engine_args = without_model
    spec = EngineSpec(
        model_path=str(folder),
        tokenizer=str(folder),
        config=RolloutConfig(
            sampling=SamplingConfig(top_p=0.95, top_k=64, max_tokens=1600), max_num_seqs=seats
        ),
        dtype="float32",
        max_model_len=context,
        seed=0,
        keep_routing=True,
        keep_sampling_mask=True,
    )
    return vllm_engine.VllmEngine(spec)
