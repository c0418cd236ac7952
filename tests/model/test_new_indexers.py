"""A dense DeepSeek-V3 model becomes a DeepSeek-V3.2 model, whose indexers a warm-up trains."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from keel.configs.schema import ConfigError
from keel.model.attention import Segments, use_packed_attention
from keel.model.load import checkpoint_tensors, load_model_config, load_policy
from keel.model.sparse.attention import SparsePass, use_sparse_attention
from keel.model.trainable import lacks_indexers, trainable_facts
from keel.trainer.engine.weights import write_model
from tests.model.families import VOCAB, build
from tests.model.quantised import quantise

YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN |= {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 16}
YARN |= {"rope_theta": 10_000.0}


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("fp8", [False, True])
def test_dense_base_gets_indexers(tmp_path: Path, fp8: bool) -> None:
    folder, path = tmp_path / "base", str(tmp_path / "base")
    base = build("deepseek_v3", rope_parameters=YARN).eval()
    base.save_pretrained(folder)
    if fp8:
        quantise(folder, (128, 128))
        base = load_policy(path, torch.float32).eval()
    change_config(folder, auto_map={"AutoConfig": "code.Config"}, index_topk=4)
    assert lacks_indexers(path)
    facts = trainable_facts(path, load_model_config(path, new_indexers=True), new_indexers=True)
    assert facts.index_top_k == 4 and facts.index_width == 128 and facts.indexer_parameters > 0
    torch.manual_seed(1)
    model = load_policy(path, torch.float32, new_indexers=True).eval()
    torch.manual_seed(1)
    again = load_policy(path, torch.float32, new_indexers=True).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again[name]), name
        if name.endswith("indexer.wk.weight"):
            assert 0.01 < weight.std() < 0.04, "drawn as transformers does"

    ids = torch.arange(24)[None] % VOCAB
    use_sparse_attention(model)
    use_packed_attention(model)
    with torch.no_grad():
        expected = base(input_ids=ids).logits
        hidden = model.get_decoder()(
            input_ids=ids,
            use_cache=False,
            segments=Segments.of([24]),
            sparse=SparsePass(dense=True),
        ).last_hidden_state
        torch.testing.assert_close(model.lm_head(hidden), expected, rtol=0, atol=1e-4)

    saved = tmp_path / "saved"
    write_model(saved, model, checkpoint_tensors(model), dtype="float32")
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV32ForCausalLM"] and "auto_map" not in config
    trainable_facts(str(saved), load_model_config(str(saved)))
    loaded = load_policy(str(saved), torch.float32).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in again.items())
    assert not lacks_indexers(str(saved))


def test_only_a_warm_up_may_lack_indexers_and_nothing_else(tmp_path: Path) -> None:
    model, path = build("deepseek_v32"), str(tmp_path)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)

    def save(*without: str) -> None:
        rest = {k: v for k, v in tensors.items() if not any(part in k for part in without)}
        save_file(rest, file, metadata={"format": "pt"})

    def check(*, new_indexers: bool) -> None:
        config = load_model_config(path, new_indexers=new_indexers)
        trainable_facts(path, config, new_indexers=new_indexers)

    save(".indexer.")
    check(new_indexers=True)
    assert lacks_indexers(path)
    with pytest.raises(ConfigError, match=r"15 of .* tensors are missing"):
        check(new_indexers=False)
    for also in ("layers.0.self_attn.indexer.wk", "o_proj"):
        save(also, *[".indexer."] * (also == "o_proj"))
        with pytest.raises(ConfigError, match="tensors are missing"):
            check(new_indexers=True)
