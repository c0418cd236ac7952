"""What `test_changed_deepspeed.py` runs, in a process of its own: training with a DeepSpeed in
which something has another name, or is done in another way."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.engine.scenarios import (
    STEPS,
    TIGHT,
    Ranks,
    Result,
    Scenario,
    make_config,
    run_rank,
)

Change = tuple[str, str, str]
"""Modules of DeepSpeed, what stands in its source, and what stands there instead."""
BF16 = "deepspeed.runtime.bf16_optimizer"
CHANGES: Mapping[str, tuple[int, Change | None]] = {
    "1 as it is": (1, None),
    "1 another name": (1, (BF16, "_update_hp_grad", "_add_hp_grad")),
    "1 another parameter": (
        1,
        (BF16, "param_idx, clear_lp_grads):", "param_idx, clear_lp_grads, scale=1.0):"),
    ),
    "1 another way": (
        1,
        (
            BF16,
            "self._update_hp_grad(lp_param, group_idx, param_idx,",
            "BF16_Optimizer._update_hp_grad(self, lp_param, group_idx, param_idx,",
        ),
    ),
    "1 another meaning": (1, (BF16, "lp._hp_grad = hp_grad", "lp._hp_grad = hp_grad.view(-1)")),
    "1 another attribute": (1, (BF16, "autoep_folding_tp_group", "folding_group")),
    "1 asleep, another name": (1, (BF16, "fp32_groups_gradients_flat", "gradients_flat")),
    "3 as it is": (3, None),
    "3 asleep, another name": (
        3,
        (
            "deepspeed.runtime.base_optimizer deepspeed.runtime.zero.stage3",
            "ipg_buckets",
            "buckets_by_dtype",
        ),
    ),
}
PLACE: Change = ("deepspeed.runtime.zero.stage3", "grad_position", "gradients_at")
"""The optimizer's state is kept under another name, so it could not be saved."""


@contextmanager
def doctored(change: Change | None) -> Iterator[None]:
    """Within it, DeepSpeed's modules have other source, and all others their new classes."""
    names, old, new = change or ("", "", "")
    theirs = [module for name, module in sys.modules.items() if name.startswith("deepspeed")]
    before = [(module, dict(vars(module))) for module in theirs]
    for module in map(sys.modules.__getitem__, names.split()):
        source, was = inspect.getsource(module), dict(vars(module))
        assert old in source, change
        exec(compile(source.replace(old, new), str(module.__file__), "exec"), vars(module))
        for each in theirs:
            for key, value in list(vars(each).items()):
                if inspect.isclass(value) and value is was.get(key):
                    setattr(each, key, vars(module)[key])
    try:
        yield
    finally:
        for module, content in before:
            vars(module).update(content)


def trained(stage: int, change: Change | None, *, sleep: bool) -> Scenario:
    def run(ranks: Ranks) -> Result:
        from keel.trainer.engine import engine as module  # noqa: PLC0415  (loads DeepSpeed)
        from keel.trainer.engine.offload import Offload  # noqa: PLC0415  (loads DeepSpeed)

        on_cpu, module.compute_dtype = module.compute_dtype, lambda *_: torch.bfloat16
        awake, config = (
            make_config(ranks.world_size, stage, dtype="bfloat16", tokens=TIGHT, sleep=there)
            for there in (False, sleep)
        )
        with doctored(change):
            engine = ranks.engine(config)
            metrics = []
            for step in range(STEPS):
                metrics += ranks.train(engine, awake, range(step, step + 1))
                ranks.published(engine)
            module.compute_dtype = on_cpu
            after = ranks.published(engine)
            saved = ranks.folder / f"saved-{next(ranks.serial)}"
            saved.mkdir()
            engine.save(saved)
            ranks.train(engine, awake, range(1))
            moved = ranks.published(engine)
            engine.load(saved)
            assert all(torch.equal(after[n], t) for n, t in ranks.published(engine).items())
            ranks.train(engine, awake, range(1))
            return {
                "after": after,
                "moved": moved,
                "resumed": ranks.published(engine),
                "metrics": metrics,
                "notes": engine.notes,
                "optimizer": type(engine._engine.optimizer).__name__,
                "offloads": isinstance(engine._offload, Offload),
            }

    return run


def refused(ranks: Ranks) -> Result:
    with doctored(PLACE), pytest.raises(RuntimeError) as error:
        ranks.engine(make_config(ranks.world_size, 3))
    return {"error": str(error.value)}


SCENARIOS: Mapping[int, Mapping[str, Any]] = {
    1: {
        name: trained(stage, change, sleep="asleep" in name)
        for name, (stage, change) in CHANGES.items()
    }
    | {"place": refused}
}


def run_changes(rank: int, world_size: int, port: int, folder: Path) -> None:
    run_rank(rank, world_size, port, folder, SCENARIOS)
