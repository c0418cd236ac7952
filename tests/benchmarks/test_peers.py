"""Workloads, recipe and verdicts of the comparison with TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers import keel_grpo
from benchmarks.peers.shape import MARKS, write
from benchmarks.peers.workload import SMALL, Workload
from keel.configs.load import load_config
from keel.model.load import load_tokenizer
from keel.rl.types import Prompt
from keel.rollout.engine.conversion import render_prompt


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return write(tmp_path_factory.mktemp("peers"), SMALL)


def messages(workload: Workload) -> list[list[dict[str, Any]]]:
    return [
        json.loads(line)["messages"] for line in Path(workload.prompts).read_text().splitlines()
    ]


def test_prompt_lengths_match_in_both_systems(workload: Workload) -> None:
    tokenizer = load_tokenizer(workload.model)
    assert len(tokenizer) == workload.shape.tokens
    for prompt in messages(workload):
        ours = render_prompt(
            tokenizer, Prompt(prompt_id="p", domain="d", messages=tuple(prompt), reward={})
        )
        theirs = AutoTokenizer.from_pretrained(workload.model).apply_chat_template(
            [prompt], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        assert theirs["input_ids"][0] == ours.token_ids
        assert len(ours.token_ids) == workload.prompt_tokens


def test_no_answer_can_end(workload: Workload) -> None:
    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.randint(len(MARKS), workload.shape.tokens, (8, 48))
    with torch.no_grad():
        logits = model(ids).logits.flatten(0, 1)
    assert workload.sharpness / 2 < float(logits.std()) < 2 * workload.sharpness
    least_kept = logits.topk(workload.top_k).values[:, -1]
    never = torch.cat([logits[:, : len(MARKS)], logits[:, workload.shape.tokens :]], dim=1)
    assert bool((never.max(dim=1).values < least_kept).all())


@pytest.mark.parametrize("arm", sorted(keel_grpo.ARMS))
def test_every_arm_is_a_valid_recipe(workload: Workload, arm: str, tmp_path: Path) -> None:
    made = keel_grpo.recipe(workload, folder=tmp_path / "run", steps=3, gpu=True, arm=arm)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(made))  # JSON is YAML
    config = load_config(path)
    assert config.rollout.sampling.max_tokens == workload.completion_tokens
    assert config.algorithm.prompts_per_step * config.algorithm.group_size == workload.sequences
