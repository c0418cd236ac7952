"""LoRA: engines, exports and checkpoints against peft and against the base model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.configs.schema import Config, ConfigError, LoraConfig
from keel.rl.metrics import values
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.scenarios import Ranks, Scenario, make_config, run_all, same

pytestmark = pytest.mark.e2e
LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "o_proj", "up_proj"))


def lora_config(stage: int = 0, **options: Any) -> Config:
    config = make_config(1, stage, kl_coef=0.1, ref_routing="replay", lr=5e-2, **options)
    return replace(config, model=replace(config.model, lora=LORA))


def lora(model: str, stage: int) -> Scenario:
    """Train for three steps, with a checkpoint after the first, and continue from that once."""

    def run(ranks: Ranks) -> dict[str, Any]:
        config = lora_config(stage)
        engine = ranks.engine(config, model)

        def step(engine: Any, number: int) -> dict[str, float]:
            groups = Rollouts(number).groups(2, 3, kl_coef=0.1)
            return values(engine.step([ranks.batch(groups, config)]))

        result: dict[str, Any] = {"first": ranks.published(engine), "metrics": [step(engine, 0)]}
        folder = ranks.folder / f"{model} saved"
        folder.mkdir()
        engine.save(folder)
        result["metrics"] += [step(engine, 1), step(engine, 2)]
        engine.export(ranks.folder / f"{model} out")
        again = ranks.engine(config, model)
        again.load(folder)
        step(again, 1)
        step(again, 2)
        return {**result, "last": ranks.published(engine), "resumed": ranks.published(again)}

    return run


SCENARIOS = {1: {"dense": lora("dense", 0), "moe": lora("moe", 2)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_model(folder / "dense", "dense")
    write_model(folder / "moe")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return run_all(folder, __name__)


@pytest.fixture(params=["dense", "moe"])
def trained(
    request: pytest.FixtureRequest, folder: Path, results: dict[str, Any]
) -> tuple[Path, dict[str, Any]]:
    return folder / request.param, results[request.param]


def logits(model: Any) -> Tensor:
    ids = torch.arange(24)[None] % 60
    with torch.no_grad():
        return model.eval()(ids).logits


def test_exported_models_compute_what_peft_computes(trained: tuple[Path, Any]) -> None:
    from peft import PeftModel  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model, _ = trained
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = logits(base)
    merged = AutoModelForCausalLM.from_pretrained(f"{model} out", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, f"{model} out/adapter")
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-5, atol=1e-5)
    assert float((logits(merged) - before).abs().max()) > 0.05
    settings = json.loads(Path(f"{model} out/adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (LORA.rank, LORA.alpha)


def test_engines_get_merged_weights_under_base_names(trained: tuple[Path, Any]) -> None:
    from keel.model.load import checkpoint_tensors, load_policy  # noqa: PLC0415

    model, result = trained
    base = dict(checkpoint_tensors(load_policy(str(model), torch.float32)))
    assert result["first"].keys() == result["last"].keys() == base.keys()
    for name, tensor in base.items():
        assert torch.equal(result["first"][name], tensor), name
        adapted = name.endswith(tuple(f"{target}.weight" for target in LORA.targets))
        mixed = model.name == "moe" and ".mlp." in name
        assert torch.equal(result["last"][name], tensor) is (not adapted or mixed), name


def test_resume_is_exact_and_saves_adapters_only(trained: tuple[Path, Any]) -> None:
    model, result = trained
    same(result["resumed"], result["last"], atol=0)
    index = Path(f"{model} saved/optimizer/index.json").read_text()
    assert "lora_A" in index and "base_layer" not in index and "embed" not in index


def test_reference_is_the_base_model(trained: tuple[Path, Any]) -> None:
    first, second, third = (metrics["kl/ref"] for metrics in trained[1]["metrics"])
    assert first == 0.0 < second < third


def test_unsupported_combinations_are_refused() -> None:
    with pytest.raises(ConfigError, match="zero_stage"):
        lora_config(stage=3)
    with pytest.raises(ConfigError, match="residual_dtype"):
        replace(lora_config().model, residual_dtype="float32")
