"""A tiny mixture of experts, and synthetic rollouts of it with routes and sampling masks.

transformers is imported where it is used: every run of pytest collects this module.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from keel.rl.types import Group, Prompt, SamplingMasks, ScoredGroup, Segment, Trajectory

VOCABULARY, LAYERS, EXPERTS, TOP_K = 64, 3, 4, 2
DENSE_LAYER = 1
MOST_KEPT = 8
"""Largest sampling mask; recipes have four times as many for top-k."""


def write_model(folder: Path, *, tied: bool = False, head_dim: int = 16) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        mlp_only_layers=[DENSE_LAYER],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)


def write_dense(folder: Path, *, hidden_size: int = 64) -> None:
    """A dense model with a single key head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)


def write_sparse(folder: Path) -> None:
    """A model with sparse attention over 4 tokens and the routers of `write_model`."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = DeepseekV32Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        mlp_layer_types=["dense" if layer == DENSE_LAYER else "sparse" for layer in range(LAYERS)],
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=1,
        topk_group=1,
        index_n_heads=8,
        index_head_dim=16,
        index_topk=4,
        initializer_range=0.1,
    )
    DeepseekV32ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer  # noqa: PLC0415
    from tokenizers.models import WordLevel  # noqa: PLC0415
    from tokenizers.pre_tokenizers import Whitespace  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


class Rollouts:
    """Seeded scored groups of trajectories of up to `windows` segments.

    live_routes: record the routes of the model itself. prompt: tokens, with routes, that all
    segments of a group begin with.
    """

    def __init__(
        self,
        seed: int,
        model_path: Path,
        *,
        live_routes: bool = False,
        experts: int = EXPERTS,
        windows: int = 2,
        prompt: int = 0,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._experts, self._windows, self._prompt = experts, windows, prompt
        self._model = None
        if live_routes:
            from transformers import Qwen3MoeForCausalLM  # noqa: PLC0415

            self._model = Qwen3MoeForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    def groups(self, prompts: int, size: int, *, kl_coef: float = 0.0) -> list[ScoredGroup]:
        return [self._group(f"p{index}", size, kl_coef) for index in range(prompts)]

    def _group(self, prompt_id: str, size: int, kl_coef: float) -> ScoredGroup:
        begun = self._random.integers(0, VOCABULARY, self._prompt).astype(np.int32)
        routes = self._routes(begun) if self._prompt else None
        rewards = self._random.permutation(np.linspace(0, 1, size)).astype(np.float32)
        message = {"role": "user", "content": "?"}
        return ScoredGroup(
            group=Group(
                prompt=Prompt(
                    prompt_id=prompt_id, domain="d", messages=(message,), kl_coef=kl_coef
                ),
                trajectories=tuple(
                    Trajectory(
                        prompt_id=prompt_id,
                        sibling=sibling,
                        segments=tuple(
                            self._segment(prompt_id, begun, routes)
                            for _ in range(self._random.integers(1, self._windows + 1))
                        ),
                        finish_reason="stop",
                        messages=(),
                    )
                    for sibling in range(size)
                ),
            ),
            rewards_G=rewards,
            parts_G=tuple({"correct": float(reward)} for reward in rewards),
            advantages_G=rewards - rewards.mean(),
        )

    def _segment(
        self, prompt_id: str, begun: NDArray[np.int32], routes: NDArray[np.int16] | None
    ) -> Segment:
        random = self._random
        prompt, answer = len(begun) + random.integers(2, 6), random.integers(3, 12)
        length = prompt + answer
        tokens = random.integers(0, VOCABULARY, length).astype(np.int32)
        tokens[: len(begun)] = begun
        sampled = np.arange(length) >= prompt
        spans = [self._kept(token) if on else [] for token, on in zip(tokens, sampled, strict=True)]
        sizes = np.array([len(span) or VOCABULARY for span in spans])
        logp = np.minimum(-np.log(sizes) + random.normal(0, 0.3, length), -0.01)
        local = self._routes(tokens)
        if routes is not None:
            local[: len(begun)] = routes
        return Segment(
            prompt_id=prompt_id,
            token_ids_T=tokens,
            trainable_T=sampled,
            logp_old_T=np.where(sampled, logp, 0).astype(np.float32),
            version_T=np.where(sampled, 0, -1).astype(np.int32),
            routes_TLK=local,
            sampling_mask=SamplingMasks.from_lists(spans),
        )

    def _kept(self, token: int) -> NDArray[np.int64]:
        """A sampling mask with the token; one in five tokens has none."""
        if self._random.random() < 0.2:
            return np.zeros(0, np.int64)
        others = np.delete(np.arange(VOCABULARY), token)
        return np.append(
            self._random.choice(others, self._random.integers(1, MOST_KEPT), False), token
        )

    def _routes(self, tokens: NDArray[np.int32]) -> NDArray[np.int16]:
        layers = LAYERS - 1
        if self._model is None:
            scores = self._random.random((len(tokens), layers, self._experts))
            routes = scores.argsort(-1)[..., :TOP_K]
        else:
            with torch.no_grad():
                output = self._model(torch.tensor(tokens)[None].long(), output_router_logits=True)
            chosen = [logits.topk(TOP_K).indices for logits in output.router_logits]
            routes = torch.stack(chosen, 1).numpy()
        routes = routes.astype(np.int16)
        routes[self._random.integers(len(tokens))] = -1  # an unrecorded row
        routes[-1] = -1
        return routes
