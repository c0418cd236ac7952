"""Scenarios on one and two ranks for `test_engine.py`, in separate processes."""

import gc
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._dynamo.utils import counters

from keel.configs.schema import ConfigError
from keel.model.load import checkpoint_tensors, load_policy
from keel.model.routing import router_modules
from keel.rl.metrics import values
from keel.rl.packing import TrainBatch
from keel.rl.types import ScoredGroup
from tests.forked import forked_from
from tests.ports import free_ports
from tests.trainer.engine.batches import Rollouts
from tests.trainer.engine.ranks import SAVED_AFTER, STEPS, TIGHT, Ranks, make_config
from tests.waiting import PATIENCE_S

Result = dict[str, Any]
Scenario = Callable[["Ranks"], Result]


def training(stage: int, **changes: Any) -> Scenario:
    """Train, publish before and after, export."""
    model = changes.pop("model", "untied")

    def run(ranks: Ranks) -> Result:
        config = make_config(ranks.world_size, stage, **changes)
        engine = ranks.engine(config, model)
        before = ranks.published(engine)
        counters.clear()
        metrics = ranks.train(engine, config, range(STEPS))
        exported = ranks.folder / f"exported-{ranks.world_size}-{next(ranks.serial)}"
        engine.export(exported)
        return {
            "before": before,
            "after": ranks.published(engine),
            "metrics": metrics,
            "exported": exported,
            "version": engine.version,
            "graphs": counters["stats"]["unique_graphs"],
        }

    return run


def resumed(stage: int, **changes: Any) -> Scenario:
    """Train without interruption, from a checkpoint, which another model refuses to load, and then
    again from a checkpoint made before the first step."""

    def run(ranks: Ranks) -> Result:
        config = make_config(ranks.world_size, stage, tokens=TIGHT, **changes)
        saved = ranks.folder / f"saved-{ranks.world_size}-{next(ranks.serial)}"
        untrained = saved.with_name(f"{saved.name}-untrained")
        if ranks.rank == 0:
            saved.mkdir()
            untrained.mkdir()
        straight = ranks.engine(config)
        straight.save(untrained)
        ranks.train(straight, config, range(SAVED_AFTER))
        straight.save(saved)
        ranks.train(straight, config, range(SAVED_AFTER, STEPS))
        later = ranks.engine(config)
        torch.manual_seed(random.randrange(1000))
        later.load(saved)
        numbers = (later.steps, later.version)
        ranks.train(later, config, range(SAVED_AFTER, STEPS))
        resumed = ranks.published(later)
        later.load(untrained)
        ranks.train(later, config, range(STEPS))
        with pytest.raises(ValueError, match=f"{saved}: lm_head") as refused:
            ranks.engine(config, "tied").load(saved)
        return {
            "straight": ranks.published(straight),
            "resumed": resumed,
            "repeated": ranks.published(later),
            "loaded": numbers,
            "refused": str(refused.value),
        }

    return run


def referenced(stage: int, **changes: Any) -> Scenario:
    """The KL term at the start, with live routes, and after steps."""

    def run(ranks: Ranks) -> Result:
        config = make_config(ranks.world_size, stage, kl_coef=0.1, **changes)
        engine = ranks.engine(config)
        groups = Rollouts(0, live=ranks.folder / "untied").groups(2, 3, kl_coef=0.1)
        batch, metrics = ranks.batch(groups, config), []
        for _ in range(3):
            metrics.append(ranks.merged(engine.step([batch])))
            ranks.published(engine)
        return {"metrics": metrics}

    return run


