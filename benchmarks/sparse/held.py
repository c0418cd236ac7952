"""How much of the attention the indexers' top k hold on real text that nothing was trained on.

    python -m benchmarks.sparse.held                                    minutes of a CPU
    python -m benchmarks.sparse.held --large --seconds 240 --packages torch transformers

A model of the family deepseek_v32 learns Python's standard library (and packages) from random
weights, with dense attention; its indexers learn from that attention (Eq. 3); both by Keel's
trainer, on text, batches and losses of `keel pretrain`, in this process. Files are held out as
wholes. On these, by layer and by k: the share of dense attention that k earlier tokens hold, chosen
by the indexer before and after its warm-up, beside the best possible k, the last k, the first
four with the last k − 4, and any k; and the loss with attention to what the indexers select.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.common.revision import commit
from benchmarks.sparse.looking import LOOKED, Looking, Shares
from benchmarks.sparse.shapes import LARGE, SMALL, Shape, at_context
from benchmarks.sparse.sources import Tokens, gathered, tokenized, written
from keel.configs.schema import Config, ConversationsConfig, ModelConfig, RunConfig, TrainerConfig
from keel.configs.sections.sft import SftConfig
from keel.data.conversations.load import Lessons, load_lessons
from keel.data.conversations.text import Encoded
from keel.model.sparse.attention import indexers, sparse_layers
from keel.rl.metrics import values
from keel.rl.packing import TrainBatch
from keel.rl.supervised.lessons import Lesson, pack_lessons
from keel.trainer.engine.engine import TrainerEngine
from keel.trainer.supervised.loop import Batches

DENSE, WARM_UP = 0.6, 0.2
"""Shares of --seconds; what is left is for text and measurements."""
PROBE = 5
"""Steps that tell how many there is time for, on an engine of their own."""


def made_model(shape: Shape, tokens: Tokens, folder: Path, seed: int) -> int:
    """Random weights, and the tokenizer; returns the number of parameters."""
    config = AutoConfig.for_model(
        "deepseek_v32",
        architectures=["DeepseekV32ForCausalLM"],
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        num_hidden_layers=shape.layers,
        mlp_layer_types=["dense"] * shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        q_lora_rank=shape.latent,
        kv_lora_rank=shape.latent,
        qk_nope_head_dim=shape.head,
        qk_rope_head_dim=shape.head // 2,
        v_head_dim=shape.head,
        index_n_heads=shape.index_heads,
        index_head_dim=shape.index_size,
        index_topk=shape.top_k[len(shape.top_k) // 2],
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokens.end,
        pad_token_id=tokens.end,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokens.tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def recipe(
    shape: Shape, model: Path, text: Path, stage: str, steps: int, seed: int, held: int
) -> Config:
    """A recipe of `keel pretrain`; held: windows of the files that are held out."""
    lr = {"dense": shape.dense_lr, "warm-up": shape.warm_up_lr, "sparse": 1e-6}[stage]
    sources = (
        ConversationsConfig(name="learned", source="text", path=str(text / "learned.jsonl")),
        ConversationsConfig(
            name="held", source="text", path=str(text / "held.jsonl"), repeat=0.0, holdout=held
        ),
    )
    return Config(
        run=RunConfig(seed=seed),
        model=ModelConfig(path=str(model), dtype="bfloat16" if on_gpu() else "float32"),
        sft=SftConfig(
            sources=sources, max_context_tokens=shape.context, conversations_per_step=shape.rows
        ),
        trainer=TrainerConfig(
            attention=stage,  # type: ignore[arg-type]
            lr=lr,
            warmup_steps=max(1, steps // 20),
            schedule="cosine",
            min_lr=lr / 10,
            weight_decay=0.0 if stage == "warm-up" else 0.1,
            micro_batch_tokens=shape.micro_batch_tokens,
            threads=torch.get_num_threads(),
        ),
    ).supervised(steps)


def on_gpu() -> bool:
    return torch.cuda.is_available()


def read(config: Config, tokens: Tokens) -> Lessons:
    """As `keel pretrain` reads it."""

    def nothing(*_: Any) -> Any:
        raise AssertionError("there is nothing but text")

    return load_lessons(
        config.sft,
        seed=config.run.seed,
        render=nothing,
        solve=nothing,
        tokenizer="made",
        encoded=Encoded(tokens.encode, after=(tokens.end,)),
    )


@contextmanager
def opened(config: Config) -> Any:
    engine = TrainerEngine(config.model.path, config)
    try:
        yield engine
    finally:
        del engine
        gc.collect()
        if on_gpu():
            torch.cuda.empty_cache()


def batch_of(lessons: Sequence[Lesson], config: Config) -> TrainBatch:
    (batch,) = pack_lessons(lessons, ranks=1, micro_batch_tokens=config.trainer.micro_batch_tokens)
    return batch


def run_steps(engine: TrainerEngine, config: Config, lessons: Lessons, *, quiet: bool) -> float:
    """All steps of `config`; returns seconds a step, of the second half."""
    batches = Batches(lessons.train, config.sft, epoch=1)
    steps, half = config.run.steps, 0.0
    began = time.monotonic()
    for step in range(1, steps + 1):
        if step == steps // 2 + 1:
            half = time.monotonic()
        found = values(engine.step([batch_of(batches.take(), config)]))
        if not quiet and (step % max(1, steps // 8) == 0 or step == 1):
            numbers = ", ".join(f"{k} {found[k]:.3f}" for k in LOGGED if k in found)
            spent = time.monotonic() - began
            print(f"  {step}/{steps}: {numbers}, {spent:.0f} s", flush=True)
    return (time.monotonic() - half) / (steps - steps // 2)


LOGGED = ("loss", "indexer/kl", "indexer/held", "grad_norm")


def trained(
    config: Config, lessons: Lessons, folder: Path, *, most: int, seconds: float | None
) -> int:
    """Train a stage for `most` steps, or as many as fit into `seconds`; write the model."""
    if seconds is not None:
        began = time.monotonic()
        probe = replace(config, run=replace(config.run, steps=PROBE))
        with opened(probe) as engine:
            each = run_steps(engine, probe, lessons, quiet=True)
        most = max(PROBE, min(most, int((seconds - (time.monotonic() - began)) / each)))
    warm = max(1, most // 20)
    config = replace(
        config,
        run=replace(config.run, steps=most),
        trainer=replace(config.trainer, warmup_steps=warm),
    )
    print(f"{config.trainer.attention}, {most} steps", flush=True)
    with opened(config) as engine:
        run_steps(engine, config, lessons, quiet=False)
        engine.export(folder)
    return most


def measured(
    shape: Shape, config: Config, lessons: Sequence[Lesson]
) -> tuple[Shares, dict[str, float]]:
    """Of the model of a recipe of the warm-up: shares by layer; and losses, dense and sparse by k.

    Raises RuntimeError where what is counted here is not what `keel pretrain` calls
    `indexer/held`.
    """
    batch, losses = batch_of(lessons, config), dict[str, float]()
    with opened(config) as engine:
        model = engine._network.model
        shares = Shares(shape.layers, shape.context, shape.top_k, engine.device)
        hooks = [
            layer.register_forward_pre_hook(lambda *_, at=at: shares.enter(at))
            for at, layer in enumerate(sparse_layers(model))
        ]
        kind = Looking.into(shares)
        with patch("keel.model.sparse.attention.Chunk", kind):
            found = values(engine.score(batch))
        for hook in hooks:
            hook.remove()
        losses["dense"] = found["nll"]
        own = model.config.index_topk
        counted = shares.as_keel_counts(own)
        if abs(counted - found["indexer/held"]) > 2e-3:
            raise RuntimeError(
                f"top {own}: {counted:.4f} counted here, indexer/held {found['indexer/held']:.4f}"
            )
    sparse = replace(config, trainer=replace(config.trainer, attention="sparse"))
    with opened(sparse) as engine:
        for k in shape.top_k:
            for indexer in indexers(engine._network.model):
                indexer.index_topk = k  # type: ignore[assignment]
            losses[f"{k}"] = values(engine.score(batch))["nll"]
    return shares, losses


def tables(shape: Shape, before: Shares, after: Shares) -> list[str]:
    """Markdown: by k, the mean over layers; and by layer."""
    said = ["| k | k/T | indexer, before | " + " | ".join(LOOKED) + " |", "|---" * 8 + "|"]
    for k in shape.top_k:
        cells = [before.mean(k, "indexer"), *(after.mean(k, way) for way in LOOKED)]
        row = " | ".join(f"{100 * cell:.1f}" for cell in cells)
        said.append(f"| {k} | 1/{shape.context // k} | {row} |")
    said += ["", "the indexer's, and the best possible, by layer", ""]
    said.append("| layer | " + " | ".join(f"k = {k}" for k in shape.top_k) + " |")
    said.append("|---" * (len(shape.top_k) + 1) + "|")
    for layer in range(shape.layers):
        pairs = (
            [f"{100 * after.share(layer, k, way):.1f}" for way in ("indexer", "best")]
            for k in shape.top_k
        )
        said.append(f"| {layer} | " + " | ".join(", ".join(pair) for pair in pairs) + " |")
    return said


def measure(shape: Shape, options: argparse.Namespace, work: Path) -> Mapping[str, Any]:
    began = time.monotonic()
    budget = options.seconds
    files = gathered(options.packages, shape.characters)
    tokens = tokenized(files, shape.vocabulary)
    written(files, work)
    base = work / "base"
    parameters = made_model(shape, tokens, base, options.seed)
    held = sum(
        -(-len(tokens.encode(text)) // (shape.context - 1)) for text in files.held
    )  # the end of a text is a token, too
    first = recipe(shape, base, work, "dense", shape.dense_steps, options.seed, held)
    lessons = read(first, tokens)
    whole = [one for one in lessons.heldout["held"] if one.total_tokens == shape.context]
    step = max(1, len(whole) // shape.held_out)
    asked = whole[::step][: shape.held_out]
    report = lessons.report["learned"]
    print(
        f"{parameters / 1e6:.1f} M parameters; {report.documents:,} files with "
        f"{report.learned_tokens:,} tokens to learn, {len(files.held):,} held out, of which "
        f"{len(asked)} contexts of {shape.context:,} tokens are measured; "
        f"{time.monotonic() - began:.0f} s so far",
        flush=True,
    )
    room = None if budget is None else budget - (time.monotonic() - began)
    dense = trained(
        first,
        lessons,
        work / "dense",
        most=shape.dense_steps,
        seconds=None if room is None else DENSE * room,
    )
    second = recipe(shape, work / "dense", work, "warm-up", shape.warm_up_steps, options.seed, held)
    before, losses_before = measured(shape, second, asked)
    if budget is not None:
        room = (budget - (time.monotonic() - began)) * WARM_UP / (1 - DENSE)
    warm = trained(second, lessons, work / "warm", most=shape.warm_up_steps, seconds=room)
    third = recipe(shape, work / "warm", work, "warm-up", shape.warm_up_steps, options.seed, held)
    after, losses = measured(shape, third, asked)
    print(*tables(shape, before, after), sep="\n")
    print("loss on held-out text, nats a token (indexers before and after their warm-up)")
    for name, loss in losses.items():
        what = "dense attention" if name == "dense" else f"top {name}"
        print(f"  {what}: {losses_before[name]:.3f}  {loss:.3f}")
    spent = time.monotonic() - began
    print(f"{spent:.0f} s, {time.process_time():.0f} CPU s", flush=True)
    return {
        "commit": commit(),
        "machine": torch.cuda.get_device_name() if on_gpu() else "CPU",
        "seed": options.seed,
        "shape": asdict(shape),
        "parameters": parameters,
        "steps": {"dense": dense, "warm-up": warm},
        "tokens": report.learned_tokens,
        "seconds": spent,
        "before": before.json(),
        "after": after.json(),
        "loss before": losses_before,
        "loss after": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--large", action="store_true", help="43 M parameters, for a GPU")
    parser.add_argument("--context", type=int, help="tokens, with the same k/T")
    parser.add_argument("--rows", type=int, help="contexts of a step: fewer, more steps")
    parser.add_argument("--seconds", type=float, help="fewer steps, to be done within so many")
    parser.add_argument("--packages", nargs="*", default=[], help="to learn from, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    shape = LARGE if options.large else SMALL
    shape = at_context(shape, options.context or shape.context)
    shape = replace(shape, rows=options.rows or shape.rows)
    disable_progress_bar()
    if not on_gpu():
        torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if on_gpu() else "CPU"
    print(f"{where}, commit {commit()}, seed {options.seed}\n{shape}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(shape, options, Path(folder))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
