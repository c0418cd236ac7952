"""A GPU too small for all that a rank holds at once (`keel.trainer.engine.offload`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.rl.types import ScoredGroup
from tests.trainer.engine.batches import Rollouts
from tests.trainer.engine.ranks import TIGHT, Ranks, make_config

SMALL = 2**14
"""Bytes of a host block, so that offloaded tensors span several."""


@cache
def groups_of(step: int, model: Path) -> Sequence[ScoredGroup]:
    """Rollouts with live routes, cached as they take a while."""
    return Rollouts(step, live=model).groups(2, 3, kl_coef=0.1)


def crowding(stage: int) -> Callable[[Ranks], dict[str, Any]]:
    """Two updates a batch with a reference policy, in bfloat16.

    Without time sharing ("awake"); with little room while engines sample ("partly"); a byte short
    for activations ("lacking"); and with room for one kind of tensor at a time ("crowded").
    Records offloaded bytes by kind: before and after loading the optimizer, and while sampling.
    """

    def run(ranks: Ranks) -> dict[str, Any]:
        from keel.trainer.engine import engine as module  # noqa: PLC0415  (loads DeepSpeed)
        from keel.trainer.engine import offload  # noqa: PLC0415

        def away(engine: Any) -> dict[str, int]:
            names = {"state": "state", "reference": "frozen", "weights": "weights", "rest": "rest"}
            buffers = {key: getattr(engine._offload, f"_{name}") for key, name in names.items()}
            return {key: buffer.offloaded_bytes for key, buffer in buffers.items()}

        def one_byte_less(one: Any) -> float:
            back = (one._gradients, one._buckets, one._rest, one._frozen)
            return offload.SPARE + sum(buffer.offloaded_bytes for buffer in back) - 1.0

        result: dict[str, Any] = {}
        for key in ("awake", "partly", "lacking", "crowded"):
            seen: dict[str, list[dict[str, int]]] = {"gradients": [], "update": [], "sampling": []}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "compute_dtype", lambda *_: torch.bfloat16)
                patch.setattr(offload, "BLOCK", SMALL)
                config = make_config(
                    ranks.world_size,
                    stage,
                    dtype="bfloat16",
                    tokens=TIGHT,
                    kl_coef=0.1,
                    sleep=key != "awake",
                )
                engine: Any = ranks.engine(config)
                one = engine._offload
                if key == "partly":
                    masters = offload._on_device(one._optimizer_state(), engine.device)
                    one._room = 2.0 * sum(storage.nbytes() for storage in masters)
                if key == "lacking":
                    one._room, one._activations = 1e12, 0.0
                    patch.setattr(type(one), "_free", one_byte_less)
                if key == "crowded":
                    one._room = 0.0
                    patch.setattr(type(one), "_free", lambda _: 0.0)
                if key != "awake":
                    load = one.before_update

                    def before_update(
                        load: Any = load, engine: Any = engine, seen: Any = seen
                    ) -> None:
                        seen["gradients"].append(away(engine))
                        load()
                        seen["update"].append(away(engine))

                    one.before_update = before_update
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