def reading(stage: int, *, model: str = "untied", **changes: Any) -> Scenario:
    """Count how often each rank reads the model, and compare policy and reference with its files.

    Unset weights are NaN. A second engine fails to read on the last reading rank.
    """

    def run(ranks: Ranks) -> Result:
        from keel.trainer.engine import engine as module  # noqa: PLC0415  (loads DeepSpeed)
        from keel.trainer.engine import weights as sent  # noqa: PLC0415
        from keel.trainer.engine.expert_parallel import ExpertLayers  # noqa: PLC0415

        config = make_config(ranks.world_size, stage, kl_coef=0.1, **changes)
        whole = load_policy(str(ranks.folder / model), torch.float32)
        routers = len(router_modules(whole)) if config.trainer.expert_parallel > 1 else 0
        expected = dict(checkpoint_tensors(whole))
        read, blind = list[str](), list[int]()

        def load(path: str, dtype: torch.dtype, **options: bool) -> Any:
            read.append(path)
            if ranks.rank in blind:
                raise OSError("stale file handle") if stage else ConfigError("there is nothing")
            return load_policy(path, dtype, **options)

        def unset(shape: tuple[int, ...], *, dtype: torch.dtype) -> Any:
            return torch.full(shape, torch.nan, dtype=dtype)

        def equal(network: Any) -> bool:
            spread = ExpertLayers(network.model, expected=routers)
            here = sent.Weights(network.model, spread, stage=stage).named(torch.float32)
            matches = {name: torch.equal(tensor, expected[name]) for name, tensor in here}
            return matches.keys() == expected.keys() and all(matches.values())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "load_policy", load)
            patch.setattr(sent, "torch", SimpleNamespace(empty=unset, device=torch.device))
            engine = ranks.engine(config, model)
            assert engine._references._models[0] is not None
            times = ranks.all(len(read))
            same = ranks.all((equal(engine._network), equal(engine._references._models[0].network)))
            blind += range(config.trainer.reading_ranks)[-1:]  # the last that reads
            with pytest.raises((ConfigError, OSError, RuntimeError)) as error:
                ranks.engine(config, model)
        return {"times": times, "same": same, "refused": ranks.all(repr(error.value))}

    return run


def in_bfloat16(stage: int) -> Scenario:
    """Train in bfloat16 as on a GPU: "awake", with everything ("offloaded") or gradients only
    ("stays") offloaded after each step, and in stage 1 with DeepSpeed's gradient sums ("theirs").
    """

    def run(ranks: Ranks) -> Result:
        from keel.trainer.engine import engine as module  # noqa: PLC0415  (loads DeepSpeed)
        from keel.trainer.engine import zero  # noqa: PLC0415

        on_cpu, zero.compute_dtype = zero.compute_dtype, lambda *_: torch.bfloat16
        engine_result = module.sum_in_one_pass
        result: Result = {}
        for key in ("awake", "offloaded", "stays", *["theirs"] * (stage == 1)):
            sleep, offload = key in ("offloaded", "stays"), key != "stays"
            module.sum_in_one_pass = (lambda _: "") if key == "theirs" else engine_result
            how: Any = {"dtype": "bfloat16", "sleep": sleep, "offload_while_sampling": offload}
            config = make_config(ranks.world_size, stage, tokens=TIGHT, **how)
            engine = ranks.engine(config)
            metrics = ranks.train(engine, config, range(STEPS))
            result[key] = {
                "after": ranks.published(engine),
                "metrics": metrics,
                "optimizer": type(engine._engine.optimizer).__name__,
                "notes": engine.notes,
            }
        zero.compute_dtype, module.sum_in_one_pass = on_cpu, engine_result
        return result

    return run


def apart(stage: int, *, bfloat16: bool = False, **trainer: Any) -> Scenario:
    """One step with another weight of the indexers' loss, and with their own schedule."""

    def run(ranks: Ranks) -> Result:
        from keel.trainer.engine import zero  # noqa: PLC0415  (loads DeepSpeed)

        result: Result = {}
        for key, changes in {
            "plain": {},
            "heavier": {"indexer_loss": 64.0},
            # A quarter of the rate, as 9/10 are left at step 1 of 10.
            "slower": {"indexer_lr": 2.5e-3 / 0.9, "indexer_schedule": "linear"},
        }.items():
            with pytest.MonkeyPatch.context() as patch:
                if bfloat16:
                    patch.setattr(zero, "compute_dtype", lambda *_: torch.bfloat16)
                how: Any = {"tokens": TIGHT, "warmup_steps": 0, "weight_decay": 0.0, **trainer}
                config = make_config(ranks.world_size, stage, **how, **changes)
                engine = ranks.engine(config, "sparse")
                before = ranks.published(engine)
                (metrics,) = ranks.train(engine, config, range(1))
            after = ranks.published(engine)
            moved = {name: after[name] - before[name] for name in after}
            result[key] = {"moved": moved, "metrics": values(metrics)}
        return result

    return run


