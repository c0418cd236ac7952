"""Any layout of experts and ranks gives the weights, metrics and checkpoints of one process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from keel.rl.metrics import Metric, values
from tests.trainer.engine.batches import LAYERS, TOP_K, Rollouts, write_model
from tests.trainer.engine.scenarios import (
    TIGHT,
    Ranks,
    Result,
    Scenario,
    make_config,
    reading,
    run_all,
    same,
    same_training,
)

pytestmark = pytest.mark.e2e

EXPERTS = 12
"""More than ten rows of the hidden size, so that ZeRO-3 shards routers, too."""
STEPS = 3
SAVED_AFTER = 1
STAGES = (0, 1, 2, 3)

_MIXTURE = {
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "mlp_only_layers": [1], "head_dim": 16},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {
        **_DEEPSEEK,
        "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 4,
    },
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "qwen2_moe": {
        "num_experts": EXPERTS,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": False,
    },
    "mixtral": {"num_local_experts": EXPERTS, "num_hidden_layers": LAYERS - 1},
}
FAMILIES["deepseek_v2 greedy"] = {**FAMILIES["deepseek_v2"], "topk_method": "greedy"}
"""Routes over all experts, despite its configured groups."""


def write_family(folder: Path, family: str, **changes: Any) -> None:
    write_model(folder, family.split()[0], seed=1, **{**_MIXTURE, **FAMILIES[family], **changes})


def train(
    ranks: Ranks, engine: Any, config: Any, steps: range, *, selects: int = 0, **groups: Any
) -> list[Any]:
    """Metrics of each step over all ranks. Step 1 has too few groups, so some ranks get padding."""
    results: list[dict[str, Metric]] = []
    for step in steps:
        rollouts = Rollouts(step, experts=EXPERTS, selects=selects)
        batch = ranks.batch(rollouts.groups(1 if step == 1 else 2, 3, **groups), config)
        results.append(ranks.merged(engine.step([batch])))
    return results


def configure(ranks: Ranks, stage: int, **changes: Any) -> Any:
    """Expert parallelism 2 with at least two ranks."""
    size = min(2, ranks.world_size)
    options = {"expert_parallel": size, "tokens": TIGHT, "mask_delta": 0.3, **changes}
    return make_config(ranks.world_size, stage, **options)


def training(
    stage: int,
    family: str = "qwen3_moe",
    *,
    resume: bool = False,
    **changes: Any,
) -> Scenario:
    """Publish, train, publish, export. resume: also from a checkpoint."""

    def run(ranks: Ranks) -> Result:
        config = configure(ranks, stage, **changes)
        engine = ranks.engine(config, family)
        before = ranks.published(engine)
        counters.clear()
        metrics = train(ranks, engine, config, range(SAVED_AFTER))
        folder = ranks.folder / f"{ranks.world_size}-{next(ranks.serial)}"
        if ranks.rank == 0:
            folder.mkdir()
        if resume:
            engine.save(folder)
        metrics += train(ranks, engine, config, range(SAVED_AFTER, STEPS))
        result = {"before": before, "after": ranks.published(engine), "metrics": metrics}
        result["graphs"] = counters["stats"]["unique_graphs"]
        engine.export(folder / "exported")
        result["exported"] = folder / "exported"
        if resume:
            later = ranks.engine(config, family)
            later.load(folder)
            result["loaded"] = (later.steps, later.version)
            train(ranks, later, config, range(SAVED_AFTER, STEPS))
            result["resumed"] = ranks.published(later)
        return result

    return run


def referenced(stage: int, family: str = "qwen3_moe", **changes: Any) -> Scenario:
    """One step with a KL term whose update reveals the gradient g, and a second step.

    Adam's update is g / (|g| + ε), here with ε = 1 and a learning rate of 1.
    """

    def run(ranks: Ranks) -> Result:
        options = {"lr": 1.0, "eps": 1.0, "warmup_steps": 0, "weight_decay": 0.0, "grad_clip": 0.0}
        config = configure(ranks, stage, kl_coef=0.1, **options, **changes)
        engine, selects = ranks.engine(config, family), FAMILIES[family].get("index_topk", 0)
        before = ranks.published(engine)
        metrics = train(ranks, engine, config, range(1), kl_coef=0.1, selects=selects)
        after = ranks.published(engine)
        updates = {name: before[name] - after[name] for name in after}
        gradients = {name: update / (1 - update.abs()) for name, update in updates.items()}
        metrics += train(ranks, engine, config, range(1, 2), kl_coef=0.1, selects=selects)
        return {"after": gradients, "metrics": metrics}

    return run


def skipping(stage: int) -> Scenario:
    """One expert of one rank is NaN, so all ranks skip the step."""

    def run(ranks: Ranks) -> Result:
        config = configure(ranks, stage)
        engine = ranks.engine(config, "qwen3_moe")
        expert = engine._network.model.get_decoder().layers[0].mlp.experts
        if ranks.rank == 1:
            expert.w1.data[0] = torch.nan
        metrics = train(ranks, engine, config, range(1))
        return {"metrics": metrics, "after": ranks.published(engine)}

    return run


def starting(family: str) -> Scenario:
    """Publish without training."""

    def run(ranks: Ranks) -> Result:
        return {"before": ranks.published(ranks.engine(configure(ranks, 0), family))}

    return run


SCENARIOS: Mapping[int, Mapping[str, Scenario]] = {
    1: {
        "qwen3_moe": training(0),
        "deepseek_v3": training(0, "deepseek_v3"),
        "deepseek_v32": training(0, "deepseek_v32"),
        "deepseek_v2 greedy": training(0, "deepseek_v2 greedy"),
        "live reference": referenced(0),
        "replayed reference": referenced(0, ref_routing="replay"),
        "sparse reference": referenced(0, "deepseek_v32"),
    },
    2: {
        **{f"qwen3_moe, stage {s}": training(s, resume=s in (0, 3)) for s in STAGES},
        "live reference, stage 2": referenced(2),
        "replayed reference, stage 3": referenced(3, ref_routing="replay"),
        "live reference, sequence, stage 3": referenced(3, sequence_parallel=2),
        "deepseek_v32, stage 3, recomputed, offloaded": training(
            3, "deepseek_v32", activation_checkpointing=True, offload_optimizer=True, resume=True
        ),
        "sparse reference, sequence, stage 3, recomputed": referenced(
            3, "deepseek_v32", sequence_parallel=2, activation_checkpointing=True
        ),
        "deepseek_v2 greedy, stage 1": training(1, "deepseek_v2 greedy"),
        "deepseek_v3, sequence, stage 2": training(2, "deepseek_v3", sequence_parallel=2),
        "qwen3_moe, offloaded, stage 2": training(2, offload_optimizer=True, resume=True),
        "qwen3_moe, asleep, stage 3": training(3, sleep=True),
        "skipping, stage 2": skipping(2),
        **{f"read, stage {s}": reading(s, model="qwen3_moe", expert_parallel=2) for s in (1, 3)},
        **{f"weights of {f}": starting(f) for f in ("deepseek_v2", "mixtral", "qwen2_moe")},
    },
    4: {
        "qwen3_moe, 4 ranks, stage 2": training(2, resume=True),
        "qwen3_moe, 4 ranks, sequence, stage 3": training(3, sequence_parallel=4),
        "sparse reference, 4 ranks, sequence": referenced(0, "deepseek_v32", sequence_parallel=4),
    },
}


SPREAD = {**SCENARIOS[2], **SCENARIOS[4]}
TRAINED = [name for name in SPREAD if name.split(",")[0] in FAMILIES]
RESUMED = [
    *(f"qwen3_moe, stage {stage}" for stage in (0, 3)),
    "qwen3_moe, offloaded, stage 2",
    "deepseek_v32, stage 3, recomputed, offloaded",
    "qwen3_moe, 4 ranks, stage 2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for family in FAMILIES:
        write_family(folder / family, family)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """Run every scenario once, and the saving ones of other layouts."""
    return run_all(folder, __name__, "ALL")


@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_one_process(results: dict[str, Any], name: str) -> None:
    plain = results[name.split(",")[0]]
    same_training(results[name], plain)
    assert values(plain["metrics"][0])["grad_norm"] > 0.05
    assert 0 < values(plain["metrics"][-1])["routing/overlap"] < 1
    moved = [not torch.equal(plain["after"][n], old) for n, old in plain["before"].items()]
    assert sum(moved) >= len(moved) - 2, "all but correction biases, which have no gradient"


@pytest.mark.parametrize("name", [name for name in SPREAD if "reference" in name])
def test_gradients_equal_one_process(results: dict[str, Any], name: str) -> None:
    plain = results[name.split(",")[0]]
    same_training(results[name], plain)
    large = [gradient.abs().max() > 1e-3 for gradient in plain["after"].values()]
    assert sum(large) > 0.8 * len(large)


@pytest.mark.parametrize("name", ["replayed reference", "replayed reference, stage 3"])
def test_reference_with_replayed_routes_starts_at_policy(
    results: dict[str, Any], name: str
) -> None:
    first, last = (values(metrics) for metrics in results[name]["metrics"])
    assert first["kl/ref"] == pytest.approx(0, abs=1e-9)
    assert last["kl/ref"] > 1e-3
    assert values(results["live reference"]["metrics"][0])["kl/ref"] > 1e-3


@pytest.mark.parametrize("name", [*TRAINED, *(n for n in SPREAD if n.startswith("weights"))])
def test_published_weights_equal_the_checkpoint(
    folder: Path, results: dict[str, Any], name: str
) -> None:
    family = name.removeprefix("weights of ").split(",")[0]
    same(results[name]["before"], load_file(folder / family / "model.safetensors"), atol=0)
    if name in TRAINED:
        exported = results[name]["exported"]
        same(results[name]["after"], load_file(exported / "model.safetensors"), atol=0)
        assert json.loads((exported / "config.json").read_text())["model_type"] == family.split()[0]


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_exact(results: dict[str, Any], name: str) -> None:
    assert results[name]["loaded"] == (SAVED_AFTER, SAVED_AFTER)
    same(results[name]["resumed"], results[name]["after"], atol=0)


@pytest.mark.parametrize(("stage", "times"), [(1, [1, 1]), (3, [1, 0])])
def test_only_ranks_with_distinct_experts_read(
    results: dict[str, Any], stage: int, times: list[int]
) -> None:
    result = results[f"read, stage {stage}"]
    assert result["times"] == times and result["same"] == [(True, True)] * 2


@pytest.mark.parametrize("name", [name for name in SPREAD if "skipping" in name])
def test_all_ranks_skip_a_bad_step(results: dict[str, Any], name: str) -> None:
    (metrics,) = results[name]["metrics"]
    assert values(metrics)["train/skipped_steps"] == 1
    before = results["qwen3_moe"]["before"]
    finite = {n: t for n, t in results[name]["after"].items() if t.isfinite().all()}
    assert len(finite) == len(before) - 1
    same(finite, {n: before[n] for n in finite}, atol=0)


class Layout(NamedTuple):
    ranks: int
    stage: int
    dtype: str = "float32"
    changes: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        more = [f"{name} {value}" for name, value in self.changes]
        return ", ".join([f"{self.ranks} ranks", f"stage {self.stage}", self.dtype, *more])


def spread(ranks: int, stage: int, dtype: str = "float32", **changes: Any) -> Layout:
    return Layout(ranks, stage, dtype, tuple({"expert_parallel": 1, **changes}.items()))


SPLIT = {"expert_parallel": 2}
BF16 = "bfloat16"
MOVES: Mapping[Layout, tuple[Layout, ...]] = {
    spread(1, 0): (
        spread(2, 2, sequence_parallel=2, **SPLIT),
        spread(2, 3, offload_optimizer=True),
    ),
    spread(2, 0, **SPLIT): (spread(2, 2),),
    spread(2, 2, sequence_parallel=2): (spread(1, 0), spread(2, 3, **SPLIT)),
    spread(2, 3): (spread(2, 1, offload_optimizer=True),),
    spread(2, 3, **SPLIT): (spread(1, 2), spread(2, 0)),
    spread(2, 1, BF16): (spread(2, 3, BF16, **SPLIT),),
    spread(2, 3, BF16, sleep=True): (spread(1, 1, BF16), spread(2, 1, BF16, **SPLIT)),
}
"""Layouts that resume from the checkpoint of each layout."""


def folder_of(root: Path, *layouts: Layout) -> Path:
    return root / " → ".join(map(str, layouts))


def started(ranks: Ranks, layout: Layout) -> tuple[Any, Any]:
    from keel.trainer.engine import zero  # noqa: PLC0415  (loads DeepSpeed)

    on_cpu, zero.compute_dtype = zero.compute_dtype, lambda *_: getattr(torch, layout.dtype)
    try:
        config = configure(ranks, layout.stage, dtype=layout.dtype, **dict(layout.changes))
        return ranks.engine(config, "qwen3_moe"), config
    finally:
        zero.compute_dtype = on_cpu


def saved(ranks: Ranks, engine: Any, folder: Path) -> None:
    if ranks.rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    engine.save(folder)


def saving(layout: Layout) -> Scenario:
    """Train, save, and take another step."""

    def run(ranks: Ranks) -> Result:
        engine, config = started(ranks, layout)
        train(ranks, engine, config, range(SAVED_AFTER))
        saved(ranks, engine, folder_of(ranks.folder, layout))
        weights = ranks.published(engine)
        metrics = train(ranks, engine, config, range(SAVED_AFTER, SAVED_AFTER + 1))
        return {"weights": weights, "metrics": metrics}

    return run


def moving(layout: Layout, other: Layout) -> Scenario:
    """Load the checkpoint of `layout`, save it again, and take another step."""

    def run(ranks: Ranks) -> Result:
        engine, config = started(ranks, other)
        engine.load(folder_of(ranks.folder, layout))
        numbers, weights = (engine.steps, engine.version), ranks.published(engine)
        saved(ranks, engine, folder_of(ranks.folder, layout, other))
        metrics = train(ranks, engine, config, range(SAVED_AFTER, SAVED_AFTER + 1))
        return {"weights": weights, "numbers": numbers, "metrics": metrics, "notes": engine.notes}

    return run


def whole_state(folder: Path) -> tuple[dict[Any, torch.Tensor], set[float]]:
    """Whole tensors of a checkpoint by (kind, parameter), and Adam's steps."""
    ranks = json.loads((folder / "optimizer" / "index.json").read_text())["ranks"]
    parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for number, rank in enumerate(ranks):
        path = folder / "optimizer" / f"rank_{number}.safetensors"
        tensors = load_file(path) if rank["pieces"] else {}
        for name, start, count, tensor, offset in rank["pieces"]:
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                piece = tensors[f"{kind}.{tensor}"][offset : offset + count]
                assert start not in parts.setdefault((kind, name), {})
                parts[kind, name][start] = piece
    whole = {
        key: torch.cat([results[s] for s in sorted(results)]) for key, results in parts.items()
    }
    return whole, {step for rank in ranks for step in rank["steps"].values()}


