"""Graphs of compiled decoder layers, with a stand-in for flash attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from transformers import AutoModelForCausalLM, Qwen3Config

from keel.model import attention
from keel.model.attention import Segments, use_packed_attention
from keel.trainer.engine import layer_compile

pytestmark = pytest.mark.e2e

CONFIG = Qwen3Config(
    vocab_size=31,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def blind(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *_: Any) -> Tensor:
    """A stand-in with the signature of flash attention."""
    times = query.shape[1] // key.shape[1]
    seen = (key + value).repeat_interleave(times, 1)
    return query + seen + segments.offsets[-1] * segments.longest


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """Compiled graphs of models that use `blind` as flash attention."""
    graphs: list[GraphModule] = []

    def count(graph: GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(attention, "_has_flash", lambda *_: True)
    monkeypatch.setattr(attention, "_varlen", blind)
    monkeypatch.setattr(layer_compile, "BACKEND", count)
    return graphs


def test_layers_share_one_graph_for_any_length(graphs: list[GraphModule]) -> None:
    model = AutoModelForCausalLM.from_config(CONFIG)
    use_packed_attention(model)
    layer_compile.compile_layers(model)
    for lengths in [(5, 9, 2), (4, 3), (7, 7, 7, 30)]:
        tokens = torch.zeros((1, sum(lengths)), dtype=torch.long)
        inputs = {"input_ids": tokens, "use_cache": False, "segments": Segments.of(lengths)}
        decoder = model.get_decoder()
        assert decoder(**inputs).last_hidden_state.requires_grad
        assert len(graphs) == 1
    with torch.no_grad():  # evaluation, or a reference policy
        decoder(**inputs)
    assert len(graphs) <= 2


def test_every_layer_variant_is_compiled(graphs: list[GraphModule]) -> None:
    """PyTorch compiles 8 variants by default; uncompiled ones would reorder gradients on a rank."""
    torch._dynamo.reset()
    for count in range(1, 13):
        sizes = {"intermediate_size": 8 * count}
        model = AutoModelForCausalLM.from_config(Qwen3Config(**{**CONFIG.to_dict(), **sizes}))
        use_packed_attention(model)
        layer_compile.compile_layers(model)
        tokens = torch.zeros((1, 9), dtype=torch.long)
        model.get_decoder()(input_ids=tokens, use_cache=False, segments=Segments.of((5, 4)))
        assert len(graphs) == count
