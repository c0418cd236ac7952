"""Split trajectories, shared prompts, conversations and compiled layers train alike."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from keel.configs.schema import AlgorithmConfig, Config
from keel.rl.metrics import values
from keel.rl.packing import TrainBatch, split_optimizer_steps
from keel.rl.sft import SftExample, plan_sft, supervised_segment
from tests.trainer.engine import scenarios
from tests.trainer.engine import test_expert_parallel as experts
from tests.trainer.engine.batches import (
    VOCABULARY,
    Rollouts,
    write_model,
)
from tests.trainer.engine.scenarios import (
    TIGHT,
    Ranks,
    Result,
    Scenario,
    make_config,
    run_all,
    same,
    same_training,
)

pytestmark = pytest.mark.e2e

SFT_STEPS = 2
HELDOUT = 99
"""Seed."""
WARM_UP: Mapping[str, str] = {"model": "sparse", "attention": "warm-up"}
"""Only indexers learn."""


def conversations(seed: int) -> list[SftExample]:
    """Five conversations of one to three contexts, most with several trained spans."""
    random = np.random.default_rng(seed)

    def segment(name: str) -> object:
        length = int(random.integers(4, 14))
        output = random.random(length) < 0.6
        output[0], output[-1] = False, True
        return supervised_segment(name, random.integers(0, VOCABULARY, length), output)

    return [
        SftExample(
            prompt_id=f"c{number}",
            segments=tuple(segment(f"c{number}") for _ in range(random.integers(1, 4))),  # pyright: ignore
        )
        for number in range(5)
    ]


def supervised(config: Config) -> Config:
    """Disable clipping, which hides large gradients; a large eps preserves small ones."""
    trainer = replace(config.trainer, grad_clip=0.0, warmup_steps=0, eps=1e-2)
    return replace(config, algorithm=AlgorithmConfig(mask_delta=None), trainer=trainer)


def learning(stage: int, *, model: str = "untied", **changes: object) -> Scenario:
    """Held-out loss before and after two steps, metrics, and weights."""

    def run(ranks: Ranks) -> Result:
        config = supervised(make_config(ranks.world_size, stage, **changes))  # pyright: ignore
        engine, trainer = ranks.engine(config, model), config.trainer
        local = ranks.rank // trainer.sequence_parallel

        def packed(seed: int):
            return plan_sft(
                conversations(seed),
                replicas=trainer.data_parallel,
                micro_batch_tokens=trainer.micro_batch_tokens,
            )[local].pack()

        def measured() -> dict[str, float]:
            return values(ranks.merged(engine.evaluate_nll(packed(HELDOUT))))

        before = measured()
        metrics = [values(ranks.merged(engine.step([packed(step)]))) for step in range(SFT_STEPS)]
        return {
            "heldout": [before, measured()],
            "metrics": metrics,
            "after": ranks.published(engine),
        }

    return run


SFT_SCENARIOS: Mapping[int, Mapping[str, Scenario]] = {
    1: {
        "warm-up": learning(0, **WARM_UP),
        "conversations": learning(0),
        "conversations unpacked": learning(0, tokens=1),
    },
    2: {
        "warm-up stage 3": learning(3, tokens=TIGHT, **WARM_UP),
        "conversations stage 1": learning(1, tokens=TIGHT),
        "conversations stage 3 sequence": learning(3, sequence_parallel=2, tokens=TIGHT),
    },
}

STEPS = 3
WINDOWS = 9
PROMPT, HALF = 24, 96
"""Tokens of a shared prompt, and of a micro-batch: three trajectories that share it, or two."""
FEW = 40
"""Tokens of micro-batches of two or three windows."""
MASK_DELTA = 0.01
"""Drops some of these trajectories."""


def training(
    stage: int,
    *,
    updates: int = 1,
    model: str = "untied",
    kl_coef: float = 0.0,
    windows: int = WINDOWS,
    prompt: int = 0,
    **changes: Any,
) -> Scenario:
    def run(ranks: Ranks) -> Result:
        config = make_config(
            ranks.world_size, stage, mask_delta=MASK_DELTA, kl_coef=kl_coef, **changes
        )
        engine = ranks.engine(config, model)
        counters.clear()
        metrics, scored, split, shared = [], [], [], []
        for step in range(STEPS):
            # Step 1 has too few groups for all ranks, so some get padding.
            rollouts = Rollouts(step, windows=windows, prompt=prompt)
            groups = rollouts.groups(1 if step == 1 else 2, 3, kl_coef=kl_coef)
            batches = [ranks.batch(part, config) for part in split_optimizer_steps(groups, updates)]
            passes: list[Any] = [None] * ranks.world_size
            dist.all_gather_object(passes, [len(batch.mask_pass) for batch in batches])
            scored.append(passes)
            shared.append([any_shared(batch) for batch in batches])
            split.append([batch.split_sequences for batch in batches])
            metrics.append(ranks.merged(engine.step(batches)))
        after = ranks.published(engine)
        return {
            "after": after,
            "metrics": metrics,
            "scored": scored,
            "split": split,
            "shared": shared,
            "graphs": counters["stats"]["unique_graphs"],
        }

    return run


def any_shared(batch: TrainBatch) -> bool:
    return any(one.follows is not None for one in batch.micro_batches)


def prompted(stage: int, *, share_prompts: bool = True, **changes: Any) -> Scenario:
    """Trajectories of one window with a long shared prompt."""
    changes |= {"windows": 1, "prompt": PROMPT, "share_prompts": share_prompts}
    return training(stage, tokens=HALF, **changes)


SCENARIOS: Mapping[int, Mapping[str, Scenario]] = {
    1: {
        "whole": training(0),
        "whole, updates": training(0, updates=2),
        "whole, reference": training(0, kl_coef=0.1),
        "whole, tight": training(0, tokens=FEW),
        "whole, prompted": prompted(0, share_prompts=False, kl_coef=0.1),
        "prompted, alone": prompted(0, kl_coef=0.1),
    },
    2: {
        "whole, stage 0": training(0, tokens=FEW),
        "updates, stage 3": training(3, tokens=FEW, updates=2),
        "reference, stage 1": training(1, tokens=FEW, kl_coef=0.1),
        "prompted, stage 1, sequence": prompted(1, kl_coef=0.1, sequence_parallel=2),
        "prompted, stage 3, recomputed": prompted(3, kl_coef=0.1, activation_checkpointing=True),
        "prompted, stage 1, experts": prompted(1, kl_coef=0.1, expert_parallel=2),
        "whole, stage 1, sequence": training(1, tokens=FEW, sequence_parallel=2),
        "whole, stage 2, asleep, recomputed": training(
            2, tokens=FEW, sleep=True, activation_checkpointing=True
        ),
    },
    4: {"whole, stage 3, 4 ranks, sequence": training(3, tokens=FEW, sequence_parallel=2)},
}


FAMILY = "qwen3_moe"
EXPERTS = f"{FAMILY}, compiled, stage 2, sequence, offloaded, asleep"
SPARSE = "sparse, compiled, recomputed"
COMPILED: Mapping[int, Mapping[str, Scenario]] = {
    1: {
        "prompted, compiled": prompted(0, kl_coef=0.1, compile=True),
        FAMILY: experts.training(0),
        "sparse": scenarios.training(0, model="sparse"),
        SPARSE: scenarios.training(0, model="sparse", activation_checkpointing=True, compile=True),
    },
    2: {
        EXPERTS: experts.training(
            2, compile=True, sequence_parallel=2, offload_optimizer=True, sleep=True
        ),
    },
}
"""With compiled layers, and without."""
ALL = {
    size: {**local, **SFT_SCENARIOS.get(size, {}), **COMPILED.get(size, {})}
    for size, local in SCENARIOS.items()
}
"""In the same processes."""


WHOLE = ("whole", "whole, updates", "whole, reference")
PROMPTED = "whole, prompted"
OTHERS = [name for size in SCENARIOS.values() for name in size if name not in (*WHOLE, PROMPTED)]
SHARED = [name for name in OTHERS if name.startswith("prompted")]
SPLIT = [name for name in OTHERS if name not in SHARED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("windows")
    write_model(folder / "untied")
    # Few layers, as each is compiled on its own.
    write_model(folder / "sparse", "sparse", num_hidden_layers=2, mlp_layer_types=["sparse"] * 2)
    experts.write_family(folder / FAMILY, FAMILY, num_hidden_layers=2, mlp_only_layers=[])
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return run_all(folder, __name__, "ALL")


@pytest.mark.parametrize("name", OTHERS)
def test_micro_batches_and_ranks_do_not_matter(results: dict[str, Any], name: str) -> None:
    first = name.split(",")[0]
    plain = results["whole" if first == "whole" else f"whole, {first}"]
    # Adam divides by the root of a tiny moment: rounding, which differs by machine, grows there.
    same(results[name]["after"], plain["after"], atol=1e-5)
    for expected, actual in zip(plain["metrics"], results[name]["metrics"], strict=True):
        values_, reference = values(actual), values(expected)
        if name in SHARED:
            packed = values_.pop("train/tokens")
            assert packed + values_.pop("train/shared_tokens", 0) == reference.pop("train/tokens")
            for of_tokens in ("routing/overlap", "routing/fallback_fraction"):
                assert values_.pop(of_tokens) == pytest.approx(reference.pop(of_tokens), abs=0.1)
        assert values_ == pytest.approx(reference, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", [PROMPTED, *SHARED])
def test_prompts_are_shared_as_configured(results: dict[str, Any], name: str) -> None:
    shared = results[name]["shared"]
    assert [shared[0], shared[2]] == [[name in SHARED]] * 2
    tokens = [
        [values(metrics)["train/tokens"] for metrics in results[one]["metrics"]]
        for one in (name, PROMPTED)
    ]
    share = [local / all_ for local, all_ in zip(*tokens, strict=True)]
    assert max(share[0], share[2]) < 0.75 or name == PROMPTED, share


@pytest.mark.parametrize("name", SPLIT)
def test_all_ranks_score_equally_often(results: dict[str, Any], name: str) -> None:
    for passes in results[name]["scored"]:
        assert all(counts == passes[0] for counts in passes)
    assert all(min(counts) > 0 for counts in results[name]["split"])


LAYOUTS = [
    name
    for size in SFT_SCENARIOS.values()
    for name in size
    if name not in ("conversations", "warm-up")
]


@pytest.mark.parametrize("name", LAYOUTS)
def test_conversations_train_alike_on_any_layout(results: dict[str, Any], name: str) -> None:
    plain = results["warm-up" if name.startswith("warm-up") else "conversations"]
    # Adam divides by the root of a tiny moment: rounding, which differs by machine, grows there.
    same(results[name]["after"], plain["after"], atol=1e-5)
    for expected, actual in zip(plain["heldout"], results[name]["heldout"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-4)
    for expected, actual in zip(plain["metrics"], results[name]["metrics"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_sft_matches_transformers(folder: Path, results: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (slow to load)

    from keel.model.load import checkpoint_tensors  # noqa: PLC0415  (slow to load)

    model = AutoModelForCausalLM.from_pretrained(folder / "untied", dtype=torch.float32)

    def loss(seed: int) -> Tensor:
        total, count = torch.zeros(()), 0
        for example in conversations(seed):
            for segment in example.segments:
                ids = torch.from_numpy(segment.token_ids_T).long()[None]
                labels = ids.where(torch.from_numpy(segment.trainable_T), -100)
                output = int(segment.trainable_T.sum())
                total = total + model(input_ids=ids, labels=labels).loss * output
                count += output
        return total / count

    weights = [one for one in model.parameters() if one.ndim >= 2]
    others = [one for one in model.parameters() if one.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": weights}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-2,
        weight_decay=0.1,
    )
    engine_result = results["conversations"]
    with torch.no_grad():
        assert engine_result["heldout"][0]["nll"] == pytest.approx(float(loss(HELDOUT)), rel=1e-5)
    for step, metrics in enumerate(engine_result["metrics"]):
        theirs = loss(step)
        assert metrics["loss"] == pytest.approx(float(theirs.detach()), rel=1e-5)
        assert metrics["nll"] == pytest.approx(metrics["loss"], rel=1e-5)
        theirs.backward()
        adam.step()
        adam.zero_grad()
    same(engine_result["after"], dict(checkpoint_tensors(model)), atol=1e-5)
    with torch.no_grad():
        assert engine_result["heldout"][1]["nll"] == pytest.approx(float(loss(HELDOUT)), rel=1e-5)


def test_layers_compile_once_for_all_lengths(results: dict[str, Any]) -> None:
    for compiled, plain in ((EXPERTS, FAMILY), ("prompted, compiled", "prompted, alone")):
        assert 0 < results[compiled]["graphs"] < 20
        assert results[plain]["graphs"] == 0


@pytest.mark.parametrize(
    ("name", "plain", "atol", "rel"),
    [
        (EXPERTS, FAMILY, 1e-5, 1e-4),
        (SPARSE, "sparse", 1e-5, 1e-4),
        ("prompted, compiled", "prompted, alone", 3e-6, 1e-5),
    ],
)
def test_compiled_layers_learn_the_same(
    results: dict[str, Any], name: str, plain: str, atol: float, rel: float
) -> None:
    same_training(results[name], results[plain], atol=atol, rel=rel)