SAVES: Mapping[int, Mapping[str, Scenario]] = {
    ranks: {str(layout): saving(layout) for layout in MOVES if layout.ranks == ranks}
    for ranks in (1, 2)
}
LOADS: Mapping[int, Mapping[str, Scenario]] = {
    ranks: {
        f"{layout} → {other}": moving(layout, other)
        for layout, others in MOVES.items()
        for other in others
        if other.ranks == ranks
    }
    for ranks in (1, 2)
}


PAIRS = [(layout, other) for layout, others in MOVES.items() for other in others]


ALL = {size: {**local, **SAVES.get(size, {})} for size, local in SCENARIOS.items()}
"""In the same processes."""


@pytest.fixture(scope="module")
def moved(folder: Path, results: dict[str, Any]) -> dict[str, Any]:
    return run_all(folder, __name__, "LOADS")


@pytest.mark.parametrize(("layout", "other"), PAIRS, ids=lambda pair: str(pair))
def test_another_layout_resumes(
    folder: Path, results: dict[str, Any], moved: dict[str, Any], layout: Layout, other: Layout
) -> None:
    before, after = results[str(layout)], moved[f"{layout} → {other}"]
    assert after["numbers"] == (SAVED_AFTER, SAVED_AFTER) and after["notes"] == []
    same(after["weights"], before["weights"], atol=0)
    state, steps = whole_state(folder_of(folder, layout))
    again, again_steps = whole_state(folder_of(folder, layout, other))
    assert again_steps == steps
    same(again, state, atol=0)
    (unmoved,), (resumed,) = before["metrics"], after["metrics"]
    if layout.dtype == "float32":
        # Sums over ranks and micro-batches are rounded in another order.
        limits = {"rel": 1e-4, "abs": 1e-6}
    else:
        # Activations have 8 bits, and differences of log-probabilities fewer.
        limits = {"rel": 0.2, "abs": 2e-3}
    assert values(resumed) == pytest.approx(values(unmoved), **limits, nan_ok=True)
