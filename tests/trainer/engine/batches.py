"""A tiny mixture of experts, and synthetic rollouts of it with routes and sampling masks.

transformers is imported where it is used: every run of pytest collects this module.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keel.rl.recordings import SamplingMasks
from keel.rl.types import ScoredGroup, Segment
from tests.rl.rollouts import scored, trajectory

VOCABULARY, LAYERS, EXPERTS, TOP_K = 64, 3, 4, 2
DENSE_LAYER = 1
MOST_KEPT = 8
"""Largest sampling mask; recipes have four times as many for top-k."""


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}
_MIXTURE = {"moe_intermediate_size": 32, "num_experts_per_tok": TOP_K, "norm_topk_prob": True}
_LATENT = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": (
        "qwen3_moe",
        {
            **_MIXTURE,
            "mlp_only_layers": [DENSE_LAYER],
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": EXPERTS,
        },
    ),
    "dense": ("qwen3", {"num_key_value_heads": 1, "head_dim": 16}),
    "sparse": (
        "deepseek_v32",
        {
            **_MIXTURE,
            **_LATENT,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "n_routed_experts": EXPERTS,
            "n_group": 1,
            "topk_group": 1,
            "index_n_heads": 8,
            "index_head_dim": 16,
            "index_topk": 4,
        },
    ),
}
"""The family and shape of each model. "dense" has a single key head, and "sparse" attends to 4
tokens."""


def write_model(folder: Path, model: str = "untied", *, seed: int = 0, **changes: Any) -> None:
    """Write one of `MODELS`, or a family with these `changes`, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(seed)
    family, shape = MODELS.get(model, (model, {}))
    config = AutoConfig.for_model(family, **{**_SIZES, **shape, **changes})
    network = AutoModelForCausalLM.from_config(config)
    for name, buffer in network.named_buffers():
        if name.endswith("e_score_correction_bias") and seed:
            buffer.normal_(std=0.1)
    network.save_pretrained(folder)
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

    live: record the routes of this model. prompt: tokens, with routes, that all segments of a group
    begin with. selects: record as many positions per token as sparse attention selects.
    """

    def __init__(
        self,
        seed: int,
        *,
        live: Path | None = None,
        experts: int = EXPERTS,
        windows: int = 2,
        prompt: int = 0,
        selects: int = 0,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._experts, self._windows, self._prompt = experts, windows, prompt
        self._selects = selects
        self._model = None
        if live:
            from transformers import Qwen3MoeForCausalLM  # noqa: PLC0415

            self._model = Qwen3MoeForCausalLM.from_pretrained(live, dtype=torch.float32)

    def groups(self, prompts: int, size: int, *, kl_coef: float = 0.0) -> list[ScoredGroup]:
        return [self._group(f"p{index}", size, kl_coef) for index in range(prompts)]

    def _group(self, prompt_id: str, size: int, kl_coef: float) -> ScoredGroup:
        begun = self._random.integers(0, VOCABULARY, self._prompt).astype(np.int32)
        routes = self._routes(begun) if self._prompt else None
        rewards = self._random.permutation(np.linspace(0, 1, size)).astype(np.float32)
        trajectories = [
            trajectory(
                *(
                    self._segment(prompt_id, begun, routes)
                    for _ in range(self._random.integers(1, self._windows + 1))
                ),
                sibling=sibling,
            )
            for sibling in range(size)
        ]
        parts = [{"correct": float(reward)} for reward in rewards]
        return scored(trajectories, rewards, parts=parts, kl_coef=kl_coef)  # type: ignore[arg-type]

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
            selected_TLb=self._selected(length) if self._selects else None,
        )

    def _selected(self, length: int) -> NDArray[np.uint8]:
        """Bitmaps of random earlier positions, all zero for some tokens."""
        scores = self._random.random((length, LAYERS, length))
        scores *= np.tri(length)[:, None]
        chosen = scores.argsort(-1).argsort(-1) >= length - self._selects
        chosen[: self._selects] = False
        chosen[self._random.integers(length)] = False
        return np.packbits(chosen, axis=-1, bitorder="little")

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