SMALL = 2**14
"""Bytes of a host block, so that offloaded tensors span several."""


@cache
def groups_of(step: int, model: Path) -> Sequence[ScoredGroup]:
    """Rollouts with live routes, cached as they take a while."""
    return Rollouts(step, live=model).groups(2, 3, kl_coef=0.1)


def watch_updates(offload: Any, note: Callable[[str], None]) -> None:
    """Call `note` before and after the optimizer is loaded for an update."""
    load = offload.before_update

    def before_update() -> None:
        note("gradients")
        load()
        note("update")

    offload.before_update = before_update


def crowding(stage: int) -> Scenario:
    """Two updates a batch with a reference policy, in bfloat16.

    Without time sharing ("awake"); with little room while engines sample ("partly"); a byte short
    for activations ("lacking"); and with room for one kind of tensor at a time ("crowded").
    Records offloaded bytes by kind: before and after loading the optimizer, and while sampling.
    """

    def run(ranks: Ranks) -> Result:
        from keel.trainer.engine import offload, zero  # noqa: PLC0415  (loads DeepSpeed)

        def away(engine: Any) -> dict[str, int]:
            names = {"state": "state", "reference": "frozen", "weights": "weights", "rest": "rest"}
            one = engine._offload
            return {key: getattr(one, f"_{name}").offloaded_bytes for key, name in names.items()}

        def one_byte_less(one: Any) -> float:
            back = (one._gradients, one._buckets, one._rest, one._frozen)
            return offload.SPARE + sum(buffer.offloaded_bytes for buffer in back) - 1.0

        result: dict[str, Any] = {}
        for key in ("awake", "partly", "lacking", "crowded"):
            seen: dict[str, list[dict[str, int]]] = {"gradients": [], "update": [], "sampling": []}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(zero, "compute_dtype", lambda *_: torch.bfloat16)
                patch.setattr(offload, "BLOCK", SMALL)
                how: Any = {"dtype": "bfloat16", "kl_coef": 0.1, "sleep": key != "awake"}
                config = make_config(ranks.world_size, stage, tokens=TIGHT, **how)
                engine: Any = ranks.engine(config)
                one = engine._offload
                if key == "partly":
                    masters = offload._on_device(one._tensors.optimizer_state(), engine.device)
                    one._room = 2.0 * sum(storage.nbytes() for storage in masters)
                if key == "lacking":
                    one._room, one._activations = 1e12, 0.0
                    patch.setattr(type(one), "_free", one_byte_less)
                if key == "crowded":
                    one._room = 0.0
                    patch.setattr(type(one), "_free", lambda _: 0.0)
                if key != "awake":
                    watch_updates(one, lambda kind, seen=seen, e=engine: seen[kind].append(away(e)))
                metrics = []
                for step in range(2):
                    groups = groups_of(step, ranks.folder / "untied")
                    batches = [ranks.batch(groups[n : n + 1], config) for n in range(2)]
                    metrics.append(ranks.merged(engine.step(batches)))
                    after = ranks.published(engine)
                    if key != "awake":
                        seen["sampling"].append(away(engine))
                result[key] = {"after": after, "metrics": metrics, **seen}
        assert math.isfinite(result["awake"]["metrics"][-1]["grad_norm"].value)
        return result

    return run


def with_nan(batch: TrainBatch) -> TrainBatch:
    """Make one old log-probability of the first micro-batch NaN."""
    first, *others = batch.micro_batches
    logp = first.logp_old_N.copy()
    logp[np.flatnonzero(first.trainable_N)[-1]] = np.nan
    return replace(batch, micro_batches=(replace(first, logp_old_N=logp), *others))


