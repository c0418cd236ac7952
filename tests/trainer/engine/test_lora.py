"""LoRA: engines, exports and checkpoints against peft and against the base model."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.configs.schema import Config, ConfigError, LoraConfig
from keel.rl.metrics import values
from keel.rl.packing import pack
from tests.buckets import unpack_bucket
from tests.trainer.engine.batches import Rollouts, write_dense, write_model
from tests.trainer.engine.ranks import ROOMY, make_config

pytestmark = pytest.mark.e2e
LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "o_proj", "up_proj"))


def lora_config(stage: int = 0, **options: Any) -> Config:
    config = make_config(1, stage, kl_coef=0.1, ref_routing="replay", lr=5e-2, **options)
    return replace(config, model=replace(config.model, lora=LORA))


def run(folder: str, stage: int) -> dict[str, Any]:
    """Train for three steps, with a checkpoint after the first, and continue from that once."""
    from keel.trainer.engine.engine import TrainerEngine  # noqa: PLC0415  (loads DeepSpeed)

    path, config = Path(folder), lora_config(stage)
    engine = TrainerEngine(str(path / "model"), config)

    def step(engine: TrainerEngine, number: int) -> dict[str, float]:
        groups = Rollouts(number, path / "model").groups(2, 3, kl_coef=0.1)
        (batch,) = pack(groups, ranks=1, micro_batch_tokens=ROOMY)
        return values(engine.step([batch]))

    def sent(engine: TrainerEngine) -> dict[str, Tensor]:
        buckets = [unpack_bucket(bucket) for bucket in engine.publish(50_000)]
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}

    result: dict[str, Any] = {"first": sent(engine), "metrics": [step(engine, 0)]}
    (path / "checkpoint").mkdir()
    engine.save(path / "checkpoint")
    result["metrics"] += [step(engine, 1), step(engine, 2)]
    result["last"] = sent(engine)
    engine.export(path / "out")
    again = TrainerEngine(str(path / "model"), config)
    again.load(path / "checkpoint")
    step(again, 1)
    step(again, 2)
    result["resumed"] = sent(again)
    return result


@pytest.fixture(scope="module", params=["dense", "moe"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    {"dense": write_dense, "moe": write_model}[request.param](folder / "model")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return folder, pool.submit(run, str(folder), {"dense": 0, "moe": 2}[request.param]).result()


def logits(model: Any) -> Tensor:
    ids = torch.arange(24)[None] % 60
    with torch.no_grad():
        return model.eval()(ids).logits


def test_exported_models_compute_what_peft_computes(trained: tuple[Path, Any]) -> None:
    from peft import PeftModel  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    folder, _ = trained
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    before = logits(base)
    merged = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(folder / "out" / "adapter"))
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-5, atol=1e-5)
    assert float((logits(merged) - before).abs().max()) > 0.05
    settings = json.loads((folder / "out" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (LORA.rank, LORA.alpha)


def test_engines_get_merged_weights_under_base_names(trained: tuple[Path, Any]) -> None:
    from keel.model.load import checkpoint_tensors, load_policy  # noqa: PLC0415

    folder, result = trained
    base = dict(checkpoint_tensors(load_policy(str(folder / "model"), torch.float32)))
    assert result["first"].keys() == result["last"].keys() == base.keys()
    for name, tensor in base.items():
        assert torch.equal(result["first"][name], tensor), name
        adapted = name.endswith(tuple(f"{target}.weight" for target in LORA.targets))
        mixed = folder.name.startswith("moe") and ".mlp." in name
        assert torch.equal(result["last"][name], tensor) is (not adapted or mixed), name


def test_resume_is_exact_and_saves_adapters_only(trained: tuple[Path, Any]) -> None:
    folder, result = trained
    for name, tensor in result["last"].items():
        assert torch.equal(result["resumed"][name], tensor), name
    index = (folder / "checkpoint" / "optimizer" / "index.json").read_text()
    assert "lora_A" in index and "base_layer" not in index and "embed" not in index


def test_reference_is_the_base_model(trained: tuple[Path, Any]) -> None:
    first, second, third = (metrics["kl/ref"] for metrics in trained[1]["metrics"])
    assert first == 0.0 < second < third


def test_unsupported_combinations_are_refused() -> None:
    with pytest.raises(ConfigError, match="zero_stage"):
        lora_config(stage=3)
    with pytest.raises(ConfigError, match="residual_dtype"):
        replace(lora_config().model, residual_dtype="float32")
