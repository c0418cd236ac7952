"""One rank of the trainer on a GPU: bfloat16 with flash attention, compiled or recomputed and
offloaded, against float32 without any of it; the loss, and the cold start."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from keel.configs.schema import ColdStartConfig, Dtype, SourceConfig, TinyModelConfig
from keel.model.layers import flash4
from keel.model.tiny.build import ensure_tiny_model
from keel.model.tiny.cold_start import Curriculum
from keel.rl.metrics import values
from keel.trainer.engine import offload
from tests.gpu.marks import GPU, skip_without_flash4
from tests.rl.batches import LossInputs
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.scenarios import TIGHT, Ranks, make_config, training

pytestmark = GPU


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """One, with one process group for all tests: DeepSpeed keeps it."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder / "untied")
    write_model(folder / "wide", head_dim=64)
    write_model(folder / "broad", "dense", hidden_size=1024)
    yield Ranks(0, 1, dist.HashStore(), folder)
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def only_engine() -> None:
    """Free memory that an earlier engine left, which small tensors would otherwise occupy."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("dtype", "residual"), [("bfloat16", "model"), ("float16", "model"), ("float16", "float32")]
)
def test_half_precision_follows_float32_under_every_stage(
    ranks: Ranks, dtype: Dtype, residual: str
) -> None:
    plain = values(training(0)(ranks)["metrics"][0])
    for stage in (0, 1, 2, 3):
        for recomputed in (False, True):
            result = training(
                stage,
                dtype=dtype,
                residual_dtype=residual,
                tokens=TIGHT,
                activation_checkpointing=recomputed,
                offload_optimizer=recomputed and stage > 0,
                compile=not recomputed and stage < 3,
            )(ranks)
            first = values(result["metrics"][0])
            assert first["loss"] == pytest.approx(plain["loss"], abs=0.01)
            assert first["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.03)
            assert first["mismatch/kl"] == pytest.approx(plain["mismatch/kl"], rel=0.03)
            assert first["train/skipped_steps"] == 0
            kind = getattr(torch, dtype)
            assert all(tensor.dtype == kind for tensor in result["after"].values())


@pytest.mark.parametrize("stage", [1, 3])
def test_bfloat16_masses_follow_float32(ranks: Ranks, stage: int) -> None:
    held = {"kept_mass_coef": 1.0, "tokens": TIGHT}
    exact, plain, half = (
        values(training(stage, **changes)(ranks)["metrics"][0])
        for changes in (held, {}, {**held, "dtype": "bfloat16", "compile": stage == 1})
    )
    assert exact["grad_norm"] > 1.1 * plain["grad_norm"], "the penalty must have been at work"
    assert half["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.03)
    for name in ("sampling/kept_mass", "sampling/mass_shortfall"):
        assert half[name] == pytest.approx(exact[name], rel=0.03)


@pytest.mark.parametrize("kernels", ["torch", "flash4"])
@pytest.mark.parametrize("compiled", [False, True])
def test_both_attention_kernels_compile(
    ranks: Ranks, compiled: bool, kernels: Literal["torch", "flash4"]
) -> None:
    if kernels == "flash4":
        skip_without_flash4()
    bfloat16 = {"model": "wide", "dtype": "bfloat16"}
    plain = values(training(1, attention_kernels="torch", **bfloat16)(ranks)["metrics"][0])
    assert not flash4._ACTIVE
    for recomputed in (False, True):
        how = {"activation_checkpointing": recomputed, "keep_attention": recomputed}
        run = training(1, attention_kernels=kernels, compile=compiled, **bfloat16, **how)
        result = run(ranks)
        assert bool(flash4._ACTIVE) == (kernels == "flash4")
        first = values(result["metrics"][0])
        assert first["loss"] == pytest.approx(plain["loss"], abs=0.01)
        assert first["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.03)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloading_changes_no_training(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setattr(
        offload, "_max_resident_bytes", lambda *_: 0.0
    )  # an engine wants all of the GPU
    found = {}
    for sleep in (False, True):
        config = make_config(1, stage, dtype="bfloat16", tokens=TIGHT, kl_coef=0.1, sleep=sleep)
        engine = ranks.engine(config)
        groups = Rollouts(0).groups(2, 3, kl_coef=0.1)
        steps = []
        for step in range(3):
            steps.append(values(engine.step([ranks.batch(groups, config)])))
            before = torch.cuda.memory_allocated()
            count = sum(tensor.numel() for tensor in ranks.published(engine).values())
            freed = before - torch.cuda.memory_allocated()
            # Master weights, two moments and weights; small tensors stay.
            assert (freed >= 13 * count) == sleep, f"{freed:,} bytes of {count:,} numbers"
            if step == 1:
                saved = tmp_path / f"saved-{sleep}"
                saved.mkdir()
                engine.save(saved)
        later = ranks.engine(config)
        later.load(saved)
        again = values(later.step([ranks.batch(groups, config)]))
        assert again["loss"] == pytest.approx(steps[2]["loss"], rel=1e-3, abs=1e-6)
        found[sleep] = steps
        del engine, later
    for asleep, awake in zip(found[True], found[False], strict=True):
        assert asleep == pytest.approx(awake, rel=1e-3, abs=1e-6, nan_ok=True)


def test_overflowing_loss_scales_are_halved(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(1, 1, dtype="float16")
    groups = Rollouts(0).groups(2, 3)
    monkeypatch.setattr("keel.trainer.engine.zero.SCALE_POWER", 26)
    engine = ranks.engine(config)
    before = ranks.published(engine)
    skipped = 0
    for _ in range(16):
        found = values(engine.step([ranks.batch(groups, config)]))
        if not found["train/skipped_steps"]:
            break
        skipped += 1
        assert all(torch.equal(before[k], v) for k, v in ranks.published(engine).items())
    assert 0 < skipped < 16 and engine.version == skipped + 1
    assert any(not torch.equal(before[k], v) for k, v in ranks.published(engine).items())


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any host-device synchronisation inside is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(batch: LossInputs) -> LossInputs:
    return LossInputs(**{field.name: getattr(batch, field.name).cuda() for field in fields(batch)})


@pytest.mark.parametrize("kl_coef", [None, 0.0, 0.1])
def test_gpu_agrees_without_synchronizing(kl_coef: float | None) -> None:
    batch = LossInputs.random(0, [3, 1, 400, 20], drift=1.0)
    coef = {} if kl_coef is None else {"kl_coef": kl_coef}
    expected, expected_gradient = batch.loss(mask_delta=0.2, **coef)
    moved = on_gpu(batch)
    with no_waiting():
        output, gradient = moved.loss(mask_delta=0.2, **coef)
    torch.testing.assert_close(gradient.cpu(), expected_gradient)
    for name, metric in expected.metrics.items():
        assert output.metrics[name].value == pytest.approx(metric.value, nan_ok=True)


SPELLING = SourceConfig(name="spelling", source="reasoning_gym", task="spell_backward", size=8)


def test_the_gpu_teaches_and_is_free_afterwards(tmp_path: Path) -> None:
    config = TinyModelConfig(cold_start=ColdStartConfig(steps=60, batch_size=32, lr=5e-3))
    losses: list[float] = []
    torch.cuda.init()
    held, before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    folders = [
        ensure_tiny_model(
            replace(config, cache_dir=str(tmp_path / name)),
            Curriculum(seed=0, sources=[SPELLING]),
            device="cuda",
            progress=lambda _step, loss, _seconds: losses.append(loss),
        )
        for name in ("first", "second")
    ]
    assert len(losses) == 120
    assert losses[59] < 0.6 * losses[0]
    assert torch.cuda.memory_allocated() <= held
    assert torch.cuda.memory_reserved() - before < 2**28
    first, second = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == second
