"""Workloads of the comparison with TRL and verl, as far as it runs without them."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers import keel_grpo, verl_attention
from benchmarks.peers.shape import MARKS, write
from benchmarks.peers.workload import SMALL, Workload
from keel.configs.load import load_config
from keel.model.load import load_tokenizer
from keel.rl.types import Prompt
from keel.rollout.chat.render import render_prompt


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return write(tmp_path_factory.mktemp("peers"), SMALL)


def test_prompt_lengths_match_in_both_systems(workload: Workload) -> None:
    tokenizer = load_tokenizer(workload.model)
    assert len(tokenizer) == workload.shape.tokens
    template = AutoTokenizer.from_pretrained(workload.model).apply_chat_template
    for line in Path(workload.prompts).read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = Prompt(prompt_id="p", domain="d", messages=tuple(messages), reward={})
        ours, _ = render_prompt(tokenizer, prompt)
        theirs = template([messages], add_generation_prompt=True, tokenize=True, return_dict=True)
        assert theirs["input_ids"][0] == ours
        assert len(ours) == workload.prompt_tokens


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


def test_every_arm_is_a_valid_recipe(workload: Workload, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for arm in keel_grpo.ARMS:
        made = keel_grpo.recipe(workload, folder=tmp_path / "run", steps=3, gpu=True, arm=arm)
        path.write_text(json.dumps(made))  # JSON is YAML
        config = load_config(path)
        assert config.rollout.sampling.max_tokens == workload.completion_tokens
        assert config.algorithm.prompts_per_step * config.algorithm.group_size == workload.sequences


def dense(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Softmax attention over a packed row, with a mask: [heads, N, D] in, [N, heads, D] out."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    causal = torch.ones(len(sequence), len(sequence)).tril().bool()
    seen = causal & (sequence[:, None] == sequence[None, :])
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def test_packed_sequences_attend_separately() -> None:
    torch.manual_seed(0)
    lengths = [5, 1, 7]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    row = verl_attention.packed(positions)
    assert row.offsets.tolist() == [0, 5, 6, 13] and row.longest == 7
    shapes = [(4, 13, 8), (2, 13, 8), (2, 13, 8)]
    mine = [torch.randn(shape, requires_grad=True) for shape in shapes]
    theirs = [x.detach().clone().requires_grad_() for x in mine]
    made, _ = verl_attention.attention(
        nn.Identity(), *(x[None] for x in mine), None, scaling=8**-0.5, position_ids=positions
    )
    expected = dense(*theirs, lengths)
    torch.testing.assert_close(made[0], expected)
    upstream = torch.randn_like(expected)
    made[0].backward(upstream)
    expected.backward(upstream)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
