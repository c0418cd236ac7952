"""Checkpoints in DeepSeek's FP8 format are trained as if they had never been quantised."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from keel.configs.schema import ConfigError
from keel.model.load import checkpoint_tensors, load_model_config, load_policy
from keel.model.trainable import trainable_facts
from keel.trainer.engine.weights import write_model
from tests.model.families import VOCAB, build
from tests.model.quantised import HALVES, quantise, quantise_weight, set_block


@pytest.mark.parametrize(
    ("family", "block"), [("deepseek_v3", (128, 128)), ("deepseek_v32", (12, 20))]
)
def test_weights_are_dequantised(family: str, block: tuple[int, int], tmp_path: Path) -> None:
    model = build(family).eval()
    model.save_pretrained(tmp_path)
    expected = quantise(tmp_path, block)
    path = str(tmp_path)
    trainable_facts(path, load_model_config(path))
    loaded = load_policy(path, torch.float32).eval()
    saved = dict(checkpoint_tensors(loaded))
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, expected[name]), name
    half = dict(checkpoint_tensors(load_policy(path, torch.bfloat16)))
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert torch.equal(half[name], expected[name].bfloat16())

    ids = torch.arange(24)[None] % VOCAB
    with torch.no_grad():
        before, after = (m(input_ids=ids).logits.log_softmax(-1) for m in (model, loaded))
    gap = (before - after).abs()
    assert 0 < gap.mean() < 0.1 * before.std(), "the error of three bits of mantissa"

    write_model(tmp_path / "export", loaded, checkpoint_tensors(loaded), dtype="bfloat16")
    assert not hasattr(load_model_config(str(tmp_path / "export")), "quantization_config")


@pytest.mark.e2e
def test_engines_know_every_tensor_of_an_update(tmp_path: Path) -> None:
    from keel.weights.loader import TensorChecklist  # noqa: PLC0415  (loads vLLM)

    build("deepseek_v3").save_pretrained(tmp_path)
    expected = quantise(tmp_path, (128, 128))
    checklist = TensorChecklist.of_checkpoint(str(tmp_path), load_model_config(str(tmp_path)))
    assert {*checklist._required} == {name.removeprefix("model.") for name in expected}


def test_small_updates_of_an_fp8_checkpoint_are_followed_late() -> None:
    """The claim of docs/rollouts.md: the part of an update that an engine in FP8 follows."""
    torch.manual_seed(0)
    block = 128, 128
    plain = torch.randn(256, 256).bfloat16().float()
    rounded = quantise_weight(plain, block)[2].bfloat16().float()
    change = 0.01 * torch.randn(256, 256)

    def followed(weight: torch.Tensor) -> float:
        before, after = (
            quantise_weight(each.bfloat16().float(), block)[2] for each in (weight, weight + change)
        )
        return float(((after - before) * change).sum() / change.square().sum())

    assert followed(plain) == pytest.approx(1, abs=0.05)
    assert followed(rounded) == pytest.approx(0.36, abs=0.05)


def test_faulty_checkpoints_are_refused(tmp_path: Path) -> None:
    build("deepseek_v3").save_pretrained(tmp_path)
    quantise(tmp_path, (16, 16))
    path = str(tmp_path)

    def refused(match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            trainable_facts(path, load_model_config(path))
        with pytest.raises(ConfigError, match=match):
            load_policy(path, torch.float32)

    set_block(tmp_path, [16, 8])
    refused("is in FP8, but has no")
    for wrong in (None, [128], [0, 128], "128"):
        set_block(tmp_path, wrong)
        refused("weights are quantised")
    set_block(tmp_path, [16, 16])
    with safe_open(tmp_path / HALVES[1], framework="pt") as file:
        scales = {key: file.get_tensor(key) for key in sorted(file.keys())[1:]}
    save_file(scales, tmp_path / HALVES[1], metadata={"format": "pt"})
    refused("is in FP8, but has no")
