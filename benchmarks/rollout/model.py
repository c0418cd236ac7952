"""Models and prompts of the rollout benchmark.

The weights are random, and the head is scaled so that truncated sampling keeps as many ids as from
a trained model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from benchmarks.common import Mixture
from benchmarks.peers import shape
from benchmarks.peers.workload import Workload
from keel.model.load import facts_of
from keel.rl.types import Prompt

END = "<|im_end|>"
START = "<|im_start|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
TEMPLATE_TOKENS = len("user\n") + len("\n") + len("assistant\n") + 3
"""Tokens that the template adds to a prompt; a byte is a token."""


@dataclass(frozen=True)
class Size(Mixture):
    """Sizes of the model, which is dense if it has no experts, and of one timed run."""

    expert: int = 640
    prompts: int = 16
    group: int = 16
    prompt: int = 128
    """Tokens."""
    completion: int = 512
    """Tokens; every completion has this length."""
    top_p: float = 0.95
    top_k: int = 512
    dtype: str = "bfloat16"

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        """Sampled tokens of one run."""
        return self.sequences * self.completion


SMALL = Size(
    hidden=64,
    layers=2,
    experts=8,
    per_token=2,
    expert=32,
    vocabulary=2048,
    prompts=4,
    group=4,
    prompt=48,
    completion=32,
    top_k=64,
    dtype="float32",
)


def dense(size: Size, workload: Workload) -> Size:
    """Take model, completions and sampling from a workload of benchmarks/peers."""
    return replace(
        size,
        hidden=workload.shape.hidden_size,
        layers=workload.shape.layers,
        experts=0,
        per_token=0,
        expert=0,
        vocabulary=workload.shape.vocab_size,
        prompts=workload.prompts_per_step,
        group=workload.group_size,
        prompt=workload.prompt_tokens,
        completion=workload.completion_tokens,
        top_p=workload.top_p,
        top_k=workload.top_k,
    )


def write_dense(folder: Path, workload: Workload) -> dict[str, float]:
    """Write a dense model with the tokenizer of `write_model`, whose special ids the model never
    samples; return facts about it."""
    made = workload.shape
    shape.write_model(folder, made, seed=workload.seed, sharpness=workload.sharpness)
    write_tokenizer(folder, made.vocab_size)
    parameters = facts_of(AutoConfig.from_pretrained(folder)).parameters
    return {"parameters": parameters, "logit_spread": workload.sharpness}


def write_model(folder: Path, size: Size, mean_kept: float) -> dict[str, float]:
    """Write a mixture of experts and its tokenizer; return facts about it."""
    write_tokenizer(folder, size.vocabulary)
    config = size.config(
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=0,
        dtype=size.dtype,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:
        model = Qwen3MoeForCausalLM(config).to(getattr(torch, size.dtype))
    spread = logit_spread(size, mean_kept, device)
    with torch.no_grad():
        # The final norm leaves vectors of length √hidden, so the logits are normal with this
        # spread, whatever the layers compute.
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.normal_(0.0, spread / size.hidden**0.5)
        model.lm_head.weight[0] = 0.0  # the end token, which is then never in the top k
    model.save_pretrained(folder)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "logit_spread": spread,
        "asked_mean_kept": mean_kept,
    }


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a byte-level tokenizer, whose vocabulary is filled with words that never occur."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [END, START, *alphabet]
    words += [f"Ġw{index}" for index in range(vocabulary - len(words))]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def logit_spread(size: Size, mean_kept: float, device: torch.device) -> float:
    """Find the standard deviation of normal logits of which truncation keeps `mean_kept` ids."""
    generator = torch.Generator(device).manual_seed(1)
    rows = torch.randn(256, size.vocabulary, generator=generator, device=device)
    ranked = rows.topk(size.top_k).values
    low, high = 0.1, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        chances = (ranked * middle).softmax(-1)
        before = chances.cumsum(-1) - chances
        kept = (before < size.top_p).sum(-1).float().mean().item()
        low, high = (middle, high) if kept > mean_kept else (low, middle)
    return (low + high) / 2


def make_prompts(size: Size, salt: str) -> list[Prompt]:
    """Make prompts of `size.prompt` tokens that differ from their first word on, so that a new
    `salt` gives prompts that are not in the prefix cache."""
    length = size.prompt - TEMPLATE_TOKENS
    return [
        Prompt(
            prompt_id=f"{salt}-{index}",
            domain="benchmark",
            messages=(
                {"role": "user", "content": (f"{salt}-{index}: " + "lorem ipsum " * 99)[:length]},
            ),
        )
        for index in range(size.prompts)
    ]
