"""GPU recipes pass `keel check` on a machine without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen3Config

from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.model.load import facts_of
from keel.model.tiny.build import model_config
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.placement.hardware import Node, place
from keel.trainer.placement.nodes import planned_hardware, seat_lines
from keel.trainer.prepare import prepare

GPUS = {
    "tiny-100m": 1,
    "gpu-dense": 1,
    "gpu2-async": 2,
    "gpu4-expert-parallel": 4,
}
SEATS = {
    "tiny-100m": "engine 0 on GPU 0, shared; trainer rank 0 on GPU 0, shared",
    "gpu-dense": "engine 0 on GPU 0, shared; trainer rank 0 on GPU 0, shared",
    "gpu2-async": "engine 0 on GPU 1; trainer rank 0 on GPU 0",
    "gpu4-expert-parallel": "engines 0–1 on GPUs 2–3; trainer ranks 0–1 on GPUs 0–1",
}


def machine(gpus: int) -> list[Node]:
    return [Node(name="here", gpus=gpus, cpus=16, free_gpus=gpus, free_cpus=16)]


@pytest.mark.parametrize("name", GPUS)
def test_recipe_fits_the_gpus_in_its_name(name: str) -> None:
    config = load_config(name)
    assert list(place(config, machine(GPUS[name])).lines()) == [f"here: {SEATS[name]}"]
    if GPUS[name] > 2:  # a single GPU can be shared
        with pytest.raises(ConfigError, match=r"the recipe needs \d GPU\(s\)"):
            place(config, machine(GPUS[name] - 1))


@pytest.mark.parametrize("name", GPUS)
def test_check_plans_gpu_recipes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    overrides = ["run.gpu_gib=80", f"run.gpus_per_node={GPUS[name]}"]
    for number in range(len(load_config(name).data.sources)):
        overrides += [f"data.sources.{number}.{few}" for few in ("size=32", "holdout=8")]
    if name == "gpu-dense":
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(tmp_path)
        Qwen3Config(  # the shape of Qwen3-0.6B
            architectures=["Qwen3ForCausalLM"],
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
            max_position_embeddings=40_960,
        ).save_pretrained(tmp_path)
        overrides += [f"model.path={tmp_path}", "data.max_prompt_tokens=1024"]
    task = prepare(name, overrides, hardware=planned_hardware)
    assert f"node 0: {SEATS[name]}" in seat_lines(task.config, task.hardware)
    text = task.text()
    assert "KV cache holds all" in text
    assert "OFF" not in text


def test_tiny_100m_uses_all_stabilisers() -> None:
    config = load_config("tiny-100m")
    facts = facts_of(model_config(config.model.tiny, build_tokenizer()))
    assert facts.parameters >= 100_000_000
    assert config.model.dtype == "bfloat16"
    assert config.algorithm.keep_routing and config.algorithm.keep_sampling_mask
    assert config.algorithm.mask_delta and config.algorithm.kl == "unbiased_k3"
    assert config.rollout.sampling.truncated
    assert any(source.kl_coef > 0 for source in config.data.sources)


@pytest.mark.parametrize("name", ["gpu2-async", "gpu4-expert-parallel"])
def test_multi_gpu_recipes_differ_in_layout_only(name: str) -> None:
    one, more = load_config("tiny-100m"), load_config(name)
    assert (one.model, one.data, one.rewards, one.eval) == (
        more.model,
        more.data,
        more.rewards,
        more.eval,
    )
    assert one.rollout.sampling == more.rollout.sampling
    assert one.trainer.lr == more.trainer.lr
