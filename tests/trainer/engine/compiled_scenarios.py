"""Scenarios with compiled layers, for `test_engine_compiled.py`; a process shares its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.trainer.engine import expert_scenarios as experts
from tests.trainer.engine import window_scenarios as windows
from tests.trainer.engine.scenarios import TIGHT, Scenario, run_rank, training

FAMILY = "qwen3_moe"
SCENARIOS: Mapping[int, Mapping[str, Scenario]] = {
    1: {
        "compiled": training(0, tokens=TIGHT, compile=True, agents=True),
        "plain": training(0),
        "prompted": windows.prompted(0, kl_coef=0.1),
        "prompted, compiled": windows.prompted(0, kl_coef=0.1, compile=True),
        FAMILY: experts.training(0),
    },
    2: {
        "stage 2 sequence recomputed offloaded compiled asleep": training(
            2,
            sequence_parallel=2,
            tokens=TIGHT,
            activation_checkpointing=True,
            offload_optimizer=True,
            compile=True,
            sleep=True,
        ),
        f"{FAMILY}, compiled, stage 1": experts.training(1, compile=True),
    },
}


def run_compiled_rank(rank: int, world_size: int, port: int, folder: Path) -> None:
    run_rank(rank, world_size, port, folder, SCENARIOS)