def skipping(stage: int, *, bfloat16: bool = False, **trainer: Any) -> Any:
    """Skipped steps change neither weights nor later steps; too many in a row end training."""

    def run(ranks: Ranks) -> Result:
        from keel.trainer.engine import engine as module  # noqa: PLC0415  (loads DeepSpeed)
        from keel.trainer.engine import zero  # noqa: PLC0415

        on_cpu, loss = zero.compute_dtype, module.grpo_loss
        if bfloat16:
            zero.compute_dtype = lambda *_: torch.bfloat16
        config = make_config(ranks.world_size, stage, tokens=32, warmup_steps=0, **trainer)
        groups = Rollouts(0).groups(2, 3)
        good = ranks.batch(groups, config)
        assert len(good.micro_batches) == 2, "one that is bad on a rank, and one that is not"
        bad = with_nan(good) if ranks.rank == 1 else good

        def infinite(*values: Any, **options: Any) -> Any:
            """Infinite on rank 0, with a finite gradient."""
            share = loss(*values, **options)
            return replace(share, loss=share.loss + torch.inf) if ranks.rank == 0 else share

        straight, skipped = ranks.engine(config), ranks.engine(config)
        for _ in range(2):
            ranks.merged(straight.step([good]))
        before, metrics = ranks.published(skipped), []

        def step(batches: Sequence[TrainBatch]) -> None:
            metrics.append(ranks.merged(skipped.step(batches)))

        step([bad])
        module.grpo_loss = infinite
        step([good])
        module.grpo_loss = loss
        selected = ranks.published(skipped)
        for _ in range(2):
            step([good])
        after, last = ranks.published(skipped), skipped.gave_up
        for _ in range(2):
            step([bad])
        step([bad, good])  # the second one is skipped, too
        result = {
            "before": before,
            "kept": selected,
            "straight": ranks.published(straight),
            "after": after,
            "end": ranks.published(skipped),
            "metrics": metrics,
            "gave up": (last, skipped.gave_up),
            "version": skipped.version,
        }
        zero.compute_dtype = on_cpu
        return result

    return run


def without_signal(stage: int) -> Any:
    """A step of uniform groups after a normal one, and a resume."""

    def run(ranks: Ranks) -> dict[str, Any]:
        config = make_config(ranks.world_size, stage, tokens=32, warmup_steps=0)
        groups = Rollouts(0).groups(2, 3)
        good = ranks.batch(groups, config)
        uniform = [replace(each, advantages_G=each.advantages_G * 0) for each in groups]
        silent = ranks.batch(uniform, config)
        folder = ranks.folder / "silent"
        folder.mkdir(exist_ok=True)
        torch.distributed.barrier()

        straight, skipped = ranks.engine(config), ranks.engine(config)
        for engine in (straight, skipped):
            engine.step([good])
        before = ranks.published(skipped)
        metrics = ranks.merged(skipped.step([silent]))
        after = ranks.published(skipped)
        skipped.save(folder)
        torch.distributed.barrier()
        resumed = ranks.engine(config)
        resumed.load(folder)
        for engine in (straight, skipped, resumed):
            metrics_of_last = ranks.merged(engine.step([good]))
        return {
            "before": before,
            "after": after,
            "metrics": [metrics, metrics_of_last],
            "straight": ranks.published(straight),
            "skipped": ranks.published(skipped),
            "resumed": ranks.published(resumed),
            "counts": (resumed.steps, resumed.version),
        }

    return run


