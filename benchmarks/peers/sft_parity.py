"""Keel's supervised loss beside TRL's SFTTrainer, on the same conversations in float32, on a CPU.

    python -m benchmarks.peers.sft_parity

Needs TRL beside Keel (`requirements/peers.txt`). Both are given the same ids and the same marks of
what is learned: TRL one conversation a row, padded, two rows at a time; Keel all of them packed.
TRL's loss and gradient norm are those of one optimizer step of its own `train`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

from keel.configs.load import load_config
from keel.model.embedded.tokenizer import build_tokenizer, vocab_rows
from keel.rl.metrics import values
from keel.rl.supervised.lessons import Lesson, pack_lessons, shown
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.taught import Context, taught
from keel.trainer.engine.engine import TrainerEngine

TOLERANCE = 1e-5
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
}
MODELS: dict[str, Any] = {
    "dense": lambda rows: Qwen3ForCausalLM(Qwen3Config(vocab_size=rows, **SHAPE)),
    "mixture of experts": lambda rows: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=rows,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            **SHAPE,
        )
    ),
}


def contexts() -> list[Context]:
    """Six conversations of different lengths, one of them with thinking over two questions."""
    chat = TemplateChat(build_tokenizer())
    found: list[Context] = []
    for number in range(6):
        messages = [
            {"role": "user", "content": f"Spell {'abcdefgh'[: number + 2]} backward."},
            {
                "role": "assistant",
                "content": "abcdefgh"[: number + 2][::-1],
                "reasoning_content": "letter by letter",
            },
        ]
        if number % 2:
            messages += [
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes.", "reasoning_content": "it was checked"},
            ]
        found += taught(chat, messages, (), thinking=True)
    return found


def by_trl(folder: Path, given: list[Context], out: Path) -> tuple[float, float]:
    """Loss and gradient norm of a step."""
    rows = {
        "input_ids": [context.ids for context in given],
        "completion_mask": [[int(said) for said in context.said] for context in given],
    }
    trainer = SFTTrainer(
        model=str(folder),
        train_dataset=Dataset.from_dict(rows),
        processing_class=build_tokenizer(),
        args=SFTConfig(
            output_dir=str(out),
            max_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=-(-len(given) // 2),
            max_grad_norm=1e9,
            learning_rate=1e-9,
            logging_steps=1,
            completion_only_loss=True,
            bf16=False,
            fp16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            router_aux_loss_coef=0.0,  # see docs/sft.md
        ),
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    return float(logged["loss"]), float(logged["grad_norm"])


def by_keel(folder: Path, given: list[Context]) -> tuple[float, float]:
    recipe = load_config("sft-quickstart", [f"model.path={folder}", "run.device=cpu"])
    engine = TrainerEngine(str(folder), recipe.supervised(1))
    lessons = [
        Lesson(prompt_id=f"c{i}", segments=(shown(f"c{i}", context.ids, context.said),))
        for i, context in enumerate(given)
    ]
    (batch,) = pack_lessons(lessons, ranks=1, micro_batch_tokens=256)
    found = values(engine.step([batch]))
    return found["loss"], found["grad_norm"]


def main() -> int:
    given, worst = contexts(), 0.0
    tokenizer = build_tokenizer()
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place) / name.replace(" ", "-") for name in MODELS}
        for name, make in MODELS.items():
            torch.manual_seed(0)
            make(vocab_rows(tokenizer)).save_pretrained(folders[name])
            tokenizer.save_pretrained(folders[name])
        theirs = {name: by_trl(at, given, Path(place) / "out") for name, at in folders.items()}
        os.environ["LOCAL_RANK"] = "0"  # which would make TRL look for other ranks
        ours = {name: by_keel(at, given) for name, at in folders.items()}
    for name in MODELS:
        print(f"{name:<20} {'loss':>12} {'gradient norm':>16}")
        for who, (loss, norm) in (("TRL", theirs[name]), ("Keel", ours[name])):
            print(f"  {who:<18} {loss:>12.7f} {norm:>16.7f}")
        pairs = zip(ours[name], theirs[name], strict=True)
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in pairs))
    print(f"largest relative difference {worst:.1e} (at most {TOLERANCE:g} is parity)")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
