"""What torch.compile makes of a decoder layer, with a stand-in for flash attention."""

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
from keel.trainer.engine.layer_compile import SEGMENTS, TOKENS, segments_of

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
    """Takes what flash attention takes and looks at nothing."""
    times = query.shape[1] // key.shape[1]
    seen = (key + value).repeat_interleave(times, 1)
    return query + seen + segments.offsets[-1] * segments.longest


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """What is compiled, of models that take `blind` for flash attention."""
    graphs: list[GraphModule] = []

    def count(graph: GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(attention, "_has_flash", lambda *_: True)
    monkeypatch.setattr(attention, "_varlen", blind)
    monkeypatch.setattr(layer_compile, "BACKEND", count)
    return graphs


def test_all_layers_are_one_graph_for_rows_of_any_length(graphs: list[GraphModule]) -> None:
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


def test_no_variant_of_a_layer_runs_uncompiled(graphs: list[GraphModule]) -> None:
    """PyTorch compiles 8 of a function, and runs any more as they are: on one rank, perhaps, and
    not on another, whose gradients then come in another order."""
    torch._dynamo.reset()
    for count in range(1, 13):
        sizes = {"intermediate_size": 8 * count}
        model = AutoModelForCausalLM.from_config(Qwen3Config(**{**CONFIG.to_dict(), **sizes}))
        use_packed_attention(model)
        layer_compile.compile_layers(model)
        tokens = torch.zeros((1, 9), dtype=torch.long)
        model.get_decoder()(input_ids=tokens, use_cache=False, segments=Segments.of((5, 4)))
        assert len(graphs) == count


def test_the_warm_up_is_of_no_size_that_a_model_has(graphs: list[GraphModule]) -> None:
    """Sizes that are equal at the first call are taken for one, and other rows compile again."""
    assert segments_of(0) == SEGMENTS
    for head_dim in (64, 128, 192, 256):
        sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": head_dim}
        model = AutoModelForCausalLM.from_config(Qwen3Config(**{**CONFIG.to_dict(), **sizes}))
        use_packed_attention(model)
        layer_compile.compile_layers(model)
        # As many as have head_dim offsets would be one too many.
        for count in (SEGMENTS, segments_of((head_dim - 1) * TOKENS)):
            torch._dynamo.reset()
            graphs.clear()
            for lengths in [(TOKENS,) * count, (5, 9, 2), (head_dim, head_dim), (31,)]:
                tokens = torch.zeros((1, sum(lengths)), dtype=torch.long)
                segments = Segments.of(lengths)
                model.get_decoder()(input_ids=tokens, use_cache=False, segments=segments)
                assert len(graphs) == 1, (head_dim, lengths)