SCENARIOS: Mapping[int, Mapping[str, Scenario]] = {
    1: {
        "plain": training(0),
        "accumulated": training(0, tokens=TIGHT),
        "recomputed": training(0, activation_checkpointing=True),
        "recomputed but attention": training(0, activation_checkpointing=True, keep_attention=True),
        "plain tied": training(0, model="tied"),
        "plain dense": training(0, model="dense"),
        "plain sparse": training(0, model="sparse"),
        "recomputed sparse": training(0, model="sparse", activation_checkpointing=True),
        "indexers alone": training(0, model="sparse", attention="warm-up"),
        "indexers alone, recomputed": training(
            0, model="sparse", attention="warm-up", activation_checkpointing=True
        ),
        "indexers frozen": training(0, model="sparse", attention="dense"),
        "masses held": training(0, kept_mass_coef=1.0),
        "masses held, accumulated": training(0, kept_mass_coef=1.0, tokens=TIGHT),
    },
    2: {
        **{f"stage {stage}": training(stage, tokens=TIGHT) for stage in (0, 1, 2)},
        "stage 2 sparse": training(2, tokens=TIGHT, model="sparse"),
        "masses held, stage 3 sequence": training(
            3, kept_mass_coef=1.0, sequence_parallel=2, tokens=TIGHT
        ),
        "stage 3 sparse recomputed": training(3, model="sparse", activation_checkpointing=True),
        "stage 3 tied": training(3, tokens=TIGHT, model="tied"),
        "stage 0 sequence dense": training(0, sequence_parallel=2, tokens=TIGHT, model="dense"),
        "stage 3 offloaded": training(3, tokens=TIGHT, offload_optimizer=True),
        "stage 3 sequence recomputed": training(
            3, sequence_parallel=2, tokens=TIGHT, activation_checkpointing=True
        ),
        **{f"read once {stage}": reading(stage) for stage in (0, 3)},
        **{f"bfloat16 {stage}": in_bfloat16(stage) for stage in (1, 3)},
        **{f"crowded {stage}": crowding(stage) for stage in (1, 3)},
        "resumed 1": resumed(1),
        "resumed 3 asleep": resumed(3, sleep=True),
        "reference 0": referenced(0),
        "reference 3 asleep": referenced(3, sleep=True),
        "skipping 0": skipping(0),
        "without signal": without_signal(3),
        **{f"skipping {stage} bfloat16": skipping(stage, bfloat16=True) for stage in (1, 3)},
        "skipping 2 offloaded": skipping(2, bfloat16=True, offload_optimizer=True),
        **{f"apart {stage}": apart(stage) for stage in (0, 2)},
        "apart 1 bfloat16": apart(1, bfloat16=True),
        "apart 3 offloaded": apart(3, offload_optimizer=True),
    },
}


def run_rank(
    rank: int, world_size: int, port: int, folder: Path, module: str, attribute: str
) -> None:
    """Run the module's scenarios for this number of ranks; rank 0 writes the results."""
    os.environ["LOCAL_RANK"] = "0"
    torch.set_num_threads(1)
    patience = timedelta(seconds=2 * PATIENCE_S)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout=patience)
    ranks = Ranks(rank, world_size, store, folder)
    results: Result = {}
    for name, scenario in getattr(import_module(module), attribute)[world_size].items():
        # DeepSpeed collects garbage often; exclude all objects that exist already.
        gc.collect()
        gc.freeze()
        results[name] = scenario(ranks)
    if rank == 0:
        torch.save(results, folder / f"results-{world_size}.pt")


def run_all(folder: Path, module: str, attribute: str = "SCENARIOS") -> Result:
    """Run a module's scenarios on each number of ranks, all at the same time. Returns the results
    by scenario."""
    sizes: list[int] = [*getattr(import_module(module), attribute)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        forked_from("tests.trainer.engine.preloaded")
        running = [
            mp.start_processes(
                run_rank,
                (size, port, folder, module, attribute),
                nprocs=size,
                join=False,
                start_method="forkserver",
            )
            for size, port in zip(sizes, free_ports(len(sizes)), strict=True)
        ]
        for context in running:
            assert context is not None
            while not context.join(timeout=120):
                pass
    results: Result = {}
    for size in sizes:
        results |= torch.load(folder / f"results-{size}.pt", weights_only=False)
    return results


def same(actual: dict[str, Any], expected: dict[str, Any], *, atol: float) -> None:
    """Compare tensors by name and value."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def same_training(
    actual: Result, expected: Result, *, atol: float = 1e-5, rel: float = 1e-4, abs: float = 1e-6
) -> None:
    """Compare the weights after training and the metrics of each step."""
    same(actual["after"], expected["after"], atol=atol)
    assert actual.get("version") == expected.get("version")
    for one, other in zip(actual["metrics"], expected["metrics"], strict=True):
        assert values(one) == pytest.approx(values(other), rel=rel, abs=abs, nan_ok=True)
